"""The CUDA kernels in Triton's interpreter, on tensors of the CPU, against the plain expression. Run by test_kernels.py in a
process of its own: what Triton's functions are is decided when Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spd as spd
from tests.test_kernels import inputs, plain, with_gradients
from tests.tiny import tiny_decompose, tiny_host
from tl_spd import gates, kernels

assert os.environ["TRITON_INTERPRET"] == "1"
# The interpreter of Triton 3.2 takes numbers out of arrays in a way that numpy 1.25 and later announce the end of.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
SIZES = [(100, 5, 3, 70), (33, 4, 2, 7), (64, 2, 1, 64), (1, 3, 1, 1), (0, 3, 2, 4)]  # rows, d_in, d_gate, C


@pytest.fixture(autouse=True)
def two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the rows, so that each takes more than one tile; idle ones would take the interpreter's time too."""
    monkeypatch.setattr(kernels, "PROGRAMS", 2)


def through(kind: str, given: list[Tensor], step: int = 80) -> Tensor:
    return kernels.VectorGates.apply(*given, step) if kind == "vector" else kernels.ScalarGates.apply(*given)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["vector", "scalar"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 0.02)], ids=str
)
def test_interpreted_kernels_equal_the_plain_expression(
    dtype: torch.dtype, tolerance: float, kind: str, size: tuple[int, ...]
) -> None:
    given = inputs(kind, size, dtype)
    exact = [each.detach().double().requires_grad_() for each in given]
    wanted = with_gradients(plain(kind, exact), exact)
    for got, want in zip(with_gradients(through(kind, given), given), wanted, strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("kind", ["vector", "scalar"])
def test_every_program_sums_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU two programs that add to the same numbers would lose some; one after the other, as here, they do not."""
    kept, real = [], kernels._sums
    monkeypatch.setattr(kernels, "_sums", lambda *args: kept.append(real(*args)) or kept[-1])
    through(kind, inputs(kind, (100, 5, 3, 70), torch.float64)).sum().backward()
    assert [len(parts) for parts in kept] == [2] * (2 if kind == "vector" else 3)
    assert all(bool((parts != 0).any(-1).all()) for parts in kept)


def test_no_program_is_idle() -> None:
    assert [kernels._programs(rows) for rows in (0, 1, 32, 33, 65)] == [1, 1, 1, 2, 2]


def test_blocks_fill_half_the_cache_and_are_no_smaller_than_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50_000_000))
    assert kernels.block_rows(torch.zeros(9, 64), 1600) == 50_000_000 // (2 * 1600 * 4)
    assert kernels.block_rows(torch.zeros(9, 768), 16 * 8192) == 768
    assert kernels.block_rows(torch.zeros(9, 20), 16 * 8192) == 128


@pytest.mark.parametrize("function", [gates.vector_gates, gates.scalar_gates])
def test_any_layout_and_dtype_of_inputs(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed inputs and parameters, inputs in bfloat16, gradients that are one number expanded."""
    kind = "vector" if function is gates.vector_gates else "scalar"
    x, *parameters = inputs(kind, (6, 3, 2, 5), torch.float32)
    given = [x.detach().bfloat16().T.contiguous().T.requires_grad_()]
    given += [each.detach().mT.contiguous().mT.requires_grad_() for each in parameters]
    assert not any(each.is_contiguous() for each in given)
    results = []
    for chosen in (None, kernels):
        monkeypatch.setattr(gates, "_kernels", lambda x, chosen=chosen: chosen)
        monkeypatch.setattr(kernels, "block_rows", lambda x, hidden: 4)
        results.append(torch.autograd.grad(function(*given, torch.zeros(5)).sum(), given))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["vector", "scalar"])
def test_interpreted_kernels_pass_gradcheck(kind: str) -> None:
    given = inputs(kind, (3, 2, 2, 3), torch.float64)
    assert torch.autograd.gradcheck(lambda *given: through(kind, [*given], step=2), given)


def test_inputs_without_gradient_get_none() -> None:
    x, *parameters = inputs("vector", (5, 2, 2, 3), torch.float64)
    through("vector", [x.detach(), *parameters]).sum().backward()
    assert x.grad is None
    assert all(each.grad is not None for each in parameters)


@pytest.mark.parametrize("spec", [spd.Scalar(2), spd.Vector(2), spd.Attention(2)], ids=str)
def test_a_training_through_the_kernels_gives_the_same_numbers(
    spec: spd.ImportanceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gates' own choice of rows and layout of what they hand over, with a GPU's cache of 8 KiB."""
    settings: dict[str, Any] = dict(sites="blocks.0.mlp.*", importance=spec, steps=2)
    wanted = tiny_decompose(tiny_host(), **settings)
    launched = []
    monkeypatch.setattr(gates, "_kernels", lambda x: launched.append(x) or kernels)
    monkeypatch.setattr(kernels, "block_rows", lambda x, hidden: max(1, 8192 // (2 * hidden * x.element_size())))
    run = tiny_decompose(tiny_host(), **settings)
    assert launched
    for got, want in zip(run.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
