"""What the page asks of the server: its files, users by prefix, a year in one body, a second model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_logs import prepared, random_log, write_parquet
from serving import END, HISTORY, client_of, make_data, make_run
from starlette.testclient import TestClient

from trope.data.catalogue import Catalogue
from trope.data.sequences import Sequences
from trope.server.app import Options, make_app
from trope.server.dataset import KnownUsers
from trope.server.logs import Log
from trope.server.open_store import open_store
from trope.server.page_files import FILES
from trope.server.served import Served
from trope.server.timeline import UNIT

MOMENTS = [END + day * 86_400 for day in range(-12, 30, 3)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return make_data(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module", params=["trope", "hstu-trope"])
def run(request: pytest.FixtureRequest, data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"), request.param)


@pytest.fixture
def client(run: Path, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(run, tmp_path / "events.sqlite") as client:
        yield client


def post(client: TestClient, path: str, **content: Any) -> Any:
    answer = client.post(path, json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "question",
    [
        {"user_id": "u03"},
        {"user_id": "u03", "history_until": END - 5 * 86_400, "filter_seen": "history"},
        {"user_id": "u04", "moments": [END - 30 * 86_400, *MOMENTS]},  # no event until the first moment
        {"history": [{"item_id": "item 2", "timestamp": END - 10**6}, {"item_id": "no item", "timestamp": END}]},
        {"user_id": "nobody"},
    ],
)
def test_a_timeline_says_what_recommend_says(client: TestClient, question: dict[str, Any]) -> None:
    asked = {"moments": MOMENTS, "k": 6, **question}
    said, compact = post(client, "/recommend", **asked, explain=True), post(client, "/timeline", **asked)
    assert compact["moments"] == asked["moments"] and compact["note"] == said["note"]
    assert compact["model"] == said["model"] and compact["user_id"] == said["user_id"]
    ids = [item["item_id"] for item in compact["items"]]
    for step, row in enumerate(said["moments"]):
        assert [ids[place] for place in compact["lists"][step]] == [item["item_id"] for item in row["items"]]
        scores = [item["score"] for item in row["items"]]
        assert np.multiply(compact["scores"][step], UNIT) == pytest.approx(scores, abs=UNIT)
        # An item's curve goes through its listed scores.
        curves = [compact["curves"][place][step] for place in compact["lists"][step]]
        assert np.multiply(curves, UNIT) == pytest.approx(scores, abs=1.5 * UNIT)
        assert (step in compact["by_counts"]) == (row["from"] == "counts")
        for item, why in zip(row["items"], compact["why"][step], strict=True):
            known = dict(zip(compact["parts"], why, strict=True))
            assert {part: known.get(part, 0) * UNIT for part in item["why"]} == pytest.approx(item["why"], abs=UNIT)


def test_curves_know_items_where_they_are_not_listed(client: TestClient) -> None:
    asked = {"user_id": "u03", "moments": MOMENTS, "history_until": END}
    few, all_items = (post(client, "/timeline", **asked, k=k) for k in (3, 15))
    names = [item["item_id"] for item in all_items["items"]]
    for item, curve in zip(few["items"], few["curves"], strict=True):
        place = names.index(item["item_id"])
        listed = [
            scores[places.index(place)] for places, scores in zip(all_items["lists"], all_items["scores"], strict=True)
        ]
        assert curve == pytest.approx(listed, abs=1)


def test_bad_timelines_are_refused_in_a_line(client: TestClient) -> None:
    for content, message in (
        ({"user_id": "u03", "moments": MOMENTS, "compared": True}, "--compare"),
        ({"user_id": "u03", "compared": "yes"}, "true or false"),
        ({"user_id": "u03", "moments": MOMENTS, "new_items": True}, "new_items"),
        ({"user_id": "u03", "moments": MOMENTS * 20, "k": 1000}, "moments times k may be 20,480"),
        ([], "an object"),
    ):
        answer = client.post("/timeline", json=content)
        assert answer.status_code == 400 and message in answer.json()["error"]


def test_a_second_model_answers_and_sees_new_events(data: Sequences, tmp_path: Path) -> None:
    ours, theirs = make_run(data, tmp_path / "ours"), make_run(data, tmp_path / "theirs", "hstu-trope", seed=1)
    store = open_store(tmp_path / "events.sqlite")
    served, compared = (Served.open(run, None, store, HISTORY, "cpu") for run in (ours, theirs))
    app = make_app({"": served}, store, Options(device="cpu"), Log(requests=False), compared)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        asked = {"user_id": "ann", "moments": [END + 86_400]}
        assert post(client, "/timeline", **asked, compared=True)["by_counts"] == [0]
        post(client, "/events", events=[{"user_id": "ann", "item_id": "item 3", "timestamp": END}])
        first = post(client, "/timeline", **asked)
        assert compared.position == served.position, "it follows along, and need not read a day of events when asked"
        second = post(client, "/timeline", **asked, compared=True)
        assert first["by_counts"] == second["by_counts"] == []
        described = client.get("/model").json()
        assert (first["model"], second["model"]) == (described["version"], described["compared"]["version"])
        assert first["model"] != second["model"]
        assert (described["run"], described["compared"]["run"]) == ("ours", "theirs")


def test_users_are_found_by_prefix(client: TestClient, data: Sequences) -> None:
    def found(**query: Any) -> list[dict[str, Any]]:
        return client.get("/users", params=query).json()["users"]

    assert [user["user_id"] for user in found(prefix="u1")] == [f"u{n}" for n in range(10, 20)]
    assert [user["user_id"] for user in found(limit=2)] == ["u01", "u02"]
    assert found(prefix="x") == [] == found(prefix="u011")
    (user,) = found(prefix="u20")
    own = slice(*data.offsets[[19, 20]].tolist())
    assert user["events"] == own.stop - own.start
    assert [user["first"], user["last"]] == data.times[own][[0, -1]].tolist()
    for query in ({"limit": 0}, {"limit": "x"}, {"name": "u"}, {"prefix": "u" * 300}):
        assert client.get("/users", params=query).status_code == 400


def test_whole_numbers_are_found_by_the_beginning_of_their_text(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users = [-5, *random.integers(0, 10_000, 300).tolist(), 7, 70, 2**62]
    events = [(user, item, 1_600_000_000 + item) for user in users for item in (1, 2, 3)]
    data = prepared(write_parquet(tmp_path / "log.parquet", events), tmp_path / "data")
    known = KnownUsers(data, Catalogue(data.ids("item_ids"), None))
    for prefix in ("", "7", "70", "71", "4", "-5", "0", "07", "x", "46", str(2**62), "9" * 25):
        wanted = [str(user) for user in sorted(set(users)) if str(user).startswith(prefix)]
        assert sorted(user.user_id for user in known.search(prefix, 1_000)) == sorted(wanted), prefix


def test_an_id_may_have_a_slash(tmp_path: Path) -> None:
    events = [(f"u/{user}", f"item/{item}/curve", time) for user, item, time in random_log()]
    data = prepared(write_parquet(tmp_path / "log.parquet", events), tmp_path / "data")
    with client_of(make_run(data, tmp_path / "run"), tmp_path / "s") as client:
        between = {"from": END + 10**4, "to": END + 10**6, "steps": 2}
        for user in ("u/7", "u%2F7"):
            answer = client.get(f"/users/{user}/timeline", params=between)
            assert answer.status_code == 200 and answer.json()["user_id"] == "u/7" and answer.json()["note"] is None
        for item in ("item/2/curve", "item%2F2%2Fcurve"):
            answer = client.get(f"/items/{item}/curve", params=between)
            assert answer.status_code == 200 and answer.json()["item_id"] == "item/2/curve"
            assert answer.json()["note"] is None
        assert client.get("/users/x/y/other").status_code == 404
        metrics = client.get("/metrics").text
        assert 'route="/users/{user_id}/timeline"' in metrics and 'route="/items/{item_id}/curve"' in metrics


def test_an_id_may_have_line_breaks_and_spaces_at_its_ends(tmp_path: Path) -> None:
    events = [(f" u\n{user} ", f"item\r\n{item}\n", time) for user, item, time in random_log()]
    data = prepared(write_parquet(tmp_path / "log.parquet", events), tmp_path / "data")
    with client_of(make_run(data, tmp_path / "run"), tmp_path / "s") as client:
        between = {"from": END + 10**4, "to": END + 10**6, "steps": 2}
        found = client.get("/users", params={"prefix": " u\n7"}).json()["users"]
        assert [user["user_id"] for user in found] == [" u\n7 "]
        answer = client.get("/users/%20u%0A7%20/timeline", params=between)
        assert answer.status_code == 200 and answer.json()["user_id"] == " u\n7 " and answer.json()["note"] is None
        answer = client.get("/items/item%0D%0A2%0A/curve", params=between)
        assert answer.status_code == 200 and answer.json()["item_id"] == "item\r\n2\n"
        assert 'route="/items/{item_id}/curve"' in client.get("/metrics").text


def test_an_integer_in_a_path_is_written_as_one(tmp_path: Path) -> None:
    events = [(user, -3 if item == 3 else item, time) for user, item, time in random_log()]
    data = prepared(write_parquet(tmp_path / "log.parquet", events), tmp_path / "data")
    with client_of(make_run(data, tmp_path / "run"), tmp_path / "s") as client:
        between = {"from": END + 10**4, "to": END + 10**6, "steps": 2}
        for item in (7, 10, -3):
            assert client.get(f"/items/{item}/curve", params=between).json()["item_id"] == item
        for path in ("1_0", "%207", "7%20", "+7", "--3", "7.0", "%D9%A7", "9" * 19, "9" * 30, "x"):
            answer = client.get(f"/items/{path}/curve", params=between)
            assert answer.status_code == 400 and "must be an integer" in answer.json()["error"], path


def test_the_page_is_served_with_types_and_a_policy(client: TestClient) -> None:
    page = client.get("/")
    assert page.url.path == "/page/" and page.headers["content-type"] == "text/html; charset=utf-8"
    for file in sorted(path for path in FILES.iterdir() if path.suffix != ".html"):
        answer = client.get(f"/page/{file.name}")
        assert answer.status_code == 200 and answer.content == file.read_bytes()
        kind = {".js": "text/javascript", ".css": "text/css"}[file.suffix]
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/page/{file.name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py"):
        assert client.get(path).status_code == 404


def test_the_pages_files_name_nothing_that_is_not_there_and_no_other_host() -> None:
    for file in FILES.iterdir():
        text = file.read_text(encoding="utf-8")
        named = re.findall(r'(?:from|import|href=|src=) ?"(?:\./)?([a-z]+\.(?:js|css))"', text)
        assert all((FILES / name).is_file() for name in named)
        assert not re.findall(r"(?<!www\.w3\.org)https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert len(text.splitlines()) <= 400
