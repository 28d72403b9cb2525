"""Speed of causal tracing on SmolLM2 against plain loops. ``python -m benchmarks.tracing``.

Plain: for every layer, position and noise draw one whole pass of the host with two hooks, one that corrupts the subject's
embeddings and one that restores the state. All places would take an hour, so plain is timed, in turn with ours, on one layer of
each third of the host, all positions and draws; ours traces whole kinds, and its time is divided by its number of passes. The
effects at the plain places must agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import tyro

from benchmarks.common import DEVICE, markdown, publish
from tl_spd.analysis.tracing import causal_trace, find_subject, noise_draws
from tl_spd.hosts import load_host
from tl_spd.sites import HookedTransformer, n_layers

PROMPT, SUBJECT, ANSWER = "Tiger Woods plays professional", "Tiger Woods", " golf"
POINTS = {"resid": "hook_resid_post", "mlp": "hook_mlp_out"}


@dataclass
class Arguments:
    """How much is traced."""

    draws: int = 4
    window: int = 1
    rounds: int = 2
    host: str = "smollm2"


@torch.no_grad()
def plain(model: HookedTransformer, kind: str, layer: int, draws: int) -> list[float]:
    """Mean effect of restoring one layer's state at each position."""
    tokens, answer = model.to_tokens(PROMPT), model.to_single_token(ANSWER)
    positions, point = find_subject(model, PROMPT, SUBJECT), f"blocks.{layer}.{POINTS[kind]}"
    noise = noise_draws(model, len(positions), draws, 3.0, 0)
    clean = model.run_with_cache(tokens, names_filter=point)[1][point]

    def p(draw: int, hooks: list[Any]) -> float:
        def corrupt(value: torch.Tensor, hook: Any) -> None:
            value[:, positions] += noise[draw]

        logits = model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", corrupt), *hooks])
        return logits[0, -1].softmax(-1)[answer].item()

    effects = []
    for position in range(tokens.shape[1]):

        def restore(value: torch.Tensor, hook: Any, at: int = position) -> None:
            value[:, at] = clean[:, at]

        effects.append(sum(p(draw, [(point, restore)]) - p(draw, []) for draw in range(draws)) / draws)
    return effects


def main(arguments: Arguments) -> None:
    """Time both and publish the table."""
    model = load_host(arguments.host, device=DEVICE)
    layers = [n_layers(model) * third // 6 for third in (1, 3, 5)]
    options: dict[str, Any] = {"window": arguments.window, "draws": arguments.draws}
    rows = []
    for kind in POINTS:
        ours, loops, worst = [], [], 0.0
        for _ in range(arguments.rounds):
            started = time.perf_counter()
            table = causal_trace(model, PROMPT, SUBJECT, ANSWER, kinds=[kind], **options)
            ours.append((time.perf_counter() - started) / (len(table) * arguments.draws))
            started = time.perf_counter()
            found = {layer: plain(model, kind, layer, arguments.draws) for layer in layers}
            passes = (
                2 * len(found) * len(found[layers[0]]) * arguments.draws
            )  # the corrupted pass is run again each time
            loops.append((time.perf_counter() - started) / passes)
            for layer, effects in found.items():
                here = table[table.layer == layer].sort_values("position").effect.tolist()
                worst = max(worst, *(abs(a - b) for a, b in zip(here, effects, strict=True)))
        best = {"ours ms per pass": 1e3 * sorted(ours)[0], "plain ms per pass": 1e3 * sorted(loops)[0]}
        rows.append({"kind": kind, **best, "largest difference of effects": worst})
    table = pd.DataFrame(rows).set_index("kind")
    table["plain / ours"] = table["plain ms per pass"] / table["ours ms per pass"]
    text = (
        f"{arguments.host}, `{PROMPT}`, {arguments.draws} draws; a pass is one place and draw (plain's corrupted passes "
        f"count too). Fastest of {arguments.rounds} rounds.\n\n{markdown(table)}"
    )
    publish("tracing", "Causal tracing", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
