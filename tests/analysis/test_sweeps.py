"""Sweeps against Runs made one by one."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from tests.tiny import tiny_host, tiny_tokens
from tl_spd.analysis.adversarial import Adversary
from tl_spd.analysis.evaluation import evaluate
from tl_spd.analysis.sweeps import _beaten, pareto, splitting
from tl_spd.importance import Vector
from tl_spd.losses import Faithfulness, ImportanceMinimality, Recon
from tl_spd.settings import FaithfulnessWarmup
from tl_spd.train import decompose

LOSSES = (Faithfulness(2.0), ImportanceMinimality(0.1, p_final=0.5), Recon(0.7))
SETTINGS: dict[str, Any] = dict(
    sites="blocks.*.mlp.W_out",
    steps=3,
    importance=Vector(d_gate=2),
    warmup=FaithfulnessWarmup(steps=0),
    progress=False,
    losses=LOSSES,
)


@pytest.mark.parametrize("last", [False, True])
def test_pareto_rows_equal_runs_made_alone(last: bool) -> None:
    model, data, held_out = tiny_host("gpt2"), tiny_tokens(), tiny_tokens(seed=9)
    settings, adversary = SETTINGS | dict(C=3, seed=4, last_token_only=last), Adversary(steps=2)
    table = pareto(model, data, held_out, coefficients=(0.0, 30.0), adversary=adversary, **settings)
    assert table.minimality.tolist() == [0.0, 30.0]
    assert set(table.seed) == {4}
    assert set(table.budget) == {"2x0.1,site,seed0"}
    for row in table.itertuples():
        losses = (LOSSES[0], ImportanceMinimality(row.minimality, p_final=0.5), LOSSES[2])
        run = decompose(model, data, **settings | dict(losses=losses))
        alone = evaluate(model, run, held_out, last_token_only=last, adversary=adversary)
        wanted = alone[alone.site == "all"].set_index("metric").value
        assert (row.faithfulness, row.recon, row.L0) == (wanted["faithfulness"], wanted["recon"], wanted["L0"])
        assert row.adversarial == wanted["adversarial@2x0.1,site,seed0"]
    assert table.recon.nunique() == 2


def test_a_strong_start_is_swept_in_proportion() -> None:
    settings = SETTINGS | dict(C=3, losses=(LOSSES[0], ImportanceMinimality(0.1, coeff_start=5.0), LOSSES[2]))
    table = pareto(tiny_host("gpt2"), tiny_tokens(), tiny_tokens(), coefficients=(0.2,), **settings)
    alone = settings | dict(losses=(LOSSES[0], ImportanceMinimality(0.2, coeff_start=10.0), LOSSES[2]))
    run = decompose(tiny_host("gpt2"), tiny_tokens(), **alone)
    wanted = evaluate(run=run, model=tiny_host("gpt2"), tokens=tiny_tokens(), adversary=None)
    assert table.recon.tolist() == wanted[wanted.metric == "recon"].value.tolist()


def test_efficient_rows_are_those_that_no_other_beats() -> None:
    table = pd.DataFrame({"recon": [1.0, 2.0, 2.0, 3.0], "L0": [9.0, 5.0, 6.0, 5.0]})
    assert [_beaten(table, row.recon, row.L0) for row in table.itertuples()] == [False, False, True, True]


@pytest.mark.parametrize("C", [2, {"*0*": 2, "*1*": 3}])
def test_splitting_counts_alive_subcomponents_of_both_runs(C: Any) -> None:
    model, data, held_out = tiny_host("gpt2"), tiny_tokens(), tiny_tokens(seed=9)
    table = splitting(model, data, held_out, C=C, thresholds=(0.0,), min_fraction=0.2, **SETTINGS)
    first, second = (2, 2) if isinstance(C, int) else (2, 3)
    assert table.C.tolist() == [first, second, 2 * first, 2 * second]
    assert table.factor.tolist() == [1, 1, 2, 2]
    doubled = {key: 2 * count for key, count in C.items()} if isinstance(C, dict) else 2 * C
    runs = [decompose(model, data, C=count, **SETTINGS) for count in (C, doubled)]
    wanted = []
    for run in runs:
        for g in run.importances(model, held_out).values():
            shares = [float((g[..., c] > 0).double().mean()) for c in range(g.shape[-1])]
            wanted.append(sum(share > 0.2 for share in shares))
    assert table.alive.tolist() == wanted
    assert max(wanted) > 0


def test_sweeps_that_cannot_be_made_are_refused() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    with pytest.raises(ValueError, match="at least one number"):
        pareto(model, tokens, tokens, coefficients=(), C=3, **SETTINGS)
    with pytest.raises(ValueError, match=r"must hold an ImportanceMinimality to sweep, found \['Recon'\]"):
        pareto(model, tokens, tokens, coefficients=(1.0,), C=3, **SETTINGS | dict(losses=[Recon(1.0)]))
    with pytest.raises(TypeError, match=r"leave out \['out'\]"):
        pareto(model, tokens, tokens, coefficients=(1.0,), C=3, out="runs/x", **SETTINGS)
    with pytest.raises(TypeError, match=r"leave out \['resume'\]"):
        splitting(model, tokens, tokens, C=3, resume=True, **SETTINGS)


def test_padding_counts_nowhere() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    tables = []
    for held_out in (tokens, torch.where(mask.bool(), tokens, (tokens + 1) % 11)):
        options = dict(C=3, **SETTINGS)
        sparse = pareto(model, tokens, held_out, mask, coefficients=(1.0,), adversary=Adversary(steps=1), **options)
        tables.append((sparse.drop(columns="budget"), splitting(model, tokens, held_out, mask, **options)))
    for first, second in zip(*tables, strict=True):
        pd.testing.assert_frame_equal(first, second)
