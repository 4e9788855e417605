"""A run as one HTML page: its results, figures, config and machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trope.figures.html import Markup, card, cards, details, document, facts, heading, paragraph, picture, table, text
from trope.figures.style import Drawn
from trope.runs import CONFIG, ENVIRONMENT, METRICS, read_data, read_environment, read_metrics, write_text
from trope.settings import read_saved_toml, to_dict


def write_report(run: Path, pictures: Sequence[tuple[Drawn, bytes]], path: Path) -> Path:
    """Write the page to `path`, whole or not at all; pictures: each figure with its SVG."""
    name = run.resolve().name
    data, config = read_data(run), to_dict(read_saved_toml(run / CONFIG))
    metrics = read_metrics(run) if (run / METRICS).is_file() else {}
    environment = read_environment(run) if (run / ENVIRONMENT).is_file() else {}
    model, rotary = config["model"], config["rotary"]
    about = (
        f"{model['block'].upper()}, rotary encoding: {rotary['kind']}; {model['blocks']} blocks, width "
        f"{model['width']}. Trained on {Path(data['path']).name} ({data['users']:,} users, "
        f"{data['items']:,} items, {data['events']:,} events), protocol {data['protocol']['name']}."
    )
    page = document(
        f"{name}: report",
        heading(f"Run {name}"),
        paragraph(about, soft=True),
        cards(
            _results(metrics),
            card("Training", facts(_training(metrics, config["train"]))),
            card("Machine", _values(environment.items())),
        ),
        *(
            card("", picture(svg, alt=f"{drawn.title}. {drawn.caption}".strip()))
            for drawn, svg in _curve_first(pictures)
        ),
        details("Config", cards(*(card(group, _values(entries.items())) for group, entries in config.items()))),
        details("Dataset", _values(data.items())),
    )
    write_text(path, page)
    return path


def _curve_first(pictures: Sequence[tuple[Drawn, bytes]]) -> list[tuple[Drawn, bytes]]:
    """The learning curve belongs to the tables above it."""
    return sorted(pictures, key=lambda pair: pair[0].name.startswith("fig"))


def _results(metrics: dict[str, Any]) -> Markup:
    """Validation and test in percent; a run that has not ended has neither."""
    if not metrics:
        return card("Results", paragraph("This run has not ended: there is no metrics.json yet."))
    rows = [
        [text(name), text(f"{100 * metrics['valid'][name]:.2f}"), text(f"{100 * value:.2f}")]
        for name, value in metrics["test"].items()
    ]
    return card("Results, percent", table([text(""), text("validation"), text("test")], rows))


def _training(metrics: dict[str, Any], train: dict[str, Any]) -> list[tuple[str, str]]:
    sampled = ("negatives",) if train["loss"] == "sampled" else ()
    rows = [(name, str(train[name])) for name in ("loss", *sampled, "batch", "lr", "seed")]
    if not metrics:
        return rows
    seconds = float(metrics["seconds"])
    refit = "tested after a second training, as long, on training and validation events"
    return [
        ("best epoch", f"{metrics['best_epoch']} of {metrics['epochs']}, by validation"),
        *([("refit", refit)] if metrics.get("refit") else []),
        ("steps", f"{metrics['steps']:,}"),
        ("time", f"{seconds / 60:.1f} min"),
        ("seen items", f"filter_seen {metrics['filter_seen']}"),
        *rows,
    ]


def _values(pairs: Iterable[tuple[str, Any]]) -> Markup:
    return facts((label, _words(value)) for label, value in pairs)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
