"""The same seed gives the same bits, whatever else was drawn or called before; the global random states stay as they were.

One table of calls covers every public function of the package, the analyses, the views and the experiments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformer_lens import HookedTransformer
from transformers import GPT2Config, GPT2LMHeadModel

import tl_spd as spd
from tests.experiments.test_facts import SETTINGS, word_facts, word_host
from tests.tiny import tiny_decompose, tiny_host, tiny_run, tiny_tokenizer
from tl_spd import hosts, suppress, views
from tl_spd.analysis import (
    activity,
    adversarial,
    attention,
    contribution,
    evaluation,
    pair,
    passes,
    patching,
    prompts,
    pruning,
    run_pruning,
    suppression,
    sweeps,
    tracing,
    vocabulary,
    zero_out,
)
from tl_spd.engine import Engine
from tl_spd.experiments.facts import FactsSettings, run_facts
from tl_spd.experiments.induction import InductionSettings, run_induction
from tl_spd.experiments.induction_target import InductionTask, TargetSettings
from tl_spd.sites import find_sites
from tl_spd.views.report import report
from tl_spd.wiring import attention_patterns

TOKENS = torch.randint(2, 11, (3, 5), generator=torch.Generator().manual_seed(0))  # 0 is padding, 1 the first token
ONE, PROMPT = torch.ones(3, dtype=torch.long), "w1 w2 w3"
OUT = "blocks.0.mlp.W_out"
SHORT: dict[str, Any] = dict(sites="blocks.*.mlp.W_out", C=2, steps=2, progress=False)


class Case:
    """A host, a Run, and what has been measured on them."""

    def __init__(self, folder: Path):
        self.folder, self.model = folder, tiny_host()
        self.model.set_tokenizer(tiny_tokenizer("right"))
        self.run = tiny_run(self.model, "blocks.*.mlp.*")
        self.run.history = tiny_decompose(self.model, TOKENS).history
        self.run.save(folder / "run")
        self.g = self.run.importances(self.model, TOKENS)
        self.engine = Engine(self.model, self.run)
        self.directions = suppress.subcomponent_directions(self.run, {OUT: [0, 1]})
        self.metric = pair.answer_metric(self.model, 3, 4)
        self.patched = patching.patch_subcomponents(self.model, self.run, TOKENS[:1], TOKENS[1:2], self.metric)
        self.trace = tracing.causal_trace(self.model, PROMPT, "w2", "w4", draws=2)
        self.zeroed = zero_out.zero_out(self.model, [PROMPT], ["w4"])
        self.controls = suppression.control_table(self.model, self.run, {OUT: [0]}, [PROMPT], ["w4"], draws=2)
        self.curve = pruning.rank1_curve(self.model, self.run, TOKENS, tau=0.01, points=2)
        self.here = {"all": TOKENS >= 0}
        self.texts = ["a", "b", "c", "d", "e"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("determinism"))


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """As outside of the tests: beartype looks at entries of lists that Python's global generator chooses."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def inside(context: contextlib.AbstractContextManager[HookedTransformer]) -> Tensor:
    with context as model:
        return model(TOKENS)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def hf_host(c: Case) -> HookedTransformer:
    with torch.random.fork_rng():
        config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
        GPT2LMHeadModel(config).eval().save_pretrained(c.folder / "hf")
        tiny_tokenizer("right").save_pretrained(c.folder / "hf")
    return hosts.load_host(str(c.folder / "hf"))


def saved_and_loaded(c: Case) -> HookedTransformer:
    suppress.save_weights(c.model, c.folder / "weights.safetensors")
    suppress.load_weights(c.model, c.folder / "weights.safetensors")
    return c.model


def rich(c: Case, importance: spd.ImportanceSpec, **changes: Any) -> spd.Run:
    """A training that draws everything that can be drawn: rows, initial values, masks, subsets."""
    terms = (*spd.paper_losses("gpt2"), spd.StochasticReconPartial(1.0, samples=2, subset="sequence"))
    losses = tuple({term.name: term for term in terms}.values())
    return tiny_decompose(
        c.model, TOKENS, importance=importance, losses=losses, batch_size=2, warmup=spd.FaithfulnessWarmup(3), **changes
    )


