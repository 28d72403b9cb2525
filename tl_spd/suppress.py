"""Suppression: directions projected out of a host's weights, inside a context or in a copy of the host.

1. ``W <- W - sum_k (r_k^T W w_k) r_k w_k^T`` with unit ``r_k, w_k``, all terms from the original ``W``; or one direction
   after the other (``sequential=True``).
2. Directions come from a Run's subcomponents, from singular vectors of the host's weight, from chance, or from the user.
3. The context managers put edited weights in the place of the host's parameters and put the very same objects back. Where
   contexts overlap the innermost wins, site by site, and they may be left in any order. Interrupts: see ``install``.
4. :func:`suppressed_copy` is a host of its own with edited weights; :func:`save_weights` writes any host's weights.

Source: the paper on transformers, which suppresses rank-1 subcomponents in this way. Approximations: none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tl_spd.checks import check_finite, check_whole
from tl_spd.install import check_host, next_entered
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, Site, all_sites, fold, parameter, replace_parameter, unfold, weight
from tl_spd.storage import StorageError, brief, check_header, replacing, tensors_digest
from tl_spd.wiring import make_twin

DIGEST = "blake2b"
"""Under which name :func:`save_weights` keeps the digest of what it wrote; files of others have none and are not checked."""


@dataclass(frozen=True, eq=False)
class Directions:
    """``k`` rank-1 directions of one site's weight ``[d_in, d_out]``; their lengths do not matter.

    Attributes:
        read: ``[d_in, k]``, what each direction reads.
        write: ``[k, d_out]``, what it writes.
    """

    read: Tensor
    write: Tensor

    def __post_init__(self) -> None:
        both = self.read, self.write
        if any(side.ndim != 2 or not side.is_floating_point() for side in both) or both[0].shape[1] != both[1].shape[0]:
            raise ValueError(
                f"read {tuple(self.read.shape)} and write {tuple(self.write.shape)} are no directions; "
                "wanted [d_in, k] and [k, d_out] with the same k, in floating point."
            )
        if not all(bool(side.isfinite().all()) for side in both):
            raise ValueError("The directions have entries that are not finite.")

    def __len__(self) -> int:
        return self.read.shape[1]

    def __getitem__(self, indices: Sequence[int]) -> Directions:
        """The directions of these indices, in this order."""
        return Directions(self.read[:, list(indices)], self.write[list(indices)])


def suppressed_weight(
    host_weight: Float[Tensor, "d_in d_out"],
    read: Float[Tensor, "d_in k"],
    write: Float[Tensor, "k d_out"],
    sequential: bool = False,
) -> Float[Tensor, "d_in d_out"]:
    """``W - sum_k (r_k^T W w_k) r_k w_k^T`` with unit ``r_k, w_k``; every term from the original ``W``.

    ``sequential=True`` applies one direction after the other instead, each to what the last one left. Computed in
    float32 or better, returned in the dtype of ``host_weight``. A zero direction suppresses nothing.
    """
    W = host_weight.to(torch.promote_types(host_weight.dtype, torch.float32))
    if sequential:
        for k in range(read.shape[1]):
            r, w, strength = removed_terms(W, read[:, k : k + 1], write[k : k + 1])
            W = W - (r * strength) @ w
        return W.to(host_weight.dtype)
    r, w, strength = removed_terms(W, read, write)
    return torch.addmm(W, r * strength, w, alpha=-1).to(host_weight.dtype)


def removed_terms(
    W: Float[Tensor, "d_in d_out"], read: Float[Tensor, "d_in k"], write: Float[Tensor, "k d_out"]
) -> tuple[Float[Tensor, "d_in k"], Float[Tensor, "k d_out"], Float[Tensor, "k"]]:
    """Unit ``r_k``, unit ``w_k`` and ``r_k^T W w_k`` in the dtype of ``W``: what simultaneous suppression takes away."""
    r = nn.functional.normalize(read.to(W), dim=0)
    w = nn.functional.normalize(write.to(W), dim=1)
    return r, w, ((W @ w.T) * r).sum(0)  # on a CPU several times faster than with r.T @ W


# --- where directions come from --------------------------------------------------------------------------------------


def subcomponent_directions(run: Run, subcomponents: Mapping[str, Sequence[int]]) -> dict[str, Directions]:
    """The directions of chosen subcomponents, site name -> indices (a repeated index counts once).

    Raises:
        ValueError: a site that the Run does not decompose.
        IndexError: a subcomponent that the site does not have.
    """
    found = {}
    for name, indices in subcomponents.items():
        if name not in run.components:
            raise ValueError(f"{name} is not decomposed in this Run; its sites are {list(run.components)}.")
        parts = run.components[name]
        if outside := [index for index in indices if index not in range(parts.C)]:
            raise IndexError(f"{name} has subcomponents 0 to {parts.C - 1}; found {outside}.")
        once = list(dict.fromkeys(int(index) for index in indices))
        found[name] = Directions(parts.read.detach()[:, once], parts.write.detach()[once])
    return found


def singular_directions(model: HookedTransformer, counts: Mapping[str, int]) -> dict[str, Directions]:
    """The largest singular directions of the host's weights, site name -> how many (at most its rank's upper bound).

    Raises:
        ValueError: an unknown site, or more directions than the smaller side of the weight.
    """
    found = {}
    for name, (site, count) in _counted(model, counts).items():
        if count > min(site.d_in, site.d_out):
            raise ValueError(f"{name} is {site.d_in} x {site.d_out}; it has no {count} singular directions.")
        W = weight(model, site)
        check_finite(f"{name} of the host", W)
        U, _, Vh = torch.linalg.svd(W.to(torch.promote_types(W.dtype, torch.float32)), full_matrices=False)
        found[name] = Directions(U[:, :count].contiguous(), Vh[:count].contiguous())
    return found


def random_directions(
    model: HookedTransformer, counts: Mapping[str, int], generator: torch.Generator, matched: bool = False
) -> dict[str, Directions]:
    """Unit directions drawn uniformly, site name -> how many.

    Read and write are independent, so that little of the weight lies along a pair of them. ``matched=True`` draws what is
    read and writes what the host's weight makes of it, ``w_k ~ r_k^T W``: suppression then takes away everything that the
    weight does along ``r_k``, a harder control.
    """
    found = {}
    for name, (site, count) in _counted(model, counts).items():
        W = weight(model, site)
        W = W.to(torch.promote_types(W.dtype, torch.float32))

        def drawn(*shape: int, like: Tensor = W) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)

        read = nn.functional.normalize(drawn(site.d_in, count), dim=0)
        write = read.T @ W if matched else drawn(count, site.d_out)
        found[name] = Directions(read, nn.functional.normalize(write, dim=1))
    return found


def _counted(model: HookedTransformer, counts: Mapping[str, int]) -> dict[str, tuple[Site, int]]:
    sites = _named_sites(model, counts)
    check_whole(**{f"the count of {name}": count for name, count in counts.items()})
    if negative := [name for name, count in counts.items() if count < 0]:
        raise ValueError(
            f"{counts[negative[0]]} directions of {negative[0]} were asked for; give a count of 0 or more."
        )
    return {name: (sites[name], count) for name, count in counts.items()}


def _named_sites(model: HookedTransformer, names: Mapping[str, object]) -> dict[str, Site]:
    own = {site.name: site for site in all_sites(model)}
    if strange := [name for name in names if name not in own]:
        raise ValueError(f"This host has no site {strange[0]!r}; it has {list(own)}.")
    return {name: own[name] for name in names}


# --- suppression -----------------------------------------------------------------------------------------------------


@contextmanager
def suppressed(
    model: HookedTransformer, run: Run, subcomponents: Mapping[str, Sequence[int]], *, sequential: bool = False
) -> Iterator[HookedTransformer]:
    """Inside this context the directions of chosen subcomponents are projected out of the host's own weights.

    Args:
        subcomponents: site name -> indices of subcomponents (a repeated index counts once).
        sequential: one direction after the other (see :func:`suppressed_weight`).

    The weights are swapped, so there is no cost per token. Parameters are put back as the same objects, bit for bit.

    Raises:
        ValueError, IndexError: unknown sites or subcomponents, before anything is changed.
    """
    directions = subcomponent_directions(run, subcomponents)
    check_host(model, run, [run.components[name].site for name in directions])
    with suppressed_directions(model, directions, sequential=sequential):
        yield model


@contextmanager
def suppressed_directions(
    model: HookedTransformer, directions: Mapping[str, Directions], *, sequential: bool = False
) -> Iterator[HookedTransformer]:
    """As :func:`~tl_spd.suppress.suppressed`, for any directions: site name -> :class:`~tl_spd.suppress.Directions`.

    Raises:
        ValueError: unknown sites or directions of another shape than the site's, before anything is changed.
    """
    new = _edited(model, directions, sequential)
    try:
        try:
            for site, edit in new:
                edit.entered = next_entered()
                replace_parameter(model, site, edit)
            yield model
        finally:
            _take_out(model, new)
    finally:
        _take_out(model, new)  # once more, where an interrupt cut the first short


class _Edited(nn.Parameter):  # a suppressed weight in the place of the one under it, which may be one itself
    under: nn.Parameter
    entered: int = 0  # `decomposed` reads it: the innermost context wins

    def __deepcopy__(self, memo: dict) -> nn.Parameter:  # a copy of the host has it for its own
        return nn.Parameter(self.detach().clone(), self.requires_grad)


@torch.no_grad()
def _edited(
    model: HookedTransformer, directions: Mapping[str, Directions], sequential: bool
) -> list[tuple[Site, _Edited]]:
    sites = check_directions(model, directions)
    new = []
    for site in sites:
        own, chosen = parameter(model, site), directions[site.name]
        edited = suppressed_weight(fold(site, own), chosen.read, chosen.write, sequential)
        edit = _Edited(unfold(site, edited), requires_grad=own.requires_grad)
        edit.under = own
        new.append((site, edit))
    return new


def check_directions(model: HookedTransformer, directions: Mapping[str, Directions]) -> list[Site]:
    """The sites that ``directions`` name, in their order; ValueError where a site is unknown or a shape does not fit."""
    sites = _named_sites(model, directions)
    for name, site in sites.items():
        shape = directions[name].read.shape[0], directions[name].write.shape[1]
        if shape != (site.d_in, site.d_out):
            raise ValueError(
                f"{name} is {site.d_in} x {site.d_out}; the directions given are for {shape[0]} x {shape[1]}."
            )
    return list(sites.values())


def _take_out(model: HookedTransformer, new: Sequence[tuple[Site, _Edited]]) -> None:
    """Take edits out of the piles on a host's parameters, wherever in the pile each is. Can be repeated."""
    for site, edit in new:
        above = top = parameter(model, site)
        while isinstance(above, _Edited) and above is not edit and above.under is not edit:
            above = above.under
        if top is edit or not isinstance(top, _Edited):
            if (edit.under.dtype, edit.under.device) != (edit.dtype, edit.device):  # the host was cast or moved inside
                edit.under.data = edit.under.data.to(edit)
            replace_parameter(model, site, edit.under)
        elif isinstance(above, _Edited):  # else it is out already
            above.under = edit.under


