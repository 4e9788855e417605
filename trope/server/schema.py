"""What a client may send: events and questions, read from JSON and checked. Each refusal is one line.

Written by hand instead of with a validation library: this is the hot path, and the messages name the entry.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson
import torch

from trope.data.windows import FILTERS
from trope.rotary.checks import LATEST_TIME, check_time_values
from trope.server.limits import Limits
from trope.server.refusal import Refused
from trope.times import DAY, parse_moment, say_moment

ItemId = int | str
_EVENT_KEYS = frozenset(("user_id", "item_id", "timestamp", "event_id"))
_HISTORY_KEYS = frozenset(("item_id", "timestamp"))
_QUESTION_KEYS = frozenset((
    "user_id", "history", "moment", "moments", "history_until", "k", "allow", "deny", "filter_seen", "explain",
    "new_items",
))  # fmt: skip
_ARM_KEY = frozenset(("arm",))
_MOST_INT = 2**63 - 1
_INTEGER = re.compile("-?[0-9]{1,19}")
_SHOWN = 60


class Event(NamedTuple):
    """One event as it is stored. Users are compared as text, so 7 and "7" are one user."""

    user: str
    item: ItemId
    time: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What one user, or one history, is to be recommended."""

    user: str | None
    history: Sequence[tuple[ItemId, int]] | None  # in order of time
    moments: Sequence[int]
    is_sweep: bool = False  # whether the client gave a list of moments
    is_now: bool = False  # whether the client gave no moment
    history_until: int | None = None
    k: int = 10
    filter_seen: str = "none"
    allow: Sequence[ItemId] | None = None
    deny: Sequence[ItemId] = ()
    explain: bool = False
    attention: bool = False  # whether `explain` also tells which events the model looked at
    new_items: bool = False
    arm: str | None = None  # of an experiment, where the client names one


