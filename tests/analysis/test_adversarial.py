"""The adversary against its own formula, against a grid of masks, and against a second route for its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.analysis.test_evaluation import one_kl
from tests.tiny import tiny_host, tiny_padding, tiny_run, tiny_tokens, unchanged
from tl_spd.analysis.adversarial import Adversary, adversarial_recon
from tl_spd.engine import Engine


@pytest.mark.parametrize(("per", "shape"), [("site", (1, 1, 3)), ("position", (1, 5, 3)), ("token", (3, 5, 3))])
def test_the_value_is_the_kl_of_the_masks_found_and_the_largest_met(per: Any, shape: tuple[int, ...]) -> None:
    model, tokens = tiny_host("llama"), tiny_tokens()
    run, state = tiny_run(model, "blocks.*.mlp.*"), torch.get_rng_state()
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    g = engine.importances(batch)
    with unchanged(model):
        found = adversarial_recon(engine, batch, g, Adversary(steps=5, step_size=0.2, per=per))
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in run.parameters())
    assert {tuple(r.shape) for r in found.r.values()} == {shape}
    assert all(bool(((r >= 0) & (r <= 1)).all()) and not r.requires_grad for r in found.r.values())
    masks = {name: (value + (1 - value) * found.r[name]).detach() for name, value in g.items()}
    assert found.kl == pytest.approx(one_kl(model, run, tokens, masks, False), rel=1e-9)
    assert len(found.history) == 6
    assert found.kl == max(found.history) > found.history[0]


def test_a_step_follows_the_sign_of_the_slope_measured_by_differences() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.1.mlp.W_out")
    engine = Engine(model, run, last_token_only=True)
    batch = engine.observe(tokens)
    g = {name: value.detach() for name, value in engine.importances(batch).items()}
    (name,) = g
    start = adversarial_recon(engine, batch, g, Adversary(steps=0, seed=3))
    after = adversarial_recon(engine, batch, g, Adversary(steps=1, seed=3))

    def kl(r: torch.Tensor) -> float:
        return one_kl(model, run, tokens, {name: g[name] + (1 - g[name]) * r}, True)

    moved = start.r[name].clone()
    for c in range(3):
        nudge = torch.zeros(3, dtype=torch.float64)
        nudge[c] = 1e-5
        slope = kl(start.r[name] + nudge) - kl(start.r[name] - nudge)
        moved[..., c] += 0.1 if slope > 0 else -0.1
    assert after.history[0] == start.kl
    assert after.history[1] == pytest.approx(kl(moved.clamp(0, 1)), rel=1e-9)


def test_no_masking_on_a_grid_is_much_worse_than_the_one_found() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.1.attn.W_V")
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    g = {name: value.detach() for name, value in engine.importances(batch).items()}
    (name,) = g
    found = adversarial_recon(engine, batch, g, Adversary())
    corners = itertools.product((0.0, 0.5, 1.0), repeat=3)
    grid = [one_kl(model, run, tokens, {name: g[name] + (1 - g[name]) * torch.tensor(r)}, False) for r in corners]
    assert found.kl >= 0.99 * max(grid)


def test_padding_is_not_scored() -> None:
    model, tokens, mask = tiny_host("gpt2"), tiny_tokens(), tiny_padding("right")
    run = tiny_run(model, "blocks.*.mlp.W_in")
    engine = Engine(model, run)
    values = []
    for changed in (tokens, torch.where(mask.bool(), tokens, (tokens + 1) % 11)):
        batch = engine.observe(changed, mask)
        values.append(adversarial_recon(engine, batch, engine.importances(batch), Adversary(steps=2)).kl)
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=-1), "steps must be at least 0"),
        (dict(step_size=0.0), "step_size above 0"),
        (dict(step_size=float("nan")), "step_size above 0"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adversary(**changes)


def test_the_budget_in_words() -> None:
    assert Adversary().budget == "20x0.1,site,seed0"
    assert Adversary(steps=7, step_size=0.25, per="token", seed=3).budget == "7x0.25,token,seed3"
