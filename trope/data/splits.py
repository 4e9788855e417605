"""Cut the events of a folder that is being written by a protocol, and describe the result for `meta.json`.

Shards are cut where they are written (`trope.data.shards`); the facts of all of them give one description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trope.data import protocols
from trope.data.protocols import Protocol, Splits
from trope.data.writer import write_array


@dataclass(frozen=True)
class SplitFacts:
    """What `meta.json` needs to know of some users' events besides their arrays; moments are Unix seconds.

    train_first, train_last: of the training events, None where there are none. longest: events of the user with most.
    """

    users: int
    events: int
    baskets: int
    train_first: int | None
    train_last: int | None
    train_events: int
    valid_users: int
    test_users: int
    longest: int

    @classmethod
    def of(cls, offsets: np.ndarray, times: np.ndarray, baskets: np.ndarray | None, cuts: Splits) -> SplitFacts:
        """baskets: int32 [events], None where the source has none."""
        begins = offsets[:-1]
        trained = cuts.train_end > 0
        tested = (cuts.test_start > 0) & (cuts.test_end > cuts.test_start)
        validated = trained & (cuts.valid_end > cuts.train_end)
        return cls(
            users=len(begins),
            events=len(times),
            baskets=0 if baskets is None else int(baskets[-1]) + 1,
            train_first=int(times[begins[trained]].min()) if trained.any() else None,
            train_last=int(times[(begins + cuts.train_end - 1)[trained]].max()) if trained.any() else None,
            train_events=int(cuts.train_end.sum(dtype=np.int64)),
            valid_users=int(validated.sum()),
            test_users=int(tested.sum()),
            longest=int(np.diff(offsets).max()),
        )


def describe(facts: Sequence[SplitFacts], protocol: Protocol, first: int, last: int, name: str) -> dict[str, Any]:
    """The entries of `meta.json` about a dataset's splits; ValueError if nobody can be tested.

    facts: of all its users. protocol: resolved. first, last: moments of all events. name: for the message.
    """
    if not any(each.test_users for each in facts):
        users, longest = sum(each.users for each in facts), max(each.longest for each in facts)
        raise ValueError(protocol.nobody_to_test(name, users, longest))
    counted = ("train_events", "valid_users", "test_users", "baskets")
    counts = {key: sum(getattr(each, key) for each in facts) for key in counted}
    if not counts["baskets"]:
        del counts["baskets"]
    return {
        "protocol": protocol.to_dict(),
        "time_span": {
            "all": [first, last],
            "train": [
                min(each.train_first for each in facts if each.train_first is not None),
                max(each.train_last for each in facts if each.train_last is not None),
            ],
        },
        "counts": counts,
    }


def write_splits(folder: Path, protocol: Protocol, name: str) -> dict[str, Any]:
    """Cut the written arrays by the protocol, and write the cuts; returns their entry and those of `describe`."""
    times, offsets = (np.load(folder / f"{array}.npy", mmap_mode="r") for array in ("times", "offsets"))
    baskets = np.load(folder / "baskets.npy", mmap_mode="r") if (folder / "baskets.npy").exists() else None
    first, last = int(times[offsets[:-1]].min()), int(times[offsets[1:] - 1].max())
    protocol = protocol.resolve(first, last)
    cuts = protocols.split(protocol, offsets, times, baskets)
    described = describe([SplitFacts.of(offsets, times, baskets, cuts)], protocol, first, last, name)
    return {"entry": write_array(folder, "splits", np.stack(cuts)), **described}
