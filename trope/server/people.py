"""Each user's history: the dataset's events and those stored since, in order of time."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trope.data.catalogue import Catalogue
from trope.server.dataset import KnownUsers
from trope.server.schema import ItemId
from trope.server.store import Past, Store, Stored

Ints = npt.NDArray[np.int64]
_STEP = 128
HELD_BYTES = 512 << 20
"""Of histories."""
_OBJECTS = 1024
"""Bytes of a person without a single event: the objects, and the id in the cache."""


class Room:
    """Columns of numbers with room for an eighth more behind them, as in Python's lists.

    A server replaces arrays all day. New ones of every size would leave holes in the process's memory; rooms come in
    few sizes and are used again.
    """

    __slots__ = ("_array",)

    def __init__(self, columns: int, length: int) -> None:
        self._array = np.empty((columns, -(-(length + length // 8 + 1) // _STEP) * _STEP), np.int64)

    @property
    def num_bytes(self) -> int:
        """Of the array."""
        return self._array.nbytes

    def has(self, length: int) -> bool:
        """Whether so many numbers fit."""
        return length <= self._array.shape[1]

    def put(self, *columns: Ints) -> Ints:
        """The columns as one array in this room, [columns, length]; overwrites what was there."""
        return np.stack(columns, out=self._array[:, : len(columns[0])])

    def append(self, length: int, *values: int) -> Ints:
        """Numbers behind the first `length`, which stay; returns all."""
        self._array[:, length] = values
        return self._array[:, : length + 1]


@dataclass(slots=True, eq=False)
class Person:
    """A history: dense items and times, in order of time; position: of the last stored event that is in it.

    new: items that the model does not know, with the time of the first event of each.
    """

    items: Ints
    times: Ints
    position: int = 0
    is_known: bool = False  # whether there was any event at all, also with items that the model does not know
    is_kept: bool = True  # False for a history that came with a request, and goes with it
    new: dict[ItemId, int] = field(default_factory=dict)
    _room: Room | None = field(default=None, repr=False)  # of items and times, which begin there
    _own: Ints | None = field(default=None, repr=False)
    _own_room: Room | None = field(default=None, repr=False)
    _last: int = field(init=False, repr=False)
    counted: int = field(default=0, repr=False)  # bytes of it in the sum of `People`
    has_grown: bool = field(default=False, repr=False)  # `own` has taken room since

    def __post_init__(self) -> None:
        self._last = int(self.times[-1]) if len(self.times) else 0

    @property
    def num_bytes(self) -> int:
        """That this person holds."""
        rooms = sum(room.num_bytes for room in (self._room, self._own_room) if room is not None)
        new = sum(sys.getsizeof(item) + sys.getsizeof(time) for item, time in self.new.items())
        return _OBJECTS + rooms + sys.getsizeof(self.new) + new

    def own(self, length: int) -> Ints:
        """The first `length` events by item, [3, C]: distinct items in order of id, how often each was chosen, and when
        last. Those of the whole history are kept."""
        if length == len(self.items) and self._own is not None:
            return self._own
        # In reverse, the first place of an item is that of its last event.
        items, places, counts = np.unique(self.items[:length][::-1], return_index=True, return_counts=True)
        columns = items, counts, self.times[length - 1 - places]
        if length < len(self.items):
            return np.stack(columns)
        if not self.is_kept:
            self._own = np.stack(columns)
            return self._own
        if self._own_room is None or not self._own_room.has(len(items)):
            self._own_room, self.has_grown = Room(3, len(items)), True
        self._own = self._own_room.put(*columns)
        return self._own

    @property
    def last(self) -> int:
        """Time of the last event, 0 without one; of an item that the model does not know, that of its first event."""
        return max(self._last, max(self.new.values(), default=0))

    def until(self, moment: int) -> int:
        """How many events happened up to a moment; one of this very second has happened."""
        return len(self.times) if moment >= self._last else int(np.searchsorted(self.times, moment, side="right"))

    def joined(self, items: Ints, times: Ints, position: int, most: int) -> Person:
        """The person that takes this one's place, with new events behind those of the same time; at most `most`.

        This one is not to be used any more: its arrays may be used for the new one.
        """
        length, is_later = len(self.times), len(times) == 0 or (len(times) == 1 and int(times[0]) >= self._last)
        if is_later and self._room is not None and length + len(times) <= most and self._room.has(length + len(times)):
            if len(times):
                items, times = self._room.append(length, int(items[0]), int(times[0]))
            else:
                items, times = self.items, self.times
            return Person(items, times, position, True, new=self.new, _room=self._room, _own_room=self._own_room)
        times, items = np.concatenate((self.times, times)), np.concatenate((self.items, items))
        if len(times) > 1 and (np.diff(times) < 0).any():
            order = np.argsort(times, kind="stable")
            times, items = times[order], items[order]
        return Person.in_room(items[-most:], times[-most:], position, True, self._own_room, self.new)

    @classmethod
    def in_room(
        cls,
        items: Ints,
        times: Ints,
        position: int = 0,
        is_known: bool = False,
        own_room: Room | None = None,
        new: dict[ItemId, int] | None = None,
    ) -> Person:
        """A person who is kept, and to whose history events may be added."""
        room = Room(2, len(items))
        items, times = room.put(items, times)
        return cls(items, times, position, is_known, new=new or {}, _room=room, _own_room=own_room)

    def note_new(self, items: Sequence[ItemId], times: Iterable[int], most: int) -> None:
        """Keep items that the model does not know, at most `most` of them."""
        for item, time in zip(items, times, strict=True):
            self.new[item] = min(time, self.new.get(item, time))
        while len(self.new) > most:
            del self.new[next(iter(self.new))]


class People:
    """Histories of users, the most recently asked ones in memory. Used by one thread.

    Args:
        store: of the events that came in.
        catalogue: of the model.
        known: the dataset's users, where there is a dataset.
        most: events of a history; the last ones are kept.
        cached: users in memory; those of the last batch may come on top.
        most_bytes: that their histories may take; those of the last batch may come on top.
        on_let_go: called with a person who left memory; what is remembered of a history belongs to the object.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        known: KnownUsers | None,
        most: int,
        cached: int = 20_000,
        most_bytes: int = HELD_BYTES,
        on_let_go: Callable[[Person], None] = lambda _: None,
    ) -> None:
        self.store, self.catalogue, self.known, self.most, self.cached = store, catalogue, known, most, cached
        self.most_bytes, self.on_let_go = most_bytes, on_let_go
        self._cache: OrderedDict[str, Person] = OrderedDict()
        self._bytes = 0  # of all persons in the cache
        self._asked: Sequence[str] = ()  # of the last batch: `Person.own` may have taken room since they were counted

    def get(self, users: Sequence[str]) -> list[Person]:
        """The histories of some users; an unknown user's is empty."""
        self._let_go()
        missing = [user for user in dict.fromkeys(users) if user not in self._cache]
        if missing:
            for user, stored in zip(missing, self.store.histories(missing, self.most), strict=True):
                self._cache[user] = self._load(user, stored)
                self._count(self._cache[user])
        found = [self._cache[user] for user in users]
        for user in users:
            self._cache.move_to_end(user)
        self._asked = users
        return found

    def of(self, history: Sequence[tuple[ItemId, int]]) -> Person:
        """A history that came with a request; items that the model does not know are left out."""
        items = self.catalogue.dense([item for item, _ in history])
        times = np.fromiter((time for _, time in history), np.int64, len(history))
        person = Person(items[items > 0], times[items > 0], is_known=bool(history), is_kept=False)
        unknown = np.flatnonzero(items == 0).tolist()
        person.note_new([history[place][0] for place in unknown], times[unknown].tolist(), self.most)
        return person

    def add(self, event: Stored) -> Person | None:
        """Take a new event into its user's history, if that is in memory and has not got it yet.

        Returns the person that was replaced: what is remembered of a history belongs to the object.
        """
        person = self._cache.get(event.user)
        if person is None or event.position <= person.position:
            return None
        if self.known is not None and event.time <= person.last and event.time <= self.known.last(event.user):
            return self._without(event.user)  # the dataset may hold it: `_load` compares them
        joined = self._joined(person, [Past(event.position, event.item, event.time)])
        joined.counted, self._cache[event.user] = person.counted, joined
        self._count(joined)
        if self._bytes > self.most_bytes:  # events may come for hours without a question
            self._let_go()
        return person

    def _let_go(self) -> None:
        """Keep within the limits. Not before the batch has been answered: the encoder meets its persons until then."""
        for user in self._asked:
            person = self._cache.get(user)
            if person is not None and person.has_grown:
                self._count(person)
        while len(self._cache) > self.cached or self._bytes > self.most_bytes:
            self.on_let_go(self._without(next(iter(self._cache))))

    def _count(self, person: Person) -> None:
        """Bring the sum up to date with what a person holds now."""
        before, person.counted, person.has_grown = person.counted, person.num_bytes, False
        self._bytes += person.counted - before

    def _without(self, user: str) -> Person:
        person = self._cache.pop(user)
        self._bytes -= person.counted
        return person

    def _load(self, user: str, stored: list[Past]) -> Person:
        items, times = (np.empty(0, np.int64),) * 2 if self.known is None else self.known.history(user, self.most)
        person = Person.in_room(items, times, is_known=len(items) > 0)
        if not stored:
            return person
        person = self._joined(person, _not_among(stored, items, times, self.catalogue))
        person.position = stored[-1].position  # also where the dataset holds the last one
        return person

    def _joined(self, person: Person, new: Sequence[Past]) -> Person:
        """The history with new events behind those of the same time."""
        items = self.catalogue.dense([event.item for event in new])
        times = np.fromiter((event.time for event in new), np.int64, len(new))
        position = max((event.position for event in new), default=person.position)
        unknown = np.flatnonzero(items == 0).tolist()
        if unknown:
            person.note_new([new[place].item for place in unknown], times[unknown].tolist(), self.most)
        return person.joined(items[items > 0], times[items > 0], position, self.most)


def _not_among(stored: list[Past], items: Ints, times: Ints, catalogue: Catalogue) -> list[Past]:
    """Stored events that the dataset does not hold: a model that learned them brings them along in its dataset."""
    if not len(times) or min(event.time for event in stored) > times[-1]:
        return stored
    there = Counter(zip(items.tolist(), times.tolist(), strict=True))
    left = []
    for event, item in zip(stored, catalogue.dense([event.item for event in stored]).tolist(), strict=True):
        if there[item, event.time] > 0:
            there[item, event.time] -= 1
        else:
            left.append(event)
    return left
