"""Importance functions against hand arithmetic, plain loops in numpy, and automatic differentiation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tl_spd as spd
from tests.tiny import tiny_host, tiny_padding, tiny_tokens
from tl_spd import attend as attend_module
from tl_spd import gates
from tl_spd.attend import attend, relative_scores
from tl_spd.importance import LEAK, AttentionImportance, Importances, lower, upper
from tl_spd.sites import Site

SITE = Site("blocks.0.mlp.W_in", "W_in", 0, 5, 7, 1)
C, N_CTX, D_GATE = 3, 6, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype) * std


def built(spec: spd.ImportanceSpec, seed: int = 0, site: Site = SITE, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The function of ``spec`` with every parameter random, biases too."""
    source = generator(seed)

    def normal(*shape: int, std: float, mean: Any = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=source, dtype=dtype) * (std or 0.5)
        return drawn + (mean(drawn) if callable(mean) else mean)

    return spec.build(site, C, N_CTX, normal)


def erf_gelu(value: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))))(value)


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


# --- sigmoids --------------------------------------------------------------------------------------------------------


def test_the_leak_is_a_hundredth() -> None:
    assert LEAK == 0.01


@pytest.mark.parametrize(
    ("pre", "low", "high"),
    [(-2.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.25, 0.25, 0.25), (1.0, 1.0, 1.0), (3.0, 1.0, 1.02), (101.0, 1.0, 2.0)],
)
def test_values_of_both_sigmoids_by_hand(pre: float, low: float, high: float) -> None:
    value = torch.tensor(pre, dtype=torch.float64)
    assert lower(value).item() == low
    assert upper(value).item() == pytest.approx(high, abs=1e-15)


