"""Files from strangers: generated changes to Runs, checkpoints and weights are refused in one sentence or change nothing.

Each kind of change is made several times with its own seeds. A change that whoever made it would sign is signed. What loads in
spite of it must be the original, bit for bit; what is refused names the folder or file. Bombs are read under a memory limit.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

import tl_spd as spd
from tests.tiny import same_runs, tiny_decompose, tiny_host, tiny_run
from tl_spd import storage
from tl_spd.suppress import load_weights, save_weights

SITES = ("blocks.0.attn.W_Q", "blocks.1.mlp.W_out")
TRAINING: dict[str, Any] = dict(sites=SITES, steps=4, losses=[spd.StochasticRecon(1.0), spd.Faithfulness(1.0)])
SECONDS = 30
"""A bound on every case, for a machine with much else to do; alone they take milliseconds."""


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Saved:
    """The files of one target in memory: the record (None for weights) and the tensor file's bytes."""

    def __init__(self, path: Path):
        self.folder = path if path.is_dir() else None
        self.record: Any = json.loads((path / "record.json").read_text()) if self.folder else None
        file = path / self.record["tensors"]["file"] if self.folder else path
        self.data = file.read_bytes()
        self.text: bytes | None = None
        """Stands in the place of the record's own text, unsigned."""
        self.signed = True

    @property
    def header(self) -> str:
        return self.data[8 : 8 + int.from_bytes(self.data[:8], "little")].decode()

    def set_header(self, text: str, size: int | None = None) -> None:
        body = self.data[8 + int.from_bytes(self.data[:8], "little") :]
        raw = text.encode()
        self.data = (len(raw) if size is None else size).to_bytes(8, "little") + raw + body

    def tensors(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Change the tensors, and what the file says of itself."""
        tensors = load(self.data)
        change(tensors)
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        self.data = save(tensors, None if self.folder else {"blake2b": storage.tensors_digest(tensors)})

    def write(self, path: Path) -> None:
        if self.folder is None:
            path.write_bytes(self.data)
            return
        entry = self.record.get("tensors")
        name = entry.get("file") if isinstance(entry, dict) else None
        usual = isinstance(name, str) and re.fullmatch(r"tensors-[0-9a-f]+\.safetensors", name)
        if self.signed and usual:
            name = entry["file"] = f"tensors-{digest(self.data)}.safetensors"
            entry["blake2b"] = digest(self.data)
        (path / (name if usual else "tensors-00.safetensors")).write_bytes(self.data)
        if self.signed:
            self.record.pop("blake2b", None)
            self.record["blake2b"] = digest(json.dumps(self.record, sort_keys=True).encode())
        (path / "record.json").write_bytes(json.dumps(self.record).encode() if self.text is None else self.text)


# --- kinds of changes ------------------------------------------------------------------------------------------------


def truncated(draw: random.Random, saved: Saved) -> None:
    saved.signed = False
    if saved.folder and draw.random() < 0.5:
        text = json.dumps(saved.record).encode()
        saved.text = text[: draw.randrange(len(text))]
    else:
        saved.data = saved.data[: draw.randrange(len(saved.data))]


def truncated_and_signed(draw: random.Random, saved: Saved) -> None:
    saved.data = saved.data[: draw.choice([0, 7, 8, 9, draw.randrange(len(saved.data)), len(saved.data) - 1])]


def flipped(draw: random.Random, saved: Saved) -> None:
    saved.signed = False
    place = draw.randrange(len(saved.data))
    saved.data = saved.data[:place] + bytes([saved.data[place] ^ 1 << draw.randrange(8)]) + saved.data[place + 1 :]


def led_elsewhere(draw: random.Random, saved: Saved) -> None:
    name = draw.choice(
        [
            "../run2/{}",
            "/etc/passwd",
            "a/{}",
            "..",
            "",
            "{}\0",
            "tensors-../../{}",
            "~/{}",
            "file://{}",
            "\u202e{}",
            "record.json",
        ]
    )
    saved.record["tensors"]["file"] = name.format(saved.record["tensors"]["file"])


def huge_header(draw: random.Random, saved: Saved) -> None:
    size = draw.choice([2**63 - 1, 2**64 - 1, 2**40, 100_000_001, 16_000_001, len(saved.data), 0, 1])
    if draw.random() < 0.5:
        saved.set_header(saved.header, size)
    else:
        saved.set_header(saved.header + " " * draw.choice([16_000_000, 20_000_000]))


def changed_header(draw: random.Random, saved: Saved) -> None:
    """Entries of the header that contradict each other, the file, or the rules of the format."""
    header = json.loads(saved.header)
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    what = draw.randrange(8)
    if what == 0:
        entry["data_offsets"] = [offset + draw.choice([-1, 1, 2**40, 2**63]) for offset in entry["data_offsets"]]
    elif what == 1:
        entry["data_offsets"] = entry["data_offsets"][::-1]
    elif what == 2:
        entry["shape"] = draw.choice([[-1, 3], [2**62, 4], [1.5], "x", None, [], [[1]], [0], [10**20]])
    elif what == 3:
        entry["dtype"] = draw.choice(["F99", "", None, 3, "I8", "F64", "BOOL", "C64", "F8_E4M3"])
    elif what == 4:
        entry[draw.choice(["__class__", "blake2b", "dtype "])] = "x"
    elif what == 5:
        header[draw.choice(["../../x", "__import__", "", "\n", "x" * 5000])] = header.pop(name)
    elif what == 6:
        saved.set_header(saved.header.replace("{", f'{{"{name}":{json.dumps(entry)},', 1))  # twice the same name
        return
    else:
        saved.set_header(draw.choice(["[" * 10_000, "null", "[]", '{"a":{}}', "{" + '"a":{' * 5000, "\xff", "NaN"]))
        return
    saved.set_header(json.dumps(header))


def some_tensor(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    return draw.choice(sorted(tensors))


def dtypes(draw: random.Random, saved: Saved) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = some_tensor(draw, tensors)
        others = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
        kinds = [torch.int32, torch.int64, torch.uint8, torch.bool] if saved.folder is None else others
        tensors[name] = tensors[name].to(draw.choice([dtype for dtype in kinds if dtype != tensors[name].dtype]))

    saved.tensors(change)


def shapes(draw: random.Random, saved: Saved) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = some_tensor(draw, tensors)
        value = tensors[name]
        others = [value[None], value.reshape(-1)[:-1], torch.zeros(0, dtype=value.dtype), torch.stack([value, value])]
        others += [value.T] if value.ndim == 2 and value.shape[0] != value.shape[1] else []
        tensors[name] = draw.choice([other for other in others if other.shape != value.shape])

    saved.tensors(change)


def not_finite(draw: random.Random, saved: Saved) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        names = [name for name, value in tensors.items() if value.is_floating_point()]
        value = tensors[draw.choice(sorted(names))].reshape(-1)
        value[draw.randrange(len(value))] = draw.choice([math.nan, math.inf, -math.inf])

    saved.tensors(change)


def missing_tensors(draw: random.Random, saved: Saved) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[some_tensor(draw, tensors)]

    saved.tensors(change)


def extra_tensors(draw: random.Random, saved: Saved) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        first = some_tensor(draw, tensors)
        name = draw.choice(["x", first + "x", "../" + first, first + "\n", "training/optimizer/0/max_exp_avg_sq"])
        name = draw.choice(
            [name, "training/x", "training/optimizer/-1/exp_avg", "training/generator/other", "é" * 3000]
        )
        tensors[name] = torch.ones(draw.choice([(), (3,), (0,)]))

    saved.tensors(change)


def swapped_tensors(draw: random.Random, saved: Saved) -> None:
    """Two tensors of different shapes under each other's names."""

    def change(tensors: dict[str, Tensor]) -> None:
        pairs = [(a, b) for a in tensors for b in tensors if tensors[a].shape != tensors[b].shape]
        first, second = draw.choice(pairs)
        tensors[first], tensors[second] = tensors[second], tensors[first]

    saved.tensors(change)


def no_tensor_file(draw: random.Random, saved: Saved) -> None:
    """What runs code when it is unpickled, and other formats."""
    saved.data = draw.choice(
        [pickle.dumps(Runs()), b"PK\x03\x04" + pickle.dumps(Runs()), b"", b"\0" * 64, b"GGUF" + bytes(90)]
    )


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(Path(__file__).with_name("unpickled")),))


JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 1e400, math.nan, 10**30, "", "x", "../../x", "<script>\u202e\n", "y" * 5000),
    *([], {}, [[]], [None] * 3, {"a": 1}, {"kind": "Vector"}, "1", ["blocks.0.attn.W_Q"]),
]


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*here, key)
        yield from paths(value[key], (*here, key))


def junk_in_the_record(draw: random.Random, saved: Saved) -> None:
    """Some value of the record, however deep, is another one, or is not there."""
    *path, last = draw.choice([path for path in paths(saved.record) if path[0] != "blake2b"])
    inside = saved.record
    for key in path:
        inside = inside[key]
    if draw.random() < 0.2:
        del inside[last]
    else:
        inside[last] = draw.choice(JUNK)


def json_bombs(draw: random.Random, saved: Saved) -> None:
    """Deep, long, repeated and oversized JSON, in the place of the record or of a value in it."""
    text = json.dumps(saved.record)
    deep = draw.choice([300, 900, 990, 5000, 200_000])
    bomb = draw.choice(
        [
            "[" * deep + "]" * deep,
            '{"a":' * deep + "1" + "}" * deep,
            "9" * draw.choice([4000, 5000, 100_000]),
            "1e" + "9" * 100_000,
            f"[{'1.5,' * 300_000}1]",
            f'"{"x" * 3_000_000}"',
            f"[{'{},' * 200_000}1]",
            '"' + "\\ud800" * 1000 + '"',
        ]
    )
    key = draw.choice(["settings", "history", "n_ctx", "sites", "schema_version", "importance", "tensors", "new", ""])
    saved.text = bomb.encode() if not key else text.replace("{", f'{{"{key}":{bomb},', 1).encode()
    if key and draw.random() < 0.5:  # signed, and so in one place only
        try:
            saved.record[key] = json.loads(bomb)
            json.dumps(saved.record, sort_keys=True)
            saved.text = None
        except (ValueError, RecursionError):
            saved.record = json.loads(text)


