"""Engine: all masked passes of a training step in few passes of the host.

1. The original model runs once; the state with which each block starts is kept.
2. A pass that masks nothing before layer l starts at layer l from the original's state: passes are sorted by their first
   masked layer, stacked along the batch, and join the stack where they begin.
3. At a masked site the rows that mask it go through the components; the other rows keep the host's output.
4. The last residual stream is cut to the scored positions. Logits and KL are computed in blocks of rows, forward and
   gradient at once, so that nothing of the size passes x positions x vocabulary is ever kept.
5. ``max_rows`` splits the stack. With ``recompute`` nothing that a stack makes is kept for the backward pass, which makes it
   again, one stack after the other. A pass that changes something else by hooks of its own runs alone.

Same numbers as running every pass alone from the tokens (tested against a plain sequential version).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tl_spd.attend import recomputed
from tl_spd.checks import check_finite, check_seen, check_whole
from tl_spd.data import check_batch, check_scored
from tl_spd.hooks import HookSet, removing
from tl_spd.importance import LEAK, Importances
from tl_spd.install import masked_output
from tl_spd.masks import Pass, check_fits, check_masks
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer, Site, n_layers
from tl_spd.wiring import (
    Observation,
    Reader,
    Start,
    capped,
    embed,
    final_residual,
    make_twin,
    observe,
    padding_mask,
    put_writer,
    softcap,
    sync_twin,
    unembedding,
    write_hook,
)

LOGIT_ELEMENTS = 1 << 23
"""Largest number of logits computed at once (rows x vocabulary)."""

STACK_TOKENS = 1 << 13
"""Tokens stacked at once on a CPU where ``max_rows`` does not say: larger temporaries leave its cache."""


@dataclass(frozen=True)
class Batch:
    """One batch with what the original model did on it.

    Attributes:
        tokens: ``[batch, pos]``.
        attention_mask: as the user gave it, or None.
        real: which places hold real tokens, or None where all do.
        scored: flat indices into ``batch * pos`` of the scored positions.
        seen: inputs of the sites and states of the blocks.
        final: what the unembedding reads at the scored positions, ``[scored, d_model]``.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Tensor | None
    real: Bool[Tensor, "batch pos"] | None
    scored: Int[Tensor, "scored"]
    seen: Observation
    final: Float[Tensor, "scored d_model"]


def scored_positions(tokens: Tensor, real: Tensor | None, last_token_only: bool) -> Int[Tensor, "scored"]:
    """Flat indices of the scored positions: all real ones, or the last real one of every sequence that has one."""
    everywhere = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    if last_token_only:
        later = everywhere.flip(1).cumsum(1).flip(1)
        everywhere = everywhere & (later == 1)
    return everywhere.flatten().nonzero()[:, 0]


