"""The command line: real commands on a small host."""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import tl_spd as spd
from tests.tiny import same_runs, tiny_host
from tl_spd import cli
from tl_spd.experiments.induction_target import InductionTask, TargetSettings
from tl_spd.sites import HookedTransformer
from tl_spd.storage import locked


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> HookedTransformer:
    """A tiny host in the place of a language model; its "tokenizer" reads digits."""
    model = tiny_host("llama", dtype=torch.float32)
    model.to_tokens = lambda text: torch.tensor([[int(letter) for letter in text]])
    model.asked_for = []
    monkeypatch.setattr(cli, "load_host", lambda name: model.asked_for.append(name) or model)
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
    options = ["--host", "my", "--prompts", "1234", "56", "--sites", "blocks.0.mlp.W_*", "--C", "4", "--steps", "3"]
    call(monkeypatch, "decompose", "--out", str(out), *options)
    printed = capsys.readouterr().out
    table = pd.read_csv(out / "evaluation.csv").set_index(["metric", "site"])
    assert {"before", "after"} <= set(table.columns)
    assert table.loc[("layerwise", "blocks.0.mlp.W_gate"), "after"] >= 0
    assert "faithfulness" in printed
    run = spd.load(out, small_host)
    assert [term["kind"] for term in run.settings["losses"]] == [t.name for t in spd.paper_losses("gpt2")]

    call(monkeypatch, "evaluate", str(out), "--thresholds", "0.5")  # on the prompts that decompose was given
    assert "Measured on:\n  '1234'\n  '56'\n" in capsys.readouterr().out
    assert small_host.asked_for == ["my", "my"]
    again = pd.read_csv(out / "evaluation.csv").set_index(["metric", "site"]).value
    assert again["recon", "all"] == pytest.approx(table.loc[("recon", "all"), "after"], rel=1e-6)
    assert ("rounded@0.5", "all") in again.index
    call(monkeypatch, "evaluate", str(out), "--prompts", "9")
    assert "Measured on:\n  '9'\n" in capsys.readouterr().out


def test_the_report_of_a_decompose_folder_says_its_command(
    small_host: HookedTransformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--prompts", "12 34", "5", "--sites", "blocks.0.mlp.W_*", "--C", "4", "--steps", "2", "--seed", "3"]
    small_host.to_tokens = lambda text: torch.tensor([[int(letter) for letter in text if letter != " "]])
    call(monkeypatch, "decompose", "--out", str(tmp_path / "run"), *options)
    call(monkeypatch, "report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html"))
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    command = re.search(r"<code>(tl-spd decompose [^<]*)</code>", page)
    assert command is not None
    words = shlex.split(command[1])
    assert "12 34" in words
    words[words.index("--out") + 1] = str(tmp_path / "again")
    call(monkeypatch, *words[1:])
    assert same_runs(spd.load(tmp_path / "run", small_host), spd.load(tmp_path / "again", small_host))

    real, given = cli.report, []
    with monkeypatch.context() as patch:
        patch.setattr(cli, "report", lambda *args: given.append(args) or real(*args[:2]))
        call(monkeypatch, "report", str(tmp_path / "run"), "-o", str(tmp_path / "viewed.html"), "--host", "my")
    assert given[0][2:4] == (small_host, ["12 34", "5"])

    settings = tmp_path / "run" / "settings.json"
    good = json.loads(settings.read_text())
    odd = [{"prompts": ["a\nb"]}, {"prompts": ["--out"]}, {"prompts": []}, {"seed": [1]}, {"steps": None}, {"lr": "-1"}]
    for change in [*odd, {"prompts": ["x" * 2000]}, {"host": {"a": 1}}, {"more": 1}]:
        settings.write_text(json.dumps(good | change))
        call(monkeypatch, "report", str(tmp_path / "run"), "-o", str(tmp_path / "odd.html"))
        assert "No one command is known" in (tmp_path / "odd.html").read_text(encoding="utf-8")
    for prompts in ("12", [1], {"1": 2}):
        settings.write_text(json.dumps(good | {"prompts": prompts}))
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, "evaluate", str(tmp_path / "run"))


