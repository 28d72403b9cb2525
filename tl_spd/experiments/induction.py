"""The induction experiment: train the paper's target, decompose it, and make the paper's three tables.

1. :mod:`tl_spd.experiments.induction_target` trains the two-layer attention-only model; its attention is checked first, since
   a target without the circuit decomposes into another story.
2. Q, K, V of both layers are decomposed with attention importances, scored at the last token.
3. On held-out sequences: active subcomponents by position (s1, m, s2, all others), unique subcomponents, and metrics with the
   KL of attention patterns; beside the paper's table the deterministic layerwise reconstruction of every site.

Presets: ``quick`` (5 to 10 minutes on two cores), ``cpu`` (19 to 32; a target that trained three times as long, and three
times the steps), ``paper`` (the paper's own losses, batch and steps; for a GPU). ``quick`` and ``cpu`` end with the
paper's losses and importances, but for the last three of these:

- A sparse start: minimality begins fifty times as strong, and the importances' attention near each token. Else Q0 stays on nearly
  everywhere: a subcomponent that is on at all positions is not told which of them need it before it has learnt which token
  comes before. From ten times, that may still be so after 1,250 of 6,000 steps.
- The leak of importances that are off begins at 1 (:class:`~tl_spd.importance.Leak`): from 0.01, Q0 stays off where it is needed.
- Components start from singular vectors: from random ones so short a training keeps many copies of one direction.
- Gradients are clipped to a norm of 1. Where masks break so sharp a circuit a sequence costs tens of nats; unclipped, its
  gradient fills Adam's second moments for a thousand steps, in which next to nothing is turned off.
- ReconLayerwise: without it the sites of layer 0 agree privately on another circuit, and Q0 or K0 alone at exactly ``m = g`` is
  off by several nats.
- ReconPartial, a subset of sites for every sequence: without it Q0 and K0 together at ``m = g`` are off by 5 to 23 nats,
  while every site alone and all six together are exact (K1's importances know where m is).
- StochasticReconLayerwise counts as a sum over the six sites, not as a mean, and draws four masks: with few subcomponents on,
  about one sequence in a hundred goes wrong under the masks of Q0 or K0, which a mean hardly shows.

``cpu-even-start`` (13 to 18 minutes) is ``quick``'s target, the paper's losses and ReconLayerwise for 10,000 steps from
singular vectors, with none of the others; ``cpu-paper-losses`` is that without ReconLayerwise. ``cpu-rank-2`` is ``cpu`` on a
target whose layer 0 may use two dimensions of its head (its W_Q and W_K learn twice as fast, else not every seed learns the
circuit), to show where the number of Q0's and K0's subcomponents comes from: the heads of the other targets need six to eight.
Importances start around 0 (from 1 the same number of steps leaves more on) in all, and the learning rate is 3e-3 in all but
``paper``.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_spd.analysis.activity import active_by_position, one_hot_positions, unique_subcomponents
from tl_spd.analysis.adversarial import Adversary, adversarial_recon
from tl_spd.analysis.attention import attention_kl, attention_without_positions
from tl_spd.analysis.evaluation import evaluate
from tl_spd.components import Init
from tl_spd.engine import Engine
from tl_spd.experiments.induction_target import (
    InductionTask,
    TargetResult,
    TargetSettings,
    build_target,
    train_target,
)
from tl_spd.importance import Attention, ImportanceSpec, Leak
from tl_spd.losses import (
    ImportanceMinimality,
    LossTerm,
    ReconLayerwise,
    ReconPartial,
    StochasticReconLayerwise,
    paper_losses,
)
from tl_spd.run import Run
from tl_spd.settings import Optimizer, Schedule
from tl_spd.sites import HookedTransformer
from tl_spd.suppress import load_weights, save_weights
from tl_spd.train import decompose

SITES = ("blocks.*.attn.W_[QKV]",)
EVALUATION_SEED = 10_007
ADVERSARY_SEQUENCES = 256
DRAWS = 32
"""Stochastic masks drawn to measure: about one sequence in a thousand goes wrong under K0's, and a few such decide the mean."""


