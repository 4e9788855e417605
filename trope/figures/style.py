"""One look for all figures of a run: palette, page, time axes, and files that are the same bytes every time.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; maps go from blue (opposed) over white to
vermilion (aligned). matplotlib is imported only where something is drawn.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trope.atomic import atomic_file
from trope.data.printable import printable
from trope.times import DAY, HOUR, MINUTE, MONTH, WEEK, YEAR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE, GREY, PALE, INK = (
    "#0072B2", "#D55E00", "#009E73", "#AA4499", "#777777", "#C8C8C8", "#222222",
)  # fmt: skip
QUERY, KEY, RESULT = VERMILION, BLUE, GREEN
WIDTH, DPI = 10.0, 200
FORMATS = ("png", "svg")
BANDS = (
    ("under an hour", 0, HOUR), ("hours", HOUR, DAY), ("days", DAY, WEEK), ("weeks", WEEK, MONTH),
    ("months", MONTH, YEAR), ("years", YEAR, math.inf),
)  # fmt: skip
"""Name, shortest and longest period in seconds."""
# Text as paths looks the same everywhere; a fixed salt and no date give the same bytes. Names may have dollar signs,
# so nothing is typeset as mathematics.
_STYLE: Any = {
    "svg.hashsalt": "trope", "font.family": "DejaVu Sans", "font.size": 11, "axes.titlesize": 11.5,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.labelsize": 11, "text.parse_math": False,
    "axes.edgecolor": GREY, "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.labelcolor": INK,
}  # fmt: skip


class Drawn(NamedTuple):
    """A finished figure: its file name without ending, what it found, how to read it, and the figure itself."""

    name: str
    title: str
    caption: str
    figure: Figure


def require_matplotlib() -> None:
    """Raise with what to install where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "figures are drawn with matplotlib, which is not installed: pip install 'trope[figures]'"
        ) from error


@contextmanager
def style() -> Iterator[None]:
    """What is drawn and saved inside looks like every other figure."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def page(height: float) -> Figure:
    """An empty figure, without pyplot: no display, no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def finish(name: str, figure: Figure, title: str, caption: str) -> Drawn:
    """Put the finding on top and how to read it below."""
    title, caption = printable(title), printable(caption)
    figure.suptitle(balance(_keep(title), 88), x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.supxlabel(textwrap.fill(_keep(caption), 145), x=0.01, ha="left", fontsize=9.5, color="#555555")
    return Drawn(name, title, caption, figure)


def _keep(text: str) -> str:
    """No line break between a number and its percent sign."""
    return text.replace(" %", "\u00a0%")


def balance(text: str, most: int) -> str:
    """Lines of about the same length, none past `most` letters: no word is left alone on the last."""
    lines = textwrap.wrap(text, most)
    width = most
    while width > 1 and len(textwrap.wrap(text, width - 1)) == len(lines):
        width -= 1
    return textwrap.fill(text, width)


def unavailable(name: str, subject: str, reason: str) -> Drawn:
    """In place of a figure that this run has nothing for."""
    figure = page(1.2)
    axes = figure.subplots()
    axes.axis("off")
    axes.text(0, 0.5, textwrap.fill(reason, 110), va="center", transform=axes.transAxes, color="#555555")
    return finish(name, figure, f"{subject}: not available for this run", "")


def content(figure: Figure, ending: str) -> bytes:
    """The figure as the bytes of a png or svg file, without date or version."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None} if ending == "png" else {"Date": None, "Creator": "trope"}
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")  # of an id or a name: drawn as a box
        figure.savefig(stream, format=ending, dpi=DPI, metadata=metadata)
    return _numbered(stream.getvalue()) if ending == "svg" else stream.getvalue()


def _numbered(svg: bytes) -> bytes:
    """The ids of an SVG, counted through.

    Matplotlib hashes positions to the last bit, which its layout does not always reproduce, though nobody can see it.
    """
    numbers: dict[bytes, int] = {}

    def number(found: re.Match[bytes]) -> bytes:
        return found[1] + found[2] + b"%d" % numbers.setdefault(found[2] + found[3], len(numbers))

    return re.sub(rb'(id="|#)([a-z])([0-9a-f]{10})\b', number, svg)


def save(data: bytes, path: Path) -> Path:
    """Write a file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_bytes(data)
    return path


def diverging() -> Colormap:
    """Blue at -1, white at 0, vermilion at +1."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(
        "trope", ["#004C78", BLUE, "#9CCBE4", "#FFFFFF", "#F4B183", VERMILION, "#8A3C00"]
    )


def rising() -> Colormap:
    """White for the least, dark green for the most."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("trope-rising", ["#FFFFFF", "#8FD3BC", GREEN, "#00402F"])


def log_time_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic x axis in seconds with ticks where people have words."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    marks = {"1 s": 1, "1 min": MINUTE, "10 min": 10 * MINUTE, "1 h": HOUR, "6 h": 6 * HOUR, "1 d": DAY, "1 w": WEEK,
             "1 mo": MONTH, "1 y": YEAR, "5 y": 5 * YEAR, "20 y": 20 * YEAR, "100 y": 100 * YEAR}  # fmt: skip
    shown = {name: at for name, at in marks.items() if low <= at <= high}
    axes.set_xticks(list(shown.values()), list(shown))
    axes.minorticks_off()


def shade_bands(axes: Axes, low: float, high: float, named: bool) -> None:
    """Grey every other band of periods of a logarithmic axis, with names on top."""
    for number, (name, first, last) in enumerate(BANDS):
        left, right = max(first, low), min(last, high)
        if left >= right:
            continue
        if number % 2:
            axes.axvspan(left, right, color="#F0F0F0", lw=0, zorder=0)
        if named:
            at = math.sqrt(left * right)
            axes.text(at, 1.02, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=9.5, color="#555555")


def sides_strip(axes: Axes, words: list[tuple[str, str]], reach: tuple[float, float]) -> None:
    """Leave a strip below the data, `reach` being their least and most, and write (word, colour) into it."""
    low, high = reach
    room = max(high - low, 1e-6)
    axes.set_ylim(low - 0.28 * room, high + 0.08 * room)
    for place, (word, colour) in enumerate(words):
        axes.text(0.015 + 0.16 * place, 0.03, word, transform=axes.transAxes, color=colour, fontweight="bold")