def repeated_keys(draw: random.Random, saved: Saved) -> None:
    """The record is signed as it is parsed: what stands first is not what was signed."""
    key = draw.choice(["n_ctx", "sites", "tensors", "settings", "schema_version", "blake2b"])
    saved.record.pop("blake2b")
    saved.record["blake2b"] = digest(json.dumps(saved.record, sort_keys=True).encode())
    saved.text = json.dumps(saved.record).replace("{", f'{{"{key}":{json.dumps(draw.choice(JUNK))},', 1).encode()


def other_versions(draw: random.Random, saved: Saved) -> None:
    saved.record["schema_version"] = draw.choice(
        [0, 2, 10**30, -1, "1", None, 1.5, [1], {"1": 1}, math.nan, "z" * 9000]
    )


BOTH: list[Callable[[random.Random, Saved], None]] = [
    truncated, truncated_and_signed, flipped, huge_header, changed_header, dtypes, shapes, not_finite, missing_tensors,
    extra_tensors, swapped_tensors, no_tensor_file,
]  # fmt: skip
RECORDS = [led_elsewhere, junk_in_the_record, json_bombs, repeated_keys, other_versions]
MORE = {junk_in_the_record: 25, changed_header: 12, json_bombs: 8}
KINDS = {"run": [*BOTH, *RECORDS], "checkpoint": [*BOTH, *RECORDS], "weights": BOTH}
ALWAYS_REFUSED = (dtypes, shapes, not_finite, missing_tensors, swapped_tensors)
"""No change of these kinds to a Run's or a host's weights may load."""
CASES = [(target, kind, MORE.get(kind, 3)) for target, kinds in KINDS.items() for kind in kinds]


def test_there_are_enough_of_them() -> None:
    assert sum(seeds for _, _, seeds in CASES) >= 200
    assert len({kind for _, kind, _ in CASES}) >= 10


# --- what becomes of them --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A host, a Run of it, a training stopped at step 2 of 4 with its unbroken end, and a host's weights; each with its files."""
    where, model = tmp_path_factory.mktemp("originals"), tiny_host(dtype=torch.float32)
    run = tiny_run(model, SITES)
    run.settings, run.history = {"C": 3, "steps": 2}, tiny_decompose(model, steps=2).history
    run.save(where / "run")

    def data(step: int, generator: torch.Generator) -> Tensor:
        if step == 2 and not (where / "stopped").exists():
            (where / "stopped").mkdir()
            raise KeyboardInterrupt
        return torch.randint(0, 11, (2, 4), generator=generator)

    with pytest.raises(KeyboardInterrupt) as stopped:
        tiny_decompose(model, data, **TRAINING | {"out": where / "training"})
    save_weights(model, where / "weights")
    found = {"model": model, "data": data, "unbroken": tiny_decompose(model, data, **TRAINING), "where": where}
    return found | {"run": run, "checkpoint": stopped.value.run, "weights": model}  # type: ignore[attr-defined]


def unless_refused(work: Callable[[], Any], path: Path) -> Any:
    """What ``work`` gives, or None where it is refused in one sentence that names ``path``; at once in any case."""
    started = time.monotonic()
    try:
        return work()
    except ValueError as error:  # StorageError is one
        caught = error
    finally:
        assert time.monotonic() - started < SECONDS
    assert type(caught) in (ValueError, spd.StorageError), repr(caught)
    assert str(path) in str(caught)
    assert "\n" not in str(caught)
    assert len(str(caught)) < 1400
    return None