def induction(c: Case) -> Any:
    settings = replace(
        InductionSettings.preset("quick"),
        task=InductionTask(vocab=6, length=8),
        target=TargetSettings(steps=6, batch_size=4, log_every=3),
        C=3,
        steps=2,
        batch_size=4,
    )
    result = run_induction(settings, c.folder / "induction", progress=False)
    return result.run, result.target.history, result.active, result.unique, result.metrics


def facts(c: Case) -> Any:
    model = word_host()
    settings = FactsSettings(("blocks.*.mlp.W_*",), facts=word_facts(model), **{**SETTINGS, "steps": 2})
    result = run_facts(settings, None, progress=False, model=model)
    return [getattr(result, name) for name in ("run", "effects", "selections", "trace", "zero_out", "metrics")]


def drawn(figure: Any) -> None:
    """Views are drawn to the end, and not compared: their elements' names are new each time."""
    if isinstance(figure, views.View):
        figure.save(os.devnull)
    elif hasattr(figure, "savefig"):
        figure.savefig(os.devnull, format="png")
    else:
        figure.to_json()


Call = Callable[[Case], Any]
CALLS: dict[str, Call] = {
    # the package
    "decompose, Vector": lambda c: rich(c, spd.Vector(2)),
    "decompose, Scalar, svd": lambda c: rich(c, spd.Scalar(2), init="svd"),
    "decompose, Attention": lambda c: rich(c, spd.Attention(2), seed=7),
    "decompose, Shared, function": lambda c: tiny_decompose(
        c.model, lambda step, g: torch.randint(2, 11, (2, 4), generator=g), importance=spd.Shared(4)
    ),
    "estimate_memory": lambda c: dict(spd.estimate_memory(c.model, TOKENS, sites=OUT, C=3).stages),
    "paper_losses": lambda c: spd.paper_losses("gpt2"),
    "load": lambda c: spd.load(c.folder / "run", c.model),
    "decomposed": lambda c: inside(spd.decomposed(c.model, c.run, "stochastic", generator=generator())),
    "suppressed": lambda c: inside(spd.suppressed(c.model, c.run, {OUT: [0]})),
    "suppressed_directions": lambda c: inside(spd.suppressed_directions(c.model, c.directions, sequential=True)),
    "suppressed_copy": lambda c: spd.suppressed_copy(c.model, c.directions)(TOKENS),
    "Run": lambda c: (c.run.importances(c.model, TOKENS), c.run.delta(c.model), c.run.save(c.folder / "again")),
    "LossTerm.hooks": lambda c: c.model.run_with_hooks(TOKENS, fwd_hooks=spd.StochasticRecon().hooks(c.run, c.g)),
    "load_host": lambda c: hf_host(c) and None,
    # suppression
    "suppressed_weight removed_terms": lambda c: suppress.suppressed_weight(
        c.run.delta(c.model)[OUT], c.directions[OUT].read, c.directions[OUT].write
    ),
    "subcomponent_directions check_directions": lambda c: suppress.subcomponent_directions(c.run, {OUT: [1]}),
    "singular_directions": lambda c: suppress.singular_directions(c.model, {OUT: 2}),
    "random_directions": lambda c: suppress.random_directions(c.model, {OUT: 2}, generator(), matched=True),
    "save_weights load_weights": lambda c: saved_and_loaded(c) and None,
    # analyses
    "active_by_position": lambda c: activity.active_by_position(c.g, c.here),
    "unique_subcomponents": lambda c: activity.unique_subcomponents(c.g),
    "l0 l0_by_site": lambda c: activity.l0_by_site(c.g),
    "one_hot_positions": lambda c: activity.one_hot_positions(ONE, 5),
    "subcomponent_activity": lambda c: activity.subcomponent_activity(c.g),
    "top_examples": lambda c: activity.top_examples(c.g, TOKENS),
    "unique_to_prompts": lambda c: activity.unique_to_prompts(c.g, TOKENS, threshold=0.5),
    "adversarial_recon": lambda c: adversarial.adversarial_recon(
        c.engine, c.engine.observe(TOKENS), c.g, adversarial.Adversary(3, per="token")
    ),
    "pattern_kl attention_kl": lambda c: attention.attention_kl(c.model, c.run, TOKENS),
    "attention_without_positions": lambda c: attention.attention_without_positions(c.model, TOKENS, 0, 0, ONE, ONE),
    "contributions": lambda c: contribution.contributions(c.model, c.run, TOKENS),
    "evaluate": lambda c: evaluation.evaluate(c.model, c.run, TOKENS, seed=3),
    "answer_metric": lambda c: pair.answer_metric(c.model, 3)(c.model(TOKENS)),
    "rows_of": lambda c: passes.rows_of(passes.Passes(c.model).record(TOKENS)[1], ONE),
    "patch_subcomponents": lambda c: patching.patch_subcomponents(c.model, c.run, TOKENS[:1], TOKENS[1:2], c.metric),
    "joint_shares": lambda c: patching.joint_shares(c.model, c.run, TOKENS[:1], TOKENS[1:2], c.metric, c.patched),
    "compare_whole_sites": lambda c: patching.compare_whole_sites(c.model, c.run, TOKENS[:1], TOKENS[1:2], c.metric),
    "correlations": lambda c: patching.correlations(c.patched),
    "as_prompts equal_lengths standing standings": lambda c: prompts.standings(
        c.model, prompts.as_prompts(c.model, [PROMPT, "w1"], ["w4", "w5"]), 2
    ),
    "t_quantile mean_interval": lambda c: prompts.mean_interval(torch.arange(6.0).reshape(2, 3)),
    "level singular_terms": lambda c: (
        pruning.level(0.1),
        pruning.singular_terms(c.model, find_sites(c.model, OUT)[0]),
    ),
    "greedy_svd_path": lambda c: pruning.greedy_svd_path(c.model, TOKENS, sites=OUT, tau=0.1),
    "rank1_curve": lambda c: pruning.rank1_curve(c.model, c.run, TOKENS, tau=0.01, points=2),
    "greedy_run_path check_tau": lambda c: run_pruning.greedy_run_path(c.model, c.run, TOKENS, tau=0.01),
    "effect_table": lambda c: suppression.effect_table(c.model, [PROMPT], ["w4"], {"own": c.directions}),
    "control_table": lambda c: suppression.control_table(
        c.model, c.run, {OUT: [0]}, [PROMPT], ["w4"], draws=2, effort=suppression.Effort({OUT: 2})
    ),
    "select_by_importance": lambda c: suppression.select_by_importance(c.g, 3),
    "select_by_effect chosen": lambda c: suppression.chosen(
        suppression.select_by_effect(c.model, c.directions, PROMPT, "w4", 2)
    ),
    "pareto": lambda c: sweeps.pareto(c.model, TOKENS, TOKENS, coefficients=[0.1], **SHORT),
    "splitting": lambda c: sweeps.splitting(c.model, TOKENS, TOKENS, **SHORT),
    "find_subject": lambda c: tracing.find_subject(c.model, PROMPT, "w2"),
    "causal_trace noise_draws": lambda c: tracing.causal_trace(c.model, PROMPT, "w2", "w4", draws=2, seed=4),
    "direct_effects": lambda c: vocabulary.direct_effects(c.model, c.run, OUT),
    "zero_out": lambda c: zero_out.zero_out(c.model, [PROMPT], ["w4"]),
    # experiments
    "run_induction measure named_positions build_target train_target fast_forward attention_of_circuit "
    "accuracy_of_target": induction,
    "run_facts check_facts tokenize choose spared_facts measure_suppression summarize": facts,
    # views
    "show_attention": lambda c: drawn(
        views.show_attention(c.texts, *[attention_patterns(c.model, TOKENS)] * 2)  # the same model twice
    ),
    "show_active": lambda c: drawn(views.show_active(c.texts, c.g)),
    "show_importance": lambda c: drawn(views.show_importance(c.texts, c.g, {OUT: [0]})),
    "show_top_examples": lambda c: drawn(
        views.show_top_examples(activity.top_examples(c.g, TOKENS), [c.texts] * 3, c.g, OUT)
    ),
    "show_vocabulary document": lambda c: drawn(views.show_vocabulary(vocabulary.direct_effects(c.model, c.run, OUT))),
    "plot_active_by_position": lambda c: drawn(views.plot_active_by_position(activity.active_by_position(c.g, c.here))),
    "plot_history": lambda c: drawn(views.plot_history(c.run.history)),
    "plot_target": lambda c: drawn(
        views.plot_target(
            pd.DataFrame(
                {name: [0.1, 0.2] for name in ("step", "loss", "accuracy", "attention_m_on_s1", "attention_s2_on_m")}
            )
        )
    ),
    "plot_rank1_curve": lambda c: drawn(views.plot_rank1_curve(c.curve)),
    "plot_suppression": lambda c: drawn(views.plot_suppression(c.controls)),
    "plot_trace": lambda c: drawn(views.plot_trace(c.trace)),
    "plot_zero_out": lambda c: drawn(views.plot_zero_out(c.zeroed)),
    "plot_importance": lambda c: drawn(views.plot_importance(c.texts, c.g, OUT)),
    "plot_patching": lambda c: drawn(
        views.plot_patching(patching.compare_whole_sites(c.model, c.run, TOKENS[:1], TOKENS[1:2], c.metric))
    ),
    "report": lambda c: report(c.folder / "run", c.folder / "report.html") and None,
}


