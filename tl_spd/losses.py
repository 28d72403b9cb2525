"""Loss terms: what a decomposition is trained for. Frozen dataclasses, first argument ``coeff``.

With P the original model's output distribution, Q the decomposed one's, KL(P || Q) in nats as a mean over scored positions:

==========================  ============================================================================================
Faithfulness                ``(1/N) sum_sites sum_ij (W - read @ write)^2``, N entries in all decomposed matrices
ImportanceMinimality        mean over batch and positions of ``sum_sites sum_c (upper(g) + eps)^p``; p goes linearly
StochasticRecon             mean over samples of KL with every site masked stochastically
StochasticReconLayerwise    mean over sites and samples of KL with that one site masked stochastically
Recon                       KL with every site masked by ``m = g``
ReconPartial                KL with a random subset of sites masked by ``m = g``
StochasticReconPartial      mean over samples of KL, each with its own random subset and stochastic masks
==========================  ============================================================================================

A reconstruction term says which sites take which masks (``passes``) and nothing about how they are evaluated; the training
engine evaluates the passes of all terms together. A term of your own is one subclass: of :class:`ReconTerm` with ``passes``,
or of :class:`LossTerm` with ``value``. Source: Bushnaq et al. 2025 and the paper on transformers (partial terms).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spd.checks import check_whole
from tl_spd.importance import Importances, falling, falls_fit, upper
from tl_spd.install import pass_hooks
from tl_spd.masks import Pass, stochastic_mask
from tl_spd.run import Run
from tl_spd.sites import Hook, HookedTransformer, weight

Subset = Literal["step", "sequence"]


@dataclass(frozen=True)
class Step:
    """Everything a term may look at in one training step.

    Attributes:
        run: the components and importance functions being trained.
        importances: those of this batch, with gradients.
        weights: site name -> the host's weight ``[d_in, d_out]``.
        progress: 0 at the first step, 1 at the last.
        generator: the source of randomness.
        kl: evaluates passes together: list of passes -> their KL(P || Q), ``[pass]``.
    """

    run: Run
    importances: Importances
    weights: Mapping[str, Float[Tensor, "d_in d_out"]]
    progress: float
    generator: torch.Generator
    kl: Callable[[Sequence[Pass]], Float[Tensor, "pass"]]


@dataclass(frozen=True)
class LossTerm:
    """One weighted term of the training loss. Subclasses are frozen dataclasses and implement ``value``."""

    coeff: float = 1.0

    def __post_init__(self) -> None:
        if not self.coeff >= 0:
            raise ValueError(f"{type(self).__name__}: coeff must be a number of at least 0, found {self.coeff}.")

    @property
    def name(self) -> str:
        """The term's name in histories and messages."""
        return type(self).__name__

    def coeff_at(self, progress: float) -> float:
        """What the value counts in the training loss when ``progress`` (0 to 1) of it is done: ``coeff`` throughout."""
        return self.coeff

    def value(self, step: Step) -> Float[Tensor, ""]:
        """The term's value before its coefficient."""
        raise NotImplementedError

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """The masked passes that the term looks at; none for a term that needs no forward pass."""
        return []

    def hooks(
        self,
        run: Run,
        importances: Importances,
        model: HookedTransformer | None = None,
        *,
        generator: torch.Generator | None = None,
        index: int = 0,
    ) -> list[Hook]:
        """TransformerLens hooks of the term's pass number ``index``: ``model.run_with_hooks(tokens, fwd_hooks=...)``.

        ``importances`` must be those of the same tokens, from ``run.importances(model, tokens)``. ``generator`` feeds
        stochastic masks and random subsets (default: a fresh one with seed 0).
        """
        generator = generator or torch.Generator(next(iter(importances.values())).device).manual_seed(0)
        passes = self.passes(importances, generator)
        if not 0 <= index < len(passes):
            raise IndexError(f"{self.name} has {len(passes)} passes for these importances; found index {index}.")
        model = model if model is not None else (importances.host() if importances.host else None)
        if model is None:
            raise ValueError("The host of these importances is not known (any more); pass model=.")
        return pass_hooks(model, run, passes[index], importances)


@dataclass(frozen=True)
class ReconTerm(LossTerm):
    """A term whose value is the mean KL of its passes. Subclasses implement ``passes``."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        """Mean over the term's passes of KL(P || Q)."""
        return step.kl(self.passes(step.importances, step.generator)).mean()


