"""Which items an answer may hold: those of a list, or all but those of a list.

Ids that the model does not know are ignored: a shop's stock has newer items than the model, and what the model does not
know it never recommends. A list to allow without one known item is refused.

Shapes: B users, V items (ids 1 .. V), W items of a tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.catalogue import Catalogue
from trope.evaluate.ranking import Cells

Ints = npt.NDArray[np.int64]


class LeftOut(NamedTuple):
    """What is not ranked: pairs of a user and an item, and for everybody the items that are False in `ranked_V`."""

    cells: Cells
    ranked_V: Tensor | None  # bool [V + 1]; None ranks all

    def leave_out(self, tile_BW: Tensor, first: int) -> None:
        """Give them the score -inf, in place; tile_BW: scores of the items from `first` on."""
        self.cells.leave_out(tile_BW, first)
        if self.ranked_V is not None:
            tile_BW.masked_fill_(~self.ranked_V[first : first + tile_BW.shape[1]], -torch.inf)


def known_items(catalogue: Catalogue, originals: Iterable[Any] | None, name: str) -> Ints | None:
    """Dense ids of the items of a list that the model knows; name: of the list, for messages."""
    if originals is None:
        return None
    if isinstance(originals, str | bytes) or not isinstance(originals, Iterable):
        what = "the text " if isinstance(originals, str | bytes) else ""
        raise ValueError(f"{name} must be a list of item ids, got {what}{originals!r}; put it into a list")
    found = [item.item() if isinstance(item, np.generic) else item for item in originals]
    kind = str if catalogue.is_text else int
    wrong = next((item for item in found if not isinstance(item, kind) or isinstance(item, bool)), None)
    if wrong is not None:
        wanted = "text" if catalogue.is_text else "integers"
        raise ValueError(f"{name} must hold {wanted}, as the item ids of the training data, got {wrong!r}; cast them")
    dense = catalogue.dense(found)
    known = dense[dense > 0]
    if name == "allow" and not len(known):
        raise ValueError(
            f"none of the {len(found):,} items of allow is among the model's {len(catalogue):,}; "
            "allow at least one that the model knows, or leave the list out"
        )
    return known


def ranked_items(allow: Any, deny: Any, num_items: int, device: torch.device) -> Tensor | None:
    """Which items may be ranked, bool [V + 1]; None for all. allow, deny: dense ids, or None for no list."""
    if allow is None and deny is None:
        return None
    ranked_V = torch.full((num_items + 1,), allow is None)
    for name, items in (("allow", allow), ("deny", deny)):
        if items is not None:
            ranked_V[_dense(items, num_items, name)] = name == "allow"
    return ranked_V.to(device)


def _dense(items: Any, num_items: int, name: str) -> Tensor:
    found = np.asarray(items)
    if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(f"{name} must be a list of dense item ids, got {found.dtype} of shape {found.shape}")
    if len(found) and not 1 <= found.min() <= found.max() <= num_items:
        raise ValueError(
            f"{name} must hold dense item ids from 1 to {num_items:,}, got {found.min()} to {found.max()}; "
            "catalogue.dense gives them, and 0 for an item that the model does not know"
        )
    return torch.from_numpy(found.astype(np.int64))
