"""Loss terms against their formulas, computed straight through explicit matrix algebra, and against finite differences."""

from __future__ import annotations

import gc
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_lens import HookedTransformer

import tl_spd as spd
from tests.tiny import MORE_STYLES, STYLES, tiny_host, tiny_run, tiny_tokens
from tl_spd.engine import Batch, Engine
from tl_spd.importance import Importances
from tl_spd.losses import host_weights, random_subset
from tl_spd.run import new_run
from tl_spd.sites import all_sites, find_sites, replace_parameter, unfold

Masks = Mapping[str, Tensor]
ALL_TERMS: tuple[spd.LossTerm, ...] = (
    spd.Faithfulness(),
    spd.ImportanceMinimality(),
    spd.StochasticRecon(samples=2),
    spd.StochasticReconLayerwise(samples=2),
    spd.Recon(),
    spd.ReconLayerwise(),
    spd.ReconPartial(),
    spd.StochasticReconPartial(samples=2),
)
IDS = [term.name for term in ALL_TERMS]
SITES = {
    "shortformer": ("embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_K", "blocks.1.attn.W_[QVO]", "unembed.W_U"),
    "gpt2": ("embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_[QO]", "blocks.*.mlp.W_*", "unembed.W_U"),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- two hosts as explicit matrix algebra ----------------------------------------------------------------------------


class Algebra:
    """The masked forward pass of a shortformer or GPT-2-style host, written down without hooks or modules."""

    def __init__(self, model: HookedTransformer, run: spd.Run, masks: Masks):
        self.p = {name: value.detach() for name, value in model.named_parameters()}
        self.run, self.masks = run, masks

    def times(self, name: str, x: Tensor, W: Tensor) -> Tensor:
        """``x W``, or ``((x read) * m) write`` where the site is masked."""
        if name not in self.masks:
            return x @ W
        parts = self.run.components[name]
        return ((x @ parts.read) * self.masks[name]) @ parts.write

    def row(self, name: str, index: Tensor, W: Tensor) -> Tensor:
        one_hot = (index[..., None] == torch.arange(W.shape[0])).to(W.dtype)
        return self.times(name, one_hot, W)

    def attention(self, layer: int, qk: Tensor, v_in: Tensor, heads: int) -> Tensor:
        at = f"blocks.{layer}.attn."
        batch, pos, _ = qk.shape
        out = {}
        for kind, x in (("Q", qk), ("K", qk), ("V", v_in)):
            W, b = self.p[f"{at}W_{kind}"], self.p[f"{at}b_{kind}"]
            folded = torch.cat(list(W), dim=1)  # head blocks side by side
            out[kind] = (self.times(f"{at}W_{kind}", x, folded) + b.flatten()).reshape(batch, pos, heads, -1)
        z = torch.zeros_like(out["V"])
        for head in range(heads):
            for i in range(pos):
                scores = torch.stack([(out["Q"][:, i, head] * out["K"][:, j, head]).sum(-1) for j in range(i + 1)], -1)
                pattern = (scores / math.sqrt(out["Q"].shape[-1])).softmax(-1)
                z[:, i, head] = sum(pattern[:, j, None] * out["V"][:, j, head] for j in range(i + 1))
        W_O = torch.cat(list(self.p[f"{at}W_O"]), dim=0)
        return self.times(f"{at}W_O", z.flatten(2), W_O) + self.p[f"{at}b_O"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.p[f"{name}.w"] + self.p[f"{name}.b"]

    def logits(self, style: str, tokens: Tensor) -> Tensor:
        resid = self.row("embed.W_E", tokens, self.p["embed.W_E"])
        positions = self.row(
            "pos_embed.W_pos", torch.arange(tokens.shape[1]).expand_as(tokens), self.p["pos_embed.W_pos"]
        )
        if style == "gpt2":
            resid = resid + positions
        for layer in range(2):
            at = f"blocks.{layer}."
            if style == "shortformer":
                resid = resid + self.attention(layer, resid + positions, resid, 2)
                continue
            normed = self.norm(at + "ln1", resid)
            resid = resid + self.attention(layer, normed, normed, 2)
            normed = self.norm(at + "ln2", resid)
            W_in, W_out = self.p[at + "mlp.W_in"], self.p[at + "mlp.W_out"]
            pre = self.times(at + "mlp.W_in", normed, W_in) + self.p[at + "mlp.b_in"]
            cubic = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
            post = 0.5 * pre * (1 + torch.tanh(cubic))
            resid = resid + self.times(at + "mlp.W_out", post, W_out) + self.p[at + "mlp.b_out"]
        if style == "gpt2":
            resid = self.norm("ln_final", resid)
        return self.times("unembed.W_U", resid, self.p["unembed.W_U"]) + self.p["unembed.b_U"]


class Case:
    """A tiny host, a Run, tokens, and both routes to a pass's KL."""

    def __init__(self, style: str, sites: Sequence[str] | None = None, importance: spd.ImportanceSpec | None = None):
        self.style, self.tokens = style, tiny_tokens(3, 4)
        self.model = tiny_host(style)
        self.run = tiny_run(self.model, tuple(sites or SITES[style]), importance=importance or spd.Vector(2))
        self.engine = Engine(self.model, self.run)
        self.batch: Batch = self.engine.observe(self.tokens)
        self.host = Algebra(self.model, self.run, {}).logits(style, self.tokens)

    def step(self, seed: int = 5, progress: float = 0.25) -> spd.Step:
        found = self.engine.importances(self.batch)
        weights = host_weights(self.model, self.run)
        source = generator(seed)
        return spd.Step(self.run, found, weights, progress, source, lambda passes: self.engine.kl(self.batch, passes))

    def kl(self, masks: Masks) -> float:
        """KL(P || Q) of one pass by algebra: sum over the vocabulary, mean over all positions."""
        logits = Algebra(self.model, self.run, masks).logits(self.style, self.tokens)
        P, Q = self.host.softmax(-1), logits.softmax(-1)
        return (P * (P / Q).log()).sum(-1).mean().item()


@pytest.fixture(scope="module", params=list(SITES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_the_algebra_is_the_hosts(case: Case) -> None:
    torch.testing.assert_close(case.host, case.model(case.tokens).detach(), rtol=1e-10, atol=1e-11)


def test_importances_are_away_from_the_kinks(case: Case) -> None:
    for pre in case.step().importances.pre.values():
        assert bool(((pre > 0.1) & (pre < 0.9)).all())


# --- values ----------------------------------------------------------------------------------------------------------


def mixed(g: Tensor, rho: Tensor) -> Tensor:
    return g + (1 - g) * rho


def drawn(source: torch.Generator, g: Tensor) -> Tensor:
    return mixed(g, torch.rand(3, 4, g.shape[-1], generator=source, dtype=torch.float64))


def close(value: Tensor, want: float) -> bool:
    return value.item() == pytest.approx(want, rel=1e-9)


def test_faithfulness(case: Case) -> None:
    total, entries = 0.0, 0
    for name, parts in case.run.components.items():
        own = dict(case.model.named_parameters())[name].detach()
        kind = name.rpartition(".")[2]
        W = torch.cat(list(own), dim=0 if kind == "W_O" else 1) if own.ndim == 3 else own
        for i in range(W.shape[0]):
            row = sum(parts.read[i, c] * parts.write[c] for c in range(parts.C))
            total, entries = total + (W[i] - row).square().sum().item(), entries + W.shape[1]
    assert close(spd.Faithfulness().value(case.step()), total / entries)


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
def test_importance_minimality(case: Case, progress: float) -> None:
    step = case.step(progress=progress)
    p, total = 0.8 - 0.6 * progress, 0.0
    for place in range(12):
        for pre in step.importances.pre.values():
            total += sum((gamma + 1e-3) ** p for gamma in pre.detach().reshape(12, -1)[place].tolist())
    assert close(spd.ImportanceMinimality(1.0, 0.8, 0.2, 1e-3).value(step), total / 12)


def test_importance_minimality_looks_at_real_positions_and_goes_on_above_one() -> None:
    pre = {"a": torch.tensor([[[2.0, -1.0], [0.5, 0.5]]]), "b": torch.tensor([[[0.25], [9.0]]])}
    found = Importances(pre, real=torch.tensor([[True, False]]))
    run = tiny_run(tiny_host("gpt2"), "embed.W_E")
    step = spd.Step(run, found, {}, 1.0, generator(), lambda passes: torch.zeros(0))
    term = spd.ImportanceMinimality(1.0, 0.9, 0.5, 1e-12)
    assert term.value(step).item() == pytest.approx(1.01**0.5 + 1e-6 + 0.25**0.5)


def test_recon(case: Case) -> None:
    step = case.step()
    assert close(spd.Recon().value(step), case.kl(step.importances))


def test_recon_layerwise(case: Case) -> None:
    step = case.step()
    want = [case.kl({name: g}) for name, g in step.importances.items()]
    assert close(spd.ReconLayerwise().value(step), sum(want) / len(want))


@pytest.mark.parametrize("samples", [1, 3])
def test_stochastic_recon(case: Case, samples: int) -> None:
    step, source = case.step(7), generator(7)
    want = []
    for _ in range(samples):
        want.append(case.kl({name: drawn(source, g) for name, g in step.importances.items()}))
    assert close(spd.StochasticRecon(samples=samples).value(step), sum(want) / samples)


@pytest.mark.parametrize("samples", [1, 2])
def test_stochastic_recon_layerwise(case: Case, samples: int) -> None:
    step, source = case.step(7), generator(7)
    want = []
    for name, g in step.importances.items():
        for _ in range(samples):
            want.append(case.kl({name: drawn(source, g)}))
    assert close(spd.StochasticReconLayerwise(samples=samples).value(step), sum(want) / len(want))


@pytest.mark.parametrize("seed", range(3))
def test_recon_partial(case: Case, seed: int) -> None:
    step = case.step(seed)
    subset = random_subset(list(step.importances), generator(seed))
    want = case.kl({name: step.importances[name] for name in subset})
    assert close(spd.ReconPartial().value(step), want)


def test_stochastic_recon_partial(case: Case) -> None:
    step, source = case.step(7), generator(7)
    want, subsets = [], []
    for _ in range(3):
        subsets.append(random_subset(list(step.importances), source))
        want.append(case.kl({name: drawn(source, step.importances[name]) for name in subsets[-1]}))
    assert len(set(map(tuple, subsets))) > 1  # every sample draws a subset of its own
    assert close(spd.StochasticReconPartial(samples=3).value(step), sum(want) / 3)


@pytest.mark.parametrize("term", [spd.ReconPartial(subset="sequence"), spd.StochasticReconPartial(subset="sequence")])
@pytest.mark.parametrize("style", list(SITES))
def test_partial_terms_with_a_subset_per_sequence(style: str, term: spd.ReconTerm) -> None:
    """One sequence after another by algebra, each with the sites that it masks."""
    case = Case(style, ["embed.W_E", "blocks.*"])
    step = case.step(3)
    (entry,) = term.passes(step.importances, generator(3))
    by_sequence = [{name: m for name, m in entry.masks.items() if entry.rows[name][b]} for b in range(3)]
    assert len({tuple(masks) for masks in by_sequence}) > 1
    logits = [
        Algebra(case.model, case.run, {n: m[b : b + 1] for n, m in masks.items()}).logits(style, case.tokens[b : b + 1])
        for b, masks in enumerate(by_sequence)
    ]
    P, Q = case.host.softmax(-1), torch.cat(logits).softmax(-1)
    assert close(term.value(step), (P * (P / Q).log()).sum(-1).mean().item())
    for name, mask in entry.masks.items():
        g = step.importances[name]
        assert torch.equal(mask, g) if isinstance(term, spd.ReconPartial) else bool(((mask >= g) & (mask <= 1)).all())


@pytest.mark.parametrize("term", [spd.ReconPartial(subset="sequence"), spd.StochasticReconPartial(subset="sequence")])
def test_a_subset_per_sequence_covers_the_unembedding(term: spd.ReconTerm) -> None:
    case = Case("gpt2", ["blocks.0.mlp.W_in", "unembed.W_U"])
    step = case.step(1)
    (entry,) = term.passes(step.importances, generator(1))
    chosen = entry.rows["unembed.W_U"]
    assert chosen.any()
    assert not chosen.all()
    logits = []
    for b in range(3):
        masks = {name: m[b : b + 1] for name, m in entry.masks.items() if entry.rows[name][b]}
        logits.append(Algebra(case.model, case.run, masks).logits("gpt2", case.tokens[b : b + 1]))
    P, Q = case.host.softmax(-1), torch.cat(logits).softmax(-1)
    assert close(term.value(step), (P * (P / Q).log()).sum(-1).mean().item())


# --- gradients -------------------------------------------------------------------------------------------------------


GRADIENT_SITES = ("embed.W_E", "blocks.0.mlp.W_in", "blocks.1.attn.W_Q", "unembed.W_U")


@pytest.fixture(scope="module", params=[spd.Scalar(2), spd.Attention(2), spd.Shared(3)], ids=str)
def gradient_case(request: pytest.FixtureRequest) -> Case:
    return Case("gpt2", GRADIENT_SITES, request.param)


@pytest.mark.parametrize("term", ALL_TERMS, ids=IDS)
def test_gradients_agree_with_finite_differences(gradient_case: Case, term: spd.LossTerm) -> None:
    """Along random directions in all read, all write, and all importance parameters."""
    case, run = gradient_case, gradient_case.run
    groups = {
        "read": [parts.read for parts in run.components.values()],
        "write": [parts.write for parts in run.components.values()],
        "importance": [value for function in run.functions.values() for value in function.parameters()],
    }
    every = [value for group in groups.values() for value in group]
    gradients = torch.autograd.grad(term.value(case.step()), every, allow_unused=True, materialize_grads=True)
    gradient = dict(zip(map(id, every), gradients, strict=True))
    source, h = generator(9), 1e-5
    for kind, parameters in groups.items():
        direction = [torch.randn(p.shape, generator=source, dtype=p.dtype) for p in parameters]
        exact = sum((gradient[id(p)] * d).sum().item() for p, d in zip(parameters, direction, strict=True))
        moved = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, d in zip(parameters, direction, strict=True):
                    p.add_(d, alpha=sign * h)
                moved.append(term.value(case.step()).item())
                for p, d in zip(parameters, direction, strict=True):
                    p.sub_(d, alpha=sign * h)
        assert exact == pytest.approx((moved[0] - moved[1]) / (2 * h), rel=2e-6, abs=1e-9), kind
        touched = {
            "Faithfulness": kind != "importance",
            "ImportanceMinimality": kind == "importance" or (kind == "read" and isinstance(run.importance, spd.Scalar)),
        }.get(term.name, True)
        assert (exact != 0) is touched, kind


# --- which sites take which masks ------------------------------------------------------------------------------------


def plain_importances(names: str = "abc", batch: int = 2) -> Importances:
    return Importances({name: torch.full((batch, 3, 2), 0.5) for name in names})


def test_passes_say_which_sites_are_masked() -> None:
    g = plain_importances()
    masked = {term.name: [sorted(entry.masks) for entry in term.passes(g, generator())] for term in ALL_TERMS}
    every = ["a", "b", "c"]
    assert masked["Faithfulness"] == masked["ImportanceMinimality"] == masked["Recon"] == [every]
    assert masked["StochasticRecon"] == [every, every]
    assert masked["ReconLayerwise"] == [["a"], ["b"], ["c"]]
    assert masked["StochasticReconLayerwise"] == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]]
    assert [len(masked[name]) for name in ("ReconPartial", "StochasticReconPartial")] == [1, 2]
    ones = spd.Faithfulness().passes(g, generator())[0].masks
    assert all(bool((mask == 1).all()) for mask in ones.values())


def test_masks_of_every_stochastic_pass_are_their_own() -> None:
    for term in (spd.StochasticRecon(samples=4), spd.StochasticReconLayerwise(samples=4)):
        masks = [mask for entry in term.passes(plain_importances(), generator()) for mask in entry.masks.values()]
        flat = torch.cat([mask.flatten() for mask in masks])
        assert flat.unique().numel() == flat.numel()


def test_subsets_are_uniform_in_size_and_within_a_size() -> None:
    names, source, n = ["a", "b", "c", "d"], generator(), 4000
    drawn_subsets = Counter(tuple(random_subset(names, source)) for _ in range(n))
    for size in range(1, 5):
        subsets = list(combinations(names, size))
        share = 1 / 4 / len(subsets)
        for subset in subsets:  # in the order of the names, each as often as the others of its size
            assert abs(drawn_subsets[subset] / n - share) < 5 * (share * (1 - share) / n) ** 0.5, subset
    assert sum(drawn_subsets.values()) == n
    assert () not in drawn_subsets


def test_a_single_site_is_always_chosen() -> None:
    assert [random_subset(["a"], generator(seed)) for seed in range(5)] == [["a"]] * 5


@pytest.mark.parametrize("term", [spd.ReconPartial(), spd.StochasticReconPartial()])
def test_partial_passes_use_a_subset_per_step(term: spd.LossTerm) -> None:
    for seed in range(20):
        (entry,) = term.passes(plain_importances(), generator(seed))
        assert list(entry.masks) == random_subset(["a", "b", "c"], generator(seed))
        assert not entry.rows


@pytest.mark.parametrize("cls", [spd.ReconPartial, spd.StochasticReconPartial])
def test_partial_passes_use_a_subset_per_sequence(cls: type[Any]) -> None:
    batch = 3000
    (entry,) = cls(subset="sequence").passes(plain_importances(batch=batch), generator())
    chosen = torch.stack([entry.rows[name] for name in "abc"], dim=1)
    subsets = Counter(map(tuple, chosen.tolist()))
    for flags, count in subsets.items():
        share = {1: 1 / 9, 2: 1 / 9, 3: 1 / 3}[sum(flags)]
        assert abs(count / batch - share) < 5 * (share * (1 - share) / batch) ** 0.5
    assert len(subsets) == 7


def test_sites_that_no_sequence_chose_are_left_out() -> None:
    g = plain_importances("abcdefgh", batch=1)
    (entry,) = spd.ReconPartial(subset="sequence").passes(g, generator(1))
    assert 0 < len(entry.masks) < 8
    assert list(entry.masks) == list(entry.rows)
    assert all(bool(rows.all()) for rows in entry.rows.values())


def test_the_exponent_goes_linearly() -> None:
    term = spd.ImportanceMinimality(1.0, 0.9, 0.1)
    assert [term.p(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.9, 0.7, 0.5, 0.1])


@dataclass(frozen=True)
class Watch(spd.LossTerm):
    """Tells its value how far the training is."""

    def value(self, step: spd.Step) -> Tensor:
        write = next(iter(step.run.components.values())).write
        return step.progress + 0 * write.sum()


def test_the_exponent_is_annealed_over_training() -> None:
    run = spd.decompose(
        tiny_host("gpt2"), tiny_tokens(), sites="blocks.0.mlp.W_in", C=2, steps=5, log_every=1, losses=[Watch()],
        warmup=spd.FaithfulnessWarmup(0), progress=False,
    )  # fmt: skip
    assert run.history["Watch"].tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])


