"""Plotly figures: their data against importances and tables, and their texts as plotly reads them."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd
import pytest
import torch

from tests.views.pages import NASTY, VISIBLE, importances
from tl_spd.views import plot_importance, plot_patching


def test_the_heatmap_sorts_subcomponents_by_where_they_matter() -> None:
    g = torch.tensor([[[0.2, 0.0, 0.9, 0.0, 0.3], [0.1, 0.7, 0.9, 0.05, 0.6], [0.3, 0.0, 0.0, 0.0, 0.8]]])
    (heat,) = plot_importance(["a", "b", "c"], {"s": g}, "s", threshold=0.05).data
    assert list(heat.y) == ["2", "1", "4", "0"]  # at a; at b; at c, 0.8 before 0.3; subcomponent 3 is never above 0.05
    assert [list(row) for row in heat.z] == [[0.9, 0.9, 0], [0, 0.7, 0], [0.3, 0.6, 0.8], [0.2, 0.1, 0.3]]
    assert (heat.zmin, heat.zmax) == (0, 1)


def test_tokens_mean_themselves_to_plotly() -> None:
    figure = plot_importance(NASTY, importances(), "a", prompt=1)
    for row in figure.data[0].customdata:
        assert [html.unescape(text) for text in row] == [f"position {i}: {text}" for i, text in enumerate(VISIBLE)]
        assert not any("<" in text for text in row)
    ticks = figure.data[0].x
    assert not any("<" in text for text in ticks)
    assert html.unescape(ticks[1]) == "The (1)"
    assert len(set(ticks)) == len(NASTY)  # none stands for two positions
    assert figure.layout.xaxis.tickvals is None  # plotly leaves out what would overlap


def test_a_prompt_without_active_subcomponents_is_refused() -> None:
    with pytest.raises(ValueError, match="No subcomponent of a has an importance above 1 "):
        plot_importance(NASTY, importances(), "a", threshold=1.0)


def patching(**more: Any) -> pd.DataFrame:
    columns = {"site": ["blocks.0.attn.W_Q", "blocks.1.attn.W_Q", "blocks.0.mlp.W_in"], "position": [0, 1, 1]}
    effects = {"joint_effect": [0.5, -1.0, 2.0], "tl_effect": [0.4, -1.1, 2.2]}
    return pd.DataFrame({**columns, "token": [3, 4, 4], "corrupted_token": [5, 4, 6], **effects, **more})


def test_patching_points_lie_at_transformerlens_and_our_effect() -> None:
    equal, queries, inputs = plot_patching(patching(), {3: "<b>", 5: "x"}).data
    assert list(equal.x) == list(equal.y) == [-1.1, 2.2]
    assert (list(queries.x), list(queries.y)) == ([0.4, -1.1], [0.5, -1.0])
    assert (list(inputs.x), list(inputs.y)) == ([2.2], [2.0])
    assert queries.text[0] == "blocks.0.attn.W_Q<br>position 0: &lt;b&gt; (corrupted: x)"
    assert inputs.text[0] == "blocks.0.mlp.W_in<br>position 1: 4 (corrupted: 6)"
    assert (queries.name, inputs.name) == ("W_Q", "W_in")
    assert queries.marker.symbol != inputs.marker.symbol  # told apart without colour
    with_k = plot_patching(patching(k=[1, 2, 1])).data
    assert [trace.name for trace in with_k] == ["equal", "W_Q, k 1", "W_Q, k 2", "W_in, k 1"]


@pytest.mark.parametrize(("kinds", "ks"), [(3, 3), (12, 1), (14, 20)])
def test_no_two_series_look_the_same(kinds: int, ks: int) -> None:
    rows = pd.DataFrame({"site": f"blocks.0.w{i}", "k": k} for i in range(kinds) for k in range(ks))
    table = rows.assign(position=0, token=1, corrupted_token=2, joint_effect=0.5, tl_effect=0.4)
    series = plot_patching(table).data[1:]
    assert len({(one.marker.color, one.marker.symbol) for one in series}) == len(series) == kinds * ks
    if (kinds, ks) == (3, 3):
        looks = {tuple(one.name.split(", k ")): one.marker for one in series}
        assert all(looks["w1", k].color == looks["w1", "0"].color != looks["w2", k].color for k in "012")
        assert all(looks[kind, "1"].symbol == looks["w0", "1"].symbol for kind in ("w0", "w1", "w2"))


def test_both_axes_of_patching_have_one_scale() -> None:
    axes = plot_patching(patching()).layout
    assert (axes.yaxis.scaleanchor, axes.yaxis.scaleratio or 1) == ("x", 1)


def test_tables_that_are_not_of_patching_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \['tl_effect'\].*compare_whole_sites or joint_shares makes"):
        plot_patching(patching().drop(columns="tl_effect"))
    with pytest.raises(ValueError, match="no rows"):
        plot_patching(patching()[:0])
