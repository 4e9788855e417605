"""Where sequences lie among flat tokens, for padded and jagged batches alike.

Shape letters: B sequences, L positions, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SequenceBounds(NamedTuple):
    """Sequence b is the tokens starts[b] .. starts[b] + lengths[b]; both are contiguous, as kernels read them.

    max_len: length of the longest sequence or more, known on the host.
    is_padded: the tokens are a padded batch [B, max_len], row by row.
    is_complete: every token belongs to a sequence, so kernels need not clear anything outside.
    """

    starts_B: Tensor
    lengths_B: Tensor
    max_len: int
    is_padded: bool = False
    is_complete: bool = False

    @classmethod
    def padded(cls, lengths_B: Tensor, max_len: int) -> SequenceBounds:
        """The bounds of a right-padded batch [B, max_len], flattened."""
        starts_B = torch.arange(len(lengths_B), device=lengths_B.device) * max_len
        return cls(starts_B, lengths_B.contiguous(), max_len, is_padded=True)

    @classmethod
    def jagged(cls, offsets: Tensor, max_len: int) -> SequenceBounds:
        """The bounds of sequences one behind the other, offsets [B + 1]."""
        return cls(offsets[:-1].contiguous(), offsets.diff(), max_len, is_complete=True)

    def row_of(self, token_T: Tensor) -> Tensor:
        """Row of each token. Tokens outside any sequence get the next row, possibly B."""
        if self.is_padded:
            return token_T // self.max_len
        return torch.searchsorted(self.starts_B + self.lengths_B, token_T, right=True)  # passes over empty ones

    def places(self) -> tuple[Tensor, Tensor]:
        """The token at each place of a padded batch [B, L], and which places exist; missing places get token 0."""
        index_L = torch.arange(self.max_len, device=self.starts_B.device)
        exists_BL = index_L < self.lengths_B[:, None]
        return torch.where(exists_BL, self.starts_B[:, None] + index_L, 0), exists_BL
