"""The commands of docs/scale.md on several machines, which are lost: network namespaces that see one disk.

Run by `make test-ranks`, as root, in about nine minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_logs import loose, prepared, random_log, write_parquet
from safetensors.torch import load_file
from training import SIZE, tiny_data

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from clusters import ENV, PATIENCE, Cluster, lose, running
from hosts import Hosts, why_not

from trope.data.folder import read_meta
from trope.data.protocols import Protocol
from trope.runs import BEST, LOG, WEIGHTS

pytestmark = pytest.mark.ranks
EPOCHS = 10
# The last epoch's model is the best one, so that all epochs are in the weights that are compared.
SETTINGS = (*SIZE, f"train.epochs={EPOCHS}", f"train.eval_every={EPOCHS}", "train.parts=4")


@pytest.fixture(scope="module", autouse=True)
def _machines() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("cluster")).path


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    subprocess.run([sys.executable, *training(data, run)], check=True, capture_output=True, timeout=PATIENCE, env=ENV)
    return run


def training(data: Path, run: Path) -> list[str]:
    chosen = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["-m", "trope", "train", str(data), "--out", str(run), "--resume", "--model", "hstu-trope",
            "--device", "cpu", "--no-progress", *chosen]  # fmt: skip


def cluster_of(nodes: str, per_node: int, data: Path, run: Path) -> Cluster:
    return Cluster(nodes, per_node, training(data, run), run)


def check_equal(run: Path, one: Path) -> None:
    """To the bit: the losses of all epochs, the weights and the test."""
    assert losses(run) == losses(one) and len(losses(one)) == EPOCHS
    found, wanted = (load_file(each / BEST / WEIGHTS) for each in (run, one))
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
    assert scores_of(run) == scores_of(one)


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    return {row["epoch"]: row["epoch_loss"] for row in rows if "epoch_loss" in row}


def scores_of(run: Path) -> dict[str, float]:
    return json.loads((run / "metrics.json").read_text())["test"]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1)])
def test_machines_train_what_one_process_trains(
    data: Path, undisturbed: Path, tmp_path: Path, nodes: int, per_node: int
) -> None:
    cluster = cluster_of(str(nodes), per_node, data, tmp_path / "run")
    with running(nodes, cluster) as (_, jobs):
        assert cluster.ends(jobs) == [0] * nodes, cluster.said()
    check_equal(cluster.run, undisturbed)


def test_a_machine_that_died_comes_back(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """With a fixed number of machines the others wait for it, and start again with it."""
    cluster = cluster_of("2", 2, data, tmp_path / "run")
    with running(2, cluster) as (machines, jobs):
        machines[1].kill()
        jobs[1] = cluster.start(machines[1])
        assert cluster.ends(jobs) == [0, 0], cluster.said()
    check_equal(cluster.run, undisturbed)


@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "cut"])
def test_the_others_go_on_without_a_machine(data: Path, undisturbed: Path, tmp_path: Path, is_cut: bool) -> None:
    """With a range of machines."""
    cluster = cluster_of("1:2", 2, data, tmp_path / "run")
    with running(2, cluster) as (machines, jobs):
        lose(machines[1], is_cut)
        assert cluster.ends(jobs[:1]) == [0], cluster.said()  # `torchrun` of a machine without a cable waits on
    assert "trope: another process was lost: " in cluster.said()
    check_equal(cluster.run, undisturbed)


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_cable_that_is_out_for_a_moment_changes_nothing(
    data: Path, undisturbed: Path, tmp_path: Path, nodes: str
) -> None:
    cluster = cluster_of(nodes, 2, data, tmp_path / "run")
    with running(2, cluster) as (machines, jobs):
        machines[1].cut()
        epoch = cluster.epoch()
        time.sleep(20)
        assert cluster.epoch() <= epoch + 1, "the others waited"
        machines[1].mend()
        assert cluster.ends(jobs) == [0, 0], cluster.said()
    assert "another process was lost" not in cluster.said()
    check_equal(cluster.run, undisturbed)


@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "cut"])
def test_without_the_first_machine_the_others_end(data: Path, undisturbed: Path, tmp_path: Path, is_cut: bool) -> None:
    """The rendezvous is lost with it. The others start again with another first machine, whatever the old one does."""
    cluster = cluster_of("1:2", 2, data, tmp_path / "run")
    with running(2, cluster) as (machines, jobs):
        for machine in machines:
            machine.configure("net/ipv4/tcp_retries2", 6)  # `torchrun` itself would wait for a quarter of an hour
        lose(machines[0], is_cut)
        assert cluster.ends(jobs[1:]) != [0]
        cluster.first = "machine2"
        assert cluster.ends([cluster.start(machines[1])]) == [0], cluster.said()
    check_equal(cluster.run, undisturbed)


def test_a_name_at_a_loopback_address_needs_an_interface(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The machine that cannot reach the other one says so in one line."""
    cluster = cluster_of("2", 2, data, tmp_path / "run")
    with Hosts(2, tmp_path, has_own_name=False) as machines:
        for host in machines:
            cluster.start(host)
        cluster.wait_until(lambda: "trope: processes cannot reach each other" in cluster.said())
        (line, *_) = [row for row in cluster.said().splitlines() if "trope: processes cannot" in row]
        assert "127.0.1.1" in line and "GLOO_SOCKET_IFNAME" in line
        for host in machines:  # the other machine may wait for half an hour, which is gloo's patience
            host.kill()
        named = {"GLOO_SOCKET_IFNAME": "eth0"}
        assert cluster.ends([cluster.start(host, named) for host in machines]) == [0, 0], cluster.said()
    check_equal(cluster.run, undisturbed)


def spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None or shutil.which("java") is None:
        pytest.skip("pyspark or Java is missing")
    return Path(found.origin).parent


def test_a_spark_cluster_writes_duckdbs_shards_and_may_lose_a_worker(tmp_path: Path) -> None:
    """One master with the driver, two workers. One worker dies when the first shards are there."""
    home, master = spark_home(), "spark://machine1:7077"
    log = write_parquet(tmp_path / "log.parquet", random_log(6_000, users=200, items=50))
    prepared(log, tmp_path / "duckdb", loose(shard_users=2, protocol=Protocol("holdout", window=86_400)))
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.shuffle.partitions 4\n")
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home), "SPARK_CONF_DIR": str(tmp_path)}
    limits = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_WORKER_MEMORY": "1g", "SPARK_WORKER_CORES": "1"}
    started = str(home / "bin" / "spark-class"), "org.apache.spark.deploy"
    command = [
        sys.executable, "-m", "trope", "prepare", str(log), "--out", str(tmp_path / "spark"), "--engine", "spark",
        "--master", master, "--shard-users", "2", "--protocol", "holdout", "--window", "1d",
        "--min-user", "1", "--min-item", "1",
    ]  # fmt: skip
    with Hosts(3, tmp_path) as (first, *others), (tmp_path / "output").open("a") as output:

        def said() -> str:
            return (tmp_path / "output").read_text()

        def wait_until(condition: Callable[[], object]) -> None:
            until = time.monotonic() + PATIENCE
            while not condition():
                assert time.monotonic() < until, said()
                time.sleep(0.02)

        first.start([started[0], f"{started[1]}.master.Master", "--host", first.name, "--port", "7077"], output, env)
        for host in others:
            folder = str(tmp_path / host.name)
            worker = [started[0], f"{started[1]}.worker.Worker", "--work-dir", folder, master]
            host.start(worker, output, {**env, **limits})
        wait_until(lambda: said().count("Registering worker") == 2)
        job = first.start(command, output, env)
        wait_until(lambda: job.poll() is not None or any(tmp_path.glob(".spark.partial*/shards/*")))
        others[0].kill()
        assert job.wait(PATIENCE) == 0, said()
    assert "Lost executor" in said()
    assert all(any((tmp_path / host.name).glob("app-*/*")) for host in others), "each machine had an executor"
    assert len(read_meta(tmp_path / "spark")["shards"]) == 100
    found, wanted = (
        {file.relative_to(tmp_path / each): file.read_bytes() for file in (tmp_path / each).rglob("*.npy")}
        for each in ("spark", "duckdb")
    )
    assert found == wanted
