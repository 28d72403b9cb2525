"""The gates of :mod:`tl_spd.gates` on CUDA: what lies between the matmuls, in one pass over memory each (Triton).

``gamma_c = sum_k W2[k, c] * gelu(pre[k, c] + b1[k, c])`` with ``pre`` from a matmul (vector gates) or ``a[c] * W1[k, c]`` (scalar
gates: nothing of size ``[rows, d_gate, C]`` exists there at all). Vector gates take rows in blocks (:func:`block_rows`): torch's
matmul writes a block's ``pre``, a kernel reads it once. So matmuls keep torch's speed and TF32 policy, and gradients of shared
parameters are summed in a fixed order: the same bits every time.

Launches go to the inputs' device. The kernels' sums are made in float32, of float64 in float64. Without a GPU the tests run the
kernels in Triton's interpreter, and compile them for the GPUs' instruction sets.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLS = 32, 64
"""The tile of rows and subcomponents that a program holds."""

PROGRAMS = 64
"""Most programs that share the rows of one column of tiles in a backward pass; each sums parameters' gradients for itself."""


def _jit(function: Any) -> Any:
    """``triton.jit`` of the function as it is written: what checks types at run time wraps it, which Triton cannot read."""
    return triton.jit(inspect.unwrap(function))


@_jit
def _tile(rows, C, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows, subcomponents, and which of both there are."""
    r = first * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    return r, c, (r < rows) & (c < C)


@_jit
def _normal(x):
    """The normal distribution up to ``x``: ``gelu(x) = x * _normal(x)``."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@_jit
def _slope(x, below):
    """The derivative of gelu, ``below`` being ``_normal(x)``."""
    return below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@_jit
def _of_hidden(parameter, k, C, ACC: tl.constexpr, COLS: tl.constexpr):
    """What ``parameter: [d_gate, C]`` holds for hidden unit ``k``, ``[1, COLS]``."""
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    return tl.load(parameter + k * C + c, c < C, 0.0).to(ACC)


@_jit
def _add(sums, values, C, d_gate, COLS: tl.constexpr):
    """Add ``values: [1, COLS]`` to this program's own part of ``sums``."""
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    at = sums + (tl.program_id(2) * d_gate + tl.program_id(0)) * C + c
    tl.store(at, tl.load(at, c < C, 0.0) + values, c < C)


@_jit
def vector_forward(pre, b1, W2, out, rows, C, d_gate, ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``out[r, c]`` from ``pre[r, k, c]``."""
    r, c, inside = _tile(rows, C, tl.program_id(0), ROWS, COLS)
    total = tl.zeros([ROWS, COLS], ACC)
    for k in range(d_gate):
        x = tl.load(pre + (r * d_gate + k) * C + c, inside, 0.0).to(ACC) + _of_hidden(b1, k, C, ACC, COLS)
        total += _of_hidden(W2, k, C, ACC, COLS) * x * _normal(x)
    tl.store(out + r * C + c, total, inside)


@_jit
def scalar_forward(a, W1, b1, W2, out, rows, C, d_gate, ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``out[r, c]`` from ``a[r, c]``."""
    r, c, inside = _tile(rows, C, tl.program_id(0), ROWS, COLS)
    inner = tl.load(a + r * C + c, inside, 0.0).to(ACC)
    total = tl.zeros([ROWS, COLS], ACC)
    for k in range(d_gate):
        x = inner * _of_hidden(W1, k, C, ACC, COLS) + _of_hidden(b1, k, C, ACC, COLS)
        total += _of_hidden(W2, k, C, ACC, COLS) * x * _normal(x)
    tl.store(out + r * C + c, total, inside)


@_jit
def vector_backward(
    pre, grad, b1, W2, sums_b1, sums_W2, rows, C, d_gate, ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """``pre[r, k, c]`` becomes its own gradient; ``sums_*: [programs, d_gate, C]`` grow by those of the parameters."""
    k = tl.program_id(0)
    bias, weight = _of_hidden(b1, k, C, ACC, COLS), _of_hidden(W2, k, C, ACC, COLS)
    sum_b1, sum_W2 = tl.zeros([1, COLS], ACC), tl.zeros([1, COLS], ACC)
    for first in range(tl.program_id(2), tl.cdiv(rows, ROWS), tl.num_programs(2)):
        r, c, inside = _tile(rows, C, first, ROWS, COLS)
        g = tl.load(grad + r * C + c, inside, 0.0).to(ACC)
        x = tl.load(pre + (r * d_gate + k) * C + c, inside, 0.0).to(ACC) + bias
        below = _normal(x)
        grad_pre = g * weight * _slope(x, below)
        sum_W2 += tl.sum(g * x * below, 0)[None, :]
        sum_b1 += tl.sum(grad_pre, 0)[None, :]
        tl.store(pre + (r * d_gate + k) * C + c, grad_pre, inside)
    _add(sums_b1, sum_b1, C, d_gate, COLS)
    _add(sums_W2, sum_W2, C, d_gate, COLS)


@_jit
def scalar_backward(
    a, grad, W1, b1, W2, grad_a, rows, C, d_gate, ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """``grad_a[r, c]``."""
    r, c, inside = _tile(rows, C, tl.program_id(0), ROWS, COLS)
    inner = tl.load(a + r * C + c, inside, 0.0).to(ACC)
    total = tl.zeros([ROWS, COLS], ACC)
    for k in range(d_gate):
        slope = _of_hidden(W1, k, C, ACC, COLS)
        x = inner * slope + _of_hidden(b1, k, C, ACC, COLS)
        total += _of_hidden(W2, k, C, ACC, COLS) * _slope(x, _normal(x)) * slope
    tl.store(grad_a + r * C + c, total * tl.load(grad + r * C + c, inside, 0.0).to(ACC), inside)


@_jit
def scalar_backward_sums(
    a, grad, W1, b1, W2, sums_W1, sums_b1, sums_W2, rows, C, d_gate,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``sums_*: [programs, d_gate, C]`` grow by the gradients of the parameters."""
    k = tl.program_id(0)
    slope, bias = _of_hidden(W1, k, C, ACC, COLS), _of_hidden(b1, k, C, ACC, COLS)
    weight = _of_hidden(W2, k, C, ACC, COLS)
    sum_W1, sum_b1, sum_W2 = tl.zeros([1, COLS], ACC), tl.zeros([1, COLS], ACC), tl.zeros([1, COLS], ACC)
    for first in range(tl.program_id(2), tl.cdiv(rows, ROWS), tl.num_programs(2)):
        r, c, inside = _tile(rows, C, first, ROWS, COLS)
        inner = tl.load(a + r * C + c, inside, 0.0).to(ACC)
        g = tl.load(grad + r * C + c, inside, 0.0).to(ACC)
        x = inner * slope + bias
        below = _normal(x)
        grad_pre = g * weight * _slope(x, below)
        sum_W2 += tl.sum(g * x * below, 0)[None, :]
        sum_b1 += tl.sum(grad_pre, 0)[None, :]
        sum_W1 += tl.sum(grad_pre * inner, 0)[None, :]
    _add(sums_W1, sum_W1, C, d_gate, COLS)
    _add(sums_b1, sum_b1, C, d_gate, COLS)
    _add(sums_W2, sum_W2, C, d_gate, COLS)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    """Run ``kernel`` where its first argument is; nothing for an empty grid."""
    first = args[0]
    acc = tl.float64 if first.dtype == torch.float64 else tl.float32
    if all(grid):
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[grid](*args, ACC=acc, ROWS=ROWS, COLS=COLS)


def _programs(rows: int) -> int:
    """As many as find a tile of ``rows`` to sum, up to ``PROGRAMS``."""
    return max(1, min(PROGRAMS, triton.cdiv(rows, ROWS)))


def _sums(like: Tensor, programs: int) -> Tensor:
    """Room for every program's share of a parameter's gradient, ``[programs, *shape]``."""
    return torch.zeros(programs, *like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def block_rows(x: Tensor, hidden: int) -> int:
    """Rows whose hidden layer fills half of the GPU's second-level cache, where that holds 128 rows and as many as ``W1`` has.

    With fewer, every block would read and write more of ``W1`` and its gradient than of its own.
    """
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    return max(128, x.shape[-1], cache // (2 * hidden * x.element_size()))


class VectorGates(torch.autograd.Function):
    """As :func:`tl_spd.gates.vector_gates` of ``x: [rows, d_in]``, without ``b2``; contiguous tensors of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, step: int) -> Tensor:
        """``[rows, C]``, taking ``step`` rows at a time."""
        ctx.save_for_backward(x, W1, b1, W2)
        ctx.step = step
        d_gate, C = W2.shape
        out = x.new_empty(x.shape[0], C)
        weights = W1.reshape(x.shape[1], -1)
        hidden = x.new_empty(min(step, len(x)), d_gate * C)
        for block, result in zip(x.split(step), out.split(step), strict=True):
            pre = torch.mm(block, weights, out=hidden[: len(block)])
            grid = (triton.cdiv(len(block), ROWS), triton.cdiv(C, COLS))
            _launch(vector_forward, grid, pre, b1, W2, result, len(block), C, d_gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor, None]:
        """The gradients of all inputs, each block's hidden layer computed again."""
        x, W1, b1, W2 = ctx.saved_tensors
        d_gate, C = W2.shape
        weights = W1.reshape(x.shape[1], -1)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        most = min(ctx.step, len(x))
        hidden, programs = x.new_empty(most, d_gate * C), _programs(most)
        grad_weights, sums_b1, sums_W2 = torch.zeros_like(weights), _sums(b1, programs), _sums(W2, programs)
        grid = (d_gate, triton.cdiv(C, COLS), programs)
        for start in range(0, len(x), ctx.step):
            block, g = x[start : start + ctx.step], grad[start : start + ctx.step].contiguous()
            pre = torch.mm(block, weights, out=hidden[: len(block)])
            _launch(vector_backward, grid, pre, g, b1, W2, sums_b1, sums_W2, len(block), C, d_gate)
            grad_weights.addmm_(block.T, pre)
            if grad_x is not None:
                torch.mm(pre, weights.T, out=grad_x[start : start + ctx.step])
        return grad_x, grad_weights.view_as(W1), sums_b1.sum(0).to(b1.dtype), sums_W2.sum(0).to(W2.dtype), None


class ScalarGates(torch.autograd.Function):
    """As :func:`tl_spd.gates.scalar_gates` of ``a: [rows, C]``, without ``b2``; contiguous tensors of one dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, W1: Tensor, b1: Tensor, W2: Tensor) -> Tensor:
        """``[rows, C]``."""
        ctx.save_for_backward(a, W1, b1, W2)
        out = torch.empty_like(a)
        grid = (triton.cdiv(len(a), ROWS), triton.cdiv(a.shape[1], COLS))
        _launch(scalar_forward, grid, a, W1, b1, W2, out, *a.shape, len(W2))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all inputs; nothing of size ``[rows, d_gate, C]`` exists."""
        a, W1, b1, W2 = ctx.saved_tensors
        programs, columns = _programs(len(a)), triton.cdiv(a.shape[1], COLS)
        grad, grad_a, sums = grad.contiguous(), torch.empty_like(a), [_sums(p, programs) for p in (W1, b1, W2)]
        _launch(scalar_backward, (triton.cdiv(len(a), ROWS), columns), a, grad, W1, b1, W2, grad_a, *a.shape, len(W2))
        if len(a):
            _launch(scalar_backward_sums, (len(W2), columns, programs), a, grad, W1, b1, W2, *sums, *a.shape, len(W2))
        return grad_a, *(each.sum(0).to(a.dtype) for each in sums)
