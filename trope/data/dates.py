"""Dates as text: ISO 8601, or a format in the letters of Python's strptime. Every engine reads the same moments.

A format becomes a regular expression that rewrites a date as ISO 8601. A second one lets only such ISO dates through to
the engine's own parser as DuckDB and Spark read alike. Names of zones are not among them: DuckDB would read the rows
after one in its zone, and an hour of autumn means two moments. Such rows are bad rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ibis
import ibis.expr.types as ir

_HOUR, _SIXTY = r"(?:[01]?\d|2[0-3])", r"[0-5]?\d"
ISO = (
    rf"^\d{{4}}(?:-\d{{1,2}}-|/\d{{1,2}}/)\d{{1,2}}(?:[ T]{_HOUR}:{_SIXTY}(?::{_SIXTY}(?:\.\d*)?"
    r"(?: UTC| GMT|Z|[+-](?:0\d|1[0-4])(?::?[0-5]\d)?)?)?)?$"
)
_CODES = {
    "Y": r"(\d{4})",
    "y": r"(\d{2})",
    "m": r"(\d{1,2})",
    "b": r"(\d{2})",  # names of months are replaced by their numbers first
    "B": r"(\d{2})",
    "d": r"(\d{1,2})",
    "H": rf"({_HOUR})",
    "I": r"(0?[1-9]|1[0-2])",
    "M": rf"({_SIXTY})",
    "S": rf"({_SIXTY})",
    "f": r"(\d{1,9})",
    "p": r"([AaPp][Mm])",
    "z": r"(Z|[+-]\d{2}:?\d{2})",
}
_MONTHS = (
    "jan(?:uary)?", "feb(?:ruary)?", "mar(?:ch)?", "apr(?:il)?", "may", "june?", "july?", "aug(?:ust)?",
    "sep(?:tember)?", "oct(?:ober)?", "nov(?:ember)?", "dec(?:ember)?",
)  # fmt: skip
_HALF_DAY, _HOUR_US = 12 * 3_600 * 10**6, 3_600 * 10**6


def check_format(form: str) -> None:
    """Refuse a format with unknown letters, or without a day."""
    letters = re.findall(r"%(.?)", form.replace("%%", ""))
    known = ", ".join(f"%{letter}" for letter in _CODES)
    unknown = [letter for letter in letters if letter not in _CODES]
    if unknown:
        raise ValueError(f"--time-format {form!r} has %{unknown[0]}; it may have {known} and %%")
    for needed, what in (("Yy", "year"), ("mbB", "month"), ("d", "day")):
        if sum(letters.count(letter) for letter in needed) != 1:
            raise ValueError(
                f"--time-format {form!r} must have one {what} (%{' or %'.join(needed)}), as in '%d/%m/%Y %H:%M'"
            )
    doubled = [letter for letter in letters if letters.count(letter) > 1]
    if doubled or ("H" in letters and "I" in letters):
        raise ValueError(f"--time-format {form!r} has %{(doubled or ['I'])[0]} besides another of its kind; write one")
    if ("I" in letters) != ("p" in letters) or ("p" in letters and "z" in letters):
        raise ValueError(f"--time-format {form!r}: %I (1 to 12) goes with %p (AM or PM), and not with %z; use %H")


def microseconds(text: ir.Value, form: str, group: str, parse: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Unix microseconds of dates as text, null where the text is no such date; without a zone they are UTC.

    form: as `check_format` takes it, "" for ISO 8601.
    group: the sign before a group's number in the engine's replacements, a backslash or a dollar.
    parse: the engine's own parser of ISO dates, which returns microseconds or null.
    """
    text = text.strip()
    if not form:
        return parse(_only(text, ISO, text).replace("/", "-"))
    letters = re.findall(r"%(.)", form.replace("%%", ""))
    if {"b", "B"} & set(letters):
        for number, name in enumerate(_MONTHS, start=1):
            text = text.re_replace(f"(?i){name}", f"{number:02}")
    iso = _only(text, _pattern(form), text.re_replace(_pattern(form), _template(letters, group)))
    if "y" in letters:  # as Python does: 69 to 99 are of the last century
        last = iso.substr(0, 2) >= "69"
        iso = ibis.ifelse(last, ibis.literal("19"), ibis.literal("20")) + iso
    moment = parse(_only(iso, ISO, iso))
    if "p" not in letters:
        return moment
    noon = (moment // _HOUR_US) % 24 == 12
    afternoon = text.re_search("[Pp][Mm]")
    return moment + ibis.cases((afternoon & ~noon, _HALF_DAY), (~afternoon & noon, -_HALF_DAY), else_=0)


def guess_format(texts: list[str]) -> str:
    """Formats that fit all texts, as words for advice: `'%d/%m/%Y'`; "" where none is known."""
    forms = []
    for day in ("%d{0}%m{0}%Y", "%m{0}%d{0}%Y", "%Y{0}%m{0}%d"):
        for mark in "/.-":
            for time in ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p"):
                form = day.format(mark) + time
                if all(_fits(text.strip(), form) for text in texts):
                    forms.append(repr(form))
    return " or ".join(forms)


def _fits(text: str, form: str) -> bool:
    from datetime import datetime

    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def _only(text: ir.Value, pattern: str, value: ir.Value) -> ir.Value:
    """The value where the text has the pattern, else null."""
    return ibis.ifelse(text.re_search(pattern), value, ibis.null("string"))


def _pattern(form: str) -> str:
    parts = re.split(r"%(.)", form.replace("%%", "\0"))
    # re.escape would also escape a space, which is no escape to every engine.
    literal = [re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", part).replace("\0", "%") for part in parts[::2]]
    codes = [_CODES[letter] for letter in parts[1::2]]
    if "" in literal[1:-1]:  # without a sign between them, numbers have all their digits
        codes = [code.replace("{1,2}", "{2}").replace(r"]?\d", r"]\d").replace("0?", "0") for code in codes]
    return "^" + "".join(a + b for a, b in zip(literal, [*codes, ""], strict=True)) + "$"


def _template(letters: list[str], group: str) -> str:
    """The replacement that puts the groups of `_pattern` in the order of ISO 8601."""

    def of(wanted: str) -> str | None:
        return next((f"{group}{place}" for place, letter in enumerate(letters, start=1) if letter in wanted), None)

    zone, fraction = of("z") or "", of("f")
    time = f" {of('HI') or '00'}:{of('M') or '00'}:{of('S') or '00'}{'.' + fraction if fraction else ''}{zone}"
    return f"{of('Yy')}-{of('mbB')}-{of('d')}{time}"
