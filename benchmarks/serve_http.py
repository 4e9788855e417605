"""Requests a second over HTTP: `trope serve`, and LitServe around `Recommender`, with the demo's model on two cores.

    python benchmarks/serve_http.py --out results/serve_http.json      # needs litserve, which trope itself does not
    python benchmarks/serve_http.py --run runs/demo/trope --out results/serve_http_demo.json    # after make demo

64 clients ask for known users, ten items each, and ask again when the answer is there. Both servers find the users'
histories in the same dataset. `trope serve` has been asked for every user three times before, as a server that has been
running for a while: it then remembers their histories, where the model can. LitServe batches up to 64 requests and
ranks them with one `Recommender.rank`, at several batch timeouts and numbers of workers; the ratio is to the best of
them. The load generator shares the cores with the server; it is the same for both, keeps its requests as bytes and
parses one answer in a hundred. `client_cpu_ms` is what it needs. On a machine with other work compare the CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from serve_load import free_port, make_run

from trope.bench.load import load
from trope.bench.serve import warm_up
from trope.bench.server import Server, serve
from trope.data.stream import data_of_run
from trope.environment import describe

LITSERVE = Path(__file__).with_name("serve_litserve.py")
TIMEOUTS, WORKERS = (0.0, 0.005, 0.02), (1, 2)


def bodies(folder: Path, users: list[int], moment: int) -> Path:
    """Questions for users drawn at random."""
    drawn = np.random.default_rng(1).choice(users, 20_000)
    path = folder / "bodies.jsonl"
    path.write_text("".join(json.dumps({"user_id": int(user), "k": 10, "moment": moment}) + "\n" for user in drawn))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trope-serve-bench")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="trope")
    parser.add_argument("--run", type=Path, help="a run with integer users; default: generated, of the demo's size")
    parser.add_argument("--skip-litserve", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run, rows = given.run or make_run(given.folder, given.model), []
    data = data_of_run(run)
    ids = data.ids("user_ids")
    assert ids is not None
    users, moment = [int(user) for user in ids.to_list()], data.time_span[1] + 86_400
    given.folder.mkdir(parents=True, exist_ok=True)
    asked = bodies(given.folder, users, moment)

    def measure(turn: int, name: str, server: Server, path: str) -> None:
        try:
            if path == "/recommend":
                warm_up(server.url, [{"user_id": user, "moment": moment} for user in users])
            before = server.cpu_seconds()
            row = load(server.url, path, asked, given.clients, given.seconds)
            # The load's warm-up second is in the server's time too.
            each = (server.cpu_seconds() - before) / (row["rate"] * (given.seconds + 1))
            rows.append({"server": name, "round": turn, **row, "cpu_ms": 1000 * each})
        finally:
            server.end()
        row = rows[-1]
        times = f"p50 {row['p50']:7.1f} ms  p99 {row['p99']:7.1f} ms  {row['cpu_ms']:.2f} ms of CPU each"
        print(f"{name:36} {row['rate']:8,.0f} /s  {times}  {row['statuses']}", flush=True)

    for turn in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            measure(turn, "trope serve", serve(run, "--quiet", "--store", f"{folder}/a"), "/recommend")
            measure(turn, "trope serve, a log line each", serve(run, "--store", f"{folder}/b"), "/recommend")
        for workers in () if given.skip_litserve else WORKERS:
            for timeout in TIMEOUTS:
                command = [sys.executable, str(LITSERVE), str(run), str(free_port()), str(timeout), str(workers)]
                name = f"LitServe, {workers} workers, timeout {1000 * timeout:.0f} ms"
                measure(turn, name, Server(command, r"running on (http://\S+)", threads=1), "/predict")
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row["server"], []).append(row["rate"])
    medians = {name: statistics.median(found) for name, found in rates.items()}
    theirs = [rate for name, rate in medians.items() if name.startswith("LitServe")]
    if theirs:
        print(f"medians: trope serve answers {medians['trope serve'] / max(theirs):.1f}x the requests of LitServe")
    if given.out:
        source = "generated" if given.run is None else given.run.name
        found = {"environment": describe(), "model": given.model, "run": source, "rows": rows}
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
