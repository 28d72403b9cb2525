"""Gates: one small MLP per subcomponent, evaluated without its hidden layer in memory.

``gamma_c(x) = w2_c . gelu(W1_c^T x + b1_c) + b2_c`` for every subcomponent c. The hidden layer ``[rows, d_gate, C]`` is far
larger than inputs and outputs together, so

1. rows are taken in blocks whose hidden layer stays in the processor's cache;
2. only the inputs are kept for the backward pass, which computes each block's hidden layer again;
3. biases ride along as one more input column of ones, so that the matmuls of both passes serve them too.

Exact up to rounding: the same numbers as the plain expression (tested in float64 with gradcheck). The hidden axis comes
before the subcomponent axis, so that sums over it run along contiguous memory. No second derivatives.

On CUDA, where Triton is installed (CUDA builds of torch on Linux bring it), :mod:`tl_spd.kernels` does the same in fewer passes
over memory; without Triton the blocks serve there too. Where Triton is installed but cannot launch anything (it needs a C
compiler), they do after a warning.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

gelu, gelu_backward = torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input

BLOCK_BYTES = 1 << 21
"""Size of one block's hidden layer in bytes: measured best on two cores with 1 MiB of second-level cache each."""


def _rows_per_block(rows: int, hidden: int, element_size: int) -> int:
    return min(rows, max(1, BLOCK_BYTES // max(1, hidden * element_size)))


@cache
def _triton_works() -> bool:
    """Whether kernels can be launched; a warning, the first time, where Triton is there and what it needs is not."""
    if find_spec("triton") is None:
        return False
    import triton

    try:
        triton.runtime.driver.active.get_current_device()  # builds what every launch needs
    except Exception as error:
        warnings.warn(f"Triton is installed but cannot be used: {error!r}. Gates are computed in blocks.", stacklevel=2)
        return False
    return True


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels for where ``x`` is, if there are any."""
    if x.device.type != "cuda" or not _triton_works():
        return None
    from tl_spd import kernels  # needs Triton

    return kernels


def vector_gates(
    x: Float[Tensor, "*rows d_in"],
    W1: Float[Tensor, "d_in d_gate C"],
    b1: Float[Tensor, "d_gate C"],
    W2: Float[Tensor, "d_gate C"],
    b2: Float[Tensor, "C"],
) -> Float[Tensor, "*rows C"]:
    """``sum_k W2[k, c] * gelu((x @ W1)[k, c] + b1[k, c]) + b2[c]`` for every row of ``x``."""
    flat = x.to(W1.dtype).reshape(-1, x.shape[-1])  # under autocast it may come in less
    if kernels := _kernels(flat):
        step = kernels.block_rows(flat, W2.numel())
        out = kernels.VectorGates.apply(*(each.contiguous() for each in (flat, W1, b1, W2)), step)
        return (out + b2).reshape(*x.shape[:-1], b2.shape[0])
    weights = torch.cat([W1.reshape(x.shape[-1], -1), b1.reshape(1, -1)])
    out = _VectorGates.apply(torch.cat([flat, flat.new_ones(flat.shape[0], 1)], dim=1), weights, W2)
    return (out + b2).reshape(*x.shape[:-1], b2.shape[0])


class _VectorGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, W2: Tensor) -> Tensor:
        """The gates ``[rows, C]`` without ``b2``, block by block."""
        ctx.save_for_backward(x, weights, W2)
        d_gate, C = W2.shape
        out = x.new_empty(x.shape[0], C)
        step = _rows_per_block(x.shape[0], d_gate * C, x.element_size())
        pre, hidden = x.new_empty(step, d_gate * C), x.new_empty(step, d_gate * C)
        for start in range(0, x.shape[0], step or 1):
            rows = min(step, x.shape[0] - start)
            torch.mm(x[start : start + rows], weights, out=pre[:rows])
            gelu(pre[:rows], out=hidden[:rows])
            torch.sum(hidden[:rows].view(rows, d_gate, C).mul_(W2), dim=1, out=out[start : start + rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The gradients of all inputs, each block's hidden layer computed again."""
        x, weights, W2 = ctx.saved_tensors
        d_gate, C = W2.shape
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weights, grad_W2 = torch.zeros_like(weights), torch.zeros_like(W2)
        step = _rows_per_block(x.shape[0], d_gate * C, x.element_size())
        pre, hidden = x.new_empty(step, d_gate * C), x.new_empty(step, d_gate * C)
        for start in range(0, x.shape[0], step or 1):
            rows = min(step, x.shape[0] - start)
            block, g = x[start : start + rows], grad[start : start + rows, None]
            before, after = pre[:rows], hidden[:rows]
            torch.mm(block, weights, out=before)
            gelu(before, out=after)
            grad_W2 += after.view(rows, d_gate, C).mul_(g).sum(0)
            torch.mul(g, W2, out=after.view(rows, d_gate, C))
            gelu_backward(after, before, grad_input=before)
            grad_weights.addmm_(block.T, before)
            if grad_x is not None:
                torch.mm(before, weights.T, out=grad_x[start : start + rows])
        return grad_x, grad_weights, grad_W2


def scalar_gates(
    a: Float[Tensor, "*rows C"],
    W1: Float[Tensor, "d_gate C"],
    b1: Float[Tensor, "d_gate C"],
    W2: Float[Tensor, "d_gate C"],
    b2: Float[Tensor, "C"],
) -> Float[Tensor, "*rows C"]:
    """``sum_k W2[k, c] * gelu(a[c] * W1[k, c] + b1[k, c]) + b2[c]`` for every row of ``a``."""
    given, kernels = (a.to(W1.dtype).reshape(-1, a.shape[-1]), W1, b1, W2), _kernels(a)
    out = kernels.ScalarGates.apply(*(each.contiguous() for each in given)) if kernels else _ScalarGates.apply(*given)
    return (out + b2).reshape(a.shape)


class _ScalarGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, W1: Tensor, b1: Tensor, W2: Tensor) -> Tensor:
        """The gates ``[rows, C]`` without ``b2``, block by block."""
        ctx.save_for_backward(a, W1, b1, W2)
        out = torch.empty_like(a)
        step = _rows_per_block(a.shape[0], W2.numel(), a.element_size())
        for start in range(0, a.shape[0], step or 1):
            hidden = F.gelu(torch.addcmul(b1, a[start : start + step, None], W1))
            torch.sum(hidden.mul_(W2), dim=1, out=out[start : start + step])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of all inputs, each block's hidden layer computed again."""
        a, W1, b1, W2 = ctx.saved_tensors
        grad_a = torch.empty_like(a)
        grad_W1, grad_b1, grad_W2 = torch.zeros_like(W1), torch.zeros_like(b1), torch.zeros_like(W2)
        step = _rows_per_block(a.shape[0], W2.numel(), a.element_size())
        for start in range(0, a.shape[0], step or 1):
            block, g = a[start : start + step, None], grad[start : start + step, None]
            pre = torch.addcmul(b1, block, W1)
            grad_W2 += F.gelu(pre).mul_(g).sum(0)
            grad_pre = torch.ops.aten.gelu_backward(g * W2, pre)
            grad_b1 += grad_pre.sum(0)
            torch.sum(grad_pre * W1, dim=1, out=grad_a[start : start + step])
            grad_W1 += grad_pre.mul_(block).sum(0)
        return grad_a, grad_W1, grad_b1, grad_W2