# --- terms as settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", ALL_TERMS, ids=IDS)
def test_terms_are_frozen_and_start_with_their_coefficient(term: spd.LossTerm) -> None:
    assert fields(term)[0].name == "coeff"
    assert type(term)(3.5).coeff == 3.5
    assert term.coeff == 1.0
    with pytest.raises(FrozenInstanceError):
        term.coeff = 2.0  # type: ignore[misc]
    assert term == type(term)(**asdict(term))


@pytest.mark.parametrize("term", ALL_TERMS, ids=IDS)
@pytest.mark.parametrize("coeff", [-1.0, float("nan")])
def test_coefficients_below_zero_are_refused(term: spd.LossTerm, coeff: float) -> None:
    with pytest.raises(ValueError, match=rf"{term.name}: coeff must be a number of at least 0, found {coeff}"):
        type(term)(coeff)


@pytest.mark.parametrize(
    "cls", [spd.StochasticRecon, spd.StochasticReconLayerwise, spd.StochasticReconPartial], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("samples", [0, -3])
def test_samples_below_one_are_refused(cls: type[Any], samples: int) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__}: samples must be at least 1, found {samples}"):
        cls(samples=samples)


@pytest.mark.parametrize("name", ["p_start", "p_final", "eps"])
@pytest.mark.parametrize("value", [0.0, -0.1, float("nan")])
def test_exponents_that_are_not_above_zero_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"p_start, p_final and eps must be above 0, found .*{value}"):
        spd.ImportanceMinimality(**{name: value})


