"""A save that fails at any of its calls to the operating system, one writer at a time, and reading while it writes.

Every call that a save makes (open, write, fsync, rename, unlink, mkdir, lock, close) fails in turn, as on a full disk, as with a
broken disk, and as at the end of the process, behind which nothing more happens. What is read then must be the old or the new
state, and which of them follows from whether the record had been renamed.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spd as spd
from tests.tiny import same_runs, tiny_decompose, tiny_host
from tl_spd import storage
from tl_spd.storage import StorageError, discard, locked, read_folder, read_record, write_folder
from tl_spd.suppress import load_weights, save_weights

OLD = {"a": torch.arange(6.0).reshape(2, 3), "b/c": torch.tensor([True, False])}
NEW = {"a": torch.ones(2, 3), "d": torch.tensor(7, dtype=torch.uint8)}

KINDS = ["crash", "full", "broken"]


class Crash(BaseException):
    """The end of the process."""


class Disk:
    """Counts the calls that change a disk and fails from the ``fails_at``-th on (from 0): crash, full; only there: broken."""

    GROWS = ("mkdir", "write", "fsync", "replace", "open")

    def __init__(self, fails_at: int, kind: str):
        self.fails_at, self.kind, self.calls, self.files = fails_at, kind, 0, list[int]()
        self.committed = False
        """Whether a record has been renamed into place."""
        self.real = {name: getattr(os, name) for name in ("open", "close", "replace", "fsync", "unlink", "mkdir")}

    def fails(self, name: str) -> bool:
        self.calls += 1
        at = self.calls - 1 - self.fails_at
        return {"crash": at >= 0, "full": at >= 0 and name in self.GROWS, "broken": at == 0}[self.kind]

    def error(self) -> BaseException:
        return {"crash": Crash(), "full": OSError(errno.ENOSPC, "full"), "broken": OSError(errno.EIO, "broken")}[
            self.kind
        ]

    def call(self, name: str) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if self.fails(name):
                raise self.error()
            result = self.real[name](*args, **kwargs)
            if name == "open":
                self.files.append(result)
            elif name == "close":
                self.files.remove(args[0])
            self.committed |= name == "replace" and Path(args[1]).name == storage.RECORD
            return result

        return made

    def open_file(self, path: Any, mode: str = "r") -> Any:
        if "r" not in mode and self.fails("open"):
            raise self.error()
        opened = builtins.open(path, mode)  # noqa: SIM115 - closed by whom it is given
        real = opened.write

        def write(data: bytes) -> int:
            if self.fails("write"):
                real(data[: len(data) // 2])
                raise self.error()
            return int(real(data))

        with contextlib.suppress(AttributeError):  # of a file for reading
            opened = Written(opened, write)
        return opened

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.real:
                patch.setattr(os, name, self.call(name))
            patch.setattr(storage, "open", self.open_file, raising=False)
            try:
                yield
            finally:
                for file in self.files:  # a process that has ended holds no lock
                    self.real["close"](file)
        storage._held.clear()


class Written:
    """A file whose writes go another way."""

    def __init__(self, file: Any, write: Callable[[bytes], int]):
        self.file, self.write, self.read, self.fileno = file, write, file.read, file.fileno

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def every_call(
    kind: str, work: Callable[[], Any], before: Callable[[], Any], calls: range = range(10_000)
) -> Iterator[Disk]:
    """One failing disk for every call that ``work`` makes (or some), after it has run on it; ``before`` prepares each."""
    for fails_at in calls:
        before()
        disk = Disk(fails_at, kind)
        with disk.installed(), contextlib.suppress(Crash if kind == "crash" else OSError):
            work()
        if disk.calls <= fails_at:
            return  # it ran to the end without a failure
        yield disk


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_anywhere_leaves_the_old_or_the_new_state(tmp_path: Path, kind: str) -> None:
    folder, seen = tmp_path / "run", []

    def old() -> None:
        write_folder(folder, {"name": "old"}, OLD)
        (folder / "tensors-00ff.safetensors").write_bytes(b"left by somebody")

    for disk in every_call(kind, lambda: write_folder(folder, {"name": "new"}, NEW), old):
        record, tensors = read_folder(folder)
        assert (record["name"] == "new") == disk.committed
        assert same(tensors, NEW if disk.committed else OLD)
        seen.append(disk.committed)
        write_folder(folder, {"name": "new"}, NEW)  # and the next write works and cleans up
        assert same(read_folder(folder)[1], NEW)
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    assert len(seen) >= 15
    assert set(seen) == {False, True}


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_save_and_a_removal_that_fail_leave_nothing_or_all(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    for disk in every_call(kind, lambda: write_folder(folder, {}, NEW), lambda: discard(folder)):
        assert storage.holds_record(folder) == disk.committed
        assert not disk.committed or same(read_folder(folder)[1], NEW)
    for _ in every_call(kind, lambda: discard(folder), lambda: write_folder(folder, {}, NEW)):
        assert not storage.holds_record(folder) or same(read_folder(folder)[1], NEW)
    discard(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_weights_whose_writing_fails_leave_the_old_file(tmp_path: Path, kind: str) -> None:
    old, new, fresh, path = tiny_host(seed=1), tiny_host(seed=2), tiny_host(seed=3), tmp_path / "weights"
    for _ in every_call(kind, lambda: save_weights(new, path), lambda: save_weights(old, path)):
        load_weights(fresh, path)
        assert any(torch.equal(fresh.W_E, host.W_E) for host in (old, new))


TRAINING: dict[str, Any] = dict(
    steps=2, checkpoint_every=1, sites="blocks.0.mlp.W_out", losses=[spd.StochasticRecon(1.0)]
)


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_a_training_that_fails_anywhere_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    """From every third call of all of its saves, the last one of the Run itself too; what was reached is never lost."""
    model, settings = tiny_host(), TRAINING | {"out": tmp_path / "run"}
    unbroken = tiny_decompose(model, **settings | {"out": tmp_path / "unbroken"})
    reached, least = [], 0

    def fresh() -> None:
        discard(tmp_path / "run" / "checkpoint")
        discard(tmp_path / "run")

    every_third = range(KINDS.index(kind), 10_000, 3)
    for disk in every_call(kind, lambda: tiny_decompose(model, **settings), fresh, every_third):
        held = storage.holds_record(tmp_path / "run" / "checkpoint")
        assert held == disk.committed
        if held:
            spd.load(tmp_path / "run" / "checkpoint", model)
        reached.append(read_record(tmp_path / "run" / "checkpoint")["step"] if held else 0)
        assert reached[-1] >= least
        least = reached[-1]
        assert same_runs(tiny_decompose(model, resume=True, **settings), unbroken)
        assert same_runs(spd.load(tmp_path / "run", model), unbroken)
    assert sorted(set(reached)) == [0, 1, 2]


def test_what_ends_a_training_carries_the_run_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_host()
    unbroken = tiny_decompose(model, **TRAINING | {"checkpoint_every": None})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(spd.Run, "save", full)  # the last thing that decompose does
    with pytest.raises(OSError, match="full") as caught:
        tiny_decompose(model, **TRAINING | {"out": tmp_path, "checkpoint_every": None})
    assert same_runs(caught.value.run, unbroken)  # type: ignore[attr-defined]
    assert not any(p.requires_grad for p in caught.value.run.parameters())  # type: ignore[attr-defined]


# --- one writer at a time --------------------------------------------------------------------------------------------

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
time.sleep(60)
"""
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")


