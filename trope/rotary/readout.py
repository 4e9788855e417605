"""The readout by time: some planes of the network's output turn with the moment it speaks for, before the output is
compared with the items.

Plane p of the output h then meets that of an item e as

    |h_p| |e_p| cos(w_p (t - t0) + angle(h_p) - angle(e_p))

so an item's score is a short Fourier series in t with coefficients of its own: the item's popularity over time, as
far as the user's history does not say more. Attention can only weigh what is in the user's own history; this reaches
the whole catalogue. Items do not turn, so any index over their vectors still serves, for any moment (docs/method.md,
departure 4).

Shape letters: T tokens, E width, W dims of the start that are given, F turning dims, P turning planes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.readout import Curve, add_turned
from trope.rotary import checks
from trope.rotary.base import set_constant
from trope.rotary.trope import TRoPE

# Time constants, as parts of the training data's time span T: periods from 2 pi T / 500, an eightieth of it, to pi T.
FASTEST, SLOWEST = 500, 2


class TimeReadout(nn.Module):
    """Turns the first dims of every output by the moment it speaks for: `(out, moments) -> out`, same shape.

    A drop-in for any model that scores items by a dot product: `readout(out, moments) @ items.T`.

    Args:
        width: of the output, E.
        time_span: first and last time of the training events, Unix seconds.
        share: of the planes that turn; at least one does. More are more to learn about every item.
        learnable: learn the frequencies.
        check_values: read the moments to refuse bad ones.
        until: turn until this moment, where it is later than the time span that a checkpoint brings along. An update
            has learned what comes between; the coordinates stay those of the first training.
    """

    def __init__(
        self,
        width: int,
        time_span: tuple[int, int],
        share: float = 0.25,
        learnable: bool = True,
        check_values: bool = True,
        until: int | None = None,
    ) -> None:
        super().__init__()
        width = checks.check_whole("width", width)
        if width < 2 or not 0 < share <= 1:
            raise ValueError(f"a readout needs a width of 2 at least and a share in (0, 1], got {width} and {share}")
        first, last = checks.check_span(time_span)
        self.width, self.check_values, self.until = width, check_values, until
        # Shared, so that a rotation of one side has no coefficients of the other; not rotate_key=False, which would
        # form its frequencies anew at every call (TRoPE.is_linear).
        self.turn = TRoPE(
            2 * turning_planes(width, share), time_span=(first, last), learnable=learnable, share_alpha=True,
            alpha_init="ones", beta_min=(last - first) / FASTEST, beta_max=(last - first) / SLOWEST,
            check_values=False,
        )  # fmt: skip
        self.register_load_state_dict_post_hook(_follow_span)
        _follow_span(self)

    def forward(self, out: Tensor, moments: Tensor, start: Tensor | None = None) -> Tensor:
        """The outputs with their first F dims turned.

        Args:
            out: [.., E].
            moments: the time each output speaks for, int64 Unix seconds, [..].
            start: [.., E] what a residual stream began with. The turning dims then hold what was added to it: the last
                item's own vector, turned, would point to nothing.
        """
        checks.check_time_dtype(moments, "moments")
        if out.shape != (*moments.shape, self.width):
            raise ValueError(
                f"out must be [.., {self.width}] with a moment for each vector, got {tuple(out.shape)} and moments "
                f"{tuple(moments.shape)}"
            )
        for name, x in (("out", out), ("start", start)):
            if x is not None:
                checks.check_float(x, name)
        if start is not None and start.shape != out.shape:
            raise ValueError(f"start must be of out's shape {tuple(out.shape)}, got {tuple(start.shape)}")
        if self.check_values and checks.can_read_values(moments):
            checks.check_time_values(moments, name="moments")
        turning = self.turn.head_dim
        added = out[..., :turning] if start is None else out[..., :turning] - start[..., :turning]
        coords = self.curve().coordinates(moments)
        x = added.reshape(1, -1, 1, turning)  # one sequence, one head, and no keys
        turned, _ = self.turn.rotate(x, x[:, :, :0], coords.reshape(1, 1, -1), coords.reshape(1, 1, -1))
        return torch.cat((turned.view(added.shape).to(out.dtype), out[..., turning:]), dim=-1)

    def of_sum(
        self, x_TE: Tensor, delta_TE: Tensor | None, start_TW: Tensor | None, moments_T: Tensor, late: Late = IN_PLACE
    ) -> Tensor:
        """`forward` of x + delta, in one pass over memory: the end of a residual stream that began with `start_TW`.

        start_TW: its first dims are enough, W from F to E. The caller has checked the moments.
        """
        return add_turned(x_TE, delta_TE, start_TW, moments_T, self.curve(), late=late)

    def curve(self) -> Curve:
        """What turns the planes. Coordinates are seconds from the middle of the training data."""
        turns = self.turn.turns()
        slopes_P = None if turns.slopes_q is None else turns.slopes_q[0]
        # Held at the ends of what was learned: nobody has learned what comes after, and a curve that turns on would
        # say what was popular a period ago.
        ends = self.get_buffer("earliest"), self.get_buffer("latest")
        return Curve(turns.freqs_q[0], slopes_P, turns.deltas_q, self.turn.get_buffer("t0"), *ends)


def turning_planes(width: int, share: float) -> int:
    """How many planes of an output turn: a share of them, at least one."""
    return min(max(1, round(share * width / 2)), width // 2)


def _follow_span(module: nn.Module, _: object = None) -> None:
    """The bank and the ends follow from the time span, which a checkpoint brings along."""
    assert isinstance(module, TimeReadout)
    if module.turn.get_buffer("span").is_meta:  # no values yet: a checkpoint will bring them
        return
    span = int(module.turn.get_buffer("span"))
    module.turn.set_bank(span / FASTEST, span / SLOWEST)
    until = 0 if module.until is None else module.until - int(module.turn.get_buffer("t0"))
    set_constant(module, "earliest", torch.tensor(-(span // 2)))
    set_constant(module, "latest", torch.tensor(max(span - span // 2, until)))