def test_minimality_falls_from_its_first_coefficient_to_its_own() -> None:
    term = spd.ImportanceMinimality(0.01, coeff_start=1.0, coeff_falls=(0.2, 0.6))
    at = {0.0: 1.0, 0.2: 1.0, 0.3: 10**-0.5, 0.4: 0.1, 0.5: 10**-1.5, 0.6: 0.01, 1.0: 0.01}
    assert {progress: term.coeff_at(progress) for progress in at} == pytest.approx(at)
    assert [spd.ImportanceMinimality(0.01).coeff_at(progress) for progress in at] == [0.01] * len(at)


@pytest.mark.parametrize("cls", [spd.ReconPartial, spd.StochasticReconPartial])
def test_unknown_subsets_are_refused(cls: type[Any]) -> None:
    term = object.__new__(cls)
    for entry in fields(cls):
        object.__setattr__(term, entry.name, "batch" if entry.name == "subset" else 1)
    with pytest.raises(ValueError, match=rf"{cls.__name__}: subset must be 'step' or 'sequence', found 'batch'"):
        inspect.unwrap(cls.__post_init__)(term)  # past the type checker of the test run


def test_the_papers_terms_and_coefficients() -> None:
    def table(setting: Any) -> dict[str, float]:
        return {term.name: term.coeff for term in spd.paper_losses(setting)}

    assert table("induction") == {
        "Faithfulness": 1000,
        "ImportanceMinimality": 0.02,
        "StochasticRecon": 1,
        "StochasticReconLayerwise": 1,
        "Recon": 0.5,
    }
    assert table("gpt2") == {
        "Faithfulness": 1e6,
        "ImportanceMinimality": 0.05,
        "StochasticRecon": 0.1,
        "StochasticReconLayerwise": 0.1,
        "Recon": 0.1,
        "ReconPartial": 10,
        "StochasticReconPartial": 10,
    }
    for setting in ("induction", "gpt2"):
        minimality = next(t for t in spd.paper_losses(setting) if isinstance(t, spd.ImportanceMinimality))  # type: ignore[arg-type]
        assert (minimality.p_start, minimality.p_final) == (0.9, 0.1)
    with pytest.raises(ValueError, match="'induction' and 'gpt2', found 'llama'"):
        inspect.unwrap(spd.paper_losses)("llama")


