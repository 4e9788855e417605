"""Several servers on one Redis, a real one on a free port: every server sees what any of them was told."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from patience import wait_until
from serving import NOW, client_of, make_data, make_run

from trope.server.open_store import open_store
from trope.server.redis_store import POSITION, RedisStore
from trope.server.schema import Event
from trope.server.sqlite_store import SqliteStore
from trope.server.store import Past, StoreError

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on the PATH")
pytestmark = [pytest.mark.serve, needs_redis]


class Redis:
    """redis-server in a folder, flushing every command to disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.folder = f"redis://127.0.0.1:{self.port}/0", folder
        self.start()

    def start(self) -> None:
        options = ["--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        command = ["redis-server", "--port", str(self.port), "--dir", str(self.folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self.answers, "redis-server does not answer")

    def answers(self) -> bool:
        try:
            return bool(redis.Redis(port=self.port).ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    started = Redis(tmp_path)
    yield started
    started.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    return make_run(make_data(folder), folder / "run")


def ask(client: Any, **question: Any) -> Any:
    answer = client.post("/recommend", json=question)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tell(client: Any, user: str, item: str, moment: int, **more: Any) -> Any:
    event = {"user_id": user, "item_id": item, "timestamp": moment, **more}
    answer = client.post("/events", json={"events": [event]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_one_server_is_told_the_other_answers_with(server: Redis, run: Path) -> None:
    with client_of(run, server.url) as one, client_of(run, server.url) as other:
        clients = [one, other]
        for step in range(20):
            writer, reader = clients[step % 2], clients[(step + 1) % 2]
            user, item = f"u{step % 3:02}", f"item {1 + step % 15}"
            ask(reader, user_id=user, moment=NOW)  # the history is in the reader's memory
            tell(writer, user, item, NOW)
            question = {"user_id": user, "moment": NOW, "filter_seen": "window", "k": 15}
            answers = [ask(client, **question) for client in clients]
            assert item not in [entry["item_id"] for entry in answers[1]["items"]]
            assert answers[0] == answers[1]
        assert tell(one, "u01", "item 1", NOW, event_id="once")["stored"] == 1
        assert tell(other, "u01", "item 1", NOW, event_id="once")["stored"] == 0


def test_acknowledged_events_survive_a_killed_redis(server: Redis, run: Path) -> None:
    with client_of(run, server.url) as client:
        for step in range(30):
            tell(client, "ann", f"item {1 + step % 15}", NOW + step)
        before = ask(client, user_id="ann", moment=NOW + 100)
        server.kill()
        answer = client.post("/recommend", json={"user_id": "ann"})
        assert answer.status_code == 503 and "does not answer" in answer.json()["error"]
        refused = {"events": [{"user_id": "ann", "item_id": "item 1", "timestamp": NOW}]}
        assert client.post("/events", json=refused).status_code == 503
        assert client.get("/health").status_code == 200
        server.start()
        assert ask(client, user_id="ann", moment=NOW + 100) == before
    with client_of(run, server.url) as client:
        after = ask(client, user_id="ann", moment=NOW + 100)
        assert [i["item_id"] for i in after["items"]] == [i["item_id"] for i in before["items"]]


def test_ready_says_when_the_store_is_gone_and_when_it_is_back(server: Redis, run: Path) -> None:
    """Without any other request."""
    with client_of(run, server.url) as client:
        assert client.get("/ready").status_code == 200
        server.kill()
        wait_until(lambda: client.get("/ready").status_code == 503)
        answer = client.get("/ready")
        assert "does not answer" in answer.json()["error"] and answer.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        server.start()
        wait_until(lambda: client.get("/ready").status_code == 200)


def test_ready_knows_of_a_post_that_failed(server: Redis, run: Path) -> None:
    with client_of(run, server.url) as client:
        redis.Redis(port=server.port).config_set("maxmemory", 1)
        event = {"user_id": "ann", "item_id": "item 1", "timestamp": NOW}
        assert client.post("/events", json={"events": [event]}).status_code == 503
        assert client.get("/ready").status_code == 503
        redis.Redis(port=server.port).config_set("maxmemory", 0)
        wait_until(lambda: client.get("/ready").status_code == 200)


def test_a_store_tells_the_same_whatever_it_is(server: Redis, tmp_path: Path) -> None:
    stores: list[Any] = [SqliteStore(tmp_path / "s"), RedisStore(server.url)]
    posts = [
        [Event("ann", "a", 5), Event("ann", "b", 4, "x")],
        [Event("bob", 7, 6), Event("bob", 'q"\u2028é', 6, "y"), Event("bob", "c", 7, "x")],
        [Event("ann", "a", 5, "y")],
    ]
    for store in stores:
        assert store.last_position() == 0 and store.after(0, 10) == []
        assert store.append(posts) == [2, 2, 0]
        assert [tuple(event) for event in store.after(0, 10)] == [
            (1, "ann", "a", 5), (2, "ann", "b", 4), (3, "bob", 7, 6), (4, "bob", 'q"\u2028é', 6),
        ]  # fmt: skip
        assert [event.position for event in store.after(2, 1)] == [3]
        assert store.last_position() == 4
        expected = [[Past(4, 'q"\u2028é', 6)], [], [Past(2, "b", 4)]]
        assert store.histories(["bob", "nobody", "ann"], 1) == expected
        assert "on disk when acknowledged" in store.describe()
        many = [Event(f"user {place}", place, 1 + place) for place in range(2500)]
        assert store.append([many]) == [2500] and len(store.after(4, 9999)) == 2500
        store.close()


def test_events_after_a_loss_are_seen(server: Redis, run: Path) -> None:
    """A Redis without a file on disk comes back empty: positions begin anew, and so do the servers."""
    with client_of(run, server.url) as one, client_of(run, server.url) as other:
        before = [ask(client, user_id="nobody", moment=NOW + 100, k=15)["items"] for client in (one, other)]
        for step in range(5):
            tell(one, "ann", "item 1", NOW + step)
        ask(other, user_id="ann", moment=NOW + 100)
        redis.Redis(port=server.port).flushall()
        for client, scores in zip((one, other), before, strict=True):
            assert ask(client, user_id="ann", moment=NOW + 100)["from"] == "counts"
            assert ask(client, user_id="nobody", moment=NOW + 100, k=15)["items"] == scores, "counts are forgotten too"
        tell(one, "bob", "item 2", NOW)
        question = {"user_id": "bob", "moment": NOW, "filter_seen": "history", "k": 15}
        for client in (one, other):
            assert "item 2" not in [entry["item_id"] for entry in ask(client, **question)["items"]]


def test_a_post_is_stored_whole_or_not_at_all(server: Redis) -> None:
    """Memory that is full, and a position that was lost: the next try, with the same ids, stores all of it."""
    store, client = RedisStore(server.url), redis.Redis(port=server.port)
    store.append([[Event("ann", "a", 5, "first")]])
    post = [Event("ann", place, 6, f"id {place}") for place in range(2_500)]
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match="does not answer"):
        store.append([post])
    client.config_set("maxmemory", 0)
    client.delete(POSITION)  # the stream refuses positions that it has
    with pytest.raises(StoreError, match="equal or smaller"):
        store.append([post])
    client.set(POSITION, 1)
    assert len(store.after(0, 9_999)) == 1 and len(store.histories(["ann"], 9_999)[0]) == 1
    assert store.append([post]) == [2_500] and store.append([post]) == [0]
    assert len(store.after(0, 9_999)) == 2_501
    store.close()


def test_long_posts_are_one_script(server: Redis) -> None:
    store, client = RedisStore(server.url), redis.Redis(port=server.port)
    sent = int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
    assert store.append([[Event("ann", place, 6) for place in range(10_000)]] * 2) == [10_000] * 2
    assert int(client.info("commandstats")["cmdstat_evalsha"]["calls"]) - sent <= 2, "one, and one before it is known"
    store.close()


def test_a_redis_that_is_not_there(server: Redis) -> None:
    server.kill()
    with pytest.raises(ValueError, match="does Redis run there") as refused:
        open_store("redis://:secret@127.0.0.1:1/0")
    assert "secret" not in str(refused.value)
