"""Suppression: what projecting directions out of the weights does to answers, beside controls, and which directions to take.

1. Effect: probability, log-probability and rank of each prompt's answer before and inside a suppression.
2. Controls for k subcomponents: as many random directions (several draws), random read directions with what the weight
   makes of them, the largest singular directions, and subcomponents of other prompts.
3. Selection: at most k candidates by importance alone, or greedily by effect: every round tries each remaining candidate
   beside those taken, and takes the one that leaves the answer least probable, while that lowers it; or, where other
   prompts are to be spared, the one with the least sum of what is left of the answer and what changes in theirs. Controls
   get the same effort: the same greedy choice from as many random or singular directions as subcomponents were tried.
4. Trials are stacked: a row takes ``sum_k (x . r_k) s_k w_k`` off a site's output, which is what the suppressed weight does.

Source: the paper on transformers suppresses subcomponents; the controls and the equal effort are this library's.
Approximations: none; stacked trials may differ from suppressed weights in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spd.analysis.prompts import Prompt, as_prompts, standing, standings
from tl_spd.checks import check_finite, check_whole
from tl_spd.components import Components
from tl_spd.hooks import HookSet, removing
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, all_sites, weight
from tl_spd.suppress import (
    Directions,
    check_directions,
    random_directions,
    removed_terms,
    singular_directions,
    subcomponent_directions,
    suppressed_directions,
)
from tl_spd.wiring import Reader, make_twin, put_writer

CONTROLS = ("subcomponents", "random", "random matched", "singular")
_Set = tuple[dict[str, Any], Mapping[str, Directions]]
"""Columns that say which suppression it is, and its directions."""


def effect_table(
    model: HookedTransformer,
    prompts: Sequence[str | Tensor],
    answers: Sequence[int | str],
    suppressions: Mapping[str, Mapping[str, Directions]],
    *,
    sequential: bool = False,
    max_rows: int = 64,
) -> pd.DataFrame:
    """What each suppression does to the answer of each prompt.

    Args:
        prompts: texts or tokens ``[1, pos]``.
        answers: each prompt's answer behind its last position, a token or a text of one token.
        suppressions: name -> site name -> directions, suppressed together.
        max_rows: how many prompts of one length run together at most.

    Returns:
        One row per suppression and prompt: ``suppression, directions`` (how many), ``prompt, answer`` (token), ``p_before,
        p_after, logp_before, logp_after`` (nats), ``rank_before, rank_after`` (1: most probable), ``ratio`` of the
        probabilities, after to before. Hooks on the host count, before and after.

    Raises:
        ValueError: prompts or directions that do not fit the host, before any pass.
    """
    sets: list[_Set] = [({"suppression": name}, directions) for name, directions in suppressions.items()]
    return _effects(model, as_prompts(model, prompts, answers), sets, sequential, max_rows)


def _effects(
    model: HookedTransformer, asked: list[Prompt], sets: list[_Set], sequential: bool, max_rows: int
) -> pd.DataFrame:
    if not sets:
        raise ValueError("No suppression was given; name at least one, for example {'none': {}}.")
    for _, directions in sets:
        check_directions(model, directions)
    before, tables = _columns("before", standings(model, asked, max_rows)), []
    about = pd.DataFrame({"prompt": [p.name for p in asked], "answer": [p.answer for p in asked]})
    for labels, directions in sets:
        with suppressed_directions(model, directions, sequential=sequential):
            after = _columns("after", standings(model, asked, max_rows))
        count = sum(len(pool) for pool in directions.values())
        tables.append(pd.concat([about, before, after], axis=1).assign(**labels, directions=count))
    first = [*sets[0][0], "directions", "prompt", "answer"]
    columns = [f"{number}_{when}" for number in ("p", "logp", "rank") for when in ("before", "after")]
    table = pd.concat(tables, ignore_index=True)[[*first, *columns]]
    return table.assign(ratio=(table.logp_after - table.logp_before).map(math.exp))


def _columns(when: str, found: list[tuple[float, int]]) -> pd.DataFrame:
    log_p = pd.Series([log_p for log_p, _ in found])
    ranks = [rank for _, rank in found]
    return pd.DataFrame({f"p_{when}": log_p.map(math.exp), f"logp_{when}": log_p, f"rank_{when}": ranks})


# --- controls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How the subcomponents were selected, for controls that are selected with the same effort.

    Attributes:
        tried: site name -> how many candidates were tried there.
        prompt: the place in the list of prompts of the one whose answer was to become less probable.
        spare: the places of those whose answers were to stay as they are.
    """

    tried: Mapping[str, int]
    prompt: int = 0
    spare: Sequence[int] = ()


