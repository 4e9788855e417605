"""The report of `trope inspect` as one HTML page."""

from __future__ import annotations

from pathlib import Path

from trope.data.inspect.measure import Report
from trope.data.inspect.summary import calendar_findings, key_figures
from trope.figures.html import bullets, card, cards, document, facts, heading, paragraph, picture
from trope.runs import write_text


def write_page(report: Report, path: Path | str) -> Path:
    """Write the page to `path`, whole or not at all; needs matplotlib."""
    try:
        from trope.figures.inspect.plots import plots
    except ImportError as error:
        raise ValueError(
            "--html draws with matplotlib, which is not installed: pip install 'trope[figures]'"
        ) from error

    subtitle = f"Temporal structure of a prepared dataset, protocol {report.protocol}. All times are UTC."
    page = document(
        f"{report.name}: temporal structure",
        heading(report.name),
        paragraph(subtitle, soft=True),
        cards(
            card("Key figures", facts(key_figures(report))),
            card("Does the calendar matter?", bullets(calendar_findings(report))),
            *(card("", picture(plot.svg, alt=plot.title, caption=plot.caption)) for plot in plots(report)),
            wide=True,
        ),
    )
    write_text(Path(path), page)
    return Path(path)
