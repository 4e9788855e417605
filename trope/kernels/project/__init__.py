"""A linear map in a lower precision than its weights, with the weights' gradient in theirs. Decides what runs.

It does what autocast does around torch's linear layer, in fewer passes over memory. The weights' gradient leaves the
product in float32 instead of being rounded and cast back. The bias's gradient is one sum over tokens; torch's own takes
as long as the product itself where the output is narrow.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.backend import Backend, resolve_backend

# Whether gradients of weights, and of biases, are formed beside the backward pass where the caller says so.
WEIGHTS_LATE, BIASES_LATE = True, True


def project(
    x_TI: Tensor,
    weight_IO: Tensor,
    bias_O: Tensor | None = None,
    backend: Backend = "auto",
    low_IO: Tensor | None = None,
    low_bias_O: Tensor | None = None,
    late: Late = IN_PLACE,
) -> Tensor:
    """x @ weight + bias in the dtype of x; differentiable in all three.

    low_IO, low_bias_O: copies of weight and bias in the dtype of x, if the caller has them, so that nothing is cast.
    late: where the backward pass forms the gradients of weight and bias.
    """
    if resolve_backend(backend, x_TI) == "torch":
        y_TO = x_TI @ weight_IO.to(x_TI.dtype)
        return y_TO if bias_O is None else y_TO + bias_O.to(x_TI.dtype)
    return _Project.apply(x_TI, weight_IO, bias_O, low_IO, low_bias_O, late.to(weight_IO, bias_O))


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, low_bias: Tensor | None,
        late: Late,
    ) -> Tensor:  # fmt: skip
        low = weight.to(x.dtype) if low is None else low
        ctx.save_for_backward(x, low)
        ctx.late = late
        ctx.is_transposed = weight.stride(0) == 1 and weight.stride(1) != 1
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        if bias is None:
            return x @ low
        return torch.addmm(bias.to(x.dtype) if low_bias is None else low_bias, x, low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from trope.kernels.project.triton import sum_rows  # only now: CPU users need no Triton

        (g,) = gradients
        x, low = ctx.saved_tensors
        dx = g @ low.t() if ctx.needs_input_grad[0] else None
        # A product that leaves in float32 is only there on GPUs.
        exact = g.is_cuda and g.dtype != torch.float32 and ctx.weight_dtype == torch.float32
        # In the layout of the parameter behind the weights, which autograd would else copy the gradient to.
        left, right = (g, x) if ctx.is_transposed else (x, g)
        of_weights, of_biases = (ctx.late if is_late else IN_PLACE for is_late in (WEIGHTS_LATE, BIASES_LATE))
        with of_weights.work(left, right):
            product = torch.mm(left.t(), right, out_dtype=torch.float32) if exact else left.t() @ right
            dw = of_weights.gradient(product.to(ctx.weight_dtype))
        with of_biases.work(g):
            db = None if ctx.bias_dtype is None else of_biases.gradient(sum_rows(g).to(ctx.bias_dtype))
        return dx, dw.t() if ctx.is_transposed else dw, db, None, None, None
