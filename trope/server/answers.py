"""Questions to answers: who is answered by the model, who from live counts, and how an answer is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch

from trope.data.printable import counted
from trope.evaluate.live import users_at_a_time
from trope.evaluate.ranking import Cells, TopK
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.attention_maps import attention_shares
from trope.serve.counted import COUNTS, MODEL
from trope.serve.long_after import long_after
from trope.server.encoder import Cut, Rows
from trope.server.people import Ints, Person
from trope.server.popularity import log_share
from trope.server.schema import ItemId, Question
from trope.server.scoring import PARTS, Scores, best_by_counts
from trope.server.served import Served
from trope.server.wanted import Wanted, best_new
from trope.times import DAY

LOOKED_AT = 5
"""Events whose share of attention is told with `explain`."""
_DIGITS = 6
_MILLION = 10.0**_DIGITS
T = TypeVar("T")


@dataclass(slots=True)
class Row:
    """One list to make: a question at one of its moments. `cut` is None where only counts can answer."""

    question: Question
    moment: int
    person: Person
    cut: Cut | None
    wanted: Wanted
    items: list[int] = field(default_factory=list)  # dense, best first
    scores: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)  # with `explain`
    new: list[tuple[ItemId, float]] = field(default_factory=list)  # items the model does not know, with `new_items`


def answer(served: Served, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """One answer for each question; the whole batch is encoded together."""
    users = [question.user for question in questions if question.user is not None]
    persons = iter(served.people.get(users))
    rows: list[list[Row]] = []
    for question in questions:
        person = next(persons) if question.history is None else served.people.of(question.history)
        wanted = Wanted.of(served, question)
        moments = [_now(question, person)] if question.is_now else question.moments
        rows.append([_row(question, moment, person, wanted) for moment in moments])
    flat = [row for group in rows for row in group]
    most = users_at_a_time(served.recommender.model.num_items, USERS_AT_A_TIME)
    for part in _parts([row for row in flat if row.cut is not None], most):
        _by_model(served, part)
    for part in _parts([row for row in flat if row.cut is None], most):
        _by_counts(served, part)
    return [_write(served, question, group) for question, group in zip(questions, rows, strict=True)]


def curve(served: Served, item: ItemId, user: str | None, moments: list[int]) -> dict[str, Any]:
    """An item's score at each moment: for a user, or by everybody's counts where only they can answer."""
    dense = int(served.catalogue.dense([item])[0])
    about: dict[str, Any] = {"item_id": item, "name": None, "user_id": user, "model": served.version}
    every = list(range(len(moments)))
    if not dense:
        said = [log_share(served.new_items.count(item, t), float(served.popularity.yardstick(t)[0])) for t in moments]
        why = "the model does not know this item: its log share of everybody's counts"
        return {
            **about, "from": COUNTS, "note": why, "moments": moments, "by_counts": every, "scores": _rounded(said),
        }  # fmt: skip
    about["name"] = served.name(dense)
    person = None if user is None else served.people.get([user])[0]
    wanted = Wanted.of(served, _ONE)
    rows = {} if person is None else {step: _row(_ONE, moments[step], person, wanted) for step in every}
    known = [step for step in every if step in rows and rows[step].cut is not None]
    parts: list[list[float]] = [[]] * len(moments)
    for steps in _parts(known, users_at_a_time(served.recommender.model.num_items, USERS_AT_A_TIME)):
        cells = Cells(torch.arange(len(steps)), torch.full((len(steps),), dense))
        found = Scores(served, _rows([rows[step] for step in steps])).parts(_to(served, cells)).tolist()
        for step, row in zip(steps, found, strict=True):
            parts[step] = row
    by_counts = [step for step in every if not parts[step]]
    for step in by_counts:
        parts[step] = _counted(float(served.popularity.at([moments[step]])[0, dense]))
    note = None if user is None or not by_counts else _why_counts(served, person)
    return {
        **about, "from": MODEL if known else COUNTS, "note": note, "moments": moments, "by_counts": by_counts,
        "scores": _rounded([sum(row) for row in parts]),
        "parts": {name: _rounded([row[place] for row in parts]) for place, name in enumerate(PARTS)},
    }  # fmt: skip


def _counted(score: float) -> list[float]:
    """The parts of a score that is everybody's counts alone, see `PARTS`."""
    return [0.0, 0.0, score, 0.0]


