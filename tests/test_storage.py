"""Storage: what is written is read again, a crash leaves the old or the new state, and nothing damaged is believed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_spd import storage
from tl_spd.storage import StorageError, discard, read_folder, read_record, write_folder

OLD = {"a": torch.arange(6.0).reshape(2, 3), "b/c": torch.tensor([True, False])}
NEW = {"a": torch.ones(2, 3), "d": torch.tensor(7, dtype=torch.uint8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "run", {"name": "old", "values": [1, 2.5, None]}, OLD)
    return tmp_path / "run"


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours
    )


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record and sign it again, as somebody who means harm would."""
    record = json.loads((folder / "record.json").read_text())
    del record["blake2b"]
    change(record)
    record["blake2b"] = digest(json.dumps(record, sort_keys=True).encode())
    (folder / "record.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype).T, "scalar": torch.tensor(3).to(dtype)}
    record = {"text": 'ä\n"', "number": 0.1, "nested": {"list": [1, [2]]}}
    write_folder(tmp_path, record, tensors)
    read, found = read_folder(tmp_path)
    assert same(found, tensors)
    assert {key: read[key] for key in record} == record
    assert read["schema_version"] == 1


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    write_folder(tmp_path, {"values": [*values, 5e-324, 1e308, -0.0]}, {})
    assert read_record(tmp_path)["values"] == [*values, 5e-324, 1e308, -0.0]


def test_a_second_write_replaces_the_first_and_leaves_two_files(folder: Path) -> None:
    write_folder(folder, {"name": "new"}, NEW)
    record, tensors = read_folder(folder)
    assert record["name"] == "new"
    assert "values" not in record
    assert same(tensors, NEW)
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", record["tensors"]["file"]]


def test_what_else_is_in_the_folder_stays(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint").mkdir()
    write_folder(folder, {}, NEW)
    discard(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "notes.txt"]
    assert not storage.holds_record(folder)
    discard(folder)


def test_what_a_killed_process_left_is_overwritten(folder: Path) -> None:
    (folder / ".partial").write_bytes(b"half")
    (folder / "tensors-00ff.safetensors").write_bytes(b"orphan")
    assert same(read_folder(folder)[1], OLD)
    write_folder(folder, {}, NEW)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("record", [{"x": {1, 2}}, {"x": torch.ones(2)}])
def test_a_record_that_json_cannot_hold_changes_nothing(folder: Path, record: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TypeError, match="JSON"):
        write_folder(folder, record, NEW)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_any_flipped_byte_is_noticed(folder: Path) -> None:
    for file in list(folder.iterdir()):
        data = file.read_bytes()
        for place in range(0, len(data), 7):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(StorageError, match=f"{folder}"):
                read_folder(folder)
        file.write_bytes(data)
    assert same(read_folder(folder)[1], OLD)


@pytest.mark.parametrize("name", ["record.json", "tensors-*.safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_files_are_refused(folder: Path, name: str, keep: float) -> None:
    (file,) = folder.glob(name)
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(StorageError, match=f"{file} is damaged"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("name", "message"), [("record.json", "holds no record.json"), ("tensors-*.safetensors", "safetensors is missing")]
)
def test_missing_files_are_named(folder: Path, name: str, message: str) -> None:
    (file,) = folder.glob(name)
    file.unlink()
    with pytest.raises(StorageError, match=message):
        read_folder(folder)


def test_no_folder_at_all(folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="not a folder saved by tl_spd"):
        read_folder(folder)


NO_RECORDS = [
    b"",
    b"not json",
    b"[1, 2]",
    b"3",
    b"null",
    b'"text"',
    b"{}",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b"9" * 10_000,
]


@pytest.mark.parametrize("data", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_what_is_no_record_is_refused(folder: Path, data: bytes) -> None:
    (folder / "record.json").write_bytes(data)
    with pytest.raises(StorageError, match=r"record\.json is damaged"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("{", '{"name": "first",', 1), "a key stands twice"),
        (lambda text: text.replace('"old"', "[" + "[]," * 100_000 + "[]]"), "larger or deeper than any record"),
        (lambda text: text + " " * 100_000_001, "larger or deeper than any record"),
    ],
    ids=["twice", "many", "long"],
)
def test_records_that_say_two_things_or_too_much_are_refused(
    folder: Path, change: Callable[[str], str], message: str
) -> None:
    file = folder / "record.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(StorageError, match=f"{file} is damaged .*{message}"):
        read_folder(folder)


def test_a_record_that_could_not_be_read_again_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MOST_RECORD", 2000)
    with pytest.raises(StorageError, match=r"has \d+ bytes, more than 2000; raise log_every"):
        write_folder(folder, {"history": [0.1] * 1000}, NEW)
    assert same(read_folder(folder)[1], OLD)


def test_links_in_a_folder_of_somebody_else_are_not_written_through(folder: Path, tmp_path: Path) -> None:
    mine, new = tmp_path / "mine", tmp_path / "new"
    mine.write_text("mine")
    (folder / ".partial").symlink_to(mine)
    (folder / "tensors-00.safetensors").symlink_to(mine)
    write_folder(folder, {}, NEW)
    (folder / ".lock").symlink_to(new)
    with pytest.raises(OSError, match=r"\.lock"):
        write_folder(folder, {}, OLD)
    assert mine.read_text() == "mine"
    assert not new.exists()
    assert same(read_folder(folder)[1], NEW)


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_other_schema_versions_are_named(folder: Path, version: Any) -> None:
    rewrite(folder, lambda record: record.update(schema_version=version))
    with pytest.raises(StorageError, match=f"schema version {version!r}, this release reads 1"):
        read_folder(folder)


@pytest.mark.parametrize(
    "name",
    ["../run2/{}", "/etc/passwd", "sub/{}", "..", "", "{}\0", "record.json", "tensors-../../x.safetensors", 3, None],
)
def test_a_record_cannot_point_outside_its_folder(folder: Path, name: Any) -> None:
    shutil.copytree(folder, folder.with_name("run2"))
    if isinstance(name, str):
        name = name.format(read_record(folder)["tensors"]["file"])
    rewrite(folder, lambda record: record["tensors"].update(file=name))
    with pytest.raises(StorageError, match="names no tensor file of its own folder"):
        read_folder(folder)


@pytest.mark.parametrize("entry", [None, "x", [], {}])
def test_a_record_without_tensors_is_refused(folder: Path, entry: Any) -> None:
    rewrite(folder, lambda record: record.update(tensors=entry))
    with pytest.raises(StorageError, match="names no tensor file"):
        read_folder(folder)


HEADER = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
NO_TENSORS = [
    b"",
    b"short",
    (1 << 62).to_bytes(8, "little") + b"{}",
    len(HEADER).to_bytes(8, "little") + HEADER,
    len(HEADER).to_bytes(8, "little") + HEADER.replace(b"F32", b"F99") + bytes(16),
    len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[4]", b"[5]") + bytes(16),
    (16_000_001).to_bytes(8, "little") + HEADER.ljust(16_000_001) + bytes(16),
]


@pytest.mark.parametrize("data", NO_TENSORS, ids=range(len(NO_TENSORS)))
def test_a_signed_file_that_is_no_safetensors_is_refused(folder: Path, data: bytes) -> None:
    name = f"tensors-{digest(data)}.safetensors"
    (folder / name).write_bytes(data)
    rewrite(folder, lambda record: record.update(tensors={"file": name, "blake2b": digest(data)}))
    with pytest.raises(StorageError, match="not a valid safetensors file"):
        read_folder(folder)
