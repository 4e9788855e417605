"""Scores of a model and of what is counted at each user's moment.

`LiveScorer`: a model with a pulse: cosines, everybody's counts, and the user's own items. `CountedScorer`: the control
"MODEL + counting" for a model without one (`trope.evaluate.counting`).

Shapes: B users of a batch, M their distinct moments, E width, V items, K half-lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from trope.data.sequences import EvalBatch, Sequences
from trope.data.stream import Stream
from trope.evaluate.ranking import Cells, TileScores, check_finite, dot_scores
from trope.evaluate.ranking.user_batches import Encode
from trope.models.pulse import CountStream, EventsInTime, OwnItems, Pulse, SortedEvents, own_items
from trope.models.pulse.counts import grain

# Scores of everybody's part held at a time.
MOST_SCORES = 1 << 26


class Counting(NamedTuple):
    """What the control adds to a cosine: beta * log of the item's share of everybody's decayed counts."""

    beta: float
    half_life: int  # seconds

    def counts(self, data: Sequences | Stream, split: str) -> CountStream:
        """Everybody's counts for it."""
        half_life = torch.tensor([self.half_life], dtype=torch.float64)
        return CountStream(events_before(data, split), half_life, data.num_items)


class LiveScorer:
    """Scores by a model and its pulse; users must come in the order of t_now, as `rank_users` has them.

    What counts at a moment are the events of the split's histories that lie strictly before it.

    encode: histories to vectors. items_VE: the items' vectors. split: valid or test. until: the end of the window that
        is asked for; without one that of the protocol, if it has a window. counts: of everybody, where `data` are some
        users of a larger dataset.
    """

    def __init__(
        self,
        pulse: Pulse,
        encode: Encode,
        items_VE: Tensor,
        data: Sequences,
        split: str,
        until: int | None = None,
        counts: CountStream | None = None,
    ) -> None:
        self.pulse, self.encode, self.items_VE, self.data, self.split = pulse, encode, items_VE, data, split
        self.stream = pulse.count_in_time(events_before(data, split)) if counts is None else counts
        begin, window = data.protocol.t_now(split), data.protocol.window or 0
        ahead = window if until is None or begin is None else until - begin
        self.horizon = pulse.horizon(ahead)

    def __call__(self, batch: EvalBatch) -> TileScores:
        out_BE = self.encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
        check_finite(out_BE, "outputs")
        lengths_B, own = self.own(batch)
        scaled_BE = self.pulse.scale(out_BE, lengths_B, batch.t_now, self.horizon)
        return live_scores(self.pulse, scaled_BE, self.items_VE, own, batch.t_now, self.stream.at, self.horizon)

    def own(self, batch: EvalBatch) -> tuple[Tensor, OwnItems]:
        """How long the users' whole histories are, and what they hold."""
        lengths_B = self.data.split_range(self.split)[0][batch.users].long()
        history = self.data.whole_histories(batch.users, lengths_B)
        return lengths_B, own_items(*history, batch.t_now, self.pulse.half_lives, self.data.num_items)


class CountedScorer:
    """Scores by a model plus counting; users must come in the order of t_now, as `rank_users` has them.

    counting: what is added. The others are as in `LiveScorer`.
    """

    def __init__(
        self,
        counting: Counting,
        encode: Encode,
        items_VE: Tensor,
        data: Sequences,
        split: str,
        counts: CountStream | None = None,
    ) -> None:
        self.beta, self.encode, self.items_VE = counting.beta, encode, items_VE
        self.stream = counting.counts(data, split) if counts is None else counts

    def __call__(self, batch: EvalBatch) -> TileScores:
        out_BE = self.encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
        check_finite(out_BE, "outputs")
        dots = dot_scores(out_BE, self.items_VE)
        moments_M, moment_B = torch.unique(batch.t_now, return_inverse=True)
        counted_MV = self.beta * torch.cat(list(self.stream.at(moments_M)))
        return lambda first, last: dots(first, last) + counted_MV[:, first:last][moment_B]


def events_before(data: Sequences | Stream, split: str) -> EventsInTime:
    """Everybody's events of the histories of a split, in the order of time."""
    if isinstance(data, Stream):
        return data.in_time(split)
    events = data.first_events(data.split_range(split)[0])
    return SortedEvents(data.items[events], data.times[events])


def time_unit(data: Sequences | Stream) -> int:
    """The unit of all times, in seconds; of a stream it takes a pass over all events."""
    if isinstance(data, Sequences):
        return grain(data.times)
    return min(data.over_blocks(lambda user, block: grain(block.times)))  # each unit divides the larger ones


def live_scores(
    pulse: Pulse,
    scaled_BE: Tensor,
    items_VE: Tensor,
    own: OwnItems,
    t_now_B: Tensor,
    shares_at: Callable[[Tensor], Iterable[Tensor]],
    horizon: float = 0.0,
) -> TileScores:
    """The three parts of the score, a tile at a time.

    scaled_BE: outputs, scaled by the pulse. shares_at: rising moments to log shares [K, V + 1], one for each.
    horizon: `Pulse.horizon` of what is asked for.
    """
    dots = dot_scores(scaled_BE, items_VE)
    moments_M, moment_B = torch.unique(t_now_B, return_inverse=True)
    each_moment = zip(shares_at(moments_M), moments_M, strict=True)
    everybody_MV = torch.stack([pulse.of_everybody(shares_KV, moment, horizon) for shares_KV, moment in each_moment])
    cells, own_C = Cells(own.rows_C, own.items_C), pulse.of_own(own)

    def scores(first: int, last: int) -> Tensor:
        tile_BV = dots(first, last) + everybody_MV[:, first:last][moment_B]
        here, mine = cells.within(first, last)
        return tile_BV.index_put_((mine.rows, mine.items), own_C[here], accumulate=True)

    return scores


def users_at_a_time(num_items: int, most: int) -> int:
    """How many users may have moments of their own without too much memory."""
    return max(1, min(most, MOST_SCORES // (num_items + 1)))
