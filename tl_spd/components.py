"""Components: one site's weight written as a sum of rank-1 subcomponents, ``W ~ sum_c read_c (x) write_c``.

1. ``read: [d_in, C]`` takes the inner activation ``a_c = x . read_c`` from the input; ``write: [C, d_out]`` sends it on.
2. A masked forward is ``y = ((x @ read) * m) @ write`` (the host's bias is added by whoever installs it).
3. ``delta`` is what the sum leaves of the host's weight; nothing is assumed about it.

Source: Bushnaq et al. 2025 (SPD), whose code calls ``read`` V and ``write`` U; the paper on transformers calls them U and V.
Initialisations: Kaiming as in the SPD code (fan-in gain 1), the singular vectors of the weight, or (this library's) one
subcomponent for each of the inputs that the data brings, an interpolative decomposition of these inputs.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_spd.sites import Site

Init = Literal["kaiming", "svd", "inputs"]

DEPENDENT = 1e-2
"""An input of which less than this share lies outside the inputs chosen so far brings nothing new."""


class Components(nn.Module):
    """The rank-1 subcomponents of one site.

    Attributes:
        read: ``[d_in, C]``, what each subcomponent reads.
        write: ``[C, d_out]``, what it writes.
    """

    def __init__(self, site: Site, read: Float[Tensor, "d_in C"], write: Float[Tensor, "C d_out"]):
        super().__init__()
        if read.shape != (site.d_in, write.shape[0]) or write.shape[1] != site.d_out:
            raise ValueError(
                f"{site.name}: read {tuple(read.shape)} and write {tuple(write.shape)} do not fit; "
                f"wanted ({site.d_in}, C) and (C, {site.d_out})."
            )
        self.site = site
        self.read = nn.Parameter(read)
        self.write = nn.Parameter(write)

    @property
    def C(self) -> int:
        """The number of subcomponents."""
        return self.read.shape[1]

    def weight(self) -> Float[Tensor, "d_in d_out"]:
        """The matrix that the subcomponents sum to."""
        return self.read @ self.write

    def delta(self, host_weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """What the subcomponents leave of the host's weight."""
        return host_weight.to(self.read.dtype) - self.weight()

    def inner(self, x: Tensor) -> Tensor:
        """Inner activations ``[batch, pos, (heads,) C]`` of inputs ``[..., d_in]`` or indices ``[batch, pos]``."""
        if not self.site.lookup:
            return x.to(self.read.dtype) @ self.read
        rows = self.read[x.clamp(min=0)]
        return torch.where((x >= 0)[..., None], rows, torch.zeros_like(rows))  # a padded place looks nothing up

    def output(self, x: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        """The masked output for the input ``x``, in the shape and dtype of the host's own output ``like``, without bias.

        ``mask`` broadcasts to ``[batch, pos, C]``. Inputs with a head axis, and outputs per head (``hook_result``), are
        computed head by head with the same mask.
        """
        if x.ndim == 4:  # split Q, K, V inputs: every head reads its own
            write = _repeat_heads(self.write.reshape(self.C, self.site.heads, -1), like.shape[2], dim=1)
            masked = self.inner(x) * mask[..., None, :]
            return torch.einsum("bphc,chd->bphd", masked, write).to(like.dtype)
        if self.site.kind == "W_O" and like.ndim == 4:  # one result per head
            read = self.read.reshape(self.site.heads, -1, self.C)
            split = x.to(read.dtype).reshape(*x.shape[:2], self.site.heads, -1)
            inner = torch.einsum("bphd,hdc->bphc", split, read)
            return ((inner * mask[..., None, :]) @ self.write).to(like.dtype)
        y = ((self.inner(x) * mask) @ self.write).to(like.dtype)
        if like.ndim == 4:
            return _repeat_heads(y.reshape(*y.shape[:2], self.site.heads, -1), like.shape[2], dim=2)
        return y


def _repeat_heads(value: Tensor, heads: int, dim: int) -> Tensor:
    """Key and value heads repeated for a host that ungroups its grouped-query attention."""
    return value if value.shape[dim] == heads else value.repeat_interleave(heads // value.shape[dim], dim=dim)


def init_components(
    site: Site,
    host_weight: Float[Tensor, "d_in d_out"],
    C: int,
    init: Init,
    generator: torch.Generator,
    inputs: Float[Tensor, "rows d_in"] | None = None,
) -> Components:
    """Fresh components of ``site`` in float32 (float64 for a float64 host), on the weight's device.

    ``kaiming``: normal entries with standard deviation ``1/sqrt(d_in)`` for read and ``1/sqrt(C)`` for write.
    ``svd``: the largest ``C`` singular directions, each side carrying the root of its singular value; subcomponents
    beyond the rank read at random and write nothing, so that they start outside the sum and can still learn.
    ``inputs``: the first subcomponents belong to one of ``inputs`` each: they read it and none of the other chosen ones, and
    write what the host makes of it. The rest of the weight, which is zero on the chosen inputs, follows as in ``svd``.

    Raises:
        ValueError: ``C`` below 1, an unknown ``init``, a weight that is not finite, or no ``inputs`` where they are needed.
    """
    if C < 1:
        raise ValueError(f"{site.name}: C must be at least 1 subcomponent, found {C}.")
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {get_args(Init)}, found {init!r}.")
    if init == "inputs" and inputs is None:
        raise ValueError(f"{site.name}: init='inputs' needs the site's inputs on some data.")
    if not bool(torch.isfinite(host_weight).all()):
        raise ValueError(
            f"{site.name}: the host's weight has entries that are not finite; nothing can be decomposed from it."
        )
    weight = host_weight.to(torch.float64 if host_weight.dtype == torch.float64 else torch.float32)

    def normal(*shape: int, std: float) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=weight.dtype, device=generator.device)
        return (drawn * std).to(weight.device)

    read, write = normal(site.d_in, C, std=site.d_in**-0.5), normal(C, site.d_out, std=C**-0.5)
    if init == "kaiming":
        return Components(site, read, write)
    taken, rest = 0, weight
    if inputs is not None:
        own_read, own_write = input_terms(weight, inputs, C)
        taken = own_read.shape[1]
        read[:, :taken], write[:taken] = own_read, own_write
        rest = weight - (own_read @ own_write).to(weight.dtype)
    U, S, Vh = torch.linalg.svd(rest, full_matrices=False)
    more = min(C - taken, S.shape[0])
    write[taken:] = 0
    read[:, taken : taken + more] = U[:, :more] * S[:more].sqrt()
    write[taken : taken + more] = S[:more].sqrt()[:, None] * Vh[:more]
    return Components(site, read, write)


def input_terms(
    weight: Float[Tensor, "d_in d_out"], inputs: Float[Tensor, "rows d_in"], C: int
) -> tuple[Float[Tensor, "d_in k"], Float[Tensor, "k d_out"]]:
    """Read and write of at most ``C`` subcomponents, each for one of ``inputs``, in float64; both sides equally long.

    Inputs are chosen as in a QR with pivoting: always the one of which most lies outside those chosen so far, until the
    rest depends on them (:data:`DEPENDENT`). Reads are the columns of the chosen inputs' pseudo-inverse, writes their outputs:
    ``x_i . read_j`` is zero for two chosen inputs, and the sum is the weight on all that the chosen inputs span.
    """
    x = inputs.double()
    lengths, left = x.norm(dim=1), x.clone()
    chosen: list[int] = []
    while len(chosen) < min(C, *x.shape):
        remaining = left.norm(dim=1)
        best = int(torch.where(remaining > DEPENDENT * lengths, remaining, 0).argmax())
        if remaining[best] <= DEPENDENT * lengths[best]:
            break
        chosen.append(best)
        direction = left[best] / remaining[best]
        left = left - torch.outer(left @ direction, direction)
    read = torch.linalg.pinv(x[chosen]) if chosen else x.new_zeros(x.shape[1], 0)
    write = x[chosen] @ weight.double()
    scale = (write.norm(dim=1) / read.norm(dim=0)).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return read * scale, write / scale[:, None]
