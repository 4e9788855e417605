"""`trope serve`: the same answers as `Recommender`, events that are seen at once, and what is refused."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from patience import wait_until
from serving import END, HISTORY, MAX_LEN, NOW, client_of, make_data, make_run
from starlette.testclient import TestClient

from trope.data.sequences import Sequences
from trope.serve.recommender import Histories, Recommender
from trope.server.app import Options, make_app
from trope.server.limits import Limits, TokenBuckets
from trope.server.logs import Log
from trope.server.schema import Event
from trope.server.served import Served, version_of
from trope.server.sqlite_store import SqliteStore

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return make_data(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module", params=["trope", "hstu-trope"])
def run(request: pytest.FixtureRequest, data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"), request.param)


@pytest.fixture(scope="module")
def pulse_run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"))


@pytest.fixture
def client(run: Path, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(run, tmp_path / "events.sqlite") as client:
        yield client


def ask(client: TestClient, **question: Any) -> Any:
    answer = client.post("/recommend", json=question)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tell(client: TestClient, *events: tuple[Any, ...]) -> Any:
    rows = [dict(zip(("user_id", "item_id", "timestamp", "event_id"), event, strict=False)) for event in events]
    answer = client.post("/events", json={"events": rows})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: TestClient, status: int = 400, path: str = "/recommend", **body: Any) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    said = answer.json()["error"]
    assert "\n" not in said and "Traceback" not in said
    return said


def listed(answer: Any) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def by_recommender(run: Path, data: Sequences, user: str, moment: int, **options: Any) -> list[tuple[Any, float]]:
    recommender = Recommender.from_pretrained(run, "cpu")
    row = np.array([data.ids("user_ids").find(user)])
    places = torch.from_numpy(row)
    history = Histories.of(data, places, data.count_before(places, moment + 1))
    found = recommender.rank(history, np.array([moment]), **options)
    return list(zip(recommender.catalogue.originals(found.items), found.scores.tolist(), strict=True))


@pytest.mark.parametrize("filter_seen", ["none", "window", "history"])
def test_a_known_users_answer_is_the_recommenders(client: Any, run: Path, data: Any, filter_seen: str) -> None:
    for user, moment in (("u01", NOW), ("u07", NOW + 10**6), ("u03", END - 500_000)):
        answer = ask(client, user_id=user, moment=moment, k=5, filter_seen=filter_seen)
        expected = by_recommender(run, data, user, moment, k=5, filter_seen=filter_seen)
        assert listed(answer) == [item for item, _ in expected]
        assert [item["score"] for item in answer["items"]] == pytest.approx([s for _, s in expected], abs=2e-6)
        assert [item["rank"] for item in answer["items"]] == list(range(1, len(expected) + 1))
        assert (answer["from"], answer["moment"], answer["user_id"]) == ("model", moment, user)


def test_asked_again_the_answer_is_the_same(client: Any) -> None:
    """A model that remembers encodes the first time, remembers the second, and looks from then on."""
    questions = [{"user_id": f"u{user:02}", "moment": NOW + user, "k": 15} for user in range(1, 8)]
    first, *again = (client.post("/recommend", json=questions).json() for _ in range(3))
    for answers in again:
        for one, other in zip(first, answers, strict=True):
            assert listed(one) == listed(other)
            assert [i["score"] for i in one["items"]] == pytest.approx([i["score"] for i in other["items"]], abs=3e-6)


def test_users_that_are_asked_for_together_are_answered_as_alone(client: Any) -> None:
    """Among unknown users, other moments, other k, and histories of their own."""
    history = [{"item_id": "item 3", "timestamp": END}, {"item_id": "lamp", "timestamp": END + 5}]
    questions = [
        {"user_id": "u01", "moment": NOW, "k": 3},
        {"user_id": "nobody", "moment": NOW},
        {"history": history, "moment": "2020-10-01", "k": 7, "filter_seen": "history"},
        {"user_id": "u02", "moments": [NOW, NOW + 86_400], "k": 2, "explain": True},
        {"user_id": "u02", "moment": NOW, "allow": ["item 1", "item 2", "sofa"]},
    ]
    together = client.post("/recommend", json=questions).json()
    for question, answer in zip(questions, together, strict=True):
        alone = ask(client, **question)
        for one, other in zip(_lists(alone), _lists(answer), strict=True):
            assert listed(one) == listed(other)
            assert [i["score"] for i in one["items"]] == pytest.approx([i["score"] for i in other["items"]], abs=2e-6)
        assert alone["note"] == answer["note"]
    assert [answer.get("from", "sweep") for answer in together] == ["model", "counts", "model", "sweep", "model"]


def _lists(answer: Any) -> list[Any]:
    return answer.get("moments", [answer])


def test_allow_and_deny(client: Any) -> None:
    everything = listed(ask(client, user_id="u05", moment=NOW, k=15))
    assert len(everything) == 15
    assert listed(ask(client, user_id="u05", moment=NOW, k=15, deny=everything[:3])) == everything[3:]
    some = [everything[9], everything[2], everything[5], "lamp"]
    answer = ask(client, user_id="u05", moment=NOW, allow=some)
    assert listed(answer) == [everything[2], everything[5], everything[9]]
    assert answer["note"].endswith("the model does not know 1 item of allow")
    assert listed(ask(client, user_id="u05", moment=NOW, allow=some, deny=[everything[5]], k=1)) == [everything[2]]
    assert listed(ask(client, user_id="u05", moment=NOW, allow=[])) == []


def test_the_parts_of_a_score_are_its_sum(client: Any, run: Path) -> None:
    answer = ask(client, user_id="u04", moment=NOW, k=15, explain=True)
    for item in answer["items"]:
        assert set(item["why"]) == {"standing", "turning", "counts", "own_items"}
        assert sum(item["why"].values()) == pytest.approx(item["score"], abs=1e-5)
    shares = [event["share"] for event in answer["attention"]]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1
    assert all(event["time"] <= NOW for event in answer["attention"])
    own = {item["item_id"] for item in answer["items"] if item["why"]["own_items"]}
    if client.get("/model").json()["has_pulse"]:
        assert 0 < len(own) < 16 and all(item["why"]["counts"] for item in answer["items"])
    else:
        assert not own


def test_an_event_is_seen_by_the_next_question(client: Any, run: Path) -> None:
    """By a user of the dataset, and by one that was unknown before."""
    before = ask(client, user_id="u06", moment=NOW, filter_seen="history", k=15)
    assert ask(client, user_id="new", moment=NOW)["from"] == "counts"
    unseen = listed(before)[0]
    assert tell(client, ("u06", unseen, NOW - 5), ("new", "item 2", NOW - 5))["stored"] == 2
    assert unseen not in listed(ask(client, user_id="u06", moment=NOW, filter_seen="history", k=15))
    assert unseen in listed(ask(client, user_id="u06", moment=NOW - 6, filter_seen="history", k=15))
    after = ask(client, user_id="new", moment=NOW, k=15)
    assert after["from"] == "model"
    history = [{"item_id": "item 2", "timestamp": NOW - 5}]
    assert listed(after) == listed(ask(client, history=history, moment=NOW, k=15))


@pytest.mark.parametrize("ahead", [600, 80_000])
def test_an_event_of_a_clock_that_runs_ahead_is_seen_by_the_next_question(client: Any, ahead: int) -> None:
    """Without a moment, the next question is asked at the event's time."""
    moment = int(time.time()) + ahead
    unseen = listed(ask(client, user_id="u06", filter_seen="history", k=15))[0]
    popular = {entry["item_id"]: entry["score"] for entry in ask(client, user_id="nobody", k=15)["items"]}
    tell(client, ("u06", unseen, moment), *(("x", "item 3", moment) for _ in range(50)))
    after = ask(client, user_id="u06", filter_seen="history", k=15)
    assert unseen not in listed(after) and after["moment"] == moment
    assert ask(client, user_id="x")["from"] == "model"
    now = {entry["item_id"]: entry["score"] for entry in ask(client, user_id="nobody", k=15)["items"]}
    assert now["item 3"] != pytest.approx(popular["item 3"], abs=1e-4), "everybody's counts have it"
    year = client.post("/timeline", json={"user_id": "x"}).json()
    assert year["by_counts"] == [] and year["moments"] == [moment]
    # A moment that is given is kept to, and so is the end of a history.
    assert unseen in listed(ask(client, user_id="u06", moment=moment - 1, filter_seen="history", k=15))
    held = ask(client, user_id="u06", history_until=moment - 1, filter_seen="history", k=15)
    assert unseen in listed(held) and held["moment"] < moment


