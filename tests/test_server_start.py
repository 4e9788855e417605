"""What a server holds: a model that was swapped is freed, also the first one."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from serving import make_data, make_run
from starlette.testclient import TestClient
from test_fit import invoke

from trope.online.assignment import ArmOption
from trope.server.app import Options
from trope.server.logs import Log
from trope.server.served import Served
from trope.server.start import start
from trope.server.start_trial import open_trial


@pytest.mark.parametrize("arms", [("",), ("control", "trope")])
def test_a_model_that_was_swapped_is_freed(arms: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    data = make_data(tmp_path)
    paths = [make_run(data, tmp_path / f"run{seed}", seed=seed) for seed in range(3)]
    refs: list[Any] = []
    opened = Served.open

    def noted(*arguments: Any) -> Served:
        served = opened(*arguments)
        refs.append([weakref.ref(part) for part in (served, served.recommender.model, served.encoder, served.people)])
        return served

    monkeypatch.setattr(Served, "open", noted)
    runs = {arm: ArmOption(arm, str(path), 1.0) for arm, path in zip(arms, paths, strict=False)}
    begin = partial(open_trial, "spring", tmp_path / "shown", runs, may_override=False, watch=False)
    log, options = Log(requests=False), Options(device="cpu")
    started = start(runs, None, tmp_path / "s", options, log, begin if len(arms) > 1 else None)
    try:
        gc.collect()
        gc.freeze()  # as `trope serve` does: what is in a cycle then stays for good
        with TestClient(started.app, base_url="http://127.0.0.1") as client:
            assert client.post("/recommend", json={"user_id": "u01"}).status_code == 200
            swap = {"path": str(paths[2])} | ({"arm": arms[-1]} if len(arms) > 1 else {})
            assert client.post("/model", json=swap).status_code == 200
            assert client.post("/recommend", json={"user_id": "u01"}).status_code == 200
            old, new = refs[len(arms) - 1], refs[-1]
            wait_until(lambda: all(part() is None for part in old), "the old model is still there")
            assert all(part() is not None for part in new)
    finally:
        gc.unfreeze()


def test_a_folder_without_a_model_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, said = invoke("serve", tmp_path, "--port", 0)
    assert code == 2 and "is it the folder of a trained model?" in said and "\n" not in said.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_behind_a_link_must_be_told_where_events_go(tmp_path: Path) -> None:
    """Events inside the folder would stay behind when the link moves to the next model."""
    make_run(make_data(tmp_path), tmp_path / "monday")
    (tmp_path / "live").symlink_to("monday")
    before = sorted((tmp_path / "monday").rglob("*"))
    code, said = invoke("serve", tmp_path / "live", "--port", 0)
    assert code == 2 and "is a link" in said and "--store" in said and "\n" not in said.strip()
    assert sorted((tmp_path / "monday").rglob("*")) == before