def term_values(terms: Sequence[LossTerm], step: Step) -> list[Float[Tensor, ""]]:
    """The value of every term before its coefficient; the passes of all reconstruction terms are evaluated together."""
    passes = {t.name: t.passes(step.importances, step.generator) for t in terms if type(t).value is ReconTerm.value}
    kl = step.kl([entry for group in passes.values() for entry in group]) if passes else torch.zeros(0)
    together = dict(zip(passes, kl.split([len(group) for group in passes.values()]), strict=True))
    return [together[t.name].mean() if t.name in together else t.value(step) for t in terms]


def faithfulness(run: Run, weights: Mapping[str, Float[Tensor, "d_in d_out"]]) -> Float[Tensor, ""]:
    """Mean squared difference between ``weights`` (:func:`host_weights`) and what the Run's subcomponents sum to."""
    deltas = [run.components[name].delta(host) for name, host in weights.items()]
    entries = sum(delta.numel() for delta in deltas)
    return torch.stack([delta.square().sum() for delta in deltas]).sum() / entries


@dataclass(frozen=True)
class Faithfulness(LossTerm):
    """Mean squared difference between the host's weights and what the subcomponents sum to.

    Its pass masks every site by ones, which a faithful decomposition leaves equal to the host's.
    """

    def value(self, step: Step) -> Float[Tensor, ""]:
        """``(1/N) sum_sites sum_ij (W - read @ write)^2``."""
        return faithfulness(step.run, step.weights)

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass with ones everywhere."""
        return [Pass({name: torch.ones_like(g) for name, g in importances.items()})]


class _Power(torch.autograd.Function):
    """``base ** p`` for bases above 0; its derivative divides the power by the base, which is cheaper than another power."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, p: float) -> Tensor:
        power = base.pow(p)
        ctx.save_for_backward(base, power)
        ctx.p = p
        return power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        base, power = ctx.saved_tensors
        return (grad * ctx.p).mul(power).div_(base), None


@dataclass(frozen=True)
class ImportanceMinimality(LossTerm):
    """Mean over real positions of ``sum_sites sum_c (upper(g) + eps)^p``; p goes linearly from ``p_start`` to ``p_final``.

    With ``coeff_start`` the coefficient begins there and falls geometrically to ``coeff`` between the two shares of the
    training in ``coeff_falls``. A strong beginning keeps importances below 1, where they are told which positions need
    them; once above 1 at all positions neither this term (slope 0.01) nor any mask says so (not in the paper).

    Its pass masks every site by its importances: the pass that it makes sparse.
    """

    p_start: float = 0.9
    p_final: float = 0.1
    eps: float = 1e-12
    coeff_start: float | None = None
    coeff_falls: tuple[float, float] = (0.2, 0.7)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.p_start > 0 and self.p_final > 0 and self.eps > 0):
            raise ValueError(
                f"ImportanceMinimality: p_start, p_final and eps must be above 0, found {self.p_start}, {self.p_final}, "
                f"{self.eps}."
            )
        falls, start = self.coeff_falls, self.coeff_start
        if not falls_fit(falls) or (start is not None and not (start > 0 and self.coeff > 0)):
            raise ValueError(
                "ImportanceMinimality: coeff_start goes with a coeff above 0, is above 0 itself, and coeff_falls are two "
                f"shares of the training, the first one smaller; found {start}, {self.coeff} and {falls}."
            )

    def coeff_at(self, progress: float) -> float:
        """The coefficient at ``progress`` in [0, 1]."""
        if self.coeff_start is None:
            return self.coeff
        return falling(self.coeff_start, self.coeff, self.coeff_falls, progress)

    def p(self, progress: float) -> float:
        """The exponent at ``progress`` in [0, 1]."""
        return self.p_start + (self.p_final - self.p_start) * progress

    def value(self, step: Step) -> Float[Tensor, ""]:
        """Mean over batch and real positions of ``sum_sites sum_c (upper(g) + eps)^p``."""
        p, real = self.p(step.progress), step.importances.real
        per_token = [_Power.apply(upper(pre) + self.eps, p).sum(-1) for pre in step.importances.pre.values()]
        total = torch.stack(per_token).sum(0)
        return total.mean() if real is None else total[real].mean()

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass with ``m = g`` everywhere."""
        return [Pass(dict(importances))]


@dataclass(frozen=True)
class _Sampled(ReconTerm):
    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(samples=self.samples)
        if self.samples < 1:
            raise ValueError(f"{type(self).__name__}: samples must be at least 1, found {self.samples}.")


@dataclass(frozen=True)
class StochasticRecon(_Sampled):
    """Mean over ``samples`` of KL with every site masked stochastically."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass per sample."""
        return [
            Pass({name: stochastic_mask(g, generator) for name, g in importances.items()}) for _ in range(self.samples)
        ]