def control_table(
    model: HookedTransformer,
    run: Run,
    subcomponents: Mapping[str, Sequence[int]],
    prompts: Sequence[str | Tensor],
    answers: Sequence[int | str],
    *,
    others: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    effort: Effort | None = None,
    draws: int = 10,
    seed: int = 0,
    sequential: bool = False,
    max_rows: int = 64,
) -> pd.DataFrame:
    """The effects of suppressing ``subcomponents`` (site name -> indices), beside those of controls at the same sites.

    Args:
        others: name -> site name -> indices of subcomponents, for example those of another prompt.
        effort: also try controls selected from as many candidates as the subcomponents were.
        draws: how many times random directions are drawn, all from ``seed``.

    Returns:
        The columns of :func:`effect_table` with ``control`` and ``draw`` in the place of ``suppression``. Controls:
        ``subcomponents`` (those given), ``random``, ``random matched`` (what is read at random, and all that the weight
        makes of it), ``singular``, each name of ``others``; with ``effort`` also ``best`` of each but the first: at most
        as many as there are subcomponents, by :func:`select_by_effect` (at most a site's rank of singular directions).

    Raises:
        ValueError, IndexError: what does not fit the host or the Run, before any pass.
    """
    check_whole(draws=draws, seed=seed, max_rows=max_rows)
    asked, others = as_prompts(model, prompts, answers), others or {}
    if draws < 1 or (taken := [name for name in others if name in CONTROLS or name.startswith("best ")]):
        found = f"draws={draws}" if draws < 1 else f"others has {taken[0]!r}"
        raise ValueError(f"draws must be at least 1 and names of others new ones; found {found}.")
    places = [] if effort is None else [effort.prompt, *effort.spare]
    if outside := [place for place in places if not 0 <= place < len(asked)]:
        raise ValueError(f"effort names the prompt {outside[0]}; there are {len(asked)} prompts, the first is 0.")
    own = subcomponent_directions(run, subcomponents)
    check_directions(model, own)
    given = {name: subcomponent_directions(run, indices) for name, indices in others.items()}
    counts = {name: len(directions) for name, directions in own.items()}
    sets: list[_Set] = [({"control": "subcomponents", "draw": 0}, own)]
    sets += _controls(model, counts, given, draws, seed, "")
    if effort is not None:
        pools = _controls(model, effort.tried, given, draws, seed, "best ")
        spare = [asked[place] for place in effort.spare]
        trials = [(labels, _Trials(model, asked[effort.prompt], pool, max_rows, spare)) for labels, pool in pools]
        sets += [(labels, trial.best(sum(counts.values()))) for labels, trial in trials]
    return _effects(model, asked, sets, sequential, max_rows)


def _controls(
    model: HookedTransformer,
    counts: Mapping[str, int],
    others: Mapping[str, Mapping[str, Directions]],
    draws: int,
    seed: int,
    prefix: str,
) -> list[_Set]:
    generator, sets = torch.Generator().manual_seed(seed), list[_Set]()
    for matched, name in ((False, "random"), (True, "random matched")):
        for draw in range(draws):
            pool = random_directions(model, counts, generator, matched)
            sets.append(({"control": prefix + name, "draw": draw}, pool))
    sides = {site.name: min(site.d_in, site.d_out) for site in all_sites(model)}
    singular = singular_directions(model, {name: min(count, sides[name]) for name, count in counts.items()})
    sets.append(({"control": prefix + "singular", "draw": 0}, singular))
    return sets + [({"control": prefix + name, "draw": 0}, pool) for name, pool in others.items()]


# --- selection -------------------------------------------------------------------------------------------------------


