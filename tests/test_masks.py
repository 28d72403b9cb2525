"""Masks: distributions, gradients, determinism, and refusals that name the site, what was given and what is wanted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_spd.masks import (
    MASK_NAMES,
    Pass,
    check_fits,
    check_masks,
    make_masks,
    rounded_mask,
    stochastic_mask,
    uniform,
)
from tl_spd.sites import Site

SITES = (Site("blocks.0.mlp.W_in", "W_in", 0, 5, 7, 1), Site("blocks.0.mlp.W_out", "W_out", 0, 7, 5, 1))
COUNTS = {"blocks.0.mlp.W_in": 3, "blocks.0.mlp.W_out": 4}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _global_randomness_is_untouched() -> Any:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


# --- stochastic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [0.0, 0.25, 0.9, 1.0])
def test_stochastic_masks_are_uniform_between_the_importance_and_one(g: float) -> None:
    n = 20_000
    mask = stochastic_mask(torch.full((4, n // 16, 4), g, dtype=torch.float64), generator()).flatten()
    assert mask.min() >= g
    assert mask.max() <= 1
    width = 1 - g
    assert abs(mask.mean().item() - (g + width / 2)) <= 5 * width / (12 * n) ** 0.5  # five standard errors
    assert abs(mask.var().item() - width**2 / 12) <= 5 * width**2 / (180 * n) ** 0.5 + 1e-12
    if width:  # a uniform distribution: every tenth of the interval holds a tenth of the numbers
        counts = torch.histc((mask - g) / width, bins=10, min=0, max=1)
        assert (counts / n - 0.1).abs().max() < 5 * (0.09 / n) ** 0.5


def test_every_entry_and_every_draw_has_its_own_number() -> None:
    g, source = torch.zeros(3, 4, 5), generator()
    draws = torch.stack([stochastic_mask(g, source), stochastic_mask(g, source)])
    assert draws.unique().numel() == draws.numel()


def test_stochastic_masks_follow_the_formula() -> None:
    g = torch.rand(2, 3, 4, generator=generator(1), dtype=torch.float64)
    rho = uniform(g.shape, generator(5), g)
    torch.testing.assert_close(stochastic_mask(g, generator(5)), g + (1 - g) * rho, rtol=1e-15, atol=1e-15)


def test_gradient_reaches_the_importance_with_one_minus_rho() -> None:
    g = torch.rand(2, 3, 4, generator=generator(1), dtype=torch.float64, requires_grad=True)
    rho = uniform(g.shape, generator(5), g)
    weights = torch.rand(2, 3, 4, generator=generator(2), dtype=torch.float64)
    (grad,) = torch.autograd.grad((stochastic_mask(g, generator(5)) * weights).sum(), g)
    torch.testing.assert_close(grad, weights * (1 - rho))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_have_the_dtype_asked_for_and_depend_on_the_generator_alone(dtype: torch.dtype) -> None:
    like = torch.zeros((), dtype=dtype)
    one, same, other = (uniform((50,), generator(seed), like) for seed in (0, 0, 1))
    assert one.dtype == dtype
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# --- by name ---------------------------------------------------------------------------------------------------------


def importances() -> dict[str, Tensor]:
    return {
        "blocks.0.mlp.W_in": torch.tensor([[[0.0, 0.1, 1.0]]]),
        "blocks.0.mlp.W_out": torch.tensor([[[0.3, 0.0, 0.05, 0.2]]]),
    }


def test_masks_by_name_by_hand() -> None:
    g = importances()
    assert make_masks("importance", g) == g
    assert {name: mask.tolist() for name, mask in make_masks("ones", g).items()} == {
        "blocks.0.mlp.W_in": [[[1.0, 1.0, 1.0]]],
        "blocks.0.mlp.W_out": [[[1.0, 1.0, 1.0, 1.0]]],
    }
    assert {name: mask.tolist() for name, mask in make_masks("rounded", g).items()} == {
        "blocks.0.mlp.W_in": [[[0.0, 1.0, 1.0]]],
        "blocks.0.mlp.W_out": [[[1.0, 0.0, 1.0, 1.0]]],
    }
    assert {name: mask.tolist() for name, mask in make_masks("rounded", g, threshold=0.1).items()} == {
        "blocks.0.mlp.W_in": [[[0.0, 0.0, 1.0]]],  # above, not at: 0.1 itself is off
        "blocks.0.mlp.W_out": [[[1.0, 0.0, 0.0, 1.0]]],
    }


def test_stochastic_masks_by_name_are_drawn_site_after_site() -> None:
    g, source = importances(), generator(3)
    want = {name: stochastic_mask(value, source) for name, value in g.items()}
    got = make_masks("stochastic", g, generator(3))
    assert all(torch.equal(got[name], want[name]) for name in g)


def test_rounded_masks_keep_the_dtype() -> None:
    assert rounded_mask(torch.ones(1, 1, 1, dtype=torch.float64), 0.5).dtype == torch.float64


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="masks='zeros' is not known") as error:
        make_masks("zeros", importances())
    assert all(name in str(error.value) for name in MASK_NAMES)


def test_stochastic_masks_need_a_generator() -> None:
    with pytest.raises(ValueError, match=r"needs a generator=torch\.Generator\(\)"):
        make_masks("stochastic", importances())


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (1,), (5, 3), (1, 1, 3), (2, 5, 3), (2, 1, 1), (2, 5, 1)])
def test_what_broadcasts_is_accepted(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape)
    check_masks({"blocks.0.mlp.W_in": mask}, SITES, COUNTS)
    check_fits("blocks.0.mlp.W_in", mask, 2, 5)
    assert torch.broadcast_shapes(shape, (2, 5, 3)) == (2, 5, 3)


@pytest.mark.parametrize("shape", [(4,), (2, 5, 2), (1, 1, 1, 3), (3, 5), (0,)])
def test_wrong_shapes_name_site_given_and_wanted(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask") as error:
        check_masks({"blocks.0.mlp.W_in": torch.zeros(shape)}, SITES, COUNTS)
    for part in ("blocks.0.mlp.W_in", str(shape), "(batch, pos, 3)"):
        assert part in str(error.value)


def test_each_site_has_its_own_count() -> None:
    check_masks({"blocks.0.mlp.W_out": torch.zeros(4)}, SITES, COUNTS)
    with pytest.raises(ValueError, match=r"W_out has shape \(3,\).*\(batch, pos, 4\)"):
        check_masks({"blocks.0.mlp.W_out": torch.zeros(3)}, SITES, COUNTS)


def test_unknown_sites_are_named_beside_the_known() -> None:
    with pytest.raises(ValueError, match=r"\['blocks\.1\.mlp\.W_in'\]") as error:
        check_masks({"blocks.0.mlp.W_in": torch.zeros(3), "blocks.1.mlp.W_in": torch.zeros(3)}, SITES, COUNTS)
    assert str([site.name for site in SITES]) in str(error.value)


@pytest.mark.parametrize("mask", [0.5, [1.0, 1.0, 1.0], None])
def test_what_is_no_tensor_is_refused(mask: Any) -> None:
    unchecked = inspect.unwrap(check_masks)  # as outside of tests, where no type checker refuses first
    with pytest.raises(TypeError, match=rf"blocks\.0\.mlp\.W_in must be a tensor, found {type(mask).__name__}"):
        unchecked({"blocks.0.mlp.W_in": mask}, SITES, COUNTS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64])
def test_masks_of_other_numbers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"W_in must hold floating-point numbers or booleans, found {dtype}"):
        check_masks({"blocks.0.mlp.W_in": torch.ones(3, dtype=dtype)}, SITES, COUNTS)


@pytest.mark.parametrize("shape", [(3, 5, 3), (2, 4, 3), (4, 3), (3, 1, 3), (3, 1, 1)])
def test_masks_for_another_batch_name_site_given_and_wanted(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask") as error:
        check_fits("blocks.0.mlp.W_in", torch.zeros(shape), 2, 5)
    for part in ("blocks.0.mlp.W_in", str(shape), f"(2, 5, {shape[-1]})"):
        assert part in str(error.value)


def test_a_pass_is_frozen_and_masks_nothing_else_by_default() -> None:
    entry = Pass({"blocks.0.mlp.W_in": torch.zeros(3)})
    assert (dict(entry.rows), list(entry.hooks)) == ({}, [])
    with pytest.raises(AttributeError):
        entry.masks = {}  # type: ignore[misc]
