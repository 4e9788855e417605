"""Which window for a holdout? How many users some windows from one moment on would test, and whether what these choose
was there to be learned. Writes a CSV:

    python benchmarks/holdout_windows.py data/globo-news 2017-10-16T15:00:00Z 1 2 3 6 12 24 > results/globo-windows.csv

DATA is a prepared dataset of any protocol, windows are in hours. known: share of the test's events whose item has an
event before the window of validation; known_refit: before the test (`train.refit`).
"""

from __future__ import annotations

import csv
import sys

import numpy as np

from trope.data.sequences import Sequences
from trope.times import parse_moment


def main() -> None:
    path, moment, *hours = sys.argv[1:]
    data, cutoff = Sequences.load(path), parse_moment(moment, "the cutoff")
    items, times = data.items.numpy(), data.times.numpy()
    user = np.repeat(np.arange(data.num_users), np.diff(data.offsets.numpy()))
    has_history = np.bincount(user[times < cutoff], minlength=data.num_users) > 0
    first = np.full(data.num_items + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, items, times)  # when each item was first chosen by anyone
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["cutoff", "hours", "test_users", "test_events", "known", "known_refit"])
    for length in map(float, hours):
        window = int(3600 * length)
        is_test = (times >= cutoff) & (times < cutoff + window) & has_history[user]
        seen = first[items[is_test]]
        known = [f"{(seen < until).mean():.3f}" for until in (cutoff - window, cutoff)]
        writer.writerow([moment, f"{length:g}", len(np.unique(user[is_test])), int(is_test.sum()), *known])


if __name__ == "__main__":
    main()
