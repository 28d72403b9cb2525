"""Views on tokens: importances in a prompt, counts of active subcomponents, top examples, direct effects on the vocabulary.

Each takes what the library measured (importances, or a DataFrame of ``tl_spd.analysis``) with the tokens as texts, and shows it
with circuitsvis' ``ColoredTokens``: white is 0, the darkest blue the number that the view states. Values are rounded to
``DIGITS`` decimals. Approximations: none beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spd.checks import check_shares, check_whole
from tl_spd.views.frames import checked
from tl_spd.views.view import Panel, View, harmless, visible

DIGITS = 4
"""Decimals of the numbers that go into a page."""
FEW = 3
"""Subcomponents of each site where none were chosen."""


def show_importance(
    tokens: Sequence[str],
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    subcomponents: Mapping[str, Sequence[int]] | None = None,
    prompt: int = 0,
) -> View:
    """A prompt's tokens coloured by the importance of chosen subcomponents, one at a time.

    Args:
        tokens: the prompt's tokens as texts, for example ``model.to_str_tokens(text)``.
        importances: of :meth:`~tl_spd.run.Run.importances`.
        subcomponents: site name -> indices; several get a picker. Default: of every site the three of largest mean importance
            on the prompt.
        prompt: which sequence of the batch the tokens are.

    Raises:
        ValueError: nothing chosen, an unknown site, tokens that are not those of the importances.
        IndexError: a prompt or subcomponent that does not exist.
        TypeError: subcomponents that are not lists of indices by site.
    """
    if subcomponents is None:
        means = {site: one_prompt(tokens, importances, site, prompt).mean(0) for site in importances}
        subcomponents = {
            site: mean.argsort(descending=True, stable=True)[:FEW].tolist() for site, mean in means.items()
        }
    if not isinstance(subcomponents, Mapping) or not all(isinstance(v, Iterable) for v in subcomponents.values()):
        raise TypeError(
            f"Give subcomponents as {{'blocks.0.attn.W_Q': [0]}}, site to indices; found {subcomponents!r}."
        )
    choices = {}
    for site, indices in subcomponents.items():
        g = one_prompt(tokens, importances, site, prompt)
        for index in _indices(site, indices, g.shape[1]):
            props = {"values": rounded(g[:, index])}
            choices[f"{site} {index}"] = [Panel("ColoredTokens", props, f"Importance of {site}, subcomponent {index}")]
    if not choices:
        raise ValueError("No subcomponent was chosen; give at least one, for example {'blocks.0.attn.W_Q': [0]}.")
    return View(
        "Importance of subcomponents by token",
        choices,
        note="White: 0, blue: 1. Hover over a token for its value.",
        picker="Subcomponent:",
        shared={"tokens": [harmless(token) for token in tokens], "minValue": 0, "maxValue": 1, "paddingBottom": 30},
    )


def show_active(
    tokens: Sequence[str],
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    sites: Sequence[str] | None = None,
    prompt: int = 0,
    threshold: float = 0.0,
) -> View:
    """A prompt's tokens coloured by how many subcomponents are active there (importance above ``threshold``).

    Args:
        tokens: the prompt's tokens as texts.
        sites: which sites; default all. Several get a picker, with their sum in front.
        prompt: which sequence of the batch the tokens are.

    Raises:
        ValueError: no site, an unknown one, tokens that are not those of the importances.
        IndexError: a prompt that does not exist.
    """
    check_shares("threshold", [threshold])
    names = list(importances) if sites is None else list(sites)
    counts = {name: (one_prompt(tokens, importances, name, prompt) > threshold).sum(1) for name in names}
    if not counts:
        raise ValueError(f"No site was chosen; there are {list(importances)}.")
    totals = {name: importances[name].shape[-1] for name in names}
    if len(counts) > 1:
        every = f"all {len(counts)} sites"
        totals[every] = sum(totals.values())
        counts = {every: torch.stack(list(counts.values())).sum(0), **counts}
    choices = {}
    for name, count in counts.items():
        least, most = int(count.min()), int(count.max())
        props = {"values": count.tolist(), "maxValue": max(most, 1)}
        title = f"Active subcomponents of {name}: {least} to {most} of {totals[name]}; darkest blue: {max(most, 1)}"
        choices[name] = [Panel("ColoredTokens", props, title)]
    return View(
        f"Active subcomponents by token (importance above {threshold:g})",
        choices,
        note="White: none. Hover over a token for its number.",
        picker="Site:",
        shared={"tokens": [harmless(token) for token in tokens], "minValue": 0, "paddingBottom": 30},
    )


def show_top_examples(
    table: pd.DataFrame,
    tokens: Sequence[Sequence[str]],
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    site: str,
    subcomponents: Sequence[int] | None = None,
    window: int = 12,
) -> View:
    """The tokens on which subcomponents of ``site`` are most important, with the text around them.

    Args:
        table: of :func:`tl_spd.analysis.activity.top_examples`.
        tokens: every prompt's tokens as texts, as many as the importances have positions.
        importances: those that the table was made of; they colour the tokens.
        subcomponents: which ones; default all that have examples. Several get a picker.
        window: how many tokens before and behind are shown.

    Raises:
        ValueError: a table that is not one of top examples or lacks what was asked for, tokens that do not fit.
    """
    source = "tl_spd.analysis.activity.top_examples"
    rows = checked(table, ["site", "subcomponent", "rank", "prompt", "position", "value"], source)
    rows = rows[rows["site"] == site].sort_values(["subcomponent", "rank"])
    found = list(dict.fromkeys(rows["subcomponent"].tolist()))
    if missing := [index for index in subcomponents or () if index not in found]:
        raise ValueError(f"The table has no examples of {site} {missing}: never active there, or not asked for.")
    if not found:
        raise ValueError(f"The table has no examples of {site!r}; its sites are {sorted(set(table['site']))}.")
    check_whole(window=window)
    if window < 0:
        raise ValueError(f"window must be at least 0 tokens, found {window}.")
    choices = {}
    for index in found if subcomponents is None else subcomponents:
        choices[str(index)] = [
            _example(tokens, importances, site, index, row.prompt, row.position, window)
            for row in rows[rows["subcomponent"] == index].itertuples()
        ]
    return View(
        f"Top tokens of the subcomponents of {site}",
        choices,
        note="White: importance 0, blue: 1; the most important token first. Hover over a token for its value.",
        picker="Subcomponent:",
        shared={"minValue": 0, "maxValue": 1},
    )


def _example(
    tokens: Sequence[Sequence[str]],
    importances: Mapping[str, Tensor],
    site: str,
    index: int,
    prompt: int,
    position: int,
    window: int,
) -> Panel:
    if not 0 <= prompt < len(tokens):
        raise ValueError(f"The table has examples of prompt {prompt}; tokens were given for {len(tokens)} prompts.")
    values = one_prompt(tokens[prompt], importances, site, prompt)[:, index]
    if not 0 <= position < len(values):
        raise ValueError(f"The table has an example at position {position}; prompt {prompt} has {len(values)} tokens.")
    around = slice(max(0, position - window), position + window + 1)
    texts = [harmless(token) for token in tokens[prompt][around]]
    title = f"{values[position]:.3f} at “{visible(tokens[prompt][position])}”, prompt {prompt}, position {position}"
    return Panel("ColoredTokens", {"tokens": texts, "values": rounded(values[around])}, title)


def show_vocabulary(table: pd.DataFrame, subcomponents: Sequence[int] | None = None) -> View:
    """The tokens whose logits subcomponents raise and lower most, read off what they write.

    Args:
        table: of :func:`tl_spd.analysis.vocabulary.direct_effects`, for one site.
        subcomponents: which ones; default all in the table. Several get a picker.

    Raises:
        ValueError: a table of another kind, of several sites, or without what was asked for.
    """
    source = "tl_spd.analysis.vocabulary.direct_effects"
    rows = checked(table, ["site", "subcomponent", "side", "rank", "text", "effect"], source)
    sites, found = rows["site"].unique().tolist(), rows["subcomponent"].unique().tolist()
    if len(sites) != 1:
        raise ValueError(f"A view on the vocabulary is of one site; the table has {sites}.")
    if missing := [index for index in subcomponents or () if index not in found]:
        raise ValueError(f"The table has no subcomponents {missing} of {sites[0]}; it has {found}.")
    choices = {}
    for index in found if subcomponents is None else subcomponents:
        panels = []
        for side in ("raised", "lowered"):
            own = rows[(rows["subcomponent"] == index) & (rows["side"] == side)].sort_values("rank")
            lines = [[visible(r.text).replace(" ", "·"), round(float(r.effect), DIGITS)] for r in own.itertuples()]
            props = {"columns": ["token", "effect"], "rows": lines, "digits": DIGITS}
            panels.append(Panel("Table", props, f"Logits {side} by subcomponent {index}"))
        choices[str(index)] = panels
    return View(
        f"Direct effect on the vocabulary of {sites[0]}",
        choices,
        note="Logits per unit of length written, relative to the mean over the vocabulary, where the inner activation is "
        "positive (where it is negative, the signs turn). Only the direct path to the unembedding. A dot (·) is a space.",
        picker="Subcomponent:",
        row=True,
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def rounded(values: Tensor) -> list:
    """``values`` as nested lists of numbers rounded to ``DIGITS`` decimals."""
    return torch.round(values.detach().double().cpu(), decimals=DIGITS).tolist()


def one_prompt(
    tokens: Sequence[str], importances: Mapping[str, Tensor], site: str, prompt: int
) -> Float[Tensor, "pos C"]:
    """One sequence's importances at ``site``, after checking that ``tokens`` are its texts."""
    if site not in importances:
        raise ValueError(f"There are no importances of {site!r}, only of {list(importances)}.")
    g = importances[site].detach()
    if not 0 <= prompt < g.shape[0]:
        raise IndexError(f"prompt must be 0 to {g.shape[0] - 1}, found {prompt}.")
    check_tokens(tokens, g.shape[1], f"the importances of {site}")
    if not bool(torch.isfinite(g[prompt]).all()):
        raise ValueError(f"The importances of {site} are not all finite; there is nothing to colour tokens by.")
    return g[prompt]


def check_tokens(tokens: Sequence[str], positions: int, what: str) -> None:
    """ValueError where ``tokens`` is not a list of ``positions`` texts."""
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"tokens must be a list of texts, one per position; found {tokens!r}. See model.to_str_tokens."
        )
    if len(tokens) != positions:
        raise ValueError(f"There are {len(tokens)} tokens, but {what} are of {positions} positions.")


def _indices(site: str, indices: Sequence[int], C: int) -> list[int]:
    if outside := [index for index in indices if index not in range(C)]:
        raise IndexError(f"{site} has subcomponents 0 to {C - 1}; found {outside}.")
    return list(dict.fromkeys(indices))
