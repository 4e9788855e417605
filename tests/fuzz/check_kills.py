"""The third fuzzer: SIGKILL a command at a random moment, run it again to the end, and compare every byte.

Also two commands at once on one folder, and `--overwrite` where it must not delete.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.check_damage import SIZE, train_words, trained, write_log
from tests.fuzz.commands import Outcome
from tests.fuzz.forks import Forks

_PATIENCE = 300.0
COMMANDS = ("prepare", "overwrite", "train", "refit", "refit again", "compare")


@dataclass(frozen=True)
class Undisturbed:
    """A command that nobody killed: the folder before and after it, how long it took, which names it changed."""

    before: Path
    after: dict[str, str]
    seconds: float
    names: list[str]


class Kills:
    """Commands to kill, each run undisturbed once, in `folder`. killed: how many died of SIGKILL, by command."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder = folder
        self._forks = forks
        self._known: dict[str, Undisturbed] = {}
        self.killed: Counter[str] = Counter()

    def check(self, seed: int) -> tuple[str, list[str]]:
        """What the case of a seed is, and what is wrong."""
        rng = random.Random(f"kill {seed}")
        command = COMMANDS[seed % len(COMMANDS)]
        known = self._undisturbed(command)
        with tempfile.TemporaryDirectory(prefix="trope-fuzz-") as name:
            folder = Path(name) / "here"
            shutil.copytree(known.before, folder, symlinks=True)
            old = result(folder, command)
            moments, wrong = [], []
            for _ in range(rng.choice((1, 1, 2))):
                moments.append(self._kill(folder, command, known, rng))
                wrong += _torn(folder, command, old, known)
            about = f"{command}, killed {' and '.join(moments)}"
            outcome = run(self._forks, command_words(folder, command), folder)
            if outcome.problem or outcome.code:
                if command == "prepare" and outcome.refused and result(folder, command) == known.after:
                    return about, wrong  # it was killed after its end
                return about, [*wrong, f"started again: {outcome.problem or outcome.line}"]
            return about, wrong + _differences(known.after, result(folder, command), "in the end")

    def _kill(self, folder: Path, command: str, known: Undisturbed, rng: random.Random) -> str:
        """Start the command and kill it; returns when. Half of the kills aim at renames of folders."""
        words = command_words(folder, command)
        if rng.random() < 0.7:
            renames = [place for place, name in enumerate(known.names, 1) if name in ("rename", "replace")]
            places = renames if renames and rng.random() < 0.7 else range(1, len(known.names) + 1)
            place = rng.choice(places)
            moment = f"before {known.names[place - 1]} {place} of {len(known.names)}"
            pid = self._forks.start(words, folder, place)
            return self._ended(pid, command, moment)
        share = rng.random()
        pid = self._forks.start(words, folder)
        time.sleep(share * known.seconds)
        os.kill(pid, signal.SIGKILL)
        return self._ended(pid, command, f"after {share:.0%} of the time")

    def _ended(self, pid: int, command: str, moment: str) -> str:
        """The moment of a kill, or that the command was quicker; after a first kill it has less to do."""
        is_killed = self._forks.wait(pid, _PATIENCE)["code"] == -signal.SIGKILL
        self.killed[command] += is_killed
        return moment if is_killed else f"not {moment}, it ended by itself"

    def _undisturbed(self, command: str) -> Undisturbed:
        if command not in self._known:
            before, after = self._folder / f"{command} before", self._folder / f"{command} after"
            self._begin(before, command)
            shutil.copytree(before, after, symlinks=True)
            begun = time.monotonic()
            ended = self._forks.wait(self._forks.start(command_words(after, command), after), _PATIENCE)
            if ended["code"] != 0:
                raise RuntimeError(f"the undisturbed {command} does not work: {ended['text'][-500:]}")
            seconds = time.monotonic() - begun
            self._known[command] = Undisturbed(before, result(after, command), seconds, ended["names"])
        return self._known[command]

    def _begin(self, folder: Path, command: str) -> None:
        """The folder that a command is started in: a log, and what the command needs besides."""
        write_log(folder / "raw")
        if command == "prepare":
            return
        expect(self._forks, prepare_words(folder, "raw"), folder)
        if command == "overwrite":
            write_log(folder / "raw2", seed=1)
        if command == "refit again":
            expect(self._forks, train_words(folder / "data", folder / "run", "trope"), folder)


def run(forks: Forks, words: list[str], folder: Path) -> Outcome:
    """Run a command to its end."""
    ended = forks.wait(forks.start(words, folder), _PATIENCE)
    return Outcome(ended["code"], err=ended["text"], seconds=_PATIENCE)


def expect(forks: Forks, words: list[str], folder: Path) -> None:
    """Run a command that must succeed."""
    outcome = run(forks, words, folder)
    if outcome.code != 0:
        raise RuntimeError(f"trope {words[0]} does not work: {outcome.problem or outcome.line}")


def _torn(folder: Path, command: str, old: dict[str, str], known: Undisturbed) -> list[str]:
    """What may not be seen after a kill, before anybody has started the command again."""
    if command == "overwrite" and result(folder, command) not in (old, known.after):
        return [f"after the kill, --out is neither the old nor the new dataset but {_say(folder / 'data')}"]
    if command == "refit again" and (folder / "run" / "metrics.json").is_file():
        return _differences(known.after, result(folder, command), "after the kill, metrics and model disagree:")
    return []


