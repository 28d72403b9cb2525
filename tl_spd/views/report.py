"""Report: one HTML file about a saved Run, to look at or to send; it holds all that it shows and makes no requests.

1. What was decomposed, the settings, the curves of the training, and the tables and figures of whatever CSV files lie beside
   the Run (the first ``MOST_ROWS`` rows of each).
2. With the host and prompts: importances of subcomponents by token with a picker, active subcomponents, attention patterns.
3. How to make the Run again: command, seeds, versions, the digests of host and Run.

Nothing is measured but the importances and patterns of the prompts. Everything shown comes from files and prompts and is not
trusted: it is escaped, and characters that cannot be seen or that turn the text's direction are spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_spd.install import decomposed
from tl_spd.run import Run, check_record, load
from tl_spd.sites import HookedTransformer, host_device, text_tokens, token_texts
from tl_spd.storage import RECORD, StorageError, holds_record, read_record
from tl_spd.views import figures, pieces
from tl_spd.views.attention import show_attention
from tl_spd.views.frames import drawable
from tl_spd.views.tokens import rounded
from tl_spd.views.view import LABEL, Panel, View, document, harmless, short, visible
from tl_spd.wiring import attention_patterns

MOST_BYTES = 15_000_000
MOST_ROWS = 200
MOST_SUBCOMPONENTS = 20
"""Most subcomponents of each site in the picker, those of largest mean importance."""
INNER = ("run", "checkpoint")
"""Folders of a Run whose tables lie one above."""
FIRST = ("metrics", "evaluation", "summary", "active", "unique", "selections")
"""Tables in front of the others."""
SHOWN_OPEN = pieces.MOST_FULL
"""Tables of at most so many rows are shown at once, longer ones on a click."""
TEXTS = ("prompt", "token", "text", "answer", "target")
"""Columns that stay text even where they look like numbers."""


def report(
    folder: str | Path,
    out: str | Path,
    model: HookedTransformer | None = None,
    prompts: Sequence[str] | Tensor | None = None,
    command: str = "",
    names: Mapping[int, str] | None = None,
) -> Path:
    """Write the report on a saved Run to the file ``out``.

    Args:
        folder: an experiment's folder, or a Run's own.
        model: the host that the Run was made for; with ``prompts`` it gives the views.
        prompts: texts, or tokens ``[batch, pos]`` for a host without tokenizer.
        command: what made the Run, to be stated.
        names: token -> text, where it is to be another than the tokenizer's, or than its number.

    Returns:
        ``out`` as a path.

    Raises:
        StorageError: there is no Run, or it is damaged.
        ValueError: only one of ``model`` and ``prompts``, an empty prompt, a host that the Run was not made for, a CSV file that
            cannot be read, more than 15 MB.
        IsADirectoryError: ``out`` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name the file to write, for example {out / 'report.html'}.")
    if (model is None) != (prompts is None):
        raise ValueError("Views need both the host and prompts; only one of them was given.")
    where, beside = locate(folder)
    record = read_record(where)
    check_record(record, str(where))
    notes = {name: pieces.read_json(beside / f"{name}.json") for name in ("settings", "summary")}
    parts = [pieces.STYLE, *_about(record, beside), *_settings(record, notes["settings"]), *_curves(record)]
    if model is not None and prompts is not None:
        parts += _views(model, load(where, model), _tokens(model, prompts), names or {})
    target = notes["summary"].get("target")
    parts += _tables(beside, target.get("phase_change_step") if isinstance(target, Mapping) else None)
    parts += _reproduce(record, notes, where, command)
    page = document(f"Decomposition: {visible(beside.resolve().name)}", parts).encode()
    if len(page) > MOST_BYTES:
        raise ValueError(f"The report would be {len(page) / 1e6:.0f} MB, more than 15; give fewer or shorter prompts.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(page)
    return out


def locate(folder: str | Path) -> tuple[Path, Path]:
    """The folder of the Run in ``folder`` (itself, or ``run`` in it), and the one where its settings and tables lie.

    Raises:
        StorageError: there is no Run.
    """
    folder = Path(folder)
    if holds_record(folder / "run"):
        return folder / "run", folder
    if not holds_record(folder):
        found = f"neither {RECORD} nor run/{RECORD} in it" if folder.is_dir() else "no such folder"
        raise StorageError(f"Asked for the Run in {folder}. Found: {found}. Give the folder that --out named.")
    parent = folder.resolve().parent
    return folder, parent if folder.resolve().name in INNER and (parent / "settings.json").is_file() else folder


# --- sections --------------------------------------------------------------------------------------------------------


def _about(record: Mapping[str, Any], beside: Path) -> Iterator[str]:
    sites, settings = record["sites"], record["settings"]
    yield f"<h1>Decomposition: {pieces.text(beside.resolve().name)}</h1>"
    total = sum(site["C"] for site in sites)
    steps = f", trained for {settings['steps']:,} steps" if isinstance(settings.get("steps"), int) else ""
    options = ", ".join(f"{name} {value}" for name, value in record["importance"].items() if name != "kind")
    kind = pieces.text(f"{record['importance']['kind']} ({options})")
    yield f"<p>{total:,} rank-1 subcomponents (C) of {len(sites)} weights{steps}. Importance functions: {kind}.</p>"
    yield "<h2>What was decomposed</h2>"
    columns = ["name", "layer", "d_in", "d_out", "C"]
    yield pieces.table(["weight", *columns[1:]], ([site[key] for key in columns] for site in sites))


def _settings(record: Mapping[str, Any], experiment: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    yield pieces.table(["setting", "value"], pieces.flat(record["settings"]))
    if experiment:
        table = pieces.table(["setting", "value"], pieces.flat(experiment))
        yield f"<details><summary>Settings of the experiment (settings.json)</summary>{table}</details>"


def _curves(record: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Training</h2>"
    history = pd.DataFrame(record["history"])
    if len(history) < 2:
        yield "<p>Fewer than two steps were logged; there is no curve to draw.</p>"
        return
    names = {name: drawable(name).replace("$", r"\$").lstrip("_") for name in history.columns}
    yield pieces.picture(figures.plot_history(history.rename(columns=names)), "Loss terms and L0 by training step")


def _tables(beside: Path, phase_change_step: int | None) -> Iterator[str]:
    files = [file for file in beside.glob("*.csv") if file.is_file() and file.stem != "history"]
    order = {name: place for place, name in enumerate(FIRST)}
    if files:
        yield "<h2>Results</h2>"
    for file in sorted(files, key=lambda file: (order.get(file.stem, len(order)), file.stem)):
        try:
            types = dict.fromkeys(TEXTS, str)
            table = pd.read_csv(file, keep_default_na=False, na_values=[""], dtype=types, low_memory=False)
        except ValueError as error:
            cause = short(str(error), pieces.MOST_TEXT)
            raise ValueError(f"{file} cannot be read as a table ({cause!r}); move it elsewhere.") from error
        shown = pieces.table(list(table.columns), table.head(MOST_ROWS).itertuples(index=False))
        left = f"; the first {MOST_ROWS} are shown" if len(table) > MOST_ROWS else ""
        state = "open" if len(table) <= SHOWN_OPEN else ""
        yield f"<details {state}><summary>{pieces.text(file.name)} ({len(table):,} rows{left})</summary>{shown}</details>"
        try:
            drawn = [pieces.picture(figure, caption) for caption, figure in _drawn(table, phase_change_step)]
        except (TypeError, ValueError, LookupError) as error:
            cause = short(str(error), pieces.MOST_TEXT)
            raise ValueError(f"{file} cannot be drawn ({cause!r}); move it elsewhere.") from error
        yield from drawn


def _drawn(table: pd.DataFrame, phase_change_step: int | None) -> Iterator[tuple[str, Any]]:
    """Captions and figures for a table, told by its columns."""
    has: Callable[[str], bool] = lambda names: not table.empty and set(names.split()) <= set(table.columns)  # noqa: E731
    if has("site position threshold active"):
        for threshold in sorted(set(table["threshold"])):
            title = f"Active subcomponents per token, importance above {threshold:g}"
            yield title, figures.plot_active_by_position(table, threshold)
    elif has("prompt kind layer position token effect p_clean p_corrupted"):
        for prompt, rows in table.groupby("prompt", sort=False):
            tokens = [short(visible(token), LABEL) for token in rows["token"].fillna("")]
            yield f"Causal trace of “{prompt}”", figures.plot_trace(rows.assign(token=tokens))
    elif has("kind layer prompt p_before p_after"):
        yield "Probability of the answer with one layer's output at zero", figures.plot_zero_out(table)
    elif has("method seed kept kl"):
        yield "Output KL by rank-1 pieces kept", figures.plot_rank1_curve(table)
    elif has("step loss accuracy attention_m_on_s1 attention_s2_on_m"):
        yield "Training of the target", figures.plot_target(table, phase_change_step)
    elif has("target choice group control prompt logp_before logp_after"):
        few = table[table["group"] != "facts"]
        for (target, choice), rows in few.groupby(["target", "choice"], sort=False):
            prompts = list(dict.fromkeys(rows["prompt"]))[: figures.MAX_PANELS]
            yield f"Suppressed for “{target}”, chosen by {choice}", figures.plot_suppression(rows, prompts)


def _reproduce(
    record: Mapping[str, Any], notes: Mapping[str, Mapping[str, Any]], where: Path, command: str
) -> Iterator[str]:
    yield "<h2>How to reproduce it</h2>"
    if command:
        yield f"<p>The command: <code>{pieces.text(command, 4 * pieces.MOST_TEXT)}</code></p>"
    else:
        yield "<p>No one command is known: give the settings above to <code>tl_spd.decompose</code>, with the same data.</p>"
    path = pieces.text(repr(str(where)), 4 * pieces.MOST_TEXT)
    yield f"<p>To read this Run: <code>tl_spd.load({path}, model)</code>; it refuses other weights.</p>"
    sources = {"this Run": record, "its settings": record["settings"], **notes}
    commits = [[f"commit ({name})", source["commit"]] for name, source in sources.items() if "commit" in source]
    rows = [["seed", str(record["settings"].get("seed", "not recorded"))], *commits]
    rows += [[f"version of {name}", version] for name, version in record["versions"].items()]
    rows += [["digest of the Run's tensors", record["tensors"]["blake2b"]]]
    rows += [["digest of the host's other weights" if k == "*" else k, v] for k, v in record["fingerprint"].items()]
    yield pieces.table(["what", "value"], rows)


# --- views -----------------------------------------------------------------------------------------------------------


def _tokens(model: HookedTransformer, prompts: Sequence[str] | Tensor) -> list[Tensor]:
    """Every prompt's tokens ``[1, pos]``."""
    if isinstance(prompts, Tensor):
        found = list(prompts.to(host_device(model)).split(1))
    else:
        found = [text_tokens(model, text) for text in ([prompts] if isinstance(prompts, str) else prompts)]
    if not found or not all(tokens.numel() for tokens in found):
        raise ValueError(f"Views need at least one prompt, and each at least one token; found {prompts!r}.")
    return found


@torch.no_grad()
def _views(model: HookedTransformer, run: Run, batches: list[Tensor], names: Mapping[int, str]) -> Iterator[View | str]:
    yield "<h2>Prompts</h2>"
    pairs = [zip(tokens[0].tolist(), token_texts(model, tokens[0]), strict=True) for tokens in batches]
    texts = [[names.get(token, text) for token, text in prompt] for prompt in pairs]
    spaced = texts if model.tokenizer is not None else [[f"{token} " for token in prompt] for prompt in texts]
    found = [run.importances(model, tokens, torch.ones_like(tokens)) for tokens in batches]
    g = {name: [one[name][0] for one in found] for name in run.components}
    choices: dict[str, list[Tensor]] = {}
    active: dict[str, list[Tensor]] = {}
    for name, values in g.items():
        mean = torch.cat(values).mean(0)
        best = mean.argsort(descending=True, stable=True)[:MOST_SUBCOMPONENTS]
        choices |= {f"{name} {i}": [v[:, i] for v in values] for i in best.tolist() if mean[i] > 0}
        active[name] = [(v > 0).sum(1) for v in values]
    note = (
        f"Of each site at most {MOST_SUBCOMPONENTS} subcomponents, those of largest mean importance on these prompts."
    )
    if choices:
        title = "Importance of subcomponents by token"
        yield _by_prompt(title, choices, spaced, "Subcomponent:", note, 1, _sparsest(choices))
    else:
        yield "<p>No subcomponent is active on these prompts.</p>"
    active = {f"all {len(g)} sites": [torch.stack(c).sum(0) for c in zip(*active.values(), strict=True)], **active}
    yield _by_prompt("Active subcomponents by token", active, spaced, "Site:", "Active: importance above 0.")
    layers = {site.layer for site in run.sites if site.kind in ("W_Q", "W_K")}
    for place, (tokens, importances) in enumerate(zip(batches, found, strict=True) if layers else ()):
        original = attention_patterns(model, tokens)
        with decomposed(model, run, importances=importances):
            ours = attention_patterns(model, tokens)
        original, ours = ({layer: both[layer] for layer in sorted(layers)} for both in (original, ours))
        view = show_attention(texts[place], original, ours)
        view.title += f", prompt {place}"
        if run.settings.get("last_token_only"):
            view.note += " Trained on the last token's prediction alone: rows that do not matter to it need not agree."
        yield view


def _sparsest(choices: Mapping[str, Sequence[Tensor]]) -> str:
    """Of the last site's subcomponents the one whose importance stands out most from its mean, over all prompts.

    The first token is left aside, where it is not the only one: many subcomponents do no more than mark it.
    """
    last = list(choices)[-1].rpartition(" ")[0]
    own = {name: values for name, values in choices.items() if name.rpartition(" ")[0] == last}
    after = {name: [v[min(1, len(v) - 1) :] for v in values] for name, values in own.items()}
    return max(after, key=lambda name: sum(float(v.max() - v.mean()) for v in after[name]))


def _by_prompt(
    title: str,
    choices: Mapping[str, Sequence[Tensor]],
    texts: list[list[str]],
    picker: str,
    note: str,
    most: int | None = None,
    first: str | None = None,
) -> View:
    """All prompts coloured by what is picked, ``first`` at the start; ``choices``: name -> values ``[pos]`` of every prompt.

    The darkest colour is ``most``, or the largest value of the choice.
    """
    tokens = [[harmless(token) for token in prompt] for prompt in texts]
    panels: dict[str, list[Panel]] = {}
    for name, values in choices.items():
        top = max(1, *(int(row.max()) for row in values)) if most is None else most
        panels[name] = [
            Panel(
                "ColoredTokens",
                {"tokens": prompt, "values": rounded(row), "maxValue": top},
                f"Prompt {i}: {name}, 0 to {top}",
            )
            for i, (prompt, row) in enumerate(zip(tokens, values, strict=True))
        ]
    note = f"{note} White: 0, darkest blue: the largest number. Hover over a token for its value."
    return View(title, panels, note=note, first=first, picker=picker, shared={"minValue": 0, "paddingBottom": 30})