# --- terms as hooks --------------------------------------------------------------------------------------------------


def hook_count(model: HookedTransformer) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in model.hook_dict.values())
    return own + sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def with_weights(model: HookedTransformer, tokens: Tensor, matrices: Mapping[str, Tensor]) -> Tensor:
    """The host's logits with whole weight matrices in the place of its own."""
    chosen = [site for site in all_sites(model) if site.name in matrices]
    new = [torch.nn.Parameter(unfold(site, matrices[site.name])) for site in chosen]
    old = [replace_parameter(model, site, value) for site, value in zip(chosen, new, strict=True)]
    try:
        with torch.no_grad():
            return model(tokens)
    finally:
        for site, value in zip(chosen, old, strict=True):
            replace_parameter(model, site, value)


@pytest.mark.parametrize("style", [*STYLES, *MORE_STYLES])
def test_hooks_of_every_term_in_every_style(style: str) -> None:
    """With the same importances at every token a mask amounts to a weight: ``read diag(m) write``.

    One term masks every site, the others a quarter of them in turn.
    """
    model, tokens = tiny_host(style), tiny_tokens()
    unused = {"pos_embed.W_pos"} if style == "rmspre_alibi" else set()
    names = [site.name for site in all_sites(model) if site.name not in unused]
    run = tiny_run(model, tuple(names))
    levels = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    lookups = run.importances(model, tokens).lookups
    for number, term in enumerate(ALL_TERMS):
        stochastic = "Stochastic" in term.name  # its mask is 1 where the importance is
        level = torch.ones_like(levels) if stochastic else levels
        chosen = names if isinstance(term, spd.Recon) else names[number::4]
        found = Importances({name: level.expand(*tokens.shape, 3) for name in chosen}, lookups)
        passes = term.passes(found, generator())
        index = len(passes) // 2
        with torch.no_grad():
            got = model.run_with_hooks(
                tokens, fwd_hooks=term.hooks(run, found, model, generator=generator(), index=index)
            )
        mask = torch.ones_like(levels) if isinstance(term, spd.Faithfulness) else level
        parts = {name: run.components[name] for name in passes[index].masks}
        amount = {name: ((part.read * mask) @ part.write).detach() for name, part in parts.items()}
        want = with_weights(model, tokens, amount)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m, t=term: f"{t.name}: {m}")
        assert hook_count(model) == 0


