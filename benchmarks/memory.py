"""Peak memory and time of a training step as it grows. ``python -m benchmarks.memory``.

Each case runs in a process of its own, so that the peak (maximum resident size minus that before the first step) is its own.
GPT-2-small shapes with random weights, all matrices of the blocks, C 256, scalar gates, all seven losses; one of layers, sites,
tokens and samples varies at a time. The plain version keeps the graph of all its passes and is not run where that would not
fit 16 GB (it grows with sites x layers).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import markdown, publish
from benchmarks.step import gpt2_host, make_steps
from tl_spd.run import new_run
from tl_spd.sites import find_sites

CASES: list[dict[str, Any]] = [
    {"layers": 1}, {"layers": 2}, {"layers": 4}, {"layers": 12, "versions": ["ours"]},
    {"layers": 2, "sites": "blocks.0.*"}, {"layers": 2, "sites": "blocks.*.mlp.*"},
    {"layers": 2, "length": 36}, {"layers": 2, "length": 144, "versions": ["ours"]},
    {"layers": 2, "samples": 2}, {"layers": 2, "samples": 4, "versions": ["ours"]},
]  # fmt: skip


@dataclass
class Arguments:
    """``case`` is for the processes that this one starts."""

    case: str | None = None
    steps: int = 3


def measured(
    version: str, layers: int, sites: str = "blocks.*", length: int = 9, samples: int = 1, steps: int = 3
) -> dict:
    """Peak megabytes above the start and median seconds of ``steps`` steps in this process."""
    model = gpt2_host(layers)
    found = find_sites(model, sites)
    run = new_run(model, found, dict.fromkeys((site.name for site in found), 256), spd.Scalar(16))
    terms = tuple(replace(t, samples=samples) if hasattr(t, "samples") else t for t in spd.paper_losses("gpt2"))
    generator = torch.Generator().manual_seed(0)
    sample = lambda: torch.randint(0, 50257, (2, length), generator=generator)  # noqa: E731
    step = make_steps(model, run, terms, sample, last_token_only=False)[version]
    before, times = peak(), []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return {"sites": len(found), "MB": peak() - before, "seconds": sorted(times)[len(times) // 2]}


def peak() -> float:
    """Largest resident size of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Arguments) -> None:
    """Run every case in its own process and publish the table, or run one and print it."""
    if arguments.case is not None:
        print(json.dumps(measured(**json.loads(arguments.case), steps=arguments.steps)))
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        row = {"layers": case["layers"], "length": case.get("length", 9), "samples": case.get("samples", 1)}
        for version in case.get("versions", ["ours", "plain"]):
            given = json.dumps({"version": version} | {k: v for k, v in case.items() if k != "versions"})
            command = [sys.executable, "-m", "benchmarks.memory", "--case", given, "--steps", str(arguments.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            row |= {"sites": found["sites"]} | {f"{version} {key}": found[key] for key in ("MB", "seconds")}
        rows.append(row)
        print(row, flush=True)
    table = pd.DataFrame(rows).set_index(["layers", "sites", "length", "samples"])
    table["plain / ours, seconds"] = table["plain seconds"] / table["ours seconds"]
    table["ours / plain, MB"] = table["ours MB"] / table["plain MB"]
    text = "Batch 2. Peak resident size above that before the first step; median seconds of a step.\n\n" + markdown(
        table
    )
    publish("memory", "Memory and time of a step as it grows", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
