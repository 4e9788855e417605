"""A table of recommendations as a Parquet or CSV file, written piece by piece: the file is whole or absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from trope.atomic import atomic_file, one_line_if_full
from trope.data.catalogue import Catalogue
from trope.data.folder import Ids

SUFFIXES = (".parquet", ".csv")
Ints = npt.NDArray[np.int64]


class TableWriter(Protocol):
    """Writes pieces of one table; of Arrow's for Parquet and for CSV."""

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""


class AnswerFile:
    """Rows of user_id, moment, rank, item_id, score, and name where the catalogue has names.

    users: original ids of the dataset's users.
    """

    def __init__(self, writer: TableWriter, users: Ids, catalogue: Catalogue, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema
        self._users, self._items = _arrow(users), _arrow(catalogue.item_ids)
        self._names = None if catalogue.item_names is None else _names(catalogue)
        self.rows = 0

    def append(self, moment: int, users_N: Ints, items_N: Ints, scores_N: npt.NDArray[Any], ranks_N: Ints) -> None:
        """Add recommendations at one moment; users are places, items dense ids."""
        places = pa.array(items_N - 1)
        columns = [
            self._users.take(pa.array(users_N)),
            pa.array(np.full(len(users_N), moment, np.int64)).cast(pa.timestamp("s", "UTC")),
            pa.array(ranks_N),
            self._items.take(places),
            pa.array(scores_N),
            *([] if self._names is None else [self._names.take(places)]),
        ]
        cast = [column.cast(field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(cast, schema=self._schema))
        self.rows += len(users_N)


def check_suffix(path: Path) -> None:
    """Refuse a name that says neither Parquet nor CSV, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out {path} must end with {' or '.join(SUFFIXES)}, which says how it is written")
    if path.is_dir():
        raise IsADirectoryError(f"--out {path} is a folder; name a file")


@contextmanager
def answer_file(path: Path, users: Ids, catalogue: Catalogue) -> Iterator[AnswerFile]:
    """Open a file for recommendations; it appears under its name, or replaces one, when the block ends well."""
    schema = pa.schema(
        [
            ("user_id", _kind(users)),
            ("moment", pa.timestamp("s" if path.suffix.lower() == ".csv" else "ms", "UTC")),  # Parquet has no seconds
            ("rank", pa.int32()),
            ("item_id", _kind(catalogue.item_ids)),
            ("score", pa.float32()),
            *([] if catalogue.item_names is None else [("name", pa.large_string())]),
        ]
    )
    writer = pq.ParquetWriter if path.suffix.lower() == ".parquet" else pa.csv.CSVWriter
    with one_line_if_full(path), atomic_file(path) as partial, writer(str(partial), schema) as open_writer:
        yield AnswerFile(open_writer, users, catalogue, schema)


def _kind(ids: Ids) -> pa.DataType:
    return pa.large_string() if len(ids.arrays("")) > 1 else pa.int64()


def _arrow(ids: Ids) -> pa.Array:
    """Ids as one Arrow array, without a copy of their text."""
    values, *ends = ids.arrays("").values()
    if not ends:
        return pa.array(values)
    offsets = np.concatenate(([0], ends[0]))
    return pa.LargeStringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values)))


def _names(catalogue: Catalogue) -> pa.Array:
    """Every item's name, its id where it has none."""
    assert catalogue.item_names is not None
    names = _arrow(catalogue.item_names)
    return pc.if_else(pc.equal(names, ""), _arrow(catalogue.item_ids).cast(pa.large_string()), names)
