"""The attention view against patterns of a host and of its decomposition, taken from TransformerLens's own caches."""

from __future__ import annotations

import pytest
import torch

import tl_spd as spd
from tests.tiny import tiny_host, tiny_run, tiny_tokens
from tests.views.pages import data_of, panels
from tl_spd.views import show_attention

TOKENS = ["<b>", "two", "a very long token, cut", "\n", "five"]


def patterns() -> list[dict[int, torch.Tensor]]:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*.attn.W_Q")
    _, original = model.run_with_cache(tokens)
    with spd.decomposed(model, run):
        _, decomposed = model.run_with_cache(tokens)
    return [{layer: cache["pattern", layer] for layer in range(2)} for cache in (original, decomposed)]


def test_three_panels_per_head_hold_the_two_patterns_and_their_difference() -> None:
    original, decomposed = patterns()
    view = show_attention(TOKENS, original, decomposed, prompt=1)
    found = panels(view)
    assert list(found) == [f"layer {layer}, head {head}" for layer in range(2) for head in range(2)]
    for layer in range(2):
        for head in range(2):
            shown = [torch.tensor(panel["props"]["attention"]) for panel in found[f"layer {layer}, head {head}"]]
            first, second = (pattern[layer][1, head].float() for pattern in (original, decomposed))
            for values, wanted in zip(shown, (first, second, second - first), strict=True):
                torch.testing.assert_close(values, wanted, atol=5.1e-5, rtol=0)
    assert data_of(view)["shared"]["tokens"] == ["<\u2060b>", "two", "a very long t…", r"\n", "five"]


def test_the_differences_colours_reach_to_its_largest_entry_as_its_title_says() -> None:
    one = torch.eye(2).expand(1, 1, 2, 2).contiguous()
    other = one.clone()
    other[0, 0, 1] = torch.tensor([0.25, 0.75])
    _, shown, difference = panels(show_attention(["a", "b"], {3: one}, {3: other}))["layer 3, head 0"]
    assert difference["props"]["attention"] == [[0, 0], [0.25, -0.25]]
    assert (difference["props"]["minValue"], difference["props"]["maxValue"]) == (-0.25, 0.25)
    assert difference["title"] == "Difference (orange −0.25, blue +0.25)"
    assert shown["props"]["maxValue"] == 1
    same = panels(show_attention(["a", "b"], {3: one}, {3: one}))["layer 3, head 0"][2]
    assert same["props"]["maxValue"] > 0  # colours divide by it
    assert same["title"] == "Difference (none in four decimals)"


def test_the_head_that_differs_most_is_shown_first() -> None:
    original = {layer: torch.full((1, 2, 2, 2), 0.5) for layer in (0, 3)}
    decomposed = {layer: pattern.clone() for layer, pattern in original.items()}
    assert data_of(show_attention(["a", "b"], original, decomposed))["first"] == 0
    decomposed[0][0, 1, 1, 0] += 0.1
    decomposed[3][0, 0, 1, 0] -= 0.2
    data = data_of(show_attention(["a", "b"], original, decomposed))
    assert data["choices"][data["first"]]["label"] == "layer 3, head 0"


def test_what_does_not_fit_is_refused() -> None:
    original, decomposed = patterns()
    with pytest.raises(ValueError, match=r"found \[0, 1\] and \[1\]"):
        show_attention(TOKENS, original, {1: decomposed[1]})
    with pytest.raises(ValueError, match="at least one"):
        show_attention(TOKENS, {}, {})
    with pytest.raises(ValueError, match=r"Layer 0: .* found \(3, 2, 5, 5\) and \(3, 1, 5, 5\)"):
        show_attention(TOKENS, original, {layer: p[:, :1] for layer, p in decomposed.items()})
    with pytest.raises(ValueError, match=r"\[batch, head, pos, pos\]"):
        show_attention(TOKENS, {0: original[0][0]}, {0: decomposed[0][0]})
    with pytest.raises(ValueError, match="4 tokens, but the patterns of layer 0 are of 5"):
        show_attention(TOKENS[:4], original, decomposed)
    with pytest.raises(IndexError, match="prompt must be 0 to 2, found 3"):
        show_attention(TOKENS, original, decomposed, prompt=3)
    with pytest.raises(ValueError, match="not finite"):
        show_attention(TOKENS, original, {layer: p / 0 for layer, p in decomposed.items()})
