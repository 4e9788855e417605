"""Write a dataset as shards of users: the engine's workers write them, here their entries become `meta.json`'s.

Nothing in here grows with the number of events or users but the list of shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trope.atomic import recover_all
from trope.data.arrays import Coded
from trope.data.core import Sizes
from trope.data.engines.base import Engine
from trope.data.folder import SHARDED_FORMAT, SHARDS, find_array, shard_folder
from trope.data.progress import Stages
from trope.data.protocols import Protocol
from trope.data.shards import ShardJob
from trope.data.splits import SplitFacts, describe


def write_shards(
    coded: Coded, shard_users: int, folder: Path, ticks: int, protocol: Protocol, name: str, engine: Engine,
    stages: Stages,
) -> tuple[Sizes, dict[str, Any]]:  # fmt: skip
    """Write every shard into `folder`; returns the dataset's sizes, and its entries of `meta.json`.

    ticks: units of the events' times in a second. name: of the source, for messages.
    """
    ends = coded.events.aggregate(first=coded.events.tick.min(), last=coded.events.tick.max()).to_pyarrow()
    first, last = (int(ends[side][0].as_py()) // ticks for side in ("first", "last"))
    job = ShardJob(str(folder.absolute()), ticks, protocol.resolve(first, last), shard_users)
    total, done = int(coded.users.count().to_pyarrow().as_py()), 0
    found = []
    for shard in engine.each_shard(coded.users, coded.events, shard_users, job):
        found.append(shard)
        done += shard["facts"]["users"]
        stages.done("write", done / total)
    # A task of Spark that was killed leaves its unfinished folder, or takes away the one that another task has written.
    recover_all(folder / SHARDS)
    found.sort(key=lambda shard: int(shard["number"]))
    assert [shard["number"] for shard in found] == list(range(len(found))), "a shard is missing or was written twice"
    _check_written(folder, found)
    facts = [SplitFacts(**shard["facts"]) for shard in found]
    assert sum(each.users for each in facts) == total, "a shard has lost users"
    sizes = Sizes(total, int(coded.items.count().to_pyarrow().as_py()), sum(each.events for each in facts))
    return sizes, {
        "format": SHARDED_FORMAT,
        **describe(facts, job.protocol, first, last, name),
        "shard_users": shard_users,
        "shards": [shard["arrays"] for shard in found],
    }


def _check_written(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Refuse shards that are not here: executors write to their own disk where --out is no shared one.

    Sizes are compared and nothing is read, for there may be terabytes.
    """
    for shard in shards:
        try:
            for name in shard["arrays"]:
                find_array(shard_folder(folder, shard["number"]), name, shard)
        except (OSError, ValueError):
            raise ValueError(
                f"the executors did not write shard {shard['number']} into {folder / SHARDS} as the driver sees it; "
                "--out must be on a file system that all machines share"
            ) from None
