"""Training: ``decompose`` - settings, and one loop that reads from top to bottom.

A step: original forward (no gradient) -> importances -> the terms' masked passes, evaluated together -> weighted sum -> one
optimiser step on read, write and importance parameters. The host never receives gradients and never changes by a bit.

Before the first step the components alone are brought near the weights (faithfulness warm-up; without it some seeds fail).
Randomness comes from generators seeded by ``seed``; a checkpoint holds their states, so that resuming is bit-exact on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_spd import storage
from tl_spd.components import Init
from tl_spd.data import Batches
from tl_spd.engine import Engine
from tl_spd.importance import ImportanceSpec, Vector
from tl_spd.losses import Faithfulness, LossTerm, ReconTerm, Step, host_weights, paper_losses
from tl_spd.run import Run, from_record, new_run
from tl_spd.sites import HookedTransformer, find_sites, host_device


class NonFiniteLossError(FloatingPointError):
    """A loss was not finite; the message names the step and the term."""


@dataclass(frozen=True)
class Optimizer:
    """``kind`` is ``"adam"`` or ``"adamw"``; ``clip`` bounds the norm of all gradients together (None: no bound)."""

    lr: float = 1e-3
    kind: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("adam", "adamw"):
            raise ValueError(f"Optimizer: kind must be 'adam' or 'adamw', found {self.kind!r}.")
        if self.lr < 0 or self.weight_decay < 0 or (self.clip is not None and self.clip <= 0):
            raise ValueError(f"Optimizer: lr and weight_decay must be at least 0 and clip above 0, found {self}.")

    def build(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The fused torch optimiser over ``parameters``."""
        cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.kind]
        return cls(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate: linear ``warmup`` (steps, or a fraction of all below 1), then ``kind`` down to ``final``."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup: float = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "linear"):
            raise ValueError(f"Schedule: kind must be 'constant', 'cosine' or 'linear', found {self.kind!r}.")
        if self.warmup < 0:
            raise ValueError(f"Schedule: warmup must be at least 0, found {self.warmup}.")

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


@dataclass(frozen=True)
class Settings:
    """Everything that decides a decomposition; saved with the Run.

    Attributes:
        sites: glob patterns over the host's weight names.
        C: subcomponents per site, or a dict from patterns to numbers.
        importance: which importance function every site gets.
        losses: the terms with their coefficients.
        steps: optimiser steps.
        batch_size: rows drawn per step where the data is one token tensor (None: all of it).
        last_token_only: score only the last real position instead of all real positions.
        max_rows: most sequences stacked in one pass of the host (None: no bound).
        log_every: steps between rows of the history.
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
    max_rows: int | None = None
    log_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if not self.losses or not all(isinstance(term, LossTerm) for term in self.losses):
            raise ValueError(f"losses must be one or more loss terms such as spd.Recon(1.0), found {self.losses!r}.")
        names = [term.name for term in self.losses]
        if len(set(names)) < len(names):
            raise ValueError(f"Every loss term may be given once, found {names}.")
        if not isinstance(self.importance, ImportanceSpec):
            raise TypeError(f"importance must be a specification such as spd.Vector(d_gate=8), found {self.importance!r}.")

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
        import fnmatch

        found: dict[str, int] = {}
        for pattern, count in self.C.items():
            matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                raise ValueError(f"C names the pattern {pattern!r}, which matches none of {list(names)}.")
            found.update(dict.fromkeys(matching, count))
        if lacking := [name for name in names if name not in found]:
            raise ValueError(f"C gives no number of subcomponents for {lacking}.")
        return found


def _listed(value: Any) -> Any:
    """``value`` with tuples as lists, as JSON gives them back."""
    if isinstance(value, Mapping):
        return {key: _listed(entry) for key, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, list | tuple) else value


def decompose(
    model: HookedTransformer,
    data: Any,
    *,
    sites: str | Iterable[str],
    C: int | Mapping[str, int],
    steps: int,
    importance: ImportanceSpec = Vector(),
    losses: Iterable[LossTerm] | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Decompose weights of ``model`` into rank-1 subcomponents that explain it on ``data``.

    Args:
        data: a token tensor ``[batch, pos]``, an iterable of batches, or a function ``(step, generator) -> batch``. A batch
            is a token tensor or a pair ``(tokens, attention_mask)``; the generator is on the CPU.
        losses: default ``paper_losses("gpt2")``.
        out: a folder; the Run is saved there, and checkpoints in ``out/checkpoint`` every ``checkpoint_every`` steps.
        resume: continue from ``out/checkpoint`` if there is one; its settings must be the same.
        settings: further fields of :class:`Settings`.

    Returns:
        The Run, its history with one row per logged step (losses before coefficients; L0 is the mean number of
        subcomponents above 0 per token, summed over sites).

    Raises:
        ValueError, TypeError: wrong settings, patterns or data, before training starts.
        NonFiniteLossError: a loss was not finite; the last good checkpoint is kept.
    """
    chosen = Settings(
        sites if isinstance(sites, str) else tuple(sites),
        C,
        importance,
        paper_losses("gpt2") if losses is None else tuple(losses),
        steps,
        **settings,
    )
    if (resume or checkpoint_every) and out is None:
        raise ValueError("checkpoint_every= and resume= need a folder: pass out=.")
    trainer = _Trainer(model, chosen, Batches(data, model, chosen.batch_size))
    folder = None if out is None else Path(out) / "checkpoint"
    if not (resume and folder is not None and trainer.restore(folder)):
        trainer.warm_up(progress)
    trainer.run.requires_grad_(True)
    try:
        for step in _shown(trainer, range(trainer.step, steps), progress):
            batch = trainer.engine.observe(*trainer.batches(step, trainer.data_generator))
            importances = trainer.engine.importances(batch)
            losses_now = trainer.losses(batch, importances)
            trainer.update(losses_now)
            if (step + 1) % chosen.log_every == 0 or step + 1 == steps:
                trainer.log(importances)
            if folder is not None and checkpoint_every and ((step + 1) % checkpoint_every == 0 or step + 1 == steps):
                trainer.save(folder)
    finally:
        trainer.run.requires_grad_(False)
    trainer.run.history = pd.DataFrame(trainer.history)
    if out is not None:
        trainer.run.save(out)
    return trainer.run


def _shown(trainer: _Trainer, steps: range, progress: bool) -> Iterator[int]:
    with tqdm(steps, disable=not progress, initial=steps.start, total=steps.stop, desc="decompose") as bar:
        trainer.bar = bar
        yield from bar


class _Trainer:
    """The moving parts of one training: parameters, optimiser, generators, history."""

    def __init__(self, model: HookedTransformer, settings: Settings, batches: Batches):
        self.model, self.settings, self.batches = model, settings, batches
        sites = find_sites(model, settings.sites)
        counts = settings.counts([site.name for site in sites])
        self.run = new_run(model, sites, counts, settings.importance, settings.init, settings.seed)
        self.run.settings = settings.plain()
        self._attach()
        self.data_generator = torch.Generator().manual_seed(settings.seed + 1)
        self.mask_generator = torch.Generator(host_device(model)).manual_seed(settings.seed + 2)
        self.history: list[dict[str, float]] = []
        self.recent: list[Tensor] = []
        self.step = 0
        self.bar: Any = None

    def _attach(self) -> None:
        settings = self.settings
        self.engine = Engine(self.model, self.run, settings.last_token_only, settings.max_rows)
        self.weights = host_weights(self.model, self.run)
        self.optimizer = settings.optimizer.build(self.run.parameters())

    def warm_up(self, progress: bool) -> None:
        """Bring the components near the host's weights before anything else is asked of them."""
        settings = self.settings.warmup
        parameters = [p for parts in self.run.components.values() for p in parts.parameters()]
        self.run.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, lr=settings.lr, fused=True)
        step = Step(self.run, None, self.weights, 0.0, self.mask_generator, None)  # type: ignore[arg-type]
        try:
            for _ in tqdm(range(settings.steps), disable=not progress, desc="faithfulness warm-up", leave=False):
                loss = Faithfulness().value(step)
                if loss.item() < settings.tolerance:
                    break
                for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = grad
                optimizer.step()
        finally:
            for parameter in parameters:
                parameter.grad = None
            self.run.requires_grad_(False)

    def losses(self, batch: Any, importances: Any) -> Tensor:
        """The value of every term before its coefficient, ``[term]``; reconstruction terms are evaluated together."""
        steps = max(1, self.settings.steps - 1)
        context = Step(
            self.run,
            importances,
            self.weights,
            self.step / steps,
            self.mask_generator,
            lambda passes: self.engine.kl(batch, passes, importances),
        )
        values: dict[str, Tensor] = {}
        together = [term for term in self.settings.losses if type(term).value is ReconTerm.value]
        passes = [term.passes(importances, self.mask_generator) for term in together]
        if together:
            kl = context.kl([entry for group in passes for entry in group])
            for term, part in zip(together, kl.split([len(group) for group in passes]), strict=True):
                values[term.name] = part.mean()
        for term in self.settings.losses:
            if term.name not in values:
                values[term.name] = term.value(context)
        return torch.stack([values[term.name].to(torch.float32) for term in self.settings.losses])

    def update(self, values: Tensor) -> None:
        """One optimiser step on the weighted sum."""
        coeffs = torch.tensor([term.coeff for term in self.settings.losses], device=values.device)
        total = values @ coeffs
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.optimizer.lr * self.settings.schedule.factor(self.step, self.settings.steps)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        if self.settings.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.run.parameters(), self.settings.optimizer.clip)
        self.optimizer.step()
        self.recent.append(torch.cat([total.detach()[None], values.detach()]))
        self.step += 1

    def log(self, importances: Mapping[str, Tensor]) -> None:
        """One copy from the device: check that all recent losses were finite, add a row, show it."""
        names = ["loss", *(term.name for term in self.settings.losses)]
        active = torch.stack([(g.detach() > 0).sum(-1).float().mean() for g in importances.values()]).sum()
        table = torch.stack(self.recent)
        rows = torch.cat([table, active.expand(len(table), 1)], dim=1).cpu()
        if not bool(torch.isfinite(rows).all()):
            first = int((~torch.isfinite(rows)).any(1).nonzero()[0])
            bad = [name for name, value in zip(names, rows[first].tolist(), strict=False) if not math.isfinite(value)]
            raise NonFiniteLossError(
                f"Step {self.step - len(rows) + first}: {', '.join(bad[1:] or bad)} was not finite. The last checkpoint, if "
                "any, is from before. Try a smaller learning rate or clip=1.0 in the optimizer."
            )
        self.recent.clear()
        self.history.append({"step": self.step, **dict(zip([*names, "L0"], rows[-1].tolist(), strict=True))})
        if self.bar is not None:
            self.bar.set_postfix({name: f"{value:.2g}" for name, value in list(self.history[-1].items())[1:]})

    def save(self, folder: Path) -> None:
        """Write a checkpoint: the Run, the optimiser's and the generators' states."""
        if self.recent:
            return_rows = torch.stack(self.recent)
            if not bool(torch.isfinite(return_rows).all()):
                return  # the next log names the step; the last good checkpoint stays
        tensors = self.run.tensors()
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors.update({f"optimizer/{index}/{key}": value for key, value in state.items()})
        for name, value in (("data", self.data_generator), ("mask", self.mask_generator)):
            tensors[f"generator/{name}"] = value.get_state()
        for index, row in enumerate(self.recent):
            tensors[f"recent/{index:06d}"] = row
        record = self.run.record() | {"step": self.step, "rows": self.history}
        storage.write_folder(folder, record, tensors)

    def restore(self, folder: Path) -> bool:
        """Continue from the checkpoint in ``folder``; False if there is none."""
        if not (folder / storage.RECORD).exists():
            return False
        record, tensors = storage.read_folder(folder)
        now, then = self.settings.plain(), record["settings"]
        if now != then:
            changed = {key: (then.get(key), now[key]) for key in now if then.get(key) != now[key]}
            raise ValueError(f"The checkpoint in {folder} was made with other settings (then, now): {changed}.")
        self.run = from_record(record, tensors, self.model, str(folder))
        self._attach()
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/")
                state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.data_generator.set_state(tensors["generator/data"])
        self.mask_generator.set_state(tensors["generator/mask"])
        self.recent = [tensors[name].to(host_device(self.model)) for name in sorted(tensors) if name.startswith("recent/")]
        self.history, self.step = record["rows"], record["step"]
        return True
