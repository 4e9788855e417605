"""Counting baselines for every table. They need no training, so a model must be ahead of them to be worth its cost.

most popular        by training events
popular in 7 d      by the events of the last 7 days before t_now; also 30 d, 24 h and 1 h
decayed counts      by all events before t_now, each counting half after a half-life that validation chooses
again               the user's own items, by decayed counts of the user's own events

Those of a stream are in `trope.evaluate.streamed_baselines`; scorers and the choice of half-lives are the same.

Shapes: B users of a batch, M their distinct moments, K half-lives or windows, V items, T events in the order of time,
C own items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trope.config import Config
from trope.data.sequences import EvalBatch, Sequences
from trope.data.stream import Stream
from trope.evaluate.evaluation import Scorer, rank_all
from trope.evaluate.live import events_before, time_unit, users_at_a_time
from trope.evaluate.ranking import Cells, TileScores
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.evaluate.some_users import as_it_is, draw_users
from trope.models.pulse import HALF_LIVES, CountStream, EventsInTime, SortedEvents, own_counts
from trope.models.pulse.counts import half_lives_within
from trope.times import say_short

MOST_POPULAR, DECAYED, AGAIN = "most popular", "decayed counts", "again"
# Hours by name, the longest first.
RECENT = {"popular in 30 d": 720, "popular in 7 d": 168, "popular in 24 h": 24, "popular in 1 h": 1}
_LAST = {
    "popular in 30 d": "last 30 days", "popular in 7 d": "last 7 days", "popular in 24 h": "last 24 hours",
    "popular in 1 h": "last hour",
}  # fmt: skip
NAMES = (MOST_POPULAR, *RECENT)
"""Those that need no validation."""
MOST_USERS = 4_096
"""Validation users by whom a half-life is chosen, at most."""
# Scores that stay in a CPU's cache: with larger batches 4,096 users x 10,000 items take four times as long.
CACHED_SCORES = 1 << 19
# Decayed counts are compared in whole parts of an event, so that equal counts are equal however they were added up. An
# event is nothing after 21 half-lives.
_PARTS = 1e6


class Events(NamedTuple):
    """The events of a split's histories, in the order of time."""

    items_T: Tensor  # int64
    times_T: Tensor

    @classmethod
    def of(cls, data: Sequences, split: str) -> Events:
        """Those before a split; for `test` they include the validation events."""
        events = data.first_events(data.split_range(split)[0])
        times_T, order = torch.sort(data.times[events], stable=True)
        return cls(data.items[events][order].long(), times_T)


def baselines(data: Sequences, split: str, config: Config) -> dict[str, Scorer]:
    """Scorers by their name in tables, for `rank_users` with `batch_size` users at a time.

    config: how users are ranked, and the criterion by which validation chooses half-lives.
    """
    events, popular = Events.of(data, split), MostPopular(data)
    found: dict[str, Scorer] = {MOST_POPULAR: popular}
    found |= {name: RecentlyPopular(popular, events, hours) for name, hours in RECENT.items()}
    if (chosen := choose_half_lives(data, popular, config)) is not None:
        decayed = decayed_counts(popular, SortedEvents(*events), [chosen.decayed])
        found[f"{DECAYED}, {say_short(chosen.decayed)}"] = decayed[chosen.decayed]
        found[AGAIN] = Again(popular, data, split, chosen.again)
    return found


def half_lives(data: Sequences | Stream) -> list[int]:
    """Seconds, of `HALF_LIVES` those that the data can tell apart."""
    first, last = data.time_span
    return [HALF_LIVES[place] for place in half_lives_within(time_unit(data), last - first)]


class HalfLives(NamedTuple):
    """Seconds that validation chose for each baseline that has a half-life."""

    decayed: int
    again: int


def choose_half_lives(data: Sequences | Stream, popular: MostPopular, config: Config) -> HalfLives | None:
    """The half-lives that are best on validation, the shortest of equals; None where nobody validates."""
    if not data.can_evaluate("valid"):
        return None
    generator, lives = torch.Generator().manual_seed(0), half_lives(data)
    ((store, users),) = draw_users(data, [as_it_is], "valid", MOST_USERS, generator)
    scorers: dict[str, Scorer] = {}
    for half_life, scorer in decayed_counts(popular, events_before(data, "valid"), lives).items():
        scorers[f"{DECAYED}, {half_life}"] = scorer
        scorers[f"{AGAIN}, {half_life}"] = Again(popular, store, "valid", half_life)
    seen, max_len, criterion = config.eval.filter_seen, config.model.max_len, config.train.criterion
    batch = batch_size(data, len(lives))
    ranked = rank_all(scorers, store, "valid", seen, max_len, batch=batch, users=users)
    best = (max(lives, key=lambda each: ranked[f"{name}, {each}"].metrics[criterion]) for name in (DECAYED, AGAIN))
    return HalfLives(*best)


