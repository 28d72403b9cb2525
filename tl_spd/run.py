"""Run: a finished (or running) decomposition - components, importance functions, the settings used and the history.

A Run is made by ``decompose`` or read by ``load``; everything else puts it into a host, measures it or shows it. It keeps no
reference to the host: methods that need the host's activations or weights take the model.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tl_spd import storage
from tl_spd.checks import check_seen
from tl_spd.components import Components, Init, init_components
from tl_spd.data import check_batch
from tl_spd.importance import LEAK, Importances, ImportanceSpec
from tl_spd.sites import (
    HookedTransformer,
    Site,
    all_sites,
    fingerprint,
    host_device,
    host_dtype,
    match_sites,
    n_ctx,
    weight,
)
from tl_spd.wiring import Observation, make_twin, observe, padding_mask

PACKAGES = ("tl_spd", "torch", "transformer-lens", "safetensors")


@dataclass(eq=False)
class Run:
    """Rank-1 subcomponents of a host's weights, and functions that say which of them matter on a given input.

    Attributes:
        components: site name -> its read and write directions.
        functions: site name -> its importance function (a module).
        importance: the specification the functions were built from.
        n_ctx: longest input the importance functions take, in tokens.
        settings: the settings of the decomposition, as plain values, with ``data``: a digest of it (None: made on the way).
        history: one row per logged step.
        fingerprint: digests of the host's weights, to refuse other hosts.
    """

    components: dict[str, Components]
    functions: dict[str, nn.Module]
    importance: ImportanceSpec
    n_ctx: int
    fingerprint: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __repr__(self) -> str:
        total = sum(parts.C for parts in self.components.values())
        steps = f", {self.settings['steps']} steps" if "steps" in self.settings else ""
        return f"<Run: {total} subcomponents of {len(self.components)} sites, {self.importance}{steps}>"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The decomposed sites in forward order."""
        return tuple(components.site for components in self.components.values())

    def select(self, patterns: str | Iterable[str] | None) -> tuple[Site, ...]:
        """The Run's sites that match ``patterns`` (all for None); a pattern without a match is an error."""
        return self.sites if patterns is None else match_sites(self.sites, patterns)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All trainable parameters under flat names: read and write directions, then importance functions."""
        return {
            f"{prefix}/{key}": parameter
            for prefix, module in self._modules().items()
            for key, parameter in module.named_parameters()
        }

    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, in the order of :meth:`named_parameters`."""
        return list(self.named_parameters().values())

    def requires_grad_(self, on: bool) -> Run:
        """Switch the gradients of all parameters on or off."""
        for parameter in self.parameters():
            parameter.requires_grad_(on)
        return self

    def delta(self, model: HookedTransformer) -> dict[str, Tensor]:
        """What the subcomponents leave of each host weight: site name -> ``[d_in, d_out]``."""
        with torch.no_grad():
            return {name: parts.delta(weight(model, parts.site)) for name, parts in self.components.items()}

    def importances(
        self, model: HookedTransformer, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> Importances:
        """Importances ``[batch, pos, C]`` per site for ``tokens``, from the original model's activations.

        Padding is found by the host's tokenizer, or given as ``attention_mask`` (1 at real tokens).

        Raises:
            ValueError, TypeError: tokens or a mask that do not fit the host (see :func:`~tl_spd.data.check_batch`).
            FloatingPointError: the host is not finite on these tokens; names the first input that is not.
        """
        seen, real = self.observed(model, tokens, attention_mask)
        with torch.no_grad():
            found = self.importances_from(seen, real)
        found.host = weakref.ref(model)
        return found

    def observed(
        self, model: HookedTransformer, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> tuple[Observation, Bool[Tensor, "batch pos"] | None]:
        """What the original model shows at the sites on ``tokens``, and which are real (None: all).

        Raises:
            ValueError, TypeError, FloatingPointError: as :meth:`importances`.
        """
        tokens, attention_mask = check_batch((tokens, attention_mask), model)
        kwargs = {} if attention_mask is None else {"attention_mask": attention_mask}
        seen = observe(make_twin(model), self.sites, tokens, **kwargs)
        check_seen(seen, self.sites)
        return seen, padding_mask(model, tokens, attention_mask)

    def importances_from(
        self, seen: Observation, real: Tensor | None, sites: Iterable[Site] | None = None, leak: float = LEAK
    ) -> Importances:
        """Importances from a pass that was already made, with gradients to the Run's parameters if they have them.

        ``leak``: the slope with which they pass below 0, a value of :meth:`~tl_spd.importance.Leak.at`.
        """
        pre, lookups = {}, {}
        for site in self.sites if sites is None else sites:
            if site.name not in seen.inputs:
                continue  # a pass that started or stopped at a layer did not reach this site
            x = seen.inputs[site.name]
            parts = self.components[site.name]
            inner = parts.inner(x)
            if site.lookup:
                lookups[site.name] = x
                x = seen.rows[site.name]
            pre[site.name] = self.functions[site.name](x.to(parts.read.dtype), inner, real)
        return Importances(pre, lookups, real, leak=leak)

    # --- storage ---

    def _modules(self) -> dict[str, nn.Module]:
        components: dict[str, nn.Module] = {f"components/{name}": module for name, module in self.components.items()}
        return components | {f"functions/{name}": module for name, module in self.functions.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer under a flat name, detached."""
        return {
            f"{prefix}/{key}": value
            for prefix, module in self._modules().items()
            for key, value in module.state_dict().items()
        }

    def record(self) -> dict[str, Any]:
        """Everything but the tensors, as plain values for JSON."""
        return {
            "sites": [{**asdict(site), "C": self.components[site.name].C} for site in self.sites],
            "importance": {"kind": type(self.importance).__name__, **asdict(self.importance)},  # type: ignore[call-overload]
            "n_ctx": self.n_ctx,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "history": {key: self.history[key].tolist() for key in self.history.columns},
            "versions": {name: _version(name) for name in PACKAGES},
        }

    def save(self, path: str | Path) -> None:
        """Write the Run to the folder ``path`` (JSON and safetensors); what is there stays until all is written."""
        storage.write_folder(path, self.record(), self.tensors())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from its source folder


def run_dtype(model: HookedTransformer) -> torch.dtype:
    """The dtype of a Run's parameters: float32, or float64 for a float64 host."""
    return torch.float64 if host_dtype(model) == torch.float64 else torch.float32


def new_run(
    model: HookedTransformer,
    sites: Iterable[Site],
    C: Mapping[str, int],
    importance: ImportanceSpec,
    init: Init = "kaiming",
    seed: int = 0,
    batch: tuple[Tensor, Tensor | None] | None = None,
) -> Run:
    """A Run with freshly initialised components and importance functions, on the host's device.

    Parameters are float32, or float64 for a float64 host. Initial values depend on ``seed`` alone, not on the device.
    ``batch``: tokens and attention mask, from which ``init="inputs"`` takes the sites' inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    sites, longest, dtype = tuple(sites), n_ctx(model), run_dtype(model)

    def normal(*shape: int, std: float, mean: float | Callable[[Tensor], Tensor] = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=dtype) * std
        return drawn + (mean(drawn) if callable(mean) else mean)

    inputs = site_inputs(model, sites, *batch) if init == "inputs" and batch is not None else {}
    components, functions = {}, {}
    for site in sites:
        components[site.name] = init_components(
            site, weight(model, site), C[site.name], init, generator, inputs.get(site.name)
        )
        functions[site.name] = importance.build(site, C[site.name], longest, normal).to(host_device(model))
    run = Run(components, functions, importance, longest, fingerprint(model, sites))
    return run.requires_grad_(False)


def site_inputs(
    model: HookedTransformer,
    sites: Sequence[Site],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
) -> dict[str, Float[Tensor, "rows d_in"]]:
    """The inputs of ``sites`` at the real positions of ``tokens``, one row each (every head's, where they differ).

    What a lookup site looks up is a one-hot row, each index once.
    """
    kwargs = {} if attention_mask is None else {"attention_mask": attention_mask}
    seen, real = observe(make_twin(model), sites, tokens, **kwargs), padding_mask(model, tokens, attention_mask)
    found = {}
    for site in sites:
        rows = seen.inputs[site.name] if real is None else seen.inputs[site.name][real]
        if site.lookup:
            found[site.name] = nn.functional.one_hot(rows.unique(), site.d_in).to(run_dtype(model))
        else:
            found[site.name] = rows.reshape(-1, site.d_in)
    return found


def load(path: str | Path, model: HookedTransformer) -> Run:
    """Read the Run saved in the folder ``path`` (also a checkpoint of :func:`~tl_spd.train.decompose`) for the host ``model``.

    Raises:
        StorageError: a missing or damaged file, another schema, tensors that do not fit the record.
        ValueError: the Run was made for other weights; the message names the first site that differs.
    """
    record, tensors = storage.read_folder(path)
    return from_record(record, tensors, model, str(path))


def from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor], model: HookedTransformer, where: str) -> Run:
    """The Run that ``record`` and ``tensors`` describe, checked against the host ``model``."""
    check_record(record, where)
    sites, C = _sites(record)
    try:
        if (kind := record["importance"]["kind"]) not in ImportanceSpec.registry:
            raise ValueError(
                f"its importance function {kind!r} is not known here; import the module that defines it first"
            )
        importance = ImportanceSpec.from_json(record["importance"])
    except (TypeError, ValueError) as error:
        raise storage.StorageError(
            f"The record in {where} is damaged or incomplete: {storage.brief(error)}."
        ) from error
    prints, longest = dict(record["fingerprint"]), record["n_ctx"]
    _check_host(model, sites, prints, where)
    run = _unfilled(model, sites, C, importance, longest, where)
    run.fingerprint, run.settings, run.history = prints, dict(record["settings"]), pd.DataFrame(record["history"])
    _fill(run, tensors, where, beside=storage.TRAINING if "step" in record else None)
    for module in run._modules().values():
        module.to(host_device(model))
    return run


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record that lacks a part of :meth:`Run.record`, or has one of another kind.

    Raises:
        StorageError: names what is wrong.
    """
    try:
        sizes = [record["n_ctx"], *_sites(record)[1].values()]
        if bad := [size for size in sizes if type(size) is not int or size < 1]:
            raise ValueError(f"n_ctx and C must be at least 1, found {bad[0]!r}")
        for part in ("importance", "fingerprint", "settings", "history", "versions", "tensors"):
            if not isinstance(record[part], dict):
                raise TypeError(f"{part} is {record[part]!r}")
        if odd := [value for value in record["fingerprint"].values() if not isinstance(value, str)]:
            raise TypeError(f"its fingerprint holds {odd[0]!r}")
        if not isinstance(record["importance"]["kind"], str):
            raise TypeError(f"its importance function is {record['importance']['kind']!r}")
        record["tensors"]["blake2b"]
        columns = list(record["history"].values())
        if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            raise ValueError("the columns of its history are no lists of one length")
        if odd := [value for column in columns for value in column if not isinstance(value, int | float | None)]:
            raise TypeError(f"its history holds {odd[0]!r}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise storage.StorageError(
            f"The record in {where} is damaged or incomplete: {storage.brief(error)}."
        ) from error


def _sites(record: Mapping[str, Any]) -> tuple[list[Site], dict[str, Any]]:
    """The sites of a record and their C."""
    sites = [Site(**{key: value for key, value in entry.items() if key != "C"}) for entry in record["sites"]]
    for site in sites:
        if [type(value) for value in (site.name, site.kind, site.layer, site.d_in, site.d_out)] != [
            str,
            str,
            int,
            int,
            int,
        ]:
            raise TypeError(f"one of its sites is {site}")
        if not site.name.isprintable():
            raise ValueError(f"one of its sites is named {site.name!r}")
    return sites, {entry["name"]: entry["C"] for entry in record["sites"]}


def _check_host(model: HookedTransformer, sites: Iterable[Site], prints: Mapping[str, str], where: str) -> None:
    own = {site.name: site for site in all_sites(model)}
    for site in sites:
        if (found := own.get(site.name)) != site:
            shape = "no such weight" if found is None else f"{found.d_in} x {found.d_out}"
            raise ValueError(
                f"The Run in {where} decomposes {site.name[:200]} as {site.d_in} x {site.d_out}; this host has {shape}. "
                "Load the host that it was made for."
            )
    now = fingerprint(model, tuple(sites))
    if differing := [name for name in now if now[name] != prints.get(name)]:
        which = differing[0] if differing[0] != "*" else "a weight that is not decomposed"
        raise ValueError(
            f"The Run in {where} was made for other weights: {which} differs from this host's (also a cast to another "
            "dtype counts). Load the host, processing and dtype that it was made for."
        )


def _unfilled(
    model: HookedTransformer,
    sites: list[Site],
    C: Mapping[str, int],
    importance: ImportanceSpec,
    longest: int,
    where: str,
) -> Run:
    """A Run of the recorded shapes in memory that nothing touches before the tensors have been found to fit."""
    dtype = run_dtype(model)

    def empty(*shape: int, std: float = 0.0, mean: object = 0.0) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    try:
        components = {s.name: Components(s, empty(s.d_in, C[s.name]), empty(C[s.name], s.d_out)) for s in sites}
        functions = {s.name: importance.build(s, C[s.name], longest, empty) for s in sites}
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        message = f"The record in {where} describes a Run that cannot be built: {storage.brief(error)}."
        raise storage.StorageError(message) from error
    return Run(components, functions, importance, longest, {}).requires_grad_(False)


def _fill(run: Run, tensors: Mapping[str, Tensor], where: str, beside: str | None) -> None:
    """Fill the Run with ``tensors``; further ones are refused but for those whose names begin with ``beside``."""
    wanted = run.tensors()
    if missing := sorted(set(wanted) - set(tensors)):
        raise storage.StorageError(f"The tensors in {where} lack {missing[0]!r} ({len(missing)} missing in all).")
    if extra := sorted(name for name in set(tensors) - set(wanted) if beside is None or not name.startswith(beside)):
        message = f"The tensors in {where} hold {storage.brief(extra[0])}, which its record does not ask for."
        raise storage.StorageError(message)
    for name, target in wanted.items():
        given = tensors[name]
        if given.shape != target.shape or given.dtype != target.dtype:
            raise storage.StorageError(
                f"{name!r} in {where} is {tuple(given.shape)} {given.dtype}; wanted {tuple(target.shape)} {target.dtype}."
            )
        if not bool(torch.isfinite(given).all()):
            raise storage.StorageError(f"{name!r} in {where} has entries that are not finite.")
        target.copy_(given)
