"""Training processes killed with SIGKILL, on disks with room and on full ones: what was reached stays, and resuming gives
the unbroken run's parameters, bit for bit.

The processes come from a forkserver that has imported everything once: each starts with nothing but the files on disk. Three
kills at chosen moments of a save are in the suite; fifty at random moments, on a full disk too, are slow.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_spd as spd
from tests.tiny import same_runs, tiny_decompose, tiny_host
from tl_spd import storage
from tl_spd.storage import read_folder, write_folder

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")

STEPS = 30
PAUSE = 0.005


def draw(step: int, generator: torch.Generator) -> torch.Tensor:
    """A fresh batch."""
    return torch.randint(0, 11, (3, 5), generator=generator)


def train(out: Path, checkpoint_every: int | None, steps: int = STEPS, room: int | None = None) -> None:
    """What every process does: train to the end, from the checkpoint where there is one; slow writes are easier to hit."""
    real = os.fsync

    def slowly(file: int) -> None:
        time.sleep(PAUSE)
        real(file)

    storage.os.fsync = slowly  # type: ignore[assignment]
    if room is not None:
        no_file_larger_than(room)
    tiny_decompose(
        tiny_host(dtype=torch.float32),
        draw,
        steps=steps,
        log_every=7,
        optimizer=spd.Optimizer(lr=0.01, kind="adamw", weight_decay=0.1, clip=1.0),
        schedule=spd.Schedule("cosine", warmup=5),
        warmup=spd.FaithfulnessWarmup(steps=20),
        out=out,
        checkpoint_every=checkpoint_every,
        resume=checkpoint_every is not None,
    )


def step_of(folder: Path) -> int:
    """The step of the checkpoint that a process is writing to, without any check."""
    try:
        return int(json.loads((folder / "record.json").read_text())["step"])
    except FileNotFoundError:
        return 0


def between_saves(folder: Path) -> bool:
    return [path.suffix for path in sorted(folder.iterdir())] == [".json", ".safetensors"]


def writing_a_file(folder: Path) -> bool:
    return (folder / ".partial").exists()


def between_the_two_renames(folder: Path) -> bool:
    return len(list(folder.glob("tensors-*"))) == 2


MOMENTS: list[tuple[int, Callable[[Path], bool]]] = [
    (3, between_saves),
    (11, writing_a_file),
    (20, between_the_two_renames),
]


def kill_at(process: Any, folder: Path, step: int, moment: Callable[[Path], bool]) -> int:
    """Kill ``process`` while its checkpoint is at ``step`` or later and ``moment`` holds; the step that is then on disk."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.is_alive():
        time.sleep(0.001)
        if step_of(folder) >= step and moment(folder):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.01)
            if moment(folder):  # still: the process has been stopped in it
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL
                assert moment(folder)
                return step_of(folder)
            os.kill(process.pid, signal.SIGCONT)
    pytest.fail(f"{moment.__name__} was not met at step {step}; exit code {process.exitcode}")


def test_killed_at_three_moments_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_resume_kill"])
    folder, model, reached = tmp_path / "broken" / "checkpoint", tiny_host(dtype=torch.float32), []
    unbroken = context.Process(target=train, args=(tmp_path / "unbroken", None))
    unbroken.start()
    for step, moment in MOMENTS:
        process = context.Process(target=train, args=(tmp_path / "broken", 1))
        process.start()
        reached.append(kill_at(process, folder, step, moment))
        spd.load(folder, model)  # whole, whatever the moment
    last = context.Process(target=train, args=(tmp_path / "broken", 1))
    last.start()
    for process in (last, unbroken):
        process.join(60)
        assert process.exitcode == 0
    assert reached == sorted(reached)
    assert reached[0] >= 3
    assert reached[-1] < STEPS
    assert same_runs(spd.load(tmp_path / "broken", model), spd.load(tmp_path / "unbroken", model))
    assert len(list(folder.iterdir())) == 2


# --- full disks ------------------------------------------------------------------------------------------------------

OLD, NEW = {"a": torch.arange(3000.0)}, {"a": torch.arange(3000.0) + 0.5, "b": torch.ones(7)}
RECORD = {"name": "new", "history": {"loss": [0.1] * 300}}


