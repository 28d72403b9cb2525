"""The engine against the plain version: the same values and gradients from far fewer passes of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

import tl_spd as spd
from benchmarks import plain
from tests.tiny import MORE_STYLES, STYLES, tiny_host, tiny_padding, tiny_run, tiny_tokens
from tl_spd import engine as engine_module
from tl_spd.engine import Engine, scored_positions
from tl_spd.importance import Importances
from tl_spd.install import pass_hooks
from tl_spd.losses import host_weights
from tl_spd.masks import Pass
from tl_spd.sites import all_sites


@dataclass(frozen=True)
class SomeLayerwise(spd.StochasticReconLayerwise):
    """Every fourth site only: the plain version takes its time."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        return super().passes(importances, generator)[::4]


TERMS: tuple[spd.LossTerm, ...] = (
    spd.StochasticRecon(0.7, samples=2),
    SomeLayerwise(0.9),
    spd.Recon(0.5),
    spd.ReconPartial(1.1),
    spd.StochasticReconPartial(0.8, samples=2),
    spd.Faithfulness(2.0),
    spd.ImportanceMinimality(0.1),
)
FEW_TERMS: tuple[spd.LossTerm, ...] = (spd.Recon(0.5), spd.StochasticReconPartial(0.8), *TERMS[-2:])
FEW_SITES = ("embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_V", "blocks.1.attn.W_[KO]", "unembed.W_U")
PER_SEQUENCE: tuple[spd.LossTerm, ...] = (
    spd.Recon(0.5),
    spd.ReconPartial(1.1, subset="sequence"),
    spd.StochasticReconPartial(0.8, samples=2, subset="sequence"),
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def used_sites(style: str) -> tuple[str, ...]:
    """All sites that a forward pass of the style uses (an alibi host has a positional embedding that none does)."""
    names = [site.name for site in all_sites(tiny_host(style))]
    return tuple(name for name in names if not (style == "rmspre_alibi" and name == "pos_embed.W_pos"))


def engine_step(
    model: HookedTransformer,
    run: spd.Run,
    terms: Sequence[spd.LossTerm],
    tokens: Tensor,
    source: torch.Generator,
    attention_mask: Tensor | None = None,
    last_token_only: bool = False,
    progress: float = 0.0,
    max_rows: int | None = None,
    recompute: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What ``plain.plain_step`` gives, by the engine with the passes of all reconstruction terms together."""
    engine = Engine(model, run, last_token_only, max_rows, recompute)
    batch = engine.observe(tokens, attention_mask)
    found = engine.importances(batch)
    recon = [(term, term.passes(found, source)) for term in terms if isinstance(term, spd.ReconTerm)]
    kl = engine.kl(batch, [entry for _, passes in recon for entry in passes])
    parts = kl.split([len(passes) for _, passes in recon])
    values = {term.name: part.mean() for (term, _), part in zip(recon, parts, strict=True)}
    step = spd.Step(run, found, host_weights(model, run), progress, source, lambda p: engine.kl(batch, p))
    values |= {term.name: term.value(step) for term in terms if term.name not in values}
    total = torch.stack([term.coeff * values[term.name] for term in terms]).sum()
    gradients = torch.autograd.grad(total, run.parameters(), allow_unused=True, materialize_grads=True)
    return {name: value.detach() for name, value in values.items()}, list(gradients)


Outcome = tuple[dict[str, Tensor], list[Tensor]]


def assert_same(got: Outcome, want: Outcome, tolerance: float) -> None:
    assert list(got[0].keys() ^ want[0].keys()) == []
    for name, value in want[0].items():
        assert got[0][name].item() == pytest.approx(value.item(), rel=tolerance), name
    largest = max(gradient.norm().item() for gradient in want[1])
    assert largest > 0
    for index, (mine, theirs) in enumerate(zip(got[1], want[1], strict=True)):
        error, size = (mine - theirs).norm().item(), theirs.norm().item()
        assert error <= tolerance * max(size, 1e-3 * largest), f"gradient {index}: {error} of {size}"


# --- the same numbers ------------------------------------------------------------------------------------------------


SIDES = [(style, side) for style in STYLES for side in ("left", "right")]


@pytest.mark.parametrize("style", STYLES)
def test_values_and_gradients_are_the_plain_versions(style: str) -> None:
    """Every site, embeddings and unembedding too."""
    model, tokens = tiny_host(style), tiny_tokens()
    run = tiny_run(model)
    want = plain.plain_step(model, run, TERMS, tokens, generator(3), progress=0.3)
    got = engine_step(model, run, TERMS, tokens, generator(3), progress=0.3)
    assert_same(got, want, TOLERANCE[torch.float64])


def test_the_plain_versions_agree() -> None:
    """All passes differentiated together, or one by one."""
    model, tokens, mask = tiny_host("gpt2"), tiny_tokens(), tiny_padding("left")
    run = tiny_run(model)
    want = plain.plain_step(model, run, TERMS, tokens, generator(3), mask, progress=0.3)
    got = plain.plain_step(model, run, TERMS, tokens, generator(3), mask, progress=0.3, by_pass=True)
    assert_same(got, want, TOLERANCE[torch.float64])


@pytest.mark.parametrize(("style", "side"), [*SIDES, *((style, "left") for style in MORE_STYLES)])
def test_with_padding(style: str, side: str) -> None:
    """The same in every style."""
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, used_sites(style))
    want = plain.plain_step(model, run, FEW_TERMS, tokens, generator(3), mask)
    assert_same(engine_step(model, run, FEW_TERMS, tokens, generator(3), mask), want, TOLERANCE[torch.float64])


def test_with_every_site_alone() -> None:
    model, tokens, terms = tiny_host("gpt2"), tiny_tokens(), [spd.StochasticReconLayerwise(1.0)]
    run = tiny_run(model)
    want = plain.plain_step(model, run, terms, tokens, generator(3))
    assert_same(engine_step(model, run, terms, tokens, generator(3)), want, TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    "spec", [spd.Scalar(2), spd.Attention(2), spd.Attention(2, 3, "scalar"), spd.Shared(3)], ids=str
)
@pytest.mark.parametrize("side", [None, "left"])
def test_with_every_importance_function(spec: spd.ImportanceSpec, side: str | None) -> None:
    model, tokens, mask = tiny_host("gpt2"), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, ("embed.W_E", "blocks.1.mlp.*"), importance=spec)
    want = plain.plain_step(model, run, FEW_TERMS, tokens, generator(3), mask)
    assert_same(engine_step(model, run, FEW_TERMS, tokens, generator(3), mask), want, TOLERANCE[torch.float64])


@pytest.mark.parametrize("style", STYLES)
def test_in_single_precision(style: str) -> None:
    """On hosts of which the plain version itself is within 1e-5 of double precision; not every random one is."""
    model, tokens = tiny_host(style, seed=1, dtype=torch.float32), tiny_tokens()
    run = tiny_run(model)
    assert run.parameters()[0].dtype == torch.float32
    want = plain.plain_step(model, run, FEW_TERMS, tokens, generator(3))
    assert_same(engine_step(model, run, FEW_TERMS, tokens, generator(3)), want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("style", ["shortformer", "llama"])
def test_with_only_the_last_token_scored(style: str, side: str | None) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, ("embed.W_E", "blocks.*.attn.W_V", "unembed.W_U"))
    want = plain.plain_step(model, run, FEW_TERMS, tokens, generator(3), mask, last_token_only=True)
    got = engine_step(model, run, FEW_TERMS, tokens, generator(3), mask, last_token_only=True)
    assert_same(got, want, TOLERANCE[torch.float64])


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("style", STYLES)
def test_with_a_subset_per_sequence(style: str, side: str | None) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, ("embed.W_E", "blocks.*.attn.W_[QO]"))
    want = plain.plain_step(model, run, PER_SEQUENCE, tokens, generator(4), mask)
    assert_same(engine_step(model, run, PER_SEQUENCE, tokens, generator(4), mask), want, TOLERANCE[torch.float64])


def test_with_a_subset_per_sequence_at_the_unembedding() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, ("blocks.1.mlp.W_in", "unembed.W_U"))
    want = plain.plain_step(model, run, PER_SEQUENCE, tokens, generator(4))
    assert_same(engine_step(model, run, PER_SEQUENCE, tokens, generator(4)), want, TOLERANCE[torch.float64])


@pytest.mark.parametrize("max_rows", [1, 3, 7, None])
@pytest.mark.parametrize("style", ["shortformer", "gpt2"])
def test_with_the_stack_split(style: str, max_rows: int | None) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding("left")
    run = tiny_run(model, ("*W_E", "blocks.1.*W_O", "*W_U"))
    want = plain.plain_step(model, run, TERMS, tokens, generator(3), mask)
    got = engine_step(model, run, TERMS, tokens, generator(3), mask, max_rows=max_rows)
    assert_same(got, want, TOLERANCE[torch.float64])


@pytest.mark.parametrize("style", STYLES)
def test_recomputed_stacks_give_the_same_bits(style: str) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding("left")
    run = tiny_run(model)
    kept, again = (
        engine_step(model, run, TERMS, tokens, generator(3), mask, max_rows=4, recompute=recompute)
        for recompute in (False, True)
    )
    assert kept[0] == again[0]
    assert all(map(torch.equal, kept[1], again[1]))


@pytest.mark.parametrize("style", ["gpt2", "softcap"])
@pytest.mark.parametrize("elements", [1, 700, 1 << 23])
def test_with_the_logits_in_blocks(monkeypatch: pytest.MonkeyPatch, style: str, elements: int) -> None:
    monkeypatch.setattr(engine_module, "LOGIT_ELEMENTS", elements)
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding("right")
    run = tiny_run(model, "blocks.1.*.W_O")
    want = plain.plain_step(model, run, TERMS, tokens, generator(3), mask)
    assert_same(engine_step(model, run, TERMS, tokens, generator(3), mask), want, TOLERANCE[torch.float64])


def test_the_blocks_bound_the_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five passes, fifteen scored positions, a vocabulary of eleven."""
    model = tiny_host("gpt2")
    engine = Engine(model, tiny_run(model, "blocks.1.*.W_O"))
    batch = engine.observe(tiny_tokens())
    found = engine.importances(batch)
    passes = spd.StochasticRecon(samples=5).passes(found, generator())
    own, sizes = engine_module._logits, []

    def watched(rows: Tensor, W: Tensor, *others: Any) -> Tensor:
        sizes.append(rows.shape[0] * W.shape[1])
        return own(rows, W, *others)

    monkeypatch.setattr(engine_module, "_logits", watched)
    engine.kl(batch, passes)
    assert max(sizes) == 5 * 15 * 11
    sizes.clear()
    monkeypatch.setattr(engine_module, "LOGIT_ELEMENTS", 5 * 11 * 4)
    engine.kl(batch, passes)
    assert max(sizes) == 5 * 11 * 4


@pytest.mark.parametrize(
    "flags",
    [{flag: True} for flag in ("use_split_qkv_input", "use_attn_in", "use_attn_result", "use_hook_mlp_in")],
    ids=lambda flags: next(iter(flags)),
)
def test_with_the_hosts_flags(flags: dict[str, bool]) -> None:
    model, tokens = tiny_host("gpt2", **flags), tiny_tokens()
    run = tiny_run(model, used_sites("gpt2"))
    want = plain.plain_step(model, run, FEW_TERMS, tokens, generator(3))
    assert_same(engine_step(model, run, FEW_TERMS, tokens, generator(3)), want, TOLERANCE[torch.float64])
    assert all(model.cfg.to_dict()[flag] for flag in flags)


def test_rows_of_a_batch_do_not_depend_on_padding_or_on_each_other() -> None:
    """A sequence alone, and the same sequence padded on the left beside a longer one: the same KL."""
    model = tiny_host("llama")
    run = tiny_run(model, "blocks.*")
    alone = tiny_tokens(1, 3, seed=1)
    long = tiny_tokens(1, 5, seed=2)
    together = torch.cat([torch.cat([torch.zeros(1, 2, dtype=torch.long), alone], dim=1), long])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    sums = []
    for tokens, given in ((alone, None), (long, None), (together, mask)):
        engine = Engine(model, run)
        batch = engine.observe(tokens, given)
        found = engine.importances(batch)
        sums.append(engine.kl(batch, [Pass(dict(found))]).item() * batch.scored.numel())
    assert sums[2] == pytest.approx(sums[0] + sums[1], rel=1e-9)


@pytest.mark.parametrize(
    "masks",
    [
        {"blocks.0.attn.W_V": [0.5], "blocks.1.attn.W_K": [0.5, 0.2, 0.0]},
        {"unembed.W_U": [0.5, 0.2, 0.0]},
        {"embed.W_E": [True, False, True]},
    ],
    ids=lambda masks: next(iter(masks)),
)
def test_masks_that_broadcast(masks: dict[str, list[float]]) -> None:
    """Alone and beside a pass with a mask per token."""
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, FEW_SITES)
    inputs, lookups, logits = plain.original(model, run, tokens)
    found = plain.importances(model, run, inputs, lookups)
    small = Pass({name: torch.tensor(value) for name, value in masks.items()})
    whole = Pass({name: torch.tensor(value).expand(3, 5, 3).to(torch.float64) for name, value in masks.items()})
    want = plain.kl(model, run, tokens, whole, found, logits).item()
    assert plain.kl(model, run, tokens, small, found, logits).item() == pytest.approx(want, rel=1e-12)
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    assert engine.kl(batch, [small]).tolist() == pytest.approx([want], rel=1e-10)
    assert engine.kl(batch, [whole]).tolist() == pytest.approx([want], rel=1e-10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blocks.1.attn.W_K", ()),
        ("blocks.1.attn.W_K", (1,)),
        ("blocks.1.attn.W_K", (1, 1, 1)),
        ("unembed.W_U", ()),
        ("unembed.W_U", (1,)),
        ("unembed.W_U", (1, 1, 1)),
    ],
)
def test_masks_that_broadcast_along_subcomponents_in_a_stack(shape: tuple[int, ...], name: str) -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, FEW_SITES)
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    same = [Pass({name: torch.full(size, 0.5, dtype=torch.float64)}) for size in (shape, (3, 5, 3), shape)]
    first, second, third = engine.kl(batch, same).tolist()
    assert first == pytest.approx(second, rel=1e-10)
    assert first == third


