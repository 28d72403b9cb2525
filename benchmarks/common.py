"""What every benchmark shares: where it ran, how two versions are timed, and where results go."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this run."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("torch", "transformer-lens", "tl_spd")
    return {
        "machine": f"{cpu[0].partition(': ')[2] if cpu else platform.processor()}, {len(cpu)} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "command": " ".join(["python", "-m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def alternate(versions: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Median seconds of each version, called in turn in this process after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    for round_ in range(warm_up + rounds):
        for name, function in versions.items():
            started = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= warm_up:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def markdown(table: pd.DataFrame, form: str = ".3g") -> str:
    """``table`` with its index as a markdown table; numbers in ``form``, missing ones empty."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "" if value != value else format(value, form)
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    head = ["", *map(cell, table.columns)]
    rows = [[cell(index), *map(cell, row)] for index, row in zip(table.index, table.to_numpy(), strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def publish(name: str, title: str, text: str, data: Any) -> None:
    """Write ``results/<name>.md`` and ``.json`` with the environment, and print the text; ``<name>_cuda`` on a GPU."""
    RESULTS.mkdir(exist_ok=True)
    name += "_cuda" if DEVICE == "cuda" else ""
    where = environment()
    lines = "\n".join(f"- {key}: {value}" for key, value in where.items())
    page = f"# {title}\n\n{lines}\n\n{text.strip()}\n"
    (RESULTS / f"{name}.md").write_text(page)
    (RESULTS / f"{name}.json").write_text(json.dumps({"environment": where, "data": data}, indent=1) + "\n")
    print(page)
