"""The documentation keeps its word: quoted lines exist, tables say what results/ says, the README's snippet runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_headline_table_stands_on_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    found = {page for page in tables.PAGES if "<!-- table: headline -->" in (ROOT / page).read_text()}
    assert found - {"docs/findings.md"} == tables.HEADLINE_PAGES


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
