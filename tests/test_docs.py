"""The documentation keeps its word: quoted lines exist, tables say what results/ says, the README's snippet runs."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from trope.config import Config

ROOT = Path(__file__).parent.parent


def method_rows() -> list[tuple[str, str, str]]:
    """(file, symbol, quoted line) of the method page's table; "same" repeats the row above."""
    found, where = [], ("", "")
    for line in (ROOT / "docs" / "method.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if len(cells) != 3 or cells[0] == "paper":
            continue
        if cells[1] != "same":
            path, symbol = re.findall(r"`([^`]+)`", cells[1])
            where = (path, symbol)
        found.append((*where, cells[2].removesuffix(" |").strip("`")))
    return found


@pytest.mark.parametrize(("path", "symbol", "line"), method_rows())
def test_method_quotes_real_lines(path: str, symbol: str, line: str) -> None:
    source = (ROOT / path).read_text()
    assert line in source
    for name in symbol.split("."):
        assert re.search(rf"(def|class) {name}\b", source)


def test_method_covers_the_paper() -> None:
    assert len(method_rows()) >= 15


def test_tables_are_what_results_say() -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], check=True)


def test_a_stale_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    page = (ROOT / "docs" / "method.md").read_text()
    assert tables.written(page.replace("1e+02", "1e+03")) == page
    assert tables.written(page) == page


def test_no_table_mixes_commits_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line below a table is made from the runs; a page that has lost it is out of date."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables
    import tables_accuracy

    runs = [{"name": name, "environment": {"commit": commit}} for name, commit in (("a", "c" * 12), ("b", "d" * 12))]
    assert tables_accuracy.with_commits("| x |", runs) == (
        "| x |\n\nRows come from several commits: a at ccccccc; b at ddddddd."
    )
    assert tables_accuracy.with_commits("| x |", runs[:1] * 2) == "| x |"
    marker = re.compile(r"\nRows come from several commits: .*\n")
    trained, number = tables_accuracy.trained, iter(range(10**6))

    def of_commit(commit: typing.Callable[[], str]) -> typing.Callable[[str], list[dict[str, typing.Any]]]:
        return lambda name: [{**run, "environment": {"commit": commit()}} for run in trained(name)]

    for name in ("headline", "globo-news", "ablation-globo-news"):
        monkeypatch.setattr(tables_accuracy, "trained", of_commit(lambda: f"{next(number):<012}"))
        assert marker.search(f"{tables.TABLES[name]()}\n")
        monkeypatch.setattr(tables_accuracy, "trained", of_commit(lambda: "0123456789ab"))
        assert not marker.search(f"{tables.TABLES[name]()}\n")
    monkeypatch.setattr(tables_accuracy, "trained", trained)
    for page in tables.HEADLINE_PAGES:
        text = (ROOT / page).read_text()
        if marker.search(text):
            assert tables.written(marker.sub("", text)) == text


def test_a_table_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    with pytest.raises(SystemExit, match=r"a page asks for 'headlien', which does not exist; there are .*headline"):
        tables.written("<!-- table: headlien -->\n<!-- end -->")


def test_the_readme_snippets_run() -> None:
    text = (ROOT / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog may name what is gone


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def missing(path: Path) -> bool:
    """Whether a file or folder that a page names does not exist. A path may hold wildcards."""
    found = list(path.parent.glob(path.name)) if "*" in path.name else path.exists()
    return not found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    files = [link for link in links if link and "://" not in link]
    assert [link for link in files if missing(page.parent / link)] == []


@pytest.mark.parametrize("page", TODAY, ids=name_of)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?<![\w/.-])((?:trope|tests|benchmarks|examples|configs|results)/[\w./*-]*[\w/*])", text)
    real = {path for path in named if "NAME" not in path}
    # `results/` and the like hold files that recipes write; what a page names there must be there too.
    assert sorted(path for path in real if missing(ROOT / path)) == []


@pytest.mark.parametrize("page", TODAY, ids=name_of)
def test_pages_import_modules_that_exist(page: Path) -> None:
    named = set(re.findall(r"^(?:from|import) (trope[\w.]*)", page.read_text(), re.MULTILINE))
    assert [module for module in named if importlib.util.find_spec(module) is None] == []


@pytest.mark.parametrize("page", [page for page in TODAY if page.name != "tried.md"], ids=name_of)
def test_pages_name_settings_that_exist(page: Path) -> None:
    """docs/tried.md may name what was removed."""
    groups = typing.get_type_hints(Config)
    words = re.findall(rf"(?<![\w./])({'|'.join(groups)})\.([a-z_]+)(?!\w)", page.read_text())
    settings = {word for word in words if word[1] not in ("py", "safetensors")}
    known = {(group, each.name) for group, kind in groups.items() for each in dataclasses.fields(kind)}
    assert sorted(settings - known) == []


@pytest.mark.parametrize(("page", "most"), [("README.md", 170), ("docs/tried.md", 120)])
def test_pages_stay_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_every_page_with_a_table_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    holding = {name_of(page) for page in PAGES if tables.TABLE.search(page.read_text())}
    assert holding <= set(tables.PAGES)
    headline = {page for page in holding if "<!-- table: headline -->" in (ROOT / page).read_text()}
    assert headline == tables.HEADLINE_PAGES == {"README.md", "docs/results.md"}


def test_the_configuration_page_is_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "configuration.py"), "--check"], check=True)


def test_a_setting_without_a_description_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import configuration

    @dataclasses.dataclass
    class Group:
        """A group.

        first, second: the same text
            over two lines; third: in the same line. fourth: after a sentence.
        """

        first: int = 1
        second: int = 2
        third: int = 3
        fourth: int = 4

    said = configuration.entries(Group)
    assert said["first"] == said["second"] == "the same text over two lines"
    assert (said["third"], said["fourth"]) == ("in the same line.", "after a sentence.")
    assert Group.__doc__ is not None
    Group.__doc__ = Group.__doc__.replace("fourth:", "")
    with pytest.raises(ValueError, match="no entry for fourth"):
        configuration.entries(Group)
