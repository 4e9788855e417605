"""The tables of docs/online.md."""

from __future__ import annotations

from table_parts import markdown, read

READERS = ("naive", "group sequential", "confidence sequence", "one test at the end")


def looks() -> str:
    """False positives and power of those who look every day."""
    header = ["reader", "false positives, once", "power, once", "false positives, returning", "power, returning"]
    runs = {(run["shop"], run["effect"] > 0): run for run in read("abtest-looks.json")["runs"]}
    kinds = [(shop, true) for shop in ("once", "returning") for true in (False, True)]
    return markdown(
        header,
        [[name, *(f"{100 * runs[kind][name]['share']:.1f} %" for kind in kinds)] for name in READERS],
    )


def cuped() -> str:
    """Squared correlation and reduction of the variance on the calendar shop."""
    header = ["metric", "squared correlation", "variance falls by"]
    found = read("cuped.json")["rows"]
    return markdown(
        header, [[row["metric"], *(f"{100 * row[key]:.2f} %" for key in ("rho2", "reduction"))] for row in found]
    )


def scale() -> str:
    """Time and memory of an analysis."""
    header = ["engine", "exposures", "users", "outcomes", "seconds", "CPU seconds", "memory, GiB", "load before"]
    return markdown(
        header,
        [
            [
                run["engine"],
                *(f"{run[key]:,}" for key in ("exposures", "users", "outcomes")),
                *(f"{run[key]:.1f}" for key in ("wall_s", "cpu_s", "peak_memory_gib", "load_before")),
            ]
            for run in read("abtest-scale.json")["runs"]
        ],
    )


def rehearsal() -> str:
    """How often an interval holds the true lift, and how often a difference is called."""
    header = [
        "shop",
        "metric",
        "true lift",
        "mean estimate",
        "intervals with the truth",
        "spread",
        "called better, worse",
    ]
    rows = []
    for shop, found in read("rehearsal.json").items():
        called = f"{found['winner']:.1%}, {found['difference'] - found['winner']:.1%}"
        for metric, row in found["metrics"].items():
            holds = round(row["interval_holds_truth"] * found["experiments"])
            rows.append([
                shop, metric, f"{row['true_lift']:+.2%} ± {row['true_lift_error']:.2%}", f"{row['mean_estimate']:+.2%}",
                f"{row['interval_holds_truth']:.1%} ({holds} of {found['experiments']})",
                f"{row['distance_spread']:.2f}", called,
            ])  # fmt: skip
            called = ""  # of all metrics together
    return markdown(header, rows)


ONLINE = {"abtest-looks": looks, "abtest-cuped": cuped, "abtest-scale": scale, "rehearsal": rehearsal}
"""By their names in the pages."""
