"""Which rows of a global batch are a process's: about as many tokens for each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def token_part(ends: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """A process's rows of a global batch, so that all have about as many tokens: from the first until before the last.

    ends: running sum of the rows' tokens. A cut falls on the row's edge that is nearest to the even share.
    """
    edges = [0, *ends]

    def cut(process: int) -> int:
        wanted = edges[-1] * process / size
        after = bisect_right(edges, wanted)
        if after == len(edges):
            return len(ends)
        return after - 1 if wanted - edges[after - 1] <= edges[after] - wanted else after

    return (0 if rank == 0 else cut(rank)), (len(ends) if rank == size - 1 else cut(rank + 1))
