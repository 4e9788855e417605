"""Text from data, safe to print: an id, a name or a path cannot make the terminal do anything. And counts of things."""

from __future__ import annotations

import re

# Control characters, line and paragraph separators, overrides of the writing direction, halves of surrogate pairs.
_ACTING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""`str(text)` on one line, every character that acts instead of being seen spelled out: `\x1b`, `\n`, `\u202e`.

    rich reads markup in plain strings: give it `Text(printable(name))`.
    """
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def counted(count: int, noun: str) -> str:
    """`1 user`, `2,000 users`: a number before a noun whose plural ends in s."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
