"""Patching: what each subcomponent carries from a clean prompt into a corrupted one, beside TransformerLens's own patches.

Two prompts of equal length run on the original model. For a site with inputs ``x_clean`` and ``x_corr``, inner activations
``a_c = x . read_c`` and a position p:

1. *Patching a set S of subcomponents*: the corrupted prompt runs with ``sum_{c in S} (a_c(clean) - a_c(corr)) write_c`` added
   to the site's output at p. The effect is the metric of that pass minus the metric of the corrupted prompt.
2. *TransformerLens's patch* copies the clean output at p, all heads, at the hook point right behind the site's matmul
   (``generic_activation_patch``). With all subcomponents in S the two differ by ``(x_clean - x_corr) @ delta`` alone, since
   ``(x_clean - x_corr) @ W = (x_clean - x_corr) @ (read @ write + delta)`` and biases cancel.
3. *Attribution* (gradient x activation): the derivative of the metric as subcomponent c begins to be patched in,
   ``(dmetric/dy . write_c) (a_c(clean) - a_c(corr))`` on the corrupted prompt, for all sites in one backward pass.

Passes are made by :class:`~tl_spd.analysis.pair.PromptPair`. A subcomponent whose inner activation is the same in both prompts
has the effect 0 without a pass.

Source: activation patching as in TransformerLens; attribution as in Nanda, *Attribution patching* (2023).
Approximations: those of the pair (rounding); an attribution is the effect to first order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_spd.analysis.pair import Metric, PromptPair
from tl_spd.analysis.pair import answer_metric as answer_metric
from tl_spd.checks import check_shares, check_whole
from tl_spd.components import Components
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, weight


def patch_subcomponents(
    model: HookedTransformer,
    run: Run,
    clean: Int[Tensor, "..."],
    corrupted: Int[Tensor, "..."],
    metric: Metric,
    sites: str | Sequence[str] | None = None,
    *,
    positions: Sequence[int] | None = None,
    threshold: float | None = None,
    max_rows: int = 64,
) -> pd.DataFrame:
    """The effect of patching each subcomponent at each position, with TransformerLens's patch of the site beside it.

    Args:
        clean, corrupted: tokens ``[1, pos]`` of equal length.
        metric: see :func:`~tl_spd.analysis.pair.answer_metric`.
        sites: a pattern or patterns; default all of the Run's attention and MLP matrices.
        positions: which positions to patch; default all.
        threshold: patch only subcomponents whose importance is above it at that position in the clean or the corrupted
            prompt, the others get no row; default all.
        max_rows: how many passes go through the model at once; each makes logits of ``pos x d_vocab`` numbers.

    Returns:
        One row per site, position and subcomponent: ``site, position, token`` (of the clean prompt), ``corrupted_token,
        subcomponent, inner_clean, inner_corrupted, importance_clean, importance_corrupted, attribution, effect, tl_effect``
        (the site's, the same in all rows of a site and position), ``metric_clean, metric_corrupted`` (of the whole
        prompts). Effects and attributions in units of the metric.

    Raises:
        ValueError: wrong shapes or lengths, tokens out of the vocabulary, unknown sites or embeddings, positions outside
            the prompt, a metric that is not one differentiable number, a Run made for another host.
    """
    check_shares("threshold", () if threshold is None else (threshold,))
    pair = PromptPair(model, run, clean, corrupted, metric, sites, positions, max_rows)
    attributions = pair.attributions()
    importances = pair.importances()
    tables = []
    for site in pair.sites:
        parts, at = run.components[site.name], torch.tensor(pair.positions, device=clean.device)
        with torch.no_grad():
            inner = [parts.inner(seen.inputs[site.name])[0, at] for seen in pair.seen]
            g = [found[site.name][0, at] for found in importances]
        least = -math.inf if threshold is None else threshold
        row, c = (torch.maximum(*g) > least).nonzero(as_tuple=True)
        columns = {
            "inner_clean": inner[0][row, c],
            "inner_corrupted": inner[1][row, c],
            "importance_clean": g[0][row, c],
            "importance_corrupted": g[1][row, c],
            "attribution": attributions[site.name][0, at][row, c],
            "effect": pair.effects(parts, at[row], torch.eye(parts.C, dtype=torch.bool, device=c.device)[c]),
            "tl_effect": pair.host_effects(site).to(row.device)[row],
        }
        tables.append(pair.labels(site, at[row]).assign(subcomponent=c.cpu().numpy(), **_numbers(columns)))
    table = pd.concat(tables, ignore_index=True)
    return table.assign(metric_clean=pair.values[0], metric_corrupted=pair.values[1])


def joint_shares(
    model: HookedTransformer,
    run: Run,
    clean: Int[Tensor, "..."],
    corrupted: Int[Tensor, "..."],
    metric: Metric,
    table: pd.DataFrame,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    max_rows: int = 64,
) -> pd.DataFrame:
    """How much of TransformerLens's effect the k subcomponents of largest absolute effect carry when patched together.

    Args:
        table: what :func:`patch_subcomponents` returned for the same arguments; gives sites, positions and the ranking.
        ks: how many subcomponents; a k beyond the rows that there are takes all of them.

    Returns:
        One row per site, position and k: ``site, position, token, corrupted_token, k, joint_effect`` (patched together),
        ``summed_effect`` (their single effects added, for comparison), ``tl_effect, joint_share, summed_share`` (of
        ``tl_effect``; NaN where it is 0).

    Raises:
        ValueError: as :func:`patch_subcomponents`; an empty table, or one made for other prompts; a k below 1.
    """
    _check_table(table, ks)
    names, positions = list(table.site.unique()), sorted(int(p) for p in table.position.unique())
    pair = PromptPair(model, run, clean, corrupted, metric, names, positions, max_rows)
    _check_made_for(table, pair)
    results = []
    for site in pair.sites:
        parts = run.components[site.name]
        rows = []
        for position, here in table[table.site == site.name].groupby("position"):
            ranked = here.iloc[(-here.effect.abs()).argsort(kind="stable")]
            rows += [(position, k, ranked.iloc[:k], ranked.tl_effect.iloc[0]) for k in ks]
        at = torch.tensor([row[0] for row in rows], device=clean.device)
        kept = torch.zeros(len(rows), parts.C, dtype=torch.bool, device=clean.device)
        for index, (_, _, largest, _) in enumerate(rows):
            kept[index, largest.subcomponent.tolist()] = True
        results.append(
            pair.labels(site, at).assign(
                k=[row[1] for row in rows],
                **_numbers({"joint_effect": pair.effects(parts, at, kept)}),
                summed_effect=[float(row[2].effect.sum()) for row in rows],
                tl_effect=[row[3] for row in rows],
            )
        )
    found = pd.concat(results, ignore_index=True)
    whole = found.tl_effect.where(found.tl_effect != 0)
    return found.assign(joint_share=found.joint_effect / whole, summed_share=found.summed_effect / whole)


def compare_whole_sites(
    model: HookedTransformer,
    run: Run,
    clean: Int[Tensor, "..."],
    corrupted: Int[Tensor, "..."],
    metric: Metric,
    sites: str | Sequence[str] | None = None,
    *,
    positions: Sequence[int] | None = None,
    max_rows: int = 64,
) -> pd.DataFrame:
    """All subcomponents of a site patched together against TransformerLens's patch of it, and what the delta explains.

    Returns:
        One row per site and position: ``site, position, token, corrupted_token, joint_effect`` (all subcomponents),
        ``tl_effect, difference`` (``tl_effect - joint_effect``: 0 where the decomposition is faithful), ``delta_explains``
        (what ``joint_effect`` grows by as ``(x_clean - x_corr) @ delta`` is added too), ``unexplained`` (``difference -
        delta_explains``: 0 but for rounding), ``delta_share`` (the norm of that added vector over the norm of the change
        of the host's output; not finite where the latter is 0).

    Raises:
        ValueError: as :func:`patch_subcomponents`.
    """
    pair = PromptPair(model, run, clean, corrupted, metric, sites, positions, max_rows)
    at, tables = torch.tensor(pair.positions, device=clean.device), []
    for site in pair.sites:
        parts = run.components[site.name]
        with torch.no_grad():
            matrix = weight(pair.twin, site).to(parts.read.dtype)
            delta, eye = parts.delta(matrix), torch.eye(site.d_in, dtype=matrix.dtype, device=matrix.device)
            both = Components(site, torch.cat([parts.read, eye], 1), torch.cat([parts.write, delta]))
            dx = pair.difference(parts)[0, at]
            ratio = (dx @ delta).norm(dim=-1) / (dx @ matrix).norm(dim=-1)
        without_delta = torch.arange(both.C, device=at.device) < parts.C
        joint = pair.effects(both, at, without_delta.expand(len(at), -1))
        full = pair.effects(both, at, torch.ones_like(without_delta).expand(len(at), -1))
        whole = pair.host_effects(site)
        numbers = {
            "joint_effect": joint,
            "tl_effect": whole,
            "difference": whole - joint,
            "delta_explains": full - joint,
            "unexplained": whole - full,
            "delta_share": ratio,
        }
        tables.append(pair.labels(site, at).assign(**_numbers(numbers)))
    return pd.concat(tables, ignore_index=True)


def _check_table(table: pd.DataFrame, ks: Sequence[int]) -> None:
    check_whole(**{f"ks[{index}]": k for index, k in enumerate(ks)})
    if not ks or min(ks) < 1:
        raise ValueError(f"ks={list(ks)}: each k must be at least 1 subcomponent, and there must be one.")
    if table.empty:
        raise ValueError(
            "The table has no rows: no subcomponent was patched. Lower the threshold of patch_subcomponents."
        )


def _check_made_for(table: pd.DataFrame, pair: PromptPair) -> None:
    found = table[["metric_clean", "metric_corrupted"]].iloc[0].tolist()
    if not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in zip(found, pair.values, strict=True)):
        raise ValueError(
            f"The table was made where the metric is {found} on the clean and the corrupted prompt; here it is "
            f"{pair.values}. Use the same host, prompts and metric."
        )


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """How well cheaper numbers predict effects, from the table of :func:`patch_subcomponents`.

    Pairs: ``attribution, effect`` and ``importance_clean, |effect|`` over the rows whose inner activation differs between
    the prompts; ``summed effect, tl_effect`` and ``largest |effect|, |tl_effect|`` over the (site, position) that they
    leave. Sums and maxima are over the rows that there are: a table made with a threshold lacks the others.

    Returns:
        One row per site (and ``"all"`` of them together) and pair: ``site, first, second, n`` (how many points),
        ``pearson, spearman`` (NaN where either side is constant; ties share their mean rank).
    """
    moved = table[table.inner_clean != table.inner_corrupted]
    moved = moved.assign(size=moved.effect.abs())
    found = []
    for site in [*table.site.unique(), "all"]:
        rows = moved if site == "all" else moved[moved.site == site]
        places = rows.groupby(["site", "position"])
        whole = places.tl_effect.first()
        pairs = [
            ("attribution", "effect", rows.attribution, rows.effect),
            ("importance_clean", "|effect|", rows.importance_clean, rows["size"]),
            ("summed effect", "tl_effect", places.effect.sum(), whole),
            ("largest |effect|", "|tl_effect|", places["size"].max(), whole.abs()),
        ]
        found += [(site, a, b, len(x), _pearson(x, y), _pearson(x.rank(), y.rank())) for a, b, x, y in pairs]
    return pd.DataFrame(found, columns=["site", "first", "second", "n", "pearson", "spearman"])


def _pearson(x: pd.Series, y: pd.Series) -> float:
    if x.nunique() < 2 or y.nunique() < 2:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5)


def _numbers(columns: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.detach().double().cpu().numpy() for name, value in columns.items()}
