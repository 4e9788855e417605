"""Answers from counts alone, for users of whom the model knows nothing: what everybody chooses.

With a pulse that weighs everybody's counts, the score is that part of the model's score, at the moment asked for.
Without one, it is the log share of the item's count in training, at any moment.

Shapes: B users, M moments, V items (column 0 is padding), K recommendations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.catalogue import Catalogue
from trope.evaluate.live import users_at_a_time
from trope.evaluate.ranking import Cells, TopK, top_k_of
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.pulse import LiveCounts, Pulse
from trope.models.pulse.shares import log_shares
from trope.serve.lists import LeftOut

MODEL, COUNTS = "model", "counts"
"""Values of the column `source`: who gave an answer."""


class SharesAt:
    """Log shares at moments; those of the last one are kept, for the next batch of a long list of users."""

    def __init__(self) -> None:
        self._kept: tuple[LiveCounts, int, int, Tensor] | None = None

    def __call__(self, live: LiveCounts, moments: Tensor) -> Iterator[Tensor]:
        """One [C, V + 1] for each moment."""
        for moment in moments.tolist():
            kept = self._kept
            if kept is None or kept[0] is not live or kept[1:3] != (live.added, moment):
                kept = self._kept = live, live.added, moment, live.log_shares(moment)
            yield kept[3]


class CountScores:
    """Scores of all items by counts.

    pulse: None where the model has no fitted one. shares_at: rising moments to log shares, [C, V + 1] each.
    """

    def __init__(
        self, pulse: Pulse | None, shares_at: Callable[[Tensor], Iterable[Tensor]], catalogue: Catalogue
    ) -> None:
        weighs = pulse is not None and bool(pulse.get_buffer("everybody").any())
        self.pulse = pulse if weighs else None
        self.shares_at, self.catalogue = shares_at, catalogue

    def at(self, moments_M: Tensor, horizon: float) -> Tensor:
        """[M, V + 1], at rising moments."""
        if self.pulse is not None:
            each = zip(self.shares_at(moments_M), moments_M, strict=True)
            return torch.stack([self.pulse.of_everybody(shares_CV, moment, horizon) for shares_CV, moment in each])
        if self.catalogue.item_counts is None:
            raise ValueError(
                "this model keeps no counts: an older version of trope saved it; train again, or leave users without "
                "a known item out"
            )
        counts_V = torch.from_numpy(np.concatenate(([0], self.catalogue.item_counts)))
        return log_shares(counts_V[None]).to(moments_M.device).expand(len(moments_M), -1)

    def best(
        self, t_now: npt.NDArray[np.int64], k: int, ranked_V: Tensor | None, horizon: float, device: torch.device
    ) -> TopK:
        """The `k` best items at each moment, on the CPU; ranked_V: as in `LeftOut`."""
        found = []
        V = len(self.catalogue)
        for moments_B in torch.from_numpy(t_now).to(device).split(users_at_a_time(V, USERS_AT_A_TIME)):
            moments_M, moment_B = torch.unique(moments_B, return_inverse=True)
            scores_MV = self.at(moments_M, horizon)
            nobody = torch.zeros(0, dtype=torch.int64, device=device)
            left_out = LeftOut(Cells(nobody, nobody), ranked_V)

            def scores(first: int, last: int, scores_MV: Tensor = scores_MV) -> Tensor:
                return scores_MV[:, first:last].clone()  # what is left out is marked in place

            best = top_k_of(scores, len(moments_M), V, device, k, left_out)
            found.append(TopK(best.items_BK[moment_B].cpu(), best.scores_BK[moment_B].cpu()))
        return TopK(*(torch.cat(parts) for parts in zip(*found, strict=True)))
