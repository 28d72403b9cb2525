"""Patching against plain hooks on the whole host, TransformerLens's own patches, finite differences and hand arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer, patching

from tests.tiny import STYLES, VOCAB, exact_run, tiny_host, tiny_run, tiny_tokenizer, unchanged
from tl_spd.analysis.patching import (
    answer_metric,
    compare_whole_sites,
    correlations,
    joint_shares,
    patch_subcomponents,
)
from tl_spd.run import Run
from tl_spd.wiring import observe

CLEAN, CORRUPTED = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 7, 3, 8, 5]])
POINTS = {
    **{f"W_{letter}": f"attn.hook_{letter.lower()}" for letter in "QKV"},
    "W_O": "hook_attn_out",
    "W_gate": "mlp.hook_pre",
    "W_in": "mlp.hook_pre",
    "W_out": "hook_mlp_out",
}
HOSTS: dict[str, dict[str, Any]] = {
    **{style: dict(style=style) for style in (*STYLES, "qk_norm", "rmspre_alibi", "softcap")},
    "ungrouped": dict(style="llama", ungroup_grouped_query_attention=True),
    "flags": dict(style="gpt2", use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True),
}


def point(model: HookedTransformer, site: str) -> str:
    """The hook point behind the matmul of ``site``, by hand."""
    layer, kind = site.split(".")[1], site.split(".")[3]
    late = kind == "W_in" and model.cfg.gated_mlp
    return f"blocks.{layer}." + ("mlp.hook_pre_linear" if late else POINTS[kind])


def plain(
    model: HookedTransformer,
    run: Run,
    site: str,
    p: int,
    chosen: Iterable[int],
    tokens: tuple[Tensor, Tensor] = (CLEAN, CORRUPTED),
    scale: float = 1.0,
) -> Tensor:
    """Logits of one whole pass of the corrupted prompt on the host, with subcomponents of ``site`` patched at ``p``."""
    parts = run.components[site]
    host = without_flags(model)
    x, y = (observe(host, [parts.site], t).inputs[site][0, p] for t in tokens)
    added = sum(
        (scale * (x @ parts.read[:, c] - y @ parts.read[:, c]) * parts.write[c] for c in chosen), torch.zeros(())
    )

    def add(value: Tensor, hook: Any) -> Tensor:
        own = added.reshape(parts.site.heads, -1) if value.ndim == 4 else added
        if value.ndim == 4 and value.shape[2] != parts.site.heads:
            own = torch.cat([head.expand(value.shape[2] // parts.site.heads, -1) for head in own])
        value[0, p] = value[0, p] + own
        return value

    with torch.no_grad():
        return host.run_with_hooks(tokens[1], fwd_hooks=[(point(model, site), add)])


def without_flags(model: HookedTransformer) -> HookedTransformer:
    """The host itself, its flags that split activations switched off."""
    model.cfg.use_split_qkv_input = model.cfg.use_attn_result = model.cfg.use_hook_mlp_in = False
    return model


def log_p(logits: Tensor, answer: int = 2) -> float:
    return float(logits[0, -1].detach().softmax(-1)[answer].log())


@pytest.mark.parametrize("host", HOSTS)
def test_effects_and_attributions_equal_whole_passes_with_a_plain_hook(host: str) -> None:
    model = tiny_host(**HOSTS[host])
    run = tiny_run(model, "blocks.*", C=2)
    with unchanged(model):
        table = patch_subcomponents(model, run, CLEAN, CORRUPTED, answer_metric(model, 2), positions=[1, 4], max_rows=3)
    assert len(table) == 2 * 2 * len(run.components)
    base, step = log_p(model(CORRUPTED)), 1e-4
    for row in table.iloc[::5].itertuples():
        args = (model, run, row.site, row.position, [row.subcomponent])
        assert row.effect == pytest.approx(log_p(plain(*args)) - base, abs=1e-12)
        slope = (log_p(plain(*args, scale=step)) - log_p(plain(*args, scale=-step))) / (2 * step)
        assert row.attribution == pytest.approx(slope, rel=1e-4, abs=1e-7)
    assert table.groupby("site").effect.apply(lambda e: e.abs().max()).min() > 1e-4
    assert table.metric_corrupted.unique().tolist() == pytest.approx([base])
    assert table.metric_clean.unique().tolist() == pytest.approx([log_p(model(CLEAN))])


@pytest.mark.parametrize("host", HOSTS)
def test_all_subcomponents_of_an_exact_run_are_the_patch_of_the_hook(host: str) -> None:
    model = tiny_host(**HOSTS[host])
    run = exact_run(model, "blocks.*")
    found = compare_whole_sites(model, run, CLEAN, CORRUPTED, answer_metric(model, 2, other=6))
    assert found.joint_effect.sub(found.tl_effect).abs().max() < 1e-10
    assert found.difference.abs().max() < 1e-10
    _, clean = without_flags(model).run_with_cache(CLEAN)
    base = model(CORRUPTED)[0, -1].detach()
    for row in found.iloc[::4].itertuples():

        def patch(value: Tensor, hook: Any, p: int = row.position) -> Tensor:
            value = value.clone()
            value[:, p] = clean[hook.name][:, p]
            return value

        last = model.run_with_hooks(CORRUPTED, fwd_hooks=[(point(model, row.site), patch)])[0, -1].detach()
        assert row.tl_effect == pytest.approx(float(last[2] - last[6] - base[2] + base[6]), abs=1e-12)
    assert (found.groupby("site").tl_effect.apply(lambda e: e.abs().max()) > 1e-4).all()
    assert (found[found.position == 0][["joint_effect", "tl_effect"]] == 0).all(axis=None)


def test_the_patch_is_transformer_lens_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_host("gpt2")
    run, metric = exact_run(model, "blocks.*.mlp.W_out"), answer_metric(model, 2)
    found = compare_whole_sites(model, run, CLEAN, CORRUPTED, metric)
    assert capsys.readouterr() == ("", "")  # no progress bar
    _, cache = model.run_with_cache(CLEAN)
    with torch.no_grad():
        theirs = patching.get_act_patch_mlp_out(model, CORRUPTED, cache, metric) - metric(model(CORRUPTED))
    assert found.tl_effect.tolist() == pytest.approx(theirs.flatten().tolist(), abs=1e-6)  # theirs are float32


def test_the_delta_explains_what_inexact_components_leave() -> None:
    model = tiny_host("llama")
    run = tiny_run(model, "blocks.*")
    found = compare_whole_sites(model, run, CLEAN, CORRUPTED, answer_metric(model, 2))
    moved = found[found.position > 0]
    assert moved.groupby("site").difference.apply(lambda d: d.abs().max()).min() > 1e-3
    assert found.unexplained.abs().max() < 1e-10
    assert found.delta_explains.sub(found.difference).abs().max() < 1e-10
    base = log_p(model(CORRUPTED))
    for row in found.iloc[::7].itertuples():
        assert row.joint_effect == pytest.approx(
            log_p(plain(model, run, row.site, row.position, range(3))) - base, abs=1e-12
        )
    row = moved.set_index(["site", "position"]).loc["blocks.0.mlp.W_out", 3]
    _, clean = model.run_with_cache(CLEAN)
    _, corrupted = model.run_with_cache(CORRUPTED)
    dx = (clean["blocks.0.mlp.hook_post"] - corrupted["blocks.0.mlp.hook_post"])[0, 3]
    W, parts = model.blocks[0].mlp.W_out, run.components["blocks.0.mlp.W_out"]
    wanted = (dx @ W - (dx @ parts.read) @ parts.write).norm() / (dx @ W).norm()
    assert row.delta_share == pytest.approx(wanted.item())


def test_columns_and_choices_of_rows() -> None:
    model = tiny_host("gpt2")
    run, metric = tiny_run(model), answer_metric(model, 2)
    whole = patch_subcomponents(model, run, CLEAN, CORRUPTED, metric)
    assert set(whole.site) == {site.name for site in run.select("blocks.*")}
    assert whole.position.tolist()[:15] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert whole.token.tolist()[:15:3] == CLEAN[0].tolist()
    assert whole.corrupted_token.tolist()[:15:3] == CORRUPTED[0].tolist()
    assert whole.subcomponent.tolist()[:6] == [0, 1, 2, 0, 1, 2]
    for name, tokens in (("clean", CLEAN), ("corrupted", CORRUPTED)):
        g = run.importances(model, tokens)
        seen = observe(model, run.sites, tokens).inputs
        for site, rows in whole.groupby("site"):
            assert rows[f"importance_{name}"].tolist() == pytest.approx(g[site].flatten().tolist())
            inner = seen[site] @ run.components[site].read
            assert rows[f"inner_{name}"].tolist() == pytest.approx(inner.flatten().tolist())
    assert (whole[whole.position == 0][["effect", "attribution", "tl_effect"]] == 0).all(axis=None)
    args = (model, run, CLEAN, CORRUPTED, metric, "*.W_in")
    expected = whole[whole.site.str.endswith("W_in")]
    some = patch_subcomponents(*args, positions=[3, 1], max_rows=1)
    same = expected[expected.position.isin([1, 3])].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, same, rtol=1e-10, atol=1e-12)
    either = expected[["importance_clean", "importance_corrupted"]].max(axis=1)
    threshold = float(either.median())
    active = patch_subcomponents(*args, threshold=threshold)
    same = expected[either > threshold].reset_index(drop=True)
    assert 0 < len(active) < len(expected)
    pd.testing.assert_frame_equal(active, same, rtol=1e-10, atol=1e-12)


def test_only_what_differs_takes_a_pass() -> None:
    model = tiny_host("gpt2")
    run, own, calls = tiny_run(model, "blocks.0.attn.W_Q"), answer_metric(model, 2), []

    def counted(logits: Tensor) -> Tensor:
        calls.append(logits.shape)
        return own(logits)

    patch_subcomponents(model, run, CLEAN, CORRUPTED, counted)
    # both prompts, the backward pass, five of TransformerLens's, and 3 subcomponents at the 2 places whose tokens differ
    assert len(calls) == 2 + 1 + 5 + 3 * 2
    assert set(calls) == {(1, 5, VOCAB)}


def test_shares_of_the_largest_by_passes_made_by_hand() -> None:
    model = tiny_host("parallel")
    run, metric = exact_run(model, ("blocks.0.*", "blocks.1.attn.W_V")), answer_metric(model, 2)
    table = patch_subcomponents(model, run, CLEAN, CORRUPTED, metric)
    shares = joint_shares(model, run, CLEAN, CORRUPTED, metric, table, ks=(1, 3, 99))
    assert len(shares) == 3 * 5 * len(run.components)
    base = log_p(model(CORRUPTED))
    singles = {place: rows.set_index("subcomponent").effect for place, rows in table.groupby(["site", "position"])}
    for row in shares[shares.position.isin([1, 3])].itertuples():
        effects = singles[row.site, row.position].to_dict()
        largest = sorted(effects, key=lambda c: -abs(effects[c]))[: row.k]
        by_hand = log_p(plain(model, run, row.site, row.position, largest)) - base
        assert row.joint_effect == pytest.approx(by_hand, abs=1e-12)
        assert row.summed_effect == pytest.approx(sum(effects[c] for c in largest), abs=1e-12)
        assert row.joint_share == pytest.approx(by_hand / row.tl_effect, rel=1e-6)
        assert row.summed_share == pytest.approx(row.summed_effect / row.tl_effect)
    everything = shares[(shares.k == 99) & (shares.tl_effect != 0)]
    assert everything.joint_share.tolist() == pytest.approx([1.0] * len(everything), abs=1e-6)
    assert everything.summed_share.sub(1).abs().max() > 1e-3
    still = shares[shares.position == 0]
    assert still.joint_share.isna().all()
    assert (still.joint_effect == 0).all()


def test_correlations_by_hand() -> None:
    table = pd.DataFrame(
        {
            "site": ["a"] * 6 + ["b"] * 2,
            "position": [0, 0, 1, 1, 2, 2, 0, 0],
            "inner_clean": [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0],
            "inner_corrupted": [0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0],  # the sixth row is left out
            "importance_clean": [0.1, 0.2, 0.3, 0.4, 0.4, 9.0, 1.0, 1.0],
            "attribution": [1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 1.0, 2.0],
            "effect": [1.0, 3.0, -2.0, 5.0, 4.0, 0.0, 2.0, 1.0],
            "tl_effect": [4.0, 4.0, 3.0, 3.0, 8.0, 8.0, 3.0, 3.0],
        }
    )
    found = correlations(table).set_index(["site", "first"])
    own = found.loc["a", "attribution"]
    assert (own.second, own.n) == ("effect", 5)
    # deviations -2 to 2, and of the effects -1.2 0.8 -4.2 2.8 1.8, whose squares sum to 30.8
    assert own.pearson == pytest.approx(8 / math.sqrt(10 * 30.8))
    assert own.spearman == pytest.approx(1 - 6 * 8 / (5 * 24))  # ranks 2 3 1 5 4 of 1 2 3 4 5: squares 1 1 4 1 1
    # importances have the ranks 1 2 3 4.5 4.5, sizes 1 3 2 5 4
    assert found.loc["a", "importance_clean"].spearman == pytest.approx(8.5 / math.sqrt(9.5 * 10))
    summed = found.loc["a", "summed effect"]  # 4, 3, 4 for 4, 3, 8
    assert (summed.n, summed.spearman) == (3, pytest.approx(1.5 / math.sqrt(1.5 * 2)))
    assert summed.pearson == pytest.approx(2 / math.sqrt(2 / 3 * 14))
    largest = found.loc["a", "largest |effect|"]  # 3, 5, 4 for 4, 3, 8
    assert largest.spearman == pytest.approx(-0.5)
    assert found.loc["b", "attribution"].spearman == -1
    assert math.isnan(found.loc["b", "importance_clean"].pearson)  # constant
    assert found.loc["all", "attribution"].n == 7
    assert found.loc["all", "summed effect"].n == 4


def test_padded_prompts_are_stacked_with_their_attention_mask() -> None:
    model = tiny_host("gpt2")
    model.set_tokenizer(tiny_tokenizer("left"), default_padding_side="left")
    run = exact_run(model, "blocks.*")
    tokens = torch.tensor([[0, 0, 1, 4, 5]]), torch.tensor([[0, 0, 1, 8, 5]])
    table = patch_subcomponents(model, run, *tokens, answer_metric(model, 2), ["blocks.0.attn.W_K", "*.W_out"])
    base = log_p(model(tokens[1]))
    for row in table[table.effect != 0].iloc[::5].itertuples():
        whole = plain(model, run, row.site, row.position, [row.subcomponent], tokens)
        assert row.effect == pytest.approx(log_p(whole) - base, abs=1e-12)
    assert set(table[table.effect != 0].position) == {3, 4}
    found = compare_whole_sites(model, run, *tokens, answer_metric(model, 2))
    assert found.difference.abs().max() < 1e-10


def test_the_original_model_is_patched_whatever_hooks_the_host_has() -> None:
    model = tiny_host("gpt2")
    run, metric = tiny_run(model, "blocks.1.mlp.W_in"), answer_metric(model, 2)
    wanted = patch_subcomponents(model, run, CLEAN, CORRUPTED, metric)
    model.add_hook("blocks.0.hook_resid_post", lambda value, hook: value * 0)
    with unchanged(model):
        pd.testing.assert_frame_equal(patch_subcomponents(model, run, CLEAN, CORRUPTED, metric), wanted)


def test_a_float32_host() -> None:
    model = tiny_host("llama", dtype=torch.float32)
    found = compare_whole_sites(model, exact_run(model, "blocks.*"), CLEAN, CORRUPTED, answer_metric(model, 2))
    assert found.difference.abs().max() < 1e-4
    assert found.tl_effect.abs().max() > 1e-2


def test_answer_metric_by_hand() -> None:
    model = tiny_host("gpt2")
    logits = torch.zeros(1, 2, VOCAB)
    logits[0, 1, 3], logits[0, 1, 4], logits[0, 0, 3] = 2.0, 0.5, 9.0
    wanted = 2 - math.log(VOCAB - 2 + math.exp(2) + math.exp(0.5))
    assert float(answer_metric(model, 3)(logits)) == pytest.approx(wanted, rel=1e-6)
    assert float(answer_metric(model, 3, other=4)(logits)) == 1.5
    for answer, other in ((VOCAB, None), (-1, None), (3, VOCAB)):
        with pytest.raises(ValueError, match="out of the vocabulary"):
            answer_metric(model, answer, other)
    with pytest.raises(ValueError, match="always 0"):
        answer_metric(model, 3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(clean=CLEAN[:, :4]), "clean has 4 tokens and corrupted 5"),
        (dict(clean=CLEAN[0]), r"clean has the shape \(5,\)"),
        (dict(corrupted=CORRUPTED.repeat(2, 1)), r"corrupted has the shape \(2, 5\)"),
        (dict(clean=CLEAN[:, :0]), r"clean has the shape \(1, 0\)"),
        (dict(clean=CLEAN + VOCAB), "clean has a token out of the vocabulary"),
        (dict(corrupted=CORRUPTED - 2), "corrupted has a token out of the vocabulary"),
        (dict(clean=CLEAN.repeat(1, 2), corrupted=CORRUPTED.repeat(1, 2)), "10 tokens; this host takes at most 8"),
        (dict(sites="blocks.9.*"), "'blocks.9.*' matches nothing here"),
        (dict(sites=["blocks.*", "embed.W_E"]), r"not \['embed.W_E'\]; choose"),
        (dict(sites="unembed.W_U"), r"not \['unembed.W_U'\]; choose"),
        (dict(positions=[5]), r"positions=\[5\]: wanted some of 0 to 4"),
        (dict(positions=[-1, 2]), r"positions=\[-1, 2\]"),
        (dict(positions=[]), r"positions=\[\]"),
        (dict(max_rows=0), "max_rows must be at least 1 pass at once, found 0"),
        (dict(metric=lambda logits: logits[:, -1, :2]), r"tensor of one number, found shape \(1, 2\)"),
        (dict(metric=lambda logits: logits.detach()[0, -1, 2]), "differentiable"),
    ],
)
def test_mistakes_are_told_and_leave_the_host(changes: dict[str, Any], message: str) -> None:
    model = tiny_host("gpt2")
    metric = answer_metric(model, 2)
    given = (
        dict(model=model, run=tiny_run(model), clean=CLEAN, corrupted=CORRUPTED, metric=metric, sites=None) | changes
    )
    with unchanged(model), pytest.raises(ValueError, match=message):
        patch_subcomponents(**given)


def test_a_run_without_matrices_or_of_another_host() -> None:
    model = tiny_host("gpt2")
    args = (CLEAN, CORRUPTED, answer_metric(model, 2))
    with pytest.raises(ValueError, match="no attention or MLP matrix"):
        patch_subcomponents(model, tiny_run(model, "embed.W_E"), *args)
    with pytest.raises(ValueError, match="no such weight"):
        patch_subcomponents(model, tiny_run(tiny_host("llama"), "*.W_gate"), *args)


def test_tables_that_do_not_fit() -> None:
    model = tiny_host("gpt2")
    run, metric = tiny_run(model, "blocks.0.attn.*"), answer_metric(model, 2)
    table = patch_subcomponents(model, run, CLEAN, CORRUPTED, metric)
    none = patch_subcomponents(model, run, CLEAN, CORRUPTED, metric, threshold=1.0)
    assert none.empty
    with pytest.raises(ValueError, match="no rows"):
        joint_shares(model, run, CLEAN, CORRUPTED, metric, none)
    with pytest.raises(ValueError, match="at least 1 subcomponent"):
        joint_shares(model, run, CLEAN, CORRUPTED, metric, table, ks=(0, 1))
    with pytest.raises(ValueError, match="same host, prompts and metric"):
        joint_shares(model, run, CORRUPTED, CLEAN, metric, table)
