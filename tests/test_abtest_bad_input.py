"""Bad experiments: one clear line each, or a result that calls no winner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from abtest_logs import DAY, START, Logs, experiment, write_exposures, write_record

from trope.data.sources.resolve import Request
from trope.online.analysis.analyse import Analysis, Question, analyse
from trope.online.analysis.looks import Plan
from trope.online.analysis.report import to_page
from trope.online.analysis.verdict import judge

FEW = experiment(users=40, days=2)


def run(folder: Path, logs: Logs | None = None, **question: object) -> Analysis:
    if logs is not None:
        logs.write(folder)
    request = Request(str(folder / "outcomes.parquet"))
    return analyse(folder / "exposures", request, Question(**question), threads=1)  # type: ignore[arg-type]


def changed(**change: object) -> Logs:
    return Logs(**{**vars(FEW), **change})  # type: ignore[arg-type]


def rows(count: int, arm: str = "control", **change: object) -> list[tuple[str, str, int, bool]]:
    return [(f"u{number}", arm, START + 60 * number, False) for number in range(count)]


def moved(factor: int = 1, days: int = 0) -> list[tuple[str, str, int, float]]:
    """The outcomes at other times."""
    return [(user, item, time * factor + days * DAY, paid) for user, item, time, paid in FEW.outcomes]


SEEN = FEW.exposures
OF_CONTROL = [row for row in SEEN if row[1] == "control"]
BAD_LOGS = [
    (changed(exposures=[*SEEN, ("new", "b", START + 9, False)]), "an arm that experiment.json does not name: 'b'"),
    (
        changed(exposures=[*SEEN, (OF_CONTROL[0][0], "trope", START + 9, False)]),
        r"1 users saw two arms, 'u\d+' for one",
    ),
    (changed(exposures=[(u, a, m * 1000, f) for u, a, m, f in SEEN]), "like milliseconds: divide them by 1000"),
    (changed(outcomes=moved(factor=1000)), "look like milliseconds: pass --time-unit ms"),
    (changed(started=START * 1000), "started 1700000000000 is after the year 2099; write seconds"),
    (changed(exposures=OF_CONTROL), "no user was exposed to arm 'trope'"),
    (changed(exposures=[(u, a, m, True) for u, a, m, _ in SEEN]), "are forced .*nobody is left"),
    (
        changed(exposures=[(u, a, m + 9 * DAY, f) for u, a, m, f in SEEN], behind=9 * DAY),
        "in milliseconds, or the server",
    ),
    (changed(exposures=[]), "has no exposures: its Parquet files hold no rows"),
    (changed(exposures=[("", a, m, f) for _, a, m, f in SEEN]), "exposures without user_id"),
    (changed(outcomes=moved(days=-90)), "all .* precede their user's first exposure"),
    (changed(outcomes=[(f"x{u}", i, START + 9, v) for u, i, _, v in FEW.outcomes]), "is of an exposed user"),
    (
        changed(outcomes=[(f"x{u}", i, START - 9, v) for u, i, _, v in FEW.outcomes]),
        r"is of an exposed user: it has users such as 'xu\d+', and the exposures such as 'u0'; .*ids alike",
    ),
    (changed(outcomes=[]), "has no events: its files hold no rows"),
    (changed(started=START + 99 * DAY), "all exposures of .* precede the start of the experiment"),
    (changed(started=START - 3_000 * DAY), "days past the start of the experiment"),
    (changed(outcomes=[*FEW.outcomes, ("u1", "i", START + 9, float("nan"))]), "1 rows whose 'revenue' is missing"),
    (changed(shares={"control": 0.5}), "must name two arms or more"),
    (changed(shares={"control": 0.5, "trope": 0}), "share of arm 'trope' must be above 0"),
]


@pytest.mark.parametrize(("logs", "message"), BAD_LOGS, ids=[message[:30] for _, message in BAD_LOGS])
def test_bad_logs_get_one_line(logs: Logs, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path, logs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": None}, "has no column 'arm'; it has request_id"),
        ({"moment": pa.array([1.5] * 9)}, "column 'moment' as double; it must be whole numbers"),
        ({"user_id": pa.array(range(9))}, "column 'user_id' as int64; it must be text"),
        ({"experiment": pa.array(["other"] * 9)}, "9 exposures of another experiment .'other', not 'test'"),
        ({"moment": pa.array([None] * 9, pa.int64())}, "9 exposures without moment"),
        ({"moment": pa.array([-5] * 9, pa.int64())}, "moment -5 is zero or negative"),
        ({"answered": pa.array(["now"] * 9)}, "column 'answered' as string; it must be numbers"),
    ],
)
def test_bad_columns_get_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    FEW.write(tmp_path)
    write_exposures(tmp_path / "exposures" / "exposures-9.parquet", rows(9), **change)
    with pytest.raises(ValueError, match=message):
        run(tmp_path)


def test_moments_far_after_their_answers_are_left_out(tmp_path: Path) -> None:
    """One question about next summer neither ends the experiment nor makes looks over."""
    plan = Plan(looks=30, horizon=30)
    one = run(tmp_path, experiment(), metrics="orders", plan=plan)
    late = [(f"u{number}", arm, START + 200 * DAY, False) for number, arm in ((0, "trope"), (999, "control"))]
    answered = pa.array([START + 9.5] * 2)
    write_exposures(tmp_path / "exposures" / "exposures-9.parquet", late, answered=answered)
    two = run(tmp_path, None, metrics="orders", plan=plan)
    assert two.exposed.ahead == 2 and (two.exposed.exposures, two.exposed.last) == (
        one.exposed.exposures,
        one.exposed.last,
    )
    assert (two.last_day, two.users, two.comparisons) == (one.last_day, one.users, one.comparisons)
    assert "2 for moments over a day after they were answered" in dict(to_page(two, judge(two)).facts)["Exposures"]
    # Up to a day ahead, a list was seen when it was answered.
    near = [("u0", next(arm for user, arm, _, _ in experiment().exposures if user == "u0"), START + 4 * DAY + 9, False)]
    write_exposures(tmp_path / "exposures" / "exposures-9.parquet", near, answered=pa.array([START + 4 * DAY - 9.5]))
    three = run(tmp_path, None, metrics="orders", plan=plan)
    assert three.exposed.ahead == 0 and three.exposed.last == START + 4 * DAY - 10 and three.last_day == 3


def test_exposures_without_answered_and_with_unsigned_moments(tmp_path: Path) -> None:
    logs = experiment()
    one = run(tmp_path, logs, metrics="orders")
    for number in range(2):
        rows = logs.exposures[number::2]
        moments = pa.array([row[2] for row in rows], pa.uint64())
        write_exposures(tmp_path / "exposures" / f"exposures-{number}.parquet", rows, answered=None, moment=moments)
    two = run(tmp_path, None, metrics="orders")
    assert two.comparisons == one.comparisons and two.exposed.counts == one.exposed.counts
    # An exposure before the start is a negative number of seconds after it.
    write_exposures(
        tmp_path / "exposures" / "exposures-9.parquet", rows[:1], moment=pa.array([START - 2 * DAY], pa.uint64())
    )
    assert "1 exposures precede the assignment" in judge(run(tmp_path, None, metrics="orders")).said


def damage_end(folder: Path) -> None:
    file = folder / "exposures" / "exposures-0.parquet"
    file.write_bytes(file.read_bytes()[:-40])


def damage_middle(folder: Path) -> None:
    file = folder / "exposures" / "exposures-0.parquet"
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    file.write_bytes(data)


def remove_files(folder: Path) -> None:
    for file in (folder / "exposures").glob("*.parquet"):
        file.unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_end, "cannot read .*exposures-0.parquet.*truncated or not Parquet"),
        (damage_middle, "cannot read .*exposures.*truncated or damaged"),
        (remove_files, r"no exposures-\*.parquet in"),
        (lambda folder: (folder / "exposures" / "experiment.json").unlink(), "has no experiment.json"),
        (lambda folder: (folder / "exposures" / "experiment.json").write_text("{"), "is not JSON"),
        (
            lambda folder: write_record(folder / "exposures", FEW.shares, format=7),
            "has format 7, and this version reads 1",
        ),
        (lambda folder: (folder / "outcomes.parquet").unlink(), "no file at"),
    ],
)
def test_bad_files_get_one_line(harm: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    FEW.write(tmp_path)
    harm(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        run(tmp_path)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"control": "b"}, "--control 'b' is no arm of .*; there are control, trope"),
        ({"metrics": "clicks"}, "unknown metric 'clicks'; choose conversion"),
        ({"metrics": "orders/orders"}, "unknown metric 'orders/orders'"),
        ({"metrics": "orders,orders"}, "names 'orders' twice"),
        ({"metrics": ","}, "names no metric"),
        ({"on_bad": "ignore"}, "--on-bad must be one of fail, skip"),
        ({"alpha": 0.7}, "--alpha must lie between 0 and 0.5"),
        ({"revenue_col": "price"}, "no column 'price' for the revenue"),
        ({"segments": Path("nowhere.csv")}, "no file of segments at nowhere.csv"),
    ],
)
def test_bad_questions_get_one_line(question: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        run(tmp_path, FEW, **question)


def test_bad_segments_get_one_line(tmp_path: Path) -> None:
    file = tmp_path / "segments.csv"
    for text, message in (
        ("user,a\nu1,x\n", "has no column 'user_id' for the user"),
        ("user_id\nu1\n", "no column besides 'user_id'"),
        ("user_id,a\nu1,x\nu1,y\n", "names a user twice"),
        ("user_id,a\n" + "".join(f"u{n},{n}\n" for n in range(40)), "column 'a' has over 20 values"),
        (
            "user_id,a\n1,x\n2,y\n",
            r"no exposed user is in .*: it has users such as '1' in column 'user_id', .* as 'u0'",
        ),
        ("user_id,a,a\nu1,x,y\n", "has two columns 'a'"),
        ("user_id,a\nu1,x\n,y\n", "has 1 rows without 'user_id'"),
        ("", "cannot read .*segments.csv: Empty CSV"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            run(tmp_path, FEW, segments=file)
        assert "\n" not in str(caught.value)
    file = tmp_path / "segments.parquet"
    for column in (pa.array([["x"]]), pa.array([b"\xff"])):
        pq.write_table(pa.table({"user_id": ["u1"], "a": column}), file)
        with pytest.raises(ValueError, match=r"segments.parquet: column 'a' is .*; cast it first"):
            run(tmp_path, FEW, segments=file)


def test_ids_of_segments_are_text(tmp_path: Path) -> None:
    """Leading zeros are kept, and NA is a value like any other."""

    def renamed(user: str) -> str:
        return f"{int(user[1:]):05d}"

    logs = changed(
        exposures=[(renamed(user), *rest) for user, *rest in SEEN],
        outcomes=[(renamed(user), *rest) for user, *rest in FEW.outcomes],
    )
    file = tmp_path / "segments.csv"
    file.write_text("user_id,country\n" + "".join(f"{n:05d},{'NA' if n % 2 else 'PL'}\n" for n in range(40)))
    found = run(tmp_path, logs, metrics="orders", segments=file)
    assert [(row.value, row.users) for row in found.segments] == [("NA", 20), ("PL", 20)]


def test_rows_without_an_amount_are_skipped_if_asked(tmp_path: Path) -> None:
    one = run(tmp_path, FEW)
    nan = [("u1", "i", START + 9, float("nan")), ("u2", "i", START + 9, float("inf"))]
    with pytest.raises(ValueError, match=r"2 rows whose 'revenue' is missing.*--on-bad skip"):
        run(tmp_path, changed(outcomes=[*FEW.outcomes, *nan]))
    two = run(tmp_path, None, on_bad="skip")
    assert two.comparisons == one.comparisons and two.outcomes.rows == one.outcomes.rows
    with pytest.raises(ValueError, match="'revenue' is missing"):
        run(tmp_path, changed(outcomes=nan), on_bad="skip")


def test_bad_outcomes_are_named_or_skipped(tmp_path: Path) -> None:
    exposures, _ = FEW.write(tmp_path)
    file = tmp_path / "outcomes.csv"
    rows = [f"{user};{item};{time};{paid}" for user, item, time, paid in FEW.outcomes]
    file.write_text("\n".join(["user_id;item_id;timestamp;revenue", *rows, "u1;i1;yesterday;3"]) + "\n")
    request = Request(str(file), delimiter=";")
    with pytest.raises(ValueError, match=f"1 bad row: outcomes.csv line {len(rows) + 2}: .*--on-bad skip"):
        analyse(exposures, request, threads=1)
    found = analyse(exposures, request, Question(on_bad="skip"), threads=1)
    assert found.outcomes.rows == len(FEW.outcomes)


def broken(kind: str) -> Logs:
    """A strong effect in an experiment that cannot be trusted."""
    logs = experiment(users=600, days=4, lift=3.0, seed=5)
    arm = {user: arm for user, arm, _, _ in logs.exposures}
    if kind == "sample ratio":  # a fifth of one arm was lost
        logs.exposures = [row for row in logs.exposures if row[1] == "control" or int(row[0][1:]) % 3]
    elif kind == "day":  # one arm was down on the first day
        logs.exposures = [
            (u, a, m + DAY if a == "trope" and m < START + DAY else m, f) for u, a, m, f in logs.exposures
        ]
    elif kind == "hour":  # one arm served the night
        shift = {user: int(np.random.default_rng(int(user[1:])).integers(0, DAY // 3)) for user in arm}
        logs.exposures = [
            (u, a, START + (m - START) // DAY * DAY + shift[u] + (DAY // 3 if a == "trope" else 0), f)
            for u, a, m, f in logs.exposures
        ]
    elif kind == "early":
        logs.exposures[0] = (*logs.exposures[0][:2], START - 60, False)
    return logs


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sample ratio", "No winner is called: the sample ratio is off: trope has 3"),
        ("day", "No winner is called: the arms saw other traffic: first exposures by day"),
        ("hour", "first exposures by hour of the day fall on the arms differently"),
        ("early", r"No winner is called: [1-9]\d* exposures precede the assignment"),
    ],
)
def test_no_winner_of_a_broken_experiment(kind: str, said: str, tmp_path: Path) -> None:
    found = run(tmp_path, broken(kind), metrics="conversion,revenue")
    assert found.of("revenue").adjusted < 0.001, "the effect itself must be plain"
    verdict = judge(found)
    assert verdict.winners == [] and verdict.refused
    assert re.search(said, verdict.said), verdict.said


def test_a_sound_experiment_has_a_winner(tmp_path: Path) -> None:
    verdict = judge(run(tmp_path, broken("nothing"), metrics="conversion,revenue"))
    assert verdict.winners == ["trope"] and not verdict.refused
    assert verdict.said.startswith("Winner: trope beats control: CVR +")
    loser = judge(run(tmp_path, None, metrics="revenue", control="trope"))
    assert loser.winners == [] and loser.said.startswith("No winner: control is worse than trope: Revenue -")


@pytest.mark.parametrize("plan", [Plan(looks=2, horizon=8), Plan(always=True)], ids=lambda plan: plan.kind)
def test_a_strong_effect_wins_before_the_end(plan: Plan, tmp_path: Path) -> None:
    found = run(tmp_path, broken("nothing"), metrics="revenue", plan=plan)
    reading = found.of("revenue").reading
    assert judge(found).winners == ["trope"]
    assert reading.crossed is not None and reading.crossed <= 3 and reading.rises and reading.low > 0


def test_no_effect_has_no_winner(tmp_path: Path) -> None:
    verdict = judge(run(tmp_path, experiment(users=200, lift=0.0, seed=2), metrics="revenue"))
    assert verdict.winners == [] and verdict.said.startswith("No winner: no metric of trope differs from control")


def test_a_metric_that_never_moves_has_no_p_value(tmp_path: Path) -> None:
    logs = Logs(FEW.exposures, [(u, "i", START + 3 * DAY, 0.0) for u, *_ in FEW.exposures], FEW.shares)
    found = run(tmp_path, logs, metrics="conversion,revenue")
    assert not found.of("revenue").reading.estimate.is_known and not found.of("conversion").reading.estimate.is_known
    assert judge(found).winners == []
