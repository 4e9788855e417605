"""report.md and report.html: the paper's marks, the intervals, what a reader must know; and the live table."""

from __future__ import annotations

import io
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from bootstrap import paired_bootstrap
from data_logs import prepared, random_log, write_parquet
from finished_runs import finish
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from training import SIZE, tiny_data
from typer.testing import CliRunner

from trope.cli import main as cli
from trope.data.printable import printable
from trope.data.sequences import Sequences
from trope.evaluate.metrics import per_user
from trope.evaluate.saved_ranks import load
from trope.experiments.config_file import common_settings
from trope.experiments.live_table import LiveTable
from trope.experiments.pool import Outcome, Run, Variant, plan
from trope.experiments.progress import Progress
from trope.experiments.report import baselines as counted
from trope.experiments.report.html import to_html
from trope.experiments.report.markdown import to_markdown
from trope.experiments.report.page import Cell, Grid, Page, Section
from trope.experiments.report.screen import parts_that_fit, show_section, show_warnings
from trope.experiments.variants import choose
from trope.figures import html
from trope.runs import REFIT
from trope.times import DAY

# Places of the positive: good is nearly always first, fair a little behind, poor far behind.
PLACES = {"good": 1, "fair": 3, "poor": 9}
VARIANTS = ("--variant", "good=hstu-trope,train.lr=0.01", "--variant", "poor=sasrec")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("report"))


def better(run: Run, count: int) -> np.ndarray:
    random = np.random.default_rng([run.seed, PLACES[run.variant.name]])
    return random.integers(0, 2 * PLACES[run.variant.name], count)


def variants() -> list[Variant]:
    return choose([], ["fair=hstu", "good=hstu-trope,train.lr=0.01", "poor=sasrec"], SIZE)


