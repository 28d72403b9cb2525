"""An interrupt at any moment leaves the host as it was, no folder locked, and a training that can be resumed.

Each case is run again and again, with a KeyboardInterrupt in front of one line that it reaches in tl_spd and contextlib: of each
line the first two times and the last time that it is reached; in the nightly forms every time, and every instruction. What is
compared is the host's state before: hooks in their order, tensors by object and bits, flags, ``forward``; and a pass's bits. Of
a folder the operating system says whether it is locked, and a training is compared with one that nobody interrupted.

Not interrupted are lines of other packages and of the test itself, which stands for the user. The interrupt's traceback is let
go before the state is looked at.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

import tl_spd as spd
from tests.tiny import Same, host_state, same_runs, tiny_decompose, tiny_host, tiny_run, tiny_tokens
from tl_spd import storage
from tl_spd.hooks import HookSet, removing
from tl_spd.run import Run
from tl_spd.settings import make_settings
from tl_spd.train import _Trainer
from tl_spd.wiring import watch_starts

PACKAGE = Path(spd.__file__).parent
ROOMS = (str(PACKAGE), contextlib.__file__)

if sys.platform != "win32":
    import fcntl

TOKENS = tiny_tokens(1, 3)
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
Stop = Callable[[Callable[[], object]], object]
Case = Iterator[Callable[[Stop], object]]


class Boom(Exception):
    """What a block inside a context raises."""


class Interrupter:
    """Runs a function with an interrupt when it reaches its ``at``-th line or opcode in ``rooms`` (0: none), and notes these."""

    def __init__(self, by: str, at: int = 0, rooms: tuple[str, ...] = ROOMS):
        self.by, self.at, self.rooms = by, at, rooms
        self.reached: list[tuple[str, int]] = []
        self.run: Run | None = None
        """What the interrupt carried when it came out."""

    def __call__(self, program: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            program()
        except KeyboardInterrupt as stop:
            assert self.at > 0
            self.run = getattr(stop, "run", None)
        finally:
            sys.settrace(before)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.rooms):
            return None
        frame.f_trace_opcodes = self.by == "opcode"
        if event == self.by:
            self.reached.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.reached) == self.at:
                raise KeyboardInterrupt
        return self.trace


def state(model: HookedTransformer) -> dict[str, Any]:
    return host_state(model) | {"forward": Same(vars(model).get("forward"))}


def moments(reached: list[tuple[str, int]], each: bool) -> list[int]:
    """Which of the places ``reached`` are interrupted, counted from 1: each, or of every place the first two and the last."""
    times: dict[tuple[str, int], list[int]] = {}
    for at, place in enumerate(reached, 1):
        times.setdefault(place, []).append(at)
    return sorted({at for those in times.values() for at in (those if each else (*those[:2], those[-1]))})


def go(program: Callable[[], object]) -> None:
    program()


def through(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def through_raising(context: AbstractContextManager[Any]) -> None:
    with contextlib.suppress(Boom), context:
        raise Boom


# --- what is interrupted: inside the contexts of a case, by `stop`, as often as there are lines ------------------------


def masked(model: HookedTransformer, run: Run) -> AbstractContextManager[Any]:
    masks = {name: torch.tensor(0.5, dtype=torch.float64) for name in ("blocks.0.attn.W_Q", "blocks.0.attn.W_O")}
    return spd.decomposed(model, run, masks)


def edited(model: HookedTransformer, run: Run) -> AbstractContextManager[Any]:
    return spd.suppressed(model, run, {"blocks.0.attn.W_Q": [0], "unembed.W_U": [1]})


@contextmanager
def decomposed(model: HookedTransformer, run: Run) -> Case:
    yield lambda stop: stop(lambda: through(masked(model, run)))


@contextmanager
def suppressed(model: HookedTransformer, run: Run) -> Case:
    yield lambda stop: stop(lambda: through(edited(model, run)))


@contextmanager
def decomposed_of_a_users_forward(model: HookedTransformer, run: Run) -> Case:
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    yield lambda stop: stop(lambda: through_raising(masked(model, run)))
    del model.forward


@contextmanager
def decomposed_inside(model: HookedTransformer, run: Run) -> Case:
    with edited(model, run), masked(model, run):
        yield lambda stop: stop(lambda: through(masked(model, run)))


@contextmanager
def suppressed_inside(model: HookedTransformer, run: Run) -> Case:
    with masked(model, run), edited(model, run):
        yield lambda stop: stop(lambda: through_raising(edited(model, run)))


@contextmanager
def outermost_first(model: HookedTransformer, run: Run) -> Case:
    def enter_and_leave(stop: Stop) -> None:
        contexts = [edited(model, run), masked(model, run), edited(model, run), masked(model, run)]
        for index in range(4):
            contexts[index].__enter__()
        wanted = model(TOKENS)  # the innermost two win everywhere
        for _ in range(2):
            stop(lambda: contexts.pop(0).__exit__(None, None, None))
            assert torch.equal(model(TOKENS), wanted)
        for _ in range(2):
            contexts.pop(0).__exit__(None, None, None)

    yield enter_and_leave


@contextmanager
def a_call_inside(model: HookedTransformer, run: Run) -> Case:
    def call(stop: Stop) -> None:
        stop(lambda: model(TOKENS))
        with pytest.raises(RuntimeError, match="outside a call"):
            model.blocks[0].attn.hook_q(torch.zeros(1, 3, 2, 4, dtype=torch.float64))

    with masked(model, run):
        yield call


@contextmanager
def hooks_of_our_own(model: HookedTransformer, run: Run) -> Case:
    def watch() -> None:
        with removing(HookSet()) as hooks:
            watch_starts(model, {}, hooks)
            hooks.add(model, "blocks.0.attn.hook_q", lambda value, hook: value)

    yield lambda stop: stop(watch)


CASES = [
    decomposed,
    suppressed,
    decomposed_of_a_users_forward,
    decomposed_inside,
    suppressed_inside,
    outermost_first,
    a_call_inside,
    hooks_of_our_own,
]


NIGHTLY = [pytest.param(*form, marks=pytest.mark.slow) for form in (("line", True), ("opcode", True))]


@pytest.mark.parametrize(("by", "each"), [("line", False), *NIGHTLY])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_moment_leaves_the_host_as_it_was(
    case: Callable[..., AbstractContextManager[Any]], by: str, each: bool
) -> None:
    model = tiny_host("shortformer", n_layers=1)
    run = tiny_run(model)
    model.blocks[0].attn.W_Q.requires_grad_(False)
    model.add_hook("blocks.0.attn.hook_q", double, is_permanent=True)
    model.blocks[0].attn.hook_z.register_forward_hook(lambda module, args, value: value + 1)
    outside = state(model)
    with case(model, run) as reach:
        reach(go)  # what happens at the first use alone
        before, wanted = state(model), model(TOKENS)
        reach(whole := Interrupter(by))
        assert len(whole.reached) > 50
        for at in moments(whole.reached, each):
            reach(interrupter := Interrupter(by, at))
            assert interrupter.reached[:at] == whole.reached[:at]
            after, place = state(model), whole.reached[at - 1]
            assert [key for key in before | after if before.get(key) != after.get(key)] == [], (at, place)
            assert torch.equal(model(TOKENS), wanted), (at, place)
    assert state(model) == outside


def double(value: Tensor, hook: Any) -> Tensor:
    return value * 2


# --- folders and trainings ---------------------------------------------------------------------------------------------


def assert_free(folder: Path) -> None:
    """Nobody holds the folder, by this process's book and by the operating system's."""
    assert not storage._held
    if (lock := folder / storage.LOCK).exists():  # an empty file may stay
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@posix
@pytest.mark.parametrize("by", ["line", "opcode"])
def test_an_interrupt_at_any_moment_leaves_no_folder_locked(tmp_path: Path, by: str) -> None:
    def hold() -> None:
        with storage.locked(tmp_path), storage.locked(tmp_path):
            inside.append(True)

    inside: list[bool] = []
    hold()
    whole = Interrupter(by)
    whole(hold)
    assert len(whole.reached) > 50
    for at in moments(whole.reached, each=True):
        Interrupter(by, at)(hold)
        assert_free(tmp_path)
        hold()
        assert list(tmp_path.iterdir()) == []
    assert len(inside) > 2 + len(whole.reached)  # some of the interrupts came behind the block


@pytest.mark.parametrize("by", ["line", "opcode"])
def test_an_interrupt_at_any_moment_leaves_no_gradients_on(by: str) -> None:
    model = tiny_host("shortformer", n_layers=1)
    run = tiny_run(model, "blocks.0.attn.W_Q")
    trainer = _Trainer(model, run, make_settings("blocks.0.attn.W_Q", 2, spd.Vector(d_gate=2), None, 1), {"data": None})
    whole = Interrupter(by)
    whole(lambda: through(trainer.training(None)))
    assert len(whole.reached) > 50
    for at in moments(whole.reached, each=True):
        Interrupter(by, at)(lambda: through(trainer.training(None)))
        assert not any(parameter.requires_grad for parameter in run.parameters()), whole.reached[at - 1]


@posix
@pytest.mark.filterwarnings("ignore:unclosed file", "ignore:Exception ignored in")  # Python closes what was just opened
@pytest.mark.parametrize(
    ("rooms", "every"),
    [
        pytest.param((str(PACKAGE / "train.py"), str(PACKAGE / "storage.py")), 10, id="some"),
        pytest.param(ROOMS, 1, id="all", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_moment_leaves_a_training_that_can_be_resumed(
    tmp_path: Path, rooms: tuple[str, ...], every: int
) -> None:
    model = tiny_host("shortformer", n_layers=1)
    model.blocks[0].attn.W_Q.requires_grad_(False)

    def train(out: Path | None, **how: Any) -> Run:
        kept = None if out is None else 1
        return tiny_decompose(
            model, TOKENS, sites="blocks.0.attn.W_Q", C=2, steps=2, out=out, checkpoint_every=kept, **how
        )

    wanted, before = train(None), state(model)
    whole = Interrupter("line", rooms=rooms)
    whole(lambda: train(tmp_path / "whole"))
    found: list[int] = []
    for at in moments(whole.reached, each=False)[::every]:
        out = tmp_path / str(at)
        stopped = Interrupter("line", at, rooms)
        stopped(lambda: train(out))  # noqa: B023 - called at once
        place = stopped.reached[at - 1]
        assert place == whole.reached[at - 1]
        assert state(model) == before, place
        if out.exists():
            assert_free(out)
        kept = [] if stopped.run is None else [stopped.run]
        if storage.holds_record(out / "checkpoint"):
            kept.append(spd.load(out / "checkpoint", model))
        found += [len(kept)]
        for run in kept:
            assert not any(p.requires_grad or p.grad is not None for p in run.parameters()), place
            rows = run.history.to_dict("records")
            assert rows == wanted.history.to_dict("records")[: len(rows)], place
        assert same_runs(train(out, resume=True), wanted), place
    assert min(map(found.count, (0, 1, 2))) > 3
