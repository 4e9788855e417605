"""What a server holds in memory does not grow with what it is asked and told."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import HISTORY, NOW, make_data, make_run

from trope.models.recommender import SequentialRecommender
from trope.server.answers import answer
from trope.server.encoder import Cut, Encoder, Rows
from trope.server.people import Person
from trope.server.schema import Event, Question
from trope.server.served import Served
from trope.server.sqlite_store import SqliteStore
from trope.settings import preset

MAX_LEN = 64  # memories of 32, 48 and 64 places


@cache
def model() -> SequentialRecommender:
    torch.manual_seed(0)
    size = ["model.width=16", "model.heads=2", "model.head_dim=8", f"model.max_len={MAX_LEN}"]
    return SequentialRecommender(preset("trope", size), 50, (1_500_000_000, 1_560_000_000)).eval()


def test_histories_that_grow_leave_no_rooms_behind() -> None:
    encoder = Encoder(model(), torch.device("cpu"))
    persons = [Person.in_room(np.array([1]), np.array([1_540_000_000])) for _ in range(4)]
    peak = 0
    more = np.arange(1, 8)
    for _ in range(1, MAX_LEN, len(more)):
        for place, person in enumerate(persons):
            encoder.forget(person)
            persons[place] = person.joined(more, person.times[-1:] + 60 * more, position=1, most=HISTORY)
            for _ in range(2):  # the second time, it is remembered
                with torch.inference_mode():
                    encoder.vectors(Rows([Cut(persons[place], len(persons[place].items))], [0], [1_550_000_000]))
            memories = [memory for kept in encoder._memories.values() for memory in kept.values()]
            peak = max(peak, sum(memory.num_bytes for memory in memories))
            assert encoder._bytes <= peak, "nothing beyond what was in use at once"
    assert len({person._room for person in persons}) == len(memories) == 4


def test_a_room_is_left_for_another_an_eighth_longer_at_least() -> None:
    person, rooms = Person.in_room(np.arange(1, 601), np.arange(600)), set()
    for time in range(600, 6_000):
        person = person.joined(np.array([1]), np.array([time]), position=time, most=HISTORY)
        rooms.add(person._room)
    assert len(rooms) < np.log(10) / np.log(9 / 8)
    assert person.num_bytes < 16 * 6_000 * 9 / 8 + 16 * 128 + 2_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    return make_run(make_data(folder), folder / "run")


def test_histories_in_memory_keep_within_their_bytes(run: Path, tmp_path: Path) -> None:
    """However many users ask and however much they tell; who was let go of comes back with the whole history."""
    store = SqliteStore(tmp_path / "events.sqlite")
    served, free = (Served.open(run, None, store, HISTORY, "cpu") for _ in range(2))
    served.people.most_bytes = 40_000
    users = [f"u{place:02}" for place in range(1, 21)] + [f"new {place}" for place in range(5)]
    for turn in range(12):
        store.append([[Event(user, f"item {turn + 9}", NOW + turn)] for user in users[turn % 3 :: 3]])
        for batch in (users[:4], users[4:], users[turn % 7 :: 5]):
            questions = [Question(user, None, [NOW + turn]) for user in batch]
            with torch.inference_mode():
                for each in (served, free):
                    each.follow()
                found, expected = answer(served, questions), answer(free, questions)
            assert [_listed(one) for one in found] == [_listed(one) for one in expected]
            people, encoder = served.people, served.encoder
            people.get([])  # counts what the batch has added
            assert people._bytes == sum(person.num_bytes for person in people._cache.values()) <= people.most_bytes
            assert {*encoder._memories, *encoder._seen} <= {*people._cache.values()}
    assert len(free.people._cache) == len(users) and free.people._bytes > 2 * served.people.most_bytes
    store.close()


def test_events_without_a_question_keep_within_the_bytes_too(run: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "events.sqlite")
    served = Served.open(run, None, store, HISTORY, "cpu")
    users = [f"u{place:02}" for place in range(1, 6)]
    people = served.people
    assert [person.is_known for person in people.get(users)] == [True] * 5
    people.get([])
    people.most_bytes = people._bytes
    for turn in range(10):
        store.append([[Event("u03", "item 1", NOW + 100 * turn + step) for step in range(100)]])
        served.follow()
        assert people._bytes == sum(person.num_bytes for person in people._cache.values()) <= people.most_bytes
    assert served.people.get(["u03"])[0].times[-1] == NOW + 999, "who was let go of has the whole history again"
    store.close()


def test_pages_of_the_file_in_memory_are_few(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "events.sqlite")
    for connection in (store._writer, store._reader):
        assert connection.execute("PRAGMA cache_size").fetchone() == (-256,)
    store.close()


def _listed(said: dict[str, Any]) -> list[Any]:
    """Items in their order. Scores of batches that were encoded otherwise differ in the last digit."""
    return [entry["item_id"] for entry in said["items"]] + [said["from"]]
