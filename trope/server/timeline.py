"""A year of answers in one small body, for the page: dragging its slider then needs no further request.

Lists name items by their place in one table, and numbers are whole multiples of `UNIT`. The items that are listed most
often also have their score at every moment, listed there or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trope.evaluate.live import users_at_a_time
from trope.evaluate.ranking import Cells
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.serve.counted import COUNTS
from trope.server.answers import answer
from trope.server.encoder import Cut, Rows
from trope.server.people import Person
from trope.server.schema import ItemId, Question
from trope.server.scoring import PARTS, Scores
from trope.server.served import Served

UNIT = 0.0001
CURVES = 60
"""Items with a score at every moment."""


def timeline(served: Served, question: Question) -> dict[str, Any]:
    """The question's list at each of its moments, the parts of each score, and curves of the items listed most."""
    said = answer(served, [replace(question, is_sweep=True, explain=True)])[0]
    rows = said["moments"]
    question = replace(question, moments=[row["moment"] for row in rows])  # "now" depends on the user
    often = Counter(entry["item_id"] for row in rows for entry in row["items"])
    items = [item for item, _ in often.most_common()]
    place = {item: each for each, item in enumerate(items)}
    whys = [[entry["why"] for entry in row["items"]] for row in rows]
    parts = [part for part in PARTS if any(why[part] for row in whys for why in row)]
    return {
        "user_id": said["user_id"],
        "model": said["model"],
        "note": said["note"],
        "unit": UNIT,
        "moments": question.moments,
        "by_counts": [step for step, row in enumerate(rows) if row["from"] == COUNTS],
        "items": [{"item_id": item, "name": _name(served, item)} for item in items],
        "lists": [[place[entry["item_id"]] for entry in row["items"]] for row in rows],
        "scores": [_units([entry["score"] for entry in row["items"]]) for row in rows],
        "parts": parts,
        "why": [[_units([why[part] for part in parts]) for why in row] for row in whys],
        "curves": [_units(curve) for curve in _curves(served, question, items[:CURVES])],
    }


def _curves(served: Served, question: Question, items: list[ItemId]) -> npt.NDArray[np.float64]:
    """Scores of some items at all moments, [items, moments]: by the model, or by counts where only they can answer."""
    dense = torch.from_numpy(served.catalogue.dense(items)).to(served.recommender.device)
    found = np.empty((len(items), len(question.moments)))
    if question.history is None:
        assert question.user is not None
        person = served.people.get([question.user])[0]
    else:
        person = served.people.of(question.history)
    until = question.history_until
    lengths = [person.until(moment if until is None else until) for moment in question.moments]
    known = [step for step, length in enumerate(lengths) if length]
    most = users_at_a_time(served.recommender.model.num_items, USERS_AT_A_TIME)
    for first in range(0, len(known), most):
        steps = known[first : first + most]
        found[:, steps] = _by_model(served, person, [(lengths[n], question.moments[n]) for n in steps], dense)
    for step in set(range(len(lengths))) - set(known):
        found[:, step] = served.popularity.at([question.moments[step]])[0, dense].cpu().numpy()
    return found


def _by_model(
    served: Served, person: Person, asked: list[tuple[int, int]], dense: torch.Tensor
) -> npt.NDArray[np.float32]:
    """asked: lengths of the history, and moments. Returns [items, asked]."""
    lengths = list(dict.fromkeys(length for length, _ in asked))
    place = {length: each for each, length in enumerate(lengths)}
    cuts = [Cut(person, length) for length in lengths]
    scores = Scores(served, Rows(cuts, [place[length] for length, _ in asked], [moment for _, moment in asked]))
    cells = Cells(torch.arange(len(asked), device=dense.device).repeat_interleave(len(dense)), dense.repeat(len(asked)))
    return scores.parts(cells).sum(1).view(len(asked), len(dense)).T.cpu().numpy()


def _name(served: Served, item: ItemId) -> str | None:
    """None for an item that the model does not know, or without a name."""
    dense = int(served.catalogue.dense([item])[0])
    return served.name(dense) if dense else None


def _units(values: Any) -> list[int]:
    return [int(value) for value in np.rint(np.asarray(values, np.float64) / UNIT)]
