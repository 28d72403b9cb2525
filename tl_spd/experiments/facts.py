"""The facts experiment: decompose early layers on two facts, suppress what is unique to one of them, and see what else suffers.

1. The facts of a :class:`~tl_spd.experiments.facts_data.FactSet` are checked against the host. The pair must be known: each
   answer is one token and the host's most probable one. Of the other facts those that are not known are dropped and counted.
2. Sites of early layers are decomposed on the pair's prompts (without the answers), scored at all positions, with Vector
   importances and the paper's losses, the partial ones among them.
3. Subcomponents unique to each prompt are listed by token: those active there only (importance), and those that write there
   only (contribution; an importance may stay high where nothing is read). At most ``k`` are suppressed: the most
   important ones, the most contributing ones, and those that a greedy choice by effect on the fact takes from the
   ``candidates`` of largest contribution while ``spared`` facts are to stay as they are. Those are left out of the fact set.
4. Effects on the fact, the other fact, the reversed questions and the fact set, beside controls of the same size (random,
   singular and the other prompt's directions), and where the choice was by effect, controls chosen with the same effort.
5. Causal traces of both prompts, a zero-out sweep, the evaluation of the Run.

Presets: ``quick`` (layers 0-2, about 20 minutes on two cores), ``cpu`` (layers 0-5, under 60), ``gpt2`` (the paper's settings:
every block of GPT-2 small, for a GPU with 80 GB). Source: the paper's experiment on facts. Where this departs from it: the
presets for two cores have fewer layers and steps and a small d_gate, start with one subcomponent for each input that the
pair brings, and move components more slowly than importances, since real weights bear only small steps; controls, equal
effort and spared facts are this library's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_spd.analysis.activity import unique_subcomponents, unique_to_prompts
from tl_spd.analysis.contribution import contributions
from tl_spd.analysis.evaluation import evaluate
from tl_spd.analysis.tracing import causal_trace
from tl_spd.analysis.zero_out import zero_out
from tl_spd.checks import check_shares
from tl_spd.components import Init
from tl_spd.experiments.facts_data import IN_PAPERS_WORDS, SHIPPED, FactSet
from tl_spd.experiments.facts_steps import check_facts, choose, measure_suppression, spared_facts, summarize, tokenize
from tl_spd.hosts import load_host
from tl_spd.importance import Importances, ImportanceSpec, Vector
from tl_spd.losses import LossTerm, paper_losses
from tl_spd.run import Run
from tl_spd.settings import FaithfulnessWarmup, Optimizer, Schedule
from tl_spd.sites import HookedTransformer, token_texts
from tl_spd.train import decompose

TABLES = ("known", "active", "unique", "selections", "effects", "summary", "trace", "zero_out", "metrics")
SHORT = ("active", "selections", "summary", "metrics")
"""The tables that ``summary.json`` holds too."""

MATRICES = ("attn.W_*", "mlp.W_*")


@dataclass(frozen=True)
class FactsSettings:
    """What decides a facts run.

    Attributes:
        host: what :func:`~tl_spd.hosts.load_host` takes.
        facts: the pair, its reversed questions and the fact set.
        device: where the host goes (None: a GPU if there is one).
        k: how many directions are suppressed at most.
        candidates: how many of the subcomponents that write on one prompt only are tried, those of largest contribution.
        spared: how many known facts the choice by effect is to leave alone.
        threshold: importance above which a subcomponent is active.
        min_contribution: share of a site's output above which a subcomponent writes there (see
            :func:`~tl_spd.analysis.contribution.contributions`).
        control_draws: draws of random controls.
        trace_draws: noise draws of the causal traces.
    """

    sites: tuple[str, ...]
    steps: int
    host: str = "smollm2"
    facts: FactSet = SHIPPED
    device: str | None = None
    C: int | Mapping[str, int] = 600
    importance: ImportanceSpec = field(default_factory=lambda: Vector(d_gate=4))
    init: Init = "inputs"
    losses: tuple[LossTerm, ...] = field(default_factory=lambda: paper_losses("gpt2"))
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=5e-3, component_lr=1e-4))
    schedule: Schedule = field(default_factory=Schedule)
    warmup: FaithfulnessWarmup = field(default_factory=FaithfulnessWarmup)
    k: int = 4
    candidates: int = 64
    spared: int = 8
    threshold: float = 0.0
    min_contribution: float = 0.01
    control_draws: int = 5
    trace_draws: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares("threshold", [self.threshold])
        check_shares("min_contribution", [self.min_contribution])
        if min(self.k, self.candidates, self.control_draws, self.trace_draws) < 1 or self.spared < 0:
            raise ValueError(
                f"k, candidates, control_draws and trace_draws must be at least 1 and spared at least 0, found {self.k}, "
                f"{self.candidates}, {self.control_draws}, {self.trace_draws} and {self.spared}."
            )

    @classmethod
    def preset(cls, name: str, seed: int = 0) -> FactsSettings:
        """Settings by name, the same for every seed but for the seed.

        Raises:
            ValueError: an unknown name.
        """
        small = {"*": 600, "*.W_[KV]": 200}  # a little above SmolLM2's ranks of 576 and 192
        presets = {
            "quick": cls(("blocks.[0-2].mlp.W_*",), steps=150, control_draws=2, trace_draws=4),
            "cpu": cls(
                _layers("[0-5]"),
                steps=300,
                C=small,
                optimizer=Optimizer(lr=5e-3, component_lr=2e-5),
                control_draws=2,
            ),
            "gpt2": cls(
                _layers("*"),
                steps=20_000,
                host="gpt2",
                facts=IN_PAPERS_WORDS,
                C=768,
                importance=Vector(d_gate=64),
                init="kaiming",
                optimizer=Optimizer(lr=1e-3, kind="adamw", weight_decay=0.05),
                schedule=Schedule("constant", warmup=0.01),
            ),
        }
        if name not in presets:
            raise ValueError(f"No preset {name!r}; there are {sorted(presets)}.")
        return replace(presets[name], seed=seed)


def _layers(pattern: str) -> tuple[str, ...]:
    return tuple(f"blocks.{pattern}.{matrices}" for matrices in MATRICES)


@dataclass(frozen=True)
class FactsResult:
    """A finished facts run.

    Attributes:
        run: the decomposition.
        known: every fact: ``part`` (pair, reversed or facts), ``relation, prompt, answer, one_token, p, rank, known``.
        active: ``site, threshold, min_fraction, unique, C, writing``; ``unique`` counts subcomponents active anywhere on the
            pair, ``writing`` those that write there.
        unique: ``by, prompt, position, token, site, subcomponent, value``: what is active (``by`` importance) or writes (``by``
            contribution) on one prompt only, where, and how much.
        selections: ``target, choice`` (importance, contribution or effect), ``round, site, index, position, token`` (where it
            is most important, or contributes most), ``importance`` (before the cut at 1) and ``contribution``, the
            largest on this prompt, and for the choice by effect ``p, ratio, change, tried``.
        effects: ``target, choice, group`` and the columns of :func:`~tl_spd.analysis.suppression.control_table`.
        summary: see :func:`~tl_spd.experiments.facts_steps.summarize`.
        trace: ``prompt`` and the columns of :func:`~tl_spd.analysis.tracing.causal_trace`.
        zero_out: see :func:`~tl_spd.analysis.zero_out.zero_out`; of the pair and the reversed questions.
        metrics: see :func:`~tl_spd.analysis.evaluation.evaluate`; on the pair.
        seconds: wall time of each part.
    """

    run: Run
    known: pd.DataFrame
    active: pd.DataFrame
    unique: pd.DataFrame
    selections: pd.DataFrame
    effects: pd.DataFrame
    summary: pd.DataFrame
    trace: pd.DataFrame
    zero_out: pd.DataFrame
    metrics: pd.DataFrame
    seconds: dict[str, float]

    def counts(self) -> dict[str, Any]:
        """How many facts are known and dropped, and how many subcomponents there are, active, and unique to each prompt."""
        facts = self.known[self.known.part == "facts"]
        one = self.unique.drop_duplicates(["by", "prompt", "site", "subcomponent"]).groupby(["by", "prompt"]).size()
        pair = self.known[self.known.part == "pair"].prompt
        everywhere = self.active.groupby("threshold")[["unique", "C", "writing"]].sum()
        return {
            "facts": len(facts),
            "known": int(facts.known.sum()),
            "dropped": int((~facts.known).sum()),
            "dropped_as_several_tokens": int((~facts.one_token).sum()),
            "subcomponents": int(everywhere.C.iloc[0]),
            "active": {f"{threshold:g}": int(n) for threshold, n in everywhere["unique"].items()},
            "active_share": {f"{t:g}": n / c for t, n, c in everywhere[["unique", "C"]].itertuples()},
            "writing": int(everywhere.writing.iloc[0]),
            "active_only_on": {prompt: int(one.get(("importance", prompt), 0)) for prompt in pair},
            "writing_only_on": {prompt: int(one.get(("contribution", prompt), 0)) for prompt in pair},
        }

    def effects_table(self) -> pd.DataFrame:
        """Mean ratios of every suppression (rows) by group of prompts (columns), with more on the fact set."""
        keys = ["target", "choice", "control"]
        ratios = self.summary.pivot(index=keys, columns="group", values="ratio")
        facts = self.summary[self.summary.group == "facts"].set_index(keys)
        more = facts[["ci_low", "ci_high", "worst", "change", "first"]].rename(columns=lambda name: f"facts {name}")
        order = [group for group in self.summary.group.unique() if group in ratios]
        table = pd.concat([facts[["directions", "draws"]], ratios[order], more], axis=1)
        return table.reindex(pd.MultiIndex.from_frame(self.summary[keys].drop_duplicates()))

    def numbers(self) -> dict[str, Any]:
        """The counts, the seconds and the short tables as plain values, for JSON (NaN as null)."""
        short = {f"{name}_table": json.loads(getattr(self, name).to_json(orient="records")) for name in SHORT}
        return {**self.counts(), "seconds": self.seconds, **short}

    def save(self, out: Path) -> None:
        """Write the Run, every table as CSV, ``summary.json`` and ``tables.md`` to the folder ``out``."""
        out.mkdir(parents=True, exist_ok=True)
        self.run.history.to_csv(out / "history.csv", index=False)
        self.run.save(out / "run")
        for name in TABLES:
            getattr(self, name).to_csv(out / f"{name}.csv", index=False)
        (out / "summary.json").write_text(json.dumps(self.numbers(), indent=1))
        (out / "tables.md").write_text(self.tables(), encoding="utf-8")

    def tables(self) -> str:
        """The tables as text."""
        by_token = (
            self.unique.groupby(["by", "prompt", "position", "token", "site"], sort=False).size().unstack(fill_value=0)
        )
        joint = self.metrics[self.metrics.site == "all"].set_index("metric").value
        best = self.trace.sort_values("effect", ascending=False).groupby(["prompt", "kind"], sort=False).head(3)
        swept = self.zero_out.pivot_table(index=["kind", "layer"], columns="prompt", values="p_after", sort=False)
        parts = [
            "Counts: " + ", ".join(f"{name} {value}" for name, value in self.counts().items()),
            "Subcomponents active (by importance) or writing (by contribution) on one prompt only, by token",
            by_token.T.to_string(),
            "Suppressed directions",
            _shown(self.selections.set_index(["target", "choice", "round"])),
            "Probability of the answer, after to before suppression: mean over prompts, the facts' 95% interval and worst",
            _shown(self.effects_table()),
            "Causal trace: the three largest effects of each kind",
            _shown(best.sort_values(["prompt", "kind"], kind="stable").set_index(["prompt", "kind", "layer"])),
            "Probability of the answer with one layer's output at zero",
            _shown(swept),
            "Metrics on the pair (KL in nats, mean over positions)",
            joint.to_string(float_format=_form),
            "Seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in self.seconds.items()),
        ]
        return "\n\n".join(parts) + "\n"


def _form(value: float) -> str:
    return f"{value:.3g}"


def _shown(table: pd.DataFrame) -> str:
    return table.to_string(float_format=_form, na_rep="")


# --- the experiment --------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds of one part after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.last = now - self.last, now


def run_facts(
    settings: FactsSettings,
    out: str | Path | None = None,
    progress: bool = True,
    model: HookedTransformer | None = None,
    resume: bool = False,
) -> FactsResult:
    """Check the facts, decompose on the pair, suppress, trace, zero out, evaluate; write everything to ``out`` if given.

    ``model``: a host that is loaded already, in the place of ``settings.host``. An interrupt of the decomposition is kept in
    ``out/run/checkpoint``; ``resume`` goes on from there.

    Raises:
        ValueError: as :func:`~tl_spd.experiments.facts_steps.check_facts`, before the decomposition.
    """
    clock = _Clock()
    model = _host(settings) if model is None else model
    clock("host")
    known = check_facts(model, settings.facts)
    clock("facts")
    tokens, mask = tokenize(model, [fact.prompt for fact in settings.facts.pair])
    kept = None if out is None else Path(out) / "run"
    run = _decompose(model, settings, tokens, mask, progress=progress, out=kept, resume=resume)
    clock("decomposition")
    importances, shares = run.importances(model, tokens, mask), contributions(model, run, tokens, mask)
    unique = _unique(model, settings, tokens, importances, shares)
    spare = spared_facts(known, settings.spared)
    choices = []
    for row, fact in enumerate(settings.facts.pair):
        real = slice(row, row + 1), slice(int(mask[row].sum()))
        values = {
            by: {site: g[real] for site, g in numbers.items()}
            for by, numbers in (("importance", importances.pre), ("contribution", shares))
        }
        mine = unique[unique.prompt == fact.prompt]
        choices.append(choose(model, run, fact, values, mine, settings.k, settings.candidates, spare))
    clock("selection")
    effects = measure_suppression(model, run, choices, known, spare, settings.control_draws, settings.seed)
    clock("effects")
    trace, swept = _trace(model, settings), _zero_out(model, settings)
    clock("tracing")
    active = unique_subcomponents(importances, importances.real, min_fraction=0.0)
    writing = {s: int((share.amax((0, 1)) > settings.min_contribution).sum()) for s, share in shares.items()}
    active["writing"] = active.site.map(writing)
    metrics = evaluate(model, run, tokens, mask)
    clock("evaluation")
    rows = [row for choice in choices for row in choice.table.to_dict("records")]  # pandas 2 warns of empty columns
    selections = pd.DataFrame(rows, columns=choices[0].table.columns)
    summary = summarize(effects)
    result = FactsResult(run, known, active, unique, selections, effects, summary, trace, swept, metrics, clock.seconds)
    if out is not None:
        result.save(Path(out))
        (Path(out) / "settings.json").write_text(json.dumps(asdict(settings), indent=1, default=str))
    return result


def _host(settings: FactsSettings) -> HookedTransformer:
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_host(settings.host, device=device)


def _decompose(model: HookedTransformer, settings: FactsSettings, tokens: Tensor, mask: Tensor, **how: Any) -> Run:
    return decompose(
        model,
        (tokens, mask),
        sites=settings.sites,
        C=settings.C,
        steps=settings.steps,
        importance=settings.importance,
        init=settings.init,
        losses=settings.losses,
        optimizer=settings.optimizer,
        schedule=settings.schedule,
        warmup=settings.warmup,
        seed=settings.seed,
        **how,
    )


def _unique(
    model: HookedTransformer,
    settings: FactsSettings,
    tokens: Tensor,
    importances: Importances,
    shares: Mapping[str, Tensor],
) -> pd.DataFrame:
    """The table ``FactsResult.unique``, with prompts and tokens as texts."""
    by = {
        "importance": unique_to_prompts(importances, tokens, importances.real, settings.threshold),
        "contribution": unique_to_prompts(shares, tokens, importances.real, settings.min_contribution),
    }
    unique = pd.concat(by, names=["by", "row"]).reset_index("by").reset_index(drop=True)
    prompts = {row: fact.prompt for row, fact in enumerate(settings.facts.pair)}
    texts = token_texts(model, torch.tensor(unique.token.tolist(), dtype=torch.long))
    return unique.assign(prompt=unique.prompt.map(prompts), token=texts)


def _trace(model: HookedTransformer, settings: FactsSettings) -> pd.DataFrame:
    tables = []
    for fact in settings.facts.pair:
        found = causal_trace(
            model, fact.prompt, fact.subject, fact.answer, draws=settings.trace_draws, seed=settings.seed
        )
        found.insert(0, "prompt", fact.prompt)
        tables.append(found)
    return pd.concat(tables, ignore_index=True)


def _zero_out(model: HookedTransformer, settings: FactsSettings) -> pd.DataFrame:
    asked = (*settings.facts.pair, *settings.facts.reversed)
    return zero_out(model, [fact.prompt for fact in asked], [fact.answer for fact in asked])
