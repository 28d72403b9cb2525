"""A pair of prompts on the original model: passes of the corrupted one in which subcomponents of the clean one are patched in.

1. Both prompts run once on a hook-free twin with the host's weights as they are now; the sites' inputs are kept.
2. A patched pass adds ``((x_clean - x_corr) @ read * kept) @ write`` at one position to a site's output. Passes are stacked
   along the batch and begin at the site's layer, on the corrupted prompt's residual stream.
3. Attribution: how much of each subcomponent is patched in is a variable at 0; its gradient, for all sites in one
   backward pass, is ``(dmetric/dy . write_c) (a_c(clean) - a_c(corr))``.
4. TransformerLens's patch runs on the same twin, one position at a time. Its results are taken from the metric itself,
   because it returns them in float32.

Approximation: stacked passes may differ from single ones in the last bits, so effects have the rounding error of a metric.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_spd.checks import check_finite, check_seen, check_whole
from tl_spd.components import Components
from tl_spd.importance import Importances
from tl_spd.run import Run
from tl_spd.sites import (
    Hook,
    HookedTransformer,
    Site,
    all_sites,
    d_vocab,
    generic_activation_patch,
    layer_pos_patch_setter,
    n_ctx,
)
from tl_spd.wiring import make_twin, observe, padding_mask, unembedding, write_hook, write_point

Metric = Callable[[Tensor], Tensor]
"""From logits ``[1, pos, d_vocab]`` to one number, differentiable; larger is closer to the clean prompt's answer."""

PATCHED_KINDS = ("W_Q", "W_K", "W_V", "W_O", "W_gate", "W_in", "W_out")


def answer_metric(model: HookedTransformer, answer: int, other: int | None = None) -> Metric:
    """A metric of the last position: the answer's log-probability in nats, or its logit minus that of the token ``other``.

    Raises:
        ValueError: a token outside the vocabulary, or ``other`` equal to ``answer``.
    """
    check_whole(answer=answer, other=other)
    words = unembedding(model)[0].shape[1]
    if outside := [token for token in (answer, other) if token is not None and not 0 <= token < words]:
        raise ValueError(f"Token {outside[0]} is out of the vocabulary; this host has tokens 0 to {words - 1}.")
    if answer == other:
        raise ValueError(f"answer and other are both {answer}; their logit difference is always 0. Give two tokens.")

    def measure(logits: Tensor) -> Tensor:
        last = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32))
        return (last.log_softmax(-1)[:, answer] if other is None else last[:, answer] - last[:, other]).mean()

    return measure


