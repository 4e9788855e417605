"""No request within the limits keeps everybody else waiting: what is refused, and what is done once for a question."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import NOW, client_of, make_data, make_run
from starlette.testclient import TestClient

from trope.data.catalogue import Catalogue
from trope.evaluate.ranking import Cells
from trope.server.limits import Limits
from trope.server.popularity import NewItems
from trope.server.refusal import Refused
from trope.server.schema import Reader


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


def test_what_a_question_leaves_out_is_marked_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each moment, however often the question or the history names it."""
    marked: list[int] = []
    leave_out = Cells.leave_out

    def counted(self: Cells, *arguments: Any) -> None:
        marked.append(len(self.items))
        leave_out(self, *arguments)

    monkeypatch.setattr(Cells, "leave_out", counted)
    again = [{"item_id": f"item {place % 3 + 1}", "timestamp": NOW} for place in range(3_000)]
    for who in ({"user_id": "nobody"}, {"history": again, "filter_seen": "history"}):
        marked.clear()
        asked = {**who, "moments": moments(30), "deny": ["item 4", "item 5"] * 5_000}
        answer = client.post("/recommend", json=asked).json()
        assert sum(marked) == 30 * (5 if "history" in who else 2)
        assert not {"item 4", "item 5"} & {item["item_id"] for row in answer["moments"] for item in row["items"]}


def test_a_history_is_counted_once_for_all_its_moments(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    unique = np.unique

    def noting(array: Any, **options: Any) -> Any:
        counted.extend([len(array)] if "return_counts" in options else [])
        return unique(array, **options)

    monkeypatch.setattr(np, "unique", noting)
    history = [{"item_id": "item 1", "timestamp": NOW}, {"item_id": "item 2", "timestamp": NOW}]
    asked = {"history": history, "moments": moments(30), "filter_seen": "history"}
    assert client.post("/recommend", json=asked).status_code == 200
    assert counted == [2]


@pytest.mark.parametrize("right", [["item"] * 50, [7] * 50])
def test_items_that_are_right_are_not_looked_at_one_by_one(right: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may hold two million of them, and nobody is answered meanwhile."""
    text = isinstance(right[0], str)
    reader, calls = Reader(text, Limits()), []
    item = Reader.item
    monkeypatch.setattr(Reader, "item", lambda *arguments: calls.append(1) or item(*arguments))
    asked = [{"user_id": "ann", "allow": right, "deny": right}]
    (question,), _ = reader.questions(json.dumps(asked).encode())
    assert question.allow == question.deny == right and not calls
    for wrong in [7, True, "x" * 257, "a\0b", "", None] if text else ["7", True, 2**63, 1.0, None]:
        asked[0]["deny"] = [*right, wrong]
        with pytest.raises(Refused, match=r"question 0\.deny\[50\] must"):
            reader.questions(json.dumps(asked).encode())


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
