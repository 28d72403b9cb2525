"""The facts Runs beside TransformerLens's patches: ``python -m benchmarks.patching --seeds 0 1 2``.

For every seed's finished facts run: both prompts of the pair, each as the clean one once. Every subcomponent that is active in
either prompt is patched at every position, alone and with the largest others, beside TransformerLens's patch of the same matrix's
output. The metric is the logit of the clean prompt's answer minus that of the other's, as a share of the whole way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from torch import Tensor

import tl_spd as spd
from benchmarks.common import markdown, publish
from tl_spd.analysis.pair import Metric
from tl_spd.analysis.patching import answer_metric, compare_whole_sites, correlations, joint_shares, patch_subcomponents
from tl_spd.experiments.facts import FactsSettings
from tl_spd.hosts import load_host
from tl_spd.run import Run
from tl_spd.sites import HookedTransformer


@dataclass
class Arguments:
    """Where the Runs are."""

    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "quick"
    runs: Path = Path("runs")


def patch_pair(
    model: HookedTransformer,
    run: Run,
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
    threshold: float | None = None,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
) -> dict[str, pd.DataFrame]:
    """All patching tables of one pair of prompts."""
    patches = patch_subcomponents(model, run, clean, corrupted, metric, threshold=threshold)
    return {
        "patches": patches,
        "shares": joint_shares(model, run, clean, corrupted, metric, patches, ks),
        "whole": compare_whole_sites(model, run, clean, corrupted, metric),
        "correlations": correlations(patches),
    }


def check_table(results: Mapping[Any, Mapping[str, pd.DataFrame]]) -> str:
    """All subcomponents of a site together against TransformerLens's patch, one row per result."""
    columns = {"largest |TransformerLens's effect|": "tl_effect", "largest |difference|": "difference",
               "largest |unexplained by the delta|": "unexplained"}  # fmt: skip
    rows = {
        key: {name: result["whole"][column].abs().max() for name, column in columns.items()}
        for key, result in results.items()
    }
    return markdown(pd.DataFrame(rows))


def correlation_table(results: Mapping[Any, Mapping[str, pd.DataFrame]], names: Sequence[str]) -> str:
    """How well cheaper numbers predict effects, all sites together."""
    found = pd.concat({key: result["correlations"] for key, result in results.items()}, names=[*names, None])
    found = found[found.site == "all"].droplevel(-1).set_index(["first", "second"], append=True)
    return markdown(found[["n", "pearson", "spearman"]])


def share_tables(
    results: Mapping[tuple[int, str], Mapping[str, pd.DataFrame]], least: float, shown: float
) -> list[str]:
    """The spread of ``joint_share`` over places of at least ``least``, and every place of at least ``shown``, by k."""
    found = pd.concat({key: result["shares"] for key, result in results.items()}, names=["seed", "clean", None])
    found = found.set_index(["site", "position"], append=True).droplevel(2)
    last = found.k.max()
    found["pieces"] = ["all active" if k == last else f"{k} largest" for k in found.k]
    spread = found[found.tl_effect.abs() >= least].groupby(["seed", "clean", "pieces"], sort=False).joint_share
    table = spread.describe()[["count", "min", "50%", "max"]].rename(columns={"count": "places", "50%": "median"})
    large = found[found.tl_effect.abs() >= shown]
    single = large.pivot_table(index=found.index.names, columns="pieces", values="joint_share", sort=False)
    single.insert(0, "TransformerLens", large.groupby(found.index.names).tl_effect.first())
    return [markdown(table, ".2f"), markdown(single.sort_index(level=["clean", "site", "position"]), ".2f")]


def main(arguments: Arguments) -> None:
    """Patch every seed's Run in both directions and publish the tables."""
    settings = FactsSettings.preset(arguments.preset)
    model = load_host(settings.host)
    pair = settings.facts.pair
    prompts, answers = [fact.prompt for fact in pair], [model.to_single_token(fact.answer) for fact in pair]
    tokens = model.to_tokens(prompts).split(1)
    results, way = {}, {}
    for seed in arguments.seeds:
        run = spd.load(arguments.runs / f"facts-{arguments.preset}-{seed}" / "run", model)
        for clean, corrupted in ((0, 1), (1, 0)):
            logits = answer_metric(model, answers[clean], answers[corrupted])
            low, high = (logits(model(tokens[which])).item() for which in (corrupted, clean))

            def restored(found: Tensor, logits: Metric = logits, low: float = low, high: float = high) -> Tensor:
                return (logits(found) - low) / (high - low)

            key, ks = (seed, prompts[clean]), (1, 2, 4, max(parts.C for parts in run.components.values()))
            way[key] = high - low
            tables = patch_pair(model, run, tokens[clean], tokens[corrupted], restored, threshold=0.0, ks=ks)
            tables["patches"] = tables["patches"][tables["patches"].effect.abs() > 1e-3]
            results[key] = tables
    parts = [
        f"Runs of the facts preset {arguments.preset}, by seed and clean prompt; the other prompt of the pair is the corrupted "
        "one. Effects are shares of the whole way between the prompts' metrics, which is "
        + " and ".join(f"{way[key]:.2f} ({key[1]})" for key in list(way)[:2])
        + " in logits. Subcomponents with an importance above 0 in either prompt are patched.",
        "What the subcomponents of largest effect carry together, as a share of TransformerLens's effect: over all matrices and "
        "tokens where that is at least 0.05 of the way, and each where it is at least 0.15",
        *share_tables(results, 0.05, 0.15),
        "All subcomponents of a site together, active or not, against TransformerLens's patch",
        check_table(results),
        "How well cheaper numbers predict effects (all sites together)",
        correlation_table(results, ["seed", "clean"]),
    ]
    data = [
        {"seed": seed, "clean": clean} | {name: table.to_dict("records") for name, table in result.items()}
        for (seed, clean), result in results.items()
    ]
    publish("facts_patching", "Subcomponents of the facts Runs beside activation patching", "\n\n".join(parts), data)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
