"""Text files before an engine reads them: what the first line names, and whether every line can be read at all.

Engines forgive too much. DuckDB takes half a gzip stream for a whole one, loses lines of 32 MB, and counts the 100,000
lines behind an unclosed quote as one bad row. `check_text` reads every file once, a block at a time, and refuses what
an engine could misread. Both engines see only files that passed.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from trope.data.sources.description import Source

# A little below DuckDB's own limits, beyond which it drops a line with or without saying so.
_LONGEST = {"csv": 1_999_000, "json": 16_000_000}
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_CR, _LF, _SPACE = b"\r\n "
# The end of a JSON line after which a value must follow.
_CUT = re.compile(rb"[:,\[][ \t\r]*\n")


def open_text(file: Path) -> pa.NativeFile:
    """A stream of the file's bytes, decompressed by its suffix; a damaged stream raises OSError when it is read."""
    return pa.input_stream(str(file), compression="detect")


def keys(file: Path) -> set[str]:
    """The keys of the JSON lines in the first block of a file, plain or compressed; other lines do not count."""
    found: set[str] = set()
    for line in _head(file).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        found |= row.keys() if isinstance(row, dict) else set()
    return found


def header(file: Path, delimiter: str) -> tuple[str, ...]:
    """The column names in the first line of a text file, plain or compressed; empty names are kept."""
    head = _head(file)
    try:
        line = re.split(rb"[\r\n]", head.removeprefix(_BOM), maxsplit=1)[0].decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text; convert it first, for example with iconv") from None
    try:
        fields = tuple(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error as error:
        raise ValueError(
            f"{file}: the first line must name the columns, and cannot be split ({error}); it begins {line[:40]!r}"
        ) from None
    if not fields:
        what = "is empty" if file.stat().st_size == 0 else "begins with an empty line"
        raise ValueError(f"{file} {what}; its first line must name the columns")
    return fields


def _head(file: Path) -> bytes:
    """The first block of a file."""
    try:
        with open_text(file) as stream:
            return bytes(stream.read(_BLOCK))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from None


def check_text(source: Source, strict: bool = False) -> bool:
    """Whether a quoted field of the source holds a line break. Refuses files that an engine could misread.

    strict: refuse also what DuckDB reads or rejects row by row, and Spark reads otherwise.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return any(list(pool.map(lambda file: _File(file, source, strict).check(), source.files)))


class _File:
    """One pass over one file, in blocks of whole lines."""

    def __init__(self, file: Path, source: Source, strict: bool) -> None:
        self._file = file
        self._longest = _LONGEST[source.kind]
        self._is_csv = source.kind == "csv"
        self._quote = source.quote.encode() if self._is_csv else b""
        self._delimiter = source.delimiter.encode()
        self._strict = strict
        self._line = 1  # of the block's first byte
        self._record = 0  # bytes of a quoted record that began before the block
        self._opened = 0  # the line of the quote that is open, 0 if none is
        self._ends: str | None = None  # how lines end, once one has
        self._multiline = False
        self._cut = 0  # the JSON line, last so far, that was cut off before a value; 0 if none was

    def check(self) -> bool:
        try:
            for block in self._blocks():
                self._check_block(block)
                self._line += block.count(b"\n")
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self._file, error) from None
        if self._opened:
            raise self._bad_quote("is never closed")
        return self._multiline

    def _blocks(self) -> Iterator[bytes]:
        """The file in blocks that end with a line; a line that is too long is refused."""
        rest = b""
        with open_text(self._file) as stream:
            while read := stream.read(_BLOCK):
                block = rest + read if rest else (self._without_mark(read) if self._line == 1 else read)
                first, end = block.find(b"\n"), block.rfind(b"\n") + 1
                if max(first, len(block) - end) > self._longest:
                    if b"\r" in block and first < 0:
                        raise self._carriage_return()
                    line = self._line if first < 0 or first > self._longest else self._line + block.count(b"\n")
                    raise self._too_long(line)
                rest = block[end:]
                if end:
                    yield block[:end]
        if rest:
            yield rest

    def _without_mark(self, block: bytes) -> bytes:
        """A file's first block; the mark before JSON is refused, as DuckDB would lose the first row."""
        if not self._is_csv and block.startswith(_BOM):
            raise ValueError(
                f"{self._file} begins with a byte order mark, which is no JSON; remove it, for example with tail -c +4"
            )
        return block.removeprefix(_BOM)

    def _check_block(self, block: bytes) -> None:
        if self._strict:
            self._check_strictly(block)
        if not self._is_csv:
            self._check_whole(block)
        if self._opened or (self._quote and self._quote in block):
            self._check_quoted(block)
        elif b"\r" in block:
            pairs = block.count(b"\r\n")
            self._check_ends(pairs, block.count(b"\n") - pairs, block.count(b"\r") - pairs)
        else:
            self._check_ends(0, block.count(b"\n"), 0)

    def _check_whole(self, block: bytes) -> None:
        """Refuse a JSON line that breaks off before a value: DuckDB takes the next line for it, and loses that line."""
        whole = block.count(b"}\n") or block.count(b"}\r\n")  # a search costs more than these counts
        if not self._cut and whole < block.count(b"\n") and (found := _CUT.search(block)):
            self._cut = self._line_of(block, found.start())
            block = block[found.end() :]
        if self._cut and block.strip():
            raise ValueError(
                f"{self._file} line {self._cut:,} breaks off where a value must follow; each line must be one whole "
                "JSON object, mend it"
            )

    def _check_ends(self, crlf: int, lf: int, cr: int) -> None:
        """Refuse line ends that change, or a carriage return alone: engines disagree on both."""
        if cr:
            raise self._carriage_return()
        if not self._is_csv:
            return
        for ends, found in (("CRLF", crlf), ("LF", lf)):
            if found and self._ends not in (None, ends):
                raise ValueError(
                    f"{self._file} mixes line ends, CRLF and LF, from about line {self._line:,} on; convert it, for "
                    "example with dos2unix"
                )
            self._ends = ends if found else self._ends

    def _check_quoted(self, block: bytes) -> None:
        """Follow the quotes through a block; line ends count only outside them."""
        code = np.frombuffer(block, np.uint8)
        inside = bool(self._opened)
        quotes = np.flatnonzero(code == self._quote[0])
        if not self._is_regular(code, quotes, inside):
            quotes = self._structural(block, quotes.tolist(), inside)
        feeds, returns = np.flatnonzero(code == _LF), np.flatnonzero(code == _CR)
        quoted = ((np.searchsorted(quotes, feeds) + inside) % 2).astype(bool)
        self._multiline |= bool(quoted.any())
        feeds, returns = feeds[~quoted], returns[(np.searchsorted(quotes, returns) + inside) % 2 == 0]
        pairs = int(np.isin(returns + 1, feeds).sum())
        self._check_ends(pairs, len(feeds) - pairs, len(returns) - pairs)
        record = self._record + (int(feeds[0]) if len(feeds) else len(block))
        self._record = len(block) - int(feeds[-1]) - 1 if len(feeds) else record
        if (inside + len(quotes)) % 2 == 0:
            self._opened = 0
        elif len(quotes):
            self._opened = self._line_of(block, int(quotes[-1]))
        if max(record, self._record) > self._longest:
            raise self._bad_quote("is not closed within 2 MB") if self._opened else self._too_long(self._line)

    def _is_regular(self, code: np.ndarray, quotes: np.ndarray, inside: bool) -> bool:
        """Whether every quote begins a field, ends a field, or is doubled."""
        if len(self._delimiter) > 1:
            return False
        ends = [self._delimiter[0], self._quote[0], _LF]
        opening, closing = quotes[int(inside) :: 2], quotes[1 - int(inside) :: 2]
        before, after = code[opening[opening > 0] - 1], code[closing[closing < len(code) - 1] + 1]
        return bool(np.isin(before, ends).all() and np.isin(after, [*ends, _CR]).all())

    def _structural(self, block: bytes, quotes: list[int], inside: bool) -> np.ndarray:
        """The quotes that begin or end a field, one by one; others stand for themselves."""
        found: list[int] = []
        skipped = -1
        for place in quotes:
            if place == skipped:
                continue
            if not inside:
                start = place
                while start and block[start - 1] == _SPACE and not block.endswith(self._delimiter, 0, start):
                    start -= 1
                if start and block[start - 1] != _LF and not block.endswith(self._delimiter, 0, start):
                    continue
                inside = True
                if self._strict and start < place:
                    raise self._other_rows(self._line_of(block, place), "has spaces before a quote")
            elif block.startswith(self._quote, place + 1):
                skipped = place + 1
                continue
            else:
                after = block[place + 1 : place + 200]
                if not after.startswith(self._delimiter):
                    after = after.lstrip(b" ")
                if after and after[0] not in (_CR, _LF) and not after.startswith(self._delimiter):
                    self._opened = self._line_of(block, found[-1]) if found else self._opened
                    raise self._bad_quote("is closed in the middle of a field (a quote inside a field is doubled)")
                inside = False
            found.append(place)
        return np.array(found, np.int64)

    def _check_strictly(self, block: bytes) -> None:
        if not block.isascii():
            try:
                block.decode()
            except UnicodeDecodeError as error:
                raise self._other_rows(self._line_of(block, error.start), "is not UTF-8") from None
        if (
            self._is_csv
            and (b"\n " in block or b"\n\t" in block or block[0] in b" \t")
            and (blank := re.search(rb"(?:\A|\n)[ \t]+\r?(?:\n|\Z)", block))
        ):
            raise self._other_rows(self._line_of(block, blank.start() + 1), "holds only spaces")
        if not self._is_csv and (array := re.search(rb"^[ \t]*\[", block, re.MULTILINE)):
            raise self._other_rows(self._line_of(block, array.start()), "is an array")

    def _line_of(self, block: bytes, place: int) -> int:
        return self._line + block.count(b"\n", 0, place)

    def _other_rows(self, line: int, what: str) -> ValueError:
        return ValueError(
            f"{self._file} line {line:,} {what}, which Spark reads differently; mend it, or use --engine duckdb"
        )

    def _bad_quote(self, what: str) -> ValueError:
        return ValueError(f"{self._file}: the quote in line {self._opened:,} {what}; mend the line")

    def _too_long(self, line: int) -> ValueError:
        return ValueError(
            f"{self._file} line {line:,} is longer than {self._longest:,} bytes; is a line break missing? Mend it"
        )

    def _carriage_return(self) -> ValueError:
        return ValueError(
            f"{self._file} has carriage returns alone (CR, not CRLF) from line {self._line:,} on; where they end the "
            "lines convert them, for example with tr '\\r' '\\n'"
        )


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot read {file}: {error}; is it truncated, damaged or not what its name says?")
