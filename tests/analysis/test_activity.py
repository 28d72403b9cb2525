"""Counts of active subcomponents, by hand."""

from __future__ import annotations

import pytest
import torch

from tl_spd.analysis.activity import (
    active_by_position,
    l0,
    l0_by_site,
    one_hot_positions,
    subcomponent_activity,
    top_examples,
    unique_subcomponents,
    unique_to_prompts,
)
from tl_spd.importance import Importances

# Two sequences of two tokens, three subcomponents.
TOKENS = torch.tensor([[7, 8], [9, 8]])
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


def test_l0_by_site_counts_at_every_threshold_and_sums_the_sites() -> None:
    two = {"a": G["a"], "b": G["a"][..., 2:]}  # b: active at three of four tokens
    table = l0_by_site(two, thresholds=(0.0, 0.1)).set_index(["threshold", "site"]).l0
    wanted = {
        (0.0, "a"): 1.25,
        (0.0, "b"): 0.75,
        (0.0, "all"): 2.0,
        (0.1, "a"): 1.0,
        (0.1, "b"): 0.75,
        (0.1, "all"): 1.75,
    }
    assert table.to_dict() == wanted
    assert l0_by_site(two, torch.tensor([[True, False], [True, False]]), (0.0,)).l0.tolist() == [2.0, 1.0, 3.0]


def test_frequency_and_mean_importance_by_hand() -> None:
    table = subcomponent_activity(G, thresholds=(0.0, 0.1))
    by = table.set_index(["threshold", "subcomponent"])
    assert by.frequency.to_dict() == {
        (0.0, 0): 0.25,
        (0.0, 1): 0.25,
        (0.0, 2): 0.75,
        (0.1, 0): 0.25,
        (0.1, 1): 0.0,
        (0.1, 2): 0.75,
    }
    assert by.mean_importance[0.1].tolist() == pytest.approx([0.2 / 4, 0.05 / 4, 2.3 / 4])
    padded = subcomponent_activity(G, torch.tensor([[True, True], [True, False]]), (0.0,))
    assert padded.frequency.tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert padded.mean_importance.tolist() == pytest.approx([0.2 / 3, 0.05 / 3, 2 / 3])


def test_top_examples_are_sorted_cut_and_only_where_active() -> None:
    def rows(**changes: object) -> list[tuple]:
        table = top_examples(G, TOKENS, **changes)
        assert table.columns.tolist() == ["site", "subcomponent", "rank", "prompt", "position", "token", "value"]
        return [(*row[1:6], round(row[6], 6)) for row in table.itertuples(index=False)]

    first, second = (0, 0, 1, 0, 9, 0.2), (1, 0, 0, 0, 7, 0.05)
    third = [
        (2, 0, 0, 0, 7, 1.0),
        (2, 1, 1, 0, 9, 1.0),
        (2, 2, 1, 1, 8, 0.3),
    ]  # of equal values the first prompt is first
    assert rows() == [first, second, *third]
    assert rows(k=2, threshold=0.1) == [first, *third[:2]]
    assert rows(real=torch.tensor([[False, True], [True, True]])) == [
        first,
        (2, 0, *third[1][2:]),
        (2, 1, *third[2][2:]),
    ]
    with pytest.raises(ValueError, match="k must be at least 1 example, found 0"):
        rows(k=0)
    with pytest.raises(ValueError, match=r"a: importances of shape \(2, 2, 3\) are not those of tokens \(1, 2\)"):
        top_examples(G, TOKENS[:1])


def test_top_examples_of_equal_importance_are_sorted_by_what_was_cut_off() -> None:
    g = Importances({"a": torch.tensor([[[1.5], [3.0]], [[0.5], [2.0]]])})
    assert top_examples(g, TOKENS).value.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert top_examples(g, TOKENS).token.tolist() == [8, 8, 7, 9]  # 3 of prompt 0, 2 of prompt 1, 1.5, 0.5
    assert top_examples(g, TOKENS).prompt.tolist() == [0, 1, 0, 1]


def test_unique_to_prompts_needs_activity_on_one_prompt_alone() -> None:
    # subcomponent 0 only on prompt 1, 1 only on prompt 0, 2 on both
    table = unique_to_prompts(G, TOKENS)
    assert table.columns.tolist() == ["prompt", "position", "token", "site", "subcomponent", "value"]
    assert [row[:5] for row in table.itertuples(index=False)] == [(0, 0, 7, "a", 1), (1, 0, 9, "a", 0)]
    assert table.value.tolist() == pytest.approx([0.05, 0.2])
    without_first = torch.tensor([[False, True], [True, True]])  # then 2 is active on prompt 1 alone, at two tokens
    table = unique_to_prompts(G, TOKENS, without_first)
    assert list(zip(table.position, table.subcomponent, strict=True)) == [(0, 0), (0, 2), (1, 2)]
    assert unique_to_prompts(G, TOKENS, threshold=1.0).empty


def test_places_are_whole_numbers_also_where_a_site_is_never_active() -> None:
    g = {"a": torch.zeros(1, 2, 3), "b": torch.tensor([[[0.5], [0.0]]])}
    table = unique_to_prompts(g, torch.tensor([[7, 8]]))
    assert table.to_dict("records") == [
        {"prompt": 0, "position": 0, "token": 7, "site": "b", "subcomponent": 0, "value": 0.5}
    ]
    assert {str(table[name].dtype) for name in ("prompt", "position", "token", "subcomponent")} == {"int64"}