# --- passes that change something else -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rolled(spd.ReconTerm):
    """Recon with the entries of one activation of the masked model moved on by one."""

    point: str = "blocks.0.hook_resid_post"

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        def roll(value: Tensor, hook: Any) -> Tensor:
            return value.roll(1, -1)

        return [Pass(dict(importances), hooks=[(self.point, roll)])]


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("style", STYLES)
def test_passes_with_hooks_of_their_own_among_others(style: str, side: str | None) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding(side)
    run = tiny_run(model, ("embed.W_E", "blocks.1.*", "unembed.W_U"))
    terms = [spd.Recon(0.3), Rolled(0.9)]
    want = plain.plain_step(model, run, terms, tokens, generator(3), mask)
    assert_same(engine_step(model, run, terms, tokens, generator(3), mask), want, TOLERANCE[torch.float64])
    assert want[0]["Rolled"] != want[0]["Recon"]


@pytest.mark.parametrize(
    ("flag", "point"),
    [
        ("use_split_qkv_input", "blocks.0.hook_q_input"),
        ("use_attn_in", "blocks.0.hook_attn_in"),
        ("use_attn_result", "blocks.0.attn.hook_result"),
        ("use_hook_mlp_in", "blocks.0.hook_mlp_in"),
    ],
)
def test_a_passs_own_hook_at_a_point_that_a_flag_of_the_host_opens(flag: str, point: str) -> None:
    model, tokens = tiny_host("gpt2", **{flag: True}), tiny_tokens()
    run = tiny_run(model, "blocks.0.*")
    terms = [spd.Recon(0.3), Rolled(0.9, point)]
    want = plain.plain_step(model, run, terms, tokens, generator(3))
    assert want[0]["Rolled"].item() != pytest.approx(want[0]["Recon"].item())
    assert_same(engine_step(model, run, terms, tokens, generator(3)), want, TOLERANCE[torch.float64])