def test_events_in_any_order_make_the_same_history(client: Any) -> None:
    events = [("item 1", END + 30), ("item 2", END + 10), ("item 3", END + 20)]
    for item, moment in events:
        tell(client, ("late", item, moment))
        ask(client, user_id="late", moment=NOW)  # the history is in memory from now on
    tell(client, *(("sorted", item, moment) for item, moment in sorted(events, key=lambda e: e[1])))
    assert ask(client, user_id="late", moment=NOW)["items"] == ask(client, user_id="sorted", moment=NOW)["items"]


def test_an_event_id_is_stored_once(client: Any) -> None:
    said = tell(client, ("ann", "item 1", NOW, "e1"), ("ann", "item 2", NOW, "e2"))
    assert (said["stored"], said["repeated"]) == (2, 0)
    said = tell(client, ("ann", "item 1", NOW, "e1"), ("ann", "item 3", NOW, "e3"))
    assert (said["stored"], said["repeated"]) == (1, 1)
    assert tell(client, ("ann", "item 1", NOW), ("ann", "item 1", NOW))["stored"] == 2


def test_counts_follow_the_events(pulse_run: Path, tmp_path: Path) -> None:
    """As `Recommender.observe` counts them; those before the end of the model's own counts are in these already."""
    new = [(f"n{place % 5}", f"item {1 + place % 3}", END + 60 * place) for place in range(40)]
    recommender = Recommender.from_pretrained(pulse_run, "cpu")
    recommender.observe(pd.DataFrame(new, columns=["user_id", "item_id", "timestamp"]))
    history = pd.DataFrame([("x", "item 9", END)], columns=["user_id", "item_id", "timestamp"])
    expected = recommender.recommend(history, NOW, k=15)
    asked = {"history": [{"item_id": "item 9", "timestamp": END}], "moment": NOW, "k": 15}
    with client_of(pulse_run, tmp_path / "s") as client:
        before = ask(client, **asked)
        for event in new:
            tell(client, event)
        tell(client, ("n1", "item 4", END - 10**5), ("n1", "lamp", END + 1))
        after = ask(client, **asked)
    assert listed(after) == expected["item_id"].tolist()
    assert [i["score"] for i in after["items"]] == pytest.approx(expected["score"].tolist(), abs=1e-5)
    assert [i["score"] for i in after["items"]] != pytest.approx([i["score"] for i in before["items"]], abs=1e-3)
    with client_of(pulse_run, tmp_path / "s") as client:  # a server that is started again counts the same
        again = ask(client, **asked)
    assert listed(again) == listed(after)
    assert [i["score"] for i in again["items"]] == pytest.approx([i["score"] for i in after["items"]], abs=1e-5)


