"""Adversarial recon: the worst masking that the importances still allow, found by gradient ascent.

Masks are ``m = g + (1 - g) * r`` with ``r`` in [0, 1]. Uniform ``r`` bounds the average masking, which training sees; the worst
``r`` bounds what "unimportant" claims: a subcomponent that does not matter may be left in or out in any combination.

1. ``r`` starts uniform at random, one number per subcomponent, or per subcomponent and position, or per subcomponent and token.
2. Each step moves every ``r`` by the step size along the sign of the gradient of KL(P || Q), and clamps it to [0, 1].
3. The value is the largest KL met, the start included.

Source: projected sign-gradient ascent (Madry et al. 2018) on the recon KL. Approximations: the value is a lower bound of the
true worst case; it means little without the budget (steps, step size, what ``r`` is shared over), which stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tl_spd.checks import check_whole
from tl_spd.engine import Batch, Engine
from tl_spd.masks import Pass, uniform

Per = Literal["site", "position", "token"]


@dataclass(frozen=True)
class Adversary:
    """How hard the worst masking is looked for.

    Attributes:
        steps: gradient steps (0: the random start alone).
        step_size: how far every ``r`` moves in a step.
        per: ``"site"``: one ``r`` per subcomponent, shared over batch and positions; ``"position"``: one per position, shared
            over the batch; ``"token"``: one per sequence and position (the strongest).
        seed: of the random start.
    """

    steps: int = 20
    step_size: float = 0.1
    per: Per = "site"
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(steps=self.steps, seed=self.seed)
        if self.steps < 0 or not 0 < self.step_size < math.inf:
            raise ValueError(
                f"Adversary: steps must be at least 0 and step_size above 0, found {self.steps} and {self.step_size}."
            )
        if self.per not in get_args(Per):
            raise ValueError(f"Adversary: per must be one of {get_args(Per)}, found {self.per!r}.")

    @property
    def budget(self) -> str:
        """The budget in words, as it stands beside numbers: ``20x0.1,site,seed0``."""
        return f"{self.steps}x{self.step_size:g},{self.per},seed{self.seed}"


@dataclass(frozen=True)
class Attack:
    """What an adversary found.

    Attributes:
        kl: the largest KL(P || Q) met, nats.
        history: the KL at the start and after every step.
        r: site -> the ``r`` that gave ``kl``, ``[1, 1, C]``, ``[1, pos, C]`` or ``[batch, pos, C]``.
    """

    kl: float
    history: tuple[float, ...]
    r: dict[str, Tensor]


def adversarial_recon(
    engine: Engine,
    batch: Batch,
    importances: Mapping[str, Tensor],
    adversary: Adversary = Adversary(),
) -> Attack:
    """The worst masking of all sites together on ``batch`` that ``adversary`` finds.

    ``importances`` ``[batch, pos, C]`` per site are held fixed; no gradient reaches the Run or stays on anything.
    """
    g = {name: value.detach() for name, value in importances.items()}
    generator = torch.Generator(batch.tokens.device).manual_seed(adversary.seed)
    shared = {"site": 2, "position": 1, "token": 0}[adversary.per]
    r = {name: uniform((*[1] * shared, *value.shape[shared:]), generator, value) for name, value in g.items()}
    best, worst, history = 0.0, r, list[float]()
    for step in range(adversary.steps + 1):
        last = step == adversary.steps
        with torch.set_grad_enabled(not last):
            r = {name: value.detach().requires_grad_(not last) for name, value in r.items()}
            kl = engine.kl(batch, [Pass({name: value + (1 - value) * r[name] for name, value in g.items()})])[0]
        history.append(float(kl.detach()))
        if step == 0 or history[-1] > best:
            best, worst = history[-1], {name: value.detach() for name, value in r.items()}
        if not last:
            whole = torch.full_like(kl, batch.scored.numel())  # a mean's gradients may be too small for float16
            gradients = torch.autograd.grad(kl, list(r.values()), grad_outputs=whole)
            moved = zip(r.items(), gradients, strict=True)
            r = {name: (value.detach() + adversary.step_size * by.sign()).clamp(0, 1) for (name, value), by in moved}
    return Attack(best, tuple(history), worst)
