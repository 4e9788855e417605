"""Scores of rows, and the parts they are made of: the network's standing and turning planes, everybody's counts, the
user's own items. A model without a pulse has no counts and no own items in its score.

Shapes: N rows, M distinct moments, V items (column 0 is padding), E width, C cells (a row and an item), K best.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trope.evaluate.ranking import Cells, TopK, dot_scores, top_k_of
from trope.models.pulse.own import own_features
from trope.server.encoder import Rows
from trope.server.served import Served

PARTS = ("standing", "turning", "counts", "own_items")
"""What a score is the sum of, in the order of `Scores.parts`."""


class Scores:
    """Scores of some rows of a served model."""

    def __init__(self, served: Served, rows: Rows) -> None:
        recommender, self.pulse = served.recommender, served.popularity.pulse
        self.vectors_VE, self.num_items = recommender.vectors_VE, recommender.model.num_items
        self.device = device = recommender.device
        model = recommender.model
        self.turning = 0 if model.readout is None else model.readout.turn.head_dim
        self.out_NE = served.encoder.vectors(rows)
        if self.pulse is None:
            return
        cuts = [rows.cuts[cut] for cut in rows.cut_N]
        own_of = [cut.person.own(cut.length) for cut in rows.cuts]  # once for all moments of a history
        owned = [own_of[cut] for cut in rows.cut_N]
        rows_C = torch.from_numpy(np.repeat(np.arange(len(owned)), [own.shape[1] for own in owned])).to(device)
        items_C, counts_C, last_C = torch.from_numpy(np.concatenate(owned, axis=1)).to(device)
        lengths_N = torch.tensor([cut.length for cut in cuts], device=device)
        t_now_N = torch.tensor(rows.moments_N, device=device)
        self.out_NE = self.pulse.scale(self.out_NE, lengths_N, t_now_N)
        own = own_features(rows_C, items_C, counts_C.float(), last_C, lengths_N, t_now_N, self.pulse.half_lives)
        self.own, self.own_C = Cells(own.rows_C, own.items_C), self.pulse.of_own(own)
        moments, inverse = np.unique(np.array(rows.moments_N), return_inverse=True)
        self.everybody_MV = served.popularity.at(moments.tolist())
        self.moment_N = torch.from_numpy(inverse).to(device)

    def best(self, k: int, left_out: Cells) -> TopK:
        """The `k` best items of each row; equal scores in order of item."""
        return top_k_of(self._tile, len(self.out_NE), self.num_items, self.device, k, left_out)

    def parts(self, cells: Cells) -> Tensor:
        """The parts of the scores of some cells, float32 [C, 4], see `PARTS`."""
        products_CE = self.out_NE[cells.rows] * self.vectors_VE[cells.items]
        turning_C, standing_C = products_CE[:, : self.turning].sum(1), products_CE[:, self.turning :].sum(1)
        if self.pulse is None:
            nothing_C = torch.zeros_like(standing_C)
            return torch.stack((standing_C, turning_C, nothing_C, nothing_C), dim=1)
        counts_C = self.everybody_MV[self.moment_N[cells.rows], cells.items]
        # The own cells are sorted by row and item, so each cell finds its place by bisection.
        keys, wanted = (x.rows * (self.num_items + 1) + x.items for x in (self.own, cells))
        place_C = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        own_C = torch.where(keys[place_C] == wanted, self.own_C[place_C], 0.0)
        return torch.stack((standing_C, turning_C, counts_C, own_C), dim=1)

    def _tile(self, first: int, last: int) -> Tensor:
        tile_NV = dot_scores(self.out_NE, self.vectors_VE)(first, last)
        if self.pulse is not None:
            everybody_MV = self.everybody_MV[:, first:last]
            tile_NV += everybody_MV if len(everybody_MV) == 1 else everybody_MV[self.moment_N]
            mine, own_C = self.own, self.own_C
            if (first, last) != (1, self.num_items + 1):
                here, mine = mine.within(first, last)
                own_C = own_C[here]
            else:
                mine = Cells(mine.rows, mine.items - 1)
            tile_NV.index_put_((mine.rows, mine.items), own_C, accumulate=True)
        return tile_NV


def best_by_counts(served: Served, moments_N: list[int], k: int, left_out: Cells) -> TopK:
    """The `k` best items of each row by everybody's counts alone."""
    moments, inverse = np.unique(np.array(moments_N), return_inverse=True)
    everybody_MV, moment_N = served.popularity.at(moments.tolist()), torch.from_numpy(inverse)
    num_items, device = served.recommender.model.num_items, served.recommender.device
    moment_N = moment_N.to(device)
    return top_k_of(
        lambda first, last: everybody_MV[:, first:last][moment_N], len(moments_N), num_items, device, k, left_out
    )
