"""The facts experiment end to end on a tiny host with words for tokens; each table against a route of its own."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import tl_spd as spd
from tests.tiny import tiny_host, tiny_tokenizer, unchanged, with_weights
from tl_spd import cli
from tl_spd.analysis.contribution import contributions
from tl_spd.analysis.suppression import select_by_effect
from tl_spd.experiments import facts as experiment
from tl_spd.experiments.facts import TABLES, FactsResult, FactsSettings, run_facts
from tl_spd.experiments.facts_data import PAIR, SHIPPED, Fact, FactSet
from tl_spd.experiments.facts_steps import check_facts, spared_facts, summarize
from tl_spd.sites import HookedTransformer, weight
from tl_spd.suppress import subcomponent_directions

SETTINGS: dict[str, Any] = {
    "steps": 5,
    "C": 5,
    "importance": spd.Vector(d_gate=2, start=0.0),
    "init": "svd",
    "spared": 0,
    "warmup": spd.FaithfulnessWarmup(steps=5),
    "k": 2,
    "candidates": 3,
    "min_contribution": 0.145,  # no share lies within 0.018 of it: they differ a little between CPUs
    "threshold": 0.48,
    "control_draws": 2,
    "trace_draws": 3,
}


def word_host() -> HookedTransformer:
    model = tiny_host("llama", dtype=torch.float32)
    model.set_tokenizer(tiny_tokenizer("right"))
    return model


def last(model: HookedTransformer, prompt: str) -> Tensor:
    """Log-probabilities behind the prompt."""
    return model(model.to_tokens(prompt))[0, -1].log_softmax(-1)


def told(model: HookedTransformer, prompt: str, subject: str = "") -> Fact:
    """A fact that the host knows: whatever it finds most probable."""
    return Fact(prompt, " " + model.tokenizer.decode([int(last(model, prompt).argmax())]), subject)


def word_facts(model: HookedTransformer) -> FactSet:
    others = ["w7 w8", "w1 w1 w5", "w6 w2 w0 w1", "w3 w3"]
    wrong = " w" + str((int(last(model, "w0 w4").argmax()) - 2 + 1) % 9)
    return FactSet(
        (told(model, "w1 w2 w3", "w1 w2"), told(model, "w4 w5 w6 w3", "w5")),
        (Fact("w3 w0 w1", " w2"), Fact("w3 w0 w4", " w5")),
        (*(told(model, prompt) for prompt in others), Fact("w0 w4", wrong), Fact("w8 w8", " w1 w2")),
    )


def swapped(model: HookedTransformer, run: spd.Run, indices: dict[str, list[int]]) -> HookedTransformer:
    """A host with the chosen subcomponents' directions taken out of its weights, all terms from the original weight."""
    pools = {name: (run.components[name].read[:, i].T, run.components[name].write[i]) for name, i in indices.items()}
    return without(model, run, pools)


def without(model: HookedTransformer, run: spd.Run, pools: dict[str, tuple[Tensor, Tensor]]) -> HookedTransformer:
    matrices = {}
    for name, (reads, writes) in pools.items():
        W = left = weight(model, run.components[name].site).detach().double()
        for r, w in zip(reads.double(), writes.double(), strict=True):
            r, w = r / r.norm(), w / w.norm()
            left = left - (r @ W @ w) * torch.outer(r, w)
        matrices[name] = left.float()
    return with_weights(model, matrices)


def p_of(model: HookedTransformer, fact: Fact) -> float:
    return last(model, fact.prompt)[model.tokenizer.convert_tokens_to_ids(fact.answer.strip())].exp().item()


def chosen_by(result: FactsResult, target: str, choice: str) -> dict[str, list[int]]:
    rows = result.selections[(result.selections.target == target) & (result.selections.choice == choice)]
    return {site: group["index"].tolist() for site, group in rows.groupby("site")}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[HookedTransformer, FactsSettings, FactsResult, Path]:
    model, out = word_host(), tmp_path_factory.mktemp("facts")
    settings = FactsSettings(("blocks.*.attn.W_[QV]", "blocks.*.mlp.W_*"), facts=word_facts(model), **SETTINGS)
    with unchanged(model):
        result = run_facts(settings, out, progress=False, model=model)
    return model, settings, result, out


