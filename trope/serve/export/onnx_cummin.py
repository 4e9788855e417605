"""`cummin` in ONNX's own operations, which have a running sum and no running minimum.

A minimum over j <= i of a masked square: quadratic in the length, as attention is.
"""

from __future__ import annotations

from typing import Any

from onnxscript import opset18 as op


def cummin(values: Any, dim: int) -> tuple[Any, Any]:
    """Running minima of int64 [.., L] along the last dim, twice: nobody here asks where they are."""
    assert dim in (-1, 1), "programs take running minima along the events"
    length = op.Gather(op.Shape(values), op.Constant(value_ints=[-1]))
    one = op.Constant(value_ints=[1])
    square = op.Concat(length, length, axis=0)
    is_later = op.Not(op.Cast(op.Trilu(op.Expand(op.Constant(value_ints=[1]), square), upper=0), to=9))
    spread = op.Unsqueeze(values, op.Constant(value_ints=[-2]))
    largest = op.Constant(value_ints=[(1 << 63) - 1])
    found = op.ReduceMin(op.Where(is_later, largest, spread), op.Constant(value_ints=[-1]), keepdims=0)
    return found, found
