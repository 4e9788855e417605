"""Evaluation of a stream: the users of one block after the other, each block ranked as a store of its own.

A user's ranks depend on the model, on that user's events, and for what counts on everybody's counts at that user's
moment, so they are those of the whole store. A holdout has one moment, and all events are counted once. Under the other
protocols each user has a moment, and all events are counted once for each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate import evaluation
from trope.evaluate.evaluation import EvalResult, Model, fitted_pulse
from trope.evaluate.metrics import Places
from trope.evaluate.ranking.user_batches import no_users

T = TypeVar("T")


def evaluate(
    model: Model, data: Sequences | Stream, split: str, filter_seen: str, max_len: int, **options: Any
) -> EvalResult:
    """Rank the catalogue for every user of a split by a model.

    data: on the model's device, in memory or a stream. The rest is as in `trope.evaluate.evaluation.evaluate`.
    """
    if isinstance(data, Sequences):
        return evaluation.evaluate(model, data, split, filter_seen, max_len, **options)
    if not data.can_evaluate(split):
        raise ValueError(no_users(data, split))
    pulse, counts, counting = fitted_pulse(model), None, options.get("counting")
    if counting is not None:
        counts = counting.counts(data, split)
    elif pulse is not None and options.get("live", True):
        counts = pulse.count_in_time(data.in_time(split))

    def rank(user: int, block: Sequences) -> EvalResult | None:
        if not block.can_evaluate(split):
            return None
        found = evaluation.evaluate(model, block, split, filter_seen, max_len, counts=counts, **options)
        return EvalResult(found.users + user, found.places)

    blocks = over_blocks(data, rank, options.get("progress", False))
    return joined([found for found in blocks if found is not None])


def over_blocks(stream: Stream, rank: Callable[[int, Sequences], T], progress: bool) -> Iterator[T]:
    """`Stream.over_blocks` with a bar of blocks, above the bar that `rank` has; a single block has none."""
    blocks = math.ceil(len(stream.sizes) / stream.window())
    hidden = not progress or blocks == 1
    yield from tqdm(stream.over_blocks(rank), "blocks", blocks, unit="block", disable=hidden, leave=False)


def joined(parts: list[EvalResult]) -> EvalResult:
    """The results of blocks, in the order of their users, as one."""
    better, ties = (np.concatenate([getattr(part.places, name) for part in parts]) for name in ("better", "ties"))
    before = np.cumsum([0, *(len(part.ranks) for part in parts[:-1])])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, before, strict=True)]
    return EvalResult(
        np.concatenate([part.users for part in parts]), Places(better, ties, np.concatenate(([0], *offsets)))
    )
