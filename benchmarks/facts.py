"""``tl-spd facts`` on several seeds: what suppression takes from a fact, beside what it takes elsewhere and what controls take.

``python -m benchmarks.facts --seeds 0 1 2``. A seed whose folder holds a finished run of the same settings is not run again: its
tables are read. Where it holds a finished decomposition only, that one is read and the rest is run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from torch.nn.functional import cosine_similarity

import tl_spd as spd
from benchmarks.common import markdown, publish
from tl_spd.analysis.suppression import chosen, effect_table
from tl_spd.experiments.facts import TABLES, FactsResult, FactsSettings, run_facts
from tl_spd.experiments.facts_steps import spared_facts, tokenize
from tl_spd.hosts import load_host
from tl_spd.run import new_run
from tl_spd.suppress import subcomponent_directions

SPARED = 0.1
"""Mean change of the fact set's probabilities below which a control counts as sparing it."""


@dataclass
class Arguments:
    """Seeds one after the other, each with its own decomposition."""

    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "quick"
    out: Path = Path("runs")


def seed_table(results: dict[int, FactsResult]) -> pd.DataFrame:
    """One column per seed: counts, seconds, the evaluation's joint numbers and how deep its worst layerwise recon is."""
    columns = {}
    for seed, result in results.items():
        column: dict[str, Any] = {}
        for name, value in result.counts().items():
            column |= {f"{name}: {key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        metrics = result.metrics
        column |= metrics[metrics.site == "all"].set_index("metric").value.to_dict()
        column["layerwise, worst site"] = metrics[(metrics.metric == "layerwise") & (metrics.site != "all")].value.max()
        column |= {f"seconds: {part}": value for part, value in result.seconds.items()}
        columns[f"seed {seed}"] = {name: float(value) for name, value in column.items()}
    return pd.DataFrame(columns)


def headline_table(results: dict[int, FactsResult]) -> pd.DataFrame:
    """What is left of the fact and of the fact set, beside the controls that take most of the fact, by seed, fact and choice.

    Among the controls that ``spare`` the fact set (mean change below SPARED), and among all of them.
    """
    rows = {}
    for seed, result in results.items():
        for (target, choice), table in result.effects_table().groupby(["target", "choice"], sort=False):
            by_control = table.droplevel(["target", "choice"])
            own, controls = by_control.loc["subcomponents"], by_control.drop("subcomponents")
            row = {name: own[name] for name in ("directions", "fact", "facts", "facts change")}
            for which, among in {"sparing": controls[controls["facts change"] < SPARED], "any": controls}.items():
                if len(among):
                    name = among.fact.idxmin()
                    row |= {f"{which} control": name, f"{which}: fact": among.fact[name]}
                    row[f"{which}: facts change"] = among["facts change"][name]
            rows[f"seed {seed}", target, choice] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def effect_tables(results: dict[int, FactsResult]) -> list[str]:
    """For each fact and choice the ratios of every seed, one row per suppression and seed."""
    every = pd.concat({seed: result.effects_table() for seed, result in results.items()}, names=["seed"])
    parts = []
    for (target, choice), rows in every.groupby(["target", "choice"], sort=False):
        shown = rows.droplevel(["target", "choice"]).swaplevel().sort_index(level="control", sort_remaining=True)
        parts += [f"`{target}`, choice by {choice}", markdown(shown)]
    return parts


def selection_table(results: dict[int, FactsResult]) -> str:
    """Which directions were suppressed, by seed, fact and choice, with the token where each is most important."""
    every = pd.concat({seed: result.selections for seed, result in results.items()}, names=["seed", "row"])
    every["token"] = every.token.map(repr)
    return markdown(every.droplevel("row").set_index(["target", "choice", "round"], append=True))


def start_table(preset: str, results: dict[int, FactsResult], out: Path) -> pd.DataFrame:
    """What training did to the directions chosen by effect, and what those that they started from do in their place.

    ``cosine``: of trained and initial read and write, the least of the chosen ones. ``fact``, ``facts``, ``change``: what is
    left of the fact and of the fact set (mean, and mean of |ratio - 1|), trained and initial.
    """
    model, rows = load_host(FactsSettings.preset(preset).host), {}
    for seed, result in results.items():
        settings = FactsSettings.preset(preset, seed)
        batch = tokenize(model, [fact.prompt for fact in settings.facts.pair])
        run = spd.load(out / f"facts-{preset}-{seed}" / "run", model)
        counts = {name: parts.C for name, parts in run.components.items()}
        first = new_run(model, run.sites, counts, run.importance, settings.init, seed, batch)
        facts = result.known[(result.known.part == "facts") & result.known.known]
        facts = facts[~facts.prompt.isin(spared_facts(result.known, settings.spared).prompt)]
        by_effect = result.selections[result.selections.choice == "effect"]
        for target, choice in by_effect.groupby("target", sort=False):
            answer = result.known.set_index("prompt").answer[target]
            trained, initial = (subcomponent_directions(which, chosen(choice)) for which in (run, first))
            row = {
                f"cosine {side}": min(
                    float(
                        cosine_similarity(getattr(trained[name], side), getattr(initial[name], side), dim).abs().min()
                    )
                    for name in trained
                )
                for side, dim in (("read", 0), ("write", 1))
            }
            sets = {"trained": trained, "initial": initial}
            table = effect_table(model, [target, *facts.prompt], [answer, *facts.answer], sets)
            for name, ratios in table.groupby("suppression", sort=False).ratio:
                row |= {f"{name} fact": ratios.iloc[0], f"{name} facts": ratios.iloc[1:].mean()}
                row[f"{name} change"] = (ratios.iloc[1:] - 1).abs().mean()
            rows[f"seed {seed}", target] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def unique_table(results: dict[int, FactsResult]) -> str:
    """How many subcomponents active, or writing, on one prompt only there are at each of its tokens, by seed."""
    columns = {}
    for seed, result in results.items():
        rows = result.unique.assign(token=result.unique.token.map(repr))
        columns[f"seed {seed}"] = rows.groupby(["by", "prompt", "position", "token"], sort=False).size()
    return markdown(pd.DataFrame(columns).fillna(0).astype(int).sort_index())


def result_of(settings: FactsSettings, folder: Path) -> FactsResult:
    """The finished run of ``settings`` in ``folder``, without its Run; a new one if there is none."""
    done, wanted = folder / "settings.json", json.loads(json.dumps(asdict(settings), default=str))  # written last
    if not done.exists() or json.loads(done.read_text()) != wanted:
        print(run_facts(settings, folder, resume=True).tables(), flush=True)
    tables = {name: pd.read_csv(folder / f"{name}.csv") for name in TABLES}
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    return FactsResult(run=None, seconds=seconds, **tables)  # type: ignore[arg-type]


def main(arguments: Arguments) -> None:
    """Run every seed and publish the tables."""
    results = {}
    for seed in arguments.seeds:
        settings = FactsSettings.preset(arguments.preset, seed)
        results[seed] = result_of(settings, arguments.out / f"facts-{arguments.preset}-{seed}")
    settings = FactsSettings.preset(arguments.preset)
    text = [
        f"Host {settings.host}, sites {settings.sites}, C {settings.C}, {settings.importance}, {settings.steps} steps on "
        f"{' and '.join(f'`{fact.prompt}` -> `{fact.answer}`' for fact in settings.facts.pair)}. At most {settings.k} directions "
        f"are suppressed: the most important ones of those active on a prompt only, the most contributing ones of those writing "
        f"there only, or those of the {settings.candidates} most contributing ones that a choice by effect takes. It (at the "
        f"same time least change of {settings.spared} other facts, `spared`, which are not in the fact set) ends where one more "
        "does not help. Contribution: the length of what a subcomponent writes as a share of its site's output; it writes where "
        f"that is above {settings.min_contribution:g}.",
        "What is left of the answer's probability (`change`: mean of |ratio - 1|), beside the control taking most of the fact: "
        f"of those that change the fact set by less than {SPARED:g} (`sparing`), and of all (`any`)",
        markdown(headline_table(results)),
        "What training did to the directions chosen by effect, and what those that they started from do in their place",
        markdown(start_table(arguments.preset, results, arguments.out)),
        markdown(seed_table(results)),
        "Subcomponents active (by importance) or writing (by contribution) on one prompt only, by token",
        unique_table(results),
        "Suppressed directions (importance before its cut at 1 and contribution: the largest at any token; "
        "`p`, `ratio`: of the fact, with all up to that round suppressed)",
        selection_table(results),
        "Probability of the answer after suppression as a share of that before: means over prompts. `facts`: the known facts of "
        "the fact set with 95% interval over facts, worst ratio, mean absolute change and share of answers still ranked first; "
        "`same answer`: those of them whose answer is this fact's. Random controls: means over draws, worst of all draws. "
        "`best`: chosen greedily by effect on the fact from as many directions as subcomponents were tried.",
        *effect_tables(results),
    ]
    data = {seed: result.numbers() for seed, result in results.items()}
    publish(f"facts_{arguments.preset}", f"Facts, preset {arguments.preset}", "\n\n".join(text), data)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
