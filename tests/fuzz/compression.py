"""Twists of compressed logs: cut off, with a wrong checksum, or of two members."""

from __future__ import annotations

import gzip
import random
import zlib

from tests.fuzz.logs import Log

Files = dict[str, bytes]


def compressed(log: Log, rng: random.Random) -> bool:
    """The log as .gz or .zst."""
    if rng.random() < 0.8:  # more than what is read to find the header
        log.extras.append("padding")
        for row in log.rows:
            row.extra["padding"] = rng.randbytes(2_000_000 // len(log.rows)).hex()
    if log.compression:
        return True
    log.compression = rng.choice((".gz", ".gz", ".zst"))
    log.files = [(name + log.compression, count) for name, count in log.files]
    if log.source not in ("log",):
        log.source += log.compression
    return True


def truncate(log: Log, files: Files, rng: random.Random) -> bool:
    """A compressed file that ends too early; the longest, where the end is farthest from the header."""
    name = max((name for name, _ in log.files), key=lambda name: len(files[name]))
    cut = rng.choice((1, 4, len(files[name]) // 2, len(files[name]) // 10 + 1))
    files[name] = files[name][:-cut]
    log.must_refuse = True
    return True


def wrong_crc(log: Log, files: Files, rng: random.Random) -> bool:
    """A .gz whose content does not match its checksum, or its length."""
    name = rng.choice([name for name, _ in log.files])
    if not name.endswith(".gz"):
        return False
    content = bytearray(files[name])
    content[-rng.choice((1, 2, 5, 6, 7, 8, len(content) // 2))] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)
    try:
        gzip.decompress(files[name])
    except (OSError, EOFError, ValueError, zlib.error):
        log.must_refuse = True
        return True
    return False


def two_members(log: Log, files: Files, rng: random.Random) -> bool:
    """A .gz of two members, as `cat a.gz b.gz` gives: one log."""
    name = rng.choice([name for name, _ in log.files])
    if not name.endswith(".gz"):
        return False
    content = gzip.decompress(files[name])
    cut = rng.randint(0, len(content))
    files[name] = gzip.compress(content[:cut], mtime=0) + gzip.compress(content[cut:], mtime=0)
    return True
