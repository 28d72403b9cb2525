"""KL of attention patterns."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import STYLES, tiny_host, tiny_run, tiny_tokens
from tl_spd.analysis.attention import attention_kl, pattern_kl
from tl_spd.install import decomposed


def test_pattern_kl_by_hand() -> None:
    p = torch.tensor([1.0, 0.0, 0.5, 0.5]).reshape(1, 1, 2, 2)
    q = torch.tensor([0.5, 0.5, 0.25, 0.75]).reshape(1, 1, 2, 2)
    wanted = [math.log(2), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)]
    assert pattern_kl(p, q).flatten().tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_attention_kl_equals_a_loop_over_cached_patterns(style: str) -> None:
    model, tokens = tiny_host(style), tiny_tokens()
    run = tiny_run(model, "blocks.*")
    table = attention_kl(model, run, tokens)
    _, original = model.run_with_cache(tokens)
    with decomposed(model, run):
        _, other = model.run_with_cache(tokens)
    for row in table.itertuples():
        name = f"blocks.{row.layer}.attn.hook_pattern"
        total, last, batch, pos = 0.0, 0.0, *tokens.shape
        for b in range(batch):
            for i in range(pos):
                p, q = original[name][b, row.head, i, : i + 1], other[name][b, row.head, i, : i + 1]
                kl = float((p * (p / q).log()).sum())
                total, last = total + kl, last + (kl if i == pos - 1 else 0.0)
        assert row.kl == pytest.approx(total / (batch * pos), rel=1e-9)
        assert row.kl_last == pytest.approx(last / batch, rel=1e-9)


def test_a_perfect_decomposition_leaves_the_attention() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*.attn.W_O")  # W_O of layer 1 and nothing before layer 0's attention
    table = attention_kl(model, run, tokens, masks={})
    assert table.kl.abs().max() == 0
