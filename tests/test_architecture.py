"""The layout of the package: imports go one way, every package is in a contract, files are small.

Imports inside functions count; imports under `if TYPE_CHECKING` do not.
"""

from __future__ import annotations

import ast
import graphlib
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp
import pytest

import trope
from trope import runs

ROOT = Path(__file__).parent.parent
PACKAGE = Path(trope.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_TOP_MODULES, MOST_TOP_PACKAGES = 9, 13
MOST_LINES, MOST_MEDIAN_LINES = 400, 200
# Old names that did not say what the module does.
UNCLEAR = {"whole", "watch", "spans", "cut", "joint_gradient", "activate", "rank_file", "train_guard"}
FILE_NAMES = {
    runs.CONFIG, runs.ENVIRONMENT, runs.DATA, runs.METRICS, runs.RANKS, runs.LOG, runs.OUTPUT, runs.WEIGHTS,
    runs.MODEL_CONFIG, runs.CARD, runs.OPTIMIZER, runs.STATE, runs.CATALOGUE_RECORD, runs.LOCK,
    runs.PULSE, runs.COUNTING, runs.LINEAGE,
}  # fmt: skip
FOLDER_NAMES = {runs.CATALOGUE, runs.BEST, runs.CHECKPOINTS, runs.REFIT, runs.TENSORBOARD, runs.MODEL}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("trope", exclude_type_checking_imports=True, cache_dir=None)


@pytest.fixture(scope="module")
def layers() -> list[list[str]]:
    """The layers of the contract in pyproject.toml, highest first, each as its modules."""
    pyproject = PACKAGE.parent / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("the contracts are in the repository, not in the installed package")
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["type"] == "layers"]
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in contract["layers"]]


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, the first again at the end; [] if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # graphlib lists what is imported before what imports it
    return []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    cycle = find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert cycle in (["b", "c", "b"], ["c", "b", "c"])


def test_no_module_imports_itself_in_a_circle(graph: grimp.ImportGraph) -> None:
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    assert len(imports) >= 100, "the graph must hold the whole package"
    cycle = find_cycle(imports)
    assert not cycle, "import cycle: " + " -> ".join(cycle)


def test_every_top_level_package_and_module_is_in_the_contract(layers: list[list[str]]) -> None:
    top = {f"trope.{path.stem}" for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    top |= {f"trope.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    listed = [name for layer in layers for name in layer]
    assert sorted(listed) == sorted(top), "the layers in pyproject.toml must name each package and top module once"


def test_imports_follow_the_layers(graph: grimp.ImportGraph, layers: list[list[str]]) -> None:
    """What import-linter checks, here with the imports inside functions named one by one."""
    height = {name: -place for place, layer in enumerate(layers) for name in layer}
    wrong = [
        f"{importer} imports {imported}"
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if _top(importer) in height and _top(imported) in height and _top(importer) != _top(imported)
        and height[_top(importer)] <= height[_top(imported)]
    ]  # fmt: skip
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(("importer", "imported"), [("train", "serve"), ("serve", "train")])
def test_training_and_serving_do_not_know_each_other(graph: grimp.ImportGraph, importer: str, imported: str) -> None:
    chains = graph.find_shortest_chains(f"trope.{importer}", f"trope.{imported}")
    assert not chains, "\n".join(" -> ".join(chain) for chain in sorted(chains))


def test_the_top_is_small() -> None:
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert len(modules) <= MOST_TOP_MODULES, modules
    assert len(packages) <= MOST_TOP_PACKAGES, packages


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without __init__.py would escape the graph and the contracts."""
    folders = {path.parent for path in MODULES}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_no_file_is_long() -> None:
    lines = _lines([*MODULES, *ROOT.glob("benchmarks/*.py")])
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not long, f"files past {MOST_LINES} lines: {long}"


def test_most_files_are_short() -> None:
    assert statistics.median(_lines().values()) <= MOST_MEDIAN_LINES


def test_module_names_say_what_is_inside() -> None:
    names = {path.stem for path in MODULES} | {path.parent.name for path in MODULES}
    assert not names & UNCLEAR


def test_the_file_names_of_a_run_are_spelled_in_runs_alone() -> None:
    """As whole strings, and as parts of paths such as `run / "best"`. Docstrings and sentences may name files."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {text!r}"
        for path in MODULES
        if path.name != "runs.py"
        for line, text in _spelled(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "import these from trope.runs:\n" + "\n".join(found)


def test_spelled_file_names_are_found() -> None:
    source = 'a = "metrics.json"\nb = run / "best"\nc = run / "best" / f"ranks-{split}.npz"\nd = {"best": "bold"}\n'
    assert [line for line, _ in _spelled(ast.parse(source))] == [1, 2, 3, 3]


def _lines(files: Iterable[Path] = MODULES) -> dict[str, int]:
    return {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}


def _top(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _spelled(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a file name of a run, or a folder name in a path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FILE_NAMES:
            yield node.lineno, str(node.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("ranks-"):
            yield node.lineno, node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = node.right
            if isinstance(right, ast.Constant) and right.value in FOLDER_NAMES:
                yield right.lineno, str(right.value)
