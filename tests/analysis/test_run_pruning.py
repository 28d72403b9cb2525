"""Pruning of a Run against every candidate installed in the host, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tl_spd as spd
from tests.tiny import tiny_host, tiny_padding, tiny_run, tiny_tokens, unchanged
from tl_spd.analysis import run_pruning
from tl_spd.analysis.pruning import TIE
from tl_spd.analysis.run_pruning import greedy_run_path
from tl_spd.engine import Batch
from tl_spd.importance import Importances
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer

SITES = "blocks.*.attn.W_[QV]"


def tiny(kind: str) -> tuple[HookedTransformer, Run]:
    """A host, and a Run of which some subcomponents are off at every token."""
    model = tiny_host(kind)
    run = tiny_run(model, SITES)
    for function in run.functions.values():
        function.gates.b2.data[1] = -5.0
    return model, run


@torch.no_grad()
def plain_path(
    model: HookedTransformer, run: Run, tokens: Tensor, mask: Tensor | None, tau: float, last: bool
) -> list[tuple[str, int, float]]:
    log_p = model(tokens, attention_mask=mask).log_softmax(-1)
    real = torch.ones_like(tokens) if mask is None else mask

    def kl(masks: dict[str, Tensor]) -> float:
        with spd.decomposed(model, run, masks=masks):
            log_q = model(tokens, attention_mask=mask).log_softmax(-1)
        each = (log_p.exp() * (log_p - log_q)).sum(-1)
        rows = [each[b][row.bool()] for b, row in enumerate(real)]
        return float(torch.stack([row[-1] for row in rows]).mean() if last else torch.cat(rows).mean())

    masks = dict(run.importances(model, tokens, mask))
    left = [(name, c) for name in masks for c in (0, 2)]
    path = [("", -1, kl(masks))]
    while left:
        trials = []
        for name, c in left:
            trial = {key: value.clone() for key, value in masks.items()}
            trial[name][..., c] = 0
            trials.append((kl(trial), name, c, trial))
        cost, name, c, trial = min(trials, key=lambda entry: entry[0])
        if cost > tau:
            break
        masks = trial
        left.remove((name, c))
        path.append((name, c, cost))
    return path


@pytest.mark.parametrize("candidates", [2, 100])
@pytest.mark.parametrize(
    ("kind", "side", "last"), [("shortformer", None, True), ("gpt2", "right", False), ("llama", "left", True)]
)
def test_the_path_is_the_plain_one(
    kind: str, side: str | None, last: bool, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_pruning, "CANDIDATES", candidates)
    (model, run), tokens, mask = tiny(kind), tiny_tokens(), tiny_padding(side)
    wanted = plain_path(model, run, tokens, mask, 10.0, last)
    assert len(wanted) == 1 + 4 * 2
    with unchanged(model):
        found = greedy_run_path(model, run, tokens, mask, tau=10.0, last_token_only=last)
    assert list(zip(found.site, found.subcomponent, strict=True)) == [(name, c) for name, c, _ in wanted]
    assert found.kl.tolist() == pytest.approx([kl for *_, kl in wanted], rel=1e-9)
    assert found["round"].tolist() == list(range(9))
    assert found.kept.tolist() == list(range(8, -1, -1))


def test_it_stops_before_tau_is_exceeded() -> None:
    model, run = tiny("gpt2")
    whole = greedy_run_path(model, run, tiny_tokens(), tau=10.0)
    tau = whole.kl[1:].iloc[:4].max()
    cut = greedy_run_path(model, run, tiny_tokens(), tau=tau)
    over = (whole.kl[1:] > tau).to_numpy().nonzero()[0]
    assert len(cut) == 1 + (over[0] if len(over) else 8)
    assert len(greedy_run_path(model, run, tiny_tokens(), tau=0.0)) == 1


def test_of_equal_ones_the_first_is_taken() -> None:
    model, run = tiny("gpt2")
    parts = run.components["blocks.1.attn.W_V"]
    parts.write.data[[0, 2]] = 0.0  # of the last site: neither changes anything
    path = greedy_run_path(model, run, tiny_tokens(), tau=10.0)
    removed = path[path.site == "blocks.1.attn.W_V"].subcomponent.tolist()
    assert removed == [0, 2]


def test_what_is_on_at_padding_only_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, run), mask = tiny("gpt2"), tiny_padding("right")
    real, importances = mask.bool(), run_pruning.Engine.importances

    def odd(engine: run_pruning.Engine, batch: Batch) -> Importances:
        g = importances(engine, batch)
        g["blocks.0.attn.W_V"][..., 0] *= ~real
        assert g["blocks.0.attn.W_V"][..., 0].any()
        return g

    monkeypatch.setattr(run_pruning.Engine, "importances", odd)
    path = greedy_run_path(model, run, tiny_tokens(), mask, tau=10.0)
    assert path.kept[0] == 7
    assert not ((path.site == "blocks.0.attn.W_V") & (path.subcomponent == 0)).any()


def test_kls_that_differ_by_rounding_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later ones are lower, by a thousandth of a step."""
    model, run = tiny("gpt2")
    monkeypatch.setattr(run_pruning, "_kls", lambda *args: [TIE * (5.5 - 0.001 * at) for at in range(len(args[-1]))])
    path = greedy_run_path(model, run, tiny_tokens(), tau=10.0)
    assert path.subcomponent[1:].tolist() == [0, 2] * 4
    assert path.site[1:].tolist() == [name for name in run.components for _ in range(2)]
