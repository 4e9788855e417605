"""`trope prepare` as a user meets it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from data_logs import START, Event, loose, prepared, random_log, write_csv, write_parquet
from rich.console import Console
from test_data_sources import grocery, pixel
from training import tiny
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.few_users import say_evaluated
from trope.data.folder import read_meta
from trope.data.protocols import Protocol
from trope.data.summary import summarise
from trope.times import DAY, parse_moment
from trope.train.loop import train


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_csv_by_flags_and_what_is_said_at_the_end(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", random_log())
    log.write_text(log.read_text().replace("user,item,timestamp", "who,what,when", 1))
    flags = ("--user-col", "who", "--item-col", "what", "--time-col", "when")
    said = run(log, "--out", tmp_path / "out", *flags, "--protocol", "holdout", "--window", "1d")
    meta = read_meta(tmp_path / "out")
    for expected in ("20 users, 15 items, 400 events", "holdout, 1 day from", meta["checksum"]):
        assert expected in said
    assert meta["protocol"]["window"] == 86_400


def test_a_delimiter_and_a_time_format(tmp_path: Path) -> None:
    days = [(u, i, f"{t % 28 + 1:02}/09/2020") for u, i, t in random_log()]
    log = write_csv(tmp_path / "log.csv", days, ";")  # type: ignore[arg-type]
    run(log, "--out", tmp_path / "out", "--delimiter", ";", "--time-format", "%d/%m/%Y")
    source = read_meta(tmp_path / "out")["source"]
    assert (source["rows"], source["time_unit"], source["time_format"]) == (400, "iso", "%d/%m/%Y")


def test_bad_rows_and_the_paper_are_reported(tmp_path: Path) -> None:
    pixel(tmp_path)
    with (tmp_path / "Pixel200K.csv").open("a") as file:
        file.write("i1,u1,never\n")
    flags = ("--raw", tmp_path, "--on-bad", "skip", "--protocol", "loo-paper")
    said = run("pixel200k", "--out", tmp_path / "out", *flags)
    for expected in ("1 bad row left out", "Pixel200K.csv line 6: time is missing", "3,965,656", "NOT equal"):
        assert expected in said


def test_equal_counts_are_called_equal(tmp_path: Path) -> None:
    pixel(tmp_path)
    run("pixel200k", "--raw", tmp_path, "--out", tmp_path / "out", "--protocol", "loo-paper")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    for row in meta["paper"].values():
        row |= {"paper": row["ours"], "equal": True}
    console = Console(record=True, width=100, file=sys.stderr)
    summarise(meta, tmp_path / "out", console)
    text = console.export_text()
    assert text.count(" equal") == 3
    assert "NOT" not in text


def test_the_calendar_shop_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trope.data import synthetic

    small = synthetic.CalendarShop(users=150, items=120)
    monkeypatch.setattr(synthetic, "CalendarShop", lambda: small)
    command = ("calendar-shop", "--min-item", "1")
    said = run(*command, "--out", tmp_path / "out", "--protocol", "next-basket")
    assert "150 users" in said and "baskets" in said
    assert "next-moment" not in said  # its visitors take one thing at a time


def test_a_shop_is_written_as_parquet_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "--out", str(tmp_path / "shop.csv"), "--users", "50"])
    assert isinstance(result.exception, ValueError) and "name a .parquet file" in str(result.exception)
    assert not (tmp_path / "shop.csv").exists()


@pytest.mark.parametrize("protocol", ["holdout", "loo-strict", "next-basket"])
def test_events_that_share_their_time_bring_a_hint(tmp_path: Path, protocol: str) -> None:
    days = [(u, i, START + (t - START) // 86_400 * 86_400) for u, i, t in random_log()]
    command = ("--out", tmp_path / "out", "--protocol", protocol, "--overwrite")
    said = " ".join(run(write_csv(tmp_path / "log.csv", days), *command).split())
    assert "% of events share their time" in said
    assert ("prepare with --protocol next-basket or holdout" in said) == (protocol == "loo-strict")
    assert "train with --set model.predicts=next-moment" in said.replace("Train", "train")
    if protocol != "next-basket":
        assert "next-moment" not in run(write_csv(tmp_path / "log.csv", random_log()), *command)


def test_the_pages_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    run(write_csv(tmp_path / "clicks.csv", random_log()), "--out", "data/clicks")
    found: dict[str, Any] = {}
    exec(compile(snippet, "data.md", "exec"), found)
    assert len(found["batch"].items)


def test_errors_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(u, i, t * 1_000) for u, i, t in random_log()])
    command = [sys.executable, "-m", "trope", "prepare", str(log), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "trope: " in done.stderr
    assert "pass --time-unit ms" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_was_dropped_and_why_is_said(tmp_path: Path) -> None:
    rows = [*random_log(), *[(user, 99, START + 500_000) for user in range(1_000, 2_500)], (1, 1, "never")]
    log = write_csv(tmp_path / "log.csv", [*rows, (1, 2, START - 5), (1, 2, START + 10**7)])
    flags = ("--on-bad", "skip", "--since", START, "--until", START + 10**6)
    said = " ".join(run(log, "--out", tmp_path / "out", *flags).split())
    for expected in (
        "read 1,903 rows of log.csv dropped 1 row that cannot be used, see below 1 row before --since 2020-09-13",
        "1 row from --until 2020-09-25 02:13:20 UTC on",
        "1,500 rows by the 5-core: 1,520 users became 20, 16 items became 15 kept 20 users, 15 items, 400 events",
        "Only 20 users validate and 20 test, too few to tell models apart: by chance alone an HR@10 of 0.10 varies by "
        "± 0.13. Keep more users with --min-user 1 --min-item 1",
    ):
        assert expected in said, said


def test_nothing_dropped_is_said_too(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", random_log(4_000, users=200))
    said = " ".join(run(log, "--out", tmp_path / "out").split())
    assert "dropped nothing kept 200 users" in said
    assert said.endswith(f"or `trope train {tmp_path / 'out'} --out runs/NAME`")
    assert "too few" not in said


def test_few_users_are_not_blamed_on_a_core_that_dropped_one(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [*random_log(4_000, users=199), (1_000, 1, 1_500_000_000)])
    said = " ".join(run(log, "--out", tmp_path / "out").split())
    assert "200 users became 199" in said and "too few" in said and "--min-user 1" not in said


@pytest.mark.parametrize(("protocol", "hint"), [("loo-strict", "A larger log"), ("holdout", "a longer --window")])
def test_few_users_in_a_log_that_lost_none(tmp_path: Path, protocol: str, hint: str) -> None:
    flags = ("--out", tmp_path / "out", "--protocol", protocol)
    said = " ".join(run(write_csv(tmp_path / "log.csv", random_log(4_000, users=199)), *flags).split())
    assert "too few to tell models apart" in said and hint in said
    assert "--min-user 1" not in said


def thinning() -> list[Event]:
    """Ten full days from 2020-09-01 on, then one event a week; one item too rare for a 5-core."""
    first = parse_moment("2020-09-01")
    full = [(n % 300, n % 12, first + n * 10 * DAY // 6_000) for n in range(6_000)]
    return [*full, *[(7, 1, first + (10 + 7 * week) * DAY) for week in range(1, 9)], (3, 99, first)]


@pytest.mark.parametrize("shards", [(), ("--shard-users", 70)])
def test_a_log_that_thins_out_gets_a_cutoff_proposed(tmp_path: Path, shards: tuple[object, ...]) -> None:
    log = write_csv(tmp_path / "log.csv", thinning())
    flags = ("--protocol", "holdout", "--window", "1d", *shards)
    said = " ".join(run(log, "--out", tmp_path / "out", *flags, "--cutoff", "2020-11-06").split())
    assert "evaluation 0 users validate, 1 tests" in said
    assert "Only 0 users validate and 1 tests" in said and "The windows hold 0 and 1 events, a typical window" in said
    proposed = "the log thins out after 2020-09-11 00:00 UTC. Pass --cutoff 2020-09-10T00:00:00Z."
    assert proposed in said and "--min-user" not in said
    said = " ".join(run(log, "--out", tmp_path / "next", *flags, "--cutoff", "2020-09-10T00:00:00Z").split())
    assert "evaluation 300 users validate, 300 test " in said and "too few" not in said


def test_one_user_is_said_in_the_singular() -> None:
    assert say_evaluated({"counts": {"valid_users": 1, "test_users": 6}}) == "1 user validates, 6 test"


def test_a_log_of_a_few_events_a_day_thins_out_nowhere(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [(1, n % 3, START + n * DAY) for n in (*range(30), 35)])
    said = " ".join(run(log, "--out", tmp_path / "out", "--protocol", "holdout").split())
    assert "thins out" not in said and "Choose another --cutoff or a longer --window." in said


def test_users_are_not_to_be_kept_where_the_core_dropped_none(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [*random_log(), (1, 99, START)])
    said = " ".join(run(log, "--out", tmp_path / "out").split())
    assert "by the 5-core: 20 users, 16 items became 15" in said and "--min-user 1" not in said
    assert "too few to tell models apart" in said


def test_training_without_a_user_to_validate_advises_by_protocol(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", thinning())
    window = Protocol("holdout", cutoff=parse_moment("2020-11-06"), window=DAY)
    data = prepared(log, tmp_path / "out", loose(protocol=window))
    with pytest.raises(ValueError, match="no user to validate on; prepare it with another --cutoff or a longer --win"):
        train(data, tiny(), tmp_path / "run", "cpu", progress=False)
    window = Protocol("holdout", cutoff=parse_moment("2020-11-04"), window=DAY)
    with pytest.raises(ValueError, match=r"to test: .* choose another --cutoff or a longer --window, or loosen"):
        prepared(log, tmp_path / "none", loose(protocol=window))


def test_a_filter_of_two_thresholds_and_other_event_types(tmp_path: Path) -> None:
    rows = [*random_log(), (1_000, 1, START)]
    log = write_parquet(tmp_path / "log.parquet", rows, kind=[*["view"] * 400, "buy"])
    flags = ("--event-col", "kind", "--event", "view", "--min-user", 2, "--min-item", 1, "--once")
    said = " ".join(run(log, "--out", tmp_path / "out", *flags).split())
    assert "dropped 1 row of an --event other than view kept" in said
    log = write_parquet(tmp_path / "log.parquet", rows)
    said = " ".join(run(log, "--out", tmp_path / "once", *flags[4:]).split())
    assert "1 row by the filter (--min-user 2 --min-item 1 --once): 21 users became 20, 15 items kept" in said


@pytest.mark.parametrize("shards", [(), ("--shard-users", 8)])
def test_events_of_a_clock_that_was_ahead_are_named(tmp_path: Path, shards: tuple[object, ...]) -> None:
    now = int(time.time())
    log = [(user, item, now - 10**7 + when % 10**6) for user, item, when in random_log()]
    late = [(1, 1, now + 10**6), (2, 2, now + 2 * 10**6)]
    path = write_parquet(tmp_path / "log.parquet", log + late)
    said = run(path, "--out", tmp_path / "out", *shards)
    assert (
        "2 events later than now, until " in said and "a clock was wrong. Leave such events out with --until 20" in said
    )
    until = re.search(r"--until (\S+?)\.?$", said, re.MULTILINE)
    assert until is not None
    said = run(path, "--out", tmp_path / "cut", *shards, "--until", until[1])
    assert "later than now" not in said


def test_times_in_minutes_are_noticed(tmp_path: Path) -> None:
    log = [(user, item, when // 60) for user, item, when in random_log()]
    said = run(write_parquet(tmp_path / "log.parquet", log), "--out", tmp_path / "out")
    assert "All events lie in 1970 when their times are read as seconds." in said


@pytest.mark.parametrize(
    ("given", "said"),
    [(("--memory", "lots"), "refused --memory lots: "), (("--threads", "-3"), "refused --threads -3: ")],
)
def test_what_duckdb_refuses_is_what_was_given(tmp_path: Path, given: tuple[str, str], said: str) -> None:
    log = write_csv(tmp_path / "log.csv", random_log())
    result = CliRunner().invoke(app, ["prepare", str(log), "--out", str(tmp_path / "out"), *given])
    assert said in str(result.exception)


def test_a_log_of_which_most_is_later_than_now_is_a_plan(tmp_path: Path) -> None:
    ahead = [(user, item, int(time.time()) + 10**6 + when % 10**6) for user, item, when in random_log()]
    assert "later than now" not in run(write_parquet(tmp_path / "log.parquet", ahead), "--out", tmp_path / "o")


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    out, name = tmp_path / "a [" / "bold]", "[red] [/bold] \x1b[31m.csv"
    run(write_csv(tmp_path / "log.csv", [*random_log(), (1, 1, "never")]), "--out", out, "--on-bad", "skip")
    meta = read_meta(out)
    meta["source"]["name"] = meta["bad_rows"]["first"][0]["file"] = name
    console = Console(record=True, width=200, file=sys.stderr)
    summarise(meta, out, console)
    text = console.export_text()
    for expected in (
        "a [/bold]",
        "401 rows of [red] [/bold] \\x1b[31m.csv",
        "  [red] [/bold] \\x1b[31m.csv line 402: time",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_products_without_a_type_are_said_to_be_dropped(tmp_path: Path) -> None:
    flags = ("--raw", grocery(tmp_path), "--level", "type", "--min-user", 1, "--min-item", 1, "--protocol", "loo-paper")
    said = " ".join(run("complete-journey", "--out", tmp_path / "out", *flags).split())
    assert "read 6 rows of complete-journey" in said
    assert "dropped 1 row without a product_type kept 2 users, 2 items, 5 events" in said


def test_where_nobody_watches_nothing_is_left_of_the_bar(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", random_log())
    assert CliRunner().invoke(app, ["prepare", str(log), "--out", str(tmp_path / "out")]).stderr == ""
