"""Greedy rank-1 pruning of singular terms, and its curve beside a Run's: how many rank-1 pieces a given output KL needs.

Every matrix is the sum of its singular terms (those above rounding). Every round:

1. for each matrix that still has a term, the pruned model with its smallest remaining term left out as well is a candidate;
2. the candidate of the lowest KL(P || Q) is taken (P: the original's output distribution), and the next round begins;
3. pruning stops when the lowest KL exceeds ``tau``, or when nothing is left.

Ties: KLs are compared in whole steps of ``TIE`` nats (:func:`level`); of equal ones the first site in forward order is taken.

The choices are those of evaluating every candidate from the tokens; what is saved:

1. The pruned model's state at every block is kept. A candidate starts at its site's layer from there, and all candidates run
   stacked along the batch, each joining at its layer. Of its site only the term left out is computed, ``y - (x . read) write``.
2. After a choice, states up to the chosen layer still hold; only later blocks run again.
3. KL is convex in what the unembedding reads (its logits are affine in it), so the tangent at any point that was evaluated
   before bounds it from below. Candidates are evaluated in the order of their bounds (from the pruned model itself, and from
   the last time that the site's candidate was evaluated) until the next bound lies above the lowest KL found. Most never meet
   the vocabulary. Hosts with a soft cap on their logits have no such bound; all their candidates are evaluated.

Source: Algorithm 2 of the paper on transformers. Approximations: none beyond rounding; choices can differ from the plain
algorithm's only between candidates whose KLs differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_spd.checks import check_seen, check_shares, check_whole
from tl_spd.components import Components, init_components
from tl_spd.data import check_batch, check_scored
from tl_spd.engine import LOGIT_ELEMENTS, Batch, Engine, scored_positions
from tl_spd.hooks import HookSet, removing
from tl_spd.importance import Scalar
from tl_spd.masks import Pass
from tl_spd.run import Run
from tl_spd.sites import (
    HookedTransformer,
    Site,
    find_sites,
    n_ctx,
    n_layers,
    parameter,
    replace_parameter,
    unfold,
    weight,
)
from tl_spd.wiring import (
    Reader,
    capped,
    final_residual,
    make_twin,
    observe,
    padding_mask,
    put_writer,
    softcap,
    unembedding,
)

TIE = 1e-9
"""The step, in nats, in which KLs are compared."""
ROUNDING = 1e-5
"""How far, relative to itself, rounding may lift a bound above what it bounds."""


def level(kl: float) -> float:
    """``kl`` in whole steps of ``TIE``, as it is compared; rounding below 0 counts as 0."""
    return max(0.0, kl if math.isinf(kl) else float(math.floor(kl / TIE)))


def check_tau(tau: float) -> None:
    """ValueError unless ``tau`` is at least 0."""
    if not tau >= 0:
        raise ValueError(f"tau must be a number of nats of at least 0, found {tau}.")


def singular_terms(model: HookedTransformer, site: Site) -> Components:
    """The singular terms of ``site``'s weight as subcomponents, largest first; those at rounding size are left out.

    Raises:
        ValueError: the weight has entries that are not finite.
    """
    W = weight(model, site)
    terms = init_components(site, W, min(site.d_in, site.d_out), "svd", torch.Generator())
    values = terms.write.detach().square().sum(1)
    tolerance = values[0] * max(W.shape) * torch.finfo(values.dtype).eps
    rank = int((values > tolerance).sum())
    return Components(site, terms.read.detach()[:, :rank], terms.write.detach()[:rank])


@torch.no_grad()
def greedy_svd_path(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    sites: str | Iterable[str],
    tau: float,
    last_token_only: bool = False,
    max_rounds: int | None = None,
    max_rows: int | None = None,
) -> pd.DataFrame:
    """Remove singular terms one by one, always the one whose removal costs least, until the cheapest exceeds ``tau``.

    Args:
        sites: patterns over the names of matrices inside blocks.
        tau: the largest KL(P || Q) allowed, nats, a mean over the scored positions.
        last_token_only: score the last real position of every sequence instead of all real ones.
        max_rounds: stop after so many removals (None: no bound).
        max_rows: most sequences stacked in one pass (None: no bound).

    Returns:
        One row per removed term: ``round`` (from 1), ``site``, ``index`` (of the singular term removed, 0 the largest),
        ``kept`` (terms left in all sites together), ``kl`` (nats, after the removal).

    Memory: scored positions x vocabulary in float64 for the original's log-probabilities.

    Raises:
        ValueError: a pattern without a match, a site outside the blocks, ``tau`` not a number of at least 0,
            ``max_rounds`` or ``max_rows`` below 1, nothing scored.
    """
    check_whole(max_rounds=max_rounds, max_rows=max_rows)
    if max_rounds is not None and max_rounds < 1:
        raise ValueError(f"max_rounds must be at least 1 removal, found {max_rounds}.")
    check_tau(tau)
    tokens, attention_mask = check_batch((tokens, attention_mask), model)
    pruned = _Pruned(model, find_sites(model, sites), tokens, attention_mask, last_token_only, max_rows)
    current, seen = pruned.tangent(pruned.final(pruned.resid)[0]), dict[str, _Tangent]()
    rows: list[tuple[int, str, int, int, float]] = []
    while len(rows) != max_rounds and (candidates := pruned.candidates()):
        chosen, found = _cheapest(pruned, candidates, current, seen, tau)
        seen.update(found)
        if chosen is None:
            break
        pruned.remove(chosen)
        current = seen.pop(chosen)  # of a term that is gone; it is the pruned model's own now
        rows.append((len(rows) + 1, chosen, pruned.left[chosen], sum(pruned.left.values()), current.kl))
    return pd.DataFrame(rows, columns=["round", "site", "index", "kept", "kl"])


@dataclass(frozen=True)
class _Tangent:
    """KL(P || Q) at ``final`` and its slope there; both ``[scored, d_model]``."""

    final: Tensor
    kl: float
    slope: Tensor

    def below(self, final: Tensor) -> float:
        """A lower bound of the KL at ``final``."""
        return self.kl + float(((final - self.final).double() * self.slope.double()).sum())


def _cheapest(
    pruned: _Pruned, candidates: dict[str, Tensor], current: _Tangent, seen: dict[str, _Tangent], tau: float
) -> tuple[str | None, dict[str, _Tangent]]:
    """The candidate to take (None if all exceed ``tau``), and what was evaluated to find it."""
    bounds = dict.fromkeys(candidates, 0.0)
    if pruned.convex:
        for name, final in candidates.items():
            bound = max(tangent.below(final) for tangent in (current, seen.get(name, current)))
            bounds[name] = bound - ROUNDING * abs(bound)
    found, best, chosen = dict[str, _Tangent](), (level(tau), math.inf), None
    for least, place, name in sorted((level(bounds[name]), place, name) for place, name in enumerate(candidates)):
        if (least, place) > best:
            break
        found[name] = pruned.tangent(candidates[name])
        if (reached := (level(found[name].kl), place)) < best:
            best, chosen = reached, name
    return (chosen if chosen is not None and found[chosen].kl <= tau else None), found


class _Pruned:
    """The pruned model on a twin of the host, with its state at every block. The host itself is never run or changed."""

    def __init__(
        self,
        model: HookedTransformer,
        sites: Sequence[Site],
        tokens: Tensor,
        attention_mask: Tensor | None,
        last_token_only: bool,
        max_rows: int | None,
    ):
        _check(model, sites, max_rows)
        real = padding_mask(model, tokens, attention_mask)
        self.scored = scored_positions(tokens, real, last_token_only)
        check_scored(tokens, self.scored)
        self.sites = {site.name: site for site in sites}
        self.terms = {site.name: singular_terms(model, site) for site in sites}
        self.left = {name: terms.C for name, terms in self.terms.items()}
        self.matrices = {s.name: weight(model, s).to(self.terms[s.name].read.dtype, copy=True) for s in sites}
        self.twin, self.depth, self.rows = make_twin(model), n_layers(model), tokens.shape[0]
        self.per_stack = len(sites) if max_rows is None else max(1, max_rows // self.rows)
        kwargs = {} if attention_mask is None else {"attention_mask": attention_mask}
        observed = observe(self.twin, [], tokens, stop_at_layer=self.depth, **kwargs)
        check_seen(observed, [])
        self.starts, self.resid = observed.starts, observed.output
        self.convex = softcap(self.twin) <= 0
        self.log_p = self._log_probs(self.final(self.resid)[0])

    def candidates(self) -> dict[str, Float[Tensor, "scored d_model"]]:
        """Site -> what the unembedding reads where its smallest remaining term is left out too, in forward order."""
        names, found = [name for name, left in self.left.items() if left], dict[str, Tensor]()
        for start in range(0, len(names), self.per_stack):
            group = names[start : start + self.per_stack]
            found.update(zip(group, self.final(self._stack(group)), strict=True))
        return found

    def remove(self, name: str) -> None:
        """Take the smallest remaining term of the site ``name`` out of the pruned model."""
        site, term = self.sites[name], self._smallest(name)
        self.left[name] -= 1
        self.matrices[name] -= term.weight()
        if self.left[name] == 0:
            self.matrices[name].zero_()  # and no rest of rounding
        own = parameter(self.twin, site)
        new = unfold(site, self.matrices[name]).to(own.dtype)
        replace_parameter(self.twin, site, nn.Parameter(new.clone(), requires_grad=False))
        resid = self.starts[site.layer].resid
        for layer in range(site.layer, self.depth):
            self.starts[layer] = replace(self.starts[layer], resid=resid)
            resid = self._block(layer, resid)

    def final(self, resid: Float[Tensor, "rows pos d_model"]) -> Float[Tensor, "pass scored d_model"]:
        """What the unembedding reads at the scored positions of stacked passes."""
        stacked = resid.reshape(resid.shape[0] // self.rows, -1, resid.shape[-1])
        return final_residual(self.twin, stacked[:, self.scored])

    def tangent(self, final: Float[Tensor, "scored d_model"]) -> _Tangent:
        """KL(P || Q) and its slope at ``final``, in blocks of rows."""
        W, _ = unembedding(self.twin)
        step = max(1, LOGIT_ELEMENTS // W.shape[1])
        total, slopes = 0.0, []
        for start in range(0, final.shape[0], step):
            log_p = self.log_p[start : start + step]
            log_q = self._log_probs(final[start : start + step])
            p = log_p.exp()
            total += float((p * (log_p - log_q)).sum())
            slopes.append(log_q.exp_().sub_(p).to(W.dtype) @ W.T / final.shape[0])
        if not math.isfinite(total):
            raise FloatingPointError("The KL of a pruned model was not finite: its logits, or the host's own, are not.")
        return _Tangent(final, total / final.shape[0], torch.cat(slopes))

    def _log_probs(self, final: Tensor) -> Float[Tensor, "scored d_vocab"]:
        W, b = unembedding(self.twin)
        return capped(self.twin, final @ W + b).double().log_softmax(-1)

    def _smallest(self, name: str) -> Components:
        last, terms = self.left[name] - 1, self.terms[name]
        return Components(terms.site, terms.read.detach()[:, last : last + 1], terms.write.detach()[last : last + 1])

    def _stack(self, names: list[str]) -> Float[Tensor, "rows pos d_model"]:
        """The last residual stream of the candidates ``names`` (in forward order), stacked along the batch."""
        sites = [self.sites[name] for name in names]
        with removing(HookSet()) as hooks:
            reader = Reader(self.twin, sites, hooks)
            for index, site in enumerate(sites):
                put_writer(hooks, self.twin, site, partial(self._leave_out, site.name, index, reader))
            resid = self.starts[0].resid[:0]
            for layer in range(sites[0].layer, self.depth):
                joining = sum(site.layer == layer for site in sites)
                resid = self._block(layer, torch.cat([resid, *[self.starts[layer].resid] * joining]))
            return resid

    def _leave_out(self, name: str, index: int, reader: Reader, y: Tensor) -> Tensor:
        own = slice(index * self.rows, (index + 1) * self.rows)
        one = self.matrices[name].new_ones(1, 1, 1)
        y[own] -= self._smallest(name).output(reader.inputs[name][own], one, y[own])  # the twin's own, fresh tensor
        return y

    def _block(self, layer: int, resid: Tensor) -> Tensor:
        start, count = self.starts[layer], resid.shape[0] // self.rows
        beside = [start.shortformer_positions, start.attention_mask]
        positions, mask = (None if v is None else v.repeat(count, *[1] * (v.ndim - 1)) for v in beside)
        return self.twin.blocks[layer](resid, shortformer_pos_embed=positions, attention_mask=mask)


def _check(model: HookedTransformer, sites: Sequence[Site], max_rows: int | None) -> None:
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1 sequence, found {max_rows}.")
    if outside := [site.name for site in sites if not 0 <= site.layer < n_layers(model)]:
        raise ValueError(f"Only matrices inside blocks can be pruned, found {outside}; ask for sites='blocks.*'.")


# --- the curve -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def rank1_curve(
    model: HookedTransformer,
    run: Run,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    tau: float,
    last_token_only: bool = False,
    thresholds: Sequence[float] | None = None,
    points: int = 12,
    seeds: Sequence[int] = (0, 1, 2),
    max_rows: int | None = None,
) -> pd.DataFrame:
    """Kept rank-1 pieces against output KL on ``tokens``, on the Run's sites, for three ways of choosing what to keep.

    ``svd``: every round of :func:`greedy_svd_path` up to ``tau``, after a row with everything kept. ``spd``: the Run's
    subcomponents whose mean importance over the real tokens is above a threshold, for each of ``thresholds`` (default: about
    ``2 * points`` of them, denser where few or nearly all are kept). ``random``: a random order of all singular terms per
    seed, cut at such counts. What is kept is kept at every token (mask 1, else 0). ``spd_masked``: the choices of ``spd``,
    but each subcomponent at its importance there; :func:`~tl_spd.analysis.run_pruning.greedy_run_path` has that with the
    greedy choices of ``svd``.

    Returns:
        One row per point: ``method, seed`` (-1 where nothing is random), ``kept, kl`` (nats, a mean over scored positions).

    Raises:
        ValueError: as :func:`greedy_svd_path`; fewer than 1 point, thresholds outside [0, 1].
    """
    check_whole(points=points, **{f"seeds[{index}]": seed for index, seed in enumerate(seeds)})
    check_shares("threshold", thresholds or ())
    if points < 1:
        raise ValueError(f"points must be at least 1, found {points}.")
    shared: dict[str, Any] = dict(last_token_only=last_token_only, max_rows=max_rows)
    path = greedy_svd_path(model, tokens, attention_mask, sites=list(run.components), tau=tau, **shared)
    terms = {site.name: singular_terms(model, site) for site in run.sites}
    total = sum(parts.C for parts in terms.values())
    rows = [("svd", -1, total, 0.0), *(("svd", -1, int(r.kept), float(r.kl)) for r in path.itertuples())]

    engine = Engine(model, run, **shared)
    batch = engine.observe_checked(tokens, attention_mask)
    g = engine.importances(batch)
    means = {name: (v.flatten(0, 1) if batch.real is None else v[batch.real]).mean(0) for name, v in g.items()}
    order = torch.cat(list(means.values())).sort(descending=True).values.tolist()
    if thresholds is None:
        thresholds = [order[count] if count < len(order) else -1.0 for count in _counts(len(order), points)]
    above = [{name: mean > threshold for name, mean in means.items()} for threshold in thresholds]
    rows += _points("spd", -1, engine, batch, above)
    rows += _points("spd_masked", -1, engine, batch, above, g)

    engine = Engine(model, Run(terms, {}, Scalar(), n_ctx(model), {}), **shared)
    batch = engine.observe_checked(tokens, attention_mask)
    for seed in seeds:
        place = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
        places = dict(zip(terms, place.split([parts.C for parts in terms.values()]), strict=True))
        kept = [{name: at < count for name, at in places.items()} for count in _counts(total, points)]
        rows += _points("random", seed, engine, batch, kept)
    return pd.DataFrame(rows, columns=["method", "seed", "kept", "kl"])


def _counts(total: int, points: int) -> list[int]:
    """0, ``total`` and whole numbers between, spaced geometrically from both ends."""
    steps = [round(total ** (index / points)) for index in range(points + 1)]
    return sorted({0, total, *steps, *(total - step for step in steps)})


def _points(
    method: str,
    seed: int,
    engine: Engine,
    batch: Batch,
    kept: list[dict[str, Tensor]],
    masks: Mapping[str, Tensor] | None = None,
) -> list[tuple[str, int, int, float]]:
    """One row per distinct set of kept pieces: each site's, ``[C]`` booleans, are its mask, or let ``masks`` through."""
    by_count = {sum(int(keep.sum()) for keep in sets.values()): sets for sets in kept}
    chosen = [{n: keep if masks is None else masks[n] * keep for n, keep in sets.items()} for sets in by_count.values()]
    kl = engine.kl(batch, [Pass(sets) for sets in chosen]).tolist()
    return [(method, seed, count, value) for count, value in zip(by_count, kl, strict=True)]
