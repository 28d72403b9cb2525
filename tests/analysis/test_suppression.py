"""Effects and selections against hosts whose weights were really swapped, one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

from tests.tiny import MORE_STYLES, STYLES, tiny_host, tiny_run, tiny_tokens, unchanged, with_weights
from tl_spd.analysis.suppression import (
    Effort,
    chosen,
    control_table,
    effect_table,
    select_by_effect,
    select_by_importance,
)
from tl_spd.sites import find_sites, weight
from tl_spd.suppress import Directions, random_directions, subcomponent_directions

PROMPTS, ANSWERS = [tiny_tokens(1, 4, 1), tiny_tokens(1, 5, 2), tiny_tokens(1, 4, 3)], [3, 0, 7]


def swapped(model: HookedTransformer, directions: Mapping[str, Directions]) -> HookedTransformer:
    """A host with the directions taken out of its weights, all terms from the original weight."""
    matrices = {}
    for name, pool in directions.items():
        (site,) = find_sites(model, name)
        W = left = weight(model, site).double()
        for r, w in zip(pool.read.T, pool.write, strict=True):
            r, w = r / r.norm(), w / w.norm()
            left = left - (r @ W @ w) * torch.outer(r, w)
        matrices[name] = left
    return with_weights(model, matrices)


def probability(model: HookedTransformer, tokens: Tensor, answer: int) -> float:
    return model(tokens)[0, -1].softmax(-1)[answer].item()


def test_every_effect_equals_its_own_host() -> None:
    model = tiny_host()
    run = tiny_run(model)
    suppressions = {
        "none": {},
        "one": subcomponent_directions(run, {"blocks.0.mlp.W_in": [1]}),
        "two sites": subcomponent_directions(run, {"embed.W_E": [0, 2], "unembed.W_U": [1]}),
    }
    with unchanged(model):
        table = effect_table(model, PROMPTS, ANSWERS, suppressions, max_rows=1)
    assert table.suppression.tolist() == [name for name in suppressions for _ in PROMPTS]
    assert table.directions.tolist() == [0] * 3 + [1] * 3 + [3] * 3
    for row, (name, prompt) in zip(table.itertuples(), itertools.product(suppressions, range(3)), strict=True):
        assert row.prompt == " ".join(str(token) for token in PROMPTS[prompt][0].tolist())
        assert row.answer == ANSWERS[prompt]
        for host, p, logp, rank in [
            (model, row.p_before, row.logp_before, row.rank_before),
            (swapped(model, suppressions[name]), row.p_after, row.logp_after, row.rank_after),
        ]:
            wanted = host(PROMPTS[prompt])[0, -1].softmax(-1).detach()
            assert p == pytest.approx(wanted[row.answer].item(), rel=1e-9)
            assert logp == pytest.approx(math.log(p), rel=1e-9, abs=1e-12)
            assert rank == 1 + int((wanted > wanted[row.answer]).sum())
        assert row.ratio == pytest.approx(row.p_after / row.p_before)
    assert table[table.suppression == "none"].ratio.eq(1).all()
    assert (table[table.suppression != "none"].ratio - 1).abs().min() > 1e-4


def test_sequential_suppression_is_asked_for() -> None:
    model = tiny_host()
    run = tiny_run(model)
    suppressions = {"two": subcomponent_directions(run, {"blocks.0.mlp.W_in": [0, 1]})}
    one, other = (effect_table(model, PROMPTS, ANSWERS, suppressions, sequential=s) for s in (True, False))
    assert (one.p_after - other.p_after).abs().min() > 1e-6


def test_no_suppression_and_directions_that_do_not_fit_are_refused() -> None:
    model = tiny_host()
    with pytest.raises(ValueError, match="No suppression was given"):
        effect_table(model, PROMPTS, ANSWERS, {})
    bad = Directions(torch.ones(2, 1), torch.ones(1, 2))
    with unchanged(model), pytest.raises(ValueError, match="W_U is 6 x 11; the directions given are for 2 x 2"):
        effect_table(model, PROMPTS, ANSWERS, {"good": {}, "bad": {"unembed.W_U": bad}})


@pytest.mark.parametrize("style", [*STYLES, *MORE_STYLES])
def test_the_greedy_choice_equals_plain_trials_on_swapped_hosts(style: str) -> None:
    model, tokens, answer = tiny_host(style), tiny_tokens(1), 4
    names = [site.name for site in find_sites(model, "*") if style != "rmspre_alibi" or site.kind != "W_pos"]
    pool = random_directions(model, dict.fromkeys(names, 1), torch.Generator().manual_seed(1), matched=True)
    with unchanged(model):
        table = select_by_effect(model, pool, tokens, answer, 2, max_rows=5)
    taken: dict[str, Directions] = {}
    before = probability(model, tokens, answer)
    for step, row in enumerate(table.itertuples()):
        trials = {
            name: probability(swapped(model, {**taken, name: pool[name]}), tokens, answer)
            for name in names
            if name not in taken
        }
        best = min(trials, key=trials.get)
        taken[best] = pool[best]
        assert (row.round, row.site, row.index) == (step + 1, best, 0)
        assert row.p == pytest.approx(trials[best], rel=1e-9)
        assert row.ratio == pytest.approx(trials[best] / before, rel=1e-9)
    assert table.tried.tolist() == [len(names), 2 * len(names) - 1]


def test_several_candidates_of_one_site_and_an_early_end() -> None:
    model, tokens, answer = tiny_host(), tiny_tokens(1), 4
    pool = random_directions(model, {"blocks.0.mlp.W_in": 3, "blocks.1.attn.W_V": 2}, torch.Generator().manual_seed(3))
    table = select_by_effect(model, pool, tokens, answer, 9)
    found = chosen(table)
    assert sum(len(indices) for indices in found.values()) == len(table) < 5
    lowest = probability(swapped(model, {name: pool[name][i] for name, i in found.items()}), tokens, answer)
    assert table.p.iloc[-1] == pytest.approx(lowest, rel=1e-9)
    for name, size in (("blocks.0.mlp.W_in", 3), ("blocks.1.attn.W_V", 2)):
        for index in set(range(size)) - set(found.get(name, [])):  # no candidate left would have helped
            more = {**found, name: [*found.get(name, []), index]}
            assert probability(swapped(model, {n: pool[n][i] for n, i in more.items()}), tokens, answer) >= lowest
    everything = select_by_effect(model, {name: pool[name][i] for name, i in found.items()}, tokens, answer, 9)
    assert len(everything) == len(table)
    for settings in ({"k": 0}, {"k": 1, "max_rows": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            select_by_effect(model, pool, tokens, answer, **settings)


def test_the_greedy_choice_spares_the_answers_it_is_told_to() -> None:
    """Every round minimises what is left of the answer plus the mean change of the spared answers, and ends at the best."""
    model, tokens, answer = tiny_host(), tiny_tokens(1), 1
    pool = random_directions(
        model, {"blocks.0.mlp.W_in": 3, "blocks.1.attn.W_V": 3}, torch.Generator().manual_seed(4), True
    )
    spare = [(tiny_tokens(1, 4, seed=7), 2), (tiny_tokens(1, 3, seed=8), 5)]
    texts, answers = zip(*spare, strict=True)
    with unchanged(model):
        table = select_by_effect(model, pool, tokens, answer, 6, spare=texts, spare_answers=answers, max_rows=4)

    def cost(taken: set[tuple[str, int]]) -> tuple[float, float]:
        names = {name for name, _ in taken}
        host = swapped(model, {name: pool[name][[i for n, i in sorted(taken) if n == name]] for name in names})
        left = probability(host, tokens, answer) / probability(model, tokens, answer)
        moved = [abs(probability(host, *one) / probability(model, *one) - 1) for one in spare]
        return left, sum(moved) / 2

    every = {(name, index) for name in pool for index in range(3)}
    taken: set[tuple[str, int]] = set()
    for row in table.itertuples():
        costs = {one: cost(taken | {one}) for one in every - taken}
        best = min(costs, key=lambda one: sum(costs[one]))
        assert (row.site, row.index) == best
        assert (row.ratio, row.change) == pytest.approx(costs[best], rel=1e-9)
        taken.add(best)
    assert 0 < len(table) < 6
    assert min(sum(cost(taken | {one})) for one in every - taken) >= sum(cost(taken))
    alone = select_by_effect(model, pool, tokens, answer, 6)
    assert chosen(alone) != chosen(table)  # sparing makes a difference here
    assert alone.change.eq(0).all()


def test_controls_spare_the_same_prompts() -> None:
    model, name = tiny_host(), "blocks.0.mlp.W_in"
    run = tiny_run(model, name, C=9)
    table = control_table(model, run, {name: [1, 8]}, PROMPTS, ANSWERS, effort=Effort({name: 9}, 1, (0, 2)), draws=1)
    pool = random_directions(model, {name: 9}, torch.Generator().manual_seed(0))
    spare = dict(spare=[PROMPTS[0], PROMPTS[2]], spare_answers=[ANSWERS[0], ANSWERS[2]])
    wanted = select_by_effect(model, pool, PROMPTS[1], ANSWERS[1], 2, **spare)
    row = table[(table.control == "best random") & (table.prompt == table.prompt[1])].iloc[0]
    assert row.ratio == pytest.approx(wanted.ratio.iloc[-1] if len(wanted) else 1.0, rel=1e-6)


def test_selection_by_importance_by_hand() -> None:
    g = {"a": torch.tensor([[[0.0, 1.0, 0.3], [0.1, 0.0, 0.3]]]), "b": torch.tensor([[[1.0, 0.2], [0.5, 0.2]]])}
    table = select_by_importance(g, 3)
    wanted = [(1, "b", 0, 1.0), (2, "a", 1, 1.0), (3, "a", 2, 0.3)]  # the tie goes to the larger mean
    assert [row[:3] for row in table.itertuples(index=False, name=None)] == [row[:3] for row in wanted]
    assert table.importance.tolist() == pytest.approx([row[3] for row in wanted])
    assert chosen(table) == {"b": [0], "a": [1, 2]}
    assert chosen(select_by_importance(g, 9, {"a": [0, 2, 0]})) == {"a": [2, 0]}
    for k, candidates, error, message in [
        (0, None, ValueError, "k must be at least 1"),
        (1, {"c": [0]}, ValueError, r"no importances of c, only of \['a', 'b'\]"),
        (1, {"b": [2]}, IndexError, r"b has subcomponents 0 to 1; found \[2\]"),
    ]:
        with pytest.raises(error, match=message):
            select_by_importance(g, k, candidates)


def test_controls_beside_the_subcomponents() -> None:
    model = tiny_host()
    run = tiny_run(model)
    asked = {"blocks.0.mlp.W_in": [1, 2], "blocks.1.attn.W_O": [0]}
    other = {"blocks.0.mlp.W_in": [0]}
    settings = dict(others={"second prompt": other}, draws=2, seed=3)
    state = torch.get_rng_state()
    with unchanged(model):
        table = control_table(model, run, asked, PROMPTS, ANSWERS, **settings)
    assert torch.equal(state, torch.get_rng_state())
    controls = ["subcomponents", "random", "random", "random matched", "random matched", "singular", "second prompt"]
    assert table.control.tolist() == [name for name in controls for _ in PROMPTS]
    assert table[table.prompt == table.prompt[0]].draw.tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert table[table.prompt == table.prompt[0]].directions.tolist() == [3, 3, 3, 3, 3, 3, 1]
    for name, indices in (("subcomponents", asked), ("second prompt", other)):
        alone = effect_table(model, PROMPTS, ANSWERS, {"x": subcomponent_directions(run, indices)})
        assert table[table.control == name].p_after.tolist() == alone.p_after.tolist()
    singular = {}
    for name, k in (("blocks.0.mlp.W_in", 2), ("blocks.1.attn.W_O", 1)):
        (site,) = find_sites(model, name)
        W = weight(model, site)  # eigenvectors of W W^T: a second route to the singular vectors
        reads = torch.linalg.eigh(W @ W.T).eigenvectors.flip(1)[:, :k]
        singular[name] = Directions(reads, reads.T @ W)
    wanted = [
        probability(swapped(model, singular), tokens, answer) for tokens, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert table[table.control == "singular"].p_after.tolist() == pytest.approx(wanted, rel=1e-8)
    random = table[table.control.isin(["random", "random matched"])]
    assert random.p_after.nunique() == len(random)
    pd.testing.assert_frame_equal(table, control_table(model, run, asked, PROMPTS, ANSWERS, **settings))
    later = control_table(model, run, asked, PROMPTS, ANSWERS, **{**settings, "seed": 4})
    assert set(table.control[table.p_after != later.p_after]) == {"random", "random matched"}


def test_controls_with_the_same_effort_of_selection() -> None:
    model = tiny_host()
    run, name = tiny_run(model, "blocks.0.mlp.W_in", C=9), "blocks.0.mlp.W_in"
    effort = Effort({name: 9}, prompt=1)
    table = control_table(model, run, {name: [1, 8]}, PROMPTS, ANSWERS, others={"two": {name: [0, 3]}}, effort=effort)
    plain = control_table(model, run, {name: [1, 8]}, PROMPTS, ANSWERS, others={"two": {name: [0, 3]}})
    assert table[: len(plain)].equals(plain)
    best = table[len(plain) :]
    assert list(dict.fromkeys(best.control)) == ["best random", "best random matched", "best singular", "best two"]
    assert best.directions.max() <= 2
    first = best[best.prompt == table.prompt[1]]
    pool = random_directions(model, {name: 9}, torch.Generator().manual_seed(0))[name]
    (row,) = first[(first.control == "best random") & (first.draw == 0)].itertuples()
    alone = [probability(swapped(model, {name: pool[[i]]}), PROMPTS[1], 0) for i in range(9)]
    start = min(range(9), key=alone.__getitem__)
    pairs = [probability(swapped(model, {name: pool[[start, i]]}), PROMPTS[1], 0) for i in range(9) if i != start]
    assert row.p_after == pytest.approx(min(alone[start], *pairs), rel=1e-9)
    for control, pooled in best.groupby("control"):  # chosen on that prompt, so no worse there than doing nothing
        on_it = pooled[pooled.prompt == table.prompt[1]]
        assert (on_it.p_after <= on_it.p_before).all(), control


def test_control_settings_that_are_refused() -> None:
    model = tiny_host()
    run = tiny_run(model)
    for changes, message in [
        ({"draws": 0}, "found draws=0"),
        ({"others": {"random": {}}}, "others has 'random'"),
        ({"others": {"best x": {}}}, "others has 'best x'"),
        ({"effort": Effort({}, prompt=3)}, "effort names the prompt 3; there are 3 prompts"),
        ({"effort": Effort({}, spare=(0, -1))}, "effort names the prompt -1; there are 3 prompts"),
        ({"effort": Effort({"blocks.0.attn.X": 1})}, "no site 'blocks.0.attn.X'"),
    ]:
        with unchanged(model), pytest.raises(ValueError, match=message):
            control_table(model, run, {"embed.W_E": [0]}, PROMPTS, ANSWERS, **changes)