def select_by_importance(
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    k: int,
    candidates: Mapping[str, Sequence[int]] | None = None,
) -> pd.DataFrame:
    """The at most ``k`` most important candidates: by the largest importance at a real token, ties by the mean, then by order.

    Importances are cut off at 1, where ties are common; ``importances.pre`` orders in the same way without the cut.

    Args:
        candidates: site name -> indices; default all subcomponents.

    Returns:
        One row per choice, best first: ``round`` (from 1), ``site, index, importance`` (the largest).

    Raises:
        ValueError, IndexError: ``k`` below 1, or candidates that are not in ``importances``.
    """
    _check_k(k)
    rows = []
    every = {name: range(g.shape[-1]) for name, g in importances.items()}
    real = getattr(importances, "real", None)
    for name, indices in (every if candidates is None else candidates).items():
        if name not in importances:
            raise ValueError(f"There are no importances of {name}, only of {list(importances)}.")
        check_finite(f"The importances of {name}", importances[name])
        g = importances[name].flatten(0, 1) if real is None else importances[name][real]
        if not len(g):
            raise ValueError(
                f"{name}: there is no real token among importances of shape {tuple(importances[name].shape)}."
            )
        if outside := [index for index in indices if index not in range(g.shape[1])]:
            raise IndexError(f"{name} has subcomponents 0 to {g.shape[1] - 1}; found {outside}.")
        largest, mean = g.max(0).values.tolist(), g.double().mean(0).tolist()
        rows += [(largest[index], mean[index], name, index) for index in dict.fromkeys(indices)]
    rows.sort(key=lambda row: (-row[0], -row[1]))
    table = [(n, name, index, value) for n, (value, _, name, index) in enumerate(rows[:k], 1)]
    return pd.DataFrame(table, columns=["round", "site", "index", "importance"])


@torch.no_grad()
def select_by_effect(
    model: HookedTransformer,
    directions: Mapping[str, Directions],
    prompt: str | Tensor,
    answer: int | str,
    k: int,
    *,
    spare: Sequence[str | Tensor] = (),
    spare_answers: Sequence[int | str] = (),
    max_rows: int = 32,
) -> pd.DataFrame:
    """At most ``k`` of ``directions`` (site name -> candidates), chosen greedily to make ``answer`` improbable.

    Suppression of those chosen is simultaneous. The choice minimises ``ratio + change`` and ends early where no candidate
    lowers it.

    Args:
        spare: prompts whose answers ``spare_answers`` are to keep their probabilities.
        max_rows: how many trials are stacked at most.

    Returns:
        One row per round: ``round`` (from 1), ``site, index`` (of the candidate), ``p`` (the answer's probability with all
        chosen so far suppressed), ``ratio`` (to its probability with none), ``change`` (the mean of ``|ratio - 1|`` over
        the spared prompts; 0 without any), ``tried`` (trials made up to this round).

    Raises:
        ValueError: ``k`` or ``max_rows`` below 1, or what does not fit the host.
    """
    spared = as_prompts(model, spare, spare_answers) if len(spare) or len(spare_answers) else []
    return _Trials(model, as_prompts(model, [prompt], [answer])[0], directions, max_rows, spared).select(k)


def chosen(selection: pd.DataFrame) -> dict[str, list[int]]:
    """Site name -> indices of a selection, as :func:`~tl_spd.suppress.suppressed` takes them."""
    return {name: rows["index"].tolist() for name, rows in selection.groupby("site", sort=False)}


def _check_k(k: int) -> None:
    check_whole(k=k)
    if k < 1:
        raise ValueError(f"k must be at least 1 direction, found {k}.")