def test_unknown_users_get_what_is_popular(client: Any, run: Path) -> None:
    tell(client, *(("x", "item 7", NOW - 60) for _ in range(500)))
    answer = ask(client, user_id="nobody", moment=NOW, k=3)
    assert answer["from"] == "counts" and "unknown: answered from what everybody chooses now" in answer["note"]
    if not client.get("/model").json()["has_pulse"]:  # random weights of the test's pulse may like few counts
        assert listed(answer)[0] == "item 7"
    tell(client, ("odd", "lamp", NOW))
    answer = ask(client, user_id="odd", moment=NOW, k=3)
    assert answer["from"] == "counts" and "no event until this moment with an item that the model" in answer["note"]


def test_new_items_are_listed_only_if_allowed(client: Any) -> None:
    tell(client, *(("x", "lamp", NOW - 60) for _ in range(2000)))
    assert "lamp" not in listed(ask(client, user_id="nobody", moment=NOW, k=15))
    answer = ask(client, user_id="nobody", moment=NOW, k=5, new_items=True)
    assert answer["items"][0]["item_id"] == "lamp" and answer["items"][0]["is_new"]
    assert [item["rank"] for item in answer["items"]] == [1, 2, 3, 4, 5]
    assert "lamp" not in listed(ask(client, user_id="nobody", moment=NOW, k=5, new_items=True, deny=["lamp"]))
    assert listed(ask(client, user_id="nobody", moment=NOW, new_items=True, allow=["lamp", "x"])) == ["lamp"]
    assert client.get("/model").json()["new_items"] == 1
    curve = client.get("/items/lamp/curve", params={"from": NOW, "to": NOW + 10**7, "steps": 3}).json()
    assert curve["from"] == "counts" and curve["scores"] == sorted(curve["scores"], reverse=True)


