"""An approximate index for catalogues of millions of items: candidates are searched, then scored exactly.

Items do not turn with the moment, so one index serves every t_now. It searches by inner product with the network's
output. A pulse adds what the index does not hold: everybody's counts at the moment, and the user's own items. So the
candidates of a user are the nearest items of the index, the most popular items of the moment, and the user's own
items. Counts of the items beyond the most popular hardly differ; among these the network decides.

What is lost is measured: `recall` compares with the exact ranking, `tune` searches more lists until enough is found.

Shapes: B users, V items (ids 1 .. V), E width, C candidates of a user, P popular items, N pairs of a user and a
candidate, K recommendations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.evaluate.ranking import Cells, TopK, dot_scores, top_k_among
from trope.models.pulse import OwnItems, Pulse
from trope.serve.histories import Histories, Ranking

if TYPE_CHECKING:
    from collections.abc import Iterator

WORTH_IT = 1_000_000
"""Items from which an index may be worth its losses; exact ranking is quick below."""
KINDS = ("faiss",)
CANDIDATES = 256  # of each user from the index
POPULAR = 1 << 14  # items of the moment that are always scored: 1.6 % of a million
TARGET = 0.99  # recall at which `tune` stops
_POINTS = 64  # of each list's centre, in training; more take longer and find the same
_SEARCHED = 16  # lists searched before `tune` says otherwise
_GATHERED = 1 << 25  # numbers of candidates' vectors held at a time


class Popular(NamedTuple):
    """Everybody's part of the score at one moment, and the items that are always scored."""

    scores_V: Tensor  # [V + 1]
    items_P: Tensor
    vectors_PE: Tensor
    place_V: Tensor  # of each item in items_P, -1 elsewhere


