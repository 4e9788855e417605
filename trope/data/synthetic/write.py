"""Stream the calendar shop to Parquet: memory holds a few blocks at a time, and the output is whole or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trope.data.synthetic.catalogue import build_catalogue, ground_truth
from trope.data.synthetic.config import CalendarShop
from trope.data.synthetic.events import Events, block_count, generate_block

PART = "part-{:05d}.parquet"
TRUTH = "_ground_truth.json"
"""The underscore keeps readers of Parquet folders from taking it for data."""


def generate_events(shop: CalendarShop, workers: int = 2) -> Iterator[Events]:
    """Yield the blocks of a shop in order; at most `workers + 1` of them are alive at once.

    workers: threads; numpy releases the interpreter lock where the time goes
    """
    catalogue = build_catalogue(shop)
    pending: deque[Future[Events]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for block in range(block_count(shop)):
            pending.append(pool.submit(generate_block, shop, catalogue, block))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def write_events(
    path: Path | str,
    shop: CalendarShop,
    *,
    rows_per_file: int = 20_000_000,
    workers: int = 2,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Write a shop's events as Parquet (user, item, timestamp, basket) with its ground truth beside, and return `path`.

    path: one file if it ends in .parquet, else a folder of part-NNNNN.parquet files
    rows_per_file: about where a folder's next file begins; has no influence on the rows
    """
    path = Path(path)
    if path.suffix not in ("", ".parquet"):
        raise ValueError(
            f"events are written as Parquet, not as {path.suffix}: name a .parquet file or a folder without an ending, "
            f"got {path}"
        )
    single = path.suffix == ".parquet"
    truth = path.with_suffix(".truth.json") if single else path / TRUTH
    _check_target(path, truth, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.mkdir()
    try:
        _write_parts(draft, shop, None if single else rows_per_file, workers, progress)
        (draft / TRUTH).write_text(json.dumps({"config": asdict(shop)} | ground_truth(shop)))
        if single:
            os.replace(draft / TRUTH, truth)
            os.replace(draft / PART.format(0), path)
        else:
            if path.exists():
                shutil.rmtree(path)
            os.replace(draft, path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ValueError(
                f"no space left while writing {path}; nothing was kept, free some and run again"
            ) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _check_target(path: Path, truth: Path, overwrite: bool) -> None:
    """Refuse to replace what is there, unless asked to and it is a shop's log."""
    if not path.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists: choose another path or allow overwriting")
    if path.is_dir() and any(path.iterdir()) and not truth.exists():
        raise FileExistsError(f"{path} is a folder without {TRUTH}, not a generated log: choose another path")


def _write_parts(folder: Path, shop: CalendarShop, rows_per_file: int | None, workers: int, progress: bool) -> None:
    """Write one row group per block, beginning the next file once one holds `rows_per_file` rows."""
    # Imported here, so that the shop itself needs numpy only.
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None
    rows = parts = 0
    bar = tqdm(total=shop.users, unit=" users", unit_scale=True, desc="calendar shop", disable=not progress)
    try:
        for events in generate_events(shop, workers):
            table = pa.table(events._asdict())
            if writer is None:
                path = folder / PART.format(parts)
                # Plain columns: dictionaries of millions of ids cost time and save nothing.
                writer = pq.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False)
                parts += 1
            writer.write_table(table)
            bar.update(int(events.user[-1] - events.user[0]) + 1)
            rows += len(events.user)
            if rows_per_file is not None and rows >= rows_per_file:
                writer.close()
                writer, rows = None, 0
    finally:
        bar.close()
        if writer is not None:
            writer.close()