def test_decompose_leaves_the_folder_of_an_experiment_alone(
    small_host: HookedTransformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", "12", "--sites", "blocks.0.mlp.W_in", "--C", "8", "--steps", "1"]
    call(monkeypatch, "decompose", "--out", str(tmp_path / "run"), *options)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "decompose", "--out", str(tmp_path), *options)
    assert "holds the Run of an experiment" in capsys.readouterr().err
    assert (tmp_path / "settings.json").read_text() == "{}"


def interrupt_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the ``call``-th backward pass from now on."""
    real, calls = torch.Tensor.backward, []

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(self)
        if len(calls) == call:
            raise KeyboardInterrupt
        real(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "backward", backward)


def test_an_interrupted_decompose_says_where_it_is_kept_and_resumes_to_the_same_bits(
    small_host: HookedTransformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", "1234", "56", "--sites", "blocks.0.mlp.W_*", "--C", "4", "--steps", "5"]
    call(monkeypatch, "decompose", "--out", str(tmp_path / "unbroken"), *options)
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        with pytest.raises(SystemExit) as caught:
            call(monkeypatch, "decompose", "--out", str(tmp_path / "run"), *options)
    assert caught.value.code == 130
    kept = tmp_path / "run" / "checkpoint"
    told = capsys.readouterr().err
    call(monkeypatch, "evaluate", str(kept))
    assert "Measured on:\n  '1234'\n  '56'\n" in capsys.readouterr().out
    assert f"stopped after step 2 of 5. spd.load('{kept}', model)" in told
    call(monkeypatch, "decompose", "--out", str(tmp_path / "run"), *options, "--resume")
    assert same_runs(spd.load(tmp_path / "run", small_host), spd.load(tmp_path / "unbroken", small_host))


def test_an_interrupted_induction_resumes_to_the_same_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetSettings(steps=30, batch_size=8, log_every=10)
    small = dict(task=InductionTask(vocab=6, length=8), target=target, C=5, steps=4, batch_size=4)
    settings = replace(cli.InductionSettings.preset("quick"), **small)
    monkeypatch.setattr(cli.InductionSettings, "preset", lambda *_: settings)
    call(monkeypatch, "induction", "--out", str(tmp_path / "unbroken"))
    with monkeypatch.context() as patch:
        interrupt_at(30 + 3, patch)
        with pytest.raises(SystemExit, match="130"):
            call(monkeypatch, "induction", "--out", str(tmp_path / "broken"))
    assert "stopped after step 2 of 4" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(cli.InductionTask, "sample", None)  # the target is not trained again before it says so
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, "induction", "--out", str(tmp_path / "broken"))
    told = capsys.readouterr().err
    assert told.startswith("tl-spd: ")
    assert "stopped at step 2 of 4. Pass resume=True (--resume)" in told
    call(monkeypatch, "induction", "--out", str(tmp_path / "broken"), "--resume")
    call(monkeypatch, "evaluate", str(tmp_path / "broken"))
    found = pd.read_csv(tmp_path / "broken" / "evaluation.csv").set_index(["metric", "site"]).value
    wanted = pd.read_csv(tmp_path / "broken" / "metrics.csv").set_index(["metric", "site"]).value
    assert found["faithfulness", "all"] == pytest.approx(wanted["faithfulness", "all"], rel=1e-5)
    assert found["recon", "all"] == pytest.approx(wanted["recon", "all"], rel=0.5)  # other sequences of the same task
    for name in ("active.csv", "metrics.csv", "history.csv"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_facts_resumes_and_no_two_commands_write_to_one_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    class Result:
        def tables(self) -> str:
            return ""

    monkeypatch.setattr(cli, "run_facts", lambda settings, out, **rest: asked.update(rest) or Result())
    call(monkeypatch, "facts", "--out", str(tmp_path), "--resume")
    assert asked == {"resume": True}
    codes: list[Any] = []

    def other() -> None:
        for command in ("facts", "induction", "decompose"):
            try:
                call(monkeypatch, command, "--out", str(tmp_path))
            except SystemExit as stop:
                codes.append(stop.code)

    with locked(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    refused = capsys.readouterr().err.splitlines()
    assert codes == [2, 2, 2]
    assert sum(f"is writing to {tmp_path}" in message for message in refused) == 3


def test_a_missing_argument_exits_with_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "decompose")
