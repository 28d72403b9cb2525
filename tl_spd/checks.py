"""Checks: numbers that mean nothing are refused before any work; what is not finite is named where it is first seen.

1. Counts and seeds are whole numbers; thresholds and fractions lie in [0, 1], as importances do.
2. A host's parameters are looked at once, before a decomposition.
3. What a pass of the original model showed is looked at in the order in which the pass made it.

Approximations: none. A largest absolute value stands for all entries of a tensor, since NaN and infinity carry through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spd.sites import HookedTransformer, Site
from tl_spd.wiring import Observation


def check_whole(**values: Any) -> None:
    """TypeError for the first of ``values`` that is not a whole number; None is passed over."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number, found {value!r}.")


def check_shares(name: str, values: Iterable[float]) -> None:
    """ValueError for the first of ``values`` outside [0, 1]; NaN is outside."""
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be 0 to 1, as importances and shares are; found {value}.")


def check_weights(model: HookedTransformer) -> None:
    """ValueError that names the first parameter of the host with entries that are not finite."""
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            name = name.replace("attn._", "attn.")  # grouped keys and values, under the name that their site has
            raise ValueError(
                f"{name}: the host's weight has entries that are not finite; nothing can be decomposed or measured with it."
            )


def extremes(seen: Observation, sites: Sequence[Site]) -> dict[str, Float[Tensor, ""]]:
    """The largest absolute value of what a pass of the original model showed, by name, in the order of the pass.

    The residual stream in front of every block that was reached, the inputs of ``sites``, and what the pass returned.
    """
    inputs = {s.name: seen.inputs[s.name] for s in sites if not s.lookup and s.name in seen.inputs}
    shown: dict[str, Tensor] = {}
    for layer, start in seen.starts.items():
        shown[f"the residual stream in front of block {layer}"] = start.resid
        here = [site.name for site in sites if site.layer == layer and site.name in inputs]
        shown |= {f"the input of {name}": inputs.pop(name) for name in here}
    if isinstance(seen.output, Tensor):
        shown["the output of the pass"] = seen.output
    shown |= {f"the input of {name}": value for name, value in inputs.items()}  # of the unembedding
    return {name: torch.linalg.vector_norm(value.detach(), math.inf) for name, value in shown.items() if value.numel()}


def check_seen(seen: Observation, sites: Sequence[Site]) -> None:
    """FloatingPointError that names the first of :func:`extremes` that is not finite."""
    found = extremes(seen, sites)
    if found and not bool(torch.stack([torch.isfinite(value) for value in found.values()]).all()):
        first = next(name for name, value in found.items() if not bool(torch.isfinite(value)))
        raise FloatingPointError(not_finite(first))


def check_finite(name: str, value: Tensor) -> None:
    """FloatingPointError that names ``value`` where it has entries that are not finite."""
    if not bool(torch.isfinite(value).all()):
        raise FloatingPointError(f"{name} has entries that are not finite; there is nothing to measure.")


def not_finite(name: str) -> str:
    """What to say where the original model itself is not finite at ``name``."""
    return (
        f"{name[0].upper()}{name[1:]} was not finite in the original model. Look at the host's weights there, and at its dtype: "
        "float16 ends at 65504, bfloat16 does not."
    )
