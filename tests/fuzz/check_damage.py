"""The second fuzzer: damage a file of a run, a dataset or a catalogue, then use it. No traceback, hang or wrong answer.

The undamaged folders are made once. Each case copies them, damages one file, runs one command, and compares its
answer with
that of the undamaged folders: it must be the same, or refused in one line.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.commands import HANG, Outcome, Worker
from tests.fuzz.damages import DAMAGES, damage, forge, has_checksum

SIZE = (
    "model.width=8", "model.heads=1", "model.head_dim=8", "model.blocks=1", "model.max_len=8", "train.epochs=2",
    "train.batch=32", "train.negatives=16",
)  # fmt: skip
RUNS = {"trope": ("hstu-trope", ("train.refit=true",)), "time": ("hstu-time", ())}
LATER = 1_700_000_000
# How often a command is used.
COMMANDS = {"evaluate": 8, "recommend": 8, "resume": 5, "compare": 5, "load": 8}
_FIGURES_EVERY = 50  # cases; figures take seconds
# A second training, and seven figures, may take longer than what answers a request.
_SLOW = {"resume": 60.0, "figures": 90.0}


@dataclass(frozen=True)
class Answer:
    """What a command said: a value to compare, None where only the way it ended is judged."""

    outcome: Outcome
    value: Any


def train_words(data: Path, run: Path, name: str, *settings: str) -> list[str]:
    """`trope train` of one of `RUNS`."""
    model, own = RUNS[name]
    chosen = [word for setting in (*SIZE, *own, *settings) for word in ("--set", setting)]
    return ["train", str(data), "--model", model, "--out", str(run), "--no-progress", "--device", "cpu", *chosen]


def write_log(folder: Path, seed: int = 0, users: int = 30, items: int = 20) -> Path:
    """A small log in RecBole's format: text ids, item names, several weeks; returns the folder."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user in range(users):
        moments = sorted(1_600_000_000 + rng.randrange(40 * 86_400) for _ in range(rng.randint(8, 16)))
        lines += [f"user{user}\titem{rng.randrange(items)}\t{moment}" for moment in moments]
    (folder / "small.inter").write_text("\n".join(lines) + "\n")
    names = [f"item{item}\tName of {item}" for item in range(items)]
    (folder / "small.item").write_text("\n".join(["item_id:token\tname:token_seq", *names]) + "\n")
    return folder


