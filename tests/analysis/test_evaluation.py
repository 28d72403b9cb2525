"""Evaluation against passes made one at a time through the public context manager."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_host, tiny_padding, tiny_run, tiny_tokens
from tl_spd.analysis import evaluation
from tl_spd.analysis.adversarial import Adversary
from tl_spd.analysis.evaluation import evaluate
from tl_spd.engine import Batch, Engine
from tl_spd.install import decomposed
from tl_spd.masks import Pass
from tl_spd.run import Run


def one_kl(model: torch.nn.Module, run: Run, tokens: Tensor, masks: object, last: bool) -> float:
    log_p = model(tokens).log_softmax(-1)
    with decomposed(model, run, masks):
        log_q = model(tokens).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return float((kl[:, -1] if last else kl).mean().detach())


@pytest.mark.parametrize("last", [False, True])
def test_every_deterministic_number_equals_its_own_forward_pass(last: bool) -> None:
    model, tokens = tiny_host("llama"), tiny_tokens()
    run = tiny_run(model, "blocks.*")
    run.requires_grad_(False)
    table = evaluate(model, run, tokens, last_token_only=last, thresholds=(0.5,)).set_index(["metric", "site"]).value
    g = run.importances(model, tokens)
    assert table["recon", "all"] == pytest.approx(one_kl(model, run, tokens, "importance", last), rel=1e-9)
    assert table["unmasked", "all"] == pytest.approx(one_kl(model, run, tokens, "ones", last), rel=1e-9)
    rounded = {name: (value > 0.5).double() for name, value in g.items()}
    assert table["rounded@0.5", "all"] == pytest.approx(one_kl(model, run, tokens, rounded, last), rel=1e-9)
    for name, value in g.items():
        assert table["layerwise", name] == pytest.approx(one_kl(model, run, tokens, {name: value}, last), rel=1e-9)
    assert table["layerwise", "all"] == pytest.approx(table["layerwise"][list(g)].mean())
    assert table["L0", "all"] == pytest.approx(sum(float((v > 0).sum(-1).double().mean()) for v in g.values()))
    squares = sum(float(d.square().sum()) for d in run.delta(model).values())
    assert table["faithfulness", "all"] == pytest.approx(squares / sum(d.numel() for d in run.delta(model).values()))


def test_stochastic_numbers_depend_on_the_seed_alone() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*")
    state = torch.get_rng_state()
    first, again = evaluate(model, run, tokens, seed=1), evaluate(model, run, tokens, seed=1)
    pd.testing.assert_frame_equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    other = evaluate(model, run, tokens, seed=2)
    changed = set(first.metric[first.value != other.value])
    assert changed == {"stochastic", "stochastic_layerwise"}


def test_stochastic_numbers_are_means_of_draws_made_one_after_the_other() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*.mlp.*")
    run.requires_grad_(False)
    table = evaluate(model, run, tokens, samples=3, seed=4, adversary=None).set_index(["metric", "site"]).value
    g, generator = run.importances(model, tokens), torch.Generator().manual_seed(4)

    def draw(name: str) -> Tensor:
        return g[name] + (1 - g[name]) * torch.rand(g[name].shape, generator=generator, dtype=g[name].dtype)

    joint = [one_kl(model, run, tokens, {name: draw(name) for name in g}, False) for _ in range(3)]
    assert table["stochastic", "all"] == pytest.approx(sum(joint) / 3, rel=1e-9)
    alone = [{name: one_kl(model, run, tokens, {name: draw(name)}, False) for name in g} for _ in range(3)]
    for name in g:
        assert table["stochastic_layerwise", name] == pytest.approx(sum(kl[name] for kl in alone) / 3, rel=1e-9)


def test_more_draws_hold_no_more_masks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run, together, kl = tiny_run(model, "blocks.*.mlp.*"), [], Engine.kl

    def recorded(self: Engine, batch: Batch, passes: Sequence[Pass]) -> Tensor:
        together.append(len(passes))
        return kl(self, batch, passes)

    monkeypatch.setattr(Engine, "kl", recorded)
    evaluate(model, run, tokens, samples=9, adversary=None)
    assert max(together) == len(run.sites)


def test_the_adversarial_row_names_its_budget_and_is_the_worst_number() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*.mlp.*")
    adversary = Adversary(steps=15, seed=2)
    table = evaluate(model, run, tokens, adversary=adversary).set_index(["metric", "site"]).value
    assert table["adversarial@15x0.1,site,seed2", "all"] > max(table["stochastic", "all"], table["recon", "all"])
    without = evaluate(model, run, tokens, adversary=None)
    assert not without.metric.str.startswith("adversarial").any()
    assert len(without) == len(table) - 1


def log_probs(model: torch.nn.Module, run: Run | None, tokens: Tensor) -> Tensor:
    if run is None:
        return model(tokens).log_softmax(-1).detach()
    with decomposed(model, run):
        return model(tokens).log_softmax(-1).detach()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_ce_difference_by_hand(side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "LOGIT_ELEMENTS", 120)  # two sequences at once
    model, tokens, mask = tiny_host("llama"), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, "blocks.*")
    answers = torch.tensor([3, 1, 4])
    by_token, by_answer = [], []
    for b in range(3):  # every sequence alone, without its padding
        row = tokens[b] if mask is None else tokens[b, mask[b].bool()]
        change = (log_probs(model, None, row[None]) - log_probs(model, run, row[None]))[0]
        by_token += [float(change[i, row[i + 1]]) for i in range(len(row) - 1)]
        by_answer.append(float(change[-1, answers[b]]))
    short = dict(adversary=None, samples=1)
    table = evaluate(model, run, tokens, mask, **short).set_index("metric").value
    assert table["ce_difference"] == pytest.approx(sum(by_token) / len(by_token), rel=1e-8)
    last = evaluate(model, run, tokens, mask, last_token_only=True, answers=answers, **short).set_index("metric").value
    assert last["ce_difference"] == pytest.approx(sum(by_answer) / 3, rel=1e-8)


def test_no_ce_difference_without_answers() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run, short = tiny_run(model, "blocks.*.mlp.W_in"), dict(adversary=None, samples=1)
    assert "ce_difference" not in set(evaluate(model, run, tokens, last_token_only=True, **short).metric)
    assert "ce_difference" not in set(evaluate(model, run, tokens[:, :1], **short).metric)
    with pytest.raises(ValueError, match="answers= is for last_token_only=True"):
        evaluate(model, run, tokens, answers=torch.tensor([1, 2, 3]))