def test_shipped_facts_are_well_formed() -> None:
    assert SHIPPED.pair == PAIR
    assert [fact.answer for fact in PAIR] == [" golf", " basketball"]
    everything = [*SHIPPED.pair, *SHIPPED.reversed, *SHIPPED.facts]
    assert len(SHIPPED.facts) >= 120
    assert len({fact.relation for fact in SHIPPED.facts}) >= 12
    assert len({fact.prompt.lower() for fact in everything}) == len(everything)
    for fact in everything:
        assert re.fullmatch(r" [A-Za-z]+", fact.answer), fact
        assert re.fullmatch(r"[^ {}]+( [^ {}]+)*", fact.prompt), fact
        assert fact.relation, fact
        assert fact.subject in fact.prompt, fact
    names = ("Tiger", "Woods", "Kobe", "Bryant")
    assert [fact for fact in SHIPPED.facts if any(name in fact.prompt for name in names)] == []


def test_a_fact_set_is_checked_and_read(tmp_path: Path) -> None:
    a, b, c, d, e = (Fact(f"{name} is", " x", name) for name in "abcde")
    with pytest.raises(ValueError, match="found 1, 2 and 1"):
        FactSet((a,), (b, c), (d,))
    with pytest.raises(ValueError, match="'a is' more often"):
        FactSet((a, b), (c, d), (e, a))
    with pytest.raises(ValueError, match="subject 'z' is not in the prompt 'a is'"):
        FactSet((replace(a, subject="z"), b), (c, d), (e,))
    parts = {
        "pair": [
            {"prompt": "a is", "answer": " x", "subject": "a"},
            {"prompt": "b is", "answer": " x", "subject": "b"},
        ],
        "reversed": [{"prompt": "c is", "answer": " x"}, {"prompt": "d is", "answer": " x"}],
        "facts": [{"prompt": "e is", "answer": " x", "relation": "r"}],
    }
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(parts))
    read = FactSet.read(file)
    assert read.pair == (a, b)
    assert read.facts == (Fact("e is", " x", "", "r"),)
    for wrong in ({**parts, "more": []}, {**parts, "facts": [{"question": "e"}]}, [1]):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"facts.json holds no facts .*Wanted \{pair, reversed, facts\}"):
            FactSet.read(file)


@pytest.mark.parametrize("field", ["prompt", "answer", "subject", "relation"])
@pytest.mark.parametrize("part", ["pair", "reversed", "facts"])
@pytest.mark.parametrize("text", ["a\0b", "\ud83d"])
def test_texts_that_no_table_can_hold_are_refused_with_the_facts(
    tmp_path: Path, text: str, part: str, field: str
) -> None:
    """Python 3.10 writes no NUL as CSV, and no Python half a pair as UTF-8; a whole pair, an emoji, can be written."""
    facts = FactSet(PAIR, SHIPPED.reversed, (Fact("e is", " x", "\U0001f600", "r"),))
    first, *others = getattr(facts, part)
    wrong = {**asdict(facts), part: [asdict(fact) for fact in (replace(first, **{field: text}), *others)]}
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(asdict(facts)))
    assert FactSet.read(file) == facts
    file.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=f"may hold no NUL character.*; found {re.escape(repr(text))}"):
        FactSet.read(file)


def test_presets_differ_in_what_they_cost_alone() -> None:
    paper = FactsSettings.preset("gpt2", 3)
    assert (paper.host, paper.C, paper.importance, paper.steps) == ("gpt2", 768, spd.Vector(d_gate=64), 20_000)
    assert paper.optimizer == spd.Optimizer(lr=1e-3, kind="adamw", weight_decay=0.05)
    assert paper.schedule == spd.Schedule("constant", warmup=0.01)
    assert paper.seed == 3
    for name in ("quick", "cpu", "gpt2"):
        settings = FactsSettings.preset(name)
        assert settings.losses == spd.paper_losses("gpt2")
        assert settings.k == 4
        assert [fact.answer for fact in settings.facts.pair] == [" golf", " basketball"]
    assert paper.facts.pair[0].prompt == "Tiger Woods plays the sport of"
    quick, cpu = FactsSettings.preset("quick"), FactsSettings.preset("cpu")
    assert (quick.losses, quick.optimizer.lr) == (cpu.losses, cpu.optimizer.lr)
    with pytest.raises(ValueError, match="No preset 'slow'"):
        FactsSettings.preset("slow")
    with pytest.raises(ValueError, match="must be at least 1 and spared at least 0, found 0"):
        replace(quick, k=0)


