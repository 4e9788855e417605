"""`Recommender`: takes histories and a moment `t_now`, gives the best items of the whole catalogue.

Scores are cosines, or with a pulse cosines, everybody's counts and the user's own items; computed for every item. Equal
scores are ordered by item, so the same call gives the same answer.

Shape letters: B batch, L positions, E width, V items, T jagged events, K recommendations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.catalogue import Catalogue
from trope.data.windows import flatten_ranges, last_events, seen_counts
from trope.devices import choose_device, on_own_gpu
from trope.evaluate.evaluation import fitted_pulse
from trope.evaluate.live import live_scores, users_at_a_time
from trope.evaluate.ranking import Cells, TopK, check_finite, top_k, top_k_of, users_together
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.memory import Memory
from trope.models.pretrained import find_folder
from trope.models.pulse import own_items
from trope.models.recommender import SequentialRecommender
from trope.rotary.checks import check_choice, check_time_values
from trope.runs import BEST, CATALOGUE
from trope.serve.checks import check_filled, check_request, check_values, refuse_past
from trope.serve.counted import COUNTS, MODEL, CountScores, SharesAt
from trope.serve.forks import note_threads, refuse_fork
from trope.serve.frames import (
    NAME,
    SOURCE,
    Events,
    column_per_user,
    moments_per_user,
    read_events,
    refuse_unknown,
    write_recommendations,
)
from trope.serve.histories import Histories, Ranking, listed
from trope.serve.index import KINDS, ItemIndex
from trope.serve.lists import LeftOut, known_items, ranked_items
from trope.serve.moments import MomentRanking, encode_last, rank_moments
from trope.serve.publish import push, save
from trope.times import Moment

__all__ = ["Histories", "Ranking", "Recommender"]


class Recommender:
    """A trained model with its catalogue, ready to answer.

    Args:
        model: the trained network.
        catalogue: original ids and names of its items.
        device: where to compute; auto takes a GPU where there is one.
        index: `faiss` ranks candidates of an approximate index, for millions of items (`trope.serve.index`); None ranks
            every item. Lists to allow or deny are always answered from every item.

    `live` has everybody's counts, for a model with a pulse. It may be replaced, to ask as if it were another day.
    """

    def __init__(
        self, model: SequentialRecommender, catalogue: Catalogue, device: str = "auto", index: str | None = None
    ) -> None:
        if len(catalogue) != model.num_items:
            raise ValueError(
                f"the catalogue has {len(catalogue):,} items, the model {model.num_items:,}; they are of different runs"
            )
        self.device = choose_device(device)
        refuse_fork(self.device)
        note_threads()
        self.model = model.to(self.device).eval()
        self.catalogue = catalogue
        with torch.inference_mode():
            self._vectors_VE = self.model.item_vectors()
        check_finite(self._vectors_VE, "item vectors")
        self._pulse = fitted_pulse(self.model)
        self.live = None if self._pulse is None else self._pulse.kept()
        self._shares = SharesAt()
        if index is not None:
            check_choice("index", index, KINDS)
        self.index = None if index is None else ItemIndex(self._vectors_VE)

    @property
    def vectors_VE(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0 is padding."""
        return self._vectors_VE

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        device: str = "auto",
        revision: str | None = None,
        verify: bool = True,
        index: str | None = None,
    ) -> Recommender:
        """Open a run made by `trope train`, or a folder with a model and its catalogue; nothing is unpickled.

        source: the folder, or a repository on the Hugging Face hub, "hf://owner/name", with `revision`.
        verify: compare the weights with their SHA-256, which reads the file once more.
        """
        folder = find_folder(source, revision)
        best = folder / BEST
        model = SequentialRecommender.from_pretrained(best if best.is_dir() else folder, verify=verify)
        return cls(model, Catalogue.load(folder / CATALOGUE), device, index)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model, catalogue and a model card, which `from_pretrained` reads; the folder appears when it is whole.

        folder: a new one, an empty one, or one that this method made, which is replaced.
        """
        save(self.model, self.catalogue, Path(folder))

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool = True,
        revision: str | None = None,
        message: str = "Model and catalogue by trope",
        token: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub; returns the address of the commit.

        repo: "owner/name", also as "hf://owner/name"; made if it does not exist. The catalogue goes along: everybody
            who may read the repository sees the items' ids and names, and how often each was chosen.
        private: whether a new repository is; an old one stays as it is. revision: a branch, the main one by default.
        token: of the hub; without one that of `hf auth login`.
        """
        return push(self.model, self.catalogue, repo, private, revision, message, token)

    def recommend(
        self,
        events: Any,
        t_now: Moment | Mapping[int | str, Moment],
        k: int = 10,
        filter_seen: str = "none",
        *,
        unknown_items: str = "refuse",
        on_unknown: str = "refuse",
        allow_past: bool = False,
        within: int = 0,
        allow: Iterable[int | str] | None = None,
        deny: Iterable[int | str] | None = None,
    ) -> Any:
        """The `k` best items of each user at `t_now`: a DataFrame of the events' kind (user_id, item_id, score, rank).

        A column `name` follows where the catalogue has names, and with `on_unknown="counts"` a column `source`.

        Args:
            events: pandas or polars DataFrame or Arrow table with user_id, item_id and timestamp (whole Unix seconds,
                or datetimes, UTC where they have no zone), in any order; the model looks at a user's last `max_len`.
            t_now: ISO 8601 with a zone, a plain date (its midnight UTC), Unix seconds, or a datetime with a zone; or
                one for each user, as a mapping or as the name of a column of `events`.
            k: recommendations per user; fewer where the catalogue has not that many left.
            filter_seen: leave out `none`, the items of the `window` looked at, or of the whole `history`.
            unknown_items: `refuse` events with items the model does not know, or `drop` them.
            on_unknown: `refuse` users without an event with a known item, or answer them from `counts` of what
                everybody chooses; unknown items are then dropped. The column `source` says who answered: model, counts.
            allow_past: accept a `t_now` before a user's last event.
            within: seconds from `t_now` that the answer is for; 0 asks for what is chosen then. Tells a difference only
                with a pulse that a holdout's window has fitted.
            allow, deny: item ids; only those of `allow` are ranked, and none of `deny`. Ids that the model does not
                know are ignored; an `allow` without a known item is refused.
        """
        check_choice("unknown_items", unknown_items, ("refuse", "drop"))
        check_choice("on_unknown", on_unknown, ("refuse", COUNTS))
        table = read_events(events, self.catalogue.is_text)
        if isinstance(t_now, str) and t_now in table.frame.columns:
            t_now = column_per_user(table, t_now)
        moments = np.array(moments_per_user(t_now, table.users), np.int64)
        lists = [known_items(self.catalogue, x, name) for x, name in ((allow, "allow"), (deny, "deny"))]
        histories = self._histories(table, unknown_items == "drop", on_unknown == COUNTS)
        histories = check_values(histories, moments, self.model.num_items)
        if not allow_past:
            refuse_past(table.users, histories, moments)
        ranking = self._rank(histories, moments, k, filter_seen, within, *lists)
        items = self.catalogue.originals(ranking.items)
        names = self.catalogue.names(ranking.items)
        more: dict[str, list[str]] = {} if names is None else {NAME: names}
        if on_unknown == COUNTS:
            more[SOURCE] = np.where(np.diff(histories.offsets) > 0, MODEL, COUNTS)[ranking.rows].tolist()
        return write_recommendations(table, ranking, items, more, self.catalogue.is_text)

    def observe(self, events: Any) -> int:
        """Count new events of anybody, each once: a model with a pulse then knows what is popular now.

        events: as for `recommend`. Returns how many were counted: items that the model does not know are not, nor is
        anything by a model without a pulse.
        """
        if self.live is None:
            return 0
        table = read_events(events, self.catalogue.is_text, may_be_empty=True)
        dense = self.catalogue.dense(table.items)
        known = dense > 0
        items, times = (torch.from_numpy(x[known]).to(self.device) for x in (dense, table.times))
        if not len(items):
            return 0
        check_time_values(times)
        self.live.add(items, times)
        return len(items)

    def rank(
        self,
        histories: Histories,
        t_now: npt.NDArray[np.int64],
        k: int = 10,
        filter_seen: str = "none",
        within: int = 0,
        *,
        allow: npt.ArrayLike | None = None,
        deny: npt.ArrayLike | None = None,
    ) -> Ranking:
        """The `k` best items of each history, as arrays with dense ids.

        t_now: [B] Unix seconds, one for each history; it may lie before the history's last event. within: as for
            `recommend`. allow, deny: the same with dense ids; others than 1 .. V are refused.
        """
        if np.shape(t_now) != (len(histories.offsets) - 1,):
            raise ValueError(
                f"t_now must have one moment for each of {len(histories.offsets) - 1:,} histories, got shape "
                f"{np.shape(t_now)}; repeat a moment that is the same for all"
            )
        check_filled(histories)
        histories = check_values(histories, t_now, self.model.num_items)
        return self._rank(histories, t_now.astype(np.int64, copy=False), k, filter_seen, within, allow, deny)

    @on_own_gpu
    def remember(self, histories: Histories) -> Memory:
        """The last `max_len` events of each history, encoded once: for `rank_moments`, and to be continued."""
        histories = check_values(histories, None, self.model.num_items)
        check_filled(histories)
        items, times, offsets = (torch.from_numpy(x) for x in histories)
        width = min(self.model.config.model.max_len, int(offsets.diff().max()))
        history = last_events(items, times, offsets[:-1], offsets[1:], width)
        return self.model.remember(*(x.to(self.device) for x in history))

    @on_own_gpu
    def rank_moments(
        self,
        histories: Histories,
        moments_BM: npt.NDArray[np.int64],
        k: int = 10,
        filter_seen: str = "none",
        within: int = 0,
        memory: Memory | None = None,
    ) -> MomentRanking:
        """The `k` best items of each history at each of its moments, as `rank` gives them for one moment each.

        A history is encoded once for all its moments, unless the model has blocks that cannot remember.

        moments_BM: Unix seconds; they may lie before the history's last event. within: as for `recommend`.
        memory: of these histories, where the caller has kept it: from `remember`, continued by `Memory.append`.
        """
        refuse_fork(self.device)
        histories = check_values(histories, None, self.model.num_items)
        check_filled(histories)
        check_request(k, filter_seen, within)
        return rank_moments(self, histories, moments_BM, min(k, len(self.catalogue)), filter_seen, within, memory)

    @on_own_gpu
    def _rank(
        self,
        histories: Histories,
        t_now: npt.NDArray[np.int64],
        k: int,
        filter_seen: str,
        within: int,
        allow: npt.ArrayLike | None,
        deny: npt.ArrayLike | None,
    ) -> Ranking:
        """The best items of each history; one without events is answered from counts."""
        refuse_fork(self.device)
        check_request(k, filter_seen, within)
        k, ranked_V = min(int(k), len(self.catalogue)), ranked_items(allow, deny, len(self.catalogue), self.device)
        lengths = np.diff(histories.offsets)
        asked, others = np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
        own = histories._replace(offsets=np.append(histories.offsets[:-1][asked], histories.offsets[-1]))
        parts = []
        if len(asked):
            batches = self._rank_batches(own, t_now[asked], k, filter_seen, within, ranked_V)
            parts = [part._replace(rows=asked[part.rows]) for part in batches]
        if len(others):
            part = self.rank_by_counts(t_now[others], k, within, ranked_V)
            parts.append(part._replace(rows=others[part.rows]))
        rows, *columns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(rows, kind="stable")
        return Ranking(rows[order], *(x[order] for x in columns))

    @on_own_gpu
    @torch.inference_mode()
    def rank_by_counts(
        self, t_now: npt.NDArray[np.int64], k: int, within: int = 0, ranked_V: Tensor | None = None
    ) -> Ranking:
        """The `k` best items at each moment for somebody unknown. ranked_V: as in `LeftOut`."""
        horizon = 0.0 if self._pulse is None else self._pulse.horizon(within)
        scores = CountScores(self._pulse, self._shares_at, self.catalogue)
        return listed(scores.best(t_now, k, ranked_V, horizon, self.device), np.arange(len(t_now)))

    def _histories(self, events: Events, drop: bool, keep_empty: bool) -> Histories:
        """Each user's known events in order of time; equal times keep the table's order.

        keep_empty: whether a user may have none; unknown items are then dropped.
        """
        dense = self.catalogue.dense(events.items)
        order = np.lexsort((events.ticks, events.rows))
        if (dense == 0).any():
            if not (drop or keep_empty):
                refuse_unknown(events, dense, len(self.catalogue))
            order = order[dense[order] > 0]
        counts = np.bincount(events.rows[order], minlength=len(events.users))
        if counts.min() == 0 and not keep_empty:
            lost = events.users[int(counts.argmin())]
            raise ValueError(
                f"user {lost!r} has no event with a known item; leave such users out of events, or pass "
                "on_unknown='counts'"
            )
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Histories(dense[order], events.times[order], offsets)

    @torch.inference_mode()
    def _rank_batches(
        self,
        histories: Histories,
        t_now: npt.NDArray[np.int64],
        k: int,
        filter_seen: str,
        within: int,
        ranked_V: Tensor | None,
    ) -> Iterator[Ranking]:
        items, times, offsets = (torch.from_numpy(x) for x in histories)
        for rows in torch.arange(len(t_now)).split(self.rows_at_a_time):
            begins, ends = offsets[rows], offsets[rows + 1]
            width = min(self.model.config.model.max_len, int((ends - begins).max()))
            history = last_events(items, times, begins, ends, width)
            seen = flatten_ranges(ends - seen_counts(ends - begins, width, filter_seen), ends)
            cells = Cells(seen.rows_T.to(self.device), items[seen.places_T].long().to(self.device))
            whole = None
            if self.live is not None:  # else nobody reads more than the network looks at
                events = flatten_ranges(begins, ends)
                whole = items[events.places_T], times[events.places_T], events.offsets_B
            t_now_B = torch.from_numpy(t_now[rows.numpy()]).to(self.device)
            out_BE = encode_last(self.model, *(x.to(self.device) for x in (*history, t_now_B)))
            yield listed(self.best_of(out_BE, whole, t_now_B, k, LeftOut(cells, ranked_V), within), rows.numpy())

    @property
    def rows_at_a_time(self) -> int:
        """How many pairs of a history and a moment are ranked together."""
        num_items = self.model.num_items
        return users_at_a_time(num_items, USERS_AT_A_TIME) if self._pulse else users_together(num_items, self.device)

    def best_of(
        self,
        out_BE: Tensor,
        whole: tuple[Tensor, Tensor, Tensor] | None,
        t_now_B: Tensor,
        k: int,
        left_out: LeftOut,
        within: int,
    ) -> TopK:
        """The best items by the network's outputs, and by the pulse.

        whole: all events of the histories as items, times and offsets; the pulse needs them.
        """
        check_finite(out_BE, "outputs")
        index = self.index if left_out.ranked_V is None else None
        if self._pulse is None or self.live is None:
            if index is not None:
                return index.top_k(out_BE, k, left_out.cells)
            return top_k(out_BE, self._vectors_VE, k, left_out)
        assert whole is not None
        items, times, offsets = (x.to(self.device) for x in whole)
        own = own_items(items, times, offsets, t_now_B, self._pulse.half_lives, self.model.num_items)
        horizon = self._pulse.horizon(within)
        scaled_BE = self._pulse.scale(out_BE, offsets.diff(), t_now_B, horizon)
        if index is not None:
            return index.top_k_live(self._pulse, scaled_BE, own, t_now_B, self._shares_at, horizon, k, left_out.cells)
        scores = live_scores(self._pulse, scaled_BE, self._vectors_VE, own, t_now_B, self._shares_at, horizon)
        return top_k_of(scores, len(t_now_B), self.model.num_items, self.device, k, left_out)

    def _shares_at(self, moments: Tensor) -> Iterator[Tensor]:
        assert self.live is not None
        return self._shares(self.live, moments)
