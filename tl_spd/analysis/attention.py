"""Attention: patterns of the original beside those of the decomposed model, and what positions do for them.

1. KL(P || Q) in nats between the attention of the original (P) and of the decomposed model (Q), a mean over sequences and real
   query positions, per layer and head.
2. The mechanism test: how much a query attends to a key when positional embeddings are left out of the query's input alone,
   all keys keeping theirs. Shortformer positions join the inputs of Q and K at every layer and are left out there; standard
   ones join the residual stream and can be told apart only in front of layer 0, whose norm is then applied to the rest.

Source: table 1c of the paper on transformers and its test of the first layer's head. Approximations: none.
"""

from __future__ import annotations

from contextlib import nullcontext

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.checks import check_whole
from tl_spd.data import check_batch
from tl_spd.hooks import HookSet, removing
from tl_spd.install import Masks, decomposed
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, Site, find_sites, n_layers
from tl_spd.wiring import (
    HEAD_INPUTS,
    Start,
    attention_patterns,
    make_twin,
    observe,
    padding_mask,
    watch_starts,
    write_point,
)


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
    tokens, _ = check_batch(tokens, model)
    original = _patterns(model, tokens, "the original model")
    with decomposed(model, run, masks):
        other = _patterns(model, tokens, "the decomposed model")
    real = padding_mask(model, tokens)
    rows = []
    for layer, pattern in original.items():
        kl = pattern_kl(pattern, other[layer])
        by_query = kl if real is None else kl * real[:, None]
        mean = by_query.sum((0, 2)) / (tokens.numel() if real is None else real.sum())
        for head in range(kl.shape[1]):
            rows.append((layer, head, mean[head].item(), kl[:, head, -1].mean().item()))
    return pd.DataFrame(rows, columns=["layer", "head", "kl", "kl_last"])


def _patterns(model: HookedTransformer, tokens: Tensor, whose: str) -> dict[int, Tensor]:
    """The patterns of every layer, after checking that real queries attend to something: scores that are not finite give 0."""
    patterns, real = attention_patterns(model, tokens), padding_mask(model, tokens)
    for layer, pattern in patterns.items():
        empty = ~(pattern.sum(-1) > 0.5)
        if bool(empty.any() if real is None else (empty & real[:, None]).any()):
            raise FloatingPointError(f"Layer {layer}: the attention scores of {whose} are not finite on these tokens.")
    return patterns


@torch.no_grad()
def attention_without_positions(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    head: int,
    query: Int[Tensor, "batch"],
    key: Int[Tensor, "batch"],
    *,
    run: Run | None = None,
    masks: Masks = "importance",
) -> pd.DataFrame:
    """How much ``query`` attends to ``key``, as it is and with positional embeddings left out of the query's input alone.

    Args:
        query: the query's position in every sequence.
        key: the key's position in every sequence, at or before the query.
        run: measure the decomposed model (as :func:`~tl_spd.install.decomposed` with ``masks``) instead of the original.
            Importances are those of the original model with its positions.

    Returns:
        One row per sequence: ``sequence, layer, head, query, key, attention, without`` (both in [0, 1]).

    Raises:
        ValueError: a host without positional embeddings in the query's input at this layer; a layer, head or position that
            does not exist; a key behind its query.
    """
    check_whole(layer=layer, head=head)
    site = _query_site(model, layer, head)
    tokens, _ = check_batch(tokens, model)
    _check_positions(query, key, tokens)
    with decomposed(model, run, masks) if run is not None else nullcontext():
        pattern, bare = _pattern_and_bare_query(model, tokens, site)
        without = _pattern_with_query(model, tokens, site, bare)
    rows = []
    for sequence, (i, j) in enumerate(zip(query.tolist(), key.tolist(), strict=True)):
        at = (sequence, head, i, j)
        rows.append((sequence, layer, head, i, j, pattern[at].item(), without[at].item()))
    return pd.DataFrame(rows, columns=["sequence", "layer", "head", "query", "key", "attention", "without"])


def _query_site(model: HookedTransformer, layer: int, head: int) -> Site:
    """The matrix W_Q of ``layer``, after checking that its input holds positional embeddings that can be left out."""
    if not 0 <= layer < n_layers(model):
        raise ValueError(f"layer must be 0 to {n_layers(model) - 1}, found {layer}.")
    site = find_sites(model, f"blocks.{layer}.attn.W_Q")[0]
    if not 0 <= head < site.heads:
        raise ValueError(f"head must be 0 to {site.heads - 1}, found {head}.")
    kind = model.cfg.positional_embedding_type
    if kind not in ("standard", "shortformer"):
        raise ValueError(
            f"This host's positions are {kind!r}: no embedding of them is in the query's input. Standard and shortformer "
            "positions can be left out."
        )
    if kind == "standard" and layer > 0:
        raise ValueError(
            f"Standard positional embeddings are one term of the query's input at layer 0 only, found layer {layer}."
        )
    return site


def _check_positions(query: Tensor, key: Tensor, tokens: Tensor) -> None:
    batch, length = tokens.shape
    if query.shape != (batch,) or key.shape != (batch,):
        raise ValueError(
            f"query and key must be one position for each of the {batch} sequences, found shapes {tuple(query.shape)} and "
            f"{tuple(key.shape)}."
        )
    if wrong := [p for p in [*query.tolist(), *key.tolist()] if not 0 <= p < length]:
        raise ValueError(f"Positions must be 0 to {length - 1}, found {wrong[0]}.")
    if behind := [(i, j) for i, j in zip(query.tolist(), key.tolist(), strict=True) if j > i]:
        raise ValueError(f"A key must be at or before its query, found query {behind[0][0]} and key {behind[0][1]}.")


def _pattern_and_bare_query(
    model: HookedTransformer, tokens: Tensor, site: Site
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch pos d_model"]]:
    """The layer's pattern, and what its W_Q would read without positional embeddings."""
    starts, added = dict[int, Start](), dict[str, Tensor]()
    standard = model.cfg.positional_embedding_type == "standard"
    with removing(HookSet()) as hooks:
        watch_starts(model, starts, hooks)
        if standard:
            point = model.hook_dict[write_point(model, find_sites(model, "pos_embed.W_pos")[0])]
            hooks.put(point.register_forward_hook, lambda module, args, value: added.update(positions=value))
        pattern = _patterns(model, tokens, "this model")[site.layer]
    start, twin = starts[site.layer], make_twin(model)
    resid = start.resid - added["positions"] if standard else start.resid
    none = None if standard else torch.zeros_like(resid)
    kwargs = dict(shortformer_pos_embed=none, attention_mask=start.attention_mask)
    seen = observe(twin, [site], resid, start_at_layer=site.layer, stop_at_layer=site.layer + 1, **kwargs)
    return pattern, seen.inputs[site.name]


def _pattern_with_query(
    model: HookedTransformer, tokens: Tensor, site: Site, new: Tensor
) -> Float[Tensor, "batch head query key"]:
    """The layer's pattern when its W_Q reads ``new`` at every position; keys and values are as they were."""
    name = HEAD_INPUTS["W_Q"]

    def exchange(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        old = kwargs[name]
        return args, {**kwargs, name: new[:, :, None].expand_as(old) if old.ndim == 4 else new}

    attention = model.get_submodule(site.name.rpartition(".")[0])
    with removing(HookSet()) as hooks:
        hooks.put(attention.register_forward_pre_hook, exchange, prepend=True, with_kwargs=True)  # a Run reads it too
        return attention_patterns(model, tokens)[site.layer]