def test_known_facts_are_those_the_host_finds_most_probable(case: tuple) -> None:
    model, settings, result, _ = case
    table = result.known.set_index("prompt")
    assert not table.loc["w8 w8"].one_token
    assert table.loc["w8 w8"].isna().p
    for fact in (*settings.facts.pair, *settings.facts.reversed, *settings.facts.facts[:-1]):
        log_p, own = last(model, fact.prompt), p_of(model, fact)
        row = table.loc[fact.prompt]
        assert row.p == pytest.approx(own, rel=1e-5)
        assert row["rank"] == 1 + int((log_p.exp() > own).sum())
        assert bool(row.known) == (int(log_p.argmax()) == model.tokenizer.convert_tokens_to_ids(fact.answer.strip()))
    counts = result.counts()
    assert [counts[key] for key in ("facts", "known", "dropped", "dropped_as_several_tokens")] == [6, 4, 2, 1]


def test_what_cannot_be_measured_is_refused() -> None:
    model = word_host()
    facts = word_facts(model)
    first, second = facts.pair
    with pytest.raises(ValueError, match=r"does not know 'w1 w2 w3' -> ' w0': its probability is .*, its rank [2-9]"):
        check_facts(model, replace(facts, pair=(replace(first, answer=" w0"), second)))
    with pytest.raises(ValueError, match="' w1 w2' is not one token"):
        check_facts(model, replace(facts, reversed=(facts.reversed[0], Fact("w2 w2", " w1 w2"))))
    with pytest.raises(ValueError, match="knows none of the 2 other facts"):
        check_facts(model, replace(facts, facts=facts.facts[-2:]))


def test_unique_and_active_subcomponents_are_counted_from_importances(case: tuple) -> None:
    model, settings, result, _ = case
    tokens = [model.to_tokens(fact.prompt) for fact in settings.facts.pair]  # one by one: nothing is padded
    g = [result.run.importances(model, row) for row in tokens]
    expected = {
        (fact.prompt, p, site, c, round(float(g[i][site][0, p, c]), 4))
        for i, fact in enumerate(settings.facts.pair)
        for site in result.run.components
        for c in range(5)
        for p in range(tokens[i].shape[1])
        if g[i][site][0, p, c] > settings.threshold and not (g[1 - i][site][0, :, c] > settings.threshold).any()
    }
    found = result.unique[result.unique.by == "importance"]
    rows = zip(found.prompt, found.position, found.site, found.subcomponent, found.value.round(4), strict=True)
    assert set(rows) == expected
    assert len(found) == len(expected) > 2
    for row in found.itertuples():
        assert row.token == row.prompt.split()[row.position - 1]  # one token in front
    for name, parts in result.run.components.items():
        active = sum(any(bool((one[name][0, :, c] > 0.1).any()) for one in g) for c in range(parts.C))
        rows = result.active[(result.active.site == name) & (result.active.threshold == 0.1)]
        assert rows.unique.tolist() == [active]
        assert rows.C.tolist() == [5]
    assert result.counts()["active_share"]["0.1"] == result.counts()["active"]["0.1"] / (5 * len(result.run.components))


def only_here(
    model: HookedTransformer, settings: FactsSettings, result: FactsResult, here: int
) -> dict[str, dict[tuple[str, int], float]]:
    """Each prompt run alone: what is active, and what writes, on one prompt and not on the other, with its largest value."""
    both = [model.to_tokens(fact.prompt) for fact in settings.facts.pair]
    g = [result.run.importances(model, tokens) for tokens in both]
    shares = [contributions(model, result.run, tokens) for tokens in both]
    found: dict[str, dict[tuple[str, int], float]] = {"importance": {}, "contribution": {}}
    for site, parts in result.run.components.items():
        for c in range(parts.C):
            most = [float(one[site][..., c].max()) for one in g]
            if most[here] > settings.threshold >= most[1 - here]:
                found["importance"][site, c] = float(g[here].pre[site][..., c].max())
            most = [float(one[site][..., c].max()) for one in shares]
            if most[here] > settings.min_contribution >= most[1 - here]:
                found["contribution"][site, c] = most[here]
    return found


