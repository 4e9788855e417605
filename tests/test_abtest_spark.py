"""Spark and DuckDB agree on an experiment to 1e-12. Run by `make test-spark`: it needs pyspark and Java 17."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from abtest_logs import experiment

from trope.data.sources.resolve import Request
from trope.online.analysis.analyse import Question, analyse
from trope.online.analysis.looks import Plan
from trope.online.analysis.report import to_json
from trope.online.analysis.verdict import judge

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield
    session.stop()


def same(one: Any, other: Any, where: str = "") -> None:
    """Every number of two results agrees to 1e-12, everything else exactly."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            if key not in ("engine", "environment"):
                same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{where}[{place}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12), where
    else:
        assert one == other, where


@pytest.mark.parametrize("plan", [Plan(), Plan(looks=2, horizon=4), Plan(always=True)], ids=lambda plan: plan.kind)
def test_engines_agree(plan: Plan, tmp_path: Path) -> None:
    logs = experiment(users=3_000, days=4)
    exposures, outcomes = logs.write(tmp_path)
    segments = tmp_path / "segments.csv"
    segments.write_text("user_id,group\n" + "".join(f"u{number},{number % 3}\n" for number in range(2_900)))
    metrics = "conversion,orders,items,revenue,orders/exposures,revenue/orders"
    question = Question(metrics=metrics, plan=plan, segments=segments)
    found = [analyse(exposures, Request(str(outcomes)), question, engine=engine) for engine in ("duckdb", "spark")]
    duckdb, spark = (json.loads(json.dumps(to_json(each, judge(each)))) for each in found)
    assert spark["engine"].startswith("spark") and duckdb["engine"].startswith("duckdb")
    same(duckdb, spark)
