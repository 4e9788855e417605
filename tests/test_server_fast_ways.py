"""What the server does in a faster way gives what the plain way gives."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trope.evaluate.ranking import Cells, top_k_of
from trope.server.answers import rounded
from trope.server.people import Person

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e4, max_value=1e4)


@given(st.lists(st.one_of(FLOATS, st.integers(-2000, 2000).map(lambda n: n / 2**8), st.just(-0.0)), min_size=1))
def test_scores_are_rounded_as_python_rounds(values: list[float]) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    assert list(map(repr, rounded(scores).tolist())) == [repr(round(value, 6)) for value in scores.tolist()]


@given(st.data())
def test_the_best_of_one_tile_are_those_of_many(data: st.DataObject) -> None:
    """One tile may need no keys; several always do."""
    B, V, k = (data.draw(st.integers(1, most)) for most in (3, 12, 14))
    values = st.one_of(st.sampled_from([0.0, -0.0, 1.0]), FLOATS)
    scores_BV = torch.tensor(data.draw(st.lists(st.lists(values, min_size=V, max_size=V), min_size=B, max_size=B)))
    left = data.draw(st.lists(st.tuples(st.integers(0, B - 1), st.integers(1, V)), unique=True))
    rows, items = torch.tensor(left, dtype=torch.int64).view(-1, 2).unbind(1)

    def best(tile: int) -> tuple[list[list[int]], str]:
        scores = lambda first, last: scores_BV[:, first - 1 : last - 1].clone()  # noqa: E731
        found = top_k_of(scores, B, V, torch.device("cpu"), k, Cells(rows, items), tile)
        return found.items_BK.tolist(), repr(found.scores_BK.tolist())

    assert best(1 << 20) == best(64 * 4) == best(1)


@given(st.lists(st.integers(1, 9)), st.integers(1, 10))
def test_events_until_a_moment_are_counted(times: list[int], moment: int) -> None:
    times = sorted(times)
    person = Person(np.ones(len(times), np.int64), np.array(times, np.int64))
    assert person.until(moment) == sum(time <= moment for time in times)