@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in", "use_attn_result", "use_hook_mlp_in"])
@pytest.mark.parametrize("style", ["gpt2", "parallel"])
def test_hooks_with_the_hosts_flags(style: str, flag: str) -> None:
    plain, flagged, tokens = tiny_host(style), tiny_host(style, **{flag: True}), tiny_tokens()
    run = tiny_run(plain, "blocks.1.*")
    found = run.importances(plain, tokens)
    with torch.no_grad():
        want = plain.run_with_hooks(tokens, fwd_hooks=spd.StochasticRecon().hooks(run, found))
        got = flagged.run_with_hooks(tokens, fwd_hooks=spd.StochasticRecon().hooks(run, found, flagged))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert hook_count(flagged) == 0


def test_hooks_carry_gradients_to_the_run_and_none_to_the_host_where_it_is_frozen() -> None:
    model, tokens = tiny_host("gpt2").requires_grad_(False), tiny_tokens()
    run = tiny_run(model)
    hooks = spd.Recon().hooks(run, run.importances(model, tokens))
    model.run_with_hooks(tokens, fwd_hooks=hooks).square().sum().backward()
    assert all(parts.read.grad is not None and parts.write.grad is not None for parts in run.components.values())
    assert all(value.grad is None for value in model.parameters())


def test_hooks_draw_from_the_generator_or_a_fresh_one() -> None:
    model, tokens = tiny_host("gpt2"), tiny_tokens()
    run = tiny_run(model, "blocks.0.mlp.W_in")
    found = run.importances(model, tokens)
    state = torch.get_rng_state()

    def logits(**given: Any) -> Tensor:
        return model.run_with_hooks(tokens, fwd_hooks=spd.StochasticRecon().hooks(run, found, **given)).detach()

    assert torch.equal(logits(), logits())
    assert torch.equal(logits(), logits(generator=generator(0)))
    assert not torch.equal(logits(), logits(generator=generator(1)))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pass_that_is_not_there_is_refused() -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.mlp.W_*")
    found = run.importances(model, tiny_tokens())
    for index in (-1, 2):
        with pytest.raises(IndexError, match=rf"ReconLayerwise has 2 passes .* found index {index}"):
            spd.ReconLayerwise().hooks(run, found, index=index)


