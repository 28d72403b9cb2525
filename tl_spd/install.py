"""Installing a Run into a host: the context manager ``decomposed``. Nothing outlives it.

1. On entering, hooks go onto the modules that read (inputs) and the hook points behind the matmuls (outputs); the user's
   hooks come after ours, so they fire once per call and see the masked pass.
2. Each call of the model first runs the original model (the host's weights as they are now) on a hook-free twin, where
   importances are asked for, and makes this call's masks. With a key-value cache the twin keeps its own.
3. On leaving, exactly these hooks are removed. If somebody else removed them before, the next call and leaving say so.

Where contexts overlap, also with ``suppressed``, the innermost wins, site by site, and they may be left in any order.

An interrupt (Ctrl-C), while entering or leaving too, leaves the host as it was. Where it falls into the few steps of Python's
own ``contextlib`` around these, the host is put back when the interrupt's traceback is let go, in a notebook at the next
error. A second interrupt within the same leaving is not provided for.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tl_spd.checks import check_finite, check_shares
from tl_spd.hooks import HookSet
from tl_spd.importance import Importances
from tl_spd.masks import Pass, check_fits, check_masks, make_masks
from tl_spd.run import Run
from tl_spd.sites import (
    Hook,
    HookedTransformer,
    KeyValueCache,
    Site,
    all_sites,
    bias,
    digest,
    parameter,
)
from tl_spd.wiring import (
    Observation,
    Reader,
    make_twin,
    new_cache,
    observe,
    padding_mask,
    read_hooks,
    sync_twin,
    write_hook,
)

Masks = str | Mapping[str, Tensor]
_entered = itertools.count(1)


def next_entered() -> int:
    """Numbers contexts in the order of entering: the innermost has the largest number."""
    return next(_entered)


class HooksRemovedError(RuntimeError):
    """Somebody removed this package's hooks from a host while a Run was installed in it."""


