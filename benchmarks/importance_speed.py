"""Speed of the importance functions by length. ``python -m benchmarks.importance_speed``.

1. In the paper's form: training steps of the induction decomposition (six sites, C 100, d_gate 16, the paper's five losses, the
   target untrained) at batch 4. From :data:`RECOMPUTED_FROM` positions on with ``recompute``, one pass at a time: the host's own
   attention makes ``pos x pos`` patterns in every masked pass, and a step would take 46 GB at 10,240.
2. The functions alone: forward and backward of the importances of one site of width 16.

Kinds alternate in one process. Attention runs with each backend that can train here (``auto`` takes eager below 1,024
positions, blocked from there on); those that build scores ``pos x pos`` stop at 1,024 positions. For scale: the paper's GPU made
0.77, 0.77 and 0.60 of vector's training steps with attention at 16, 64 and 1,024 positions, and 0.55 at 10,240.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import DEVICE, alternate, markdown, publish
from benchmarks.step import make_steps
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.importance import lower
from tl_spd.run import new_run
from tl_spd.sites import Site, find_sites

BATCH, D_MODEL, C, D_GATE = 4, 16, 100, 16
KINDS: dict[str, spd.ImportanceSpec] = {
    "scalar": spd.Scalar(D_GATE),
    "vector": spd.Vector(D_GATE),
    "attention eager": spd.Attention(D_GATE, backend="eager"),
    "attention sdpa": spd.Attention(D_GATE, backend="sdpa"),
    "attention blocked": spd.Attention(D_GATE, backend="blocked"),
}
if DEVICE == "cuda":  # where flex attention has a backward pass
    KINDS["attention flex"] = spd.Attention(D_GATE, backend="flex")
SQUARE = {"attention eager", "attention sdpa"}
RECOMPUTED_FROM = 4096


@dataclass
class Arguments:
    """Which lengths are timed."""

    lengths: tuple[int, ...] = (16, 64, 1024, 10240)
    step_lengths: tuple[int, ...] = (16, 64, 1024)
    """Of these, where whole training steps are timed too. At 10,240 one takes minutes on a CPU."""
    rounds: int = 9


def iteration(spec: spd.ImportanceSpec, length: int) -> Callable[[], Any]:
    """Forward and backward of one site's importances."""
    generator = torch.Generator().manual_seed(0)
    site = Site("blocks.0.attn.W_Q", "W_Q", 0, D_MODEL, D_MODEL, 1)
    function = spec.build(
        site, C, length, lambda *shape, std, mean=0.0: torch.randn(shape, generator=generator) * std + mean
    )
    function = function.to(DEVICE)
    x = torch.randn(BATCH, length, D_MODEL, generator=generator).to(DEVICE)
    read = torch.randn(D_MODEL, C, generator=generator).to(DEVICE).requires_grad_()

    def run() -> None:
        for parameter in [read, *function.parameters()]:
            parameter.grad = None
        lower(function(x, x @ read)).sum().backward()

    return run


def training_step(spec: spd.ImportanceSpec, length: int) -> Callable[[], Any]:
    """One training step of the induction decomposition."""
    task, generator = InductionTask(length=length), torch.Generator().manual_seed(0)
    model = build_target(task, seed=0).to(DEVICE)
    sites = find_sites(model, "blocks.*.attn.W_[QKV]")
    run = new_run(model, sites, dict.fromkeys((site.name for site in sites), C), spec)
    sample = lambda: task.sample(BATCH, generator)[0]  # noqa: E731
    rows = BATCH if length >= RECOMPUTED_FROM else None
    return make_steps(model, run, spd.paper_losses("induction"), sample, True, rows_recomputed=rows)["ours"]


MEASURED = {"training step": training_step, "importances of one site": iteration}


def main(arguments: Arguments) -> None:
    """Time all kinds at all lengths and publish the tables."""
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        kinds = {kind: spec for kind, spec in KINDS.items() if length <= 1024 or kind not in SQUARE}
        for what, make in MEASURED.items():
            if make is training_step and length not in arguments.step_lengths:
                continue
            rounds, warm_up = arguments.rounds * (5 if length <= 64 else 1), 2
            if DEVICE == "cpu" and length > 1024:  # a minute and more each
                rounds, warm_up = 2, 0
            seconds = alternate({kind: make(spec, length) for kind, spec in kinds.items()}, rounds, warm_up)
            rows += [{"what": what, "kind": kind, "length": length, "per second": 1 / s} for kind, s in seconds.items()]
            print(length, what, seconds, flush=True)
    frame, parts = pd.DataFrame(rows), list[str]()
    for what in MEASURED:
        rate = frame[frame.what == what].pivot(index="kind", columns="length", values="per second").reindex(list(KINDS))
        parts += [f"## {what.capitalize()}: per second, batch {BATCH}", markdown(rate)]
        parts += ["Share of vector's rate", markdown(rate / rate.loc["vector"], ".2f")]
    publish("importance_speed", "Speed of importance functions", "\n\n".join(parts), rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
