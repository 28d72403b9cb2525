"""Activity: how many subcomponents are active where.

A subcomponent is active where its importance is above a threshold. Source: tables 1a and 1b of the paper on transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor


def active_by_position(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    positions: Mapping[str, Bool[Tensor, "batch pos"]],
    thresholds: Sequence[float] = (0.0, 0.1),
) -> pd.DataFrame:
    """Mean number of active subcomponents per token at named positions.

    Args:
        positions: name -> which (sequence, position) pairs it means.

    Returns:
        One row per site, position and threshold: ``site, position, threshold, active``.
    """
    rows = []
    for site, g in importances.items():
        for threshold in thresholds:
            counts = (g > threshold).sum(-1).double()
            for position, where in positions.items():
                if not bool(where.any()):
                    raise ValueError(f"The position {position!r} marks no token of this batch.")
                rows.append((site, position, threshold, counts[where].mean().item()))
    return pd.DataFrame(rows, columns=["site", "position", "threshold", "active"])


def unique_subcomponents(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    real: Bool[Tensor, "batch pos"] | None = None,
    thresholds: Sequence[float] = (0.0, 0.1),
    min_fraction: float = 0.001,
) -> pd.DataFrame:
    """How many subcomponents are active on more than ``min_fraction`` of all real (sequence, position) pairs.

    Returns:
        One row per site and threshold: ``site, threshold, min_fraction, unique, C``.
    """
    rows = []
    for site, g in importances.items():
        tokens = g.flatten(0, 1) if real is None else g[real]
        for threshold in thresholds:
            frequency = (tokens > threshold).double().mean(0)
            rows.append((site, threshold, min_fraction, int((frequency > min_fraction).sum()), g.shape[-1]))
    return pd.DataFrame(rows, columns=["site", "threshold", "min_fraction", "unique", "C"])


def l0(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    real: Bool[Tensor, "batch pos"] | None = None,
    threshold: float = 0.0,
) -> dict[str, float]:
    """Mean number of active subcomponents per real token, per site."""
    active = {site: (g > threshold).sum(-1).double() for site, g in importances.items()}
    return {site: (n if real is None else n[real]).mean().item() for site, n in active.items()}


def one_hot_positions(indices: Tensor, length: int) -> Bool[Tensor, "batch pos"]:
    """Marks position ``indices[b]`` of every sequence b, for :func:`active_by_position`."""
    return torch.arange(length, device=indices.device)[None] == indices[:, None]
