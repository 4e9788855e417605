"""Who is ahead when nobody's earlier items are in the list?

    python benchmarks/seen_items.py DATA... [--run RUN] [--out results/seen-items.json]

Where people hardly ever choose an item again, a list that keeps what the user had wastes places. The pulse learns to
leave such items out, and no other row of a table does. So counting is ranked with `filter_seen` none, as in the tables,
and history, which leaves out every earlier item for everybody. RUN is a run of `trope` on the first DATA: the network
alone, with counting, and with the pulse, both chosen on validation for each filter. Half-lives are chosen for each
filter too. At most MOST_USERS test users, drawn at random, are ranked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.windows import flatten_ranges
from trope.environment import describe
from trope.evaluate.baselines import baselines, batch_size
from trope.evaluate.compare import compare_values
from trope.evaluate.counting import choose_counting
from trope.evaluate.evaluation import EvalResult, evaluate, rank_users
from trope.evaluate.live import Counting
from trope.evaluate.metrics import per_user
from trope.evaluate.some_users import some_users
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, CONFIG
from trope.settings import preset, read_saved_toml, with_settings
from trope.train.pulse import fit_pulse

FILTERS = ("none", "history")
METRIC = "Recall@10"  # HR@10 where every user has one positive
MOST_USERS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="prepared datasets")
    parser.add_argument("--run", type=Path, help="a run of `trope` on the first of them")
    parser.add_argument("--out", type=Path, default=Path("results/seen-items.json"))
    asked = parser.parse_args()
    found: dict[str, Any] = {"environment": describe(), "most_users": MOST_USERS, "data": {}}
    for folder in asked.data:
        data = Sequences.load(folder)
        config = preset("trope", [])
        counted = {each: counting(data, filtered(config, each)) for each in FILTERS}
        found["data"][folder.name] = {"had_before": had_before(data), "counting": counted}
        print(folder.name, json.dumps(found["data"][folder.name]), flush=True)
    if asked.run is not None:
        found["run"] = {"data": asked.data[0].name, **of_run(asked.run, Sequences.load(asked.data[0]))}
        print(json.dumps(found["run"]), flush=True)
    asked.out.write_text(json.dumps(found, indent=2) + "\n")


def filtered(config: Config, filter_seen: str) -> Config:
    return with_settings(config, [f"eval.filter_seen={filter_seen}"])


def had_before(data: Sequences) -> float:
    """The share of the test positives that the user had chosen before."""
    users = data.eval_users("test")
    items, offsets = data.seen("test", users, 1, "history")
    begins, ends = (data.offsets[users] + place[users].long() for place in data.split_range("test"))
    tested = flatten_ranges(begins, ends)
    of_user = data.num_items + 1  # numbers for pairs of a user and an item
    positives = tested.rows_T * of_user + data.items[tested.places_T]
    earlier = torch.repeat_interleave(torch.arange(len(users)), offsets.diff()) * of_user + items
    return float(torch.isin(positives, earlier).double().mean())


def counting(data: Sequences, config: Config) -> dict[str, float]:
    """The first metric of the headline table, of every counting baseline."""
    users = some_users(data, "test", MOST_USERS, torch.Generator().manual_seed(0))
    seen, max_len = config.eval.filter_seen, config.model.max_len
    scorers = baselines(data, "test", config)
    ranked = {
        name: rank_users(scorer, data, "test", seen, max_len, batch=batch_size(data), users=users)
        for name, scorer in scorers.items()
    }
    return {name: result.metrics[METRIC] for name, result in ranked.items()}


def of_run(run: Path, data: Sequences) -> dict[str, Any]:
    """A trained network with each filter: alone, with counting, with its pulse; and how far the pulse is ahead."""
    config = read_saved_toml(run / CONFIG)
    model = SequentialRecommender.from_pretrained(run / BEST)
    assert model.pulse is not None, "a run of `trope`"
    found: dict[str, Any] = {
        "width": config.model.width,
        "seed": config.train.seed,
        "users": len(data.eval_users("test")),
    }
    for filter_seen in FILTERS:
        now = filtered(config, filter_seen)

        def tested(counting: Counting | None = None, now: Config = now) -> EvalResult:
            return evaluate(model, data, "test", now.eval.filter_seen, now.model.max_len, counting=counting)

        model.pulse.forget()
        alone = tested()
        chosen = choose_counting(model, data, now, now.train.seed)
        counted = tested(Counting(chosen["beta"], chosen["half_life"])) if chosen["beta"] else alone
        fit_pulse(model, data, now, now.train.seed)
        results = {"counting": counted, "network": alone, "pulse": tested()}
        values = {name: {METRIC: per_user(each.places)[METRIC]} for name, each in results.items()}
        ahead = compare_values(values).systems[2].difference
        assert ahead is not None
        found[filter_seen] = {
            **{name: float(each[METRIC].mean()) for name, each in values.items()},
            "pulse_minus_counting": {key: float(bound[0]) for key, bound in ahead._asdict().items()},
        }
    return found


if __name__ == "__main__":
    main()
