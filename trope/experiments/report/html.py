"""A report as one HTML file: no scripts, no other files, light and dark by the reader's own setting."""

from __future__ import annotations

from html import escape

from trope.experiments.report.page import Cell, Grid, Page

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #57606a; --line: #d0d7de; --band: #f3f5f7;
  --better: #0a6b2c; --worse: #b3261e; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #14171a; --soft: #9aa4ae; --line: #3a4149;
  --band: #1e2327; --better: #6fd08c; --worse: #ff8f86; --warn: #3d3313; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .25rem; }
p { max-width: 50rem; margin: .25rem 0 .75rem; } .soft { color: var(--soft); }
.warn { background: var(--warn); padding: .5rem .75rem; border-radius: .25rem; max-width: 50rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text th, .text td { text-align: left; } td:first-child, th { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; }
tbody tr:nth-child(even) { background: var(--band); }
td b { font-weight: 700; } u { text-underline-offset: .2em; text-decoration-thickness: 1.5px; }
small { display: block; color: var(--soft); white-space: nowrap; font-weight: 400; }
.text small { white-space: normal; }
small.better { color: var(--better); } small.worse { color: var(--worse); }
dl { display: grid; grid-template-columns: max-content minmax(0, 50rem); gap: .35rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .6rem } }
"""


def to_html(page: Page) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(page.title)}</h1>", f"<p>{escape(page.summary)}</p>"]
    parts += [f'<p class="warn"><b>Mind:</b> {escape(warning)}</p>' for warning in page.warnings]
    for section in page.sections:
        parts += [f"<h2>{escape(section.title)}</h2>", f'<p class="soft">{escape(section.text)}</p>']
        parts.append(_table(section.grid))
    facts = "\n".join(f"<dt>{escape(label)}</dt><dd>{escape(what)}</dd>" for label, what in page.facts)
    body = "\n".join([*parts, "<h2>How this was measured</h2>", f"<dl>\n{facts}\n</dl>"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in grid.header)
    rows = "\n".join(
        f'<tr><th scope="row">{_cell(row[0])}</th>' + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in grid.rows
    )
    kind = "" if grid.numbers else ' class="text"'
    return f'<div class="wide"><table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    text = {"best": f"<b>{text}</b>", "second": f"<u>{text}</u>"}.get(cell.mark, text)
    if not cell.note:
        return text
    # Colour is not the only sign: what is beyond chance has a star as well.
    kind, star = (f' class="{cell.tone}"', " *") if cell.tone else ("", "")
    return f"{text}<small{kind}>{escape(cell.note)}{star}</small>"