@pytest.mark.parametrize(
    ("pre", "coming", "going"),
    [
        (0.5, 2.0, 2.0),  # inside: as it is
        (0.5, -2.0, -2.0),
        (-3.0, -2.0, -0.02),  # below 0: a hundredth, where descending raises the pre-activation
        (-3.0, 2.0, 0.0),  # and nothing where it would lower it further
        (1.5, 2.0, 0.0),  # above 1: nothing
        (1.5, -2.0, 0.0),
    ],
)
def test_gradient_of_lower_depends_on_its_sign(pre: float, coming: float, going: float) -> None:
    value = torch.tensor(pre, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(coming * lower(value), value)
    assert grad.item() == pytest.approx(going, abs=1e-15)


def test_a_wider_leak_lets_that_much_of_what_raises_through() -> None:
    value = torch.tensor([-3.0, -3.0, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    coming = torch.tensor([-2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(Importances({"a": value}, leak=0.25)["a"], value, coming)
    assert grad.tolist() == [-0.5, 0.0, -2.0, 0.0]


def test_a_leak_falls_from_its_start_to_a_hundredth() -> None:
    leak = spd.Leak(1.0, falls=(0.2, 0.6))
    at = {0.0: 1.0, 0.2: 1.0, 0.3: 10**-0.5, 0.4: 0.1, 0.5: 10**-1.5, 0.6: 0.01, 1.0: 0.01}
    assert {progress: leak.at(progress) for progress in at} == pytest.approx(at)
    assert [spd.Leak().at(progress) for progress in at] == pytest.approx([0.01] * len(at))


def test_descending_a_leak_lifts_a_dead_importance_but_never_sinks_it() -> None:
    for slope, moves in ((-1.0, True), (1.0, False)):
        value = torch.tensor([-0.5], requires_grad=True)
        (grad,) = torch.autograd.grad((slope * lower(value)).sum(), value)
        assert bool((value - grad > value).all()) is moves
        assert bool((value - grad >= value).all())


@pytest.mark.parametrize(("pre", "slope"), [(-3.0, 0.0), (0.5, 1.0), (1.5, 0.01), (50.0, 0.01)])
@pytest.mark.parametrize("coming", [2.0, -2.0])
def test_gradient_of_upper(pre: float, slope: float, coming: float) -> None:
    value = torch.tensor(pre, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(coming * upper(value), value)
    assert grad.item() == pytest.approx(coming * slope, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_both_sigmoids_equal_their_cases_bit_for_bit(dtype: torch.dtype) -> None:
    """Bounds too: at 0 lower leaks and upper rises, at 1 lower stands and upper rises in full."""
    pre = torch.cat([numbers(3000, dtype=dtype), torch.tensor([0.0, 1.0, -1e-30, 1e-30]).to(dtype).repeat(50)])
    pre, coming = pre.requires_grad_(), numbers(len(pre), seed=1, dtype=dtype)
    (grad,) = torch.autograd.grad(lower(pre), pre, coming)
    leaked = torch.where(pre <= 0, LEAK * coming.clamp(max=0), coming)
    assert torch.equal(grad, torch.where(pre >= 1, torch.zeros_like(coming), leaked))
    (grad,) = torch.autograd.grad(upper(pre), pre, coming)
    assert torch.equal(
        grad, torch.where(pre > 1, LEAK * coming, torch.where(pre >= 0, coming, torch.zeros_like(coming)))
    )
    value = torch.where(pre > 1, 1 + LEAK * (pre - 1), pre.clamp(min=0))
    torch.testing.assert_close(upper(pre), value, rtol=torch.finfo(dtype).eps, atol=0)


def test_importances_hold_lower_of_what_they_were_made_from() -> None:
    pre = {"a": torch.tensor([[[-1.0, 0.5, 7.0]]])}
    found = Importances(pre)
    assert found["a"].tolist() == [[[0.0, 0.5, 1.0]]]
    assert found.pre["a"] is pre["a"]
    assert (found.real, found.host, found.lookups) == (None, None, {})


# --- gates against loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_pos", [(2, 4), (1, 1)])
def test_scalar_is_one_network_of_one_number_per_subcomponent(batch_pos: tuple[int, int]) -> None:
    function = built(spd.Scalar(d_gate=D_GATE))
    p, inner = arrays(function), numbers(*batch_pos, C, seed=1)
    got = function(numbers(*batch_pos, 5), inner, None).detach().numpy()
    want = np.zeros((*batch_pos, C))
    for c in range(C):  # independent parameters: everything of subcomponent c, one place after another
        for place in np.ndindex(*batch_pos):
            hidden = erf_gelu(inner.numpy()[place][c] * p["gates.W1"][:, c] + p["gates.b1"][:, c])
            want[place][c] = hidden @ p["gates.W2"][:, c] + p["gates.b2"][c]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def loop_of_vector_gates(x: np.ndarray, p: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros((*x.shape[:-1], C))
    for c in range(C):
        for place in np.ndindex(*x.shape[:-1]):
            hidden = erf_gelu(x[place] @ p["gates.W1"][:, :, c] + p["gates.b1"][:, c])
            out[place][c] = hidden @ p["gates.W2"][:, c] + p["gates.b2"][c]
    return out


@pytest.mark.parametrize("batch_pos", [(2, 4), (1, 1)])
def test_vector_is_one_network_of_the_input_per_subcomponent(batch_pos: tuple[int, int]) -> None:
    function = built(spd.Vector(d_gate=D_GATE))
    x = numbers(*batch_pos, 5, seed=1)
    got = function(x, numbers(*batch_pos, C), None).detach().numpy()
    np.testing.assert_allclose(got, loop_of_vector_gates(x.numpy(), arrays(function)), rtol=1e-12, atol=1e-13)


def test_shared_is_one_network_for_all_subcomponents() -> None:
    function = built(spd.Shared(hidden=8))
    p, x = arrays(function), numbers(2, 4, 5, seed=1)
    want = np.zeros((2, 4, C))
    for place in np.ndindex(2, 4):
        hidden = erf_gelu(np.array([x.numpy()[place] @ p["W1"][:, h] + p["b1"][h] for h in range(8)]))
        for c in range(C):
            want[place][c] = sum(hidden[h] * p["W2"][h, c] for h in range(8)) + p["b2"][c]
    np.testing.assert_allclose(function(x, numbers(2, 4, C), None).detach().numpy(), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("spec", [spd.Vector(d_gate=D_GATE), spd.Scalar(d_gate=D_GATE)])
def test_subcomponents_share_nothing(spec: spd.ImportanceSpec) -> None:
    function = built(spec)
    x, inner = numbers(2, 4, 5), numbers(2, 4, C)
    before = function(x, inner, None)
    with torch.no_grad():
        for parameter in function.parameters():
            parameter[..., 1] += 1
    changed = (function(x, inner, None) != before).flatten(0, 1)
    assert changed[:, 1].all()
    assert not changed[:, [0, 2]].any()


def test_look_ups_are_judged_by_rows_of_the_width_of_the_output() -> None:
    function = built(spd.Vector(d_gate=2), site=Site("embed.W_E", "W_E", -1, 11, 7, 1))
    assert function.gates.W1.shape == (7, 2, C)


def test_d_gate_and_hidden_are_the_widths_of_the_hidden_layers() -> None:
    assert built(spd.Scalar(d_gate=9)).gates.W1.shape == (9, C)
    assert built(spd.Vector(d_gate=9)).gates.W1.shape == (5, 9, C)
    assert built(spd.Attention(d_gate=9)).gates.W1.shape == (10, 9, C)
    assert built(spd.Shared(hidden=9)).W1.shape == (5, 9)


# --- attention -------------------------------------------------------------------------------------------------------


def loop_of_attention(x: np.ndarray, p: dict[str, np.ndarray], real: np.ndarray | None, n_ctx: int) -> np.ndarray:
    """Algorithm 1 with a double loop over i, j: gamma ``[batch, pos, C]``."""
    batch, pos, d_in = x.shape
    s, d_attn = n_ctx, p["W_Q"].shape[1]
    both = np.zeros((batch, pos, 2 * d_in))
    for b in range(batch):
        x_pos = x[b] + p["absolute"][:pos]
        q, k, v = x[b] @ p["W_Q"], x[b] @ p["W_K"], x_pos @ p["W_V"]
        for i in range(pos):
            weights = np.zeros(pos)
            for j in range(pos):  # bidirectional: every j, before and behind i
                table = p["relative"][j - i + s]
                r = q[i] @ table if p["relative"].ndim == 2 else table
                keep = real is None or real[b, j]
                weights[j] = math.exp((q[i] @ k[j] + r) / math.sqrt(d_attn)) if keep else 0.0
            both[b, i] = np.concatenate([weights @ v / weights.sum(), x_pos[i]])
    return loop_of_vector_gates(both, p)


ATTENTIONS = [
    spd.Attention(d_gate=D_GATE, relative=relative, d_attn=d_attn, backend=backend)  # type: ignore[arg-type]
    for relative in ("vector", "scalar")
    for d_attn in (None, 2)
    for backend in ("eager", "sdpa", "blocked", "auto")
]


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("spec", ATTENTIONS, ids=str)
def test_attention_equals_a_double_loop(monkeypatch: pytest.MonkeyPatch, spec: spd.Attention, side: str | None) -> None:
    monkeypatch.setattr(attend_module, "BLOCK_SCORES", 2 * 4 * 3)  # two sequences: four queries as three and one
    function = built(spec)
    assert isinstance(function, AttentionImportance)
    with torch.no_grad():
        function.absolute.copy_(numbers(N_CTX, 5, seed=8))
        function.relative.copy_(numbers(*function.relative.shape, seed=9))
    mask = tiny_padding(side, 2, 4)
    real = None if mask is None else mask.bool()
    x = numbers(2, 4, 5, seed=1)
    got = function(x, numbers(2, 4, C), real).detach().numpy()
    want = loop_of_attention(x.numpy(), arrays(function), None if real is None else real.numpy(), N_CTX)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("d_attn", [None, 3])
def test_attention_of_a_given_reach_starts_falling_by_a_factor_e_every_so_many_tokens(d_attn: int | None) -> None:
    usual, local = (
        dict(built(spd.Attention(d_gate=2, d_attn=d_attn, relative="scalar", reach=reach)).named_parameters())
        for reach in (None, 1.5)
    )
    assert all(torch.equal(local[name], value) for name, value in usual.items() if name != "relative")
    table = (local["relative"] - usual["relative"]).detach()[1:]
    alike, values = torch.zeros(1, N_CTX, d_attn or 5).double(), torch.eye(N_CTX)[None].double()
    (pattern,) = attend(alike, alike, values, table, None, "eager")
    for i in range(N_CTX):
        for j in range(N_CTX):
            assert (pattern[i, j] / pattern[i, i]).item() == pytest.approx(math.exp(-abs(i - j) / 1.5), rel=1e-12)


def test_a_reach_is_refused_where_the_table_meets_the_queries() -> None:
    with pytest.raises(
        ValueError, match=r"reach must be .*needs the biases of relative='scalar', found 2.0 and 'vector'"
    ):
        spd.Attention(reach=2.0)


@pytest.mark.parametrize("pos", [1, 2, N_CTX])
def test_relative_scores_at_the_ends_of_the_table(pos: int) -> None:
    q, table, biases = (
        numbers(2, pos, 3),
        numbers(2 * pos, 3, seed=1)[1:],
        numbers(2 * pos, seed=2)[1:],
    )  # parts of more
    vector, scalar = relative_scores(q, table, pos), relative_scores(q, biases, pos)
    assert scalar.shape == (1, pos, pos)
    for i in range(pos):
        for j in range(pos):
            torch.testing.assert_close(vector[:, i, j], q[:, i] @ table[j - i + pos - 1])
            assert scalar[0, i, j] == biases[j - i + pos - 1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("relative", ["vector", "scalar"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("backend", ["sdpa", "blocked", "auto"])
def test_backends_give_the_same_numbers_and_gradients(
    monkeypatch: pytest.MonkeyPatch, backend: Any, dtype: torch.dtype, tolerance: float, relative: str, side: str | None
) -> None:
    monkeypatch.setattr(attend_module, "BLOCK_SCORES", 3 * 16 * 5)  # blocks of five queries, and a rest of one
    monkeypatch.setattr(attend_module, "BLOCKED_FROM", 16)
    mask = tiny_padding(side, 3, 16)
    q, k = (numbers(3, 16, 4, seed=seed, dtype=dtype).requires_grad_() for seed in (1, 2))
    v = numbers(3, 16, 6, seed=3, dtype=dtype).requires_grad_()
    shape = (31, 4) if relative == "vector" else (31,)
    table = numbers(*shape, seed=4, dtype=dtype).requires_grad_()
    results = []
    for which in ("eager", backend):
        out = attend(q, k, v, table, None if mask is None else mask.bool(), which)
        grads = torch.autograd.grad((out * numbers(3, 16, 6, seed=5, dtype=dtype)).sum(), (q, k, v, table))
        results.append((out, *grads))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=tolerance, atol=tolerance * float(eager.detach().abs().max()))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # compiled where it is for: on CUDA
@pytest.mark.parametrize("relative", ["vector", "scalar"])
@pytest.mark.parametrize("side", [None, "left"])
def test_flex_gives_the_same_numbers_and_refuses_gradients_on_a_cpu(relative: str, side: str | None) -> None:
    mask = tiny_padding(side, 2, 8)
    q, k, v = (numbers(2, 8, 4, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    table = numbers(*((15, 4) if relative == "vector" else (15,)), seed=4, dtype=torch.float32)
    real = None if mask is None else mask.bool()
    eager, flex = (attend(q, k, v, table, real, backend) for backend in ("eager", "flex"))  # type: ignore[arg-type]
    torch.testing.assert_close(flex, eager, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        attend(q.requires_grad_(), k, v, table, real, "flex")


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation puts out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return out


@pytest.mark.parametrize("relative", ["vector", "scalar"])
def test_blocked_queries_never_make_all_scores_at_once(monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    pos = 64
    monkeypatch.setattr(attend_module, "BLOCK_SCORES", 4 * pos)
    q, k, v = (numbers(1, pos, 2, seed=seed).requires_grad_() for seed in (1, 2, 3))
    table = numbers(*((2 * pos - 1, 2) if relative == "vector" else (2 * pos - 1,))).requires_grad_()
    sizes = {}
    for backend in ("eager", "blocked"):
        with Largest() as largest:
            attend(q, k, v, table, None, backend).sum().backward()  # type: ignore[arg-type]
        sizes[backend] = largest.elements
    assert sizes["eager"] >= pos * pos
    assert sizes["blocked"] <= 4 * 2 * pos < pos * pos  # four queries meet fewer than 2 pos entries of the table


@pytest.mark.parametrize(("positions", "wanted"), [(3, "_eager"), (4, "recomputed")])
def test_long_inputs_choose_blocks(monkeypatch: pytest.MonkeyPatch, positions: int, wanted: str) -> None:
    monkeypatch.setattr(attend_module, "BLOCKED_FROM", 4)
    called: list[str] = []
    for name in ("_eager", "_sdpa", "recomputed"):
        own = getattr(attend_module, name)

        def watched(*args: Any, name: str = name, own: Any = own) -> Tensor:
            called.append(name)
            return own(*args)

        monkeypatch.setattr(attend_module, name, watched)
    attend(numbers(1, positions, 2), numbers(1, positions, 2), numbers(1, positions, 2), numbers(2 * positions - 1))
    assert called[0] == wanted


@pytest.mark.parametrize("spec", ATTENTIONS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_attended_to(spec: spd.Attention, side: str) -> None:
    function, mask = built(spec), tiny_padding(side, 3, 5)
    assert mask is not None
    x, inner, real = numbers(3, 5, 5), numbers(3, 5, C), mask.bool()
    other = torch.where(real[..., None], x, 100 * numbers(3, 5, 5, seed=7))
    assert not torch.equal(other, x)
    assert torch.equal(function(x, inner, real)[real], function(other, inner, real)[real])
    assert not torch.allclose(function(x, inner, None)[real], function(other, inner, None)[real])


@pytest.mark.parametrize("backend", ["eager", "sdpa", "blocked"])
def test_later_tokens_matter_at_earlier_places(backend: Any) -> None:
    function = built(spd.Attention(d_gate=D_GATE, backend=backend))
    x, inner = numbers(1, 4, 5), numbers(1, 4, C)
    later = x.clone()
    later[0, 3] += 1
    assert not torch.isclose(function(x, inner, None)[0, :3], function(later, inner, None)[0, :3]).any()


@pytest.mark.parametrize("backend", ["eager", "sdpa", "blocked"])
def test_a_sequence_of_padding_alone_stays_finite_also_in_its_gradients(backend: Any) -> None:
    function = built(spd.Attention(d_gate=D_GATE, backend=backend))
    real = torch.tensor([[True, True, False], [False, False, False]])
    out = function(numbers(2, 3, 5), numbers(2, 3, C), real)
    grads = torch.autograd.grad(out[real].sum(), list(function.parameters()))
    assert all(bool(value.isfinite().all()) for value in (out, *grads))


def test_attention_refuses_more_positions_than_it_was_built_for() -> None:
    function = built(spd.Attention())
    with pytest.raises(ValueError, match=f"at most {N_CTX} positions, found {N_CTX + 1}"):
        function(numbers(1, N_CTX + 1, 5), numbers(1, N_CTX + 1, C), None)


# --- blocked gates ---------------------------------------------------------------------------------------------------


def plain_vector(x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    return (F.gelu(torch.einsum("...i,ikc->...kc", x, W1) + b1) * W2).sum(-2) + b2


def plain_scalar(a: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    return (F.gelu(a[..., None, :] * W1 + b1) * W2).sum(-2) + b2


def gate_inputs(kind: str, dtype: torch.dtype, rows: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    first = [(*rows, 5), (5, D_GATE, C)] if kind == "vector" else [(*rows, C), (D_GATE, C)]
    shapes = [*first, (D_GATE, C), (D_GATE, C), (C,)]
    return [numbers(*shape, seed=index, dtype=dtype).requires_grad_() for index, shape in enumerate(shapes)]


GATES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "vector": (gates.vector_gates, plain_vector),
    "scalar": (gates.scalar_gates, plain_scalar),
}
ROW_BYTES = D_GATE * C * 8  # one float64 row of the hidden layer


@pytest.mark.parametrize("rows_per_block", [1, 3, 10, 1000])  # ten rows in blocks: one by one, with a rest, at once
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_blocked_gates_equal_the_plain_expression(
    monkeypatch: pytest.MonkeyPatch, rows_per_block: int, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(gates, "BLOCK_BYTES", rows_per_block * ROW_BYTES * torch.finfo(dtype).bits // 64)
    blocked, plain = GATES[kind]
    given = gate_inputs(kind, dtype)
    results = []
    for function in (blocked, plain):
        out = function(*given)
        weights = numbers(*out.shape, seed=11, dtype=dtype)
        results.append((out, *torch.autograd.grad((out * weights).sum(), given)))
    for got, want in zip(*results, strict=True):
        error = (got - want).norm() / want.norm()
        assert error.item() < tolerance


@pytest.mark.parametrize("kind", GATES)
def test_the_hidden_layer_is_never_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Forward and backward; 40 rows, of which the inputs are smaller than the hidden layer."""
    sizes = []
    for rows_per_block in (3, 1000):
        monkeypatch.setattr(gates, "BLOCK_BYTES", rows_per_block * ROW_BYTES)
        with Largest() as largest:
            GATES[kind][0](*gate_inputs(kind, torch.float64, (40,))).sum().backward()
        sizes.append(largest.elements)
    assert sizes[0] <= 40 * 6 < 40 * D_GATE * C <= sizes[1]


@pytest.mark.parametrize("block_bytes", [1, 3 * ROW_BYTES, 1 << 20])
@pytest.mark.parametrize("kind", GATES)
def test_gates_pass_gradcheck(monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int) -> None:
    monkeypatch.setattr(gates, "BLOCK_BYTES", block_bytes)
    assert torch.autograd.gradcheck(GATES[kind][0], gate_inputs(kind, torch.float64, (4,)))


@pytest.mark.parametrize("kind", GATES)
def test_gates_take_no_rows(kind: str) -> None:
    given = gate_inputs(kind, torch.float64, (0, 4))
    out = GATES[kind][0](*given)
    assert out.shape == (0, 4, C)
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(out.sum(), given))


@pytest.mark.parametrize(
    "spec", [spd.Scalar(3), spd.Vector(3), spd.Shared(6), *ATTENTIONS[:3], *ATTENTIONS[8:11]], ids=str
)
def test_every_function_passes_gradcheck(spec: spd.ImportanceSpec) -> None:
    function = built(spec)
    names, values = zip(*function.named_parameters(), strict=True)
    x, inner = numbers(2, 3, 5, seed=3), numbers(2, 3, C, seed=4)
    real = torch.tensor([[True, True, False], [True, True, True]])

    def of_parameters(inner: Tensor, *parameters: Tensor) -> Tensor:
        out = torch.func.functional_call(function, dict(zip(names, parameters, strict=True)), (x, inner, real))
        return out[real]

    free = [value.detach().clone().requires_grad_() for value in values]
    takes_inner = isinstance(spec, spd.Scalar)  # the others do not look at inner activations
    many = isinstance(spec, spd.Attention)
    assert torch.autograd.gradcheck(of_parameters, (inner.requires_grad_(takes_inner), *free), fast_mode=many)


# --- specifications --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        spd.Scalar(3),
        spd.Vector(5),
        spd.Shared(7),
        spd.Attention(4, 2, "scalar", "eager", reach=2.5),
        spd.Attention(),
    ],
    ids=str,
)
def test_a_specification_survives_json(spec: spd.ImportanceSpec) -> None:
    record = {"kind": type(spec).__name__, **asdict(spec)}  # type: ignore[call-overload]
    assert spd.ImportanceSpec.from_json(record) == spec
    assert record["kind"] == type(spec).__name__  # the record is not used up


def test_unknown_kinds_are_refused_beside_the_known() -> None:
    with pytest.raises(ValueError, match=r"'Matrix' is not known; known are \[.*'Attention'.*'Vector'"):
        spd.ImportanceSpec.from_json({"kind": "Matrix", "d_gate": 3})
    with pytest.raises(ValueError, match="None is not known"):
        spd.ImportanceSpec.from_json({"d_gate": 3})


def test_unknown_settings_are_refused_beside_the_known() -> None:
    with pytest.raises(ValueError, match=r"Vector has no settings \['gate'\]; it has \['d_gate', 'start'\]"):
        spd.ImportanceSpec.from_json({"kind": "Vector", "gate": 3})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spd.Scalar(d_gate=0), "d_gate must be at least 1, found 0"),
        (lambda: spd.Vector(d_gate=-2), "d_gate must be at least 1, found -2"),
        (lambda: spd.Shared(hidden=0), "hidden must be at least 1, found 0"),
        (lambda: spd.Attention(d_gate=0), "d_gate must be at least 1, found 0"),
        (lambda: spd.Attention(d_attn=0), "d_attn must be at least 1, found 0"),
    ],
)
def test_widths_below_one_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("key", "value"), [("relative", "matrix"), ("backend", "flash")])
def test_unknown_kinds_of_attention_are_refused(key: str, value: str) -> None:
    record = {"d_gate": 4, "d_attn": None, "relative": "vector", "backend": "eager"} | {key: value}
    spec = object.__new__(spd.Attention)
    for name, entry in record.items():
        object.__setattr__(spec, name, entry)
    with pytest.raises(ValueError, match=f"{key} must be .*, found '{value}'"):
        inspect.unwrap(spd.Attention.__post_init__)(spec)


def test_specifications_are_frozen() -> None:
    for spec in (spd.Scalar(), spd.Vector(), spd.Attention()):
        with pytest.raises(AttributeError):
            spec.d_gate = 3  # type: ignore[misc]


# --- in a host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("spec", [spd.Scalar(2), spd.Vector(2), spd.Attention(2), spd.Shared(4)], ids=str)
def test_importances_come_from_the_original_activations(spec: spd.ImportanceSpec, side: str | None) -> None:
    """Two routes to one site of a GPT-2-style host: ``run.importances``, and the cache of the plain model by hand."""
    model, tokens, mask = tiny_host("gpt2"), tiny_tokens(), tiny_padding(side)
    run = spd.decompose(
        model, tokens, sites="blocks.1.mlp.W_out", C=C, importance=spec, steps=1, losses=[spd.Recon()],
        warmup=spd.FaithfulnessWarmup(0), progress=False,
    )  # fmt: skip
    found = run.importances(model, tokens, mask)
    _, cache = model.run_with_cache(tokens, **({} if mask is None else {"attention_mask": mask}))
    x = cache["blocks.1.mlp.hook_post"]
    (name,) = run.components
    pre = run.functions[name](x, x @ run.components[name].read, None if mask is None else mask.bool())
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(found.pre[name][real], pre.detach()[real])
    torch.testing.assert_close(found[name][real], pre.detach()[real].clamp(0, 1))


@dataclass(frozen=True)
class Constant(spd.ImportanceSpec):
    """A user's own function: the same learnt importance at every token."""

    start: float = 0.5

    def build(self, site: Site, C: int, n_ctx: int, normal: Callable[..., Tensor]) -> nn.Module:
        return _Constant(normal(C, std=0.0) + self.start)


class _Constant(nn.Module):
    def __init__(self, start: Tensor):
        super().__init__()
        self.level = nn.Parameter(start)

    def forward(self, x: Tensor, inner: Tensor, real: Tensor | None = None) -> Tensor:
        return self.level.expand_as(inner)


def test_a_users_own_function_trains_and_is_stored(tmp_path: Any) -> None:
    model = tiny_host("gpt2")
    run = spd.decompose(
        model, tiny_tokens(), sites="blocks.*.mlp.W_*", C=C, importance=Constant(0.4), steps=2, log_every=1,
        warmup=spd.FaithfulnessWarmup(0), progress=False, out=tmp_path,
    )  # fmt: skip
    assert len(run.history) == 2
    assert np.isfinite(run.history.to_numpy()).all()
    moved = [bool((function.level != 0.4).any()) for function in run.functions.values()]
    assert all(moved)
    again = spd.load(tmp_path, model)
    assert again.importance == Constant(0.4)
    one, two = run.importances(model, tiny_tokens()), again.importances(model, tiny_tokens())
    assert all(torch.equal(one[name], two[name]) for name in one)