_ONE = Question(None, (), ())


def _now(question: Question, person: Person) -> int:
    """The moment of a question without one: of the user's last event, if the clock that gave its time is ahead of ours.

    At the server's own second such an event would not have happened yet, though it was acknowledged.
    """
    now = question.moments[0]
    is_ahead = question.user is not None and question.history_until is None and now < person.last <= now + DAY
    return person.last if is_ahead else now


def _row(question: Question, moment: int, person: Person, wanted: Wanted) -> Row:
    until = moment if question.history_until is None else question.history_until
    length = person.until(until)
    return Row(question, moment, person, Cut(person, length) if length else None, wanted)


def _parts(rows: list[T], most: int) -> Iterator[list[T]]:
    return (rows[first : first + most] for first in range(0, len(rows), most))


def _rows(rows: Sequence[Row]) -> Rows:
    """The rows' distinct histories, and which belongs to which."""
    places: dict[tuple[int, int], int] = {}
    cuts: list[Cut] = []
    cut_N = []
    for row in rows:
        assert row.cut is not None
        key = (id(row.cut.person), row.cut.length)
        if key not in places:
            places[key] = len(cuts)
            cuts.append(row.cut)
        cut_N.append(places[key])
    return Rows(cuts, cut_N, [row.moment for row in rows])


def _by_model(served: Served, rows: list[Row]) -> None:
    scores = Scores(served, _rows(rows))
    left_out = [_left_out(served, row) for row in rows]
    if any(row.question.allow is None for row in rows):
        k = max(row.question.k for row in rows if row.question.allow is None)
        found = scores.best(min(k, scores.num_items), _to(served, _cells(left_out)))
        _take(rows, found)
    for place, row in enumerate(rows):
        if row.question.allow is not None:
            items = row.wanted.items(served, left_out[place])
            cells = Cells(torch.full_like(items, place), items)
            _take_best(row, items, scores.parts(_to(served, cells)).sum(1).cpu())
    explained = [(place, row) for place, row in enumerate(rows) if row.question.explain and row.items]
    if explained:
        cells = _cells([np.array(row.items if row.question.explain else [], np.int64) for row in rows])
        parts = iter(scores.parts(_to(served, cells)).tolist())
        for _, row in explained:
            row.parts = [next(parts) for _ in row.items]


def _by_counts(served: Served, rows: list[Row]) -> None:
    left_out = [_left_out(served, row) for row in rows]
    k = min(max(row.question.k for row in rows), served.recommender.model.num_items)
    found = best_by_counts(served, [row.moment for row in rows], k, _to(served, _cells(left_out)))
    _take(rows, found)
    for row, out in zip(rows, left_out, strict=True):
        everybody_V = None
        if row.question.new_items:
            everybody_V = served.popularity.yardstick(row.moment)
        elif row.question.allow is not None:
            everybody_V = served.popularity.at([row.moment])[0]
        if everybody_V is None:
            continue
        items = row.wanted.items(served, out)
        _take_best(row, items, everybody_V.cpu()[items])
        if row.question.new_items:
            row.new = best_new(served, row.question, row.wanted, row.person, row.moment, float(everybody_V[0]))


def _left_out(served: Served, row: Row) -> Ints:
    """Dense items that are not listed. Distinct ones: a body may deny 10,000 at each of its moments."""
    seen, deny = row.question.filter_seen, row.wanted.deny
    if seen == "none" or row.cut is None:
        return deny
    if seen == "history":
        return np.concatenate((row.person.own(row.cut.length)[0], deny))
    first = max(0, row.cut.length - served.recommender.model.config.model.max_len)
    return np.concatenate((row.person.items[first : row.cut.length], deny))


def _cells(items: list[Ints]) -> Cells:
    """Cells of some items for each row."""
    rows = np.repeat(np.arange(len(items)), [len(row) for row in items])
    return Cells(torch.from_numpy(rows), torch.from_numpy(np.concatenate(items)))


def _to(served: Served, cells: Cells) -> Cells:
    device = served.recommender.device
    return Cells(cells.rows.to(device), cells.items.to(device))


