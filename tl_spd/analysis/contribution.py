"""Contributions: how much of a site's output each subcomponent writes at each token.

1. The original model runs once, as it does for importances.
2. At a token where the site reads ``x``, subcomponent c writes ``g_c (x . read_c) write_c``. Its contribution is the length of
   that, divided by the length of what the host's own weight writes there, ``x W``, without the bias.

An importance alone does not say that a subcomponent does anything. Where ``x . read_c`` is nearly 0, no reconstruction loss
sees the mask, so an importance may stay at any height there. Source: this library's. Approximations: none.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, weight


@torch.no_grad()
def contributions(
    model: HookedTransformer, run: Run, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
) -> dict[str, Float[Tensor, "batch pos C"]]:
    """The share of each site's output that each subcomponent writes: lengths, so shares of one token need not add up to 1.

    Padding is found by the host's tokenizer, or given as ``attention_mask`` (1 at real tokens).

    Returns:
        Site name -> ``[batch, pos, C]``, at least 0; 0 at padding and where the host's own weight writes nothing.

    Raises:
        ValueError, TypeError, FloatingPointError: as :meth:`~tl_spd.run.Run.importances`.
    """
    seen, real = run.observed(model, tokens, attention_mask)
    importances, found = run.importances_from(seen, real), {}
    for site in run.sites:
        parts, x = run.components[site.name], seen.inputs[site.name]
        written = importances[site.name] * parts.inner(x).abs() * parts.write.norm(dim=1)
        output = seen.rows[site.name] if site.lookup else x @ weight(model, site)
        whole = output.to(written).norm(dim=-1, keepdim=True)
        there = whole > 0 if real is None else (whole > 0) & real[..., None]
        found[site.name] = torch.where(there, written / whole, 0.0)
    return found