def prepare_words(folder: Path, raw: str, *more: str) -> list[str]:
    """`trope prepare` of the small log, into `data`."""
    return [
        "prepare", "recbole:small", "--raw", str(folder / raw), "--out", str(folder / "data"), "--min-user=1",
        "--min-item=1", "--protocol=holdout", "--window=7d", *more,
    ]  # fmt: skip


def command_words(folder: Path, command: str) -> list[str]:
    """The command line of one of `COMMANDS`."""
    if command == "prepare":
        return prepare_words(folder, "raw")
    if command == "overwrite":
        return prepare_words(folder, "raw2", "--overwrite")
    if command == "compare":
        chosen = [word for setting in SIZE for word in ("--set", setting)]
        return [
            "compare", str(folder / "data"), "--models", "hstu-time,hstu-trope", "--out", str(folder / "many"),
            "--device", "cpu", "--resamples", "50", *chosen,
        ]  # fmt: skip
    name = "time" if command == "train" else "trope"
    return [*train_words(folder / "data", folder / "run", name), "--resume"]


def result(folder: Path, command: str) -> dict[str, str]:
    """Hashes of what a command makes: a dataset's files, or the weights and metrics of runs."""
    if command in ("prepare", "overwrite"):
        files = sorted((folder / "data").glob("*"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}
    found = {}
    for metrics in sorted(folder.rglob("metrics.json")):
        for name, value in trained(metrics.parent).items():
            found[f"{metrics.parent.relative_to(folder)} {name}"] = json.dumps(value)
    return found


def _differences(right: dict[str, str], found: dict[str, str], when: str) -> list[str]:
    names = [name for name in sorted(right.keys() | found.keys()) if right.get(name) != found.get(name)]
    return [f"{when} not the same bytes: {', '.join(names)}"] if names else []


def _say(folder: Path) -> str:
    return "missing" if not folder.exists() else f"{len(list(folder.iterdir()))} files"


def two_at_once(folder: Path, forks: Forks) -> list[str]:
    """Two prepares of different logs into one new --out: one must win, the other must be refused."""
    write_log(folder / "raw")
    write_log(folder / "raw2", seed=1)
    expected = []
    for raw in ("raw", "raw2"):
        expect(forks, prepare_words(folder, raw), folder)
        expected.append(result(folder, "prepare"))
        shutil.rmtree(folder / "data")
    started = [forks.start(prepare_words(folder, raw), folder) for raw in ("raw", "raw2")]
    ended = [forks.wait(pid, _PATIENCE) for pid in started]
    outcomes = [Outcome(end["code"], err=end["text"]) for end in ended]
    wrong = [outcome.problem for outcome in outcomes if outcome.problem]
    winners = [place for place, outcome in enumerate(outcomes) if outcome.code == 0]
    if len(winners) != 1:
        wrong.append(f"two prepares into one new --out end with {[outcome.code for outcome in outcomes]}")
    elif result(folder, "prepare") != expected[winners[0]]:
        wrong.append("--out is not the dataset of the prepare that succeeded")
    return wrong


def overwrite_foreign(folder: Path, forks: Forks) -> list[str]:
    """--overwrite on a folder that trope did not make, though it has a meta.json."""
    write_log(folder / "raw")
    (folder / "data" / "photos").mkdir(parents=True)
    (folder / "data" / "photos" / "cat.jpg").write_bytes(b"a cat")
    (folder / "data" / "meta.json").write_text('{"format": 1, "title": "my album"}')
    return _must_keep(folder, forks, [folder / "data" / "photos" / "cat.jpg", folder / "data" / "meta.json"])


def overwrite_with_more(folder: Path, forks: Forks) -> list[str]:
    """--overwrite on a dataset into which somebody put a file of their own."""
    write_log(folder / "raw")
    expect(forks, prepare_words(folder, "raw"), folder)
    (folder / "data" / "notes.md").write_text("mine")
    return _must_keep(folder, forks, [folder / "data" / "notes.md"])


def source_inside(folder: Path, forks: Forks) -> list[str]:
    """--overwrite where the log lies inside --out."""
    write_log(folder / "raw")
    expect(forks, prepare_words(folder, "raw"), folder)
    shutil.move(folder / "raw", folder / "data" / "raw")
    return _must_keep(folder, forks, [folder / "data" / "raw" / "small.inter"], raw="data/raw")


def _must_keep(folder: Path, forks: Forks, files: list[Path], raw: str = "raw") -> list[str]:
    contents = [file.read_bytes() for file in files]
    outcome = run(forks, prepare_words(folder, raw, "--overwrite"), folder)
    kept = [file.is_file() and file.read_bytes() == content for file, content in zip(files, contents, strict=True)]
    lost = [file.name for file, is_kept in zip(files, kept, strict=True) if not is_kept]
    if lost:
        return [f"--overwrite deleted {', '.join(lost)} (exit code {outcome.code})"]
    return [outcome.problem] if outcome.problem else []


FOLDERS: dict[str, tuple[str, Callable[[Path, Forks], list[str]]]] = {
    "two-at-once": ("16", two_at_once),
    "overwrite-foreign": ("15", overwrite_foreign),
    "overwrite-with-more": ("15", overwrite_with_more),
    "source-inside": ("15", source_inside),
}
"""Cases of folders, with the item of issue 15 that each stands for; they are the same in every run."""
