"""What a training holds: predicted before it starts, and not a byte more after hundreds of steps and contexts."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spd as spd
from tests.tiny import tiny_decompose, tiny_host, tiny_run, tiny_tokens, unchanged
from tl_spd import memory
from tl_spd.data import Batches
from tl_spd.settings import make_settings

FEW = (spd.Faithfulness(1.0), spd.ImportanceMinimality(0.1), spd.StochasticRecon(1.0), spd.Recon(1.0))
WARM_UP = spd.FaithfulnessWarmup(steps=2)


def allocated(function: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator had given out at once during ``function``, beyond those at its start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def rows(batch: int, pos: int = 12) -> Tensor:
    return tiny_tokens(batch, pos)


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "scalar": ("llama", 8, dict(importance=spd.Scalar(4), losses=FEW)),
    "attention": ("shortformer", 8, dict(importance=spd.Attention(d_gate=4), losses=spd.paper_losses("induction"))),
    "vector, one stack of 4 rows": ("parallel", 8, dict(losses=spd.paper_losses("gpt2"), max_rows=4)),
    "recomputed": ("llama", 8, dict(losses=spd.paper_losses("gpt2"), max_rows=8, recompute=True)),
    "shared, many parameters": (
        "gpt2",
        1,
        dict(importance=spd.Shared(hidden=3000), losses=FEW, sites="blocks.0.mlp.*"),
    ),
    "last token, all sites": ("gpt2", 8, dict(losses=FEW, last_token_only=True, sites="*")),
    "warm-up is the peak": ("gpt2", 8, dict(importance=spd.Scalar(1), losses=FEW[:2], C=200, sites="blocks.*.mlp.*")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_the_allocator_gives_out(case: str) -> None:
    style, batch, changes = CASES[case]
    model, data = tiny_host(style, dtype=torch.float32, n_ctx=12), rows(batch)
    arguments = dict(sites="blocks.*", C=5, importance=spd.Vector(4), steps=3, warmup=WARM_UP, progress=False) | changes
    found = spd.estimate_memory(model, data, **arguments)
    measured = allocated(lambda: spd.decompose(model, data, **arguments))
    assert abs((found.peak - found.host) / measured - 1) < 0.25, (found.stages, measured)
    names = {key: arguments[key] for key in ("sites", "C", "importance", "losses", "steps")}
    assert memory.at_most(model, make_settings(**names), Batches(data, model)) > measured


def test_recomputing_holds_one_stack_at_a_time() -> None:
    model = tiny_host("llama", dtype=torch.float32, n_ctx=12)
    kept, again = (
        spd.estimate_memory(
            model, rows(8), sites="blocks.*", C=5, losses=spd.paper_losses("gpt2"), max_rows=8, recompute=recompute
        )
        for recompute in (False, True)
    )
    assert again.peak - again.host < 0.5 * (kept.peak - kept.host)


def test_the_parts_by_hand() -> None:
    model = tiny_host("gpt2", dtype=torch.float32)
    found = spd.estimate_memory(
        model, rows(4, 5), sites="blocks.0.mlp.W_in", C=5, importance=spd.Vector(3), losses=FEW, warmup=WARM_UP
    )
    components, gates = 5 * (6 + 12), 6 * 3 * 5 + 3 * 5 + 3 * 5 + 5
    assert found.host == 4 * sum(p.numel() for p in model.parameters()) + sum(
        b.numel() * b.element_size() for b in model.buffers()
    )
    assert found.parameters == found.gradients == 4 * (components + gates)
    assert found.optimizer == 2 * found.parameters
    # W, read @ write, W minus that, its square: three of [6, 12] at once with the gradient of the square; Adam's moments.
    fixed = found.host + found.parameters + 2 * 4 * components
    assert fixed + 2 * 4 * 72 < found.stages["warm-up"] < fixed + 4 * components + 5 * 4 * 72
    assert found.peak == found.stages[found.stage] == max(found.stages.values())
    fixed = found.host + found.parameters + found.gradients + found.optimizer
    assert found.activations["losses"] == found.stages["losses"] - fixed


def test_a_checkpoint_is_in_memory_twice_beside_the_tensors(tmp_path: Path) -> None:
    model = tiny_host("gpt2", dtype=torch.float32)
    arguments: dict[str, Any] = dict(sites="blocks.0.mlp.W_in", C=5, losses=FEW, importance=spd.Shared(5000))
    without = spd.estimate_memory(model, rows(2, 3), **arguments)
    saved = spd.estimate_memory(model, rows(2, 3), **arguments, out=tmp_path, checkpoint_every=1)
    assert "checkpoint" not in without.stages
    assert saved.stage == "checkpoint"
    assert saved.peak - saved.host == pytest.approx(10 * saved.parameters, rel=0.05)  # 4 as always, and 3 of them twice


LOWERED: dict[str, dict[str, Any]] = {
    "the rows of your batches": dict(data=rows(4)),
    "C": dict(C=4),
    "d_gate": dict(importance=spd.Vector(50)),
    "the losses' samples": dict(losses=(FEW[0], spd.StochasticRecon(samples=2))),
    "fewer sites": dict(sites="blocks.1.*"),
    "recompute=True and max_rows": dict(recompute=True, max_rows=8),
}


def test_what_a_warning_names_lowers_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_host(dtype=torch.float32, n_ctx=12)
    arguments: dict[str, Any] = dict(
        data=rows(8), sites="blocks.*", C=8, importance=spd.Vector(100), losses=(FEW[0], spd.StochasticRecon(samples=4))
    )
    peak = spd.estimate_memory(model, **arguments).peak
    monkeypatch.setattr(memory, "_memory", lambda device: (peak // 2, 2 * peak))
    with pytest.warns(UserWarning, match="may not fit") as caught:
        spd.decompose(model, **arguments, steps=1, progress=False, warmup=spd.FaithfulnessWarmup(steps=0))
    for name, change in LOWERED.items():
        assert name in str(caught[0].message)
        assert spd.estimate_memory(model, **arguments | change).peak < 0.95 * peak, name


def test_what_can_never_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_host()
    monkeypatch.setattr(memory, "_memory", lambda device: (100, 1000))
    with (
        unchanged(model),
        pytest.raises(spd.TooLargeError, match=r"0\.00 MB of 0\.00 MB are free.* check_memory=False"),
    ):
        tiny_decompose(model, out=tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    assert len(tiny_decompose(model, check_memory=False).history) == 4


def test_data_is_asked_for_one_batch_and_loses_none() -> None:
    model, seen = tiny_host(), list[int]()

    def batches() -> Any:
        for index in range(4):
            seen.append(index)
            yield tiny_tokens(seed=index)

    once = tiny_decompose(model, batches())
    assert seen == [0, 1, 2, 3]
    again = tiny_decompose(model, [tiny_tokens(seed=index) for index in range(4)], check_memory=False)
    assert once.history.equals(again.history)


# --- no growth --------------------------------------------------------------------------------------------------------


def alive() -> tuple[int, int]:
    """How many tensors live, and the bytes of their storages."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


