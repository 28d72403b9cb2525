"""``tl-spd decompose`` on SmolLM2-135M, before and after. ``python -m benchmarks.smollm2 --seeds 0 1 2``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmarks.common import markdown, publish
from tl_spd.cli import Decompose


@dataclass
class Arguments:
    """Seeds one after the other, with the command's defaults."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = Decompose.steps
    out: Path = Path("runs")


def main(arguments: Arguments) -> None:
    """Run every seed and publish before and after."""
    columns, seconds = {}, {}
    for seed in arguments.seeds:
        out, started = arguments.out / f"smollm2-{seed}", time.perf_counter()
        Decompose(out=out, seed=seed, steps=arguments.steps).run()
        seconds[seed] = round(time.perf_counter() - started)
        table = pd.read_csv(out / "evaluation.csv").set_index(["metric", "site"])
        for moment in ("before", "after"):
            columns[f"seed {seed} {moment}"] = table[moment]
    shown = pd.DataFrame(columns)
    settings = Decompose(out=arguments.out)
    text = (
        f"Sites {settings.sites}, C {settings.C}, Vector importance with d_gate {settings.d_gate}, the seven losses with the "
        f"paper's coefficients, {arguments.steps} steps, seconds per seed {seconds}. Prompts: {settings.prompts}. KL in nats, "
        f"mean over all positions; L0 per token. `before` is the initialisation ({settings.init}).\n\n{markdown(shown)}"
    )
    data = {
        name: [{"metric": m, "site": s, "value": v} for (m, s), v in column.items()] for name, column in columns.items()
    }
    publish("smollm2", "SmolLM2-135M, MLP matrices of layers 0-3", text, data)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
