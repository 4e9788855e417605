"""The pulse's weights: how cosines, everybody's counts and the user's own items become one score.

    score(u, i, t) = <scaled output, item> + sum_c w_c log share_c(i, t) + v . own(u, i, t)

The scale of the output may differ between its turning and its standing planes, with the length of the history, with
the model's age and with the horizon: whether the question is what is chosen now, or within a window from now. The
weights of the shares may differ with age and horizon. Some sixty numbers, fitted on events that the network has not
seen (`trope.train.pulse`): networks are overconfident about days they have not seen, and a plane that only remembers
days falls silent here. Until they are fitted the score is the cosine.

Shapes: B users, V items, K half-lives, P periods, C rows of shares (half-lives, then periods), F features, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trope.models.pulse.counts import HALF_LIVES, CountStream, DecayedCounts, EventsInTime, SortedEvents
from trope.models.pulse.live import LiveCounts
from trope.models.pulse.own import FEATURES, OwnItems
from trope.models.pulse.seasons import BINS, PERIODS, SeasonCounts, known_periods
from trope.times import YEAR

WEIGHTS = ("network", "everybody", "own", "age_unit")
_MIDDLE_LENGTH = 2.5  # log of 12 events: the length of a history is counted from here


class Pulse(nn.Module):
    """Weights of the score's parts, and the counts at the end of training. Buffers: the optimiser leaves them alone.

    Args:
        num_items: V.
        turning: how many of the output's first dims turn with the moment (the readout's).
        time_span: first and last time of the learned events. The readout stands still after the last. Seasons that
            the span does not repeat are not counted.
        age_from: when the model's age begins: the end of its training, which an update does not change. The end of
            `time_span` if None.
    """

    def __init__(self, num_items: int, turning: int, time_span: tuple[int, int], age_from: int | None = None) -> None:
        super().__init__()
        self.num_items, self.turning, self.time_span = num_items, turning, time_span
        self.age_from = time_span[1] if age_from is None else age_from
        self.periods = known_periods(time_span[1] - time_span[0])
        self.knows_year = PERIODS.index(YEAR) in self.periods
        K = len(HALF_LIVES)
        # Rows: the part itself, times log length, times age, times horizon. Columns: standing and turning planes.
        self.register_buffer("network", torch.zeros(4, 2))
        # Rows: the log shares, times age, times horizon.
        self.register_buffer("everybody", torch.zeros(3, K + len(PERIODS)))
        self.register_buffer("own", torch.zeros(FEATURES + K))
        self.register_buffer("age_unit", torch.zeros((), dtype=torch.int64))  # 0: it knows no age
        self.register_buffer("counts", torch.zeros(K, num_items + 1))
        self.register_buffer("seasons", torch.zeros(len(self.periods), BINS, num_items + 1))
        self.register_buffer("counted_until", torch.zeros((), dtype=torch.int64))
        self.forget()

    def forget(self) -> None:
        """Go back to weights that say nothing but the cosine. The counts stay."""
        for name in WEIGHTS:
            self.get_buffer(name).zero_()
        self.get_buffer("network")[0] = 1.0

    @property
    def is_fitted(self) -> bool:
        """Whether the weights say anything but the cosine."""
        return bool(self.get_buffer("everybody").any() or self.get_buffer("own").any())

    @property
    def half_lives(self) -> Tensor:
        """Seconds, float64 [K]."""
        return torch.tensor(HALF_LIVES, dtype=torch.float64, device=self.get_buffer("own").device)

    def age(self, t_now_B: Tensor) -> Tensor:
        """The model's age, float32 [B]: 0 while it is fresh, 1 after one unit, and no more later."""
        return self._units(t_now_B, self.age_from).clamp(0, 1)

    def horizon(self, seconds: int) -> float:
        """How far ahead is asked for: 0 for what is chosen now, 1 for a whole unit, and no more."""
        unit = int(self.get_buffer("age_unit"))
        return min(seconds / unit, 1.0) if unit else 0.0

    def known_times(self, times_T: Tensor) -> Tensor:
        """When to ask the readout. It stands still for one unit after the training data: that was measured. Later, if
        the data know their year, it is asked for the same time of the last year that they hold.
        """
        if not self.knows_year:
            return times_T
        return in_last_year(times_T, self.time_span[1], self.get_buffer("age_unit"))

    def scale(self, out_BE: Tensor, lengths_B: Tensor, t_now_B: Tensor, horizon: float = 0.0) -> Tensor:
        """The network's outputs, scaled: their dot products with items are the first part of the score.

        lengths_B: of the whole histories.
        """
        about_B4 = scale_features(lengths_B, self.age(t_now_B), horizon)
        standing_B, turning_B = part_scales(about_B4, self.get_buffer("network")).unbind(1)
        parts = (
            out_BE[:, : self.turning] * (turning_B * self.fade(t_now_B))[:, None],
            out_BE[:, self.turning :] * standing_B[:, None],
        )
        return torch.cat(parts, dim=1)

    def fade(self, t_now_B: Tensor) -> Tensor:
        """What is left of the turning planes, float32 [B]: all, but where the readout stands still for ever.

        What standing still is worth was measured for one unit; each further one halves it.
        """
        units_B = self._units(t_now_B, self.time_span[1])
        return torch.ones_like(units_B) if self.knows_year else torch.exp2(-(units_B - 1).clamp(min=0))

    def of_everybody(self, log_shares_CV: Tensor, moment: Tensor, horizon: float = 0.0) -> Tensor:
        """The second part of the score at one moment, [V + 1]."""
        plain_C, with_age_C, with_horizon_C = self.get_buffer("everybody")
        return (plain_C + self.age(moment) * with_age_C + horizon * with_horizon_C) @ log_shares_CV

    def of_own(self, own: OwnItems) -> Tensor:
        """The third part of the score, for the users' own items, [C]."""
        return own.features_CF @ self.get_buffer("own")

    def _units(self, t_now_B: Tensor, since: int) -> Tensor:
        """Time since a moment, in units, float32 [B]; 0 where no unit is known."""
        unit = int(self.get_buffer("age_unit"))
        if unit == 0:
            return torch.zeros_like(t_now_B, dtype=torch.float32)
        return ((t_now_B - since).double() / unit).float()

    def weights(self) -> dict[str, Any]:
        """All weights as plain numbers."""
        return {name: self.get_buffer(name).tolist() for name in WEIGHTS}

    def take_weights(self, weights: dict[str, Any]) -> None:
        """Take over what `weights` gave."""
        for name in WEIGHTS:
            buffer = self.get_buffer(name)
            found = torch.tensor(weights[name], dtype=buffer.dtype)
            if found.shape != buffer.shape:
                raise ValueError(f"the pulse's {name} must be of shape {tuple(buffer.shape)}, got {tuple(found.shape)}")
            buffer.copy_(found)

    def count(self, items_N: Tensor, times_N: Tensor) -> CountStream:
        """Counts of a log in memory, as the score needs them."""
        return self.count_in_time(SortedEvents(items_N, times_N))

    def count_in_time(self, events: EventsInTime) -> CountStream:
        """Counts of a log that is in the order of time."""
        return CountStream(events, self.half_lives, self.num_items, self.periods)

    def nothing_counted(self, moment: int) -> LiveCounts:
        """Counts at a moment before which nothing happened yet."""
        counts = DecayedCounts(self.half_lives, self.num_items)
        counts.decay(moment)
        return LiveCounts(counts, SeasonCounts(self.periods, self.num_items, self.half_lives.device), self.time_span[0])

    def keep(self, found: CountStream | LiveCounts) -> None:
        """Keep everybody's counts as they were when training ended, for serving."""
        assert found.counts.moment is not None
        assert found.seasons is not None
        self.get_buffer("counts").copy_(found.counts.counts_KV)
        self.get_buffer("seasons").copy_(found.seasons.bins_PGV)
        self.get_buffer("counted_until").fill_(found.counts.moment)

    def kept(self) -> LiveCounts:
        """What was kept, to go on from."""
        counts = self.get_buffer("counts")
        seasons = SeasonCounts(self.periods, self.num_items, counts.device)
        seasons.bins_PGV.copy_(self.get_buffer("seasons"))
        decayed = DecayedCounts.of(self.half_lives, counts, int(self.get_buffer("counted_until")))
        return LiveCounts(decayed, seasons, since=self.time_span[0])


def in_last_year(times_T: Tensor, last: int, unit: Tensor | int) -> Tensor:
    """Times later than `last` + `unit`, as the same time of the year before `last`; the others, and all for unit 0, as
    they are."""
    years_T = -((last - times_T) // YEAR)  # rounded up
    is_late_T = (times_T > last + unit) & (torch.as_tensor(unit) > 0)
    return torch.where(is_late_T, times_T - years_T * YEAR, times_T)


def scale_features(lengths_B: Tensor, age_B: Tensor, horizon: float) -> Tensor:
    """What the scale of the output depends on, [B, 4]: one, the log length of the history, the age, the horizon."""
    log_lengths_B = lengths_B.clamp(min=1).float().log() - _MIDDLE_LENGTH
    return torch.stack((torch.ones_like(age_B), log_lengths_B, age_B, torch.full_like(age_B, horizon)), dim=1)


def part_scales(about_B4: Tensor, network_42: Tensor) -> Tensor:
    """Scales of the standing and the turning planes, [B, 2]. Never below 0: what a plane says may fade, but nobody
    learned its opposite."""
    return (about_B4 @ network_42).clamp(min=0)
