"""Importance functions: which subcomponents matter at which token, ``g = sigma(gamma(input))`` in [0, 1].

1. ``Scalar``: ``gamma_c`` is an MLP ``1 -> d_gate -> 1`` of the inner activation ``x . read_c``.
2. ``Vector``: ``gamma_c`` is an MLP ``d_in -> d_gate -> 1`` of the input ``x``.
3. ``Attention``: one bidirectional attention head over the tokens first, then ``2 d_in -> d_gate -> 1`` on what it brought
   beside the position-coded input. Padding is never attended to. Source: Algorithm 1 of the paper on transformers.
4. ``Shared``: one MLP ``d_in -> hidden -> C`` for all subcomponents of a site (not in that paper).

All gates use erf-GELU; subcomponents have independent parameters in 1-3. Inputs are always those of the original model.
For look-up sites (embeddings) the "input" is the row looked up, which says as much as the one-hot index.

Gammas start around ``start``. At 1 (default) every subcomponent is on, so that training begins at the host itself and turns
off what is not needed; at 0 half of what is needed is off, where only the leak of the sigmoid can bring it back (:class:`Leak`).

A specification is a frozen dataclass; a new importance function is one subclass of :class:`ImportanceSpec` with ``build``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tl_spd.attend import BACKENDS, Backend, attend
from tl_spd.checks import check_whole
from tl_spd.gates import scalar_gates, vector_gates
from tl_spd.sites import Site

LEAK = 0.01
"""Slope of the leaks of both sigmoids (Bushnaq et al. 2025); of ``lower``'s the least, see :class:`Leak`."""


JUST_BELOW_0 = -1e-45
"""Nothing in float32 lies between this and 0; what does in float64 counts as 0."""


def where_above(bound: float, x: Tensor, value: Tensor) -> Tensor:
    """``value`` where ``x > bound``, else 0: ``torch.where``, many times faster on a CPU."""
    return torch.ops.aten.threshold_backward(value, x, bound)


def where_between(low: float, high: float, x: Tensor, value: Tensor) -> Tensor:
    """``value`` where ``low < x < high``, else 0."""
    return torch.ops.aten.hardtanh_backward(value, x, low, high)


class _Lower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor, leak: float) -> Tensor:
        ctx.save_for_backward(pre)
        ctx.leak = leak
        return pre.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pre,) = ctx.saved_tensors
        raising = grad.clamp(max=0)
        below = where_above(JUST_BELOW_0, -pre, raising)
        return torch.add(where_between(0.0, 1.0, pre, grad), below, alpha=ctx.leak), None


def lower(pre: Tensor, leak: float = LEAK) -> Tensor:
    """The importance used in masks: ``pre`` clamped to [0, 1].

    Below 0 the gradient leaks with slope ``leak``, and only where descending it would raise ``pre``; above 1 it is zero.
    """
    return _Lower.apply(pre, leak)


class _Upper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor) -> Tensor:
        ctx.save_for_backward(pre)
        return torch.add(pre.clamp(0, 1), (pre - 1).clamp_(min=0), alpha=LEAK)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (pre,) = ctx.saved_tensors
        from_0 = where_above(JUST_BELOW_0, pre, grad)
        above_1 = where_above(1.0, pre, from_0)
        return torch.add(from_0 - above_1, above_1, alpha=LEAK)


def upper(pre: Tensor) -> Tensor:
    """The importance used in minimality: 0 below 0, ``pre`` up to 1, then on with slope 0.01."""
    return _Upper.apply(pre)


def falling(start: float, end: float, falls: tuple[float, float], progress: float) -> float:
    """``start`` at first, ``end`` at last, falling geometrically between the two shares of the training in ``falls``."""
    fallen = min(1.0, max(0.0, (progress - falls[0]) / (falls[1] - falls[0])))
    return start * (end / start) ** fallen


def falls_fit(falls: tuple[float, ...]) -> bool:
    """Whether these are two shares of a training, the first one smaller."""
    return len(falls) == 2 and 0 <= falls[0] < falls[1] <= 1


@dataclass(frozen=True)
class Leak:
    """How much of the gradient passes ``lower`` below 0: ``start``, falling to 0.01 between the two shares ``falls``.

    A subcomponent that is off but needed at a few positions gets a gradient only there, and a leak of 0.01 passes a hundredth
    of it; against strong minimality it stays off. From a start of 1 it comes back. The leak must fall again: it only ever
    raises, so that noise would keep too much on (not in the paper).
    """

    start: float = LEAK
    falls: tuple[float, float] = (0.2, 0.7)

    def __post_init__(self) -> None:
        if not (LEAK <= self.start <= 1 and falls_fit(self.falls)):
            raise ValueError(
                f"Leak: start must be {LEAK} to 1, and falls two shares of the training, the first one smaller; found "
                f"{self.start} and {self.falls}."
            )

    def at(self, progress: float) -> float:
        """The slope when ``progress`` (0 to 1) of the training is done."""
        return falling(self.start, LEAK, self.falls, progress)


