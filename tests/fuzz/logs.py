"""Random event logs: rows, how they are written into files, and the options to prepare them with.

`draw` makes an ordinary log, which `trope prepare` must read. `tests.fuzz.twists` turns it into a hostile one.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.oracle import FAR_FUTURE, TICKS, Options, Row

# Names that engines, or trope's own expressions, give to columns of theirs.
INTERNAL = (
    "file_row_number", "file_index", "filename", "file", "place", "time", "tick", "reason", "written", "rowid", "row",
    "path", "block", "id", "first", "_broken", "event", "user_id", "item_id", "basket", "rows", "events", "_metadata",
)  # fmt: skip
ODD = ("User ID", 'qu"ote', "it's", "ünï✓", "SELECT", "x.y", " lead", "%", "naïve", "(a)", "用户", "a b", "$1", "#")
_WORDS = ("ann", "Bob", "żółw", "日本", "😀", "a b", 'q"q', "it's", "x,y", "t\tt", "NULL", "nan", "None", "-", "é", "é")
_NUMBERLIKE = (
    "7", "07", "007", "+7", "7.0", "1e3", "0x10", "-0", "9" * 19, "9" * 20, "\uff19", "1_0", " 7", "7 ", "true",
)  # fmt: skip


@dataclass
class Log:
    """A log before it is written.

    kind: csv, json or parquet. unit: s, ms, us, ns, iso, or timestamp for a temporal Parquet column.
    columns: column names by role. types, extra_types: Arrow types by role and by extra column (Parquet). files:
    names, and
    how many rows each holds. must_refuse, may_refuse: what is expected beside the dataset of the rows.
    others: further right answers, each as rows and the count of bad rows. lines_known: whether line numbers of bad
    rows can be predicted. spark: whether Spark can be asked too.
    """

    kind: str
    unit: str
    columns: dict[str, str]
    rows: list[Row]
    options: Options
    types: dict[str, pa.DataType] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    extra_types: dict[str, pa.DataType] = field(default_factory=dict)
    extras_first: bool = False
    files: list[tuple[str, int]] = field(default_factory=list)
    source: str = ""
    decoys: dict[str, bytes] = field(default_factory=dict)
    delimiter: str = ","
    line_end: str = "\n"
    bom: bool = False
    quoting: int = csv.QUOTE_MINIMAL
    compression: str = ""
    ascii_json: bool = True
    must_refuse: bool = False
    may_refuse: bool = False
    others: list[tuple[list[Row], int | None]] = field(default_factory=list)
    extra_words: list[str] = field(default_factory=list)
    spark: bool = True

    @property
    def roles(self) -> list[str]:
        return [role for role in ("user", "item", "time", "basket", "event") if role in self.columns]

    @property
    def text_roles(self) -> frozenset[str]:
        """Which ids are text in the files."""
        if self.kind != "parquet":
            return frozenset(("user", "item", "basket"))
        return frozenset(role for role, kind in self.types.items() if not pa.types.is_integer(kind))

    def suffix(self) -> str:
        """The ending of the log's files."""
        plain = {"csv": ".tsv" if self.delimiter == "\t" else ".csv", "json": ".jsonl", "parquet": ".parquet"}
        return plain[self.kind] + self.compression


def draw(rng: random.Random, loose: bool = False) -> Log:
    """An ordinary log: every way of writing it that docs/data.md allows, some bad rows, and random options.

    loose: options that keep all good rows, so that a wrong row cannot hide.
    """
    kind = rng.choice(("csv", "csv", "json", "parquet", "parquet"))
    unit = rng.choice(("s", "s", "ms", "us", "ns", "iso") + (("timestamp",) * 3 if kind == "parquet" else ()))
    ids = {role: _id_pool(rng, size) for role, size in (("user", 9), ("item", 8), ("basket", 12))}
    log = Log(kind, unit, _columns(rng), [], Options(TICKS[unit], baskets=rng.random() < 0.25))
    log.options.skip_bad = rng.random() < 0.5
    if log.options.baskets:
        log.columns["basket"] = _unused(rng, log, ("basket", "order", *ODD, *INTERNAL))
    if rng.random() < 0.15:
        log.columns["event"] = _unused(rng, log, ("event", "type", *ODD, *INTERNAL))
        log.options.events = tuple(rng.sample(("buy", "view", "BUY"), rng.choice((1, 2))))
    log.extras_first = rng.random() < 0.5
    for _ in range(rng.choice((0, 0, 1, 3))):
        log.extras.append(_unused(rng, log, (*ODD, *INTERNAL)))
    if kind == "parquet":
        _draw_types(rng, log, ids)
    _draw_rows(rng, log, ids)
    _draw_text_format(rng, log)
    _draw_files(rng, log)
    if loose:
        log.options.skip_bad, log.options.protocol = True, "loo-paper"
    else:
        _draw_options(rng, log)
    return log


