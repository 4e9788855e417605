"""How much the item tells about the calendar, with chance and drift removed.

For each cycle (day, week, year) the events' phases are put in bins, and two shares of the bins' entropy are measured:

- `explained`, I(item; bin) / H(bin): what the item tells about the phase. Items that come and go explain the phase of
  any cycle, so a high number may be mere drift.
- `repeating`: what an item's profile over the phase, learned from every other cycle, tells about the cycles in between.
  Drift does not survive this; it is what a model that knows the calendar can use at a later date.

Both are measured again with the bins permuted; the result, which is due to chance, is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trope.times import DAY, HOUR, MONDAY, WEEK, YEAR

CYCLES = (("hour of day", DAY, 24), ("day of week", WEEK, 7), ("time of year", YEAR, 12))
PERMUTATIONS = 4
PRIOR_EVENTS = 50.0
"""Events with the average profile that are added to each item's own, so that rare items claim little."""
TRUST = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""How far the profiles are believed, from hardly to fully; the best counts, since drift spoils them more or less."""


@dataclass(frozen=True)
class CalendarSignal:
    """What the item explains of one cycle's phase, as shares of the phase's entropy beyond chance.

    cycles: how often the log goes round; noise: standard deviation of `repeating` under chance
    is_told: whether the log's times tell the phase at all; see `tells_phase`
    """

    name: str
    cycles: float
    explained: float
    repeating: float
    noise: float
    is_told: bool = True

    @property
    def verdict(self) -> str:
        """One or two words for `repeating`."""
        if self.cycles < 2 or not self.is_told:
            return "cannot tell"
        if self.repeating < max(0.001, 4 * self.noise):
            return "none seen"
        return "weak" if self.repeating < 0.01 else "clear" if self.repeating < 0.05 else "strong"


def calendar_signals(items: NDArray[np.int64], times: NDArray[np.int64], seed: int = 0) -> list[CalendarSignal]:
    """Measure every cycle on a sample of events.

    items: [n] small ids from 0; times: [n] Unix seconds, n at least 1
    """
    rng = np.random.default_rng(seed)
    span = float(times.max() - times.min())
    return [_signal(name, items, times, period, bins, span, rng) for name, period, bins in CYCLES]


def tells_phase(times: NDArray[np.int64], period: int, bins: int) -> bool:
    """Whether times tell the phase of a cycle; a log of plain dates tells no hour of day."""
    phases = np.unique((times - MONDAY) % period)
    if len(np.unique(phases * bins // period)) <= 1:
        return False
    # Midnights of a zone that changes its clocks are plain dates, too: they are an hour apart.
    clock_changes = period == DAY and len(phases) == 2 and int(phases[1] - phases[0]) in (HOUR, DAY - HOUR)
    return not clock_changes


def _signal(
    name: str,
    items: NDArray[np.int64],
    times: NDArray[np.int64],
    period: int,
    bins: int,
    span: float,
    rng: np.random.Generator,
) -> CalendarSignal:
    phase = (times - MONDAY) % period * bins // period
    odd = (times - MONDAY) // period % 2 == 1
    entropy = float(np.log(len(phase)) - _xlogx(np.bincount(phase)) / len(phase))
    if not tells_phase(times, period, bins):
        return CalendarSignal(name, span / period, 0.0, 0.0, 0.0, is_told=False)
    measured = np.array(_measure(items, phase, odd, bins)) / entropy
    chance = np.array([_measure(items, _shuffle(phase, odd, rng), odd, bins) for _ in range(PERMUTATIONS)]) / entropy
    explained, repeating = np.maximum(measured - chance.mean(axis=0), 0.0)
    return CalendarSignal(name, span / period, float(explained), float(repeating), float(chance[:, 1].std(ddof=1)))


def _shuffle(phase: NDArray[np.int64], odd: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the phases permuted within the odd and within the even cycles: they may cover different phases."""
    shuffled = phase.copy()
    for half in (odd, ~odd):
        shuffled[half] = rng.permutation(phase[half])
    return shuffled


def _measure(
    items: NDArray[np.int64], phase: NDArray[np.int64], odd: NDArray[np.bool_], bins: int
) -> tuple[float, float]:
    """Return in nats per event: the mutual information of item and phase, and what transfers between cycles."""
    shape = (int(items.max()) + 1, bins)
    cell = items * bins + phase
    even_table, odd_table = (
        np.bincount(cell[half], minlength=shape[0] * bins).reshape(shape).astype(np.float64) for half in (~odd, odd)
    )
    gains = [_transfer(even_table, odd_table, trust) + _transfer(odd_table, even_table, trust) for trust in TRUST]
    return mutual_information(even_table + odd_table), max(0.0, *gains) / len(items)


def mutual_information(table: NDArray[np.float64]) -> float:
    """Return the mutual information, in nats, of rows and columns of a table of counts."""
    total = table.sum()
    joint = _xlogx(table) - _xlogx(table.sum(axis=0)) - _xlogx(table.sum(axis=1)) + _xlogx(total)
    return float(joint / total)


def _transfer(known: NDArray[np.float64], new: NDArray[np.float64], trust: float) -> float:
    """Return the log-likelihood that the item profiles in `known` gain over no profiles on the events in `new`."""
    if known.sum() == 0 or new.sum() == 0:
        return 0.0
    usual = known.sum(axis=0) / known.sum()
    profile = (known + PRIOR_EVENTS * usual) / (known.sum(axis=1, keepdims=True) + PRIOR_EVENTS)
    # Only the lift over the usual profile is carried over: the other cycles may be busy at other phases.
    lift = 1 + trust * (np.divide(profile, usual, out=np.ones_like(profile), where=usual > 0) - 1)
    expected = lift @ (new.sum(axis=0) / new.sum())
    return float((new * np.log(lift / expected[:, None])).sum())


def _xlogx(counts: NDArray) -> float:
    """Return the sum of n log n."""
    return float(np.sum(counts * np.log(np.maximum(counts, 1))))
