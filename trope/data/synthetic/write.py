"""Stream the calendar shop to Parquet: memory holds a few blocks at a time, and the output is whole or absent."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trope.atomic import atomic_file, atomic_folder, one_line_if_full
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
    single, truth = path.suffix == ".parquet", truth_path(path)

    def may_replace(_: Path) -> None:
        _check_target(path, truth, overwrite)

    may_replace(path)
    with one_line_if_full(path):
        if single:
            # Left first is the inner one: events without their truth may be seen, never events with another's.
            with atomic_file(truth) as new_truth, atomic_file(path) as new_events:
                _write_parts(lambda _: new_events, shop, None, workers, progress)
                new_truth.write_text(_truth_of(shop))
                may_replace(path)
                truth.unlink(missing_ok=True)
        else:
            with atomic_folder(path, may_replace) as folder:
                _write_parts(lambda part: folder / PART.format(part), shop, rows_per_file, workers, progress)
                (folder / TRUTH).write_text(_truth_of(shop))
    return path


def truth_path(path: Path) -> Path:
    """Where the ground truth of the log at `path` is: beside a file, or in a folder."""
    return path.with_suffix(".truth.json") if path.suffix == ".parquet" else path / TRUTH


def _truth_of(shop: CalendarShop) -> str:
    return json.dumps({"config": asdict(shop)} | ground_truth(shop))


def _check_target(path: Path, truth: Path, overwrite: bool) -> None:
    """Refuse to replace what is there, unless asked to and it is a shop's log and nothing more."""
    there = [file for file in (path, truth) if file.exists()]
    if not there:
        return
    if not overwrite:
        raise FileExistsError(f"{there[0]} exists: choose another path or allow overwriting")
    inside = list(path.iterdir()) if path.is_dir() else []
    if path.is_dir() and not inside:
        return
    foreign = sorted(file.name for file in inside if file != truth and not (file.is_file() and _is_part(file)))
    if foreign or not _is_truth(truth):
        why = f"it holds {foreign[0]!r}" if foreign else f"there is no ground truth in {truth}"
        raise FileExistsError(f"{path} is not a generated log: {why}, so it is not replaced; choose another path")


def _is_part(path: Path) -> bool:
    return re.fullmatch(r"part-\d{5,}\.parquet", path.name) is not None


def _is_truth(path: Path) -> bool:
    """Whether a file is the ground truth of a shop."""
    try:
        truth = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return False
    return isinstance(truth, dict) and isinstance(truth.get("config"), dict)


def _write_parts(
    name: Callable[[int], Path], shop: CalendarShop, rows_per_file: int | None, workers: int, progress: bool
) -> None:
    """Write one row group per block, beginning the next file once one holds `rows_per_file` rows.

    name: returns the path of a file by its number.
    """
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
                # Plain columns: dictionaries of millions of ids cost time and save nothing.
                writer = pq.ParquetWriter(name(parts), table.schema, compression="zstd", use_dictionary=False)
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