@pytest.mark.parametrize(("target", "kind", "seeds"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_changed_files_are_refused_or_mean_the_same(
    target: str, kind: Callable[..., None], seeds: int, originals: dict[str, Any], tmp_path: Path
) -> None:
    outcomes = outcomes_of(target, kind, range(seeds), originals, tmp_path)
    assert not (any(outcomes) and kind in ALWAYS_REFUSED and target != "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind", "seeds"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_many_more_changes(
    target: str, kind: Callable[..., None], seeds: int, originals: dict[str, Any], tmp_path: Path
) -> None:
    outcomes = outcomes_of(target, kind, range(seeds, 20 * seeds), originals, tmp_path)
    assert not (any(outcomes) and kind in ALWAYS_REFUSED and target != "checkpoint")


def outcomes_of(
    target: str, kind: Callable[..., None], seeds: range, originals: dict[str, Any], tmp_path: Path
) -> list[bool]:
    """Make the changes of these seeds, and see what becomes of each: whether it could be loaded (and was right)."""
    source = originals["where"] / {"checkpoint": "training/checkpoint"}.get(target, target)
    model, outcomes = originals["model"], []
    for seed in seeds:
        saved, path = Saved(source), tmp_path / str(seed) / source.name
        path.parent.mkdir()
        if target != "weights":
            path.mkdir()
        kind(random.Random(f"{target} {kind.__name__} {seed}"), saved)
        saved.write(path)
        if target == "weights":
            fresh, before = tiny_host(seed=1, dtype=torch.float32), tiny_host(seed=1, dtype=torch.float32)
            outcomes.append(unless_refused(lambda p=path, m=fresh: load_weights(m, p) or True, path) is not None)
            wanted = model if outcomes[-1] else before
            assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), wanted.parameters(), strict=True))
            continue
        run = unless_refused(lambda p=path: spd.load(p, model), path)
        outcomes.append(run is not None)
        if run is not None:
            ours, wanted = run.tensors(), originals[target].tensors()
            assert ours.keys() == wanted.keys()
            assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
        if target == "checkpoint":
            settings = TRAINING | {"out": path.parent, "resume": True}
            resumed = unless_refused(lambda s=settings: tiny_decompose(model, originals["data"], **s), path)
            if resumed is not None and kind is not junk_in_the_record:  # which may change the step, or a logged loss
                assert same_runs(resumed, originals["unbroken"])
        shutil.rmtree(path.parent)
    assert not Path(__file__).with_name("unpickled").exists()
    return outcomes


# --- bombs -----------------------------------------------------------------------------------------------------------

MEMORY = 1_500_000_000
"""Bytes of address space that reading a bomb may take, beyond what the process has."""


def bombs(source: Path, where: Path) -> Iterator[str]:
    """Folders and files that are small to send or make, and large to take in; their names."""
    text = (source / "record.json").read_text()
    for name, record in {
        "a long text": text.replace("{", '{"x":"' + "y" * 101_000_000 + '",', 1),
        "a shorter text": text.replace("{", '{"x":"' + "y" * 40_000_000 + '",', 1),
        "many lists": text.replace("{", '{"x":[' + "[]," * 2_000_000 + "[]],", 1),
        "many numbers": text.replace("{", '{"x":[' + "1.5," * 3_000_000 + "1],", 1),
        "text of wide characters": text.replace("{", '{"x":"' + "🦊" * 5_000_000 + '",', 1),
    }.items():
        shutil.copytree(source, where / name)
        (where / name / "record.json").write_text(record)
        yield name
    shutil.copytree(source, where / "a long hole")
    os.truncate(where / "a long hole" / "record.json", 2**40)
    yield "a long hole"
    shutil.copytree(source, where / "a large hole")
    os.truncate(next((where / "a large hole").glob("tensors-*")), 2**36)
    yield "a large hole"
    saved = Saved(source)
    entries = (f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(100_000))
    saved.set_header("{" + ",".join(entries) + "}")
    saved.data = saved.data[: 8 + int.from_bytes(saved.data[:8], "little")]
    (where / "many tensors").mkdir()
    saved.write(where / "many tensors")
    yield "many tensors"
    header = b'{"embed.W_E":{"dtype":"F32","shape":[17179869184],"data_offsets":[0,68719476736]}}'
    (where / "weights").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(where / "weights", 8 + len(header) + 2**36)
    yield "weights"


def read_bombs(where: Path, names: list[str]) -> None:
    """Raises unless every bomb is refused, soon and in little memory."""
    import resource

    model = tiny_host(dtype=torch.float32)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for name in names:
        started = time.monotonic()
        read = load_weights if name == "weights" else lambda model, path: spd.load(path, model)
        assert unless_refused(lambda n=name, r=read: r(model, where / n) or True, where / name) is None, name
        print(f"{name}: {time.monotonic() - started:.1f} s")


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux")
def test_bombs_are_refused_within_a_limit_of_memory(originals: dict[str, Any], tmp_path: Path) -> None:
    names = list(bombs(originals["where"] / "run", tmp_path))
    process = multiprocessing.get_context("forkserver").Process(target=read_bombs, args=(tmp_path, names))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    shutil.rmtree(tmp_path)
