r"""Recommendations for each month after the training data of the calendar shop, told nothing since, or with --live.

    trope generate --out shop.parquet --users 40000 --years 4 --start 2018-01-01 --no-replenishment --no-weekly \
        --no-daily --no-lifetimes --no-sessions
    trope prepare shop.parquet --protocol holdout --cutoff 2021-01-01 --window 60d --out data/shop
    trope train data/shop --out runs/shop-trope
    python benchmarks/season_ahead.py data/shop shop.truth.json runs/shop-trope --csv results/season-ahead.csv

An item is in season at a moment if its category is sold then with a probability of at least 0.2 among seasonal goods.
"best" is the ten items that the generator's own probabilities put first, for somebody unknown.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from trope.data.sequences import Sequences
from trope.data.synthetic.categories import SEASONS
from trope.environment import describe
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY, say_minute

IN_SEASON = 0.2
MONTHS, USERS, K = 12, 2_000, 10
Floats = npt.NDArray[np.float64]


class Truth:
    """The shop's own probabilities, by dense item id (0 is padding)."""

    def __init__(self, data: Sequences, path: Path) -> None:
        told = json.loads(path.read_text(encoding="utf-8"))
        originals = np.array(data.ids("item_ids"), dtype=np.int64)
        category_of = np.array(told["items"]["category"])
        self.category_V = np.concatenate(([-1], category_of[originals]))
        motives = [each["motive"] for each in told["categories"]]
        self.first = motives.index("season")
        self.seasons = motives.count("season")
        self.share = told["config"]["season_share"]
        counts_V = np.bincount(data.items.cpu().numpy(), minlength=data.num_items + 1).astype(np.float64)
        self.is_seasonal_V = (self.category_V >= self.first) & (self.category_V < self.first + self.seasons)
        of_category = np.bincount(self.category_V[1:], weights=counts_V[1:], minlength=len(motives))
        self.in_category_V = np.concatenate(([0.0], counts_V[1:] / np.maximum(of_category[self.category_V[1:]], 1)))
        self.other_V = np.where(self.is_seasonal_V, 0.0, counts_V / counts_V[~self.is_seasonal_V].sum())

    def in_season(self, moment: int) -> npt.NDArray[np.bool_]:
        return self._of_season(moment) >= IN_SEASON

    def best(self, moment: int) -> npt.NDArray[np.int64]:
        seasonal = self.share * self._of_season(moment) * self.in_category_V
        return np.argsort(-(seasonal + (1 - self.share) * self.other_V))[:K]

    def _of_season(self, moment: int) -> Floats:
        """The probability of each item's category among seasonal goods, 0 for others; [V + 1]."""
        shares = SEASONS.share(np.array([moment]))[0]
        place_V = np.clip(self.category_V - self.first, 0, self.seasons - 1)
        return np.where(self.is_seasonal_V, shares[place_V], 0.0)


def tell(models: dict[str, Recommender], data: Sequences, since: int, until: int) -> None:
    """What everybody bought between two moments."""
    new = torch.nonzero((data.times >= since) & (data.times < until)).flatten()
    for model in models.values():
        items = model.catalogue.originals(data.items[new].long().numpy())
        model.observe(pd.DataFrame({"user_id": 0, "item_id": items, "timestamp": data.times[new].numpy()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--live", action="store_true", help="tell the models all events before each month, and ask then"
    )
    options = parser.parse_args()
    data = Sequences.load(options.data)
    truth, start = Truth(data, options.truth), data.protocol.t_now("test")
    assert start is not None, "prepare the shop with --protocol holdout"
    models = {run.name: Recommender.from_pretrained(run) for run in options.runs}
    users = torch.arange(0, data.num_users, max(1, data.num_users // USERS))
    users = users[data.count_before(users, start) > 0]
    rows, told = [], start
    for month in range(MONTHS):
        moment = start + int((month + 0.5) * 365.2425 / MONTHS * DAY)
        if options.live:
            tell(models, data, told, moment)
            told = moment
        histories = Histories.of(data, users, data.count_before(users, told))
        in_season = truth.in_season(moment)
        found = {"month": say_minute(moment)[:10], "best": float(in_season[truth.best(moment)].mean())}
        for name, model in models.items():
            ranking = model.rank(histories, np.full(len(users), moment), k=K)
            found[name] = float(in_season[ranking.items].mean())
        rows.append(found)
        print(
            "  ".join(f"{key} {value:.3f}" if key != "month" else str(value) for key, value in found.items()),
            flush=True,
        )
    for name in models:
        mean, best = (float(np.mean([row[key] for row in rows])) for key in (name, "best"))
        print(f"{name}: {100 * mean / best:.1f} % of the generator's own in-season share")
    if options.csv is not None:
        environment = describe()
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*rows[0], "device", "commit", "date"])
            about = [environment["device"], environment["commit"], environment["date"]]
            writer.writerows([*row.values(), *about] for row in rows)


if __name__ == "__main__":
    main()
