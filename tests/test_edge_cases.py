"""Edge cases that mean something equal the plain version; what is not finite is named where it is first seen; half hosts.

The plain version (``benchmarks.plain``) runs every pass alone, from the tokens, in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

import tl_spd as spd
from benchmarks.plain import plain_step
from tests.tiny import N_CTX, same_runs, tiny_decompose, tiny_host, tiny_padding, tiny_run, tiny_tokens
from tl_spd.analysis.activity import l0, subcomponent_activity, top_examples, unique_subcomponents
from tl_spd.analysis.adversarial import Adversary
from tl_spd.analysis.attention import attention_kl, attention_without_positions
from tl_spd.analysis.evaluation import evaluate
from tl_spd.analysis.patching import answer_metric, compare_whole_sites, patch_subcomponents
from tl_spd.analysis.pruning import greedy_svd_path, rank1_curve
from tl_spd.analysis.run_pruning import greedy_run_path
from tl_spd.analysis.suppression import control_table, effect_table, select_by_effect, select_by_importance
from tl_spd.analysis.tracing import causal_trace
from tl_spd.analysis.vocabulary import direct_effects
from tl_spd.analysis.zero_out import zero_out
from tl_spd.run import new_run
from tl_spd.sites import find_sites, host_dtype, weight
from tl_spd.suppress import singular_directions, subcomponent_directions, suppressed_copy

NAN, INF = math.nan, math.inf
TOKENS = tiny_tokens()
ROW = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])  # the last sequence is padding alone
OUT0, IN1, OUT1 = "blocks.0.mlp.W_out", "blocks.1.mlp.W_in", "blocks.1.mlp.W_out"
TERMS: tuple[spd.LossTerm, ...] = (
    spd.Faithfulness(2.0),
    spd.ImportanceMinimality(0.1),
    spd.StochasticRecon(0.5),
    spd.StochasticReconPartial(0.5, samples=2, subset="sequence"),
    spd.ReconLayerwise(0.7),
)
STILL = spd.Optimizer(lr=0.0)


# --- what works ------------------------------------------------------------------------------------------------------


def zeroed(model: HookedTransformer) -> HookedTransformer:
    model.blocks[0].mlp.W_out.data.zero_()
    return model


EDGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one token": (TOKENS[:1, :1], {}),
    "one token, attention": (TOKENS[:1, :1], {"importance": spd.Attention(2)}),
    "32-bit tokens": (TOKENS.int(), {}),
    "as long as n_ctx": (tiny_tokens(2, N_CTX), {"importance": spd.Attention(2)}),
    "a row of padding": ((TOKENS, ROW), {}),
    "a row of padding, last token": ((TOKENS, ROW), {"last_token_only": True}),
    "a row of padding, attention": ((TOKENS, ROW), {"importance": spd.Attention(2)}),
    "a row of padding, embeddings": ((TOKENS, ROW), {"sites": ["embed.W_E", "pos_embed.W_pos", "unembed.W_U"]}),
    "left padding": ((TOKENS, tiny_padding("left")), {}),
    "C of 1": (TOKENS, {"C": 1}),
    "C above the number of entries": (TOKENS, {"C": 6 * 12 + 1}),
    "C above the number of entries, svd": (TOKENS, {"C": 6 * 12 + 1, "init": "svd"}),
    "more rows asked for than there are": (TOKENS, {"batch_size": 1000}),
    "passes stacked one by one": (TOKENS, {"max_rows": 1}),
    "more than one stack holds": (TOKENS, {"max_rows": 10**9}),
    "p above 1": (TOKENS, {"losses": [spd.ImportanceMinimality(1.0, p_start=2.5, p_final=1.5), spd.Recon()]}),
    "p near 0": (TOKENS, {"losses": [spd.ImportanceMinimality(1.0, p_start=1e-3, p_final=1e-6), spd.Recon()]}),
    "a coefficient of 0": (TOKENS, {"losses": [spd.ImportanceMinimality(0.0), spd.Recon()]}),
    "all coefficients 0": (TOKENS, {"losses": [spd.Recon(0.0)]}),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("edge", EDGES)
def test_training_at_an_edge_equals_the_plain_step_and_a_rate_of_0_changes_nothing(edge: str, zero: bool) -> None:
    data, changes = EDGES[edge]
    model = zeroed(tiny_host()) if zero else tiny_host()
    settings = {"losses": TERMS, "steps": 1, "optimizer": STILL, "seed": 3} | changes
    run = tiny_decompose(model, data, **settings)
    tokens, mask = data if isinstance(data, tuple) else (data, None)
    generator = torch.Generator().manual_seed(settings["seed"] + 2)  # that of the masks
    last = settings.get("last_token_only", False)
    terms = settings["losses"]
    values, gradients = plain_step(model, run.requires_grad_(True), terms, tokens, generator, mask, last)
    row = run.history.iloc[0]
    for name, value in values.items():
        assert row[name] == pytest.approx(value.item(), rel=1e-9, abs=1e-12)
    assert row["loss"] == pytest.approx(sum(term.coeff * values[term.name].item() for term in terms), rel=1e-9)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    found = find_sites(model, settings.get("sites", "blocks.*.mlp.W_out"))
    counts = {site.name: settings.get("C", 3) for site in found}
    importance, init = settings.get("importance", spd.Vector(d_gate=2)), settings.get("init", "kaiming")
    fresh = new_run(model, found, counts, importance, init, settings["seed"])
    assert all(torch.equal(run.tensors()[name], value) for name, value in fresh.tensors().items())
    moved = tiny_decompose(model, data, **settings | {"optimizer": spd.Optimizer(), "steps": 3})
    assert all(bool(value.isfinite().all()) for value in moved.tensors().values())


def test_a_zero_matrix_has_no_terms_and_nothing_to_suppress() -> None:
    model = zeroed(tiny_host())
    (site,) = find_sites(model, OUT0)
    run = new_run(model, [site], {OUT0: 2}, spd.Vector(2), "svd")
    assert not run.components[OUT0].write.any()
    assert greedy_svd_path(model, TOKENS, sites=OUT0, tau=1.0).empty
    copied = suppressed_copy(model, singular_directions(model, {OUT0: 2}))
    assert torch.equal(copied(TOKENS), model(TOKENS))
    with spd.decomposed(model, run, masks="ones"):
        torch.testing.assert_close(model(TOKENS), copied(TOKENS))


@pytest.mark.parametrize("twice", [[OUT0, OUT0], [OUT0, "blocks.0.mlp.*_out", "*.0.mlp.W_out"]])
def test_patterns_that_overlap_count_once(twice: list[str]) -> None:
    model = tiny_host()
    assert same_runs(tiny_decompose(model, sites=twice), tiny_decompose(model, sites=OUT0))
    run = tiny_run(model, "blocks.*.mlp.*")
    with spd.decomposed(model, run, sites=OUT0):
        once = model(TOKENS)
    with spd.decomposed(model, run, sites=twice):
        assert torch.equal(model(TOKENS), once)
    last = tiny_decompose(model, sites="blocks.*.mlp.W_out", C={"*": 3, "blocks.0.*": 2})  # the last pattern holds
    assert [parts.C for parts in last.components.values()] == [2, 3]


def test_thresholds_of_0_and_1_keep_what_is_above_them() -> None:
    model = tiny_host()
    run = tiny_run(model, OUT0)
    g = run.importances(model, TOKENS)[OUT0]
    for threshold in (0.0, 1.0):
        with spd.decomposed(model, run, masks="rounded", threshold=threshold):
            rounded = model(TOKENS)
        with spd.decomposed(model, run, masks={OUT0: torch.tensor(g.tolist()).gt(threshold)}):
            assert torch.equal(rounded, model(TOKENS))
    assert l0({OUT0: torch.ones(1, 2, 3)}, threshold=1.0) == {OUT0: 0}


def test_more_than_there_is_gives_all_there_is() -> None:
    model = tiny_host()
    run = tiny_run(model, OUT0)
    g = run.importances(model, TOKENS)
    active = int((g[OUT0] > 0).sum())
    assert len(top_examples(g, TOKENS, k=10**9)) == active > 0
    assert sorted(select_by_importance(g, 10**9)["index"]) == [0, 1, 2]
    directions = subcomponent_directions(run, {OUT0: [0, 1, 2]})
    pd.testing.assert_frame_equal(*(select_by_effect(model, directions, TOKENS[:1], 1, k) for k in (3, 10**9)))
    trace = {window: causal_trace(model, TOKENS[:1], [0], 1, window=window, draws=2) for window in (4, 10**9)}
    pd.testing.assert_frame_equal(trace[4], trace[10**9])  # of two layers, four reach both from either


@pytest.mark.parametrize("importance", [spd.Vector(d_gate=2), spd.Attention(d_gate=2)])
def test_a_row_of_padding_changes_no_number(importance: spd.ImportanceSpec) -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.*.mlp.*", importance=importance)
    with_row, without = (run.importances(model, TOKENS[:n], ROW[:n]) for n in (3, 2))
    for name, g in without.items():
        torch.testing.assert_close(with_row[name][:2], g)
    for measure in (
        l0,
        lambda g: unique_subcomponents(g).unique.tolist(),
        lambda g: subcomponent_activity(g).frequency,
    ):
        pd.testing.assert_series_equal(*(pd.Series(measure(g)) for g in (with_row, without)))
    real = without[OUT0][ROW[:2].bool()]  # the importances themselves say which tokens are real
    assert l0(without)[OUT0] == pytest.approx(float((real > 0).sum(-1).double().mean()))
    assert select_by_importance(with_row, 1).importance.item() == max(
        g[ROW.bool()].max().item() for g in with_row.values()
    )
    tables = [evaluate(model, run, TOKENS[:n], ROW[:n], adversary=None, samples=1) for n in (3, 2)]
    sure = [table[~table.metric.str.contains("stochastic")].reset_index(drop=True) for table in tables]
    pd.testing.assert_frame_equal(*sure, rtol=1e-9)
    with pytest.raises(ValueError, match="is scored: it is empty or all padding"):
        evaluate(model, run, TOKENS, torch.zeros_like(TOKENS))
    with pytest.raises(ValueError, match="no real token"):
        l0(run.importances(model, TOKENS, torch.zeros_like(TOKENS)))


# --- what is not finite ----------------------------------------------------------------------------------------------


def broken(how: str) -> tuple[HookedTransformer, spd.Run]:
    """A host that is not finite from the second half of block 0 on, and a Run of block 1."""
    model = tiny_host(dtype=torch.float16 if how == "overflow" else torch.float32)
    run = tiny_run(model, "blocks.1.mlp.*")
    if how == "overflow":  # each part can be written in float16, the sum of both cannot
        model.blocks[0].mlp.b_out.data.fill_(6e4)
        model.blocks[0].attn.b_O.data.fill_(6e4)
    else:
        model.blocks[0].mlp.b_out.data[2] = {"nan": NAN, "inf": INF}[how]
    return model, run


ONE = torch.ones(3, dtype=torch.long)
BEFORE = "residual stream in front of block 1 was not finite"
MEASURES: dict[str, tuple[Callable[[HookedTransformer, spd.Run], Any], str]] = {
    "importances": (lambda m, r: r.importances(m, TOKENS), BEFORE),
    "evaluate": (lambda m, r: evaluate(m, r, TOKENS), BEFORE),
    "greedy_svd_path": (lambda m, r: greedy_svd_path(m, TOKENS, sites=IN1, tau=1.0), BEFORE),
    "rank1_curve": (lambda m, r: rank1_curve(m, r, TOKENS, tau=1.0), BEFORE),
    "greedy_run_path": (lambda m, r: greedy_run_path(m, r, TOKENS, tau=1.0), BEFORE),
    "patch_subcomponents": (
        lambda m, r: patch_subcomponents(m, r, TOKENS[:1], TOKENS[1:2], answer_metric(m, 1)),
        BEFORE,
    ),
    "compare_whole_sites": (
        lambda m, r: compare_whole_sites(m, r, TOKENS[:1], TOKENS[1:2], answer_metric(m, 1)),
        BEFORE,
    ),
    "causal_trace": (lambda m, r: causal_trace(m, TOKENS[:1], [0], 1, draws=2), BEFORE),
    "zero_out": (lambda m, r: zero_out(m, [TOKENS[:1]], [1]), BEFORE),
    "effect_table": (lambda m, r: effect_table(m, [TOKENS[:1]], [1], {"none": {}}), "logits"),
    "control_table": (lambda m, r: control_table(m, r, {IN1: [0]}, [TOKENS[:1]], [1], draws=1), "logits"),
    "select_by_effect": (
        lambda m, r: select_by_effect(m, subcomponent_directions(r, {IN1: [0]}), TOKENS[:1], 1, 1),
        "logits",
    ),
    "attention_kl": (lambda m, r: attention_kl(m, r, TOKENS), "Layer 1: the attention scores of the original model"),
    "attention_without_positions": (
        lambda m, r: attention_without_positions(m, TOKENS, 0, 0, ONE, ONE),
        "Layer 1: the attention scores",
    ),
    "hooks": (lambda m, r: spd.Recon().hooks(r, r.importances(m, TOKENS)), BEFORE),
}


@pytest.mark.parametrize("how", ["nan", "inf", "overflow"])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_host_that_is_not_finite_is_named_and_gives_no_table(measure: str, how: str) -> None:
    function, message = MEASURES[measure]
    with pytest.raises(FloatingPointError, match=message):
        function(*broken(how))


def test_unembeddings_that_are_not_finite_are_named() -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.*.mlp.*")
    model.unembed.W_U.data[0, 3] = NAN
    with pytest.raises(FloatingPointError, match=r"unembed\.W_U of the host"):
        evaluate(model, run, TOKENS)
    with pytest.raises(FloatingPointError, match=f"direct effect of {OUT0} 0"):
        direct_effects(model, run, OUT0)
    with pytest.raises(FloatingPointError, match="KL of a pruned model"):
        greedy_svd_path(model, TOKENS, sites=OUT0, tau=1.0)


@pytest.mark.parametrize("name", ["blocks.1.mlp.b_in", "embed.W_E", OUT0, "blocks.0.attn.W_K"])
def test_a_weight_that_is_not_finite_is_named_before_any_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_host("llama" if name.endswith("W_K") else "gpt2")
    parameters = {key.replace("attn._", "attn."): value for key, value in model.named_parameters()}
    parameters[name].data.view(-1)[1] = NAN
    monkeypatch.setattr(HookedTransformer, "forward", None)
    with pytest.raises(ValueError, match=f"{name}: the host's weight has entries that are not finite"):
        tiny_decompose(model)


def test_an_activation_that_overflows_is_named_with_its_step_and_leaves_the_run_finite() -> None:
    model = tiny_host(dtype=torch.float16)
    model.embed.W_E.data[10] = 6e4  # the position takes it over the end of float16
    model.pos_embed.W_pos.data[0] = 6e4
    calm = TOKENS.clamp(max=9)

    def data(step: int, generator: torch.Generator) -> Tensor:
        return torch.full_like(calm, 10) if step == 2 else calm

    with pytest.raises(spd.NonFiniteLossError, match=r"^Step 2: The residual stream in front of block 0 was") as caught:
        tiny_decompose(model, data)
    run = caught.value.run  # type: ignore[attr-defined]
    assert run.history.step.tolist() == [1, 2]
    assert all(bool(value.isfinite().all()) for value in run.tensors().values())


# --- half-precision hosts --------------------------------------------------------------------------------------------

HALF = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Spacing of numbers around 1."""


