"""Runs: saved and loaded to the bit, for the host they were made for and for no other."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import tl_spd as spd
from tests.tiny import same_runs, tiny_host, tiny_padding, tiny_run, tiny_tokens
from tl_spd import storage
from tl_spd.importance import ImportanceSpec
from tl_spd.run import Run, new_run, site_inputs
from tl_spd.sites import Site, bias, find_sites, weight

SPECS = [
    spd.Scalar(d_gate=2),
    spd.Vector(d_gate=2),
    spd.Shared(hidden=3),
    spd.Attention(d_gate=2, d_attn=3),
    spd.Attention(d_gate=2, relative="scalar"),
    spd.Attention(d_gate=2, relative="scalar", reach=2.0),
]


@dataclasses.dataclass(frozen=True)
class Halved(ImportanceSpec):
    """An importance function of a user's own: one direction per subcomponent, scaled by a buffer."""

    scale: float = 0.5

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        module = HalvedImportance()
        module.W = nn.Parameter(normal(site.d_importance, C, std=1.0))
        module.register_buffer("scale", torch.full((C,), self.scale, dtype=module.W.dtype))
        return module


class HalvedImportance(nn.Module):
    """``scale * x W``."""

    def forward(self, x: Tensor, inner: Tensor, real: Tensor | None = None) -> Tensor:
        return (x @ self.W) * self.scale


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Run, Path]:
    """A host, a Run of both its W_out, and the folder that the Run was saved in."""
    model = tiny_host()
    run = tiny_run(model, "blocks.*.mlp.W_out")
    run.settings = {"C": 3, "optimizer": {"lr": 0.1}, "sites": ["a", "b"]}
    run.history = pd.DataFrame([{"step": 1, "loss": 0.1}, {"step": 2, "loss": 1 / 3}])
    run.save(tmp_path / "run")
    return model, run, tmp_path / "run"


def resign(
    folder: Path, record: Callable[[dict[str, Any]], Any] = len, tensors: Callable[[dict[str, Tensor]], Any] = len
) -> None:
    """Save the folder again with a changed record and changed tensors, as somebody who means harm would."""
    old_record, old_tensors = storage.read_folder(folder)
    del old_record["schema_version"], old_record["tensors"]
    record(old_record)
    tensors(old_tensors)
    storage.write_folder(folder, old_record, old_tensors)


