"""Greedy pruning of a Run's subcomponents: :mod:`tl_spd.analysis.pruning`'s algorithm on what a decomposition found.

The masked model (every subcomponent at its importance) loses, round by round, the subcomponent without which its output KL
is lowest. Unlike a singular term, a subcomponent is on only where its importance says so: fewer of them can be needed in all,
by an account that gives the importances for free.
"""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_spd.analysis.pruning import check_tau, level
from tl_spd.engine import Batch, Engine
from tl_spd.masks import Pass
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer

CANDIDATES = 32
"""Candidates whose masks are held at once."""


@torch.no_grad()
def greedy_run_path(
    model: HookedTransformer,
    run: Run,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    tau: float,
    last_token_only: bool = False,
    max_rows: int | None = None,
) -> pd.DataFrame:
    """Remove subcomponents of the masked model one by one, always the one whose removal costs least, until that exceeds ``tau``.

    Takes ``n (n + 1) / 2`` masked passes for ``n`` subcomponents that are on anywhere. Of equal KLs (in steps of
    :data:`~tl_spd.analysis.pruning.TIE`) the first in forward order is taken.

    Args:
        tau: the largest KL(P || Q) allowed, nats, a mean over the scored positions; P: the original's output distribution.

    Returns:
        One row per round: ``round, site, subcomponent`` (removed), ``kept`` (all sites together), ``kl``. Row 0 is the masked
        model with all that is on at any real token; nothing is removed there (``""``, -1). With ``method`` ("spd_greedy") and
        ``seed`` (-1) the rows continue those of :func:`~tl_spd.analysis.pruning.rank1_curve`.

    Raises:
        ValueError, TypeError: ``tau`` below 0; tokens or a mask that do not fit the host.
    """
    check_tau(tau)
    engine = Engine(model, run, last_token_only, max_rows)
    batch = engine.observe_checked(tokens, attention_mask)
    g = dict(engine.importances(batch))
    on = {name: values.flatten(0, 1) if batch.real is None else values[batch.real] for name, values in g.items()}
    kept = [(name, c) for name, values in on.items() for c in (values > 0).any(0).nonzero()[:, 0].tolist()]
    rows = [(0, "", -1, len(kept), engine.kl(batch, [Pass(g)]).item())]
    while kept:
        kls = _kls(engine, batch, g, kept)
        best = min(range(len(kept)), key=lambda index: level(kls[index]))
        if kls[best] > tau:
            break
        name, c = kept.pop(best)
        g = _without(g, name, c)
        rows.append((len(rows), name, c, len(kept), kls[best]))
    table = pd.DataFrame(rows, columns=["round", "site", "subcomponent", "kept", "kl"])
    return table.assign(method="spd_greedy", seed=-1)


def _without(masks: dict[str, Tensor], name: str, c: int) -> dict[str, Tensor]:
    return {**masks, name: masks[name].index_fill(-1, torch.tensor([c], device=masks[name].device), 0)}


def _kls(engine: Engine, batch: Batch, masks: dict[str, Tensor], candidates: list[tuple[str, int]]) -> list[float]:
    """The output KL without each of ``candidates``."""
    kls = list[float]()
    for start in range(0, len(candidates), CANDIDATES):
        passes = [Pass(_without(masks, *one)) for one in candidates[start : start + CANDIDATES]]
        kls += engine.kl(batch, passes).tolist()
    return kls