def test_choices_equal_those_made_one_candidate_at_a_time(case: tuple) -> None:
    model, settings, result, _ = case
    fact = settings.facts.pair[0]
    rows = result.selections[result.selections.target == fact.prompt]
    unique = only_here(model, settings, result, 0)
    orders = {by: sorted(values, key=lambda one: -values[one]) for by, values in unique.items()}
    assert set(orders["importance"]) != set(orders["contribution"])
    for by, order in orders.items():
        mine = rows[rows.choice == by]
        assert list(zip(mine.site, mine["index"], strict=True)) == order[: settings.k]
        assert mine[by].tolist() == pytest.approx([unique[by][one] for one in order[: settings.k]], rel=1e-4)
    candidates = orders["contribution"][: settings.candidates]
    assert len(candidates) < len(orders["contribution"])  # some are not tried
    left = {pick: p_of(swapped(model, result.run, {pick[0]: [pick[1]]}), fact) for pick in candidates}
    greedy = rows[rows.choice == "effect"].iloc[0]
    assert (greedy.site, greedy["index"]) == min(left, key=left.__getitem__)
    assert greedy.tried == len(candidates)
    assert greedy.ratio == pytest.approx(min(left.values()) / p_of(model, fact), rel=1e-4)
    assert greedy.contribution == pytest.approx(unique["contribution"][greedy.site, greedy["index"]], rel=1e-4)


def test_what_writes_is_counted_from_contributions(case: tuple) -> None:
    model, settings, result, _ = case
    for here, fact in enumerate(settings.facts.pair):
        unique = only_here(model, settings, result, here)
        assert result.counts()["active_only_on"][fact.prompt] == len(unique["importance"])
        assert result.counts()["writing_only_on"][fact.prompt] == len(unique["contribution"]) > 0
    shares = [contributions(model, result.run, model.to_tokens(fact.prompt)) for fact in settings.facts.pair]
    most = [torch.stack([one[site].amax((0, 1)) for one in shares]).amax(0) for site in result.run.components]
    assert result.counts()["writing"] == sum(int((one > settings.min_contribution).sum()) for one in most)


def test_effects_equal_those_of_hosts_with_other_weights(case: tuple) -> None:
    model, settings, result, _ = case
    first, second = settings.facts.pair
    effects = result.effects[(result.effects.target == first.prompt) & (result.effects.choice == "importance")]
    for control, prompt in (("subcomponents", first.prompt), ("other prompt", second.prompt)):
        other = swapped(model, result.run, chosen_by(result, prompt, "importance"))
        ratios = effects[effects.control == control].set_index("prompt").ratio
        for fact in (*settings.facts.pair, *settings.facts.reversed, *settings.facts.facts[:4]):
            assert ratios[fact.prompt] == pytest.approx(p_of(other, fact) / p_of(model, fact), rel=1e-4)
    groups = effects[effects.control == "singular"].set_index("prompt").group
    prompts = [fact.prompt for fact in (*settings.facts.pair, *settings.facts.reversed)]
    assert groups[prompts].tolist() == ["fact", "other fact", "reversed", "other reversed"]
    swap = result.effects[result.effects.target == second.prompt].drop_duplicates("prompt").set_index("prompt").group
    assert swap[prompts].tolist() == ["other fact", "fact", "other reversed", "reversed"]
    assert groups.tolist().count("facts") == 4
    assert "w0 w4" not in groups.index