def _take(rows: list[Row], best: TopK) -> None:
    for row, items, scores in zip(rows, best.items_BK.tolist(), rounded(best.scores_BK).tolist(), strict=True):
        if row.question.allow is None:
            items = items[: row.question.k]
            row.items = [item for item in items if item] if 0 in items else items  # 0 where fewer are left
            row.scores = scores[: len(row.items)]


def _take_best(row: Row, items: torch.Tensor, scores: torch.Tensor) -> None:
    """The best of some items, which are in order of id; equal scores keep that order."""
    order = torch.argsort(-scores, stable=True)[: row.question.k]
    row.items, row.scores = items[order].tolist(), rounded(scores[order]).tolist()


def rounded(scores: torch.Tensor) -> torch.Tensor:
    """Float32 scores as `round` gives them at six digits, float64; much faster than `round` of each.

    The product is exact: 24 bits of a score and 14 of a million (but for its power of two) fit in 53.
    """
    assert scores.dtype == torch.float32
    return scores.double().mul_(_MILLION).round_().div_(_MILLION)


def _write(served: Served, question: Question, rows: list[Row]) -> dict[str, Any]:
    said: dict[str, Any] = {"user_id": question.user, "model": served.version}
    lists = [
        {"moment": row.moment, "from": COUNTS if row.cut is None else MODEL, "items": _listed(served, row)}
        for row in rows
    ]
    if question.attention:
        for said_of, row in zip(lists, rows, strict=True):
            said_of["attention"] = [] if row.cut is None else looked_at(served, row.cut, row.moment)
    if question.is_sweep:
        said["moments"] = lists
    else:
        said |= lists[0]
    said["note"] = _note(served, question, rows)
    return said


def looked_at(served: Served, cut: Cut, moment: int) -> list[dict[str, Any]]:
    """The events that the model looked at most from a moment, and their shares of its attention."""
    model, device = served.recommender.model, served.recommender.device
    window = slice(max(0, cut.length - model.config.model.max_len), cut.length)
    items_L, times_L = cut.person.items[window], cut.person.times[window]
    items_1L, times_1L = (torch.from_numpy(x).to(device)[None] for x in (items_L, times_L))
    shares_L = attention_shares(model, items_1L, times_1L, torch.tensor([moment], device=device))
    if shares_L is None:
        return []
    best = torch.argsort(-shares_L, stable=True)[:LOOKED_AT].tolist()
    return [
        {
            "item_id": served.originals[int(items_L[place]) - 1], "time": int(times_L[place]),
            "share": round(float(shares_L[place]), _DIGITS),
        }
        for place in best
    ]  # fmt: skip


def _listed(served: Served, row: Row) -> list[dict[str, Any]]:
    originals = served.originals
    found: list[dict[str, Any]] = [
        {"item_id": originals[item - 1], "score": score, "rank": rank}
        for rank, item, score in zip(count(1), row.items, row.scores, strict=False)
    ]
    if served.catalogue.item_names is not None:
        for entry, item in zip(found, row.items, strict=True):
            entry["name"] = served.name(item)
    if row.question.explain:
        every = row.parts or [_counted(score) for score in row.scores]
        for entry, parts in zip(found, every, strict=True):
            entry["why"] = dict(zip(PARTS, _rounded(parts), strict=True))
    if row.new:
        found += [{"item_id": item, "score": round(score, _DIGITS), "is_new": True} for item, score in row.new]
        found = sorted(found, key=lambda entry: -entry["score"])[: row.question.k]
        for rank, entry in enumerate(found, start=1):
            entry["rank"] = rank
    return found


def _note(served: Served, question: Question, rows: list[Row]) -> str | None:
    notes = []
    if any(row.cut is None for row in rows):
        notes.append(_why_counts(served, rows[0].person))
    elif served.popularity.pulse is None:
        late = long_after(served.recommender.model.time_span, max(row.moment for row in rows))
        notes += [] if late is None else [late]
    if question.allow is not None and not question.new_items:
        unknown = len(rows[0].wanted.new)
        notes += [f"the model does not know {counted(unknown, 'item')} of allow"] if unknown else []
    return "; ".join(notes) or None


def _why_counts(served: Served, person: Person | None) -> str:
    known = person is not None and person.is_known
    said = "no event until this moment with an item that the model knows" if known else "the user is unknown"
    if served.popularity.is_empty:
        return f"{said}, and nothing has been counted yet: items in order of their id"
    return f"{said}: answered from what everybody chooses now"


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