def test_new_items_that_were_seen_are_left_out(client: Any) -> None:
    """From the store, from memory, and from a history in the request; of a later event only from its time on."""
    tell(client, ("new", "lamp", NOW - 60), *(("x", item, NOW - 90) for item in ("lamp", "sofa") for _ in range(2000)))
    asked = {"moment": NOW, "k": 2, "new_items": True}
    for seen in ("window", "history"):
        assert listed(ask(client, user_id="new", **asked, filter_seen=seen))[0] == "sofa"
        assert "lamp" not in listed(ask(client, user_id="new", **asked, filter_seen=seen))
        assert "lamp" in listed(ask(client, user_id="new", **{**asked, "moment": NOW - 61}, filter_seen=seen))
    assert set(listed(ask(client, user_id="new", **asked))) == {"lamp", "sofa"}
    tell(client, ("new", "sofa", NOW - 50))
    assert not {"lamp", "sofa"} & set(listed(ask(client, user_id="new", **asked, filter_seen="history")))
    history = [{"item_id": "sofa", "timestamp": NOW}]
    assert "sofa" not in listed(ask(client, history=history, **asked, filter_seen="history"))
    chosen = ask(client, history=history, **asked, filter_seen="history", allow=["lamp", "sofa"])
    assert listed(chosen) == ["lamp"]


def test_a_timeline_is_a_list_for_each_moment(client: Any) -> None:
    answer = client.get("/users/u02/timeline", params={"from": "2020-09-20", "to": NOW + 10**6, "steps": 5, "k": 3})
    lists = answer.json()["moments"]
    assert len(lists) == 5 and lists[-1]["moment"] == NOW + 10**6
    for each in lists:
        assert listed(each) == listed(ask(client, user_id="u02", moment=each["moment"], k=3))


def test_an_items_curve_is_its_score_in_the_lists(client: Any) -> None:
    params = {"from": NOW, "to": NOW + 10**6, "steps": 4, "user_id": "u02"}
    curve = client.get("/items/item 4/curve", params=params).json()
    for moment, score in zip(curve["moments"], curve["scores"], strict=True):
        items = ask(client, user_id="u02", moment=moment, k=15)["items"]
        assert score == pytest.approx(next(i["score"] for i in items if i["item_id"] == "item 4"), abs=1e-5)
    assert set(curve["parts"]) == {"standing", "turning", "counts", "own_items"}
    del params["user_id"]
    assert client.get("/items/item 4/curve", params=params).json()["from"] == "counts"


def test_a_curve_that_begins_before_the_users_first_event(client: Any) -> None:
    """Counts answer those moments alone; the others are the model's."""
    tell(client, ("ann", "item 2", NOW))
    params = {"from": NOW - 10_000, "to": NOW + 20_000, "steps": 4, "user_id": "ann"}
    curve = client.get("/items/item 4/curve", params=params).json()
    assert curve["by_counts"] == [0] and curve["from"] == "model" and "no event until this moment" in curve["note"]
    for moment, score in zip(curve["moments"], curve["scores"], strict=True):
        items = ask(client, user_id="ann", moment=moment, k=15)["items"]
        assert score == pytest.approx(next(i["score"] for i in items if i["item_id"] == "item 4"), abs=1e-5)
    assert [part[0] for part in curve["parts"].values()] == pytest.approx([0, 0, curve["scores"][0], 0])


