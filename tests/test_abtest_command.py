"""`trope abtest analyse` from end to end: what it prints, which files it writes, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from abtest_logs import START, Logs, experiment

from trope.cli.main import main


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of `trope WORDS`."""
    monkeypatch.setattr(sys, "argv", ["trope", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exposures, outcomes = experiment(users=400, lift=3.0).write(tmp_path)
    segments, out = tmp_path / "segments.csv", tmp_path / "out"
    segments.write_text(
        "user_id,country\n" + "".join(f"u{number},{'PL' if number % 2 else 'DE'}\n" for number in range(400))
    )
    words = (
        "abtest",
        "analyse",
        exposures,
        outcomes,
        "--out",
        out,
        "--segments",
        segments,
        "--metrics",
        "conversion,revenue",
    )
    assert command(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Winner: trope beats control: CVR +")
    for words in ("Metric", "Definition", "Relative lift", "P-Value", "95 % interval", "CVR", "Revenue per user", "DE"):
        assert words in printed
    assert sorted(file.name for file in out.iterdir()) == [
        "analysis.json", "days.png", "days.svg", "forest.png", "forest.svg", "report.html", "report.md",
    ]  # fmt: skip
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2 and "Winner: trope beats control" in page
    text = (out / "report.md").read_text()
    assert "| Metric" in text and "![forest.png](forest.png)" in text and "Holm over metrics and arms" in text
    found = json.loads((out / "analysis.json").read_text())
    assert found["verdict"]["winners"] == ["trope"] and found["environment"]["trope"]
    assert [row["metric"] for row in found["comparisons"]] == ["conversion", "revenue"]
    assert len(found["comparisons"][0]["points"]) == 4 and len(found["segments"]) == 4


def test_first_line_of_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = experiment(users=200, lift=3.0)
    logs.shares = {"control": 0.1, "trope": 0.9}
    exposures, outcomes = logs.write(tmp_path)
    words = ("abtest", "analyse", exposures, outcomes, "--out", tmp_path / "out", "--looks", 2, "--horizon", 8)
    assert command(monkeypatch, *words, "--metrics", "orders/exposures") == 0
    assert capsys.readouterr().out.startswith("No winner is called: the sample ratio is off: trope has ")
    assert json.loads((tmp_path / "out" / "analysis.json").read_text())["verdict"]["winners"] == []


def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exposures, outcomes = experiment(users=20).write(tmp_path)
    words = ("abtest", "analyse", exposures, outcomes, "--out", tmp_path / "out")
    assert command(monkeypatch, *words, "--control", "b") == 2
    assert command(monkeypatch, *words, "--always", "--looks", 3, "--horizon", 9) == 2
    assert command(monkeypatch, *words, "--engine", "sqlite") == 2
    assert command(monkeypatch, *words[:2], exposures.parent, *words[3:]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("trope: ") for line in lines)
    assert f"did you mean {exposures}?" in lines[-1]


def test_before_the_first_look_and_without_lifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports of experiments that have nothing to show yet."""
    exposures, outcomes = experiment(users=60, days=2).write(tmp_path)
    words = ("abtest", "analyse", exposures, outcomes, "--out", tmp_path / "out")
    assert command(monkeypatch, *words, "--looks", 2, "--horizon", 30) == 0
    assert capsys.readouterr().out.startswith("No winner yet: the first of 2 looks is still to come.")
    few = Logs([("a", "control", START, False), ("b", "trope", START, False)], [("a", "i", START + 9, 1.0)])
    few.write(tmp_path / "few")
    words = ("abtest", "analyse", tmp_path / "few" / "exposures", tmp_path / "few" / "outcomes.parquet")
    assert command(monkeypatch, *words, "--out", tmp_path / "out2") == 0
    assert "n/a" in capsys.readouterr().out
    # An arm in which nobody buys has a lift of -100 % and no interval.
    logs = experiment(users=100, days=2)
    arms = {user: arm for user, arm, _, _ in logs.exposures}
    logs.outcomes = [row for row in logs.outcomes if arms[row[0]] == "control"]
    exposures, outcomes = logs.write(tmp_path / "none")
    words = ("abtest", "analyse", exposures, outcomes, "--no-cuped", "--metrics", "conversion,revenue/orders")
    assert command(monkeypatch, *words, "--out", tmp_path / "out3") == 0
    assert "-100.00 %" in capsys.readouterr().out
    assert command(monkeypatch, *words, "--always", "--out", tmp_path / "out3") == 0
