"""The CUDA kernels without CUDA: interpreted (interpreted_kernels.py), and compiled for GPUs; on one, if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tl_spd import gates

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("vector_forward", "vector_backward", "scalar_forward", "scalar_backward", "scalar_backward_sums")


def inputs(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Gate inputs and parameters, without ``b2``."""
    rows, d_in, d_gate, C = size
    first = [(rows, d_in), (d_in, d_gate, C)] if kind == "vector" else [(rows, C), (d_gate, C)]
    source = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in (*first, (d_gate, C), (d_gate, C))]
    return [each.to(device, dtype).requires_grad_() for each in drawn]


def plain(kind: str, given: list[Tensor]) -> Tensor:
    x, W1, b1, W2 = given
    pre = torch.einsum("ri,ikc->rkc", x, W1) if kind == "vector" else x[:, None] * W1
    return (F.gelu(pre + b1) * W2).sum(1)


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


def test_interpreted_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_kernels.py"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(("element", "capability"), [("fp32", 80), ("fp32", 90), ("fp64", 90), ("bf16", 90)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, element: str, capability: int
) -> None:
    """Down to machine code, without a GPU: for those of 2020 and 2022 on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tl_spd import kernels

    kernel = getattr(kernels, name)
    acc = "fp64" if element == "fp64" else "fp32"
    constants = {
        "ACC": getattr(triton.language, {"fp64": "float64", "fp32": "float32"}[acc]),
        "ROWS": kernels.ROWS,
        "COLS": kernels.COLS,
    }
    types = dict.fromkeys(constants, "constexpr") | dict.fromkeys(("rows", "C", "d_gate"), "i32")
    pointers = {
        name: f"*{acc if name.startswith('sums') else element}" for name in kernel.arg_names if name not in types
    }
    source = ASTSource(kernel, {name: (types | pointers)[name] for name in kernel.arg_names}, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(compiled.asm["cubin"]) > 1000
    assert compiled.metadata.shared < 48 * 1024


def test_triton_that_cannot_launch_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    gates._triton_works.cache_clear()
    with pytest.warns(UserWarning, match="installed but cannot be used: .*C compiler.* Gates are computed in blocks"):
        assert not gates._triton_works()
    assert not gates._triton_works()  # without another warning, which would be an error here
    gates._triton_works.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vector", "scalar"])
@pytest.mark.parametrize(
    "size", [(20_000, 48, 8, 256), (20_000, 16, 4, 100)], ids=str
)  # several blocks; many tiles in one
def test_on_a_gpu(kind: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 of the CPU; the same bits twice; no hidden layer in memory."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    exact = inputs(kind, size, torch.float64)
    wanted = with_gradients(plain(kind, exact), exact)
    function = gates.vector_gates if kind == "vector" else gates.scalar_gates
    given, results = inputs(kind, size, torch.float32, "cuda"), []
    assert gates._kernels(given[0]) is not None
    b2 = torch.zeros(size[-1], device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        results.append(with_gradients(function(*given, b2), given))
    for got, again, want in zip(*results, wanted, strict=True):
        assert torch.equal(got, again)
        assert (got.double().cpu() - want).norm() < 1e-5 * want.norm()
    if size[-1] == 256:
        assert torch.cuda.max_memory_allocated() - before < size[0] * size[2] * size[3] * 4
