"""What the server does in a faster way gives what the plain way gives."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.evaluate.ranking import Cells, top_k_of
from trope.models import kept
from trope.models.memory import Memory
from trope.models.recommender import SequentialRecommender
from trope.server.answers import rounded
from trope.server.encoder import Cut, Encoder, Rows
from trope.server.people import Person
from trope.settings import preset

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


EVENT = st.tuples(st.integers(1, 5), st.integers(1, 9))


@given(st.lists(st.lists(EVENT, max_size=2), max_size=300), st.integers(1, 200))
def test_a_history_grows_in_its_place(posts: list[list[tuple[int, int]]], most: int) -> None:
    """Events that come in order are appended in place, others are sorted in; the history is the same."""
    person = Person.in_room(*np.empty((2, 0), np.int64))
    expected: list[tuple[int, int]] = []
    for post in posts:
        items, times = np.array(post, np.int64).reshape(-1, 2).T
        person = person.joined(items, times, position=1, most=most)
        expected = sorted([*expected, *post], key=lambda event: event[1])[-most:]
        assert list(zip(person.items.tolist(), person.times.tolist(), strict=True)) == expected
        found = {item: [time for other, time in expected if other == item] for item, _ in sorted(expected)}
        assert person.own(len(expected)).T.tolist() == [[item, len(x), x[-1]] for item, x in found.items()]


def test_who_is_replaced_keeps_the_events_until_then() -> None:
    before = Person.in_room(np.array([1, 2]), np.array([10, 20]))
    after = before.joined(np.array([3]), np.array([30]), position=1, most=9)
    assert before.items.tolist() == [1, 2] and after.items.tolist() == [1, 2, 3]
    assert np.shares_memory(before.items, after.items)


@cache
def model() -> SequentialRecommender:
    torch.manual_seed(0)
    size = ["model.width=16", "model.heads=2", "model.head_dim=8", "model.max_len=20"]
    return SequentialRecommender(preset("trope", size), 50, (1_500_000_000, 1_560_000_000)).eval()


@settings(max_examples=15)
@given(st.data())
def test_memories_that_take_the_room_of_others_are_right(data: st.DataObject) -> None:
    """Whatever is asked in whatever order, with room for few memories: what a fresh encode gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "_PAGES", 1)
        encoder = Encoder(model(), torch.device("cpu"), most_bytes=3 * 2 * 16 * 20 * 4)
        persons = [_person(data.draw(st.integers(1, 30))) for _ in range(4)]
        for _ in range(12):
            for place in data.draw(st.lists(st.integers(0, 3), max_size=2)):
                encoder.forget(persons[place])
                new = (np.array([data.draw(st.integers(1, 50))]), persons[place].times[-1:] + 60)
                persons[place] = persons[place].joined(*new, position=1, most=100)
            asked = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6))
            who = list(dict.fromkeys(place for place, _ in asked))
            cuts = [Cut(persons[place], len(persons[place].items)) for place in who]
            moments = [1_550_000_000 + 9_999 * step for _, step in asked]
            rows = Rows(cuts, [who.index(place) for place, _ in asked], moments)
            with torch.inference_mode():
                found = encoder.vectors(rows)
                fresh = Encoder(model(), torch.device("cpu"))._encoded(rows)
            assert torch.allclose(found, fresh, atol=2e-6)
            held = [memory for kept_of in encoder._memories.values() for memory in kept_of.values()]
            held += [memory for rooms in encoder._rooms.values() for memory in rooms]
            assert sum(memory.num_bytes for memory in held) == encoder._bytes


@settings(max_examples=40)
@given(st.data())
def test_batches_that_need_more_than_there_is_room_for_are_answered_as_alone(data: st.DataObject) -> None:
    """Several users, several lengths of their histories and several moments, in a cache for a few memories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "_PAGES", 1)
        most, together = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 8))
        encoder = Encoder(model(), torch.device("cpu"), most * _one_memory(), together * _one_memory())
        persons = [_person(length) for length in (20, 24, 28, 30)]
        question = st.tuples(st.integers(0, 3), st.integers(14, 20), st.integers(0, 3))
        for _ in range(4):
            asked = data.draw(st.lists(question, min_size=1, max_size=16))
            keys = list(dict.fromkeys((place, length) for place, length, _ in asked))
            cuts = [Cut(persons[place], length) for place, length in keys]
            moments = [1_550_000_000 + 9_999 * step for _, _, step in asked]
            rows = Rows(cuts, [keys.index((place, length)) for place, length, _ in asked], moments)
            with torch.inference_mode():
                found = encoder.vectors(rows)
                alone = [
                    Encoder(model(), torch.device("cpu"))._encoded(Rows([cuts[cut]], [0], [moment]))
                    for cut, moment in zip(rows.cut_N, moments, strict=True)
                ]
            assert torch.allclose(found, torch.cat(alone), atol=2e-6)
            assert encoder._bytes <= encoder.most_bytes


@cache
def _one_memory() -> int:
    """Bytes of a history of 14 to 20 events."""
    return Encoder(model(), torch.device("cpu"))._remember(Cut(_person(20), 20)).num_bytes


def test_one_users_memories_keep_within_the_room() -> None:
    encoder = Encoder(model(), torch.device("cpu"), most_bytes=3 * _one_memory())
    person = _person(30)
    cuts = [Cut(person, length) for length in range(14, 21)]
    moments = [1_550_000_000, 1_550_009_999] * len(cuts)
    with torch.inference_mode():
        encoder.vectors(Rows(cuts, [place // 2 for place in range(len(moments))], moments))
    assert encoder._bytes <= encoder.most_bytes


def test_a_batch_holds_few_memories_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of histories that came with a request, of which nothing is kept."""
    encoder = Encoder(model(), torch.device("cpu"), most_together=2 * _one_memory())
    sizes: list[int] = []
    join = Memory.join
    monkeypatch.setattr(Memory, "join", lambda memories: (sizes.append(len(memories)), join(memories))[1])
    person = Person(_person(30).items, _person(30).times, is_kept=False)
    cuts = [Cut(person, length) for length in range(14, 21)]
    moments = [1_550_000_000, 1_550_009_999] * len(cuts)
    with torch.inference_mode():
        encoder.vectors(Rows(cuts, [place // 2 for place in range(len(moments))], moments))
    assert sum(sizes) == len(cuts) and max(sizes) <= 2


def _person(length: int) -> Person:
    return Person.in_room(np.arange(1, length + 1), 1_540_000_000 + 3_600 * np.arange(length))
