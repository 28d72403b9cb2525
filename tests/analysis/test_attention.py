"""KL of attention patterns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import STYLES, tiny_host, tiny_run, tiny_tokenizer, tiny_tokens, unchanged
from tl_spd.analysis.attention import attention_kl, attention_without_positions, pattern_kl
from tl_spd.install import decomposed
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer


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


QUERY, KEY = torch.tensor([4, 2, 3]), torch.tensor([1, 0, 3])


def by_hand(
    model: HookedTransformer, run: Run | None, tokens: Tensor, layer: int, head: int, b: int, drop: bool
) -> list[float]:
    """One row of attention from the weights: queries with or without positions, keys with them, one sequence, no padding."""
    i, P = int(QUERY[b]), model.W_pos.detach()[: tokens.shape[1]]
    attn, ln = model.blocks[layer].attn, model.blocks[layer].ln1
    if model.cfg.positional_embedding_type == "shortformer":
        if run is None:
            resid = model.run_with_cache(tokens)[1][f"blocks.{layer}.hook_resid_pre"][b]
        else:
            with decomposed(model, run):
                resid = model.run_with_cache(tokens)[1][f"blocks.{layer}.hook_resid_pre"][b]
        x_q, x_k = resid + (0 if drop else P), resid + P
    else:
        E = model.W_E.detach()[tokens[b]]
        x_q, x_k = ((x - x.mean(-1, keepdim=True)) for x in (E + (0 if drop else P), E + P))
        x_q, x_k = (x / (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt() * ln.w + ln.b for x in (x_q, x_k))

    def project(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if run is None:
            return x @ weight[head] + bias[head]
        name = f"blocks.{layer}.attn.W_{kind}"
        g, parts = run.importances(model, tokens)[name][b], run.components[name]
        own = slice(head * 4, head * 4 + 4)
        rows = [sum(x[p] @ parts.read[:, c] * g[p, c] * parts.write[c, own] for c in range(3)) for p in range(5)]
        return torch.stack(rows) + bias[head]

    q, k = project("Q", x_q, attn.W_Q, attn.b_Q)[i], project("K", x_k, attn.W_K, attn.b_K)
    scores = [float(q.detach() @ k[j].detach()) / 2 for j in range(i + 1)]  # d_head 4
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


@pytest.mark.parametrize("with_run", [False, True])
@pytest.mark.parametrize(("style", "layer", "flags"), [
    ("shortformer", 0, {}), ("shortformer", 1, {}), ("gpt2", 0, {}), ("gpt2", 0, {"use_split_qkv_input": True}),
])  # fmt: skip
def test_attention_without_positions_by_hand(style: str, layer: int, flags: dict[str, Any], with_run: bool) -> None:
    model, tokens = tiny_host(style, **flags), tiny_tokens()
    run = tiny_run(model, "blocks.*") if with_run else None
    with unchanged(model):
        table = attention_without_positions(model, tokens, layer, 1, QUERY, KEY, run=run)
    assert table[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [[layer, 1]]
    for b, row in enumerate(table.itertuples()):
        i, j = int(QUERY[b]), int(KEY[b])
        assert (row.sequence, row.query, row.key) == (b, i, j)
        assert row.attention == pytest.approx(by_hand(model, run, tokens, layer, 1, b, drop=False)[j], rel=1e-9)
        assert row.without == pytest.approx(by_hand(model, run, tokens, layer, 1, b, drop=True)[j], rel=1e-9)
    assert ((table.attention - table.without).abs() / table.attention).min() > 1e-3


def test_padded_sequences_attend_as_they_do_alone() -> None:
    model = tiny_host("shortformer")
    model.set_tokenizer(tiny_tokenizer("left"))
    tokens = torch.tensor([[0, 0, 1, 5, 6], [1, 4, 5, 6, 7]])
    both = attention_without_positions(model, tokens, 1, 0, torch.tensor([4, 4]), torch.tensor([3, 3]))
    alone = attention_without_positions(model, tokens[:1, 2:], 1, 0, torch.tensor([2]), torch.tensor([1]))
    assert both.attention[0] == pytest.approx(alone.attention[0], rel=1e-9)
    assert both.without[0] == pytest.approx(alone.without[0], rel=1e-9)


@pytest.mark.parametrize("wanted", [1, 2])
def test_an_error_inside_leaves_the_host_as_it_was(wanted: int) -> None:
    model, tokens, calls = tiny_host("gpt2"), tiny_tokens(), []

    def fail(value: Tensor, hook: Any) -> None:
        calls.append(1)
        if len(calls) == wanted:
            raise RuntimeError("mine")

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", fail)]):
        with unchanged(model), pytest.raises(RuntimeError, match="mine"):
            attention_without_positions(model, tokens, 0, 0, QUERY, KEY)
        assert len(calls) == wanted


@pytest.mark.parametrize(
    ("style", "changes", "message"),
    [
        ("llama", {}, "positions are 'rotary'"),
        ("gpt2", {"layer": 1}, "at layer 0 only, found layer 1"),
        ("gpt2", {"layer": 2}, "layer must be 0 to 1, found 2"),
        ("gpt2", {"head": -1}, "head must be 0 to 1, found -1"),
        ("gpt2", {"query": torch.tensor([4, 2, 5])}, "Positions must be 0 to 4, found 5"),
        ("gpt2", {"key": torch.tensor([1, 3, 3])}, "found query 2 and key 3"),
    ],
)
def test_what_cannot_be_left_out_is_refused(style: str, changes: dict[str, Any], message: str) -> None:
    arguments = {"layer": 0, "head": 0, "query": QUERY, "key": KEY, **changes}
    with pytest.raises(ValueError, match=message):
        attention_without_positions(tiny_host(style), tiny_tokens(), **arguments)
