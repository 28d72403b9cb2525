"""Figures: what is drawn, read back from matplotlib's artists, against the tables; tables come from the library where cheap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from tests.tiny import tiny_decompose, tiny_host
from tests.views.pages import NASTY, importances
from tl_spd import views
from tl_spd.analysis.activity import active_by_position
from tl_spd.analysis.tracing import COLUMNS as TRACE
from tl_spd.analysis.zero_out import COLUMNS as ZERO
from tl_spd.experiments.induction_target import InductionTask, TargetSettings, train_target


def history() -> pd.DataFrame:
    return tiny_decompose(tiny_host()).history


def target() -> pd.DataFrame:
    return train_target(InductionTask(vocab=5, length=6), TargetSettings(steps=4, log_every=2), progress=False).history


def active() -> pd.DataFrame:
    where = torch.zeros(2, len(NASTY), dtype=torch.bool)
    where[:, 0] = True
    return active_by_position(importances(), {"first": where, "other": ~where})


def curve() -> pd.DataFrame:
    rows = [("svd", -1, 4, 0.0), ("svd", -1, 3, 0.1), ("svd", -1, 2, 0.4), ("spd", -1, 0, 2.0), ("spd", -1, 2, 0.3)]
    rows += [("spd", -1, 1, 0.9)] + [("random", seed, kept, 1.0 + seed / kept) for seed in (0, 1) for kept in (1, 3)]
    return pd.DataFrame(rows, columns=["method", "seed", "kept", "kl"])


def trace() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    texts = [text.replace("\ud83d", "half an emoji") for text in NASTY]  # which pandas refuses
    rows = [
        (kind, layer, position, texts[position], generator.normal(), 0.0, 0.0, 10, 0.75, 0.125)
        for kind in ("resid", "mlp")
        for layer in range(3)
        for position in range(len(NASTY))
    ]
    return pd.DataFrame(rows, columns=TRACE)


PROMPTS = ["costs $5 or $6 <b>", "a second\u202e prompt 🦊"]


def zeroed() -> pd.DataFrame:
    rows = [
        (kind, layer, prompt, 3, 0.5 + 0.25 * index, 0.5 / (1 + layer + index), -1.0, 2)
        for kind in ("mlp", "attn")
        for layer in range(4)
        for index, prompt in enumerate(PROMPTS)
    ]
    return pd.DataFrame(rows, columns=ZERO)


def controls() -> pd.DataFrame:
    rows = [("subcomponents", 0, prompt, -1.0, -4.0) for prompt in PROMPTS]
    rows += [
        ("random", draw, prompt, -1.0, -1.0 + change)
        for prompt in PROMPTS
        for draw, change in enumerate((0.1, 0.3, 0.5))
    ]
    return pd.DataFrame(rows, columns=["control", "draw", "prompt", "logp_before", "logp_after"])


PLOTS: dict[str, tuple[Callable[..., Figure], Callable[[], pd.DataFrame], str]] = {
    "history": (views.plot_history, history, "loss"),
    "target": (views.plot_target, target, "accuracy"),
    "active": (views.plot_active_by_position, active, "active"),
    "curve": (views.plot_rank1_curve, curve, "kl"),
    "trace": (views.plot_trace, trace, "effect"),
    "zero": (views.plot_zero_out, zeroed, "p_after"),
    "suppression": (views.plot_suppression, controls, "logp_after"),
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_figure_can_be_saved_has_labelled_axes_and_leaves_pyplot_alone(name: str, tmp_path: Path) -> None:
    plot, table, _ = PLOTS[name]
    made, before = table(), dict(plt.rcParams)
    kept, figures = made.copy(), plt.get_fignums()
    figure = plot(made)
    figure.savefig(tmp_path / "figure.pdf")
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.pdf").stat().st_size > 1000
    assert plt.get_fignums() == figures
    assert dict(plt.rcParams) == before
    pd.testing.assert_frame_equal(made, kept)
    labels = [figure.get_supxlabel(), *(label for ax in figure.axes for label in (ax.get_xlabel(), ax.get_ylabel()))]
    assert figure.axes[0].get_xlabel() or figure.get_supxlabel() or figure.axes[-1].get_xlabel()
    assert any(unit in " ".join(labels) for unit in ("nats", "P(answer", "per token"))


@pytest.mark.parametrize("name", PLOTS)
def test_missing_columns_and_empty_tables_are_refused(name: str) -> None:
    plot, table, column = PLOTS[name]
    made = table()
    with pytest.raises(ValueError, match=rf"lacks \['{column}'\]; it has .* makes what is wanted here"):
        plot(made.drop(columns=column))
    with pytest.raises(ValueError, match=r"no rows, .* makes what is wanted here"):
        plot(made[:0])


def test_history_shows_every_term_and_l0() -> None:
    table = history()
    left, right = views.plot_history(table).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in left.lines}
    terms = [name for name in table.columns if name not in ("step", "loss", "L0")]
    assert drawn == {"weighted sum": table["loss"].tolist(), **{name: table[name].tolist() for name in terms}}
    assert left.get_yscale() == "log"
    assert right.lines[0].get_ydata().tolist() == table["L0"].tolist()
    assert right.lines[0].get_xdata().tolist() == table["step"].tolist()


def test_the_targets_phase_change_is_marked_where_it_is() -> None:
    table = target()
    top, bottom = views.plot_target(table, 3).axes
    assert top.lines[0].get_ydata().tolist() == table["loss"].tolist()
    names = ["accuracy", "attention_m_on_s1", "attention_s2_on_m"]
    for line, name in zip(bottom.lines, names, strict=False):
        assert line.get_ydata().tolist() == table[name].tolist()
    assert [list(ax.lines[-1].get_xdata()) for ax in (top, bottom)] == [[3, 3], [3, 3]]
    assert top.texts[0].get_text().strip() == "phase change, step 3"
    assert len(views.plot_target(table).axes[0].lines) == 1


def test_active_counts_stand_in_their_cells_and_can_be_read() -> None:
    table = active()
    ax = views.plot_active_by_position(table, threshold=0.1).axes[0]
    rows = table[table["threshold"] == 0.1].set_index(["site", "position"])["active"]
    drawn = ax.images[0].get_array()
    places = [(site, position) for site in ("a", "b") for position in ("first", "other")]
    assert drawn.flatten().tolist() == [rows[place] for place in places]
    assert [text.get_text() for text in ax.texts] == [f"{rows[place]:.3g}" for place in places]
    image = ax.images[0]
    for text, value in zip(ax.texts, drawn.flatten(), strict=True):
        grey = image.cmap(image.norm(value))[:3] @ np.array([0.299, 0.587, 0.114])
        assert abs(grey - (text.get_color() == "white")) > 0.3
    with pytest.raises(ValueError, match=r"no threshold 0.5; it has \[0.0, 0.1\]"):
        views.plot_active_by_position(table, threshold=0.5)


def test_the_curve_draws_every_point_that_a_logarithm_has() -> None:
    ax = views.plot_rank1_curve(curve()).axes[0]
    drawn = [(line.get_label(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines]
    assert drawn == [
        ("SPD, by importance", [1, 2], [0.9, 0.3]),
        ("singular terms, greedy", [2, 3], [0.4, 0.1]),
        ("singular terms, random (2 orders)", [1, 3], [1.0, 1.0]),
        ("_singular terms, random (2 orders)", [1, 3], [2.0, 1 + 1 / 3]),
    ]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert len({line.get_linestyle() for line in ax.lines}) == 3  # told apart without colour


def test_traces_lie_with_tokens_down_and_layers_across_on_one_scale() -> None:
    table = trace()
    figure = views.plot_trace(table, subject=[1, 2])
    resid, mlp = figure.axes[:2]
    for ax, kind in ((resid, "resid"), (mlp, "mlp")):
        grid = ax.images[0].get_array()
        assert grid.shape == (len(NASTY), 3)
        for row in table[table["kind"] == kind].itertuples():
            assert grid[row.position, row.layer] == row.effect
        assert ax.images[0].get_clim() == (table["effect"].min(), table["effect"].max())
        left, right, bottom, top = ax.images[0].get_extent()
        assert (left, right, bottom, top) == (-0.5, 2.5, len(NASTY) - 0.5, -0.5)
    labels = [text.get_text() for text in resid.get_yticklabels()]
    assert labels[:3] == ["<|endoftext|>", "The*", " <script>alert(1)</script>*"]
    assert labels[NASTY.index("${x}")] == "${x}"
    assert labels[NASTY.index("\u202eabc")] == r"\u202eabc"
    assert "0.75 clean, 0.125 corrupted" in figure.get_suptitle()


def test_zero_out_draws_a_line_and_a_level_per_prompt() -> None:
    table = zeroed()
    mlp, attn = views.plot_zero_out(table).axes
    for ax, kind in ((mlp, "mlp"), (attn, "attn")):
        for index, prompt in enumerate(PROMPTS):
            rows = table[(table["kind"] == kind) & (table["prompt"] == prompt)]
            assert ax.lines[2 * index].get_ydata().tolist() == rows["p_after"].tolist()
            assert list(ax.lines[2 * index + 1].get_ydata()) == [0.5 + 0.25 * index] * 2


def test_suppression_bars_are_means_with_intervals_of_students_t_over_draws() -> None:
    first, second = views.plot_suppression(controls()).axes
    for ax in (first, second):
        assert [bar.get_width() for bar in ax.patches] == pytest.approx([-3.0, 0.3])
        (interval,) = [part for part in ax.containers if isinstance(part, ErrorbarContainer)]
        (ends,) = interval.lines[2][0].get_segments()
        half = 4.302653 * 0.2 / 3**0.5  # 97.5 % of Student's t with 2 degrees; the draws' standard deviation is 0.2
        assert ends[:, 0] == pytest.approx([0.3 - half, 0.3 + half], rel=1e-3)
        assert ends[:, 1] == pytest.approx([1, 1])
        dots = next(line for line in ax.lines if line.get_marker() == ".")
        assert dots.get_xdata().tolist() == pytest.approx([0.1, 0.3, 0.5])
    assert first.get_title() == "costs $5 or $6 <b>"
    assert [text.get_text() for text in first.get_yticklabels()] == ["subcomponents", "random"]
    assert first.yaxis_inverted()
    named = controls().rename(columns={"control": "suppression"})
    assert len(views.plot_suppression(named, PROMPTS[1:]).axes) == 1


def test_suppression_refuses_prompts_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="no prompt 'x'"):
        views.plot_suppression(controls(), ["x"])
    many = pd.concat([controls()[:1].assign(prompt=str(n)) for n in range(7)])
    with pytest.raises(ValueError, match=r"At most 6 prompts .* found 7; choose with prompts="):
        views.plot_suppression(many)
    with pytest.raises(ValueError, match=r"lacks \['suppression'\]"):
        views.plot_suppression(controls().drop(columns="control"))
