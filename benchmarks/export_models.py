"""Models to export in the benchmarks: the six presets with weights far from where training begins, and a catalogue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trope.data.catalogue import FORMAT, Catalogue
from trope.data.folder import sha256_of
from trope.models.recommender import SequentialRecommender
from trope.runs import CATALOGUE, CATALOGUE_RECORD, seal, write_json
from trope.serve.recommender import Recommender
from trope.settings import preset

SIX = ("hstu", "hstu-time", "hstu-trope", "sasrec", "tisasrec", "trope")
SPAN = (1_480_000_000, 1_512_000_000)


def recommender_of(
    name: str, folder: Path, items: int, width: int, length: int, heads: int = 4, blocks: int = 2,
    predicts: str = "next-event",
) -> Recommender:  # fmt: skip
    """A preset of one size. Its catalogue is written to `folder`.

    Biases, frequencies and the pulse are drawn anew: as training begins, most of them do next to nothing.
    """
    torch.manual_seed(0)
    sizes = {
        "width": width, "heads": heads, "head_dim": width // heads, "blocks": blocks, "max_len": length,
        "predicts": predicts,
    }  # fmt: skip
    model = SequentialRecommender(preset(name, [f"model.{key}={value}" for key, value in sizes.items()]), items, SPAN)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "bias.position" in path or "bias.time" in path:
                parameter.normal_(0, 0.3)
            elif "delta" in path:
                parameter.normal_()
        if model.pulse is not None:
            _fit(model.pulse)
    _write_catalogue(folder / CATALOGUE, items)
    return Recommender(model, Catalogue.load(folder / CATALOGUE), "cpu")


def _fit(pulse: torch.nn.Module) -> None:
    """Weights of the size that fits have, and made-up counts."""
    for name, scale in (("everybody", 0.3), ("own", 0.5)):
        pulse.get_buffer(name).normal_(0, scale)
    pulse.get_buffer("network").add_(4)
    pulse.get_buffer("age_unit").fill_(30 * 86_400)
    for name in ("counts", "seasons"):
        pulse.get_buffer(name).exponential_()[..., 0] = 0
    pulse.get_buffer("counted_until").fill_(SPAN[1])


def _write_catalogue(folder: Path, items: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "item_ids.npy"
    np.save(path, np.arange(1, items + 1))
    entry = {"bytes": path.stat().st_size, "sha256": sha256_of(path), "shape": [items]}
    write_json(folder / CATALOGUE_RECORD, seal({"format": FORMAT, "arrays": {"item_ids": entry}}))
