"""Who is in which arm: shares, independence, and stability under restarts and more arms."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trope.online.assignment import ArmOption, Experiment, read_arms

USERS = [f"user {number}" for number in range(20_000)]
TWO = {"control": 50.0, "trope": 50.0}


def experiment(arms: dict[str, float], salt: str = "salt") -> Experiment:
    return Experiment("trial", arms, 1_700_000_000, salt)


@pytest.mark.parametrize("arms", [TWO, {"a": 1, "b": 9}, {"a": 0.2, "b": 0.3, "c": 0.1, "d": 0.4}, {"a": 1, "b": 200}])
@pytest.mark.parametrize("salt", ["x", "y"])
def test_shares_are_within_three_sigma(arms: dict[str, float], salt: str) -> None:
    trial = experiment(arms, salt)
    counts = Counter(map(trial.arm_of, USERS))
    for arm, share in trial.shares.items():
        sigma = math.sqrt(len(USERS) * share * (1 - share))
        assert abs(counts[arm] - len(USERS) * share) <= 3 * sigma, (arm, counts)


def test_two_experiments_are_independent() -> None:
    one, other = (experiment({"a": 1, "b": 2, "c": 1}, salt) for salt in ("first", "second"))
    table = np.zeros((3, 3))
    for user in USERS:
        table["abc".index(one.arm_of(user)), "abc".index(other.arm_of(user))] += 1
    assert stats.chi2_contingency(table).pvalue > 0.001
    same = np.diag(np.full(3, 10))
    assert stats.chi2_contingency(same).pvalue < 0.001, "the test can fail"


def test_neighbouring_ids_are_independent() -> None:
    """Consecutive ids must not share an arm more often than chance."""
    arms = [experiment(TWO).arm_of(str(user)) == "trope" for user in range(20_000)]
    table = np.zeros((2, 2))
    np.add.at(table, (np.array(arms[:-1], int), np.array(arms[1:], int)), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.floats(0.01, 100), st.text(min_size=1, max_size=8),
    st.lists(st.text(max_size=12), min_size=1, max_size=50),
)  # fmt: skip
@settings(max_examples=100)
def test_a_new_arm_only_takes(shares: list[float], added: float, salt: str, users: list[str]) -> None:
    old = {f"arm{place}": share for place, share in enumerate(shares)}
    before, after = experiment(old, salt), experiment({"new": added, **old}, salt)
    scaled = experiment({arm: share / 7 for arm, share in reversed(old.items())}, salt)
    for user in users:
        assert after.arm_of(user) in ("new", before.arm_of(user))
        assert before.arm_of(user) in old
        assert scaled.arm_of(user) == before.arm_of(user), "only the ratio of shares matters, not their order"


def test_a_new_arm_takes_its_share() -> None:
    before, after = experiment(TWO), experiment({**TWO, "third": 50.0})
    moved = sum(before.arm_of(user) != after.arm_of(user) for user in USERS)
    assert abs(moved - len(USERS) / 3) <= 3 * math.sqrt(len(USERS) * 2 / 9)


def test_the_assignment_is_written_down() -> None:
    """Known answers: another version, machine or process must give the same."""
    trial = experiment({"control": 50, "trope": 50}, "spring")
    users = [str(user) for user in range(1_000)] + ["ann", "Ünal", "\ud800"]
    arms = [trial.arm_of(user) for user in users]
    digest = hashlib.sha256(" ".join(arms).encode()).hexdigest()
    code = (
        "import hashlib;from trope.online.assignment import Experiment as E;"
        "t=E('trial',{'control':50,'trope':50},1,'spring');"
        "u=[str(i) for i in range(1000)]+['ann','\\u00dcnal','\\ud800'];"
        "print(hashlib.sha256(' '.join(map(t.arm_of,u)).encode()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest
    assert arms[:6] == KNOWN


KNOWN = ["control", "trope", "trope", "control", "trope", "trope"]


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"a": 1.0}, "at least two arms, got a"),
        ({}, "at least two arms, got none"),
        ({"a": 1.0, "b": 0.0}, "share of arm b must be a positive number, got 0.0"),
        ({"a": 1.0, "b": -1.0}, "must be a positive number"),
        ({"a": 1.0, "b": math.inf}, "must be a positive number"),
        ({"a": 1.0, "b": math.nan}, "must be a positive number"),
        ({"a": 1.0, "../b": 1.0}, "an arm's name must be"),
        ({"a": 1.0, "": 1.0}, "an arm's name must be"),
    ],
)
def test_bad_experiments_are_one_line(arms: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        experiment(arms)


def test_a_bad_name_or_salt() -> None:
    with pytest.raises(ValueError, match="an experiment's name must be"):
        Experiment("a/b", TWO, 0, "s")
    with pytest.raises(ValueError, match="the salt is empty"):
        Experiment("a", TWO, 0, "")


def test_arms_are_read() -> None:
    assert read_arms(["control=runs/a:50", "trope=hf://owner/name:12.5"]) == [
        ArmOption("control", "runs/a", 50.0),
        ArmOption("trope", "hf://owner/name", 12.5),
    ]
    assert read_arms(["a=C:/runs=1"], needs_share=False) == [ArmOption("a", "C:/runs=1", 1.0)]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["runs/a:50"], "--arm runs/a:50 is not understood; write --arm NAME=RUN:SHARE"),
        (["a=runs/a"], "--arm a=runs/a is not understood"),
        (["a=:5"], "is not understood"),
        (["a=runs/a:half"], "the share must be a number, got 'half'"),
        (["a=x:1", "b=x:1", "a=y:1"], "--arm a is given twice"),
    ],
)
def test_bad_arms_are_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_arms(texts)