@pytest.mark.parametrize("spec", [*SPECS, Halved(0.25)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip(tmp_path: Path, spec: ImportanceSpec, dtype: torch.dtype) -> None:
    model, tokens = tiny_host(dtype=dtype), tiny_tokens()
    run = tiny_run(model, ("*embed*", "blocks.0.attn.*", "blocks.1.mlp.*"), importance=spec)
    run.settings = {"C": 3, "list": [0.1, None, "text"], "nested": {"x": True}}
    run.history = pd.DataFrame([{"step": 5, "loss": 0.1, "L0": 3.0}, {"step": 10, "loss": 1e-30, "L0": 2.5}])
    run.save(tmp_path)
    loaded = spd.load(tmp_path, model)
    assert same_runs(run, loaded)
    assert list(loaded.history.dtypes) == list(run.history.dtypes)
    for name in ("sites", "importance", "n_ctx", "fingerprint", "settings"):
        assert getattr(loaded, name) == getattr(run, name), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    before, after = run.importances(model, tokens), loaded.importances(model, tokens)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with spd.decomposed(model, run):
        masked = model(tokens)
    with spd.decomposed(model, loaded):
        assert torch.equal(model(tokens), masked)


def test_the_record_says_what_was_used(saved: Any) -> None:
    _, run, folder = saved
    record = json.loads((folder / "record.json").read_text())
    assert record["schema_version"] == 1
    assert [(entry["name"], entry["d_in"], entry["d_out"], entry["C"]) for entry in record["sites"]] == [
        ("blocks.0.mlp.W_out", 12, 6, 3),
        ("blocks.1.mlp.W_out", 12, 6, 3),
    ]
    assert record["importance"] == {"kind": "Vector", "d_gate": 2, "start": 1.0}
    assert record["n_ctx"] == 8
    assert record["settings"] == run.settings
    assert record["history"] == {"step": [1, 2], "loss": [0.1, 1 / 3]}
    assert (
        record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    )  # not all builds say which
    assert set(record["versions"]) == {"tl_spd", "torch", "transformer-lens", "safetensors"}
    assert set(record["fingerprint"]) == {"blocks.0.mlp.W_out", "blocks.1.mlp.W_out", "*"}


def change(model: Any, name: str) -> Any:
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] += 1e-6
    return model


OTHER_HOSTS: dict[str, tuple[Callable[[], Any], str]] = {
    "decomposed site": (
        lambda: change(tiny_host(), "blocks.1.mlp.W_out"),
        r"other weights: blocks\.1\.mlp\.W_out differs",
    ),
    "other parameter": (
        lambda: change(tiny_host(), "blocks.0.attn.W_Q"),
        "other weights: a weight that is not decomposed",
    ),
    "dtype": (lambda: tiny_host().to(torch.float32), "also a cast to another dtype"),
    "attention only": (lambda: tiny_host("shortformer"), r"W_out as 12 x 6; this host has no such weight"),
    "other width": (lambda: tiny_host(d_mlp=10), r"W_out as 12 x 6; this host has 10 x 6"),
    "other style": (lambda: tiny_host("parallel"), r"other weights: blocks\.0\.mlp\.W_out"),
}


@pytest.mark.parametrize("other", OTHER_HOSTS)
def test_other_hosts_are_refused(saved: Any, other: str) -> None:
    _, _, folder = saved
    make, message = OTHER_HOSTS[other]
    with pytest.raises(ValueError, match=message):
        spd.load(folder, make())


def test_a_reverted_host_is_accepted_again(saved: Any) -> None:
    model, run, folder = saved
    kept = model.blocks[0].mlp.W_out.detach().clone()
    change(model, "blocks.0.mlp.W_out")
    with pytest.raises(ValueError, match="other weights"):
        spd.load(folder, model)
    model.blocks[0].mlp.W_out.data.copy_(kept)
    assert same_runs(run, spd.load(folder, model))


READ, W1 = "components/blocks.0.mlp.W_out/read", "functions/blocks.1.mlp.W_out/gates.W1"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(READ), f"lack '{READ}' \\(1 missing"),
    "two missing": (lambda t: (t.pop(READ), t.pop(W1)), f"lack '{READ}' \\(2 missing"),
    "extra": (lambda t: t.update(spare=torch.ones(2)), "hold 'spare', which its record does not ask for"),
    "a training's": (lambda t: t.update({"training/x": torch.ones(2)}), "hold 'training/x', which its record does not"),
    "transposed": (lambda t: t.update({READ: t[READ].T}), rf"'{READ}' .* is \(3, 12\) torch.float64; wanted \(12, 3\)"),
    "longer": (lambda t: t.update({W1: torch.zeros(12, 2, 4).double()}), r"is \(12, 2, 4\) .* wanted \(12, 2, 3\)"),
    "dtype": (
        lambda t: t.update({READ: t[READ].float()}),
        r"is \(12, 3\) torch.float32; wanted \(12, 3\) torch.float64",
    ),
    "nan": (lambda t: t[W1].view(-1)[5].fill_(float("nan")), f"'{W1}' .* not finite"),
    "inf": (lambda t: t[READ].view(-1)[0].fill_(float("-inf")), f"'{READ}' .* not finite"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(saved: Any, case: str) -> None:
    model, _, folder = saved
    spoil, message = BAD_TENSORS[case]
    resign(folder, tensors=spoil)
    with pytest.raises(spd.StorageError, match=message):
        spd.load(folder, model)


BAD_RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown importance": (lambda r: r["importance"].update(kind="Oracle"), "'Oracle' is not known.*import the module"),
    "unknown setting": (lambda r: r["importance"].update(width=3), r"no settings \['width'\]"),
    "bad setting": (lambda r: r["importance"].update(d_gate=0), "d_gate must be at least 1"),
    "other width": (lambda r: r["importance"].update(d_gate=5), r"is \(12, 2, 3\) .* wanted \(12, 5, 3\)"),
    "C of 0": (lambda r: r["sites"][0].update(C=0), "at least 1, found 0"),
    "C as text": (lambda r: r["sites"][0].update(C="3"), "at least 1, found '3'"),
    "C of another": (lambda r: r["sites"][1].update(C=4), r"is \(12, 3\) torch.float64; wanted \(12, 4\)"),
    "n_ctx infinite": (lambda r: r.update(n_ctx=1e400), "at least 1, found inf"),
    "no sites": (lambda r: r.pop("sites"), "damaged or incomplete: KeyError"),
    "sites no list": (lambda r: r.update(sites=3), "damaged or incomplete"),
    "site of other fields": (lambda r: r["sites"][0].update(color="red"), "damaged or incomplete"),
    "site without a name": (lambda r: r["sites"][0].pop("name"), "damaged or incomplete"),
    "no fingerprint": (lambda r: r.pop("fingerprint"), "damaged or incomplete"),
    "fingerprint no dict": (lambda r: r.update(fingerprint=3), "damaged or incomplete"),
    "settings no dict": (lambda r: r.update(settings=3), "damaged or incomplete"),
    "uneven history": (lambda r: r["history"].update(loss=[1.0]), "damaged or incomplete"),
    "importance no dict": (lambda r: r.update(importance="Vector"), "damaged or incomplete"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_records_that_do_not_fit_are_refused(saved: Any, case: str) -> None:
    model, _, folder = saved
    spoil, message = BAD_RECORDS[case]
    resign(folder, record=spoil)
    with pytest.raises(spd.StorageError, match=message):
        spd.load(folder, model)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: [entry.update(C=10**7) for entry in r["sites"]],
        lambda r: r["sites"][0].update(C=10**15),
        lambda r: r["importance"].update(d_gate=10**7),
        lambda r: r["importance"].update(d_gate=10**18),
    ],
    ids=["C 10^7", "C 10^15", "d_gate 10^7", "d_gate 10^18"],
)
def test_sizes_in_a_record_cost_nothing_before_they_are_checked(
    saved: Any, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    model, _, folder = saved
    resign(folder, record=spoil)
    before = resident()
    with pytest.raises(spd.StorageError, match=r"wanted|cannot be built"):
        spd.load(folder, model)
    assert resident() - before < 100 << 20


def resident() -> int:
    """The process's largest resident memory so far, in bytes."""
    resource = pytest.importorskip("resource")
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def test_a_user_defined_importance_needs_its_class(saved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, _, _ = saved
    tiny_run(model, "blocks.0.mlp.W_in", importance=Halved()).save(tmp_path / "own")
    monkeypatch.delitem(ImportanceSpec.registry, "Halved")
    with pytest.raises(spd.StorageError, match="'Halved' is not known here; import the module that defines it"):
        spd.load(tmp_path / "own", model)


def test_delta_is_what_the_sum_leaves(saved: Any) -> None:
    model, run, _ = saved
    for layer in (0, 1):
        name = f"blocks.{layer}.mlp.W_out"
        parts = run.components[name]
        total = sum(torch.outer(parts.read[:, c], parts.write[c]) for c in range(3))
        torch.testing.assert_close(run.delta(model)[name], model.blocks[layer].mlp.W_out.detach() - total.detach())
    assert not any(delta.requires_grad for delta in run.delta(model).values())


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (None, [0, 1]),
        ("*", [0, 1]),
        ("blocks.1.*", [1]),
        (["blocks.1.mlp.W_out", "blocks.0.*", "*"], [0, 1]),
    ],
)
def test_select(saved: Any, patterns: Any, names: list[int]) -> None:
    _, run, _ = saved
    assert [site.name for site in run.select(patterns)] == [f"blocks.{layer}.mlp.W_out" for layer in names]


