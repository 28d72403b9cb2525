"""Speed of a training step: the engine against the plain sequential version. ``python -m benchmarks.step``.

Both draw the same kinds of masks, make the same losses and gradients and take one Adam step; they alternate in one process.
The floor is the step's matmul work (importance functions forward and backward, masked sites forward and backward) at the
matmul rate measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import DEVICE, alternate, markdown, publish
from benchmarks.plain import plain_step
from tl_spd.engine import Engine
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.losses import Step, host_weights
from tl_spd.run import Run, new_run
from tl_spd.sites import HookedTransformer, HookedTransformerConfig, find_sites

PROGRESS = 0.5
"""The share of a training at which its steps are timed."""


@dataclass
class Arguments:
    """Which cases are timed."""

    rounds: int = 7
    gpt2_layers: tuple[int, ...] = (1, 2, 4)
    """Also GPT-2-small shapes with random weights and so many blocks. The plain version keeps the graph of all its passes,
    which for 12 blocks (72 sites) does not fit 24 GB."""
    gpt2_by_pass: tuple[int, ...] = (2, 12)
    """So many blocks beside a plain version that differentiates every pass before the next one."""


def gemm_rate() -> float:
    """Floating-point operations per second of a large float32 matmul on this machine."""
    a, b = torch.randn(4096, 512, device=DEVICE), torch.randn(512, 1600, device=DEVICE)
    seconds = alternate({"it": lambda: a @ b}, 20)["it"]
    return 2 * 4096 * 512 * 1600 / seconds


def floor_flops(run: Run, tokens: int, masked: dict[str, int]) -> float:
    """Matmul operations of one step: gates and masked sites, forward and backward (twice the forward)."""
    gates = 0
    for name, function in run.functions.items():
        per_token = sum(p.numel() for key, p in function.named_parameters() if p.ndim > 1 and "absolute" not in key)
        gates += 2 * per_token * tokens
        parts = run.components[name]
        gates += 2 * tokens * masked[name] * (parts.read.numel() + parts.write.numel())
    return 3.0 * gates


def make_steps(
    model: HookedTransformer,
    run: Run,
    terms: tuple[spd.LossTerm, ...],
    sample: Callable[[], torch.Tensor],
    last_token_only: bool,
    by_pass: bool = False,
    rows_recomputed: int | None = None,
) -> dict[str, Callable[[], Any]]:
    """One training step of each version, on the same parameters; the plain one's passes differentiated together or one by one.

    ``rows_recomputed``: ours makes stacks of so many sequences again in its backward pass.
    """
    engine = Engine(model, run, last_token_only, rows_recomputed, recompute=rows_recomputed is not None)
    weights = host_weights(model, run)
    generator = torch.Generator(DEVICE).manual_seed(0)
    run.requires_grad_(True)
    optimizer = torch.optim.Adam(run.parameters(), lr=0.0, fused=True)

    def ours() -> None:
        batch = engine.observe(sample().to(DEVICE))
        found = engine.importances(batch)
        step = Step(run, found, weights, PROGRESS, generator, lambda passes: engine.kl(batch, passes))
        groups = {t.name: t.passes(found, generator) for t in terms if isinstance(t, spd.ReconTerm)}
        kl = engine.kl(batch, [entry for group in groups.values() for entry in group])
        parts = dict(zip(groups, kl.split([len(group) for group in groups.values()]), strict=True))
        total = sum(t.coeff_at(PROGRESS) * (parts[t.name].mean() if t.name in parts else t.value(step)) for t in terms)
        optimizer.zero_grad()
        total.backward()  # type: ignore[union-attr]
        optimizer.step()

    def plain() -> None:
        args = (model, run, terms, sample().to(DEVICE), generator, None, last_token_only, PROGRESS)
        _, gradients = plain_step(*args, by_pass=by_pass)
        for parameter, gradient in zip(run.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return {"ours": ours, "plain": plain}


def induction_case(importance: spd.ImportanceSpec, batch: int, rounds: int) -> dict[str, Any]:
    """The induction step: length 64, C 100, six sites, the paper's five losses, scored at the last token."""
    task, generator = InductionTask(), torch.Generator().manual_seed(0)
    model = build_target(task, seed=0).to(DEVICE)
    sites = find_sites(model, "blocks.*.attn.W_[QKV]")
    run = new_run(model, sites, dict.fromkeys((site.name for site in sites), 100), importance)
    terms = spd.paper_losses("induction")
    steps = make_steps(model, run, terms, lambda: task.sample(batch, generator)[0], True)
    seconds = alternate(steps, rounds)
    floor = floor_flops(run, batch * task.length, dict.fromkeys(run.components, 3)) / gemm_rate()
    return {"case": f"induction, B {batch}, {type(importance).__name__}", **seconds, "floor": floor}


def gpt2_host(layers: int = 12) -> HookedTransformer:
    """A host of GPT-2 small's shapes with random weights and ``layers`` blocks."""
    config = HookedTransformerConfig(
        n_layers=layers, n_heads=12, d_model=768, d_head=64, d_mlp=3072, n_ctx=256, d_vocab=50257, act_fn="gelu_new",
        normalization_type="LN", device=DEVICE, seed=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return HookedTransformer(config)


def gpt2_case(rounds: int, layers: int, by_pass: bool = False) -> dict[str, Any]:
    """GPT-2-small shapes, random weights: B 2, length 9, all matrices of all blocks, C 256, scalar gates, seven losses."""
    model = gpt2_host(layers)
    sites = find_sites(model, "blocks.*")
    run = new_run(model, sites, dict.fromkeys((site.name for site in sites), 256), spd.Scalar(16))
    terms = tuple(replace(term) for term in spd.paper_losses("gpt2"))
    generator = torch.Generator().manual_seed(0)
    steps = make_steps(model, run, terms, lambda: torch.randint(0, 50257, (2, 9), generator=generator), False, by_pass)
    name = f"GPT-2 shapes, {layers} layers, {len(sites)} sites" + by_pass * ", plain pass by pass"
    return {"case": name, **alternate(steps, rounds, warm_up=1)}


def main(arguments: Arguments) -> None:
    """Time all cases and publish the table."""
    rows = [
        induction_case(importance, batch, arguments.rounds)
        for batch in (16, 64)
        for importance in (spd.Vector(16), spd.Attention(16))
    ]
    rows += [gpt2_case(max(1, arguments.rounds // 3), layers) for layers in arguments.gpt2_layers]
    rows += [gpt2_case(max(1, arguments.rounds // 3), layers, by_pass=True) for layers in arguments.gpt2_by_pass]
    table = pd.DataFrame(rows).set_index("case")
    table["plain / ours"] = table.plain / table.ours
    table["ours / floor"] = table.ours / table.floor
    text = "Median seconds per training step, two versions alternating in one process.\n\n" + markdown(table)
    publish("step", "Training step", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
