"""Training: every number against a plain computation, every kind of data, and what a training may not touch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformer_lens import HookedTransformer

import tl_spd as spd
import tl_spd.train
from tests.tiny import same_runs, tiny_decompose, tiny_host, tiny_padding, tiny_tokens
from tl_spd import storage
from tl_spd.data import Batches
from tl_spd.run import new_run
from tl_spd.sites import find_sites

NAN = float("nan")
SITES = [f"blocks.{layer}.mlp.W_out" for layer in (0, 1)]
LEARN_NOTHING = spd.Optimizer(lr=0.0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked, as outside of the tests: the package's own messages are seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- schedules -------------------------------------------------------------------------------------------------------

EIGHTH, HALF = 0.5 + 0.5 * 0.5**0.5, 0.5  # (1 + cos(pi / 4)) / 2


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (spd.Schedule(), [1, 1, 1, 1]),
        (spd.Schedule(warmup=2), [0.5, 1, 1, 1]),
        (spd.Schedule(warmup=0.5), [0.5, 1, 1, 1]),
        (spd.Schedule(warmup=1), [1, 1, 1, 1]),
        (spd.Schedule(warmup=8), [0.125, 0.25, 0.375, 0.5]),
        (spd.Schedule("linear"), [1, 0.75, 0.5, 0.25]),
        (spd.Schedule("linear", final=0.2), [1, 0.8, 0.6, 0.4]),
        (spd.Schedule("linear", warmup=2), [0.5, 1, 1, 0.5]),
        (spd.Schedule("cosine"), [1, EIGHTH, HALF, 1 - EIGHTH]),
        (spd.Schedule("cosine", final=0.5), [1, 0.5 + 0.5 * EIGHTH, 0.75, 1 - 0.5 * EIGHTH]),
        (spd.Schedule("cosine", warmup=0.5), [0.5, 1, 1, HALF]),
    ],
    ids=str,
)
def test_schedule_factors(schedule: spd.Schedule, factors: list[float]) -> None:
    assert [schedule.factor(step, 4) for step in range(4)] == pytest.approx(factors, abs=1e-12)


# --- losses and optimiser steps against plain code -------------------------------------------------------------------

TERMS = [spd.Faithfulness(2.0), spd.ImportanceMinimality(0.1, p_start=0.9, p_final=0.3), spd.Recon(0.7)]
Parameters = dict[str, Tensor]


def lower(pre: Tensor, leak: float) -> Tensor:
    """Clamped to [0, 1]; the gradient leaks below 0 where it would raise ``pre``."""
    through = pre.clone()
    if through.requires_grad:
        through.register_hook(lambda g: torch.where(pre > 0, g, leak * g.clamp(max=0)) * (pre < 1))
    return (pre.clamp(0, 1) - pre).detach() + through


def plain_pass(
    model: HookedTransformer, parameters: Parameters, tokens: Tensor, leak: float = 0.01
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Original logits, gamma of both sites, and the logits with both W_out masked by their importances."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    pre, hooks, seen = [], [], {}
    for layer, name in enumerate(SITES):
        W1, b1, W2, b2 = (parameters[f"functions/{name}/gates.{key}"] for key in ("W1", "b1", "W2", "b2"))
        hidden = F.gelu(torch.einsum("bpd,dgc->bpgc", cache[f"blocks.{layer}.mlp.hook_post"], W1) + b1)
        pre.append((hidden * W2).sum(2) + b2)

        def keep(value: Tensor, hook: Any, layer: int = layer) -> None:
            seen[layer] = value

        def put(value: Tensor, hook: Any, layer: int = layer, name: str = name) -> Tensor:
            inner = seen[layer] @ parameters[f"components/{name}/read"]
            out = (inner * lower(pre[layer], leak)) @ parameters[f"components/{name}/write"]
            return out + model.blocks[layer].mlp.b_out.detach()

        hooks += [(f"blocks.{layer}.mlp.hook_post", keep), (f"blocks.{layer}.hook_mlp_out", put)]
    return logits, pre, model.run_with_hooks(tokens, fwd_hooks=hooks)


def kl(original: Tensor, other: Tensor) -> Tensor:
    p, q = original.double().softmax(-1), other.double().softmax(-1)
    return (p * (p / q).log()).sum(-1)


def plain_losses(
    model: HookedTransformer, parameters: Parameters, tokens: Tensor, p: float, leak: float
) -> list[Tensor]:
    """Faithfulness, minimality and recon."""
    logits, pre, masked = plain_pass(model, parameters, tokens, leak)
    deltas = [
        model.blocks[layer].mlp.W_out.detach()
        - parameters[f"components/{name}/read"] @ parameters[f"components/{name}/write"]
        for layer, name in enumerate(SITES)
    ]
    faithfulness = sum((delta**2).sum() for delta in deltas) / sum(delta.numel() for delta in deltas)
    upper = [torch.where(x > 1, 0.99 + 0.01 * x, x.clamp(min=0)) for x in pre]
    minimality = sum(((x + 1e-12) ** p).sum(-1) for x in upper).mean()
    return [faithfulness, minimality, kl(logits, masked).mean()]


def hand_made_step(
    parameters: Parameters, grads: list[Tensor], state: list[Tensor], t: int, optimizer: spd.Optimizer, factor: float
) -> Parameters:
    """Step ``t`` (from 1) of Adam or AdamW; ``state`` holds the first and then the second moments and is updated."""
    norm = sum((grad**2).sum() for grad in grads) ** 0.5
    new, count = {}, len(grads)
    for index, ((name, value), grad) in enumerate(zip(parameters.items(), grads, strict=True)):
        own = optimizer.component_lr if name.startswith("components/") else None
        lr = (optimizer.lr if own is None else own) * factor
        if optimizer.clip is not None and norm > optimizer.clip:
            grad = grad * (optimizer.clip / (norm + 1e-6))
        if optimizer.kind == "adam":
            grad = grad + optimizer.weight_decay * value
        else:
            value = value * (1 - lr * optimizer.weight_decay)
        beta1, beta2 = optimizer.betas
        first = state[index] = beta1 * state[index] + (1 - beta1) * grad
        second = state[count + index] = beta2 * state[count + index] + (1 - beta2) * grad**2
        step = (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + 1e-8)
        new[name] = (value - lr * step).detach()
    return new


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (spd.Optimizer(lr=0.01), spd.Schedule()),
        (spd.Optimizer(lr=0.02, kind="adamw", weight_decay=0.3), spd.Schedule("linear")),
        (spd.Optimizer(lr=0.02, weight_decay=0.3, betas=(0.5, 0.9)), spd.Schedule("cosine", warmup=2)),
        (spd.Optimizer(lr=0.01, clip=0.05), spd.Schedule()),
        (spd.Optimizer(lr=0.01, clip=1e6), spd.Schedule()),
        (spd.Optimizer(lr=0.01, component_lr=0.003), spd.Schedule("linear")),
    ],
    ids=["adam", "adamw linear", "adam L2 cosine", "clipped", "not clipped", "two rates"],
)
@pytest.mark.parametrize("leak", [(0.01, 0.01, 0.01), (1.0, 0.1, 0.01)], ids=["the leak", "a leak that falls"])
def test_steps_are_hand_made_steps(
    optimizer: spd.Optimizer, schedule: spd.Schedule, leak: tuple[float, float, float]
) -> None:
    model, tokens, steps = tiny_host(), tiny_tokens(), 3
    settings: dict[str, Any] = dict(losses=TERMS, importance=spd.Vector(d_gate=2, start=0.0))
    settings["leak"] = spd.Leak(leak[0], falls=(0.25, 0.75))
    run = tiny_decompose(model, tokens, steps=steps, optimizer=optimizer, schedule=schedule, **settings)
    start = tiny_decompose(model, tokens, steps=1, optimizer=LEARN_NOTHING, **settings)
    assert all(0.1 < (g == 0).double().mean().item() < 0.9 for g in start.importances(model, tokens).values())
    parameters = {name: value.clone() for name, value in start.tensors().items()}
    state = [torch.zeros_like(value) for value in [*parameters.values()] * 2]
    for step in range(steps):
        leaves = {name: value.requires_grad_(True) for name, value in parameters.items()}
        losses = plain_losses(model, leaves, tokens, p=0.9 - 0.3 * step, leak=leak[step])
        total = 2.0 * losses[0] + 0.1 * losses[1] + 0.7 * losses[2]
        row = run.history.iloc[step]
        names = ["loss", "Faithfulness", "ImportanceMinimality", "Recon"]
        assert [row[name] for name in names] == pytest.approx([x.item() for x in (total, *losses)], rel=1e-9)
        grads = list(torch.autograd.grad(total, list(leaves.values())))
        parameters = hand_made_step(parameters, grads, state, step + 1, optimizer, schedule.factor(step, steps))
    for name, value in run.tensors().items():
        torch.testing.assert_close(
            value, parameters[name], rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_minimality_counts_as_its_coefficient_at_each_step_says() -> None:
    term = spd.ImportanceMinimality(0.1, coeff_start=10.0, coeff_falls=(0.25, 0.75))
    run = tiny_decompose(tiny_host(), steps=5, losses=[term, spd.Recon(0.7)], optimizer=LEARN_NOTHING)
    weighted = run.history.loss - 0.7 * run.history.Recon
    assert (weighted / run.history.ImportanceMinimality).tolist() == pytest.approx([10, 10, 1, 0.1, 0.1])


def test_last_token_only_scores_the_last_real_position() -> None:
    model, tokens, mask = tiny_host(), tiny_tokens(), tiny_padding("right")
    assert mask is not None
    settings: dict[str, Any] = dict(losses=[spd.Recon(1.0)], steps=1, optimizer=LEARN_NOTHING)
    run = tiny_decompose(model, (tokens, mask), last_token_only=True, **settings)
    every = tiny_decompose(model, (tokens, mask), **settings)
    at_last, at_all = [], []
    for row, length in enumerate(mask.sum(1).tolist()):  # each prompt alone and without padding
        logits, _, masked = plain_pass(model, run.tensors(), tokens[row : row + 1, :length])
        at_all.append(kl(logits, masked)[0])
        at_last.append(at_all[-1][-1])
    assert run.history.Recon[0] == pytest.approx(torch.stack(at_last).mean().item(), rel=1e-9)
    assert every.history.Recon[0] == pytest.approx(torch.cat(at_all).mean().item(), rel=1e-9)


@pytest.mark.parametrize("importance", [spd.Vector(d_gate=2), spd.Attention(d_gate=2)], ids=["vector", "attention"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(side: str, importance: spd.ImportanceSpec) -> None:
    model, tokens, mask = tiny_host(), tiny_tokens(), tiny_padding(side)
    assert mask is not None
    losses = [*spd.paper_losses("gpt2"), spd.ReconLayerwise(1.0)]
    settings: dict[str, Any] = dict(losses=losses, importance=importance, steps=3, sites="blocks.*.mlp.*")
    other = torch.where(mask.bool(), tokens, (tokens + 1) % 11)
    here = tiny_decompose(model, (tokens, mask), **settings)
    there = tiny_decompose(model, lambda step, generator: (other, mask.bool()), **settings)
    np.testing.assert_allclose(here.history.to_numpy(), there.history.to_numpy(), rtol=1e-9)
    without = tiny_decompose(model, tokens, **settings)
    assert not np.allclose(here.history.to_numpy(), without.history.to_numpy(), rtol=1e-3)


def test_p_goes_from_start_to_final() -> None:
    model, tokens = tiny_host(), tiny_tokens()
    terms = [spd.ImportanceMinimality(1.0, p_start=0.8, p_final=0.2)]
    run = tiny_decompose(model, tokens, losses=terms, steps=4, optimizer=LEARN_NOTHING)
    _, pre, _ = plain_pass(model, run.tensors(), tokens)
    upper = [torch.where(x > 1, 0.99 + 0.01 * x, x.clamp(min=0)) for x in pre]
    wanted = [float(sum(((x + 1e-12) ** p).sum(-1) for x in upper).mean()) for p in (0.8, 0.6, 0.4, 0.2)]
    assert run.history.ImportanceMinimality.tolist() == pytest.approx(wanted, rel=1e-9)


def test_history_rows_columns_and_l0() -> None:
    model, tokens, mask = tiny_host(), tiny_tokens(), tiny_padding("left")
    assert mask is not None
    run = tiny_decompose(model, (tokens, mask), steps=7, log_every=3, optimizer=LEARN_NOTHING)
    names = ["Faithfulness", "ImportanceMinimality", "StochasticRecon", "Recon"]
    assert list(run.history) == ["step", "loss", *names, "L0"]
    assert run.history.step.tolist() == [3, 6, 7]
    weighted = run.history[names].to_numpy() @ [2.0, 0.1, 0.5, 0.7]
    np.testing.assert_allclose(run.history.loss, weighted, rtol=1e-12)
    active = sum((g > 0).sum(-1) for g in run.importances(model, tokens, mask).values())
    real = [int(active[row, pos]) for row in range(3) for pos in range(5) if pos >= row]
    assert run.history.L0.tolist() == pytest.approx([sum(real) / 12] * 3)


@dataclass(frozen=True)
class Size(spd.LossTerm):
    """A user's own term: the mean square of all read directions."""

    def value(self, step: spd.Step) -> Tensor:
        return torch.cat([parts.read.flatten() for parts in step.run.components.values()]).square().mean()


