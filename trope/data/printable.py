"""Text from data, safe to print: an id, a name or a path cannot write to the terminal what it was not asked to say."""

from __future__ import annotations

import unicodedata

# Control characters (escape codes among them), halves of surrogate pairs, and separators that break a line.
_HIDDEN = {"Cc", "Cs", "Zl", "Zp"}
# These turn the direction of what follows, so that a line reads as another one. Joiners of emoji stay.
_TURNING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: object) -> str:
    """`str(text)` on one line, with control characters shown as their escapes, such as `\\x1b`.

    For a Rich table or console wrap the result in `rich.text.Text`, which reads no markup, or in `rich.markup.escape`.
    """
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(_escape(c) if c in _TURNING or unicodedata.category(c) in _HIDDEN else c for c in shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
