"""Hostile logs: each twist takes an ordinary log and makes it one that has been read wrongly, or could be.

Every twist names the item of issue 15 that it stands for, or "" where nothing was wrong. A twist changes the log before
it is written (`log`), or the files afterwards (`files`), and says what is right: the dataset of the rows, a refusal,
or both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pyarrow as pa

from tests.fuzz.compression import Files, compressed, truncate, two_members, wrong_crc
from tests.fuzz.logs import INTERNAL, Log, deal_rows, render, say_time, spoil, write, write_parquet
from tests.fuzz.oracle import TICKS


@dataclass(frozen=True)
class Twist:
    """kinds: logs it can be applied to; the others are left as they are. log, files: return False if it did not fit."""

    item: str
    kinds: tuple[str, ...]
    log: Callable[[Log, random.Random], bool] | None = None
    files: Callable[[Log, Files, random.Random], bool] | None = None


def _mostly_parquet(log: Log, rng: random.Random) -> bool:
    """False for most logs of other kinds: where a twist was read wrongly in Parquet most of all."""
    return log.kind == "parquet" or rng.random() < 0.15


def _tied(log: Log, rng: random.Random) -> bool:
    """Extra columns with an engine's own names, and times so coarse that the rows' order decides."""
    name = rng.choice(INTERNAL[:3] if rng.random() < 0.2 else INTERNAL[:2])
    if not _mostly_parquet(log, rng) or name.casefold() in {
        column.casefold() for column in (*log.columns.values(), *log.extras)
    }:
        return False
    log.extras.append(name)
    log.extra_types[name] = pa.int64()
    ticks = log.options.ticks
    day = min(row.tick for row in log.rows if row.tick is not None) // ticks // 86_400 * 86_400 * ticks
    for row in log.rows:
        row.extra[name] = rng.randrange(5)
        if row.reason is None:
            row.tick = day + rng.choice((0, 3_600)) * ticks
            row.written = say_time(log, row.tick, rng)
    return True


def _hive(log: Log, rng: random.Random) -> bool:
    """Folders named as Hive names partitions; docs/data.md gives them no meaning."""
    role = rng.choice(("user", "item", "time"))
    value = {"user": "77", "item": "abc", "time": "1400000000"}[role]
    names = [f"log/{log.columns[role]}={value}/part{n}{log.suffix()}" for n in range(rng.choice((1, 2)))]
    if "/" in log.columns[role]:
        return False
    deal_rows(rng, log, names)
    log.source, log.decoys = rng.choice(("log", names[0] if len(names) == 1 else "log")), {}
    return True


def _glob_names(log: Log, rng: random.Random) -> bool:
    """File names that are patterns themselves, beside files that the pattern would match."""
    suffix = log.suffix()
    pattern, match = rng.choice((("log[1]", "log1"), ("a*", "ab"), ("a?", "ab"), ("{a,b}", "b"), ("a**", "aab")))
    if rng.random() < 0.5:
        other = replace(log, rows=[replace(row, item=log.rows[0].item) for row in log.rows[::2]])
        log.decoys = {match + suffix: write(other, other.rows)}
        log.files, log.source = [(pattern + suffix, len(log.rows))], pattern + suffix
        return True
    deal_rows(rng, log, [f"log/{pattern}{suffix}", f"log/{match}{suffix}"])
    log.source, log.decoys = "log", {}
    return True


def _named_zone(log: Log, rng: random.Random) -> bool:
    """One time with a named zone among times without any."""
    if log.unit != "iso":
        return False
    good = [row for row in log.rows if row.reason is None]
    for row in good:
        assert row.tick is not None
        row.tick -= row.tick % TICKS["us"]
        row.written = datetime.fromtimestamp(row.tick // TICKS["us"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    row, zone = rng.choice(good[: len(good) // 2 + 1]), rng.choice(("America/New_York", "Asia/Tokyo", "Europe/Berlin"))
    local = datetime.fromisoformat(row.written).replace(tzinfo=ZoneInfo(zone), fold=0)
    row.written += f" {zone}"
    as_read, row.tick = replace(row), int(local.timestamp()) * TICKS["us"]
    # To call such a time unreadable is right too: docs/data.md speaks of offsets only.
    as_read.reason = "time"
    log.may_refuse = True
    log.others.append(([as_read if other is row else other for other in log.rows], None))
    return True


def _case(log: Log, rng: random.Random) -> bool:
    """A column whose name differs from that of an id in case alone."""
    role = rng.choice(("user", "item"))
    name = log.columns[role].swapcase()
    if not _mostly_parquet(log, rng) or name in (*log.columns.values(), *log.extras):
        return False
    log.extras.insert(0, name)
    log.extras_first |= rng.random() < 0.7
    log.extra_types[name] = log.types.get(role, pa.string())
    for row in log.rows:
        row.extra[name] = rng.choice(log.rows).item if role == "item" else rng.choice(log.rows).user
    log.may_refuse = True
    return True


def _long_line(log: Log, rng: random.Random) -> bool:
    """A line of 20 MB and more."""
    if log.kind == "csv" and log.compression:
        log.files = [(name.removesuffix(log.compression), count) for name, count in log.files]
        log.source, log.compression = log.source.removesuffix(log.compression), ""
    if not log.extras:
        log.extras.append("remark")
    row = rng.choice(log.rows)
    for other in log.rows:
        other.extra.setdefault(log.extras[0], "")
    row.extra[log.extras[0]] = "x" * rng.choice((3_000_000, 21_000_000, 33_000_000, 33_000_000, 33_000_000))
    log.may_refuse, log.spark = True, False
    if row.reason is None:
        log.others.append(([replace(row, reason="line") if other is row else other for other in log.rows], None))
    return True


def _open_quote(log: Log, rng: random.Random) -> bool:
    """A quote that is never closed, in the middle of a file without other quotes."""
    if log.quoting or any('"' in str(value) for row in log.rows for value in vars(row).values()):
        return False
    name = [(f"log{log.suffix()}", len(log.rows))]
    log.files, log.source, log.decoys = name, name[0][0], {}
    place = rng.randrange(len(log.rows) // 2, len(log.rows))
    rest = log.delimiter.join(["1"] * (len(log.roles) + len(log.extras) - 1)).encode()
    log.rows[place].raw = b'"open' + log.delimiter.encode() + rest
    log.rows[place].reason = "fields"
    # All that follows may be inside the quote. Then all of it is bad, and must be counted.
    swallowed = [row if n < place else replace(row, reason="fields") for n, row in enumerate(log.rows)]
    log.others.append((swallowed, None))
    log.may_refuse, log.spark = True, False
    return True


def _mixed_schemas(log: Log, files: Files, rng: random.Random) -> bool:
    """Two Parquet files of one source that give a column different types."""
    role = rng.choice(("user", "item", "time"))
    half = len(log.rows) // 2
    parts = (log.rows[:half], log.rows[half:])
    kind = log.types[role]
    if role == "time":
        if not pa.types.is_integer(kind) or log.unit != "s":  # in others 0.7 is less than a second
            return False
        fractions = [replace(row, written=None if row.written is None else row.written + 0.7) for row in parts[1]]
        written = [write_parquet(log, parts[0]), write_parquet(log, fractions, {"time": pa.float64()})]
    else:
        if not pa.types.is_integer(kind):
            return False
        as_float = rng.random() < 0.85
        shift = 0.5 if as_float else 0
        small = all(value is None or abs(value) < 2**50 for value in (getattr(row, role) for row in log.rows))
        if as_float and not small:
            return False
        others = [
            row if (value := getattr(row, role)) is None else
            replace(row, **{role: float(value) + shift if as_float else str(value)}) for row in parts[1]
        ]  # fmt: skip
        written = [
            write_parquet(log, parts[0]),
            write_parquet(log, others, {role: pa.float64() if as_float else pa.string()}),
        ]
        log.must_refuse |= as_float
    order = (0, 1) if rng.random() < 0.85 else (1, 0)
    files.clear()
    files.update({f"log/{letter}.parquet": written[part] for letter, part in zip("ab", order, strict=True)})
    log.rows = [row for part in order for row in parts[part]]
    log.source, log.may_refuse = "log", True
    return True


def _wrong_unit(log: Log, rng: random.Random) -> bool:
    """All times in milliseconds, read as seconds."""
    if log.unit != "ms" or any(row.reason for row in log.rows):
        return False
    log.unit, log.must_refuse, log.options.skip_bad = "s", True, rng.random() < 0.5
    return True


def _dates_as_numbers(log: Log, rng: random.Random) -> bool:
    if log.unit != "iso" or any(row.reason for row in log.rows):
        return False
    log.unit, log.must_refuse = "s", True
    return True


def _float_ids(log: Log, files: Files, rng: random.Random) -> bool:
    role = rng.choice(("user", "item"))
    rows = [row if getattr(row, role) is None else replace(row, **{role: 1.5}) for row in log.rows]
    name = log.files[0][0]
    files.clear()
    files[name] = write_parquet(log, rows, {role: pa.float64()})
    log.source, log.must_refuse = name, True
    return True


def _no_column(log: Log, rng: random.Random) -> bool:
    log.extra_words += ["--user-col=no such column"]
    log.must_refuse, log.options.skip_bad = True, False
    return True


def _foreign_bytes(log: Log, rng: random.Random) -> bool:
    """A line that is not UTF-8."""
    row = rng.choice(log.rows)
    fields = [b"\xff\xfe"] * (len(log.roles) + len(log.extras))
    row.raw, row.reason = log.delimiter.encode().join(fields) if log.kind == "csv" else b'{"user": "\xff"}', "fields"
    log.may_refuse, log.spark = True, False
    return True


def _no_json(log: Log, rng: random.Random) -> bool:
    row = rng.choice(log.rows)
    lines = (b"no json", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"[1, 2]", b'{"user": 1', b"\x00")
    row.raw, row.reason = rng.choice(lines), "fields"
    log.may_refuse = True
    log.spark = not row.raw.startswith(b"[")  # Spark refuses an array, which to DuckDB is a bad row
    return True


def _carriage_returns(log: Log, rng: random.Random) -> bool:
    log.line_end, log.may_refuse, log.spark = "\r", True, False
    return not any(row.reason for row in log.rows)


def _mixed_line_ends(log: Log, files: Files, rng: random.Random) -> bool:
    name = log.files[0][0]
    if log.compression or b'"' in files[name] or b"\r" in files[name] or any(row.reason for row in log.rows):
        return False
    lines = files[name].split(b"\n")
    files[name] = b"".join(line + rng.choice((b"\n", b"\r\n")) for line in lines[:-1])
    log.may_refuse = True
    return True


def _long_header(log: Log, rng: random.Random) -> bool:
    name = "x" * rng.choice((131_073, 140_000))
    log.extras.append(name)
    for row in log.rows:
        row.extra[name] = "1"
    log.may_refuse, log.spark = True, False
    return True


def _header_comma(log: Log, files: Files, rng: random.Random) -> bool:
    """A header that ends with a delimiter, above rows that do not."""
    name = log.files[0][0]
    if log.compression or log.bom or log.line_end != "\n":
        return False
    head, _, rest = files[name].partition(b"\n")
    files[name] = head + log.delimiter.encode() + b"\n" + rest
    log.must_refuse, log.options.skip_bad = True, False
    return True


def _semicolons(log: Log, files: Files, rng: random.Random) -> bool:
    """Another delimiter than the name of the file promises."""
    if log.compression or log.delimiter == "\t":
        return False
    files[log.files[0][0]] = write(replace(log, delimiter=";"), log.rows)
    log.source, log.must_refuse = log.files[0][0], True
    return True


def _line_breaks(log: Log, rng: random.Random) -> bool:
    """Ids with a line break inside quotes. DuckDB reads them, Spark does not (docs/data.md)."""
    old = next(row.item for row in log.rows if row.reason is None)
    if log.line_end == "\r\n" or not isinstance(old, str):
        return False
    for row in log.rows:
        row.item = "two\nlines" if row.item == old else row.item
    log.spark = False
    return True


def _huge_options(log: Log, rng: random.Random) -> bool:
    flag = rng.choice(("--min-user", "--min-item", "--since", "--until", "--cutoff", "--window", "--threads"))
    log.extra_words += [f"{flag}={'9' * 23}"]
    if flag == "--until":
        log.options.until, log.may_refuse = None, True  # it filters nothing
    else:
        log.must_refuse = True
    return True


def _empty_file(log: Log, files: Files, rng: random.Random) -> bool:
    """A file of no bytes, where there must at least be a header."""
    if log.kind == "json" and len(log.files) > 1:  # whose lines need no header
        return False
    files[rng.choice([name for name, _ in log.files])], log.must_refuse = b"", True
    return True


def _extra_header_only(log: Log, files: Files, rng: random.Random) -> bool:
    """One more file with a header and no rows."""
    if log.source != "log":
        return False
    files[f"log/zzz{log.suffix()}"] = write(log, [])
    return True


def _no_end(log: Log, files: Files, rng: random.Random) -> bool:
    """The last line without its line end."""
    name = log.files[-1][0]
    if log.compression:
        return False
    files[name] = files[name].removesuffix(log.line_end.encode())
    return True


def _many_bad(log: Log, rng: random.Random) -> bool:
    for row in rng.sample(log.rows, len(log.rows) // 4):
        if row.reason is None:
            spoil(rng, log, row)
    return True


TEXT, ALL = ("csv", "json"), ("csv", "json", "parquet")
TWISTS = {
    "truncated": Twist("1", TEXT, compressed, truncate),
    "wrong-crc": Twist("1", TEXT, compressed, wrong_crc),
    "two-members": Twist("1", TEXT, compressed, two_members),
    "hive-folders": Twist("2", ALL, _hive),
    "glob-names": Twist("3", ALL, _glob_names),
    "named-zone": Twist("4", ALL, _named_zone),
    "case": Twist("5", ALL, _case),
    "long-line": Twist("6", ("csv",), _long_line),
    "open-quote": Twist("6", ("csv",), _open_quote),
    "mixed-schemas": Twist("7", ("parquet",), None, _mixed_schemas),
    "internal-names": Twist("8", ALL, _tied),
    "carriage-returns": Twist("19", ("csv",), _carriage_returns),
    "long-header": Twist("19", ("csv",), _long_header),
    "huge-options": Twist("19", ALL, _huge_options),
    "header-comma": Twist("20", ("csv",), None, _header_comma),
    "mixed-line-ends": Twist("20", ("csv",), None, _mixed_line_ends),
    "semicolons": Twist("20", ("csv",), None, _semicolons),
    "wrong-unit": Twist("", ALL, _wrong_unit),
    "dates-as-numbers": Twist("", TEXT, _dates_as_numbers),
    "float-ids": Twist("", ("parquet",), None, _float_ids),
    "no-column": Twist("", ALL, _no_column),
    "foreign-bytes": Twist("", ("csv", "json"), _foreign_bytes),
    "no-json": Twist("", ("json",), _no_json),
    "line-breaks": Twist("", ("csv",), _line_breaks),
    "empty-file": Twist("", ALL, None, _empty_file),
    "header-only": Twist("", ("csv", "parquet"), None, _extra_header_only),
    "no-line-end": Twist("", TEXT, None, _no_end),
    "many-bad": Twist("", ALL, _many_bad),
}


def _keep_broken(log: Log) -> None:
    """A row with too many fields must have too many also after a twist has added a column."""
    for row in log.rows if log.kind == "csv" else ():
        width = len(log.roles) + len(log.extras)
        if row.raw is not None and row.raw == log.delimiter.join(["1"] * width).encode():
            row.raw += f"{log.delimiter}1".encode()


def twisted(log: Log, name: str, rng: random.Random) -> tuple[Files, bool]:
    """The files of a log after a twist, and whether the twist fitted the log; if not, the log is as it was."""
    twist = TWISTS[name]
    if log.kind not in twist.kinds:
        return render(log), False
    fits = twist.log is None or twist.log(log, rng)
    _keep_broken(log)
    files = render(log)
    if fits and twist.files is not None:
        fits = twist.files(log, files, rng)
    return files, fits
