"""Random programs of contexts, hooks, interrupts, casts and copies: the right pass is seen, and nothing is left behind.

Every host has a shadow, a plain copy on which tl_spd is never used. All that a user does is done to both; before each call
the shadow's weights are set by hand to what the contexts amount to, so that results, gradients, caches, the firing of the
user's hooks and the hooks left must be the same on both. Each host also has a ledger of what its own weights should be.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint

import tl_spd as spd
from tests.tiny import host_parameters, set_weights, tiny_host, tiny_run, tiny_tokens
from tl_spd.run import Run

SUITE, NIGHTLY, PARTS = 300, 10_000, 10  # programs, and parts of the nightly form
TRIES = 4  # times as many programs at most, until every situation was met
settings.register_profile(
    "contexts", deadline=None, stateful_step_count=15, database=None, print_blob=True, suppress_health_check=()
)
settings.register_profile("contexts-suite", settings.get_profile("contexts"), max_examples=SUITE, derandomize=True)
settings.register_profile(
    "contexts-nightly",
    settings.get_profile("contexts"),
    max_examples=NIGHTLY // PARTS,
    stateful_step_count=20,
    derandomize=False,  # else, where CI is set, every part would be the same programs
    suppress_health_check=[HealthCheck.too_slow],  # 10,000 programs may share a busy machine
)

HOSTS: dict[str, dict[str, Any]] = {
    "shortformer": {"use_split_qkv_input": True},
    "gpt2": {"use_attn_result": True},
    "llama": {"use_hook_mlp_in": True},
    "parallel": {"use_attn_in": True},
}
TOKENS = {"many": tiny_tokens(2, 4), "one": tiny_tokens(1, 1)}
LOOKUPS = ("embed.W_E", "pos_embed.W_pos")
PLACES = st.integers(0, 10**6)  # taken modulo how many things there are to choose from
ENTRIES = st.fixed_dictionaries(
    {
        "kinds": st.lists(
            st.sampled_from(
                ["given", "given", "ones", "importance", "rounded", "stochastic", "suppressed", "suppressed"]
            ),
            min_size=1,
            max_size=2,
        ),
        "manner": st.sampled_from(["by hand", "by hand", "stack", "generator"]),
        "run": st.integers(0, 1),
        "seed": PLACES,
    }
)
SEEN: Counter[str] = Counter()


class Boom(Exception):
    """What programs raise."""


class Stop(BaseException):
    """What programs raise and no ``except Exception`` catches."""


def within(model: HookedTransformer, tokens: Tensor, point: str, hook: Callable[..., Any]) -> Tensor:
    with model.hooks(fwd_hooks=[(point, hook)]):
        return model(tokens)


CALLS: dict[str, Callable[[HookedTransformer, Tensor, str, Callable[..., Any]], Any]] = {
    "logits": lambda model, tokens, *_: model(tokens),
    "loss": lambda model, tokens, *_: model.forward(tokens, return_type="both", loss_per_token=True),
    "run_with_hooks": lambda model, tokens, *hook: model.run_with_hooks(tokens, fwd_hooks=[hook]),
    "hooks that stay": lambda model, tokens, *hook: model.run_with_hooks(
        tokens, fwd_hooks=[hook], reset_hooks_end=False
    ),
    "hooks": within,
    "run_with_cache": lambda model, tokens, *_: model.run_with_cache(tokens),
    "cache of two": lambda model, tokens, p, _: model.run_with_cache(
        tokens, names_filter=[p, "blocks.0.hook_resid_post"]
    ),
    "stop": lambda model, tokens, *_: model(tokens, stop_at_layer=1),
}
SITUATIONS = [
    *(*HOSTS, *CALLS, "gradients", "generate", "generate refused", "thread", "add_hook", "drop_hook"),
    *("by hand", "stack", "generator", "dropped", "out of order", "all left"),
    *("overlapping", "disjoint", "one Run on two hosts"),
    *("the right pass", "the right pass of varying masks", "copy inside", "cast inside", "other weights"),
    *("Boom", "Stop", "KeyboardInterrupt", "importances interrupted", "hooks taken away", "refused for want of hooks"),
]
"""What a long enough set of programs must have met, counted in SEEN."""


ERRORS = st.sampled_from([Boom, Stop, KeyboardInterrupt])


@dataclass(eq=False)
class Context:
    """A context that was entered: the masks that it means, or the matrices that a suppression put in.

    ``broken``: somebody took its hooks away. ``alive`` are references to what must die with it.
    """

    run: Run
    sites: list[str]
    kind: str
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    generator: torch.Generator | None = None
    broken: bool = False

    @property
    def suppression(self) -> bool:
        return self.kind == "suppressed"

    @property
    def varies(self) -> bool:
        """Whether its masks may differ from token to token."""
        return self.kind in ("importance", "rounded", "stochastic")


@dataclass(eq=False)
class Unit:
    """Contexts that are entered and left together, through whatever holds them."""

    holder: Any
    contexts: list[Context]


class Bench:
    """A host, its shadow, a plain copy to ask for importances, the contexts that are entered, and the ledger."""

    def __init__(self, host: HookedTransformer, shadow: HookedTransformer):
        self.host, self.shadow, self.plain = host, shadow, copy.deepcopy(shadow)
        self.plain.reset_hooks(including_permanent=True)
        self.units: list[Unit] = []
        self.contexts: list[Context] = []  # in the order of entering
        self.exact = True  # never cast to float32
        self.met = weakref.WeakSet[Run]()  # Runs that were put into it before
        self.dtype = host.cfg.dtype
        self.own = {name: folded(name, value) for name, value in host_parameters(host).items() if is_site(name)}
        self.objects = [(name, value, value.requires_grad) for name, value in host_parameters(host).items()]
        self.buffers = [id(value) for value in host.buffers()]

    def below(self) -> dict[str, Tensor]:
        """The weights that lie in the host's places now: its own, or the innermost suppression's."""
        weights = dict(self.own)
        for context in self.contexts:
            weights.update(context.matrices)
        return weights

    def static(self, tokens: Tensor) -> bool:
        return tokens.numel() == 1 or not any(context.varies for context in self.contexts)

    def set_shadow(self, tokens: Tensor) -> bool:
        """Set the shadow's weights to what a call with ``tokens`` should compute with; False where none amount to it."""
        static, weights, below = self.static(tokens), dict(self.own), self.below()
        set_weights(self.plain, below)
        for context in self.contexts:
            masks = {name: context.masks.get(name) for name in context.sites}
            if context.varies and static:
                masks = self.masks_of(context, tokens)
            if not context.suppression and (static or not context.varies):
                weights |= {name: masked(context.run, name, mask) for name, mask in masks.items() if mask is not None}
            weights |= context.matrices
        set_weights(self.shadow, weights)
        return static

    def masks_of(self, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """The masks ``[C]`` of a call with one token, importances being those of the weights without any Run."""
        importances = context.run.importances(self.plain, tokens)
        found, copied = {}, torch.Generator()
        if context.generator is not None:
            copied.set_state(context.generator.get_state())
        for site in context.run.sites:  # in forward order, as fresh numbers are drawn
            if site.name in context.sites:
                g = importances[site.name][0, 0].detach()
                if context.kind == "rounded":
                    g = (g > 0.5).to(g)
                elif context.kind == "stochastic":
                    g = g + (1 - g) * torch.rand(1, 1, len(g), generator=copied, dtype=g.dtype)[0, 0]
                found[site.name] = g
        return found

    # --- what must hold after every step ---

    def check(self) -> None:
        suppressed = {name for context in self.contexts for name in context.matrices}
        now, shadows = host_parameters(self.host), host_parameters(self.shadow)
        assert [*now] == [name for name, _, _ in self.objects]
        for name, parameter, flag in self.objects:
            found = now[name]
            assert found.requires_grad == flag, name
            assert found.dtype == self.dtype, name
            assert (found is parameter) == (name not in suppressed), name
            if name not in suppressed:
                wanted = self.own[name] if name in self.own else shadows[name].detach()
                assert torch.equal(folded(name, found) if name in self.own else found.detach(), wanted), name
        assert [id(value) for value in self.host.buffers()] == self.buffers
        for ours, theirs in zip(self.host.buffers(), self.shadow.buffers(), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        self.check_hooks(left=not self.contexts)

    def check_hooks(self, left: bool) -> None:
        """The user's hooks are there in their order; once all contexts are ``left``, nothing else is."""
        for (path, ours), theirs in zip(self.host.named_modules(), self.shadow.modules(), strict=True):
            if isinstance(ours, HookPoint):
                for one, other in ((ours.fwd_hooks, theirs.fwd_hooks), (ours.bwd_hooks, theirs.bwd_hooks)):
                    users = [h for h in one if h.user_hook is None or "tl_spd" not in h.user_hook.__module__]
                    assert [h.user_hook for h in users] == [h.user_hook for h in other], path
                    assert len(users) == len(one) or not left, path
                ids = [handle.hook.id for handle in ours.fwd_hooks]
                assert not left or [key for key in ours._forward_hooks if key in ids] == ids, path
            if left:
                assert set(vars(ours)) - {"forward"} == set(vars(theirs)) - {"forward"}, path
                for key, table in vars(theirs).items():
                    if "hooks" in key and isinstance(table, dict):
                        assert len(vars(ours)[key]) == len(table), (path, key)
        if left:
            assert self.host.forward.__func__ is HookedTransformer.forward
            assert self.host.forward.__self__ is self.host


class Contexts(RuleBasedStateMachine):
    """Programs on up to two hosts of one architecture, with two Runs on overlapping sites."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.benches: list[Bench] = []
        self.fired: list[tuple[str, str]] = []
        self.alive: list[tuple[str, weakref.ref[Any]]] = []  # what must die in the end

    @initialize(
        style=st.sampled_from([*HOSTS]),
        frozen=st.integers(1, 4),
        entered=st.lists(ENTRIES, max_size=4),
        fifo=st.booleans(),
    )
    def begin(self, style: str, frozen: int, entered: list[dict[str, Any]], fifo: bool) -> None:
        """A host of one architecture, in which some parameters get no gradient and some contexts are entered already."""
        prototype, runs, self.points = stage(style)
        SEEN.update(["programs", style])
        self.runs = [copy.deepcopy(run) for run in runs]
        self.made_for = {
            name: folded(name, value) for name, value in host_parameters(prototype).items() if is_site(name)
        }
        host = copy.deepcopy(prototype)
        for index, parameter in enumerate(host.parameters()):
            parameter.requires_grad_(index % frozen == 0)
        self.benches, self.fifo = [Bench(host, copy.deepcopy(host))], fifo
        for entry in entered:
            self.enter(0, entry)

    def bench(self, place: int) -> Bench:
        return self.benches[place % len(self.benches)]

    # --- entering and leaving ---

    @rule(place=PLACES, entry=ENTRIES)
    def enter(self, place: int, entry: dict[str, Any]) -> None:
        kinds, manner, which, seed = entry["kinds"], entry["manner"], entry["run"], entry["seed"]
        bench, stack, contexts = self.bench(place), ExitStack(), []
        for index, kind in enumerate(kinds if manner == "stack" else kinds[:1]):
            manager, context = self.make(bench, kind, self.runs[(which + index) % 2], seed + index)
            with self.warned_of_other_weights(bench, context):
                if manner == "generator":
                    manager = half_way(manager)
                    next(manager)
                elif manner == "by hand":
                    manager.__enter__()
                else:
                    stack.enter_context(manager)
            bench.met.add(context.run)
            bench.contexts.append(context)
            contexts.append(context)
            if not context.suppression:
                installation = vars(bench.host)["forward"].listeners[-1]
                self.alive.append(("installation", weakref.ref(installation)))
                if context.varies:
                    self.alive.append(("twin", weakref.ref(installation.original.twin)))
        bench.units.append(Unit(stack if manner == "stack" else manager, contexts))
        SEEN.update([f"enter {kind}" for kind in kinds] + [manner])
        for first, second in itertools.combinations(bench.contexts, 2):
            if first.run is not second.run:
                SEEN["overlapping" if {*first.sites} & {*second.sites} else "disjoint"] += 1
        for other in self.benches:
            shared = {c.run for c in other.contexts} & {c.run for c in bench.contexts}
            SEEN["one Run on two hosts"] += other is not bench and bool(shared)

    def warned_of_other_weights(self, bench: Bench, context: Context) -> Any:
        """Expects a warning where a Run meets a host for the first time, and its own weights are others in any bit."""
        same = bench.dtype == torch.float64 and all(torch.equal(bench.own[n], self.made_for[n]) for n in context.sites)
        if same or context.run in bench.met:
            return nullcontext()
        SEEN["other weights"] += 1
        return pytest.warns(UserWarning, match="made for other weights")

    def make(self, bench: Bench, kind: str, run: Run, seed: int) -> tuple[Any, Context]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(run.components), generator=generator).tolist()
        names = [[*run.components][index] for index in order[: 1 + seed % 4]]
        if kind == "suppressed":
            chosen = {name: [0, 1] if (seed >> 3) % 2 else [seed % run.components[name].C] for name in names}
            below = bench.below()
            matrices = {name: projected(run, name, indices, below[name]) for name, indices in chosen.items()}
            return spd.suppressed(bench.host, run, chosen), Context(run, names, kind, matrices=matrices)
        context = Context(run, names, kind, generator=generator if kind == "stochastic" else None)
        masks: Any = kind
        if kind in ("given", "ones"):
            context.masks = {name: self.mask(run, name, kind, generator) for name in names}
            masks = context.masks if kind == "given" else kind
        manager = spd.decomposed(bench.host, run, masks, names, generator=context.generator, threshold=0.5)
        return manager, context

    def mask(self, run: Run, name: str, kind: str, generator: torch.Generator) -> Tensor:
        ones = torch.ones(run.components[name].C, dtype=torch.float64)
        return ones if kind == "ones" else torch.rand(len(ones), generator=generator, dtype=torch.float64)

    @rule(
        place=PLACES,
        index=st.sampled_from([-1, 0, 1]),
        how=st.sampled_from(["normally", "normally", "raising", "interrupted", "dropped"]),
    )
    def leave(self, place: int, index: int, how: str) -> None:
        bench = self.bench(place)
        if bench.units:
            self.leave_unit(bench, index % len(bench.units), how)

    def leave_unit(self, bench: Bench, index: int, how: str) -> None:
        SEEN["out of order"] += index != len(bench.units) - 1
        unit = bench.units.pop(index)
        holder, unit.holder = unit.holder, None
        if not hasattr(holder, "__exit__"):
            if how == "normally":
                holder.close()
            else:
                SEEN["dropped"] += 1
            holder = None  # the last reference
        elif how in ("raising", "interrupted"):  # an exception in flight is not replaced
            error = Boom() if how == "raising" else KeyboardInterrupt()
            assert not holder.__exit__(type(error), error, None)
        elif any(context.broken for context in unit.contexts):
            with pytest.raises(spd.HooksRemovedError):
                holder.__exit__(None, None, None)
        else:
            assert not holder.__exit__(None, None, None)
        bench.contexts = [context for context in bench.contexts if context not in unit.contexts]
        still = {name for context in bench.contexts for name in context.matrices}
        for name in {name for context in unit.contexts for name in context.matrices} - still:
            bench.own[name] = bench.own[name].to(bench.dtype)  # what was cast inside is cast on leaving
        SEEN["all left"] += not bench.contexts

    # --- calls ---

    @rule(
        place=PLACES,
        kind=st.sampled_from([*CALLS]),
        size=st.sampled_from([*TOKENS]),
        point=PLACES,
        alters=st.booleans(),
    )
    def call(self, place: int, kind: str, size: str, point: int, alters: bool) -> None:
        self.on_both(self.bench(place), *self.drawn(self.bench(place), kind, size, point, alters))

    def drawn(self, bench: Bench, kind: str, size: str, point: int, alters: bool) -> tuple[Any, Tensor]:
        """One of CALLS, with a hook at one of the hook points."""
        if kind == "hooks that stay" and any(context.broken for context in bench.contexts):
            kind = "hooks"  # the call is refused, and would leave them on the host alone
        hook = (self.alter if alters else self.note)("call")
        where = self.points[point % len(self.points)]
        SEEN[kind] += 1
        return lambda model: CALLS[kind](model, TOKENS[size], where, hook), TOKENS[size]

    def on_both(self, bench: Bench, call: Callable[[HookedTransformer], Any], tokens: Tensor) -> None:
        """Make a call on host and shadow: the same results, and the same hooks fire in the same order, once."""
        self.fired.clear()
        if any(context.broken for context in bench.contexts):
            with pytest.raises(spd.HooksRemovedError):
                call(bench.host)
            assert set(self.fired) <= {("torch", "")}  # a hook in front of the whole model
            call(bench.shadow)  # TransformerLens may take hooks off at the end of a call, so the shadow needs it too
            SEEN["refused for want of hooks"] += 1
            return
        static = bench.set_shadow(tokens)  # before the call, which draws fresh masks
        found = call(bench.host)
        ours = self.fired.copy()
        self.fired.clear()
        wanted = call(bench.shadow)
        assert ours == self.fired
        if static:
            SEEN["the right pass"] += bool(bench.contexts)
            SEEN["the right pass of varying masks"] += any(context.varies for context in bench.contexts)
            assert_close(found, wanted, bench.exact)

    @rule(place=PLACES, size=st.sampled_from([*TOKENS]))
    def gradients(self, place: int, size: str) -> None:
        """Gradients of all that is not decomposed, biases too."""
        bench, tokens = self.bench(place), TOKENS[size]
        if any(hooked.bwd_hooks for hooked in bench.host.hook_dict.values()):
            return
        winners = {name: context for context in bench.contexts for name in context.sites}
        skipped = {name for name, context in winners.items() if not context.suppression}

        def call(model: HookedTransformer) -> dict[str, Tensor]:
            loss = model(tokens).square().mean()
            chosen = {n: p for n, p in host_parameters(model).items() if p.requires_grad and n not in skipped}
            found = torch.autograd.grad(loss, [*chosen.values()], allow_unused=True, materialize_grads=True)
            return dict(zip(chosen, found, strict=True))

        SEEN["gradients"] += 1
        self.on_both(bench, call, tokens)

    @rule(
        place=PLACES,
        cached=st.booleans(),
        point=PLACES,
        alters=st.booleans(),
        raises=st.sampled_from([None, None, 1, 2]),
    )
    def generate(self, place: int, cached: bool, point: int, alters: bool, raises: int | None) -> None:
        bench, where, tokens = self.bench(place), self.points[point % len(self.points)], TOKENS["many"][:, :2]
        lookups = any(name in LOOKUPS for c in bench.contexts if not c.suppression for name in c.sites)
        hook = self.raising(KeyboardInterrupt, raises) if raises else (self.alter if alters else self.note)("call")
        cached = (
            cached and bench.host.cfg.positional_embedding_type != "shortformer"
        )  # TransformerLens fails there itself

        def call(model: HookedTransformer) -> Any:
            with model.hooks(fwd_hooks=[(where, hook())] if raises else [(where, hook)]):
                return model.generate(
                    tokens, 2, verbose=False, stop_at_eos=False, do_sample=False, use_past_kv_cache=cached
                )

        def caught(model: HookedTransformer) -> Any:
            try:
                return call(model)
            except KeyboardInterrupt:
                return "interrupted"

        if lookups or any(context.broken for context in bench.contexts):
            with pytest.raises((RuntimeError, KeyboardInterrupt) if raises else RuntimeError):
                call(bench.host)
            caught(bench.shadow)
            SEEN["generate refused"] += lookups
        else:
            SEEN["generate"] += 1
            self.on_both(bench, caught, tokens)

    @rule(place=PLACES, error=ERRORS, size=st.sampled_from([*TOKENS]), point=PLACES, cache=st.booleans())
    def interrupt(self, place: int, error: type[BaseException], size: str, point: int, cache: bool) -> None:
        """A user's hook raises in the middle of a forward."""
        where = self.points[point % len(self.points)]

        def call(model: HookedTransformer) -> None:
            boom = self.raising(error, 1)()
            with pytest.raises(error), model.hooks(fwd_hooks=[(where, boom)]):
                (model.run_with_cache if cache else model)(TOKENS[size])

        bench = self.bench(place)
        if not any(context.broken for context in bench.contexts):
            SEEN[error.__name__] += bool(bench.contexts)
            self.on_both(bench, call, TOKENS[size])

    @rule(place=PLACES, error=ERRORS, size=st.sampled_from([*TOKENS]))
    def interrupt_importances(self, place: int, error: type[BaseException], size: str) -> None:
        """The extra pass for importances is interrupted, before anything of the user's runs."""
        bench = self.bench(place)
        varying = [context for context in bench.contexts if context.varies]
        if not varying or any(context.broken for context in bench.contexts):
            return

        def boom(*_: Any) -> None:
            raise error

        handle = varying[-1].run.functions[varying[-1].sites[0]].register_forward_pre_hook(boom)
        self.fired.clear()
        with pytest.raises(error):
            bench.host(TOKENS[size])
        handle.remove()
        assert set(self.fired) <= {("torch", "")}  # a hook in front of the whole model
        SEEN["importances interrupted"] += 1

    @rule(
        place=PLACES,
        kind=st.sampled_from([*CALLS]),
        size=st.sampled_from([*TOKENS]),
        point=PLACES,
        alters=st.booleans(),
    )
    def beside_a_thread(self, place: int, kind: str, size: str, point: int, alters: bool) -> None:
        """A call, while a thread enters, runs and leaves another model."""
        model, run, masks, wanted = other_stage()
        found: list[Any] = []

        def work() -> None:
            try:
                for _ in range(2):
                    with spd.decomposed(model, run, masks), spd.suppressed(model, run, {"blocks.0.attn.W_O": [0]}):
                        found.append(model.run_with_cache(TOKENS["many"])[0])
                found.append(model(TOKENS["many"]))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            self.on_both(self.bench(place), *self.drawn(self.bench(place), kind, size, point, alters))
        finally:
            thread.join()
        assert_close(tuple(found), wanted, exact=True)
        SEEN["thread"] += 1

    # --- hooks ---

    def note(self, label: str) -> Callable[..., None]:
        return lambda value, hook: self.fired.append((label, hook.name))

    def alter(self, label: str) -> Callable[..., Tensor]:
        def hook(value: Tensor, hook: HookPoint) -> Tensor:
            self.fired.append((label, str(hook.name)))
            return value * 1.1 + 0.01

        return hook

    def raising(self, error: type[BaseException], times: int) -> Callable[[], Callable[..., None]]:
        """A maker of hooks that raise when they are reached for the ``times``-th time."""

        def make() -> Callable[..., None]:
            reached = Counter[str]()

            def hook(value: Tensor, hook: HookPoint) -> None:
                self.fired.append(("boom", str(hook.name)))
                reached["times"] += 1
                if reached["times"] == times:
                    raise error

            return hook

        return make

    @rule(
        place=PLACES,
        point=PLACES,
        alters=st.booleans(),
        permanent=st.booleans(),
        prepend=st.booleans(),
        direction=st.sampled_from(["fwd", "fwd", "fwd", "bwd"]),
    )
    def add_hook(self, place: int, point: int, alters: bool, permanent: bool, prepend: bool, direction: str) -> None:
        label = f"hook {SEEN['add_hook']}"
        hook = self.alter(label) if alters and direction == "fwd" else self.note(label)
        where = self.points[point % len(self.points)]
        bench = self.bench(place)
        for model in (bench.host, bench.shadow):
            model.add_hook(where, hook, dir=direction, is_permanent=permanent, prepend=prepend)
        SEEN["add_hook"] += 1

    @rule(place=PLACES, index=PLACES)
    def drop_hook(self, place: int, index: int) -> None:
        """The user takes one of their own hooks out."""
        bench = self.bench(place)
        users = [(name, h.user_hook) for name, p in bench.shadow.hook_dict.items() for h in p.fwd_hooks + p.bwd_hooks]
        if not users:
            return
        name, hook = users[index % len(users)]
        for model in (bench.host, bench.shadow):
            point = model.hook_dict[name]
            for handles in (point.fwd_hooks, point.bwd_hooks):
                for handle in [handle for handle in handles if handle.user_hook is hook]:
                    handle.hook.remove()
                    handles[:] = [other for other in handles if other is not handle]
        SEEN["drop_hook"] += 1

    @rule(
        place=PLACES, path=st.sampled_from(["blocks.0.attn", "blocks.0.attn.hook_q", "embed", "unembed.hook_out", ""])
    )
    def add_torch_hook(self, place: int, path: str) -> None:
        bench = self.bench(place)
        for model in (bench.host, bench.shadow):
            module, note = model.get_submodule(path), lambda *_: self.fired.append(("torch", path))
            module.register_forward_hook(note)
            module.register_forward_pre_hook(note)

    @rule(place=PLACES, everything=st.sampled_from([False, False, True]), clear=st.booleans())
    def reset(self, place: int, everything: bool, clear: bool) -> None:
        bench = self.bench(place)
        for model in (bench.host, bench.shadow):
            model.reset_hooks(clear_contexts=clear, including_permanent=everything)
        for context in bench.contexts:
            context.broken |= everything and not context.suppression
        SEEN["hooks taken away"] += everything and bool(bench.contexts)
        if everything:
            self.on_both(bench, lambda model: model(TOKENS["one"]), TOKENS["one"])  # refused, or nothing was ours

    # --- the host itself ---

    @rule(place=PLACES, dtype=st.sampled_from([torch.float32, torch.float64]))
    def cast(self, place: int, dtype: torch.dtype) -> None:
        bench = self.bench(place)
        for model in (bench.host, bench.shadow, bench.plain):
            model.to(dtype)
        suppressed = {name for context in bench.contexts for name in context.matrices}
        bench.own = {name: own if name in suppressed else own.to(dtype) for name, own in bench.own.items()}
        bench.dtype, bench.exact = dtype, bench.exact and dtype == torch.float64
        bench.buffers = [id(value) for value in bench.host.buffers()]
        SEEN["cast inside"] += bool(bench.contexts)

    @precondition(lambda self: len(self.benches) == 1 or not all(bench.contexts for bench in self.benches))
    @rule(place=PLACES)
    def copy(self, place: int) -> None:
        """A copy is a host of its own: suppressed where the host is, without its Runs, with the user's hooks."""
        bench = self.bench(place)
        host, shadow = copy.deepcopy(bench.host), copy.deepcopy(bench.shadow)
        below = bench.below()
        set_weights(shadow, below)
        copied = Bench(host, shadow)
        copied.exact, copied.dtype = bench.exact, bench.dtype
        assert_close(copied.own, {name: below[name].to(bench.dtype) for name in copied.own}, bench.exact)
        assert {type(parameter) for parameter in host.parameters()} == {torch.nn.Parameter}
        shared = {value.data_ptr() for value in host.parameters()} & {
            value.data_ptr() for value in bench.host.parameters()
        }
        assert not shared
        self.alive.append(("copy", weakref.ref(host)))
        SEEN["copy inside"] += bool(bench.contexts)
        kept = [other for other in self.benches if other is bench or other.contexts]
        self.benches = [*kept[:1], copied] if len(kept) < 2 else [other for other in kept if other.contexts] + [copied]

    # --- what must hold ---

    @invariant()
    def nothing_else_has_changed(self) -> None:
        for bench in self.benches:
            bench.check()

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # the program has failed, and its traceback keeps all alive
        for index, bench in enumerate(self.benches):
            while bench.units:
                self.leave_unit(bench, 0 if self.fifo else len(bench.units) - 1, "normally")
            bench.check()
            self.on_both(bench, lambda model: model.run_with_cache(TOKENS["many"]), TOKENS["many"])
            self.alive.append((f"host {index}", weakref.ref(bench.host)))
        runs = [weakref.ref(run) for run in self.runs]
        self.runs.clear()
        gc.collect()
        assert [reference() for reference in runs] == [None, None]
        assert [what for what, gone in self.alive if gone() and what in ("twin", "installation")] == []
        self.benches.clear()
        del bench
        gc.collect()
        assert [what for what, gone in self.alive if gone()] == []
        gc.freeze()  # what hypothesis keeps need not be looked through again


# --- stages ----------------------------------------------------------------------------------------------------------


@functools.cache
def stage(style: str) -> tuple[HookedTransformer, list[Run], list[str]]:
    """A host, two Runs on overlapping sites, and the names of the hook points."""
    host = tiny_host(style, n_layers=1, **HOSTS[style])
    runs = [tiny_run(host, seed=1), tiny_run(host, ("blocks.*", "unembed.*"), C=2, seed=2)]
    return host, runs, [*host.run_with_cache(TOKENS["many"])[1]]


@functools.cache
def other_stage() -> tuple[HookedTransformer, Run, dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Another model, a Run and masks for it, and its logits inside (twice) and outside."""
    model = tiny_host("parallel", seed=5, n_layers=1)
    run, changed = tiny_run(model, seed=6), copy.deepcopy(model)
    masks = {name: torch.linspace(0, 1, 3, dtype=torch.float64) for name in ("blocks.0.attn.W_Q", "blocks.0.mlp.W_in")}
    matrices = {name: masked(run, name, mask) for name, mask in masks.items()}
    name = "blocks.0.attn.W_O"
    matrices[name] = projected(run, name, [0], folded(name, host_parameters(model)[name]))
    set_weights(changed, matrices)
    inside = changed(TOKENS["many"])
    return model, run, masks, (inside, inside, model(TOKENS["many"]))


def is_site(name: str) -> bool:
    return ".W_" in name


def folded(name: str, weight: Tensor) -> Tensor:
    """A weight as the matrix ``[d_in, d_out]``, a copy."""
    weight = weight.detach().clone()
    if name.endswith(("W_Q", "W_K", "W_V")):
        return torch.cat([*weight], dim=1)
    return torch.cat([*weight], dim=0) if name.endswith("W_O") else weight


def masked(run: Run, name: str, mask: Tensor) -> Tensor:
    """The matrix that a masked site multiplies with."""
    return ((run.components[name].read * mask) @ run.components[name].write).detach()


def projected(run: Run, name: str, indices: list[int], weight: Tensor) -> Tensor:
    """``weight`` without its parts along the directions of ``indices``."""
    result = weight = weight.double()
    for index in indices:
        read, write = run.components[name].read[:, index].detach(), run.components[name].write[index].detach()
        read, write = read / read.norm(), write / write.norm()
        result = result - (read @ weight @ write) * torch.outer(read, write)
    return result


def half_way(context: Any) -> Iterator[None]:
    """A generator that is left in the middle of a context."""
    with context:
        yield
        raise AssertionError("nobody goes on")


def assert_close(found: Any, wanted: Any, exact: bool) -> None:
    """The same values to rounding, also in caches and pairs of results."""
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, exact)
    elif isinstance(wanted, Tensor):
        assert isinstance(found, Tensor), found
        assert found.dtype == wanted.dtype
        scale = (
            float(wanted.detach().abs().max()) if wanted.numel() and wanted.is_floating_point() and not exact else 1.0
        )
        rtol, atol = (1e-8, 1e-10) if exact else (1e-3, 1e-3 * max(1.0, scale if scale < 1e30 else 1.0))
        assert torch.allclose(found, wanted, rtol=rtol, atol=atol), float((found - wanted).detach().abs().max())
    elif isinstance(wanted, str) or wanted is None:
        assert found == wanted
    else:
        assert list(found) == list(wanted)
        for name in wanted:
            assert_close(found[name], wanted[name], exact)


# --- tests -----------------------------------------------------------------------------------------------------------


def run_programs(profile: str) -> list[str]:
    """Run as many programs as the profile has, each with its own assertions; returns the situations that none met."""
    SEEN.clear()
    for style in HOSTS:
        stage(style)
    other_stage()
    gc.collect()
    gc.freeze()
    try:
        for number in range(TRIES):  # which programs there are depends on hypothesis's release and the modules loaded
            programs = seeded(number)(lambda: Contexts()) if number else Contexts
            run_state_machine_as_test(programs, settings=settings.get_profile(profile))
            if all(SEEN[situation] for situation in SITUATIONS):
                break
    finally:
        gc.unfreeze()
    assert SEEN["programs"] >= settings.get_profile(profile).max_examples
    return [situation for situation in SITUATIONS if not SEEN[situation]]


def test_random_programs() -> None:
    assert run_programs("contexts-suite") == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_programs(part: int) -> None:
    assert run_programs("contexts-nightly") == []
