"""Views on tokens: what they hand to the browser against the importances and tables they were given."""

from __future__ import annotations

import inspect

import pandas as pd
import pytest
import torch

from tests.tiny import tiny_host, tiny_run, tiny_tokenizer, tiny_tokens
from tests.views.pages import JOINER, NASTY, VISIBLE, data_of, importances, panels
from tl_spd.analysis.activity import top_examples
from tl_spd.analysis.vocabulary import direct_effects
from tl_spd.views import show_active, show_importance, show_top_examples, show_vocabulary


def test_importance_of_chosen_subcomponents_of_one_prompt() -> None:
    g = importances()
    view = show_importance(NASTY, g, {"b": [2, 0, 2], "a": [1]}, prompt=1)
    assert list(panels(view)) == ["b 2", "b 0", "a 1"]
    for label, (panel,) in panels(view).items():
        site, index = label.split()
        assert panel["element"] == "ColoredTokens"
        assert panel["props"]["values"] == pytest.approx(g[site][1, :, int(index)].tolist(), abs=5.1e-5)
    shared = data_of(view)["shared"]
    assert [token.replace(JOINER, "") for token in shared["tokens"]] == VISIBLE
    assert (shared["minValue"], shared["maxValue"]) == (0, 1)


def test_by_default_the_most_important_three_of_every_site_are_shown() -> None:
    g = {
        "s": torch.tensor([[[0.1, 0.9, 0.0, 0.5], [0.1, 0.0, 0.0, 0.5]]]),
        "t": torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]),
    }
    assert list(panels(show_importance(["a", "b"], g))) == ["s 3", "s 1", "s 0", "t 1", "t 0"]  # means 0.5, 0.45, 0.1


@pytest.mark.parametrize("asked", ["blocks.0.mlp.W_in", [0, 1], {"a": 3}])
def test_subcomponents_of_another_type_are_refused(asked: object) -> None:
    bare = inspect.unwrap(show_importance)  # beartype would refuse it first
    with pytest.raises(TypeError, match=r"^Give subcomponents as \{'.*': \[0\]\}, site to indices; found .*\.$"):
        bare(NASTY, importances(), asked)


def test_numbers_are_rounded_to_four_decimals() -> None:
    g = {"s": torch.tensor([[[0.123456789], [1.0]]], requires_grad=True)}
    (panel,) = panels(show_importance(["a", "b"], g, {"s": [0]}))["s 0"]
    assert panel["props"]["values"] == [0.1235, 1.0]


def test_counts_of_active_subcomponents_by_hand() -> None:
    g = {
        "s": torch.tensor([[[0.0, 0.2, 0.9], [0.0, 0.0, 0.1], [0.5, 0.5, 0.5]]]),
        "t": torch.tensor([[[1.0], [0.0], [0.05]]]),
    }
    found = panels(show_active(["a", "b", "c"], g, threshold=0.1))
    assert {name: panel["props"]["values"] for name, (panel,) in found.items()} == {
        "all 2 sites": [3, 0, 3],
        "s": [2, 0, 3],
        "t": [1, 0, 0],
    }
    assert [panel["props"]["maxValue"] for (panel,) in found.values()] == [3, 3, 1]
    assert found["all 2 sites"][0]["title"] == "Active subcomponents of all 2 sites: 0 to 3 of 4; darkest blue: 3"
    assert list(panels(show_active(["a", "b", "c"], g, ["t"]))) == ["t"]
    quiet = panels(show_active(["a", "b", "c"], g, ["t"], threshold=1.0))["t"][0]
    assert (quiet["props"]["values"], quiet["props"]["maxValue"]) == ([0, 0, 0], 1)


def test_top_examples_show_the_tables_tokens_with_what_is_around_them() -> None:
    g, texts = importances(), [NASTY, [f"t{i}" for i in range(len(NASTY))]]
    tokens = torch.arange(2 * len(NASTY)).reshape(2, -1)
    table = top_examples(g, tokens, k=2)
    found = panels(show_top_examples(table, texts, g, "b", window=3))
    rows = table[table["site"] == "b"]
    assert list(found) == ["0", "1", "2"]
    for index, shown in found.items():
        for row, panel in zip(rows[rows["subcomponent"] == int(index)].itertuples(), shown, strict=True):
            first = max(0, row.position - 3)
            token = ([VISIBLE, texts[1]][row.prompt])[row.position]
            assert panel["title"].startswith(
                f"{row.value:.3f} at “{token}”, prompt {row.prompt}, position {row.position}"
            )
            values = panel["props"]["values"]
            assert values[row.position - first] == pytest.approx(row.value, abs=5.1e-5)
            around = g["b"][row.prompt, first : row.position + 4, int(index)]
            assert values == pytest.approx(around.tolist(), abs=5.1e-5)
            wanted = [VISIBLE, texts[1]][row.prompt][first : row.position + 4]
            assert [text.replace(JOINER, "") for text in panel["props"]["tokens"]] == wanted
    assert list(panels(show_top_examples(table, texts, g, "b", [2, 1]))) == ["2", "1"]


