"""Contributions against what a plain pass shows, one token and one subcomponent at a time."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import set_weights, tiny_host, tiny_padding, tiny_run, tiny_tokens, unchanged
from tl_spd.analysis.contribution import contributions
from tl_spd.sites import weight

SITES = ("blocks.1.attn.W_Q", "blocks.0.mlp.W_out", "embed.W_E")


@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_a_contribution_is_the_length_written_over_the_length_of_the_output(side: str | None) -> None:
    model = tiny_host("gpt2")
    run, tokens, mask = tiny_run(model, SITES), tiny_tokens(), tiny_padding(side)
    with unchanged(model):
        found = contributions(model, run, tokens, mask)
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    g = run.importances(model, tokens, mask)
    rows = torch.nn.functional.one_hot(tokens, model.cfg.d_vocab).to(model.W_E)
    inputs = dict(
        zip(
            SITES,
            (model.blocks[1].ln1(cache["blocks.1.hook_resid_pre"]), cache["blocks.0.mlp.hook_post"], rows),
            strict=True,
        )
    )
    for name, parts in run.components.items():
        W = weight(model, parts.site)
        for b, p in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
            x = inputs[name][b, p]
            for c in range(parts.C):
                written = g[name][b, p, c] * (x @ parts.read[:, c]) * parts.write[c]
                wanted = float(written.norm() / (x @ W).norm()) if mask is None or mask[b, p] else 0.0
                assert float(found[name][b, p, c]) == pytest.approx(wanted, rel=1e-9)
    assert all(bool((share > 0.01).any()) for share in found.values())


def test_where_the_host_writes_nothing_there_is_no_share_of_it() -> None:
    model = tiny_host("gpt2")
    set_weights(model, {"blocks.0.mlp.W_out": torch.zeros_like(model.W_out[0])})
    found = contributions(model, tiny_run(model, "blocks.*.mlp.W_out"), tiny_tokens())
    assert float(found["blocks.0.mlp.W_out"].abs().max()) == 0.0
    assert float(found["blocks.1.mlp.W_out"].max()) > 0.0
