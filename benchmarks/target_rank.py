"""What the induction target's layer 0 needs to find s1, without any decomposition. ``python -m benchmarks.target_rank``.

1. How many directions: W_Q, W_K or both of layer 0 are cut to their largest singular values.
2. At which positions: layer 0's queries are zeroed but at m, its keys but at s1, or both: where the paper has Q0 and K0 active.
   And queries but at m and s2: s2's own may matter to the query that it makes in layer 1.

KL of the output at s2 follows, on 1,024 held-out sequences. What the target needs, a decomposition must keep in which every site
alone is exact at ``m = g``; one that keeps less leaves the rest of the circuit to the importance functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import tyro
from torch import Tensor

from benchmarks.common import markdown, publish
from tl_spd.experiments.induction_target import InductionTask, TargetSettings, train_target
from tl_spd.sites import Hook, HookedTransformer

RANKS = (1, 2, 3, 4, 6, 8, 12)
SEQUENCES, SEED = 1024, 10_007
CUT = {"Q0": ("W_Q",), "K0": ("W_K",), "both": ("W_Q", "W_K")}


@dataclass
class Arguments:
    """Which targets are trained: every seed of the preset quick's target, trained three times as long too, then with so many
    dimensions of layer 0's head."""

    seeds: tuple[int, ...] = (0, 1, 2)
    qk_rank: int = 2


def cut(weight: Tensor, rank: int) -> Tensor:
    """``weight`` with its ``rank`` largest singular values, ``[1, d_model, d_head]``."""
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    return (U[..., :rank] * S[..., None, :rank]) @ V[..., :rank, :]


@torch.no_grad()
def needs(model: HookedTransformer, task: InductionTask) -> list[dict[str, Any]]:
    """One row per cut and rank."""
    attn = model.blocks[0].attn
    own = {name: getattr(attn, name).data for name in ("W_Q", "W_K")}
    tokens, _, s1 = task.sample(SEQUENCES, torch.Generator().manual_seed(SEED))
    log_p, rows = model(tokens)[:, -1].log_softmax(-1), []

    def row(which: str, rank: int, logits: Tensor) -> dict[str, Any]:
        log_q = logits[:, -1].log_softmax(-1)
        return {"cut": which, "rank": rank, "KL": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()}

    for which, names in CUT.items():
        for rank in RANKS:
            for name in names:
                getattr(attn, name).data = cut(own[name], rank)
            rows.append(row(which, rank, model(tokens)))
            for name in names:
                getattr(attn, name).data = own[name]
    point, last = "blocks.0.attn.hook_", torch.full_like(s1, task.length - 1)
    query, key, queries = alone(point + "q", s1 + 1), alone(point + "k", s1), alone(point + "q", s1 + 1, last)
    kept = {
        "Q0 at m alone": [query],
        "K0 at s1 alone": [key],
        "both alone": [query, key],
        "Q0 at m, s2 alone": [queries],
    }
    for which, hooks in kept.items():
        rows.append(row(which, 16, model.run_with_hooks(tokens, fwd_hooks=hooks)))
    return rows


def alone(point: str, *positions: Tensor) -> Hook:
    """A hook that zeroes what ``point`` shows at all positions but these of each sequence, ``[batch]`` each."""

    def kept(value: Tensor, hook: Any) -> Tensor:
        here = torch.stack([torch.arange(value.shape[1]) == position[:, None] for position in positions]).any(0)
        return value * here[:, :, None, None]

    return point, kept


def main(arguments: Arguments) -> None:
    """Train the targets, cut them and publish the tables."""
    task, rows = InductionTask(), list[dict[str, Any]]()
    for seed in arguments.seeds:
        targets = {
            "all dimensions": TargetSettings.preset("quick", seed),
            "all dimensions, longer": TargetSettings.preset("cpu", seed),
            f"{arguments.qk_rank} dimensions, longer": replace(
                TargetSettings.preset("cpu", seed), qk_rank=arguments.qk_rank
            ),
        }
        for target, settings in targets.items():
            trained = train_target(task, settings, progress=False)
            rows += [{"target": target, "seed": seed, **trained.found(), **row} for row in needs(trained.model, task)]
    frame = pd.DataFrame(rows)
    found = frame.groupby(["target", "seed"]).first()[["accuracy", "attention_m_on_s1", "attention_s2_on_m"]]
    kl = frame.pivot(index=["target", "cut", "rank"], columns="seed", values="KL").rename(
        columns=lambda seed: f"seed {seed}"
    )
    parts = ["Targets", markdown(found), "KL in nats at s2 of what is left (cut, rank)", markdown(kl, ".2g")]
    publish("target_rank", "What layer 0 of the induction target needs", "\n\n".join(parts), rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
