"""Plots to hover over, drawn by plotly: each returns a plotly ``Figure``; ``figure.write_html(path)`` saves it for offline use.

They take importances and DataFrames of the library and measure nothing. Approximations: none.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from tl_spd.checks import check_shares
from tl_spd.views.frames import BLACK, COLORS, checked, graph_objects
from tl_spd.views.tokens import one_prompt, rounded
from tl_spd.views.view import LABEL, short, visible

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon")
FILLS = ("", "-open", "-dot", "-open-dot")
"""Endings of a symbol, where the colours do not suffice."""


def plot_importance(
    tokens: Sequence[str],
    importances: Mapping[str, Float[Tensor, "batch pos C"]],
    site: str,
    prompt: int = 0,
    threshold: float = 0.0,
) -> Any:
    """Importances of a site's subcomponents on one prompt as a heatmap, position x subcomponent.

    Subcomponents are sorted by the position where they are most important, those most important there first; those that
    are never above ``threshold`` are left out.

    Args:
        tokens: the prompt's tokens as texts.
        importances: of :meth:`~tl_spd.run.Run.importances`.
        prompt: which sequence of the batch the tokens are.

    Raises:
        ValueError: an unknown site, tokens that do not fit, no subcomponent above the threshold.
        IndexError: a prompt that does not exist.
        ImportError: plotly is missing.
    """
    check_shares("threshold", [threshold])
    go = graph_objects()
    g = one_prompt(tokens, importances, site, prompt)
    most, where = g.max(0)
    active = (most > threshold).nonzero()[:, 0].tolist()
    if not active:
        raise ValueError(
            f"No subcomponent of {site} has an importance above {threshold:g} on this prompt; lower threshold=."
        )
    order = sorted(active, key=lambda index: (int(where[index]), -float(most[index]), index))
    texts = [f"position {i}: {_text(token)}" for i, token in enumerate(tokens)]
    heat = go.Heatmap(
        z=rounded(g[:, order].T),
        x=[f"{_text(short(visible(token), LABEL))} ({i})" for i, token in enumerate(tokens)],
        y=[str(index) for index in order],
        customdata=[texts] * len(order),
        zmin=0,
        zmax=1,
        colorscale="Cividis",
        colorbar={"title": "importance"},
        hovertemplate="subcomponent %{y}<br>%{customdata}<br>importance %{z}<extra></extra>",
    )
    figure = go.Figure(heat)
    # Of categories plotly leaves out the labels for which there is no room.
    figure.update_xaxes(title="token (position)", type="category", tickangle=-50)
    figure.update_yaxes(title="subcomponent", type="category", autorange="reversed", dtick=1)
    title = f"Importances of {site}<br>{len(order)} of {g.shape[1]} subcomponents above {threshold:g}"
    height = 240 + 14 * max(len(order), 8)
    figure.update_layout(title=title, template="simple_white", height=height)
    return figure


def plot_patching(table: pd.DataFrame, token_texts: Mapping[int, str] | None = None) -> Any:
    """Effects of a site's subcomponents patched together against TransformerLens's patch of the site, one point per place.

    On the dashed diagonal the two are equal. Colours are kinds of sites; symbols are ``k`` where the table has several.

    Args:
        table: of :func:`tl_spd.analysis.patching.compare_whole_sites` or ``joint_shares`` (its ``k`` is shown too).
        token_texts: token -> text, for the hover labels; default the tokens' numbers.

    Raises:
        ValueError: a table of another kind, or an empty one.
        ImportError: plotly is missing.
    """
    go = graph_objects()
    columns = ["site", "position", "token", "corrupted_token", "joint_effect", "tl_effect"]
    checked(table, columns, "tl_spd.analysis.patching.compare_whole_sites or joint_shares")
    named = {
        int(t): _text(str((token_texts or {}).get(int(t), t))) for t in pd.concat([table.token, table.corrupted_token])
    }
    both = pd.concat([table["tl_effect"], table["joint_effect"]])
    ends = [float(both.min()), float(both.max())]
    figure = go.Figure(go.Scatter(x=ends, y=ends, mode="lines", line={"color": BLACK, "dash": "dash"}, name="equal"))
    groups = ["kind", "k"] if "k" in table.columns else ["kind"]
    rows_of = table.assign(kind=table["site"].str.rpartition(".")[2])
    kinds, turns = ({value: i for i, value in enumerate(rows_of[name].unique())} for name in (groups[0], groups[-1]))
    for name, rows in rows_of.groupby(groups, sort=False):
        labels = [
            f"{r.site}<br>position {r.position}: {named[r.token]} (corrupted: {named[r.corrupted_token]})"
            for r in rows.itertuples()
        ]
        points = go.Scatter(
            x=rows["tl_effect"].tolist(),
            y=rows["joint_effect"].tolist(),
            mode="markers",
            marker=_marker(kinds[name[0]], turns[name[-1]] if len(turns) > 1 else kinds[name[0]]),
            name=", k ".join(str(part) for part in name),
            text=labels,
            hovertemplate="%{text}<br>TransformerLens %{x:.4g}<br>subcomponents %{y:.4g}<extra></extra>",
        )
        figure.add_trace(points)
    figure.update_xaxes(title="effect of TransformerLens's patch<br>(units of the metric)", constrain="domain")
    figure.update_yaxes(
        title="effect of the subcomponents<br>(units of the metric)", constrain="domain", scaleanchor="x"
    )
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}
    title = "Patching: subcomponents<br>against the whole site"
    figure.update_layout(title=title, template="simple_white", height=620, legend=legend)
    return figure


def _marker(kind: int, symbol: int) -> dict[str, Any]:
    """The marker of a series; no two look the same up to 14 kinds with 20 symbols each."""
    turn = (kind // len(COLORS) + 2 * (symbol // len(SYMBOLS))) % len(FILLS)
    shape = SYMBOLS[symbol % len(SYMBOLS)] + FILLS[turn]
    return {"color": COLORS[kind % len(COLORS)], "symbol": shape, "size": 9, "opacity": 0.8}


def _text(token: str) -> str:
    """A token for plotly, which reads texts as HTML."""
    return html.escape(visible(token), quote=False)
