"""Suppression of any directions, where directions come from, and edited copies and their files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tl_spd as spd
from tests.tiny import host_parameters, tiny_host, tiny_run, tiny_tokens, unchanged, with_weights
from tl_spd.sites import find_sites, weight
from tl_spd.suppress import (
    Directions,
    load_weights,
    random_directions,
    save_weights,
    singular_directions,
    subcomponent_directions,
    suppressed_copy,
    suppressed_directions,
)

TOKENS = tiny_tokens()
NAMES = ["embed.W_E", "blocks.0.attn.W_K", "blocks.1.attn.W_O", "blocks.0.mlp.W_in"]


def by_terms(W: Tensor, directions: Directions, sequential: bool) -> Tensor:
    """The suppressed weight, entry by entry of its formula."""
    left = W.clone()
    for k in range(directions.read.shape[1]):
        r, w = directions.read[:, k] / directions.read[:, k].norm(), directions.write[k] / directions.write[k].norm()
        left = left - (r @ (left if sequential else W) @ w) * r[:, None] * w[None]
    return left


def some_directions(model: spd.Run, seed: int = 0, k: int = 2) -> dict[str, Directions]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {site.name: (site.d_in, site.d_out) for site in find_sites(model, NAMES)}

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {name: Directions(3 * drawn(d_in, k), drawn(k, d_out)) for name, (d_in, d_out) in shapes.items()}


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_any_directions_by_their_formula_as_context_and_as_copy(style: str, sequential: bool) -> None:
    model = tiny_host(style)
    directions = some_directions(model)
    sites = {site.name: site for site in find_sites(model, NAMES)}
    wanted = {name: by_terms(weight(model, sites[name]), chosen, sequential) for name, chosen in directions.items()}
    swapped = with_weights(model, wanted)
    plain = model(TOKENS)
    with unchanged(model):
        with suppressed_directions(model, directions, sequential=sequential):
            inside = {name: weight(model, sites[name]) for name in NAMES}
            logits = model(TOKENS)
        copied = suppressed_copy(model, directions, sequential=sequential)
    for name in NAMES:
        assert torch.allclose(inside[name], wanted[name], rtol=1e-12, atol=1e-12)
        assert torch.allclose(weight(copied, sites[name]), wanted[name], rtol=1e-12, atol=1e-12)
    assert torch.allclose(logits, swapped(TOKENS), rtol=1e-9, atol=1e-9)
    assert torch.allclose(copied(TOKENS), logits, rtol=1e-12, atol=1e-12)
    assert (logits - plain).abs().max() > 1e-2


def test_a_run_and_its_own_directions_are_one_thing() -> None:
    model = tiny_host()
    run, chosen = tiny_run(model), {"embed.W_E": [2, 0, 2], "blocks.1.attn.W_O": [1]}
    directions = subcomponent_directions(run, chosen)
    assert [len(found) for found in directions.values()] == [2, 1]
    assert torch.equal(directions["embed.W_E"].read, run.components["embed.W_E"].read.detach()[:, [2, 0]])
    with spd.suppressed(model, run, chosen):
        wanted = model(TOKENS)
    with spd.suppressed_directions(model, directions):
        assert torch.equal(model(TOKENS), wanted)


def test_suppressing_singular_directions_leaves_the_smaller_singular_values() -> None:
    model = tiny_host()
    sites = find_sites(model, NAMES)
    directions = singular_directions(model, dict.fromkeys(NAMES, 2))
    with suppressed_directions(model, directions):
        for site in sites:
            left = torch.linalg.svdvals(weight(model, site))
            wanted = torch.linalg.svdvals(suppressed_source(model, site.name))[2:]
            assert torch.allclose(left[: len(wanted)], wanted, rtol=1e-10, atol=1e-10)
            assert left[len(wanted) :].abs().max() < 1e-10


def suppressed_source(model: torch.nn.Module, name: str) -> Tensor:
    """The host's own weight under a suppression."""
    edited = host_parameters(model)[name]
    (site,) = find_sites(model, name)
    under = edited.under.detach()
    return under.permute(1, 0, 2).flatten(1) if site.kind == "W_K" else under.reshape(site.d_in, site.d_out)


def test_random_directions_are_unit_drawn_from_the_generator_and_matched_ones_take_all() -> None:
    model = tiny_host()
    state = torch.get_rng_state()
    counts = dict.fromkeys(NAMES, 3)
    first, again = (random_directions(model, counts, torch.Generator().manual_seed(5)) for _ in range(2))
    other = random_directions(model, counts, torch.Generator().manual_seed(6))
    matched = random_directions(model, dict.fromkeys(NAMES, 1), torch.Generator().manual_seed(5), matched=True)
    assert torch.equal(state, torch.get_rng_state())
    for name in NAMES:
        assert torch.equal(first[name].read, again[name].read)
        assert torch.equal(first[name].write, again[name].write)
        assert not torch.allclose(first[name].read, other[name].read, atol=0.1)
        for unit in (first[name].read.norm(dim=0), first[name].write.norm(dim=1)):
            assert torch.allclose(unit, torch.ones(3, dtype=torch.float64))
    with suppressed_directions(model, matched):
        for site in find_sites(model, NAMES):
            assert (matched[site.name].read.T @ weight(model, site)).abs().max() < 1e-12


