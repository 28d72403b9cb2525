"""Memory: what a training will hold at its peak, found before it starts.

1. The host, the components and the importance functions are made on torch's meta device: shapes without numbers.
2. One faithfulness step and one training step run there, through the code that trains, while every storage that lives is
   counted. A random subset of sites is taken at its largest: all of them.
3. What one step cannot show is added: the gradients of the step before, Adam's moments, and what a checkpoint is turned into.

Source: this library. Approximations: the first batch stands for all of them; padding counts as real tokens; autocast counts
as float32; attention importances in blocks count a GPU's larger ones; what torch uses inside one operation, its libraries and its
caching are not seen. The numbers are what torch's allocator gives out. On a CPU the process grows by 1.2 to 2 times as much:
the C library keeps blocks that were freed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tl_spd.components import Components
from tl_spd.data import Batches
from tl_spd.engine import Engine, passes_per_stack, scored_positions
from tl_spd.importance import ImportanceSpec, Vector
from tl_spd.losses import LossTerm, Step, faithfulness, host_weights, term_values
from tl_spd.run import Run, run_dtype
from tl_spd.settings import Settings, make_settings
from tl_spd.sites import HookedTransformer, find_sites, host_device, n_ctx
from tl_spd.wiring import make_twin, padding_mask

WRITTEN_TWICE = 2
"""A checkpoint's bytes are in memory twice beside the tensors themselves: those of each tensor, then those of the file."""


RESIDENT = 1.5
"""How far a process on a CPU grows beyond what it asked for: about the middle of what was measured."""