def test_controls_of_a_choice_by_effect_are_the_best_of_as_many(case: tuple) -> None:
    model, settings, _, _ = case
    first = settings.facts.pair[0]
    result = run_facts(
        replace(settings, k=1), progress=False, model=model
    )  # so that the best single one is all that counts
    rows = result.effects[(result.effects.target == first.prompt) & (result.effects.choice == "effect")]
    ratios = rows[(rows.group == "fact") & (rows.draw == 0)].set_index("control").ratio
    tried = []
    for here in (0, 1):
        shares = only_here(model, settings, result, here)["contribution"]
        tried.append(sorted(shares, key=lambda one: -shares[one])[: settings.candidates])
    others = [swapped(model, result.run, {site: [c]}) for site, c in tried[1]]
    singular = []
    for site, count in Counter(site for site, _ in tried[0]).items():
        U, _, Vh = torch.linalg.svd(weight(model, result.run.components[site].site).detach())
        singular += [without(model, result.run, {site: (U.T[[i]], Vh[[i]])}) for i in range(count)]
    for control, hosts in (("best other prompt", others), ("best singular", singular)):
        best = min([1.0, *(p_of(host, first) / p_of(model, first) for host in hosts)])
        assert ratios[control] == pytest.approx(best, rel=1e-4)
    assert {"best random", "best random matched"} <= set(ratios.index)
    assert "other prompt's candidates" not in set(rows.control)


def test_spared_facts_are_known_ones_spread_evenly() -> None:
    known = pd.DataFrame(
        {"part": ["pair", *["facts"] * 9], "known": [True] * 3 + [False] + [True] * 6, "prompt": [*"abcdefghij"]}
    )
    assert spared_facts(known, 3).prompt.tolist() == ["b", "e", "g"]  # of b c e f g h i j, every second
    assert spared_facts(known, 9).prompt.tolist() == ["b", "e", "g", "i"]
    assert spared_facts(known, 0).empty


def test_spared_facts_are_asked_for_in_the_choice_and_counted_apart(case: tuple) -> None:
    model, settings, _, _ = case
    first = settings.facts.pair[0]
    result = run_facts(replace(settings, spared=1), progress=False, model=model)
    spared = spared_facts(result.known, 1)
    groups = result.effects.drop_duplicates("prompt").set_index("prompt").group
    assert groups[groups == "spared"].index.tolist() == spared.prompt.tolist()
    assert groups.tolist().count("facts") == 3
    shares = only_here(model, settings, result, 0)["contribution"]
    indices: dict[str, list[int]] = {}
    for site, index in sorted(shares, key=lambda one: -shares[one])[: settings.candidates]:
        indices.setdefault(site, []).append(index)
    spare = dict(spare=spared.prompt.tolist(), spare_answers=spared.answer.tolist())
    directions = subcomponent_directions(result.run, indices)
    wanted = select_by_effect(model, directions, first.prompt, first.answer, settings.k, **spare)
    found = result.selections[(result.selections.target == first.prompt) & (result.selections.choice == "effect")]
    assert found.site.tolist() == wanted.site.tolist()
    assert found.ratio.tolist() == pytest.approx(wanted.ratio.tolist(), rel=1e-4)
    assert found["index"].tolist() == [indices[row.site][row["index"]] for _, row in wanted.iterrows()]


def test_the_summary_is_means_and_intervals_over_prompts() -> None:
    ratios = {"a": (1.0, 0.8), "b": (0.7, 0.5), "c": (1.2, 1.2)}
    rows = [
        ("t", "importance", "facts", "random", draw, 3, prompt, 9 if prompt == "b" else 8, 1 + draw, ratio)
        for prompt, both in ratios.items()
        for draw, ratio in enumerate(both)
    ]
    columns = ["target", "choice", "group", "control", "draw", "directions", "prompt", "answer", "rank_after", "ratio"]
    rows.append(("t", "importance", "fact", "random", 0, 3, "t", 9, 1, 0.25))
    table = summarize(pd.DataFrame(rows, columns=columns)).set_index("group")
    assert table.loc["fact"].ratio == 0.25
    assert math.isnan(table.loc["fact"].ci_low)
    facts = table.loc["facts"]  # means 0.9, 0.6, 1.2: mean 0.9, standard deviation 0.3; the t quantile of 2 is 4.30265
    half = 4.30265 * 0.3 / 3**0.5
    assert [facts.ratio, facts.ci_low, facts.ci_high] == pytest.approx([0.9, 0.9 - half, 0.9 + half], rel=1e-3)
    assert (facts.worst, facts["first"], facts.draws, facts.prompts, facts.directions) == (0.5, 0.5, 2, 3, 3)
    assert facts.change == pytest.approx((0 + 0.2 + 0.3 + 0.5 + 0.2 + 0.2) / 6)
    assert table.loc["same answer"].ratio == pytest.approx(0.6)
    assert table.loc["same answer"].prompts == 1


