"""Wiring: how the input of a site is seen and its output replaced, and the twin on which the original model runs.

The second half of what knows TransformerLens (names come from ``sites``). Three ways of seeing inputs, one of writing:

1. :class:`Reader` watches a host through hooks on its modules: exact under every configuration.
2. :func:`read_hooks` does the same with hook points alone, for ``model.run_with_hooks``. The norm's gain and bias, and
   shortformer positions, are applied again, because no hook point shows the value behind them.
3. :func:`write_hook` replaces the output at the hook point right behind the matmul.
4. :func:`make_twin` copies a host's structure without its hooks; it shares the weights' storage and gets no gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from tl_spd.hooks import HookSet, removing
from tl_spd.sites import (
    Hook,
    HookedTransformer,
    HookPoint,
    KeyValueCache,
    Site,
    apply_softcap,
    gather_positions,
    get_attention_mask,
    weight,
)

HEAD_INPUTS = {"W_Q": "query_input", "W_K": "key_input", "W_V": "value_input"}


class Reader:
    """Watches a host and keeps the latest input of each site in ``inputs`` (``[batch, pos, d_in]`` or indices).

    Q, K, V inputs have a head axis where the host splits them. ``remove`` takes exactly these hooks away.

    Args:
        hooks: where the hooks are noted, for who must take them away even if this is cut short.
        keep: takes a site's name and its input, in place of ``inputs``.
    """

    def __init__(
        self,
        model: HookedTransformer,
        sites: Sequence[Site],
        hooks: HookSet | None = None,
        keep: Callable[[str, Tensor], None] | None = None,
    ):
        self.inputs: dict[str, Tensor] = {}
        self.hooks, self.keep = hooks or HookSet(), keep or self.inputs.__setitem__
        modules: dict[str, list[Site]] = {}
        for site in sites:
            modules.setdefault(site.name.rpartition(".")[0], []).append(site)
        for path, here in modules.items():
            self._watch(model, path, here)

    def _watch(self, model: HookedTransformer, path: str, here: list[Site]) -> None:
        module = model.get_submodule(path)
        late = {"W_O": "hook_z", "W_out": "hook_post", "W_U": "hook_in"}
        if early := [site for site in here if site.kind not in late]:
            self.hooks.put(
                module.register_forward_pre_hook,
                lambda reached, args, kwargs: self._at_entry(module, early, reached, args, kwargs),
                with_kwargs=True,
            )
        for site in here:
            if site.kind in late:
                self._watch_last(getattr(module, late[site.kind]), site)

    def _watch_last(self, point: HookPoint, site: Site) -> None:
        read = self.hooks.put(
            point.register_forward_hook, lambda reached, _, value: self._at_last(point, site, reached, value)
        )
        last = lambda reached, _: reached._forward_hooks.move_to_end(read.id)  # noqa: E731
        self.hooks.put(point.register_forward_pre_hook, last)  # a hook added later may change the value: read behind it

    def _at_entry(self, own: nn.Module, sites: list[Site], reached: nn.Module, args: tuple, kwargs: dict) -> None:
        if reached is own:  # and not that of a deep copy of the host, which takes its hooks along
            for site in sites:
                self.keep(site.name, _entry_input(site, args, kwargs))

    def _at_last(self, own: nn.Module, site: Site, reached: nn.Module, value: Tensor) -> None:
        if reached is own:
            if reached._backward_hooks:  # they see the masked pass, which branches off here
                watch = BackwardHook(reached, [*reached._backward_hooks.values()], [])
                value = watch.setup_output_hook(watch.setup_input_hook((value,))[0])
            self.keep(site.name, value.flatten(2))

    def remove(self) -> None:
        """Take the hooks away and forget the inputs."""
        self.hooks.remove()
        self.inputs.clear()


def _entry_input(site: Site, args: tuple, kwargs: dict) -> Tensor:
    if site.kind in HEAD_INPUTS:
        return kwargs[HEAD_INPUTS[site.kind]]
    if site.kind == "W_pos":
        tokens, cached, mask = (*args, 0, None)[:3]
        return gather_positions(kwargs.get("past_kv_pos_offset", cached), kwargs.get("attention_mask", mask), tokens)
    return args[0]


def read_hooks(
    model: HookedTransformer, sites: Sequence[Site], inputs: dict[str, Tensor], lookups: dict[str, Tensor]
) -> list[Hook]:
    """Hook functions that keep the input of each of ``sites`` in ``inputs``, through hook points alone.

    ``lookups`` gives the indices of embedding sites, which no hook point shows.
    """
    missing = [site.name for site in sites if site.lookup and site.name not in lookups]
    if missing:
        raise ValueError(f"No indices for {missing}; use importances of these tokens, run.importances(model, tokens).")
    inputs.update({site.name: lookups[site.name] for site in sites if site.lookup})
    hooks: list[Hook] = []
    for layer in dict.fromkeys(site.layer for site in sites if not site.lookup):
        here = {site.kind: site for site in sites if site.layer == layer}
        if attention := {kind: here[kind] for kind in HEAD_INPUTS if kind in here}:
            hooks += _attention_reads(model, layer, attention, inputs)
        if mlp := [here[kind] for kind in ("W_gate", "W_in") if kind in here]:
            hooks += _mlp_reads(model, layer, mlp, inputs)
        for kind, point in (("W_O", "attn.hook_z"), ("W_out", "mlp.hook_post")):
            if kind in here:
                hooks.append((f"blocks.{layer}.{point}", _keep(inputs, [here[kind]])))
        if "W_U" in here:
            hooks.append(("unembed.hook_in", _keep(inputs, [here["W_U"]])))
    return hooks


def _keep(inputs: dict[str, Tensor], sites: Sequence[Site], norm: Any = None) -> Callable[..., None]:
    return lambda value, hook: _kept(inputs, sites, norm, value)


def _kept(inputs: dict[str, Tensor], sites: Sequence[Site], norm: Any, value: Tensor) -> None:
    if norm is not None:  # hook_normalized shows the value before the norm's own gain and bias
        value = value.to(norm.cfg.dtype)
        value = value * norm.w if hasattr(norm, "w") else value
        value = value + norm.b if hasattr(norm, "b") else value
    inputs.update({site.name: value.flatten(2) if site.kind == "W_O" else value for site in sites})


def _restart(turn: list[str]) -> None:
    turn[:] = HEAD_INPUTS


def _kept_in_turn(inputs: dict[str, Tensor], here: dict[str, Site], turn: list[str], norm: Any, value: Tensor) -> None:
    kind = turn.pop(0)  # the block norms its attention's three inputs in the order Q, K, V
    _kept(inputs, [here[kind]] if kind in here else [], norm, value)


def _attention_reads(
    model: HookedTransformer, layer: int, here: dict[str, Site], inputs: dict[str, Tensor]
) -> list[Hook]:
    block, prefix = model.blocks[layer], f"blocks.{layer}."
    hooks: list[Hook] = [(prefix + "hook_resid_pre", _keep(inputs, list(here.values())))]
    if model.cfg.use_attn_in:
        hooks.append((prefix + "hook_attn_in", _keep(inputs, list(here.values()))))
    if model.cfg.use_split_qkv_input:
        hooks += [(f"{prefix}hook_{kind[-1].lower()}_input", _keep(inputs, [site])) for kind, site in here.items()]
    if hasattr(block.ln1, "hook_normalized"):
        turn: list[str] = []
        hooks += [
            (prefix + "hook_resid_pre", lambda value, hook: _restart(turn)),
            (prefix + "ln1.hook_normalized", lambda value, hook: _kept_in_turn(inputs, here, turn, block.ln1, value)),
        ]
    if model.cfg.positional_embedding_type == "shortformer":
        hooks += _shortformer_reads(prefix, here, inputs)
    return hooks


def _shortformer_reads(prefix: str, here: dict[str, Site], inputs: dict[str, Tensor]) -> list[Hook]:
    seen: dict[str, Tensor] = {}
    added = [site for site in here.values() if site.kind != "W_V"]
    adds = [(f"{prefix}attn.hook_{site.kind[-1].lower()}", _add_positions(site, inputs, seen)) for site in added]
    return [("hook_pos_embed", lambda value, hook: seen.update(now=value)), *adds]


def _add_positions(site: Site, inputs: dict[str, Tensor], seen: dict[str, Tensor]) -> Callable[..., None]:
    return lambda value, hook: inputs.update({site.name: _with_positions(inputs[site.name], seen.get("now"))})


def _with_positions(x: Tensor, positions: Tensor | None) -> Tensor:
    if positions is None:
        raise RuntimeError("Shortformer positions were not seen: start the pass from tokens, not at a layer.")
    return x + (positions if x.ndim == 3 else positions[:, :, None])


def _mlp_reads(model: HookedTransformer, layer: int, here: list[Site], inputs: dict[str, Tensor]) -> list[Hook]:
    block, prefix = model.blocks[layer], f"blocks.{layer}."
    if hasattr(block.ln2, "hook_normalized"):
        return [(prefix + "ln2.hook_normalized", _keep(inputs, here, block.ln2))]
    hooks: list[Hook] = [
        (prefix + ("hook_resid_pre" if model.cfg.parallel_attn_mlp else "hook_resid_mid"), _keep(inputs, here))
    ]
    if model.cfg.use_hook_mlp_in:
        hooks.append((prefix + "hook_mlp_in", _keep(inputs, here)))
    return hooks


def write_point(model: HookedTransformer, site: Site) -> str:
    """The hook point that shows the output of ``site``'s matmul with its bias (before the bias for ``hook_result``)."""
    per_head = model.cfg.use_attn_result
    names = {
        "W_E": "hook_embed",
        "W_pos": "hook_pos_embed",
        "W_O": "attn.hook_result" if per_head else "hook_attn_out",
        "W_gate": "mlp.hook_pre",
        "W_in": "mlp.hook_pre_linear" if model.cfg.gated_mlp else "mlp.hook_pre",
        "W_out": "hook_mlp_out",
        "W_U": "unembed.hook_out",
    }
    point = names.get(site.kind, f"attn.hook_{site.kind[-1].lower()}")
    return f"blocks.{site.layer}.{point}" if site.name.startswith("blocks.") else point


