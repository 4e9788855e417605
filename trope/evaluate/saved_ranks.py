"""Saved ranks: what `trope train` and `trope evaluate` leave in the run folder, so that `trope compare` needs no model.

RUN/ranks-SPLIT.npz, plain arrays and nothing to unpickle:

    users    int64 [U]     in rising order
    offsets  int64 [U+1]   user u owns ranks offsets[u] .. offsets[u+1]
    ranks    float64 [S]   of the positives, from 1, ties counted half
    ties     int64 [S]     other items with the same score
    about    JSON text     what was ranked: see `About`; and `model`, the SHA-256 of best/config.json, which has that of
                           the weights, so that ranks of another run are refused
"""

from __future__ import annotations

import json
import struct
import tokenize
import typing
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trope.atomic import atomic_file
from trope.config import Config
from trope.data.folder import sha256_of
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate.evaluation import EvalResult
from trope.evaluate.metrics import Floats, Ints, Places
from trope.runs import BEST, MODEL_CONFIG, check_kinds, parse_json, ranks_path

_ARRAYS = {"users": np.int64, "offsets": np.int64, "ranks": np.float64, "ties": np.int64}
# What numpy raises for files that are not, or no longer, an archive of these arrays.
_UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError, SyntaxError,
    OverflowError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """What ranks must have in common to be compared.

    checksum: of the dataset. protocol: its name. split: valid or test. filter_seen: what the ranking left out;
    max_len: the history's length, which decides what `filter_seen = window` means.
    """

    checksum: str
    protocol: str
    split: str
    filter_seen: str
    max_len: int

    @classmethod
    def of(cls, data: Sequences | Stream, split: str, config: Config) -> About:
        """Of a split of a dataset, ranked as a config says."""
        return cls(data.meta["checksum"], data.protocol.name, split, config.eval.filter_seen, config.model.max_len)

    def difference(self, other: About) -> str | None:
        """The first reason why ranks of these two cannot be compared, or None."""
        for name in ("checksum", "split", "filter_seen", "max_len"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and (name != "max_len" or self.filter_seen == "window"):
                return f"{name} {mine} and {theirs}"
        return None


def save(run: Path, result: EvalResult, about: About) -> Path:
    """Write the ranks into the run folder, whole or not at all."""
    path = ranks_path(run, about.split)
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.savez_compressed(
            file,
            users=result.users,
            offsets=result.offsets,
            ranks=result.ranks,
            ties=result.places.ties,
            about=np.array(json.dumps({**asdict(about), "model": _model_of(run)})),
        )
    return path


def load(run: Path, split: str) -> tuple[EvalResult, About]:
    """Read what `save` wrote."""
    path = ranks_path(run, split)
    if not path.is_file():
        raise FileNotFoundError(
            f"{run} has no ranks of split {split!r}; run `trope evaluate {run} --split {split}` first"
        )
    again = f"run `trope evaluate {run} --split {split}` again"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            users, offsets, ranks, ties = (arrays[name].astype(dtype) for name, dtype in _ARRAYS.items())
            described = parse_json(str(arrays["about"]).encode())
        model = described.pop("model", None)  # older versions did not save it
        about = About(**described)
        check_kinds(path, described, typing.get_type_hints(About), again)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged or foreign: {error}; {again}") from None
    if about.split != split or not _fit_together(users, offsets, ranks, ties):
        raise ValueError(f"{path} is damaged or foreign: its arrays do not fit together; {again}")
    if model is not None and _model_of(run) not in (None, model):
        raise ValueError(f"{path} has the ranks of another model than {run / BEST}; {again}")
    better = np.rint(ranks - 1 - ties / 2).astype(np.int64)
    return EvalResult(users, Places(better, ties, offsets)), about


def _model_of(run: Path) -> str | None:
    """What tells the model of a run from others; None for a run without one."""
    path = run / BEST / MODEL_CONFIG
    return sha256_of(path) if path.is_file() else None


def _fit_together(users: Ints, offsets: Ints, ranks: Floats, ties: Ints) -> bool:
    """Whether every user, in rising order, owns ranks from 1 on."""
    return bool(
        all(array.ndim == 1 for array in (users, offsets, ranks, ties))
        and len(users) + 1 == len(offsets)
        and offsets[0] == 0
        and offsets[-1] == len(ranks) == len(ties)
        and (np.diff(offsets) > 0).all()
        and (np.diff(users, prepend=-1) > 0).all()
        and np.isfinite(ranks).all()
        and (ties >= 0).all()
        and (ranks >= 1 + ties / 2).all()
    )
