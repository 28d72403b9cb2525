"""The command line: real commands on a small host."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import tl_spd as spd
from tests.tiny import tiny_host
from tl_spd import cli
from tl_spd.sites import HookedTransformer


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> HookedTransformer:
    """A tiny host in the place of a language model; its "tokenizer" reads digits."""
    model = tiny_host("llama", dtype=torch.float32)
    model.to_tokens = lambda text: torch.tensor([[int(letter) for letter in text]])
    monkeypatch.setattr(cli, "load_host", lambda name: model)
    return model


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tl-spd", *arguments])
    cli.main()


def test_tokenize_pads_on_the_right_and_masks_it(small_host: HookedTransformer) -> None:
    tokens, mask = cli.tokenize(small_host, ("123", "4"))
    assert tokens.tolist() == [[1, 2, 3], [4, 4, 4]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_decompose_then_evaluate(
    small_host: HookedTransformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = ["--prompts", "1234", "56", "--sites", "blocks.0.mlp.W_*", "--C", "4", "--steps", "3"]
    call(monkeypatch, "decompose", "--out", str(out), *options)
    printed = capsys.readouterr().out
    table = pd.read_csv(out / "evaluation.csv").set_index(["metric", "site"])
    assert {"before", "after"} <= set(table.columns)
    assert table.loc[("layerwise", "blocks.0.mlp.W_gate"), "after"] >= 0
    assert "faithfulness" in printed
    run = spd.load(out, small_host)
    assert [term["kind"] for term in run.settings["losses"]] == [t.name for t in spd.paper_losses("gpt2")]

    call(monkeypatch, "evaluate", str(out), "--prompts", "1234", "56", "--thresholds", "0.5")
    again = pd.read_csv(out / "evaluation.csv").set_index(["metric", "site"]).value
    assert again["recon", "all"] == pytest.approx(table.loc[("recon", "all"), "after"], rel=1e-6)
    assert ("rounded@0.5", "all") in again.index


def test_a_missing_argument_exits_with_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "decompose")