class _Trials:
    """Simultaneous suppressions of one prompt, each its own row, on a twin whose weights stay as they are."""

    def __init__(
        self,
        model: HookedTransformer,
        prompt: Prompt,
        directions: Mapping[str, Directions],
        max_rows: int,
        spare: Sequence[Prompt] = (),
    ):
        check_whole(max_rows=max_rows)
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1 trial, found {max_rows}.")
        self.twin, self.prompt, self.spare = make_twin(model), prompt, spare
        self.directions, self.max_rows = directions, max_rows
        self.names = [(name, index) for name, pool in directions.items() for index in range(len(pool))]
        self.parts: dict[str, Components] = {}
        for site in check_directions(model, directions):
            W = weight(model, site)
            pool = directions[site.name]
            r, w, strength = removed_terms(W.to(torch.promote_types(W.dtype, torch.float32)), pool.read, pool.write)
            self.parts[site.name] = Components(site, r, w * strength[:, None])

    @torch.no_grad()
    def p(self, prompt: Prompt, taken: Bool[Tensor, "rows candidates"]) -> Float[Tensor, "rows"]:
        """The answer's probability with each row's candidates suppressed."""
        return torch.cat([self._p(prompt, part) for part in taken.split(self.max_rows)])

    def _p(self, prompt: Prompt, taken: Bool[Tensor, "rows candidates"]) -> Float[Tensor, "rows"]:
        sites = [parts.site for parts in self.parts.values()]
        masks = taken[:, None].split([parts.C for parts in self.parts.values()], dim=-1)
        with removing(HookSet()) as hooks:
            reader = Reader(self.twin, sites, hooks)

            def without(parts: Components, mask: Tensor, like: Tensor) -> Tensor:
                return like - parts.output(reader.inputs[parts.site.name], mask.to(parts.read.dtype), like)

            for parts, mask in zip(self.parts.values(), masks, strict=True):
                put_writer(hooks, self.twin, parts.site, partial(without, parts, mask))
            logits = self.twin(prompt.tokens.expand(taken.shape[0], -1))
        answers = torch.full((taken.shape[0],), prompt.answer, device=logits.device)
        return standing(logits[:, -1], answers)[0].exp()

    def select(self, k: int) -> pd.DataFrame:
        """The greedy choice, see :func:`select_by_effect`."""
        _check_k(k)
        device = self.prompt.tokens.device
        one_each = torch.eye(len(self.names), dtype=torch.bool, device=device)
        taken = torch.zeros(len(self.names), dtype=torch.bool, device=device)
        before, *spared = (self.p(prompt, taken[None]) for prompt in (self.prompt, *self.spare))
        rows: list[tuple[int, str, int, float, float, float, int]] = []
        tried, least = 0, 1.0
        while len(rows) < k and not bool(taken.all()):
            left = (~taken).nonzero()[:, 0]
            p = self.p(self.prompt, taken | one_each[left])
            tried += len(left)
            best, change = self._best(taken | one_each[left], p / before, spared)
            ratio = float(p[best] / before)
            if not ratio + change < least:
                break
            least = ratio + change
            taken[left[best]] = True
            rows.append((len(rows) + 1, *self.names[int(left[best])], p[best].item(), ratio, change, tried))
        return pd.DataFrame(rows, columns=["round", "site", "index", "p", "ratio", "change", "tried"])

    def _best(self, trials: Tensor, ratio: Tensor, spared: Sequence[Tensor]) -> tuple[int, float]:
        """The trial of least ``ratio + change``, the first of equals, and its change.

        A change only adds: the trial of least ratio sets what is to be beaten, and spared prompts run only for the trials
        that still can, fewer with every prompt.
        """
        first, count = ratio.argmin()[None], max(1, len(spared))
        bound = (
            ratio[first] + sum(self._moved(*one, trials[first]) for one in zip(self.spare, spared, strict=True)) / count
        )
        rows = (ratio <= bound).index_fill(0, first, True).nonzero()[:, 0]
        total = torch.zeros_like(ratio[rows])
        for prompt, before in zip(self.spare, spared, strict=True):
            total = total + self._moved(prompt, before, trials[rows])
            still = (ratio[rows] + total / count <= bound) | (rows == first)  # other batches may round another way
            rows, total = rows[still], total[still]
        best = int((ratio[rows] + total / count).argmin())
        return int(rows[best]), float(total[best] / count)

    def _moved(self, prompt: Prompt, before: Tensor, trials: Tensor) -> Tensor:
        return (self.p(prompt, trials) / before - 1).abs()

    def best(self, k: int) -> dict[str, Directions]:
        """The directions that :meth:`select` chooses."""
        return {name: self.directions[name][indices] for name, indices in chosen(self.select(k)).items()}