def test_many_random_directions_look_the_same_from_everywhere() -> None:
    model = tiny_host()  # uniform on the sphere of 6 dimensions: the mean outer product is 1/6 of the identity
    read = random_directions(model, {"blocks.0.attn.W_Q": 4000}, torch.Generator().manual_seed(0))[
        "blocks.0.attn.W_Q"
    ].read
    assert torch.allclose(read @ read.T / 4000, torch.eye(6, dtype=torch.float64) / 6, atol=0.01)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((6, 2), (3, 8)), r"read \(6, 2\) and write \(3, 8\) are no directions"),
        (((6,), (1, 8)), "are no directions"),
    ],
)
def test_what_are_no_directions(shapes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Directions(*(torch.ones(shape) for shape in shapes))
    with pytest.raises(ValueError, match="not finite"):
        Directions(torch.full((2, 1), torch.nan), torch.ones(1, 2))


def test_directions_that_do_not_fit_are_refused_and_change_nothing() -> None:
    model = tiny_host()
    good, bad = Directions(torch.ones(6, 1), torch.ones(1, 8)), Directions(torch.ones(8, 1), torch.ones(1, 6))
    for given, message in [
        ({"blocks.0.attn.W_Q": good, "blocks.1.attn.W_Q": bad}, "blocks.1.attn.W_Q is 6 x 8.*for 8 x 6"),
        ({"blocks.0.attn.W_Q": good, "blocks.7.attn.W_Q": good}, "no site 'blocks.7.attn.W_Q'; it has"),
    ]:
        with unchanged(model):
            with pytest.raises(ValueError, match=message), suppressed_directions(model, given):
                pytest.fail("entered")
            with pytest.raises(ValueError, match=message):
                suppressed_copy(model, given)
    with pytest.raises(ValueError, match="6 x 8; it has no 7 singular"):
        singular_directions(model, {"blocks.0.attn.W_Q": 7})
    with pytest.raises(ValueError, match="-1 directions of"):
        random_directions(model, {"blocks.0.attn.W_Q": -1}, torch.Generator())


def storages(model: torch.nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()}


def test_a_copy_is_a_host_of_its_own() -> None:
    model = tiny_host("llama")
    model.blocks[0].attn.W_Q.requires_grad_(False)
    model.add_hook("hook_embed", lambda value, hook: 0 * value)
    run, directions = tiny_run(model), some_directions(model)
    with unchanged(model), spd.decomposed(model, run, masks="ones"):
        copied = suppressed_copy(model, directions)
        assert "forward" not in vars(copied)
    assert not storages(model) & storages(copied)
    assert type(host_parameters(copied)["embed.W_E"]) is torch.nn.Parameter
    assert not any(point.fwd_hooks for point in copied.hook_dict.values())
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in copied.named_parameters()} == grads
    assert not grads["blocks.0.attn.W_Q"]
    with unchanged(model), torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()


def test_a_copy_made_inside_a_suppression_keeps_it() -> None:
    model = tiny_host()
    with suppressed_directions(model, some_directions(model)):
        wanted, copied = model(TOKENS), suppressed_copy(model, {})
    assert torch.equal(copied(TOKENS), wanted)


@pytest.mark.parametrize("style", ["llama", "gpt2", "shortformer"])
def test_weights_survive_a_file(style: str, tmp_path: object) -> None:
    model, fresh = tiny_host(style), tiny_host(style, seed=1)
    copied = suppressed_copy(model, random_directions(model, {"blocks.0.attn.W_V": 1}, torch.Generator(), True))
    path = tmp_path / "edited.safetensors"
    path.write_bytes(b"something else")
    with unchanged(copied):
        save_weights(copied, path)
    assert [file.name for file in tmp_path.iterdir()] == ["edited.safetensors"]
    assert not torch.allclose(fresh(TOKENS), copied(TOKENS), atol=1e-2)
    load_weights(fresh, path)
    assert torch.equal(fresh(TOKENS), copied(TOKENS))


def test_tied_weights_are_written_twice(tmp_path: object) -> None:
    model, fresh = tiny_host(), tiny_host(seed=1)
    model.unembed.W_U.data = model.embed.W_E.data.T
    save_weights(model, tmp_path / "tied")
    load_weights(fresh, tmp_path / "tied")
    assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_files_of_other_hosts_are_refused_and_change_nothing(tmp_path: object) -> None:
    model, path = tiny_host(), tmp_path / "weights"
    for other, message in [
        (tiny_host("llama"), "made for another config: only one of the file and this host has 'blocks.0.attn.W_K'"),
        (tiny_host(d_model=8), r"W_E' in .* is \(11, 8\); this host's is \(11, 6\)"),
    ]:
        save_weights(other, path)
        with unchanged(model), pytest.raises(spd.StorageError, match=message):
            load_weights(model, path)
    path.write_bytes(b"no tensors")
    with unchanged(model), pytest.raises(spd.StorageError, match="cannot be read as a safetensors file"):
        load_weights(model, path)
    with pytest.raises(spd.StorageError, match="cannot be read"):
        load_weights(model, tmp_path / "missing")
    save_file({}, path)
    with pytest.raises(spd.StorageError, match="another config"):
        load_weights(model, path)
