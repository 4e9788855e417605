"""Number the baskets of a stream of events."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Baskets:
    """Numbers the baskets of a stream of events; a basket begins where the basket id or the user changes."""

    def __init__(self, offsets: np.ndarray) -> None:
        self._offsets = offsets
        self._seen = 0  # events so far
        self._count = 0  # baskets so far
        self._last: pa.Array | None = None
        self._originals: list[pa.Array] = []

    def number(self, ids: pa.Array) -> np.ndarray:
        """The basket numbers of the next events."""
        before = pa.concat_arrays([self._last if self._last is not None else ids[:1], ids[:-1]])
        begins = pc.not_equal(ids, before).to_numpy(zero_copy_only=False)
        low, high = np.searchsorted(self._offsets, [self._seen, self._seen + len(ids)])
        begins[self._offsets[low:high] - self._seen] = True
        numbers = self._count - 1 + np.cumsum(begins)
        if numbers[-1] > np.iinfo(np.int32).max:
            raise ValueError("there are more than 2,147,483,647 baskets; prepare without --basket-col")
        self._originals.append(ids.filter(pa.array(begins)))
        self._seen += len(ids)
        self._count = int(numbers[-1]) + 1
        self._last = ids[-1:]
        return numbers

    def originals(self) -> pa.ChunkedArray:
        """The original id of every basket, by number."""
        return pa.chunked_array(self._originals)
