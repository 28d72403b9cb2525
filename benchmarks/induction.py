"""The induction result on several seeds: the paper's tables beside ours. ``python -m benchmarks.induction --seeds 0 1 2``.

A seed whose folder holds a finished run of the same settings is not run again: its tables are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from benchmarks.common import markdown, publish
from tl_spd.experiments.induction import InductionSettings, run_induction

PAPER_ACTIVE = {  # table 1a: s1, m, s2, random
    "Q0": (0.0, 1.0, 0.0, 0.001),
    "K0": (1.0, 0.05, 0.0, 0.183),
    "V0": (1.0, 0.0, 0.0, 0.0),
    "Q1": (0.0, 0.0, 1.0, 0.0),
    "K1": (0.0, 1.0, 0.0, 0.0),
    "V1": (0.0, 5.053, 0.0, 0.0),
}
PAPER_UNIQUE = {"Q0": 1, "K0": 1, "V0": 1, "Q1": 1, "K1": 1, "V1": 11}
PAPER_METRICS = {"faithfulness": 3e-9, "recon": 1e-4, "stochastic_layerwise": 1e-4, "attention_kl": 0.194}
PAPER_METRICS |= {"m_on_s1_attention, original": 1.0, "m_on_s1_without, original": 0.0941}


@dataclass
class Arguments:
    """Seeds one after the other, each with its own target and decomposition."""

    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "quick"
    out: Path = Path("runs")


def short(site: str) -> str:
    """``blocks.0.attn.W_Q`` -> ``Q0``."""
    return site.rpartition("_")[2] + site.split(".")[1]


def tables(results: dict[int, Tables]) -> str:
    """One markdown table per table of the paper, all seeds in it."""
    active, unique, metrics = {}, {}, {}
    for site, values in PAPER_ACTIVE.items():
        active[site, "paper"] = dict(zip(("s1", "m", "s2", "random"), values, strict=True))
    unique["paper"], metrics["paper"] = PAPER_UNIQUE, PAPER_METRICS
    for seed, result in results.items():
        at_zero = result.active[result.active.threshold == 0].pivot(index="site", columns="position", values="active")
        for site, row in at_zero[["s1", "m", "s2", "random"]].iterrows():
            active[short(str(site)), f"seed {seed}"] = row.to_dict()
        for threshold in (0.0, 0.1):
            rows = result.unique[result.unique.threshold == threshold]
            unique[f"seed {seed}, g > {threshold:g}"] = dict(zip(map(short, rows.site), rows.unique, strict=True))
        joint = result.metrics[result.metrics.site == "all"].set_index("metric").value.to_dict()
        alone = result.metrics[result.metrics.metric == "layerwise"].set_index("site").value.drop("all")
        alone = {f"layerwise {short(site)}": value for site, value in alone.items()}
        mechanism = result.metrics[result.metrics.metric.str.startswith("m_on_s1")]
        alone |= {f"{row.metric}, {row.site}": row.value for row in mechanism.itertuples()}
        target = {
            "target accuracy": result.target["accuracy"],
            "target m on s1": result.target["attention_m_on_s1"],
            "target s2 on m": result.target["attention_s2_on_m"],
        }
        metrics[f"seed {seed}"] = target | joint | alone | {f"{k} seconds": v for k, v in result.seconds.items()}
    fraction = next(iter(results.values())).unique.min_fraction.iloc[0]
    shown = pd.DataFrame(active).T.sort_index(level=0, sort_remaining=False)
    parts = [
        "Mean active subcomponents (importance above 0) by position, 1,024 held-out sequences",
        markdown(shown, ".3f"),
        f"Unique subcomponents: active on more than {fraction:g} of the evaluated (sequence, position) pairs",
        markdown(pd.DataFrame(unique).T),
        "Metrics, KL in nats at the last token (`layerwise`: that site alone at m = g; attention_kl: mean of both layers;"
        " m_on_s1: m's attention on s1 in layer 0, and without positions in m's query)",
        markdown(pd.DataFrame(metrics)),
    ]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Tables:
    """What is shown of one seed."""

    active: pd.DataFrame
    unique: pd.DataFrame
    metrics: pd.DataFrame
    target: dict[str, Any]
    seconds: dict[str, float]

    @classmethod
    def of(cls, settings: InductionSettings, folder: Path) -> Tables:
        """Those in ``folder`` if it holds a finished run of ``settings``, else those of a new run."""
        done = folder / "settings.json"  # written last
        if not done.exists() or json.loads(done.read_text()) != settings.plain():
            print(run_induction(settings, folder).tables(), flush=True)
        summary = json.loads((folder / "summary.json").read_text())
        frames = {name: pd.DataFrame(summary[name]) for name in ("active", "unique", "metrics")}
        return cls(**frames, target=summary["target"], seconds=summary["seconds"])


def main(arguments: Arguments) -> None:
    """Run every seed and publish the tables."""
    results = {}
    for seed in arguments.seeds:
        settings = InductionSettings.preset(arguments.preset, seed)
        results[seed] = Tables.of(settings, arguments.out / f"induction-{arguments.preset}-{seed}")
    data = {seed: {f.name: _plain(getattr(result, f.name)) for f in fields(result)} for seed, result in results.items()}
    publish(f"induction_{arguments.preset}", f"Induction, preset {arguments.preset}", tables(results), data)


def _plain(value: Any) -> Any:
    return value.to_dict("records") if isinstance(value, pd.DataFrame) else value


if __name__ == "__main__":
    main(tyro.cli(Arguments))
