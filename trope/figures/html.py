"""The shell of every HTML page that trope writes: one frame, one style sheet, and the pieces that pages are made of.

A page is one file. It loads nothing, runs no script, follows the reader's light or dark setting and fits a phone.
Arguments of type `str` are text and are escaped here. Arguments of type `Markup` are HTML that this module returned;
mypy refuses a plain string in their place.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape as escape_signs
from typing import NewType

from trope.data.printable import printable

Markup = NewType("Markup", str)
"""HTML whose text is already escaped."""

# Pictures are drawn on white, so they keep a white ground on a dark page.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #f4f5f7; --paper: #ffffff; --soft: #57606a; --line: #d0d7de;
  --band: #f3f5f7; --better: #0a6b2c; --worse: #b3261e; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --page: #0f1214; --paper: #171b1f; --soft: #9aa4ae;
  --line: #3a4149; --band: #1e2327; --better: #6fd08c; --worse: #ff8f86; --warn: #3d3313; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { margin: 0 auto; padding: 1.5rem; max-width: 80rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
p { max-width: 50rem; margin: .25rem 0 .75rem; } .soft { color: var(--soft); } ul { margin: 0; padding-left: 1.2rem; }
.warn { background: var(--warn); padding: .5rem .75rem; border-radius: .25rem; max-width: 50rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem;
  margin: 0 0 1.25rem; min-width: 0; }
.cards { display: grid; gap: 1.25rem; margin-bottom: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--card, 18rem)), 1fr)); }
.cards .card { margin: 0; } .cards.wide { --card: 31rem; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .875rem; margin-top: .5rem; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: .25rem;
  padding: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
th, td { white-space: nowrap; } .text td { white-space: normal; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; }
tbody th { font-weight: 400; } tbody tr:nth-child(even) { background: var(--band); }
/* The name of a row stays in sight while a wide table scrolls. */
tr > th:first-child { position: sticky; left: 0; background: var(--paper); }
tbody tr:nth-child(even) > th:first-child { background: var(--band); }
u { text-underline-offset: .2em; text-decoration-thickness: 1.5px; }
small { display: block; color: var(--soft); white-space: nowrap; font-weight: 400; }
.text small { white-space: normal; }
small.better { color: var(--better); } small.worse { color: var(--worse); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .35rem 1rem; margin: 0; max-width: 62rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; } details[open] > summary { margin-bottom: .75rem; }
@media (max-width: 40rem) { main { padding: .75rem; } .card { padding: .75rem; }
  .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: .6rem; } }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""


def escape(words: str) -> str:
    """Text for HTML: its signs are escaped, quotes as well, and its control characters are spelled out."""
    return escape_signs(printable(words))


def document(title: str, *parts: Markup) -> str:
    """The whole page; title: of the browser's tab."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def text(words: str) -> Markup:
    """Words as they stand."""
    return Markup(escape(words))


def heading(title: str) -> Markup:
    """The title at the top of the page."""
    return Markup(f"<h1>{escape(title)}</h1>")


def paragraph(words: str, soft: bool = False) -> Markup:
    """A paragraph; soft: in a quieter colour."""
    kind = ' class="soft"' if soft else ""
    whole = escape(words).replace(" %", "&nbsp;%")  # no line break between a number and its percent sign
    return Markup(f"<p{kind}>{whole}</p>")


def warning(words: str) -> Markup:
    """A paragraph that a reader must not miss."""
    return Markup(f'<p class="warn"><b>Warning:</b> {escape(words)}</p>')


def bullets(sentences: Iterable[str]) -> Markup:
    """A list, one line for each sentence."""
    lines = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Markup(f"<ul>{lines}</ul>")


def card(title: str, *parts: Markup) -> Markup:
    """A framed part of the page under a heading; an empty title has none."""
    head = f"<h2>{escape(title)}</h2>\n" if title else ""
    body = "".join(parts)
    return Markup(f'<section class="card">{head}{body}</section>')


def cards(*parts: Markup, wide: bool = False) -> Markup:
    """Cards side by side, as many as fit; wide: cards that hold a picture."""
    kind, body = "cards wide" if wide else "cards", "\n".join(parts)
    return Markup(f'<div class="{kind}">\n{body}\n</div>')


def details(summary: str, *parts: Markup) -> Markup:
    """A card that opens when its summary is clicked."""
    body = "".join(parts)
    return Markup(f'<details class="card"><summary>{escape(summary)}</summary>\n{body}\n</details>')


def facts(pairs: Iterable[tuple[str, str]], sentences: bool = False) -> Markup:
    """Labels with their values; sentences: values are long and stand below their label on a phone."""
    rows = "\n".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in pairs)
    kind = ' class="facts"' if sentences else ""
    return Markup(f"<dl{kind}>\n{rows}\n</dl>")


def table(header: Sequence[Markup], rows: Iterable[Sequence[Markup]], numbers: bool = True) -> Markup:
    """A table that scrolls sideways where it is too wide.

    The first column names the row. numbers: whether the other columns are numbers, which are aligned to the right.
    """
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    kind = "" if numbers else ' class="text"'
    return Markup(
        f'<div class="scroll"><table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
    )


def picture(svg: bytes, alt: str, caption: str = "") -> Markup:
    """An SVG inside the page. It is an image of its own, so the ids of two pictures cannot clash."""
    encoded = base64.b64encode(svg).decode("ascii")
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return Markup(f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{encoded}">{below}</figure>')
