"""Installing a Run: against hosts whose weights were really swapped, explicit algebra, and the host's state before."""

# ruff: noqa: PT012 - what raises is often the leaving of a context, with a whole block in it

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum, rearrange
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.hook_points import HookPoint

import tl_spd as spd
import tl_spd.install
import tl_spd.wiring
from tests.tiny import (
    MORE_STYLES,
    STYLES,
    exact_run,
    host_parameters,
    host_state,
    tiny_host,
    tiny_padding,
    tiny_run,
    tiny_tokenizer,
    tiny_tokens,
    unchanged,
    with_weights,
)
from tl_spd.install import pass_hooks
from tl_spd.run import Run
from tl_spd.suppress import suppressed_weight

ALL = [*STYLES, *MORE_STYLES]
GROUPED = ("llama",)
TOKENS = tiny_tokens()
SIDES = [None, "left", "right"]
TEXTS = ["w0 w3 w1 w2", "w4 w0", "w7 w7 w8"]

FLAGS: dict[str, list[str]] = {
    "plain": [],
    "split": ["use_split_qkv_input"],
    "attn_in": ["use_attn_in"],
    "result": ["use_attn_result"],
    "mlp_in": ["use_hook_mlp_in"],
    "ungroup": ["ungroup_grouped_query_attention"],
    "attn_in ungroup": ["use_attn_in", "ungroup_grouped_query_attention"],
    "most": ["use_split_qkv_input", "use_attn_result", "use_hook_mlp_in"],
    "most ungroup": ["use_split_qkv_input", "use_attn_result", "use_hook_mlp_in", "ungroup_grouped_query_attention"],
    "both inputs": ["use_split_qkv_input", "use_attn_in", "use_attn_result"],
}


def used(style: str) -> tuple[str, ...]:
    """Sites that a pass reaches: TransformerLens makes a positional embedding for ALiBi hosts, and leaves it alone."""
    return ("embed.*", "blocks.*", "unembed.*") if style == "rmspre_alibi" else ("*",)


def supported(style: str, flags: str) -> bool:
    """Whether TransformerLens knows this combination: grouped heads can be ungrouped, and only then share ``attn_in``."""
    ungrouped = "ungroup_grouped_query_attention" in FLAGS[flags]
    if style in GROUPED:
        return ungrouped or "use_attn_in" not in FLAGS[flags]
    return not ungrouped and not (
        style == "shortformer" and "use_hook_mlp_in" in FLAGS[flags] and len(FLAGS[flags]) == 1
    )


CASES = [(style, flags) for style in ALL for flags in FLAGS if supported(style, flags)]
ENDS = [(style, flags) for style, flags in CASES if flags in ("plain", "most ungroup" if style in GROUPED else "most")]


def sides(flags: str) -> list[str | None]:
    """Padding matters little to the flags between none and most of them."""
    return SIDES if flags in ("plain", "most", "most ungroup") else [None]


def flagged_host(
    style: str, flags: str = "plain", dtype: torch.dtype = torch.float64, **changes: Any
) -> HookedTransformer:
    return tiny_host(style, dtype=dtype, **dict.fromkeys(FLAGS[flags], True), **changes)


@functools.cache
def run_for(style: str, dtype: torch.dtype = torch.float64, exact: bool = False) -> Run:
    """A Run of every site for the tiny hosts of this style, whose weights are the same whatever their flags."""
    model = tiny_host(style, dtype=dtype)
    return exact_run(model) if exact else tiny_run(model, used(style))


def points_in_use(model: HookedTransformer) -> list[str]:
    """The hook points that a pass reaches; TransformerLens refuses hooks at some of the others."""
    return [*model.run_with_cache(TOKENS)[1]]


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted value."""
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> bool:
    return error(found, wanted) <= tolerance


def random_masks(run: Run, seed: int = 0, *shape: int) -> dict[str, Tensor]:
    """Masks ``[*shape, C]`` with entries from -0.5 to 1.5: nothing is assumed about their range."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(*shape, parts.C, generator=generator, dtype=parts.read.dtype) * 2 - 0.5
        for name, parts in run.components.items()
    }


