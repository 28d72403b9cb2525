"""Activity: how many subcomponents are active where, which ones, and on which tokens.

A subcomponent is active where its importance is above a threshold. It is *unique to* a prompt where it is active at some real
token of that prompt and at no real token of the others. ``real`` says which tokens are no padding; by default the importances
say so themselves, where they come from ``run.importances``. Source: tables 1a and 1b of the paper on transformers, and its
subcomponents of single prompts. Approximations: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spd.checks import check_finite, check_shares, check_whole


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
    _checked(importances, None, thresholds)
    for where in positions.values():
        _checked(importances, where, thresholds, every=False)
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
    real = _checked(importances, real, thresholds)
    check_shares("min_fraction", [min_fraction])
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
    real = _checked(importances, real, [threshold])
    active = {site: (g > threshold).sum(-1).double() for site, g in importances.items()}
    return {site: (n if real is None else n[real]).mean().item() for site, n in active.items()}


def one_hot_positions(indices: Tensor, length: int) -> Bool[Tensor, "batch pos"]:
    """Marks position ``indices[b]`` of every sequence b, for :func:`active_by_position`.

    Raises:
        ValueError: a position outside the sequence.
    """
    if not bool(((indices >= 0) & (indices < length)).all()):
        raise ValueError(f"Positions must be 0 to {length - 1}, found {indices.tolist()}.")
    return torch.arange(length, device=indices.device)[None] == indices[:, None]


def l0_by_site(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    real: Bool[Tensor, "batch pos"] | None = None,
    thresholds: Sequence[float] = (0.0, 0.1),
) -> pd.DataFrame:
    """:func:`l0` at several thresholds.

    Returns:
        One row per threshold and site, and one per threshold with the sum over sites as site ``"all"``:
        ``site, threshold, l0``.
    """
    _checked(importances, real, thresholds)
    rows = []
    for threshold in thresholds:
        counts = l0(importances, real, threshold)
        rows += [(site, threshold, count) for site, count in counts.items()]
        rows.append(("all", threshold, sum(counts.values())))
    return pd.DataFrame(rows, columns=["site", "threshold", "l0"])


def subcomponent_activity(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    real: Bool[Tensor, "batch pos"] | None = None,
    thresholds: Sequence[float] = (0.0, 0.1),
) -> pd.DataFrame:
    """How often, and how strongly on average, every subcomponent is active.

    Returns:
        One row per site, subcomponent and threshold: ``site, subcomponent, threshold, frequency`` (share of real tokens where
        its importance is above the threshold), ``mean_importance`` (over all real tokens, active or not).
    """
    real = _checked(importances, real, thresholds)
    parts = []
    for site, g in importances.items():
        tokens = (g.flatten(0, 1) if real is None else g[real]).detach().double()
        for threshold in thresholds:
            columns = {
                "site": site,
                "subcomponent": range(g.shape[-1]),
                "threshold": threshold,
                "frequency": (tokens > threshold).double().mean(0).tolist(),
                "mean_importance": tokens.mean(0).tolist(),
            }
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def top_examples(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    tokens: Tensor,
    real: Bool[Tensor, "batch pos"] | None = None,
    k: int = 5,
    threshold: float = 0.0,
) -> pd.DataFrame:
    """The real tokens on which every subcomponent is most important, at most ``k`` of them, where it is active.

    ``tokens`` ``[batch, pos]`` are those of the importances.

    Returns:
        One row per example: ``site, subcomponent, rank`` (from 0, the largest first; equal values by ``pre``, where the
        importances have it, then by prompt and position),
        ``prompt, position`` (indices into the batch), ``token`` (its id), ``value`` (the importance). A subcomponent that is
        never above ``threshold`` has no rows.

    Raises:
        ValueError: ``k`` below 1, tokens of another shape than the importances.
    """
    check_whole(k=k)
    if k < 1:
        raise ValueError(f"k must be at least 1 example, found {k}.")
    active = _active(importances, tokens, real, threshold)
    by = {"order": True, "subcomponent": True, "value": False, "pre": False, "prompt": True, "position": True}
    active = active.sort_values(list(by), ascending=list(by.values()))
    active["rank"] = active.groupby(["order", "subcomponent"]).cumcount()
    columns = ["site", "subcomponent", "rank", "prompt", "position", "token", "value"]
    return active.loc[active["rank"] < k, columns].reset_index(drop=True)


def unique_to_prompts(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    tokens: Tensor,
    real: Bool[Tensor, "batch pos"] | None = None,
    threshold: float = 0.0,
) -> pd.DataFrame:
    """Subcomponents active at some real token of one prompt and at none of the others, wherever they are active.

    ``tokens`` ``[batch, pos]`` are those of the importances.

    Returns:
        One row per active place of such a subcomponent, by prompt, position and site: ``prompt, position, token`` (its id),
        ``site, subcomponent, value`` (the importance there).
    """
    active = _active(importances, tokens, real, threshold)
    prompts = active.groupby(["order", "subcomponent"])["prompt"].transform("nunique")
    unique = active[prompts == 1].sort_values(["prompt", "position", "order", "subcomponent"])
    return unique[["prompt", "position", "token", "site", "subcomponent", "value"]].reset_index(drop=True)


def _checked(
    importances: Mapping[str, Tensor], real: Tensor | None, thresholds: Sequence[float], every: bool = True
) -> Bool[Tensor, "batch pos"] | None:
    """Which tokens are real: as given, else as the importances say. ``every``: there must be such tokens.

    Raises:
        ValueError, TypeError: no site, no threshold or one outside [0, 1], a ``real`` that does not fit, no real token.
        FloatingPointError: importances that are not finite.
    """
    check_shares("threshold", thresholds)
    if not importances or not thresholds:
        raise ValueError(f"Give at least one site and threshold, found {list(importances)} and {list(thresholds)}.")
    real = getattr(importances, "real", None) if real is None else real
    if real is not None and real.dtype != torch.bool:
        raise TypeError(f"What is real, or at a position, is marked by booleans, found {real.dtype}; use .bool().")
    for site, g in importances.items():
        if real is not None and real.shape != g.shape[:2]:
            raise ValueError(f"{site}: importances of shape {tuple(g.shape)} do not fit marks {tuple(real.shape)}.")
        check_finite(f"The importances of {site}", g)
        if every and not (g.shape[:2].numel() if real is None else bool(real.any())):
            raise ValueError(f"{site}: there is no real token among importances of shape {tuple(g.shape)}.")
    return real


def _active(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    tokens: Tensor,
    real: Bool[Tensor, "batch pos"] | None,
    threshold: float,
) -> pd.DataFrame:
    """Every (prompt, position, subcomponent) above ``threshold`` at a real token; ``order`` is the site's place."""
    real = _checked(importances, real, [threshold], every=False)
    parts = []
    for order, (site, g) in enumerate(importances.items()):
        if g.shape[:2] != tokens.shape:
            raise ValueError(
                f"{site}: importances of shape {tuple(g.shape)} are not those of tokens {tuple(tokens.shape)}; give the "
                "tokens that the importances were computed for."
            )
        above = g.detach() > threshold
        at = (above if real is None else above & real[..., None]).nonzero(as_tuple=True)
        places = {"prompt": at[0], "position": at[1], "token": tokens[at[:2]], "subcomponent": at[2]}
        pre = getattr(importances, "pre", {}).get(site, g)  # importances stop at 1, this goes on
        values = {"value": g.detach()[at], "pre": pre.detach()[at]}
        columns = {name: value.tolist() for name, value in (places | values).items()}
        parts.append(pd.DataFrame({"order": order, "site": site, **columns}))
    whole = dict.fromkeys(["order", "prompt", "position", "token", "subcomponent"], int)
    return pd.concat(parts, ignore_index=True).astype(whole)  # columns without rows have no type of their own
