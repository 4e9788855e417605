"""Cut the events of a folder that is being written by a protocol, and describe the result for `meta.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trope.data import protocols
from trope.data.protocols import Protocol
from trope.data.writer import write_array


def write_splits(folder: Path, protocol: Protocol, name: str) -> dict[str, Any]:
    """Cut the written arrays by the protocol, and write the cuts."""
    times, offsets = (np.load(folder / f"{array}.npy", mmap_mode="r") for array in ("times", "offsets"))
    baskets = np.load(folder / "baskets.npy", mmap_mode="r") if (folder / "baskets.npy").exists() else None
    begins = offsets[:-1]
    first, last = int(times[begins].min()), int(times[offsets[1:] - 1].max())
    protocol = protocol.resolve(first, last)
    cuts = protocols.split(protocol, offsets, times, baskets)
    trained = cuts.train_end > 0
    tested = (cuts.test_start > 0) & (cuts.test_end > cuts.test_start)
    validated = trained & (cuts.valid_end > cuts.train_end)
    if not tested.any():
        raise ValueError(protocol.nobody_to_test(name, len(begins), int(np.diff(offsets).max())))
    return {
        "entry": write_array(folder, "splits", np.stack(cuts)),
        "protocol": protocol.to_dict(),
        "time_span": {
            "all": [first, last],
            "train": [int(times[begins[trained]].min()), int(times[(begins + cuts.train_end - 1)[trained]].max())],
        },
        "counts": {
            "train_events": int(cuts.train_end.sum(dtype=np.int64)),
            "valid_users": int(validated.sum()),
            "test_users": int(tested.sum()),
        },
    }