@dataclass(frozen=True)
class InductionSettings:
    """What decides an induction run: the target's training and the decomposition."""

    target: TargetSettings
    steps: int
    batch_size: int
    task: InductionTask = field(default_factory=InductionTask)
    C: int = 100
    importance: ImportanceSpec = field(default_factory=lambda: Attention(d_gate=16, start=0.0))
    leak: Leak = field(default_factory=Leak)
    init: Init = "kaiming"
    losses: tuple[LossTerm, ...] = field(default_factory=lambda: paper_losses("induction"))
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=lambda: Schedule("cosine"))
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        """The settings as plain values for JSON, losses and importance with their names."""
        text = json.dumps(asdict(self) | {"losses": list(map(str, self.losses)), "importance": str(self.importance)})
        return dict(json.loads(text))

    def training(self) -> dict[str, Any]:
        """What these settings say of :func:`~tl_spd.train.decompose`'s arguments, its data apart."""
        names = ("C", "steps", "importance", "leak", "init", "losses", "optimizer", "schedule", "seed")
        return {name: getattr(self, name) for name in names} | {"sites": SITES, "last_token_only": True}

    @classmethod
    def preset(cls, name: str, seed: int = 0) -> InductionSettings:
        """Settings by name, the same for every seed but for the seed.

        Raises:
            ValueError: an unknown name.
        """
        target, longer = TargetSettings.preset("quick", seed), TargetSettings.preset("cpu", seed)
        faster = dict.fromkeys(("blocks.0.attn.W_Q", "blocks.0.attn.W_K"), 2.0)
        two = replace(longer, qk_rank=2, lr_factor={**longer.lr_factor, **faster})
        fast: dict[str, Any] = {"init": "svd", "optimizer": Optimizer(lr=3e-3), "batch_size": 16}
        terms = {term.name: term for term in (*paper_losses("induction"), ReconLayerwise(1.0))}
        even = fast | {"losses": tuple(terms.values())}
        changed = (
            ImportanceMinimality(0.02, coeff_start=1.0),
            StochasticReconLayerwise(6.0, samples=4),
            ReconPartial(6.0, subset="sequence"),
        )
        sparse = fast | {
            "losses": tuple((terms | {term.name: term for term in changed}).values()),
            "importance": Attention(d_gate=16, start=0.0, relative="scalar", reach=2.0),
            "leak": Leak(1.0),
            "optimizer": Optimizer(lr=3e-3, clip=1.0),
        }
        presets = {
            "quick": cls(target, steps=2_000, **sparse),
            "cpu": cls(longer, steps=6_000, **sparse),
            "cpu-even-start": cls(target, steps=10_000, **even),
            "cpu-paper-losses": cls(target, steps=10_000, **fast),
            "cpu-rank-2": cls(two, steps=6_000, **sparse),
            "paper": cls(longer, steps=100_000, batch_size=1024),
        }
        if name not in presets:
            raise ValueError(f"No preset {name!r}; there are {sorted(presets)}.")
        return replace(presets[name], seed=seed)


@dataclass(frozen=True)
class InductionResult:
    """A finished induction run.

    Attributes:
        target: the trained model and what is known about its circuit.
        run: the decomposition.
        active: table 1a: ``site, position, threshold, active`` (mean active subcomponents per token).
        unique: table 1b: ``site, threshold, min_fraction, unique, C``.
        metrics: table 1c and more: ``metric, site, value``.
        seconds: wall time of ``target`` and ``decomposition``.
    """

    target: TargetResult
    run: Run
    active: pd.DataFrame
    unique: pd.DataFrame
    metrics: pd.DataFrame
    seconds: dict[str, float]

    def active_table(self, threshold: float = 0.0) -> pd.DataFrame:
        """Table 1a in the paper's form: sites by positions."""
        rows = self.active[self.active.threshold == threshold]
        return rows.pivot(index="site", columns="position", values="active")[["s1", "m", "s2", "random"]]

    def summary(self) -> dict[str, Any]:
        """Everything that is a number, for JSON."""
        return {
            "target": self.target.found(),
            "seconds": self.seconds,
            **{name: getattr(self, name).to_dict("records") for name in ("active", "unique", "metrics")},
        }

    def save(self, out: Path) -> None:
        """Write the target's weights and history, the Run, and the tables to the folder ``out``."""
        out.mkdir(parents=True, exist_ok=True)
        _write_target(self.target, out)
        self.run.history.to_csv(out / "history.csv", index=False)
        self.run.save(out / "run")
        for name in ("active", "unique", "metrics"):
            getattr(self, name).to_csv(out / f"{name}.csv", index=False)
        (out / "summary.json").write_text(json.dumps(self.summary(), indent=1))
        (out / "tables.md").write_text(self.tables(), encoding="utf-8")

    def tables(self) -> str:
        """The three tables as text."""
        unique = self.unique.pivot(index="site", columns="threshold", values="unique")
        metrics = self.metrics.pivot(index="metric", columns="site", values="value")
        target = self.summary()["target"]
        parts = [
            "Target: " + ", ".join(f"{name} {value}" for name, value in target.items()),
            "Active subcomponents per token (importance > 0)",
            self.active_table(0.0).round(3).to_string(),
            "Active subcomponents per token (importance > 0.1)",
            self.active_table(0.1).round(3).to_string(),
            f"Unique subcomponents (active on more than {self.unique.min_fraction.iloc[0]:g} of all tokens), by threshold",
            unique.to_string(),
            "Metrics (KL in nats)",
            metrics.T.to_string(float_format=lambda value: f"{value:.3g}", na_rep=""),
        ]
        return "\n\n".join(parts) + "\n"


