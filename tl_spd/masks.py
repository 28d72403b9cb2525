"""Masks: how much of each subcomponent takes part, ``m: [batch, pos, C]`` per site.

``stochastic``: ``m = g + (1 - g) * rho`` with ``rho ~ U(0, 1)`` independent per batch element, position, subcomponent, site
and sample. ``importance``: ``m = g``. ``ones``: ``m = 1``. ``rounded``: ``m = 1[g > threshold]``. Anything else is a dict from
site names to tensors that broadcast to ``[batch, pos, C]``.

Every sampler takes a ``torch.Generator``; the global random state is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spd.checks import check_shares
from tl_spd.sites import Hook, Site

MASK_NAMES = ("importance", "stochastic", "ones", "rounded")


@dataclass(frozen=True)
class Pass:
    """One masked forward pass: which sites take which masks.

    Attributes:
        masks: site name -> mask that broadcasts to ``[batch, pos, C]``; sites left out keep the host's own weight.
        rows: site name -> which sequences of the batch take the mask, where not all do.
        hooks: further TransformerLens hooks ``(name, function)`` of this pass alone.
    """

    masks: Mapping[str, Tensor]
    rows: Mapping[str, Bool[Tensor, "batch"]] = field(default_factory=dict)
    hooks: Sequence[Hook] = ()


def uniform(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Independent U(0, 1) numbers of ``shape`` in the dtype and on the device of ``like``."""
    return torch.rand(tuple(shape), generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def stochastic_mask(
    importance: Float[Tensor, "batch pos C"], generator: torch.Generator
) -> Float[Tensor, "batch pos C"]:
    """``g + (1 - g) * rho`` with fresh ``rho``; the gradient reaches ``g`` with the factor ``1 - rho``."""
    return torch.lerp(importance, torch.ones_like(importance), uniform(importance.shape, generator, importance))


def rounded_mask(importance: Float[Tensor, "batch pos C"], threshold: float) -> Float[Tensor, "batch pos C"]:
    """1 where the importance is above ``threshold``, else 0."""
    return (importance > threshold).to(importance.dtype)


def make_masks(
    kind: str, importances: Mapping[str, Tensor], generator: torch.Generator | None = None, threshold: float = 0.0
) -> dict[str, Tensor]:
    """Masks of the named ``kind`` for every site of ``importances``.

    Raises:
        ValueError: an unknown kind, a stochastic one without a generator, or a threshold outside [0, 1].
    """
    check_shares("threshold", [threshold])
    if kind == "stochastic" and generator is None:
        raise ValueError(
            "masks='stochastic' needs a generator=torch.Generator(); the global random state is never used."
        )
    samplers: dict[str, Callable[[Tensor], Tensor]] = {
        "importance": lambda g: g,
        "stochastic": lambda g: stochastic_mask(g, generator),  # type: ignore[arg-type]
        "ones": torch.ones_like,
        "rounded": lambda g: rounded_mask(g, threshold),
    }
    if kind not in samplers:
        raise ValueError(f"masks={kind!r} is not known; use one of {MASK_NAMES} or a dict from site names to tensors.")
    return {name: samplers[kind](g) for name, g in importances.items()}


def check_masks(masks: Mapping[str, Tensor], sites: Sequence[Site], counts: Mapping[str, int]) -> None:
    """Refuse masks that name unknown sites or cannot broadcast to ``[batch, pos, C]``, ``C`` from ``counts``.

    Raises:
        ValueError: names the site, the shape given and the shape wanted.
    """
    known = [site.name for site in sites]
    unknown = [name for name in masks if name not in known]
    if unknown:
        raise ValueError(f"Masks were given for {unknown}, which are not decomposed here; the sites are {known}.")
    for name, mask in masks.items():
        if not isinstance(mask, Tensor):
            raise TypeError(f"The mask of {name} must be a tensor, found {type(mask).__name__}.")
        if mask.ndim > 3 or (mask.ndim and mask.shape[-1] not in (1, counts[name])):
            raise ValueError(
                f"The mask of {name} has shape {tuple(mask.shape)}; wanted one that broadcasts to "
                f"(batch, pos, {counts[name]})."
            )
        if not mask.is_floating_point() and mask.dtype != torch.bool:
            raise TypeError(f"The mask of {name} must hold floating-point numbers or booleans, found {mask.dtype}.")


def check_fits(name: str, mask: Tensor, batch: int, pos: int) -> None:
    """Refuse a mask whose batch or position axis does not fit the pass at hand."""
    shape = (1, 1, 1, *mask.shape)[-3:]
    if shape[0] not in (1, batch) or shape[1] not in (1, pos):
        raise ValueError(
            f"The mask of {name} has shape {tuple(mask.shape)}; this pass has batch {batch} and {pos} positions, so wanted "
            f"a shape that broadcasts to ({batch}, {pos}, {mask.shape[-1] if mask.ndim else 'C'})."
        )
