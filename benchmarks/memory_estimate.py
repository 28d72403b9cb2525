"""Peak memory of trainings: predicted before they start, and measured. ``python -m benchmarks.memory_estimate``.

Each case trains three steps in a process of its own, behind two steps of faithfulness warm-up, on random weights. Measured
twice: what torch's allocator had given out at once (its own record of every allocation), and the largest resident size beyond
that before the training, in a second process without that record. The prediction and both are beside the host.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import DEVICE, markdown, publish
from benchmarks.step import gpt2_host
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.sites import HookedTransformer

LOSSES = {
    "induction": spd.paper_losses("induction"),
    "gpt2": spd.paper_losses("gpt2"),
    "recon": (spd.Faithfulness(1.0), spd.ImportanceMinimality(0.1), spd.Recon(1.0)),
}
IMPORTANCE = {
    "vector": spd.Vector(16), "attention": spd.Attention(16), "scalar": spd.Scalar(16), "shared": spd.Shared(256),
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    *({"host": "induction", "batch": b, "importance": i} for b in (16, 64) for i in ("vector", "attention")),
    {"host": "induction", "batch": 64, "importance": "vector", "losses": "recon"},
    {"host": "induction", "batch": 256, "importance": "vector", "max_rows": 64},
    *(
        {"host": "gpt2", "sites": "blocks.0.*", "importance": i, "losses": "gpt2"}
        for i in ("scalar", "shared", "vector")
    ),
    {"host": "gpt2", "sites": "blocks.*.mlp.*", "importance": "scalar", "losses": "recon", "length": 128},
    {"host": "gpt2", "sites": "blocks.1.*", "importance": "scalar", "losses": "induction", "length": 64},
]


@dataclass
class Arguments:
    """``case`` and ``how`` are for the processes that this one starts."""

    case: str | None = None
    how: str = "allocated"


def setting(
    host: str, importance: str, losses: str = "induction", batch: int = 2, length: int = 9, **further: Any
) -> tuple[HookedTransformer, torch.Tensor, dict[str, Any]]:
    """Host, data and arguments of ``decompose`` of one case."""
    generator = torch.Generator().manual_seed(0)
    own: dict[str, Any] = dict(importance=IMPORTANCE[importance], losses=LOSSES[losses], **further)
    own |= dict(steps=3, warmup=spd.FaithfulnessWarmup(steps=2, tolerance=0.0), progress=False)
    if host == "induction":
        task = InductionTask()
        own = dict(sites="blocks.*.attn.W_[QKV]", C=100, last_token_only=True) | own
        return build_target(task, seed=0), task.sample(batch, generator)[0], own
    tokens = torch.randint(0, 50257, (batch, length), generator=generator)
    return gpt2_host(2), tokens, dict(C=256) | own


def measured(case: dict[str, Any], how: str) -> dict[str, Any]:
    """What this process predicts, and what its training takes by one of the two measures, in bytes."""
    model, data, arguments = setting(**case)
    started = time.perf_counter()
    found = spd.estimate_memory(model.to(DEVICE), data.to(DEVICE), **arguments)
    row = {"predicted": found.peak - found.host, "stage": found.stage, "seconds": time.perf_counter() - started}
    if how == "resident":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spd.decompose(model, data, **arguments)
        return row | {how: 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        spd.decompose(model, data, **arguments)
        return row | {how: torch.cuda.max_memory_allocated() - before}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        spd.decompose(model, data, **arguments)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return row | {how: most}


def main(arguments: Arguments) -> None:
    """Run every case in processes of its own and publish the table, or run one and print it."""
    if arguments.case is not None:
        print(json.dumps(measured(json.loads(arguments.case), arguments.how)))
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        row = {"case": ", ".join(str(value) for value in case.values())}
        for how in ("allocated", "resident"):
            command = [sys.executable, "-m", "benchmarks.memory_estimate", "--case", json.dumps(case), "--how", how]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row |= json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(row, flush=True)
    table = pd.DataFrame(rows).set_index("case")
    table["predicted / allocated"] = table["predicted"] / table["allocated"]
    for name in ("predicted", "allocated", "resident"):
        table[f"{name}, MB"] = table.pop(name) / 1e6
    how = " ".join((__doc__ or "").split("\n\n")[1].split())
    text = "Beside the host; `seconds` is what the prediction took. " + how + "\n\n" + markdown(table)
    publish("memory_estimate", "Peak memory of trainings, predicted and measured", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
