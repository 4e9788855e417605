"""What Parquet files hold, from their footers: the columns of each file, and whether the files agree."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trope.data.sources.description import Source


def schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {file}: {error}; is it truncated or not Parquet?") from None


def check_agreement(source: Source, schemas: list[pa.Schema]) -> bool:
    """Whether the files must be read one by one: names differ only in case, or integers have several widths.

    Refuses files whose types of one column differ otherwise: an engine would cast all to the first file's type, and
    a cast may round.
    """
    by_file = any(len({name.casefold() for name in found.names}) < len(found.names) for found in schemas)
    for column in source.columns.used().values():
        first = schemas[0].field(column).type
        for file, found in zip(source.files, schemas, strict=True):
            kind = found.field(column).type
            if _read_as(kind) != _read_as(first):
                raise ValueError(
                    f"{file} has column {column!r} as {kind}, but {source.files[0].name} has it as {first}; files of "
                    "one source must agree: cast one of them"
                )
            by_file |= pa.types.is_integer(kind) and kind != first
    return by_file


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_narrow(kind: pa.DataType) -> bool:
    """Whether every value is an int64 too."""
    return pa.types.is_integer(kind) and kind != pa.uint64()


def _read_as(kind: pa.DataType) -> str:
    """The type that values are read as, exactly; types with the same answer can be mixed."""
    if pa.types.is_dictionary(kind):
        return _read_as(kind.value_type)
    if is_text(kind):
        return "text"
    if is_narrow(kind):
        return "int64"
    if pa.types.is_timestamp(kind):
        return f"timestamp, {'ns' if kind.unit == 'ns' else 'us'}, {'UTC' if kind.tz else 'no zone'}"
    return str(kind)
