"""Counts of active subcomponents, by hand."""

from __future__ import annotations

import pytest
import torch

from tl_spd.analysis.activity import active_by_position, l0, one_hot_positions, unique_subcomponents

# Two sequences of two tokens, three subcomponents.
G = {"a": torch.tensor([[[0.0, 0.05, 1.0], [0.0, 0.0, 0.0]], [[0.2, 0.0, 1.0], [0.0, 0.0, 0.3]]])}


def test_active_by_position_counts_per_named_place() -> None:
    first = one_hot_positions(torch.tensor([0, 0]), 2)
    table = active_by_position(G, {"first": first, "rest": ~first}, thresholds=(0.0, 0.1))
    values = table.set_index(["position", "threshold"]).active.to_dict()
    assert values == {("first", 0.0): 2.0, ("first", 0.1): 1.5, ("rest", 0.0): 0.5, ("rest", 0.1): 0.5}


def test_a_position_that_marks_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'nowhere' marks no token"):
        active_by_position(G, {"nowhere": torch.zeros(2, 2, dtype=torch.bool)})


@pytest.mark.parametrize(("fraction", "wanted"), [(0.0, (3, 2)), (0.25, (1, 1)), (0.75, (0, 0))])
def test_unique_counts_subcomponents_more_frequent_than_the_fraction(fraction: float, wanted: tuple[int, int]) -> None:
    # frequencies above 0: 1/4, 1/4, 3/4; above 0.1: 1/4, 0, 3/4
    table = unique_subcomponents(G, thresholds=(0.0, 0.1), min_fraction=fraction)
    assert tuple(table.unique) == wanted
    assert set(table.C) == {3}
    assert set(table.min_fraction) == {fraction}


def test_padding_is_left_out() -> None:
    real = torch.tensor([[True, False], [True, False]])
    assert l0(G) == {"a": 1.25}
    assert l0(G, real) == {"a": 2.0}
    assert unique_subcomponents(G, real, thresholds=(0.0,), min_fraction=0.9).unique.tolist() == [1]
