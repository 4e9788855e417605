"""Sources that are files: which files a path means, of what kind they are, and which columns they have."""

from __future__ import annotations

import csv
import glob
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trope.data.sources.description import TIME_UNITS, Columns, Source

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
_HEADER_BYTES = 1 << 20


def find_files(path: str) -> tuple[Path, ...]:
    """The data files that a file, a folder or a glob names, sorted by name."""
    where = Path(path)
    if where.is_dir():
        # Other tools leave hidden and underscored files beside data, and one .json is rarely a log.
        found = [file for file in where.rglob("*") if file.is_file() and kind_of(file) and file.suffix != ".json"]
        found = [file for file in found if not file.name.startswith((".", "_"))]
        if not found:
            raise FileNotFoundError(f"no CSV, TSV, JSON lines or Parquet file in folder {path}")
    elif where.is_file():
        found = [where]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]
        if not found:
            raise FileNotFoundError(f"no file at {path}")
    return tuple(sorted(file.absolute() for file in found))


def kind_of(path: Path) -> str | None:
    """`csv`, `json` or `parquet`, by the file's suffix; None for any other suffix."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def first_line(path: Path) -> str:
    """The first line of a text file, plain or compressed, without its byte-order mark."""
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            head = stream.read(_HEADER_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {error}; is it truncated or not what its name says?") from None
    try:
        return bytes(head).split(b"\n", 1)[0].decode("utf-8-sig").rstrip("\r")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; convert it first, for example with iconv") from None


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
    if kind == "csv" and "delimiter" not in options:
        options["delimiter"] = "\t" if {".tsv", ".inter"} & set(files[0].suffixes) else ","
    return check_columns(replace(Source(name, kind, columns, files), **options))


def check_columns(source: Source) -> Source:
    """The source with `fields` filled in; refused if a file lacks a column or has one twice."""
    if source.time_unit not in TIME_UNITS:
        raise ValueError(f"time unit must be one of {', '.join(TIME_UNITS)}, got {source.time_unit!r}")
    if source.kind in ("json", "table"):
        return source
    if source.kind == "parquet":
        for file in source.files:
            _check_fields(source, file, _parquet_fields(file))
        return source
    fields = source.fields
    if source.header:
        for file in source.files:
            found = tuple(next(csv.reader([first_line(file)], delimiter=source.delimiter[0]), []))
            if not found:
                what = "is empty" if file.stat().st_size == 0 else "begins with an empty line"
                raise ValueError(f"{file} {what}; its first line must name the columns")
            if fields and found != fields:
                raise ValueError(
                    f"{file} has columns {', '.join(found)}, but {source.files[0].name} has {', '.join(fields)}; "
                    "files of one source must agree"
                )
            fields = found
    _check_fields(source, source.files[0], fields)
    return replace(source, fields=fields)


def _parquet_fields(file: Path) -> tuple[str, ...]:
    try:
        return tuple(pq.read_schema(file).names)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {file}: {error}; is it truncated or not Parquet?") from None


def _check_fields(source: Source, file: Path, fields: tuple[str, ...]) -> None:
    doubled = sorted({field for field in fields if fields.count(field) > 1})
    if doubled:
        raise ValueError(f"{file} has duplicate columns {', '.join(doubled)}; rename or remove one")
    for role, column in source.columns.used().items():
        if column not in fields:
            raise ValueError(
                f"{file} has no column {column!r} for the {role}; it has {', '.join(fields)}: name it with --{role}-col"
            )
