"""Integer operations for ONNX that are right for times.

ONNX Runtime 1.31 gives wrong int64 results for Clip, Max, Min and ReduceMin of numbers past 2^31 on x86 (Eigen's SSE2
code, microsoft/onnxruntime#25280). A time since 1970 is such a number from 2038 on. Comparisons and Where are right, so
clamps are made of these. ONNX has no running minimum either; here it is the minimum of a masked square, in float64,
which holds times exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import opset18

op: Any = opset18  # its types do not know that a translation's values are symbolic
_BOOL, _INT64, _FLOAT64 = 9, 7, 11
_INTEGERS = (_INT64, 6)


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """`Tensor.clamp` with numbers or tensors as ends. Floating point keeps ONNX's own Clip."""
    if self.dtype not in _INTEGERS:
        return op.Clip(self, _end(self, min), _end(self, max))
    if min is not None:
        low = _end(self, min)
        self = op.Where(op.Less(self, low), low, self)
    if max is not None:
        high = _end(self, max)
        self = op.Where(op.Greater(self, high), high, self)
    return self


def cummin(self: Any, dim: int) -> tuple[Any, Any]:
    """Running minima of int64 [B, L] along the events, twice: nobody here asks where they are.

    Numbers up to 2^53 are exact; larger ones, which stand for none, only have to stay the largest.
    """
    assert dim in (-1, 1), "programs take running minima along the events"
    length = op.Gather(op.Shape(self), op.Constant(value_ints=[1]))
    ones = op.Expand(op.Constant(value_ints=[1]), op.Concat(length, length, axis=0))
    is_later = op.Not(op.Cast(op.Trilu(ones, upper=0), to=_BOOL))
    spread = op.Unsqueeze(op.Cast(self, to=_FLOAT64), op.Constant(value_ints=[1]))
    none = op.Cast(op.Constant(value_ints=[1 << 62]), to=_FLOAT64)
    found = op.ReduceMin(op.Where(is_later, none, spread), op.Constant(value_ints=[-1]), keepdims=0)
    found = op.Cast(found, to=_INT64)
    return found, found


def _end(like: Any, end: Any) -> Any:
    """An end of a clamp as a value of the tensor's type, or None."""
    if end is None or not isinstance(end, (int, float)):
        return end
    constant = op.Constant(value_int=end) if isinstance(end, int) else op.Constant(value_float=end)
    return op.CastLike(constant, like)


TRANSLATIONS: dict[Any, Any] = {
    torch.ops.aten.clamp.default: clamp,
    torch.ops.aten.clamp.Tensor: clamp,
    torch.ops.aten.clamp_min.default: clamp,
    torch.ops.aten.cummin.default: cummin,
}
