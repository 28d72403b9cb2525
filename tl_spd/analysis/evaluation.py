"""Evaluation of a Run on held-out tokens: what its losses mean, without sampling noise where that is possible.

Joint reconstruction can be good while one site alone at exactly ``m = g`` is far off (sites can agree privately on another
circuit), so the deterministic layerwise values are reported per site.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_spd.analysis.activity import l0
from tl_spd.engine import Engine
from tl_spd.losses import StochasticRecon, StochasticReconLayerwise, faithfulness, host_weights
from tl_spd.masks import Pass, rounded_mask
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer


@torch.no_grad()
def evaluate(
    model: HookedTransformer,
    run: Run,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    last_token_only: bool = False,
    thresholds: Sequence[float] = (0.0, 0.1),
    samples: int = 4,
    seed: int = 0,
    max_rows: int | None = None,
) -> pd.DataFrame:
    """How well the Run stands for the host on ``tokens``.

    Returns:
        One row per number: ``metric, site, value``; ``site`` is ``"all"`` for joint numbers. KL in nats. ``recon``: all sites
        at ``m = g``; ``unmasked``: at ones; ``rounded@t``: at ``1[g > t]``; ``stochastic``: mean over ``samples``;
        ``layerwise``: that site alone at ``m = g``; ``stochastic_layerwise``; ``L0``: mean active per token.
    """
    engine = Engine(model, run, last_token_only, max_rows)
    batch = engine.observe(tokens, attention_mask)
    g = engine.importances(batch)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    joint: dict[str, list[Pass]] = {
        "recon": [Pass(dict(g))],
        "unmasked": [Pass({name: torch.ones_like(value) for name, value in g.items()})],
        "stochastic": StochasticRecon(samples=samples).passes(g, generator),
    }
    for threshold in thresholds:
        joint[f"rounded@{threshold:g}"] = [Pass({name: rounded_mask(value, threshold) for name, value in g.items()})]
    rows: list[tuple[str, str, float]] = [("faithfulness", "all", faithfulness(run, host_weights(model, run)).item())]
    rows += [(metric, "all", engine.kl(batch, passes).mean().item()) for metric, passes in joint.items()]
    alone = engine.kl(batch, [Pass({name: value}) for name, value in g.items()])
    sampled = engine.kl(batch, StochasticReconLayerwise(samples=samples).passes(g, generator))
    for metric, values in (("layerwise", alone), ("stochastic_layerwise", sampled.reshape(len(g), -1).mean(1))):
        rows += [(metric, name, value) for name, value in zip(g, values.tolist(), strict=True)]
        rows.append((metric, "all", values.mean().item()))
    counts = l0(g, batch.real)
    rows += [("L0", name, value) for name, value in counts.items()] + [("L0", "all", sum(counts.values()))]
    return pd.DataFrame(rows, columns=["metric", "site", "value"])
