"""Runs `trope` commands in one process, as `python -m trope` would; the fuzzers start it and speak JSON lines to it.

One process for many commands, since importing torch takes longer than most cases. It must run with versions of trope
that are laid out differently, so it knows of the package only its command and the class `Sequences`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

# A damaged size must end in an error here, not in the machine's last memory.
MEMORY = 12 << 30


def main() -> None:
    """Answer requests until standard input ends. Argument `spark`: start one Spark session for all of them."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if "spark" in sys.argv[1:]:
        _start_spark()
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    trace, result = "", None
    with _captured() as texts:
        try:
            if "load" in request:
                result, code = _load(request["load"]), 0
            else:
                code = _command(request["words"])
        except (ValueError, OSError) as error:  # `load` only: a command turns these into a line itself
            print(f"trope: {error}", file=sys.stderr)
            code = 2
        except BaseException:  # whatever comes out here, a user would see as a traceback
            trace, code = traceback.format_exc(), 1
    out, err = texts
    seconds = time.monotonic() - begun
    return {"code": code, "out": out, "err": err, "trace": trace, "result": result, "seconds": seconds}


def _command(words: list[str]) -> int:
    try:
        from trope.cli.main import main
    except ModuleNotFoundError:  # before it was a package
        from trope.cli import main
    sys.argv = ["trope", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _load(folder: str) -> dict[str, Any]:
    """What `Sequences.load` says is in a prepared folder: the arrays' hash, and whether they are possible at all."""
    from trope.data.sequences import Sequences

    data = Sequences.load(folder)
    items, times, offsets = (tensor.numpy() for tensor in (data.items, data.times, data.offsets))
    parts = [tensor.numpy() for tensor in (data.train_end, data.valid_end, data.test_start, data.test_end)]
    arrays = [items, times, offsets, *parts]
    ids = [(name, found.to_list()) for name in ("user_ids", "item_ids", "item_names") if (found := data.ids(name))]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays) + repr(ids).encode()).hexdigest()
    lengths = offsets[1:] - offsets[:-1]
    first = offsets[:-1][lengths > 0]
    steps = times[1:] - times[:-1]
    steps[first[1:] - 1] = 0  # from one user to the next, time may go back
    sizes = {name: len(values) for name, values in ids}
    possible = {
        "items": int(items.min()) >= 1 and int(items.max()) <= data.num_items,
        "times": int(times.min()) > 0 and int(times.max()) < 4_102_444_800,
        "times in order": len(steps) == 0 or int(steps.min()) >= 0,
        "offsets": int(lengths.min()) >= 0 and int(offsets[-1]) == len(items) == len(times),
        "splits": all(int(part.min()) >= 0 and bool((part <= lengths).all()) for part in parts)
        and bool((parts[0] <= parts[1]).all() and (parts[2] <= parts[3]).all()),
        "ids": sizes.get("item_ids", data.num_items) == data.num_items
        and sizes.get("user_ids", data.num_users) == data.num_users,
    }
    return {"digest": digest, "impossible": [name for name, holds in possible.items() if not holds]}


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """A list that gets standard output and standard error when the block ends, also what C code wrote."""
    texts: list[str] = []
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        # Python's own streams may not be those of the process: a test runner has others.
        with open(1, "w", closefd=False) as to_out, open(2, "w", closefd=False) as to_err:
            try:
                with contextlib.redirect_stdout(to_out), contextlib.redirect_stderr(to_err):
                    yield texts
            finally:
                to_out.flush()
                to_err.flush()
                for number, descriptor in zip((1, 2), kept, strict=True):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))


def _start_spark() -> None:
    """Blocks of 2 kB cut even a small CSV into many tasks, dealt out of order."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "OFF").config("spark.sql.shuffle.partitions", "3")
    builder = builder.config("spark.sql.files.maxPartitionBytes", "2048").config("spark.sql.files.openCostInBytes", "0")
    builder.config("spark.sql.warehouse.dir", tempfile.mkdtemp(prefix="trope-fuzz-warehouse-")).getOrCreate()


if __name__ == "__main__":
    main()