def test_a_term_of_ones_own_takes_part() -> None:
    model = tiny_host()
    run = tiny_decompose(model, losses=[Size(3.0)], steps=2, optimizer=spd.Optimizer(lr=0.01))
    start = tiny_decompose(model, losses=[Size(3.0)], steps=1, optimizer=LEARN_NOTHING)
    reads = [start.components[name].read for name in SITES]
    assert run.history.Size[0] == pytest.approx(float(torch.cat(reads).square().mean()))
    assert run.history.loss[0] == pytest.approx(3 * run.history.Size[0])
    assert run.history.Size[1] < run.history.Size[0]
    assert run.settings["losses"] == [{"kind": "Size", "coeff": 3.0}]
    for name in SITES:
        assert torch.equal(run.components[name].write, start.components[name].write)


# --- data ------------------------------------------------------------------------------------------------------------


def one_shot(tokens: Tensor, count: int) -> Any:
    yield from (tokens for _ in range(count))


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tuple with mask": lambda tokens: (tokens, torch.ones_like(tokens)),
    "tuple without mask": lambda tokens: (tokens, None),
    "list": lambda tokens: [tokens],
    "list of pairs": lambda tokens: [(tokens, None), [tokens, torch.ones_like(tokens)]],
    "int32": lambda tokens: tokens.int(),
    "loader": lambda tokens: DataLoader(tokens, batch_size=3),  # type: ignore[arg-type]
    "loader of lists": lambda tokens: DataLoader(TensorDataset(tokens), batch_size=3),
    "loader of pairs": lambda tokens: DataLoader(TensorDataset(tokens, torch.ones_like(tokens)), batch_size=3),
    "generator": lambda tokens: one_shot(tokens, 4),
    "map": lambda tokens: map(torch.clone, [tokens] * 9),
    "function": lambda tokens: lambda step, generator: tokens,
    "function of pairs": lambda tokens: lambda step, generator: (tokens, torch.ones_like(tokens)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_batches(kind: str) -> None:
    tokens = tiny_tokens()
    batches = Batches(KINDS[kind](tokens), tiny_host())
    for step in range(4):
        found, mask = batches(step, torch.Generator())
        assert torch.equal(found, tokens)
        assert found.dtype == torch.int64
        assert mask is None or bool((mask == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_the_first_batch_takes_nothing_away(kind: str) -> None:
    batches = Batches(KINDS[kind](tiny_tokens()), tiny_host())
    assert torch.equal(batches.first(torch.Generator())[0], tiny_tokens())
    for step in range(4):
        assert torch.equal(batches(step, torch.Generator())[0], tiny_tokens())


def test_the_first_of_several_batches_comes_twice_and_the_others_once() -> None:
    batches = Batches([tiny_tokens(seed=seed) for seed in range(3)], tiny_host())
    found = [batches.first(torch.Generator())[0], *(batches(step, torch.Generator())[0] for step in range(4))]
    assert all(torch.equal(a, tiny_tokens(seed=seed)) for a, seed in zip(found, (0, 0, 1, 2, 0), strict=True))


def test_a_training_from_inputs_starts_with_a_subcomponent_for_each_real_token() -> None:
    """One step of learning rate 0: the first subcomponents read one token of the first batch each, the others none."""
    model, mask = tiny_host("llama"), tiny_padding("left", batch=2, pos=2)
    tokens = tiny_tokens(2, 2)
    data, real = [(tokens, mask), (tiny_tokens(2, 2, seed=1), mask)], mask.bool()
    still = spd.Optimizer(lr=0.0)
    run = tiny_decompose(model, data, sites="blocks.0.mlp.W_in", C=40, steps=1, init="inputs", optimizer=still)
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    x = cache["blocks.0.ln2.hook_normalized"] * model.blocks[0].ln2.w  # the RMS norm's own output
    parts = run.components["blocks.0.mlp.W_in"]
    inner = x[real] @ parts.read
    big = inner.abs() > 1e-8
    count = int(real.sum())
    assert big[:, :count].sum(0).tolist() == [1] * count
    assert big[:, :count].sum(1).tolist() == [1] * count
    assert (inner[:, count:] @ parts.write[count:]).abs().max() < 1e-10
    torch.testing.assert_close(parts.weight(), model.blocks[0].mlp.W_in, rtol=1e-8, atol=1e-10)


def test_a_mask_of_ones_is_no_mask() -> None:
    model, tokens = tiny_host(), tiny_tokens()
    assert same_runs(
        tiny_decompose(model, (tokens, torch.ones_like(tokens)), steps=2), tiny_decompose(model, tokens, steps=2)
    )


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_drawn_with_their_mask(masked: bool) -> None:
    model, tokens = tiny_host(), tiny_tokens(8)
    mask = tiny_padding("left", batch=8, pos=5) if masked else None
    batches = Batches((tokens, mask) if masked else tokens, model, batch_size=3)
    drawing, again = (torch.Generator().manual_seed(5) for _ in range(2))
    drawn = []
    for step in range(4):
        rows = torch.randperm(8, generator=again)[:3]
        found, found_mask = batches(step, drawing)
        assert torch.equal(found, tokens[rows])
        assert found_mask is None if mask is None else torch.equal(found_mask, mask[rows])
        drawn.append(tuple(rows.tolist()))
    assert len(set(drawn)) == 4
    assert torch.equal(Batches(tokens, model, batch_size=9)(0, drawing)[0], tokens)


@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_a_list_starts_again_and_is_taken_up_in_its_middle(start: int) -> None:
    batches = Batches([tiny_tokens(seed=seed) for seed in range(3)], tiny_host())
    for step in range(start, 8):
        assert torch.equal(batches(step, torch.Generator())[0], tiny_tokens(seed=step % 3))


def test_a_generator_that_ends_early_says_so() -> None:
    with pytest.raises(ValueError, match="ended after 2 batches and cannot be started again"):
        tiny_decompose(tiny_host(), one_shot(tiny_tokens(), 2))


def test_a_function_gets_the_step_and_a_seeded_generator() -> None:
    calls: list[tuple[int, float]] = []

    def data(step: int, generator: torch.Generator) -> Tensor:
        assert generator.device.type == "cpu"
        calls.append((step, float(torch.rand((), generator=generator))))
        return tiny_tokens()

    for _ in range(2):
        tiny_decompose(tiny_host(), data, steps=3)
    assert [step for step, _ in calls] == [0, 1, 2] * 2
    assert calls[:3] == calls[3:]
    assert len(dict(calls)) == len({number for _, number in calls}) == 3


ONES = torch.ones(3, 5, dtype=torch.long)
BAD_DATA: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, TypeError, "found NoneType"),
    "number": (3, TypeError, "found int"),
    "text": ("a prompt", TypeError, "found str.*to_tokens"),
    "floats": (ONES.float(), TypeError, "found a tensor of torch.float32"),
    "booleans": (ONES.bool(), TypeError, "found a tensor of torch.bool"),
    "empty list": ([], ValueError, "data is empty"),
    "list of text": (["a"], TypeError, "found str"),
    "list of triples": ([(ONES, ONES, ONES)], TypeError, "found tuple"),
    "one axis": (ONES[0], ValueError, r"\[batch, pos\].*\(5,\)"),
    "three axes": (ONES[None], ValueError, r"found shape \(1, 3, 5\)"),
    "no rows": (ONES[:0], ValueError, r"at least one token, found shape \(0, 5\)"),
    "no positions": (ONES[:, :0], ValueError, r"found shape \(3, 0\)"),
    "too long": (torch.ones(1, 9, dtype=torch.long), ValueError, "at most 8 tokens, found prompts of 9"),
    "no such token": (ONES * 11, ValueError, "0 to 10, found 11 to 11"),
    "negative token": (-ONES, ValueError, "0 to 10, found -1 to -1"),
    "mask of another shape": ((ONES, ONES[:, :4]), ValueError, r"shape \(3, 4\); wanted .* \(3, 5\)"),
    "mask with other values": ((ONES, 2 * ONES), ValueError, "found other values"),
    "two batches in a tuple": ((tiny_tokens(), tiny_tokens()), ValueError, "attention_mask must be 1"),
    "mask no tensor": ([(ONES, [[1]])], TypeError, "attention_mask must be a tensor of 0 and 1, found list"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_refused_before_anything_is_built(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, error, message = BAD_DATA[case]
    monkeypatch.setattr(tl_spd.train, "new_run", lambda *_: pytest.fail("something was built"))
    with pytest.raises(error, match=message):
        spd.decompose(tiny_host(), data, sites="*", C=3, steps=2)
    if not isinstance(data, list | str | None):  # and as one batch of several
        with pytest.raises(error, match=message):
            Batches(lambda step, generator: data, tiny_host())(0, torch.Generator())


def test_a_batch_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="empty or all padding"):
        tiny_decompose(tiny_host(), (tiny_tokens(), torch.zeros(3, 5, dtype=torch.long)))


# --- seeds, precision, and what is not touched -----------------------------------------------------------------------


@pytest.mark.parametrize("importance", [spd.Scalar(2), spd.Vector(2), spd.Shared(3), spd.Attention(2)], ids=str)
def test_the_seed_decides_every_bit(importance: spd.ImportanceSpec) -> None:
    model, tokens = tiny_host(dtype=torch.float32), tiny_tokens(8)
    settings: dict[str, Any] = dict(importance=importance, batch_size=4)
    first = tiny_decompose(model, tokens, seed=5, **settings)
    torch.rand(17)
    assert same_runs(first, tiny_decompose(model, tokens, seed=5, **settings))
    other = tiny_decompose(model, tokens, seed=6, **settings)
    assert not any(torch.equal(first.components[name].read, other.components[name].read) for name in SITES)


def snapshot(model: HookedTransformer) -> dict[str, Any]:
    """Everything of a host that a training may not change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "objects": {name: id(parameter) for name, parameter in model.named_parameters()},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [parameter.grad for parameter in model.parameters()],
        "hooks": {
            name: [list(vars(module)[table]) for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
            for name, module in model.named_modules()
        },
        "training": model.training,
    }


@pytest.mark.usefixtures("unchecked")  # beartype draws from Python's random
@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("fails", [False, True])
def test_host_and_global_random_states_are_untouched(style: str, fails: bool) -> None:
    model = tiny_host(style, dtype=torch.float32)
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value * 0)  # a user's hook: not for the twin
    before, states = snapshot(model), (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    if fails:
        with pytest.raises(spd.NonFiniteLossError):
            tiny_decompose(model, losses=[Breaks(at=2)])
    else:
        run = tiny_decompose(model, sites="*", losses=spd.paper_losses("gpt2"))
        assert all(not parameter.requires_grad and parameter.grad is None for parameter in run.parameters())
        plain = tiny_host(style, dtype=torch.float32)
        assert same_runs(run, tiny_decompose(plain, sites="*", losses=spd.paper_losses("gpt2")))
    after = snapshot(model)
    assert all(torch.equal(value, after["values"].pop(name)) for name, value in before.pop("values").items())
    assert not after.pop("values")
    assert before == after
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_hosts_of_every_precision(dtype: torch.dtype) -> None:
    model = tiny_host(dtype=torch.float64).to(dtype)
    run = tiny_decompose(model, sites="*", losses=spd.paper_losses("gpt2"), steps=2)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert {parameter.dtype for parameter in run.parameters()} == {wanted}
    assert np.isfinite(run.history.to_numpy()).all()
    assert (run.history[["Recon", "StochasticRecon", "ReconPartial"]].to_numpy() > 0).all()


def test_gradients_switched_off_outside_do_not_matter() -> None:
    model = tiny_host()
    wanted = tiny_decompose(model)
    with torch.no_grad():
        run = tiny_decompose(model)
        assert not torch.is_grad_enabled()
    assert same_runs(run, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(tmp_path: Path, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, state = tiny_host(dtype=torch.float32).to(dtype).to("cuda"), torch.cuda.get_rng_state()
    settings: dict[str, Any] = dict(sites="*", losses=spd.paper_losses("gpt2"), steps=6, checkpoint_every=2)
    run = tiny_decompose(model, tiny_tokens(8), batch_size=4, out=tmp_path, **settings)
    assert {parameter.device.type for parameter in run.parameters()} == {"cuda"}
    assert np.isfinite(run.history.to_numpy()).all()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert same_runs(run, spd.load(tmp_path, model))
    again = tiny_decompose(model, tiny_tokens(8), batch_size=4, out=tmp_path, resume=True, **settings)
    assert same_runs(run, again)


def test_the_bar_shows_losses_and_l0(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_decompose(tiny_host(), progress=True, warmup=spd.FaithfulnessWarmup(steps=2))
    shown = capsys.readouterr().err
    for part in ("decompose", "faithfulness warm-up", "4/4", "Recon=", "L0="):
        assert part in shown
    tiny_decompose(tiny_host())
    assert capsys.readouterr().err == ""


# --- warm-up ---------------------------------------------------------------------------------------------------------


def test_warm_up_reaches_its_tolerance_with_components_alone() -> None:
    model = tiny_host()
    settings: dict[str, Any] = dict(C=8, steps=1, losses=[spd.Faithfulness()], optimizer=LEARN_NOTHING)
    cold = tiny_decompose(model, **settings)
    warm = tiny_decompose(model, warmup=spd.FaithfulnessWarmup(steps=2000, tolerance=1e-5), **settings)
    assert cold.history.Faithfulness[0] > 1e-2
    assert 1e-7 < warm.history.Faithfulness[0] < 1e-5
    for name, value in warm.tensors().items():
        assert torch.equal(value, cold.tensors()[name]) == name.startswith("functions/")


def test_warm_up_stops_after_its_steps_and_can_be_off() -> None:
    model = tiny_host()
    settings: dict[str, Any] = dict(steps=1, losses=[spd.Faithfulness()], optimizer=LEARN_NOTHING)
    found = find_sites(model, "blocks.*.mlp.W_out")
    fresh = new_run(model, found, dict.fromkeys(SITES, 3), spd.Vector(d_gate=2)).tensors()
    off = tiny_decompose(model, warmup=spd.FaithfulnessWarmup(steps=0), **settings).tensors()
    assert all(torch.equal(off[name], fresh[name]) for name in fresh)
    one = tiny_decompose(model, warmup=spd.FaithfulnessWarmup(steps=1, lr=0.25), **settings).tensors()
    for name in fresh:  # the first step of Adam is lr times the sign of the gradient
        moved = 0.25 if name.startswith("components/") else 0.0
        torch.testing.assert_close(
            (one[name] - fresh[name]).abs(), torch.full_like(fresh[name], moved), rtol=0, atol=1e-4
        )


# --- numbers that are not finite -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breaks(spd.LossTerm):
    """Finite before step ``at`` of 4 (or ``steps``); then its value, or only its gradient, is not."""

    at: int = 0
    what: str = "value"
    steps: int = 4

    def value(self, step: spd.Step) -> Tensor:
        read = next(iter(step.run.components.values())).read
        if round(step.progress * (self.steps - 1)) < self.at:
            return read.square().mean()
        return read.mean() * float("nan") if self.what == "value" else (read.sum() * 0).sqrt()


@pytest.mark.parametrize(
    ("what", "every", "kept", "message"),
    [
        ("value", 6, None, "Step 5: Breaks was not finite"),
        ("gradient", 2, 4, r"Step 5: the gradient of components/blocks\.0\.mlp\.W_out/read was not finite"),
        ("gradient", 5, 5, r"Step 5: the gradient of components/blocks\.0\.mlp\.W_out/read was not finite"),
    ],
)
def test_the_last_good_checkpoint_is_kept(
    tmp_path: Path, what: str, every: int, kept: int | None, message: str
) -> None:
    model = tiny_host()
    settings: dict[str, Any] = dict(
        steps=9,
        log_every=50,
        losses=[spd.StochasticRecon(1.0), Breaks(1.0, 5, what, 9)],
        out=tmp_path,
        checkpoint_every=every,
    )
    for resume in (False, True):  # it stops there again
        with pytest.raises(spd.NonFiniteLossError, match=message):
            tiny_decompose(model, resume=resume, **settings)
        if kept is None:
            assert not (tmp_path / "checkpoint").exists()
            continue
        assert storage.read_record(tmp_path / "checkpoint")["step"] == kept
    if kept is not None:
        good = {"losses": [spd.StochasticRecon(1.0), Breaks(1.0, 9, what, 9)], "out": tmp_path / "good"}
        with pytest.raises(KeyboardInterrupt):
            tiny_decompose(model, stopping(kept, draw=False), **settings | good)
        assert same_runs(spd.load(tmp_path / "checkpoint", model), spd.load(tmp_path / "good" / "checkpoint", model))
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_where_looking_waits_no_bad_step_is_taken_and_the_first_is_named(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model, runs = tiny_host(dtype=torch.float32), []

    class Lazy(tl_spd.train._Watch):  # as on a GPU
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.at_once = False

    monkeypatch.setattr(tl_spd.train, "_Watch", Lazy)
    monkeypatch.setattr(tl_spd.train, "new_run", lambda *args: runs.append(new_run(*args)) or runs[-1])
    terms = [spd.StochasticRecon(1.0), Breaks(1.0, 5, what, 9)]
    with pytest.raises(spd.NonFiniteLossError, match="Step 5"):
        tiny_decompose(model, losses=terms, steps=9, log_every=8)
    assert runs[0].history.empty  # it stopped when the row of step 8 was due
    good = [spd.StochasticRecon(1.0), Breaks(1.0, 9, what, 9)]
    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(model, stopping(5, draw=False), losses=good, steps=9, log_every=8)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True))


def test_autocast_trains_in_bfloat16_matmuls_and_keeps_float32_parameters() -> None:
    model = tiny_host(dtype=torch.float32)
    for importance in (spd.Scalar(2), spd.Vector(2), spd.Attention(2), spd.Shared(4)):
        plain, cast = (
            tiny_decompose(model, losses=TERMS, importance=importance, steps=1, log_every=1, autocast=autocast)
            for autocast in (False, True)
        )
        assert all(parameter.dtype == torch.float32 for parameter in cast.parameters())
        one, other = (run.history.iloc[0].drop(["step", "L0"]) for run in (plain, cast))
        assert not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=0.1)  # eight bits of mantissa


def test_a_weighted_sum_that_overflows_is_named() -> None:
    with pytest.raises(spd.NonFiniteLossError, match="Step 0: loss was not finite"):
        tiny_decompose(tiny_host(dtype=torch.float32), losses=[spd.ImportanceMinimality(3e38)])


def test_a_warm_up_that_diverges_is_named() -> None:
    with pytest.raises(spd.NonFiniteLossError, match="Step 1 of the faithfulness warm-up"):
        tiny_decompose(tiny_host(), warmup=spd.FaithfulnessWarmup(steps=5, lr=1e200))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def stopping(at: int | None = None, error: type[BaseException] = KeyboardInterrupt, draw: bool = True) -> Any:
    """A function that draws its batches (or always gives the same one) and raises ``error`` at step ``at``."""

    def data(step: int, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(0, 11, (3, 5), generator=generator) if draw else tiny_tokens()
        if step == at:
            raise error
        return tokens

    return data


LONG: dict[str, Any] = dict(
    steps=8,
    log_every=3,
    sites="blocks.1.mlp.*",
    losses=[spd.Faithfulness(9.0), spd.ImportanceMinimality(0.1), spd.StochasticRecon(1.0), spd.ReconPartial(1.0)],
    optimizer=spd.Optimizer(lr=0.01, kind="adamw", weight_decay=0.1, clip=1.0),
    schedule=spd.Schedule("cosine", warmup=2),
    warmup=spd.FaithfulnessWarmup(steps=3),
    leak=spd.Leak(1.0),
)


@pytest.mark.parametrize(
    ("every", "at", "kept", "dtype"),
    [
        (1, 1, 1, torch.float32),
        (2, 5, 4, torch.bfloat16),
        (3, 7, 6, torch.float32),
        (5, 4, None, torch.float32),
    ],
)
def test_resuming_gives_the_unbroken_run(
    tmp_path: Path, every: int, at: int, kept: int | None, dtype: torch.dtype
) -> None:
    model = tiny_host(dtype=torch.float64).to(dtype)
    unbroken = tiny_decompose(model, stopping(), **LONG)
    settings = LONG | {"out": tmp_path, "checkpoint_every": every}
    with pytest.raises(ZeroDivisionError):
        tiny_decompose(model, stopping(at, ZeroDivisionError), **settings)
    if kept is None:
        assert not storage.holds_record(tmp_path / "checkpoint")
    else:
        record = storage.read_record(tmp_path / "checkpoint")
        assert (record["step"], len(record["history"].get("step", []))) == (kept, kept // 3)
    torch.rand(5)
    resumed = tiny_decompose(model, stopping(), resume=True, **settings)
    assert same_runs(resumed, unbroken)
    assert list(resumed.history.dtypes) == list(unbroken.history.dtypes)
    assert same_runs(spd.load(tmp_path, model), unbroken)
    assert same_runs(spd.load(tmp_path / "checkpoint", model), unbroken)


@pytest.mark.parametrize(
    "data",
    [
        lambda: tiny_tokens(8),
        lambda: [tiny_tokens(seed=seed) for seed in range(3)],
        lambda: (tiny_tokens(seed=seed) for seed in range(8)),
    ],
    ids=["tensor", "list", "generator"],
)
def test_resuming_takes_up_the_data_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Callable[[], Any]
) -> None:
    model = tiny_host()
    batch_size = 4 if isinstance(data(), Tensor) else None
    settings = LONG | dict(checkpoint_every=3, out=tmp_path, batch_size=batch_size)
    settings["losses"] = [spd.StochasticRecon(1.0), Stop(1.0, 5)]
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "error", ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            tiny_decompose(model, data(), **settings)
    resumed = tiny_decompose(model, data(), resume=True, **settings)
    unbroken = tiny_decompose(model, data(), **settings | {"out": None, "checkpoint_every": None})
    assert same_runs(resumed, unbroken)


@dataclass(frozen=True)
class Stop(spd.LossTerm):
    """Worth nothing; raises ``Stop.error`` at step ``at`` of 8, in the middle of the step."""

    error: ClassVar[type[BaseException] | None] = None
    at: int = 0

    def value(self, step: spd.Step) -> Tensor:
        if Stop.error is not None and round(step.progress * 7) == self.at:
            torch.rand(3, generator=step.generator)
            raise Stop.error
        return next(iter(step.run.components.values())).read.sum() * 0


@pytest.mark.parametrize(("where", "at"), [("data", 1), ("data", 7), ("term", 4), ("backward", 0), ("backward", 4)])
def test_an_interrupt_writes_the_last_complete_step(
    tmp_path: Path, where: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_host(dtype=torch.float32)
    settings = LONG | {"losses": [*LONG["losses"], Stop(1.0, at)], "out": tmp_path}
    settings |= {"check_memory": False}  # it looks at the first batch before there is anything to keep
    unbroken = tiny_decompose(model, stopping(), **settings | {"out": None})
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "error", KeyboardInterrupt if where == "term" else None)
        if where == "backward":
            calls, real = [], Tensor.backward

            def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
                calls.append(self)
                if len(calls) == at + 1:
                    raise KeyboardInterrupt
                real(self, *args, **kwargs)

            patch.setattr(Tensor, "backward", backward)
        with pytest.raises(KeyboardInterrupt):
            tiny_decompose(model, stopping(at if where == "data" else None), **settings)
    assert storage.read_record(tmp_path / "checkpoint")["step"] == at
    assert not storage.holds_record(tmp_path)
    assert same_runs(tiny_decompose(model, stopping(), resume=True, **settings), unbroken)


def test_an_interrupt_amid_the_optimiser_step_keeps_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls, real = tiny_host(), [], torch.optim.Adam.step

    def step(self: Any) -> None:
        real(self)
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", step)
        with pytest.raises(KeyboardInterrupt):
            tiny_decompose(model, steps=6, out=tmp_path, checkpoint_every=2)
    assert storage.read_record(tmp_path / "checkpoint")["step"] == 2
    resumed = tiny_decompose(model, steps=6, out=tmp_path, checkpoint_every=2, resume=True, recompute=True)
    assert same_runs(resumed, tiny_decompose(model, steps=6))  # recompute may change in between: it changes no bit


def test_an_interrupt_without_a_folder_or_in_the_warm_up_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(tiny_host(), stopping(2))
    monkeypatch.setattr(spd.Faithfulness, "value", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(tiny_host(), out=tmp_path, warmup=spd.FaithfulnessWarmup())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_carries_the_run_and_says_where_it_is_kept(tmp_path: Path) -> None:
    """In the exception as on disk: the Run of the steps that were made, and of no others."""
    model = tiny_host()
    three = tiny_decompose(model, steps=3, schedule=spd.Schedule("constant"), losses=[spd.Recon(1.0)])
    settings: dict[str, Any] = {"steps": 9, "losses": [spd.Recon(1.0)]}
    with pytest.raises(KeyboardInterrupt) as caught:
        tiny_decompose(model, stopping(3, draw=False), **settings)
    assert str(caught.value).startswith(
        "The training was stopped after step 3 of 9. Its Run is this exception's attribute run"
    )
    assert same_runs(caught.value.run, three)  # type: ignore[attr-defined]
    assert not any(parameter.requires_grad for parameter in three.parameters())
    with pytest.raises(KeyboardInterrupt) as caught:
        tiny_decompose(model, stopping(3, draw=False), **settings, out=tmp_path)
    (line,) = re.findall(r"spd\.load\('.*', model\)", str(caught.value))
    assert same_runs(eval(line, {"spd": spd, "model": model}), three)
    assert "resume=True" in str(caught.value)


@pytest.mark.parametrize("when", ["after the last checkpoint", "while the Run is written"])
def test_a_finished_training_whose_run_was_not_written_is_not_thrown_away(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, unbroken = tiny_host(), tiny_decompose(tiny_host())
    tiny_decompose(tiny_host(seed=1), out=tmp_path)  # another Run of the same settings that lies there already

    def stop(*_: Any) -> None:
        raise ZeroDivisionError if when.startswith("after") else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spd.Run, "save", stop)
        every = 2 if when.startswith("after") else None
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            tiny_decompose(model, out=tmp_path, checkpoint_every=every)
    with pytest.raises(ValueError, match=r"stopped at step 4 of 4\. Pass resume=True"):
        tiny_decompose(model, out=tmp_path)
    assert same_runs(tiny_decompose(model, out=tmp_path, resume=True), unbroken)
    assert same_runs(spd.load(tmp_path, model), unbroken)
    tiny_decompose(model, out=tmp_path)  # and now it gives way


def test_a_run_of_other_settings_is_not_replaced(tmp_path: Path) -> None:
    model = tiny_host()
    first = tiny_decompose(model, out=tmp_path)
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=r"holds a Run that was made with other settings \(steps, seed\)\. Give anoth"
        ):
            tiny_decompose(model, seed=5, steps=2, out=tmp_path, resume=resume)
    assert same_runs(spd.load(tmp_path, model), first)
    assert same_runs(tiny_decompose(model, out=tmp_path), first)  # the same again may


def test_one_that_was_interrupted_and_resumed_is_finished(tmp_path: Path) -> None:
    model = tiny_host()
    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(model, stopping(2, draw=False), out=tmp_path)
    resumed = tiny_decompose(model, out=tmp_path, resume=True)
    assert same_runs(spd.load(tmp_path / "checkpoint", model), resumed)
    assert same_runs(tiny_decompose(model, out=tmp_path), resumed)


def test_resuming_a_finished_one_returns_it_untrained(tmp_path: Path) -> None:
    model = tiny_host()
    first = tiny_decompose(model, out=tmp_path)
    assert not storage.holds_record(tmp_path / "checkpoint")
    again = tiny_decompose(model, lambda *_: pytest.fail("trained again"), out=tmp_path, resume=True)
    assert same_runs(again, first)
    with pytest.raises(ValueError, match="made for other weights"):
        tiny_decompose(tiny_host(seed=1), out=tmp_path, resume=True)


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[HookedTransformer, dict[str, Any]]:
    """A host and the settings of a training on it that was interrupted at step 2 of 4."""
    model, settings = tiny_host(), {"out": tmp_path, "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(model, stopping(2, draw=False), **settings)
    return model, settings


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "steps": {"steps": 9},
    "C": {"C": 4},
    "sites": {"sites": "blocks.0.mlp.W_out"},
    "losses": {"losses": [spd.Faithfulness(3.0), spd.StochasticRecon(0.5), spd.Recon(0.7)]},
    "importance": {"importance": spd.Vector(d_gate=3)},
    "leak": {"leak": spd.Leak(0.5)},
    "optimizer": {"optimizer": spd.Optimizer(lr=0.1)},
    "schedule": {"schedule": spd.Schedule("linear")},
    "last_token_only": {"last_token_only": True},
    "log_every": {"log_every": 2},
}


TOKENS, OTHER = tiny_tokens(), tiny_tokens().flip(0)
KNOWN: dict[str, tuple[Any, Any]] = {  # the same data twice for trainings to come, and other data
    "tokens": (TOKENS, OTHER),
    "int32": (TOKENS.int(), OTHER.int()),
    "masked": (
        (TOKENS, torch.ones_like(TOKENS)),
        (TOKENS, torch.ones_like(TOKENS).index_fill(1, torch.tensor([0]), 0)),
    ),
    "batches": ([TOKENS, OTHER], [OTHER, TOKENS]),
    "split otherwise": ([TOKENS, OTHER], [torch.cat([TOKENS, OTHER])]),
    "a pair, not two batches": ((TOKENS, torch.ones_like(TOKENS)), [TOKENS, torch.ones_like(TOKENS)]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_run_of_other_data_is_not_replaced_and_not_resumed(tmp_path: Path, name: str) -> None:
    model, (data, other) = tiny_host(), KNOWN[name]
    first = tiny_decompose(model, data, out=tmp_path, checkpoint_every=2)
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"other settings \(data\)\. Give another"):
            tiny_decompose(model, other, out=tmp_path, checkpoint_every=2, resume=resume)
    for path in tmp_path.glob("*.*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"\(then, now\): \{'data': \('[0-9a-f]{16}', '[0-9a-f]{16}'\)\}\.$"):
        tiny_decompose(model, other, out=tmp_path, checkpoint_every=2, resume=True)
    assert same_runs(tiny_decompose(model, data, out=tmp_path, checkpoint_every=2, resume=True), first)
    made = tiny_decompose(model, lambda *_: OTHER, out=tmp_path)  # nothing is known of these
    assert made.settings["data"] is None
    assert first.settings["data"] is not None


def test_the_same_data_is_the_same_in_any_form(tmp_path: Path) -> None:
    model = tiny_host()
    first = tiny_decompose(model, TOKENS, out=tmp_path)
    for data in (TOKENS.int(), (TOKENS, None), (TOKENS, torch.ones_like(TOKENS)), [TOKENS], [(TOKENS, None)]):
        assert tiny_decompose(model, data, out=tmp_path).settings == first.settings


@pytest.mark.parametrize("known", ["first", "then", "both"])
def test_only_what_all_steps_were_made_on_is_kept(tmp_path: Path, known: str) -> None:
    model, settings = tiny_host(), {"out": tmp_path, "checkpoint_every": 1}
    made = lambda *_: TOKENS  # noqa: E731

    def show(trainer: Any, bar: Any) -> None:
        if trainer.step == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl_spd.train._Trainer, "show", show)
        with pytest.raises(KeyboardInterrupt):
            tiny_decompose(model, made if known == "then" else TOKENS, **settings)
    run = tiny_decompose(model, made if known == "first" else TOKENS, resume=True, **settings)
    assert (run.settings["data"] is not None) == (known == "both")
    assert same_runs(run, tiny_decompose(model))


@pytest.mark.parametrize("name", CHANGES)
def test_resuming_with_other_settings_is_refused(stopped: Any, name: str) -> None:
    model, settings = stopped
    with pytest.raises(ValueError, match=rf"other settings \(then, now\): \{{'{name}': \(.*\)\}}\.$"):
        tiny_decompose(model, resume=True, **settings | CHANGES[name])
    assert storage.read_record(settings["out"] / "checkpoint")["step"] == 2


def test_resuming_on_other_weights_is_refused(stopped: Any) -> None:
    _, settings = stopped
    with pytest.raises(ValueError, match="made for other weights"):
        tiny_decompose(tiny_host(seed=1), resume=True, **settings)


def test_a_new_start_does_not_overwrite_an_unfinished_one(stopped: Any) -> None:
    model, settings = stopped
    with pytest.raises(
        ValueError, match=r"stopped at step 2 of 4\. Pass resume=True \(--resume\) to continue it, or another"
    ):
        tiny_decompose(model, **settings)
    resumed = tiny_decompose(model, resume=True, **settings)
    assert same_runs(resumed, tiny_decompose(model))
    again = tiny_decompose(model, lambda *_: pytest.fail("trained again"), resume=True, check_memory=False, **settings)
    assert same_runs(again, resumed)
    with pytest.raises(ZeroDivisionError):  # a finished one gives way to the same again, at once
        tiny_decompose(model, stopping(0, ZeroDivisionError), **settings)
    assert not storage.holds_record(settings["out"] / "checkpoint")
    assert same_runs(spd.load(settings["out"], model), resumed)


SPOILT: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "a run": (lambda record, tensors: record.pop("step"), "holds no training state"),
    "no settings": (lambda record, tensors: record.update(settings=None), "holds no training state"),
    "step below 0": (lambda record, tensors: record.update(step=-1), "at step -1 of 4"),
    "step beyond the end": (lambda record, tensors: record.update(step=5), "at step 5 of 4"),
    "step no number": (lambda record, tensors: record.update(step=True), "holds no training state"),
    "one of three": (lambda record, tensors: tensors.pop("training/optimizer/0/exp_avg"), "wanted .'step', 'exp_avg'"),
    "other dtype": (
        lambda record, tensors: tensors.update(
            {"training/optimizer/0/exp_avg": tensors["training/optimizer/0/exp_avg"].float()}
        ),
        "does not fit",
    ),
    "negative square": (lambda record, tensors: tensors["training/optimizer/0/exp_avg_sq"].fill_(-1), "is negative"),
    "counted from the end": (
        lambda record, tensors: tensors.update({"training/optimizer/-1/step": torch.ones(())}),
        "KeyError.*-1",
    ),
    "something else": (lambda record, tensors: tensors.update({"training/x/0/step": torch.ones(())}), "does not fit"),
    "no generator": (lambda record, tensors: tensors.pop("training/generator/mask"), "KeyError.*generator/mask"),
    "short generator": (
        lambda record, tensors: tensors.update({"training/generator/data": torch.ones(3).byte()}),
        "damaged",
    ),
    "other shape": (
        lambda record, tensors: tensors.update({"training/optimizer/0/exp_avg": torch.ones(3)}),
        "does not fit",
    ),
    "no such parameter": (
        lambda record, tensors: tensors.update({"training/optimizer/99/exp_avg": torch.ones(3)}),
        "damaged",
    ),
    "not finite": (lambda record, tensors: tensors["training/optimizer/1/exp_avg_sq"].fill_(NAN), "not finite"),
    "odd name": (lambda record, tensors: tensors.update({"training/optimizer/x": torch.ones(3)}), "damaged"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_training_state_is_refused(stopped: Any, case: str) -> None:
    model, settings = stopped
    spoil, message = SPOILT[case]
    record, tensors = storage.read_folder(settings["out"] / "checkpoint")
    del record["schema_version"], record["tensors"]
    spoil(record, tensors)
    storage.write_folder(settings["out"] / "checkpoint", record, tensors)
    with pytest.raises(spd.StorageError, match=message):
        tiny_decompose(model, resume=True, **settings)


def test_a_damaged_checkpoint_is_refused(stopped: Any) -> None:
    model, settings = stopped
    (file,) = (settings["out"] / "checkpoint").glob("tensors-*")
    file.write_bytes(file.read_bytes()[:-1])
    for resume in (True, False):
        with pytest.raises(spd.StorageError, match="is damaged"):
            tiny_decompose(model, resume=resume, **settings)


# --- settings --------------------------------------------------------------------------------------------------------


def test_C_of_patterns_and_the_last_match_holds() -> None:
    run = tiny_decompose(tiny_host(), C={"blocks.*": 2, "*.1.*": 5}, steps=1)
    assert [parts.C for parts in run.components.values()] == [2, 5]


def test_settings_are_kept_as_they_were_used() -> None:
    run = tiny_decompose(tiny_host(), C={"*": 2}, seed=3, schedule=spd.Schedule("cosine", 0.1), steps=2)
    assert run.settings["C"] == {"*": 2}
    assert run.settings["sites"] == "blocks.*.mlp.W_out"
    assert run.settings["importance"] == {"kind": "Vector", "d_gate": 2, "start": 1.0}
    assert run.settings["losses"][0] == {"kind": "Faithfulness", "coeff": 2.0}
    assert run.settings["schedule"] == {"kind": "cosine", "warmup": 0.1, "final": 0.0}
    assert (run.settings["seed"], run.settings["steps"], run.settings["init"]) == (3, 2, "kaiming")


@dataclass(frozen=True)
class Pointing(Size):
    """A term with a field that no record can hold."""

    direction: Any = None


class Plain(spd.ImportanceSpec):
    """A specification that is no dataclass."""


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"stepz": 3}, TypeError, r"no settings \['stepz'\]"),
    "steps": ({"steps": 0}, ValueError, "steps must be a whole number of at least 1, found 0"),
    "log_every": ({"log_every": 0}, ValueError, "log_every must be a whole number"),
    "batch_size": ({"batch_size": 0}, ValueError, "batch_size must be a whole number"),
    "batch_size of a list": (
        {"batch_size": 2, "data": [tiny_tokens()]},
        ValueError,
        "batch_size draws rows of one token",
    ),
    "max_rows": ({"max_rows": 0}, ValueError, "max_rows must be a whole number"),
    "C": ({"C": 0}, ValueError, "C must be a whole number of at least 1, found 0"),
    "C of a pattern": ({"C": {"*": 3, "blocks.0.*": -1}}, ValueError, r"C\['blocks.0.\*'\] must be .* found -1"),
    "C without a match": ({"C": {"*": 3, "blocks.7.*": 4}}, ValueError, r"'blocks.7.\*', which matches none of"),
    "C for some sites": (
        {"C": {"blocks.0.*": 3}},
        ValueError,
        r"no number of subcomponents for \['blocks.1.mlp.W_out'\]",
    ),
    "sites": ({"sites": "blocks.*.mlp.W_gate"}, ValueError, "'blocks.*.mlp.W_gate' matches nothing here"),
    "one of the sites": ({"sites": ["*", "nothing"]}, ValueError, "'nothing' matches nothing here"),
    "no sites": ({"sites": []}, ValueError, "No site pattern was given"),
    "init": ({"init": "zeros"}, ValueError, "init must be one of .*'kaiming', 'svd'.*, found 'zeros'"),
    "no losses": ({"losses": []}, ValueError, "one or more loss terms"),
    "a loss twice": ({"losses": [spd.Recon(1.0), spd.Recon(2.0)]}, ValueError, "given once, found .*'Recon', 'Recon'"),
    "no loss": ({"losses": ["Recon"]}, ValueError, "one or more loss terms such as"),
    "importance no dataclass": ({"importance": Plain()}, TypeError, "a specification such as spd.Vector"),
    "field no JSON": ({"losses": [Pointing(1.0, torch.ones(2))]}, TypeError, "finite plain values: .*Tensor"),
    "infinite": ({"losses": [spd.Recon(float("inf"))]}, TypeError, "finite plain values"),
    "checkpoint_every": (
        {"out": "x", "checkpoint_every": 0},
        ValueError,
        "checkpoint_every must be at least 1, found 0",
    ),
    "checkpoint_every alone": ({"checkpoint_every": 2}, ValueError, "need a folder: pass out="),
    "resume alone": ({"resume": True}, ValueError, "need a folder: pass out="),
    "no host": ({"model": torch.nn.Linear(2, 2)}, TypeError, "HookedTransformer"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
@pytest.mark.usefixtures("unchecked")
def test_bad_settings_are_refused_before_anything_is_built(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changes, error, message = BAD_SETTINGS[case]
    changes = {key: tmp_path / "out" if key == "out" else value for key, value in changes.items()}
    monkeypatch.setattr(tl_spd.train, "new_run", lambda *_: pytest.fail("something was built"))
    with pytest.raises(error, match=message):
        tiny_decompose(changes.pop("model", tiny_host()), **changes)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tl_spd.train, "new_run", lambda *_: pytest.fail("something was built"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tiny_decompose(tiny_host(), out=tmp_path / "file")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spd.Optimizer(lr=-1.0), "learning rates and weight_decay must be at least 0"),
        (lambda: spd.Optimizer(lr=NAN), "learning rates and weight_decay must be at least 0"),
        (lambda: spd.Optimizer(weight_decay=-0.1), "learning rates and weight_decay must be at least 0"),
        (lambda: spd.Optimizer(clip=0.0), "clip above 0"),
        (lambda: spd.Optimizer(betas=(0.9, 1.0)), "betas must be at least 0 and below 1"),
        (lambda: spd.Optimizer(kind="sgd"), "kind must be 'adam' or 'adamw', found 'sgd'"),
        (lambda: spd.Schedule("steps"), "kind must be 'constant', 'cosine' or 'linear', found 'steps'"),
        (lambda: spd.Schedule(warmup=-1), "warmup and final must be at least 0"),
        (lambda: spd.Schedule(final=NAN), "warmup and final must be at least 0"),
        (lambda: spd.FaithfulnessWarmup(steps=-1), "steps, tolerance and lr must be at least 0"),
        (lambda: spd.FaithfulnessWarmup(tolerance=NAN), "steps, tolerance and lr must be at least 0"),
        (lambda: spd.FaithfulnessWarmup(lr=-1.0), "steps, tolerance and lr must be at least 0"),
        (lambda: spd.Recon(-1.0), "coeff must be a number of at least 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_parts_of_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