def masked_weights(run: Run, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices that masks ``[C]`` amount to."""
    return {
        name: ((run.components[name].read * mask) @ run.components[name].write).detach() for name, mask in masks.items()
    }


def zeros(run: Run) -> dict[str, Tensor]:
    return {name: torch.zeros(parts.C, dtype=parts.read.dtype) for name, parts in run.components.items()}


# --- what a mask amounts to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "flags", "dtype"),
    [(*case, torch.float64) for case in CASES] + [(*case, torch.float32) for case in ENDS],
    ids=str,
)
def test_ones_and_exact_components_change_nothing(style: str, flags: str, dtype: torch.dtype) -> None:
    model = flagged_host(style, flags, dtype)
    run, masks = run_for(style, dtype, exact=True), [tiny_padding(side) for side in sides(flags)]
    plain = [model(TOKENS, attention_mask=mask) for mask in masks]
    with unchanged(model), spd.decomposed(model, run, masks="ones"):
        for mask, wanted in zip(masks, plain, strict=True):
            assert close(model(TOKENS, attention_mask=mask), wanted, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("style", ALL)
def test_each_exact_site_alone_changes_nothing(style: str) -> None:
    model = tiny_host(style)
    run, wanted = run_for(style, exact=True), model(TOKENS)
    for name in run.components:
        with spd.decomposed(model, run, masks="ones", sites=name):
            assert close(model(TOKENS), wanted)


@pytest.mark.parametrize("style", ALL)
def test_zero_masks_are_zero_weights(style: str) -> None:
    model = tiny_host(style)
    run = run_for(style)
    nothing = {name: torch.zeros(parts.site.d_in, parts.site.d_out) for name, parts in run.components.items()}
    alone = [[name] for name in run.components] if style in ("gpt2", "llama") else []
    for names in ([*run.components], *alone):
        wanted = with_weights(model, {name: nothing[name] for name in names})(TOKENS)
        with spd.decomposed(model, run, masks={name: zeros(run)[name] for name in names}):
            found = model(TOKENS)
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("style", "flags"), CASES)
def test_static_masks_are_the_weights_they_amount_to(style: str, flags: str) -> None:
    model = flagged_host(style, flags)
    run = run_for(style)
    masks = random_masks(run)
    swapped = with_weights(model, masked_weights(run, masks))
    for side in sides(flags):
        wanted, wanted_cache = swapped.run_with_cache(TOKENS, attention_mask=tiny_padding(side))
        with spd.decomposed(model, run, masks=masks):
            found, cache = model.run_with_cache(TOKENS, attention_mask=tiny_padding(side))
        assert close(found, wanted)
        assert list(cache) == list(wanted_cache)
        different = [
            name for name in cache if not torch.allclose(cache[name], wanted_cache[name], rtol=1e-9, atol=1e-11)
        ]
        assert different == []


@pytest.mark.parametrize("style", STYLES)
def test_each_static_mask_alone_is_the_weight_it_amounts_to(style: str) -> None:
    model = flagged_host(style, "most" if style not in GROUPED else "most ungroup")
    run = run_for(style)
    masks = random_masks(run)
    for name, matrix in masked_weights(run, masks).items():
        with spd.decomposed(model, run, masks={name: masks[name]}):
            found = model(TOKENS)
        assert close(found, with_weights(model, {name: matrix})(TOKENS))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 1), (1, 5, 3), (3, 1, 3), (3, 5, 1)], ids=str)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.0.*")
    generator = torch.Generator().manual_seed(3)
    masks = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name in run.components}
    whole = {name: mask.expand(3, 5, 3).contiguous() for name, mask in masks.items()}
    with spd.decomposed(model, run, masks=masks):
        found = model(TOKENS)
    with spd.decomposed(model, run, masks=whole):
        assert close(found, model(TOKENS))


def test_boolean_and_single_precision_masks() -> None:
    model = tiny_host()
    run = tiny_run(model)
    masks = {name: mask > 0.5 for name, mask in random_masks(run, 1, 3, 5).items()}
    found = []
    for dtype in (torch.bool, torch.float32, torch.float64, torch.bfloat16):
        with spd.decomposed(model, run, masks={name: mask.to(dtype) for name, mask in masks.items()}):
            found.append(model(TOKENS))
    assert all(torch.equal(first, found[0]) for first in found)


# --- masks that differ from token to token ---------------------------------------------------------------------------


def by_hand(model: HookedTransformer, run: Run, name: str, mask: Tensor, cache: Mapping[str, Tensor]) -> Tensor:
    """The masked output of a site of layer 1, from what the host's own cache shows of its input."""
    kind, block, prefix = name.rpartition(".")[2], model.blocks[1], "blocks.1."
    parameters = host_parameters(model)
    if kind in ("W_Q", "W_K", "W_V", "W_in", "W_gate"):
        norm = block.ln1 if "attn" in name else block.ln2
        x = cache[prefix + ("ln1" if "attn" in name else "ln2") + ".hook_normalized"] * norm.w
        x = x + norm.b if hasattr(norm, "b") else x
    elif kind == "W_O":
        x = rearrange(cache[prefix + "attn.hook_z"], "b p h k -> b p (h k)")
    elif kind == "W_out":
        x = cache[prefix + "mlp.hook_post"]
    elif kind == "W_U":
        x = cache["ln_final.hook_normalized"] * model.ln_final.w + model.ln_final.b
    else:
        index = TOKENS if kind == "W_E" else torch.arange(5).expand(3, 5)
        x = torch.nn.functional.one_hot(index, 11 if kind == "W_E" else 8).double()
    parts = run.components[name]
    y = einsum(x, parts.read, mask, parts.write, "b p i, i c, b p c, c o -> b p o")
    bias = parameters.get(name.replace("W_", "b_"))
    if bias is not None and not (kind in ("W_gate", "W_in") and model.cfg.gated_mlp):
        y = y + bias.reshape(-1)
    return rearrange(y, "b p (h k) -> b p h k", h=bias.shape[0]) if kind in ("W_Q", "W_K", "W_V") else y


@pytest.mark.parametrize(
    ("style", "name", "point"),
    [
        ("gpt2", "embed.W_E", "hook_embed"),
        ("gpt2", "pos_embed.W_pos", "hook_pos_embed"),
        ("gpt2", "blocks.1.attn.W_Q", "blocks.1.attn.hook_q"),
        ("gpt2", "blocks.1.attn.W_O", "blocks.1.hook_attn_out"),
        ("gpt2", "blocks.1.mlp.W_in", "blocks.1.mlp.hook_pre"),
        ("gpt2", "blocks.1.mlp.W_out", "blocks.1.hook_mlp_out"),
        ("gpt2", "unembed.W_U", "unembed.hook_out"),
        ("llama", "blocks.1.attn.W_K", "blocks.1.attn.hook_k"),
        ("llama", "blocks.1.attn.W_V", "blocks.1.attn.hook_v"),
        ("llama", "blocks.1.mlp.W_gate", "blocks.1.mlp.hook_pre"),
        ("llama", "blocks.1.mlp.W_in", "blocks.1.mlp.hook_pre_linear"),
    ],
)
def test_token_masks_by_hand(style: str, name: str, point: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model, name)
    masks = random_masks(run, 5, 3, 5)
    _, plain = model.run_with_cache(TOKENS)
    wanted = by_hand(model, run, name, masks[name], plain)
    with spd.decomposed(model, run, masks=masks):
        logits, cache = model.run_with_cache(TOKENS)
    assert close(cache[point], wanted)
    patched = model.run_with_hooks(TOKENS, fwd_hooks=[(point, lambda value, hook: wanted)])
    assert close(logits, patched)  # and it is handed on
    assert not close(logits, model(TOKENS), 1e-3)


@pytest.mark.parametrize("flags", ["result", "most"])
def test_token_masks_by_hand_per_head(flags: str) -> None:
    model = flagged_host("gpt2", flags)
    name = "blocks.1.attn.W_O"
    run = tiny_run(model, name)
    masks = random_masks(run, 5, 3, 5)
    _, plain = model.run_with_cache(TOKENS)
    read = rearrange(run.components[name].read, "(h k) c -> h k c", h=2)
    inner = einsum(plain["blocks.1.attn.hook_z"], read, masks[name], "b p h k, h k c, b p c -> b p h c")
    with spd.decomposed(model, run, masks=masks):
        _, cache = model.run_with_cache(TOKENS)
    assert close(cache["blocks.1.attn.hook_result"], inner @ run.components[name].write)
    whole = cache["blocks.1.attn.hook_result"].sum(2) + model.blocks[1].attn.b_O
    assert close(cache["blocks.1.hook_attn_out"], whole)


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@pytest.mark.parametrize("style", ["gpt2", "llama", "shortformer"])
def test_one_heads_input_is_read_by_that_head_alone(style: str, kind: str) -> None:
    model = flagged_host(style, "split")
    name, point = f"blocks.1.attn.W_{kind.upper()}", f"blocks.1.hook_{kind}_input"
    run = tiny_run(model, name)
    masks = random_masks(run, 5, 3, 5)
    heads = host_parameters(model)[name].shape[0]
    noise = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen: dict[str, Tensor] = {}

    def patch(value: Tensor, hook: HookPoint) -> Tensor:
        value = value.clone()
        value[:, :, -1] = noise
        seen["input"] = value
        return value

    with spd.decomposed(model, run, masks=masks):
        _, before = model.run_with_cache(TOKENS)
        with model.hooks(fwd_hooks=[(point, patch)]):
            _, after = model.run_with_cache(TOKENS)
    x = model.blocks[1].ln1(seen["input"])
    if style == "shortformer" and kind != "v":
        x = x + before["hook_pos_embed"][:, :, None]
    parts, bias = run.components[name], host_parameters(model)[name.replace("W_", "b_")]
    write = rearrange(parts.write, "c (h k) -> c h k", h=heads)
    wanted = einsum(x, parts.read, masks[name], write, "b p h i, i c, b p c, c h k -> b p h k") + bias
    assert close(after[f"blocks.1.attn.hook_{kind}"], wanted)
    assert torch.equal(after[f"blocks.1.attn.hook_{kind}"][:, :, :-1], before[f"blocks.1.attn.hook_{kind}"][:, :, :-1])


@pytest.mark.parametrize("flags", ["plain", "most"])
@pytest.mark.parametrize("style", ALL)
def test_caches_are_of_one_consistent_pass(style: str, flags: str) -> None:
    model = flagged_host(style, flags)
    run = tiny_run(model, "blocks.*")
    with spd.decomposed(model, run, masks=random_masks(run, 2, 3, 5)):
        logits, cache = model.run_with_cache(TOKENS)
    for layer in range(2):
        block = f"blocks.{layer}."
        total = cache[block + "hook_resid_pre"] + cache[block + "hook_attn_out"]
        total = total + (0 if model.cfg.attn_only else cache[block + "hook_mlp_out"])
        assert close(cache[block + "hook_resid_post"], total)
    resid = cache["blocks.1.hook_resid_post"]
    unembedded = model.unembed(resid if model.cfg.normalization_type is None else model.ln_final(resid))
    cap = model.cfg.output_logits_soft_cap
    assert close(logits, cap * torch.tanh(unembedded / cap) if cap > 0 else unembedded)


# --- the user's hooks ------------------------------------------------------------------------------------------------


def alter(value: Tensor, hook: HookPoint) -> Tensor:
    """Some change of every entry, different at every place."""
    return value * 1.25 + 0.1 * torch.arange(value.numel(), dtype=value.dtype).remainder(7).reshape(value.shape)


Patch = Callable[[HookedTransformer, str], Any]


def added(model: HookedTransformer, point: str) -> Tensor:
    model.add_hook(point, alter)
    return model(TOKENS)


def prepended(model: HookedTransformer, point: str) -> Tensor:
    model.add_hook(point, alter, prepend=True)
    return model(TOKENS)


def permanent(model: HookedTransformer, point: str) -> Tensor:
    model.add_perma_hook(point, alter)
    return model(TOKENS)


def run_with(model: HookedTransformer, point: str) -> Tensor:
    return model.run_with_hooks(TOKENS, fwd_hooks=[(point, alter)])


def within(model: HookedTransformer, point: str) -> Tensor:
    with model.hooks(fwd_hooks=[(lambda name: name == point, alter)]):
        return model(TOKENS)


@pytest.mark.parametrize(
    ("style", "way"),
    [("gpt2", prepended), ("gpt2", permanent), ("gpt2", within), ("llama", added), ("llama", run_with)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_hook_point_can_be_patched_inside(style: str, way: Patch) -> None:
    model = flagged_host(style, "most")
    run = tiny_run(model)
    masks = random_masks(run)
    swapped = with_weights(model, masked_weights(run, masks))
    points = [name for name in points_in_use(model) if not name.startswith("blocks.1.")]
    with spd.decomposed(model, run, masks=masks):
        for point in points:
            found = way(model, point)
            model.hook_dict[point].remove_hooks() if way is not permanent else drop_last(model.hook_dict[point])
            wanted = way(swapped, point)
            swapped.reset_hooks(including_permanent=True)
            assert close(found, wanted), point


def drop_last(point: HookPoint) -> None:
    point.fwd_hooks.pop().hook.remove()


@pytest.mark.parametrize("style", ALL)
def test_hooks_put_on_before_entering_act_on_the_masked_pass(style: str) -> None:
    model = flagged_host(style, "plain" if style == "shortformer" else "mlp_in")
    run = run_for(style)
    masks = random_masks(run)
    names = ("hook_z", "mlp.hook_post", "hook_q", "hook_resid_mid", "hook_normalized", "hook_mlp_in", "hook_attn_out")
    points = [name for name in points_in_use(model) if name.endswith(names)]
    model.add_hook(lambda name: name in points, alter)
    swapped = with_weights(model, masked_weights(run, masks))
    with unchanged(model), spd.decomposed(model, run, masks=masks):
        found = model(TOKENS)
    assert close(found, swapped(TOKENS))


@pytest.mark.parametrize("masks", ["importance", "ones", "stochastic"])
def test_hooks_fire_once_per_call_and_in_their_order(masks: str) -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model)
    fired: list[tuple[str, str]] = []

    def note(label: str) -> Callable[..., None]:
        return lambda value, hook: fired.append((label, hook.name))

    points = points_in_use(model)
    model.add_hook(lambda name: name in points, note("early"))
    model.add_hook("blocks.0.attn.hook_q", note("front"), prepend=True)
    model(TOKENS)
    alone = fired.copy()
    fired.clear()
    with spd.decomposed(model, run, masks=masks, generator=torch.Generator()):
        for call in (model, model.forward, model.run_with_cache):
            call(TOKENS)
            assert fired == alone
            fired.clear()
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", note("late"))])
    late = ("late", "blocks.1.attn.hook_z")
    assert [entry for entry in fired if entry != late] == alone
    assert fired.index(late) == fired.index(("early", "blocks.1.attn.hook_z")) + 1
    assert fired.count(late) == 1


@pytest.mark.parametrize("style", ALL)
def test_backward_hooks_and_gradients_are_those_of_swapped_weights(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    masks = random_masks(run)
    swapped = with_weights(model, masked_weights(run, masks))
    loss, wanted = swapped.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    with spd.decomposed(model, run, masks=masks):
        found_loss, found = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert close(found_loss, loss)
    assert list(found) == list(wanted)
    gradients = [name for name in found if name.endswith("_grad")]
    assert "blocks.0.attn.hook_q_grad" in gradients
    assert [n for n in gradients if not torch.allclose(found[n], wanted[n], rtol=1e-8, atol=1e-11)] == []


@pytest.mark.parametrize("style", ["gpt2", "llama", "shortformer"])
def test_parameter_gradients_are_those_of_swapped_weights(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model, "blocks.1.*")
    masks = random_masks(run)
    swapped = with_weights(model, masked_weights(run, masks))
    with spd.decomposed(model, run, masks=masks):
        loss = model(TOKENS, return_type="loss")
    loss.backward()  # after leaving
    swapped(TOKENS, return_type="loss").backward()
    ours, theirs = host_parameters(model), host_parameters(swapped)
    assert all(ours[name].grad is None for name in run.components)
    for name in set(ours) - set(run.components):
        assert torch.allclose(ours[name].grad, theirs[name].grad, rtol=1e-8, atol=1e-11), name
    for name, parts in run.components.items():  # chain rule through read * m @ write
        gradient = theirs[name].grad
        if name.endswith(("W_Q", "W_K", "W_V")):
            gradient = rearrange(gradient, "h d k -> d (h k)")
        gradient = gradient.reshape(parts.site.d_in, parts.site.d_out)
        assert torch.allclose(parts.read.grad, gradient @ (masks[name][:, None] * parts.write).T, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_backward_hooks_alter_the_masked_pass(style: str) -> None:
    model = flagged_host(style, "result")
    run = tiny_run(model, "blocks.*")
    masks = random_masks(run)
    swapped = with_weights(model, masked_weights(run, masks))
    points = [name for name in points_in_use(model) if name.startswith(("blocks.1.", "unembed", "ln_final"))]
    fired: list[str] = []

    def scale(gradient: Tensor, hook: HookPoint) -> Tensor:
        fired.append(hook.name)
        return gradient * (1 + torch.arange(gradient.shape[-1]) / 9)

    def gradient(host: HookedTransformer, point: str) -> Tensor:
        with host.hooks(bwd_hooks=[(point, scale)]):
            return torch.autograd.grad(host(TOKENS, return_type="loss"), host.embed.W_E)[0]

    with spd.decomposed(model, run, masks=masks):
        for point in points:
            found, count = gradient(model, point), len(fired)
            assert count > 0
            fired.clear()
            assert close(found, gradient(swapped, point), 1e-8), point
            assert fired == [point] * count
            fired.clear()


def test_calls_inside_a_call() -> None:
    model = tiny_host()
    run = tiny_run(model)
    other = tiny_tokens(2, 4, seed=7)
    inner: list[Tensor] = []

    def call_again(value: Tensor, hook: HookPoint) -> None:
        if not inner:
            inner.append(value)
            inner.extend([model(other), model(other)])

    with spd.decomposed(model, run):
        wanted, wanted_inner = model(TOKENS), model(other)
        for point in ("blocks.0.attn.hook_q", "blocks.0.ln1.hook_normalized", "blocks.1.attn.hook_z", "hook_embed"):
            assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[(point, call_again)]), wanted)
            assert torch.equal(inner[2], wanted_inner)
            inner.clear()


# --- other ways of calling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", ["gpt2", "llama", "shortformer"])
def test_text_and_padding_by_the_tokenizer(style: str, side: str) -> None:
    model = tiny_host(style)
    model.set_tokenizer(tiny_tokenizer(side))
    exact, run = exact_run(model), tiny_run(model, importance=spd.Attention(d_gate=2))
    tokens = model.to_tokens(TEXTS)
    assert (tokens == 0).any()
    plain = model(TEXTS)
    with unchanged(model), spd.decomposed(model, exact, masks="ones"):
        assert close(model(TEXTS), plain)
        assert close(model(tokens), plain)
    importances = run.importances(model, tokens)
    assert importances.real is not None
    with spd.decomposed(model, run, masks=dict(importances)):
        wanted = model(tokens)
    with unchanged(model), spd.decomposed(model, run):
        assert torch.equal(model(TEXTS), wanted)
        assert torch.equal(model(input=TEXTS), wanted)
        assert torch.equal(model(tokens), wanted)
        assert torch.equal(model.run_with_hooks(TEXTS, fwd_hooks=[]), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("own", ["left", "right"])
def test_a_calls_own_padding_side(own: str, side: str) -> None:
    model = tiny_host("llama")
    model.set_tokenizer(tiny_tokenizer(own))
    run = tiny_run(model, importance=spd.Attention(d_gate=2))
    with spd.decomposed(model, run):
        found = model(TEXTS, padding_side=side, prepend_bos=False)
        assert torch.equal(model(TEXTS, "logits", False, False, side), found)  # the same by position
    assert model.tokenizer.padding_side == own
    model.tokenizer.padding_side = side
    importances = run.importances(model, model.to_tokens(TEXTS, prepend_bos=False))
    with spd.decomposed(model, run, masks=dict(importances)):
        assert torch.equal(model(TEXTS, prepend_bos=False), found)


def test_tokens_without_a_batch_axis() -> None:
    model = tiny_host()
    run = tiny_run(model)
    with spd.decomposed(model, run):
        assert torch.equal(model(TOKENS[0]), model(TOKENS[:1]))
        assert torch.allclose(model(TOKENS[0]), model(TOKENS)[:1], rtol=1e-10)


@pytest.mark.parametrize("style", ["gpt2", "llama", "parallel", "shortformer"])
def test_starting_and_stopping_at_a_layer(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    importances = run.importances(model, TOKENS)
    swapped = with_weights(model, masked_weights(run, random_masks(run)))
    _, cache = model.run_with_cache(TOKENS)
    resid = cache["blocks.1.hook_resid_pre"]
    start = {"start_at_layer": 1}
    if style == "shortformer":
        start["shortformer_pos_embed"] = cache["hook_pos_embed"]
    later = [site.name for site in run.select(["blocks.1.*", "unembed.W_U"])]
    with spd.decomposed(model, run, masks={name: importances[name] for name in later}):
        late = model(TOKENS)
    with spd.decomposed(model, run, masks=dict(importances)):
        early = [model(TOKENS, stop_at_layer=layer) for layer in (0, 1, 2, -1)]
    with unchanged(model), spd.decomposed(model, run):
        assert torch.allclose(model(resid, **start), late, rtol=1e-10)
        for layer, wanted in zip((0, 1, 2, -1), early, strict=True):
            assert torch.equal(model(TOKENS, stop_at_layer=layer), wanted)
        between = model(resid, **start, stop_at_layer=2)
        assert model(TOKENS, return_type=None) is None
        assert model(TOKENS, return_type="both").loss.shape == ()
    with spd.decomposed(model, run, masks=random_masks(run)):
        assert close(model(resid, **start), swapped(resid, **start))
        assert close(model(TOKENS, stop_at_layer=0), swapped(TOKENS, stop_at_layer=0))
    assert between.shape == resid.shape


def test_a_mask_of_padding_counts_when_no_block_is_reached() -> None:
    model, mask = tiny_host(), tiny_padding("left")
    run = tiny_run(model, "embed.*", importance=spd.Attention(d_gate=2))
    with spd.decomposed(model, run, masks=dict(run.importances(model, TOKENS, mask))):
        wanted = model(TOKENS, attention_mask=mask, stop_at_layer=0)
    with spd.decomposed(model, run):
        assert torch.equal(model(TOKENS, attention_mask=mask, stop_at_layer=0), wanted)
        assert not torch.equal(model(TOKENS, stop_at_layer=0), wanted)


def greedy(model: HookedTransformer, tokens: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    logits = []
    for _ in range(steps):
        logits.append(model(tokens)[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return tokens, logits


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("style", ["gpt2", "llama", "rmspre_alibi", "shortformer", "parallel"])
def test_generate(style: str, cached: bool) -> None:
    model = tiny_host(style)
    model.set_tokenizer(tiny_tokenizer("left"))
    run = tiny_run(model, "blocks.*")
    tokens = model.to_tokens(TEXTS)
    settings = {"do_sample": False, "stop_at_eos": False, "verbose": False, "use_past_kv_cache": cached}
    with unchanged(model), spd.decomposed(model, run):
        wanted, logits = greedy(model, tokens, 3)
        found = model.generate(tokens, max_new_tokens=3, output_logits=True, **settings)
        assert torch.equal(found.sequences, wanted)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found.logits, logits, strict=True))
        texts = model.generate(TEXTS, max_new_tokens=3, **settings)
        assert texts == [model.tokenizer.decode(row, skip_special_tokens=True) for row in wanted]
    assert model.generate(TEXTS, max_new_tokens=3, **settings) != texts


def test_generate_without_a_tokenizer() -> None:
    model = tiny_host("llama")
    run = tiny_run(model, "*")
    with unchanged(model), spd.decomposed(model, run, sites=["blocks.*", "unembed.W_U"]):
        wanted, _ = greedy(model, TOKENS, 3)
        for cached in (False, True):
            found = model.generate(
                TOKENS, 3, do_sample=False, stop_at_eos=False, verbose=False, use_past_kv_cache=cached
            )
            assert torch.equal(found, wanted)
        stream = model.generate_stream(
            TOKENS, 3, do_sample=False, stop_at_eos=False, verbose=False, use_past_kv_cache=False
        )
        assert torch.equal(torch.cat([*stream], dim=1), wanted)


@pytest.mark.parametrize("name", ["embed.W_E", "pos_embed.W_pos"])
def test_generate_refuses_masked_embeddings(name: str) -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, (name, "blocks.0.attn.W_Q"))
    settings = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    for masks in ("importance", "ones"):
        message = f"{name}.*outside a call"
        with unchanged(model), spd.decomposed(model, run, masks=masks), pytest.raises(RuntimeError, match=message):
            model.generate(TOKENS[:, :2], 2, **settings)


@pytest.mark.parametrize("point", ["hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre"])
def test_a_refused_generate_in_which_a_hook_raises_leaves_nothing_behind(point: str) -> None:
    model = tiny_host("gpt2")
    settings = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    for name in ("embed.W_E", "pos_embed.W_pos"):
        with spd.decomposed(model, tiny_run(model, name), masks="ones"):
            wanted = model(TOKENS)
            with pytest.raises((RuntimeError, Stop)), model.hooks(fwd_hooks=[(point, raising(Stop()))]):
                model.generate(TOKENS[:, :2], 2, **settings)
            assert torch.equal(model(TOKENS), wanted)


def test_key_value_caches() -> None:
    model = tiny_host("llama")
    model.set_tokenizer(tiny_tokenizer("left"))
    run = tiny_run(model)

    def fresh() -> TransformerLensKeyValueCache:
        return TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 3)

    tokens = TOKENS.clamp(min=2)  # without padding
    used, one, two = fresh(), fresh(), fresh()
    model(tokens, past_kv_cache=used)
    with torch.no_grad(), unchanged(model), spd.decomposed(model, run):
        whole = model(tokens)
        with pytest.raises(ValueError, match=r"already holds 5 positions.*empty cache"):
            model(tokens[:, :1], past_kv_cache=used)
        assert close(model(tokens[:, :2], past_kv_cache=one), whole[:, :2])
        assert close(model(tokens[:, :1], past_kv_cache=two), whole[:, :1])  # two passes at once
        assert close(model(tokens[:, 2:4], past_kv_cache=one), whole[:, 2:4])
        one.freeze()
        for _ in range(2):
            assert close(model(tokens[:, 4:], past_kv_cache=one), whole[:, 4:])
        one.unfreeze()
        assert close(model(tokens[:, 4:], past_kv_cache=one), whole[:, 4:])
        assert close(model(tokens[:, 1:], past_kv_cache=two), whole[:, 1:])
        with pytest.raises(ValueError, match="already holds 5 positions"):
            model(tokens[:, :1], past_kv_cache=copy.deepcopy(one))


def test_importances_with_a_key_value_cache_are_those_of_all_read_so_far() -> None:
    model = tiny_host("llama")
    model.set_tokenizer(tiny_tokenizer("left"))
    run = tiny_run(model, importance=spd.Attention(d_gate=2))
    tokens = TOKENS.clamp(min=2)
    caches = [TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 3) for _ in range(2)]
    with unchanged(model), spd.decomposed(model, run) as inside:
        for start, end, frozen in ((0, 2, False), (2, 4, True), (2, 3, True), (2, 3, False), (3, 5, False)):
            masks = {name: g[:, start:end] for name, g in run.importances(model, tokens[:, :end]).items()}
            for cache in caches:
                cache.freeze() if frozen else cache.unfreeze()
            found = inside(tokens[:, start:end], past_kv_cache=caches[0])
            with spd.decomposed(model, run, masks=masks):
                assert close(found, model(tokens[:, start:end], past_kv_cache=caches[1]))


def test_a_pass_with_a_key_value_cache_can_be_repeated_after_a_failure() -> None:
    model = tiny_host("llama")
    run = tiny_run(model, ("blocks.*", "unembed.*"))
    resid, cache = model.embed(TOKENS), TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 3)
    with unchanged(model), spd.decomposed(model, run):
        wanted = model(resid, start_at_layer=0)
        with pytest.raises(Stop), model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", raising(Stop()))]):
            model(resid, start_at_layer=0, past_kv_cache=cache)
        assert torch.equal(model(resid, start_at_layer=0, past_kv_cache=cache), wanted)


# --- kinds of masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ALL)
def test_named_masks(style: str) -> None:
    model = tiny_host(style)
    run = run_for(style)
    mask = tiny_padding("right")
    importances = {name: g.detach() for name, g in run.importances(model, TOKENS, mask).items()}
    generator = torch.Generator().manual_seed(4)
    stochastic = {
        name: g + (1 - g) * torch.rand(g.shape, generator=generator, dtype=g.dtype) for name, g in importances.items()
    }
    rounded = {name: (g > 0.5).double() for name, g in importances.items()}
    assert 0.1 < torch.cat([*rounded.values()]).mean() < 0.9
    for masks, wanted, settings in (
        ("importance", importances, {}),
        ("rounded", rounded, {"threshold": 0.5}),
        ("ones", {name: torch.ones(()) for name in run.components}, {}),
        ("stochastic", stochastic, {"generator": torch.Generator().manual_seed(4)}),
    ):
        with spd.decomposed(model, run, masks=wanted):
            explicit = model(TOKENS, attention_mask=mask)
        with spd.decomposed(model, run, masks=masks, **settings):
            assert close(model(TOKENS, attention_mask=mask), explicit)


def test_stochastic_masks_are_fresh_at_every_call() -> None:
    model = tiny_host()
    run = tiny_run(model)
    with spd.decomposed(model, run, masks="stochastic", generator=torch.Generator().manual_seed(4)):
        first, second = model(TOKENS), model(TOKENS)
    with spd.decomposed(model, run, masks="stochastic", generator=torch.Generator().manual_seed(4)):
        assert torch.equal(model(TOKENS), first)
        assert torch.equal(model(TOKENS), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("masks", ["importance", "rounded", "stochastic", "ones"])
def test_importances_can_be_given(masks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_host()
    run = tiny_run(model)
    importances = run.importances(model, TOKENS)
    settings: dict[str, Any] = {"masks": masks, "sites": "blocks.0.*", "threshold": 0.5}
    with spd.decomposed(model, run, **settings, generator=torch.Generator().manual_seed(1)):
        wanted = model(TOKENS)
    monkeypatch.setattr(tl_spd.install, "make_twin", None)  # the original model need not be run
    with spd.decomposed(model, run, **settings, importances=importances, generator=torch.Generator().manual_seed(1)):
        assert torch.equal(model(TOKENS), wanted)


def test_given_importances_get_gradients() -> None:
    model = tiny_host()
    run = tiny_run(model)
    importances = run.importances(model, TOKENS)
    given = {name: g.detach().requires_grad_() for name, g in importances.items()}
    with spd.decomposed(model, run, importances=given):
        model(TOKENS, return_type="loss").backward()
    assert all(g.grad.abs().max() > 0 for g in given.values())


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (None, 15),
        ("*", 15),
        ("blocks.0.*", 6),
        (["blocks.?.attn.W_[QK]", "unembed.*", "unembed.W_U"], 5),
        ("blocks.1.mlp.W_in", 1),
    ],
)
def test_site_patterns(patterns: str | list[str] | None, names: int) -> None:
    model = tiny_host()
    run = tiny_run(model)
    masks = random_masks(run)
    chosen = [site.name for site in run.select(patterns)]
    assert len(chosen) == names
    with spd.decomposed(model, run, importances=masks, sites=patterns):
        found = model(TOKENS)
    assert close(found, with_weights(model, masked_weights(run, {name: masks[name] for name in chosen}))(TOKENS))


def outer_contexts() -> list[Callable[[HookedTransformer, Run], contextlib.AbstractContextManager[Any]]]:
    other = lambda model: tiny_run(model, seed=9)  # noqa: E731
    return [
        lambda model, run: contextlib.nullcontext(),
        lambda model, run: model.hooks(fwd_hooks=[(lambda name: name.endswith(("hook_z", "hook_normalized")), alter)]),
        lambda model, run: spd.decomposed(model, other(model), masks=zeros(other(model))),
        lambda model, run: spd.decomposed(model, other(model)),
        lambda model, run: spd.suppressed(model, run, {"blocks.0.attn.W_Q": [0, 1], "embed.W_E": [2]}),
    ]


@pytest.mark.parametrize("around", outer_contexts())
@pytest.mark.parametrize(
    "importance", [spd.Scalar(d_gate=2), spd.Attention(d_gate=2)], ids=lambda spec: type(spec).__name__
)
def test_importances_are_of_the_original_model(around: Any, importance: spd.ImportanceSpec) -> None:
    model = tiny_host()
    run = tiny_run(model, importance=importance)
    seen: list[Mapping[str, Tensor]] = []
    with around(model, run):
        wanted = dict(run.importances(model, TOKENS))
        with spd.decomposed(model, run, masks=wanted):
            logits = model(TOKENS)
        with spd.decomposed(model, run):
            assert torch.equal(model(TOKENS), logits)
            seen.append(run.importances(model, TOKENS))  # asked for inside
        with spd.decomposed(model, run), model.hooks(fwd_hooks=[("hook_embed", alter)]):
            patched = model(TOKENS)
        with spd.decomposed(model, run, masks=wanted), model.hooks(fwd_hooks=[("hook_embed", alter)]):
            assert torch.equal(model(TOKENS), patched)
    assert all(torch.equal(seen[0][name], wanted[name]) for name in wanted)


# --- contexts in contexts --------------------------------------------------------------------------------------------


def test_nested_runs_innermost_wins_site_by_site() -> None:
    model = tiny_host("llama")
    one, two = tiny_run(model, "blocks.0.*", seed=1), tiny_run(model, ("blocks.?.attn.W_Q", "*.W_out", "*.W_O"), seed=2)
    masks_one, masks_two = random_masks(one, 1), random_masks(two, 2)
    outer, inner = masked_weights(one, masks_one), masked_weights(two, masks_two)
    disjoint = {name: inner[name] for name in inner if name.startswith("blocks.1.")}
    with unchanged(model):
        plain = model(TOKENS)
        with spd.decomposed(model, one, masks=masks_one):
            assert close(model(TOKENS), with_weights(model, outer)(TOKENS))
            with spd.decomposed(model, two, masks={name: masks_two[name] for name in disjoint}):
                assert close(model(TOKENS), with_weights(model, outer | disjoint)(TOKENS))
            with spd.decomposed(model, two, masks=masks_two):
                assert close(model(TOKENS), with_weights(model, outer | inner)(TOKENS))
                with spd.decomposed(model, one, masks=masks_one):
                    assert close(model(TOKENS), with_weights(model, inner | outer)(TOKENS))
                assert close(model(TOKENS), with_weights(model, outer | inner)(TOKENS))
            assert close(model(TOKENS), with_weights(model, outer)(TOKENS))
        assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_suppressed_and_decomposed_in_each_other(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    masks = random_masks(run)
    chosen = {"blocks.0.attn.W_V": [0], "blocks.1.mlp.W_in": [1, 2], "unembed.W_U": [0]}
    matrices = masked_weights(run, masks)
    here = {name: matrices[name] for name in ("blocks.0.attn.W_V", "blocks.0.mlp.W_in", "unembed.W_U")}
    edited = {name: by_numpy(model, run, name, indices) for name, indices in chosen.items()}
    few = {name: masks[name] for name in here}
    with unchanged(model):
        with spd.decomposed(model, run, masks=few):
            with spd.suppressed(model, run, chosen):
                assert close(model(TOKENS), with_weights(model, here | edited)(TOKENS))
            assert close(model(TOKENS), with_weights(model, here)(TOKENS))
        with spd.suppressed(model, run, chosen):
            with spd.decomposed(model, run, masks=few):
                assert close(model(TOKENS), with_weights(model, edited | here)(TOKENS))
            assert close(model(TOKENS), with_weights(model, edited)(TOKENS))


@pytest.fixture(scope="module")
def four_contexts() -> tuple[HookedTransformer, list[Callable[[], Any]], dict[frozenset[int], Tensor]]:
    """A host, four overlapping contexts to enter in this order, and the logits of every subset of them."""
    model = tiny_host("llama")
    run, other = tiny_run(model, seed=1), tiny_run(model, ("blocks.?.attn.W_K", "*.W_gate", "unembed.W_U"), seed=2)
    masks, more = random_masks(run, 1), random_masks(other, 2)
    names = ("blocks.0.attn.W_K", "blocks.1.mlp.W_gate", "unembed.W_U")
    indices = {"blocks.0.attn.W_K": [0], "unembed.W_U": [1]}
    suppressed_once = {name: by_numpy(model, run, name, which) for name, which in indices.items()}
    layers = [
        suppressed_once,
        {name: masked_weights(run, masks)[name] for name in names[:2]},
        {name: by_numpy(with_weights(model, suppressed_once), other, name, [1]) for name in names},
        masked_weights(other, more),
    ]
    contexts = [
        lambda: spd.suppressed(model, run, indices),
        lambda: spd.decomposed(model, run, masks={name: masks[name] for name in names[:2]}),
        lambda: spd.suppressed(model, other, {name: [1] for name in names}),
        lambda: spd.decomposed(model, other, masks=more),
    ]
    logits = {}
    for size in range(5):
        for active in itertools.combinations(range(4), size):
            weights = {name: matrix for index in active for name, matrix in layers[index].items()}
            logits[frozenset(active)] = with_weights(model, weights)(TOKENS)
    return model, contexts, logits


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_leaving_in_any_order(order: tuple[int, ...], four_contexts: Any) -> None:
    model, factories, logits = four_contexts
    contexts, active = [factory() for factory in factories], set(range(4))
    with unchanged(model):
        for context in contexts:
            context.__enter__()
        assert close(model(TOKENS), logits[frozenset(active)])
        for index in order:
            contexts[index].__exit__(None, None, None)
            active.remove(index)
            assert close(model(TOKENS), logits[frozenset(active)])


def test_a_run_that_meets_other_weights_says_so_once() -> None:
    model, other = tiny_host(), tiny_host(seed=1)
    run = tiny_run(model, "blocks.0.mlp.*")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with spd.suppressed(model, run, {"blocks.0.mlp.W_in": [0]}), spd.decomposed(model, run):
            model(TOKENS)  # its own host, edited by us
        assert caught == []
        for _ in range(2):
            with spd.decomposed(other, run):
                other(TOKENS)
    assert len(caught) == 1
    assert "made for other weights: blocks.0.mlp.W_in differs" in str(caught[0].message)


def test_exit_stacks_and_half_consumed_generators() -> None:
    model = tiny_host()
    run, other = tiny_run(model, seed=1), tiny_run(model, "blocks.1.*", seed=2)
    masks = random_masks(run)
    plain, masked = model(TOKENS), with_weights(model, masked_weights(run, masks))(TOKENS)

    def passes() -> Iterator[Tensor]:
        with spd.decomposed(model, other):
            while True:
                yield model(TOKENS)

    with unchanged(model):
        generator = passes()
        next(generator)
        with contextlib.ExitStack() as outer, contextlib.ExitStack() as inner:
            inner.enter_context(spd.decomposed(model, run, masks=masks))
            kept = inner.pop_all()  # leaves later than the contexts entered after it
            outer.enter_context(kept)
            outer.enter_context(spd.suppressed(model, run, {"blocks.0.attn.W_O": [0]}))
            assert not close(next(generator), plain, 1e-3)
        del generator
        assert torch.equal(model(TOKENS), plain)
        with spd.decomposed(model, run, masks=masks):
            assert close(model(TOKENS), masked)


# --- leaving ---------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """An exception that is no Exception."""


def raising(error: BaseException) -> Callable[..., None]:
    def hook(value: Tensor, hook: HookPoint) -> None:
        raise error

    return hook


def leave_normally(model: HookedTransformer, context: Any) -> None:
    with context:
        model(TOKENS)


def leave_unused(model: HookedTransformer, context: Any) -> None:
    with context:
        pass


def leave_by_exception(model: HookedTransformer, context: Any) -> None:
    with pytest.raises(ZeroDivisionError), context:
        model(TOKENS)
        raise ZeroDivisionError


def leave_by_interrupt(model: HookedTransformer, context: Any) -> None:
    with pytest.raises(KeyboardInterrupt), context:
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_pattern", raising(KeyboardInterrupt()))])


def leave_in_the_twin(model: HookedTransformer, context: Any) -> None:
    with pytest.raises(IndexError), context:
        model(TOKENS + 100)


def leave_after_a_caught_exception(model: HookedTransformer, context: Any) -> None:
    with context:
        wanted = model(TOKENS)
        for point in ("blocks.0.attn.hook_q", "hook_embed", "unembed.hook_out"):
            with pytest.raises(Stop):
                model.run_with_hooks(TOKENS, fwd_hooks=[(point, raising(Stop()))])
        assert torch.equal(model(TOKENS), wanted)


def leave_by_a_dropped_generator(model: HookedTransformer, context: Any) -> None:
    def passes() -> Iterator[Tensor]:
        with context:
            yield model(TOKENS)
            yield model(TOKENS)

    next(passes())  # and its last reference is gone


def leave_after_adding_hooks(model: HookedTransformer, context: Any) -> None:
    with context:
        model.add_hook("blocks.0.attn.hook_q", alter)
        model(TOKENS)
        model.hook_dict["blocks.0.attn.hook_q"].fwd_hooks.pop().hook.remove()


def leave_by_generating(model: HookedTransformer, context: Any) -> None:
    with context:
        model.generate(TOKENS[:, :2], 2, verbose=False, stop_at_eos=False, do_sample=False)


ENDINGS = [
    leave_normally,
    leave_unused,
    leave_by_exception,
    leave_by_interrupt,
    leave_in_the_twin,
    leave_after_a_caught_exception,
    leave_by_a_dropped_generator,
    leave_after_adding_hooks,
    leave_by_generating,
]


def user_hooks(model: HookedTransformer) -> None:
    """Hooks of every sort, some at the places where a Run is installed."""
    point = model.blocks[0].attn.hook_q
    nothing = [lambda *args, **kwargs: None for _ in range(9)]
    model.add_hook("blocks.0.attn.hook_q", nothing[0])
    model.add_hook("blocks.0.attn.hook_q", nothing[1], is_permanent=True)
    model.add_hook("blocks.0.attn.hook_q", nothing[2], prepend=True)
    model.add_hook("blocks.0.mlp.hook_post", nothing[3], dir="bwd")
    model.add_hook("blocks.1.attn.hook_z", nothing[4])
    point.register_forward_hook(nothing[5], prepend=True)
    point.register_forward_pre_hook(nothing[6])
    model.blocks[1].mlp.register_forward_pre_hook(nothing[7], with_kwargs=True)
    model.register_forward_hook(nothing[8], always_call=True)


@pytest.mark.parametrize("kind", ["importance", "suppressed", "nested"])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_a_host_is_left_as_it_was(ending: Callable[[HookedTransformer, Any], None], kind: str) -> None:
    model = flagged_host("parallel", positional_embedding_type="rotary")
    user_hooks(model)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 0)
    run, before = tiny_run(model, "blocks.*"), host_state(model)
    with contextlib.ExitStack() as around:
        if kind == "nested":
            around.enter_context(spd.decomposed(model, tiny_run(model, "blocks.1.*", seed=3)))
            around.enter_context(spd.suppressed(model, run, {"blocks.1.attn.W_O": [0]}))
        if kind == "suppressed":
            context = spd.suppressed(model, run, {"blocks.0.attn.W_K": [0, 2], "blocks.1.mlp.W_out": [1]})
        else:
            context = spd.decomposed(model, run)
        ending(model, context)
    assert host_state(model) == before


def test_nothing_keeps_run_and_twin_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_host()
    run = tiny_run(model)
    twins: list[weakref.ref[HookedTransformer]] = []

    def make_twin(model: HookedTransformer) -> HookedTransformer:
        twin = tl_spd.wiring.make_twin(model)
        twins.append(weakref.ref(twin))
        return twin

    monkeypatch.setattr(tl_spd.install, "make_twin", make_twin)
    with spd.decomposed(model, run):
        model.run_with_cache(TOKENS)
        with spd.suppressed(model, run, {"embed.W_E": [0]}), pytest.raises(Stop):
            model.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", raising(Stop()))])
    model.reset_hooks(including_permanent=True)
    alive = [*twins, weakref.ref(run), weakref.ref(run.components["embed.W_E"]), weakref.ref(run.parameters()[0])]
    del run
    gc.collect()
    assert len(twins) == 1
    assert [reference() for reference in alive] == [None] * 4


def test_a_host_is_not_kept_alive_by_a_context_left() -> None:
    model = tiny_host()
    run = tiny_run(model)
    with spd.decomposed(model, run), spd.suppressed(model, run, {"embed.W_E": [0]}):
        model(TOKENS)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# --- hooks removed by others -----------------------------------------------------------------------------------------


def test_reset_hooks_spares_installations() -> None:
    model = tiny_host()
    run = tiny_run(model)
    masks = random_masks(run)
    wanted = with_weights(model, masked_weights(run, masks))(TOKENS)
    with unchanged(model), spd.decomposed(model, run, masks=masks):
        model.add_hook("blocks.0.attn.hook_q", alter)
        model.reset_hooks()
        assert close(model(TOKENS), wanted)


@pytest.mark.parametrize("pattern", ["*", "blocks.1.mlp.W_out"])
def test_hooks_removed_behind_our_back(pattern: str) -> None:
    model = tiny_host()
    run = tiny_run(model, pattern)
    plain = model(TOKENS)
    message = r"removed at \['.*including_permanent"
    with unchanged(model), pytest.raises(spd.HooksRemovedError, match=message), spd.decomposed(model, run):
        model.reset_hooks(including_permanent=True)
        for call in (model, model.forward, model.run_with_cache, model.run_with_hooks):
            with pytest.raises(spd.HooksRemovedError):
                call(TOKENS)
    chosen = {run.sites[0].name: [0]}
    inner = spd.suppressed(model, run, chosen)
    with unchanged(model), pytest.raises(spd.HooksRemovedError), spd.decomposed(model, run), inner:
        model.reset_hooks(including_permanent=True)
    with unchanged(model), pytest.raises(ZeroDivisionError), spd.decomposed(model, run):
        model.reset_hooks(including_permanent=True)
        raise ZeroDivisionError
    assert torch.equal(model(TOKENS), plain)


def test_only_the_installation_that_lost_its_hooks_complains() -> None:
    model = tiny_host()
    one, two = tiny_run(model, "blocks.0.*"), tiny_run(model, "blocks.1.*", seed=2)
    masks = random_masks(two)
    wanted = with_weights(model, masked_weights(two, masks))(TOKENS)
    with unchanged(model):
        outer = spd.decomposed(model, one)
        outer.__enter__()
        model.reset_hooks(including_permanent=True)
        with spd.decomposed(model, two, masks=masks):
            with pytest.raises(spd.HooksRemovedError):
                model(TOKENS)
            with pytest.raises(spd.HooksRemovedError):
                outer.__exit__(None, None, None)
            assert close(model(TOKENS), wanted)


def test_one_hook_removed_by_hand() -> None:
    model = tiny_host()
    run = tiny_run(model)
    message = r"\['blocks.1.hook_mlp_out'\] \(1 in all\)"
    with unchanged(model), pytest.raises(spd.HooksRemovedError, match=message), spd.decomposed(model, run):
        model(TOKENS)
        model.hook_dict["blocks.1.hook_mlp_out"].remove_hooks("both", including_permanent=True)


# --- errors before anything has changed ------------------------------------------------------------------------------


def assert_refused(context: Any, model: HookedTransformer, kind: type[Exception], message: str) -> None:
    """Entering fails with ``message`` and changes nothing, also not in a host where another Run is installed."""
    with unchanged(model), pytest.raises(kind, match=message), context:
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"sites": "blocks.0.attn.W_X"}, ValueError, r"'blocks.0.attn.W_X' matches nothing.*blocks.\{layer\}.attn.W_Q"),
        ({"sites": ["blocks.0.*", "embed.*"]}, ValueError, r"'embed.\*' matches nothing"),
        ({"sites": []}, ValueError, "No site pattern"),
        ({"masks": "all"}, ValueError, r"masks='all' is not known.*'importance'"),
        ({"masks": "stochastic"}, ValueError, "needs a generator"),
        ({"masks": {"embed.W_E": torch.ones(3)}}, ValueError, r"\['embed.W_E'\].*not decomposed here; the sites are"),
        (
            {"masks": {"blocks.0.attn.W_Q": torch.ones(3)}, "sites": "blocks.1.*"},
            ValueError,
            r"\['blocks.0.attn.W_Q'\], which are not decomposed here",
        ),
        (
            {"masks": {"blocks.0.attn.W_Q": torch.ones(4)}},
            ValueError,
            r"blocks.0.attn.W_Q has shape \(4,\); wanted.*\(batch, pos, 3\)",
        ),
        (
            {"masks": {"blocks.0.attn.W_Q": torch.ones(1, 1, 1, 3)}},
            ValueError,
            r"blocks.0.attn.W_Q has shape \(1, 1, 1, 3\); wanted",
        ),
        (
            {"masks": {"blocks.0.attn.W_Q": torch.ones(3, dtype=torch.long)}},
            TypeError,
            "blocks.0.attn.W_Q must hold floating-point numbers or booleans, found torch.int64",
        ),
        ({"importances": {"embed.W_E": torch.ones(3, 5, 3)}}, ValueError, r"\['embed.W_E'\]"),
        ({"importances": {"blocks.0.attn.W_Q": torch.ones(3, 5, 3)}}, ValueError, r"lacks \['blocks.0.attn.W_K'"),
        (
            {"importances": {"blocks.0.attn.W_Q": torch.ones(3, 5, 2)}, "sites": "blocks.0.attn.W_Q"},
            ValueError,
            r"\(3, 5, 2\); wanted.*\(batch, pos, 3\)",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.*")
    assert_refused(spd.decomposed(model, run, **settings), model, kind, message)
    with spd.decomposed(model, run):
        assert_refused(spd.decomposed(model, run, **settings), model, kind, message)


@pytest.mark.parametrize(
    ("chosen", "kind", "message"),
    [
        ({"blocks.0.attn.W_Q": [0], "embed.W_E": [0]}, ValueError, "embed.W_E is not decomposed.*blocks.0.attn.W_Q"),
        ({"blocks.0.attn.W_Q": [0], "blocks.1.attn.W_Q": [1, 3]}, IndexError, r"blocks.1.*0 to 2; found \[3\]"),
        ({"blocks.0.attn.W_Q": [-1]}, IndexError, r"found \[-1\]"),
    ],
)
def test_wrong_subcomponents_are_refused(chosen: dict[str, list[int]], kind: type[Exception], message: str) -> None:
    model = tiny_host()
    assert_refused(spd.suppressed(model, tiny_run(model, "blocks.*"), chosen), model, kind, message)


@pytest.mark.parametrize("changes", [{"d_model": 8}, {"n_layers": 1}, {"d_head": 3}], ids=str)
def test_hosts_of_another_shape_are_refused(changes: dict[str, int]) -> None:
    run, other = tiny_run(tiny_host()), tiny_host(**changes)
    message = "The Run decomposes.*this host has.*Use the host"
    for masks in ("importance", "ones"):
        assert_refused(spd.decomposed(other, run, masks=masks), other, ValueError, message)
    assert_refused(spd.suppressed(other, run, {"blocks.1.attn.W_Q": [0]}), other, ValueError, message)


@pytest.mark.parametrize(("batch", "pos"), [(2, 5), (3, 4)])
@pytest.mark.parametrize("kind", ["masks", "importances"])
def test_masks_that_do_not_fit_a_call(kind: str, batch: int, pos: int) -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.0.*")
    given = random_masks(run, 0, batch, pos)
    message = rf"blocks.0.attn.W_Q has shape \({batch}, {pos}, 3\); this pass has batch 3 and 5 positions"
    with unchanged(model), spd.decomposed(model, run, **{kind: given}):
        with pytest.raises(ValueError, match=message):
            model(TOKENS)
        model(TOKENS[:batch, :pos])


def test_parts_of_a_host_cannot_be_called_inside() -> None:
    model = tiny_host()
    run = tiny_run(model)
    _, cache = model.run_with_cache(TOKENS)
    resid = cache["blocks.0.hook_resid_post"]
    with unchanged(model), spd.decomposed(model, run, masks="ones"):
        wanted = model(TOKENS)
        with pytest.raises(RuntimeError, match=r"blocks.1.attn.W_Q was reached outside a call"):
            model.blocks[1](resid)
        assert torch.equal(model(TOKENS), wanted)
        with pytest.raises(RuntimeError, match=r"embed.W_E was reached outside a call"):
            model.embed(TOKENS)
        assert torch.equal(model(TOKENS), wanted)


def test_switching_a_hook_point_off_inside_is_noticed() -> None:
    model = flagged_host("gpt2", "result")
    run = tiny_run(model)
    with spd.decomposed(model, run):
        model.set_use_attn_result(False)
        with pytest.raises(RuntimeError, match=r"blocks.0.attn.W_O was used without its mask.*switched off"):
            model(TOKENS)
        model.set_use_attn_result(True)
        model(TOKENS)


# --- changes of the host inside --------------------------------------------------------------------------------------


def test_a_copy_made_inside_is_a_plain_host() -> None:
    model = tiny_host()
    run = tiny_run(model)
    plain = model(TOKENS)
    with spd.decomposed(model, run):
        masked = model(TOKENS)
        copied = copy.deepcopy(model)
        assert copied.forward.__func__ is type(model).forward  # so the Run was not copied
        assert torch.equal(copied(TOKENS), plain)
        assert torch.equal(copied.run_with_hooks(TOKENS, fwd_hooks=[]), plain)
        assert torch.equal(model(TOKENS), masked)
    assert torch.equal(copied(TOKENS), plain)


@pytest.mark.parametrize("style", ["gpt2", "llama", "rmspre_alibi"])
def test_casting_a_host_inside(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    with spd.decomposed(model, run), spd.suppressed(model, run, {"blocks.0.attn.W_Q": [0]}):
        double = model(TOKENS)
        model.to(torch.float32)
        single = model(TOKENS)
        assert single.dtype == torch.float32
        assert close(single.double(), double, 1e-4)
        with spd.decomposed(model, run), spd.suppressed(model, run, {"blocks.0.attn.W_Q": []}):
            model(TOKENS)
    with spd.decomposed(model, run, masks=dict(run.importances(model, TOKENS))):
        wanted = model(TOKENS)
    with spd.decomposed(model, run):
        assert torch.equal(model(TOKENS), wanted)
        model.to(torch.bfloat16)
        model(TOKENS)
        model.to(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model(TOKENS)


def test_a_cast_that_is_undone_before_the_last_suppression_is_left_rounds_nothing_under_them() -> None:
    model = tiny_host()
    run = tiny_run(model)
    first, second = (spd.suppressed(model, run, {"blocks.0.attn.W_Q": [index]}) for index in (0, 1))
    own = model.blocks[0].attn.W_Q
    bits = own.detach().clone()
    first.__enter__()
    model.to(torch.float32)
    second.__enter__()
    first.__exit__(None, None, None)
    model.to(torch.float64)
    second.__exit__(None, None, None)
    assert model.blocks[0].attn.W_Q is own
    assert torch.equal(own, bits)


@pytest.mark.parametrize("style", STYLES)
def test_the_twin_follows_a_cast(style: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    with spd.decomposed(model, run):
        model.to(torch.float32)
        found = model(TOKENS)
    with spd.decomposed(model, run, masks=dict(run.importances(model, TOKENS))):
        assert torch.equal(model(TOKENS), found)


def test_a_users_own_forward() -> None:
    model = tiny_host()
    run = tiny_run(model)
    own = type(model).forward.__get__(model)
    calls: list[str] = []

    def outer(*args: Any, **kwargs: Any) -> Any:
        calls.append("outer")
        return own(*args, **kwargs)

    model.forward = outer
    with unchanged(model), spd.decomposed(model, run, masks="importance"):
        masked = model(TOKENS)
        assert calls == ["outer"]
        ours = model.forward

        def inner(*args: Any, **kwargs: Any) -> Any:
            calls.append("inner")
            return ours(*args, **kwargs)

        model.forward = inner
        assert torch.equal(model(TOKENS), masked)
        assert calls == ["outer", "inner", "outer"]
        model.forward = ours
    with spd.decomposed(model, run, masks="importance"):
        ours = model.forward
        model.forward = inner
    assert model.forward is inner  # put there by the user, so left there
    model.forward = own
    plain = model(TOKENS)
    model.forward = inner
    assert torch.equal(model(TOKENS), plain)


def test_weights_that_the_user_changes_inside_are_seen() -> None:
    model = tiny_host()
    run = tiny_run(model)
    with spd.decomposed(model, run):
        before = model(TOKENS)
        model.embed.W_E.data = model.embed.W_E.data * 1.5
        with torch.no_grad():
            model.blocks[0].ln1.w.mul_(0.5)
        found = model(TOKENS)
    with spd.decomposed(model, run, masks=dict(run.importances(model, TOKENS))):
        assert torch.equal(model(TOKENS), found)
    assert not close(found, before, 1e-3)


# --- suppression -----------------------------------------------------------------------------------------------------


def by_numpy(model: HookedTransformer, run: Run, name: str, indices: list[int], sequential: bool = False) -> Tensor:
    """The suppressed weight ``[d_in, d_out]`` by its formula, term by term in float64."""
    weight = host_parameters(model)[name].detach().double().numpy()
    if name.endswith(("W_Q", "W_K", "W_V")):
        weight = np.concatenate([*weight], axis=1)
    elif name.endswith("W_O"):
        weight = np.concatenate([*weight], axis=0)
    parts, result = run.components[name], weight.copy()
    for index in indices:
        read = parts.read[:, index].detach().double().numpy()
        write = parts.write[index].detach().double().numpy()
        read, write = read / np.sqrt((read**2).sum()), write / np.sqrt((write**2).sum())
        result = result - (read @ (result if sequential else weight) @ write) * np.outer(read, write)
    return torch.from_numpy(result)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("style", ["llama", "gpt2", "shortformer"])
def test_suppression_by_its_formula(style: str, sequential: bool) -> None:
    model = flagged_host(style, "plain")
    run = tiny_run(model)
    own = host_parameters(model)
    with unchanged(model):
        for name in run.components:
            wanted = by_numpy(model, run, name, [2, 0], sequential)
            assert not close(wanted, by_numpy(model, run, name, [2, 0], not sequential), 1e-6)
            with spd.suppressed(model, run, {name: [2, 0]}, sequential=sequential):
                inside = host_parameters(model)
                assert [other for other in own if inside[other] is not own[other]] == [name]
                assert inside[name].shape == own[name].shape
                swapped = with_weights(model, {name: wanted})
                assert close(inside[name], host_parameters(swapped)[name])
                assert close(model(TOKENS), swapped(TOKENS))
                if not sequential:  # nothing of the chosen directions is left by a second round in that order
                    assert inside[name].requires_grad


def test_suppressing_nothing_or_twice_the_same() -> None:
    model = tiny_host()
    run = tiny_run(model)
    plain = model(TOKENS)
    with unchanged(model):
        for chosen in ({}, {"blocks.0.attn.W_O": []}):
            with spd.suppressed(model, run, chosen):
                assert torch.equal(model(TOKENS), plain)
        with spd.suppressed(model, run, {"blocks.0.attn.W_O": [1, 2]}):
            once = model(TOKENS)
        with spd.suppressed(model, run, {"blocks.0.attn.W_O": [1, 2, 1, 1]}):
            assert torch.equal(model(TOKENS), once)
        run.components["blocks.0.attn.W_O"].write.data[1:] = 0
        with spd.suppressed(model, run, {"blocks.0.attn.W_O": [1, 2]}):
            assert torch.equal(model(TOKENS), plain)


def test_one_direction_is_gone_after_suppression() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, read, write = (torch.randn(shape, generator=generator) for shape in ((6, 5), (6, 1), (1, 5)))
    left = suppressed_weight(weight, read, write)
    assert abs((read.T @ left @ write.T).item()) < 1e-5
    assert torch.linalg.matrix_rank(weight - left).item() == 1


@pytest.mark.parametrize("name", ["blocks.0.attn.W_K", "blocks.1.attn.W_O", "blocks.0.mlp.W_gate", "embed.W_E"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_suppression_in_low_precision(dtype: torch.dtype, name: str) -> None:
    model = tiny_host("llama", dtype=dtype)
    run = tiny_run(model)
    wanted = with_weights(model, {name: by_numpy(model, run, name, [0, 1])})
    with unchanged(model), spd.suppressed(model, run, {name: [0, 1]}):
        found = host_parameters(model)[name]
        assert found.dtype == dtype
        assert close(found.double(), host_parameters(wanted)[name].double(), torch.finfo(dtype).eps)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_backward_after_a_suppression_was_left(style: str) -> None:
    model = tiny_host(style)
    model.blocks[1].attn.W_Q.requires_grad_(False)
    run = tiny_run(model)
    chosen = {"blocks.0.attn.W_V": [0], "blocks.1.attn.W_Q": [1, 2], "unembed.W_U": [0]}
    swapped = with_weights(model, {name: by_numpy(model, run, name, indices) for name, indices in chosen.items()})
    with unchanged(model):
        with spd.suppressed(model, run, chosen):
            loss = model(TOKENS, return_type="loss")
        loss.backward()
    swapped(TOKENS, return_type="loss").backward()
    theirs = host_parameters(swapped)
    for name, parameter in host_parameters(model).items():
        if name in chosen:
            assert parameter.grad is None
        elif theirs[name].grad is not None:
            assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-8, atol=1e-11), name


# --- hook functions, low precision, randomness -----------------------------------------------------------------------


@pytest.mark.parametrize(("style", "flags"), [case for case in CASES if case in ENDS or case[0] in ("gpt2", "llama")])
def test_pass_hooks_are_the_same_pass(style: str, flags: str) -> None:
    model = flagged_host(style, flags)
    run, mask = run_for(style), tiny_padding("left" if "most" in flags else "right")
    masks = random_masks(run, 3, 3, 5)
    importances = run.importances(model, TOKENS, mask)
    with spd.decomposed(model, run, masks=masks):
        wanted = model(TOKENS, attention_mask=mask)
    rows = torch.tensor([True, False, True])
    chosen = spd.Pass(masks, dict.fromkeys(masks, rows))
    with unchanged(model):
        hooks = pass_hooks(model, run, spd.Pass(masks), importances)
        found = model.run_with_hooks(TOKENS, fwd_hooks=hooks, attention_mask=mask)
        some = model.run_with_hooks(TOKENS, fwd_hooks=pass_hooks(model, run, chosen, importances), attention_mask=mask)
    assert close(found, wanted)
    assert close(some, torch.where(rows[:, None, None], wanted, model(TOKENS, attention_mask=mask)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", list(STYLES))
def test_hosts_in_low_precision(style: str, dtype: torch.dtype) -> None:
    model = tiny_host(style, dtype=dtype)
    exact, run = exact_run(model), tiny_run(model)
    assert run.components["embed.W_E"].read.dtype == torch.float32
    with unchanged(model), spd.decomposed(model, exact, masks="ones"):
        logits = model(TOKENS)
    assert logits.dtype == dtype
    assert close(logits.double(), model(TOKENS).double(), 20 * torch.finfo(dtype).eps)
    with unchanged(model), spd.decomposed(model, run):
        assert model(TOKENS).isfinite().all()


def test_global_random_states_are_left_alone() -> None:
    model = tiny_host()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    run = tiny_run(model)
    for masks in ("importance", "ones", "rounded", "stochastic"):
        with spd.decomposed(model, run, masks=masks, generator=torch.Generator().manual_seed(0)):
            model.run_with_cache(TOKENS)
            with spd.suppressed(model, run, {"blocks.0.attn.W_Q": [0]}):
                model(TOKENS)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
