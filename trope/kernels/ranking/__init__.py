"""Full-catalogue places of positives by dot product: the one place that decides which implementation runs.

`Catalogue.of` prepares the items once, `places` then ranks a batch of users. What "better" and "equal" mean is defined
in ranking/reference.py and the same in both implementations, to the last bit.

Shape letters: B users, S positives of these users (a row each), V items (ids 1 .. V), T items left out, E width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.ranking import reference
from trope.kernels.ranking.reference import scaled


class Catalogue(NamedTuple):
    """All items, ready to be ranked.

    items_VE: float32 [V + 1, E], scaled; row 0 is padding and never ranked.
    split_VE: bf16 [V, 2 E'], the items' high and low parts side by side (E' is E rounded up), or None for torch.
    norm: the longest item's length, float32 scalar on the device.
    """

    items_VE: Tensor
    split_VE: Tensor | None
    norm: Tensor

    @classmethod
    def of(cls, items_VE: Tensor, backend: Backend = "auto") -> Catalogue:
        """items_VE: float32 [V + 1, E], finite."""
        assert items_VE.dtype == torch.float32 and len(items_VE) > 1
        chosen = resolve_backend(backend, items_VE)
        items_VE = scaled(items_VE[1:], common=True)
        norm = torch.linalg.vector_norm(items_VE, dim=1).amax()
        items_VE = torch.nn.functional.pad(items_VE, (0, 0, 1, 0))
        if chosen == "torch":
            return cls(items_VE, None, norm)
        from trope.kernels.ranking import triton as fused

        return cls(items_VE, fused.split(items_VE[1:]), norm)

    @property
    def backend(self) -> Literal["torch", "triton"]:
        """What `places` will run."""
        return "torch" if self.split_VE is None else "triton"


def places(
    users_BE: Tensor,
    catalogue: Catalogue,
    rows_S: Tensor,
    positives_S: Tensor,
    left_out_T: Tensor | None = None,
    left_offsets_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many items score better than each positive, and how many others the same; both int32 [S]. Never synchronises.

    Args:
        users_BE: float32, finite; any length, since a user's scale does not change the order.
        rows_S, positives_S: int64, the user's row and the item of each positive.
        left_out_T, left_offsets_B: items that are not ranked; row b's are left_offsets_B[b] .. [b+1]. Each item at most
            once and no positive of the row; 0 is skipped, so that a list can be thinned out without changing its shape.
    """
    assert users_BE.dtype == torch.float32 and rows_S.dtype == positives_S.dtype == torch.int64
    assert users_BE.shape[1] == catalogue.items_VE.shape[1]
    users_BE = scaled(users_BE)
    if left_out_T is None or left_offsets_B is None:
        left_out_T, left_offsets_B = rows_S.new_zeros(0), rows_S.new_zeros(len(users_BE) + 1)
    if catalogue.split_VE is None:
        return reference.places(users_BE, catalogue.items_VE, rows_S, positives_S, left_out_T, left_offsets_B)
    from trope.kernels.ranking import triton as fused

    return fused.places(
        users_BE,
        catalogue.items_VE,
        catalogue.split_VE,
        catalogue.norm,
        rows_S,
        positives_S,
        left_out_T,
        left_offsets_B,
    )