def passes_per_stack(tokens: Int[Tensor, "batch pos"], max_rows: int | None) -> int:
    """How many passes are stacked at once for a batch of ``tokens``."""
    if max_rows is not None:
        return max(1, max_rows // tokens.shape[0])
    return max(1, STACK_TOKENS // tokens.numel()) if tokens.device.type == "cpu" else 1 << 30


class Engine:
    """Evaluates masked passes of ``run`` on ``model``; the host itself is never run, hooked or changed.

    ``max_rows`` bounds how many sequences are stacked at once (None: all, on a CPU ``STACK_TOKENS`` tokens). ``recompute``: a
    stack's activations are made again in the backward pass, where only one stack's are there at a time; the weights must still be
    those of the forward pass then. Passes with hooks of their own are not made again.
    """

    def __init__(
        self,
        model: HookedTransformer,
        run: Run,
        last_token_only: bool = False,
        max_rows: int | None = None,
        recompute: bool = False,
    ):
        check_whole(max_rows=max_rows)
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1 sequence, found {max_rows}.")
        self.model, self.run, self.last_token_only = model, run, last_token_only
        self.max_rows, self.recompute = max_rows, recompute
        self.twin = make_twin(model)
        self.sites = {site.name: site for site in run.sites}

    def observe(self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None) -> Batch:
        """Run the original model on ``tokens`` and keep what the step needs of it."""
        sync_twin(self.twin, self.model)
        real = padding_mask(self.model, tokens, attention_mask)
        scored = scored_positions(tokens, real, self.last_token_only)
        check_scored(tokens, scored)
        return self.observe_at(tokens, attention_mask, real, scored)

    def observe_at(self, tokens: Tensor, attention_mask: Tensor | None, real: Tensor | None, scored: Tensor) -> Batch:
        """As :meth:`observe`, where it is known which positions are real and which are scored."""
        kwargs = {} if attention_mask is None else {"attention_mask": attention_mask}
        seen = observe(self.twin, self.run.sites, tokens, stop_at_layer=n_layers(self.model), **kwargs)
        with torch.no_grad():
            final = final_residual(self.twin, seen.output.flatten(0, 1)[scored][None])[0]
            if "unembed.W_U" in self.sites:
                seen.inputs["unembed.W_U"] = final_residual(self.twin, seen.output)
        return Batch(tokens, attention_mask, real, scored, seen, final)

    def observe_checked(self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None) -> Batch:
        """As :meth:`observe`, after checking the batch, and that the original model is finite on it.

        Raises:
            ValueError, TypeError: see :func:`~tl_spd.data.check_batch`; also where nothing is scored.
            FloatingPointError: names the first place of the original model that is not finite.
        """
        batch = self.observe(*check_batch((tokens, attention_mask), self.model))
        check_seen(batch.seen, self.run.sites)
        for name, value in zip(("W_U", "b_U"), unembedding(self.twin), strict=True):
            check_finite(f"unembed.{name} of the host", value)
        return batch

    def importances(self, batch: Batch, leak: float = LEAK) -> Importances:
        """Importances of the batch; gradients to the Run's parameters, if they have them, pass below 0 with slope ``leak``."""
        return self.run.importances_from(batch.seen, batch.real, leak=leak)

    def kl(self, batch: Batch, passes: Sequence[Pass]) -> Float[Tensor, "pass"]:
        """KL(P || Q) in nats of every pass, a mean over the batch's scored positions.

        Raises:
            ValueError: a mask of an unknown site or of a shape that does not broadcast to ``[batch, pos, C]``.
        """
        counts = {name: parts.C for name, parts in self.run.components.items()}
        for entry in passes:
            check_masks(entry.masks, self.run.sites, counts)
            for name, mask in entry.masks.items():
                check_fits(name, mask, *batch.tokens.shape)
        values: dict[int, Tensor] = {}
        plain = [(self._first_layer(entry), index) for index, entry in enumerate(passes) if not entry.hooks]
        per_stack, ordered = passes_per_stack(batch.tokens, self.max_rows), sorted(plain)
        for start in range(0, len(ordered), per_stack):
            chosen = [index for _, index in ordered[start : start + per_stack]]
            stacked = (batch, [passes[index] for index in chosen])
            found = recomputed(self._stacked, *stacked) if self.recompute else self._stacked(*stacked)
            values.update(zip(chosen, found, strict=True))
        for index, entry in enumerate(passes):
            if entry.hooks:
                values[index] = self._alone(batch, entry)
        return torch.stack([values[index] for index in range(len(passes))]) if passes else batch.final.new_zeros(0)

    def _stacked(self, batch: Batch, passes: list[Pass]) -> Float[Tensor, "pass"]:
        stack = _Stack(self, batch, passes)
        return self._head(batch, stack.residual(), stack.unembed_masks())

    def _first_layer(self, entry: Pass) -> int:
        return min([n_layers(self.model) - 1, *(self.sites[name].layer for name in entry.masks)])

    def _alone(self, batch: Batch, entry: Pass) -> Tensor:
        """One pass from the tokens to the logits, with hooks of its own, on a twin made for it (which takes the hooks along)."""
        twin = make_twin(self.model, keep_flags=True)
        sites = [self.sites[name] for name in entry.masks]
        reader, hooks = Reader(twin, sites), HookSet()

        def producer(site: Site) -> Any:
            mask, rows = entry.masks[site.name], entry.rows.get(site.name)
            return lambda like: masked_output(twin, self.run, site, reader.inputs[site.name], mask, like, rows)

        for site in sites:
            hooks.add(twin, *write_hook(twin, site, producer(site)))
        kwargs: dict[str, Any] = {} if batch.attention_mask is None else {"attention_mask": batch.attention_mask}
        logits = twin.run_with_hooks(batch.tokens, fwd_hooks=list(entry.hooks), **kwargs)
        return _mean_kl(self._original_logits(batch), logits.flatten(0, 1)[batch.scored])

    def _original_logits(self, batch: Batch) -> Float[Tensor, "scored d_vocab"]:
        W, b = unembedding(self.twin)
        return capped(self.twin, batch.final @ W + b)

    def _head(
        self, batch: Batch, resid: Tensor, masks: list[tuple[Tensor, Tensor | None] | None]
    ) -> Float[Tensor, "pass"]:
        """Mean KL of each pass from the stacked last residual stream ``[pass * batch, pos, d_model]``."""
        count = len(masks)
        scored = resid.reshape(count, -1, resid.shape[-1])[:, batch.scored]
        final = final_residual(self.twin, scored)
        W, b = unembedding(self.twin)
        if all(mask is None for mask in masks):
            return _HeadKL.apply(final, batch.final, W, b, softcap(self.twin)).mean(-1)
        site = next(site for site in self.run.sites if site.kind == "W_U")
        values = []
        for index, mask in enumerate(masks):
            like = (final[index] @ W + b)[None]
            logits = like
            if mask is not None:
                logits = masked_output(self.twin, self.run, site, final[index][None], mask[0], like)
                logits = logits if mask[1] is None else torch.where(mask[1][:, None], logits, like)
            values.append(_mean_kl(self._original_logits(batch), capped(self.twin, logits[0])))
        return torch.stack(values)


class _Stack:
    """Passes stacked along the batch on the engine's twin, each joining at its first masked layer."""

    def __init__(self, engine: Engine, batch: Batch, passes: list[Pass]):
        self.engine, self.batch, self.passes = engine, batch, passes
        self.first = [engine._first_layer(entry) for entry in passes]
        self.rows = batch.tokens.shape[0]
        self.joined = 0
        """How many passes take part in the block at hand."""
        self.beside: tuple[Tensor | None, Tensor | None] = (None, None)
        """Shortformer positions and attention mask of the passes that have joined."""

    def residual(self) -> Float[Tensor, "rows pos d_model"]:
        """The last residual stream of all passes, in their order."""
        begin = min(max(self.first[0], 0), n_layers(self.engine.model) - 1)
        start = self._start(begin)
        self.beside = start.shortformer_positions, start.attention_mask
        twin = self.engine.twin
        masked = [
            site for site in self.engine.run.sites if self._masking(site) and site.kind != "W_U" and not site.lookup
        ]
        with removing(HookSet()) as hooks:
            reader = Reader(twin, masked, hooks)
            for layer, block in enumerate(twin.blocks):
                if layer > begin:
                    hooks.put(block.register_forward_pre_hook, self._joiner(layer), with_kwargs=True)
            for site in masked:
                put_writer(hooks, twin, site, self._producer(site, reader))
            return twin(
                start.resid,
                start_at_layer=begin,
                stop_at_layer=n_layers(self.engine.model),
                shortformer_pos_embed=start.shortformer_positions,
                attention_mask=start.attention_mask,
            )

    def unembed_masks(self) -> list[tuple[Tensor, Tensor | None] | None]:
        """Each pass's mask of the unembedding, ``[1, scored, C]``, and which scored rows take it; None where unmasked."""
        batch, pos = self.batch.tokens.shape
        found: list[tuple[Tensor, Tensor | None] | None] = []
        for entry in self.passes:
            if "unembed.W_U" not in entry.masks:
                found.append(None)
                continue
            mask = entry.masks["unembed.W_U"].expand(batch, pos, self.engine.run.components["unembed.W_U"].C)
            rows = entry.rows.get("unembed.W_U")
            chosen = None if rows is None else rows[self.batch.scored // pos]
            found.append((mask.flatten(0, 1)[self.batch.scored][None], chosen))
        return found

    def _masking(self, site: Site) -> list[int]:
        return [index for index, entry in enumerate(self.passes) if site.name in entry.masks]

    def _start(self, layer: int) -> Start:
        """The state of all passes that begin at or before ``layer``."""
        embedded = sum(first < 0 for first in self.first)
        begun = sum(first <= layer for first in self.first)
        own = self.batch.seen.starts[layer]
        parts = [self._embedded(embedded)] if embedded else []
        self.joined = begun
        return _stack_starts([*parts, *[own] * (begun - embedded)])

    def _embedded(self, count: int) -> Start:
        """The state with which block 0 begins in the first ``count`` passes, which mask an embedding."""
        twin, run, batch = self.engine.twin, self.engine.run, self.batch
        sites = [site for site in run.sites if site.lookup and self._masking(site)]
        self.joined = count
        with removing(HookSet()) as hooks:
            reader = Reader(twin, sites, hooks)
            for site in sites:
                put_writer(hooks, twin, site, self._producer(site, reader))
            mask = None if batch.attention_mask is None else batch.attention_mask.repeat(count, 1)
            return Start(*embed(twin, batch.tokens.repeat(count, 1), mask))

    def _joiner(self, layer: int) -> Any:
        def join(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            """Stack the passes that begin at this block behind those that run already."""
            new = sum(first == layer for first in self.first)
            now = Start(args[0], *self.beside)
            whole = _stack_starts([now, *[self.batch.seen.starts[layer]] * new])
            self.joined += new
            self.beside = whole.shortformer_positions, whole.attention_mask  # the host keeps handing on the first ones
            names = ("shortformer_pos_embed", "attention_mask")
            return (whole.resid,), {**kwargs, **dict(zip(names, self.beside, strict=True))}

        return join

    def _producer(self, site: Site, reader: Reader) -> Any:
        indices = self._masking(site)

        def produce(like: Tensor) -> Tensor:
            """The site's output: masked in the passes that mask it, the host's in the others."""
            here = [index for index in indices if index < self.joined]
            masks = [self.passes[index].masks[site.name] for index in here]
            shape = (self.rows, like.shape[1], self.engine.run.components[site.name].C)
            mask = torch.cat([m.expand(shape) for m in masks]) if len(masks) > 1 else masks[0]
            rows = self._some_rows(site, here)
            x = reader.inputs[site.name]
            args = (self.engine.twin, self.engine.run, site)
            if len(here) == self.joined:
                return masked_output(*args, x, mask, like, rows)
            at = (torch.tensor(here)[:, None] * self.rows + torch.arange(self.rows)).flatten().to(like.device)
            y = masked_output(*args, x.index_select(0, at), mask, like.index_select(0, at), rows)
            return like.index_copy(0, at, y)

        return produce

    def _some_rows(self, site: Site, here: list[int]) -> Tensor | None:
        given = [self.passes[index].rows.get(site.name) for index in here]
        if all(rows is None for rows in given):
            return None
        every = torch.ones(self.rows, dtype=torch.bool, device=self.batch.tokens.device)
        return torch.cat([every if rows is None else rows for rows in given])


def _mean_kl(original: Float[Tensor, "scored d_vocab"], logits: Float[Tensor, "scored d_vocab"]) -> Float[Tensor, ""]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = original.to(wide).log_softmax(-1), logits.to(wide).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _stack_starts(parts: list[Start]) -> Start:
    def joined(values: list[Any]) -> Any:
        return None if values[0] is None else torch.cat(values)

    return Start(
        torch.cat([part.resid for part in parts]),
        joined([part.shortformer_positions for part in parts]),
        joined([part.attention_mask for part in parts]),
    )


class _HeadKL(torch.autograd.Function):
    """KL(P || Q) per scored row from what the unembedding reads; the gradient is made in the same sweep over the rows."""

    @staticmethod
    def forward(ctx: Any, final: Tensor, original: Tensor, W: Tensor, b: Tensor, cap: float) -> Tensor:
        """The KLs ``[passes, scored]`` of ``final`` ``[passes, scored, d_model]``; keeps their gradients, not the logits."""
        count, scored, d_model = final.shape
        values = final.new_empty(count, scored, dtype=torch.promote_types(final.dtype, torch.float32))
        grads = torch.empty_like(final)
        step = max(1, LOGIT_ELEMENTS // (W.shape[1] * count))
        for start in range(0, scored, step):
            block = final[:, start : start + step]
            log_p = _logits(original[start : start + step], W, b, cap).log_softmax(-1)
            logits = _logits(block.reshape(-1, d_model), W, b, cap)
            log_q = logits.log_softmax(-1).reshape(count, -1, W.shape[1])
            p = log_p.exp()
            values[:, start : start + step] = (p * (log_p - log_q)).sum(-1)
            grad = log_q.exp_().sub_(p)
            if cap > 0:
                grad = grad * (1 - (logits.reshape(grad.shape) / cap).square())
            grads[:, start : start + step] = grad.to(W.dtype) @ W.T
        ctx.save_for_backward(grads)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grads,) = ctx.saved_tensors
        return grads * grad[..., None].to(grads.dtype), None, None, None, None


def _logits(rows: Tensor, W: Tensor, b: Tensor, cap: float) -> Tensor:
    logits = torch.addmm(b, rows, W)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cap * torch.tanh(logits / cap) if cap > 0 else logits