class Importances(dict[str, Tensor]):
    """Site name -> importances ``[batch, pos, C]`` in [0, 1] (``lower``), with what else the same pass showed.

    Attributes:
        pre: site name -> ``gamma`` before the sigmoid, ``[batch, pos, C]``.
        lookups: embedding sites -> the indices they looked up, ``[batch, pos]``.
        real: which places hold real tokens, or None where all do.
        host: a weak reference to the model they are of, or None.

    Gradients pass below 0 with the slope ``leak``.
    """

    def __init__(
        self,
        pre: Mapping[str, Tensor],
        lookups: Mapping[str, Tensor] | None = None,
        real: Bool[Tensor, "batch pos"] | None = None,
        host: weakref.ref[Any] | None = None,
        leak: float = LEAK,
    ):
        super().__init__({name: lower(value, leak) for name, value in pre.items()})
        self.pre = dict(pre)
        self.lookups = dict(lookups or {})
        self.real = real
        self.host = host


class ImportanceSpec:
    """What to build for every site. Subclasses are frozen dataclasses with a ``build`` method and register themselves."""

    registry: ClassVar[dict[str, type[ImportanceSpec]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ImportanceSpec.registry[cls.__name__] = cls

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        """A module with ``forward(x, inner, real) -> gamma``.

        ``x: [batch, pos, d_importance]``, ``inner: [batch, pos, C]``, ``real: [batch, pos]`` or None, result
        ``[batch, pos, C]`` before the sigmoid. ``normal(*shape, std=..., mean=0.0)`` draws initial values in the right dtype;
        ``mean`` may be a function of what was drawn around 0, which is not called where the values will be read from a file.
        """
        raise NotImplementedError

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> ImportanceSpec:
        """The specification written as ``{"kind": class name, field: value, ...}``; unknown names are refused."""
        values = dict(record)
        kind = values.pop("kind", None)
        if kind not in ImportanceSpec.registry:
            raise ValueError(f"Importance function {kind!r} is not known; known are {sorted(ImportanceSpec.registry)}.")
        cls = ImportanceSpec.registry[kind]
        names = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"{kind} has no settings {unknown}; it has {names}.")
        return cls(**values)


def _positive(**values: int | None) -> None:
    check_whole(**values)
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}.")


class _Gates(nn.Module):
    """Parameters of ``C`` MLPs ``d_in -> d_gate -> 1``; ``d_in=None``: of one number each."""

    def __init__(self, d_in: int | None, spec: Scalar | Vector | Attention, C: int, normal: Callable[..., Tensor]):
        super().__init__()
        d_gate = spec.d_gate
        shape = (d_gate, C) if d_in is None else (d_in, d_gate, C)
        self.W1 = nn.Parameter(normal(*shape, std=(2 / (d_in or 1)) ** 0.5))
        self.b1 = nn.Parameter(normal(d_gate, C, std=0.0))
        self.W2 = nn.Parameter(normal(d_gate, C, std=d_gate**-0.5))
        self.b2 = nn.Parameter(normal(C, std=0.0, mean=spec.start))

    def forward(self, x: Tensor) -> Tensor:
        gates = scalar_gates if self.W1.ndim == 2 else vector_gates
        return gates(x, self.W1, self.b1, self.W2, self.b2)


@dataclass(frozen=True)
class Scalar(ImportanceSpec):
    """One MLP ``1 -> d_gate -> 1`` of the inner activation per subcomponent."""

    d_gate: int = 16
    start: float = 1.0

    def __post_init__(self) -> None:
        _positive(d_gate=self.d_gate)

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        """See :meth:`ImportanceSpec.build`."""
        return ScalarImportance(self, C, normal)


class ScalarImportance(nn.Module):
    """``gamma_c(x . read_c)``."""

    def __init__(self, spec: Scalar, C: int, normal: Callable[..., Tensor]):
        super().__init__()
        self.gates = _Gates(None, spec, C, normal)

    def forward(self, x: Tensor, inner: Tensor, real: Tensor | None = None) -> Tensor:
        """Gamma ``[batch, pos, C]``."""
        return self.gates(inner)


@dataclass(frozen=True)
class Vector(ImportanceSpec):
    """One MLP ``d_in -> d_gate -> 1`` of the site's input per subcomponent."""

    d_gate: int = 16
    start: float = 1.0

    def __post_init__(self) -> None:
        _positive(d_gate=self.d_gate)

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        """See :meth:`ImportanceSpec.build`."""
        return VectorImportance(self, site.d_importance, C, normal)


class VectorImportance(nn.Module):
    """``gamma_c(x)``."""

    def __init__(self, spec: Vector, d_in: int, C: int, normal: Callable[..., Tensor]):
        super().__init__()
        self.gates = _Gates(d_in, spec, C, normal)

    def forward(self, x: Tensor, inner: Tensor, real: Tensor | None = None) -> Tensor:
        """Gamma ``[batch, pos, C]``."""
        return self.gates(x)