def render(log: Log) -> dict[str, bytes]:
    """The files of a log, by name."""
    found, first = dict(log.decoys), 0
    for name, count in log.files:
        found[name] = write(log, log.rows[first : first + count])
        first += count
    return found


def write(log: Log, rows: list[Row]) -> bytes:
    """One file."""
    if log.kind == "parquet":
        return write_parquet(log, rows)
    text = _csv_lines(log, rows) if log.kind == "csv" else _json_lines(log, rows)
    content = (b"\xef\xbb\xbf" if log.bom else b"") + text
    if log.compression == ".gz":
        return gzip.compress(content, mtime=0)
    return bytes(pa.Codec("zstd").compress(content)) if log.compression == ".zst" else content


def write_parquet(log: Log, rows: list[Row], types: dict[str, pa.DataType] | None = None) -> bytes:
    """A Parquet file. types: by role, in place of the log's own."""
    types = {**log.types, **(types or {})}
    columns = {log.columns[role]: _array(rows, role, types[role]) for role in log.roles}
    extras = {name: pa.array([row.extra[name] for row in rows], log.extra_types[name]) for name in log.extras}
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({**extras, **columns} if log.extras_first else {**columns, **extras}),
        buffer,
        row_group_size=max(1, len(rows) // 2 + 1),
        coerce_timestamps=None,
    )
    return buffer.getvalue()


def words(log: Log) -> list[str]:
    """The options on the command line, without source and --out."""
    options = log.options
    flags: dict[str, Any] = {
        "--min-user": options.min_user, "--min-item": options.min_item, "--since": options.since,
        "--until": options.until, "--protocol": options.protocol, "--cutoff": options.cutoff,
        "--window": options.window, "--on-bad": "skip" if options.skip_bad else "fail",
        "--time-unit": None if log.unit in ("s", "timestamp") else log.unit,
    }  # fmt: skip
    defaults = {"user": "user", "item": "item", "time": "timestamp"}
    flags |= {f"--{role}-col": name for role, name in log.columns.items() if defaults.get(role) != name}
    # `--flag=value`, since a value may begin with a dash.
    listed = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    listed += [f"--event={kind}" for kind in options.events]
    return listed + (["--once"] if options.once else []) + log.extra_words


def say_time(log: Log, tick: int, rng: random.Random) -> Any:
    """A time as the log writes it."""
    if log.unit == "timestamp":
        return tick
    if log.unit == "iso":
        return _say_date(tick, rng)
    arrow = log.types.get("time")
    fraction = rng.choice((0, 0, 0.25, 0.5)) if log.unit != "ns" else 0
    if arrow is None or pa.types.is_string(arrow):
        if log.kind == "json" and rng.random() < 0.5:
            return tick
        return f"{tick}{str(fraction)[1:]}" if fraction and rng.random() < 0.3 else str(tick)
    if pa.types.is_floating(arrow):
        return tick + fraction
    return Decimal(tick) + Decimal(fraction) if pa.types.is_decimal(arrow) else tick


def _say_date(tick: int, rng: random.Random) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=tick)
    zone = rng.choice((None, None, UTC, timezone(timedelta(hours=2)), timezone(timedelta(hours=-5, minutes=-30))))
    moment = moment.astimezone(zone or UTC)
    if zone is None and (moment.hour, moment.minute, moment.second, moment.microsecond) == (0, 0, 0, 0):
        return moment.strftime("%Y-%m-%d")
    text = moment.strftime("%Y-%m-%d" + rng.choice("T ") + "%H:%M:%S")
    text += f".{moment.microsecond:06d}" if moment.microsecond else ""
    if zone is None:
        return text
    return text + ("Z" if zone is UTC else moment.strftime("%z")[:3] + ":" + moment.strftime("%z")[3:])