def decayed_counts(popular: MostPopular, events: EventsInTime, half_lives: list[int]) -> dict[int, DecayedPopular]:
    """Scorers by half-life that count together."""
    lives = torch.tensor(half_lives, dtype=torch.float64)
    counts = BatchCounts(CountStream(events, lives, len(popular.counts_V) - 1).counts_at)
    return {each: DecayedPopular(popular, counts, place, each) for place, each in enumerate(half_lives)}


def chosen_half_lives(scorers: Mapping[str, Scorer]) -> dict[str, int]:
    """Seconds by the name of each baseline that has a half-life; scorers: of `baselines`."""
    return {name: each.half_life for name, each in scorers.items() if isinstance(each, DecayedPopular | Again)}


def batch_size(data: Sequences | Stream, rows: int = 1) -> int:
    """How many users to rank at a time, where each may have a moment of its own: bounds memory, and is quick.

    rows: of counts that are held for each moment.
    """
    most = USERS_AT_A_TIME
    if data.device.type == "cpu":
        most = min(most, max(1, CACHED_SCORES // data.num_items))
    return users_at_a_time(2 * rows * data.num_items, most)  # counts are float64


def equal_baselines(scorers: Mapping[str, Scorer], data: Sequences, split: str) -> list[str]:
    """A sentence for each baseline that ranks as another one does because nothing more happened in its window.

    scorers: of `baselines`, for the same data and split.
    """
    t_now = data.eval_batch(split, data.eval_users(split), 1).t_now
    counts = {name: each.count(t_now) for name, each in scorers.items() if isinstance(each, RecentlyPopular)}
    return say_equal(
        {name: not count.any() for name, count in counts.items()},
        lambda one, other: counts[one].equal(counts[other]),
        split,
    )


def say_equal(is_empty: Mapping[str, bool], is_same: Callable[[str, str], bool], split: str) -> list[str]:
    """The sentences of `equal_baselines`.

    is_empty: of each window, the longest first, whether it held no event for anybody. is_same: whether two held as many
    for everybody.
    """
    said = []
    for place, (name, nothing) in enumerate(is_empty.items()):
        if nothing:
            why = f"no event lies in the {_LAST[name]} before t_now, for any {split} user"
            said.append(f"{name!r} equals {MOST_POPULAR!r}: {why}")
            continue
        # Windows end at the same moment, so two that hold as many events hold the same.
        shorter = next((other for other in list(is_empty)[place + 1 :] if is_same(name, other)), None)
        if shorter is not None:
            why = f"every event of the {_LAST[name]} before t_now lies in the {_LAST[shorter]}, for every {split} user"
            said.append(f"{name!r} equals {shorter!r}: {why}")
    return said


class BatchCounts:
    """Everybody's counts at the moments of a batch, made once for all scorers that are asked of it.

    at: rising moments to counts [K, V + 1] that are good until the next ones.
    """

    def __init__(self, at: Callable[[Tensor], Iterator[Tensor]]) -> None:
        self._at = at
        self._made: tuple[EvalBatch, Tensor, Tensor] | None = None

    def __call__(self, batch: EvalBatch) -> tuple[Tensor, Tensor]:
        """Counts [K, M, V + 1] of a batch in the order of t_now, and the place of each user's moment among them."""
        if self._made is None or self._made[0] is not batch:
            self._made = None  # counts of one batch are in memory, also while the next ones are made
            moments_M, moment_B = torch.unique(batch.t_now, return_inverse=True)
            self._made = batch, self._count(moments_M), moment_B
        return self._made[1:]

    def _count(self, moments_M: Tensor) -> Tensor:
        counts_KMV = torch.empty(0)
        for place, counts_KV in enumerate(self._at(moments_M)):
            if not place:
                counts_KMV = counts_KV.new_empty((len(counts_KV), len(moments_M), counts_KV.shape[1]))
            counts_KMV[:, place] = counts_KV
        return counts_KMV


class MostPopular:
    """Scores an item by the number of its training events. Of a stream, one pass counts them."""

    def __init__(self, data: Sequences | Stream) -> None:
        self.counts_V = torch.nn.functional.pad(data.training_counts(), (1, 0)).double()

    def __call__(self, batch: EvalBatch) -> TileScores:
        return lambda first, last: self.counts_V[first:last].repeat(len(batch.users), 1)

    def below_one(self) -> Tensor:
        """Popularity as scores below 1, which decide among equal whole numbers, [V + 1]."""
        return self.counts_V / (self.counts_V.max() + 1)


class RecentlyPopular:
    """Scores an item by its events in the last hours before t_now, then by its training events.

    It counts events of the split's histories that are strictly earlier than t_now. For `test` these include the
    validation events; without them the last hours before a holdout would be empty.

    events: of the split's histories. hours: length of the window.
    """

    def __init__(self, popular: MostPopular, events: Events, hours: int) -> None:
        self.items_T, self.times_T = events
        self.seconds = 3_600 * hours
        self.overall_V = popular.counts_V
        self._begin, self._end, self._counts_V = 0, 0, torch.zeros_like(self.overall_V)

    def count(self, t_now: Tensor) -> Tensor:
        """How many events the windows before these moments hold."""
        return torch.searchsorted(self.times_T, t_now) - torch.searchsorted(self.times_T, t_now - self.seconds)

    def __call__(self, batch: EvalBatch) -> TileScores:
        """Needs a batch in the order of t_now: then each event comes into the window once and leaves it once."""
        assert (batch.t_now.diff() >= 0).all(), "rank_users orders users by t_now"
        users = len(batch.users)
        begin_B = torch.searchsorted(self.times_T, batch.t_now - self.seconds)
        end_B = torch.searchsorted(self.times_T, batch.t_now)
        first_V = self._window(int(begin_B[0]), int(end_B[0]))
        # Events that come and go after the first user, and the first user who has them, or no longer has them.
        come, go = (torch.arange(int(b[0]), int(b[-1]), device=b.device) for b in (end_B, begin_B))
        enters, leaves = torch.searchsorted(end_B, come, right=True), torch.searchsorted(begin_B, go, right=True)
        come, go = self.items_T[come], self.items_T[go]
        # Whole numbers below 2^53, so recent events decide and ties among them fall to the overall count.
        weight = self.overall_V.max() + 1

        def scores(first: int, last: int) -> Tensor:
            change_BV = self.overall_V.new_zeros(users, last - first)
            change_BV[0] = first_V[first:last]
            one = change_BV.new_ones(())
            for rows, items, sign in ((enters, come, one), (leaves, go, -one)):
                here = (items >= first) & (items < last)
                change_BV.index_put_((rows[here], items[here] - first), sign, accumulate=True)
            return change_BV.cumsum(0).mul_(weight).add_(self.overall_V[first:last])

        return scores

    def _window(self, begin: int, end: int) -> Tensor:
        """The counts of events begin .. end - 1, from those of the call before where the window moved forward."""
        if begin < self._begin or end < self._end:
            self._begin, self._end, self._counts_V = 0, 0, torch.zeros_like(self.overall_V)
        for some, sign in ((slice(self._end, end), 1.0), (slice(self._begin, begin), -1.0)):
            counted_V = torch.bincount(self.items_T[some], minlength=len(self._counts_V))
            self._counts_V = self._counts_V + sign * counted_V
        self._begin, self._end = begin, end
        return self._counts_V


class DecayedPopular:
    """Scores an item by its decayed count at t_now: each event counts half after a half-life. Then by training events.

    It counts events strictly before t_now. counts: of several half-lives, of which `place` is this one's. half_life:
    seconds.
    """

    def __init__(self, popular: MostPopular, counts: BatchCounts, place: int, half_life: int) -> None:
        self.counts, self.place, self.half_life = counts, place, half_life
        self.popularity_V = popular.below_one()

    def __call__(self, batch: EvalBatch) -> TileScores:
        """Needs a batch in the order of t_now."""
        # The counts themselves: a log share in float32 would round an old event away beside the prior.
        counts_KMV, moment_B = self.counts(batch)
        counts_MV = (_PARTS * counts_KMV[self.place]).round_().add_(self.popularity_V)
        return lambda first, last: counts_MV[:, first:last][moment_B]


class Again:
    """Scores the user's own items by decayed counts of the user's own events, and all others by training events.

    data: the store that has the users. half_life: seconds after which an event counts half.
    """

    def __init__(self, popular: MostPopular, data: Sequences, split: str, half_life: int) -> None:
        self.data, self.split, self.half_life = data, split, half_life
        self.popularity_V = popular.below_one()

    def __call__(self, batch: EvalBatch) -> TileScores:
        lengths_B = self.data.split_range(self.split)[0][batch.users].long()
        history = self.data.whole_histories(batch.users, lengths_B)
        rows_C, items_C, counts_C = own_counts(*history, batch.t_now, self.half_life, self.data.num_items)
        cells = Cells(rows_C, items_C)

        def scores(first: int, last: int) -> Tensor:
            tile_BV = self.popularity_V[first:last].repeat(len(batch.users), 1)
            here, mine = cells.within(first, last)
            # One more, so that an own item is ahead of the others however long ago it was.
            own_C = 1 + (_PARTS * counts_C[here]).round_()
            return tile_BV.index_put_((mine.rows, mine.items), own_C, accumulate=True)

        return scores
