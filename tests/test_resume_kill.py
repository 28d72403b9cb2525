"""Training processes killed with SIGKILL: resuming gives the unbroken run's parameters, bit for bit.

The processes come from a forkserver that has imported everything once: each starts with nothing but the files on disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_spd as spd
from tests.tiny import same_runs, tiny_decompose, tiny_host
from tl_spd import storage

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")

STEPS = 30
PAUSE = 0.005


def draw(step: int, generator: torch.Generator) -> torch.Tensor:
    """A fresh batch."""
    return torch.randint(0, 11, (3, 5), generator=generator)


def train(out: Path, checkpoint_every: int | None) -> None:
    """What every process does: train to the end, from the checkpoint where there is one; slow writes are easier to hit."""
    real = os.fsync

    def slowly(file: int) -> None:
        time.sleep(PAUSE)
        real(file)

    storage.os.fsync = slowly  # type: ignore[assignment]
    tiny_decompose(
        tiny_host(dtype=torch.float32),
        draw,
        steps=STEPS,
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