class Folders:
    """The undamaged folders: `data`, and a run of each of `RUNS`; and the answers that they give."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.folder = folder
        self._worker = worker
        self._answers: dict[str, Answer] = {}
        raw = write_log(folder / "raw")
        words = ["prepare", "recbole:small", "--raw", raw, "--out", folder / "data", "--min-user=1", "--min-item=1"]
        _expect(worker.run(*words, "--protocol=holdout", "--window=7d", timeout=120))
        for name in RUNS:
            _expect(worker.run(*train_words(folder / "data", folder / name, name), timeout=240))
        shutil.rmtree(raw)

    def answer(self, command: str) -> Answer:
        """What a command answers when nothing is damaged."""
        if command not in self._answers:
            with tempfile.TemporaryDirectory(prefix="trope-fuzz-") as name:
                shutil.copytree(self.folder, Path(name) / "copy")
                self._answers[command] = ask(command, Path(name) / "copy", self._worker)
            _expect(self._answers[command].outcome)
        return self._answers[command]


def check(seed: int, folders: Folders, worker: Worker) -> tuple[str, list[str]]:
    """What the case of a seed is, and what is wrong."""
    rng = random.Random(f"damage {seed}")
    command = rng.choices(list(COMMANDS), list(COMMANDS.values()))[0]
    command = "figures" if seed % _FIGURES_EVERY == _FIGURES_EVERY - 1 else command
    right = folders.answer(command)
    with tempfile.TemporaryDirectory(prefix="trope-fuzz-") as name:
        folder = Path(name) / "copy"
        shutil.copytree(folders.folder, folder)
        files = _read_by(command, folder)
        path = rng.choice(files)
        kind = rng.choice([kind for kind, suits in DAMAGES.items() if suits(path)])
        what = damage(kind, path, files, rng)
        # An attacker, or a careless tool, writes checksums that fit.
        forged = has_checksum(path) and rng.random() < 0.4 and forge(folder)
        about = f"{command} after {what} of {path.relative_to(folder)}{', checksums made to fit' if forged else ''}"
        found = ask(command, folder, worker)
    if found.outcome.problem:
        return about, [found.outcome.problem]
    if found.outcome.refused or found.value is None or _same(right.value, found.value, path.name):
        return about, []
    if forged:  # another folder, and nobody can know; but it must be a possible one
        return about, _impossible(what, found.value)
    return about, [f"another answer without a refusal: {_first_difference(right.value, found.value)}"]


def ask(command: str, folder: Path, worker: Worker) -> Answer:
    """Run a command on `folder`, whose dataset is `data` and whose runs are `trope` and `time`."""
    data, run = folder / "data", folder / "trope"
    limit = _SLOW.get(command, HANG)
    if command == "load":
        outcome = worker.load(data, timeout=limit)
        return Answer(outcome, outcome.result)
    if command == "evaluate":
        outcome = worker.run("evaluate", run, "--data", data, "--json", folder / "e.json", timeout=limit)
        return Answer(outcome, _json(folder / "e.json", ("environment", "path", "sha256")))
    if command == "recommend":
        words = ("recommend", run, "--data", data, "--user", "user3", "--at", LATER)
        outcome = worker.run(*map(str, words), timeout=limit)
        return Answer(outcome, outcome.out.splitlines())
    if command == "compare":
        words = ("compare", run, folder / "time", "--resamples", "50", "--json", folder / "c.json")
        outcome = worker.run(*words, timeout=limit)
        return Answer(outcome, _json(folder / "c.json"))
    if command == "resume":
        name = "time"
        words = train_words(data, folder / name, name, "train.epochs=3")
        outcome = worker.run(*words, "--resume", timeout=limit)
        return Answer(outcome, trained(folder / name) if outcome.code == 0 else None)
    outcome = worker.run("figures", run, "--data", data, "--out", folder / "figures", "--format", "svg", timeout=limit)
    return Answer(outcome, None)


def trained(run: Path) -> dict[str, Any]:
    """A run's result: hash of the best weights, and metrics without durations, paths and the checksum over them."""
    weights = run / "best" / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "missing"
    return {"weights": digest, "metrics": _json(run / "metrics.json", ("seconds", "data", "sha256"))}


def _read_by(command: str, folder: Path) -> list[Path]:
    """The files that a command may read, in a fixed order."""
    parts = {"load": ("data",), "compare": ("trope", "time"), "resume": ("data", "time")}.get(
        command, ("data", "trope")
    )
    return sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())


def _impossible(what: str, value: Any) -> list[str]:
    """What nobody may accept, whatever the checksums say: arrays that no preparation writes, numbers not finite."""
    if isinstance(value, dict) and value.get("impossible"):
        return [f"accepted impossible {', '.join(value['impossible'])}"]
    if what.startswith(("nan in", "inf in", "-inf in")):
        return [f"accepted {what}"]
    return ["an answer that is not finite"] if re.search(r"\b(nan|inf|infinity)\b", str(value), re.IGNORECASE) else []


def _same(right: Any, found: Any, file: str) -> bool:
    """Whether two answers are the same; a warning that names the damaged file may take the place of the others, and of
    the control that the file held."""
    if isinstance(found, dict) and any(file in warning for warning in found.get("warnings", ())):
        without = {"warnings": [], "with_counting": {}}
        return {**right, **without} == {**found, **without}
    return bool(found == right)


def _json(path: Path, without: tuple[str, ...] = ()) -> Any:
    if not path.is_file():
        return None
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in without}


def _expect(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise RuntimeError(f"the undamaged folders do not work: {outcome.problem or outcome.line}")


def _first_difference(right: Any, found: Any, path: str = "") -> str:
    if isinstance(right, dict) and isinstance(found, dict):
        name = next(name for name in (*right, *found) if right.get(name) != found.get(name))
        return _first_difference(right.get(name), found.get(name), f"{path}/{name}")
    if isinstance(right, list) and isinstance(found, list) and len(right) == len(found):
        place = next(i for i, pair in enumerate(zip(right, found, strict=True)) if pair[0] != pair[1])
        return _first_difference(right[place], found[place], f"{path}/{place}")
    return f"{path} was {str(right)[:80]!r}, is {str(found)[:80]!r}"
