"""Storage: a folder of one JSON record and one safetensors file, written so that it is always whole.

1. Tensors go to ``tensors-<digest>.safetensors`` under a temporary name, are flushed, and renamed.
2. ``record.json``, which names that file and carries both digests, replaces the old one in one rename: this is the commit.
3. Only then are tensor files of earlier records removed. Who reads meanwhile gets the old state or the new one.
4. One process or thread at a time writes to a folder; another one is refused (:func:`locked`).

A crash at any moment leaves either the old state or the new one. Nothing is pickled; reading executes nothing, and a file
that is larger or deeper than any that is written here is refused before it is taken apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Generator, Tensor
from torch.optim import Optimizer

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

SCHEMA_VERSION = 1
RECORD = "record.json"
LOCK = ".lock"
TRAINING = "training/"
"""What the names of a checkpoint's further tensors begin with: the training's state, which a Run does not need."""

MOST_RECORD = 100_000_000
"""Most bytes of a record: a history of some 400,000 rows."""
MOST_NESTED = 100_000
"""Most lists and objects in a record."""
MOST_HEADER = 16_000_000
"""Most bytes of a safetensors file's header: some 100,000 tensors."""


class StorageError(ValueError):
    """A folder or file cannot be read or written: the message says which, what is wrong and what would help."""


# --- one writer at a time --------------------------------------------------------------------------------------------

_held: set[tuple[str, int, int]] = set()


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Inside this context no other process or thread may write to the folder ``path``, which is made if there is none.

    The lock is the operating system's, on the file ``.lock``: a process that ends gives it up, however it ends. The thread
    that holds it may take it again. A file system without locks refuses nobody.

    Raises:
        StorageError: another process or thread holds it.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    owner = (str(folder.resolve()), os.getpid(), threading.get_ident())
    if owner in _held:
        yield
        return
    files: list[int] = []
    try:
        try:
            _acquire(folder, files)
            _held.add(owner)
            yield
        finally:
            _release(folder, owner, files)
    finally:
        _release(folder, owner, files)  # once more, where an interrupt cut the first short


def _acquire(folder: Path, files: list[int]) -> None:
    """Lock the file of ``folder``; whatever is opened for it is noted in ``files`` before it is locked."""
    while True:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
        files.append(file)
        try:
            _try_lock(file)
            if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):
                return
        except (BlockingIOError, PermissionError) as error:
            raise StorageError(
                f"Another process or thread is writing to {folder}, a training for example. Wait until it has ended, end it, "
                "or give another folder."
            ) from error
        except FileNotFoundError:
            pass  # the one who held it has just removed it
        _close(files)


def _release(folder: Path, owner: tuple[str, int, int], files: list[int]) -> None:
    """Give up what :func:`_acquire` took. What was cut short can be repeated; at worst the empty file stays."""
    ours = owner in _held
    _held.discard(owner)
    if sys.platform == "win32":
        _close(files)  # an open file cannot be removed there
    if ours:
        with suppress(OSError):
            (folder / LOCK).unlink()
    _close(files)


def _close(files: list[int]) -> None:
    """Close the files, unlocked first: one that is lost to an interrupt between its two calls holds nothing."""
    for file in files:
        with suppress(OSError):
            _unlock(file)
    while files:
        os.close(files.pop())