@posix
def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    model, folder = tiny_host(), tmp_path / "run"
    run = tiny_decompose(model, **TRAINING | {"out": folder})
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder / ".lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        message = (
            rf"Another process or thread is writing to {folder}, a training.*Wait until it has ended, end it, or give"
        )
        for work in (lambda: tiny_decompose(model, **TRAINING | {"out": folder, "seed": 1}), lambda: run.save(folder)):
            with pytest.raises(StorageError, match=message):
                work()
        assert same_runs(spd.load(folder, model), run)  # reading is allowed
        process.kill()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before | {folder / ".lock": b""}
    run.save(folder)
    assert not (folder / ".lock").exists()


@posix
def test_a_training_holds_its_folder_until_it_has_ended(tmp_path: Path) -> None:
    """Seen from plain flock in another process, and from another thread of this one."""
    seen = []

    def data(step: int, generator: torch.Generator) -> Tensor:
        tried = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / ".lock")], capture_output=True, check=False)
        seen.append(b"BlockingIOError" in tried.stderr)
        thread = threading.Thread(target=lambda: seen.append(refused(tmp_path)))
        thread.start()
        thread.join()
        with locked(tmp_path):  # the thread that holds it
            seen.append(True)
        return torch.ones(1, 3, dtype=torch.long)

    with pytest.raises(KeyboardInterrupt):
        tiny_decompose(tiny_host(), stop_at(1, data), **TRAINING | {"out": tmp_path})
    assert seen == [True] * 3
    assert not refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def stop_at(at: int, data: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batch(step: int, generator: torch.Generator) -> Tensor:
        if step == at:
            raise KeyboardInterrupt
        return data(step, generator)

    return batch


def refused(folder: Path) -> bool:
    try:
        with locked(folder):
            return False
    except StorageError:
        return True


@posix
def test_many_threads_hold_a_folder_one_at_a_time(tmp_path: Path) -> None:
    """The lock's file comes and goes; whoever opens one that is then removed must not take it for the lock."""
    inside, most, taken = [0], [0], [0]

    def work() -> None:
        for _ in range(150):
            with contextlib.suppress(StorageError), locked(tmp_path):
                inside[0] += 1
                most[0], taken[0] = max(most[0], inside[0]), taken[0] + 1
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert taken[0] > 100


@posix
def test_a_lock_on_a_file_that_has_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder removes it, and a third one makes another, between the second's opening it and locking it."""
    import fcntl

    real, calls = storage._try_lock, []
    with contextlib.ExitStack() as third:

        def late(file: int) -> None:
            calls.append(file)
            if len(calls) == 1:
                (tmp_path / ".lock").unlink()
                fcntl.flock(third.enter_context(open(tmp_path / ".lock", "w")), fcntl.LOCK_EX)
            real(file)

        monkeypatch.setattr(storage, "_try_lock", late)
        assert refused(tmp_path)
    assert len(calls) == 2


@posix
def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    write_folder(tmp_path, {}, NEW)
    assert same(read_folder(tmp_path)[1], NEW)


# --- reading while it writes -----------------------------------------------------------------------------------------


def test_a_folder_that_is_replaced_between_its_two_files_is_read_as_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"name": "old"}, OLD)
    real, times = storage._read_tensors, []

    def late(folder: Path, entry: Any) -> dict[str, Tensor]:
        times.append(entry)
        if len(times) <= 3:
            write_folder(tmp_path, {"name": f"new {len(times)}"}, {"a": torch.full((2,), len(times))})
        return real(folder, entry)

    monkeypatch.setattr(storage, "_read_tensors", late)
    record, tensors = read_folder(tmp_path)
    assert record["name"] == "new 3"
    assert tensors["a"].tolist() == [3, 3]


def test_a_reader_beside_a_writer_sees_whole_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    write_folder(tmp_path, {"value": 0}, {"a": torch.full((50,), 0)})
    ended = threading.Event()

    def write() -> None:
        value = 0
        while not ended.is_set():
            value += 1
            write_folder(tmp_path, {"value": value}, {"a": torch.full((50,), value)})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, until = [], time.monotonic() + 60
        while len(set(seen)) < 30 and time.monotonic() < until:
            record, tensors = read_folder(tmp_path)
            assert tensors["a"].tolist() == [record["value"]] * 50
            seen.append(record["value"])
    finally:
        ended.set()
        thread.join()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 30
