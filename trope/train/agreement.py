"""Do all processes of a training begin with the same? Each machine reads its own files and its own command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trope.config import Config
from trope.data.folder import sha256_of
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.runs import DATA, STATE
from trope.settings import to_dict
from trope.train.distributed import Group
from trope.train.step import Feed
from trope.train.streamed import StreamFeed

_MOST_NAMED = 8  # processes in a message: of a thousand, nobody reads all
_DIGEST = hashlib.sha256().digest_size


def check_same_command(group: Group, config: Config, factors: Sequence[float] | None, data: Sequences | Stream) -> None:
    """Refuse, in all processes, a training for which they were given different settings or data.

    It would end, with wrong weights: gradients of several models, or of other batches, would be added up. With
    `train.parts` other numbers of threads are refused, too. factors: settled learning rates, see
    `trope.train.loop.Trainer`.
    """
    if group.size > 1:
        settings = [to_dict(config), None if factors is None else list(factors)]
        # Sums over other numbers of threads have other bits, which parts promise not to have.
        threads = torch.get_num_threads() if config.train.parts > 1 else None
        _check_same(group, {"config": settings, "dataset": data.meta["checksum"], "OMP_NUM_THREADS": threads})


def check_same_start(group: Group, run: Path, feed: Feed, latest: Path | None) -> None:
    """Refuse, in all processes, a training that they begin at different places, or with different blocks.

    It returns when all processes have read the checkpoint. run: the run folder, which the first process has made. feed:
    which goes on as the checkpoint says. latest: the checkpoint that was loaded, None for a new run.
    """
    if group.size > 1:
        # Not the memory itself: two that make the same blocks are as good as one. A validation, whose users are ranked
        # by all processes together, has blocks of its own.
        window = [feed.window, feed.stream.window()] if isinstance(feed, StreamFeed) else None
        # state.json has the SHA-256 of the weights and moments beside it.
        loaded = None if latest is None else [latest.name, sha256_of(latest / STATE)]
        made = sha256_of(run / DATA) if (run / DATA).is_file() else None
        _check_same(group, {"--memory": window, "checkpoint": loaded, "RUN": made})


def _check_same(group: Group, parts: dict[str, Any]) -> None:
    found = group.gather_bytes(b"".join(_digest(part) for part in parts.values()))
    if differences := _differences(list(parts), found):
        raise ValueError(
            f"{'; '.join(differences)}; give every process the same command, and keep RUN and DATA on a file system "
            "that all see"
        )


def _digest(part: Any) -> bytes:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).digest()


def _differences(names: list[str], found: list[bytes]) -> list[str]:
    """For each part that not all have in common, who sees another one than the first process.

    found: of each process, the digests of all parts one after the other.
    """
    phrases = []
    for place, name in enumerate(names):
        digests = [each[place * _DIGEST : (place + 1) * _DIGEST] for each in found]
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            phrases.append(f"{_who_sees(others)} another {name} than process 0")
    return phrases


def _who_sees(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED:,} more" if len(ranks) > _MOST_NAMED else ""
    return f"process {named} sees" if len(ranks) == 1 else f"processes {named}{more} see"
