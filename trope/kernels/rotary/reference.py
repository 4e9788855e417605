"""Rotation by real-valued coordinates in plain PyTorch: the ground truth for the fused kernel, and the path that CPUs,
float64 inputs and exported graphs take.

Notable: phases are formed and reduced in float64 (docs/method.md, "Exact phases") and leave it only as an angle in
[-pi, pi]; `betas` switches to the paper's FP32 arithmetic instead; no matmul, so TF32 and autocast cannot touch it.

Shape letters: B batch, L positions, H heads, D head dim, P planes, C coordinates (1, or 2 for TO-RoPE).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def phase(coords_CBL: Tensor, freqs_CP: Tensor, betas_P: Tensor | None = None) -> Tensor:
    """Angle of every plane at every position, in radians [B, L, P].

    Args:
        coords_CBL: where each token stands (seconds since an origin, or an index), int64 or float64.
        freqs_CP: turns per unit of coordinate, float64; with `betas_P` the paper's alpha, float32.
        betas_P: if given, the paper's Algorithm 1 lines 2-5 literally, FP32(alpha) * t / beta: float32, not reduced.
    """
    if betas_P is not None:
        return (freqs_CP[0] * coords_CBL[0].float()[..., None]) / betas_P
    if coords_CBL.device.type == "mps":  # has no float64: form the angles where there is one
        return phase(coords_CBL.cpu(), freqs_CP.cpu()).float().to(coords_CBL.device)
    turns_BLP = (coords_CBL.double()[..., None] * freqs_CP[:, None, None, :]).sum(0)
    # Whole turns change nothing; dropping them in float64 is what makes float32 cos and sin safe afterwards.
    return (turns_BLP - turns_BLP.round()) * (2 * math.pi)


def rotate(x_BLHD: Tensor, cos_BLP: Tensor, sin_BLP: Tensor, interleaved: bool) -> Tensor:
    """Algorithm 2: turn each plane (x0, x1) to (x0 cos - x1 sin, x0 sin + x1 cos); dims past 2P pass through."""
    rotary_dim = 2 * cos_BLP.shape[-1]
    # Up to the angles' precision once, down once: also the two halves of a gradient meet before they are rounded.
    rotary, rest = x_BLHD[..., :rotary_dim].to(cos_BLP.dtype), x_BLHD[..., rotary_dim:]
    cos, sin = cos_BLP[..., None, :], sin_BLP[..., None, :]  # the same angle for every head
    x0, x1 = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    y0, y1 = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    y = torch.stack((y0, y1), dim=-1).flatten(-2) if interleaved else torch.cat((y0, y1), dim=-1)
    return torch.cat((y.to(x_BLHD.dtype), rest), dim=-1)


def rotate_by(
    x_BLHD: Tensor, coords_CBL: Tensor, freqs_CP: Tensor, betas_P: Tensor | None, interleaved: bool
) -> Tensor:
    """Rotate x by its coordinates: `phase`, then `rotate`. float64 stays float64, everything else turns in float32."""
    angle_BLP = phase(coords_CBL, freqs_CP, betas_P)
    if x_BLHD.dtype != torch.float64:
        angle_BLP = angle_BLP.float()
    return rotate(x_BLHD, angle_BLP.cos(), angle_BLP.sin(), interleaved)
