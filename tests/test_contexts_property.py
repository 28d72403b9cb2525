"""1,000 random programs of contexts, hooks, exceptions and resets: the right pass is seen, and no hook and no bit is left.

Every program runs on a host and, but for the contexts of tl_spd, on its shadow: a copy whose weights are set to what the
contexts amount to, so that logits, the firing of the user's hooks and the hooks left in the end must be the same on both.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint

import tl_spd as spd
from tests.tiny import host_parameters, host_state, set_weights, tiny_host, tiny_run, tiny_tokens
from tl_spd.run import Run

HOSTS: dict[str, dict[str, Any]] = {
    "shortformer": {"use_split_qkv_input": True},
    "gpt2": {"use_attn_result": True},
    "llama": {"use_hook_mlp_in": True, "ungroup_grouped_query_attention": True, "use_attn_in": True},
    "parallel": {},
}
PROGRAMS, CHUNK = 1000, 50
TOKENS = tiny_tokens(2, 4)


class Boom(Exception):
    """What programs raise."""


@dataclass(eq=False)
class Context:
    """One context that a program has entered.

    ``matrices`` are the weights it amounts to, ``None`` where they differ from token to token. ``removable``: whether it
    has hooks that somebody can remove, and ``broken``: whether somebody did.
    """

    manager: Any
    matrices: dict[str, Tensor] | None
    sites: list[str]
    suppression: bool
    broken: bool = False

    @property
    def removable(self) -> bool:
        return not self.suppression and bool(self.sites)


@functools.cache
def stage(style: str) -> Stage:
    return Stage(style)


class Stage:
    """A host, its shadow and two Runs, used by one program after the other."""

    def __init__(self, style: str):
        self.host = tiny_host(style, n_layers=1, **HOSTS[style])
        self.shadow = copy.deepcopy(self.host)
        self.runs = [tiny_run(self.host, seed=1), tiny_run(self.host, ("blocks.*", "unembed.*"), C=2, seed=2)]
        self.own = {site.name: folded(self.host, site.name) for site in self.runs[0].sites}
        self.points = [*self.host.run_with_cache(TOKENS)[1]]
        self.state = host_state(self.host)


def folded(model: HookedTransformer, name: str) -> Tensor:
    """A weight as the matrix ``[d_in, d_out]``."""
    weight = host_parameters(model)[name].detach().clone()
    if name.endswith(("W_Q", "W_K", "W_V")):
        return torch.cat([*weight], dim=1)
    return torch.cat([*weight], dim=0) if name.endswith("W_O") else weight


class Program:
    """One random program."""

    def __init__(self, stage: Stage, seed: int):
        self.stage, self.random = stage, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.contexts: list[Context] = []
        self.fired: list[tuple[str, str]] = []
        self.handles: list[RemovableHandle] = []
        self.steps: list[str] = []

    def run(self) -> None:
        actions = [
            *[self.enter_decomposed] * 4,
            *[self.enter_suppressed] * 2,
            *[self.leave_one] * 3,
            *[self.call] * 5,
            *[self.call_and_raise] * 2,
            *[self.add_hook] * 2,
            self.add_torch_hook,
            self.reset,
        ]
        for _ in range(self.random.randint(3, 8)):
            action = self.random.choice(actions)
            self.steps.append(action.__name__)
            action()
        while self.contexts:
            self.steps.append("leave_one at the end")
            self.leave_one()
        self.compare_hooks()

    # --- contexts ---

    def enter_decomposed(self) -> None:
        run = self.random.choice(self.stage.runs)
        names = self.random.sample([*run.components], self.random.randint(1, 4))
        kind = self.random.choice(["static", "static", "static", "ones", "importance", "stochastic"])
        masks: Any = kind
        matrices: dict[str, Tensor] | None = None
        if kind in ("static", "ones"):
            given = {name: self.mask(run, name, kind) for name in names}
            masks = given if kind == "static" else kind
            parts = run.components
            matrices = {n: ((parts[n].read * given[n]) @ parts[n].write).detach() for n in names}
        context = spd.decomposed(self.stage.host, run, masks, names, generator=self.generator)
        self.enter(context, matrices, names, suppression=False)

    def mask(self, run: Run, name: str, kind: str) -> Tensor:
        C = run.components[name].C
        ones = torch.ones(C, dtype=torch.float64)
        return ones if kind == "ones" else torch.rand(C, generator=self.generator, dtype=torch.float64)

    def enter_suppressed(self) -> None:
        run = self.random.choice(self.stage.runs)
        names = self.random.sample([*run.components], self.random.randint(1, 3))
        matrices, chosen = {}, {}
        for name in names:
            weight, parts = self.stage.own[name], run.components[name]
            for context in self.contexts:
                if context.suppression and name in context.sites:
                    assert context.matrices is not None
                    weight = context.matrices[name]  # what lies in the host's place now
            chosen[name] = self.random.sample(range(parts.C), self.random.randint(1, parts.C))
            matrices[name] = weight.clone()
            for index in chosen[name]:
                read, write = parts.read[:, index].detach(), parts.write[index].detach()
                read, write = read / read.norm(), write / write.norm()
                matrices[name] -= (read @ weight @ write) * torch.outer(read, write)
        self.enter(spd.suppressed(self.stage.host, run, chosen), matrices, names, suppression=True)

    def enter(self, context: Any, matrices: dict[str, Tensor] | None, names: list[str], suppression: bool) -> None:
        if self.random.random() < 0.3:
            context = half_way(context)
            next(context)
        else:
            context.__enter__()
        self.contexts.append(Context(context, matrices, names, suppression))

    def leave_one(self) -> None:
        if not self.contexts:
            return
        last = self.random.random() < 0.6
        context = self.contexts.pop(-1 if last else self.random.randrange(len(self.contexts)))
        if not hasattr(context.manager, "__exit__"):
            if self.random.random() < 0.5:
                context.manager.close()
            context.manager = None  # garbage collected: the last reference
        elif self.random.random() < 0.3:  # an exception in flight is not replaced
            assert not context.manager.__exit__(Boom, Boom(), None)
        elif context.broken:
            with pytest.raises(spd.HooksRemovedError):
                context.manager.__exit__(None, None, None)
        else:
            assert not context.manager.__exit__(None, None, None)

    # --- calls ---

    def call(self) -> None:
        point = self.random.choice(self.stage.points)
        hook = self.random.choice([self.note("call"), self.alter("call")])
        calls: list[Callable[[HookedTransformer], Any]] = [
            lambda model: model(TOKENS),
            lambda model: model.forward(TOKENS, return_type="loss"),
            lambda model: model.run_with_hooks(TOKENS, fwd_hooks=[(point, hook)]),
            lambda model: within(model, point, hook),
            lambda model: model.run_with_cache(TOKENS, names_filter=[point, "blocks.0.hook_resid_post"]),
            lambda model: model(TOKENS, stop_at_layer=1),
        ]
        self.on_both(self.random.choice(calls))

    def call_and_raise(self) -> None:
        point, kind = self.random.choice(self.stage.points), self.random.choice([Boom, KeyboardInterrupt])

        def boom(value: Tensor, hook: HookPoint) -> None:
            self.fired.append(("boom", str(hook.name)))
            raise kind

        def call(model: HookedTransformer) -> None:
            with pytest.raises(kind):
                model.run_with_hooks(TOKENS, fwd_hooks=[(point, boom)])

        self.on_both(call)

    def on_both(self, call: Callable[[HookedTransformer], Any]) -> None:
        """Make a call on host and shadow: the same results, and the same hooks fire in the same order."""
        self.fired.clear()
        if any(context.broken for context in self.contexts):
            before = host_state(self.stage.host)
            with pytest.raises(spd.HooksRemovedError):
                call(self.stage.host)
            assert self.fired == []
            assert host_state(self.stage.host) == before
            return
        found = call(self.stage.host)
        ours = self.fired.copy()
        self.fired.clear()
        weights = dict(self.stage.own)
        for context in self.contexts:
            weights.update(context.matrices or {})
        set_weights(self.stage.shadow, weights)
        wanted = call(self.stage.shadow)
        assert ours == self.fired
        if all(context.matrices is not None for context in self.contexts):
            assert_close(found, wanted)

    # --- hooks ---

    def note(self, label: str) -> Callable[..., None]:
        return lambda value, hook: self.fired.append((label, hook.name))

    def alter(self, label: str) -> Callable[..., Tensor]:
        def hook(value: Tensor, hook: HookPoint) -> Tensor:
            self.fired.append((label, str(hook.name)))
            return value * 1.1 + 0.01

        return hook

    def add_hook(self) -> None:
        label = f"hook {len(self.steps)}"
        settings = {
            "name": self.random.choice(self.stage.points),
            "hook": self.random.choice([self.note(label), self.alter(label)]),
            "is_permanent": self.random.random() < 0.3,
            "prepend": self.random.random() < 0.3,
        }
        for model in (self.stage.host, self.stage.shadow):
            model.add_hook(**settings)

    def add_torch_hook(self) -> None:
        path = self.random.choice(["blocks.0.attn", "blocks.0.attn.hook_q", "embed", "unembed.hook_out", ""])
        for model in (self.stage.host, self.stage.shadow):
            module, note = model.get_submodule(path), lambda *_: self.fired.append(("torch", path))
            self.handles.append(module.register_forward_hook(note))
            self.handles.append(module.register_forward_pre_hook(note))

    def reset(self) -> None:
        everything = self.random.random() < 0.4
        for model in (self.stage.host, self.stage.shadow):
            model.reset_hooks(including_permanent=everything)
        for context in self.contexts:
            context.broken |= everything and context.removable

    # --- in the end ---

    def compare_hooks(self) -> None:
        host, shadow = self.stage.host, self.stage.shadow
        for (path, ours), theirs in zip(host.named_modules(), shadow.modules(), strict=True):
            for key, table in vars(theirs).items():
                if "hooks" in key and isinstance(table, dict):
                    assert len(vars(ours)[key]) == len(table), (path, key)
            if isinstance(ours, HookPoint):
                for one, other in ((ours.fwd_hooks, theirs.fwd_hooks), (ours.bwd_hooks, theirs.bwd_hooks)):
                    assert [handle.user_hook for handle in one] == [handle.user_hook for handle in other], path
                ids = [handle.hook.id for handle in ours.fwd_hooks]
                assert [key for key in ours._forward_hooks if key in ids] == ids, path
        for handle in self.handles:
            handle.remove()
        for model in (host, shadow):
            model.reset_hooks(including_permanent=True)
        left = host_state(host)
        assert [key for key in left if left[key] != self.stage.state.get(key)] == []
        assert list(left) == list(self.stage.state)


def half_way(context: Any) -> Iterator[None]:
    """A generator that is left in the middle of a context."""
    with context:
        yield
        raise AssertionError("nobody goes on")


def within(model: HookedTransformer, point: str, hook: Callable[..., Any]) -> Tensor:
    with model.hooks(fwd_hooks=[(point, hook)]):
        return model(TOKENS)


def assert_close(found: Any, wanted: Any) -> None:
    """The same values to rounding, also in caches and pairs of results."""
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, Tensor):
        assert torch.allclose(found, wanted, rtol=1e-8, atol=1e-10)
    elif wanted is not None:
        assert list(found) == list(wanted)
        for name in wanted:
            assert_close(found[name], wanted[name])


@pytest.mark.parametrize("first", range(0, PROGRAMS, CHUNK))
def test_random_programs_leave_no_trace(first: int) -> None:
    for seed in range(first, first + CHUNK):
        program = Program(stage([*HOSTS][seed % len(HOSTS)]), seed)
        try:
            program.run()
        except Exception as error:
            raise AssertionError(f"program {seed}: {program.steps}") from error
