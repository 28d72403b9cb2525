"""Attention: patterns of the original beside those of the decomposed model.

KL(P || Q) in nats between the attention of the original (P) and of the decomposed model (Q), a mean over sequences and real
query positions, per layer and head. Source: table 1c of the paper on transformers.
"""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.install import Masks, decomposed
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer
from tl_spd.wiring import attention_patterns, padding_mask


def pattern_kl(
    original: Float[Tensor, "batch head query key"], other: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head query"]:
    """KL(P || Q) in nats of every attention row; keys that P does not attend to count nothing."""
    tiny = torch.finfo(original.dtype).tiny
    terms = original * (original.clamp(min=tiny).log() - other.clamp(min=tiny).log())
    return torch.where(original > 0, terms, torch.zeros_like(terms)).sum(-1)


@torch.no_grad()
def attention_kl(
    model: HookedTransformer, run: Run, tokens: Int[Tensor, "batch pos"], masks: Masks = "importance"
) -> pd.DataFrame:
    """How far the decomposed model's attention is from the original's.

    Returns:
        One row per layer and head: ``layer, head, kl`` (mean over real query positions), ``kl_last`` (last position only).
    """
    original = attention_patterns(model, tokens)
    with decomposed(model, run, masks):
        other = attention_patterns(model, tokens)
    real = padding_mask(model, tokens)
    rows = []
    for layer, pattern in original.items():
        kl = pattern_kl(pattern, other[layer])
        by_query = kl if real is None else kl * real[:, None]
        mean = by_query.sum((0, 2)) / (tokens.numel() if real is None else real.sum())
        for head in range(kl.shape[1]):
            rows.append((layer, head, mean[head].item(), kl[:, head, -1].mean().item()))
    return pd.DataFrame(rows, columns=["layer", "head", "kl", "kl_last"])
