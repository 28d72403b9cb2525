"""Evaluation of a Run on held-out tokens: what its losses mean, without sampling noise where that is possible.

Joint reconstruction can be good while one site alone at exactly ``m = g`` is far off (sites can agree privately on another
circuit), so the deterministic layerwise values are reported per site. Sampled masks are rarely the worst ones, so the worst
masking that a stated budget finds is reported too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_spd.analysis.activity import l0
from tl_spd.analysis.adversarial import Adversary, adversarial_recon
from tl_spd.checks import check_shares, check_whole
from tl_spd.engine import LOGIT_ELEMENTS, Batch, Engine
from tl_spd.importance import Importances
from tl_spd.install import decomposed
from tl_spd.losses import ReconTerm, StochasticRecon, StochasticReconLayerwise, faithfulness, host_weights
from tl_spd.masks import Pass, rounded_mask
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, d_vocab

UNSCORED = -100
"""Stands in targets where no next token is scored."""


@torch.no_grad()
def evaluate(
    model: HookedTransformer,
    run: Run,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    *,
    last_token_only: bool = False,
    answers: Int[Tensor, "batch"] | None = None,
    thresholds: Sequence[float] = (0.0, 0.1),
    samples: int = 4,
    adversary: Adversary | None = Adversary(),  # noqa: B008 - frozen
    seed: int = 0,
    max_rows: int | None = None,
) -> pd.DataFrame:
    """How well the Run stands for the host on ``tokens``.

    Args:
        answers: with ``last_token_only``, the token that should follow each sequence.
        samples: draws of the stochastic masks. Where few draws go wrong, and those badly, four say little.
        adversary: the budget of the adversarial recon; None leaves it out.

    Returns:
        One row per number: ``metric, site, value``; ``site`` is ``"all"`` for joint numbers. KL in nats. ``recon``: all sites
        at ``m = g``; ``unmasked``: at ones; ``rounded@t``: at ``1[g > t]``; ``stochastic``: mean over ``samples``;
        ``adversarial@budget``: at the worst masks found (:mod:`tl_spd.analysis.adversarial`); ``layerwise``: that site alone at
        ``m = g``; ``stochastic_layerwise``; ``ce_difference``: mean cross-entropy (nats) at ``m = g`` minus the host's, to the
        next real token at all positions, or to ``answers`` (left out without them); ``L0``: mean active per token.

    Raises:
        ValueError, TypeError: ``answers`` without ``last_token_only`` or that are no tokens, thresholds outside [0, 1], tokens
            or a mask that do not fit the host; before any pass.
        FloatingPointError: a number is not finite; names the place in the original model, or the metric.
    """
    if answers is not None and not last_token_only:
        raise ValueError(
            "answers= is for last_token_only=True; where all positions are scored, the tokens themselves answer."
        )
    check_shares("threshold", thresholds)
    check_whole(seed=seed, max_rows=max_rows)
    StochasticRecon(samples=samples)  # refuses what is no number of draws
    engine = Engine(model, run, last_token_only, max_rows)
    _check_answers(engine, tokens, answers)
    batch = engine.observe_checked(tokens, attention_mask)
    g = engine.importances(batch)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    joint: dict[str, list[Pass]] = {
        "recon": [Pass(dict(g))],
        "unmasked": [Pass({name: torch.ones_like(value) for name, value in g.items()})],
    }
    for threshold in thresholds:
        joint[f"rounded@{threshold:g}"] = [Pass({name: rounded_mask(value, threshold) for name, value in g.items()})]
    rows: list[tuple[str, str, float]] = [("faithfulness", "all", faithfulness(run, host_weights(model, run)).item())]
    rows += [(metric, "all", engine.kl(batch, passes).mean().item()) for metric, passes in joint.items()]
    rows.append(("stochastic", "all", _sampled(engine, batch, g, StochasticRecon(), samples, generator).item()))
    if adversary is not None:
        rows.append((f"adversarial@{adversary.budget}", "all", adversarial_recon(engine, batch, g, adversary).kl))
    rows += _layerwise(engine, batch, g, samples, generator) + _ce_difference(engine, batch, g, answers)
    counts = l0(g, batch.real)
    rows += [("L0", name, value) for name, value in counts.items()] + [("L0", "all", sum(counts.values()))]
    return pd.DataFrame(_finite(rows), columns=["metric", "site", "value"])


def _finite(rows: list[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    if bad := [(metric, site) for metric, site, value in rows if not math.isfinite(value)]:
        raise FloatingPointError(
            f"{bad[0][0]} ({bad[0][1]}) was not finite, though all that the original model hands on is: logits, or what the "
            "subcomponents write, overflow their dtype. Use a host in bfloat16 or float32."
        )
    return rows


def _check_answers(engine: Engine, tokens: Tensor, answers: Tensor | None) -> None:
    if answers is None:
        return
    whole = not answers.is_floating_point() and answers.dtype != torch.bool
    if (
        not whole
        or answers.shape != tokens.shape[:1]
        or not bool(((answers >= 0) & (answers < d_vocab(engine.twin))).all())
    ):
        raise ValueError(
            f"answers must be one token of 0 to {d_vocab(engine.twin) - 1} for each of the {tokens.shape[0]} sequences, found "
            f"{answers.dtype} of shape {tuple(answers.shape)}."
        )


def _sampled(
    engine: Engine, batch: Batch, g: Importances, term: ReconTerm, samples: int, generator: torch.Generator
) -> Float[Tensor, "pass"]:
    """KL of every pass of ``term``, mean over ``samples`` draws of its masks; those of one draw are held at a time."""
    return torch.stack([engine.kl(batch, term.passes(g, generator)) for _ in range(samples)]).mean(0)


def _layerwise(
    engine: Engine, batch: Batch, g: Importances, samples: int, generator: torch.Generator
) -> list[tuple[str, str, float]]:
    """Each site alone at its importances, and masked stochastically; and the means over sites."""
    rows: list[tuple[str, str, float]] = []
    alone = engine.kl(batch, [Pass({name: value}) for name, value in g.items()])
    sampled = _sampled(engine, batch, g, StochasticReconLayerwise(), samples, generator)
    for metric, values in (("layerwise", alone), ("stochastic_layerwise", sampled)):
        rows += [(metric, name, value) for name, value in zip(g, values.tolist(), strict=True)]
        rows.append((metric, "all", values.mean().item()))
    return rows


def _ce_difference(
    engine: Engine, batch: Batch, g: Importances, answers: Tensor | None
) -> list[tuple[str, str, float]]:
    """The difference as a row; none where no token has an answer."""
    targets = _targets(engine, batch, answers)
    if not bool((targets != UNSCORED).any()):
        return []
    both = [_cross_entropy(engine, batch, targets, masks) for masks in ({}, dict(g))]
    return [("ce_difference", "all", both[1] - both[0])]


def _targets(engine: Engine, batch: Batch, answers: Tensor | None) -> Int[Tensor, "batch pos"]:
    """The token that should follow each scored position; ``UNSCORED`` where none is known."""
    targets = torch.full_like(batch.tokens, UNSCORED)
    if engine.last_token_only:
        if answers is not None:
            targets.view(-1)[batch.scored] = answers.to(targets)[batch.scored // targets.shape[1]]
        return targets
    real = torch.ones_like(targets, dtype=torch.bool) if batch.real is None else batch.real
    follows = real[:, :-1] & real[:, 1:]
    targets[:, :-1] = torch.where(follows, batch.tokens[:, 1:], targets[:, :-1])
    return targets


def _cross_entropy(
    engine: Engine, batch: Batch, targets: Int[Tensor, "batch pos"], masks: dict[str, Float[Tensor, "batch pos _"]]
) -> float:
    """Mean cross-entropy (nats) over the targets with sites masked by ``masks``, a few sequences at a time."""
    twin, (rows, pos) = engine.twin, targets.shape
    total, step = 0.0, max(1, LOGIT_ELEMENTS // (pos * d_vocab(twin)))
    for start in range(0, rows, step):
        own = slice(start, start + step)
        kwargs = {} if batch.attention_mask is None else {"attention_mask": batch.attention_mask[own]}
        with decomposed(twin, engine.run, {name: mask[own] for name, mask in masks.items()}):
            logits = twin(batch.tokens[own], **kwargs)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        losses = cross_entropy(wide, targets[own].flatten(), ignore_index=UNSCORED, reduction="sum")
        total += float(losses)
    return total / int((targets != UNSCORED).sum())
