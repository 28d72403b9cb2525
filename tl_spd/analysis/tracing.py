"""Causal tracing: which states carry a fact, found by restoring them one at a time in a corrupted pass.

1. The clean pass runs once; the states to be restored are kept: the residual stream behind each layer, MLP outputs,
   attention outputs.
2. Corrupted passes: to the token embeddings at the subject's positions (before positions are added) Gaussian noise is
   added, of ``noise`` times the standard deviation of the token embedding matrix ``W_E`` (around its mean, over all its
   ``d_vocab x d_model`` entries). The same draws serve every restoration.
3. A restored pass is the corrupted one with one position's clean state put back: the residual stream behind one layer, or
   the MLP (attention) outputs of a window of layers around it. Effect: P(answer | restored) - P(answer | corrupted).
4. A pass restored at layer l equals the corrupted one before l: it begins there, on the corrupted states. Positions and
   draws are stacked along the batch.

Source: Meng et al. 2022 (ROME), which scales the noise by the spread of subjects' embeddings over a data set of facts; here
the whole matrix is used, so that the noise is the same for every prompt. Approximations: none beyond sampling noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.analysis.passes import Passes, rows_of
from tl_spd.analysis.prompts import Prompt, as_prompts, mean_interval, standing
from tl_spd.checks import check_whole
from tl_spd.sites import (
    EMBEDDING_POINT,
    Hook,
    HookedTransformer,
    embedding_matrix,
    state_kinds,
    state_point,
    text_spans,
    token_texts,
)
from tl_spd.wiring import Start

COLUMNS = ["kind", "layer", "position", "token", "effect", "ci_low", "ci_high", "draws", "p_clean", "p_corrupted"]


def find_subject(model: HookedTransformer, prompt: str, subject: str) -> list[int]:
    """The positions of the tokens that are ``subject`` in ``prompt``, the added first token counted.

    White space in front of the subject may belong to its first token.

    Raises:
        ValueError: the subject is empty, is not in the prompt, is there more than once, or begins or ends inside a token.
    """
    wanted = subject.strip()
    start = prompt.find(wanted) if wanted else -1
    if start < 0:
        raise ValueError(
            f"The subject {subject!r} is not in the prompt {prompt!r}; it is searched for letter by letter."
        )
    if prompt.find(wanted, start + 1) >= 0:
        raise ValueError(f"The subject {subject!r} occurs more than once in {prompt!r}; give the positions you mean.")
    end = start + len(wanted)
    spans = text_spans(model, prompt)
    inside = [i for i, span in enumerate(spans) if span is not None and span[0] < end and span[1] > start]
    pieces = [prompt[slice(*span)] for i in inside if (span := spans[i]) is not None]
    first, last = (spans[inside[0]], spans[inside[-1]]) if inside else (None, None)
    if first is None or last is None or prompt[first[0] : start].strip() or first[0] > start or last[1] != end:
        raise ValueError(
            f"The subject {subject!r} does not begin and end where tokens of {prompt!r} do: the tokens there are {pieces}. "
            "Give a subject of whole tokens, or positions."
        )
    return inside


@torch.no_grad()
def causal_trace(
    model: HookedTransformer,
    prompt: str | Tensor,
    subject: str | Sequence[int],
    answer: int | str,
    *,
    kinds: Sequence[str] | None = None,
    window: int = 10,
    noise: float = 3.0,
    draws: int = 10,
    seed: int = 0,
    max_rows: int = 128,
) -> pd.DataFrame:
    """The effect of restoring every (layer, position) on the probability of ``answer`` behind the prompt.

    Args:
        prompt: a text, or tokens ``[1, pos]``.
        subject: a text that occurs once in a prompt given as text, or positions.
        answer: a token, or a text of one token.
        kinds: of ``"resid"``, ``"mlp"`` and ``"attn"``; default all that the host has.
        window: how many layers' MLP or attention outputs are restored together: from ``layer - window // 2`` on, as far
            as there are layers. 1: that layer alone.
        noise: in standard deviations of the embedding matrix's entries.
        draws: how many noise draws, made from ``seed``.
        max_rows: how many passes are stacked at most.

    Returns:
        One row per kind, layer and position: ``kind, layer, position, token`` (as text), ``effect`` (mean over draws),
        ``ci_low, ci_high`` (its 95% interval over draws, Student's t; nan for one draw), ``draws, p_clean, p_corrupted``
        (the answer's probability, corrupted: mean over draws). The host's own hooks take no part.

    Raises:
        ValueError: a prompt, subject, answer or kind that does not fit the host, or a number out of its range.
    """
    own = state_kinds(model)
    chosen = own if kinds is None else tuple(kinds)
    if unknown := [kind for kind in chosen if kind not in own]:
        raise ValueError(f"kinds={list(chosen)}: this host has no states of kind {unknown[0]!r}; it has {list(own)}.")
    check_whole(window=window, draws=draws, seed=seed, max_rows=max_rows)
    if min(window, draws, max_rows) < 1 or not 0 < noise < math.inf:
        raise ValueError(
            f"window, draws and max_rows must be at least 1 and noise above 0; found {window}, {draws}, {max_rows}, {noise}."
        )
    asked = as_prompts(model, [prompt], [answer])[0]
    positions = _positions(model, prompt, subject, asked)
    trace = _Trace(Passes(model), asked, noise_draws(model, len(positions), draws, noise, seed), positions, max_rows)
    rows = []
    names = token_texts(model, asked.tokens[0])
    for kind in chosen:
        for layer in range(trace.passes.layers):
            around = range(max(0, layer - window // 2), min(trace.passes.layers, layer + (window + 1) // 2))
            effects = trace.effects(kind, [layer] if kind == "resid" else list(around))
            spread = zip(*(numbers.tolist() for numbers in mean_interval(effects)), strict=True)
            end = draws, trace.p_clean, trace.p_corrupted.mean().item()
            rows += [(kind, layer, i, names[i], *numbers, *end) for i, numbers in enumerate(spread)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _positions(
    model: HookedTransformer, prompt: str | Tensor, subject: str | Sequence[int], asked: Prompt
) -> list[int]:
    if isinstance(subject, str):
        if not isinstance(prompt, str):
            raise ValueError(f"The subject {subject!r} is text and the prompt is tokens; give the subject's positions.")
        return find_subject(model, prompt, subject)
    check_whole(**{f"subject[{index}]": place for index, place in enumerate(subject)})
    length = asked.tokens.shape[1]
    if not subject or sorted(set(subject)) != sorted(subject) or not 0 <= min(subject) <= max(subject) < length:
        raise ValueError(f"subject={list(subject)}: wanted one or more different positions of 0 to {length - 1}.")
    return list(subject)


def noise_draws(
    model: HookedTransformer, count: int, draws: int, noise: float, seed: int
) -> Float[Tensor, "draw subject d_model"]:
    """What is added to the embeddings of the subject's ``count`` tokens; it depends on the host, the seed and the shape."""
    W_E = embedding_matrix(model)
    wide = torch.promote_types(W_E.dtype, torch.float32)
    drawn = torch.randn((draws, count, W_E.shape[1]), generator=torch.Generator().manual_seed(seed), dtype=wide)
    return (drawn.to(W_E.device) * (noise * W_E.to(wide).std(correction=0))).to(W_E.dtype)


class _Trace:
    """The clean states and the corrupted passes of one prompt, and passes with some of the first put into the second."""

    def __init__(self, passes: Passes, prompt: Prompt, noise: Tensor, positions: list[int], max_rows: int):
        self.passes, self.max_rows = passes, max_rows
        self.answer = torch.tensor([prompt.answer], device=prompt.tokens.device)
        self.draws, self.length = noise.shape[0], prompt.tokens.shape[1]
        self.clean: dict[str, Tensor] = {}  # hook point -> [1, pos, d_model]
        points = [state_point(kind, layer) for kind in state_kinds(passes.twin) for layer in range(passes.layers)]
        start = passes.record(prompt.tokens, [(point, self._keep) for point in points])
        self.p_clean = self._p(passes.resume(passes.layers, start[-1])).item()

        def corrupt(value: Tensor, hook: Any) -> Tensor:
            corrupted = value.clone()
            corrupted[:, positions] += noise
            return corrupted

        tokens = prompt.tokens.repeat(self.draws, 1)
        self.corrupted = passes.record(tokens, [(EMBEDDING_POINT, corrupt)])
        self.p_corrupted = self._p(passes.resume(passes.layers, self.corrupted[-1]))

    def _keep(self, value: Tensor, hook: Any) -> None:
        self.clean[hook.name] = value

    def _p(self, logits: Float[Tensor, "rows d_vocab"]) -> Float[Tensor, "rows"]:
        return standing(logits, self.answer.expand(logits.shape[0]))[0].exp()

    def effects(self, kind: str, layers: list[int]) -> Float[Tensor, "pos draw"]:
        """P(answer | restored) - P(answer | corrupted), with the states of ``layers`` restored at one position."""
        rows = torch.arange(self.length * self.draws, device=self.answer.device)
        found = [
            self._restored(kind, layers, part // self.draws, part % self.draws) for part in rows.split(self.max_rows)
        ]
        return torch.cat(found).reshape(self.length, self.draws) - self.p_corrupted

    def _restored(
        self, kind: str, layers: list[int], at: Int[Tensor, "rows"], draw: Int[Tensor, "rows"]
    ) -> Float[Tensor, "rows"]:
        """P(answer) of rows that are corrupted with the noise ``draw`` and restored at position ``at``."""
        if kind == "resid":
            begin = layers[0] + 1
            start = rows_of(self.corrupted[begin], draw)
            resid = self._put(start.resid, state_point(kind, layers[0]), at)
            return self._p(self.passes.resume(begin, Start(resid, start.shortformer_positions, start.attention_mask)))
        hooks: list[Hook] = [
            (state_point(kind, layer), lambda value, hook: self._put(value, hook.name, at)) for layer in layers
        ]
        return self._p(self.passes.resume(layers[0], rows_of(self.corrupted[layers[0]], draw), hooks))

    def _put(self, value: Float[Tensor, "rows pos d_model"], point: str, at: Int[Tensor, "rows"]) -> Tensor:
        restored = value.clone()
        restored[torch.arange(at.shape[0], device=at.device), at] = self.clean[point][0, at]
        return restored