@dataclass(frozen=True)
class Shared(ImportanceSpec):
    """One MLP ``d_in -> hidden -> C`` for all subcomponents of a site."""

    hidden: int = 256
    start: float = 1.0

    def __post_init__(self) -> None:
        _positive(hidden=self.hidden)

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        """See :meth:`ImportanceSpec.build`."""
        return SharedImportance(self, site.d_importance, C, normal)


class SharedImportance(nn.Module):
    """``gamma(x)`` for all subcomponents at once."""

    def __init__(self, spec: Shared, d_in: int, C: int, normal: Callable[..., Tensor]):
        super().__init__()
        self.W1 = nn.Parameter(normal(d_in, spec.hidden, std=(2 / d_in) ** 0.5))
        self.b1 = nn.Parameter(normal(spec.hidden, std=0.0))
        self.W2 = nn.Parameter(normal(spec.hidden, C, std=spec.hidden**-0.5))
        self.b2 = nn.Parameter(normal(C, std=0.0, mean=spec.start))

    def forward(self, x: Tensor, inner: Tensor, real: Tensor | None = None) -> Tensor:
        """Gamma ``[batch, pos, C]``."""
        return F.gelu(x @ self.W1 + self.b1) @ self.W2 + self.b2


@dataclass(frozen=True)
class Attention(ImportanceSpec):
    """A minimal attention head across the tokens before the gates.

    ``d_attn`` is the width of queries and keys (default: that of the input). ``relative="vector"``: a table ``[2 n_ctx,
    d_attn]`` meets the queries, ``r_ij = q_i . R[j - i + n_ctx]``; ``"scalar"``: a table ``[2 n_ctx]`` of biases.
    ``backend``: see :mod:`tl_spd.attend`; the same numbers from each. ``reach``: biases start such that attention falls by
    a factor e every so many tokens, on both sides. From an even start (None) a training that makes importances sparse at
    once may be over before any of them has learnt which token comes before. What starts some hundred times the reach away
    is not attended to in float32, and learns nothing.
    """

    d_gate: int = 16
    d_attn: int | None = None
    relative: Literal["vector", "scalar"] = "vector"
    backend: Backend = "auto"
    start: float = 1.0
    reach: float | None = None

    def __post_init__(self) -> None:
        _positive(d_gate=self.d_gate, d_attn=self.d_attn)
        if self.relative not in ("vector", "scalar"):
            raise ValueError(f"relative must be 'vector' or 'scalar', found {self.relative!r}.")
        if self.reach is not None and not (0 < self.reach < float("inf") and self.relative == "scalar"):
            raise ValueError(
                "Attention: reach must be a number of tokens above 0, and needs the biases of relative='scalar', found "
                f"{self.reach} and {self.relative!r}."
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, found {self.backend!r}.")

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        """See :meth:`ImportanceSpec.build`."""
        return AttentionImportance(self, site.d_importance, C, n_ctx, normal)


class AttentionImportance(nn.Module):
    """``gamma_c(concat(attended, x + AbsPos))``."""

    def __init__(self, spec: Attention, d_in: int, C: int, n_ctx: int, normal: Callable[..., Tensor]):
        super().__init__()
        d_attn = spec.d_attn or d_in
        self.spec, self.n_ctx = spec, n_ctx
        self.W_Q = nn.Parameter(normal(d_in, d_attn, std=d_in**-0.5))
        self.W_K = nn.Parameter(normal(d_in, d_attn, std=d_in**-0.5))
        self.W_V = nn.Parameter(normal(d_in, d_in, std=d_in**-0.5))
        self.absolute = nn.Parameter(normal(n_ctx, d_in, std=0.02))
        shape = (2 * n_ctx, d_attn) if spec.relative == "vector" else (2 * n_ctx,)

        def nearby(like: Tensor) -> Tensor:  # scores, and so these biases, are divided by sqrt(d_attn)
            assert spec.reach is not None
            return torch.arange(-n_ctx, n_ctx).to(like).abs() * (-(d_attn**0.5) / spec.reach)

        self.relative = nn.Parameter(normal(*shape, std=0.02, mean=0.0 if spec.reach is None else nearby))
        self.gates = _Gates(2 * d_in, spec, C, normal)

    def forward(
        self,
        x: Float[Tensor, "batch pos d_in"],
        inner: Tensor,
        real: Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos C"]:
        """Gamma ``[batch, pos, C]``."""
        pos = x.shape[1]
        if pos > self.n_ctx:
            raise ValueError(f"The attention importance was built for at most {self.n_ctx} positions, found {pos}.")
        x_pos = x + self.absolute[:pos]
        attended = attend(
            x @ self.W_Q, x @ self.W_K, x_pos @ self.W_V, self._relative_table(pos), real, self.spec.backend
        )
        return self.gates(torch.cat([attended, x_pos], dim=-1))

    def _relative_table(self, pos: int) -> Tensor:
        """The entries ``j - i`` from ``-(pos - 1)`` to ``pos - 1``: ``[2 pos - 1, d_attn]`` or ``[2 pos - 1]``."""
        return self.relative[self.n_ctx - pos + 1 : self.n_ctx + pos]
