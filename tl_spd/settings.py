"""Settings: everything that decides a decomposition, as frozen dataclasses that are checked when made and saved with the Run."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

import torch

from tl_spd.checks import check_whole
from tl_spd.components import Init
from tl_spd.importance import ImportanceSpec, Leak
from tl_spd.losses import LossTerm, paper_losses
from tl_spd.run import Run


@dataclass(frozen=True)
class Optimizer:
    """How parameters move.

    Attributes:
        lr: learning rate.
        kind: ``"adam"`` or ``"adamw"``.
        clip: bounds the norm of all gradients together (None: no bound).
        component_lr: learning rate of read and write directions, where it should differ from that of the importance
            functions: real weights bear much smaller steps (None: ``lr``).
    """

    lr: float = 1e-3
    kind: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    component_lr: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("adam", "adamw"):
            raise ValueError(f"Optimizer: kind must be 'adam' or 'adamw', found {self.kind!r}.")
        rates = (self.lr, self.weight_decay, self.component_lr or 0)
        if not (all(rate >= 0 for rate in rates) and (self.clip is None or self.clip > 0)):
            raise ValueError(
                f"Optimizer: learning rates and weight_decay must be at least 0 and clip above 0, found {self}."
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Optimizer: betas must be at least 0 and below 1, two of them, found {self.betas}.")

    def build(self, run: Run) -> torch.optim.Optimizer:
        """The fused torch optimiser over the Run's parameters: components, then importance functions.

        Each group keeps its own learning rate under ``base_lr``, for schedules to multiply.
        """
        cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.kind]
        component_lr = self.lr if self.component_lr is None else self.component_lr
        groups = [
            {"params": [p for module in modules for p in module.parameters()], "lr": rate, "base_lr": rate}
            for modules, rate in (
                (list(run.components.values()), component_lr),
                (list(run.functions.values()), self.lr),
            )
        ]
        betas = float(self.betas[0]), float(self.betas[1])
        return cls(groups, betas=betas, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate: linear ``warmup`` (steps, or a fraction of all below 1), then ``kind`` down to ``final``."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int | float = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "linear"):
            raise ValueError(f"Schedule: kind must be 'constant', 'cosine' or 'linear', found {self.kind!r}.")
        if not (self.warmup >= 0 and self.final >= 0):
            raise ValueError(f"Schedule: warmup and final must be at least 0, found {self.warmup} and {self.final}.")

    def factor(self, step: int, steps: int) -> float:
        """The factor at ``step`` (0 to ``steps`` - 1)."""
        warmup = self.warmup * steps if self.warmup < 1 else self.warmup
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        progress = min(1.0, max(0.0, (step - warmup) / max(1, steps - warmup)))
        fall = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress}[self.kind]
        return rise * (fall if self.kind == "constant" else self.final + (1 - self.final) * fall)


@dataclass(frozen=True)
class FaithfulnessWarmup:
    """Adam on the components alone until faithfulness is below ``tolerance``, at most ``steps`` steps (0: none)."""

    steps: int = 1000
    tolerance: float = 1e-6
    lr: float = 1e-2

    def __post_init__(self) -> None:
        check_whole(steps=self.steps)
        if not (self.steps >= 0 and self.tolerance >= 0 and self.lr >= 0):
            raise ValueError(f"FaithfulnessWarmup: steps, tolerance and lr must be at least 0, found {self}.")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a decomposition; saved with the Run.

    Attributes:
        sites: glob patterns over the host's weight names.
        C: subcomponents per site, or a dict from patterns to numbers; below a matrix's smaller side they cannot sum to it.
        importance: which importance function every site gets.
        leak: how much of the gradient reaches importances that are off; see its class, :class:`~tl_spd.importance.Leak`.
        losses: the terms with their coefficients.
        steps: optimiser steps.
        batch_size: rows drawn per step where the data is one token tensor (None, or more than there are: all of it).
        last_token_only: score only the last real position instead of all real positions.
        optimizer, schedule, warmup: how parameters move, and what is trained before; see their classes.
        init: where components start: "inputs" (one for each input the data brings), "svd" or "kaiming" (random).
        max_rows: most sequences stacked in one pass of the host (None: no bound; on a CPU what its cache holds).
        recompute: make the activations of masked passes again in the backward pass, one stack of passes after the other: slower
            by one more forward pass of each, and only one stack's are held at a time (see max_rows: what fits in one stack
            gains nothing). The same bits.
        log_every: steps between rows of the history.
        seed: of the start, the draws of rows and the masks.
        autocast: let matmuls of the step's forward passes run in bfloat16 (torch's autocast). The Run's parameters, their
            gradients and the optimiser stay in float32. TF32 is what torch is set to (off by default); nothing here sets it.
    """

    sites: str | tuple[str, ...]
    C: int | Mapping[str, int]
    importance: ImportanceSpec
    losses: tuple[LossTerm, ...]
    steps: int
    batch_size: int | None = None
    last_token_only: bool = False
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    init: Init = "kaiming"
    warmup: FaithfulnessWarmup = FaithfulnessWarmup()
    leak: Leak = field(default_factory=Leak)
    max_rows: int | None = None
    recompute: bool = False
    log_every: int = 50
    seed: int = 0
    autocast: bool = False

    def __post_init__(self) -> None:
        check_whole(seed=self.seed)
        optional = {name: getattr(self, name) for name in ("batch_size", "max_rows") if getattr(self, name) is not None}
        counts = {f"C[{key!r}]": C for key, C in self.C.items()} if isinstance(self.C, Mapping) else {"C": self.C}
        for name, value in {"steps": self.steps, "log_every": self.log_every, **optional, **counts}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}.")
        kinds = {"optimizer": Optimizer, "schedule": Schedule, "warmup": FaithfulnessWarmup, "leak": Leak}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a spd.{kind.__name__}, found {getattr(self, name)!r}.")
        if self.init not in get_args(Init):
            raise ValueError(f"init must be one of {get_args(Init)}, found {self.init!r}.")
        if not self.losses or not all(isinstance(term, LossTerm) for term in self.losses):
            raise ValueError(f"losses must be one or more loss terms such as spd.Recon(1.0), found {self.losses!r}.")
        names = [term.name for term in self.losses]
        if len(set(names)) < len(names):
            raise ValueError(f"Every loss term may be given once, found {names}.")
        if not isinstance(self.importance, ImportanceSpec) or not is_dataclass(self.importance):
            raise TypeError(f"importance must be a specification such as spd.Vector(), found {self.importance!r}.")
        try:
            json.dumps(self.plain(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Settings are saved with the Run and must be finite plain values: {error}.") from error

    def plain(self) -> dict[str, Any]:
        """The settings as plain values for JSON, each term and function with its class name."""
        values = asdict(self)
        values["importance"] = {"kind": type(self.importance).__name__, **asdict(self.importance)}  # type: ignore[call-overload]
        values["losses"] = [{"kind": term.name, **asdict(term)} for term in self.losses]
        return dict(_listed(values))

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        """``C`` of every site; in a dict of patterns the last one that matches holds."""
        if isinstance(self.C, int):
            return dict.fromkeys(names, self.C)
        found: dict[str, int] = {}
        for pattern, count in self.C.items():
            matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                raise ValueError(f"C names the pattern {pattern!r}, which matches none of {list(names)}.")
            found.update(dict.fromkeys(matching, count))
        if lacking := [name for name in names if name not in found]:
            raise ValueError(f"C gives no number of subcomponents for {lacking}.")
        return found


def make_settings(sites: Any, C: Any, importance: Any, losses: Any, steps: Any, **further: Any) -> Settings:
    """The settings that the arguments of ``decompose`` make; unknown names are refused."""
    if unknown := set(further) - {entry.name for entry in fields(Settings)}:
        raise TypeError(f"decompose has no settings {sorted(unknown)}; spd.Settings lists those there are.")
    terms = paper_losses("gpt2") if losses is None else tuple(losses)
    return Settings(sites if isinstance(sites, str) else tuple(sites), C, importance, terms, steps, **further)


def _listed(value: Any) -> Any:
    """``value`` with tuples as lists, as JSON gives them back."""
    if isinstance(value, Mapping):
        return {key: _listed(entry) for key, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, list | tuple) else value
