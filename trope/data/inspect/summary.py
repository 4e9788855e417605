"""The words and small tables that the terminal and the HTML page share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trope.data.inspect import durations
from trope.data.inspect.measure import Report
from trope.times import say_day, say_roughly

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

PLAIN_DATES = "the log has plain dates, without a time of day"


def percent(share: float) -> str:
    """Return a share with a sensible number of digits, e.g. `12 %`, `0.3 %`."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def key_figures(report: Report) -> list[tuple[str, str]]:
    """Return the counts and rates, as label and value."""
    top = max(1, len(report.popularity) // 100)
    return [
        ("users", f"{report.users:,}"),
        ("items", f"{report.items:,}"),
        ("events", f"{report.events:,}"),
        ("time span", f"{say_day(report.first)} to {say_day(report.last)} ({say_roughly(report.last - report.first)})"),
        ("events per user", _quantiles(report.lengths, "{:,.0f}")),
        ("gap to next event", f"median {say_roughly(durations.median(report.gaps))}"),
        ("repeats", f"{percent(report.repeats)} of events are items that the user had before"),
        ("ties", f"{percent(report.ties)} of events share their second with another of the same user"),
        ("popularity", f"the top 1 % of items has {percent(report.popularity[:top].sum() / report.events)} of events"),
        ("item lifetime", _lifetime(report)),
    ]


def length_bins(report: Report) -> dict[str, int]:
    """Return users by sequence length, in powers of two."""
    top = int(report.lengths[-1]).bit_length()
    counts = np.bincount(np.frexp(report.lengths.astype(np.float64))[1], minlength=top + 1)
    labels = [
        str(low) if low == high else f"{low}-{high}"
        for low, high in ((1 << n >> 1, (1 << n) - 1) for n in range(top + 1))
    ]
    first = int(np.argmax(counts > 0))
    return dict(zip(labels[first:], counts[first:].tolist(), strict=True))


def lifetime_units(report: Report) -> dict[str, int]:
    """Return items by the time between their first and last event."""
    return durations.by_unit(durations.count_durations(report.lifetimes))


def calendar_findings(report: Report) -> list[str]:
    """Return one sentence per cycle of the calendar, and what follows for the choice of an encoding."""
    sentences = []
    for signal in report.signals:
        if not signal.is_told:
            # Plain dates lie on several days: events of one hour of one day have the same hour.
            is_day = signal.name == "hour of day" and signal.cycles >= 1
            sentence = PLAIN_DATES if is_day else f"all events have the same {signal.name}"
        elif signal.verdict == "cannot tell":
            covered = f"{signal.cycles:.2g}"
            covered = "just under two" if covered == "2" else covered  # rounded up, it would be enough
            sentence = f"the log covers {covered} cycles, and a rhythm shows only from two on"
        elif signal.verdict == "none seen":
            sentence = "no item profile that repeats from cycle to cycle"
        else:
            sentence = f"item profiles repeat, and tell {percent(signal.repeating)} of the phase"
        sentences.append(f"{signal.name.capitalize()}: {signal.verdict}; {sentence}.")
    if any(signal.verdict in ("clear", "strong") for signal in report.signals):
        sentences.append("The moment of a recommendation matters here: an encoding of absolute time can use it.")
    elif all(signal.verdict == "cannot tell" for signal in report.signals):
        sentences.append("This log cannot tell whether the calendar matters: time may still help by gaps and recency.")
    else:
        sentences.append("No clear calendar rhythm: time may still help by gaps and recency, less by the date.")
    return sentences


def _lifetime(report: Report) -> str:
    """Return the median life of items with two events or more, and how many have one."""
    if report.popularity[0] == 1:
        return "every item has one event only"
    lived = report.lifetimes[-int((report.popularity > 1).sum()) :]
    single = percent(float((report.popularity == 1).mean()))
    return (
        f"median {say_roughly(float(np.median(lived)))} from first to last event; {single} of items have one event only"
    )


def _quantiles(values: NDArray[np.int64], form: str) -> str:
    """Return the 5 %, 50 % and 95 % points."""
    low, middle, high = (form.format(q) for q in np.quantile(values, (0.05, 0.5, 0.95)))
    return f"median {middle}, most between {low} and {high}"
