"""Installing a Run into a host: the context managers ``decomposed`` and ``suppressed``. Nothing outlives them.

``decomposed``
    1. On entering, hooks go onto the modules that read (inputs) and the hook points behind the matmuls (outputs); the user's
       hooks come after ours, so they fire once per call and see the masked pass.
    2. Each call of the model first runs the original model on a hook-free twin, where importances are asked for, and makes
       this call's masks. With a key-value cache the twin keeps one of its own.
    3. On leaving, exactly these hooks are removed. If somebody else removed them first, the next call and leaving say so.

``suppressed`` puts edited weights in the place of the host's parameters and puts the very same objects back.

Where installations overlap the innermost wins, site by site.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tl_spd.importance import Importances
from tl_spd.masks import Pass, check_fits, check_masks, make_masks
from tl_spd.run import Run
from tl_spd.sites import (
    Hook,
    HookedTransformer,
    KeyValueCache,
    Site,
    bias,
    fold,
    parameter,
    replace_parameter,
    unfold,
)
from tl_spd.wiring import (
    HookSet,
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
    """TransformerLens hooks ``(name, function)`` that turn ``model.run_with_hooks(tokens, fwd_hooks=...)`` into ``chosen``."""
    sites = [site for site in run.sites if site.name in chosen.masks]
    inputs: dict[str, Tensor] = {}
    reads = read_hooks(model, sites, inputs, importances.lookups)
    writes = {site: write_hook(model, site, _producer(model, run, site, chosen, inputs)) for site in sites}
    first = [hook for site, hook in writes.items() if site.lookup]  # what they write, shortformer sites read
    return [*first, *reads, *(hook for site, hook in writes.items() if not site.lookup), *chosen.hooks]


def _producer(model: HookedTransformer, run: Run, site: Site, chosen: Pass, inputs: dict[str, Tensor]) -> Any:
    def produce(like: Tensor) -> Tensor:
        mask, rows = chosen.masks[site.name], chosen.rows.get(site.name)
        return masked_output(model, run, site, inputs[site.name], mask, like, rows)

    return produce


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
        masks: ``"importance"``, ``"stochastic"`` (needs ``generator``), ``"ones"``, ``"rounded"`` (1 where the importance is
            above ``threshold``), or a dict from site names to tensors that broadcast to ``[batch, pos, C]``; sites that a
            dict leaves out keep the host's weights.
        sites: a pattern or patterns; default all of the Run's sites (or all of the dict's).
        importances: use these instead of computing them from the tokens of each call.

    With a key-value cache (``generate``) importances of a position are those at the time it was read. The cache must be
    empty when it is first used inside the context.

    Raises:
        ValueError, TypeError: unknown sites or masks of the wrong shape, before anything is changed.
        HooksRemovedError: our hooks were removed by somebody else; at the next call, and on leaving.
    """
    installation = _Installation(model, run, masks, run.select(sites), importances, generator, threshold)
    installation.enter()
    try:
        yield model
        installation.check()
    finally:
        installation.leave()