def test_what_was_counted_at_the_start_does_not_move(client: Any) -> None:
    before = client.get("/model").json()["counted_until"]
    tell(client, ("ann", "item 2", NOW + 10**6))
    ask(client, user_id="ann")
    assert client.get("/model").json()["counted_until"] == before


def test_a_history_can_be_held_while_the_moment_moves(client: Any) -> None:
    """`history_until`: the page's slider shows one history over the year, also before its last event."""
    held = ask(client, user_id="u02", moment=END - 600_000, history_until=NOW, k=15, filter_seen="history")
    cut = ask(client, user_id="u02", moment=END - 600_000, k=15, filter_seen="history")
    assert len(held["items"]) < len(cut["items"])


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({}, "either user_id or history, got neither"),
        ({"user_id": "a", "history": []}, "either user_id or history, got both"),
        ({"user_id": "a", "k": 0}, "k must be a whole number from 1 to 1,000, got 0"),
        ({"user_id": "a", "k": True}, "k must be a whole number"),
        ({"user_id": "a", "k": 10**9}, "k must be a whole number from 1 to 1,000"),
        ({"user_id": "a", "moment": NOW * 1000}, "looks like milliseconds"),
        ({"user_id": "a", "moment": NOW * 10**9}, "looks like nanoseconds"),
        ({"user_id": "a", "moment": "2017-12-20T18:00:00"}, "has no time zone"),
        ({"user_id": "a", "moment": 1.5}, "must be a moment"),
        ({"user_id": "a", "moment": 0}, "must be positive Unix seconds"),
        ({"user_id": "a", "moments": []}, "moments is empty"),
        ({"user_id": "a", "moments": [NOW] * 801}, "moments may have 800 entries"),
        ({"user_id": "a", "moment": NOW, "moments": [NOW]}, "either moment or moments"),
        ({"user_id": {"$ne": 1}}, "user_id must be text or an integer"),
        ({"user_id": ""}, "must have 1 to 256 characters"),
        ({"user_id": "a", "filter-seen": "none"}, "unknown entry 'filter-seen'; known are allow, deny"),
        ({"user_id": "a", "filter_seen": ["none"]}, "filter_seen must be one of none, window, history"),
        ({"user_id": "a", "allow": [7]}, r"allow\[0\] must be text, as in the training data, got 7"),
        ({"user_id": "a", "explain": 1}, "explain must be true or false"),
        ({"history": [{"item_id": "item 1"}]}, r"history\[0\].timestamp must be a moment, got None"),
        ({"history": {}}, "history must be a list"),
    ],
)
def test_bad_questions_are_refused_in_a_line(pulse_client: Any, question: Any, said: str) -> None:
    assert re.search(said, refused(pulse_client, **question))


@pytest.fixture(scope="module")
def pulse_client(pulse_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with client_of(pulse_run, tmp_path_factory.mktemp("store") / "s") as client:
        yield client


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({}, "timestamp must be a moment"),
        ({"user_id": "a", "item_id": "item 1", "timestamp": int(time.time()) + 10**6}, "lies in the future"),
        ({"user_id": "a", "item_id": 3, "timestamp": NOW}, "item_id must be text"),
        ({"user_id": 1.5, "item_id": "item 1", "timestamp": NOW}, "user_id must be text or an integer"),
        ({"user_id": "a", "item_id": "item 1", "timestamp": NOW, "event_id": []}, "event_id must be text"),
        ({"user_id": "a", "item_id": "item 1", "timestamp": NOW, "weight": 2}, "unknown entry 'weight'"),
        ([], "must be an object"),
    ],
)
def test_bad_events_are_refused_in_a_line(pulse_client: Any, event: Any, said: str) -> None:
    good = {"user_id": "a", "item_id": "item 1", "timestamp": NOW}
    message = refused(pulse_client, path="/events", events=[good, event])
    assert said in message and "events[1]" in message
    assert ask(pulse_client, user_id="a")["from"] == "counts", "none of a refused post is stored"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"user_id": NaN}', b"[]", b"7", b'"x"'])
