"""Storage: a folder of one JSON record and one safetensors file, written so that it is always whole.

1. Tensors go to ``tensors-<digest>.safetensors`` under a temporary name, are flushed, and renamed.
2. ``record.json``, which names that file and carries both digests, replaces the old one in one rename: this is the commit.
3. Only then are tensor files of earlier records removed.

A crash at any moment leaves either the old state or the new one. Nothing is pickled; reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Generator, Tensor
from torch.optim import Optimizer

SCHEMA_VERSION = 1
RECORD = "record.json"
TRAINING = "training/"
"""What the names of a checkpoint's further tensors begin with: the training's state, which a Run does not need."""


class StorageError(ValueError):
    """A folder cannot be read: the message says which file, what is wrong and what would help."""


def write_folder(path: str | Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``record`` and ``tensors`` to the folder ``path``, replacing what was there only when all is on disk."""
    folder = Path(path)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name = f"tensors-{_digest(data)}.safetensors"
    whole = {"schema_version": SCHEMA_VERSION, "tensors": {"file": name, "blake2b": _digest(data)}, **record}
    text = json.dumps({**whole, "blake2b": _record_digest(whole)}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(folder / name, data)
    _write_file(folder / RECORD, text.encode())
    for other in folder.glob("tensors-*.safetensors"):
        if other.name != name:
            other.unlink()


def discard(path: str | Path) -> None:
    """Remove what :func:`write_folder` wrote to the folder ``path``; what else is there stays."""
    folder = Path(path)
    (folder / RECORD).unlink(missing_ok=True)  # first, so that a crash leaves no record without its tensors
    for other in folder.glob("tensors-*.safetensors"):
        other.unlink()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _record_digest(record: Mapping[str, Any]) -> str:
    return _digest(json.dumps(record, sort_keys=True).encode())


def _write_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(".partial")  # one name for all: what a killed process left is overwritten
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
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


def holds_record(path: str | Path) -> bool:
    """Whether the folder ``path`` was written by :func:`write_folder`."""
    return (Path(path) / RECORD).is_file()


def read_record(path: str | Path) -> dict[str, Any]:
    """The record of a folder written by :func:`write_folder`, without its tensors; errors as of :func:`read_folder`."""
    file = Path(path) / RECORD
    if not file.is_file():
        raise StorageError(f"{path} holds no {RECORD}; it is not a folder saved by tl_spd.")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{file} is damaged ({error}); save the run again or use a backup.") from error
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{file} has schema version {version!r}, this release reads {SCHEMA_VERSION}; "
            "use the release of tl_spd that wrote it (named under 'versions' in the file)."
        )
    digest = record.pop("blake2b", None)
    if digest != _record_digest(record):
        raise StorageError(f"{file} is damaged: its content is not what was written. Copy the whole folder again.")
    return record


def read_folder(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a folder written by :func:`write_folder`.

    Raises:
        StorageError: no such folder, a missing or damaged file, or a schema version that this release cannot read.
    """
    record = read_record(path)
    return record, _read_tensors(Path(path), record.get("tensors"))


def _read_tensors(folder: Path, entry: Any) -> dict[str, Tensor]:
    name = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"tensors-[0-9a-f]+\.safetensors", name):
        raise StorageError(f"{folder / RECORD} names no tensor file of its own folder, found {entry!r}.")
    file = folder / name
    if not file.is_file():
        raise StorageError(f"{file} is missing; the record in {folder} names it. Copy the whole folder again.")
    data = file.read_bytes()
    if _digest(data) != entry.get("blake2b"):
        raise StorageError(f"{file} is damaged: its content is not what the record says. Copy the whole folder again.")
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise StorageError(f"{file} is not a valid safetensors file ({error}).") from error


def pack_training(optimizer: Optimizer, generators: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's state and the generators' states as flat tensors."""
    packed = {f"{TRAINING}generator/{name}": state for name, state in generators.items()}
    for index, state in optimizer.state_dict()["state"].items():
        packed.update({f"{TRAINING}optimizer/{index}/{key}": value for key, value in state.items()})
    return packed


def unpack_training(
    tensors: Mapping[str, Tensor], optimizer: Optimizer, generators: Mapping[str, Generator], where: str
) -> None:
    """Give ``optimizer`` and ``generators`` the state that :func:`pack_training` took.

    Raises:
        StorageError: something is missing, does not fit the optimiser's parameters or is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, value in tensors.items():
            if name.startswith(f"{TRAINING}optimizer/"):
                index, key = name.split("/")[2:]
                shape = () if key == "step" else parameters[int(index)].shape
                if value.shape != shape or not bool(value.isfinite().all()):
                    raise ValueError(f"{name} does not fit its parameter or is not finite")
                state.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for name, generator in generators.items():
            generator.set_state(tensors[f"{TRAINING}generator/{name}"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        message = f"The training state in {where} is damaged, or was made on another kind of device: {error!r}."
        raise StorageError(message) from error
