"""Prompts with answers: standings by hand and by single passes, Student's t by published values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import tiny_host, tiny_tokenizer, tiny_tokens, unchanged
from tl_spd.analysis.prompts import as_prompts, equal_lengths, mean_interval, standing, standings, t_quantile


def test_standing_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(2), 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    log_p, ranks = standing(logits, torch.tensor([1, 2]))
    assert log_p.exp().tolist() == pytest.approx([2 / 5, math.e / (3 * math.e + 1)])
    assert ranks.tolist() == [1, 1]  # a tie costs no rank
    assert standing(logits, torch.tensor([0, 3]))[1].tolist() == [2, 4]
    assert standing(logits.bfloat16(), torch.tensor([0, 3]))[0].dtype == torch.float32


def test_standings_of_mixed_lengths_equal_single_passes() -> None:
    model = tiny_host()
    given = [tiny_tokens(1, length, seed) for seed, length in enumerate([3, 5, 3, 1, 3])]
    prompts = as_prompts(model, given, [1, 2, 3, 4, 5])
    sizes = []
    model.add_hook("hook_embed", lambda value, hook: sizes.append(tuple(value.shape[:2])))
    found = standings(model, prompts, max_rows=2)
    assert sizes == [(2, 3), (1, 3), (1, 5), (1, 1)]
    for (log_p, rank), tokens, answer in zip(found, given, range(1, 6), strict=True):
        p = model(tokens)[0, -1].softmax(-1)
        assert math.exp(log_p) == pytest.approx(p[answer].item(), rel=1e-9)
        assert rank == p.sort(descending=True).indices.tolist().index(answer) + 1
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        equal_lengths(prompts, 0)


@pytest.mark.parametrize("bos", [True, False])
def test_prompts_as_text(bos: bool) -> None:
    model = tiny_host(default_prepend_bos=bos)
    model.set_tokenizer(tiny_tokenizer("right"))
    with unchanged(model):
        text, numbers = as_prompts(model, ["w0 w3", torch.tensor([[4, 6, 6]])], ["w5", 2])
    assert (text.name, text.tokens.tolist(), text.answer) == ("w0 w3", [[1] * bos + [2, 5]], 7)
    assert (numbers.name, numbers.tokens.tolist(), numbers.answer) == ("4 6 6", [[4, 6, 6]], 2)
    with pytest.raises(ValueError, match="'w1 w2' is 2 tokens"):
        as_prompts(model, ["w0"], ["w1 w2"])
    with pytest.raises(ValueError, match="this host takes 1 to 8"):
        as_prompts(model, ["w0 " * 9], [1])


@pytest.mark.parametrize(
    ("prompts", "answers", "message"),
    [
        ("w0 w1", [1], "found one text"),
        ([], [], "0 prompts and 0 answers"),
        ([tiny_tokens(1)], [1, 2], "1 prompts and 2 answers"),
        ([tiny_tokens(2)], [1], r"found \(2, 5\)"),
        ([tiny_tokens(1)[0]], [1], r"found \(5,\)"),
        ([tiny_tokens(1).double()], [1], "float64"),
        ([tiny_tokens(1, 9)], [1], "has 9 tokens; this host takes 1 to 8"),
        ([tiny_tokens(1, 0)], [1], "has 0 tokens"),
        ([tiny_tokens(1)], [11], "Token 11 of .* vocabulary of 11 tokens"),
        ([torch.tensor([[0, -1]])], [0], "Token -1"),
        (["w0"], [1], "no tokenizer for 'w0'; give tokens"),
        ([tiny_tokens(1)], ["w0"], "no tokenizer for 'w0'; give the token's number"),
    ],
)
def test_what_is_refused(prompts: list, answers: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_prompts(tiny_host(), prompts, answers)


@pytest.mark.parametrize(
    ("degrees", "wanted"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227), (100, 1.98397)]
)
def test_students_t_as_printed_in_tables(degrees: int, wanted: float) -> None:
    assert t_quantile(degrees) == pytest.approx(wanted, rel=1e-4)


def test_mean_interval_by_hand() -> None:
    mean, low, high = mean_interval(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]).double())
    half = 4.30265 / math.sqrt(3)  # standard deviation 1
    assert mean.tolist() == [2, 5]
    assert low.tolist() == pytest.approx([2 - half, 5], rel=1e-4)
    assert high.tolist() == pytest.approx([2 + half, 5], rel=1e-4)
    mean, low, high = mean_interval(torch.ones(2, 1))
    assert mean.tolist() == [1, 1]
    assert bool((low.isnan() & high.isnan()).all())