def test_bodies_that_are_no_questions(pulse_client: Any, body: bytes) -> None:
    for path in ("/recommend", "/events", "/model"):
        answer = pulse_client.post(path, content=body, headers=JSON)
        assert answer.status_code == 400 and "error" in answer.json()


def test_what_is_not_there(pulse_client: Any) -> None:
    assert pulse_client.get("/nothing").status_code == 404
    assert pulse_client.get("/recommend").status_code == 405
    assert pulse_client.post("/recommend", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert pulse_client.get("/health", headers={"host": "evil.example"}).status_code == 200
    assert pulse_client.get("/users/u01/timeline").json()["error"].startswith("the parameters from and to are missing")
    assert pulse_client.get("/users/u01/timeline?from=2020-01-02&to=2020-01-01").status_code == 400
    assert pulse_client.get("/items/item%201/curve?from=2020-01-01&to=2020-01-02&steps=x").status_code == 400


def test_health_model_and_metrics(client: Any) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    about = client.get("/model").json()
    assert about["items"] == 15 and about["users_of_dataset"] == 20 and about["max_len"] == MAX_LEN
    assert client.get("/ready").json() == {"status": "ready", "model": about["version"]}
    ask(client, user_id="u01")
    text = client.get("/metrics").text
    assert 'trope_requests_total{route="/recommend",status="200"} 1.0' in text
    assert 'trope_answers_total{source="model"} 1.0' in text
    client.get("/users/secret/timeline?from=2020-01-01&to=2020-01-02")
    text = client.get("/metrics").text
    assert 'route="/users/{user_id}/timeline"' in text and "secret" not in text


def test_a_key_is_asked_for(pulse_run: Path, tmp_path: Path) -> None:
    with client_of(pulse_run, tmp_path / "s", keys=("k" * 16, "another key of mine")) as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        refused = ({}, {"x-api-key": "k" * 15}, {"authorization": "Bearer wrong"}, {"authorization": "k" * 16})
        for headers in refused:
            assert client.get("/model", headers=headers).status_code == 401
            assert client.post("/recommend", json={"user_id": "u01"}, headers=headers).status_code == 401
        for headers in ({"x-api-key": "k" * 16}, {"authorization": "bearer another key of mine"}):
            assert client.get("/model", headers=headers).status_code == 200


def test_size_rate_and_host_are_limited(pulse_run: Path, tmp_path: Path) -> None:
    hosts, limits = ("127.0.0.1",), Limits(body=1000)
    with client_of(pulse_run, tmp_path / "s", rate=4, hosts=hosts, limits=limits) as client:
        assert client.post("/recommend", json={"user_id": "x" * 2000}).status_code == 413
        chunks = (b" " * 600 for _ in range(3))
        assert client.post("/recommend", content=chunks, headers=JSON).status_code == 413
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 421
        codes = {client.get("/health").status_code for _ in range(60)}  # more than 4 a second on any machine
        assert codes == {200, 429}


def test_a_body_that_does_not_arrive_is_given_up(pulse_run: Path, tmp_path: Path) -> None:
    parts = [{"type": "http.request", "body": b"[", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/recommend", "query_string": b"", "client": ("127.0.0.1", 9)}
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    with client_of(pulse_run, tmp_path / "s", limits=Limits(upload=0.05)) as client:
        asyncio.run(client.app({**scope, "headers": headers}, receive, send))
    assert sent[0]["status"] == 408 and b"not here after 0.05 seconds" in sent[1]["body"]


def test_wrong_keys_are_limited_too(pulse_run: Path, tmp_path: Path) -> None:
    with client_of(pulse_run, tmp_path / "s", keys=("k" * 16,), rate=0.001) as client:
        codes = [client.get("/model", headers={"x-api-key": f"guess {place}"}).status_code for place in range(3)]
        assert codes == [401, 429, 429]


def test_a_token_bucket_fills_again() -> None:
    clock = [0.0]
    buckets = TokenBuckets(2.0, lambda: clock[0])
    assert [buckets.take("a") for _ in range(6)] == [True] * 4 + [False] * 2
    assert buckets.take("b")
    clock[0] = 1.0
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_log_that_cannot_be_written_stops_nobody(pulse_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    store = SqliteStore(tmp_path / "s")
    app = make_app({"": Served.open(pulse_run, None, store, HISTORY, "cpu")}, store, Options(device="cpu"), Log())
    full = open("/dev/full", "w")  # noqa: SIM115, closing it would raise what was not written
    monkeypatch.setattr(sys, "stderr", full)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for _ in range(3):
            assert listed(ask(client, user_id="u01"))
        assert client.get("/model").status_code == 200
    assert not (tmp_path / "s-wal").exists(), "the store was closed"
    with pytest.raises(OSError, match="space"):
        full.close()


def test_a_full_queue_says_try_again(pulse_run: Path, tmp_path: Path) -> None:
    with client_of(pulse_run, tmp_path / "s", limits=Limits(waiting=0)) as client:
        answer = client.post("/recommend", json={"user_id": "u01"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_a_model_is_swapped(data: Sequences, pulse_run: Path, tmp_path: Path) -> None:
    other = make_run(data, tmp_path / "other", "hstu-trope", seed=1)
    with client_of(pulse_run, tmp_path / "s") as client:
        old = ask(client, user_id="u01", moment=NOW)
        tell(client, ("u01", "item 1", NOW))
        answer = client.post("/model", json={"path": str(other)})
        assert answer.status_code == 200, answer.text
        new = ask(client, user_id="u01", moment=NOW, filter_seen="history", k=15)
        assert new["model"] == answer.json()["version"] != old["model"]
        assert "item 1" not in listed(new), "the new model knows the stored events"
        for path in ("nowhere", str(tmp_path)):
            answer = client.post("/model", json={"path": path})
            assert answer.status_code == 400 and "the old one stays" in answer.json()["error"]
        assert ask(client, user_id="u01")["model"] == new["model"]


def test_a_watched_folder_is_served_when_it_changes(data: Sequences, pulse_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pulse_run, run)
    other = make_run(data, tmp_path / "other", seed=2)
    with client_of(run, tmp_path / "s", watch=run, watch_seconds=0.02) as client:
        first = ask(client, user_id="u01")["model"]
        time.sleep(0.1)
        weights = run / "best" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-7])  # a copy that is under way
        time.sleep(0.2)
        assert ask(client, user_id="u01")["model"] == first
        shutil.rmtree(run / "best")
        shutil.copytree(other / "best", tmp_path / "new")
        (tmp_path / "new").rename(run / "best")
        wait_until(lambda: ask(client, user_id="u01")["model"] != first)


def test_a_model_that_is_replaced_while_the_server_starts_is_served(data: Any, pulse_run: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", make_run(data, tmp_path / "other", seed=2)
    shutil.copytree(pulse_run, run)
    store = SqliteStore(tmp_path / "s")
    served = Served.open(run, None, store, HISTORY, "cpu")
    shutil.rmtree(run / "best")
    shutil.copytree(other / "best", run / "best")
    options = Options(device="cpu", watch=run, watch_seconds=0.02)
    with TestClient(make_app({"": served}, store, options, Log(requests=False)), base_url="http://127.0.0.1") as client:
        wait_until(lambda: ask(client, user_id="u01")["model"] == version_of(other))


def test_events_that_the_dataset_has_already_are_not_twice(pulse_run: Path, data: Any, tmp_path: Path) -> None:
    """A run that learned the stored events brings them along in its dataset."""
    items, times, _ = data.whole_histories(*(_first_user(data)))
    store = SqliteStore(tmp_path / "s")
    ids = data.ids("item_ids")
    store.append(
        [[Event("u01", ids[item - 1], when) for item, when in zip(items.tolist(), times.tolist(), strict=True)]]
    )
    with client_of(pulse_run, store) as client, client_of(pulse_run, tmp_path / "empty") as other:
        assert ask(client, user_id="u01", moment=NOW) == ask(other, user_id="u01", moment=NOW)


def test_nor_if_they_are_told_while_the_user_is_in_memory(client: Any, data: Any) -> None:
    items, times, _ = data.whole_histories(*(_first_user(data)))
    ids = data.ids("item_ids")
    asked = {"user_id": "u01", "moment": NOW, "k": 15, "explain": True}
    before = ask(client, **asked)
    tell(client, *[("u01", ids[item - 1], when) for item, when in zip(items.tolist(), times.tolist(), strict=True)])
    assert ask(client, **asked) == before
    tell(client, ("u01", ids[int(items[-1]) % 15], int(times[-1])))
    assert ask(client, **asked) != before, "what the dataset does not hold is history"


def test_an_event_that_another_server_stored_is_not_twice(data: Any, pulse_run: Path, tmp_path: Path) -> None:
    """It comes between following the store and reading the user's events, and the dataset holds it already."""
    store = SqliteStore(tmp_path / "s")
    served = Served.open(pulse_run, None, store, HISTORY, "cpu")
    items, times, _ = data.whole_histories(*(_first_user(data)))
    event = Event("u01", data.ids("item_ids")[int(items[-1]) - 1], int(times[-1]))
    store.append([[event]])
    before = len(served.people.get(["u01"])[0].items)
    served.follow()
    assert len(served.people.get(["u01"])[0].items) == before == len(items)
    store.close()


def _first_user(data: Sequences) -> Any:
    users = torch.tensor([data.ids("user_ids").find("u01")])
    return users, data.count_before(users, NOW)


def test_a_run_without_its_dataset_is_served(run: Path, data: Any, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(run, alone)
    (alone / "data.json").unlink()
    with client_of(alone, tmp_path / "s") as client:
        assert ask(client, user_id="u01")["from"] == "counts"
    with client_of(alone, tmp_path / "s", data=data.path) as client:
        assert ask(client, user_id="u01")["from"] == "model"


@pytest.mark.parametrize("lost", ["items.npy", "meta.json"])
def test_a_run_whose_dataset_has_lost_a_file_is_refused(data: Any, tmp_path: Path, lost: str) -> None:
    """Served without it, everybody would be a stranger."""
    copy = Sequences.load(shutil.copytree(data.path, tmp_path / "data"))
    run = make_run(copy, tmp_path / "run")
    (copy.path / lost).unlink()
    with pytest.raises(FileNotFoundError, match=lost), client_of(run, tmp_path / "s"):
        pass
    shutil.rmtree(copy.path)  # elsewhere: no folder at all
    with client_of(run, tmp_path / "s") as client:
        assert ask(client, user_id="u01")["from"] == "counts"


def test_a_store_of_something_else_is_refused(pulse_run: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE t (x)")
    with pytest.raises(ValueError, match="database of something else"):
        SqliteStore(tmp_path / "other")
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(ValueError, match="cannot open the store"):
        SqliteStore(tmp_path / "text")


@pytest.mark.parametrize("after", range(1, 5))
def test_servers_that_begin_together_make_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Another one makes the store while this one looks whether there is one: after so many of its queries."""
    queries: list[str] = []

    class Slower(sqlite3.Connection):
        def execute(self, query: str, *arguments: Any) -> Any:
            queries.append(query)
            found = super().execute(query, *arguments)
            if len(queries) != after:
                return found
            rows = found.fetchall()
            monkeypatch.undo()
            SqliteStore(tmp_path / "s").close()
            return SimpleNamespace(fetchone=lambda: rows[0])

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Slower))
    store = SqliteStore(tmp_path / "s")
    assert len(queries) > after
    assert store.append([[Event("ann", 7, NOW)]]) == [1]
    store.close()
