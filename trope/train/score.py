"""`score_test`: test a run's model and write what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate import saved_ranks
from trope.evaluate.counting import read_counting, score_counting
from trope.evaluate.streamed import evaluate
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, METRICS, seal, write_json
from trope.train.checkpoint import TrainState, written_into


def score_test(
    data: Sequences | Stream, config: Config, run: Path, device: torch.device, chosen: TrainState, seconds: float
) -> dict[str, Any]:
    """Test the run's model, once, on `device`; writes metrics.json and returns what it holds.

    One process does this: it takes the whole model. chosen: where the training that validation followed ended.
    seconds: of all training.
    """
    data = data.to(device)
    model = SequentialRecommender.from_pretrained(run / BEST).to(device)
    result = evaluate(model, data, "test", config.eval.filter_seen, config.model.max_len)
    summary = {
        "valid": chosen.best_metrics,
        "test": result.metrics,
        "best_epoch": chosen.best_epoch,
        "epochs": chosen.epoch,
        "steps": chosen.step,
        "refit": config.train.refit,
        "seconds": round(seconds, 3),
        "filter_seen": config.eval.filter_seen,
        "data": data.describe(),
    }
    summary |= score_counting(model, data, config, read_counting(run, chosen.best_epoch), result)
    with written_into(run):
        saved_ranks.save(run, result, saved_ranks.About.of(data, "test", config))
        write_json(run / METRICS, seal(summary))
    return summary
