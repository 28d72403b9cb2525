"""The picture of the README, from one seed that benchmarks.facts left. ``python -m benchmarks.picture``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import tyro

import tl_spd as spd
from tl_spd.experiments.facts import FactsSettings
from tl_spd.experiments.facts_steps import tokenize
from tl_spd.hosts import load_host

SHOWN = {
    "subcomponents": "its own subcomponents",
    "best random matched": "random read directions",
    "best singular": "singular directions",
    "best random": "random directions",
}


@dataclass
class Arguments:
    """Which run is shown, and where the picture goes."""

    run: Path = Path("runs/facts-quick-0")
    site: str = "blocks.0.mlp.W_in"
    out: Path = Path("docs/_static/facts.png")


def importances(ax: plt.Axes, arguments: Arguments) -> None:
    """Importance of every subcomponent of one site that is on anywhere, at every token of the two prompts."""
    settings = FactsSettings.preset("quick")
    model = load_host(settings.host)
    run = spd.load(arguments.run / "run", model)
    tokens, mask = tokenize(model, [fact.prompt for fact in settings.facts.pair])
    g = run.importances(model, tokens, mask)[arguments.site][mask.bool()]
    on = (g > 0).any(0).nonzero()[:, 0]
    order = on[torch.argsort(g[:, on].argmax(0), stable=True)]
    words = [word for row, real in zip(tokens, mask, strict=True) for word in model.to_str_tokens(row[real.bool()])]
    image = ax.imshow(g[:, order], cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    ax.set_yticks(range(len(words)), [word.replace(" ", "·") for word in words])
    ax.set_xticks(range(len(order)), order.tolist(), fontsize=7)
    ax.set_xlabel(f"subcomponent (the {len(on)} of {g.shape[1]} that are ever on)")
    ax.set_title(f"importance of {arguments.site}")
    ax.figure.colorbar(image, ax=ax, label="importance (0 to 1)")


def left_over(ax: plt.Axes, arguments: Arguments) -> None:
    """What suppression leaves of the first fact and of the fact set, beside controls chosen with the same effort."""
    summary = pd.read_csv(arguments.run / "summary.csv")
    target = summary.target.iloc[0]
    rows = summary[(summary.target == target) & (summary.choice == "effect")].set_index(["control", "group"]).ratio
    for offset, group, colour, label in (
        (-0.2, "fact", "#0072B2", f"{target} ..."),
        (0.2, "facts", "#E69F00", "other facts"),
    ):
        values = [rows[control, group] for control in SHOWN]
        places = [place + offset for place in range(len(SHOWN))]
        ax.barh(places, values, height=0.38, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            ax.text(value + 0.01, place, f"{value:.2f}", va="center", fontsize=8)
    ax.set_yticks(range(len(SHOWN)), SHOWN.values())
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.15), xlabel="share of the answer's probability left", title="four directions suppressed")
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8)


def main(arguments: Arguments) -> None:
    """Draw both panels and write the picture."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    importances(axes[0], arguments)
    left_over(axes[1], arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