HOOK_POINTS = [
    ("gpt2", "hook_embed"),
    ("gpt2", "hook_pos_embed"),
    ("gpt2", "blocks.1.hook_resid_pre"),
    ("gpt2", "blocks.1.ln1.hook_normalized"),
    ("gpt2", "blocks.0.attn.hook_q"),
    ("gpt2", "blocks.0.attn.hook_pattern"),
    ("gpt2", "blocks.0.attn.hook_z"),
    ("gpt2", "blocks.0.hook_attn_out"),
    ("gpt2", "blocks.0.mlp.hook_pre"),
    ("gpt2", "blocks.0.mlp.hook_post"),
    ("gpt2", "blocks.1.hook_mlp_out"),
    ("gpt2", "unembed.hook_in"),
    ("shortformer", "hook_pos_embed"),
    ("shortformer", "blocks.1.hook_resid_pre"),
    ("shortformer", "blocks.1.attn.hook_k"),
    ("no_norm_mlp", "blocks.0.hook_resid_mid"),
    ("llama", "blocks.0.mlp.hook_pre_linear"),
    ("llama", "blocks.1.ln2.hook_normalized"),
]


ROUTES = [(route, *which) for route in ("engine", "hooks") for which in HOOK_POINTS]


@pytest.mark.parametrize(("route", "style", "point"), ROUTES)
def test_a_passs_own_hook_changes_what_the_masked_sites_read(route: str, style: str, point: str) -> None:
    """With masks that are the same at every token the masked model is a plain one with other weights: hook that one."""
    model, other, tokens = tiny_host(style), tiny_host(style), tiny_tokens()
    run = tiny_run(model, "*")
    level = torch.tensor([0.2, 0.7, 1.0], dtype=torch.float64)
    with torch.no_grad():
        for site in run.sites:
            parts = run.components[site.name]
            module, _, key = site.name.rpartition(".")
            key = f"_{key}" if hasattr(other.get_submodule(module), f"_{key}") else key
            target = other.get_submodule(module).get_parameter(key)
            target.copy_(_unfolded((parts.read * level) @ parts.write, target))

    def change(value: Tensor, hook: Any) -> Tensor:
        return 0.5 * value + 0.1

    P = model(tokens).softmax(-1)
    Q = other.run_with_hooks(tokens, fwd_hooks=[(point, change)]).softmax(-1)
    want = (P * (P / Q).log()).sum(-1).mean().item()
    masks = {site.name: level for site in run.sites}
    for hook in ((point, change), (lambda name: name == point, change)):  # by name, and by a filter over names
        entry = Pass(masks, hooks=[hook])
        if route == "engine":
            engine = Engine(model, run)
            got = engine.kl(engine.observe(tokens), [entry]).item()
        else:
            logits = model.run_with_hooks(
                tokens, fwd_hooks=pass_hooks(model, run, entry, run.importances(model, tokens))
            )
            Q = logits.softmax(-1)
            got = (P * (P / Q).log()).sum(-1).mean().item()
        assert got == pytest.approx(want, rel=1e-9)