class ItemIndex:
    """Candidates by inner product, in lists around centres (IVF), with 8-bit numbers. Training is deterministic.

    vectors_VE: float32 [V + 1, E]; row 0 is padding.
    """

    def __init__(self, vectors_VE: Tensor) -> None:
        faiss = _faiss()
        self.vectors_VE = vectors_VE
        self.num_items = len(vectors_VE) - 1
        vectors = vectors_VE[1:].float().cpu().numpy()
        self.lists = max(1, min(round(4 * math.sqrt(self.num_items)), self.num_items // 39))  # 39 points a centre
        kind = f"IVF{self.lists},SQ8"
        self._index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        self._index.cp.max_points_per_centroid = _POINTS
        self._index.cp.min_points_per_centroid = 1  # it would warn of small catalogues
        self._index.train(vectors)
        self._index.add(vectors)
        self.searched = _SEARCHED
        self._popular: tuple[Tensor, float, Popular] | None = None

    @property
    def searched(self) -> int:
        """How many lists a search looks through."""
        return int(self._index.nprobe)

    @searched.setter
    def searched(self, lists: int) -> None:
        self._index.nprobe = max(1, min(lists, self.lists))

    def search(self, queries_BE: Tensor, count: int) -> Tensor:
        """The items with the largest inner products, about best first, [B, count]; 0 where none is found."""
        count = min(count, self.num_items)
        _, found = self._index.search(np.ascontiguousarray(queries_BE.float().cpu().numpy()), count)
        return torch.from_numpy(found + 1).to(queries_BE.device)

    def top_k(self, out_BE: Tensor, k: int, left_out: Cells) -> TopK:
        """The `k` best by the network alone."""
        nobody = torch.zeros(0, dtype=torch.int64, device=out_BE.device)
        return self._among(out_BE, k, left_out, Cells(nobody, nobody), out_BE.new_zeros(0), None)

    def top_k_live(
        self,
        pulse: Pulse,
        scaled_BE: Tensor,
        own: OwnItems,
        t_now_B: Tensor,
        shares_at: Callable[[Tensor], Iterable[Tensor]],
        horizon: float,
        k: int,
        left_out: Cells,
    ) -> TopK:
        """The `k` best by a model with a pulse; arguments as in `trope.evaluate.live.live_scores`."""
        own_C = pulse.of_own(own)
        cells = Cells(own.rows_C, own.items_C)
        items_BK = torch.zeros((len(t_now_B), k), dtype=torch.int64, device=t_now_B.device)
        scores_BK = torch.full((len(t_now_B), k), -torch.inf, device=t_now_B.device)
        moments_M, moment_B = torch.unique(t_now_B, return_inverse=True)
        for place, (shares_CV, moment) in enumerate(zip(shares_at(moments_M), moments_M, strict=True)):
            rows = torch.nonzero(moment_B == place).flatten()
            here, mine = _of_rows(cells, rows, len(t_now_B))
            _, seen = _of_rows(left_out, rows, len(t_now_B))
            popular = self._of_moment(pulse, shares_CV, moment, horizon)
            found = self._among(scaled_BE[rows], k, seen, mine, own_C[here], popular)
            items_BK[rows], scores_BK[rows] = found.items_BK, found.scores_BK
        return TopK(items_BK, scores_BK)

    def _of_moment(self, pulse: Pulse, shares_CV: Tensor, moment: Tensor, horizon: float) -> Popular:
        """What is popular; kept for the next batch, which asks with the same shares while the moment is the same."""
        kept = self._popular
        if kept is not None and kept[0] is shares_CV and kept[1] == horizon:
            return kept[2]
        scores_V = pulse.of_everybody(shares_CV, moment, horizon)
        items_P = scores_V[1:].topk(min(POPULAR, self.num_items)).indices + 1
        place_V = torch.full_like(scores_V, -1, dtype=torch.int64)
        place_V[items_P] = torch.arange(len(items_P), device=items_P.device)
        popular = Popular(scores_V, items_P, self.vectors_VE[items_P], place_V)
        self._popular = shares_CV, horizon, popular
        return popular

    def _among(
        self, out_BE: Tensor, k: int, left_out: Cells, own: Cells, own_C: Tensor, popular: Popular | None
    ) -> TopK:
        """The best of the candidates, scored exactly. own, own_C: pairs of a user and an item, and what they add."""
        B, size = len(out_BE), self.num_items + 1
        most_left_out = int(torch.bincount(left_out.rows, minlength=1).max())
        hits_BC = self.search(out_BE, max(CANDIDATES, 4 * k) + most_left_out)  # k are left in any case
        rows_BC = torch.arange(B, device=out_BE.device)[:, None].expand_as(hits_BC)
        own_keys_C, left_keys = (cells.rows * size + cells.items for cells in (own, left_out))
        keys_N = torch.unique(torch.cat(((rows_BC * size + hits_BC)[hits_BC > 0], own_keys_C)))
        if popular is not None:  # these are scored with the others of the moment
            keys_N = keys_N[popular.place_V[keys_N % size] < 0]
        rows_N, items_N = keys_N // size, keys_N % size
        scores_N = self._dots(out_BE, rows_N, items_N)
        if popular is not None:
            scores_N += popular.scores_V[items_N]
        here = torch.isin(own_keys_C, keys_N)
        scores_N[torch.searchsorted(keys_N, own_keys_C[here])] += own_C[here]
        scores_N[torch.isin(keys_N, left_keys)] = -torch.inf
        scores_BC, items_BC = _padded(rows_N, scores_N, items_N, B)
        if popular is None:
            return top_k_among(scores_BC, items_BC, k)
        tile_BP = dot_scores(out_BE, popular.vectors_PE)(0, len(popular.items_P)) + popular.scores_V[popular.items_P]
        places_C = popular.place_V[own.items]
        inside = places_C >= 0
        tile_BP.index_put_((own.rows[inside], places_C[inside]), own_C[inside], accumulate=True)
        places = popular.place_V[left_out.items]
        tile_BP[left_out.rows[places >= 0], places[places >= 0]] = -torch.inf
        items_BP = popular.items_P.expand(B, -1)
        return top_k_among(torch.cat((scores_BC, tile_BP), 1), torch.cat((items_BC, items_BP), 1), k)

    def _dots(self, out_BE: Tensor, rows_N: Tensor, items_N: Tensor) -> Tensor:
        """Inner products of some pairs, [N]."""
        most = max(1, _GATHERED // out_BE.shape[1])
        pairs = zip(rows_N.split(most), items_N.split(most), strict=True)
        return torch.cat([(out_BE[rows] * self.vectors_VE[items]).sum(1) for rows, items in pairs])


class Ranker(Protocol):
    """What is measured; `trope.serve.recommender.Recommender` is one."""

    index: ItemIndex | None

    def rank(self, histories: Histories, t_now: npt.NDArray[np.int64], k: int, filter_seen: str) -> Ranking:
        """The best items of each history."""


def recall(
    ranker: Ranker, histories: Histories, t_now: npt.NDArray[np.int64], k: int = 10, filter_seen: str = "none"
) -> float:
    """The share of the exact `k` best items that are found with the index."""
    found = _pairs(ranker.rank(histories, t_now, k, filter_seen))
    with _exactly(ranker):
        exact = _pairs(ranker.rank(histories, t_now, k, filter_seen))
    return len(found & exact) / len(exact)


def tune(
    ranker: Ranker, histories: Histories, t_now: npt.NDArray[np.int64], k: int = 10, filter_seen: str = "none"
) -> float:
    """Double the lists searched until the recall is `TARGET`, or all are searched; returns the recall reached.

    Measure it on other users: of those it was tuned for it is a little better than of all.
    """
    assert ranker.index is not None
    with _exactly(ranker):
        exact = _pairs(ranker.rank(histories, t_now, k, filter_seen))
    while True:
        found = len(_pairs(ranker.rank(histories, t_now, k, filter_seen)) & exact) / len(exact)
        if found >= TARGET or ranker.index.searched >= ranker.index.lists:
            return found
        ranker.index.searched *= 2


@contextmanager
def _exactly(ranker: Ranker) -> Iterator[None]:
    """Rank without the index for a while."""
    index, ranker.index = ranker.index, None
    try:
        yield
    finally:
        ranker.index = index


def _pairs(ranking: Ranking) -> set[tuple[int, int]]:
    return set(zip(ranking.rows.tolist(), ranking.items.tolist(), strict=True))


def _of_rows(cells: Cells, rows: Tensor, users: int) -> tuple[Tensor, Cells]:
    """Which pairs are of these users, and those pairs with users counted among `rows`."""
    place_B = torch.full((users,), -1, dtype=torch.int64, device=rows.device)
    place_B[rows] = torch.arange(len(rows), device=rows.device)
    here = torch.nonzero(place_B[cells.rows] >= 0).flatten()
    return here, Cells(place_B[cells.rows[here]], cells.items[here])


def _padded(rows_N: Tensor, scores_N: Tensor, items_N: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by user as matrices [B, C]; what fills them scores -inf."""
    counts_B = torch.bincount(rows_N, minlength=users)
    places_N = torch.arange(len(rows_N), device=rows_N.device) - (counts_B.cumsum(0) - counts_B)[rows_N]
    shape = (users, max(1, int(counts_B.max())))
    scores_BC = torch.full(shape, -torch.inf, device=rows_N.device)
    items_BC = torch.zeros(shape, dtype=torch.int64, device=rows_N.device)
    scores_BC[rows_N, places_N], items_BC[rows_N, places_N] = scores_N, items_N
    return scores_BC, items_BC


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError("index 'faiss' needs the package faiss, which is not installed; install trope[ann]") from None
    return faiss