def test_direct_effects_stand_in_the_tables_order_with_their_signs() -> None:
    model = tiny_host("gpt2")
    model.set_tokenizer(tiny_tokenizer("right"))
    table = direct_effects(model, tiny_run(model), "blocks.1.mlp.W_out", k=4)
    found = panels(show_vocabulary(table))
    assert list(found) == ["0", "1", "2"]
    for index, (raised, lowered) in found.items():
        own = table[table["subcomponent"] == int(index)]
        for panel, side in ((raised, "raised"), (lowered, "lowered")):
            rows = own[own["side"] == side]
            assert [row[0] for row in panel["props"]["rows"]] == [text.replace(" ", "·") for text in rows["text"]]
            assert [row[1] for row in panel["props"]["rows"]] == pytest.approx(rows["effect"].tolist(), abs=5.1e-5)
            assert side in panel["title"]
    assert list(panels(show_vocabulary(table, [2]))) == ["2"]
    table.loc[0, "text"] = "\t \u202e "
    assert panels(show_vocabulary(table))["0"][0]["props"]["rows"][0][0] == r"\t·\u202e·"


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (dict(tokens="text"), ValueError, "must be a list of texts"),
        (dict(tokens=NASTY[1:]), ValueError, f"{len(NASTY) - 1} tokens, but the importances of a are of {len(NASTY)}"),
        (dict(subcomponents={}), ValueError, "No subcomponent was chosen"),
        (dict(subcomponents={"c": [0]}), ValueError, r"no importances of 'c', only of \['a', 'b'\]"),
        (dict(subcomponents={"a": [0, 3]}), IndexError, r"subcomponents 0 to 2; found \[3\]"),
        (dict(subcomponents={"a": [-1]}), IndexError, r"found \[-1\]"),
        (dict(prompt=2), IndexError, "prompt must be 0 to 1, found 2"),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict, error: type[Exception], message: str) -> None:
    arguments = dict(tokens=NASTY, importances=importances(), subcomponents={"a": [0]}) | asked
    with pytest.raises(error, match=message):
        show_importance(**arguments)


def test_importances_that_are_not_finite_and_no_sites_are_refused() -> None:
    g = importances()
    g["a"][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="not all finite"):
        show_active(NASTY, g)
    with pytest.raises(ValueError, match="No site was chosen"):
        show_active(NASTY, g, [])


def test_tables_that_do_not_fit_are_refused() -> None:
    g, texts = importances(), [NASTY, NASTY]
    table = top_examples(g, tiny_tokens(2, len(NASTY)), k=1)
    with pytest.raises(ValueError, match=r"no examples of 'c'; its sites are \['a', 'b'\]"):
        show_top_examples(table, texts, g, "c")
    with pytest.raises(ValueError, match=r"no examples of a \[7\]"):
        show_top_examples(table, texts, g, "a", [7])
    with pytest.raises(ValueError, match="at least 0 tokens, found -1"):
        show_top_examples(table, texts, g, "a", window=-1)
    with pytest.raises(ValueError, match="examples of prompt 5; tokens were given for 2"):
        show_top_examples(table.assign(prompt=5), texts, g, "a")
    with pytest.raises(ValueError, match=f"position 99; prompt . has {len(NASTY)} tokens"):
        show_top_examples(table.assign(position=99), texts, g, "a")
    with pytest.raises(ValueError, match=r"lacks \['rank'\].*activity.top_examples makes"):
        show_top_examples(table.drop(columns="rank"), texts, g, "a")
    with pytest.raises(ValueError, match=r"no rows.*activity.top_examples makes"):
        show_top_examples(table[:0], texts, g, "a")
    columns = {"site": ["a", "b"], "subcomponent": 0, "side": "raised", "rank": 0, "text": "x", "effect": 1.0}
    both = pd.DataFrame(columns)
    with pytest.raises(ValueError, match=r"of one site; the table has \['a', 'b'\]"):
        show_vocabulary(both)
    with pytest.raises(ValueError, match=r"no subcomponents \[4\] of a; it has \[0\]"):
        show_vocabulary(both[:1], [4])
