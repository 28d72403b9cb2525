"""What subcomponents write, read off with the unembedding: their direct effect on the logits (the logit lens).

1. A site that writes to the residual stream (W_O, W_out, embeddings that are added to it) adds ``a_c write_c`` there.
2. The final norm's division depends on the input and is left out; the rest of it is linear: the mean is taken off (LN, LNPre),
   then its gain multiplied on. The unembedding reads the result. An unembedding site's ``write_c`` are logits already.
3. ``write_c`` is taken at length 1, since ``(s read_c, write_c / s)`` is the same subcomponent for every ``s > 0``; for ``s < 0``
   too, so signs are those of a positive inner activation ``a_c``.
4. The mean over the vocabulary is taken off: a shift of all logits changes no probability.

Source: nostalgebraist's logit lens, applied to weights. Approximations: only the direct path, no layer in between; a soft cap
on the logits is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spd.checks import check_finite, check_whole
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, Site, d_vocab, token_texts
from tl_spd.wiring import unembedding

COLUMNS = ["site", "subcomponent", "side", "rank", "token", "text", "effect"]


@torch.no_grad()
def direct_effects(
    model: HookedTransformer, run: Run, site: str, subcomponents: Sequence[int] | None = None, k: int = 10
) -> pd.DataFrame:
    """The ``k`` tokens whose logits each subcomponent of ``site`` raises most, and the ``k`` that it lowers most.

    Args:
        site: the name of one of the Run's sites.
        subcomponents: their indices; default all.

    Returns:
        One row per subcomponent, side and rank: ``site, subcomponent, side`` (``"raised"`` or ``"lowered"``), ``rank`` (from 0,
        the largest effect first), ``token, text, effect`` (logits per unit of length written, before the final norm's
        division, relative to the mean over the vocabulary, for a positive inner activation).

    Raises:
        ValueError: a site that the Run lacks or that does not write to the residual stream, ``k`` out of range.
        IndexError: a subcomponent that the site does not have.
    """
    if site not in run.components:
        raise ValueError(f"The Run does not decompose {site!r}; its sites are {list(run.components)}.")
    parts = run.components[site]
    if reason := _no_direct_effect(model, parts.site):
        raise ValueError(
            f"{site} has no direct effect on the vocabulary: {reason} Sites that write to the residual stream directly have "
            "one: W_O, W_out and embeddings; W_U writes the logits themselves."
        )
    chosen = range(parts.C) if subcomponents is None else list(subcomponents)
    if outside := [index for index in chosen if index not in range(parts.C)]:
        raise IndexError(f"{site} has subcomponents 0 to {parts.C - 1}; found {outside}.")
    check_whole(k=k)
    if not 1 <= k <= d_vocab(model):
        raise ValueError(f"k must be 1 to {d_vocab(model)}, the size of the vocabulary; found {k}.")
    tables = []
    for index in chosen:
        effect = _effect(model, parts.site, parts.write[index])
        check_finite(f"The direct effect of {site} {index} on the vocabulary", effect)
        for side, sign in (("raised", 1), ("lowered", -1)):
            tokens = (sign * effect).topk(k).indices
            columns = {"token": tokens.tolist(), "text": token_texts(model, tokens), "effect": effect[tokens].tolist()}
            place = {"site": site, "subcomponent": index, "side": side, "rank": range(k)}
            tables.append(pd.DataFrame({**place, **columns}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def _no_direct_effect(model: HookedTransformer, site: Site) -> str | None:
    """Why what ``site`` writes does not reach the unembedding directly, or None."""
    if site.kind in ("W_O", "W_out", "W_E", "W_U"):
        return None
    if site.kind == "W_pos":
        added = model.cfg.positional_embedding_type == "standard"
        return None if added else "shortformer positions are read by queries and keys alone."
    if site.kind in ("W_Q", "W_K", "W_V"):
        return "it writes to the attention heads, whose patterns and W_O come in between."
    return "it writes to the MLP's neurons; their activation function and W_out come in between."


def _effect(model: HookedTransformer, site: Site, write: Float[Tensor, "d_out"]) -> Float[Tensor, "d_vocab"]:
    written = write / write.norm().clamp(min=torch.finfo(write.dtype).tiny)
    if site.kind != "W_U":
        if model.cfg.normalization_type in ("LN", "LNPre"):
            written = written - written.mean()
        gain = getattr(getattr(model, "ln_final", None), "w", None)  # folded into the unembedding, or none, where None
        written = written if gain is None else written * gain
        W, _ = unembedding(model)
        written = written.to(W.dtype) @ W
    return written - written.mean()
