"""Zeroed layers against hosts in which the layer's last weights and bias really are zero."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny import MORE_STYLES, STYLES, tiny_host, tiny_tokens, unchanged
from tl_spd.analysis.zero_out import COLUMNS, zero_out


@pytest.mark.parametrize("style", [*STYLES, *MORE_STYLES])
def test_every_row_equals_a_host_with_zeroed_weights(style: str) -> None:
    model = tiny_host(style)
    prompts, answers = [tiny_tokens(1, 4, 1), tiny_tokens(1, 5, 2), tiny_tokens(1, 4, 3)], [3, 0, 7]
    with unchanged(model):
        table = zero_out(model, prompts, answers, max_rows=1 if style == "gpt2" else 64)
    kinds = ["attn"] if style == "shortformer" else ["mlp", "attn"]
    assert list(table.columns) == COLUMNS
    assert len(table) == len(kinds) * 2 * 3
    for kind in kinds:
        for layer in range(2):
            zeroed = copy.deepcopy(model)
            block = zeroed.blocks[layer]
            for parameter in (block.mlp.W_out, block.mlp.b_out) if kind == "mlp" else (block.attn.W_O, block.attn.b_O):
                parameter.data.zero_()
            for tokens, answer in zip(prompts, answers, strict=True):
                name = " ".join(str(token) for token in tokens[0].tolist())
                (row,) = table[(table.kind == kind) & (table.layer == layer) & (table.prompt == name)].itertuples()
                before, after = (host(tokens)[0, -1].softmax(-1).detach() for host in (model, zeroed))
                assert row.answer == answer
                assert row.p_before == pytest.approx(before[answer].item(), rel=1e-9)
                assert row.p_after == pytest.approx(after[answer].item(), rel=1e-9)
                assert row.logp == pytest.approx(after[answer].log().item(), rel=1e-9, abs=1e-12)
                assert row.rank == 1 + int((after > after[answer]).sum())


def test_kinds_can_be_chosen_and_must_be_there() -> None:
    table = zero_out(tiny_host(), [tiny_tokens(1)], [1], kinds=["attn"])
    assert set(table.kind) == {"attn"}
    for style, kind, own in (("gpt2", "resid", "mlp.*attn"), ("shortformer", "mlp", r"\['attn'\]")):
        with pytest.raises(ValueError, match=f"no layers of kind '{kind}'; it has .*{own}"):
            zero_out(tiny_host(style), [tiny_tokens(1)], [1], kinds=[kind])


def test_hooks_of_the_host_take_no_part() -> None:
    model = tiny_host()
    plain = zero_out(model, [tiny_tokens(1)], [1])
    model.add_hook("blocks.1.hook_resid_pre", lambda value, hook: torch.zeros_like(value))
    with unchanged(model):
        assert plain.equals(zero_out(model, [tiny_tokens(1)], [1]))
