"""Zero-out sweep: one whole MLP or attention layer's output replaced by zero, layer by layer.

1. Each prompt runs once; the state with which every block begins is kept.
2. For every layer the rest of the pass is run again from that layer, with the layer's MLP (or attention) output, its bias
   included, replaced by zero at all positions.

Source: the paper on transformers, appendix on facts. Approximations: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_spd.analysis.passes import Passes
from tl_spd.analysis.prompts import as_prompts, equal_lengths, standing
from tl_spd.sites import HookedTransformer, state_kinds, state_point

COLUMNS = ["kind", "layer", "prompt", "answer", "p_before", "p_after", "logp", "rank"]


def zero_out(
    model: HookedTransformer,
    prompts: Sequence[str | Tensor],
    answers: Sequence[int | str],
    kinds: Sequence[str] | None = None,
    max_rows: int = 64,
) -> pd.DataFrame:
    """What each layer's MLP and attention do for the answers of ``prompts``.

    Args:
        prompts: texts or tokens ``[1, pos]``.
        answers: each prompt's answer, a token or a text of one token.
        kinds: of ``"mlp"`` and ``"attn"``; default all that the host has. The host's own hooks take no part.
        max_rows: how many prompts of one length run together at most.

    Returns:
        One row per kind, layer and prompt: ``kind, layer, prompt, answer`` (token), ``p_before`` and ``p_after`` (the
        answer's probability), ``logp`` (nats) and ``rank`` (1: most probable) with the output at zero.

    Raises:
        ValueError: prompts that do not fit the host, or a kind that it does not have.
    """
    own = [kind for kind in state_kinds(model) if kind != "resid"]
    if unknown := [kind for kind in kinds or () if kind not in own]:
        raise ValueError(f"kinds={list(kinds or ())}: this host has no layers of kind {unknown[0]!r}; it has {own}.")
    asked, passes = as_prompts(model, prompts, answers), Passes(model)
    rows: list[tuple[str, int, str, int, float, float, float, int]] = []
    for group, tokens, answer in equal_lengths(asked, max_rows):
        starts = passes.record(tokens)
        before = standing(passes.resume(passes.layers, starts[-1]), answer)[0].exp().tolist()
        for kind in own if kinds is None else kinds:
            for layer in range(passes.layers):
                log_p, ranks = standing(
                    passes.resume(layer, starts[layer], [(state_point(kind, layer), _zero)]), answer
                )
                found = zip(group, before, log_p.exp().tolist(), log_p.tolist(), ranks.tolist(), strict=True)
                rows += [(kind, layer, asked[i].name, asked[i].answer, *numbers) for i, *numbers in found]
    return pd.DataFrame(rows, columns=COLUMNS)


def _zero(value: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(value)
