"""Arms in the server: users are answered by their own arm, every list is logged, each arm swaps alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from patience import wait_until
from serving import HISTORY, NOW, client_of, make_data, make_run
from starlette.testclient import TestClient

from trope.data.sequences import Sequences
from trope.online.assignment import ArmOption, Experiment
from trope.online.exposures import read_experiment
from trope.server.app import Options, make_app
from trope.server.logs import Log
from trope.server.open_store import open_store
from trope.server.served import Served
from trope.server.start_trial import open_trial, runs_of

USERS = [f"u{user:02}" for user in range(1, 21)] + ["new one", "new two"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return make_data(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def runs(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "control": make_run(data, folder / "a", "hstu-trope", seed=1),
        "trope": make_run(data, folder / "b", "trope", seed=2),
        "other": make_run(data, folder / "c", "trope", seed=3),
    }


Start = Callable[..., AbstractContextManager[TestClient]]


@pytest.fixture
def start(runs: dict[str, Path], tmp_path: Path) -> Start:
    @contextmanager
    def started(
        arms: tuple[str, ...] = ("control", "trope"), override: bool = False, watch: bool = False, share: float = 50
    ) -> Iterator[TestClient]:
        options = {arm: ArmOption(arm, str(runs.get(arm, runs["control"])), share) for arm in arms}
        store = open_store(tmp_path / "events.sqlite")
        models = {arm: Served.open(option.run, None, store, HISTORY, "cpu") for arm, option in options.items()}
        trial = open_trial("spring", tmp_path / "shown", options, models, may_override=override, watch=watch)
        app = make_app(models, store, Options(device="cpu", watch_seconds=0.02), Log(requests=False), None, trial)
        with TestClient(app, base_url="http://127.0.0.1") as client:
            yield client

    return started


def shown(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("shown/exposures-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def ask(client: TestClient, **question: Any) -> Any:
    answer = client.post("/recommend", json={"moment": NOW, "k": 5, **question})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: TestClient, route: str = "/recommend", **body: Any) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_users_are_answered_by_their_own_arm(start: Start, runs: dict[str, Path], tmp_path: Path) -> None:
    """Alone, in a list, as by a server of that arm's run alone; and every list is logged."""
    alone: dict[str, list[Any]] = {}
    for arm in ("control", "trope"):
        with client_of(runs[arm], tmp_path / f"{arm}.sqlite") as client:
            alone[arm] = [ask(client, user_id=user) for user in USERS]
    with start() as client:
        together = client.post("/recommend", json=[{"user_id": user, "moment": NOW, "k": 5} for user in USERS]).json()
        again = [ask(client, user_id=user) for user in USERS]
    experiment = Experiment("spring", {"control": 1, "trope": 1}, 0, "spring")
    for place, user in enumerate(USERS):
        arm = experiment.arm_of(user)
        for answer in (together[place], again[place]):
            assert answer["arm"] == arm
            assert [i["item_id"] for i in answer["items"]] == [i["item_id"] for i in alone[arm][place]["items"]]
            assert answer["model"] == alone[arm][place]["model"]
            assert answer.keys() == alone[arm][place].keys() | {"arm", "request_id"}
    assert {answer["arm"] for answer in together} == {"control", "trope"}
    rows = shown(tmp_path)
    answers = [*together, *again]
    assert len({row["request_id"] for row in rows}) == len(rows) == len(answers)
    for row, answer in zip(rows, answers, strict=True):
        assert abs(row.pop("answered") - time.time()) < 60
        assert row == {
            "request_id": answer["request_id"], "experiment": "spring", "user_id": answer["user_id"],
            "arm": answer["arm"], "moment": NOW, "items": [entry["item_id"] for entry in answer["items"]],
            "model": answer["model"], "forced": False,
        }  # fmt: skip
    told = read_experiment(tmp_path / "shown")
    assert told is not None and told.arms == {"control": 0.5, "trope": 0.5} and told.salt == "spring"


