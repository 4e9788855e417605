"""What the three encodings of trope.rotary share: shapes, checks, and the way from coordinates to rotated q and k.

An encoding says where tokens stand (`coordinates`) and how fast planes turn (`frequencies`); everything else is here.

Shape letters: B batch, L positions, T jagged tokens, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from trope.kernels import Backend, rotate_qk
from trope.kernels.rotary import reference as rotary_reference
from trope.kernels.silu_rotate import Turns
from trope.rotary import checks

Layout = Literal["interleaved", "halves"]


class CosSin(NamedTuple):
    """Tables of the query and of the key rotation; the key's sign is already in `sin_k`."""

    cos_q: Tensor
    sin_q: Tensor
    cos_k: Tensor
    sin_k: Tensor


class Rotary(nn.Module, ABC):
    """Rotates q and k: `(q, k, times, lengths=None, t_now=None) -> (q, k)`."""

    def __init__(
        self, head_dim: int, rotary_dim: int | None, layout: Layout, backend: Backend, check_values: bool
    ) -> None:
        super().__init__()
        head_dim = checks.check_whole("head_dim", head_dim)
        rotary_dim = head_dim if rotary_dim is None else checks.check_whole("rotary_dim", rotary_dim)
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 2 and head_dim = {head_dim}, got {rotary_dim}; "
                "an odd head keeps its last dim unrotated with rotary_dim = head_dim - 1"
            )
        checks.check_choice("layout", layout, ("interleaved", "halves"))
        checks.check_choice("backend", backend, ("auto", "torch", "triton"))
        self.head_dim, self.rotary_dim, self.planes = head_dim, rotary_dim, rotary_dim // 2
        self.layout, self.backend, self.check_values = layout, backend, check_values
        self.register_load_state_dict_post_hook(_form_again)

    @abstractmethod
    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Where queries and keys stand: two tensors [C, *shape], shape being [B, L] or [T]; int64 or float64."""

    @abstractmethod
    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The same from what a caller has at hand, all of one shape: times, queries' times, places in sequences."""

    @abstractmethod
    def frequencies(self) -> tuple[Tensor, Tensor]:
        """How fast each plane of the queries and of the keys turns: signed turns per unit, float64 [C, P]."""

    def _form_constants(self) -> Tensor | None:
        """What follows from the settings and from the time span that a checkpoint brings along, float64."""
        return None

    def _keep_constants(self) -> None:
        """Form the constants and keep them, outside of checkpoints. An int64 buffer holds float64 bit for bit: it
        survives .half() and devices without float64."""
        constants = self._form_constants()
        if constants is not None:
            set_constant(self, "_constant_bits", constants.view(torch.int64))

    def _constants(self) -> Tensor:
        """What `_form_constants` gave; on the CPU where the device has no float64 (Apple MPS)."""
        bits = self.get_buffer("_constant_bits")
        return (bits.cpu() if bits.device.type == "mps" else bits).view(torch.float64)

    def paper_phase(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """For the paper's FP32 arithmetic: alpha_q [1, P], signed alpha_k [1, P] and beta [P], float32."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        times: Tensor | None,
        lengths: Tensor | None = None,
        t_now: Tensor | None = None,
        *,
        offsets: Tensor | None = None,
        allow_past: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Rotated q and k, same shapes and dtypes.

        Args:
            q, k: [B, L, H, D] right-padded, or [T, H, D] jagged with `offsets`; k may have fewer heads than q.
            times: Unix seconds of the events, int64 (or float64), [B, L] or [T]; they never fall within a sequence.
            lengths: [B] valid events per row; None means all.
            t_now: [B] the moment the last query of each sequence looks from.
            offsets: [B + 1] where each jagged sequence begins.
            allow_past: accept a `t_now` before the last event.
        """
        checks.check_qk(q, k, times, self.head_dim, jagged=offsets is not None)
        shape = q.shape[:-2]
        self.check_call(shape, times, lengths, t_now, offsets, allow_past)
        coords_q, coords_k = self.coordinates(shape, times, lengths, t_now, offsets)
        if offsets is None:
            return self.rotate(q, k, coords_q, coords_k)
        q, k = self.rotate(q[None], k[None], coords_q[:, None], coords_k[:, None])  # one long row to the kernels
        return q[0], k[0]

    def turns(self) -> Turns:
        """How fast planes turn, for a kernel that does more than rotate (trope.kernels.silu_rotate)."""
        freqs_q, freqs_k, betas = self.paper_phase() or (*self.frequencies(), None)
        return Turns(freqs_q, freqs_k, betas=betas)

    def rotate(self, q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated q and k [B, L, H, D] at coordinates [C, B, L]; for callers that reuse coordinates over layers."""
        freqs_q, freqs_k, betas = self.paper_phase() or (*self.frequencies(), None)
        interleaved = self.layout == "interleaved"
        return rotate_qk(q, k, coords_q, coords_k, freqs_q, freqs_k, betas, interleaved, self.backend)

    def cos_sin(
        self,
        times: Tensor,
        lengths: Tensor | None = None,
        t_now: Tensor | None = None,
        *,
        offsets: Tensor | None = None,
        allow_past: bool = False,
        style: Literal["huggingface", "flash"] = "huggingface",
        dtype: torch.dtype = torch.float32,
    ) -> CosSin:
        """cos and sin for other libraries' rotary functions. Query and key turn differently: apply each its own pair.

        **These functions' fused kernels return no gradient for the angles** (flash-attention and Liger give None): with
        them the coefficients silently stay as they are. Use them for frozen or trained encodings, or call the module
        itself, which trains. Plain-PyTorch functions (Hugging Face's `apply_rotary_pos_emb`) do pass the gradient on.

        Args:
            style: "huggingface" (also Liger) gives [B, L, rotary_dim], each plane's value at both its dims, for
                `layout="halves"`; "flash" gives [B * L, P]: view q as [1, B * L, H, D], `interleaved` as in `layout`.
        """
        checks.check_choice("style", style, ("huggingface", "flash"))
        if style == "huggingface" and self.layout != "halves":
            raise ValueError(
                'style="huggingface" needs layout="halves", got "interleaved"; make the module with halves'
            )
        checks.check_time_dtype(times)
        self.check_call(times.shape, times, lengths, t_now, offsets, allow_past)
        coords = self.coordinates(times.shape, times, lengths, t_now, offsets)
        *freqs, betas = self.paper_phase() or (*self.frequencies(), None)
        tables: list[Tensor] = []
        for coords_one, freqs_one in zip(coords, freqs, strict=True):
            rows = coords_one if coords_one.dim() == 3 else coords_one[:, None]
            angle = rotary_reference.phase(rows, freqs_one, betas).float()
            angle = angle if style == "flash" else torch.cat((angle, angle), dim=-1)
            angle = angle.flatten(0, 1) if style == "flash" or offsets is not None else angle
            tables += [angle.cos().to(dtype), angle.sin().to(dtype)]
        return CosSin(*tables)

    def check_call(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None, allow_past: bool,
    ) -> None:  # fmt: skip
        """Shapes always; values where they can be read and the module was not told to trust its caller."""
        if times is None:
            raise ValueError(f"{type(self).__name__} needs the events' times, got None; only IndexRoPE works without")
        checks.check_time_dtype(times)
        if times.shape != shape:
            raise ValueError(f"times must have one entry per event, shape {tuple(shape)}, got {tuple(times.shape)}")
        checks.check_events(times, lengths, offsets, t_now)
        if self.check_values and checks.can_read_values(times):
            checks.check_event_values(times, lengths, offsets, t_now, allow_past)
            checks.check_order(times, lengths, offsets, checks.ANY_ORDER)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Follow the model to its device, but never to another dtype: a coefficient in bf16 is another frequency."""

        def keep_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, layout={self.layout}"


def event_index(shape: torch.Size, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Position of each event in its own sequence, int64, [B, L] or [T]."""
    index = torch.arange(shape[-1], device=device)
    if offsets is None:
        return index.expand(shape)
    return index - offsets[sequence_of(index, offsets)]


def sequence_of(index: Tensor, offsets: Tensor) -> Tensor:
    """Which jagged sequence each token belongs to; right=True passes over empty ones."""
    return torch.searchsorted(offsets[1:], index, right=True)


def float64(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its device has none (Apple MPS)."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def set_constant(module: nn.Module, name: str, value: Tensor) -> None:
    """Fill a buffer that no checkpoint holds, in place: a captured CUDA graph reads it where it is.

    A module made on the device meta has no place yet. The buffer then comes to where the checkpoint's tensors are.
    """
    kept = module._buffers.get(name)
    if kept is not None and not kept.is_meta:
        kept.copy_(value)
        return
    tensors = (*module.parameters(), *module.buffers())
    device = next((x.device for x in tensors if not x.is_meta), value.device)
    module.register_buffer(name, value.to(device), persistent=False)


def _form_again(module: nn.Module, _: object) -> None:
    """After a checkpoint was loaded."""
    assert isinstance(module, Rotary)
    module._keep_constants()
