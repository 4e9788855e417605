"""The readout by time: some planes of the network's output turn with the moment it speaks for, before the output is
compared with the items.

Plane p of the output h then meets that of an item e as

    |h_p| |e_p| cos(w_p (t - t0) + angle(h_p) - angle(e_p))

so an item's score is a short Fourier series in t with coefficients of its own: the item's popularity over time, as
far as the user's history does not say more. Attention can only weigh what is in the user's own history; this reaches
the whole catalogue. Items do not turn, so any index over their vectors still serves, for any moment (docs/method.md,
departure 4).

Shape letters: T tokens, E width, F turning dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trope.rotary import TRoPE

# Time constants, as parts of the training data's time span T: periods from 2 pi T / 500, an eightieth of it, to pi T.
FASTEST, SLOWEST = 500, 2


class TimeReadout(nn.Module):
    """Turns the first dims of every output by the moment it speaks for.

    Args:
        width: E.
        share: of the planes that turn; at least one does.
        time_span: first and last time of the training events.
        learnable: learn the frequencies.
    """

    def __init__(self, width: int, share: float, time_span: tuple[int, int], learnable: bool = True) -> None:
        super().__init__()
        planes = max(1, round(share * width / 2))
        span = time_span[1] - time_span[0]
        self.turn = TRoPE(
            2 * planes, time_span=time_span, learnable=learnable, rotate_key=False, alpha_init="ones",
            beta_min=span / FASTEST, beta_max=span / SLOWEST, check_values=False,
        )  # fmt: skip

    def forward(self, out_TE: Tensor, in_TE: Tensor, moments_T: Tensor) -> Tensor:
        """The outputs with their first F dims turned, [T, E].

        Args:
            in_TE: what the blocks were given. The turning dims hold what the blocks have added to it: the last item's
                own vector, turned, would point to nothing.
            moments_T: the time each output speaks for, int64.
        """
        turning = self.turn.head_dim
        added = (out_TE[:, :turning] - in_TE[:, :turning])[None, :, None, :]  # one sequence, one head
        moments, _ = self.turn.coordinates_at(moments_T, moments_T, moments_T)
        turned, _ = self.turn.rotate(added, added[:, :, :0], moments[:, None], moments[:, None])  # there are no keys
        return torch.cat((turned[0, :, 0], out_TE[:, turning:]), dim=1)