class PromptPair:
    """A clean and a corrupted prompt on the original model, and passes of the corrupted one with changed outputs."""

    def __init__(
        self,
        model: HookedTransformer,
        run: Run,
        clean: Tensor,
        corrupted: Tensor,
        metric: Metric,
        sites: str | Sequence[str] | None,
        positions: Sequence[int] | None,
        max_rows: int,
    ):
        self.run, self.metric, self.max_rows = run, metric, max_rows
        self.sites = _chosen_sites(model, run, sites)
        _check_tokens(model, clean, corrupted)
        check_whole(max_rows=max_rows, **{f"positions[{index}]": place for index, place in enumerate(positions or ())})
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1 pass at once, found {max_rows}.")
        length = clean.shape[1]
        self.positions = list(range(length)) if positions is None else sorted(set(positions))
        if not self.positions or self.positions[0] < 0 or self.positions[-1] >= length:
            raise ValueError(
                f"positions={list(positions or [])}: wanted some of 0 to {length - 1}, the prompts' places."
            )
        self.model, self.twin, self.tokens = model, make_twin(model), (clean, corrupted)
        self.seen = [observe(self.twin, self.sites, tokens) for tokens in self.tokens]
        for seen in self.seen:
            check_seen(seen, self.sites)
        with torch.no_grad():
            self.values = [_one_number(metric(self.twin(tokens))) for tokens in self.tokens]

    def labels(self, site: Site, at: Int[Tensor, "rows"]) -> pd.DataFrame:
        """The columns that say which place a row is about."""
        tokens = {"token": self.tokens[0], "corrupted_token": self.tokens[1]}
        columns = {name: given[0, at].cpu().numpy() for name, given in tokens.items()}
        return pd.DataFrame({"site": site.name, "position": at.cpu().numpy(), **columns})

    def difference(self, parts: Components) -> Float[Tensor, "1 pos d_in"]:
        """How much larger the site's input is on the clean prompt, in the components' dtype."""
        clean, corrupted = (seen.inputs[parts.site.name].to(parts.read.dtype) for seen in self.seen)
        return clean - corrupted

    @torch.no_grad()
    def importances(self) -> list[Importances]:
        """Importances ``[1, pos, C]`` per site, of the clean and of the corrupted prompt."""
        real = [padding_mask(self.model, tokens) for tokens in self.tokens]
        return [self.run.importances_from(seen, r, self.sites) for seen, r in zip(self.seen, real, strict=True)]

    def attributions(self) -> dict[str, Float[Tensor, "1 pos C"]]:
        """Gradient x activation of every subcomponent of every site, from one backward pass."""
        patched: dict[str, Tensor] = {}  # how far each subcomponent is patched in: 0, but with a gradient
        hooks: list[Hook] = []
        for site in self.sites:
            parts, dx = self.run.components[site.name], self.difference(self.run.components[site.name]).detach()
            shape = (*dx.shape[:2], parts.C)
            patched[site.name] = torch.zeros(shape, dtype=dx.dtype, device=dx.device, requires_grad=True)
            hooks.append(write_hook(self.twin, site, _adder(parts, dx, patched[site.name])))
        with torch.enable_grad():
            value = self.metric(self.twin.run_with_hooks(self.tokens[1], fwd_hooks=hooks))
            if not value.requires_grad:
                raise ValueError("The metric must be differentiable by torch: its value has no gradient to the logits.")
            return dict(zip(patched, torch.autograd.grad(value, list(patched.values())), strict=True))

    @torch.no_grad()
    def effects(
        self, parts: Components, at: Int[Tensor, "rows"], kept: Bool[Tensor, "rows C"]
    ) -> Float[Tensor, "rows"]:
        """What the metric gains in one pass per row, which patches the subcomponents ``kept`` at the position ``at``."""
        moved = (parts.inner(self.difference(parts))[0] != 0)[at] & kept
        effects = torch.zeros(len(at), dtype=torch.float64)
        changing = moved.any(1).nonzero()[:, 0]
        for start in range(0, len(changing), self.max_rows):
            rows = changing[start : start + self.max_rows]
            logits = self._patched(parts, at[rows], kept[rows])
            values = [_one_number(self.metric(logits[i : i + 1])) for i in range(len(rows))]
            effects[rows.cpu()] = torch.tensor(values, dtype=torch.float64) - self.values[1]
        return effects

    def _patched(self, parts: Components, at: Tensor, kept: Tensor) -> Float[Tensor, "rows pos d_vocab"]:
        rows = torch.arange(len(at), device=at.device)
        change, mask = self.difference(parts)[0, at][:, None], kept.to(parts.read.dtype)[:, None]

        def produce(y: Tensor) -> Tensor:
            y, here = y.clone(), y[rows, at][:, None]
            y[rows, at] = (here + parts.output(change, mask, here))[:, 0]
            return y

        def stacked(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.expand(len(at), *value.shape[1:])

        start, hook = self.seen[1].starts[parts.site.layer], write_hook(self.twin, parts.site, produce)
        return self.twin.run_with_hooks(
            stacked(start.resid),
            start_at_layer=parts.site.layer,
            shortformer_pos_embed=stacked(start.shortformer_positions),
            attention_mask=stacked(start.attention_mask),
            fwd_hooks=[hook],
        )

    @torch.no_grad()
    def host_effects(self, site: Site) -> Float[Tensor, "position"]:
        """What TransformerLens's own patch of the site's hook point gains, per position."""
        point, values = write_point(self.twin, site), list[float]()
        _, cache = self.twin.run_with_cache(self.tokens[0], names_filter=point)

        def recorded(logits: Tensor) -> Tensor:  # TransformerLens keeps what a metric returns in float32
            values.append(_one_number(self.metric(logits)))
            return logits.new_zeros(())

        index = pd.DataFrame({"layer": site.layer, "pos": self.positions})
        with contextlib.redirect_stderr(io.StringIO()):  # where it shows its progress bar
            generic_activation_patch(
                self.twin,
                self.tokens[1],
                cache,
                recorded,
                layer_pos_patch_setter,
                activation_name=point.rpartition("hook_")[2],
                index_df=index,
            )
        return torch.tensor(values, dtype=torch.float64) - self.values[1]


def _adder(parts: Components, dx: Tensor, patched: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: y + parts.output(dx, patched, y)


def _one_number(value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"The metric must turn logits [1, pos, d_vocab] into a tensor of one number, found {found}.")
    check_finite("The metric", value)
    return float(value)


def _chosen_sites(model: HookedTransformer, run: Run, patterns: str | Sequence[str] | None) -> list[Site]:
    sites, own = run.select(patterns), {site.name: site for site in all_sites(model)}
    if patterns is None:
        sites = tuple(site for site in sites if site.kind in PATCHED_KINDS)
    if refused := [site.name for site in sites if site.kind not in PATCHED_KINDS]:
        raise ValueError(f"Patching takes attention and MLP matrices, not {refused}; choose sites='blocks.*'.")
    if not sites:
        raise ValueError(f"This Run has no attention or MLP matrix to patch; its sites are {list(run.components)}.")
    if strange := [site for site in sites if own.get(site.name) != site]:
        found = own.get(strange[0].name, "no such weight")
        raise ValueError(f"The Run decomposes {strange[0]}; this host has {found}. Use the host that it was made for.")
    return list(sites)


def _check_tokens(model: HookedTransformer, clean: Tensor, corrupted: Tensor) -> None:
    for name, tokens in (("clean", clean), ("corrupted", corrupted)):
        if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1:
            raise ValueError(f"{name} has the shape {tuple(tokens.shape)}; wanted tokens [1, pos] of one prompt.")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"{name} must be an integer tensor of tokens [1, pos], found {tokens.dtype}.")
        if int(tokens.min()) < 0 or int(tokens.max()) >= d_vocab(model):
            raise ValueError(
                f"{name} has a token out of the vocabulary; this host has tokens 0 to {d_vocab(model) - 1}."
            )
    if clean.shape != corrupted.shape:
        raise ValueError(
            f"clean has {clean.shape[1]} tokens and corrupted {corrupted.shape[1]}; patching goes place by place, so both "
            "must have equally many."
        )
    if clean.shape[1] > n_ctx(model):
        raise ValueError(f"The prompts have {clean.shape[1]} tokens; this host takes at most {n_ctx(model)}.")
