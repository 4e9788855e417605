"""The first fuzzer: `trope prepare` on random logs, compared with the oracle, and Spark compared with DuckDB."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import oracle
from tests.fuzz.commands import Outcome, Worker, fresh
from tests.fuzz.logs import Log, draw, render, words
from tests.fuzz.twists import TWISTS, twisted

_TRIES = 60
_PATIENCE = 60.0
_LISTED = 20
# What has been read wrongly (items 1 to 8) gets two turns where the others get one.
TURNS = [*(name for name, twist in TWISTS.items() if twist.item in tuple("12345678")), *TWISTS]


@dataclass(frozen=True)
class Case:
    """A log with its files, and what must come of them. datasets: the right answers, besides a refusal if allowed."""

    seed: int
    twist: str
    log: Log
    files: dict[str, bytes]
    datasets: list[oracle.Dataset]
    may_refuse: bool

    @property
    def item(self) -> str:
        """The item of issue 15 that the twist stands for."""
        return TWISTS[self.twist].item if self.twist else ""

    def __str__(self) -> str:
        command = " ".join([self.log.source, *words(self.log)])
        return f"{self.twist or 'plain'}, {self.log.kind}, {self.log.unit}, {command}"


def twist_of(seed: int) -> str:
    """The twist of a seed's case: one case of three has none, in the others the twists take turns."""
    turn, rest = divmod(seed, 3)
    return TURNS[(2 * turn + rest - 1) % len(TURNS)] if rest else ""


def make(seed: int, twist: str | None = None) -> Case:
    """The case of a seed. twist: in place of the seed's own, "" for none."""
    rng = random.Random(f"prepare {seed}")
    twist = twist_of(seed) if twist is None else twist
    for _ in range(_TRIES):
        log = draw(rng, loose=bool(twist) and rng.random() < 0.95)
        files, fits = twisted(log, twist, rng) if twist else (render(log), True)
        if fits:
            break
    answers = [(log.rows, None), *log.others]
    found = [oracle.predict(rows, log.options, log.text_roles, bad) for rows, bad in answers]
    datasets = [] if log.must_refuse else [dataset for dataset in found if dataset is not None]
    return Case(seed, twist, log, files, datasets, log.must_refuse or log.may_refuse or None in found)


def check(case: Case, worker: Worker, spark: Worker | None = None, code: Path | None = None) -> list[str]:
    """What is wrong. spark: a worker for the second engine. code: run `python -m trope` of this checkout instead."""
    with tempfile.TemporaryDirectory(prefix="trope-fuzz-") as name:
        folder = Path(name)
        source = write_files(case, folder / "in")
        out = folder / "out" / "data"
        out.parent.mkdir()
        command = ["prepare", str(source), f"--out={out}", *words(case.log)]
        outcome = worker.run(*command, timeout=_PATIENCE) if code is None else fresh(code, command)
        wrong = judge(case, outcome, out)
        if spark is None or not case.log.spark:
            return wrong
        other = folder / "spark" / "data"
        other.parent.mkdir()
        command[2] = f"--out={other}"
        second = spark.run(*command, "--engine=spark", timeout=_PATIENCE)
        wrong += [f"Spark: {reason}" for reason in judge(case, second, other)]
        if not wrong and outcome.code != second.code:
            wrong.append(f"DuckDB ends with {outcome.code} ({outcome.line}), Spark with {second.code} ({second.line})")
        elif not wrong and outcome.code == 0:
            reason = oracle.read(out).difference(oracle.read(other))
            wrong += [f"Spark differs from DuckDB: {reason}"] if reason else []
        return wrong


def write_files(case: Case, folder: Path) -> Path:
    """Write a case's files; returns what `trope prepare` is given."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / case.log.source


def judge(case: Case, outcome: Outcome, out: Path) -> list[str]:
    """What is wrong with the end of one `trope prepare`."""
    problem = outcome.problem
    if problem:
        return [problem]
    left = sorted(path.name for path in out.parent.iterdir() if path != out)
    wrong = [f"left behind: {', '.join(left)}"] if left else []
    if outcome.refused:
        if out.exists():
            wrong.append("refused, but the folder is there")
        if not case.may_refuse:
            wrong.append(f"refused a right log: {outcome.line}")
        return wrong
    if not out.is_dir():
        return [*wrong, "exit code 0 without a dataset"]
    found = oracle.read(out)
    differences = [dataset.difference(found) for dataset in case.datasets]
    if not differences:
        wrong.append(f"accepted what must be refused: {found.rows} rows, {found.bad} bad")
    elif all(differences):
        wrong.append(f"another dataset: {differences[0]}")
    elif differences[0] is None:
        wrong += _misplaced(case, out)
    return wrong


def _misplaced(case: Case, out: Path) -> list[str]:
    """Whether the bad rows that `meta.json` lists are at their file and line."""
    if case.twist in ("line-breaks", "open-quote"):
        return []
    first, expected = 0, []
    for name, count in case.log.files:
        for place, row in enumerate(case.log.rows[first : first + count], start=1 + (case.log.kind == "csv")):
            if row.reason is not None:
                expected.append((Path(name).name, place))
        first += count
    listed = json.loads((out / "meta.json").read_text(encoding="utf-8"))["bad_rows"]["first"]
    found = [(bad["file"], bad["row"]) for bad in listed]
    if sorted(found) == sorted(expected[:_LISTED]) or case.twist == "mixed-schemas":
        return []
    return [f"bad rows are at {expected[:3]}, meta.json says {found[:3]}"]
