"""The README's Python blocks run as they stand, one after the other, on a tiny host and with fewer steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tl_spd.hosts
from tests.tiny import tiny_host

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per word, which takes the space in front of it along."""
    numbers = {word: index for index, word in enumerate(["<|end|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_next")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def test_every_python_block_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_host("llama", dtype=torch.float32)
    words = ["Tiger", " Woods", "Kobe", " Bryant", " plays", " professional", " golf", " basketball"]
    model.set_tokenizer(tokenizer_of(words))
    monkeypatch.setattr(tl_spd.hosts, "load_host", lambda name: model)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(re.sub(r"steps=\d+", "steps=2", block), "README.md", "exec"), names)
    assert set(names["importances"]) == {f"blocks.0.mlp.W_{kind}" for kind in ("gate", "in", "out")}
    assert names["own"].history.columns.tolist()[-2:] == ["LeaveOneOut", "L0"]
    assert "LeaveOneOut" not in names["run"].history
    assert not any(point.fwd_hooks for point in model.hook_points())


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_every_file_that_is_named_is_there(page: str) -> None:
    root = Path(__file__).parent.parent
    text = (root / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:benchmarks|tests|tl_spd)/[\w./-]+|[A-Z]+\.(?:md|cff))`", text)
    named += [f"benchmarks/results/{name}" for name in re.findall(r"`([a-z][\w-]+\.md)`", text)]
    named += [f"{Path(page).parent}/{name}" for name in re.findall(r"\]\(([\w/]+\.md)\)", text)]
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []
