"""Sweeps: the same host decomposed several times, to see what a single Run cannot show.

1. :func:`pareto`: faithful or sparse? One Run per coefficient of ImportanceMinimality; recon and adversarial recon beside L0.
2. :func:`splitting`: does the number of alive subcomponents stay when C doubles? If it grows with C, subcomponents are pieces
   of C's making rather than of the host's. Alive: active on more than a stated fraction of the evaluated tokens.

Approximations: one seed per Run, the one given; repeat with others before believing a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_spd.analysis.activity import unique_subcomponents
from tl_spd.analysis.adversarial import Adversary
from tl_spd.analysis.evaluation import evaluate
from tl_spd.checks import check_shares
from tl_spd.data import check_batch
from tl_spd.losses import ImportanceMinimality, LossTerm, paper_losses
from tl_spd.sites import HookedTransformer
from tl_spd.train import decompose
from tl_spd.wiring import padding_mask


def pareto(
    model: HookedTransformer,
    data: Any,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    coefficients: Sequence[float],
    losses: Iterable[LossTerm] | None = None,
    adversary: Adversary = Adversary(),  # noqa: B008 - frozen
    **settings: Any,
) -> pd.DataFrame:
    """Decompose once per coefficient of ImportanceMinimality and evaluate each Run on ``tokens``.

    Args:
        data: what is trained on, as for :func:`~tl_spd.train.decompose`; ``tokens`` is what is measured on.
        losses: the terms, with an ImportanceMinimality whose coefficient is exchanged, and its ``coeff_start`` in proportion
            (default ``paper_losses("gpt2")``).
        settings: further arguments of ``decompose`` (sites, C, steps, ...), the same for every Run.

    Returns:
        One row per coefficient: ``minimality`` (the coefficient), ``seed, faithfulness, recon, adversarial`` (nats),
        ``budget`` (the adversary's), ``L0`` (mean active subcomponents per token, all sites), ``efficient`` (no other row has
        both a recon and an L0 at most as large, and one of them smaller).

    Raises:
        ValueError: no coefficient, or no ImportanceMinimality among ``losses``, before training starts.
        TypeError: ``out`` or another setting that belongs to one Run alone.
    """
    terms = paper_losses("gpt2") if losses is None else tuple(losses)
    if not coefficients:
        raise ValueError("coefficients must hold at least one number, found none.")
    if not any(isinstance(term, ImportanceMinimality) for term in terms):
        raise ValueError(f"losses must hold an ImportanceMinimality to sweep, found {[term.name for term in terms]}.")
    _check(model, tokens, attention_mask, settings)
    swept = [
        [_scaled(term, coeff) if isinstance(term, ImportanceMinimality) else term for term in terms]
        for coeff in coefficients
    ]  # all of them before the first training: a bad coefficient is refused here
    rows = []
    for coeff, own in zip(coefficients, swept, strict=True):
        run = decompose(model, data, losses=own, **settings)
        last = settings.get("last_token_only", False)
        options: dict[str, Any] = dict(last_token_only=last, adversary=adversary, max_rows=settings.get("max_rows"))
        table = evaluate(model, run, tokens, attention_mask, **options)
        value = table[table.site == "all"].set_index("metric").value
        worst = value[f"adversarial@{adversary.budget}"]
        numbers = (value["faithfulness"], value["recon"], worst, adversary.budget, value["L0"])
        rows.append((coeff, settings.get("seed", 0), *numbers))
    columns = ["minimality", "seed", "faithfulness", "recon", "adversarial", "budget", "L0"]
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(efficient=[not _beaten(found, row.recon, row.L0) for row in found.itertuples()])


def _scaled(term: ImportanceMinimality, coeff: float) -> ImportanceMinimality:
    start = None if term.coeff_start is None else term.coeff_start * coeff / term.coeff
    return replace(term, coeff=coeff, coeff_start=start)


def _beaten(table: pd.DataFrame, recon: float, l0: float) -> bool:
    """Whether some row is at least as good as ``(recon, l0)`` in both and better in one."""
    as_good = (table["recon"] <= recon) & (table["L0"] <= l0)
    return bool((as_good & ((table["recon"] < recon) | (table["L0"] < l0))).any())


def splitting(
    model: HookedTransformer,
    data: Any,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    C: int | Mapping[str, int],
    thresholds: Sequence[float] = (0.0, 0.1),
    min_fraction: float = 0.001,
    **settings: Any,
) -> pd.DataFrame:
    """Decompose with ``C`` and with twice ``C`` subcomponents, and count those alive on ``tokens``.

    Args:
        min_fraction: alive subcomponents are active on more than this fraction of the real tokens.
        settings: further arguments of ``decompose`` (sites, steps, losses, ...), the same for both Runs.

    Returns:
        One row per Run, site and threshold: ``factor`` (1 or 2), ``site, threshold, min_fraction, alive, C``.

    Raises:
        TypeError: ``out`` or another setting that belongs to one Run alone.
    """
    _check(model, tokens, attention_mask, settings)
    check_shares("threshold", thresholds)
    check_shares("min_fraction", [min_fraction])
    parts = []
    for factor in (1, 2):
        counts = {site: factor * count for site, count in C.items()} if isinstance(C, Mapping) else factor * C
        run = decompose(model, data, C=counts, **settings)
        g = run.importances(model, tokens, attention_mask)
        table = unique_subcomponents(g, padding_mask(model, tokens, attention_mask), thresholds, min_fraction)
        parts.append(table.rename(columns={"unique": "alive"}).assign(factor=factor))
    return pd.concat(parts, ignore_index=True)[["factor", "site", "threshold", "min_fraction", "alive", "C"]]


def _check(
    model: HookedTransformer, tokens: Tensor, attention_mask: Tensor | None, settings: Mapping[str, Any]
) -> None:
    check_batch((tokens, attention_mask), model)
    if single := [name for name in ("out", "checkpoint_every", "resume") if name in settings]:
        raise TypeError(f"A sweep makes several Runs and keeps none of them: leave out {single}.")
