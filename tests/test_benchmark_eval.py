"""`trope bench eval` on a tiny shape: rows, CSV, and that a kernel which counts wrongly gets no number."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from trope import benchmark_eval
from trope.benchmark_eval import SHAPES, TINY, Row, evaluation_benchmark, first_users, generate
from trope.environment import describe
from trope.evaluate import evaluate


def test_a_quick_run_prints_and_writes_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = evaluation_benchmark("shop", tmp_path / "eval.csv", quick=True)
    assert [(row.version, row.precision) for row in rows] == [("kernel", "fp32"), ("kernel", "bf16"), ("plain", "fp32")]
    for row in rows:
        assert row.encode_s > 0 and row.rank_s > 0
        assert row.total_s == pytest.approx(row.encode_s + row.rank_s, abs=1e-3)
        assert row.users_per_s == pytest.approx(TINY.U / row.total_s, rel=0.1)
    assert [row.measured_users for row in rows] == [TINY.sample, TINY.U, TINY.sample]
    said = capsys.readouterr().out
    assert "scaled up" in said and "3 x 2 x U 40 x V 300 x E 16" in said
    with (tmp_path / "eval.csv").open() as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == [f.name for f in fields(Row)] + list(describe())
    assert [row["version"] for row in written] == ["kernel", "kernel", "plain"]


def test_a_kernel_that_counts_wrongly_gets_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_places = benchmark_eval.places

    def wrong_places(users, catalogue, *cells):
        better, ties = true_places(users, catalogue, *cells)
        return better + (catalogue.backend == "triton"), ties

    monkeypatch.setattr(benchmark_eval, "places", wrong_places)
    rows = evaluation_benchmark(quick=True)
    assert [row.version for row in rows] == ["plain"]
    assert "no number, 20 of 20 places differ" in capsys.readouterr().out


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown shape 'huge'; choose from pixel200k, .*shop"):
        evaluation_benchmark("huge")


def test_generated_data_have_full_histories_and_one_positive_each(device: str) -> None:
    data = generate(TINY, device)
    batch = data.eval_batch("test", data.eval_users("test"), TINY.L)
    assert len(batch.users) == len(batch.positives) == TINY.U
    assert (batch.lengths == TINY.L).all()
    assert int(data.items.min()) >= 1 and int(data.items.max()) <= TINY.V
    assert (batch.times.diff(dim=1) >= 0).all() and (batch.t_now >= batch.times[:, -1]).all()
    few = first_users(data, TINY, 7)
    assert torch.equal(few.eval_batch("test", few.eval_users("test"), 3).items, batch.items[:7, -3:])
    assert SHAPES["pixel1m"].ranking_flops == 6 * 1_001_822 * 100_541 * 512


def test_the_timed_model_is_the_model(device: str) -> None:
    data, model = generate(TINY, device), benchmark_eval.make_model(TINY, device)
    timed = benchmark_eval.Timed(model, device)
    plain, watched = (
        evaluate(m, data, "test", benchmark_eval.EvalConfig(), TINY.L, backend="torch") for m in (model, timed)
    )
    assert plain.ranks.tolist() == watched.ranks.tolist()
    assert timed.seconds() > 0
