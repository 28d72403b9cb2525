"""How many directions the induction target's layer 0 needs to find s1. ``python -m benchmarks.target_rank --seeds 0 1 2``.

W_Q, W_K or both of layer 0 are cut to their largest singular values; KL of the output at s2 and m's attention on s1 follow, on
1,024 held-out sequences. What the whole target needs is what a decomposition that keeps every site alone exact must keep: one
that has fewer subcomponents of Q0 leaves the rest of the circuit to the importance functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import tyro
from torch import Tensor

from benchmarks.common import markdown, publish
from tl_spd.experiments.induction_target import InductionTask, TargetSettings, attention_of_circuit, train_target
from tl_spd.sites import HookedTransformer

RANKS = (1, 2, 3, 4, 6, 8, 12)
SEQUENCES, SEED = 1024, 10_007
CUT = {"Q0": ("W_Q",), "K0": ("W_K",), "both": ("W_Q", "W_K")}


@dataclass
class Arguments:
    """Which targets are trained: every seed of the presets' target, and of the one with so many dimensions."""

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
    tokens = task.sample(SEQUENCES, torch.Generator().manual_seed(SEED))[0]
    log_p, rows = model(tokens)[:, -1].log_softmax(-1), []
    for which, names in CUT.items():
        for rank in RANKS:
            for name in names:
                getattr(attn, name).data = cut(own[name], rank)
            log_q = model(tokens)[:, -1].log_softmax(-1)
            m_on_s1, _ = attention_of_circuit(model, task, SEQUENCES, torch.Generator().manual_seed(SEED))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
            rows.append({"cut": which, "rank": rank, "KL": kl, "m on s1": m_on_s1})
            for name in names:
                getattr(attn, name).data = own[name]
    return rows


def main(arguments: Arguments) -> None:
    """Train the targets, cut them and publish the tables."""
    task, rows = InductionTask(), list[dict[str, Any]]()
    for seed in arguments.seeds:
        targets = {
            "all 16 dimensions": TargetSettings.preset("quick", seed),
            f"qk_rank {arguments.qk_rank}": replace(TargetSettings.preset("cpu", seed), qk_rank=arguments.qk_rank),
        }
        for target, settings in targets.items():
            trained = train_target(task, settings, progress=False)
            rows += [{"target": target, "seed": seed, **trained.found(), **row} for row in needs(trained.model, task)]
    table = pd.DataFrame(rows).set_index(["target", "cut", "rank", "seed"])[["KL", "m on s1"]].unstack("seed")
    text = "KL in nats at s2 and m's attention on s1 where layer 0's W_Q, W_K or both are cut to so many singular values.\n\n"
    publish("target_rank", "What layer 0 of the induction target needs", text + markdown(table, ".2g"), rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
