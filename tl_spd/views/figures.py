"""Figures for papers, drawn by matplotlib from the DataFrames of the library: each returns a matplotlib ``Figure``.

Save one with ``figure.savefig("name.pdf")``; change what you like through ``figure.axes``. Nothing is measured here: the only
arithmetic is the mean over draws with its 95% interval (Student's t) where a table has draws. Approximations: a logarithmic axis
leaves out values that are not positive, as the functions say.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import pandas as pd
import torch

from tl_spd.analysis.prompts import mean_interval
from tl_spd.views.frames import BLACK, BLUE, HEAT, SKY, VERMILION, axes, checked, drawable, line
from tl_spd.views.view import short

STATES = {"resid": "residual stream", "mlp": "MLP output", "attn": "attention output"}
ANALYSIS = "tl_spd.analysis"
TITLE = 60
"""Most characters of a prompt in a title or legend."""
MAX_PANELS = 6
"""Most prompts that :func:`plot_suppression` puts beside each other."""


def plot_history(history: pd.DataFrame) -> Any:
    """Loss terms (before coefficients) and their weighted sum on a logarithmic axis, and L0, against the training step.

    Args:
        history: of a Run (``run.history``). Losses that are not positive are left out of the axis.
    """
    checked(history, ["step", "loss", "L0"], "tl_spd.decompose (run.history)")
    figure, (left, right) = axes(1, 2, 8.0, 3.6)
    left.plot(history["step"], history["loss"], color=BLACK, linewidth=2, label="weighted sum")
    for index, term in enumerate(name for name in history.columns if name not in ("step", "loss", "L0")):
        left.plot(history["step"], history[term], label=term, **_line(index, len(history)))
    left.set(yscale="log", xlabel="training step", ylabel="loss (KL terms in nats)")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    right.plot(history["step"], history["L0"], color=BLUE)
    right.set(xlabel="training step", ylabel="L0: active subcomponents per token", ylim=(0, None))
    return _bare(figure)


def plot_target(history: pd.DataFrame, phase_change_step: int | None = None) -> Any:
    """Loss, accuracy and attention of the induction target while it was trained, with the phase change marked.

    Args:
        history, phase_change_step: of a ``TargetResult``; None marks nothing.
    """
    columns = ["step", "loss", "accuracy", "attention_m_on_s1", "attention_s2_on_m"]
    checked(history, columns, "tl_spd.experiments.induction_target.train_target (.history)")
    figure, (top, bottom) = axes(2, 1, 5.0, 4.4, sharex=True)
    top.plot(history["step"], history["loss"], color=BLACK)
    top.set(ylabel="cross-entropy (nats)", ylim=(0, None))
    labels = ["accuracy", "attention of m on s1, layer 0", "attention of s2 on m, layer 1"]
    for index, (name, label) in enumerate(zip(columns[2:], labels, strict=True)):
        bottom.plot(history["step"], history[name], label=label, **_line(index, len(history)))
    bottom.set(xlabel="training step", ylabel="share (0 to 1)", ylim=(-0.03, 1.03))
    if phase_change_step is not None:
        for ax in (top, bottom):
            ax.axvline(phase_change_step, color=VERMILION, linestyle="--", linewidth=1.2)
        label = f" phase change, step {phase_change_step:,}"
        top.annotate(label, (phase_change_step, 0.97), xycoords=("data", "axes fraction"), va="top", color=VERMILION)
    bottom.legend(fontsize="x-small")
    return _bare(figure)


def plot_active_by_position(table: pd.DataFrame, threshold: float = 0.0) -> Any:
    """Mean number of active subcomponents, site x named position, as numbers on a heatmap.

    Args:
        table: of :func:`tl_spd.analysis.activity.active_by_position`.
        threshold: which of the table's.
    """
    checked(table, ["site", "position", "threshold", "active"], f"{ANALYSIS}.activity.active_by_position")
    rows = table[table["threshold"] == threshold]
    if rows.empty:
        raise ValueError(f"The table has no threshold {threshold}; it has {sorted(set(table['threshold']))}.")
    sites, positions = list(dict.fromkeys(rows["site"])), list(dict.fromkeys(rows["position"]))
    grid = rows.pivot(index="site", columns="position", values="active").loc[sites, positions].to_numpy()
    figure, (ax,) = axes(1, 1, 2.6 + 0.8 * len(positions), 1.0 + 0.34 * len(sites))
    image = ax.imshow(grid, cmap=HEAT, vmin=0, aspect="auto")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            light = value > 0.55 * grid.max()
            ax.text(j, i, f"{value:.3g}", ha="center", va="center", color="black" if light else "white")
    _ticks(ax.set_xticks, positions)
    _ticks(ax.set_yticks, sites)
    ax.set(xlabel="position", ylabel="site")
    figure.colorbar(image, label="active subcomponents\nper token (mean)")
    return _bare(figure, spines=False)


def plot_rank1_curve(table: pd.DataFrame) -> Any:
    """Output KL against the number of rank-1 pieces kept: SVD pruning, the Run's subcomponents, random singular terms.

    Args:
        table: of :func:`tl_spd.analysis.pruning.rank1_curve`. Points with a KL of 0 or without pieces are not on the
            logarithmic axes.
    """
    checked(table, ["method", "seed", "kept", "kl"], f"{ANALYSIS}.pruning.rank1_curve")
    names = {"spd": "SPD, by importance", "svd": "singular terms, greedy", "random": "singular terms, random"}
    names |= {"spd_masked": "SPD, by importance, masked", "spd_greedy": "SPD, masked, greedy"}
    figure, (ax,) = axes(1, 1, 4.8, 3.4)
    for index, method in enumerate(dict.fromkeys(["spd", "svd", *table["method"]])):
        style = _line(index, 1 if method == "svd" else 2)
        for turn, (_, rows) in enumerate(table[table["method"] == method].groupby("seed")):
            rows = rows[(rows["kl"] > 0) & (rows["kept"] > 0)].sort_values("kept")
            count = table.loc[table["method"] == method, "seed"].nunique()
            label = names.get(method, method) + (f" ({count} orders)" if count > 1 else "")
            thin = {"linewidth": 0.8} if count > 1 else {}
            ax.plot(rows["kept"], rows["kl"], label="_" * bool(turn) + label, **style, **thin)
    ax.set(xscale="log", yscale="log", xlabel="rank-1 pieces kept, all sites together", ylabel="output KL (nats)")
    ax.legend(fontsize="small")
    return _bare(figure)


def plot_trace(table: pd.DataFrame, subject: Sequence[int] = ()) -> Any:
    """Causal tracing as heatmaps, token x layer, one per kind of state restored, on one scale of colours.

    Args:
        table: of :func:`tl_spd.analysis.tracing.causal_trace`.
        subject: positions to mark with a star.
    """
    columns = ["kind", "layer", "position", "token", "effect", "p_clean", "p_corrupted"]
    checked(table, columns, f"{ANALYSIS}.tracing.causal_trace")
    kinds = list(dict.fromkeys(table["kind"]))
    tokens = table.drop_duplicates("position").sort_values("position")
    figure, made = axes(1, len(kinds), 1.8 + 2.3 * len(kinds), 1.5 + 0.22 * len(tokens), sharey=True)
    low, high = min(0.0, table["effect"].min()), table["effect"].max()
    for ax, kind in zip(made, kinds, strict=True):
        grid = table[table["kind"] == kind].pivot(index="position", columns="layer", values="effect")
        extent = (grid.columns[0] - 0.5, grid.columns[-1] + 0.5, len(grid) - 0.5, -0.5)
        image = ax.imshow(grid.to_numpy(), cmap=HEAT, vmin=low, vmax=high, aspect="auto", extent=extent)
        ax.set(xlabel="layer")
        ax.set_title(STATES.get(kind, kind), fontsize="medium")
        ax.xaxis.get_major_locator().set_params(integer=True)
    starred = [f"{row.token}*" if row.position in subject else row.token for row in tokens.itertuples()]
    _ticks(made[0].set_yticks, starred)
    made[0].set_ylabel("token" + (" (* subject)" if len(subject) else ""))
    figure.colorbar(image, ax=made, label="P(answer | restored)\n− P(answer | corrupted)")
    first = table.iloc[0]
    figure.suptitle(
        f"One state restored; P(answer) {first.p_clean:.3g} clean, {first.p_corrupted:.3g} corrupted", fontsize="medium"
    )
    return _bare(figure, spines=False)


def plot_zero_out(table: pd.DataFrame) -> Any:
    """The answers' probability with each layer's output at zero: a line per prompt, its probability before as a dotted line.

    Args:
        table: of :func:`tl_spd.analysis.zero_out.zero_out`.
    """
    checked(table, ["kind", "layer", "prompt", "p_before", "p_after"], f"{ANALYSIS}.zero_out.zero_out")
    kinds, prompts = list(dict.fromkeys(table["kind"])), list(dict.fromkeys(table["prompt"]))
    figure, made = axes(1, len(kinds), 1.0 + 3.4 * len(kinds), 3.0, sharey=True)
    for ax, kind in zip(made, kinds, strict=True):
        for index, prompt in enumerate(prompts):
            rows = table[(table["kind"] == kind) & (table["prompt"] == prompt)].sort_values("layer")
            style = _line(index, 2)
            ax.plot(rows["layer"], rows["p_after"], label=drawable(short(prompt, TITLE)), **style)
            ax.axhline(rows["p_before"].iloc[0], color=style["color"], linestyle=":", linewidth=1)
        ax.set(xlabel="layer")
        ax.set_title(f"one layer's {STATES.get(kind, kind)} at zero", fontsize="medium")
        ax.xaxis.get_major_locator().set_params(integer=True)
    made[0].set(ylabel="P(answer)\n(dotted: nothing at zero)", ylim=(0, None))
    if len(prompts) <= 7:
        for text in figure.legend(loc="outside lower center", fontsize="x-small", handles=made[0].lines[::2]).texts:
            text.set_parse_math(False)
    return _bare(figure)


def plot_suppression(table: pd.DataFrame, prompts: Sequence[str] | None = None) -> Any:
    """How much each suppression changes the log-probability of prompts' answers, with its controls.

    A bar is the mean over draws, the dots are the draws and the whisker is the mean's 95% interval (Student's t).

    Args:
        table: of :func:`tl_spd.analysis.suppression.control_table` or ``effect_table``.
        prompts: which of the table's prompts, at most ``MAX_PANELS``; default all.
    """
    source = f"{ANALYSIS}.suppression.control_table or effect_table"
    checked(table, ["prompt", "logp_before", "logp_after"], source)
    kind = "control" if "control" in table.columns else "suppression"
    checked(table, [kind], source)
    shown = list(dict.fromkeys(table["prompt"])) if prompts is None else list(prompts)
    if missing := [prompt for prompt in shown if prompt not in set(table["prompt"])]:
        raise ValueError(f"The table has no prompt {missing[0]!r}; it has {list(dict.fromkeys(table['prompt']))}.")
    if not 1 <= len(shown) <= MAX_PANELS:
        raise ValueError(
            f"At most {MAX_PANELS} prompts fit beside each other, found {len(shown)}; choose with prompts=."
        )
    names = list(dict.fromkeys(table[kind]))
    figure, made = axes(1, len(shown), 1.9 + 2.3 * len(shown), 1.6 + 0.3 * len(names), sharex=True, sharey=True)
    for ax, prompt in zip(made, shown, strict=True):
        rows = table[table["prompt"] == prompt]
        _bars(ax, [(rows["logp_after"] - rows["logp_before"])[rows[kind] == name].tolist() for name in names])
        ax.set_title("\n".join(wrap(drawable(short(prompt, TITLE)), 28)), fontsize="small", parse_math=False)
        ax.axvline(0, color=BLACK, linewidth=0.8)
    _ticks(made[0].set_yticks, names)
    made[0].invert_yaxis()
    figure.supxlabel("change of the answer's log-probability (nats)", fontsize="medium")
    return _bare(figure)


def _bars(ax: Any, draws: list[list[float]]) -> None:
    """A bar for every list of draws, the first apart from the others."""
    for place, values in enumerate(draws):
        mean, low, high = (end.item() for end in mean_interval(torch.tensor(values, dtype=torch.float64)))
        first = {"color": VERMILION, "hatch": "///", "edgecolor": BLACK}
        ax.barh(place, mean, height=0.65, **(first if place == 0 else {"color": SKY, "edgecolor": BLACK}))
        if len(values) > 1:
            ax.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color=BLACK, capsize=3)
            ax.plot(values, [place] * len(values), ".", color=BLACK, alpha=0.5, markersize=4)


def _line(index: int, points: int) -> dict[str, Any]:
    """A line's style; without markers where it is one of many points or they would say nothing."""
    style = line(index)
    return style if 1 < points <= 40 else {**style, "marker": ""}


def _ticks(set_ticks: Any, labels: Sequence[str]) -> None:
    set_ticks(range(len(labels)), [drawable(str(label)) for label in labels], parse_math=False)


def _bare(figure: Any, spines: bool = True) -> Any:
    """The figure with no frame on the top and the right, or none at all."""
    for ax in figure.axes:
        ax.spines[["top", "right"] if spines else ["top", "right", "left", "bottom"]].set_visible(False)
    return figure
