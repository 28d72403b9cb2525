"""Attention patterns of the original beside those of the decomposed model, with their difference, head by head.

Shown with circuitsvis' ``AttentionPattern``. Source: the paper on transformers compares patterns in this way.
Approximations: values are rounded to four decimals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tl_spd.views.frames import BLUE, ORANGE
from tl_spd.views.tokens import DIGITS, check_tokens, rounded
from tl_spd.views.view import LABEL, Panel, View, harmless, short, visible


def show_attention(
    tokens: Sequence[str],
    original: Mapping[int, Tensor],
    decomposed: Mapping[int, Tensor],
    prompt: int = 0,
) -> View:
    """Three patterns per head, picked by layer and head: original, decomposed model, and what the second has more.

    The head that differs most is shown first.

    Args:
        tokens: the prompt's tokens as texts.
        original, decomposed: layer -> pattern ``[batch, head, query, key]``, of :func:`tl_spd.wiring.attention_patterns`, or
            ``{0: cache["pattern", 0]}`` of two caches; the same layers in both.
        prompt: which sequence of the batch the tokens are.

    Raises:
        ValueError: no layers, other layers or shapes in one than in the other, tokens that do not fit.
        IndexError: a prompt that does not exist.
    """
    choices, differences = {}, {}
    for layer in _layers(original, decomposed):
        for head, (ours, theirs) in enumerate(_pair(tokens, original[layer], decomposed[layer], layer, prompt)):
            most = round(float((ours - theirs).abs().max()), DIGITS)
            differences[f"layer {layer}, head {head}"] = most
            colours = f"orange −{most:.2g}, blue +{most:.2g}" if most else "none in four decimals"
            choices[f"layer {layer}, head {head}"] = [
                _pattern(theirs, 1.0, f"Original, layer {layer}, head {head} (0 to 1)"),
                _pattern(ours, 1.0, "Decomposed model (0 to 1)"),
                _pattern(ours - theirs, most or 1.0, f"Difference ({colours})"),
            ]
    return View(
        "Attention patterns",
        choices,
        note="Rows: the token that attends; columns: the token attended to; numbers behind tokens: positions. Difference: the "
        "decomposed model minus the original.",
        picker="Head:",
        first=max(differences, key=lambda name: differences[name]),
        shared={
            "tokens": [harmless(short(visible(token), LABEL)) for token in tokens],
            "positiveColor": BLUE,
            "negativeColor": ORANGE,
        },
        row=True,
    )


def _layers(original: Mapping[int, Tensor], decomposed: Mapping[int, Tensor]) -> list[int]:
    layers, others = sorted(original), sorted(decomposed)
    if not layers or layers != others:
        raise ValueError(f"Give the same layers, at least one, of both models; found {layers} and {others}.")
    return layers


def _pair(
    tokens: Sequence[str], original: Tensor, decomposed: Tensor, layer: int, prompt: int
) -> list[tuple[Tensor, Tensor]]:
    """For every head the decomposed model's and the original's pattern on the prompt, ``[query, key]``."""
    shape = original.shape
    if shape != decomposed.shape or len(shape) != 4 or shape[2] != shape[3]:
        raise ValueError(
            f"Layer {layer}: patterns must be of one shape [batch, head, pos, pos], found {tuple(shape)} and "
            f"{tuple(decomposed.shape)}."
        )
    if not 0 <= prompt < shape[0]:
        raise IndexError(f"prompt must be 0 to {shape[0] - 1}, found {prompt}.")
    check_tokens(tokens, shape[2], f"the patterns of layer {layer}")
    both = decomposed[prompt].detach(), original[prompt].detach()
    if not all(bool(torch.isfinite(pattern).all()) for pattern in both):
        raise ValueError(f"Layer {layer}: the patterns have entries that are not finite.")
    return list(zip(*both, strict=True))


def _pattern(values: Tensor, most: float, title: str) -> Panel:
    props = {"attention": rounded(values), "minValue": -most, "maxValue": most, "zoomed": True}
    return Panel("AttentionPattern", props, title)
