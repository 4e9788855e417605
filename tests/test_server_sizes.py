"""No request within the limits keeps everybody else waiting: what is refused, and what is done once for a question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import NOW, client_of, make_data, make_run
from starlette.testclient import TestClient

from trope.data.catalogue import Catalogue
from trope.server.popularity import NewItems


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("shop")
    run: Path = make_run(make_data(folder), folder / "run")
    with client_of(run, folder / "events.sqlite") as client:
        yield client


def moments(count: int) -> list[int]:
    return [NOW + 3_600 * step for step in range(count)]


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ([{"user_id": "u01", "moments": moments(21), "k": 1000}], "moments times k may be 20,480 in one body"),
        ([{"user_id": "u01", "k": 100}] * 205, "got 20,500; ask for fewer, or send several bodies"),
        (
            [{"user_id": "nobody", "moments": moments(257), "new_items": True}],
            "new_items may be asked for at 256 moments in one body, got 257; send several bodies",
        ),
        (
            [{"user_id": "u01", "moments": moments(201), "allow": ["item 1"] * 5_000}],
            "moments times entries of allow may be 1,000,000 in one body, got 1,005,000",
        ),
    ],
)
def test_too_much_in_one_body_is_refused(client: TestClient, questions: Any, said: str) -> None:
    answer = client.post("/recommend", json=questions)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_a_long_timeline_of_long_lists_is_refused(client: TestClient) -> None:
    query = {"from": NOW, "to": NOW + 10**6, "steps": 21, "k": 1000}
    answer = client.get("/users/u01/timeline", params=query)
    assert answer.status_code == 400 and "moments times k" in answer.json()["error"]


def test_attention_is_told_for_few_moments_of_a_body(client: TestClient) -> None:
    def told(count: int, *others: Any) -> list[bool]:
        asked = [{"user_id": f"u{place % 20 + 1:02}", "moment": NOW, "explain": True} for place in range(count)]
        answers = client.post("/recommend", json=[*asked, *others]).json()
        assert all("why" in answer["items"][0] for answer in answers[:count])
        return ["attention" in answer for answer in answers]

    assert told(31, {"user_id": "u01", "moment": NOW}) == [True] * 31 + [False]
    assert told(32) == [False] * 32


def test_the_items_of_a_question_are_looked_up_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    dense = Catalogue.dense

    def counted(self: Catalogue, ids: Any) -> Any:
        calls.append(len(ids))
        return dense(self, ids)

    monkeypatch.setattr(Catalogue, "dense", counted)
    lists = {"allow": [f"item {n}" for n in range(1, 99)], "deny": ["item 2"], "new_items": True}
    for user in ("u01", "nobody"):
        calls.clear()
        question = {"user_id": user, "moments": moments(30), **lists}
        assert client.post("/recommend", json=question).status_code == 200
        assert len(calls) <= 3, "not once for each item or moment"


EVENTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40).map(lambda day: day * 86_400)), max_size=30)


@given(EVENTS, st.integers(1, 60).map(lambda day: day * 86_400), st.integers(1, 12))
def test_the_best_new_items_are_those_of_a_sort(events: list[tuple[int, int]], moment: int, k: int) -> None:
    new = NewItems()
    for place, (item, time) in enumerate(events):
        new.add(item, time)
        if place % 7 == 0:
            new.best(moment, k)
    found = new.best(moment, k)
    plain = sorted((new.count(item, moment) for item in new._counts), reverse=True)[:k]
    assert [count for _, count in found] == pytest.approx(plain)
    assert [new.count(item, moment) for item, _ in found] == pytest.approx(plain)