class _Installation:
    def __init__(
        self,
        model: HookedTransformer,
        run: Run,
        masks: Masks,
        sites: Sequence[Site],
        importances: Mapping[str, Tensor] | None,
        generator: torch.Generator | None,
        threshold: float,
    ):
        self.model, self.run, self.sites = model, run, tuple(sites)
        counts = {site.name: run.components[site.name].C for site in self.sites}
        for given in (masks, importances):
            if given is not None and not isinstance(given, str):
                check_masks(given, self.sites, counts)
        if isinstance(masks, str):
            make_masks(masks, {}, generator)  # refuses unknown names and a missing generator
        else:
            self.sites = tuple(site for site in self.sites if site.name in masks)
        if importances is not None and isinstance(masks, str):
            if lacking := [site.name for site in self.sites if site.name not in importances]:
                raise ValueError(f"importances= lacks {lacking}; give one tensor per site, or choose sites=.")
        self.masks, self.given, self.generator, self.threshold = masks, importances, generator, threshold
        self.now: dict[str, Tensor] = {}
        self.hooks = HookSet()
        self.handles: list[RemovableHandle] = []
        self.reader: Reader | None = None
        self.original: _Original | None = None

    def enter(self) -> None:
        if isinstance(self.masks, str) and self.masks != "ones" and self.given is None:
            self.original = _Original(self.model, self.run, self.sites)
        try:
            self.handles.append(self.model.register_forward_pre_hook(self.before_call, with_kwargs=True))
            self.reader = Reader(self.model, self.sites)
            for site in self.sites:
                self.hooks.add(self.model, write_hook(self.model, site, self.producer(site)))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.reader is not None:
            self.reader.remove()
        self.hooks.remove()
        self.now.clear()
        self.original = None

    def check(self) -> None:
        if missing := self.hooks.missing():
            raise HooksRemovedError(
                f"While a Run was installed, its hooks were removed at {missing[:3]} ({len(missing)} in all); passes since "
                "then used the host's own weights there. Use model.reset_hooks() without including_permanent=True."
            )

    def before_call(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        """Make this call's masks, before the host sees its input."""
        self.check()
        if not isinstance(self.masks, str):
            self.now = dict(self.masks)
        elif self.original is None:
            ones = {site.name: torch.ones((), device=self.run.components[site.name].read.device) for site in self.sites}
            self.now = make_masks(self.masks, self.given or ones, self.generator, self.threshold)
        else:
            with torch.no_grad():
                found = self.original.importances(args, kwargs)
                self.now = make_masks(self.masks, found, self.generator, self.threshold)

    def producer(self, site: Site) -> Any:
        def produce(like: Tensor) -> Tensor:
            assert self.reader is not None
            if site.name not in self.now:
                raise RuntimeError(f"{site.name} was reached outside a call of the model; call model(...), not its parts.")
            return masked_output(self.model, self.run, site, self.reader.inputs[site.name], self.now[site.name], like)

        return produce


class _Original:
    """The original model beside a host: a hook-free twin, with a key-value cache of its own for each of the user's."""

    def __init__(self, model: HookedTransformer, run: Run, sites: Sequence[Site]):
        self.model, self.run, self.sites = model, run, sites
        self.twin = make_twin(model)
        self.caches: dict[int, tuple[weakref.ref[KeyValueCache], KeyValueCache, dict[str, Tensor]]] = {}

    def importances(self, args: tuple, kwargs: dict) -> Importances:
        """Importances for the tokens of this call, ``[batch, new pos, C]`` per site."""
        sync_twin(self.twin, self.model)
        kwargs = dict(kwargs)
        args = args[:1]  # HookedTransformer.forward takes everything but the input by keyword in TransformerLens's own calls
        cache = kwargs.get("past_kv_cache")
        if cache is None:
            seen = observe(self.twin, self.sites, *args, **kwargs)
            return self.run.importances_from(seen, self.real(seen, args, kwargs), self.sites)
        return self.with_cache(cache, args, kwargs)

    def real(self, seen: Observation, args: tuple, kwargs: dict) -> Tensor | None:
        """Which places are real: the mask the host resolved, else what its tokenizer tells of the tokens."""
        for start in seen.starts.values():
            if start.attention_mask is not None:
                return start.attention_mask.bool()
        tokens = args[0] if args else kwargs["input"]
        if isinstance(tokens, str | list):
            tokens = self.model.to_tokens(tokens, **{k: kwargs[k] for k in ("prepend_bos", "padding_side") if k in kwargs})
        if kwargs.get("start_at_layer") is not None:
            tokens = kwargs.get("tokens")
        return None if tokens is None else padding_mask(self.model, tokens[None] if tokens.ndim == 1 else tokens)

    def with_cache(self, cache: KeyValueCache, args: tuple, kwargs: dict) -> Importances:
        """As above for a call that continues ``cache``: the inputs of earlier calls are kept and put in front."""
        entry = self.caches.get(id(cache))
        if entry is None or entry[0]() is not cache:
            past = cache[0].past_keys
            if past.shape[1]:
                raise ValueError(
                    f"The key-value cache already holds {past.shape[1]} positions of another pass; inside decomposed(...) "
                    "start with an empty cache."
                )
            entry = (weakref.ref(cache), new_cache(self.twin, past.shape[0], past.device), {})
            self.caches = {key: value for key, value in self.caches.items() if value[0]() is not None}
            self.caches[id(cache)] = entry
        _, own, history = entry
        own.freeze() if cache.frozen else own.unfreeze()
        kwargs["past_kv_cache"] = own
        seen = observe(self.twin, self.sites, *args, **kwargs)
        new = next(iter(seen.starts.values())).resid.shape[1]
        whole = {}
        for group, found in (("inputs", seen.inputs), ("rows", seen.rows)):
            for name, value in found.items():
                key = f"{group}/{name}"
                whole[key] = torch.cat([history[key], value], dim=1) if key in history else value
        if not cache.frozen:
            history.update(whole)
        joined = Observation(
            {name: whole[f"inputs/{name}"] for name in seen.inputs},
            {name: whole[f"rows/{name}"] for name in seen.rows},
            seen.starts,
            None,
        )
        found = self.run.importances_from(joined, self.real(seen, args, kwargs), self.sites)
        return Importances({name: pre[:, -new:] for name, pre in found.pre.items()})


def suppressed_weight(
    host_weight: Float[Tensor, "d_in d_out"],
    read: Float[Tensor, "d_in k"],
    write: Float[Tensor, "k d_out"],
    sequential: bool = False,
) -> Float[Tensor, "d_in d_out"]:
    """``W - sum_k (r_k^T W w_k) r_k w_k^T`` with unit ``r_k, w_k``; every term from the original ``W``.

    ``sequential=True`` applies one direction after the other instead, each to what the last one left. Computed in float32
    or better, returned in the dtype of ``host_weight``. A zero direction suppresses nothing.
    """
    W = host_weight.to(torch.promote_types(host_weight.dtype, torch.float32))
    r = nn.functional.normalize(read.to(W), dim=0)
    w = nn.functional.normalize(write.to(W), dim=1)
    if sequential:
        for k in range(r.shape[1]):
            W = W - (r[:, k] @ W @ w[k]) * torch.outer(r[:, k], w[k])
        return W.to(host_weight.dtype)
    strength = torch.einsum("ik,ij,kj->k", r, W, w)
    return (W - (r * strength) @ w).to(host_weight.dtype)


@contextmanager
def suppressed(
    model: HookedTransformer, run: Run, subcomponents: Mapping[str, Sequence[int]], *, sequential: bool = False
) -> Iterator[HookedTransformer]:
    """Inside this context the directions of chosen subcomponents are projected out of the host's own weights.

    Args:
        subcomponents: site name -> indices of subcomponents.
        sequential: one direction after the other (see :func:`suppressed_weight`).

    The weights are swapped, so there is no cost per token. Parameters are put back as the same objects, bit for bit.

    Raises:
        ValueError, IndexError: unknown sites or subcomponents, before anything is changed.
    """
    new: list[tuple[Site, nn.Parameter]] = []
    for name, indices in subcomponents.items():
        if name not in run.components:
            raise ValueError(f"{name} is not decomposed in this Run; its sites are {list(run.components)}.")
        parts = run.components[name]
        if outside := [index for index in indices if not 0 <= index < parts.C]:
            raise IndexError(f"{name} has subcomponents 0 to {parts.C - 1}; found {outside}.")
        own = parameter(model, parts.site)
        chosen = torch.tensor(list(indices), dtype=torch.long, device=parts.read.device)
        with torch.no_grad():
            read, write = parts.read[:, chosen], parts.write[chosen]
            edited = suppressed_weight(fold(parts.site, own), read, write, sequential)
        new.append((parts.site, nn.Parameter(unfold(parts.site, edited), requires_grad=own.requires_grad)))
    old = [(site, replace_parameter(model, site, value)) for site, value in new]
    try:
        yield model
    finally:
        for site, value in old:
            replace_parameter(model, site, value)