def masked_output(
    model: HookedTransformer, run: Run, site: Site, x: Tensor, mask: Tensor, like: Tensor, rows: Tensor | None = None
) -> Tensor:
    """The output of ``site`` with masked subcomponents, with the host's bias, in the shape of its own output ``like``.

    ``rows: [batch]`` says which sequences take the mask; the others keep the host's own output.
    """
    parts = run.components[site.name]
    check_fits(site.name, mask, like.shape[0], like.shape[1])
    mask = mask.to(parts.read.dtype) if mask.ndim else mask.to(parts.read.dtype).reshape(1, 1, 1)
    y = parts.output(x, mask, like)
    added = bias(model, site)
    if added is not None and not (site.kind == "W_O" and like.ndim == 4):  # the host adds b_O behind hook_result
        if like.ndim == 4 and added.shape[0] != like.shape[2] * like.shape[3]:  # ungrouped keys and values
            added = added.reshape(site.heads, -1).repeat_interleave(like.shape[2] // site.heads, dim=0)
        y = y + added.reshape(y.shape[2:]) if like.ndim == 4 else y + added
    return y if rows is None else torch.where(rows.reshape(-1, *[1] * (y.ndim - 1)), y, like)


def pass_hooks(model: HookedTransformer, run: Run, chosen: Pass, importances: Importances) -> list[Hook]:
    """Hooks ``(name, function)`` that turn ``model.run_with_hooks(tokens, fwd_hooks=...)`` into the pass ``chosen``."""
    check_masks(chosen.masks, run.sites, {name: parts.C for name, parts in run.components.items()})
    sites, inputs = [site for site in run.sites if site.name in chosen.masks], dict[str, Tensor]()
    reads = read_hooks(model, sites, inputs, importances.lookups)
    writes = {site: write_hook(model, site, _producer(model, run, site, chosen, inputs)) for site in sites}
    first = [hook for site, hook in writes.items() if site.lookup]  # what they write, shortformer sites read
    last = dict(hook for site, hook in writes.items() if not site.lookup)
    own = [(p, f) for n, f in chosen.hooks for p in ([n] if isinstance(n, str) else filter(n, model.hook_dict))]
    return [*first, *(h for h in own if h[0] not in last), *reads, *last.items(), *(h for h in own if h[0] in last)]


def _producer(model: HookedTransformer, run: Run, site: Site, chosen: Pass, inputs: dict[str, Tensor]) -> Any:
    return lambda like: masked_output(
        model, run, site, inputs[site.name], chosen.masks[site.name], like, chosen.rows.get(site.name)
    )


@contextmanager
def decomposed(
    model: HookedTransformer,
    run: Run,
    masks: Masks = "importance",
    sites: str | Iterable[str] | None = None,
    *,
    importances: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    threshold: float = 0.0,
) -> Iterator[HookedTransformer]:
    """Inside this context ``model`` computes with masked subcomponents instead of its own weights.

    Args:
        masks: ``"importance"``, ``"stochastic"`` (needs ``generator``), ``"ones"``, ``"rounded"`` (1 where the importance
            is above ``threshold``), or a dict from site names to tensors that broadcast to ``[batch, pos, C]``; sites that
            a dict leaves out keep the host's weights.
        sites: a pattern or patterns; default all of the Run's sites (or all of the dict's).
        importances: use these instead of computing them from the tokens of each call.

    With a key-value cache (``generate``) importances of a position are those at the time it was read. The cache must be
    empty when it is first used inside the context.

    Raises:
        ValueError, TypeError: unknown sites or masks of the wrong shape, before anything is changed.
        UserWarning: the host's weights are not those that the Run was made for (said once).
        HooksRemovedError: our hooks were removed by somebody else; at the next call, and on leaving.
    """
    installation = _Installation(model, run, run.select(sites), masks, importances, generator, threshold)
    try:
        try:
            installation.enter()
            yield model
            installation.check()
        finally:
            installation.leave()
    finally:
        installation.leave()  # once more, where an interrupt cut the first short


@dataclass(eq=False)
class _Installation:
    model: HookedTransformer
    run: Run
    sites: Sequence[Site]
    masks: Masks
    given: Mapping[str, Tensor] | None
    generator: torch.Generator | None
    threshold: float
    now: Mapping[str, Tensor] | None = None  # the masks of the call that is running
    inputs: dict[str, Tensor] = field(default_factory=dict)  # what that call has read and not yet masked
    hooks: HookSet = field(default_factory=HookSet)
    original: _Original | None = None

    def __post_init__(self) -> None:
        counts = {name: parts.C for name, parts in self.run.components.items()}
        check_masks(self.given or {}, self.run.sites, counts)
        check_shares("threshold", [self.threshold])
        for name, value in (self.given or {}).items():
            check_finite(f"importances[{name!r}]", value)
        if isinstance(self.masks, str):
            make_masks(self.masks, {}, self.generator)  # refuses unknown names and a missing generator
            if lacking := [s.name for s in self.sites if self.given is not None and s.name not in self.given]:
                raise ValueError(f"importances= lacks {lacking}; give one tensor per site, or choose sites=.")
            self.given = self.given and {site.name: self.given[site.name] for site in self.sites}
        else:
            check_masks(self.masks, self.sites, counts)
            for name, mask in self.masks.items():
                check_finite(f"The mask of {name}", mask)
            self.sites = [site for site in self.sites if site.name in self.masks]
        check_host(self.model, self.run, self.sites)
        if isinstance(self.masks, str) and self.masks != "ones" and self.given is None:
            self.original = _Original(self.model, self.run, self.sites)
        self.calls = _Calls.of(self.model)

    def enter(self) -> None:
        """Put the hooks on and take over the host's calls."""
        self.entered = next_entered()
        self.model.forward = self.calls  # type: ignore[method-assign]
        Reader(self.model, self.sites, self.hooks, self.read)  # kept by its hooks
        for site in self.sites:
            self.hooks.add(self.model, *write_hook(self.model, site, self.producer(site)))
        self.calls.listeners.append(self)

    def leave(self) -> None:
        """Undo all that ``enter`` did, or as much of it as it did. What was cut short can be repeated."""
        self.calls.remove(self)
        self.hooks.remove()
        self.original = None

    def check(self) -> None:
        if missing := self.hooks.missing():
            raise HooksRemovedError(
                f"While a Run was installed, its hooks were removed at {missing[:3]} ({len(missing)} in all). "
                "Leave the context first, or use model.reset_hooks() without including_permanent=True."
            )

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Make the masks of a call of the host."""
        self.check()
        self.now, self.inputs = self.masks_of(args, kwargs), {}

    def check_used(self) -> None:
        if self.inputs:
            raise RuntimeError(
                f"{next(iter(self.inputs))} was used without its mask: its hook point was switched off inside the context."
            )

    def read(self, name: str, x: Tensor) -> None:
        self.masks_now(name)  # refuses to read outside a call
        self.inputs[name] = x

    def masks_now(self, name: str) -> Mapping[str, Tensor]:
        """The masks of the call that runs; refuses to let the site ``name`` be reached without one."""
        if self.now is None:
            raise RuntimeError(
                f"{name} was reached outside a call: use model(...), not its parts. generate() embeds tokens outside its "
                "calls: choose sites= without the embeddings."
            )
        return self.now

    def masks_of(self, args: tuple, kwargs: dict) -> Mapping[str, Tensor]:
        """The masks of a call with these arguments."""
        if not isinstance(self.masks, str):
            return self.masks
        ones = {site.name: torch.ones((), device=self.run.components[site.name].read.device) for site in self.sites}
        with torch.no_grad():
            found = self.original.importances(args, kwargs) if self.original else self.given or ones
        return make_masks(self.masks, found, self.generator, self.threshold)

    def producer(self, site: Site) -> Any:
        return lambda like: self.produce(site, like)

    def produce(self, site: Site, like: Tensor) -> Tensor | None:
        masks, x = self.masks_now(site.name), self.inputs.pop(site.name)
        if getattr(parameter(self.model, site), "entered", 0) > self.entered:
            return None  # suppressed inside this context: the innermost wins
        return masked_output(self.model, self.run, site, x, masks[site.name], like)


_compared: weakref.WeakKeyDictionary[HookedTransformer, weakref.WeakSet[Run]] = weakref.WeakKeyDictionary()


def check_host(model: HookedTransformer, run: Run, sites: Sequence[Site]) -> None:
    """Refuse with a ValueError a host that lacks any of a Run's ``sites`` or has another shape there.

    Other weights than those the Run was made for give a warning, the first time that the two meet: the host may have been
    edited or fine-tuned on purpose.
    """
    own = {site.name: site for site in all_sites(model)}
    if strange := [site for site in sites if own.get(site.name) != site]:
        found = own.get(strange[0].name, "no such weight")
        raise ValueError(f"The Run decomposes {strange[0]}; this host has {found}. Use the host that it was made for.")
    runs = _compared.setdefault(model, weakref.WeakSet())
    if run in runs:
        return
    runs.add(run)
    prints = {site: run.fingerprint[site.name] for site in sites if site.name in run.fingerprint}
    if other := [site.name for site, made in prints.items() if digest([_own(model, site)]) != made]:
        warnings.warn(
            f"The Run was made for other weights: {other[0]} differs from this host's (also a cast to another dtype counts). "
            "Go on where the host was edited on purpose; else take the host, processing and dtype that it was made for.",
            stacklevel=2,
        )


def _own(model: HookedTransformer, site: Site) -> Tensor:
    """The host's parameter below all suppressed ones in its place, in the dtype that the host has now."""
    value: Any = parameter(model, site)
    dtype = value.dtype
    while hasattr(value, "under"):
        value = value.under
    return value.detach().to(dtype)


class _Calls:
    """Stands in for a host's ``forward``, which TransformerLens also calls past every hook, and tells installations."""

    def __init__(self, model: HookedTransformer):
        self.model, self.own = model, vars(model).get("forward")
        self.listeners: list[_Installation] = []

    @staticmethod
    def of(model: HookedTransformer) -> _Calls:
        """What stands in for the host's ``forward`` already, or what could."""
        calls = vars(model).get("forward")
        return calls if isinstance(calls, _Calls) else _Calls(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the host. A call inside a call leaves the outer one as it was."""
        outer = [(listener, listener.now, listener.inputs) for listener in self.listeners]
        try:
            try:
                for listener, *_ in outer:
                    listener.begin(args, kwargs)
                found = (self.own or MethodType(type(self.model).forward, self.model))(*args, **kwargs)
                for listener, *_ in outer:
                    listener.check_used()
                return found
            finally:
                _resume(outer)
        finally:
            _resume(outer)  # once more, where an interrupt cut the first short

    def __deepcopy__(self, memo: dict) -> Any:  # a copy of the host is a plain host
        for listener in self.listeners:
            _leave_out(listener, memo)
        own = self.own or MethodType(type(self.model).forward, self.model)
        return copy.deepcopy(own, memo)

    def remove(self, listener: _Installation) -> None:
        """Leave ``listener`` out; the host gets its own ``forward`` back behind the last one."""
        self.listeners = [other for other in self.listeners if other is not listener]
        if not self.listeners and vars(self.model).get("forward") is self:
            if self.own is None:
                del self.model.forward
            else:
                self.model.forward = self.own


def _resume(outer: list[tuple[_Installation, Mapping[str, Tensor] | None, dict[str, Tensor]]]) -> None:
    for listener, now, inputs in outer:
        listener.now, listener.inputs = now, inputs


def _leave_out(listener: _Installation, memo: dict[int, Any]) -> None:
    """Take our hooks out of the copy of the host that ``copy.deepcopy`` is making with ``memo``: it takes hooks along."""
    for table, key in listener.hooks.entries():
        memo.get(id(table), {}).pop(key, None)
    for point in listener.model.hook_dict.values():
        copied = memo.get(id(point.fwd_hooks), [])
        copied[:] = [handle for handle in copied if handle.user_hook is not listener.hooks.mark]


class _Original:
    """The original model beside a host: a hook-free twin, with a key-value cache of its own for each of the user's."""

    def __init__(self, model: HookedTransformer, run: Run, sites: Sequence[Site]):
        self.model, self.run, self.sites = model, run, sites
        self.twin = make_twin(model)
        self.signature = inspect.signature(self.twin.forward)
        self.caches: dict[int, tuple[weakref.ref[KeyValueCache], KeyValueCache, list[dict[str, Tensor]]]] = {}

    def importances(self, args: tuple, kwargs: dict) -> Importances:
        """Importances for the tokens of this call, ``[batch, new pos, C]`` per site."""
        sync_twin(self.twin, self.model)
        given = self.signature.bind(*args, **kwargs).arguments
        cache = given.get("past_kv_cache")
        if cache is not None:
            return self.with_cache(cache, given)
        seen = observe(self.twin, self.sites, **given)
        return self.run.importances_from(seen, self.real(seen, given), self.sites)

    def real(self, seen: Observation, given: Mapping[str, Any]) -> Tensor | None:
        """Which places are real: the mask the host resolved, else what its tokenizer tells of the tokens."""
        for start in seen.starts.values():
            if start.attention_mask is not None:
                return start.attention_mask.bool()
        tokens = given["input"] if given.get("start_at_layer") is None else given.get("tokens")
        if isinstance(tokens, str | list):
            tokens = self.twin.to_tokens(tokens, **{k: given[k] for k in ("prepend_bos", "padding_side") if k in given})
        if tokens is None:
            return None
        side = given["padding_side"] if given.get("padding_side") in ("left", "right") else None  # the tokenizer's
        return padding_mask(self.model, tokens[None] if tokens.ndim == 1 else tokens, given.get("attention_mask"), side)

    def with_cache(self, cache: KeyValueCache, given: dict[str, Any]) -> Importances:
        """As above for a call that continues ``cache``: the inputs of earlier calls are kept and put in front."""
        entry, past = self.caches.get(id(cache)), cache[0].past_keys
        if entry is None or entry[0]() is not cache or entry[1][0].past_keys.shape[1] != past.shape[1]:
            if past.shape[1]:
                raise ValueError(
                    f"The key-value cache already holds {past.shape[1]} positions of another pass; inside "
                    "decomposed(...) start with an empty cache."
                )
            entry = (weakref.ref(cache), new_cache(self.twin, past.shape[0], past.device), [{}, {}])
            self.caches = {key: value for key, value in self.caches.items() if value[0]() is not None}
            self.caches[id(cache)] = entry
        _, own, history = entry
        own.freeze() if cache.frozen else own.unfreeze()
        seen = observe(self.twin, self.sites, **{**given, "past_kv_cache": own})
        new = next(iter(seen.starts.values())).resid.shape[1]
        inputs, rows = (
            {name: torch.cat([past[name], value], dim=1) if name in past else value for name, value in now.items()}
            for past, now in zip(history, (seen.inputs, seen.rows), strict=True)
        )
        if not cache.frozen:
            history[:] = inputs, rows
        joined = Observation(inputs, rows, seen.starts, None)
        found = self.run.importances_from(joined, self.real(seen, given), self.sites)
        return Importances({name: pre[:, -new:] for name, pre in found.pre.items()})
