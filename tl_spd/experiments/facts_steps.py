"""The steps of the facts experiment: which facts a host knows, what to suppress for each, and what that does, beside controls.

1. A fact is known where its answer is one token and no token is more probable behind the prompt.
2. For each fact of the pair, at most k subcomponents are suppressed: of those that are active on its prompt only, the ones of
   largest importance before its cut at 1; of those that write on its prompt only, the ones of largest contribution; and
   those that a greedy choice by effect on the fact takes from the candidates, which are more of largest contribution. The
   greedy choice also has to leave some of the known facts alone; those are spared ones and counted apart.
3. Effects and controls come from :mod:`tl_spd.analysis.suppression`; groups of prompts are summarised by mean ratios.

Source: the paper's experiment on facts; controls and equal effort are this library's. Approximations: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.analysis.prompts import as_prompts, mean_interval, standings
from tl_spd.analysis.suppression import Effort, chosen, control_table, select_by_effect, select_by_importance
from tl_spd.experiments.facts_data import Fact, FactSet
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, one_token
from tl_spd.suppress import subcomponent_directions

SELECTIONS = [
    "target",
    "choice",
    "round",
    "site",
    "index",
    "position",
    "token",
    "importance",
    "contribution",
    "p",
    "ratio",
    "change",
    "tried",
]
EFFECTS = ["target", "choice", "group", "control", "draw", "directions", "prompt", "answer", "rank_after", "ratio"]
SUMMARY = ["directions", "draws", "prompts", "ratio", "ci_low", "ci_high", "worst", "change", "first"]
_KEYS = ["target", "choice", "control", "group"]
_OTHER, _POOL = "other prompt", "other prompt's candidates"


def check_facts(model: HookedTransformer, facts: FactSet, max_rows: int = 64) -> pd.DataFrame:
    """Which facts the host knows: the answer is one token, and no token is more probable behind the prompt.

    Returns:
        One row per fact: ``part`` (pair, reversed or facts), ``relation, prompt, answer, one_token, p`` and ``rank`` (missing
        where the answer is no single token), ``known``.

    Raises:
        ValueError: a fact of the pair is not known, a reversed question's answer is not one token, or no other is known.
    """
    parts = {"pair": facts.pair, "reversed": facts.reversed, "facts": facts.facts}
    rows = [
        (part, f.relation, f.prompt, f.answer, _is_one_token(model, f.answer)) for part in parts for f in parts[part]
    ]
    table = pd.DataFrame(rows, columns=["part", "relation", "prompt", "answer", "one_token"])
    if bad := table[(table.part != "facts") & ~table.one_token].answer.tolist():
        raise ValueError(f"{bad[0]!r} is not one token for this host; take another answer.")
    single = table[table.one_token]
    found = standings(model, as_prompts(model, single.prompt.tolist(), single.answer.tolist()), max_rows)
    table["p"] = pd.Series([math.exp(log_p) for log_p, _ in found], single.index)
    table["rank"] = pd.Series([rank for _, rank in found], single.index)
    table["known"] = table["rank"] == 1
    if len(unknown := table[(table.part == "pair") & ~table.known]):
        fact = unknown.iloc[0]
        raise ValueError(
            f"The host does not know {fact.prompt!r} -> {fact.answer!r}: its probability is {fact.p:.3g}, its rank "
            f"{fact['rank']:.0f}. Take a pair that the host knows, or other wordings."
        )
    if not table.known[table.part == "facts"].any():
        raise ValueError(f"The host knows none of the {len(facts.facts)} other facts; give some that it knows.")
    return table


def _is_one_token(model: HookedTransformer, answer: str) -> bool:
    try:
        one_token(model, answer)
    except ValueError:
        return False
    return True


def tokenize(model: HookedTransformer, prompts: Sequence[str]) -> tuple[Int[Tensor, "prompt pos"], Tensor]:
    """Right-padded tokens and their attention mask."""
    rows = [model.to_tokens(prompt)[0] for prompt in prompts]
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat([row, row.new_full((longest - len(row),), int(row[0]))]) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return tokens, mask.to(tokens.device)


@dataclass(frozen=True)
class Choices:
    """What may be suppressed for one fact of the pair: site name -> indices, and how they were chosen.

    Attributes:
        candidates: the subcomponents that were tried by effect.
        by: "importance", "contribution" and "effect" -> the chosen ones; a choice that found nothing is left out.
        table: the rows of ``FactsResult.selections``.
    """

    candidates: dict[str, list[int]]
    by: dict[str, dict[str, list[int]]]
    table: pd.DataFrame


def choose(
    model: HookedTransformer,
    run: Run,
    fact: Fact,
    values: Mapping[str, Mapping[str, Float[Tensor, "1 pos C"]]],
    unique: pd.DataFrame,
    k: int,
    candidates: int,
    spare: pd.DataFrame,
) -> Choices:
    """At most ``k`` subcomponents unique to the prompt of ``fact``: by importance, by contribution, and greedily by effect.

    Args:
        values: "importance" (before the cut at 1) and "contribution" -> ``[1, pos, C]`` per site, on this prompt.
        unique: the rows of ``FactsResult.unique`` that are this prompt's.
        candidates: how many are tried by effect: of those unique by contribution, those of largest contribution.
        spare: rows of ``FactsResult.known``: facts that the choice by effect is to leave alone.
    """
    found, places = {}, {}
    for by, numbers in values.items():
        rows = unique[unique.by == by].sort_values("value", ascending=False, kind="stable")
        rows = rows.drop_duplicates(["site", "subcomponent"]).rename(columns={"subcomponent": "index"})
        places[by] = rows[["site", "index", "position", "token"]]
        indices = {site: own["index"].tolist() for site, own in rows.groupby("site", sort=False)}
        found[by] = select_by_importance(numbers, max(k, candidates), indices)
    pool = chosen(found["contribution"].head(candidates))
    if pool:
        greedy = select_by_effect(
            model,
            subcomponent_directions(run, pool),
            fact.prompt,
            fact.answer,
            k,
            spare=spare.prompt.tolist(),
            spare_answers=spare.answer.tolist(),
        )
        greedy["index"] = [pool[row.site][row["index"]] for _, row in greedy.iterrows()]
        found["effect"], places["effect"] = greedy, places["contribution"]
    tables = []
    for choice, table in found.items():
        table = table.head(k).merge(places[choice], on=["site", "index"]).assign(choice=choice, target=fact.prompt)
        for by, numbers in values.items():
            table[by] = [
                float(numbers[site][..., index].max()) for site, index in zip(table.site, table["index"], strict=True)
            ]
        tables.append(table.reindex(columns=SELECTIONS))
    by_choice = {choice: chosen(table) for choice, table in zip(found, tables, strict=True) if len(table)}
    return Choices(pool, by_choice, pd.concat(tables, ignore_index=True))


def spared_facts(known: pd.DataFrame, count: int) -> pd.DataFrame:
    """``count`` rows of the known facts in ``known``, evenly spaced; fewer where there are not twice as many."""
    facts = known[(known.part == "facts") & known.known]
    return facts.iloc[:: max(2, len(facts) // max(1, count))].head(count)


def measure_suppression(
    model: HookedTransformer,
    run: Run,
    choices: Sequence[Choices],
    known: pd.DataFrame,
    spare: pd.DataFrame,
    draws: int,
    seed: int,
) -> pd.DataFrame:
    """The table ``FactsResult.effects``: each fact's choices beside controls, on the pair, the reversed questions, the facts.

    ``known`` is what :func:`check_facts` returned; the controls of a choice by effect are also chosen with the same effort.
    ``group``: fact, other fact, reversed (the fact's own), other reversed, spared (``spare``), facts.
    """
    asked = known[known.known | (known.part != "facts")]
    places = [asked.index.get_loc(row) for row in spare.index]
    groups = (
        ["fact", "other fact", "reversed", "other reversed"],
        ["other fact", "fact", "other reversed", "reversed"],
    )
    tables = []
    for index, (own, other) in enumerate(zip(choices, reversed(choices), strict=True)):
        group = dict(zip(asked.prompt, groups[index] + ["facts"] * (len(asked) - 4), strict=True))
        group |= dict.fromkeys(spare.prompt, "spared")
        for choice, indices in own.by.items():
            effort = None
            others = {_OTHER: other.by[choice]} if choice in other.by else {}
            if choice == "effect":
                effort = Effort({site: len(pool) for site, pool in own.candidates.items()}, index, places)
                others |= {_POOL: other.candidates} if other.candidates else {}
            found = control_table(
                model,
                run,
                indices,
                asked.prompt.tolist(),
                asked.answer.tolist(),
                others=others,
                effort=effort,
                draws=draws,
                seed=seed,
            )
            # All candidates at once would be more than k directions, and the best of k ones no choice of equal effort.
            found = found[~found.control.isin([_POOL, f"best {_OTHER}"])]
            found = found.assign(control=found.control.replace(f"best {_POOL}", f"best {_OTHER}"))
            found.insert(0, "group", found.prompt.map(group))
            found.insert(0, "choice", choice)
            found.insert(0, "target", asked.prompt.iloc[index])
            tables.append(found)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=EFFECTS)


def summarize(effects: pd.DataFrame) -> pd.DataFrame:
    """``effects`` in short: how much of the answers' probability is left.

    Returns:
        One row per target, choice, control and group: ``directions, draws, prompts`` (how many), ``ratio`` (probability after
        to before: mean over draws, then over prompts), ``ci_low, ci_high`` (95% interval over prompts, Student's t; NaN for one
        prompt), ``worst`` (the least ratio of any prompt and draw), ``change`` (mean of ``|ratio - 1|``), ``first`` (share
        of answers that are still the most probable token). The group "same answer" is those of ``facts`` with the fact's answer.
    """
    targets = effects[effects.group == "fact"].groupby("target").answer.first()
    same = effects[(effects.group == "facts") & (effects.answer == effects.target.map(targets))]
    rows = []
    both = pd.concat([effects, same.assign(group="same answer")], ignore_index=True)
    for key, found in both.groupby(_KEYS, sort=False):
        ratios = torch.tensor(found.groupby("prompt", sort=False).ratio.mean().tolist(), dtype=torch.float64)
        numbers = found.directions.max(), found.draw.nunique(), len(ratios), *(x.item() for x in mean_interval(ratios))
        rows.append((*key, *numbers, found.ratio.min(), (found.ratio - 1).abs().mean(), (found.rank_after == 1).mean()))
    return pd.DataFrame(rows, columns=[*_KEYS, *SUMMARY])