def test_trace_zero_out_and_metrics_are_of_the_pair(case: tuple) -> None:
    model, settings, result, _ = case
    run, kls = result.run, []
    for fact in settings.facts.pair:
        trace = result.trace[result.trace.prompt == fact.prompt]
        tokens = model.to_tokens(fact.prompt)
        assert trace.p_clean.tolist() == pytest.approx([p_of(model, fact)] * (3 * 2 * tokens.shape[1]), rel=1e-4)
        assert set(trace.draws) == {3}
        hooks = [("blocks.1.hook_mlp_out", lambda value, hook: 0 * value)]
        log_p = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].log_softmax(-1)
        swept = result.zero_out[(result.zero_out.prompt == fact.prompt) & (result.zero_out.kind == "mlp")]
        own = log_p[model.tokenizer.convert_tokens_to_ids(fact.answer.strip())].item()
        assert swept.set_index("layer").logp[1] == pytest.approx(own, rel=1e-4)
        P = model(tokens)[0].log_softmax(-1)
        with spd.decomposed(model, run):
            Q = model(tokens)[0].log_softmax(-1)
        kls += (P.exp() * (P - Q)).sum(-1).tolist()
    recon = result.metrics.set_index(["metric", "site"]).value["recon", "all"]
    assert recon == pytest.approx(sum(kls) / len(kls), rel=1e-4)  # one prompt at a time: padding counts for nothing
    assert result.metrics.metric.str.startswith("adversarial@").sum() == 1
    assert set(result.zero_out.prompt) == {fact.prompt for fact in (*settings.facts.pair, *settings.facts.reversed)}


def test_everything_is_in_the_folder_and_can_be_read_again(case: tuple) -> None:
    model, _, result, out = case
    again = spd.load(out / "run", model)
    assert all(torch.equal(value, again.tensors()[name]) for name, value in result.run.tensors().items())
    for name in TABLES:
        assert len(pd.read_csv(out / f"{name}.csv")) == len(getattr(result, name)), name

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    saved = json.loads((out / "summary.json").read_text(), parse_constant=refuse)
    assert saved["known"] == 4
    assert saved["active"] == result.counts()["active"]
    assert saved["seconds"]["decomposition"] > 0
    assert saved["summary_table"][0]["ratio"] == pytest.approx(result.summary.ratio.iloc[0], abs=1e-9)
    assert json.loads((out / "settings.json").read_text())["facts"]["pair"][0]["prompt"] == "w1 w2 w3"
    assert "Causal trace" in (out / "tables.md").read_text()


def test_a_run_without_unique_subcomponents_says_so(case: tuple, tmp_path: Path) -> None:
    model, settings, _, _ = case
    result = run_facts(
        replace(settings, threshold=1.0, min_contribution=1.0, steps=1), tmp_path, progress=False, model=model
    )
    assert result.unique.empty
    assert result.selections.empty
    assert result.effects.empty
    assert result.summary.empty
    assert result.counts()["active_only_on"] == result.counts()["writing_only_on"] == {"w1 w2 w3": 0, "w4 w5 w6 w3": 0}
    assert "writing_only_on {'w1 w2 w3': 0, 'w4 w5 w6 w3': 0}" in (tmp_path / "tables.md").read_text()


def test_the_command_takes_other_hosts_facts_and_sites(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = word_host()
    asked = []
    monkeypatch.setattr(experiment, "load_host", lambda spec, device: asked.append(spec) or model)
    facts = word_facts(model)
    parts = {part: [vars(fact) for fact in getattr(facts, part)] for part in ("pair", "reversed", "facts")}
    (tmp_path / "facts.json").write_text(json.dumps(parts))
    options = [
        "--facts",
        str(tmp_path / "facts.json"),
        "--host",
        "tiny",
        "--sites",
        "blocks.0.mlp.W_out",
        "--steps",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["tl-spd", "facts", "--out", str(tmp_path / "out"), "--C", "8", *options])
    cli.main()
    assert asked == ["tiny"]
    assert "Counts: facts 6, known 4" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["C"] == 8
