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
    if twice := sorted({name for name in table.column_names if table.column_names.count(name) > 1}):
        raise ValueError(f"{file} has two columns {twice[0]!r}; give each column a name of its own")
    if user_col not in table.column_names:
        raise ValueError(f"{file} has no column {user_col!r} for the user; it has {', '.join(table.column_names)}")
    names = [name for name in table.column_names if name != user_col]
    if not names:
        raise ValueError(f"{file} has no column besides {user_col!r}; a segment is a column of its own")
    columns = {"user": _text(table, user_col, file)}
    if columns["user"].null_count:
        raise ValueError(f"{file} has {columns['user'].null_count:,} rows without {user_col!r}; mend or remove them")
    for place, name in enumerate(names):
        column = _text(table, name, file)
        if len(column.unique()) > MOST_VALUES:
            raise ValueError(f"{file}: column {name!r} has over {MOST_VALUES} values; group them into fewer segments")
        columns[f"segment_{place}"] = column.fill_null(NOWHERE)
    if len(columns["user"].unique()) < table.num_rows:
        raise ValueError(f"{file} names a user twice; a user belongs to one segment of each column")
    copy = work / "segments.parquet"
    pq.write_table(pa.table(columns), copy)
    divided = engine.scan((copy,), tuple(columns))
    if not users.join(divided, "user", how="semi").count().to_pyarrow().as_py():
        some = [str(each)[:60] for each in (columns["user"][0], users.user.min().to_pyarrow())]
        raise ValueError(
            f"no exposed user is in {file}: it has users such as {some[0]!r} in column {user_col!r}, and the exposures "
            f"such as {some[1]!r}; are user ids written alike?"
        )
    joined = users.join(divided, "user", how="left")
    keys = [f"segment_{place}" for place in range(len(names))]
    joined = joined.mutate(**{key: joined[key].fill_null(NOWHERE) for key in keys})
    return engine.keep(joined), names


def _text(table: pa.Table, name: str, file: Path) -> pa.ChunkedArray:
    try:
        return table[name].cast(pa.string())
    except pa.ArrowException:
        raise ValueError(
            f"{file}: column {name!r} is {table[name].type}, and not all of it can be written as text; cast it first"
        ) from None


def _read(file: Path) -> pa.Table:
    kind = kind_of(file)
    if not file.is_file():
        raise FileNotFoundError(f"no file of segments at {file}")
    try:
        if kind == "parquet":
            return pq.read_table(file)
        if kind == "csv":
            parse = pyarrow.csv.ParseOptions(delimiter="\t" if file.suffix == ".tsv" else ",")
            with pyarrow.csv.open_csv(file, parse_options=parse) as reader:
                names = reader.schema.names
            # Everything is text: "007" is no 7, and NA is Namibia.
            text = pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
            )
            return pyarrow.csv.read_csv(file, convert_options=text, parse_options=parse)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"cannot read {file}: {' '.join(str(error).split())[:200]}; segments are a CSV or Parquet file"
        ) from None
    raise ValueError(f"cannot tell what {file} holds; segments are a .csv or .parquet file")
