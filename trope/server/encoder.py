"""Vectors of histories at moments. The one place where the server runs the network.

Today every pair of a history and a moment is encoded anew. A model that remembers histories (one encode, many moments)
belongs here, and only here: rows that share a history are listed as such.

Shapes: H histories, N rows (a history and a moment each), L positions, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trope.data.windows import last_events
from trope.evaluate.ranking import check_finite
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.recommender import SequentialRecommender
from trope.server.people import Person


class Cut(NamedTuple):
    """The first `length` events of a person, at least one."""

    person: Person
    length: int


class Rows(NamedTuple):
    """N rows to score: places in `cuts`, and Unix seconds."""

    cuts: Sequence[Cut]
    cut_N: Sequence[int]
    moments_N: Sequence[int]


def vectors_at(model: SequentialRecommender, rows: Rows, device: torch.device) -> Tensor:
    """Unit vectors, float32 [N, E]."""
    most = model.config.model.max_len
    windows = [slice(max(0, length - most), length) for _, length in rows.cuts]
    items_T, times_T = (
        torch.from_numpy(
            np.concatenate([getattr(cut.person, name)[w] for cut, w in zip(rows.cuts, windows, strict=True)])
        )
        for name in ("items", "times")
    )
    lengths = torch.tensor([window.stop - window.start for window in windows])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    cut_N, moments_N = torch.tensor(rows.cut_N), torch.tensor(rows.moments_N)
    parts = []
    for part in torch.arange(len(cut_N)).split(USERS_AT_A_TIME):
        begins, ends = offsets[cut_N[part]], offsets[cut_N[part] + 1]
        history = last_events(items_T, times_T, begins, ends, int((ends - begins).max()))
        parts.append(model.encode_last(*(x.to(device) for x in (*history, moments_N[part]))).float())
    out_NE = torch.cat(parts)
    check_finite(out_NE, "outputs")
    return out_NE
