"""What one Run cannot show, on the targets that benchmarks.induction left. ``python -m benchmarks.sweeps --seeds 0 1 2``.

1. Faithful or sparse: one Run per coefficient of ImportanceMinimality; recon and the worst masking found beside L0.
2. Splitting: C and twice C subcomponents; how many stay alive.

Settings are those of the preset but for the number of steps. A seed whose folder holds its tables is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro

from benchmarks.common import markdown, publish
from benchmarks.induction import short
from tl_spd.analysis.sweeps import pareto, splitting
from tl_spd.experiments.induction import InductionSettings
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.suppress import load_weights


@dataclass
class Arguments:
    """Where the targets are, how long every Run trains, and which coefficients are swept."""

    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "cpu"
    steps: int = 2_000
    coefficients: tuple[float, ...] = (0.005, 0.02, 0.08)
    runs: Path = Path("runs")
    sequences: int = 256


def swept(arguments: Arguments, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The two tables of one seed's target."""
    folder = arguments.runs / f"induction-{arguments.preset}-{seed}"
    files = [folder / f"{name}-{arguments.steps}.csv" for name in ("pareto", "splitting")]
    if all(file.exists() for file in files):
        return pd.read_csv(files[0]), pd.read_csv(files[1])
    task, settings = InductionTask(), InductionSettings.preset(arguments.preset, seed)
    model = build_target(task, seed)
    load_weights(model, folder / "target.safetensors")
    tokens, *_ = task.sample(arguments.sequences, torch.Generator().manual_seed(20_011))
    common = settings.training() | {"steps": arguments.steps, "progress": False}

    def data(step: int, generator: torch.Generator) -> torch.Tensor:
        return task.sample(settings.batch_size, generator)[0]

    front = pareto(model, data, tokens, coefficients=arguments.coefficients, **common)
    front.to_csv(files[0], index=False)
    print(front.to_string(), flush=True)
    split = splitting(model, data, tokens, **common)
    split.to_csv(files[1], index=False)
    print(split.to_string(), flush=True)
    return front, split


def main(arguments: Arguments) -> None:
    """Sweep every seed's target and publish the tables."""
    found = {seed: swept(arguments, seed) for seed in arguments.seeds}
    fronts = pd.concat([front for front, _ in found.values()]).sort_values(["minimality", "seed"])
    splits = pd.concat({seed: split for seed, (_, split) in found.items()}, names=["seed"])
    splits["site"] = splits.site.map(short)
    alive = splits.pivot_table(
        index=["threshold", "C", "seed"], columns="site", values="alive", sort=False
    ).sort_index()
    text = [
        f"Preset {arguments.preset}, but {arguments.steps} steps; {arguments.sequences} held-out sequences. KL in "
        "nats. Rows: coefficient of ImportanceMinimality and seed; `efficient`: no other coefficient of the seed is at least "
        "as good in recon and L0 and better in one.",
        markdown(fronts.set_index(["minimality", "seed"])),
        f"Alive subcomponents (active on more than {splits.min_fraction.iloc[0]:g} of all tokens); rows: threshold, C and seed",
        markdown(alive),
    ]
    data = {
        seed: {"pareto": front.to_dict("records"), "splitting": split.to_dict("records")}
        for seed, (front, split) in found.items()
    }
    publish(
        "sweeps", "Minimality against reconstruction, and splitting, on the induction model", "\n\n".join(text), data
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