@dataclass(frozen=True)
class Misspelt(spd.ReconTerm):
    """Masks a site that the Run does not have."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[spd.Pass]:
        return [spd.Pass({"blocks.0.mlp.W_inn": torch.ones(3, dtype=torch.float64)})]


def test_hooks_for_an_unknown_site_are_refused() -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.mlp.W_*")
    with pytest.raises(ValueError, match=r"'blocks\.0\.mlp\.W_inn'.*not decomposed here"):
        Misspelt().hooks(run, run.importances(model, tiny_tokens()))


def test_hooks_need_the_host_that_the_importances_are_of() -> None:
    model = tiny_host("gpt2")
    run = tiny_run(model, "blocks.0.mlp.W_*")
    found = run.importances(model, tiny_tokens())
    assert len(spd.Recon().hooks(run, found)) == len(spd.Recon().hooks(run, found, model))
    other = tiny_host("gpt2")
    del model
    gc.collect()
    with pytest.raises(ValueError, match="pass model="):
        spd.Recon().hooks(run, found)
    assert spd.Recon().hooks(run, found, other)


# --- a user's own terms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(spd.ReconTerm):
    """KL with every site masked by half of its importances."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[spd.Pass]:
        return [spd.Pass({name: 0.5 * g for name, g in importances.items()})]


