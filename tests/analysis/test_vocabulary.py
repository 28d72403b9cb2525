"""Direct effects against the host's own final norm and unembedding, with the norm's division held still by a hook."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_host, tiny_run, tiny_tokenizer, unchanged
from tl_spd.analysis.vocabulary import COLUMNS, direct_effects


def moved_logits(model: torch.nn.Module, write: Tensor) -> Tensor:
    """How the host's logits change as ``write``, at length 1, joins some residual stream, the norm's scale kept at 1."""
    x = torch.randn(1, 1, write.shape[0], dtype=write.dtype, generator=torch.Generator().manual_seed(3))

    def logits(resid: Tensor) -> Tensor:
        return model.unembed(model.ln_final(resid) if hasattr(model, "ln_final") else resid)[0, 0]

    if hasattr(model, "ln_final"):
        model.ln_final.hook_scale.add_hook(lambda value, hook: torch.ones_like(value))
    moved = logits(x + write / write.norm()) - logits(x)
    model.reset_hooks()
    return (moved - moved.mean()).detach()


W_O, W_OUT = "blocks.0.attn.W_O", "blocks.1.mlp.W_out"
WRITERS = {
    "gpt2": [W_O, W_OUT, "embed.W_E", "pos_embed.W_pos"],
    "llama": [W_O, W_OUT, "embed.W_E"],
    "parallel": [W_O, W_OUT, "embed.W_E", "pos_embed.W_pos"],
    "shortformer": [W_O, "embed.W_E"],
}


@pytest.mark.parametrize(("style", "site"), [(style, site) for style, sites in WRITERS.items() for site in sites])
def test_effects_are_those_of_the_hosts_own_modules(style: str, site: str) -> None:
    model = tiny_host(style)
    run = tiny_run(model)
    with unchanged(model):
        table = direct_effects(model, run, site, [2, 0], k=11)
    assert list(table.columns) == COLUMNS
    for index in (2, 0):
        wanted = moved_logits(model, run.components[site].write[index])
        rows = table[table["subcomponent"] == index]
        for side, order in (("raised", wanted.argsort(descending=True)), ("lowered", wanted.argsort())):
            own = rows[rows["side"] == side]
            assert own["token"].tolist() == order.tolist()
            assert own["effect"].tolist() == pytest.approx(wanted[order].tolist(), abs=1e-12)
            assert own["rank"].tolist() == list(range(11))
    assert table["subcomponent"].tolist() == [2] * 22 + [0] * 22


def test_an_unembedding_site_writes_logits_itself() -> None:
    model = tiny_host("llama")
    run = tiny_run(model)
    write = run.components["unembed.W_U"].write[1].detach()
    table = direct_effects(model, run, "unembed.W_U", [1], k=1)
    wanted = write / write.norm() - (write / write.norm()).mean()
    assert table["token"].tolist() == [int(wanted.argmax()), int(wanted.argmin())]
    assert table["effect"].tolist() == pytest.approx([float(wanted.max()), float(wanted.min())], abs=1e-12)


def test_the_scale_of_a_subcomponent_and_a_shift_of_all_logits_do_not_matter() -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.mlp.W_out")
    before = direct_effects(model, run, "blocks.0.mlp.W_out")
    with torch.no_grad():
        run.components["blocks.0.mlp.W_out"].write *= 7
        model.unembed.W_U += torch.randn(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    after = direct_effects(model, run, "blocks.0.mlp.W_out")
    assert before["effect"].tolist() == pytest.approx(after["effect"].tolist(), abs=1e-12)
    assert before["token"].tolist() == after["token"].tolist()


def test_texts_are_the_tokenizers() -> None:
    model = tiny_host("gpt2")
    model.set_tokenizer(tiny_tokenizer("right"))
    table = direct_effects(model, tiny_run(model), "embed.W_E", [0], k=11)
    words = ["[PAD]", "[BOS]", *(f"w{i}" for i in range(9))]
    assert table["text"].tolist() == [words[token] for token in table["token"]]


@pytest.mark.parametrize(
    ("style", "site", "reason"),
    [
        ("gpt2", "blocks.0.attn.W_Q", "writes to the attention heads"),
        ("gpt2", "blocks.0.mlp.W_in", "writes to the MLP's neurons"),
        ("llama", "blocks.0.mlp.W_gate", "writes to the MLP's neurons"),
        ("shortformer", "pos_embed.W_pos", "read by queries and keys alone"),
    ],
)
def test_sites_without_a_direct_effect_are_refused_with_the_reason(style: str, site: str, reason: str) -> None:
    model = tiny_host(style)
    with pytest.raises(ValueError, match=f"{site} has no direct effect.*{reason}.*W_O, W_out"):
        direct_effects(model, tiny_run(model), site)


def test_other_wrong_questions_are_refused() -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.*.W_O*")
    with pytest.raises(ValueError, match=r"does not decompose 'embed\.W_E'; its sites are"):
        direct_effects(model, run, "embed.W_E")
    with pytest.raises(IndexError, match=r"subcomponents 0 to 2; found \[3\]"):
        direct_effects(model, run, "blocks.0.attn.W_O", [3])
    with pytest.raises(ValueError, match=r"k must be 1 to 11, .* found 12"):
        direct_effects(model, run, "blocks.0.attn.W_O", k=12)
    assert list(direct_effects(model, run, "blocks.0.attn.W_O", [])) == COLUMNS
