"""One bidirectional attention head with a relative term, in interchangeable backends that give the same numbers.

``softmax((q_i . k_j + r_ij) / sqrt(d_attn)) v_j`` with ``r_ij = q_i . R[j - i]`` (a table of vectors) or ``r_ij = b[j - i]`` (of
biases). Padding is never attended to; there is no causal mask.

- ``eager``: the scores as one tensor ``[batch, pos, pos]``.
- ``sdpa``: the same scores through torch's fused attention.
- ``blocked``: queries in blocks, each block's scores made again in the backward pass; nothing of the size ``pos x pos`` is
  kept. The counterpart of flex attention where that has no backward pass (torch 2.13 on a CPU).
- ``flex``: torch's flex attention with the relative term as a ``score_mod``, compiled on CUDA. On a CPU only without
  gradients, and uncompiled: for comparison.
- ``auto``: blocked from :data:`BLOCKED_FROM` positions on, eager below. Never flex, until a GPU has shown it to be faster.

The relative term is the product of queries and table read along its diagonals by their strides: no index tensor, and no
``[pos, pos, d_attn]`` copy of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Backend = Literal["auto", "eager", "sdpa", "blocked", "flex"]
BACKENDS = ("auto", "eager", "sdpa", "blocked", "flex")

BLOCKED_FROM = 1024
"""Positions from which ``auto`` takes queries in blocks."""

BLOCK_SCORES = 1 << 19
"""Scores per block, batch x queries x positions: what a CPU's cache holds. Elsewhere 64 times as many."""


def attend(
    q: Float[Tensor, "batch pos d_attn"],
    k: Float[Tensor, "batch pos d_attn"],
    v: Float[Tensor, "batch pos d_in"],
    relative: Tensor,
    real: Bool[Tensor, "batch pos"] | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "batch pos d_in"]:
    """What every position brings from all real positions.

    ``relative`` is ``[2 pos - 1, d_attn]`` (``r_ij = q_i . relative[j - i + pos - 1]``) or ``[2 pos - 1]``
    (``r_ij = relative[j - i + pos - 1]``). A sequence of padding alone attends evenly.
    """
    pos = q.shape[1]
    if backend == "auto":
        backend = "blocked" if pos >= BLOCKED_FROM else "eager"
    if backend == "blocked":
        scores = BLOCK_SCORES * (1 if q.device.type == "cpu" else 64)
        step = max(1, min(pos, scores // max(1, q.shape[0] * pos)))
        blocks = [(start, min(start + step, pos)) for start in range(0, pos, step)]
        return torch.cat([recomputed(_eager, q, k, v, relative, real, block) for block in blocks], dim=1)
    if backend == "flex":
        return _flex(q, k, v, relative, real)
    return (_sdpa if backend == "sdpa" else _eager)(q, k, v, relative, real, (0, pos))


def recomputed(function: Callable[..., Tensor], *args: object) -> Tensor:
    """``function(*args)``, of which the backward pass keeps the arguments alone: it calls ``function`` again."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _scaled(
    q: Tensor, pos: int, relative: Tensor, real: Tensor | None, block: tuple[int, int]
) -> tuple[Float[Tensor, "batch queries d_attn"], Float[Tensor, "#batch queries pos"]]:
    """The queries of ``block`` and their ``r_ij``, both over ``sqrt(d_attn)``, with padded keys far below everything."""
    (start, stop), scale = block, 1 / math.sqrt(q.shape[-1])
    q, met = q[:, start:stop] * scale, relative[pos - stop : 2 * pos - 1 - start]
    r = relative_scores(q, met if met.ndim == 2 else met * scale, pos)
    if real is None:
        return q, r
    lowest = torch.finfo(q.dtype).min / 4  # finite, so that a row without any real token stays defined
    return q, r.masked_fill(~real[:, None, :], lowest)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, relative: Tensor, real: Tensor | None, block: tuple[int, int]
) -> Float[Tensor, "batch queries d_in"]:
    q, bias = _scaled(q, k.shape[1], relative, real, block)
    return torch.softmax(torch.baddbmm(bias, q, k.mT), dim=-1) @ v


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, relative: Tensor, real: Tensor | None, block: tuple[int, int]
) -> Float[Tensor, "batch queries d_in"]:
    q, bias = _scaled(q, k.shape[1], relative, real, block)
    bias = bias.expand(q.shape[0], -1, -1)[:, None]
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=bias, scale=1.0)[:, 0]


def _flex(q: Tensor, k: Tensor, v: Tensor, relative: Tensor, real: Tensor | None) -> Float[Tensor, "batch pos d_in"]:
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, and rarely wanted

    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, relative)):
        raise ValueError(
            "flex attention has no backward pass on a CPU; use backend='blocked' there, or torch.no_grad()."
        )
    pos, scale = q.shape[1], 1 / math.sqrt(q.shape[-1])
    lowest = torch.finfo(q.dtype).min / 4
    # Lambdas, since flex traces them and whatever decorates them. An index takes one number: dot products are written out.
    terms = [*zip(q.unbind(-1), relative.unbind(-1), strict=True)] if relative.ndim == 2 else []
    r = (
        (lambda b, i, n: sum(left[b, i] * right[n] for left, right in terms))
        if terms
        else (lambda b, i, n: relative[n])
    )
    seen = (lambda score, b, j: score) if real is None else (lambda score, b, j: torch.where(real[b, j], score, lowest))
    score_mod = lambda score, b, h, i, j: seen(score + r(b, i, j - i + pos - 1) * scale, b, j)  # noqa: E731
    function = torch.compile(flex_attention, dynamic=False) if q.device.type == "cuda" else flex_attention
    return function(q[:, None], k[:, None], v[:, None], score_mod=score_mod, scale=scale)[:, 0]


def relative_scores(
    q: Float[Tensor, "batch queries d_attn"], relative: Tensor, pos: int
) -> Float[Tensor, "#batch queries pos"]:
    """``r_ij`` of consecutive queries: the products ``q @ relative^T`` read along their diagonals.

    ``relative`` holds the ``pos + queries - 1`` entries that these queries meet, from the smallest ``j - i`` up.
    """
    queries, width = q.shape[1], relative.shape[0]
    table = (q @ relative.mT if relative.ndim == 2 else relative.expand(1, queries, -1)).contiguous()
    # Row i wants pos columns from queries - 1 - i on; in row-major order they start at i * (width - 1) + queries - 1.
    shape, strides = (table.shape[0], queries, pos), (queries * width, width - 1, 1)
    return table.as_strided(shape, strides, table.storage_offset() + queries - 1)