def compare(data: Sequences, out: Path, seeds: int = 3, *more: object) -> str:
    """All is finished, so nothing is trained."""
    chosen = [part for setting in SIZE for part in ("--set", setting)]
    arguments = [
        "compare", data.path, "--models", "", "--variant", "fair=hstu", *VARIANTS, "--seeds", seeds, "--device", "cpu",
        "--out", out, "--resamples", 300, *chosen, *more,
    ]  # fmt: skip
    result = CliRunner(env={"COLUMNS": "140"}).invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def reported(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reported") / "runs"
    finish(data, variants(), 3, out, better)
    said = compare(data, out, 3, "--json", out / "all.json")
    assert "9 finished before" in said and "report.md" in said
    assert "most popular" in said.split("Results")[1]  # the same table on the screen
    return out


def table(text: str, title: str) -> dict[str, list[str]]:
    """Cells of a Markdown table under a heading, by the first column; the header is under "model"."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows if not row[0].startswith("---")}


def test_best_is_bold_second_underlined_and_the_gain_relative(reported: Path, data: Sequences) -> None:
    rows = table((reported / "report.md").read_text(), "Results")
    assert rows["model"] == ["HR@10", "HR@50", "HR@200", "NDCG@10", "NDCG@50", "NDCG@200", "MRR"]
    metric = rows["model"].index("MRR")
    by_seed = {
        name: [json.loads((reported / f"{name}-seed{s}" / "metrics.json").read_text())["test"]["MRR"] for s in range(3)]
        for name in PLACES
    }
    mean = {name: np.mean(values) for name, values in by_seed.items()}
    shown = {name: f"{100 * mean[name]:.2f} ± {100 * np.std(by_seed[name], ddof=1):.2f}" for name in PLACES}
    assert rows["good"][metric] == f"**{shown['good']}** ({100 * (mean['good'] / mean['fair'] - 1):+.1f} %) \\*"
    assert rows["fair"][metric] == f"<u>{shown['fair']}</u>" and rows["poor"][metric] == shown["poor"]
    *fixed, decayed, again = list(rows)[-7:]
    assert fixed == ["most popular", "popular in 30 d", "popular in 7 d", "popular in 24 h", "popular in 1 h"]
    assert re.fullmatch(r"decayed counts, [\d.]+ (min|h|d)", decayed) and again == "again"
    kept = json.loads((reported / "baselines.json").read_text())["metrics"]
    for name in (*fixed, decayed, again):
        assert rows[name][metric] == f"{100 * kept[name]['MRR']:.2f}"
    assert not any("+ counting" in name for name in rows)  # these runs have no such control


@pytest.mark.parametrize(("good", "said"), [("trope", True), ("hstu-trope", False)])
def test_under_loo_paper_a_pulse_has_a_validation_of_its_own(tmp_path: Path, good: str, said: bool) -> None:
    data, out = tiny_data(tmp_path / "data", "loo-paper"), tmp_path / "runs"
    named = ("fair=hstu", f"good={good}")
    finish(data, choose([], named, SIZE), 1, out, better)
    arguments = ["compare", str(data.path), "--models", "", "--out", str(out), "--resamples", "9", "--seeds", "1"]
    arguments += [part for each in named for part in ("--variant", each)]
    arguments += [part for setting in SIZE for part in ("--set", setting)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    report = (out / "report.md").read_text()
    assert "so the test chose the epoch" in report
    assert ("Models with a pulse validate on the event before it instead" in report) == said


def test_intervals_are_against_the_reference_and_the_second_best(reported: Path) -> None:
    text = (reported / "report.md").read_text()
    values = {
        name: np.mean([per_user(load(reported / f"{name}-seed{s}", "test")[0].places)["MRR"] for s in range(3)], axis=0)
        for name in PLACES
    }
    low, high = (100 * float(bound) for bound in paired_bootstrap(values["poor"], values["fair"], 300)[1:])
    first = table(text, "Against fair, the reference")
    assert f"({low:+.2f} .. {high:+.2f})" in first["poor"][-1]
    assert list(first) == ["model", "good", "poor"]
    second = table(text, "Against the second best")
    assert second["model"][-1] == "MRR (fair)" and second["fair"][-1] == ""
    assert second["good"][-1] == first["good"][-1]


def test_a_reader_learns_how_it_was_measured(reported: Path, data: Sequences) -> None:
    for name in ("report.md", "report.html"):
        text = (reported / name).read_text().replace("\\", "")
        for words in (
            "loo-strict", "filter_seen", "30 users, one positive each", data.meta["checksum"][:12], "0, 1, 2; 9 of 9",
            "validation HR@10 chose", "test was read once", "model.width=8", "NVIDIA H200", "commit".title(), "abc123",
            "torch 2.11", "300 resamples", "train.lr=0.01",
        ):  # fmt: skip
            assert words in text, words
        assert str(data.path.parent) not in text


class Checker(HTMLParser):
    """Every tag that is opened is closed, and nothing comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe") and not {"src", "href", "onload"} & dict(attrs).keys()
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_is_whole_alone_and_says_what_the_markdown_says(reported: Path) -> None:
    text = (reported / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert not checker.open and "prefers-color-scheme: dark" in text and "http" not in text
    plain = re.sub(r"<[^>]+>", "", text)
    numbers = re.findall(r"[+-]?\d+\.\d\d", (reported / "report.md").read_text().replace("\\", ""))
    assert len(numbers) > 60 and all(number in plain for number in numbers)


def test_recall_where_users_have_several_positives(tmp_path: Path) -> None:
    held = tiny_data(tmp_path, "holdout")
    finish(held, variants(), 1, tmp_path / "runs", better)
    compare(held, tmp_path / "runs", 1)
    text = (tmp_path / "runs" / "report.md").read_text()
    assert table(text, "Results")["model"][:2] == ["Recall@10", "Recall@50"]
    assert "Recall@K: share of a user's positives" in text and "the test begins 2020-09-" in text
    assert "**Warning:** there is one seed" in text and " ± " not in text.split("## Results")[1].split("|", 1)[1]


def test_failed_runs_stand_in_the_report_with_their_reason(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs"
    finish(data, variants(), 2, out, better)
    (out / "poor-seed1" / "metrics.json").unlink()
    monkeypatch.setattr(Run, "command", lambda *_: ["sh", "-c", "echo out of memory; exit 3"])
    with pytest.raises(AssertionError, match=r"poor-seed1 +exit code 3: out of memory"):
        compare(data, out, 2)  # its exit code is 1
    text = (out / "report.md").read_text()
    assert "poor-seed1 failed: exit code 3: out of memory" in text and "1 of 6 runs are missing" in text


def test_a_reference_that_failed_is_said_to_be_missing(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs"
    finish(data, variants(), 1, out, better)
    (out / "fair-seed0" / "metrics.json").unlink()
    monkeypatch.setattr(Run, "command", lambda *_: ["false"])
    with pytest.raises(AssertionError, match="exit code 1"):
        compare(data, out, 1)
    text = (out / "report.md").read_text()
    assert "fair, the reference, has no finished run; the reference is good instead" in text
    assert "## Against good, the reference" in text and "exit code 1: it printed nothing" in text


def test_baselines_are_ranked_once(data: Sequences, reported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (reported / "report.md").read_text()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ranked again")

    monkeypatch.setattr("trope.experiments.report.baselines.rank_baselines", refuse)
    compare(data, reported)
    assert (reported / "report.md").read_text() == before
    kept = json.loads((reported / "baselines.json").read_text())
    (reported / "baselines.json").write_text(json.dumps({**kept, "about": {"checksum": "of another dataset"}}))
    with pytest.raises(AssertionError, match="ranked again"):
        compare(data, reported)
    (reported / "baselines.json").write_text(json.dumps(kept))


def warnings_in(folder: Path) -> list[str]:
    """The warnings of report.md; report.html must have the same."""
    plain = (folder / "report.md").read_text().replace("\\", "")
    found = re.findall(r"^> \*\*Warning:\*\* (.*)$", plain, re.MULTILINE)
    on_page = re.findall(r'<p class="warn"><b>Warning:</b> (.*?)</p>', (folder / "report.html").read_text())
    assert [unescape(text) for text in on_page] == found
    return found


def change_metrics(run: Path, **values: object) -> None:
    path = run / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_model_that_popularity_beats_is_named(data: Sequences, tmp_path: Path) -> None:
    finish(data, variants(), 1, tmp_path / "runs", lambda run, count: np.full(count, 15 + PLACES[run.variant.name] % 3))
    compare(data, tmp_path / "runs", 1)
    said = " ".join(warnings_in(tmp_path / "runs"))
    assert "the baseline 'most popular' is better than every model in HR@10" in said


def test_counting_that_is_ahead_of_one_model_is_said(data: Sequences, tmp_path: Path) -> None:
    places = {"good": 0, "fair": 0, "poor": 18}
    finish(data, variants(), 1, tmp_path / "runs", lambda run, count: np.full(count, places[run.variant.name]))
    compare(data, tmp_path / "runs", 1)
    (said,) = [each for each in warnings_in(tmp_path / "runs") if "'most popular' is better" in each]
    assert "than poor in HR@10" in said and "good" not in said and "every" not in said


def test_the_screen_carries_the_warnings_of_the_report(data: Sequences, tmp_path: Path) -> None:
    """One seed, counting ahead, an early epoch, HR@10 near zero: four sentences, the same in all three places."""
    out = tmp_path / "runs"
    finish(data, variants(), 1, out, lambda run, count: better(run, count) + 15 * (run.variant.name == "poor"))
    change_metrics(out / "good-seed0", best_epoch=2, epochs=12)
    said = " ".join(compare(data, out, 1, "--json", out / "all.json").split())
    found = warnings_in(out)
    for words in (
        "there is one seed", "better than poor in HR@10", "one of the first 2 epochs for good (2 of 12)",
        "HR@10 is near zero for poor (0.00 %)",
    ):  # fmt: skip
        assert any(words in each for each in found), words
        assert words in said.split("Results")[1], words
    assert all(f"Warning: {each}" in said for each in found)
    assert json.loads((out / "all.json").read_text())["warnings"] == found


def with_counting(out: Path, gains: dict[str, float]) -> dict[str, float]:
    """Give runs the control: each metric so much larger; returns the mean MRR over seeds by model."""
    found = {}
    for name, gain in gains.items():
        each = []
        for run in sorted(out.glob(f"{name}-seed*")):
            test = json.loads((run / "metrics.json").read_text())["test"]
            counted = {metric: min(1.0, value + gain) for metric, value in test.items()}
            change_metrics(run, test_with_counting=counted)
            each.append(counted["MRR"])
        found[name] = float(np.mean(each))
    return found


def test_a_model_plus_counting_stands_below_the_model_everywhere(data: Sequences, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    finish(data, variants(), 2, out, better)
    mean = with_counting(out, {"fair": 0.05, "poor": 0.0})
    said = compare(data, out, 2, "--json", out / "all.json")
    rows = table((out / "report.md").read_text(), "Results")
    names = list(rows)[1:6]
    assert names == ["fair", "fair + counting", "good", "poor", "poor + counting"]
    shown = rows["fair + counting"][rows["model"].index("MRR")]
    assert shown.startswith(f"{100 * mean['fair']:.2f} ± ") and "*" not in shown and "<u>" not in shown
    assert "fair + counting" in re.sub(r"<[^>]+>", "", (out / "report.html").read_text())
    for part in said.split("Results"):  # by metric, and the report's table
        assert "fair + counting" in part and f"{100 * mean['fair']:.2f}" in part and "good + counting" not in part
    written = json.loads((out / "all.json").read_text())["with_counting"]
    assert list(written) == ["fair", "poor"] and written["fair"]["MRR"] == pytest.approx(mean["fair"])
    assert "\\+ counting" not in said and "beta times the log" in (out / "report.md").read_text()
    found = [each for each in warnings_in(out) if "control" in each]
    assert len(found) == 1  # a control that equals its model is ahead of nothing
    assert found[0].startswith("the control 'fair + counting' is better than fair in ") and "MRR" in found[0]
    metrics = json.loads((out / "fair-seed1" / "metrics.json").read_text())
    del metrics["test_with_counting"]
    (out / "fair-seed1" / "metrics.json").write_text(json.dumps(metrics))
    compare(data, out, 2)  # one seed has none: a mean over fewer seeds would not compare
    assert "fair + counting" not in (out / "report.md").read_text()


def test_counting_that_changes_the_order_is_said(data: Sequences, tmp_path: Path) -> None:
    """Better than its own model, and than one that was ahead of it; what it was ahead of before is not news."""
    out = tmp_path / "runs"
    finish(data, variants(), 1, out, better)
    with_counting(out, {"fair": 0.9})
    compare(data, out, 1)
    (said,) = [each for each in warnings_in(out) if "control" in each]
    assert "fair, good in" in said and "MRR" in said and "poor" not in said


def test_runs_of_several_commits_are_named(data: Sequences, reported: Path, tmp_path: Path) -> None:
    assert not any("commit" in each for each in warnings_in(reported))
    out = tmp_path / "runs"
    finish(data, variants(), 2, out, better)
    for run, commit in (("good-seed0", "def456"), ("good-seed1", "123abc+"), ("poor-seed1", "123abc+")):
        path = out / run / "env.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": commit}))
    said = " ".join(compare(data, out, 2).split())
    (found,) = [each for each in warnings_in(out) if "commit" in each]
    assert found == ("rows come from several commits: fair at abc123; good at 123abc+, def456; poor at 123abc+, abc123")
    assert f"Warning: {found}" in said


def test_a_sound_comparison_warns_of_what_counting_does_alone(reported: Path) -> None:
    assert all(each.startswith("the baseline ") for each in warnings_in(reported))


def test_baselines_whose_window_is_empty_say_so(data: Sequences, tmp_path: Path) -> None:
    """A log of plain dates: strictly before midnight, the last hour is empty; the last day is not."""
    rows = [(user, item, time - time % DAY) for user, item, time in random_log(rows=400, users=30, items=20)]
    dates = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "data")
    finish(dates, variants(), 1, tmp_path / "runs", better)
    said = " ".join(compare(dates, tmp_path / "runs", 1).split())
    sentence = "'popular in 1 h' equals 'most popular': no event lies in the last hour before t_now, for any test user"
    assert sentence in warnings_in(tmp_path / "runs") and sentence in said
    assert "'popular in 24 h' equals" not in said
    assert sentence in " ".join(compare(dates, tmp_path / "runs", 1).split())  # also from baselines.json


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.json", "{", r"metrics\.json is damaged or foreign"),
        ("metrics.json", "[1]", r"metrics\.json is damaged or foreign: .* instead of names"),
        ("metrics.json", "[" * 100_000, r"metrics\.json is damaged or foreign: .*nested"),
        ("metrics.json", {"best_epoch": "two"}, r"metrics\.json is damaged or foreign: best_epoch "),
        ("metrics.json", {"epochs": 0}, r"metrics\.json is damaged or foreign: epochs"),
        ("metrics.json", {"seconds": None}, r"metrics\.json is damaged or foreign: seconds"),
        ("metrics.json", {"test": {"HR@10": "much"}}, r"metrics\.json is damaged or foreign: test"),
        ("metrics.json", {"test": {}}, r"metrics\.json is damaged or foreign: test .*HR@10"),
        ("metrics.json", {"test_with_counting": {}}, r"metrics\.json .*: test_with_counting has no HR@10"),
        ("metrics.json", {"test_with_counting": 1}, r"metrics\.json is damaged or foreign: test_with_counting"),
        ("metrics.json", {"valid": {}}, r"metrics\.json is damaged or foreign: valid .*HR@10"),
        ("metrics.json", {"filter_seen": "sometimes"}, r"metrics\.json is damaged or foreign: filter_seen"),
        ("metrics.json", {"data": 3}, r"metrics\.json is damaged or foreign: data"),
        ("env.json", "\xff", r"env\.json is damaged or foreign"),
        ("env.json", '{"commit": 7}', r"env\.json is damaged or foreign: commit"),
        ("env.json", None, r"env\.json"),
    ],
)  # fmt: skip
def test_a_damaged_run_gives_one_line(
    data: Sequences, tmp_path: Path, name: str, content: str | dict[str, object] | None, words: str
) -> None:
    out = tmp_path / "runs"
    finish(data, variants(), 1, out, better)
    path = out / "fair-seed0" / name
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        change_metrics(path.parent, **content)
    else:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises((ValueError, OSError), match=words) as refused:
        compare(data, out, 1)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_damaged_baselines_are_counted_again(data: Sequences, reported: Path) -> None:
    path = reported / "baselines.json"
    whole = json.loads(path.read_text())
    assert counted._read(path, whole["about"]) is not None
    edited = path.read_text().replace("0.", "0.1", 1)  # a plausible number, but not the one that was counted
    wrong = {"metrics": {**whole["metrics"], "most popular": {"MRR": 7}}}
    before = {name: whole["metrics"][name] for name in ("most popular", "popular in 24 h", "popular in 1 h")}
    older = json.dumps({"about": whole["about"], "metrics": before, "equal": []})
    for content in ("[" * 100_000, "\xff", "[]", "{}", '{"about": 1}', json.dumps(whole | wrong), "{", edited, older):
        path.write_bytes(content.encode("latin-1"))
        assert counted._read(path, whole["about"]) is None, content[:20]
    compare(data, reported)
    assert json.loads(path.read_text()) == whole


HOSTILE = "[/bold]\x1b[31m\n\u202e<b>[link](x)"


def test_control_characters_and_markup_in_names_are_shown_and_do_nothing() -> None:
    """Names come from a log, a folder or a run's last words. The same text stands on the screen and on both pages."""
    grid = Grid([Cell("model"), Cell(HOSTILE)], [[Cell(HOSTILE), Cell("1", HOSTILE)]])
    page = Page(HOSTILE, HOSTILE, [(HOSTILE, HOSTILE)], [Section(HOSTILE, HOSTILE, grid)], [HOSTILE])
    console = Console(file=io.StringIO(), force_terminal=False, width=300)
    show_section(page.sections[0], HOSTILE, console)
    show_warnings(page.warnings, console)
    written = (to_html(page), to_markdown(page), console.file.getvalue())  # type: ignore[attr-defined]
    for text in written:
        assert "\x1b" not in text and "\u202e" not in text and "x1b" in text and "u202e" in text
    assert "[/bold]\\x1b[31m\\n\\u202e<b>[link](x)" in written[2]
    assert "<b>[" not in written[0] and "\\[link]" in written[1]
    assert printable("Crème brûlée 日本 👩‍🍳 \\n") == "Crème brûlée 日本 👩‍🍳 \\n"


def test_on_a_narrow_screen_a_table_is_cut_and_no_word_is_broken() -> None:
    names = ["decayed-counts-43-days", "hstu-time"]
    grid = Grid(
        [Cell("model"), *(Cell(f"metric@{place}") for place in range(12))],
        [[Cell(name), *(Cell(f"{place}.25", "+0.10 .. +0.20") for place in range(12))] for name in names],
        numbers=True,
    )
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    show_section(Section("results", "", grid), "difference", console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    for word in (*names, *(f"metric@{place}" for place in range(12)), *(f"{place}.25" for place in range(12))):
        assert any(word in line.split() for line in lines), word
    assert sum("hstu-time" in line for line in lines) > 1, "each part names its rows"


@given(st.lists(st.integers(1, 30), min_size=1), st.integers(1, 100))
def test_parts_hold_every_column_once_and_fit(widths: list[int], room: int) -> None:
    parts = [widths[part] for part in parts_that_fit(widths, room)]
    assert [width for part in parts for width in part] == widths
    assert all(len(part) == 1 or sum(width + 2 for width in part) <= room for part in parts)


def test_the_live_table_shows_escape_codes_of_a_failed_run(data: Sequences, tmp_path: Path) -> None:
    (run,) = plan([Variant("a", "hstu", SIZE)], [0], tmp_path)
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
        with LiveTable([run], console) as watch:
            watch.began(run)
            watch.ended(Outcome(run, 4.0, "exit code 3: \x1b]0;owned\x07"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b]0;" not in text and "\\x1b]0;owned" in text


def test_markup_in_names_stays_text() -> None:
    grid = Grid([Cell("model"), Cell("a_b*c|d")], [[Cell("<b>x</b>"), Cell("1", "2", "best", "worse")]])
    page = Page("t", "s", [("k", "v<w>")], [Section("h", "text", grid)], ["w & w"])
    assert "<b>x</b>" not in to_html(page) and "&lt;b&gt;x" in to_html(page) and "w &amp; w" in to_html(page)
    assert "a\\_b\\*c\\|d" in to_markdown(page) and "\\<b>x" in to_markdown(page)
    assert '<b>1</b><small class="worse">2 *</small>' in to_html(page) and "**1** (2) \\*" in to_markdown(page)


def test_the_shell_escapes_whatever_is_text() -> None:
    bad = '<i>"&'
    page = html.document(
        bad, html.heading(bad), html.paragraph(bad), html.warning(bad), html.bullets([bad]), html.facts([(bad, bad)]),
        html.cards(html.card(bad, html.text(bad))), html.details(bad), html.picture(b"<svg/>", alt=bad, caption=bad),
    )  # fmt: skip
    assert "<i>" not in page and page.count("&lt;i&gt;") == 12 and 'alt="&lt;i&gt;&quot;&amp;"' in page


def test_no_other_module_writes_a_page_of_its_own() -> None:
    package = Path(html.__file__).parents[1]
    holders = [path for path in package.rglob("*.py") if "<!doctype" in path.read_text().lower()]
    assert holders == [Path(html.__file__)]


def log(run: Run, *rows: dict[str, float], mode: str = "a", end: str = "\n") -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "log.jsonl").open(mode) as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def test_progress_follows_a_log_that_grows_and_is_written_anew(tmp_path: Path) -> None:
    run = plan([Variant("a", "hstu", ("train.epochs=7",))], [0], tmp_path)[0]
    progress = Progress.of(run).update()
    assert (progress.epoch, progress.epochs, progress.best) == (0, 7, None)
    log(run, {"step": 1, "epoch": 0, "seconds": 1.0}, {"step": 2, "epoch": 1, "seconds": 2.0, "HR@10": 0.5})
    log(run, {"step": 3, "epoch": 2, "seconds": 3.0, "HR@10": 0.25}, end='\n{"step": 4, "epo')
    progress.update()
    assert (progress.epoch, progress.best, progress.best_epoch, progress.seconds) == (2, 0.5, 1, 3.0)
    (run.folder / "log.jsonl").unlink()
    log(run, {"step": 2, "epoch": 1, "seconds": 2.0, "HR@10": 0.125})
    assert (progress.update().epoch, progress.best) == (1, 0.125)


@pytest.mark.parametrize(
    "line",
    ["7", "null", "[]", '{"epoch": "x", "seconds": 1}', '{"epoch": 3}', "[" * 100_000, "\xff\xfe", '{"HR@10": 2}'],
)
def test_progress_skips_lines_that_are_not_a_logs(tmp_path: Path, line: str) -> None:
    (run,) = plan([Variant("a", "hstu", SIZE)], [0], tmp_path)
    log(run, {"step": 1, "epoch": 1, "seconds": 2.0, "HR@10": 0.5})
    with (run.folder / "log.jsonl").open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    log(run, {"step": 2, "epoch": 2, "seconds": 3.0, "HR@10": 0.25})
    progress = Progress.of(run).update()
    assert (progress.epoch, progress.best, progress.best_epoch, progress.seconds) == (2, 0.5, 1, 3.0)


def watched(runs: list[Run], terminal: bool) -> str:
    """The screen after one run ended well, one failed, one is under way and one waits."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, height=40, highlight=False)
    with LiveTable(runs, console) as watch:
        for run in runs[:3]:
            watch.began(run)
        watch.ended(Outcome(runs[1], 4.0, "exit code 3: the reason"))
        log(runs[2], {"step": 2, "epoch": 5, "seconds": 65.0, "HR@10": 0.1234})
        watch._began[runs[2].folder] -= 77  # twelve seconds later, as while the pulse is fitted and the log is silent
        watch._drawn -= 3600
        watch.tick()
        (runs[2].folder / REFIT).mkdir()
        watch._drawn -= 3600
        watch.tick()
        (text,) = [console.file.getvalue()]  # type: ignore[attr-defined]
    return text


def test_the_live_table_and_the_plain_lines_say_the_same(data: Sequences, tmp_path: Path) -> None:
    for terminal in (True, False):
        four = plan([Variant(name, "hstu", SIZE) for name in "abcd"], [0], tmp_path / str(terminal))
        text = watched(four, terminal)
        assert ("\x1b[" in text) == terminal
        assert "c-seed0" in text and "12.34" in text and "5/3" in text and "77" in text
        assert "exit code 3: the reason" in text and "d-seed0" not in text
        assert text.count("refitting") == 1
    assert "    0/4  b-seed0" in text


def test_a_file_gives_sizes_and_training_and_the_preset_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        "[recipe]\n[model]\nwidth = 8\nheads = 2\nhead_dim = 4\n[train]\nshared_negatives = true\n"
        '[eval]\nfilter_seen = "window"\n'
    )
    common = common_settings(file, ["model.width=16", "model.head_dim=8"])
    assert common == (
        "model.width=8", "model.heads=2", "model.head_dim=4", "train.shared_negatives=true", "eval.filter_seen=window",
        "model.width=16", "model.head_dim=8",
    )  # fmt: skip
    first, second, printed = choose(["sasrec", "hstu-trope", "hstu-trope-paper"], [], common)
    configs = [plan([each], [3], tmp_path)[0].config for each in (first, second, printed)]
    assert [c.model.width for c in configs] == [16] * 3 and [c.train.seed for c in configs] == [3] * 3
    assert [c.rotary.kind for c in configs] == ["none", "trope", "trope"] and configs[0].model.block == "sasrec"
    assert [c.rotary.phase for c in configs] == ["exact", "exact", "fp32"] and not configs[0].model.time_bias
    with pytest.raises(FileNotFoundError, match="no config file"):
        common_settings(tmp_path / "none.toml", [])
    with pytest.raises(ValueError, match="NAME=MODEL"):
        choose([], ["nameless"])
    with pytest.raises(ValueError, match="NAME=MODEL"):
        choose([], ["x=gru4rec,train.lr=1"])
