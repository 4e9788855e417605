"""The package from outside: what importing it loads, and the command line."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trope
from trope.bench import kernels as benchmark
from trope.cli import abtest
from trope.cli.main import app, main

HEAVY = (
    "typer", "rich", "tqdm", "pandas", "pyarrow", "ibis", "duckdb", "pyspark", "matplotlib", "transformers",
    "huggingface_hub", "safetensors", "fastapi", "faiss", "onnx", "triton", "scipy",
)  # fmt: skip


def test_importing_trope_loads_torch_and_numpy_and_nothing_heavier() -> None:
    """In a fresh interpreter, and beyond what torch itself brings along."""
    code = "import sys, torch, numpy; before = set(sys.modules); import trope; print(*set(sys.modules) - before)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in out.split()}
    assert "trope" in loaded
    assert not loaded & set(HEAVY)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "trope", *arguments], capture_output=True, text=True, env=environment)


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"trope {trope.__version__}"
    assert "bench" in run("--help").stdout


def test_paragraphs_of_the_help_are_wrapped_by_the_terminal() -> None:
    for command in (*app.registered_commands, *abtest.abtest.registered_commands):
        assert command.help and "\n" not in command.help.replace("\n\n", ""), command.name


def test_the_commands_load_nothing_heavy_until_they_run() -> None:
    """`trope --help` loads the command line itself, not even torch."""
    code = "import sys, trope.cli.main; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in out.split()}
    assert "typer" in loaded
    assert loaded & {"torch", *HEAVY} <= {"typer", "rich", "tqdm"}


def test_every_public_name_is_found_and_listed() -> None:
    for name in trope.__all__:
        assert getattr(trope, name) is not None
    assert set(trope.__all__) <= set(dir(trope))
    with pytest.raises(AttributeError, match="module 'trope' has no attribute 'TROPE'"):
        trope.TROPE  # noqa: B018


def test_there_is_one_file_per_command() -> None:
    commands = [info.callback for info in app.registered_commands]
    assert commands and all(command.__module__ == f"trope.cli.{command.__name__}" for command in commands if command)
    assert [group.name for group in app.registered_groups] == ["abtest", "bench"]
    files = {path.stem for path in (Path(trope.__file__).parent / "cli").glob("*.py")}
    files -= {"__init__", "main", "bench", "abtest", "abtest_simulate"}
    assert files == {command.__name__ for command in commands if command}


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("bench", "kernels", "--quick", "--csv", str(tmp_path / "file" / "k.csv"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("no file\nat 'a\x1b[2Jb'\u202e"), "trope: no file at 'a\\x1b[2Jb'\\u202e"),
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet"), "pip install 'trope[data]'"),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"), "pip install 'trope[figures]'"),
    ],
)
def test_an_error_is_one_line_without_escape_codes(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("trope.cli.main.app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and said in error


def test_a_module_that_no_extra_brings_is_a_bug_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'trope.gone'", name="trope.gone")

    monkeypatch.setattr("trope.cli.main.app", fail)
    with pytest.raises(ModuleNotFoundError):
        main()


def test_bench_kernels_writes_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--csv", str(path)])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(path.open()))
    assert {r["version"] for r in rows} >= {"reference", "reference compiled"}
    assert {r["direction"] for r in rows} == {"forward", "forward+backward"}
    for row in rows:
        assert 0 < float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
        assert row["commit"] and row["torch"] and row["device"]


def test_bench_kernels_refuses_numbers_for_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version off by 1 % gets a complaint and no row."""
    right = benchmark.versions

    def wrong(*arguments):
        return [
            benchmark.Version(v.name, lambda p, v=v: tuple(1.01 * y for y in v.forward(p)), v.exact, v.parameters)
            for v in right(*arguments)
        ]

    monkeypatch.setattr(benchmark, "versions", wrong)
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick"])
    assert "no number, q is off by" in " ".join(result.output.split())
    assert benchmark.kernel_benchmark(quick=True) == []