def hooks(model: torch.nn.Module) -> int:
    return sum(len(value) for m in model.modules() for key, value in vars(m).items() if key.endswith("hooks"))


def grown(steps: int, **changes: Any) -> list[tuple[int, int, int]]:
    """Tensors and bytes alive, and peak resident kilobytes, in front of steps 100 and ``steps`` - 1 of a training."""
    found = []

    def data(step: int, generator: torch.Generator) -> Tensor:
        if step in (100, steps - 1):
            found.append((*alive(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        return torch.randint(0, 11, (2, 4), generator=generator)

    tiny_decompose(tiny_host(), data, steps=steps, log_every=steps, **changes)
    return found


def test_nothing_grows_over_500_steps() -> None:
    early, late = grown(501, sites="blocks.1.mlp.W_out", losses=[spd.Faithfulness(), spd.StochasticRecon()])
    assert early[:2] == late[:2]


@pytest.mark.slow
def test_the_process_does_not_grow_over_2000_steps(record_property: Callable[[str, Any], None]) -> None:
    early, late = grown(2000, sites="blocks.*", losses=spd.paper_losses("gpt2"), importance=spd.Attention(d_gate=4))
    record_property("growth of the resident size, MB", (late[2] - early[2]) / 1024)
    assert early[:2] == late[:2]
    assert late[2] - early[2] < 20 * 1024


def test_nothing_grows_over_200_contexts() -> None:
    model, tokens = tiny_host(), tiny_tokens()
    run = tiny_run(model)
    found = []
    for context in range(201):
        with spd.decomposed(model, run, masks=("importance", "ones")[context % 2]):
            model(tokens)
        with spd.suppressed(model, run, {"blocks.0.mlp.W_in": [0]}):
            model(tokens)
        if context in (10, 200):
            found.append((*alive(), hooks(model)))
    assert found[0] == found[1]


def test_samples_count() -> None:
    """A random subset is taken at its largest, so that partial terms count as full ones."""
    model = tiny_host(dtype=torch.float32)
    partial, full = (
        spd.estimate_memory(model, rows(4, 5), sites="blocks.*", C=5, losses=(term,))
        for term in (spd.StochasticReconPartial(samples=3), spd.StochasticRecon(samples=3))
    )
    assert replace(partial, available=None) == replace(full, available=None)
