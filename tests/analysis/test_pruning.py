"""Pruning against the plain algorithm: every candidate from the tokens, in a copy of the host with the matrix recomposed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spd
from tests.tiny import set_weights, tiny_host, tiny_padding, tiny_run, tiny_tokens, unchanged, with_weights
from tl_spd.analysis import pruning
from tl_spd.analysis.pruning import TIE, greedy_svd_path, rank1_curve, singular_terms
from tl_spd.sites import HookedTransformer, find_sites, weight

Path = list[tuple[str, int, float]]


@torch.no_grad()
def output_kl(log_p: Tensor, model: HookedTransformer, tokens: Tensor, mask: Tensor | None, last: bool) -> float:
    """KL(P || Q), a mean over real positions, or over every sequence's last real one."""
    log_q = model(tokens, attention_mask=mask).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    real = torch.ones_like(tokens) if mask is None else mask
    if last:
        where = [(b, max(p for p in range(len(row)) if row[p])) for b, row in enumerate(real.tolist()) if any(row)]
        return float(torch.stack([kl[at] for at in where]).mean())
    return float(kl[real.bool()].mean())


@torch.no_grad()
def plain_path(
    model: HookedTransformer, tokens: Tensor, mask: Tensor | None, sites: Any, tau: float, last: bool
) -> tuple[Path, list[float]]:
    """Algorithm 2 as it stands in the paper, and every KL that it looked at."""
    log_p, looked = model(tokens, attention_mask=mask).log_softmax(-1), []
    weights = {site.name: weight(model, site) for site in find_sites(model, sites)}
    factors = {name: torch.linalg.svd(W, full_matrices=False) for name, W in weights.items()}
    left = {name: int(torch.linalg.matrix_rank(W)) for name, W in weights.items()}
    pruned, path = with_weights(model, {}), Path()

    def cut(name: str, k: int) -> dict[str, Tensor]:
        U, S, Vh = factors[name]
        return {name: (U[:, :k] * S[:k]) @ Vh[:k]}

    while any(left.values()):
        costs = {}
        for name, k in left.items():
            if k:
                costs[name] = output_kl(log_p, with_weights(pruned, cut(name, k - 1)), tokens, mask, last)
        looked += costs.values()
        chosen = min(costs, key=lambda name: round(max(costs[name], 0) / TIE - 0.5))  # of equal ones the first
        if costs[chosen] > tau:
            break
        left[chosen] -= 1
        set_weights(pruned, cut(chosen, left[chosen]))
        path.append((chosen, left[chosen], costs[chosen]))
    return path, looked


def assert_same(table: Any, wanted: Path) -> None:
    assert list(zip(table.site, table["index"], strict=True)) == [row[:2] for row in wanted]
    assert table.kl.tolist() == pytest.approx([row[2] for row in wanted], rel=1e-8, abs=1e-11)


@pytest.mark.parametrize(
    ("style", "sites", "side", "last", "max_rows"),
    [
        ("shortformer", "blocks.*.attn.W_[QKV]", None, True, None),
        ("gpt2", "blocks.*", None, False, 7),
        ("llama", ("blocks.*.attn.W_[KO]", "blocks.*.mlp.*"), "left", False, None),
        ("parallel", ("blocks.0.attn.W_O", "blocks.1.*"), "right", True, 1),
        ("softcap", "blocks.*.mlp.*", None, False, None),
    ],
)
def test_every_choice_and_kl_is_the_plain_algorithms(
    style: str, sites: Any, side: str | None, last: bool, max_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "LOGIT_ELEMENTS", 40)  # three rows of logits at once
    calls, own = [], pruning._Pruned.tangent
    monkeypatch.setattr(pruning._Pruned, "tangent", lambda self, final: calls.append(1) or own(self, final))
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding(side)
    tau = {"shortformer": 2.0, "gpt2": 0.04}.get(style, 0.2)
    wanted, looked = plain_path(model, tokens, mask, sites, tau, last)
    with unchanged(model):
        table = greedy_svd_path(model, tokens, mask, sites=sites, tau=tau, last_token_only=last, max_rows=max_rows)
    assert len(wanted) > 8
    if style == "gpt2":  # the bounds save most evaluations
        assert len(calls) < len(looked) / 2
    assert len(set(table.site)) > 2
    assert_same(table, wanted)
    ranks = [int(torch.linalg.matrix_rank(weight(model, site))) for site in find_sites(model, sites)]
    assert table.kept.tolist() == [sum(ranks) - done for done in range(1, len(wanted) + 1)]
    assert table["round"].tolist() == list(range(1, len(wanted) + 1))


def test_a_path_to_the_end_leaves_nothing_and_equals_zeroed_weights() -> None:
    model, tokens = tiny_host("llama"), tiny_tokens()
    names = ["blocks.0.attn.W_Q", "blocks.1.mlp.W_out"]
    table = greedy_svd_path(model, tokens, sites=names, tau=math.inf)
    assert len(table) == 12  # two matrices of rank 6
    assert table.kept.iloc[-1] == 0
    zeroed = with_weights(model, {site.name: torch.zeros(site.d_in, site.d_out) for site in find_sites(model, names)})
    log_p = model(tokens).log_softmax(-1)
    assert table.kl.iloc[-1] == pytest.approx(output_kl(log_p, zeroed, tokens, None, False), rel=1e-9)