def _unfolded(matrix: Tensor, like: Tensor) -> Tensor:
    if like.ndim == 2:
        return matrix
    heads, first, second = like.shape
    if matrix.shape[0] == heads * first:  # W_O: heads along the rows
        return matrix.reshape(heads, first, second)
    return torch.stack(matrix.reshape(first, heads, second).unbind(1))


# --- scored positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("real", "last", "want"),
    [
        (None, False, [0, 1, 2, 3, 4, 5, 6, 7]),
        (None, True, [3, 7]),
        ([[0, 1, 1, 1], [1, 1, 1, 1]], False, [1, 2, 3, 4, 5, 6, 7]),
        ([[0, 1, 1, 1], [1, 1, 0, 0]], True, [3, 5]),
        ([[1, 0, 1, 0], [0, 0, 0, 1]], False, [0, 2, 7]),
        ([[1, 0, 1, 0], [0, 0, 0, 1]], True, [2, 7]),
        ([[0, 0, 0, 0], [1, 1, 0, 0]], True, [5]),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], False, []),
    ],
)
def test_scored_positions_by_hand(real: list[list[int]] | None, last: bool, want: list[int]) -> None:
    given = None if real is None else torch.tensor(real).bool()
    assert scored_positions(torch.zeros(2, 4, dtype=torch.long), given, last).tolist() == want


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_plain_versions_scored_positions_are_the_same(side: str | None, last: bool) -> None:
    tokens, mask = tiny_tokens(), tiny_padding(side)
    engine = Engine(tiny_host("gpt2"), tiny_run(tiny_host("gpt2"), "embed.W_E"), last)
    want = plain.scored_places(tokens, mask, last).flatten().nonzero()[:, 0]
    assert torch.equal(engine.observe(tokens, mask).scored, want)


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_of_padding_alone_is_refused(last: bool) -> None:
    model = tiny_host("gpt2")
    engine = Engine(model, tiny_run(model, "blocks.0.mlp.W_in"), last)
    with pytest.raises(ValueError, match=r"No position of this batch \(2, 4\) is scored"):
        engine.observe(tiny_tokens(2, 4), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("style", ["shortformer", "gpt2", "llama"])
def test_a_sequence_of_padding_alone_counts_for_nothing(style: str) -> None:
    model, tokens = tiny_host(style), tiny_tokens()
    run = tiny_run(model, ("embed.W_E", "blocks.*.attn.W_[VO]", "unembed.W_U"), importance=spd.Attention(2))
    mask = torch.tensor([[1] * 5, [0] * 5, [0, 1, 1, 1, 1]])
    kept = [0, 2]
    terms = [spd.Recon(1.0), spd.ReconLayerwise(1.0), spd.ImportanceMinimality(1.0)]
    want = plain.plain_step(model, run, terms, tokens[kept], generator(), mask[kept])
    got = engine_step(model, run, terms, tokens, generator(), mask)
    assert_same(got, want, TOLERANCE[torch.float64])


# --- what is run, and what is not ------------------------------------------------------------------------------------


def test_passes_join_the_stack_where_they_begin() -> None:
    """Rows that each block sees: a pass that masks nothing before layer l has not been there before."""
    model, tokens = tiny_host("gpt2", n_layers=4), tiny_tokens()
    run = tiny_run(model, ("embed.W_E", "blocks.*.mlp.W_in", "unembed.W_U"))
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    found = engine.importances(batch)
    rows: dict[int, list[int]] = {layer: [] for layer in range(4)}
    for layer, block in enumerate(engine.twin.blocks):
        block.hook_resid_post.register_forward_hook(lambda _, __, value, at=layer: rows[at].append(value.shape[0]))
    engine.kl(batch, spd.ReconLayerwise().passes(found, generator()))
    assert rows == {0: [2 * 3], 1: [3 * 3], 2: [4 * 3], 3: [6 * 3]}
    for seen in rows.values():
        seen.clear()
    engine.kl(batch, [Pass({"blocks.2.mlp.W_in": found["blocks.2.mlp.W_in"]})])
    assert rows == {0: [], 1: [], 2: [3], 3: [3]}


@pytest.mark.parametrize(
    ("max_rows", "tokens", "sizes"),
    [
        (None, 1 << 13, [15]),
        (None, 30, [6, 6, 3]),
        (None, 1, [3] * 5),
        (7, 1, [6, 6, 3]),
        (3, 1, [3] * 5),
        (1, 1, [3] * 5),
    ],
)
def test_max_rows_or_else_tokens_bound_the_stack(
    monkeypatch: pytest.MonkeyPatch, max_rows: int | None, tokens: int, sizes: list[int]
) -> None:
    """Three sequences of five tokens and five passes; a single pass is never cut."""
    monkeypatch.setattr(engine_module, "STACK_TOKENS", tokens)
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.*.W_O")
    engine = Engine(model, run, max_rows=max_rows)
    batch = engine.observe(tiny_tokens())
    found = engine.importances(batch)
    rows: list[int] = []
    engine.twin.blocks[1].hook_resid_post.register_forward_hook(lambda _, __, value: rows.append(value.shape[0]))
    engine.kl(batch, spd.StochasticRecon(samples=5).passes(found, generator()))
    assert rows == sizes


@pytest.mark.parametrize("max_rows", [0, -1])
def test_a_stack_of_no_rows_is_refused(max_rows: int) -> None:
    model = tiny_host("gpt2")
    with pytest.raises(ValueError, match=f"max_rows must be at least 1 sequence, found {max_rows}"):
        Engine(model, tiny_run(model, "embed.W_E"), max_rows=max_rows)


def test_passes_come_back_in_the_order_given() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, FEW_SITES)
    engine = Engine(model, run)
    batch = engine.observe(tokens)
    found = engine.importances(batch)
    passes = spd.ReconLayerwise().passes(found, generator()) + Rolled().passes(found, generator())
    alone = [engine.kl(batch, [entry]).item() for entry in passes]
    for order in (torch.randperm(len(passes), generator=generator(seed)).tolist() for seed in range(3)):
        together = engine.kl(batch, [passes[index] for index in order]).tolist()
        assert together == pytest.approx([alone[index] for index in order], rel=1e-10)


