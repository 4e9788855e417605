"""Sources that are files: which files a path means, of what kind they are, and which columns they have."""

from __future__ import annotations

import glob
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from trope.data.dates import check_format
from trope.data.sources import parquet
from trope.data.sources.description import TIME_UNITS, Columns, Source
from trope.data.sources.text import header, keys

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".inter": "csv",
    ".dat": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
}
_COMPRESSED = (".gz", ".zst")
# What a first line that is one field may be separated by instead.
_DELIMITERS = (";", "\t", "|", ",")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def find_files(path: str) -> tuple[Path, ...]:
    """The data files that a file, a folder or a glob names, sorted by name. A path that exists is no glob."""
    where = Path(path)
    if where.is_file():
        return (where.absolute(),)
    if where.is_dir():
        # Other tools leave hidden and underscored files beside data, and one .json is rarely a log.
        found = [file for file in where.rglob("*") if file.is_file() and kind_of(file) and file.suffix != ".json"]
        found = [file for file in found if not file.name.startswith((".", "_"))]
        if not found:
            raise FileNotFoundError(f"no CSV, TSV, JSON lines or Parquet file in folder {path}")
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]
        if not found:
            raise FileNotFoundError(f"no file at {path}")
    # A link to another of the files, such as latest.csv, would count its events twice: the file itself comes first.
    once: dict[Path, Path] = {}
    for file in sorted(found, key=lambda file: (file.is_symlink(), file)):
        once.setdefault(file.resolve(), file.absolute())
    return tuple(sorted(once.values()))


def kind_of(path: Path) -> str | None:
    """`csv`, `json` or `parquet`, by the file's suffix; None for any other suffix."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def from_files(name: str, files: tuple[Path, ...], columns: Columns, **options: Any) -> Source:
    """A source of files of one kind, with its columns read and checked. options: other fields of `Source`."""
    kinds = {kind_of(file) for file in files}
    if len(kinds) != 1 or None in kinds:
        listed = ", ".join(sorted({"".join(file.suffixes) or file.name for file in files}))
        raise ValueError(
            f"{name}: cannot tell what {listed} holds; give files of one kind: "
            ".csv, .tsv or .jsonl (each also .gz or .zst), or .parquet"
        )
    kind = kinds.pop()
    assert kind is not None
    if kind != "csv" and "delimiter" in options:
        raise ValueError(f"--delimiter is for CSV files, and {files[0].name} is none")
    if kind == "csv" and "delimiter" not in options:
        options["delimiter"] = "\t" if {".tsv", ".inter"} & set(files[0].suffixes) else ","
    return check_columns(replace(Source(name, kind, columns, files), **options))


def check_columns(source: Source) -> Source:
    """The source with `fields` filled in; refused if a file lacks a column or has one twice."""
    if source.time_unit not in TIME_UNITS:
        raise ValueError(f"time unit must be one of {', '.join(TIME_UNITS)}, got {source.time_unit!r}")
    if source.time_format:
        check_format(source.time_format)
    if source.kind == "json" and source.unnamed:
        source = source.settled(keys(source.files[0]))
    if source.kind in ("json", "table"):
        used = set(source.columns.used().values())
        if source.kind == "json" and len({name.casefold() for name in used}) < len(used):
            raise ValueError(
                f"{source.name}: columns {', '.join(sorted(used))}: some differ only in case, which not every engine "
                "tells apart in JSON; rename one, or convert the log to Parquet"
            )
        return source
    if source.kind == "parquet":
        schemas = [parquet.schema(file) for file in source.files]
        source = source.settled(schemas[0].names)
        for file, found in zip(source.files, schemas, strict=True):
            _check_fields(source, file, tuple(found.names))
        return replace(source, fields=tuple(schemas[0].names), by_file=parquet.check_agreement(source, schemas))
    fields = source.fields
    if source.header:
        for file in source.files:
            names = header(file, source.delimiter[0])
            _check_header(file, names)
            if fields and names != fields:
                raise ValueError(
                    f"{file} has columns {', '.join(names)}, but {source.files[0].name} has {', '.join(fields)}; "
                    "files of one source must agree"
                )
            fields = names
    source = source.settled(fields)
    _check_fields(source, source.files[0], fields)
    return replace(source, fields=fields)


def _check_header(file: Path, fields: tuple[str, ...]) -> None:
    """Refuse a first line that names no columns: one of numbers alone, which would be an event less, or Excel's."""
    if fields and fields[0].casefold().startswith("sep="):
        raise ValueError(
            f"{file} begins with a line for Excel, {fields[0]!r}; remove that line, and pass its character with "
            "--delimiter"
        )
    filled = [field.strip() for field in fields if field.strip()]
    is_counted = filled == [str(place) for place in range(len(filled))]  # how pandas names columns without names
    if filled and not is_counted and all(map(_NUMBER.fullmatch, filled)):
        raise ValueError(
            f"{file}: the first line looks like data, not a header ({', '.join(filled)[:60]}); add a header line such "
            "as user,item,timestamp"
        )


def _check_fields(source: Source, file: Path, fields: tuple[str, ...]) -> None:
    # A header that ends with a delimiter names empty columns, which nobody asks for.
    doubled = sorted({field for field in fields if field and fields.count(field) > 1})
    if doubled:
        raise ValueError(f"{file} has duplicate columns {', '.join(doubled)}; rename or remove one")
    for role, column in source.columns.used().items():
        if column not in fields:
            raise ValueError(
                f"{file} has no column {source.wanted(role)} for the {role}; "
                + (_other_delimiter(source, fields) or _other_case(column, role, fields))
            )


def _other_delimiter(source: Source, fields: tuple[str, ...]) -> str:
    """Advice where the first line is one field that another delimiter would split; else ""."""
    if source.kind != "csv" or len(fields) != 1:
        return ""
    for delimiter in _DELIMITERS:
        if len(parts := fields[0].split(delimiter)) > 2:
            shown = "\\t" if delimiter == "\t" else delimiter
            return f"its first line {fields[0][:60]!r} splits into {len(parts)} columns with --delimiter '{shown}'"
    return ""


def _other_case(column: str, role: str, fields: tuple[str, ...]) -> str:
    """Advice to name another column: those that differ only in case or in spaces around the name, or all."""
    similar = [field for field in fields if field.strip().casefold() == column.casefold()]
    if similar:
        counts = "case counts" if similar[0] == similar[0].strip() else "spaces count"
        shown = " and ".join(map(repr, similar))
        return f"it has {shown}, and {counts}: pass --{role}-col {shlex.quote(similar[0])}"
    shown = ", ".join(field or "(empty)" for field in fields)
    said = f"it has {shown}: name it with --{role}-col"
    if any(len(field) > 8 and _NUMBER.fullmatch(field) for field in fields):  # a time is no name
        said += "; if that line is data, add a header such as user,item,timestamp above it"
    return said