# --- copies and files ------------------------------------------------------------------------------------------------


def suppressed_copy(
    model: HookedTransformer, directions: Mapping[str, Directions], *, sequential: bool = False
) -> HookedTransformer:
    """A copy of the host with the directions projected out of its weights; it shares no storage with the host.

    Weights are those that the host has now (inside :func:`suppressed` the edited ones). Hooks, a user's or an installed
    Run's, are not taken along. No directions: a plain copy.

    Raises:
        ValueError: unknown sites or directions that do not fit.
    """
    new = _edited(model, directions, sequential)
    copied = copy.deepcopy(make_twin(model, keep_flags=True), {id(model.tokenizer): model.tokenizer})
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    for site, edit in new:
        replace_parameter(copied, site, nn.Parameter(edit.detach(), requires_grad=edit.requires_grad))
    return copied


def save_weights(model: HookedTransformer, path: str | Path) -> None:
    """Write the host's parameters as they are now to the safetensors file ``path``, for :func:`load_weights`.

    The names are those of ``model.named_parameters()``; buffers follow from the config and are left out. What is there
    stays until all is written.
    """
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.named_parameters()}
    with replacing(Path(path), Path(path).with_name(Path(path).name + ".partial")) as partial:
        save_file(tensors, partial, {DIGEST: tensors_digest(tensors)})


