"""`ExposureLog`: keeps exposures without being in a request's way.

A thread takes rows from a bounded queue and appends them to a journal at once. Every so many rows or seconds it turns
the journal into a Parquet file. A killed process leaves its journal, which the next one finishes. So a kill loses the
rows that the thread had not taken, a few milliseconds of them; a power cut may lose the journal.

When the disk fails, rows wait in memory as far as there is room, and `failure` says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trope.online.exposures import PARQUET, Exposure, schema, write_parquet

ROWS = 200_000
"""Rows of a Parquet file, about."""
SECONDS = 300.0
"""Age of the first row of a journal when it is turned into a Parquet file."""
WAITING = 100_000
"""Rows that may wait in memory; more are lost and counted."""
_RETRY = 1.0
_PREFIX, _SUFFIX = ".exposures-", ".jsonl"


class ExposureLog:
    """Writes exposures into a folder until it is closed. `add` may be called from any thread.

    Args:
        folder: made if it is missing.
        rows, seconds: when a Parquet file is made. waiting: rows that may wait in memory.
        on_kept, on_lost: called with a number of rows when they are in the journal, or lost.
    """

    def __init__(
        self,
        folder: Path,
        rows: int = ROWS,
        seconds: float = SECONDS,
        waiting: int = WAITING,
        on_kept: Callable[[int], None] = lambda _: None,
        on_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        schema()  # before anything is answered: pyarrow may be missing
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows, self.seconds, self.waiting = folder, rows, seconds, waiting
        self.on_kept, self.on_lost = on_kept, on_lost
        self.failure: str | None = None
        self._queue: deque[Exposure] = deque()
        self._wake, self._is_closing = threading.Event(), False
        self._journal: _Journal | None = None
        self._began = 0.0
        finish_journals(folder)
        self._thread = threading.Thread(target=self._work, name="trope-exposures", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[Exposure]) -> None:
        """Keep rows; returns at once."""
        room = max(0, self.waiting - len(self._queue))
        self._queue.extend(rows[:room])
        if len(rows) > room:
            self.on_lost(len(rows) - room)
        self._wake.set()

    def close(self) -> None:
        """Write what waits and end. What a failing disk does not take is lost and counted."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._wake.wait(self._sleep())
            self._wake.clear()
            is_last = self._is_closing  # read after `clear`, so that no end is missed
            try:
                self._append()
                if self._is_due() or is_last:
                    self._turn()
                self.failure = None
            except Exception as error:  # also Arrow's MemoryError: a thread that ended would lose all rows in silence
                self.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                if not is_last:
                    time.sleep(_RETRY)
                    self._wake.set()
            if is_last:
                break
        if self._queue:
            self.on_lost(len(self._queue))
        if self._journal is not None:  # the next start finishes it
            self._journal.close()

    def _sleep(self) -> float | None:
        """Seconds until the journal is old enough; None where there is none."""
        if self._journal is None:
            return None
        return max(0.0, self._began + self.seconds - time.monotonic())

    def _append(self) -> None:
        while self._queue:
            if self._journal is None:
                self._journal, self._began = _Journal(self.folder), time.monotonic()
            rows = [self._queue[place] for place in range(min(len(self._queue), 4_096))]
            self._journal.append(rows)
            for _ in rows:  # only now: rows of a failed append stay in the queue
                self._queue.popleft()
            self.on_kept(len(rows))

    def _is_due(self) -> bool:
        journal = self._journal
        return journal is not None and (journal.rows >= self.rows or time.monotonic() - self._began >= self.seconds)

    def _turn(self) -> None:
        if self._journal is not None:
            _to_parquet(self._journal.path)
            self._journal.remove()
            self._journal = None


class _Journal:
    """A file of one JSON row a line, locked while its process lives."""

    def __init__(self, folder: Path) -> None:
        # Names sort by time and differ between servers that share a folder.
        name = f"{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(4)}"
        self.path, self.rows, self.size = folder / f"{_PREFIX}{name}{_SUFFIX}", 0, 0
        # It is locked before it has its name: nobody may take it for the journal of a dead process.
        unnamed = folder / f".new-{name}"
        self._file = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        _lock(self._file)
        unnamed.rename(self.path)

    def append(self, rows: Sequence[Exposure]) -> None:
        """All rows, or none: a part that a full disk took is cut off again."""
        data = "".join(json.dumps(row._asdict(), separators=(",", ":")) + "\n" for row in rows).encode()
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(f"no space left for {self.path.parent}")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += len(data)
        self.rows += len(rows)

    def remove(self) -> None:
        """Its rows are in a Parquet file."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self._file)


def finish_journals(folder: Path) -> int:
    """Turn journals of processes that were killed into Parquet files; returns how many. Live ones are left alone.

    A journal that goes meanwhile was finished by its own process, or by one that begins beside this one.
    """
    found = 0
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            if _lock(descriptor) and path.exists():
                _to_parquet(path)
                path.unlink(missing_ok=True)
                found += 1
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({' '.join(str(error).split())[:200]}); move it away") from None
        finally:
            os.close(descriptor)
    return found


def _to_parquet(journal: Path) -> None:
    """Write a journal's whole lines as a Parquet file of the same name; done already where the file is there."""
    target = journal.with_name(PARQUET.format(journal.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)))
    if target.exists():
        return
    # Arrow reads the rows without Python's lock, so that requests are answered meanwhile.
    import pyarrow as pa
    from pyarrow import json as pj

    with open(journal, "rb") as file:
        end = _end_of_lines(file)
    if not end:
        return
    with pa.memory_map(str(journal)) as source:
        table = pj.read_json(
            pa.BufferReader(source.read_buffer(end)),
            pj.ReadOptions(block_size=1 << 22),
            pj.ParseOptions(explicit_schema=schema(), unexpected_field_behavior="error"),
        )
    write_parquet(target, table.select(schema().names))


def _end_of_lines(file: Any) -> int:
    """Bytes up to the last line's end: a kill may have cut the last line short."""
    end, step = file.seek(0, os.SEEK_END), 1 << 16
    while end > 0:
        begin = max(0, end - step)
        file.seek(begin)
        place = file.read(end - begin).rfind(b"\n")
        if place >= 0:
            return begin + place + 1
        end = begin
    return 0


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False where another process has it, or where the system has no such locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ModuleNotFoundError, OSError):  # Windows, NFS: nobody can tell whether the journal's process lives
        return False
    return True