def test_events_reach_every_arm(start: Start) -> None:
    with start(override=True) as client:
        for arm in ("control", "trope"):
            assert ask(client, user_id="ann", arm=arm)["from"] == "counts"
        events = [{"user_id": "ann", "item_id": "item 3", "timestamp": NOW - 5}]
        assert client.post("/events", json={"events": events}).json()["stored"] == 1
        for arm in ("control", "trope"):
            answer = ask(client, user_id="ann", arm=arm, filter_seen="history", k=15)
            assert answer["from"] == "model" and "item 3" not in [entry["item_id"] for entry in answer["items"]]


def test_only_a_list_for_one_moment_of_a_user_is_logged(start: Start, tmp_path: Path) -> None:
    """A sweep is a preview, as a timeline is; a history has no user."""
    with start() as client:
        swept = client.post("/recommend", json={"user_id": "u01", "moments": [NOW, NOW + 9], "k": 2}).json()
        assert swept["request_id"] and len(swept["moments"]) == 2
        one = client.post("/recommend", json={"user_id": "u01", "moments": [NOW + 5], "k": 2}).json()
        without = ask(client, history=[{"item_id": "item 3", "timestamp": NOW - 9}])
        assert without["arm"] == "control"
        client.get(f"/users/u02/timeline?from={NOW - 99}&to={NOW}&steps=2")
        assert client.post("/timeline", json={"user_id": "u02", "moments": [NOW]}).status_code == 200
    rows = shown(tmp_path)
    assert [(row["request_id"], row["moment"]) for row in rows] == [(one["request_id"], NOW + 5)]
    assert rows[0]["items"] == [entry["item_id"] for entry in one["moments"][0]["items"]]


def test_an_override_needs_leave_and_is_logged_as_forced(start: Start, tmp_path: Path) -> None:
    with start() as client:
        assert "start the server with --allow-override" in refused(client, user_id="u01", arm="trope")
        assert "arm must be text" in refused(client, user_id="u01", arm=[1])
    assert not shown(tmp_path)
    with start(override=True) as client:
        answers = [ask(client, user_id="u01", arm=arm) for arm in ("control", "trope")]
        assert answers[0]["model"] != answers[1]["model"]
        assert refused(client, user_id="u01", arm="x") == "there is no arm 'x'; the arms are control, trope"
        assert "there is no arm 'x'" in refused(client, "/timeline", user_id="u01", moments=[NOW], arm="x")
        ask(client, user_id="u01")
    assert [(row["arm"], row["forced"]) for row in shown(tmp_path)][:2] == [("control", True), ("trope", True)]
    assert [row["forced"] for row in shown(tmp_path)] == [True, True, False]


def test_without_an_experiment_arms_are_unknown(runs: dict[str, Path], tmp_path: Path) -> None:
    with client_of(runs["trope"], tmp_path / "s") as client:
        assert "has an unknown entry 'arm'" in refused(client, user_id="u01", arm="trope")
        assert ask(client, user_id="u01").keys() & {"arm", "request_id"} == set()
        assert client.get("/ready").json().keys() == {"status", "model"}
        assert "experiment" not in client.get("/model").json()


def test_an_a_a_test(start: Start) -> None:
    with start(arms=("control", "same")) as client:
        answers = [ask(client, user_id=user) for user in USERS]
    assert {answer["arm"] for answer in answers} == {"control", "same"}
    assert len({answer["model"] for answer in answers}) == 1


def test_each_arm_swaps_alone(start: Start, runs: dict[str, Path], tmp_path: Path) -> None:
    with start() as client:
        before = client.get("/ready").json()["arms"]
        assert "the body must be" in refused(client, "/model", path=str(runs["other"]))
        assert "there is no arm 'x'" in refused(client, "/model", path=str(runs["other"]), arm="x")
        swapped = client.post("/model", json={"path": str(runs["other"]), "arm": "trope"})
        assert swapped.status_code == 200, swapped.text
        after = client.get("/ready").json()["arms"]
        assert after == {"control": before["control"], "trope": swapped.json()["version"]} != before
        answers = [ask(client, user_id=user) for user in USERS]
        assert all(answer["model"] == after[answer["arm"]] for answer in answers)
        about = client.get("/model").json()
        assert {arm: told["version"] for arm, told in about["experiment"]["arms"].items()} == after
        assert about["version"] == after["control"]
        metrics = client.get("/metrics").text
        assert all(f'trope_model{{version="{version}"}} 1.0' in metrics for version in after.values())
        assert f'version="{before["trope"]}"' not in metrics
    assert all(row["model"] == after[row["arm"]] for row in shown(tmp_path))