def _try_lock(file: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # the file system knows no locks


def _unlock(file: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_UN)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_folder(path: str | Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``record`` and ``tensors`` to the folder ``path``, replacing what was there only when all is on disk.

    Raises:
        StorageError: another process or thread is writing there, or the record is larger than can be read again.
        OSError: the disk is full, for example; what was there can still be read.
    """
    folder = Path(path)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name = f"tensors-{_digest(data)}.safetensors"
    whole = {"schema_version": SCHEMA_VERSION, "tensors": {"file": name, "blake2b": _digest(data)}, **record}
    text = json.dumps({**whole, "blake2b": _record_digest(whole)}, indent=1)
    if len(text) > MOST_RECORD:
        raise StorageError(f"The record for {folder} has {len(text)} bytes, more than {MOST_RECORD}; raise log_every.")
    with locked(folder):
        _sweep(folder)  # what a write that failed has left takes up room
        _write_file(folder / name, data)
        _write_file(folder / RECORD, text.encode())
        _sweep(folder)


def discard(path: str | Path) -> None:
    """Remove what :func:`write_folder` wrote to the folder ``path``; what else is there stays."""
    folder = Path(path)
    (folder / RECORD).unlink(missing_ok=True)  # first, so that a crash leaves no record without its tensors
    for other in folder.glob("tensors-*.safetensors"):
        other.unlink()


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[Path]:
    """What the block writes to ``temporary`` takes the place of ``path`` when it is on disk; on an error it is removed."""
    temporary.unlink(missing_ok=True)  # a link there would lead elsewhere
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself must reach the disk before the next one relies on it
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_file(path: Path, data: bytes) -> None:
    with replacing(path, path.with_name(".partial")) as temporary, open(temporary, "xb") as file:
        file.write(data)


def _sweep(folder: Path) -> None:
    """Remove the tensor files that the record does not name. None is missed, so what cannot be removed stays."""
    with suppress(StorageError, AttributeError):
        keep = read_record(folder)["tensors"].get("file")
        for other in folder.glob("tensors-*.safetensors"):
            if other.name != keep:
                with suppress(OSError):
                    other.unlink()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names, shapes, dtypes and every bit of ``tensors``."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _record_digest(record: Mapping[str, Any]) -> str:
    return _digest(json.dumps(record, sort_keys=True).encode())


# --- reading ---------------------------------------------------------------------------------------------------------


def holds_record(path: str | Path) -> bool:
    """Whether the folder ``path`` was written by :func:`write_folder`."""
    return (Path(path) / RECORD).is_file()


def brief(value: object, most: int = 300) -> str:
    """``repr(value)``, cut to what a message can hold."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def read_record(path: str | Path) -> dict[str, Any]:
    """The record of a folder written by :func:`write_folder`, without its tensors; errors as of :func:`read_folder`."""
    file = Path(path) / RECORD
    if not file.is_file():
        raise StorageError(f"{path} holds no {RECORD}; it is not a folder saved by tl_spd.")
    try:
        record = json.loads(_text(file), object_pairs_hook=_once)
        version, digest = record["schema_version"], record.pop("blake2b", None)
        intact = digest == _record_digest(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{file} is damaged ({brief(error)}); save the run again or use a backup.") from error
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{file} has schema version {brief(version)}, this release reads {SCHEMA_VERSION}; "
            "use the release of tl_spd that wrote it (named under 'versions' in the file)."
        )
    if not intact:
        raise StorageError(f"{file} is damaged: its content is not what was written. Copy the whole folder again.")
    return record


def _text(file: Path) -> str:
    with open(file, "rb") as opened:
        data = opened.read(MOST_RECORD + 1)
    if len(data) > MOST_RECORD or data.count(b"[") + data.count(b"{") > MOST_NESTED:
        raise ValueError("it is larger or deeper than any record")
    return data.decode("utf-8")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return found


@contextmanager
def readable(asked: str) -> Iterator[None]:
    """Whatever other packages make of a damaged file becomes one sentence; an error that says what was asked for stays.

    Raises:
        StorageError: begins with ``asked``.
    """
    try:
        yield
    except Exception as error:
        if str(error).startswith("Asked for"):
            raise
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise StorageError(f"{asked} damaged or incomplete files ({cause}). Fetch or convert them again.") from error


def read_folder(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a folder written by :func:`write_folder`, of one state even while it is written to.

    Raises:
        StorageError: no such folder, a missing or damaged file, or a schema version that this release cannot read.
    """
    record = read_record(path)
    while True:
        try:
            return record, _read_tensors(Path(path), record.get("tensors"))
        except StorageError:
            before, record = record, read_record(path)
            if _record_digest(record) == _record_digest(before):  # else it was replaced in between
                raise


def _read_tensors(folder: Path, entry: Any) -> dict[str, Tensor]:
    name = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"tensors-[0-9a-f]+\.safetensors", name):
        raise StorageError(f"{folder / RECORD} names no tensor file of its own folder, found {brief(entry)}.")
    file = folder / name
    if not file.is_file():
        raise StorageError(f"{file} is missing; the record in {folder} names it. Copy the whole folder again.")
    try:
        data = file.read_bytes()
    except (OSError, MemoryError) as error:
        raise StorageError(f"{file} cannot be read ({brief(error)}).") from error
    if _digest(data) != entry.get("blake2b"):
        raise StorageError(f"{file} is damaged: its content is not what the record says. Copy the whole folder again.")
    check_header(data[:8], file)
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, MemoryError) as error:
        raise StorageError(f"{file} is not a valid safetensors file ({brief(error)}).") from error


def check_header(head: bytes, file: Path) -> None:
    """Refuse a safetensors file that begins with ``head`` and has a larger header than any that is written here.

    Raises:
        StorageError: the header would be larger than ``MOST_HEADER`` bytes.
    """
    if (size := int.from_bytes(head[:8], "little")) > MOST_HEADER:
        raise StorageError(f"{file} is not a valid safetensors file (a header of {size} bytes).")


# --- a training's state ----------------------------------------------------------------------------------------------


def pack_training(optimizer: Optimizer, generators: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's state and the generators' states as flat tensors."""
    packed = {f"{TRAINING}generator/{name}": state for name, state in generators.items()}
    for index, state in optimizer.state_dict()["state"].items():
        packed.update({f"{TRAINING}optimizer/{index}/{key}": value for key, value in state.items()})
    return packed


ADAM = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter that it has moved."""


def unpack_training(
    tensors: Mapping[str, Tensor], optimizer: Optimizer, generators: Mapping[str, Generator], where: str
) -> None:
    """Give ``optimizer`` and ``generators`` the state that :func:`pack_training` took.

    Raises:
        StorageError: something is missing or too much, does not fit the optimiser's parameters or is not finite.
    """
    parameters = {str(i): p for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    left = {name.removeprefix(TRAINING): value for name, value in tensors.items() if name.startswith(TRAINING)}
    try:
        states = {name: left.pop(f"generator/{name}") for name in generators}
        for name, value in left.items():
            kind, index, key = name.split("/")
            parameter = parameters[index]
            shape, dtype = ((), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
            if (kind, value.shape, value.dtype) != ("optimizer", shape, dtype) or not bool(value.isfinite().all()):
                raise ValueError(f"{name} does not fit its parameter or is not finite")
            if key != "exp_avg" and bool((value < 0).any()):
                raise ValueError(f"{name} is negative")
            state.setdefault(int(index), {})[key] = value
        if odd := [index for index, found in state.items() if set(found) != set(ADAM)]:
            raise ValueError(f"optimizer/{odd[0]} holds {sorted(state[odd[0]])}, wanted {ADAM}")
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for name, generator in generators.items():
            generator.set_state(states[name])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"The training state in {where} is damaged, or was made on another kind of device: {brief(error)}."
        ) from error