def write_hook(
    model: HookedTransformer, site: Site, produce: Callable[[Tensor], Tensor | None]
) -> tuple[str, Callable[..., Tensor | None]]:
    """A hook function that replaces ``site``'s output ``y`` by ``produce(y)``, or leaves it where that is None."""
    return write_point(model, site), lambda value, hook: produce(value)


def put_writer(hooks: HookSet, twin: HookedTransformer, site: Site, produce: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``produce`` write a site's output on a twin, through ``hooks``."""
    name, function = write_hook(twin, site, produce)
    hooks.put(twin.hook_dict[name].register_forward_hook, lambda point, _, value: function(value, hook=point))


# --- the original model ----------------------------------------------------------------------------------------------


def make_twin(model: HookedTransformer, keep_flags: bool = False) -> HookedTransformer:
    """A copy of ``model``'s structure: no hooks, the same weight storage, no gradients, flags that add hook points off."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= {id(value): nn.Parameter(value.detach(), requires_grad=False) for value in model.parameters()}
    for module in model.modules():
        for table, value in vars(module).items():
            if (table.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) or table == "ctx") and value:
                memo[id(value)] = type(value)()
    cfg = copy.copy(model.cfg)
    if not keep_flags:
        cfg.use_split_qkv_input = cfg.use_attn_in = cfg.use_attn_result = cfg.use_hook_mlp_in = False
    memo |= {id(model.cfg): cfg, id(model.tokenizer): model.tokenizer}
    twin = copy.deepcopy(model, memo)
    vars(twin).pop("forward", None)  # what stands in for the method while a Run is installed
    return twin


def sync_twin(twin: HookedTransformer, model: HookedTransformer) -> None:
    """Let ``twin`` see the weights that ``model`` has now (after a swap, a cast or a move)."""
    twin.cfg.dtype, twin.cfg.device = model.cfg.dtype, model.cfg.device
    twin.tokenizer = model.tokenizer
    for ours, theirs in zip(twin.modules(), model.modules(), strict=True):
        for key, value in theirs._parameters.items():
            if value is not None and ours._parameters[key].data_ptr() != value.data_ptr():  # type: ignore[union-attr]
                ours._parameters[key] = nn.Parameter(value.detach(), requires_grad=False)
        ours._buffers.update(theirs._buffers)
        ours.training = theirs.training


@dataclass(frozen=True)
class Start:
    """The state with which block ``layer`` of a pass begins: what a stacked pass needs to join there."""

    resid: Float[Tensor, "batch pos d_model"]
    shortformer_positions: Float[Tensor, "batch pos d_model"] | None
    attention_mask: Int[Tensor, "batch offset_pos"] | None


def watch_starts(model: HookedTransformer, starts: dict[int, Start], hooks: HookSet) -> None:
    """Keep in ``starts`` what each block is given, through ``hooks``."""
    for layer, block in enumerate(model.blocks):
        hooks.put(block.register_forward_pre_hook, partial(_keep_start, starts, layer), with_kwargs=True)


def _keep_start(starts: dict[int, Start], layer: int, _: nn.Module, args: tuple, kwargs: dict) -> None:
    starts[layer] = Start(args[0], kwargs.get("shortformer_pos_embed"), kwargs.get("attention_mask"))


@dataclass(frozen=True)
class Observation:
    """What one pass of the original model showed.

    Attributes:
        inputs: site name -> input ``[batch, pos, d_in]``, or indices ``[batch, pos]`` for look-ups.
        rows: look-up site -> the host's row at each index, ``[batch, pos, d_out]``.
        starts: layer -> the state with which the block began.
        output: what the pass returned.
    """

    inputs: dict[str, Tensor]
    rows: dict[str, Tensor]
    starts: dict[int, Start]
    output: Any


@torch.no_grad()
def observe(twin: HookedTransformer, sites: Sequence[Site], *args: Any, **kwargs: Any) -> Observation:
    """Run ``twin(*args, **kwargs)`` without gradients and keep the inputs of ``sites`` and of every block.

    Logits are computed only where a site's input is seen on the way to them.
    """
    if kwargs.get("stop_at_layer") is None:
        kwargs["return_type"] = "logits" if any(site.kind == "W_U" for site in sites) else None
    starts = dict[int, Start]()
    with removing(HookSet()) as hooks:
        inputs = Reader(twin, sites, hooks).inputs
        watch_starts(twin, starts, hooks)
        output = twin(*args, **kwargs)
    rows = {
        site.name: weight(twin, site)[inputs[site.name].clamp(min=0)]
        for site in sites
        if site.lookup and site.name in inputs
    }
    return Observation(inputs, rows, starts, output)


def padding_mask(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    side: str | None = None,
) -> Bool[Tensor, "batch pos"] | None:
    """Which places hold real tokens: as given, else as the tokenizer tells (padding on ``side``); None where all do."""
    if attention_mask is None and model.tokenizer is not None and tokens.shape[1] > 0:
        attention_mask = get_attention_mask(model.tokenizer, tokens, bool(model.cfg.default_prepend_bos), side)
    if attention_mask is None or bool(attention_mask.bool().all()):
        return None
    return attention_mask.bool().to(tokens.device)


def final_residual(model: HookedTransformer, resid: Float[Tensor, "batch pos d_model"]) -> Tensor:
    """What the unembedding reads: the last residual stream behind the final norm."""
    return model.ln_final(resid) if model.cfg.normalization_type is not None else resid


def softcap(model: HookedTransformer) -> float:
    """The cap of ``cap * tanh(logits / cap)`` on the host's logits; not positive where there is none."""
    return model.cfg.output_logits_soft_cap


def new_cache(model: HookedTransformer, batch: int, device: torch.device) -> KeyValueCache:
    """An empty key-value cache for ``model``."""
    return KeyValueCache.init_cache(model.cfg, device, batch)


def capped(model: HookedTransformer, logits: Tensor) -> Tensor:
    """The host's logits behind its soft cap."""
    return apply_softcap(logits, model.cfg.output_logits_soft_cap)


def embed(
    model: HookedTransformer, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state with which block 0 begins: residual stream, shortformer positions, resolved attention mask."""
    resid, _, positions, mask = model.input_to_embed(tokens, attention_mask=attention_mask)
    return resid, positions, mask


def unembedding(model: HookedTransformer) -> tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, "d_vocab"]]:
    """The unembedding matrix and its bias, detached."""
    return model.unembed.W_U.detach(), model.unembed.b_U.detach()


def attention_patterns(
    model: HookedTransformer, tokens: Int[Tensor, "batch pos"]
) -> dict[int, Float[Tensor, "batch head query key"]]:
    """The attention pattern of every layer on ``tokens``, as the model computes it now."""
    _, cache = model.run_with_cache(tokens, return_type=None, names_filter=lambda name: name.endswith("hook_pattern"))
    return {layer: cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)}
