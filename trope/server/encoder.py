"""Vectors of histories at moments. The one place where the server runs the network.

A model that remembers histories (`model.remember`, `Memory.look`) encodes a history once and looks at it from every
moment. Its memories are kept while there is room. A history that is asked for once, at one moment, is encoded with the
others of its batch; the second time, or with several moments, it is remembered. Other models encode every row.

Shapes: N rows (a history and a moment each), M moments, L positions, E width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trope.data.windows import last_events
from trope.evaluate.ranking import check_finite
from trope.models.memory import Memory
from trope.models.recommender import SequentialRecommender
from trope.server.people import Person

KEPT_BYTES = 512 << 20
"""Of memories."""
TOGETHER_BYTES = 64 << 20
"""Of memories that are looked at together; a batch that needs more is looked at in parts."""
KEPT_SEEN = 20_000
"""Persons of whom it is known that they were asked for once."""


class Cut(NamedTuple):
    """The first `length` events of a person, at least one."""

    person: Person
    length: int


class Rows(NamedTuple):
    """N rows to score: places in `cuts`, and Unix seconds."""

    cuts: Sequence[Cut]
    cut_N: Sequence[int]
    moments_N: Sequence[int]


class Encoder:
    """Runs one model. Used by one thread.

    most_bytes: that memories may take between two batches. most_together: that they may take beyond this within one;
    the last memory may reach over it.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        device: torch.device,
        most_bytes: int = KEPT_BYTES,
        most_together: int = TOGETHER_BYTES,
    ) -> None:
        self.model, self.device, self.most_bytes, self.most_together = model, device, most_bytes, most_together
        self.can_remember = model.can_remember
        self._memories: OrderedDict[Person, dict[int, Memory]] = OrderedDict()  # by length
        self._seen: OrderedDict[Person, set[int]] = OrderedDict()  # lengths that were asked for once
        # Memories that are not used any more, by size: new ones take their room. Memories that come and go on the heap
        # leave holes in it, and the process grows by a fifth within half an hour. A new room is made only once those
        # of other sizes have gone: rooms of histories that grew out of them would stay for good.
        self._rooms: dict[int, list[Memory]] = {}
        self._bytes = 0  # of memories and rooms

    def vectors(self, rows: Rows) -> Tensor:
        """Unit vectors, float32 [N, E]."""
        places: dict[tuple[int, int], int] = {}  # a history at a moment is computed once, whoever asks for it
        place_N = [places.setdefault(pair, len(places)) for pair in zip(rows.cut_N, rows.moments_N, strict=True)]
        if len(places) < len(place_N):
            return self.vectors(Rows(rows.cuts, *zip(*places, strict=True)))[torch.tensor(place_N, device=self.device)]
        out_NE = self._looked_at(rows) if self.can_remember else self._encoded(rows)
        check_finite(out_NE, "outputs")
        return out_NE

    def _encoded(self, rows: Rows) -> Tensor:
        """Every row anew, padded to the longest."""
        most = self.model.config.model.max_len
        windows = [slice(max(0, length - most), length) for _, length in rows.cuts]
        pairs = list(zip(rows.cuts, windows, strict=True))
        items_T = torch.from_numpy(np.concatenate([cut.person.items[window] for cut, window in pairs]))
        times_T = torch.from_numpy(np.concatenate([cut.person.times[window] for cut, window in pairs]))
        lengths = torch.tensor([window.stop - window.start for window in windows])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        cut_N = torch.tensor(rows.cut_N)
        history = last_events(items_T, times_T, offsets[cut_N], offsets[cut_N + 1], int(lengths.max()))
        moments_N = torch.tensor(rows.moments_N)
        return self.model.encode_last(*(x.to(self.device) for x in (*history, moments_N))).float()

    def _looked_at(self, rows: Rows) -> Tensor:
        """From memory where there is one, or will be; the rest encoded."""
        places: list[list[int]] = [[] for _ in rows.cuts]  # of each cut, its rows
        for row, place in enumerate(rows.cut_N):
            places[place].append(row)
        cold: list[int] = []
        together: dict[int, Memory] = {}
        parts: list[Tensor] = []
        order: list[int] = []
        held = 0
        for place, cut in enumerate(rows.cuts):
            memory = self._memory(cut, len(places[place]))
            if memory is None:
                cold.append(place)
                continue
            together[place], held = memory, held + memory.num_bytes
            if held >= self.most_together:
                self._look(rows, places, together, parts, order)
                together, held = {}, 0
        self._look(rows, places, together, parts, order)
        if cold:
            asked = [row for place in cold for row in places[place]]
            new = {place: each for each, place in enumerate(cold)}
            parts.append(
                self._encoded(
                    Rows(
                        [rows.cuts[place] for place in cold],
                        [new[rows.cut_N[row]] for row in asked],
                        [rows.moments_N[row] for row in asked],
                    )
                )
            )
            order += asked
        out_NE = parts[0] if len(parts) == 1 else torch.cat(parts)
        if order == list(range(len(order))):
            return out_NE
        return out_NE[torch.tensor(order, device=out_NE.device).argsort()]

    def _look(
        self, rows: Rows, places: list[list[int]], together: dict[int, Memory], parts: list[Tensor], order: list[int]
    ) -> None:
        """Look at the memories of some cuts; adds vectors to `parts`, and to `order` the rows that they are of."""
        by_count: dict[int, list[int]] = {}  # memories with as many moments are looked at together
        for place in together:
            by_count.setdefault(len(places[place]), []).append(place)
        for group in by_count.values():
            # Joined even if it is one: a memory keeps what it forms for a look, and would grow on the heap.
            memory = Memory.join([together[place] for place in group])
            moments_BM = torch.tensor([[rows.moments_N[row] for row in places[place]] for place in group])
            parts.append(memory.look(moments_BM).flatten(0, 1).float())
            order += [row for place in group for row in places[place]]
        # Not before: the room of a memory that is let go of is taken by the next one, and then holds another history.
        while self._bytes > self.most_bytes:
            if not self._rooms:
                self.forget(next(iter(self._memories)))  # the one that was asked for the longest time ago
            self._drop_room()

    def forget(self, person: Person) -> None:
        """Let go of what is kept for a person that has been replaced."""
        self._seen.pop(person, None)
        for memory in self._memories.pop(person, {}).values():
            self._rooms.setdefault(memory.num_bytes, []).append(memory)

    def _memory(self, cut: Cut, moments: int) -> Memory | None:
        """The memory of a history; None where it is not worth one yet."""
        person, length = cut
        found = self._memories.get(person, {}).get(length)
        if found is None and moments == 1 and self._is_first(cut):
            return None
        if found is None:
            found = self._remember(cut)
            if not person.is_kept:
                return found
            self._keep(found)
            self._memories.setdefault(person, {})[length] = found
        self._memories.move_to_end(person)
        return found

    def _keep(self, memory: Memory) -> None:
        """Put a memory where another one was, if there is such a room."""
        rooms = self._rooms.get(memory.num_bytes)
        if rooms is None:
            wanted = self._bytes - memory.num_bytes
            while self._rooms and self._bytes > wanted:
                self._drop_room()
            memory.move_apart()
            self._bytes += memory.num_bytes
            return
        memory.move_into(rooms.pop())
        if not rooms:
            del self._rooms[memory.num_bytes]

    def _drop_room(self) -> None:
        size, rooms = next(iter(self._rooms.items()))
        rooms.pop()
        self._bytes -= size
        if not rooms:
            del self._rooms[size]

    def _is_first(self, cut: Cut) -> bool:
        """Whether this history is asked for the first time, as far as is known."""
        if not cut.person.is_kept:
            return True
        lengths = self._seen.setdefault(cut.person, set())
        if cut.length in lengths:
            return False
        lengths.add(cut.length)
        if len(self._seen) > KEPT_SEEN:
            self._seen.popitem(last=False)
        return True

    def _remember(self, cut: Cut) -> Memory:
        window = slice(max(0, cut.length - self.model.config.model.max_len), cut.length)
        items_1L, times_1L = (torch.from_numpy(x[window])[None] for x in (cut.person.items, cut.person.times))
        return self.model.remember(
            *(x.to(self.device) for x in (items_1L, times_1L, torch.tensor([items_1L.shape[1]])))
        )
