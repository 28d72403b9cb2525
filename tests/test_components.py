"""Components: what the subcomponents of a site sum to, how they start, and what they put out."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_host
from tl_spd.components import Components, init_components, input_terms
from tl_spd.sites import Site, bias, find_sites, weight

SITE = Site("blocks.0.mlp.W_in", "W_in", 0, 5, 7, 1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(d_in: int = 5, d_out: int = 7, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(d_in, d_out, generator=generator(seed), dtype=dtype)


# --- sums ------------------------------------------------------------------------------------------------------------


def test_weight_is_the_sum_of_outer_products_and_delta_what_is_left() -> None:
    parts = Components(SITE, matrix(5, 3), matrix(3, 7, seed=2))
    total = np.zeros((5, 7))
    for c in range(3):
        total += np.outer(parts.read.detach().numpy()[:, c], parts.write.detach().numpy()[c])
    host = matrix(seed=3)
    np.testing.assert_allclose(parts.weight().detach().numpy(), total, rtol=1e-13)
    np.testing.assert_allclose(parts.delta(host).detach().numpy(), host.numpy() - total, rtol=1e-12)
    assert parts.C == 3


def test_delta_is_in_the_precision_of_the_components() -> None:
    parts = Components(SITE, torch.zeros(5, 1), torch.zeros(1, 7))
    host = matrix(dtype=torch.bfloat16)
    assert torch.equal(parts.delta(host), host.float())


def test_inner_activations_and_masked_output_by_hand() -> None:
    site = replace(SITE, d_in=2, d_out=2)
    parts = Components(
        site, torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    )
    x = torch.tensor([[[3.0, 4.0]]])
    assert parts.inner(x).tolist() == [[[3.0, 10.0, -4.0]]]
    y = parts.output(x, torch.tensor([[[1.0, 0.5, 0.0]]]), torch.zeros(1, 1, 2))
    assert y.tolist() == [[[3.0, 5.0]]]


def test_look_ups_read_the_row_and_nothing_at_padded_places() -> None:
    site = Site("embed.W_E", "W_E", -1, 5, 7, 1)
    parts = Components(site, matrix(5, 3), matrix(3, 7))
    index = torch.tensor([[0, 4, -1]])
    inner = parts.inner(index)
    assert torch.equal(inner[0, :2], parts.read[[0, 4]])
    assert not inner[0, 2].any()


@pytest.mark.parametrize("kind", ["W_Q", "W_O"])
def test_outputs_with_a_head_axis_are_the_folded_ones_cut_up(kind: str) -> None:
    """Two routes: all at once, and head by head with the folded matrices."""
    (site,) = find_sites(tiny_host("gpt2"), f"blocks.0.attn.{kind}")
    parts = Components(site, matrix(site.d_in, 3), matrix(3, site.d_out))
    x, mask = matrix(8, site.d_in, seed=4).reshape(2, 4, -1), matrix(8, 3, seed=5).reshape(2, 4, 3)
    whole = ((x @ parts.read) * mask) @ parts.write
    if kind == "W_Q":
        shaped = parts.output(x, mask, torch.zeros(2, 4, 2, 4, dtype=torch.float64))
        torch.testing.assert_close(shaped.flatten(2), whole)
        split = parts.output(x[:, :, None].expand(2, 4, 2, 6), mask, torch.zeros(2, 4, 2, 4, dtype=torch.float64))
        torch.testing.assert_close(split.flatten(2), whole)
    else:
        per_head = parts.output(x, mask, torch.zeros(2, 4, 2, 6, dtype=torch.float64))
        first = ((x[..., :4] @ parts.read[:4]) * mask) @ parts.write
        torch.testing.assert_close(per_head[:, :, 0], first)
        torch.testing.assert_close(per_head.sum(2), whole)


# --- initialisation --------------------------------------------------------------------------------------------------


def test_kaiming_standard_deviations() -> None:
    site = replace(SITE, d_in=300, d_out=200)
    parts = init_components(site, torch.zeros(300, 200), 100, "kaiming", generator())
    for tensor, want in ((parts.read, 300**-0.5), (parts.write, 100**-0.5)):
        n = tensor.numel()
        assert abs(tensor.mean().item()) < 5 * want / n**0.5
        assert abs(tensor.std().item() / want - 1) < 5 / (2 * n) ** 0.5  # five standard errors
        kurtosis = (tensor / tensor.std()).pow(4).mean().item()
        assert abs(kurtosis - 3) < 5 * (24 / n) ** 0.5  # a normal distribution, not a uniform one (1.8)


@pytest.mark.parametrize("C", [5, 6, 9])
def test_svd_with_enough_subcomponents_is_exact(C: int) -> None:
    host = matrix()
    parts = init_components(SITE, host, C, "svd", generator())
    torch.testing.assert_close(parts.weight(), host, rtol=1e-12, atol=1e-12)
    assert parts.read.shape == (5, C)
    assert not parts.write[5:].any()  # beyond the rank: nothing is written, but something is read
    assert bool((parts.read[:, 5:].norm(dim=0) > 0).all())


def test_svd_of_a_matrix_of_lower_rank_needs_only_that_rank() -> None:
    host = matrix(5, 2) @ matrix(2, 7, seed=4)
    parts = init_components(SITE, host, 2, "svd", generator())
    torch.testing.assert_close(parts.weight(), host, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("C", [1, 2, 4])
def test_svd_with_fewer_is_the_best_of_its_rank(C: int) -> None:
    """Eckart-Young: the squared error left is the sum of the squared singular values left out (numpy's own)."""
    host = matrix()
    parts = init_components(SITE, host, C, "svd", generator())
    singular = np.linalg.svd(host.numpy(), compute_uv=False)
    assert parts.delta(host).square().sum().item() == pytest.approx((singular[C:] ** 2).sum(), rel=1e-12)
    norms = parts.read.norm(dim=0) * parts.write.norm(dim=1)
    np.testing.assert_allclose(norms.detach().numpy(), singular[:C], rtol=1e-12)
    torch.testing.assert_close(parts.read.norm(dim=0), parts.write.norm(dim=1))  # each side carries the root


@pytest.mark.parametrize(
    ("host", "want"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("init", ["kaiming", "svd"])
def test_components_are_float32_or_as_wide_as_the_host(init: Any, host: torch.dtype, want: torch.dtype) -> None:
    parts = init_components(SITE, matrix(dtype=host), 3, init, generator())
    assert parts.read.dtype == parts.write.dtype == want


@pytest.mark.parametrize("init", ["kaiming", "svd"])
def test_only_the_generator_decides(init: Any) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, same, other = (init_components(SITE, matrix(), 9, init, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.read, same.read)
    assert torch.equal(one.write, same.write)
    assert not torch.equal(one.read, other.read)


@pytest.mark.parametrize("C", [4, 8, 11])
def test_inputs_get_a_subcomponent_each_and_the_rest_is_zero_on_them(C: int) -> None:
    host, x = matrix(), matrix(3, 5, seed=8)
    parts = init_components(SITE, host, C, "inputs", generator(), x)
    read, write = parts.read.detach(), parts.write.detach()
    inner = x @ read[:, :3]
    assert (inner.abs() > 1e-6).sum(0).tolist() == [1, 1, 1]  # every one reads one input alone
    owner = inner.abs().argmax(0)
    torch.testing.assert_close(inner[owner, range(3)][:, None] * write[:3], (x @ host)[owner])  # and writes its output
    torch.testing.assert_close(x @ read[:, 3:] @ write[3:], torch.zeros(3, 7, dtype=host.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(read[:, :3].norm(dim=0), write[:3].norm(dim=1))
    if C >= 8:  # three inputs, and the five that any weight of this shape can need
        torch.testing.assert_close(parts.weight(), host, rtol=1e-12, atol=1e-12)


def test_inputs_that_depend_on_others_and_smaller_ones_get_none() -> None:
    """(3, 0) comes first, then what is longest beside it: (0, 2) before (2, 1); multiples and zeros bring nothing."""
    x = torch.tensor([[2.0, 1.0], [0.0, 2.0], [0.0, 0.0], [3.0, 0.0], [6e-3, 0.0], [1.0, 1e-3]])
    W = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    read, write = input_terms(W, x, C=6)
    wanted = torch.stack(
        [
            torch.outer(torch.tensor(a), torch.tensor(b))
            for a, b in (([1.0, 0.0], [1.0, 2.0, 0.0]), ([0.0, 1.0], [0.0, 1.0, 1.0]))
        ]
    )
    torch.testing.assert_close(torch.einsum("ik,ko->kio", read, write), wanted.double())
    first, _ = input_terms(W, x, C=1)
    torch.testing.assert_close(first / first.norm(), torch.tensor([[1.0], [0.0]]).double())


def test_a_zero_weight_or_only_zero_inputs_start_like_svd() -> None:
    x = matrix(3, 5, seed=8)
    zero = init_components(SITE, torch.zeros(5, 7), 4, "inputs", generator(), x)
    assert not zero.weight().any()
    assert torch.isfinite(zero.read).all()
    none = init_components(SITE, matrix(), 4, "inputs", generator(), 0 * x)
    assert torch.equal(none.weight(), init_components(SITE, matrix(), 4, "svd", generator()).weight())


def test_a_starting_weight_shares_nothing_with_the_host() -> None:
    host = matrix(5, 5)
    before = host.clone()
    parts = init_components(replace(SITE, d_out=5), host, 5, "svd", generator())
    with torch.no_grad():
        parts.read.zero_()
        parts.write.zero_()
    assert torch.equal(host, before)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [0, -1])
def test_no_subcomponents_are_refused(C: int) -> None:
    with pytest.raises(ValueError, match=rf"W_in: C must be at least 1 subcomponent, found {C}"):
        init_components(SITE, matrix(), C, "kaiming", generator())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("init", ["kaiming", "svd"])
def test_weights_that_are_not_finite_are_refused(init: Any, value: float) -> None:
    host = matrix()
    host[2, 3] = value
    with pytest.raises(ValueError, match=r"W_in: .*not finite"):
        init_components(SITE, host, 2, init, generator())


@pytest.mark.parametrize(
    ("read", "write"), [((4, 3), (3, 7)), ((5, 3), (3, 6)), ((5, 2), (3, 7))], ids=["read", "write", "C"]
)
def test_parts_that_do_not_fit_the_site_are_refused(read: tuple[int, int], write: tuple[int, int]) -> None:
    unchecked = inspect.unwrap(Components.__init__)  # as outside of tests, where no type checker refuses first
    wanted = rf"W_in: read \({read[0]}, {read[1]}\) and write .* do not fit; wanted \(5, C\) and \(C, 7\)"
    with pytest.raises(ValueError, match=wanted):
        unchecked(Components.__new__(Components), SITE, torch.zeros(read), torch.zeros(write))


def test_inputs_are_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match=r"W_in: init='inputs' needs the site's inputs"):
        init_components(SITE, matrix(), 2, "inputs", generator())


def test_an_unknown_initialisation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of \('kaiming', 'svd', 'inputs'\), found 'xavier'"):
        inspect.unwrap(init_components)(SITE, matrix(), 2, "xavier", generator())


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_every_site_of_a_host_starts_exact_with_svd(style: str) -> None:
    model = tiny_host(style)
    for site in find_sites(model, "*"):
        parts = init_components(site, weight(model, site), min(site.d_in, site.d_out), "svd", generator())
        torch.testing.assert_close(parts.weight(), weight(model, site), rtol=1e-10, atol=1e-12)
        assert bias(model, site) is None or bias(model, site).shape == (site.d_out,)