def pair(dtype: torch.dtype, style: str) -> tuple[HookedTransformer, HookedTransformer]:
    """A host in ``dtype`` and one with the same weights in float32."""
    half = tiny_host(style, dtype=dtype)
    full = copy.deepcopy(half).float()
    full.cfg.dtype = torch.float32
    return half, full


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_numbers_are_those_of_float32_but_for_rounding(dtype: torch.dtype, style: str) -> None:
    models = pair(dtype, style)
    runs = [tiny_run(model, "blocks.*") for model in models]
    near = dict(rtol=40 * HALF[dtype], atol=20 * HALF[dtype])
    metric = answer_metric(models[0], 1)
    measures: list[Callable[[HookedTransformer, spd.Run], pd.DataFrame]] = [
        lambda m, r: evaluate(m, r, TOKENS, adversary=Adversary(steps=0), samples=1)[lambda t: t.metric != "L0"],
        lambda m, r: attention_kl(m, r, TOKENS),
        lambda m, r: compare_whole_sites(m, r, TOKENS[:1], TOKENS[1:2], metric)[["joint_effect", "tl_effect"]],
        lambda m, r: causal_trace(m, TOKENS[:1], [0], 1, draws=2)[["p_clean", "p_corrupted", "effect"]],
        lambda m, r: zero_out(m, [TOKENS[:1]], [1])[["p_before", "p_after"]],
        lambda m, r: control_table(m, r, {OUT0: [0]}, [TOKENS[:1]], [1], draws=1)[["p_before", "p_after"]],
        lambda m, r: direct_effects(m, r, OUT0, k=1)[["effect"]],
    ]
    for measure in measures:
        half, full = (measure(model, run) for model, run in zip(models, runs, strict=True))
        pd.testing.assert_frame_equal(half, full, **near)
    for model, run in zip(models, runs, strict=True):
        with spd.decomposed(model, run):
            assert model(TOKENS).dtype == host_dtype(model)
        assert weight(suppressed_copy(model, {}), run.sites[0]).dtype == host_dtype(model)


@pytest.mark.parametrize("dtype", HALF)
def test_small_gradients_survive_half_precision(dtype: torch.dtype) -> None:
    """A mean over 800 positions with a coefficient of 1e-5: entries far below what float16 can hold (6e-8)."""
    tokens, moved = tiny_tokens(100, N_CTX), []
    for model in pair(dtype, "gpt2"):
        terms = [spd.Recon(1e-5)]
        still = dict(losses=terms, steps=1, warmup=spd.FaithfulnessWarmup(0))
        before, after = (
            tiny_decompose(model, tokens, **still, optimizer=spd.Optimizer(lr=rate, betas=(0.0, 0.0))).tensors()
            for rate in (0.0, 1e-3)
        )
        # Adam without memory moves by lr * grad / (|grad| + 1e-8): what is rounded to 0 stays where it is
        moved.append(torch.cat([(after[n] - before[n]).flatten() for n in before if n.startswith("components")]))
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) < 20 * HALF[dtype]
    assert int((moved[0] == 0).sum()) <= int((moved[1] == 0).sum()) + len(moved[1]) // 50