@pytest.mark.parametrize("patterns", ["blocks.2.*", ["blocks.0.*", "blocks.0.attn.W_Q"], [], ""])
def test_select_refuses_patterns_without_a_match(saved: Any, patterns: Any) -> None:
    _, run, _ = saved
    with pytest.raises(ValueError, match=r"matches nothing|No site pattern"):
        run.select(patterns)


def test_parameters_are_each_named_once(saved: Any) -> None:
    _, run, _ = saved
    named = run.named_parameters()
    assert [id(parameter) for parameter in named.values()] == [id(parameter) for parameter in run.parameters()]
    assert list(named)[:2] == [READ, READ.replace("read", "write")]
    assert set(named) == set(run.tensors())
    run.requires_grad_(True)
    assert all(parameter.requires_grad for parameter in run.parameters())


@pytest.mark.parametrize("init", ["kaiming", "svd"])
def test_initial_values_depend_on_the_seed_alone(init: Any) -> None:
    model = tiny_host()
    sites = find_sites(model, "blocks.*.mlp.*")
    counts = {site.name: 4 for site in sites}
    state = torch.get_rng_state()
    first = new_run(model, sites, counts, spd.Vector(d_gate=2), init, seed=3)
    second = new_run(model, sites, counts, spd.Vector(d_gate=2), init, seed=3)
    other = new_run(model, sites, counts, spd.Vector(d_gate=2), init, seed=4)
    assert same_runs(first, second)
    assert not same_runs(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("style", ["gpt2", "llama", "shortformer"])
def test_the_inputs_of_sites_are_what_makes_their_outputs(style: str) -> None:
    """Against the host's own cached activations: ``x W + b`` at the real positions of every site in front of a norm or head."""
    model, tokens, mask = tiny_host(style), tiny_tokens(), tiny_padding("right")
    found = find_sites(model, "blocks.*")
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    gated = model.cfg.gated_mlp
    hooks = {"W_Q": "attn.hook_q", "W_K": "attn.hook_k", "W_V": "attn.hook_v", "W_O": "hook_attn_out"}
    hooks |= {
        "W_in": "mlp.hook_pre_linear" if gated else "mlp.hook_pre",
        "W_gate": "mlp.hook_pre",
        "W_out": "hook_mlp_out",
    }
    for name, x in site_inputs(model, found, tokens, mask).items():
        site = next(site for site in found if site.name == name)
        wanted = cache[f"blocks.{site.layer}.{hooks[site.kind]}"][mask.bool()].reshape(-1, site.d_out)
        b = bias(model, site)
        torch.testing.assert_close(x @ weight(model, site) + (0 if b is None else b), wanted)


def test_a_lookup_reads_every_token_once() -> None:
    model, tokens = tiny_host(), torch.tensor([[3, 1, 3], [1, 0, 2]])
    (found,) = site_inputs(model, find_sites(model, "embed.W_E"), tokens, torch.tensor([[1, 1, 1], [1, 1, 0]])).values()
    wanted = torch.zeros(3, model.cfg.d_vocab)
    wanted[0, 0] = wanted[1, 1] = wanted[2, 3] = 1
    assert torch.equal(found, wanted.to(found))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_fresh_run_is_open(spec: ImportanceSpec) -> None:
    """Gammas scatter around 1, and a start at 0 puts each of them lower by just that."""
    model, name = tiny_host(), "blocks.0.mlp.W_in"
    fresh = (
        new_run(model, find_sites(model, name), {name: 200}, s, "svd")
        for s in (spec, dataclasses.replace(spec, start=0.0))
    )
    pre, closed = (run.importances(model, tiny_tokens(4)).pre[name] for run in fresh)
    torch.testing.assert_close(pre - closed, torch.ones_like(pre))
    assert pre.mean().item() == pytest.approx(1.0, abs=0.35)


def test_loading_touches_neither_the_host_nor_the_global_random_state(saved: Any) -> None:
    model, _, folder = saved
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    spd.load(folder, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_a_run_does_not_keep_its_host_alive(tmp_path: Path) -> None:
    model = tiny_host()
    run = tiny_run(model, "blocks.0.mlp.W_out")
    run.save(tmp_path)
    loaded, importances, gone = spd.load(tmp_path, model), run.importances(model, tiny_tokens()), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert loaded.sites == run.sites
    assert importances.host is not None
    assert importances.host() is None


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_importances_do_not_see_padding(spec: ImportanceSpec, side: str) -> None:
    model, tokens, mask = tiny_host(), tiny_tokens(), tiny_padding(side)
    assert mask is not None
    run = tiny_run(model, "blocks.*.mlp.W_out", importance=spec)
    other = torch.where(mask.bool(), tokens, (tokens + 1) % 11)
    here, there = (run.importances(model, given, mask) for given in (tokens, other))
    for name in here:
        torch.testing.assert_close(here[name][mask.bool()], there[name][mask.bool()], rtol=1e-12, atol=1e-12)
