"""A run as one HTML page that needs nothing else: its results, figures, config and machine; no script."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trope.figures.style import Drawn
from trope.runs import CONFIG, ENVIRONMENT, METRICS, read_data, write_text
from trope.settings import read_saved_toml, to_dict

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #f4f5f7; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 0 0 8px; } p.sub { color: #555; margin: 4px 0 20px; }
.cards { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); }
.card { background: #fff; border: 1px solid #dfe2e6; border-radius: 8px; padding: 16px; margin: 0 0 20px; }
.card img { width: 100%; height: auto; display: block; }
.cards .card { margin: 0; } .cards { margin-bottom: 20px; }
table { border-collapse: collapse; } th { font-weight: 400; color: #555; text-align: left; padding-right: 16px; }
thead th { text-align: right; border-bottom: 1px solid #ccc; padding: 2px 0 2px 24px; }
td { text-align: right; font-variant-numeric: tabular-nums; padding-left: 24px; }
.plain td { text-align: left; padding-left: 0; overflow-wrap: anywhere; }
th, td { vertical-align: top; padding-top: 2px; }
details summary { cursor: pointer; font-weight: 600; }
"""


def write_report(run: Path, pictures: Sequence[tuple[Drawn, bytes]], path: Path) -> Path:
    """Write the page to `path`, whole or not at all; pictures: each figure with its SVG."""
    name = run.resolve().name
    data, config = read_data(run), to_dict(read_saved_toml(run / CONFIG))
    model, rotary = config["model"], config["rotary"]
    about = (
        f"{model['block'].upper()}, rotary encoding: {rotary['kind']}; {model['blocks']} blocks, width "
        f"{model['width']}. Trained on {Path(data['path']).name} ({data['users']:,} users, "
        f"{data['items']:,} items, {data['events']:,} events), protocol {data['protocol']['name']}."
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}: report</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>Run {escape(name)}</h1>
<p class="sub">{escape(about)}</p>
<div class="cards">
{_results(_read(run / METRICS))}
{_card("Training", _training(_read(run / METRICS), config["train"]))}
{_card("Machine", _read(run / ENVIRONMENT).items())}
</div>
{"".join(_picture(drawn, svg) for drawn, svg in _curve_first(pictures))}
<details class="card"><summary>Config</summary>
<div class="cards">{"".join(_card(group, entries.items()) for group, entries in config.items())}</div>
</details>
<details class="card"><summary>Dataset</summary>
{_card("Dataset", ((key, _text(value)) for key, value in data.items()))}
</details>
</main>
</body>
</html>
"""
    write_text(path, page)
    return path


def _curve_first(pictures: Sequence[tuple[Drawn, bytes]]) -> list[tuple[Drawn, bytes]]:
    """The learning curve belongs to the tables above it."""
    return sorted(pictures, key=lambda pair: pair[0].name.startswith("fig"))


def _picture(drawn: Drawn, svg: bytes) -> str:
    """The figure as an image of its own, so that no two share names inside."""
    encoded = base64.b64encode(svg).decode("ascii")
    alt = escape(f"{drawn.title}. {drawn.caption}".strip(), quote=True)
    image = f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'
    return f'<section class="card" id="{escape(drawn.name)}">{image}</section>\n'


def _results(metrics: dict[str, Any]) -> str:
    """Validation and test in percent; a run that has not ended has neither."""
    if not metrics:
        return '<section class="card"><h2>Results</h2><p>This run has not ended: no metrics.json yet.</p></section>'
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{100 * metrics['valid'][name]:.2f}</td><td>{100 * value:.2f}</td></tr>"
        for name, value in metrics["test"].items()
    )
    head = "<thead><tr><th></th><th>validation</th><th>test</th></tr></thead>"
    return f'<section class="card"><h2>Results, percent</h2><table>{head}{rows}</table></section>'


def _training(metrics: dict[str, Any], train: dict[str, Any]) -> list[tuple[str, str]]:
    sampled = ("negatives",) if train["loss"] == "sampled" else ()
    rows = [(name, str(train[name])) for name in ("loss", *sampled, "batch", "lr", "seed")]
    if not metrics:
        return rows
    seconds = float(metrics["seconds"])
    return [
        ("best epoch", f"{metrics['best_epoch']} of {metrics['epochs']}, by validation"),
        *([("refit", "tested after as many epochs on validation events too")] if metrics.get("refit") else []),
        ("steps", f"{metrics['steps']:,}"),
        ("time", f"{seconds / 60:.1f} min"), ("seen items", f"filter_seen {metrics['filter_seen']}"), *rows,
    ]  # fmt: skip


def _card(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    cells = "".join(f"<tr><th>{escape(label)}</th><td>{escape(_text(value))}</td></tr>" for label, value in rows)
    return f'<section class="card plain"><h2>{escape(title)}</h2><table>{cells}</table></section>'


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of the run; {} where it is not there yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy the run again") from None
