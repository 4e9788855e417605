"""`trope bench train` on a tiny shape: every version takes the same kind of step; the roofline's terms are right."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from trope.bench.shapes import SHAPES, find_shape, generate
from trope.bench.tools import Ceilings
from trope.bench.train import Bench, Row, roofline, training_benchmark
from trope.environment import describe

CPU = torch.device("cpu")


def test_a_quick_run_prints_and_writes_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    versions = ("fused", "plain", "eager")
    rows = training_benchmark((), tmp_path / "train.csv", ("hstu-trope",), versions, ("full", "own"), quick=True)
    assert [(row.lengths, row.version) for row in rows] == [(a, b) for a in ("full", "own") for b in versions]
    for row in rows:
        parts = row.table_ms + row.candidates_ms + row.matmul_ms + row.attention_ms
        assert row.roofline_ms == pytest.approx(parts, abs=0.01)
        assert row.tokens_per_s == pytest.approx(row.tokens * row.it_per_s, rel=0.02)
    assert {row.table_state for row in rows} == {"full"}
    full, own = rows[0], rows[3]
    assert full.tokens == 16 * 16 and own.tokens < full.tokens
    with (tmp_path / "train.csv").open() as file:
        assert list(next(iter(csv.DictReader(file)))) == [f.name for f in fields(Row)] + list(describe())
    assert "hstu-trope" in capsys.readouterr().out


def test_a_run_that_is_cut_off_leaves_what_it_has_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        training_benchmark((), tmp_path / "train.csv", ("hstu", "no-model"), ("plain",), ("full",), quick=True)
    with (tmp_path / "train.csv").open() as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["hstu"]


def test_all_versions_compute_the_same_loss_to_begin_with() -> None:
    """Negatives are drawn apart, so losses agree up to their noise, and fall."""
    shape = find_shape("tiny")
    data = generate(shape, 10 * shape.batch, full=True, device=CPU)
    first = {}
    for version in ("fused", "plain", "eager"):
        step = getattr(Bench(shape, "hstu-time", data, CPU), version)()
        losses = [float(step()) for _ in range(30)]
        first[version] = losses[0]
        assert losses[-1] < losses[0]
    assert max(first.values()) - min(first.values()) < 0.1 * min(first.values())


def test_the_rooflines_terms() -> None:
    config = find_shape("pixel1m").config("hstu-trope")
    parts = roofline(config, items=100_541, tokens=6400, pairs=128 * 50 * 51 // 2, ceilings=Ceilings(4e12, 8e14))
    assert parts["table_ms"] == pytest.approx(1e3 * 100_541 * 512 * 26 / 4e12)
    row = roofline(find_shape("shop").config("hstu-trope"), 4_800_000, 65_536, 0, Ceilings(4e12, 8e14))
    assert row["table_ms"] == pytest.approx(1e3 * 4_800_000 * (128 * 18 + 8) / 4e12)
    assert parts["candidates_ms"] == pytest.approx(1e3 * 2 * 6400 * 129 * 512 * 2 / 4e12)
    assert parts["matmul_ms"] == pytest.approx(1e3 * 6 * 6400 * 2 * (512 * 2048 + 512 * 512) / 8e14)
    assert parts["attention_ms"] == pytest.approx(1e3 * 14 * 128 * 50 * 51 // 2 * 2 * 512 / 8e14, rel=1e-3)


def test_large_tables_have_one_second_moment_a_row() -> None:
    states = {name: shape.config("hstu-trope").train.table_state for name, shape in SHAPES.items()}
    assert {name for name, state in states.items() if state == "row"} == {"shop", "shop-long", "shop-100m"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape 'huge'"):
        training_benchmark(("huge",))
    with pytest.raises(ValueError, match="unknown version magic"):
        training_benchmark(versions=("magic",))
