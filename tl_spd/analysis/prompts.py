"""Prompts with answers: what the analyses of single facts have in common.

1. A prompt is a text (tokenised by the host, with its first token) or tokens ``[1, pos]``; its answer is one token, which the
   host is to predict behind the last position.
2. Standing of an answer: its log-probability in nats, and its rank (1: no token is more probable).
3. Prompts of equal length are run together, at most ``max_rows`` at once; nothing is padded.
4. A mean over draws has a 95% interval from Student's t.

Approximations: none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.checks import check_finite, check_whole
from tl_spd.sites import HookedTransformer, d_vocab, host_device, n_ctx, one_token, text_tokens


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt: what it is called in tables, its tokens and its answer's token."""

    name: str
    tokens: Int[Tensor, "1 pos"]
    answer: int


def as_prompts(model: HookedTransformer, prompts: Sequence[str | Tensor], answers: Sequence[int | str]) -> list[Prompt]:
    """Prompts as texts or tokens ``[1, pos]``, and answers as tokens or texts of one token, checked against the host.

    A text is called by itself, tokens by their numbers.

    Raises:
        ValueError: no prompts, another number of answers, a wrong shape, a token outside the vocabulary, a prompt longer
            than the host's context, or an answer of several tokens.
    """
    if isinstance(prompts, str) or len(prompts) == 0 or len(prompts) != len(answers):
        found = "one text" if isinstance(prompts, str) else f"{len(prompts)} prompts and {len(answers)} answers"
        raise ValueError(f"Wanted a list of prompts and one answer for each; found {found}.")
    return [_prompt(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _prompt(model: HookedTransformer, prompt: str | Tensor, answer: int | str) -> Prompt:
    name = prompt if isinstance(prompt, str) else " ".join(str(token) for token in prompt.flatten().tolist())
    tokens = text_tokens(model, prompt) if isinstance(prompt, str) else prompt.to(host_device(model))
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"A prompt is a text or tokens [1, pos]; found {tuple(tokens.shape)} {tokens.dtype}.")
    if not 1 <= tokens.shape[1] <= n_ctx(model):
        raise ValueError(f"The prompt {name!r} has {tokens.shape[1]} tokens; this host takes 1 to {n_ctx(model)}.")
    check_whole(answer=None if isinstance(answer, str) else answer)
    number = one_token(model, answer) if isinstance(answer, str) else int(answer)
    if outside := [token for token in [*tokens[0].tolist(), number] if not 0 <= token < d_vocab(model)]:
        raise ValueError(f"Token {outside[0]} of {name!r} is out of the vocabulary of {d_vocab(model)} tokens.")
    return Prompt(name, tokens, number)


def standing(
    logits: Float[Tensor, "rows d_vocab"], answers: Int[Tensor, "rows"]
) -> tuple[Float[Tensor, "rows"], Int[Tensor, "rows"]]:
    """Log-probability in nats (float32 or better) and rank of each row's answer; 1 is the most probable token's rank."""
    check_finite("What the model says behind the last position (its logits)", logits)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = log_p.gather(1, answers[:, None])
    return own[:, 0], 1 + (log_p > own).sum(1)


def equal_lengths(prompts: Sequence[Prompt], max_rows: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Prompts of one length together: their places in the list, tokens ``[rows, pos]`` and answers ``[rows]``.

    Raises:
        ValueError: ``max_rows`` below 1.
    """
    check_whole(max_rows=max_rows)
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1 sequence, found {max_rows}.")
    lengths: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        lengths.setdefault(prompt.tokens.shape[1], []).append(index)
    groups = [same[start : start + max_rows] for same in lengths.values() for start in range(0, len(same), max_rows)]
    tokens = [torch.cat([prompts[index].tokens for index in group]) for group in groups]
    answers = [torch.tensor([prompts[index].answer for index in group], device=tokens[0].device) for group in groups]
    return list(zip(groups, tokens, answers, strict=True))


@torch.no_grad()
def standings(model: HookedTransformer, prompts: Sequence[Prompt], max_rows: int) -> list[tuple[float, int]]:
    """Log-probability (nats) and rank of every prompt's answer, as the model with its hooks computes them now."""
    found = [(math.nan, 0)] * len(prompts)
    for group, tokens, answers in equal_lengths(prompts, max_rows):
        log_p, ranks = standing(model(tokens)[:, -1], answers)
        for index, p, rank in zip(group, log_p.tolist(), ranks.tolist(), strict=True):
            found[index] = p, rank
    return found


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t: with x = sqrt(degrees) tan(angle), the angle's density is cos^(degrees - 1).

    The distribution function is summed on a grid; relative error below 1e-4.
    """
    angles = torch.linspace(0, math.pi / 2, 400_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angles.cos() ** (degrees - 1), angles)
    return math.sqrt(degrees) * angles[1:][torch.searchsorted(mass, 0.95 * mass[-1])].tan().item()


def mean_interval(values: Float[Tensor, "*rows draw"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over the last axis and the ends of its 95% interval (Student's t); nan ends where there is one draw only."""
    mean, draws = values.mean(-1), values.shape[-1]
    if draws == 1:
        return mean, torch.full_like(mean, torch.nan), torch.full_like(mean, torch.nan)
    half = t_quantile(draws - 1) * values.std(-1) / math.sqrt(draws)
    return mean, mean - half, mean + half
