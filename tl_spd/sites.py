"""Sites: the weight matrices of a host, and the only place that knows TransformerLens.

A *site* is one weight matrix of a ``HookedTransformer``, named as TransformerLens names its parameter
(``blocks.0.attn.W_Q``) and used input-first, ``y = x W + b`` with ``W: [d_in, d_out]``; head axes are folded.

How a site is read and written, on transformer_lens 3.9:

1. Q, K, V read what the block hands to its attention: the last value seen on the way in, of ``hook_resid_pre``,
   ``hook_attn_in``, ``hook_{q,k,v}_input`` and the n-th call of ``ln1.hook_normalized`` (the block norms the three inputs
   in the order Q, K, V), after the norm's own gain and bias, plus shortformer positions for Q and K.
2. in and gate read the same way from ``hook_resid_mid`` (``hook_resid_pre`` in parallel blocks), ``hook_mlp_in``, ``ln2``.
3. O reads ``hook_z``, out reads ``mlp.hook_post``, the unembedding reads ``unembed.hook_in``.
4. Embeddings are look-ups: their input is an index (token or position), seen by a hook on the module.
5. Every output is replaced at a hook point right behind the matmul, so that caches and a user's hooks see it.

Everything else in the package works with the records and callables of this file.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer as HookedTransformer
from transformer_lens import HookedTransformerConfig as HookedTransformerConfig
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as KeyValueCache  # noqa: F401
from transformer_lens.hook_points import HookPoint as HookPoint
from transformer_lens.hook_points import LensHandle as LensHandle
from transformer_lens.patching import generic_activation_patch as generic_activation_patch
from transformer_lens.patching import layer_pos_patch_setter as layer_pos_patch_setter
from transformer_lens.utilities import get_attention_mask as get_attention_mask
from transformer_lens.utilities import get_offset_position_ids
from transformer_lens.utilities.activation_functions import apply_softcap as apply_softcap
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

KINDS = ("W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_gate", "W_in", "W_out", "W_U")
LOOKUPS = ("W_E", "W_pos")
Hook = tuple[str | Callable[..., Any], Callable[..., Any]]
"""What TransformerLens takes as a hook: a hook point's name (or a filter over names) and a function."""


@dataclass(frozen=True)
class Site:
    """One weight matrix of a host, ``[d_in, d_out]`` with head axes folded.

    ``layer`` is -1 for embeddings and ``n_layers`` for the unembedding. ``heads`` counts the blocks of the folded axis
    (``d_out`` for Q, K, V, ``d_in`` for O), 1 elsewhere.
    """

    name: str
    kind: str
    layer: int
    d_in: int
    d_out: int
    heads: int

    @property
    def lookup(self) -> bool:
        """Whether the input is an index (a token or a position) rather than a vector."""
        return self.kind in LOOKUPS

    @property
    def d_importance(self) -> int:
        """Width of what importance functions see: ``d_in``, or for look-ups the row looked up (``d_out``)."""
        return self.d_out if self.lookup else self.d_in