@dataclass(frozen=True)
class WriteSize(spd.LossTerm):
    """Mean square of all write directions."""

    power: int = 2

    def value(self, step: spd.Step) -> Tensor:
        return torch.cat([parts.write.flatten() for parts in step.run.components.values()]).pow(self.power).mean()


@dataclass(frozen=True)
class WithoutAttention(spd.ReconTerm):
    """KL of the masked model whose layer 0 does not attend to anything, too."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[spd.Pass]:
        def off(pattern: Tensor, hook: Any) -> Tensor:
            return torch.zeros_like(pattern)

        return [spd.Pass(dict(importances), hooks=[("blocks.0.attn.hook_pattern", off)])]


@dataclass(frozen=True)
class Worst(spd.LossTerm):
    """A value that evaluates passes itself: the largest of two."""

    def value(self, step: spd.Step) -> Tensor:
        g = step.importances
        return step.kl([spd.Pass(dict(g)), spd.Pass({name: 1 - value for name, value in g.items()})]).max()


OWN_SITES = ("blocks.0.attn.W_V", "blocks.*.mlp.W_*")
OWN = (Half(1.0), WriteSize(2.0), WithoutAttention(0.5), Worst(0.3))


def first_values() -> tuple[Case, dict[str, Callable[[Importances], float]]]:
    """The values of the own terms at the start of a training with seed 0, by algebra."""
    case = Case("gpt2", OWN_SITES)
    sites = find_sites(case.model, OWN_SITES)
    case.run = new_run(case.model, sites, {site.name: 3 for site in sites}, spd.Vector(2), seed=0)

    def silent(g: Importances) -> float:
        class Silent(Algebra):
            def attention(self, layer: int, qk: Tensor, v_in: Tensor, heads: int) -> Tensor:
                if layer:
                    return super().attention(layer, qk, v_in, heads)
                return self.p["blocks.0.attn.b_O"].expand_as(qk)

        Q = Silent(case.model, case.run, g).logits("gpt2", case.tokens).softmax(-1)
        P = case.host.softmax(-1)
        return (P * (P / Q).log()).sum(-1).mean().item()

    writes = [parts.write for parts in case.run.components.values()]
    size = sum(w.square().sum().item() for w in writes) / sum(w.numel() for w in writes)
    return case, {
        "Half": lambda g: case.kl({name: 0.5 * value for name, value in g.items()}),
        "WriteSize": lambda g: size,
        "WithoutAttention": silent,
        "Worst": lambda g: max(case.kl(g), case.kl({name: 1 - value for name, value in g.items()})),
    }


def test_a_users_own_terms_train_like_the_built_in_ones() -> None:
    case, wanted = first_values()
    run = spd.decompose(
        case.model, case.tokens, sites=OWN_SITES, C=3, steps=3, log_every=1, importance=spd.Vector(2),
        losses=[*OWN, spd.Recon(1.0)], warmup=spd.FaithfulnessWarmup(0), progress=False,
    )  # fmt: skip
    start = case.run.importances(case.model, case.tokens)
    first = run.history.iloc[0]
    for name, want in wanted.items():
        assert first[name] == pytest.approx(want(start), rel=1e-5), name  # histories are float32
    assert first["loss"] == pytest.approx(
        sum(term.coeff * first[term.name] for term in (*OWN, spd.Recon(1.0))), rel=1e-5
    )
    for before, after in zip(case.run.parameters(), run.parameters(), strict=True):
        assert bool((before != after).any())
    assert hook_count(case.model) == 0
    assert run.settings["losses"][1] == {"kind": "WriteSize", "coeff": 2.0, "power": 2}


@pytest.mark.parametrize("term", OWN, ids=lambda term: term.name)
def test_each_own_term_trains_alone_and_lowers_itself(term: spd.LossTerm) -> None:
    run = spd.decompose(
        tiny_host("gpt2"), tiny_tokens(3, 4), sites=OWN_SITES, C=3, steps=6, log_every=5, importance=spd.Vector(2),
        losses=[term], warmup=spd.FaithfulnessWarmup(0), optimizer=spd.Optimizer(lr=2e-2), progress=False,
    )  # fmt: skip
    assert run.history[term.name].iloc[-1] < run.history[term.name].iloc[0]


@pytest.mark.parametrize("term", [term for term in OWN if isinstance(term, spd.ReconTerm)], ids=lambda term: term.name)
def test_own_reconstruction_terms_are_hooks_too(term: spd.LossTerm) -> None:
    case, wanted = first_values()
    found = case.run.importances(case.model, case.tokens)
    with torch.no_grad():
        logits = case.model.run_with_hooks(case.tokens, fwd_hooks=term.hooks(case.run, found))
    got = F.kl_div(logits.log_softmax(-1), case.host.softmax(-1), reduction="none").sum(-1).mean().item()
    assert got == pytest.approx(wanted[term.name](found), rel=1e-9)
    assert hook_count(case.model) == 0
