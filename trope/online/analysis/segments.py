"""Segments: a file that says for each user which group it belongs to, one column for each way to divide users."""

from __future__ import annotations

from pathlib import Path

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trope.data.engines.base import Engine
from trope.data.sources.files import kind_of

NOWHERE = "(none)"
"""The segment of users whom the file does not name."""
MOST_VALUES = 20


def add_segments(users: ir.Table, file: Path, user_col: str, work: Path, engine: Engine) -> tuple[ir.Table, list[str]]:
    """The users with one text column for each segment column, and these columns' names.

    file: CSV or Parquet with `user_col`. work: a folder for a copy that every engine reads alike.
    """
    table = _read(file)
    if user_col not in table.column_names:
        raise ValueError(f"{file} has no column {user_col!r} for the user; it has {', '.join(table.column_names)}")
    names = [name for name in table.column_names if name != user_col]
    if not names:
        raise ValueError(f"{file} has no column besides {user_col!r}; a segment is a column of its own")
    columns = {"user": table[user_col].cast(pa.string())}
    for place, name in enumerate(names):
        column = table[name].cast(pa.string())
        if len(column.unique()) > MOST_VALUES:
            raise ValueError(f"{file}: column {name!r} has over {MOST_VALUES} values; group them into fewer segments")
        columns[f"segment_{place}"] = column.fill_null(NOWHERE)
    if len(columns["user"].unique()) < table.num_rows:
        raise ValueError(f"{file} names a user twice; a user belongs to one segment of each column")
    copy = work / "segments.parquet"
    pq.write_table(pa.table(columns), copy)
    joined = users.join(engine.scan((copy,), tuple(columns)), "user", how="left")
    keys = [f"segment_{place}" for place in range(len(names))]
    joined = joined.mutate(**{key: joined[key].fill_null(NOWHERE) for key in keys})
    return engine.keep(joined), names


def _read(file: Path) -> pa.Table:
    kind = kind_of(file)
    if not file.is_file():
        raise FileNotFoundError(f"no file of segments at {file}")
    try:
        if kind == "parquet":
            return pq.read_table(file)
        if kind == "csv":
            text = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
            delimiter = "\t" if file.suffix == ".tsv" else ","
            return pyarrow.csv.read_csv(
                file, convert_options=text, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter)
            )
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {file}: {error}; segments are a CSV or Parquet file") from None
    raise ValueError(f"cannot tell what {file} holds; segments are a .csv or .parquet file")
