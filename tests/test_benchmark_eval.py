"""`trope bench eval` on a tiny shape: rows, CSV, and that a kernel which counts wrongly gets no number."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from trope.bench import eval as benchmark_eval
from trope.bench.eval import Row, evaluation_benchmark, first_users, ranking_flops, sample_users
from trope.bench.shapes import find_shape, generate
from trope.environment import describe
from trope.evaluate.evaluation import evaluate

TINY = find_shape("tiny")


def test_a_quick_run_prints_and_writes_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = evaluation_benchmark("shop", tmp_path / "eval.csv", quick=True)
    assert [(row.version, row.precision) for row in rows] == [("kernel", "fp32"), ("kernel", "bf16"), ("plain", "fp32")]
    for row in rows:
        assert row.encode_s > 0 and row.rank_s > 0
        assert row.total_s == pytest.approx(row.encode_s + row.rank_s, abs=1e-3)
        assert row.users_per_s == pytest.approx(TINY.users / row.total_s, rel=0.1)
    assert [row.measured_users for row in rows] == [sample_users(TINY), TINY.users, sample_users(TINY)]
    said = capsys.readouterr().out
    assert "scaled up" in said and "3 x 2 x U 200 x V 300 x E 32" in said
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
    assert "no number, 64 of 64 places differ" in capsys.readouterr().out


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown shape 'huge'; choose one of pixel200k, .*shop"):
        evaluation_benchmark("huge")


@pytest.mark.parametrize("full", [True, False])
def test_generated_data_are_of_their_shape(device: str, full: bool) -> None:
    data = generate(TINY, TINY.users, full, torch.device(device))
    batch = data.eval_batch("test", data.eval_users("test"), TINY.max_len)
    assert len(batch.users) == len(batch.positives) == TINY.users
    assert (batch.lengths == TINY.max_len).all() == full
    windows = data.train_windows(TINY.max_len)
    lengths = windows.ends - windows.starts - 1
    assert (lengths == TINY.max_len).all() == full and lengths.max() <= TINY.max_len
    if not full:
        assert data.num_events / data.num_users == pytest.approx(TINY.events / TINY.users, rel=0.15)
    assert int(data.items.min()) >= 1 and int(data.items.max()) <= TINY.items
    assert (batch.times.diff(dim=1) >= 0).all() and (batch.t_now >= batch.times[:, -1]).all()
    few = first_users(data, 7)
    assert torch.equal(
        few.eval_batch("test", few.eval_users("test"), 3).items, data.eval_batch("test", batch.users[:7], 3).items
    )
    assert ranking_flops(find_shape("pixel1m")) == 6 * 1_001_822 * 100_541 * 512


def test_the_timed_model_is_the_model(device: str) -> None:
    data = generate(TINY, TINY.users, full=True, device=torch.device(device))
    model = benchmark_eval.make_model(TINY, data)
    timed = benchmark_eval.Timed(model, device)
    plain, watched = (evaluate(m, data, "test", "none", TINY.max_len, backend="torch") for m in (model, timed))
    assert plain.ranks.tolist() == watched.ranks.tolist()
    assert timed.seconds() > 0
