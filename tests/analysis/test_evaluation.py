"""Evaluation against passes made one at a time through the public context manager."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_host, tiny_run, tiny_tokens
from tl_spd.analysis.evaluation import evaluate
from tl_spd.install import decomposed
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
