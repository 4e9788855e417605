"""The fuzzers find what they are made for, are seeded, and find nothing in a few cases each. `make fuzz` runs more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import check_damage, check_kills, check_prepare, oracle, worker
from tests.fuzz.__main__ import cases
from tests.fuzz.commands import Outcome
from tests.fuzz.forks import Forks
from tests.fuzz.oracle import Options, Row, predict
from tests.fuzz.twists import TWISTS

ROOT = Path(__file__).parent.parent
# One case of each kind of reading that has been wrong; see tests/fuzz/README.md.
TWISTED = [(name, seed) for name, twist in TWISTS.items() for seed in (1,) if twist.item in tuple("12345678")]


class Here:
    """A `Worker` without a process: the command runs in this one."""

    def run(self, *words: object, timeout: float = 0) -> Outcome:
        return Outcome(**worker._answer({"words": [str(word) for word in words]}))

    def load(self, folder: Path, timeout: float = 0) -> Outcome:
        return Outcome(**worker._answer({"load": str(folder)}))


@pytest.mark.parametrize(("twist", "seed"), [("", seed) for seed in range(4)] + TWISTED)
def test_prepare_gives_what_the_oracle_says(twist: str, seed: int) -> None:
    case = check_prepare.make(seed, twist)
    assert check_prepare.check(case, Here()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> check_damage.Folders:
    return check_damage.Folders(tmp_path_factory.mktemp("fuzz") / "whole", Here())


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_folder_gives_the_same_answer_or_a_line(seed: int, whole: check_damage.Folders) -> None:
    about, wrong = check_damage.check(seed, whole, Here())
    assert wrong == [], about


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(ROOT) as forks:
        yield forks


@pytest.mark.parametrize("name", ["overwrite-foreign", "source-inside"])
def test_nothing_foreign_is_deleted(name: str, forks: Forks, tmp_path: Path) -> None:
    _, check = check_kills.FOLDERS[name]
    assert check(tmp_path, forks) == []


def test_a_killed_replacement_leaves_the_old_or_the_new_dataset(forks: Forks, tmp_path: Path) -> None:
    about, wrong = check_kills.Kills(tmp_path, forks).check(check_kills.COMMANDS.index("overwrite"))
    assert wrong == [], about


@pytest.mark.parametrize("twist", ["", "hive-folders", "glob-names", "mixed-schemas", "open-quote", "many-bad"])
def test_the_same_seed_gives_the_same_case(twist: str) -> None:
    first, second = (check_prepare.make(5, twist) for _ in range(2))
    assert str(first) == str(second)
    assert first.files == second.files
    assert first.twist == twist
    assert first.datasets or first.may_refuse


def test_every_twist_and_every_command_gets_its_turn() -> None:
    assert {check_prepare.twist_of(seed) for seed in range(3 * (len(check_prepare.TURNS) // 2 + 1))} == {"", *TWISTS}
    chosen = [case for _, case in zip(range(20), cases("kill", 7), strict=False)]
    assert {name for part, name in chosen if part == "folder"} == set(check_kills.FOLDERS)
    assert ("kill", "7000000") in chosen


def _rows(*events: tuple[object, object, int]) -> list[Row]:
    return [Row(user, item, tick, tick) for user, item, tick in events]


def test_the_oracle_by_hand() -> None:
    rows = _rows(("b", "7", 30), ("a", "10", 20), ("b", "9", 10), ("b", "7", 10))
    found = predict(rows, Options(protocol="loo-paper"), frozenset(("user", "item")))
    assert found is not None
    assert (found.users, found.items, found.offsets) == (["a", "b"], [7, 9, 10], [0, 1, 4])
    assert (found.sequence, found.times) == ([3, 2, 1, 1], [20, 10, 10, 30])
    assert found.splits == [[1, 2], [1, 3], [1, 2], [1, 3]]


def test_the_oracle_refuses() -> None:
    rows = [*_rows((1, 1, 5), (1, 2, 6)), Row(None, 2, 7, 7, reason="user")]
    assert predict(rows, Options(protocol="loo-paper"), frozenset()) is None
    skipped = predict(rows, Options(protocol="loo-paper", skip_bad=True), frozenset())
    assert skipped is not None
    assert (skipped.bad, skipped.rows, len(skipped.times)) == (1, 3, 2)
    assert predict(_rows((1, 1, 5)), Options(), frozenset()) is None, "nobody can be tested"


def test_the_oracle_splits_a_holdout() -> None:
    rows = _rows(*((1, item, 100 + item) for item in range(10)))
    found = predict(rows, Options(protocol="holdout", cutoff=106, window=2), frozenset())
    assert found is not None
    assert found.splits == [[4], [6], [6], [8]]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome(None, seconds=11), "hung"),
        (Outcome(1, trace='File "x/trope/a.py", line 3\nTypeError: no'), "TypeError"),
        (Outcome(1, err="Traceback (most recent call last):\n  ...\nKeyError: 'a'"), "KeyError"),
        (Outcome(2, err=""), "without a line"),
        (Outcome(2, err="trope: one\ntwo\n"), "2 lines"),
        (Outcome(3, err="trope: what"), "exit code 3"),
    ],
)
def test_an_end_that_no_user_should_see(outcome: Outcome, words: str) -> None:
    assert words in (outcome.problem or "")


@pytest.mark.parametrize(
    "outcome", [Outcome(0), Outcome(2, err="trope: a warning\ntrope: what is wrong; what to do\n")]
)
def test_an_end_that_is_right(outcome: Outcome) -> None:
    assert outcome.problem is None


def test_a_wrong_dataset_is_found(tmp_path: Path) -> None:
    case = next(case for case in map(check_prepare.make, range(0, 60, 3)) if case.datasets and case.log.kind == "csv")
    out = tmp_path / "out" / "data"
    out.parent.mkdir()
    source = check_prepare.write_files(case, tmp_path / "in")
    outcome = Here().run("prepare", source, f"--out={out}", *check_prepare.words(case.log))
    assert check_prepare.judge(case, outcome, out) == []
    items = np.load(out / "items.npy")
    np.save(out / "items.npy", items[::-1])
    assert any("another dataset: sequence" in reason for reason in check_prepare.judge(case, outcome, out))
    (out.parent / ".data.partial-1").mkdir()
    assert any("left behind" in reason for reason in check_prepare.judge(case, outcome, out))


def test_a_wrong_answer_is_found(whole: check_damage.Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_damage, "damage", lambda *_: "nothing")
    monkeypatch.setattr(check_damage, "forge", lambda *_: False)
    monkeypatch.setattr(whole, "_answers", {})
    weights = iter(("those of the whole folders", "others"))
    monkeypatch.setattr(check_damage, "ask", lambda *_: check_damage.Answer(Outcome(0), {"weights": next(weights)}))
    _, wrong = check_damage.check(0, whole, Here())
    assert any("another answer" in reason for reason in wrong)


def test_the_threat_model_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 20
    missing = [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_the_oracle_knows_nothing_of_trope() -> None:
    """Not even its reader, whose faults it is to find."""
    source = Path(oracle.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) trope", source, re.MULTILINE)
