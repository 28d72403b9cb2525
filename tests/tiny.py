"""Tiny hosts of every supported style, with every parameter random (biases and norm gains too)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from tokenizers import Tokenizer, models, pre_tokenizers
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import PreTrainedTokenizerFast

from tl_spd.importance import ImportanceSpec, Vector
from tl_spd.losses import Faithfulness, ImportanceMinimality, Recon, StochasticRecon
from tl_spd.run import Run, new_run
from tl_spd.settings import FaithfulnessWarmup
from tl_spd.sites import find_sites
from tl_spd.train import decompose

VOCAB, N_CTX = 11, 8
TINY_VECTOR = Vector(d_gate=2)

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


def tiny_host(
    style: str = "gpt2", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> HookedTransformer:
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
    importance: ImportanceSpec = TINY_VECTOR,
    seed: int = 0,
) -> Run:
    """A Run with random components and importances around 0.5, away from the kinks but in hosts with an MLP and no norm."""
    found = find_sites(model, sites)
    run = new_run(model, found, {site.name: C for site in found}, importance, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for function in run.functions.values():
        for name, parameter in function.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if name.endswith("b1"):
                parameter.data = 0.3 * noise
            elif name.endswith("W2"):
                parameter.data = 0.004 * noise
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


def tiny_decompose(model: HookedTransformer, data: Any = None, **changes: Any) -> Run:
    """A short quiet training on both W_out, logged at every step, without warm-up; ``changes`` go to ``decompose``."""
    settings: dict[str, Any] = dict(
        sites="blocks.*.mlp.W_out",
        C=3,
        steps=4,
        importance=Vector(d_gate=2),
        losses=[Faithfulness(2.0), ImportanceMinimality(0.1), StochasticRecon(0.5), Recon(0.7)],
        warmup=FaithfulnessWarmup(steps=0),
        log_every=1,
        progress=False,
    )
    return decompose(model, tiny_tokens() if data is None else data, **settings | changes)


def same_runs(first: Run, second: Run) -> bool:
    """Whether two Runs agree in every bit of their parameters and in their histories."""
    ours, theirs = first.tensors(), second.tensors()
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and first.history.equals(second.history)


def exact_run(model: HookedTransformer, sites: str | tuple[str, ...] = "*", seed: int = 0) -> Run:
    """A Run whose components sum to the host's weights: singular vectors, with two subcomponents to spare."""
    found = find_sites(model, sites)
    return new_run(model, found, {s.name: min(s.d_in, s.d_out) + 2 for s in found}, Vector(d_gate=2), "svd", seed)


def tiny_tokenizer(side: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, ... (tokens 2, 3, ...), which pads on ``side`` with token 0 and begins with token 1."""
    words = ["[PAD]", "[BOS]", *(f"w{index}" for index in range(VOCAB - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[BOS]", pad_token="[PAD]", padding_side=side
    )  # TransformerLens takes the end token for the first one where a tokenizer names none


def host_parameters(model: HookedTransformer) -> dict[str, torch.nn.Parameter]:
    """The host's parameters under the names that sites have (grouped keys and values lose their underscore)."""
    return {name.replace("attn._", "attn."): parameter for name, parameter in model.named_parameters()}


def set_weights(model: HookedTransformer, matrices: Mapping[str, torch.Tensor]) -> None:
    """Put the matrices ``[d_in, d_out]`` in the place of the weights so named."""
    parameters = host_parameters(model)
    for name, matrix in matrices.items():
        if name.endswith(("W_Q", "W_K", "W_V")):
            matrix = rearrange(matrix, "d (h k) -> h d k", h=parameters[name].shape[0])
        elif name.endswith("W_O"):
            matrix = rearrange(matrix, "(h k) d -> h k d", h=parameters[name].shape[0])
        parameters[name].data.copy_(matrix)


def with_weights(model: HookedTransformer, matrices: Mapping[str, torch.Tensor]) -> HookedTransformer:
    """A deep copy of ``model`` with the matrices ``[d_in, d_out]`` in the place of the weights so named."""
    copied = copy.deepcopy(model)
    set_weights(copied, matrices)
    return copied


class Same:
    """Equal to what holds the very same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __repr__(self) -> str:
        return f"Same({self.value!r})"


def host_state(model: HookedTransformer) -> dict[str, Any]:
    """What an installation must leave as it was: hooks by identity and order, tensors by object and bits, flags."""
    state: dict[str, Any] = {"cfg": dict(vars(model.cfg)), "context_level": model.context_level}
    for path, module in model.named_modules():
        state[f"{path}: attributes"] = sorted(vars(module))
        state[f"{path}: training"] = module.training
        for key, value in vars(module).items():
            if "hooks" in key and isinstance(value, dict):
                state[f"{path}: {key}"] = [(index, Same(hook)) for index, hook in value.items()]
            elif "hooks" in key and isinstance(value, list):
                state[f"{path}: {key}"] = [Same(hook) for hook in value]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        state[name] = (Same(tensor), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, bits)
    return state


@contextlib.contextmanager
def unchanged(model: HookedTransformer) -> Iterator[None]:
    """Fails where ``host_state`` is not the same afterwards."""
    before = host_state(model)
    yield
    after = host_state(model)
    assert list(before) == list(after)
    assert [key for key in before if before[key] != after[key]] == []
