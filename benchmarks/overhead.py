"""What an installed Run costs a forward pass, at GPT-2-small shapes. ``python -m benchmarks.overhead``.

Random weights, all 72 matrices of the blocks, C 256. ``decomposed`` with importances given (and without, where the original
model runs first), ``suppressed`` with four directions of each of six sites and of all, and the time of entering and leaving
each. ``suppressed`` writes the edited weights, so its floor is a copy of them, which is timed too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import DEVICE, alternate, markdown, publish
from benchmarks.step import gpt2_host
from tl_spd.run import new_run
from tl_spd.sites import HookedTransformer, Site, find_sites, parameter


@dataclass
class Arguments:
    """What is timed."""

    layers: int = 12
    batch: int = 4
    length: int = 32
    rounds: int = 9


def entering_and_leaving(context: Callable[[], AbstractContextManager[Any]], repeats: int) -> tuple[float, float]:
    """Median milliseconds of entering and of leaving ``context()``."""
    entered, left = [], []
    for _ in range(repeats):
        manager = context()
        started = time.perf_counter()
        manager.__enter__()
        inside = time.perf_counter()
        manager.__exit__(None, None, None)
        entered.append(inside - started)
        left.append(time.perf_counter() - inside)
    middle = repeats // 2
    return 1e3 * sorted(entered)[middle], 1e3 * sorted(left)[middle]


@contextmanager
def copying(model: HookedTransformer, sites: Sequence[Site]) -> Iterator[None]:
    """A copy of the sites' weights is held inside."""
    copies = [parameter(model, site).clone() for site in sites]
    yield
    del copies


@torch.no_grad()
def main(arguments: Arguments) -> None:
    """Time the contexts against the plain host and publish the table."""
    model = gpt2_host(arguments.layers)
    sites = find_sites(model, "blocks.*")
    run = new_run(model, sites, dict.fromkeys((site.name for site in sites), 256), spd.Scalar(16))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50257, (arguments.batch, arguments.length), generator=generator).to(DEVICE)
    importances = run.importances(model, tokens)
    six, every = ({site.name: [0, 1, 2, 3] for site in some} for some in (sites[:6], sites))
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "decomposed, importances given": lambda: spd.decomposed(model, run, importances=importances),
        "decomposed": lambda: spd.decomposed(model, run),
        "suppressed, six sites": lambda: spd.suppressed(model, run, six),
        "suppressed, all sites": lambda: spd.suppressed(model, run, every),
        "floor: the six sites' weights copied": lambda: copying(model, sites[:6]),
        "floor: all weights copied": lambda: copying(model, sites),
    }

    def inside(context: Callable[[], AbstractContextManager[Any]]) -> float:
        with context():
            return alternate({"it": lambda: model(tokens)}, 1, warm_up=0)["it"]

    times: dict[str, list[float]] = {name: [] for name in ["plain", *contexts]}
    for round_ in range(arguments.rounds + 2):
        now = {"plain": alternate({"it": lambda: model(tokens)}, 1, warm_up=0)["it"]}
        now |= {name: inside(context) for name, context in contexts.items()}
        if round_ >= 2:
            for name, seconds in now.items():
                times[name].append(seconds)
    rows = []
    for name, seconds in times.items():
        enter, leave = entering_and_leaving(contexts[name], 9) if name in contexts else (float("nan"), float("nan"))
        median = sorted(seconds)[len(seconds) // 2]
        rows.append({"case": name, "forward seconds": median, "enter ms": enter, "leave ms": leave})
    table = pd.DataFrame(rows).set_index("case")
    table.insert(1, "times plain", table["forward seconds"] / table.loc["plain", "forward seconds"])
    shape = f"{arguments.layers} layers, {len(sites)} sites, C 256, batch {arguments.batch}, {arguments.length} tokens"
    publish("overhead", "Overhead of contexts", f"Medians; {shape}.\n\n{markdown(table)}", rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
