"""What the analyses say of the Runs that benchmarks.induction left. ``python -m benchmarks.induction_analyses --seeds 0 1 2``.

For the Run of every seed: the mechanism test, the worst masking found, the KL of some sites at their importances (by s1's place),
rank-1 pieces against KL (greedy SVD, the Run, random), and patching of one prompt pair beside TransformerLens: the same
sequence with another token m.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro

import tl_spd as spd
from benchmarks.common import markdown, publish
from benchmarks.induction import short
from benchmarks.patching import check_table, correlation_table, patch_pair
from tl_spd.analysis.adversarial import Adversary, adversarial_recon
from tl_spd.analysis.attention import attention_without_positions
from tl_spd.analysis.patching import answer_metric
from tl_spd.analysis.pruning import rank1_curve
from tl_spd.analysis.run_pruning import greedy_run_path
from tl_spd.engine import Engine
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.importance import Importances
from tl_spd.masks import Pass
from tl_spd.suppress import load_weights

LEVELS = (1e-3, 1e-2, 1e-1, 1.0)
"""KLs (nats) at which pieces are counted."""
TOGETHER = ("Q0", "K0", "V0", "Q1", "K1", "V1", "Q0 K0", "Q0 K0 V0", "Q0 K0 V0 K1", "Q1 K1 V1", "Q0 K0 V0 Q1 K1 V1")
"""Sites that are masked together: one alone, and all, may be exact while some are not."""
PLACES = 4096
"""Sequences that are told apart by s1's place: a mean over all may hide a place where everything breaks."""


@dataclass
class Arguments:
    """Where the Runs are, and how many held-out sequences are used."""

    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "cpu"
    runs: Path = Path("runs")
    sequences: int = 256


def pieces_needed(curve: pd.DataFrame) -> dict[str, dict[str, float]]:
    """For every method and level: the fewest kept pieces whose KL is at most that (random: the mean over its seeds)."""
    found: dict[str, dict[str, float]] = {}
    for method, rows in curve.groupby("method"):
        by_level = {}
        for level in LEVELS:
            fewest = rows[rows.kl <= level].groupby("seed").kept.min()
            by_level[f"KL {level:g}"] = float(fewest.mean())
        found[str(method)] = by_level
    return found


def kept_by_site(run: spd.Run, importances: Importances, path: pd.DataFrame, kl: float) -> dict[str, int]:
    """What the greedy ``path`` keeps of every site at its fewest pieces whose KL is at most ``kl``."""
    removed = path[: int(path[path.kl <= kl].index[-1]) + 1].site
    alive = {name: int((values > 0).flatten(0, 1).any(0).sum()) for name, values in importances.items()}
    return {short(name): alive[name] - int((removed == name).sum()) for name in run.components}


@torch.no_grad()
def together(engine: Engine, task: InductionTask) -> pd.DataFrame:
    """KL in nats with the sites of each entry of :data:`TOGETHER` at ``m = g``, the rest the host's own, by s1's place."""
    tokens, _, s1 = task.sample(PLACES, torch.Generator().manual_seed(20_011))
    rows = {}
    for place in range(task.length - 2):
        batch = engine.observe(tokens[s1 == place])
        importances = {short(name): (name, g) for name, g in engine.importances(batch).items()}
        passes = [Pass(dict(importances[site] for site in sites.split())) for sites in TOGETHER]
        rows[place] = dict(zip(TOGETHER, engine.kl(batch, passes).tolist(), strict=True))
    kl = pd.DataFrame(rows)
    worst = {"mean": kl.mean(axis=1), "worst": kl.max(axis=1), "worst place": kl.idxmax(axis=1)}
    return pd.DataFrame(worst).rename_axis("sites").reset_index()