def _owner(model: HookedTransformer, name: str) -> tuple[nn.Module, str]:
    """The module that holds the parameter called ``name`` and the parameter's own key in it."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return module, f"_{key}" if f"_{key}" in module._parameters else key


def _refusal(model: HookedTransformer) -> str | None:
    """Why this host cannot be decomposed at all, or None."""
    cfg = model.cfg
    reasons = {
        "4-bit weights (load_in_4bit)": cfg.load_in_4bit,
        "mixture-of-experts layers (num_experts)": bool(cfg.num_experts),
        "norms before and after each layer (use_normalization_before_and_after)": (
            cfg.use_normalization_before_and_after
        ),
        f"the post-norm architecture {cfg.original_architecture}": cfg.original_architecture in POST_NORM_ARCHITECTURES,
        "a norm after the embedding (post_embedding_ln)": cfg.post_embedding_ln,
        f"positional_embedding_type {cfg.positional_embedding_type!r}": (
            cfg.positional_embedding_type not in ("standard", "rotary", "shortformer", "alibi")
        ),
        "a gated MLP with a layer-norm activation": bool(cfg.gated_mlp and cfg.is_layer_norm_activation()),
        "several devices (n_devices > 1)": cfg.n_devices > 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return ", ".join(found) or None


def all_sites(model: HookedTransformer) -> tuple[Site, ...]:
    """Every decomposable matrix of ``model`` in the order in which a forward pass uses them.

    Raises:
        TypeError: ``model`` is not a HookedTransformer.
        ValueError: the host has a part that is not supported, named in the message.
    """
    if not isinstance(model, HookedTransformer):
        raise TypeError(
            f"A host must be a transformer_lens.HookedTransformer, found {type(model).__name__}; "
            "tl_spd.hosts loads one by name, from a Hugging Face folder or from a GGUF file."
        )
    reason = _refusal(model)
    if reason:
        raise ValueError(f"This host cannot be decomposed: it has {reason}. Supported hosts are listed in the README.")
    names = ["embed.W_E"] + (
        ["pos_embed.W_pos"] if model.cfg.positional_embedding_type in ("standard", "shortformer") else []
    )
    for layer in range(model.cfg.n_layers):
        names += [f"blocks.{layer}.attn.{kind}" for kind in ("W_Q", "W_K", "W_V", "W_O")]
        if not model.cfg.attn_only:
            names += [f"blocks.{layer}.mlp.{kind}" for kind in ("W_gate", "W_in", "W_out")]
    names.append("unembed.W_U")
    return tuple(_site(model, name) for name in names if _exists(model, name))


def _exists(model: HookedTransformer, name: str) -> bool:
    module, key = _owner(model, name)
    return key in module._parameters


def _site(model: HookedTransformer, name: str) -> Site:
    module, key = _owner(model, name)
    shape = tuple(module._parameters[key].shape)  # type: ignore[union-attr]
    kind = name.rpartition(".")[2]
    layer = int(name.split(".")[1]) if name.startswith("blocks.") else (model.cfg.n_layers if kind == "W_U" else -1)
    heads = shape[0] if kind in ("W_Q", "W_K", "W_V", "W_O") else 1
    if kind in ("W_Q", "W_K", "W_V"):
        shape = (shape[1], shape[0] * shape[2])
    elif kind == "W_O":
        shape = (shape[0] * shape[1], shape[2])
    return Site(name, kind, layer, shape[0], shape[1], heads)


def find_sites(model: HookedTransformer, patterns: str | Iterable[str]) -> tuple[Site, ...]:
    """The sites of ``model`` whose names match any of the glob ``patterns``, each once, in forward order.

    Raises:
        ValueError: a pattern matches nothing; the message lists the names there are.
    """
    sites = all_sites(model)
    return match_sites(sites, patterns)


def match_sites(sites: Sequence[Site], patterns: str | Iterable[str]) -> tuple[Site, ...]:
    """Those of ``sites`` that match any of ``patterns``, in their own order; a pattern without a match is an error."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ValueError("No site pattern was given; ask for at least one, for example 'blocks.*.attn.W_Q'.")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(site.name, pattern) for site in sites):
            names = ", ".join(dict.fromkeys(_generic(site.name) for site in sites))
            raise ValueError(f"The site pattern {pattern!r} matches nothing here. Names there are: {names}.")
    return tuple(site for site in sites if any(fnmatch.fnmatchcase(site.name, p) for p in patterns))


def _generic(name: str) -> str:
    parts = name.split(".")
    return ".".join([parts[0], "{layer}", *parts[2:]]) if parts[0] == "blocks" else name


# --- weights ---------------------------------------------------------------------------------------------------------


def fold(site: Site, weight: Tensor) -> Float[Tensor, "d_in d_out"]:
    """TransformerLens's own shape of ``site``'s weight, as the matrix ``[d_in, d_out]``."""
    if site.kind in ("W_Q", "W_K", "W_V"):
        return weight.permute(1, 0, 2).reshape(site.d_in, site.d_out)
    return weight.reshape(site.d_in, site.d_out)


def unfold(site: Site, matrix: Float[Tensor, "d_in d_out"]) -> Tensor:
    """The matrix ``[d_in, d_out]`` in the shape in which TransformerLens stores it."""
    if site.kind in ("W_Q", "W_K", "W_V"):
        return matrix.reshape(site.d_in, site.heads, -1).permute(1, 0, 2).contiguous()
    if site.kind == "W_O":
        return matrix.reshape(site.heads, -1, site.d_out).contiguous()
    return matrix.contiguous()


def parameter(model: HookedTransformer, site: Site) -> nn.Parameter:
    """The host's own parameter of ``site`` (unfolded, the object itself)."""
    module, key = _owner(model, site.name)
    return module._parameters[key]  # type: ignore[return-value]


def replace_parameter(model: HookedTransformer, site: Site, new: nn.Parameter) -> nn.Parameter:
    """Put ``new`` in the place of the host's parameter of ``site`` and return the one that was there."""
    module, key = _owner(model, site.name)
    old = module._parameters[key]
    module._parameters[key] = new
    return old  # type: ignore[return-value]


def weight(model: HookedTransformer, site: Site) -> Float[Tensor, "d_in d_out"]:
    """The host's weight of ``site``, detached, folded to ``[d_in, d_out]``."""
    return fold(site, parameter(model, site).detach())