def test_ties_go_to_the_first_site_and_terms_of_no_size_do_not_count() -> None:
    model, tokens = tiny_host("no_norm_mlp"), tiny_tokens()
    dead = torch.zeros(6, 12, dtype=torch.float64)
    dead[:, :2] = torch.arange(1, 13).reshape(6, 2)  # of rank 2, read by rows of W_out that are zero
    ends = {
        f"blocks.{layer}.mlp.W_out": weight(model, find_sites(model, f"blocks.{layer}.mlp.W_out")[0])
        for layer in (0, 1)
    }
    for W in ends.values():
        W[:2] = 0
    model = with_weights(model, {"blocks.0.mlp.W_in": dead, "blocks.1.mlp.W_in": dead, **ends})
    table = greedy_svd_path(model, tokens, sites="blocks.*.mlp.W_in", tau=TIE)
    assert list(zip(table.site, table["index"], table.kept, strict=True)) == [
        ("blocks.0.mlp.W_in", 1, 3),
        ("blocks.0.mlp.W_in", 0, 2),
        ("blocks.1.mlp.W_in", 1, 1),
        ("blocks.1.mlp.W_in", 0, 0),
    ]


def test_max_rounds_is_the_path_cut_short() -> None:
    options = dict(sites="blocks.*.attn.W_[QK]", tau=math.inf)
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    whole, short = (greedy_svd_path(model, tokens, **options, max_rounds=rounds) for rounds in (None, 5))
    assert len(whole) == 24
    assert short.equals(whole[:5])


def test_singular_terms_sum_to_the_weight_largest_first() -> None:
    model = tiny_host("llama")
    for site in find_sites(model, "blocks.0.*"):
        terms, W = singular_terms(model, site), weight(model, site)
        assert torch.allclose(terms.weight(), W, atol=1e-12)
        sizes = terms.read.norm(dim=0) * terms.write.norm(dim=1)
        assert torch.allclose(sizes, torch.linalg.svdvals(W), atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tau=-1.0), "tau must be a number of nats of at least 0, found -1.0"),
        (dict(sites="*"), r"Only matrices inside blocks can be pruned, found \['embed.W_E'.*'unembed.W_U'\]"),
        (dict(sites="blocks.7.*"), "matches nothing"),
        (dict(max_rows=0), "max_rows must be at least 1"),
        (dict(max_rounds=0), "max_rounds must be at least 1"),
        (dict(attention_mask=torch.zeros(3, 5, dtype=torch.long)), "No position of this batch"),
    ],
)
def test_what_cannot_be_pruned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_svd_path(tiny_host("gpt2"), tiny_tokens(), **{"sites": "blocks.*", "tau": 0.1, **changes})


@pytest.mark.parametrize("last", [False, True])
def test_the_curve_equals_hosts_with_the_kept_pieces_as_weights(last: bool) -> None:
    model, tokens = tiny_host("shortformer"), tiny_tokens()
    run = tiny_run(model, "blocks.*.attn.W_[QV]", C=4)
    state = torch.get_rng_state()
    with unchanged(model):
        table = rank1_curve(model, run, tokens, tau=0.5, last_token_only=last, points=2, seeds=(0, 5))
    assert torch.equal(state, torch.get_rng_state())
    log_p = model(tokens).log_softmax(-1)

    path = greedy_svd_path(model, tokens, sites="blocks.*.attn.W_[QV]", tau=0.5, last_token_only=last)
    svd = table[table.method == "svd"]
    assert svd.kept.tolist() == [24, *path.kept]
    assert svd.kl.tolist() == [0.0, *path.kl]

    g = run.importances(model, tokens)
    means = {name: value.mean((0, 1)) for name, value in g.items()}
    spd = table[table.method == "spd"].set_index("kept").kl
    assert {0, 16} < set(spd.index)
    ranked = sorted(float(mean) for values in means.values() for mean in values)[::-1]
    for kept, kl in spd.items():
        sums = {}
        for name, parts in run.components.items():
            chosen = [c for c in range(4) if ranked.index(float(means[name][c])) < kept]
            sums[name] = parts.read.detach()[:, chosen] @ parts.write.detach()[chosen]
        assert kl == pytest.approx(output_kl(log_p, with_weights(model, sums), tokens, None, last), rel=1e-9)

    masked = table[table.method == "spd_masked"].set_index("kept").kl
    assert set(masked.index) == set(spd.index)
    for kept, kl in masked.items():
        keep = {name: torch.tensor([ranked.index(float(mean)) < kept for mean in means[name]]) for name in means}
        with tl_spd.decomposed(model, run, masks={name: g[name] * keep[name] for name in g}):
            log_q = model(tokens).log_softmax(-1)
        kls = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert kl == pytest.approx((kls[:, -1] if last else kls).mean().item(), rel=1e-9)

    random = table[table.method == "random"]
    zeroed = with_weights(model, {site.name: torch.zeros(6, site.d_out) for site in run.sites})
    for seed in (0, 5):
        by_kept = random[random.seed == seed].set_index("kept").kl
        assert by_kept[24] == pytest.approx(0, abs=1e-12)
        assert by_kept[0] == pytest.approx(output_kl(log_p, zeroed, tokens, None, last), rel=1e-9)
    inside = random[~random.kept.isin([0, 24])]
    assert (inside[inside.seed == 0].kl.to_numpy() != inside[inside.seed == 5].kl.to_numpy()).all()
    assert set(table.seed[table.method != "random"]) == {-1}


def test_the_curve_keeps_what_is_above_the_thresholds_given() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.1.mlp.*")
    means = torch.cat([g.mean((0, 1)) for g in run.importances(model, tokens).values()])
    table = rank1_curve(model, run, tokens, tau=0.0, thresholds=(0.0, 0.5, 1.0), points=1, seeds=())
    assert table[table.method == "spd"].kept.tolist() == [6, int((means > 0.5).sum()), 0]
    assert "random" not in set(table.method)
    with pytest.raises(ValueError, match="points must be at least 1, found 0"):
        rank1_curve(model, run, tokens, tau=0.0, points=0)