def _id_pool(rng: random.Random, most: int) -> list[int | str]:
    """Ids of one style: small, negative or huge integers, words, or text that looks like numbers."""
    style, size = rng.choice(("int", "int", "huge", "negative", "text", "numberlike", "long")), rng.randint(2, most)
    pools: dict[str, Any] = {
        "int": lambda: rng.sample(range(1, 60), size),
        "huge": lambda: [2**63 - 1 - n for n in rng.sample(range(9), size // 2 + 1)] + rng.sample(range(9), size // 2),
        "negative": lambda: rng.sample(range(-30, 30), size),
        "text": lambda: [f"{word}{n}" for n, word in enumerate(rng.sample(_WORDS, size))],
        "numberlike": lambda: rng.sample(_NUMBERLIKE, size),
        "long": lambda: [rng.choice("xyé") * n for n in rng.sample(range(1, 3000), size)],
    }
    return pools[style]()


def _columns(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.5:
        return {"user": "user", "item": "item", "time": "timestamp"}
    return dict(zip(("user", "item", "time"), rng.sample((*ODD, *INTERNAL), 3), strict=True))


def _unused(rng: random.Random, log: Log, names: tuple[str, ...]) -> str:
    taken = {name.casefold() for name in (*log.columns.values(), *log.extras)}
    return rng.choice([name for name in names if name.casefold() not in taken])


def _draw_types(rng: random.Random, log: Log, ids: dict[str, list[int | str]]) -> None:
    text = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    for role, pool in ids.items():
        if role in log.columns:
            small = all(isinstance(value, int) and 0 <= value < 128 for value in pool)
            whole = all(isinstance(value, int) for value in pool)
            kinds = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32()) if small else (pa.int64(),)
            log.types[role] = rng.choice(kinds) if whole and rng.random() < 0.8 else rng.choice(text)
            if not pa.types.is_integer(log.types[role]):
                pool[:] = map(str, pool)
    log.types["event"] = rng.choice(text)
    units = rng.choice(("s", "ms", "us", "ns")), rng.choice((None, "UTC", "Europe/Berlin"))
    numbers = [pa.int64(), pa.int64(), pa.string()]
    numbers += [pa.float64(), pa.decimal128(20, 3)] if log.unit != "ns" else []
    times = {"timestamp": pa.timestamp(*units), "iso": pa.string()}
    log.types["time"] = times.get(log.unit) or rng.choice(numbers)


def _draw_rows(rng: random.Random, log: Log, ids: dict[str, list[int | str]]) -> None:
    count, ticks = rng.randint(12, 120), TICKS[log.unit]
    start, span = rng.randint(10**9, 19 * 10**8), rng.choice((3, 3_000, 400_000, 40_000_000))
    coarse = log.unit == "timestamp" and pa.types.is_timestamp(log.types["time"]) and log.types["time"].unit
    for name in log.extras:
        log.extra_types[name] = rng.choice((pa.int64(), pa.string()))
    for _ in range(count):
        tick = (start + rng.randint(0, span)) * ticks + rng.choice((0, 0, rng.randrange(ticks)))
        if coarse in ("s", "ms"):
            tick -= tick % (ticks // TICKS[coarse])
        row = Row(rng.choice(ids["user"]), rng.choice(ids["item"]), tick, None)
        row.basket = rng.choice(ids["basket"]) if "basket" in log.columns else None
        row.event = rng.choice(("buy", "view", "BUY", None)) if "event" in log.columns else None
        row.extra = {name: _extra(rng, log.extra_types[name], log.kind) for name in log.extras}
        row.written = say_time(log, tick, rng)
        log.rows.append(row)
    if rng.random() < 0.35:
        for row in rng.sample(log.rows, rng.randint(1, 1 + count // 6)):
            spoil(rng, log, row)


def spoil(rng: random.Random, log: Log, row: Row) -> None:
    """Make a row bad, in one of the ways that docs/data.md lists."""
    way = rng.choice(("user", "item", "time", "time", "early", "late") + (("fields",) if log.kind == "csv" else ()))
    arrow, ticks = log.types.get("time"), TICKS[log.unit]
    text = log.kind != "parquet" or arrow == pa.string()
    row.reason = way
    if way in ("user", "item"):
        setattr(row, way, None if not text or rng.random() < 0.5 or log.kind == "csv" else "")
        if log.kind == "parquet":
            setattr(row, way, None)
    elif way == "fields":
        few = rng.random() < 0.5
        row.raw = log.delimiter.join(
            ["1"] * (2 if few else len(log.roles) + len(log.extras) + rng.randint(1, 3))
        ).encode()
    elif way == "time":
        wrong = ("soon", "", "nan", "inf", "-inf", "1e300", "12:30", "2020-13-45", "--", "1600000000x")
        row.written = rng.choice(wrong) if text else None
        if arrow is not None and pa.types.is_floating(arrow):
            row.written = rng.choice((None, float("nan"), float("inf"), 1e300))
    else:
        tick = rng.choice((0, -5 * ticks)) if way == "early" else (FAR_FUTURE + rng.choice((0, 5000))) * ticks
        if log.unit == "iso":
            row.written = (
                rng.choice(("1969-12-31 23:59:59", "1970-01-01")) if way == "early" else "2100-01-01T00:00:00Z"
            )
        elif arrow is not None and pa.types.is_timestamp(arrow):
            row.written = tick
        elif arrow is not None and pa.types.is_decimal(arrow):
            row.written = Decimal(tick)
        else:
            row.written = float(tick) if arrow is not None and pa.types.is_floating(arrow) else tick
            row.written = str(tick) if arrow == pa.string() else row.written


def _extra(rng: random.Random, kind: pa.DataType, log_kind: str) -> Any:
    value = rng.randrange(10**6)
    return value if pa.types.is_integer(kind) or log_kind == "json" else f"v{value}"


def _draw_text_format(rng: random.Random, log: Log) -> None:
    if log.kind == "parquet":
        return
    log.delimiter = "\t" if log.kind == "csv" and rng.random() < 0.2 else ","
    for row in log.rows:
        if row.raw is not None:
            row.raw = row.raw.replace(b",", log.delimiter.encode())
    log.line_end = rng.choice(("\n", "\n", "\r\n"))
    log.bom = log.kind == "csv" and rng.random() < 0.15
    log.quoting = rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    log.compression = rng.choice(("", "", "", ".gz", ".zst"))
    log.ascii_json = rng.random() < 0.5


def _draw_files(rng: random.Random, log: Log) -> None:
    """One file, several, folders, or a pattern; beside them what a folder's reader must leave alone."""
    layout, suffix, total = rng.choice(("one", "one", "folder", "nested", "pattern")), log.suffix(), len(log.rows)
    if layout == "one":
        name = rng.choice(("log", "my log", "log'1", "l%20g", "ü", "a#b")) + suffix
        log.files, log.source = [(name, total)], name
        return
    names = sorted({f"part{rng.randrange(30)}{suffix}" for _ in range(rng.randint(2, 4))})
    if layout == "nested":
        names = [f"{rng.choice(('a', 'b', 'a-b'))}/{name}" for name in names]
    deal_rows(rng, log, [f"log/{name}" for name in names])
    log.source = "log/*" + suffix if layout == "pattern" else "log"
    log.decoys = {"log/_SUCCESS": b"", "log/.part0.csv.crc": b"x", "log/notes.txt": b"user,item\n", "log/a.json": b"{}"}


def deal_rows(rng: random.Random, log: Log, names: list[str]) -> None:
    """Spread the rows over files. The source's order is by the parts of a file's path."""
    names = sorted(set(names), key=lambda name: name.split("/"))
    cuts = sorted(rng.randint(0, len(log.rows)) for _ in names[1:])
    counts = [end - begin for begin, end in zip([0, *cuts], [*cuts, len(log.rows)], strict=True)]
    log.files = list(zip(names, counts, strict=True))


def _draw_options(rng: random.Random, log: Log) -> None:
    options, times = log.options, [row.tick // log.options.ticks for row in log.rows if row.tick is not None]
    options.min_user, options.min_item = rng.choice((1, 1, 2, 3, 5)), rng.choice((1, 1, 2, 4))
    options.once = rng.random() < 0.15
    first, last = min(times), max(times)
    if rng.random() < 0.15:
        options.since = rng.randint(first, last)
    if rng.random() < 0.15:
        options.until = rng.randint(first, last) + 1
    if options.since is not None and options.until is not None and options.since >= options.until:
        options.until = None
    options.protocol = rng.choice(("loo-strict", "loo-strict", "loo-paper", "holdout", "next-basket"))
    if options.protocol == "holdout":
        options.window = rng.choice((None, 1, 1 + (last - first) // 5))
        options.cutoff = rng.choice((None, rng.randint(first, last)))


def _array(rows: list[Row], role: str, kind: pa.DataType) -> pa.Array:
    values = [row.written if role == "time" else getattr(row, role) for row in rows]
    if pa.types.is_timestamp(kind):  # ticks are microseconds, Arrow takes its own unit
        values = [None if value is None else value * TICKS[kind.unit] // TICKS["us"] for value in values]
    return pa.array(values, kind)


def _csv_lines(log: Log, rows: list[Row]) -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=log.delimiter, lineterminator=log.line_end, quoting=log.quoting)
    names = [log.columns[role] for role in log.roles]
    writer.writerow([*log.extras, *names] if log.extras_first else [*names, *log.extras])
    parts = [buffer.getvalue().encode()]
    for row in rows:
        if row.raw is not None:
            parts.append(row.raw + log.line_end.encode())
            continue
        buffer.seek(0)
        buffer.truncate()
        values = [row.written if role == "time" else getattr(row, role) for role in log.roles]
        extras = [row.extra[name] for name in log.extras]
        line = [*extras, *values] if log.extras_first else [*values, *extras]
        writer.writerow(["" if value is None else value for value in line])
        parts.append(buffer.getvalue().encode())
    return b"".join(parts)


def _json_lines(log: Log, rows: list[Row]) -> bytes:
    lines = []
    for row in rows:
        pairs = {log.columns[role]: row.written if role == "time" else getattr(row, role) for role in log.roles}
        line = json.dumps(
            {**row.extra, **pairs} if log.extras_first else {**pairs, **row.extra}, ensure_ascii=log.ascii_json
        ).encode()
        lines.append((line if row.raw is None else row.raw) + log.line_end.encode())
    return b"".join(lines)
