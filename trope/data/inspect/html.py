"""The report as one HTML page that needs nothing else: inline SVG, no script, every outside string escaped."""

from __future__ import annotations

from html import escape
from pathlib import Path

from trope.atomic import atomic_file
from trope.data.inspect.measure import Report
from trope.data.inspect.summary import calendar_findings, key_figures

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #f4f5f7; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 0 0 8px; } p.sub { color: #555; margin: 4px 0 20px; }
.cards { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); }
.card { background: #fff; border: 1px solid #dfe2e6; border-radius: 8px; padding: 16px; }
.card svg { width: 100%; height: auto; display: block; }
figure { margin: 0; } figcaption { color: #555; font-size: 14px; margin-top: 8px; }
table { border-collapse: collapse; } th { font-weight: 400; color: #555; text-align: right; white-space: nowrap;
  padding-right: 12px; }
th, td { vertical-align: top; padding-top: 2px; } ul { margin: 0; padding-left: 20px; }
"""


def write_html(report: Report, path: Path | str) -> Path:
    """Write the page to `path`, whole or not at all; needs matplotlib."""
    try:
        from trope.data.inspect.plots import plots
    except ImportError as error:
        raise ValueError(
            "--html draws with matplotlib, which is not installed: pip install 'trope[figures]'"
        ) from error

    figures = "".join(
        f'<figure class="card">{svg}<figcaption>{escape(caption)}</figcaption></figure>\n'
        for caption, svg in plots(report)
    )
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in key_figures(report))
    findings = "".join(f"<li>{escape(sentence)}</li>" for sentence in calendar_findings(report))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.name)}: temporal structure</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{escape(report.name)}</h1>
<p class="sub">Temporal structure of a prepared dataset, protocol {escape(report.protocol)}. All times are UTC.</p>
<div class="cards">
<section class="card"><h2>Key figures</h2><table>{rows}</table></section>
<section class="card"><h2>Does the calendar matter?</h2><ul>{findings}</ul></section>
{figures}
</div>
</main>
</body>
</html>
"""
    path = Path(path)
    with atomic_file(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path