def analyse(folder: Path, seed: int, sequences: int) -> dict[str, Any]:
    """All analyses of one seed's Run."""
    task = InductionTask()
    model = build_target(task, seed)
    load_weights(model, folder / "target.safetensors")
    run = spd.load(folder / "run", model)
    tokens, _, s1 = task.sample(sequences, torch.Generator().manual_seed(20_011))
    engine = Engine(model, run, last_token_only=True)
    batch = engine.observe(tokens)
    worst = adversarial_recon(engine, batch, engine.importances(batch), Adversary())
    numbers: dict[str, float] = {f"adversarial recon ({Adversary().budget})": worst.kl}
    for which, chosen in (("original", None), ("decomposed", run)):
        table = attention_without_positions(model, tokens, 0, 0, s1 + 1, s1, run=chosen)
        numbers[f"m on s1, {which}"] = table.attention.mean()
        numbers[f"m on s1 without positions in m's query, {which}"] = table.without.mean()
    started = time.perf_counter()
    curve = rank1_curve(model, run, tokens, tau=2.0, last_token_only=True, points=24)
    greedy = greedy_run_path(model, run, tokens, tau=2.0, last_token_only=True)
    by_site = kept_by_site(run, run.importances(model, tokens), greedy, 0.01)
    curve = pd.concat([curve, greedy[["method", "seed", "kept", "kl"]]], ignore_index=True)
    seconds = time.perf_counter() - started
    clean = tokens[:1]
    corrupted, m = clean.clone(), int(s1[0]) + 1
    corrupted[0, m] = (clean[0, m] + 64) % task.vocab
    metric = answer_metric(model, int(clean[0, m]), int(corrupted[0, m]))
    tables = patch_pair(model, run, clean, corrupted, metric) | {"together": together(engine, task)}
    tables["patches"] = tables["patches"][tables["patches"].effect.abs() > 1e-3]
    tables["shares"] = tables["shares"][tables["shares"].tl_effect.abs() > 0.1]
    return {"numbers": numbers, "curve": curve, "curve seconds": seconds, "kept at KL 0.01": by_site} | tables


def main(arguments: Arguments) -> None:
    """Analyse every seed and publish the tables."""
    results = {}
    for seed in arguments.seeds:
        folder = arguments.runs / f"induction-{arguments.preset}-{seed}"
        results[seed] = analyse(folder, seed, arguments.sequences)
    pieces = {
        (method, f"seed {seed}"): levels
        for seed, result in results.items()
        for method, levels in pieces_needed(result["curve"]).items()
    }
    by_sites = {f"seed {seed}": result["together"].set_index("sites") for seed, result in results.items()}
    shares = pd.concat([r["shares"].assign(seed=seed) for seed, r in results.items()])
    shares = shares.assign(site=shares.site.map(short)).set_index(["seed", "site", "position", "k"])
    parts = [
        f"Runs of the preset {arguments.preset}; {arguments.sequences} held-out sequences, scored at the last token.",
        markdown(pd.DataFrame({f"seed {seed}": result["numbers"] for seed, result in results.items()})),
        f"KL (nats) with these sites at m = g, the rest the model's own; mean over s1's places, the worst ({PLACES} sequences)",
        markdown(pd.concat(by_sites, axis=1)),
        "Fewest rank-1 pieces whose KL is at most so many nats. Kept at every token: svd (greedy), spd (by mean importance),"
        " random. Kept where their importances say so: spd_masked (by mean importance), spd_greedy (as svd: every round the one"
        " whose removal costs least)",
        markdown(pd.DataFrame(pieces).T.sort_index(level=0, sort_remaining=False), ".0f"),
        "Of which sites those of spd_greedy at KL 0.01 are",
        markdown(pd.DataFrame({f"seed {seed}": result["kept at KL 0.01"] for seed, result in results.items()}).T),
        "Patching one prompt pair (another token m; logit of the one m minus that of the other): what the k subcomponents of"
        " largest effect carry of TransformerLens's patch of the whole site, where that is above 0.1",
        markdown(shares[["joint_effect", "summed_effect", "tl_effect", "joint_share"]]),
        "All subcomponents of a site together against TransformerLens's patch",
        check_table(results),
        "How well cheaper numbers predict effects (all sites together)",
        correlation_table(results, ["seed"]),
    ]
    data = {
        seed: {
            key: value.to_dict("records") if isinstance(value, pd.DataFrame) else value for key, value in result.items()
        }
        for seed, result in results.items()
    }
    name = "induction_analyses" + (arguments.preset != "cpu") * f"_{arguments.preset}"
    publish(name, "Analyses of the induction Runs", "\n\n".join(parts), data)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
