"""Training: ``decompose``, one loop that reads from top to bottom.

A step: original forward (no gradient) -> importances -> the terms' masked passes, evaluated together -> weighted sum -> one
optimiser step on read, write and importance parameters. The host never receives gradients and never changes by a bit. Losses
and gradients are checked before the optimiser step, so that no parameter ever takes a value that is not finite. On a GPU the
check stays there, skips the step, and is read when a row of the history is due: one copy to the host per logged step.

Before the first step the components alone are brought near the weights (faithfulness warm-up; without it some seeds fail).
Randomness comes from generators seeded by ``seed``; a checkpoint holds their states, so that resuming is bit-exact on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_spd import storage
from tl_spd.checks import check_weights, check_whole, extremes, not_finite
from tl_spd.data import Batches
from tl_spd.engine import Batch, Engine
from tl_spd.importance import Importances, ImportanceSpec, Vector
from tl_spd.losses import Faithfulness, LossTerm, ReconTerm, Step, host_weights, term_values
from tl_spd.memory import warn_of_memory
from tl_spd.run import Run, from_record, load, new_run
from tl_spd.settings import Settings, make_settings
from tl_spd.sites import HookedTransformer, Site, find_sites, host_device, host_dtype


class NonFiniteLossError(FloatingPointError):
    """An activation, a loss or a gradient was not finite; the message names the step and the place, term or parameter."""


@torch.enable_grad()  # notebooks switch gradients off for the whole session
def decompose(
    model: HookedTransformer,
    data: Any,
    *,
    sites: str | Iterable[str],
    C: int | Mapping[str, int],
    steps: int,
    importance: ImportanceSpec = Vector(),  # noqa: B008 - frozen
    losses: Iterable[LossTerm] | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool = True,
    check_memory: bool = True,
    **settings: Any,
) -> Run:
    """Decompose weights of ``model`` into rank-1 subcomponents that explain it on ``data``.

    Args:
        data: a token tensor ``[batch, pos]`` or a tuple ``(tokens, attention_mask)``, an iterable of batches, or a function
            ``(step, generator) -> batch``. A batch is either of the first two; the generator is on the CPU.
        out: a folder for the Run, and for checkpoints (Runs too) every ``checkpoint_every`` steps and on KeyboardInterrupt.
            Nobody else may write there meanwhile; it may not hold a Run of other settings or (known beforehand) tokens.
        resume: continue from ``out/checkpoint``, or return the finished Run in ``out``. All else must be the same.
        check_memory: warn where :func:`~tl_spd.memory.estimate_memory` is above what is free, refuse what can never fit.
        losses, settings: fields of :class:`~tl_spd.settings.Settings`; losses default to ``paper_losses("gpt2")``.

    Returns:
        The Run; its history has one row per logged step (losses before coefficients, and :func:`mean_l0`). What ends the
        training early, KeyboardInterrupt too, carries the Run so far: in a notebook, ``sys.last_value.run``.

    Raises:
        ValueError, TypeError: wrong settings, patterns or data; TooLargeError: too little memory. Before training starts.
        StorageError: another process or thread is writing to ``out``, or its checkpoint is damaged.
        NonFiniteLossError: an activation, a loss or a gradient was not finite; the last checkpoint is kept.
    """
    chosen = make_settings(sites, C, importance, losses, steps, **settings)
    found, counts, batches, described = _checked(model, data, chosen)
    with _checkpoint_folder(out, checkpoint_every, resume) as folder:
        saved = None if folder is None else _read_checkpoint(folder, described, resume)
        if resume and saved is None and folder is not None and storage.holds_record(folder.parent):
            return load(folder.parent, model)
        if check_memory and not (saved and saved[0]["step"] == steps):
            warn_of_memory(model, chosen, batches, saves=out is not None, checkpoints=checkpoint_every is not None)
        run = from_record(*saved, model, str(folder)) if saved else _fresh_run(model, chosen, found, counts, batches)
        every = checkpoint_every or (steps if saved else None)  # one that was resumed must not look unfinished for ever
        trainer = _Trainer(model, run, chosen, described)
        with trainer.training(folder):
            trainer.restore(*saved, str(folder)) if saved else trainer.warm_up(progress)
            with tqdm(total=steps, initial=trainer.step, desc="decompose", disable=not progress) as bar:
                for step in range(trainer.step, steps):
                    with trainer.autocast:
                        batch = trainer.engine.observe(*batches(step, trainer.data_generator))
                        importances = trainer.engine.importances(batch, chosen.leak.at(trainer.progress))
                        losses = trainer.losses(batch, importances)
                    trainer.update(batch, losses, importances)
                    trainer.show(bar)
                    if folder and trainer.due(every):
                        trainer.save(folder)
            return trainer.finish(out)


def _checked(
    model: HookedTransformer, data: Any, settings: Settings
) -> tuple[Sequence[Site], dict[str, int], Batches, dict[str, Any]]:
    """The sites, their numbers of subcomponents, the data as batches, and what is written down of settings and data.

    Errors where one of them cannot be used.
    """
    found = find_sites(model, settings.sites)
    check_weights(model)
    batches = Batches(data, model, settings.batch_size)
    counts = settings.counts([site.name for site in found])
    return found, counts, batches, settings.plain() | {"data": batches.digest()}


def _fresh_run(
    model: HookedTransformer, settings: Settings, sites: Sequence[Site], counts: Mapping[str, int], batches: Batches
) -> Run:
    generator = torch.Generator().manual_seed(settings.seed + 1)
    first = batches.first(generator) if settings.init == "inputs" else None
    return new_run(model, sites, counts, settings.importance, settings.init, settings.seed, first)


@contextmanager
def _checkpoint_folder(out: str | Path | None, checkpoint_every: int | None, resume: bool) -> Iterator[Path | None]:
    """The folder for checkpoints, or None; ``out`` is made, while nothing is lost if it cannot be, and is ours inside."""
    check_whole(checkpoint_every=checkpoint_every)
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, found {checkpoint_every}.")
    if out is None and (resume or checkpoint_every):
        raise ValueError("checkpoint_every= and resume= need a folder: pass out=.")
    with nullcontext() if out is None else storage.locked(out):
        yield None if out is None else Path(out) / "checkpoint"


def _read_checkpoint(
    folder: Path, now: Mapping[str, Any], resume: bool
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The checkpoint to continue from, or None. What must not be lost, or was made with other settings, is refused."""
    _check_free(folder.parent, now)
    if not storage.holds_record(folder):
        return None
    record, tensors = storage.read_folder(folder)
    then, step = record.get("settings"), record.get("step")
    if not isinstance(then, dict) or type(step) is not int or type(then.get("steps")) is not int:
        raise storage.StorageError(f"{folder} holds no training state; it is no checkpoint of spd.decompose.")
    steps = then["steps"]
    if not 0 <= step <= steps:
        raise storage.StorageError(f"{folder} is damaged: it is at step {step} of {steps}. Use a backup, or remove it.")
    if not resume and not (step == steps and _written(folder.parent, record)):
        raise ValueError(
            f"{folder} holds a decomposition that stopped at step {step} of {steps}. Pass resume=True (--resume) to "
            "continue it, or another out=, or remove that folder."
        )
    if not resume:
        storage.discard(folder)  # of a finished training, which would be taken for this one's later
        return None
    if changed := _changed(then, now):
        shown = storage.brief({key: (then.get(key), now.get(key)) for key in changed}, 1000)
        raise ValueError(f"The checkpoint in {folder} was made with other settings (then, now): {shown}.")
    return record, tensors


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ; the data only where it was known beforehand both times. ``recompute`` changes no bit."""
    passed = {"recompute"} | ({"data"} if then.get("data") is None or now.get("data") is None else set())
    return [key for key in {**now, **then} if key not in passed and then.get(key) != now.get(key)]


def _check_free(out: Path, now: Mapping[str, Any]) -> None:
    """Refuse to train over the finished Run of other settings."""
    then = storage.read_record(out).get("settings") if storage.holds_record(out) else None
    if isinstance(then, dict) and (changed := _changed(then, now)):
        raise ValueError(
            f"{out} holds a Run that was made with other settings ({', '.join(changed)}). "
            "Give another out=, or remove that folder."
        )


def _written(out: Path, record: Mapping[str, Any]) -> bool:
    """Whether ``out`` holds the Run of a finished training whose last checkpoint has this record."""
    if not storage.holds_record(out):
        return False
    run = storage.read_record(out)
    same = all(run.get(key) == record.get(key) for key in ("fingerprint", "history"))
    return same and not _changed(run["settings"], record["settings"])


class _Trainer:
    """The moving parts of one training: parameters, optimiser, generators, history."""

    def __init__(self, model: HookedTransformer, run: Run, settings: Settings, described: dict[str, Any]):
        self.run, self.settings = run, settings
        same = run.settings.get("data", described["data"]) == described["data"]  # the whole training's, or not known
        run.settings = described if same else described | {"data": None}
        self.engine = Engine(model, run, settings.last_token_only, settings.max_rows, settings.recompute)
        self.weights = host_weights(model, run)
        self.parameters = run.named_parameters()
        self.optimizer = settings.optimizer.build(run)
        self.watch = _Watch([term.name for term in settings.losses], self.parameters)
        self.like = self.optimizer.param_groups[0]["params"][0]
        self.autocast = torch.autocast(self.like.device.type, torch.bfloat16, enabled=settings.autocast)
        self.data_generator = torch.Generator().manual_seed(settings.seed + 1)
        self.mask_generator = torch.Generator(host_device(model)).manual_seed(settings.seed + 2)
        self.history: list[dict[str, float]] = []
        self.step = 0
        self.whole: dict[str, Tensor] | None = None
        """The generators' states behind the last complete step; None while the parameters are between two steps."""

    @contextmanager
    def training(self, folder: Path | None) -> Iterator[None]:
        """Gradients on inside; an interrupt that leaves a complete step behind writes it to ``folder``."""
        with self._carrying_the_run():
            try:
                try:
                    self.run.requires_grad_(True)
                    with self._saving_an_interrupt(folder):
                        yield
                finally:
                    self._stop()
            finally:
                self._stop()  # once more, where an interrupt cut the first short

    def _stop(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.run.requires_grad_(False)
        self.run.history = pd.DataFrame(self.history)

    @contextmanager
    def _carrying_the_run(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.run = self.run  # type: ignore[attr-defined]
            raise

    @contextmanager
    def _saving_an_interrupt(self, folder: Path | None) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt as stop:
            if folder is not None and self.whole is not None:
                self.save(folder)
            kept = "Its Run is this exception's attribute run: in a notebook, run = sys.last_value.run."
            if folder is not None and storage.holds_record(folder):
                kept = f"spd.load({str(folder)!r}, model) reads what was reached; resume=True (--resume) continues."
            stop.args = (f"The training was stopped after step {self.step} of {self.settings.steps}. {kept}",)
            raise

    def warm_up(self, progress: bool) -> None:
        """Bring the components near the host's weights before anything else is asked of them."""
        settings = self.settings.warmup
        parameters = [p for parts in self.run.components.values() for p in parts.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=settings.lr, fused=True)
        context = Step(self.run, Importances({}), self.weights, 0.0, self.mask_generator, lambda passes: torch.zeros(0))
        for step in tqdm(range(settings.steps), "faithfulness warm-up", disable=not progress, leave=False):
            loss = Faithfulness().value(context)
            if not math.isfinite(loss.item()):
                raise NonFiniteLossError(f"Step {step} of the faithfulness warm-up: Faithfulness was not finite.")
            if loss.item() < settings.tolerance:
                break
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            optimizer.step()
        self.whole = self._generator_states()

    def losses(self, batch: Batch, importances: Importances) -> Tensor:
        """The value of every term before its coefficient, ``[term]``; reconstruction terms are evaluated together."""
        kl = partial(self.engine.kl, batch)
        context = Step(self.run, importances, self.weights, self.progress, self.mask_generator, kl)
        return torch.stack([value.to(self.like.dtype) for value in term_values(self.settings.losses, context)])

    @property
    def progress(self) -> float:
        """0 at the first step, 1 at the last."""
        return self.step / max(1, self.settings.steps - 1)

    def due(self, every: int | None) -> bool:
        """Whether the step just made is the last one or a multiple of ``every``."""
        return every is not None and (self.step % every == 0 or self.step == self.settings.steps)

    def update(self, batch: Batch, values: Tensor, importances: Importances) -> None:
        """One optimiser step on the weighted sum of ``values``, and the history's new row where one is due."""
        settings = self.settings
        total = values @ values.new_tensor([term.coeff_at(self.progress) for term in settings.losses])
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * settings.schedule.factor(self.step, settings.steps)
        self.optimizer.zero_grad(set_to_none=True)
        self._differentiate(total, batch.scored.numel())
        shown = extremes(batch.seen, self.run.sites)
        self.watch.look(self.step, shown, torch.stack([total.detach(), *values.detach()]))
        if settings.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.optimizer.clip)
        self.whole = None
        self.optimizer.found_inf = self.watch.bad  # type: ignore[attr-defined]  # fused Adam: no step where this is 1
        self.optimizer.step()
        self.step += 1
        if self.due(settings.log_every):
            self.history.append({"step": self.step, **self.watch.read(L0=mean_l0(importances))})
        self.whole = self._generator_states()

    def _differentiate(self, total: Tensor, scored: int) -> None:
        """The gradients of ``total``. A float16 host would round those of a mean, times a small coefficient, to 0.

        There the sum over positions of the largest reconstruction term, times 16, is differentiated instead: far from both
        ends of float16, by a power of two.
        """
        coeffs = [term.coeff for term in self.settings.losses if isinstance(term, ReconTerm) and term.coeff > 0]
        half = host_dtype(self.engine.model) == torch.float16
        scale = 2.0 ** min(30, round(math.log2(16 * scored / max(coeffs, default=1.0)))) if half else 1.0
        (total * scale).backward()
        if scale != 1:
            torch._foreach_div_([p.grad for p in self.parameters.values() if p.grad is not None], scale)

    def _generator_states(self) -> dict[str, Tensor]:
        return {"data": self.data_generator.get_state(), "mask": self.mask_generator.get_state()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the last complete step: the Run, the optimiser's and the generators' states."""
        assert self.whole is not None
        self.watch.read()
        self.run.history = pd.DataFrame(self.history)
        tensors = self.run.tensors() | storage.pack_training(self.optimizer, self.whole)
        storage.write_folder(folder, self.run.record() | {"step": self.step}, tensors)

    def show(self, bar: Any) -> None:
        """Move the progress bar by one step, with the history's new row where there is one."""
        bar.update()
        if self.due(self.settings.log_every):
            bar.set_postfix(self.history[-1])

    def finish(self, out: str | Path | None) -> Run:
        """The Run, written to ``out`` if given."""
        self.run.history = pd.DataFrame(self.history)
        if out is not None:
            self.run.save(out)
        return self.run

    def restore(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
        """Take up the training state of the checkpoint that was read from ``where``."""
        generators = {"data": self.data_generator, "mask": self.mask_generator}
        storage.unpack_training(tensors, self.optimizer, generators, where)
        self.step, self.history = record["step"], self.run.history.to_dict("records")
        self.whole = self._generator_states()


class _Watch:
    """Looks at activations, losses and gradients of every step where they are; on a CPU an error comes at once, else when read.

    ``bad`` becomes and stays 1 once something was not finite.
    """

    def __init__(self, terms: list[str], parameters: Mapping[str, Tensor]):
        self.losses, self.parameters = ["loss", *terms], parameters
        self.shown, self.names = list[str](), list[str]()
        one = next(iter(parameters.values()))
        self.bad = torch.zeros((), device=one.device)  # float32 is what Adam takes
        self.zero = one.new_zeros(())
        self.seen: Tensor | None = None
        """What the latest step showed, or the first bad one; in the order of ``names``."""
        self.at_once = self.bad.device.type == "cpu"

    def look(self, step: int, shown: Mapping[str, Tensor], losses: Tensor) -> None:
        """Take in what the original model showed (:func:`extremes`), losses ``[1 + term]`` and gradients of one step."""
        self.shown = list(shown)
        self.names = ["step", *shown, *self.losses, *(f"the gradient of {name}" for name in self.parameters)]
        norms = [self.zero if p.grad is None else p.grad.norm() for p in self.parameters.values()]
        numbers = [value.to(self.zero.dtype) for value in (*shown.values(), *losses)]
        now = torch.stack([torch.full_like(self.zero, step), *numbers, *norms])
        self.seen = now if self.seen is None else torch.where(self.bad.bool(), self.seen, now)
        self.bad = torch.maximum(self.bad, (~torch.isfinite(now).all()).to(self.bad.dtype))
        if self.at_once:
            self.read()

    def read(self, **further: Tensor) -> dict[str, float]:
        """The latest losses and ``further`` numbers, in one copy; an error if anything has not been finite."""
        if self.seen is None:
            return {}
        copied = torch.stack([*self.seen, *(value.to(self.seen.dtype) for value in further.values())]).tolist()
        found = dict(zip([*self.names, *further], copied, strict=True))
        if bad := [name for name in self.names if not math.isfinite(found[name])]:
            if bad[0] in self.shown:
                raise NonFiniteLossError(f"Step {found['step']:.0f}: {not_finite(bad[0])}")
            terms = [name for name in bad if name in self.losses[1:]]
            raise NonFiniteLossError(
                f"Step {found['step']:.0f}: {', '.join(terms or bad[:1])} was not finite. The last checkpoint, if any, is from "
                "before. Try a smaller learning rate, a smaller coefficient or clip=1.0 in the optimizer."
            )
        return {name: found[name] for name in [*self.losses, *further]}


def mean_l0(importances: Importances) -> Float[Tensor, ""]:
    """Mean number of subcomponents above 0 per real token, summed over sites."""
    active = torch.stack([(g.detach() > 0).sum(-1) for g in importances.values()]).sum(0)
    return (active if importances.real is None else active[importances.real]).float().mean()
