"""Names of items from a file, `trope prepare --items FILE`: CSV or Parquet with an id and a name in each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trope.data.printable import printable
from trope.data.sources.files import kind_of

# Columns that are looked for, the first that a file has; the id may also be called as in the log.
IDS = ("item", "item_id", "id")
NAMES = ("name", "item_name", "title")


class ItemNames(NamedTuple):
    """What a file says: names by the text of the original id. repeated: rows with an id that an earlier row has."""

    file: str
    by_id: Mapping[str, str]
    repeated: int

    def described(self, originals: Sequence[int | str]) -> dict[str, str | int]:
        """What `meta.json` records: how many of the dataset's items the file names, and how many ids are not items."""
        items = {str(original) for original in originals}
        unknown = sum(key not in items for key in self.by_id)
        return {"file": self.file, "named": len(self.by_id) - unknown, "unknown": unknown, "repeated": self.repeated}


def read_names(path: Path, item_col: str, name_col: str | None = None) -> ItemNames:
    """Read a file of names; of several rows with one id the first counts, and rows without a name do not.

    item_col: the log's own name for the id's column. name_col: the column of the names, None to look for `NAMES`.
    """
    table = _read(path)
    id_column = _column(path, table.column_names, (item_col, *IDS), "id")
    name_column = _column(path, table.column_names, NAMES if name_col is None else (name_col,), "name")
    kind = table.schema.field(id_column).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{path}: column {id_column!r} must hold integers or text, got {kind}; cast the column")
    by_id: dict[str, str] = {}
    repeated = 0
    ids, names = (table[column].cast(pa.large_string()).to_pylist() for column in (id_column, name_column))
    for original, name in zip(ids, names, strict=True):
        if not original or not name:
            continue
        repeated += original in by_id
        by_id.setdefault(original, printable(name))
    return ItemNames(path.name, by_id, repeated)


def _read(path: Path) -> pa.Table:
    """The table in a file; every field of a CSV file is text."""
    if not path.is_file():
        raise FileNotFoundError(f"--items: there is no file {path}")
    kind = kind_of(path)
    if kind not in ("csv", "parquet"):
        raise ValueError(f"--items: cannot tell what {path.name} holds; give a .csv, .tsv or .parquet file")
    try:
        if kind == "parquet":
            return pq.ParquetFile(path).read()
        parse = pa.csv.ParseOptions(delimiter="\t" if ".tsv" in path.suffixes else ",", newlines_in_values=True)
        with pa.csv.open_csv(path, parse_options=parse) as first:  # its types are guessed; only the header is wanted
            fields = first.schema.names
        convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(fields, pa.large_string()))
        return pa.csv.read_csv(path, parse_options=parse, convert_options=convert)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--items: cannot read {path}: {str(error).splitlines()[0]}") from None


def _column(path: Path, found: list[str], wanted: tuple[str, ...], what: str) -> str:
    """The first of the `wanted` columns that the file has, once."""
    for name in wanted:
        if found.count(name) == 1:
            return name
    named = " or ".join(map(repr, dict.fromkeys(wanted)))
    if path.suffix != ".parquet" and len(found) == 1 and ";" in found[0]:
        raise ValueError(f"--items: {path} has semicolons between its fields; write commas, or tabs in a .tsv file")
    advice = "name it with --name-col" if what == "name" else "rename the one that holds it"
    raise ValueError(
        f"--items: {path} must have one column {named} for the {what}; it has {', '.join(found)}: {advice}"
    )
