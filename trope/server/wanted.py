"""Which items a question lets into its lists, by the model's own numbers; found once for all its moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trope.server.people import Ints, Person
from trope.server.popularity import log_share
from trope.server.schema import ItemId, Question
from trope.server.served import Served

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """allow: dense items in order, None for all. deny: dense items, each once. new: items of `allow` that the model
    does not know."""

    allow: Ints | None
    deny: Ints
    new: Sequence[ItemId]

    @classmethod
    def of(cls, served: Served, question: Question) -> Wanted:
        """What a question asks for."""
        deny = _NOTHING
        if question.deny:
            dense = served.catalogue.dense(list(question.deny))
            deny = np.unique(dense[dense > 0])
        if question.allow is None:
            return cls(None, deny, ())
        items = list(dict.fromkeys(question.allow))
        dense = served.catalogue.dense(items)
        return cls(np.sort(dense[dense > 0]), deny, [items[place] for place in np.flatnonzero(dense == 0)])

    def items(self, served: Served, left_out: Ints) -> torch.Tensor:
        """The dense items that may be listed, in order."""
        every = np.arange(1, served.recommender.model.num_items + 1) if self.allow is None else self.allow
        return torch.from_numpy(every[~np.isin(every, left_out)] if len(left_out) else every)


def best_new(
    served: Served, question: Question, wanted: Wanted, person: Person, moment: int, of_none: float
) -> list[tuple[ItemId, float]]:
    """Items that the model does not know, with their log shares, best first. of_none: see `log_share`."""
    unwanted = set(question.deny)
    if question.filter_seen != "none":
        until = moment if question.history_until is None else question.history_until
        unwanted |= {item for item, first in person.new.items() if first <= until}
    if question.allow is None:
        found = served.new_items.best(moment, question.k + len(unwanted))
    else:
        found = [(item, served.new_items.count(item, moment)) for item in wanted.new]
    new = [(item, log_share(chosen, of_none)) for item, chosen in found if item not in unwanted and chosen > 0]
    return sorted(new, key=lambda pair: -pair[1])[: question.k]