def test_no_passes_have_no_divergences() -> None:
    model = tiny_host("gpt2")
    engine = Engine(model, tiny_run(model, "embed.W_E"))
    assert engine.kl(engine.observe(tiny_tokens()), []).shape == (0,)


def test_a_pass_that_masks_nothing_has_no_divergence() -> None:
    model = tiny_host("gpt2")
    engine = Engine(model, tiny_run(model, "embed.W_E"))
    batch = engine.observe(tiny_tokens())
    assert engine.kl(batch, [Pass({})]).abs().max().item() < 1e-12


@pytest.mark.parametrize("style", ["shortformer", "gpt2", "llama"])
def test_the_host_is_never_run_hooked_or_changed(style: str) -> None:
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding("left")
    run = tiny_run(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = [id(value) for value in model.parameters()]
    calls: list[int] = []
    handles = [module.register_forward_hook(lambda *_: calls.append(1)) for module in model.modules()]
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counts = [len(getattr(module, table)) for module in model.modules() for table in tables]
    for terms in (FEW_TERMS, [Rolled()]):
        engine = Engine(model, run)
        batch = engine.observe(tokens, mask)
        found = engine.importances(batch)
        step = spd.Step(run, found, host_weights(model, run), 0.5, generator(), lambda p: engine.kl(batch, p))  # noqa: B023
        torch.stack([term.value(step) for term in terms]).sum().backward()
    assert calls == []
    assert counts == [len(getattr(module, table)) for module in model.modules() for table in tables]
    assert [id(value) for value in model.parameters()] == ids
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert all(value.grad is None for value in engine.twin.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(value.grad is not None for value in run.parameters())
    for handle in handles:
        handle.remove()


def test_a_users_hooks_on_the_host_do_not_reach_the_engine() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.*")
    want = engine_step(model, run, FEW_TERMS, tokens, generator())
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda value, hook: 0 * value)]):
        assert_same(engine_step(model, run, FEW_TERMS, tokens, generator()), want, 1e-15)