def named_positions(task: InductionTask, s1: Tensor) -> dict[str, Tensor]:
    """Which positions are s1, m, s2, and which are none of them (``random``), each ``[batch, pos]``."""
    named = {
        "s1": one_hot_positions(s1, task.length),
        "m": one_hot_positions(s1 + 1, task.length),
        "s2": one_hot_positions(torch.full_like(s1, task.length - 1), task.length),
    }
    named["random"] = ~torch.stack(list(named.values())).any(0)
    return named


def measure(model: HookedTransformer, run: Run, task: InductionTask, sequences: int = 1024) -> dict[str, pd.DataFrame]:
    """The paper's tables on held-out sequences: ``active``, ``unique``, ``metrics``.

    Beside the paper's metrics those of :func:`~tl_spd.analysis.evaluation.evaluate`, and the mechanism test: m's
    attention on s1 in layer 0 with and without positions in m's query (``m_on_s1_attention``, ``m_on_s1_without``).
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    tokens, answers, s1 = task.sample(sequences, generator)
    importances = run.importances(model, tokens)
    metrics = evaluate(
        model, run, tokens, last_token_only=True, samples=DRAWS, max_rows=4096, answers=answers, adversary=None
    )
    few = Engine(model, run, last_token_only=True)  # the adversary's gradients hold the whole batch
    batch = few.observe(tokens[:ADVERSARY_SEQUENCES])
    adversary = Adversary()
    worst = adversarial_recon(few, batch, few.importances(batch), adversary)
    kl = attention_kl(model, run, tokens)
    rows = [(f"adversarial@{adversary.budget}", "all", worst.kl)]
    rows += [("attention_kl", f"layer {row.layer}", row.kl) for row in kl.itertuples()]
    rows.append(("attention_kl", "all", kl.kl.mean()))
    for which, chosen in (("original", None), ("decomposed", run)):
        mechanism = attention_without_positions(model, tokens, 0, 0, s1 + 1, s1, run=chosen)
        rows += [(f"m_on_s1_{column}", which, mechanism[column].mean()) for column in ("attention", "without")]
    return {
        "active": active_by_position(importances, named_positions(task, s1)),
        "unique": unique_subcomponents(importances),
        "metrics": pd.concat([metrics, pd.DataFrame(rows, columns=metrics.columns)], ignore_index=True),
    }


def _write_target(target: TargetResult, out: Path) -> None:
    save_weights(target.model, out / "target.safetensors")
    target.history.to_csv(out / "target_history.csv", index=False)


def _trained(settings: InductionSettings, out: Path | None, progress: bool) -> TargetResult:
    """A trained target, kept in ``out`` before anything else is done; the one that is there if it has these settings."""
    note = None if out is None else out / "target.json"
    wanted = json.loads(json.dumps({"task": asdict(settings.task), "target": asdict(settings.target)}))
    if out is not None and note is not None and note.exists():
        kept = json.loads(note.read_text())
        if kept["settings"] == wanted:
            model = build_target(settings.task, seed=0)
            load_weights(model, out / "target.safetensors")
            texts = pd.read_csv(out / "target_history.csv", dtype=str)  # numbers read by pandas 2 miss the last bit
            return TargetResult(model, texts.astype(float).astype({"step": int}), **kept["found"])
    target = train_target(settings.task, settings.target, progress)
    if out is not None and note is not None:
        out.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        _write_target(target, out)
        note.write_text(json.dumps({"settings": wanted, "found": target.found()}, indent=1))
    return target


def run_induction(
    settings: InductionSettings,
    out: str | Path | None = None,
    progress: bool = True,
    target: TargetResult | None = None,
    resume: bool = False,
) -> InductionResult:
    """Train the target (unless given), decompose it, make the tables; write everything to ``out`` if given.

    A target that an earlier run with the same target settings left in ``out`` is read, not trained again. An interrupt of the
    decomposition is kept in ``out/run/checkpoint``; ``resume`` goes on from there.
    """
    started = time.perf_counter()
    target = target or _trained(settings, None if out is None else Path(out), progress)
    trained = time.perf_counter()
    run = decompose(
        target.model,
        lambda step, generator: settings.task.sample(settings.batch_size, generator)[0],
        **settings.training(),
        progress=progress,
        out=None if out is None else Path(out) / "run",
        resume=resume,
    )
    seconds = {"target": trained - started, "decomposition": time.perf_counter() - trained}
    result = InductionResult(target, run, **measure(target.model, run, settings.task), seconds=seconds)
    if out is not None:
        result.save(Path(out))
        (Path(out) / "settings.json").write_text(json.dumps(settings.plain(), indent=1))
    return result
