"""The induction experiment end to end on a small task: real code, few steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import tl_spd as spd
from tl_spd.experiments import induction
from tl_spd.experiments.induction import InductionSettings, _trained, named_positions, run_induction
from tl_spd.experiments.induction_target import InductionTask, TargetSettings


def test_named_positions_part_every_sequence() -> None:
    task = InductionTask(vocab=5, length=6)
    tokens, answers, s1 = task.sample(50, torch.Generator().manual_seed(0))
    named = named_positions(task, s1)
    assert (sum(where.long() for where in named.values()) == 1).all()
    assert (tokens[named["s1"]] == task.s_token).all()
    assert torch.equal(tokens[named["m"]], answers)
    assert torch.equal(named["s2"].nonzero()[:, 1], torch.full((50,), 5))


# how many times as strong minimality begins, ReconLayerwise, start of the components, steps of both trainings, target's rank
PRESETS = {
    "quick": (50.0, True, "svd", 2_000, 10_000, 16),
    "cpu": (50.0, True, "svd", 6_000, 30_000, 16),
    "cpu-even-start": (1.0, True, "svd", 10_000, 10_000, 16),
    "cpu-paper-losses": (1.0, False, "svd", 10_000, 10_000, 16),
    "cpu-rank-2": (50.0, True, "svd", 6_000, 30_000, 2),
    "paper": (1.0, False, "kaiming", 100_000, 30_000, 16),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_differ_from_the_paper_in_what_is_said(name: str) -> None:
    settings, paper = InductionSettings.preset(name, seed=3), spd.paper_losses("induction")
    sparse, layerwise, *others = PRESETS[name]
    assert [settings.init, settings.steps, settings.target.steps, settings.target.qk_rank] == others
    assert (settings.optimizer.lr, settings.batch_size) == ((1e-3, 1024) if name == "paper" else (3e-3, 16))
    sharp = sparse > 1
    start = dict(relative="scalar", reach=2.0) if sharp else {}
    assert (settings.leak, settings.optimizer.clip) == ((spd.Leak(1.0), 1.0) if sharp else (spd.Leak(0.01), None))
    samples = {term.name: term.samples for term in settings.losses if hasattr(term, "samples")}
    assert samples == {"StochasticRecon": 1, "StochasticReconLayerwise": 4 if sharp else 1}
    assert settings.importance == spd.Attention(d_gate=16, start=0.0, **start)  # type: ignore[arg-type]
    ends = {term.name: term.coeff_at(1.0) for term in paper} | ({"ReconLayerwise": 1.0} if layerwise else {})
    ends |= {"StochasticReconLayerwise": 6.0, "ReconPartial": 6.0} if sharp else {}
    assert [term.subset for term in settings.losses if hasattr(term, "subset")] == (["sequence"] if sharp else [])
    assert {term.name: term.coeff_at(1.0) for term in settings.losses} == pytest.approx(ends)
    ratios = {term.name: term.coeff_at(0.0) / term.coeff_at(1.0) for term in settings.losses}
    assert ratios == pytest.approx(dict.fromkeys(ends, 1.0) | {"ImportanceMinimality": sparse})
    assert (settings.C, settings.task, settings.seed, settings.target.seed) == (100, InductionTask(), 3, 3)
    faster = {key: value for key, value in settings.target.lr_factor.items() if key.startswith("blocks.")}
    wanted = {"blocks.0.attn.W_Q": 2.0, "blocks.0.attn.W_K": 2.0} if settings.target.qk_rank == 2 else {}
    assert faster == wanted


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="No preset 'slow'"):
        InductionSettings.preset("slow")


def test_a_small_run_writes_everything_and_can_be_read_again(tmp_path: Path) -> None:
    settings = replace(
        InductionSettings.preset("quick"),
        task=InductionTask(vocab=6, length=8),
        target=TargetSettings(steps=30, batch_size=8, log_every=10),
        C=5,
        steps=4,
        batch_size=4,
    )
    result = run_induction(settings, tmp_path, progress=False)
    assert result.active_table().columns.tolist() == ["s1", "m", "s2", "random"]
    assert set(result.unique.site) == {f"blocks.{layer}.attn.W_{kind}" for layer in (0, 1) for kind in "QKV"}
    metrics = set(result.metrics.metric)
    assert {"faithfulness", "recon", "layerwise", "stochastic_layerwise", "attention_kl", "rounded@0"} <= metrics
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["target"]["accuracy"] == result.target.accuracy
    assert "Unique subcomponents" in (tmp_path / "tables.md").read_text()
    weights = load_file(tmp_path / "target.safetensors")
    assert torch.equal(weights["embed.W_E"], result.target.model.embed.W_E)
    again = spd.load(tmp_path / "run", result.target.model)
    assert all(torch.equal(value, again.tensors()[name]) for name, value in result.run.tensors().items())


def test_a_kept_target_comes_back_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its history stands in for a long one, with numbers of all digits, of which pandas 2 reads every third wrongly."""
    target = TargetSettings(steps=2, batch_size=2, log_every=1)
    settings = replace(InductionSettings.preset("quick"), task=InductionTask(vocab=6, length=8), target=target)
    first = _trained(settings, tmp_path, progress=False)
    values = torch.rand(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    history = pd.DataFrame(values, columns=first.history.columns[1:])
    history.insert(0, "step", range(1, 301))
    history.iloc[0, 1] = math.nan
    history.to_csv(tmp_path / "target_history.csv", index=False)
    monkeypatch.setattr(induction, "train_target", lambda *_: pytest.fail("trained again"))
    again = _trained(settings, tmp_path, progress=False)
    assert again.history.equals(history)
    assert again.found() == first.found()
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))
