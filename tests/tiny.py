"""Tiny hosts of every supported style, with every parameter random (biases and norm gains too)."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from tl_spd.importance import ImportanceSpec, Vector
from tl_spd.run import Run, new_run
from tl_spd.sites import find_sites

VOCAB, N_CTX = 11, 8

STYLES: dict[str, dict[str, Any]] = {
    "shortformer": dict(attn_only=True, normalization_type=None, positional_embedding_type="shortformer"),
    "gpt2": dict(normalization_type="LN", d_mlp=12, act_fn="gelu_new"),
    "llama": dict(
        normalization_type="RMS",
        d_mlp=12,
        act_fn="silu",
        gated_mlp=True,
        positional_embedding_type="rotary",
        n_key_value_heads=1,
    ),
    "parallel": dict(normalization_type="LNPre", d_mlp=12, act_fn="relu", parallel_attn_mlp=True),
}
"""Shortformer attention-only; GPT-2; Llama (grouped keys and values, rotary, gated, RMS); parallel attention and MLP."""

MORE_STYLES: dict[str, dict[str, Any]] = {
    "rmspre_alibi": dict(
        normalization_type="RMSPre", d_mlp=12, act_fn="silu", gated_mlp=True, positional_embedding_type="alibi"
    ),
    "no_norm_mlp": dict(normalization_type=None, d_mlp=12, act_fn="relu"),
    "no_norm_parallel": dict(normalization_type=None, d_mlp=12, act_fn="relu", parallel_attn_mlp=True),
    "qk_norm": dict(
        normalization_type="RMS",
        d_mlp=12,
        act_fn="silu",
        gated_mlp=True,
        positional_embedding_type="rotary",
        use_qk_norm=True,
    ),
    "softcap": dict(normalization_type="LN", d_mlp=12, act_fn="gelu", output_logits_soft_cap=3.0),
}


def tiny_host(style: str = "gpt2", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> HookedTransformer:
    """A host of two layers, two heads, d_model 6 and random parameters of unit scale."""
    config = dict(
        n_layers=2, n_heads=2, d_model=6, d_head=4, n_ctx=N_CTX, d_vocab=VOCAB, device="cpu", dtype=dtype, seed=None
    )
    config |= {**STYLES, **MORE_STYLES}[style] | changes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = HookedTransformer(HookedTransformerConfig(**config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.3 if ".b" in name or "._b" in name else 0.7
                parameter.normal_(std=scale)
                if name.endswith(".w"):
                    parameter.add_(1)
    return model.eval()


def tiny_tokens(batch: int = 3, pos: int = 5, seed: int = 0) -> torch.Tensor:
    """Random tokens ``[batch, pos]``."""
    return torch.randint(0, VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed))


def tiny_run(
    model: HookedTransformer,
    sites: str | tuple[str, ...] = "*",
    C: int = 3,
    importance: ImportanceSpec = Vector(d_gate=2),
    seed: int = 0,
) -> Run:
    """A Run with random components and importances strictly inside (0.2, 0.8), away from the kinks of the sigmoids."""
    found = find_sites(model, sites)
    run = new_run(model, found, {site.name: C for site in found}, importance, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for function in run.functions.values():
        for name, parameter in function.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if name.endswith("b1"):
                parameter.data = 0.3 * noise
            elif name.endswith("W2"):
                parameter.data = 0.02 * noise
            elif name.endswith("b2"):
                parameter.data = 0.5 + 0.05 * noise
            elif name in ("absolute", "relative"):
                parameter.data = 0.5 * noise
    return run.requires_grad_(True)


def tiny_padding(side: str | None, batch: int = 3, pos: int = 5) -> torch.Tensor | None:
    """An attention mask with 0, 1, 2, ... padded places in the batch's sequences on ``side``; None for no side."""
    if side is None:
        return None
    place, padded = torch.arange(pos)[None], torch.arange(batch)[:, None]
    return (place >= padded if side == "left" else place < pos - padded).long()
