"""What one forward knows about the times between queries and keys, shared by all blocks. Torch only.

Shape letters: B sequences, L positions, T tokens, P pairs of tiles: a tile of queries with a tile of keys not after it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Runs(NamedTuple):
    """Runs of equal buckets in each row of a tile, for the gradient of the time weights (attention/runs.py).

    counts: number of each row's keys in buckets >= k, uint8 [B, P, rows, RUNS]; not written where the buckets are
        summed one at a time.
    singles: the buckets of a tile that are summed one at a time, first and past the last, int32 [B, P, 2]; equal where
        the counts hold the whole tile.
    """

    counts: Tensor
    singles: Tensor


class Gaps(NamedTuple):
    """Times between queries and keys.

    times_T, query_times_T: int64 seconds, contiguous where kernels read them.
    last: the last bucket; it holds every longer gap.
    buckets: bucket of every pair if they are kept: int64 [B, L, L] for the reference, uint8 for the kernels, else None.
    runs: runs of the kernels' buckets if there will be a backward.
    """

    times_T: Tensor
    query_times_T: Tensor
    last: int
    buckets: Tensor | None
    runs: Runs | None = None