@torch.no_grad()
def load_weights(model: HookedTransformer, path: str | Path) -> None:
    """Copy the weights that :func:`save_weights` wrote into ``model``, a host of the same config, cast to its dtype.

    Raises:
        StorageError: no such file, no safetensors file, or one whose names, shapes and kinds of numbers are not this host's,
            or not all finite. The host has not been changed then.
    """
    try:
        with open(path, "rb") as file:
            check_header(file.read(8), Path(path))
        with safe_open(path, "pt") as opened:
            written = (opened.metadata() or {}).get(DIGEST)
        tensors = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, MemoryError) as error:
        raise StorageError(f"{path} cannot be read as a safetensors file ({brief(error)}).") from error
    if written is not None and written != tensors_digest(tensors):
        raise StorageError(f"{path} is damaged: its content is not what was written. Copy the file again.")
    own = dict(model.named_parameters())
    if differing := sorted(set(own) ^ set(tensors)):
        raise StorageError(
            f"{path} was made for another config: only one of the file and this host has {brief(differing[0])}."
        )
    for name, value in own.items():
        if tensors[name].shape != value.shape:
            raise StorageError(
                f"{name!r} in {path} is {tuple(tensors[name].shape)}; this host's is {tuple(value.shape)}."
            )
        if not tensors[name].is_floating_point() or not bool(tensors[name].to(value.dtype).isfinite().all()):
            raise StorageError(
                f"{name!r} in {path} is not all finite numbers of {value.dtype}; use another copy of it."
            )
    for name, value in own.items():
        value.copy_(tensors[name])
