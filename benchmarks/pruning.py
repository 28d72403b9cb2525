"""Speed of greedy rank-1 SVD pruning against the plain algorithm at GPT-2 shapes. ``python -m benchmarks.pruning``.

Plain: every candidate is a copy of the matrix without its smallest term, put into the host, which then runs from the tokens to
the logits. Two plain versions: one subtracts the term from the matrix, one recomposes it from its factors as the paper's
algorithm is written. Both and ours must make the same choices. Timed are rounds 2 to the last: the singular value
decompositions, which all versions need once, and the first round, where nothing is known yet, are left out. The host's weights
are random and of low rank, so that a few rounds reach the KLs of whole pruned terms (the smallest terms of a large random
matrix weigh nothing, and all candidates tie).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from unittest.mock import patch

import pandas as pd
import torch
import tyro
from torch import Tensor

from benchmarks.common import markdown, publish
from tl_spd.analysis import pruning
from tl_spd.sites import (
    HookedTransformer,
    HookedTransformerConfig,
    find_sites,
    parameter,
    unfold,
    weight,
)
from tl_spd.wiring import make_twin

Choices = list[tuple[str, int]]


@dataclass
class Arguments:
    """What is timed."""

    rounds: int = 8
    batch: int = 2
    length: int = 9
    layers: int = 2
    rank: int = 16
    """Of every matrix in a block."""


@torch.no_grad()
def plain_choices(
    model: HookedTransformer, tokens: Tensor, rounds: int, last: bool, recompose: bool
) -> tuple[Choices, list[float]]:
    """The first ``rounds`` choices of Algorithm 2, and the clock after every round."""
    scored = slice(-1, None) if last else slice(None)
    log_p = model(tokens)[:, scored].double().log_softmax(-1)
    twin, sites = make_twin(model), {site.name: site for site in find_sites(model, "blocks.*")}
    matrices = {name: weight(model, site) for name, site in sites.items()}
    factors = {name: torch.linalg.svd(matrix, full_matrices=False) for name, matrix in matrices.items()}
    left = {name: int(S.gt(S[0] * 1e-4).sum()) for name, (_, S, _) in factors.items()}
    choices, clock = Choices(), list[float]()

    def cut(name: str) -> Tensor:
        U, S, Vh = factors[name]
        k = left[name] - 1
        return (U[:, :k] * S[:k]) @ Vh[:k] if recompose else matrices[name] - torch.outer(U[:, k] * S[k], Vh[k])

    for _ in range(rounds):
        costs = {}
        for name, site in sites.items():
            own = parameter(twin, site)
            before = own.data
            own.data = unfold(site, cut(name))
            log_q = twin(tokens)[:, scored].double().log_softmax(-1)
            own.data = before
            costs[name] = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        chosen = min(costs, key=lambda name: pruning.level(costs[name]))
        matrices[chosen] = cut(chosen)
        parameter(twin, sites[chosen]).data = unfold(sites[chosen], matrices[chosen])
        left[chosen] -= 1
        choices.append((chosen, left[chosen]))
        clock.append(time.perf_counter())
    return choices, clock


def our_choices(
    model: HookedTransformer, tokens: Tensor, rounds: int, last: bool
) -> tuple[Choices, list[float], float]:
    """The first choices of ``greedy_svd_path``, the clock after every round, and the last KL."""
    clock, own = list[float](), pruning._Pruned.remove

    def timed(pruned: pruning._Pruned, name: str) -> None:
        own(pruned, name)
        clock.append(time.perf_counter())

    with patch.object(pruning._Pruned, "remove", timed):
        table = pruning.greedy_svd_path(
            model, tokens, sites="blocks.*", tau=float("inf"), last_token_only=last, max_rounds=rounds
        )
    return list(zip(table.site, table["index"], strict=True)), clock, table.kl.iloc[-1]


def gpt2_shapes(layers: int, rank: int) -> HookedTransformer:
    """GPT-2 small's shapes with random weights at the scale of trained ones, of low rank inside the blocks."""
    config = HookedTransformerConfig(
        n_layers=layers, n_heads=12, d_model=768, d_head=64, d_mlp=3072, n_ctx=64, d_vocab=50257, act_fn="gelu_new",
        normalization_type="LN", device="cpu", seed=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = HookedTransformer(config)
        for name, weights in model.named_parameters():
            if ".W_" in name:
                weights.data.normal_(std=0.05)
        for site in find_sites(model, "blocks.*"):
            matrix = torch.randn(site.d_in, rank) @ torch.randn(rank, site.d_out)
            parameter(model, site).data = unfold(site, 0.05 * rank**-0.5 * matrix)
    return model


def main(arguments: Arguments) -> None:
    """Time all versions and publish the table."""
    model, rounds, rows = gpt2_shapes(arguments.layers, arguments.rank), arguments.rounds, []
    shape = (arguments.batch, arguments.length)
    tokens = torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(0))
    for last in (False, True):
        plain = {
            mode: plain_choices(model, tokens, rounds, last, mode == "recompose") for mode in ("subtract", "recompose")
        }
        seconds = {f"plain, {mode}": (clock[-1] - clock[0]) / (rounds - 1) for mode, (_, clock) in plain.items()}
        ours, clock, kl = our_choices(model, tokens, rounds, last)
        same = all(choices == ours for choices, _ in plain.values())
        case = f"{arguments.layers} layers, tokens {shape}, {'last position' if last else 'all positions'}"
        rows.append(
            {
                "case": case,
                **seconds,
                "ours": (clock[-1] - clock[0]) / (rounds - 1),
                "KL": kl,
                "same choices": str(same),
            }
        )
    found = pd.DataFrame(rows).set_index("case")
    for mode in ("subtract", "recompose"):
        found[f"{mode} / ours"] = found[f"plain, {mode}"] / found.ours
    text = f"Seconds per round, mean of rounds 2 to {rounds}.\n\n" + markdown(found)
    publish("pruning", "Greedy rank-1 SVD pruning", text, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