def no_file_larger_than(size: int) -> None:
    """The operating system takes no byte of a file beyond ``size``, as on a disk without room for more."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def write_with_less_and_less_room(folder: Path) -> None:
    """Raises unless a write that finds no room leaves the old state, readable, and its files alone."""
    write_folder(folder, {"name": "old"}, OLD)
    before = sorted(path.name for path in folder.iterdir())
    failures = 0
    for room in range(13_000, 0, -200):
        no_file_larger_than(room)
        try:
            write_folder(folder, RECORD, NEW)
        except OSError:
            failures += 1
            record, tensors = read_folder(folder)
            assert record["name"] == "old"
            assert torch.equal(tensors["a"], OLD["a"])
            assert sorted(path.name for path in folder.iterdir()) == before
        else:
            assert room > 12_000
            no_file_larger_than(10**9)
            write_folder(folder, {"name": "old"}, OLD)
    assert failures > 50


def test_a_disk_without_room_keeps_the_old_state(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(
        target=write_with_less_and_less_room, args=(tmp_path / "run",)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


# --- fifty random moments --------------------------------------------------------------------------------------------

MANY = 300
KILLS = 50


def digest_of(record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Of everything that a training goes on from."""
    parts = [str(record["step"]), json.dumps(record["history"])]
    parts += [f"{name} {tensors[name].dtype} {tensors[name].tolist()}" for name in sorted(tensors)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def trajectory(out: Path) -> None:
    """Train without a break or a file, and write the digest of every step's checkpoint to ``out``."""
    digests, real = [digest_of({"step": 0, "history": {}}, {})], storage.write_folder

    def kept(path: Path, record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if "step" in record:
            digests.append(digest_of(record, tensors))
        else:
            real(path, record, tensors)

    storage.write_folder = kept  # type: ignore[assignment]
    train(out, 1, MANY)
    (out / "digests.json").write_text(json.dumps(digests))


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path | None]]:
    """A folder, and a file beside it that can fill up its disk: a small one in memory, where that may be mounted."""
    if request.param == "disk":
        yield tmp_path, None
        return
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield small, small / "filling"
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_killed_at_fifty_random_moments(place: tuple[Path, Path | None], tmp_path: Path) -> None:
    """Every state on disk is bit for bit one of the unbroken training, never an earlier one than before, and so is the end."""
    where, filling = place
    context, draw = multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["tests.test_resume_kill"])
    unbroken = context.Process(target=trajectory, args=(tmp_path / "unbroken",))
    unbroken.start()
    unbroken.join(300)
    digests = json.loads((tmp_path / "unbroken" / "digests.json").read_text())
    assert len(digests) == MANY + 1
    model = tiny_host(dtype=torch.float32)
    expected = spd.load(tmp_path / "unbroken", model)
    folder, reached, amid, ends = where / "broken" / "checkpoint", 0, 0, []
    while ends.count(-signal.SIGKILL) < KILLS:
        room = draw.choice([None, None, draw.randrange(500, 8000)])
        if filling is not None:
            with suppress(OSError), open(filling, "wb", buffering=0) as file:
                for _ in range(draw.choice([0, 0, 256])):
                    file.write(bytes(1024))
            room = None
        process = context.Process(target=train, args=(where / "broken", 1, MANY, room))
        process.start()
        process.join(draw.uniform(0.1, 0.8))
        process.kill()
        process.join()
        ends.append(process.exitcode)
        amid += (folder / ".partial").exists() or len(list(folder.glob("tensors-*"))) > 1
        if filling is not None:
            filling.unlink(missing_ok=True)
        if ends[-1] == 0:  # trained to its end: what is left to kill is one that begins anew
            assert same_runs(spd.load(where / "broken", model), expected)
            shutil.rmtree(where / "broken")
            reached = 0
        elif (folder / "record.json").exists():
            record, tensors = read_folder(folder)
            assert digest_of(record, tensors) == digests[record["step"]]
            assert record["step"] >= reached
            reached = record["step"]
            spd.load(folder, model)
        else:
            assert reached == 0
    print(f"{len(ends)} lives, {amid} left amid a save, {ends.count(0)} finished; step {reached} of {MANY}")
    assert 1 in ends  # the full disk
    assert amid > 5
    assert reached or 0 in ends
    last = context.Process(target=train, args=(where / "broken", 1, MANY))
    last.start()
    last.join(300)
    assert last.exitcode == 0
    assert same_runs(spd.load(where / "broken", model), expected)