def public(module: Any) -> set[str]:
    """Names of the public functions of a module, those that it only imports left out."""
    own = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return {
        name
        for name, value in own.items()
        if inspect.isfunction(inspect.unwrap(value)) and (module in (spd, views) or value.__module__ == module.__name__)
    }


def test_the_table_has_every_public_function() -> None:
    names = ["analysis", "experiments"]
    folders = [Path(importlib.import_module(f"tl_spd.{name}").__file__ or "").parent for name in names]
    modules = [f"tl_spd.{f.name}.{path.stem}" for f in folders for path in f.glob("*.py") if path.stem != "__init__"]
    found = set[str]().union(*map(public, [spd, suppress, views, *map(importlib.import_module, modules)]))
    covered = {word.rstrip(",") for name in CALLS for word in name.split()}
    assert found - covered == set()


def same(first: Any, second: Any) -> bool:
    """Whether two results agree in every bit."""
    if isinstance(first, pd.DataFrame | pd.Series):
        return first.equals(second)
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, spd.Run):
        return same(first.tensors(), second.tensors()) and same(first.history, second.history)
    if isinstance(first, nn.Module):
        return same(dict(first.state_dict()), dict(second.state_dict()))
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if dataclasses.is_dataclass(first):
        return same(vars(first), vars(second))
    return bool(first == second)


def states() -> tuple[Any, ...]:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    return (
        torch_state.tolist(),
        [part.tolist() if hasattr(part, "tolist") else part for part in numpy_state],
        random.getstate(),
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same_bits_again_and_leaves_the_global_random_states(name: str, case: Case) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = states()
    first = CALLS[name](case)
    assert states() == before
    torch.manual_seed(12)
    np.random.seed(12)
    random.seed(12)
    inside(spd.decomposed(case.model, case.run))  # other work in between
    assert same(first, CALLS[name](case))


def digest(run: spd.Run) -> str:
    total = hashlib.blake2b(run.history.to_csv(index=False).encode())
    for name, value in sorted(run.tensors().items()):
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()


def test_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    """With another hash seed, and another state of torch's generator."""
    code = (
        "import torch, sys; from pathlib import Path; import tests.test_determinism as t\n"
        "c = t.Case.__new__(t.Case); c.model = t.tiny_host(); torch.set_num_threads(int(sys.argv[1])); torch.rand(9)\n"
        "print(t.digest(t.rich(c, t.spd.Vector(2))))"
    )
    own = Case.__new__(Case)
    own.model = tiny_host()
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, str(torch.get_num_threads())]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == digest(rich(own, spd.Vector(2)))
