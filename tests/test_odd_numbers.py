"""Odd numbers that mean nothing are refused before the host has been run once, with their name and what was found.

Odd ones that mean something are in ``test_edge_cases``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jaxtyping
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

import tl_spd as spd
from tests.tiny import N_CTX, tiny_decompose, tiny_host, tiny_run, tiny_tokens
from tl_spd.analysis.activity import (
    active_by_position,
    l0,
    l0_by_site,
    one_hot_positions,
    subcomponent_activity,
    top_examples,
    unique_subcomponents,
    unique_to_prompts,
)
from tl_spd.analysis.adversarial import Adversary
from tl_spd.analysis.attention import attention_kl, attention_without_positions
from tl_spd.analysis.evaluation import evaluate
from tl_spd.analysis.patching import answer_metric, compare_whole_sites, joint_shares, patch_subcomponents
from tl_spd.analysis.pruning import greedy_svd_path, rank1_curve
from tl_spd.analysis.run_pruning import greedy_run_path
from tl_spd.analysis.suppression import control_table, effect_table, select_by_effect, select_by_importance
from tl_spd.analysis.sweeps import pareto, splitting
from tl_spd.analysis.tracing import causal_trace
from tl_spd.analysis.vocabulary import direct_effects
from tl_spd.analysis.zero_out import zero_out
from tl_spd.experiments.induction_target import TargetSettings
from tl_spd.suppress import random_directions, singular_directions, subcomponent_directions
from tl_spd.views import show_active, show_top_examples

NAN, INF = math.nan, math.inf
IN, OUT = "blocks.0.mlp.W_in", "blocks.0.mlp.W_out"
TOKENS = tiny_tokens()
ROW = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])  # the last sequence is padding alone
QUIET: dict[str, Any] = dict(sites="blocks.*.mlp.W_out", C=2, steps=1, progress=False)
ONE = torch.ones(3, dtype=torch.long)


@cache
def case() -> tuple[HookedTransformer, spd.Run, spd.Importances]:
    """A host, a Run of its MLPs, and importances of ``TOKENS``."""
    model = tiny_host()
    run = tiny_run(model, "blocks.*.mlp.*")
    return model, run, run.importances(model, TOKENS)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As outside of the tests annotations are not checked; and no host may run."""
    case()

    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the host was run before the refusal")

    monkeypatch.setattr(HookedTransformer, "forward", forward)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- batches ---------------------------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[Tensor, str]] = {
    "no sequence": (TOKENS[:0], r"at least one token|\(0, 5\)"),
    "no position": (TOKENS[:, :0], r"at least one token|has 0 tokens|\(1, 0\)"),
    "one axis": (TOKENS[0], r"\(5,\)"),
    "three axes": (TOKENS[None], r"\(1, 3, 5\)"),
    "floats": (TOKENS.double(), "torch.float64"),
    "booleans": (TOKENS > 3, "torch.bool"),
    "behind the vocabulary": (TOKENS + 11, "(?i)vocabulary|Tokens must be 0 to 10, found 1[1-9] to 2[01]"),
    "negative": (TOKENS - 11, "(?i)vocabulary|Tokens must be 0 to 10, found -"),
    "longer than n_ctx": (tiny_tokens(3, N_CTX + 1), "at most 8|takes 1 to 8"),
}
TAKE_BATCHES: dict[str, Callable[..., Any]] = {
    "importances": lambda model, run, x, **mask: run.importances(model, x, **mask),
    "decompose": lambda model, run, x, **mask: tiny_decompose(model, (x, mask["attention_mask"]) if mask else x),
    "evaluate": lambda model, run, x, **mask: evaluate(model, run, x, **mask),
    "greedy_svd_path": lambda model, run, x, **mask: greedy_svd_path(model, x, sites=IN, tau=1.0, **mask),
    "rank1_curve": lambda model, run, x, **mask: rank1_curve(model, run, x, tau=1.0, **mask),
    "greedy_run_path": lambda model, run, x, **mask: greedy_run_path(model, run, x, tau=1.0, **mask),
    "pareto": lambda model, run, x, **mask: pareto(model, TOKENS, x, coefficients=[1.0], **mask, **QUIET),
    "splitting": lambda model, run, x, **mask: splitting(model, TOKENS, x, **mask, **QUIET),
}
TAKE_TOKENS: dict[str, Callable[..., Any]] = TAKE_BATCHES | {
    "list of batches": lambda model, run, x: tiny_decompose(model, [TOKENS, x]),
    "attention_kl": lambda model, run, x: attention_kl(model, run, x),
    "attention_without_positions": lambda model, run, x: attention_without_positions(model, x, 0, 0, ONE, ONE),
}
TAKE_PROMPTS: dict[str, Callable[..., Any]] = {
    "patch_subcomponents": lambda model, run, x: patch_subcomponents(model, run, x, x, answer_metric(model, 1)),
    "compare_whole_sites": lambda model, run, x: compare_whole_sites(model, run, x, x, answer_metric(model, 1)),
    "causal_trace": lambda model, run, x: causal_trace(model, x, [0], 1),
    "zero_out": lambda model, run, x: zero_out(model, [TOKENS[:1], x], [1, 1]),
    "effect_table": lambda model, run, x: effect_table(model, [TOKENS[:1], x], [1, 1], {"none": {}}),
    "control_table": lambda model, run, x: control_table(model, run, {IN: [0]}, [x], [1]),
    "select_by_effect": lambda model, run, x: select_by_effect(model, singular_directions(model, {IN: 1}), x, 1, 1),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("function", TAKE_TOKENS)
@pytest.mark.usefixtures("outside")
def test_a_batch_that_is_none_is_refused(function: str, batch: str) -> None:
    tokens, message = BATCHES[batch]
    with pytest.raises((ValueError, TypeError), match=message):
        TAKE_TOKENS[function](*case()[:2], tokens)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.usefixtures("outside")
def test_data_of_padding_alone_is_refused(as_list: bool) -> None:
    """``init="inputs"`` would run the host at once."""
    padded = TOKENS, torch.zeros_like(TOKENS)
    with pytest.raises(ValueError, match=r"No position of this batch \(3, 5\) is scored: it is empty or all padding"):
        tiny_decompose(case()[0], [(TOKENS, ROW), padded] if as_list else padded, init="inputs")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("function", TAKE_PROMPTS)
@pytest.mark.usefixtures("outside")
def test_a_prompt_that_is_none_is_refused(function: str, batch: str) -> None:
    tokens, message = BATCHES[batch]
    with pytest.raises((ValueError, TypeError), match=message):
        TAKE_PROMPTS[function](*case()[:2], tokens[:1] if tokens.ndim == 2 else tokens)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ROW[:, :3], r"shape \(3, 3\)"),
        (2 * ROW, "1 at real tokens"),
        (ROW * NAN, "1 at real tokens"),
        (ROW.tolist(), "must be a tensor|must be an integer tensor"),
    ],
)
@pytest.mark.parametrize("function", TAKE_BATCHES)
@pytest.mark.usefixtures("outside")
def test_a_mask_that_is_none_is_refused(function: str, mask: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TAKE_BATCHES[function](*case()[:2], TOKENS, attention_mask=mask)


# --- single numbers --------------------------------------------------------------------------------------------------


def entered(model: HookedTransformer, run: spd.Run, **options: Any) -> None:
    with spd.decomposed(model, run, **options):
        raise AssertionError("the context was entered")


TAKE_THRESHOLDS: dict[str, Callable[..., Any]] = {
    "decomposed": lambda model, run, g, t: entered(model, run, masks="rounded", threshold=t),
    "evaluate": lambda model, run, g, t: evaluate(model, run, TOKENS, thresholds=[0.0, t]),
    "active_by_position": lambda model, run, g, t: active_by_position(g, {"all": TOKENS >= 0}, [0.0, t]),
    "unique_subcomponents": lambda model, run, g, t: unique_subcomponents(g, None, [0.0, t]),
    "min_fraction": lambda model, run, g, t: unique_subcomponents(g, min_fraction=t),
    "l0": lambda model, run, g, t: l0(g, None, t),
    "l0_by_site": lambda model, run, g, t: l0_by_site(g, None, [0.0, t]),
    "subcomponent_activity": lambda model, run, g, t: subcomponent_activity(g, None, [0.0, t]),
    "top_examples": lambda model, run, g, t: top_examples(g, TOKENS, threshold=t),
    "unique_to_prompts": lambda model, run, g, t: unique_to_prompts(g, TOKENS, threshold=t),
    "patch_subcomponents": lambda model, run, g, t: patch_subcomponents(
        model, run, TOKENS[:1], TOKENS[1:2], answer_metric(model, 1), threshold=t
    ),
    "rank1_curve": lambda model, run, g, t: rank1_curve(model, run, TOKENS, tau=0.1, thresholds=[0.0, t]),
    "splitting": lambda model, run, g, t: splitting(model, TOKENS, TOKENS, thresholds=[0.0, t], **QUIET),
    "splitting, min_fraction": lambda model, run, g, t: splitting(model, TOKENS, TOKENS, min_fraction=t, **QUIET),
    "show_active": lambda model, run, g, t: show_active(["a"] * 5, g, threshold=t),
}


@pytest.mark.parametrize("value", [NAN, INF, -1e-9, 1.5])
@pytest.mark.parametrize("function", TAKE_THRESHOLDS)
@pytest.mark.usefixtures("outside")
def test_a_threshold_outside_0_to_1_is_refused(function: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"(threshold|min_fraction) must be 0 to 1, .* found {value}\."):
        TAKE_THRESHOLDS[function](*case(), value)


def target(**changes: Any) -> TargetSettings:
    return TargetSettings(**changes)


def opt(**changes: Any) -> spd.Optimizer:
    return spd.Optimizer(**changes)


NUMBERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    # what takes the number, numbers that mean nothing, what the message says
    **{
        name: (lambda m, r, g, x, name=name: tiny_decompose(m, TOKENS, **{name: x}), (0, -1, 0.5, NAN), rf"\b{name}\b")
        for name in ("steps", "C", "log_every", "max_rows", "batch_size")
    },
    "seed": (lambda m, r, g, x: tiny_decompose(m, TOKENS, seed=x), (0.5, NAN), "seed must be a whole number"),
    "C of a pattern": (lambda m, r, g, x: tiny_decompose(m, TOKENS, C={"*": x}), (0, 0.5), r"C\['\*'\]"),
    "checkpoint_every": (
        lambda m, r, g, x: tiny_decompose(m, TOKENS, out="/nowhere", checkpoint_every=x),
        (0, NAN, 0.5),
        "checkpoint_every must be",
    ),
    "lr": (lambda m, r, g, x: opt(lr=x), (-1e-9, NAN), "learning rates"),
    "component_lr": (lambda m, r, g, x: opt(component_lr=x), (-1.0, NAN), "learning rates"),
    "lr, infinite": (lambda m, r, g, x: tiny_decompose(m, optimizer=opt(lr=x)), (INF,), "finite"),
    "clip": (lambda m, r, g, x: opt(clip=x), (0, -1, NAN), "clip above 0"),
    "betas": (lambda m, r, g, x: opt(betas=x), ((1, 0), (NAN, 0.9), (0.9,)), "betas must be"),
    "warmup": (lambda m, r, g, x: spd.Schedule(warmup=x), (-1, NAN), "warmup"),
    "warm-up steps": (lambda m, r, g, x: spd.FaithfulnessWarmup(steps=x), (-1, 0.5, NAN), "steps"),
    "tolerance": (lambda m, r, g, x: spd.FaithfulnessWarmup(tolerance=x), (-1, NAN), "tolerance"),
    "coeff": (lambda m, r, g, x: spd.Recon(x), (-1, NAN), "coeff must be a number of at least 0"),
    "p_start": (lambda m, r, g, x: spd.ImportanceMinimality(p_start=x), (0, -0.5, NAN), "p_start, p_final and eps"),
    "p_final": (lambda m, r, g, x: spd.ImportanceMinimality(p_final=x), (0, -0.5, NAN), "p_start, p_final and eps"),
    "coeff_start": (
        lambda m, r, g, x: spd.ImportanceMinimality(coeff_start=x),
        (0, -1.0, NAN),
        "coeff_start goes with",
    ),
    "coeff_falls": (
        lambda m, r, g, x: spd.ImportanceMinimality(coeff_start=1.0, coeff_falls=x),
        ((0.5, 0.5), (0.7, 0.2), (-0.1, 0.5), (0.5, 1.1), (NAN, 0.5), (0.5,)),
        "coeff_falls are two shares",
    ),
    "leak": (lambda m, r, g, x: spd.Leak(x), (0.0, 0.009, 1.1, -1.0, NAN, INF), "Leak: start must be 0.01 to 1"),
    "leak's falls": (
        lambda m, r, g, x: spd.Leak(1.0, falls=x),
        ((0.5, 0.5), (0.7, 0.2), (-0.1, 0.5), (0.5, 1.1), (NAN, 0.5), (0.5,)),
        "falls two shares",
    ),
    "reach": (
        lambda m, r, g, x: spd.Attention(relative="scalar", reach=x),
        (0, -1.0, NAN, INF),
        "reach must be a number",
    ),
    "samples": (lambda m, r, g, x: spd.StochasticRecon(samples=x), (0, 1.5, NAN), "samples must be"),
    "d_gate": (lambda m, r, g, x: spd.Vector(d_gate=x), (0, 1.5, NAN), "d_gate must be"),
    "hidden": (lambda m, r, g, x: spd.Shared(hidden=x), (0, 1.5, NAN), "hidden must be"),
    "pareto": (
        lambda m, r, g, x: pareto(m, TOKENS, TOKENS, coefficients=[1.0, x], **QUIET),
        (-1.0, NAN),
        "coeff must be a number",
    ),
    "no losses": (lambda m, r, g, x: tiny_decompose(m, losses=x), ([],), "one or more loss terms"),
    "no data": (lambda m, r, g, x: tiny_decompose(m, x), ([],), "data is empty"),
    "no patterns": (lambda m, r, g, x: tiny_decompose(m, sites=x), ([],), "No site pattern was given"),
    "evaluate, samples": (lambda m, r, g, x: evaluate(m, r, TOKENS, samples=x), (0, 1.5), "samples must be"),
    "evaluate, max_rows": (lambda m, r, g, x: evaluate(m, r, TOKENS, max_rows=x), (0, NAN, INF), "max_rows must be"),
    "answers": (
        lambda m, r, g, x: evaluate(m, r, TOKENS, last_token_only=True, answers=x),
        (ONE[:2], torch.ones(4).long(), ONE + 10, -ONE, ONE * NAN, ONE > 0),
        "answers must be one token of 0 to 10 for each of the 3 sequences",
    ),
    "adversary, steps": (lambda m, r, g, x: Adversary(steps=x), (-1, 0.5, NAN), "steps must be"),
    "adversary, step_size": (lambda m, r, g, x: Adversary(step_size=x), (0, -1, NAN, INF), "step_size above 0"),
    "top_examples": (lambda m, r, g, x: top_examples(g, TOKENS, k=x), (0, -1, NAN, INF, 1.5), "k must be"),
    "select_by_importance": (lambda m, r, g, x: select_by_importance(g, x), (0, NAN, 1.5), "k must be"),
    "select_by_effect": (
        lambda m, r, g, x: select_by_effect(m, subcomponent_directions(r, {IN: [0]}), TOKENS[:1], 1, x),
        (0, NAN, INF),
        "k must be",
    ),
    "direct_effects": (lambda m, r, g, x: direct_effects(m, r, OUT, k=x), (0, 12, NAN, 1.5), "k must be"),
    "direct_effects, index": (lambda m, r, g, x: direct_effects(m, r, OUT, [x]), (3, -1, 0.5), "subcomponents 0 to 2"),
    **{
        f"trace, {name}": (
            lambda m, r, g, x, name=name: causal_trace(m, TOKENS[:1], [0], 1, **{name: x}),
            (0, -1, NAN, INF, *((0.5,) if name != "noise" else ())),
            name,
        )
        for name in ("window", "noise", "draws", "max_rows")
    },
    "trace, subject": (lambda m, r, g, x: causal_trace(m, TOKENS[:1], [0, x], 1), (0, 5, -1, 0.5), "subject"),
    "tau": (lambda m, r, g, x: greedy_svd_path(m, TOKENS, sites=IN, tau=x), (-1, NAN), "tau must be"),
    "tau of a Run's": (lambda m, r, g, x: greedy_run_path(m, r, TOKENS, tau=x), (-1, NAN), "tau must be"),
    "max_rounds": (
        lambda m, r, g, x: greedy_svd_path(m, TOKENS, sites=IN, tau=1.0, max_rounds=x),
        (0, NAN, INF, 1.5),
        "max_rounds must be",
    ),
    "points": (lambda m, r, g, x: rank1_curve(m, r, TOKENS, tau=1.0, points=x), (0, NAN, 1.5), "points must be"),
    "seeds": (lambda m, r, g, x: rank1_curve(m, r, TOKENS, tau=1.0, seeds=[0, x]), (0.5, NAN), r"seeds\[1\]"),
    "zero_out": (lambda m, r, g, x: zero_out(m, [TOKENS[:1]], [1], max_rows=x), (0, 0.5, NAN), "max_rows must be"),
    "no prompts": (lambda m, r, g, x: zero_out(m, x, x), ([],), "Wanted a list of prompts"),
    "answer": (lambda m, r, g, x: zero_out(m, [TOKENS[:1]], [x]), (-1, 11, 0.5, NAN), "(?i)answer|Token"),
    "draws": (lambda m, r, g, x: control_table(m, r, {IN: [0]}, [TOKENS[:1]], [1], draws=x), (0, 0.5), "draws must be"),
    "subcomponents": (
        lambda m, r, g, x: subcomponent_directions(r, {IN: [x]}),
        (3, -1, NAN, 0.5),
        "subcomponents 0 to 2",
    ),
    "singular": (lambda m, r, g, x: singular_directions(m, {IN: x}), (-1, 7, 0.5, NAN), IN),
    "random": (lambda m, r, g, x: random_directions(m, {IN: x}, torch.Generator()), (-1, 0.5, NAN), IN),
    "patch, max_rows": (
        lambda m, r, g, x: compare_whole_sites(m, r, TOKENS[:1], TOKENS[1:2], answer_metric(m, 1), max_rows=x),
        (0, 0.5),
        "max_rows must be",
    ),
    "patch, positions": (
        lambda m, r, g, x: compare_whole_sites(m, r, TOKENS[:1], TOKENS[1:2], answer_metric(m, 1), positions=x),
        ([5], [-1], [], [0.5]),
        "positions",
    ),
    "joint_shares": (
        lambda m, r, g, x: joint_shares(m, r, ONE[None], ONE[None], answer_metric(m, 1), pd.DataFrame(), x),
        ([], [0], [1, 0.5]),
        "ks",
    ),
    "answer_metric": (lambda m, r, g, x: answer_metric(m, x), (-1, 11, 0.5), "Token|answer"),
    "layer": (lambda m, r, g, x: attention_without_positions(m, TOKENS, x, 0, ONE, ONE), (2, -1, 0.5), "layer"),
    "head": (lambda m, r, g, x: attention_without_positions(m, TOKENS, 0, x, ONE, ONE), (2, -1, 0.5), "head"),
    "query": (
        lambda m, r, g, x: attention_without_positions(m, TOKENS, 0, 0, x, ONE),
        (ONE[:2], ONE + 4, -ONE, 0 * ONE),
        "query|Positions",
    ),
    "one_hot_positions": (
        lambda m, r, g, x: one_hot_positions(torch.tensor([0, x]), 5),
        (5, -1),
        "Positions must be 0 to 4",
    ),
    "real": (lambda m, r, g, x: l0(g, x), (ROW, ROW[:2].bool(), 0 * ROW > 0), "booleans|do not fit|no real token"),
    "positions": (
        lambda m, r, g, x: active_by_position(g, {"here": x}),
        (ROW, ROW[:2].bool(), 0 * ROW > 0),
        "booleans|do not fit|marks no token",
    ),
    "masks": (lambda m, r, g, x: entered(m, r, masks={IN: x}), (torch.tensor([0, NAN, 1]),), f"mask of {IN}"),
    "given importances": (
        lambda m, r, g, x: entered(m, r, importances={**g, IN: x}),
        (g_nan := torch.full((3, 5, 3), NAN),),
        IN,
    ),
    "importances": (lambda m, r, g, x: l0({**g, IN: x}), (g_nan,), f"importances of {IN}"),
    "no importances": (lambda m, r, g, x: subcomponent_activity(x), ({},), "at least one site"),
    "window": (
        lambda m, r, g, x: show_top_examples(top_examples(g, TOKENS), [["a"] * 5] * 3, g, IN, window=x),
        (-1, 0.5),
        "window must be",
    ),
    "target, lr": (lambda m, r, g, x: target(lr=x), (-1, NAN, INF), "lr must be"),
    "target, steps": (lambda m, r, g, x: target(steps=x), (0, -1), "steps"),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.usefixtures("outside")
def test_a_number_that_means_nothing_is_refused(name: str) -> None:
    function, values, message = NUMBERS[name]
    for value in values:
        with pytest.raises((ValueError, TypeError, IndexError, FloatingPointError), match=message):
            function(*case(), value)