class TooLargeError(MemoryError):
    """A training needs more memory than its device has; the message says what to lower."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training will hold on the host's device.

    Attributes:
        host: the host's parameters and buffers, which are there already.
        parameters: components and importance functions.
        gradients: theirs.
        optimizer: Adam's two moments.
        activations: stage -> most bytes of everything else at once: masks, what autograd keeps, the weights for faithfulness.
        stages: stage -> most bytes at once, all of the above. The stages are ``"warm-up"`` (faithfulness), ``"original"``
            (the host's own pass), ``"importances"``, ``"losses"``, ``"backward"`` and ``"checkpoint"``.
        device: where all of this is.
        available: what that device has free now, or None where it does not say.
        total: what it has in all, or None.
    """

    host: int
    parameters: int
    gradients: int
    optimizer: int
    activations: Mapping[str, int]
    stages: Mapping[str, int]
    device: str
    available: int | None
    total: int | None

    @property
    def stage(self) -> str:
        """The stage with the peak."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def peak(self) -> int:
        """Most bytes at once, the host included."""
        return self.stages[self.stage]

    def __str__(self) -> str:
        """What is needed, for what and when, and what there is."""
        parts = ", ".join(f"{name} {_shown(getattr(self, name))}" for name in ("parameters", "gradients", "optimizer"))
        known = self.available is not None and self.total is not None
        there = f"{_shown(self.available)} of {_shown(self.total)} are free" if known else "what is free is not known"
        return (
            f"{_shown(self.peak - self.host)} beside the host's {_shown(self.host)}, at the stage {self.stage!r} ({parts}, "
            f"everything else there {_shown(self.activations[self.stage])}); on {self.device} {there}"
        )


def estimate_memory(
    model: HookedTransformer,
    data: Any,
    *,
    sites: str | Iterable[str],
    C: int | Mapping[str, int],
    steps: int = 1,
    importance: ImportanceSpec = Vector(),  # noqa: B008 - frozen
    losses: Iterable[LossTerm] | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool = True,
    check_memory: bool = True,
    **settings: Any,
) -> MemoryEstimate:
    """The peak memory of ``decompose`` with the same arguments, in bytes, found without making anything of that size.

    ``data`` is asked for its first batch. ``steps``, ``resume``, ``progress`` and ``check_memory`` make no difference. It takes
    about as long as a few small steps.

    Raises:
        ValueError, TypeError: as ``decompose``.
    """
    chosen = make_settings(sites, C, importance, losses, steps, **settings)
    batches = Batches(data, model, chosen.batch_size)
    return estimate(model, chosen, batches, saves=out is not None, checkpoints=checkpoint_every is not None)


@torch.enable_grad()
def estimate(
    model: HookedTransformer, settings: Settings, batches: Batches, saves: bool, checkpoints: bool
) -> MemoryEstimate:
    """As :func:`estimate_memory`, from what ``decompose`` has made of its arguments."""
    tokens, mask = batches.first(torch.Generator().manual_seed(settings.seed + 1))
    real, device = padding_mask(model, tokens, mask), host_device(model)
    scored = scored_positions(tokens, real, settings.last_token_only).to("meta")
    rows = passes_per_stack(tokens, settings.max_rows) * tokens.shape[0]
    host = _on_meta(model)
    held = _bytes([*host.parameters(), *host.buffers()])
    with _Living([*host.parameters(), *host.buffers()]) as living:
        run = _run_on_meta(host, settings)
        weights = host_weights(host, run)
        if settings.warmup.steps:
            _faithfulness_step(living, run, weights)
        engine = Engine(host, run, settings.last_token_only, rows, settings.recompute)
        _training_step(living, engine, weights, settings, tokens.to("meta"), scored)
    size = _bytes(run.parameters())
    moved = _bytes([p for parts in run.components.values() for p in parts.parameters()])
    # Gradients of the step before are dropped just before the backward pass, which makes new ones.
    added = {
        "warm-up": 2 * moved,
        "original": 3 * size,
        "importances": 3 * size,
        "losses": 3 * size,
        "backward": 2 * size,
    }
    stages = {stage: living.most[stage] + more for stage, more in added.items() if stage in living.most}
    if saves or checkpoints:
        written = WRITTEN_TWICE * size * (3 if checkpoints else 1) if device.type == "cpu" else 0
        stages["checkpoint"] = living.now + 2 * size + written
    own = {stage: size + 3 * (moved if stage == "warm-up" else size) for stage in stages}
    others = {stage: most - held - own[stage] for stage, most in stages.items()}
    return MemoryEstimate(held, size, size, 2 * size, others, stages, str(device), *_memory(device))


def warn_of_memory(
    model: HookedTransformer, settings: Settings, batches: Batches, saves: bool, checkpoints: bool
) -> None:
    """Warn where a training will not fit into the memory that is free, and refuse it where it cannot fit at all.

    Raises:
        TooLargeError: its peak is above what the device has in all.
    """
    available, total = _memory(host_device(model))
    if available is None or total is None or at_most(model, settings, batches) < available / 2:
        return
    found = estimate(model, settings, batches, saves, checkpoints)
    if found.peak > total:
        raise TooLargeError(
            f"This decomposition needs {found}. {_lower(settings)} check_memory=False trains all the same."
        )
    if (found.peak - found.host) * (RESIDENT if found.device == "cpu" else 1) > available:
        warnings.warn(f"This decomposition may not fit: it needs {found}. {_lower(settings)}", stacklevel=4)


def at_most(model: HookedTransformer, settings: Settings, batches: Batches) -> float:
    """Bytes that a training surely stays below, beside the host: too many by far, but found at once.

    So many numbers are kept per token and pass: a few for everything that a matrix or an attention head puts out.
    """
    tokens, _ = batches.first(torch.Generator().manual_seed(settings.seed + 1))
    run = _run_on_meta(model, settings)
    width = sum(6 * site.d_in + 6 * site.d_out + 4 * run.components[site.name].C for site in run.sites)
    for weight in model.parameters():
        if weight.ndim > 1:
            heads = weight.shape[0] if weight.ndim == 3 else 0
            width += 4 * weight.numel() // min(weight.shape[-2:]) + 2 * heads * tokens.shape[1]
    passes = 2 + sum(getattr(term, "samples", 1) * (1 + len(run.sites)) for term in settings.losses)
    parameters = _bytes(run.parameters())
    return 12.0 * parameters + passes * tokens.numel() * width * next(iter(run.parameters())).element_size()


def _lower(settings: Settings) -> str:
    """What to lower."""
    kind = {"hidden": "the importance functions' hidden", "d_gate": "d_gate"}
    widths = [words for name, words in kind.items() if hasattr(settings.importance, name)]
    samples = ["the losses' samples"] if any(getattr(term, "samples", 1) > 1 for term in settings.losses) else []
    rows = "batch_size" if settings.batch_size else "the rows of your batches"
    slower = "" if settings.recompute else ", or set recompute=True and max_rows to the rows of a batch (slower)"
    return f"Lower {', '.join([rows, 'C', *widths, *samples])}, or decompose fewer sites at a time{slower}."


def _memory(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes that are free on ``device``, torch's own cache included, and bytes that it has; None where it does not say."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return memory.available, memory.total
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    return None, None


def _shown(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# --- one step without numbers -----------------------------------------------------------------------------------------


def _on_meta(model: HookedTransformer) -> HookedTransformer:
    twin = make_twin(model)
    twin.tokenizer, twin.cfg.device = None, "meta"  # padding cannot be looked for among tokens without numbers
    return twin._apply(lambda tensor: tensor.to("meta"))


def _run_on_meta(host: HookedTransformer, settings: Settings) -> Run:
    sites, longest = find_sites(host, settings.sites), n_ctx(host)
    counts = settings.counts([site.name for site in sites])
    dtype = run_dtype(host)

    def empty(*shape: int, std: float = 1.0, mean: object = 0.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    components, functions = {}, {}
    for site in sites:
        C = counts[site.name]
        components[site.name] = Components(site, empty(site.d_in, C), empty(C, site.d_out))
        functions[site.name] = settings.importance.build(site, C, longest, empty)
    return Run(components, functions, settings.importance, longest, {}).requires_grad_(True)


def _faithfulness_step(living: _Living, run: Run, weights: Mapping[str, Tensor]) -> None:
    living.stage = "warm-up"
    parameters = [p for parts in run.components.values() for p in parts.parameters()]
    torch.autograd.grad(faithfulness(run, weights), parameters)


def _training_step(
    living: _Living, engine: Engine, weights: Mapping[str, Tensor], settings: Settings, tokens: Tensor, scored: Tensor
) -> None:
    living.stage = "original"
    batch = engine.observe_at(tokens, None, None, scored)
    living.stage = "importances"
    importances = engine.importances(batch)
    living.stage = "losses"
    generator = torch.Generator().manual_seed(0)
    step = Step(engine.run, importances, weights, 0.0, generator, lambda passes: engine.kl(batch, passes))
    values = term_values(settings.losses, step)
    total = torch.stack([term.coeff * value for term, value in zip(settings.losses, values, strict=True)]).sum()
    living.stage = "backward"
    total.backward()


class _Living(TorchDispatchMode):
    """Counts the bytes of the meta storages that are alive inside the block, beside those of ``held``.

    Random numbers are drawn as shapes, and random whole numbers at their largest: the size of a random subset.
    """

    def __init__(self, held: Iterable[Tensor]):
        super().__init__()
        self.now, self.stage = 0, "setup"
        self.most: dict[str, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self._count(tensor)
        self.most.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.rand.generator:
            func, kwargs = torch.ops.aten.empty.memory_format, {"dtype": kwargs.get("dtype"), "device": "meta"}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.randint.low_generator:
            result.fill_(args[1] - 1)
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_meta:
                self._count(value)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.now += size
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.most[self.stage] = max(self.now, self.most.get(self.stage, 0))

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size
