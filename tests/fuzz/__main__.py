"""Run the fuzzers: `python -m tests.fuzz --seconds 60 --seed 0`. Exit code 1 if anything was found.

Every finding is one line: the command that repeats it, the item of issue 15 that it belongs to, and what is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.fuzz import check_damage, check_kills, check_prepare
from tests.fuzz.commands import Worker
from tests.fuzz.forks import Forks

# How the time is shared.
SHARES = {"prepare": 0.5, "damage": 0.25, "kill": 0.25}
_HERE = Path(__file__).resolve().parents[2]
# Cases of one seed of the command line; the next seed has others.
_APART = 1_000_000
# Every so many cases on Spark too, and in a process of their own.
_SPARK_EVERY, _FRESH_EVERY = 12, 40

Found = tuple[str, str, list[str]]  # what the case is, the item it stands for, what is wrong


class Fuzzers:
    """The three fuzzers; each gets its processes and folders when it is first asked."""

    def __init__(self, code: Path, spark: bool, stack: ExitStack) -> None:
        self._code = code
        self._spark = spark
        self._stack = stack
        self._workers: dict[str, Worker] = {}
        self._folders: check_damage.Folders | None = None
        self._forks: Forks | None = None
        self._kills: check_kills.Kills | None = None
        self.compared = 0  # logs that both engines have read

    @property
    def killed(self) -> dict[str, int]:
        """How many commands died of SIGKILL, by command."""
        return dict(self._kills.killed) if self._kills is not None else {}

    def check(self, part: str, case: str) -> Found:
        """Run one case. part: a key of `SHARES`, or `folder`. case: a seed, or the name of a case of folders."""
        if part == "prepare":
            return self._prepare(int(case))
        if part == "damage":
            if self._folders is None:
                self._folders = check_damage.Folders(self._temporary() / "whole", self._worker("damage"))
            about, wrong = check_damage.check(int(case), self._folders, self._worker("damage"))
            return about, "9, 10, 19", wrong
        if self._forks is None:
            self._forks = self._stack.enter_context(Forks(self._code))
            self._kills = check_kills.Kills(self._temporary(), self._forks)
        if part == "folder":
            item, check = check_kills.FOLDERS[case]
            return case, item, check(self._temporary(), self._forks)
        assert self._kills is not None
        about, wrong = self._kills.check(int(case))
        return about, "11, 17", wrong

    def _prepare(self, seed: int) -> Found:
        case = check_prepare.make(seed)
        spark = self._worker("spark") if self._spark and seed % _SPARK_EVERY == _SPARK_EVERY - 1 else None
        self.compared += spark is not None and case.log.spark
        code = self._code if seed % _FRESH_EVERY == _FRESH_EVERY - 1 else None
        return str(case), case.item, check_prepare.check(case, self._worker("prepare"), spark, code)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = self._stack.enter_context(Worker(self._code, spark=name == "spark"))
        return self._workers[name]

    def _temporary(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trope-fuzz-")))


def cases(part: str, seed: int) -> Iterator[tuple[str, str]]:
    """The cases of a fuzzer, without end. The cases of folders come between the first kills."""
    names = list(check_kills.FOLDERS) if part == "kill" else []
    for number in range(_APART):
        if number % 2 and names:
            yield "folder", names.pop(0)
        yield part, str(seed * _APART + number)


def main() -> None:
    """Entry point of `python -m tests.fuzz`."""
    options = _options()
    spark = (
        not options.no_spark and shutil.which("java") is not None and importlib.util.find_spec("pyspark") is not None
    )
    code = options.code.resolve()
    again = f" --code {options.code}" if code != _HERE else ""
    counts, found = dict.fromkeys((*SHARES, "folder"), 0), 0
    with ExitStack() as stack:
        fuzzers = Fuzzers(code, spark, stack)
        for part, case in _chosen(options):
            about, item, wrong = fuzzers.check(part, case)
            counts[part] += 1
            found += bool(wrong)
            if wrong:
                of = f"item {item}: " if item else ""
                print(
                    f"python -m tests.fuzz --case {part}:{case}{again}  # {of}{'; '.join(wrong)} [{about}]", flush=True
                )
            elif options.case:
                print(f"nothing wrong [{about}]")
    done = ", ".join(f"{count} {part}" for part, count in counts.items() if count)
    if fuzzers.killed:
        print(f"died of SIGKILL: {', '.join(f'{count} {command}' for command, count in fuzzers.killed.items())}")
    engines = f"Spark compared in {fuzzers.compared}" if fuzzers.compared else "Spark not compared"
    print(f"fuzz: {done}; {engines}; findings: {found}")
    sys.exit(bool(found))


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The cases to run: those named, so many of each, or as many as the time allows."""
    if options.case:
        for case in options.case:
            part, _, name = case.partition(":")
            yield part, name
        return
    counts = {"prepare": options.prepares, "damage": options.damages, "kill": options.kills}
    chosen = [part for part, count in counts.items() if count]
    for part in chosen or SHARES:
        enough = _until(counts[part], 0.0 if chosen else SHARES[part] * options.seconds)
        for kind, case in cases(part, options.seed):
            if enough(kind == part):
                break
            yield kind, case


def _until(count: int | None, seconds: float) -> Callable[[bool], bool]:
    """Whether a fuzzer has had enough: `count` cases of its own, or its time."""
    end, left = time.monotonic() + seconds, count or 0

    def enough(is_own: bool) -> bool:
        nonlocal left
        if not count:
            return time.monotonic() >= end
        left -= is_own
        return left < 0

    return enough


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, for all fuzzers together")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same cases")
    parser.add_argument(
        "--case", action="append", help="run this case only: prepare:SEED, damage:SEED, kill:SEED, folder:NAME"
    )
    parser.add_argument("--prepares", type=int, help="run exactly so many logs, in place of --seconds")
    parser.add_argument("--damages", type=int, help="run exactly so many damages, in place of --seconds")
    parser.add_argument("--kills", type=int, help="run exactly so many kills, in place of --seconds")
    parser.add_argument(
        "--code", type=Path, default=_HERE, help="the checkout to run; its commands are all that is used"
    )
    parser.add_argument("--no-spark", action="store_true", help="leave Spark out, also where Java and pyspark are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