def test_an_alibi_host_that_has_already_run() -> None:
    model, tokens = tiny_host("rmspre_alibi"), tiny_tokens()
    model(tokens)  # keeps a table of biases as a plain attribute from now on
    engine = Engine(model, tiny_run(model, "blocks.0.*"))
    assert engine.observe(tokens).final.isfinite().all()


def test_the_engine_sees_weights_that_were_swapped_in_the_meantime() -> None:
    model, other, tokens = tiny_host("gpt2"), tiny_host("gpt2", seed=1), tiny_tokens()
    run = tiny_run(model, "blocks.*")
    engine = Engine(model, run)
    first = engine.observe(tokens).final
    model.blocks[0].mlp.W_in = other.blocks[0].mlp.W_in
    second = engine.observe(tokens).final
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, Engine(model, run).observe(tokens).final)


# --- misuse ----------------------------------------------------------------------------------------------------------

WRONG = {
    "unknown site": ({"blocks.9.attn.W_Q": (3,)}, r"blocks\.9\.attn\.W_Q"),
    "wrong C": ({"blocks.1.attn.W_Q": (4,)}, r"blocks\.1\.attn\.W_Q has shape \(4,\).*3\)"),
    "wrong batch": ({"blocks.1.attn.W_Q": (2, 5, 3)}, r"blocks\.1\.attn\.W_Q has shape \(2, 5, 3\).*\(3, 5, 3\)"),
    "whole stack": ({"blocks.1.attn.W_Q": (6, 5, 3)}, r"blocks\.1\.attn\.W_Q has shape \(6, 5, 3\).*\(3, 5, 3\)"),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_masks_of_a_users_term_name_site_given_and_wanted(case: str, count: int) -> None:
    shapes, message = WRONG[case]
    model = tiny_host("gpt2")
    engine = Engine(model, tiny_run(model, "blocks.1.attn.W_[QK]"))
    batch = engine.observe(tiny_tokens())
    entry = Pass({name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match=message):
        engine.kl(batch, [entry] * count)


# --- bfloat16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_a_half_precision_host_trains_with_finite_losses(style: str, dtype: torch.dtype) -> None:
    model = tiny_host(style, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = spd.decompose(
        model, tiny_tokens(), sites="*", C=3, steps=2, log_every=1, losses=FEW_TERMS, importance=spd.Vector(2),
        warmup=spd.FaithfulnessWarmup(0), progress=False,
    )  # fmt: skip
    assert np.isfinite(run.history.to_numpy()).all()
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in run.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bfloat16_is_near_single_precision() -> None:
    """The same weights in both: a KL of order 1 agrees to a few hundredths."""
    low, tokens = tiny_host("gpt2", dtype=torch.bfloat16), tiny_tokens()
    high = tiny_host("gpt2", dtype=torch.float32)
    high.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    values = []
    for model in (low, high):
        run = tiny_run(model, "blocks.*")
        values.append(engine_step(model, run, FEW_TERMS, tokens, generator())[0])
    for name, want in values[1].items():
        assert values[0][name].item() == pytest.approx(want.item(), rel=0.1), name
