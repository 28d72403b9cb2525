"""Sites: which matrices a host has, and that ``x @ W + b`` is what the host itself computes there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_lens import HookedTransformer

import tl_spd as spd
from tests.tiny import MORE_STYLES, N_CTX, STYLES, VOCAB, tiny_host, tiny_padding, tiny_run, tiny_tokens
from tl_spd.sites import (
    Site,
    all_sites,
    bias,
    find_sites,
    fingerprint,
    fold,
    match_sites,
    parameter,
    replace_parameter,
    unfold,
    weight,
)
from tl_spd.wiring import Reader, read_hooks

ALL_STYLES = {**STYLES, **MORE_STYLES}
FLAGS = ("use_split_qkv_input", "use_attn_in", "use_attn_result", "use_hook_mlp_in")
D, HEADS, D_HEAD, D_MLP = 6, 2, 4, 12

ATTENTION = {"W_Q": (D, 8, HEADS), "W_K": (D, 8, HEADS), "W_V": (D, 8, HEADS), "W_O": (8, D, HEADS)}
GROUPED = ATTENTION | {"W_K": (D, 4, 1), "W_V": (D, 4, 1)}
PLAIN_MLP = {"W_in": (D, D_MLP, 1), "W_out": (D_MLP, D, 1)}
GATED_MLP = {"W_gate": (D, D_MLP, 1)} | PLAIN_MLP

EXPECTED: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "shortformer": (True, ATTENTION, {}),
    "gpt2": (True, ATTENTION, PLAIN_MLP),
    "llama": (False, GROUPED, GATED_MLP),
    "parallel": (True, ATTENTION, PLAIN_MLP),
    "no_norm_mlp": (True, ATTENTION, PLAIN_MLP),
    "no_norm_parallel": (True, ATTENTION, PLAIN_MLP),
    "qk_norm": (False, ATTENTION, GATED_MLP),
    "softcap": (True, ATTENTION, PLAIN_MLP),
    "rmspre_alibi": (False, ATTENTION, GATED_MLP),  # has a positional embedding that no forward pass uses
}
"""Style -> whether it looks positions up, its attention matrices, its MLP matrices as (d_in, d_out, heads)."""


# --- names -----------------------------------------------------------------------------------------------------------


def names(model: HookedTransformer, patterns: Any) -> list[str]:
    return [site.name for site in find_sites(model, patterns)]


def test_patterns_keep_the_forward_order() -> None:
    model = tiny_host("gpt2")
    assert names(model, ["unembed.*", "blocks.1.mlp.W_*", "embed.W_E"]) == [
        "embed.W_E",
        "blocks.1.mlp.W_in",
        "blocks.1.mlp.W_out",
        "unembed.W_U",
    ]


def test_overlapping_patterns_give_each_site_once() -> None:
    model = tiny_host("gpt2")
    wanted = ["blocks.0.attn.W_Q", "blocks.0.attn.W_K", "blocks.1.attn.W_Q", "blocks.1.attn.W_K"]
    assert names(model, ["blocks.*.attn.W_[QK]", "blocks.0.attn.W_Q", "blocks.*.attn.W_Q"]) == wanted
    assert names(model, (pattern for pattern in ["blocks.*.attn.W_[QK]"])) == wanted


def test_one_pattern_may_be_a_string() -> None:
    assert names(tiny_host("gpt2"), "blocks.1.attn.W_?") == [f"blocks.1.attn.W_{kind}" for kind in "QKVO"]


def test_a_pattern_does_not_match_a_part_of_a_name_or_another_case() -> None:
    for pattern in ("W_Q", "blocks.0", "BLOCKS.*"):
        with pytest.raises(ValueError, match="matches nothing"):
            names(tiny_host("gpt2"), pattern)


def test_a_pattern_without_a_match_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.\*\.mlp\.W_gate' matches nothing") as error:
        names(tiny_host("gpt2"), ["blocks.*.attn.W_Q", "blocks.*.mlp.W_gate"])
    listed = str(error.value).split("Names there are: ")[1].rstrip(".").split(", ")
    kinds = [f"attn.W_{kind}" for kind in "QKVO"] + ["mlp.W_in", "mlp.W_out"]
    assert listed == ["embed.W_E", "pos_embed.W_pos", *(f"blocks.{{layer}}.{kind}" for kind in kinds), "unembed.W_U"]


@pytest.mark.parametrize("patterns", [[], ()])
def test_no_pattern_at_all_is_refused(patterns: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        find_sites(tiny_host("gpt2"), patterns)


def test_match_sites_picks_from_the_sites_given() -> None:
    some = find_sites(tiny_host("gpt2"), "blocks.0.*")
    assert [site.name for site in match_sites(some, "*.W_O")] == ["blocks.0.attn.W_O"]
    with pytest.raises(ValueError, match="matches nothing"):
        match_sites(some, "blocks.1.*")


# --- what there is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ALL_STYLES)
def test_every_style_has_exactly_these_sites(style: str) -> None:
    positions, attention, mlp = EXPECTED[style]
    wanted = [Site("embed.W_E", "W_E", -1, VOCAB, D, 1)]
    wanted += [Site("pos_embed.W_pos", "W_pos", -1, N_CTX, D, 1)] if positions else []
    for layer in range(2):
        for part, kinds in (("attn", attention), ("mlp", mlp)):
            wanted += [Site(f"blocks.{layer}.{part}.{kind}", kind, layer, *shape) for kind, shape in kinds.items()]
    wanted.append(Site("unembed.W_U", "W_U", 2, D, VOCAB, 1))
    assert all_sites(tiny_host(style)) == tuple(wanted)


def test_look_ups_are_judged_by_the_row_looked_up() -> None:
    sites = {site.name: site for site in all_sites(tiny_host("gpt2"))}
    assert [name for name, site in sites.items() if site.lookup] == ["embed.W_E", "pos_embed.W_pos"]
    assert sites["embed.W_E"].d_importance == D
    assert sites["blocks.0.mlp.W_out"].d_importance == D_MLP
    assert sites["unembed.W_U"].d_importance == D


def test_an_output_vocabulary_of_its_own() -> None:
    assert all_sites(tiny_host("gpt2", d_vocab_out=5))[-1] == Site("unembed.W_U", "W_U", 2, D, 5, 1)


@pytest.mark.parametrize("style", STYLES)
def test_fold_and_unfold_are_inverse(style: str) -> None:
    model = tiny_host(style)
    for site in all_sites(model):
        own = parameter(model, site)
        matrix = fold(site, own)
        assert matrix.shape == (site.d_in, site.d_out)
        assert torch.equal(unfold(site, matrix), own)
        other = torch.arange(site.d_in * site.d_out, dtype=torch.float64).reshape(site.d_in, site.d_out)
        assert unfold(site, other).shape == own.shape
        assert torch.equal(fold(site, unfold(site, other)), other)


def test_folding_puts_head_blocks_side_by_side() -> None:
    model = tiny_host("gpt2")
    attn = model.blocks[0].attn
    by_name = {site.kind: site for site in find_sites(model, "blocks.0.attn.*")}
    assert torch.equal(weight(model, by_name["W_Q"]), torch.cat([attn.W_Q[0], attn.W_Q[1]], dim=1))
    assert torch.equal(weight(model, by_name["W_O"]), torch.cat([attn.W_O[0], attn.W_O[1]], dim=0))


def test_weight_is_detached_and_parameter_is_the_object_itself() -> None:
    model = tiny_host("llama")
    (site,) = find_sites(model, "blocks.0.attn.W_K")
    assert parameter(model, site) is model.blocks[0].attn._W_K
    assert not weight(model, site).requires_grad
    new = nn.Parameter(torch.zeros_like(parameter(model, site)))
    old = replace_parameter(model, site, new)
    assert parameter(model, site) is model.blocks[0].attn._W_K is new
    assert replace_parameter(model, site, old) is new
    assert parameter(model, site) is old


def test_fingerprints_tell_weights_apart() -> None:
    model = tiny_host("gpt2")
    sites = find_sites(model, "blocks.*.attn.W_[QK]")
    before = fingerprint(model, sites)
    assert before == fingerprint(tiny_host("gpt2"), sites)
    with torch.no_grad():
        model.blocks[1].attn.W_K[0, 0, 0] += 1e-12
    after = fingerprint(model, sites)
    assert {name for name in before if before[name] != after[name]} == {"blocks.1.attn.W_K", "*"}
    with torch.no_grad():
        model.ln_final.b[0] += 1
    assert fingerprint(model, sites)["*"] != after["*"]


# --- y = x W + b -----------------------------------------------------------------------------------------------------


def flag_sets(style: str) -> Iterator[dict[str, bool]]:
    """No flag, all that TransformerLens takes for the style together, and for the main styles each alone."""
    config = ALL_STYLES[style]
    allowed = [
        flag
        for flag in FLAGS
        if not (flag == "use_attn_in" and "n_key_value_heads" in config)
        and not (flag == "use_hook_mlp_in" and config.get("attn_only"))
    ]
    yield {}
    yield dict.fromkeys(allowed, True)
    if style in STYLES:
        yield from ({flag: True} for flag in allowed)


CASES = [(style, flags) for style in ALL_STYLES for flags in flag_sets(style)]
CASE_IDS = [f"{style}-{'+'.join(flags) or 'plain'}" for style, flags in CASES]


def shown(cache: Any, site: Site) -> Tensor:
    """The host's own activation behind ``site``'s matmul, ``[batch, pos, d_out]``."""
    gated = f"blocks.{site.layer}.mlp.hook_pre_linear" in cache
    point = {
        "W_E": "hook_embed",
        "W_pos": "hook_pos_embed",
        "W_Q": f"blocks.{site.layer}.attn.hook_q",
        "W_K": f"blocks.{site.layer}.attn.hook_k",
        "W_V": f"blocks.{site.layer}.attn.hook_v",
        "W_O": f"blocks.{site.layer}.hook_attn_out",
        "W_gate": f"blocks.{site.layer}.mlp.hook_pre",
        "W_in": f"blocks.{site.layer}.mlp.{'hook_pre_linear' if gated else 'hook_pre'}",
        "W_out": f"blocks.{site.layer}.hook_mlp_out",
        "W_U": "unembed.hook_out",
    }[site.kind]
    return cache[point].flatten(2)


def product(x: Tensor, W: Tensor, b: Tensor | None, site: Site) -> Tensor:
    """``x @ W + b``, head by head where the input has a head axis."""
    if site.lookup:  # the row of the index; nothing for a padded place
        one_hot = (x[..., None] == torch.arange(site.d_in)).to(W.dtype)
        return one_hot @ W
    if x.ndim == 4:
        blocks = W.reshape(site.d_in, site.heads, -1)
        y = torch.stack([x[:, :, head] @ blocks[:, head] for head in range(site.heads)], dim=2).flatten(2)
    else:
        y = x @ W
    return y if b is None else y + b


@pytest.mark.parametrize(("style", "flags"), CASES, ids=CASE_IDS)
def test_input_times_weight_plus_bias_is_what_the_host_shows(style: str, flags: dict[str, bool]) -> None:
    model = tiny_host(style, **flags)
    positions = EXPECTED[style][0]
    sites = [site for site in all_sites(model) if positions or site.kind != "W_pos"]
    for side in ("left",) if flags else (None, "left", "right"):
        mask = tiny_padding(side)
        kwargs = {} if mask is None else {"attention_mask": mask}
        reader = Reader(model, sites)
        _, cache = model.run_with_cache(tiny_tokens(), **kwargs)
        seen = dict(reader.inputs)
        reader.remove()
        lookups = {site.name: seen[site.name] for site in sites if site.lookup}
        hooked: dict[str, Tensor] = {}
        model.run_with_hooks(tiny_tokens(), fwd_hooks=read_hooks(model, sites, hooked, lookups), **kwargs)
        for site in sites:
            want = shown(cache, site)
            for x in (seen[site.name], hooked[site.name]):  # through modules, and through hook points alone
                got = product(x, weight(model, site), bias(model, site), site)
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, s=site: f"{s.name}: {m}")


@pytest.mark.parametrize("style", ["shortformer", "gpt2", "llama"])
def test_split_inputs_are_read_head_by_head(style: str) -> None:
    model = tiny_host(style, use_split_qkv_input=True)
    sites = find_sites(model, "blocks.1.attn.W_[QKV]")

    def disturb(value: Tensor, hook: Any) -> Tensor:
        return value * torch.tensor([1.0, -2.0])[: value.shape[2], None]

    points = [f"blocks.1.hook_{kind}_input" for kind in "qkv"]
    reader, hooked = Reader(model, sites), {}
    with model.hooks(fwd_hooks=[(point, disturb) for point in points]):
        _, cache = model.run_with_cache(tiny_tokens())
        model.run_with_hooks(tiny_tokens(), fwd_hooks=read_hooks(model, sites, hooked, {}))
    for site in sites:
        for x in (reader.inputs[site.name], hooked[site.name]):
            assert x.shape[2] == site.heads
            got = product(x, weight(model, site), bias(model, site), site)
            torch.testing.assert_close(got, shown(cache, site), rtol=1e-10, atol=1e-12)


def test_input_behind_a_layer_norm_activation() -> None:
    model = tiny_host("gpt2", act_fn="solu_ln")
    (site,) = find_sites(model, "blocks.1.mlp.W_out")
    reader = Reader(model, [site])
    _, cache = model.run_with_cache(tiny_tokens())
    x = reader.inputs[site.name]
    torch.testing.assert_close(x @ weight(model, site) + model.blocks[1].mlp.b_out, cache["blocks.1.hook_mlp_out"])


def test_ungrouped_keys_and_values_repeat_the_grouped_weight() -> None:
    model = tiny_host("llama", ungroup_grouped_query_attention=True)
    (site,) = find_sites(model, "blocks.0.attn.W_V")
    reader = Reader(model, [site])
    _, cache = model.run_with_cache(tiny_tokens())
    y = reader.inputs[site.name] @ weight(model, site) + bias(model, site)
    shown_v = cache["blocks.0.attn.hook_v"]
    assert shown_v.shape[2] == 2
    for head in range(2):
        torch.testing.assert_close(shown_v[:, :, head], y)


def test_the_look_up_indices_are_tokens_and_positions() -> None:
    model = tiny_host("gpt2")
    sites = find_sites(model, ["embed.W_E", "pos_embed.W_pos"])
    reader = Reader(model, sites)
    tokens = tiny_tokens(2, 4)
    model(tokens)
    assert torch.equal(reader.inputs["embed.W_E"], tokens)
    assert torch.equal(reader.inputs["pos_embed.W_pos"], torch.tensor([[0, 1, 2, 3]] * 2))
    model(tokens, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    assert torch.equal(reader.inputs["pos_embed.W_pos"], torch.tensor([[-1, 0, 1, 2], [0, 1, -1, -1]]))


def test_hooks_that_read_look_ups_need_their_indices() -> None:
    model = tiny_host("gpt2")
    with pytest.raises(ValueError, match=r"embed\.W_E"):
        read_hooks(model, find_sites(model, "embed.W_E"), {}, {})


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("gpt2", dict(num_experts=2, experts_per_token=1), "mixture-of-experts"),
    "4-bit": ("gpt2", dict(load_in_4bit=True), "load_in_4bit"),
    "double norm": ("gpt2", dict(use_normalization_before_and_after=True), "use_normalization_before_and_after"),
    "OLMo 2": ("llama", dict(original_architecture="Olmo2ForCausalLM"), "post-norm architecture Olmo2ForCausalLM"),
    "OLMo 3": ("llama", dict(original_architecture="Olmo3ForCausalLM"), "post-norm architecture Olmo3ForCausalLM"),
    "embedding norm": ("gpt2", dict(post_embedding_ln=True), "post_embedding_ln"),
    "relative bias": ("gpt2", dict(positional_embedding_type="relative_positional_bias"), "relative_positional_bias"),
    "gated norm": ("llama", dict(act_fn="solu_ln"), "gated MLP with a layer-norm activation"),
    "devices": ("gpt2", dict(n_devices=2), r"n_devices > 1"),
}


def snapshot(model: HookedTransformer) -> tuple[dict[str, Tensor], list[int], int]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(table) for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks))
    return state, [id(value) for value in model.parameters()], hooks


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_hosts_are_refused_by_name_and_left_as_they_are(case: str) -> None:
    style, changes, message = REFUSED[case]
    model = tiny_host(style)
    for key, value in changes.items():  # on the finished host: some of these cannot be built on this machine
        setattr(model.cfg, key, value)
    state, ids, hooks = snapshot(model)
    with pytest.raises(ValueError, match=message) as error:
        spd.decompose(model, tiny_tokens(), sites="*", C=2, steps=1, progress=False)
    assert "cannot be decomposed" in str(error.value)
    with pytest.raises(ValueError, match=message):
        find_sites(model, "blocks.0.attn.W_Q")
    now, ids_now, hooks_now = snapshot(model)
    assert ids == ids_now
    assert hooks == hooks_now == 0
    assert all(torch.equal(state[name], now[name]) for name in state)


def test_a_real_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="mixture-of-experts"):
        all_sites(tiny_host("llama", num_experts=2, experts_per_token=1))


def test_all_reasons_are_named_together() -> None:
    model = tiny_host("gpt2")
    model.cfg.post_embedding_ln, model.cfg.load_in_4bit = True, True
    with pytest.raises(ValueError, match=r"load_in_4bit.*post_embedding_ln"):
        all_sites(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "gpt2", None])
def test_only_a_hooked_transformer_is_a_host(model: Any) -> None:
    unchecked = inspect.unwrap(all_sites)  # as outside of tests, where no type checker refuses first
    with pytest.raises(TypeError, match=rf"HookedTransformer, found {type(model).__name__}"):
        unchecked(model)


# --- tied embeddings -------------------------------------------------------------------------------------------------


def test_tied_embeddings_are_two_parameters_and_two_sites() -> None:
    """TransformerLens copies a tied matrix into two parameters, so that each can be decomposed, or one alone."""
    model = tiny_host("gpt2", tie_word_embeddings=True)
    with torch.no_grad():
        model.unembed.W_U.copy_(model.embed.W_E.T)
    assert model.unembed.W_U.data_ptr() != model.embed.W_E.data_ptr()
    run = tiny_run(model, ("embed.W_E", "unembed.W_U"))
    E, U = run.sites
    assert (E.d_in, E.d_out) == (U.d_out, U.d_in) == (VOCAB, D)
    assert torch.equal(weight(model, E), weight(model, U).T)
    plain = model(tiny_tokens())
    zeros = {U.name: torch.zeros(3, dtype=torch.float64)}
    with spd.decomposed(model, run, masks=zeros):
        logits, cache = model.run_with_cache(tiny_tokens())
    torch.testing.assert_close(logits, model.unembed.b_U.expand_as(logits))  # the unembedding alone is gone
    torch.testing.assert_close(cache["hook_embed"], model.embed.W_E[tiny_tokens()])
    with spd.decomposed(model, run, masks={E.name: torch.zeros(3, dtype=torch.float64)}):
        logits, cache = model.run_with_cache(tiny_tokens())
    assert not cache["hook_embed"].any()
    assert not torch.allclose(logits, plain)
