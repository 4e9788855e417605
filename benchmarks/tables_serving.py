"""The tables of docs/serving.md that are not of exports."""

from __future__ import annotations

import statistics
from collections import defaultdict

from table_parts import markdown, read


def http() -> str:
    """Requests a second over HTTP, medians of the rounds; of LitServe's settings the best one."""
    by_server: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in read("serve_http.json")["rows"]:
        by_server[row["server"]].append(row)
    medians = {
        server: {key: statistics.median(row[key] for row in rows) for key in ("rate", "p50", "p99", "cpu_ms")}
        for server, rows in by_server.items()
    }
    own = [server for server in medians if server.startswith("trope")]
    best = max((server for server in medians if server not in own), key=lambda server: medians[server]["rate"])
    header = ["server", "requests a second", "p50 ms", "p99 ms", "CPU ms a request", f"times {best.split(',')[0]}"]
    return markdown(
        header,
        [
            [
                server, f"{found['rate']:,.0f}", f"{found['p50']:.1f}", f"{found['p99']:.1f}", f"{found['cpu_ms']:.2f}",
                f"{found['rate'] / medians[best]['rate']:.1f}",
            ]
            for server, found in ((server, medians[server]) for server in (*own, best))
        ],
    )  # fmt: skip


def slider() -> str:
    """From the input to the painted list."""
    rows = []
    for name, found in read("page_slider.json")["rows"].items():
        kind = "main" if "main_p95" in found else "shown"
        times = (f"{found[f'{kind}_{part}']:.0f}" for part in ("p50", "p95", "max"))
        rows.append([name, f"{found['positions']:,}", *times])
    return markdown(["page", "positions", "p50 ms", "p95 ms", "slowest ms"], rows)


SERVING = {"serve-http": http, "serve-slider": slider}
"""By their names in the pages."""
