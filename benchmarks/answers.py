"""Answers a second: the ten best of many items for users at moments, by `Recommender.rank_moments`.

    python benchmarks/answers.py --device cuda                       # 100,541 items, width 512, L 200
    python benchmarks/answers.py --users 8 --items 5000 --width 64   # a look on a CPU

Every user is remembered and looked at from every moment, all inside the measured time; the exact top ten come back to
the host. An answer is one (user, moment). Weights are random: how fast it answers does not depend on what was learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.environment import describe
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories, Recommender
from trope.settings import preset
from trope.times import DAY

SPAN = (1_480_000_000, 1_512_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hstu-trope", help="a preset")
    parser.add_argument("--users", type=int, default=1_024)
    parser.add_argument("--moments", type=int, default=365)
    parser.add_argument("--items", type=int, default=100_541, help="default: the shop's")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"width": given.width, "heads": 4, "head_dim": given.width // 4, "max_len": given.length}
    config = preset(given.model, [f"model.{name}={value}" for name, value in sizes.items()])
    model = SequentialRecommender(config, given.items, SPAN)
    recommender = Recommender(model, Catalogue(Ids(np.arange(1, given.items + 1)), None), given.device)
    random = np.random.default_rng(0)
    events = given.users * given.length
    histories = Histories(
        random.integers(1, given.items + 1, events),
        np.sort(random.integers(*SPAN, (given.users, given.length)), axis=1).reshape(-1),
        np.arange(0, events + 1, given.length),
    )
    moments_BM = np.tile(SPAN[1] + DAY * np.arange(1, given.moments + 1), (given.users, 1))

    def seconds() -> float:
        start = time.perf_counter()
        recommender.rank_moments(histories, moments_BM, k=10, filter_seen="none")
        return time.perf_counter() - start

    seconds()
    median = statistics.median(seconds() for _ in range(given.repeats))
    rate = given.users * given.moments / median
    print(f"{rate:,.0f} answers a second: {given.users:,} users x {given.moments} moments in {median:.2f} s")
    if given.out is not None:
        said = {name: value for name, value in vars(given).items() if name != "out"}
        said |= {"seconds": median, "answers_per_second": rate, "environment": describe()}
        given.out.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