def test_each_arm_is_watched(start: Start, data: Sequences, runs: dict[str, Path], tmp_path: Path) -> None:
    with start(arms=("control", "trope"), watch=True) as client:
        before = client.get("/ready").json()["arms"]
        new = make_run(data, tmp_path / "new", "trope", seed=9)
        weights = runs["trope"] / "best"
        weights.rename(tmp_path / "old")
        (new / "best").rename(weights)
        try:
            wait_until(lambda: client.get("/ready").json()["arms"] != before)
            after = client.get("/ready").json()["arms"]
        finally:
            weights.rename(new / "best")
            (tmp_path / "old").rename(weights)
    assert after["control"] == before["control"] and after["trope"] != before["trope"]


def test_a_failing_disk_is_said_and_requests_are_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from trope.online import exposure_log

    monkeypatch.setattr(exposure_log, "_RETRY", 0.01)
    real = exposure_log._Journal.append

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with start() as client:
        assert client.get("/ready").json()["exposures"] == "kept"
        monkeypatch.setattr(exposure_log._Journal, "append", full)
        for user in USERS:
            assert ask(client, user_id=user)["items"]
        wait_until(lambda: client.get("/ready").json()["exposures"] != "kept")
        said = client.get("/ready")
        assert said.status_code == 200 and "No space left on device" in said.json()["exposures"]
        assert "trope_exposures_failing 1.0" in client.get("/metrics").text
        monkeypatch.setattr(exposure_log._Journal, "append", real)
        wait_until(lambda: client.get("/ready").json()["exposures"] == "kept")
        assert f"trope_exposures_total {len(USERS):.1f}" in client.get("/metrics").text
    assert [row["user_id"] for row in shown(tmp_path)] == USERS, "nothing was lost"


def test_a_restart_goes_on_and_other_shares_are_refused(start: Start, tmp_path: Path) -> None:
    with start() as client:
        first = {user: ask(client, user_id=user)["arm"] for user in USERS}
        began = client.get("/model").json()["experiment"]["started"]
    with start(share=7) as client:
        assert {user: ask(client, user_id=user)["arm"] for user in USERS} == first
        assert client.get("/model").json()["experiment"]["started"] == began
    assert len(shown(tmp_path)) == 2 * len(USERS)
    with (
        pytest.raises(ValueError, match=r"has the shares control 0.5, trope 0.5, got control 0.3333"),
        start(arms=("control", "trope", "other")),
    ):
        pass


def test_an_experiment_keeps_its_control_whatever_the_order_of_arms(start: Start, tmp_path: Path) -> None:
    """The control's model answers for everybody, and its run holds the events."""
    asked = ["trope=b:1", "control=a:1"]
    assert list(runs_of(None, asked, "spring", tmp_path / "shown", False)) == ["trope", "control"]
    with start() as client:
        model = client.get("/model").json()["version"]
    again = runs_of(None, asked, "spring", tmp_path / "shown", False)
    assert [arm.run for arm in again.values()] == ["a", "b"]
    with start(arms=tuple(again)) as client:
        assert client.get("/model").json()["version"] == model == ask(client, history=[])["model"]
    (tmp_path / "file").touch()
    assert runs_of(None, asked, "spring", tmp_path / "file", False), "`begin_experiment` says that it is a file"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((None, [], None, None, False), "give a run made by `trope train`, or --arm"),
        (("r", [], "spring", None, False), "--experiment needs arms"),
        (("r", [], None, Path("x"), False), "--exposures needs arms"),
        (("r", [], None, None, True), "--allow-override needs arms"),
        (("r", ["a=x:1", "b=y:1"], "spring", None, False), "give either RUN or --arm, not both"),
        ((None, ["a=x:1", "b=y:1"], None, None, False), "give --experiment NAME"),
        ((None, ["a=x:1"], "spring", None, False), "at least two arms, got a"),
        ((None, ["a=x:1", "b=y:0"], "spring", None, False), "share of arm b must be a positive number"),
        ((None, ["a=x:1", "b=y:1"], "../spring", None, False), "an experiment's name must be"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runs_of(*options)