def bias(model: HookedTransformer, site: Site) -> Float[Tensor, "d_out"] | None:
    """The bias the host adds right behind ``site``'s matmul, folded, with its gradient; None where there is none."""
    key = {"W_in": "b_in", "W_out": "b_out", "W_U": "b_U"}.get(site.kind, site.kind.replace("W_", "b_"))
    gated_in = site.kind == "W_in" and model.cfg.gated_mlp  # a gated MLP adds b_in behind the product, not behind W_in
    if site.lookup or site.kind == "W_gate" or gated_in:
        return None
    module, key = _owner(model, site.name.rpartition(".")[0] + "." + key)
    value = module._parameters.get(key)
    return None if value is None else value.reshape(-1)


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of shapes, dtypes and bits."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def fingerprint(model: HookedTransformer, sites: Sequence[Site]) -> dict[str, str]:
    """A digest of every decomposed weight and one of all the host's parameters, to recognise the host again."""
    return {site.name: digest([parameter(model, site)]) for site in sites} | {"*": digest(model.parameters())}


def host_dtype(model: HookedTransformer) -> torch.dtype:
    """The dtype of the host's weights."""
    return model.embed.W_E.dtype


def host_device(model: HookedTransformer) -> torch.device:
    """The device of the host's weights."""
    return model.embed.W_E.device


def n_ctx(model: HookedTransformer) -> int:
    """The longest input the host takes, in tokens."""
    return model.cfg.n_ctx


def d_vocab(model: HookedTransformer) -> int:
    """The number of tokens in the host's vocabulary."""
    return model.cfg.d_vocab


def n_layers(model: HookedTransformer) -> int:
    """The number of blocks of the host."""
    return model.cfg.n_layers


def gather_positions(cached: int, attention_mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Position indices ``[batch, pos]`` that TransformerLens's positional embedding looks up (-1: a padded place)."""
    batch, pos = tokens.shape
    if attention_mask is None:
        return torch.arange(cached, cached + pos, device=tokens.device).expand(batch, pos)
    positions = get_offset_position_ids(cached, attention_mask)
    real = attention_mask[:, cached : cached + pos].bool()
    return torch.where(real, positions, torch.full_like(positions, -1))


# --- states of a pass ------------------------------------------------------------------------------------------------

STATES = {"resid": "hook_resid_post", "mlp": "hook_mlp_out", "attn": "hook_attn_out"}
"""States of a layer, ``[batch, pos, d_model]``: the residual stream behind it, its MLP's and its attention's output."""

EMBEDDING_POINT = "hook_embed"
"""The hook point of the token embeddings, before positions are added."""


def state_point(kind: str, layer: int) -> str:
    """The hook point of a layer's state; ``kind`` is a key of ``STATES``."""
    return f"blocks.{layer}.{STATES[kind]}"


def state_kinds(model: HookedTransformer) -> tuple[str, ...]:
    """The kinds of states that this host's layers have: no ``"mlp"`` in attention-only hosts."""
    return tuple(kind for kind in STATES if kind != "mlp" or not model.cfg.attn_only)


def embedding_matrix(model: HookedTransformer) -> Float[Tensor, "d_vocab d_model"]:
    """The token embeddings, detached."""
    return model.embed.W_E.detach()


# --- text ------------------------------------------------------------------------------------------------------------


def text_tokens(model: HookedTransformer, text: str) -> Int[Tensor, "1 pos"]:
    """``text`` as the host's tokenizer and ``default_prepend_bos`` make it, never cut off.

    Raises:
        ValueError: the host has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"This host has no tokenizer for {text!r}; give tokens [1, pos], or model.set_tokenizer(...).")
    return model.to_tokens(text, truncate=False)


def text_spans(model: HookedTransformer, text: str) -> list[tuple[int, int] | None]:
    """Which characters ``(start, end)`` of ``text`` each of its tokens stands for; None for an added first token.

    Raises:
        ValueError: the tokenizer cannot tell, or the tokens are not those of the text with others in front.
    """
    tokens = text_tokens(model, text)[0].tolist()
    if not getattr(model.tokenizer, "is_fast", False):
        raise ValueError("This host's tokenizer does not tell where tokens are in a text; give positions instead.")
    found = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # type: ignore[misc]
    ids, added = list(found["input_ids"]), len(tokens) - len(found["input_ids"])
    if added < 0 or tokens[added:] != ids:
        raise ValueError(f"The tokens {tokens} of {text!r} do not end with its own {ids}; give positions instead.")
    return [None] * added + [(start, end) for start, end in found["offset_mapping"]]


def one_token(model: HookedTransformer, text: str) -> int:
    """The one token that ``text`` is for the host's tokenizer; ValueError if it is none or several."""
    if model.tokenizer is None:
        raise ValueError(f"This host has no tokenizer for {text!r}; give the token's number.")
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"{text!r} is {len(ids)} tokens for this host's tokenizer; an answer must be one. Mind its space."
        )
    return ids[0]


def token_texts(model: HookedTransformer, tokens: Int[Tensor, "pos"]) -> list[str]:
    """Every token as text, or its number where the host has no tokenizer."""
    numbers, tokenizer = tokens.tolist(), model.tokenizer
    return [str(number) if tokenizer is None else str(tokenizer.decode([number])) for number in numbers]