class Reader:
    """Reads bodies for one catalogue.

    Args:
        text_items: whether item ids are text; integers otherwise.
        limits: how much is accepted.
        has_arms: whether a question may name an arm.
    """

    def __init__(self, text_items: bool, limits: Limits, has_arms: bool = False) -> None:
        self.text_items, self.limits = text_items, limits
        self._question_keys = _QUESTION_KEYS | _ARM_KEY if has_arms else _QUESTION_KEYS

    def events(self, body: bytes) -> list[Event]:
        """The events of a post, `{"events": [...]}`."""
        content = _mapping(_parse(body), "the body")
        _known(content, frozenset(("events",)), "the body")
        rows = _list(content.get("events"), "events", self.limits.events)
        # A clock that runs ahead would make everybody's counts old at once.
        latest = int(time.time()) + DAY
        found = [self._event(row, f"events[{place}]", latest) for place, row in enumerate(rows)]
        if not found:
            raise Refused("events is empty; send at least one event")
        return found

    def questions(self, body: bytes) -> tuple[list[Question], bool]:
        """The questions of a body, one or a list of them, and whether it was a list."""
        content = _parse(body)
        if isinstance(content, list):
            rows = _list(content, "the body", self.limits.questions)
            found = [self._question(row, f"question {place}") for place, row in enumerate(rows)]
            if not found:
                raise Refused("the body is an empty list; send at least one question")
        else:
            found = [self._question(content, "the question")]
        rows_asked = sum(len(question.moments) for question in found)
        if rows_asked > self.limits.rows:
            raise Refused(f"a body may ask for {self.limits.rows:,} moments in all, got {rows_asked:,}; send several")
        self.check_size(found)
        explained = [question for question in found if question.explain]
        if explained and sum(len(question.moments) for question in explained) <= self.limits.looks:
            found = [replace(question, attention=question.explain) for question in found]
        return found, isinstance(content, list)

    def check_size(self, questions: Sequence[Question]) -> None:
        """Refuse what would keep everybody else waiting."""
        listed = sum(len(question.moments) * question.k for question in questions)
        if listed > self.limits.listed:
            raise Refused(
                f"moments times k may be {self.limits.listed:,} in one body, got {listed:,}; ask for fewer, or send "
                "several bodies"
            )
        new = sum(len(question.moments) for question in questions if question.new_items)
        if new > self.limits.new_items:
            raise Refused(
                f"new_items may be asked for at {self.limits.new_items} moments in one body, got {new:,}; send several "
                "bodies"
            )
        allowed = sum(len(question.moments) * len(question.allow or ()) for question in questions)
        if allowed > self.limits.allowed:
            raise Refused(
                f"moments times entries of allow may be {self.limits.allowed:,} in one body, got {allowed:,}; ask for "
                "fewer, or send several bodies"
            )

    def timeline(self, body: bytes) -> tuple[Question, bool]:
        """A question of `POST /timeline`, and whether the compared model is asked."""
        content = _mapping(_parse(body), "the question")
        compared = _flag(content.pop("compared", False), "compared")
        return self._question(content, "the question"), compared

    def item(self, value: Any, name: str) -> ItemId:
        """An item id of the catalogue's type: 7 and "7" may be different items."""
        if self.text_items:
            if not isinstance(value, str):
                raise Refused(f"{name} must be text, as in the training data, got {_shown(value)}")
            return self._text(value, name)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_INT:
            raise Refused(f"{name} must be an integer, as in the training data, got {_shown(value)}")
        return value

    def item_in_path(self, text: str) -> ItemId:
        """An item id in a URL, where everything is text."""
        if self.text_items:
            return self._text(text, "the item")
        # Python's int also reads "1_0" and " 7", which are other ids than 10 and 7.
        return self.item(int(text) if _INTEGER.fullmatch(text) else text, "the item")

    def user(self, value: Any, name: str = "user_id") -> str:
        """A user's id as text."""
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_INT:
            return str(value)
        if not isinstance(value, str):
            raise Refused(f"{name} must be text or an integer, got {_shown(value)}")
        return self._text(value, name)

    def count(self, value: Any, name: str, most: int) -> int:
        """A whole number from 1."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)  # in a URL
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise Refused(f"{name} must be a whole number from 1 to {most:,}, got {_shown(value)}")
        return value

    def _event(self, row: Any, name: str, latest: int) -> Event:
        if not isinstance(row, dict) or not row.keys() <= _EVENT_KEYS:
            _known(_mapping(row, name), _EVENT_KEYS, name)
        moment = row.get("timestamp")
        if type(moment) is not int or not 0 < moment <= latest:  # the quick way, as for most events
            moment = read_moment(moment, f"{name}.timestamp")
            if moment > latest:
                raise Refused(
                    f"{name}.timestamp lies in the future, got {say_moment(moment)}; events are what has happened"
                )
        event_id = row.get("event_id")
        if event_id is not None:
            event_id = self.user(event_id, f"{name}.event_id")
        user, item = self.user(row.get("user_id"), f"{name}.user_id"), self.item(row.get("item_id"), f"{name}.item_id")
        return Event(user, item, moment, event_id)

    def _question(self, row: Any, name: str) -> Question:
        row = _mapping(row, name)
        _known(row, self._question_keys, name)
        user, history = row.get("user_id"), row.get("history")
        if (user is None) == (history is None):
            raise Refused(f"{name} must have either user_id or history, got {'neither' if user is None else 'both'}")
        moments = self._moments(row, name)
        until, k = row.get("history_until"), row.get("k", 10)
        filter_seen, allow = row.get("filter_seen", "none"), row.get("allow")
        if filter_seen not in FILTERS:
            raise Refused(f"{name}.filter_seen must be one of {', '.join(FILTERS)}, got {_shown(filter_seen)}")
        return Question(
            None if user is None else self.user(user, f"{name}.user_id"),
            None if history is None else self._history(history, f"{name}.history"),
            moments,
            "moments" in row,
            "moments" not in row and row.get("moment") is None,
            None if until is None else read_moment(until, f"{name}.history_until"),
            self.count(k, f"{name}.k", self.limits.k),
            filter_seen,
            None if allow is None else self._items(allow, f"{name}.allow"),
            self._items(row.get("deny", []), f"{name}.deny"),
            _flag(row.get("explain", False), f"{name}.explain"),
            False,
            _flag(row.get("new_items", False), f"{name}.new_items"),
            None if row.get("arm") is None else self.user(row["arm"], f"{name}.arm"),
        )

    def _moments(self, row: Mapping[str, Any], name: str) -> list[int]:
        if "moments" not in row:
            given = row.get("moment")
            return [int(time.time()) if given is None else read_moment(given, f"{name}.moment")]
        if "moment" in row:
            raise Refused(f"{name} must have either moment or moments, got both")
        values = _list(row["moments"], f"{name}.moments", self.limits.moments)
        if not values:
            raise Refused(f"{name}.moments is empty; leave it out to ask for now")
        return [read_moment(value, f"{name}.moments[{place}]") for place, value in enumerate(values)]

    def _history(self, values: Any, name: str) -> list[tuple[ItemId, int]]:
        found = []
        for place, entry in enumerate(_list(values, name, self.limits.history)):
            row = _mapping(entry, f"{name}[{place}]")
            _known(row, _HISTORY_KEYS, f"{name}[{place}]")
            item = self.item(row.get("item_id"), f"{name}[{place}].item_id")
            found.append((item, read_moment(row.get("timestamp"), f"{name}[{place}].timestamp")))
        return sorted(found, key=lambda event: event[1])  # equal times keep the client's order

    def _items(self, values: Any, name: str) -> list[ItemId]:
        rows = _list(values, name, self.limits.items)
        # A body may hold millions, and the event loop waits: only where one is wrong are they looked at one by one.
        if self.text_items:
            most = self.limits.id_length
            is_right = all(type(value) is str and 0 < len(value) <= most and "\0" not in value for value in rows)
        else:
            is_right = all(type(value) is int and -_MOST_INT <= value <= _MOST_INT for value in rows)
        return rows if is_right else [self.item(value, f"{name}[{place}]") for place, value in enumerate(rows)]

    def _text(self, value: str, name: str) -> str:
        if not 1 <= len(value) <= self.limits.id_length or "\0" in value:
            raise Refused(f"{name} must have 1 to {self.limits.id_length} characters and no NUL, got {_shown(value)}")
        return value


def read_moment(value: Any, name: str) -> int:
    """Unix seconds of a moment, by the rules of `Recommender`: ISO 8601 with a zone, a date, or Unix seconds."""
    if type(value) is int and 0 < value <= LATEST_TIME:
        return value
    try:
        moment = parse_moment(value, name)
        if not 0 < moment <= LATEST_TIME:
            check_time_values(torch.tensor([moment]), name=name)
        return moment
    except (ValueError, OverflowError) as error:
        raise Refused(_one_line(str(error))) from None


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {_one_line(str(error))}") from None


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{name} must be an object with names and values, got {_shown(value)}")
    return value


def _known(row: Mapping[str, Any], names: frozenset[str], name: str) -> None:
    unknown = row.keys() - names
    if unknown:
        raise Refused(f"{name} has an unknown entry {_shown(min(unknown))}; known are {', '.join(sorted(names))}")


def _list(value: Any, name: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{name} must be a list, got {_shown(value)}")
    if len(value) > most:
        raise Refused(f"{name} may have {most:,} entries, got {len(value):,}; send several")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value in an error, short."""
    text = "nothing" if value is None else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
