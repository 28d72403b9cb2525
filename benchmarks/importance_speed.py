"""Speed of the importance functions by length, in the paper's form. ``python -m benchmarks.importance_speed``.

One iteration is forward and backward of the importances of one site at batch 4 (width 16, C 100, d_gate 16). Kinds alternate
in one process. Attention runs with each backend that can train here; those that build scores ``pos x pos`` stop at 1,024
positions. For scale: the paper's GPU had attention at 0.77, 0.77 and 0.60 of vector's rate at 16, 64 and 1,024 positions, and at
0.55 (flex attention) at 10,240.
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
from tl_spd.importance import lower
from tl_spd.sites import Site

BATCH, D_MODEL, C, D_GATE = 4, 16, 100, 16
KINDS: dict[str, spd.ImportanceSpec] = {
    "scalar": spd.Scalar(D_GATE),
    "vector": spd.Vector(D_GATE),
    "attention eager": spd.Attention(D_GATE, backend="eager"),
    "attention sdpa": spd.Attention(D_GATE, backend="sdpa"),
    "attention blocked": spd.Attention(D_GATE, backend="blocked"),
    "attention auto": spd.Attention(D_GATE),
}
if DEVICE == "cuda":  # where flex attention has a backward pass
    KINDS["attention flex"] = spd.Attention(D_GATE, backend="flex")
SQUARE = {"attention eager", "attention sdpa"}


@dataclass
class Arguments:
    """Which lengths are timed."""

    lengths: tuple[int, ...] = (16, 64, 1024, 10240)
    rounds: int = 9


def iteration(spec: spd.ImportanceSpec, length: int) -> Callable[[], Any]:
    """Forward and backward of one site's importances."""
    generator = torch.Generator().manual_seed(0)
    site = Site("blocks.0.attn.W_Q", "W_Q", 0, D_MODEL, D_MODEL, 1)
    function = spec.build(site, C, length, lambda *shape, std: torch.randn(shape, generator=generator) * std)
    function = function.to(DEVICE)
    x = torch.randn(BATCH, length, D_MODEL, generator=generator).to(DEVICE)
    read = torch.randn(D_MODEL, C, generator=generator).to(DEVICE).requires_grad_()

    def run() -> None:
        for parameter in [read, *function.parameters()]:
            parameter.grad = None
        lower(function(x, x @ read)).sum().backward()

    return run


def main(arguments: Arguments) -> None:
    """Time all kinds at all lengths and publish the table."""
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        kinds = {kind: spec for kind, spec in KINDS.items() if length <= 1024 or kind not in SQUARE}
        rounds = arguments.rounds if length <= 1024 else 3
        seconds = alternate({kind: iteration(spec, length) for kind, spec in kinds.items()}, rounds, warm_up=2)
        rows += [{"kind": kind, "length": length, "iterations per second": 1 / s} for kind, s in seconds.items()]
    frame = pd.DataFrame(rows)
    rate = frame.pivot(index="kind", columns="length", values="iterations per second").reindex(list(KINDS))
    text = "\n\n".join([
        f"Iterations per second (forward and backward, batch {BATCH}, one site of width {D_MODEL}, C {C}, d_gate {D_GATE})",
        markdown(rate),
        "Share of vector's rate",
        markdown(rate / rate.loc["vector"], ".2f"),
    ])  # fmt: skip
    publish("importance_speed", "Speed of importance functions", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
