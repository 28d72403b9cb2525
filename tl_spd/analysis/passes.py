"""Passes of the original model that begin at a layer, on the states of an earlier pass with something changed.

1. One pass is recorded: the state with which every block begins, and what hooks keep of it.
2. A later pass that agrees with it before layer l takes rows of its state there and runs the rest.
3. Only the last position is unembedded.

Passes run on a hook-free twin with the host's weights as they are now. Source: the same reuse as in the engine, without
components. Approximations: none; stacked rows may differ from single ones in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spd.checks import check_seen
from tl_spd.hooks import HookSet, removing
from tl_spd.sites import Hook, HookedTransformer, n_layers
from tl_spd.wiring import Observation, Start, capped, final_residual, make_twin, unembedding, watch_starts


class Passes:
    """Recorded and resumed passes of ``model``, which is itself never run, hooked or changed."""

    def __init__(self, model: HookedTransformer):
        self.twin = make_twin(model)
        self.layers = n_layers(model)

    @torch.no_grad()
    def record(self, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook] = ()) -> list[Start]:
        """The state with which each block begins, and at ``n_layers`` the last residual stream."""
        starts: dict[int, Start] = {}
        with removing(HookSet()) as watching:
            watch_starts(self.twin, starts, watching)
            resid = self.twin.run_with_hooks(tokens, fwd_hooks=list(hooks), stop_at_layer=self.layers)
        check_seen(Observation({}, {}, starts, resid), [])
        last = starts[self.layers - 1]
        end = Start(resid, last.shortformer_positions, last.attention_mask)
        return [*(starts[layer] for layer in range(self.layers)), end]

    @torch.no_grad()
    def resume(self, layer: int, start: Start, hooks: Sequence[Hook] = ()) -> Float[Tensor, "rows d_vocab"]:
        """The last position's logits of a pass that begins at ``layer`` (``n_layers``: only unembedding is left)."""
        resid = self.twin.run_with_hooks(
            start.resid,
            fwd_hooks=list(hooks),
            start_at_layer=layer,
            stop_at_layer=self.layers,
            shortformer_pos_embed=start.shortformer_positions,
            attention_mask=start.attention_mask,
        )
        W, b = unembedding(self.twin)
        return capped(self.twin, final_residual(self.twin, resid[:, -1:])[:, 0] @ W + b)


def rows_of(start: Start, index: Int[Tensor, "rows"]) -> Start:
    """The state of the rows ``index`` (a row may be taken several times)."""

    def taken(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[index]

    return Start(start.resid[index], taken(start.shortformer_positions), taken(start.attention_mask))