@dataclass(frozen=True)
class StochasticReconLayerwise(_Sampled):
    """Mean over sites and ``samples`` of KL with that one site masked stochastically, the rest the host's own."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass per site and sample."""
        return [
            Pass({name: stochastic_mask(g, generator)}) for name, g in importances.items() for _ in range(self.samples)
        ]


@dataclass(frozen=True)
class Recon(ReconTerm):
    """KL with every site masked by its importances."""

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass."""
        return [Pass(dict(importances))]


@dataclass(frozen=True)
class ReconLayerwise(ReconTerm):
    """Mean over sites of KL with that one site masked by its importances (not among the paper's seven).

    What StochasticReconLayerwise leaves open: sampled masks are rarely all near the importances themselves.
    """

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass per site."""
        return [Pass({name: g}) for name, g in importances.items()]


def random_subset(names: Sequence[str], generator: torch.Generator) -> list[str]:
    """A subset whose size is uniform on 1..L and which is uniform among those of its size, in the order of ``names``."""
    size = int(torch.randint(1, len(names) + 1, (), generator=generator, device=generator.device))
    chosen = torch.randperm(len(names), generator=generator, device=generator.device)[:size].tolist()
    return [names[index] for index in sorted(chosen)]


def _partial(
    importances: Importances, subset: Subset, generator: torch.Generator, mask: Callable[[Tensor], Tensor]
) -> Pass:
    names = list(importances)
    if subset == "step":
        return Pass({name: mask(importances[name]) for name in random_subset(names, generator)})
    batch = importances[names[0]].shape[0]
    rows = {name: torch.zeros(batch, dtype=torch.bool) for name in names}
    for sequence in range(batch):
        for name in random_subset(names, generator):
            rows[name][sequence] = True
    device = importances[names[0]].device
    used = {name: chosen.to(device) for name, chosen in rows.items() if bool(chosen.any())}
    return Pass({name: mask(importances[name]) for name in used}, used)


def _check_subset(term: LossTerm, subset: str) -> None:
    if subset not in ("step", "sequence"):
        raise ValueError(f"{term.name}: subset must be 'step' or 'sequence', found {subset!r}.")


@dataclass(frozen=True)
class ReconPartial(ReconTerm):
    """KL with a random subset of sites masked by their importances; one subset per step, or one per sequence."""

    subset: Subset = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_subset(self, self.subset)

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass."""
        return [_partial(importances, self.subset, generator, lambda g: g)]


@dataclass(frozen=True)
class StochasticReconPartial(_Sampled):
    """Mean over ``samples`` of KL, each sample with its own random subset of sites and stochastic masks."""

    subset: Subset = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_subset(self, self.subset)

    def passes(self, importances: Importances, generator: torch.Generator) -> list[Pass]:
        """One pass per sample."""
        return [
            _partial(importances, self.subset, generator, lambda g: stochastic_mask(g, generator))
            for _ in range(self.samples)
        ]


def host_weights(model: HookedTransformer, run: Run) -> dict[str, Tensor]:
    """The host's weights of the Run's sites, in the dtype of its components."""
    return {site.name: weight(model, site).to(run.components[site.name].read.dtype) for site in run.sites}


def paper_losses(setting: Literal["induction", "gpt2"]) -> tuple[LossTerm, ...]:
    """The paper's terms and coefficients for its two decompositions."""
    minimality = {"induction": 0.02, "gpt2": 0.05}
    if setting not in minimality:
        raise ValueError(f"paper_losses knows 'induction' and 'gpt2', found {setting!r}.")
    if setting == "induction":
        return (
            Faithfulness(1000.0),
            ImportanceMinimality(minimality[setting]),
            StochasticRecon(1.0),
            StochasticReconLayerwise(1.0),
            Recon(0.5),
        )
    return (
        Faithfulness(1e6),
        ImportanceMinimality(minimality[setting]),
        StochasticRecon(0.1),
        StochasticReconLayerwise(0.1),
        Recon(0.1),
        ReconPartial(10.0),
        StochasticReconPartial(10.0),
    )
