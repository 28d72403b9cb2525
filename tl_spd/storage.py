"""Storage: a folder of one JSON record and one safetensors file, written so that it is always whole.

1. Tensors go to ``tensors-<digest>.safetensors`` under a temporary name, are flushed, and renamed.
2. ``record.json``, which names that file and its digest, replaces the old one in one rename: this is the commit.
3. Only then are tensor files of earlier records removed.

A crash at any moment leaves either the old state or the new one. Nothing is pickled; reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

SCHEMA_VERSION = 1
RECORD = "record.json"


class StorageError(ValueError):
    """A folder cannot be read: the message says which file, what is wrong and what would help."""


def write_folder(path: str | Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``record`` and ``tensors`` to the folder ``path``, replacing what was there only when all is on disk."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    name = f"tensors-{digest}.safetensors"
    _write_file(folder / name, data)
    whole = {"schema_version": SCHEMA_VERSION, "tensors": {"file": name, "blake2b": digest}, **record}
    _write_file(folder / RECORD, json.dumps(whole, indent=1).encode())
    for other in folder.glob("tensors-*.safetensors"):
        if other.name != name:
            other.unlink()


def _write_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_folder(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a folder written by :func:`write_folder`.

    Raises:
        StorageError: no such folder, a missing or damaged file, or a schema version that this release cannot read.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file():
        raise StorageError(f"{folder} holds no {RECORD}; it is not a folder saved by tl_spd.")
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        version, entry = record["schema_version"], record["tensors"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / RECORD} is damaged ({error}); save the run again or use a backup.") from error
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{folder / RECORD} has schema version {version!r}, this release reads {SCHEMA_VERSION}; "
            "use the release of tl_spd that wrote it (named under 'versions' in the file)."
        )
    return record, _read_tensors(folder, entry)


def _read_tensors(folder: Path, entry: Mapping[str, str]) -> dict[str, Tensor]:
    file = folder / Path(str(entry["file"])).name  # the bare name: a record cannot point outside its folder
    if not file.is_file():
        raise StorageError(f"{file} is missing; the record in {folder} names it. Copy the whole folder again.")
    data = file.read_bytes()
    if hashlib.blake2b(data, digest_size=16).hexdigest() != entry["blake2b"]:
        raise StorageError(f"{file} is damaged: its content is not what the record says. Copy the whole folder again.")
    try:
        return load(data)
    except SafetensorError as error:
        raise StorageError(f"{file} is not a valid safetensors file ({error}).") from error
