"""The notebooks of tutorials/: what is stored in them, read off their JSON, and their quick form, executed (``make tutorials``).

Every rule is a function from a notebook to the list of what breaks it. Each is tried on a copy of a notebook that was broken for
it, so that a rule that can no longer fail is noticed, and then on every notebook.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tl_spd
from tl_spd import views
from tl_spd.experiments.induction import InductionSettings

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
NAMES = [
    "1_decompose_your_first_model",
    "2_reading_a_decomposition",
    "3_facts_in_a_language_model",
    "4_beside_activation_patching",
    "5_your_own_loss_and_importance",
]
QUICK = 'QUICK = bool(os.environ.get("TL_SPD_QUICK"))  # the short form that the tests run'
MAX_BYTES = 1_500_000
PATHS = re.compile(r"(?<![\w.])/(home|tmp|root|work|usr|opt|mnt|var|Users)/|[A-Z]:\\\\|file://")
ADDRESSES = re.compile(r"https?://|pypi\.|pythonhosted|unpkg|jsdelivr|huggingface\.co")

Notebook = dict[str, Any]
Rule = Callable[[Notebook], list[str]]


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: Notebook) -> str:
    return "".join(cell["source"])


def trees(notebook: Notebook) -> Iterator[tuple[int, ast.Module]]:
    """Number from 1 and syntax tree of every code cell that has one."""
    for number, cell in enumerate(code_cells(notebook), 1):
        try:
            yield number, ast.parse(source(cell))
        except SyntaxError:
            continue  # `rule_every_cell_compiles` says so


def rule_is_valid_and_clean(notebook: Notebook) -> list[str]:
    """By the notebook format, with the metadata that every reader needs and no times of execution."""
    nbformat = pytest.importorskip("nbformat")
    problems = [str(error) for error in nbformat.validator.iter_validate(nbformat.from_dict(notebook))]
    about = {key: set(value) for key, value in notebook["metadata"].items()}
    if about.pop("language_info", None) != {"name"} or set(about) - {"kernelspec"}:
        problems.append(f"metadata {notebook['metadata']}; wanted kernelspec and the name in language_info, no more")
    return problems + [f"cell {cell.get('id')} has metadata" for cell in notebook["cells"] if cell["metadata"]]


def rule_executed_in_order(notebook: Notebook) -> list[str]:
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts {counts}"]


def rule_no_errors(notebook: Notebook) -> list[str]:
    return [
        f"code cell {number}: {output.get('ename') or output['text']}"
        for number, cell in enumerate(code_cells(notebook), 1)
        for output in cell["outputs"]
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]


def rule_outputs_are_stored(notebook: Notebook) -> list[str]:
    """Of every cell that prints, or ends with a view, a plot or a table."""
    problems = []
    for number, tree in trees(notebook):
        calls = [
            node.value.func for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        shows = any(ast.unparse(call) == "print" for call in calls)
        last = ast.unparse(tree.body[-1]) if tree.body and isinstance(tree.body[-1], ast.Expr) else ""
        shows |= last.startswith(("views.show_", "views.plot_", "pd.DataFrame("))
        if shows and not code_cells(notebook)[number - 1]["outputs"]:
            problems.append(f"code cell {number} shows something, but no output is stored")
    return problems


def rule_no_paths_and_no_addresses(notebook: Notebook) -> list[str]:
    texts = [source(cell) for cell in notebook["cells"]]
    for output in (output for cell in code_cells(notebook) for output in cell["outputs"]):
        parts = [output.get("text", ""), *output.get("data", {}).values()]
        texts += ["".join(part) if isinstance(part, list) else str(part) for part in parts]
    found = [match for text in texts for words in (PATHS, ADDRESSES) for match in words.finditer(text)]
    return [match.string[max(0, match.start() - 20) : match.end() + 20] for match in found]


def rule_size(notebook: Notebook) -> list[str]:
    size = len(json.dumps(notebook, ensure_ascii=False).encode())
    return [f"{size:,} bytes, at most {MAX_BYTES:,}"] if size > MAX_BYTES else []


def rule_first_cells(notebook: Notebook) -> list[str]:
    """A title; then every import and the one switch between both forms, which decides nothing out of sight."""
    first, *others = code_cells(notebook)
    problems = [] if source(notebook["cells"][0]).startswith("# ") else ["the first cell is no title"]
    if source(first).splitlines().count(QUICK) != 1:
        problems.append(f"the first code cell lacks the line {QUICK}")
    imports = ("import ", "from ")
    problems += [
        f"{cell['id']} imports" for cell in others if any(s.startswith(imports) for s in source(cell).splitlines())
    ]
    return problems


def rule_writes_under_runs(notebook: Notebook) -> list[str]:
    constants = [node.value for _, tree in trees(notebook) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    paths = [value for value in constants if isinstance(value, str) and value.split("/")[0] == "runs"]
    return [f"{path!r} is not under runs/tutorials" for path in paths if not path.startswith("runs/tutorials")]


def rule_every_cell_compiles(notebook: Notebook) -> list[str]:
    problems = []
    for number, cell in enumerate(code_cells(notebook), 1):
        try:
            compile(source(cell), f"code cell {number}", "exec")
        except SyntaxError as error:
            problems.append(str(error))
    return problems


def library_names(notebook: Notebook) -> dict[str, tuple[Any, str]]:
    """What the notebook calls things of tl_spd -> the module (or None) and the attribute that it means."""
    named: dict[str, tuple[Any, str]] = {}
    for _, tree in trees(notebook):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tl_spd":
                for alias in node.names:
                    named[alias.asname or alias.name] = importlib.import_module(str(node.module)), alias.name
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("spd", "views")
            ):
                named[ast.unparse(node)] = tl_spd if node.value.id == "spd" else views, node.attr
    return named


def rule_library_names_exist(notebook: Notebook) -> list[str]:
    """Every ``spd.X``, ``views.X`` and import from tl_spd, and every keyword that these are called with."""
    found, problems = {}, []
    for name, (module, attribute) in library_names(notebook).items():
        try:
            found[name] = getattr(module, attribute, None) or importlib.import_module(f"{module.__name__}.{attribute}")
        except ModuleNotFoundError:
            problems.append(f"{name}: {module.__name__} has no {attribute}")
    for number, tree in trees(notebook):
        for node in ast.walk(tree):
            called = found.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if called is None or not callable(called):
                continue
            parameters = inspect.signature(called).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                unknown = [k.arg for k in node.keywords if k.arg is not None and k.arg not in parameters]
                problems += [f"code cell {number}: {ast.unparse(node.func)} has no argument {name}" for name in unknown]
    return problems


def rule_what_is_shown_is_explained(notebook: Notebook) -> list[str]:
    """A cell of prose follows every figure, table and view."""
    cells = [*notebook["cells"], {"cell_type": "end", "source": ""}]
    return [
        f"{cell['id']} shows something; the next cell does not say what"
        for cell, after in itertools.pairwise(cells)
        if any("data" in output for output in cell.get("outputs", ()))
        and not (after["cell_type"] == "markdown" and re.match(r"[^#]", source(after).lstrip()))
    ]


RULES: list[Rule] = [value for name, value in list(globals().items()) if name.startswith("rule_")]


def added(code: str, **cell: Any) -> Callable[[Notebook], None]:
    """A code cell at the end that was executed after the others."""

    def change(notebook: Notebook) -> None:
        count = len(code_cells(notebook)) + 1
        new = {"cell_type": "code", "id": "added", "metadata": {}, "outputs": [], "execution_count": count}
        notebook["cells"].append({**new, "source": code, **cell})

    return change


def first_code(**changes: Any) -> Callable[[Notebook], None]:
    return lambda notebook: code_cells(notebook)[0].update(changes)


FIGURE = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "AA=="}}
FAILED = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}
BREAKS: list[tuple[Rule, Callable[[Notebook], None]]] = [
    (rule_is_valid_and_clean, lambda notebook: notebook["cells"][0].pop("cell_type")),
    (rule_is_valid_and_clean, lambda notebook: notebook["metadata"]["language_info"].update(version="3.11")),
    (rule_is_valid_and_clean, first_code(metadata={"execution": {"iopub.execute_input": "2026-01-01T00:00:00Z"}})),
    (rule_executed_in_order, first_code(execution_count=None)),
    (rule_executed_in_order, first_code(execution_count=2)),
    (rule_no_errors, added("1 / 0", outputs=[FAILED])),
    (rule_no_errors, added("f()", outputs=[{"output_type": "stream", "name": "stderr", "text": "Warning"}])),
    (rule_outputs_are_stored, added("print(1)")),
    (rule_outputs_are_stored, added("views.show_active(x, g)")),
    (rule_no_paths_and_no_addresses, added("run.save('/home/me/run')")),
    (
        rule_no_paths_and_no_addresses,
        added("x", outputs=[{**FIGURE, "data": {"text/html": ["<a href='https://x.y'>"]}}]),
    ),
    (rule_size, added("x", outputs=[{**FIGURE, "data": {"image/png": "A" * MAX_BYTES}}])),
    (rule_first_cells, lambda notebook: notebook["cells"].pop(0)),
    (rule_first_cells, first_code(source="import os\nQUICK = True")),
    (rule_first_cells, added("import tl_spd")),
    (rule_writes_under_runs, added("run.save('runs/mine')")),
    (rule_every_cell_compiles, added("with spd.decomposed(model, run)")),
    (rule_library_names_exist, added("spd.decompose_it")),
    (rule_library_names_exist, added("views.show_nothing(1)")),
    (rule_library_names_exist, added("from tl_spd.masks import no_mask")),
    (rule_library_names_exist, added("spd.Schedule('cosine', heating=3)")),
    (rule_what_is_shown_is_explained, added("x", outputs=[FIGURE])),
]


def read(path: Path) -> Notebook:
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def test_these_are_the_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize(("rule", "change"), BREAKS)
def test_rule_can_fail(rule: Rule, change: Callable[[Notebook], None]) -> None:
    broken = copy.deepcopy(read(NOTEBOOKS[0]))
    before = rule(broken)
    change(broken)
    assert before == []
    assert rule(broken)


def test_every_rule_can_fail() -> None:
    assert {rule for rule, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES)
def test_every_notebook_keeps_the_rule(rule: Rule, path: Path) -> None:
    problems = rule(read(path))
    assert not problems, "\n" + "\n".join(problems)


def test_the_first_notebook_trains_the_preset_that_the_second_falls_back_to() -> None:
    """Its call of ``decompose``, read off its source and recorded, beside the preset's own arguments."""
    first = "\n".join(source(cell) for cell in code_cells(read(NOTEBOOKS[0])))
    nodes = list(ast.walk(ast.parse(first)))
    sizes = next(node for node in nodes if isinstance(node, ast.Assign) and "TARGET_STEPS" in ast.unparse(node.targets))
    call = next(node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "spd.decompose")
    known: dict[str, Any] = {"spd": tl_spd, "QUICK": False}
    exec(ast.unparse(sizes), known)
    told = {word.arg: eval(ast.unparse(word.value), known) for word in call.keywords}
    preset = InductionSettings.preset("quick")
    assert told.pop("progress") is False
    assert told | {"losses": tuple(told["losses"]), "sites": (told["sites"],)} == preset.training()
    assert f"task.sample({preset.batch_size}, generator)" in ast.unparse(call.args[1])
    assert known["TARGET_STEPS"] == preset.target.steps


# --- execution ---------------------------------------------------------------------------------------------------------

NO_HOOKS = """
from transformer_lens import HookedTransformer
hosts = [value for value in list(globals().values()) if isinstance(value, HookedTransformer)]
assert hosts and not [point.name for host in hosts for point in host.hook_points() if point.fwd_hooks or point.bwd_hooks]
"""


def kinds(cell: Notebook) -> list[str]:
    """What a cell shows: streams, and what the front page of each output is."""
    return sorted({output.get("name") or next(iter(sorted(output["data"]))) for output in cell["outputs"]})


def complaints(cells: list[Notebook], filters: list[str]) -> str:
    """What cells wrote to stderr, but for the warnings (two lines each) that ``pyproject.toml`` ignores, with its reasons."""
    streams = [output for cell in cells for output in cell["outputs"] if output.get("name") == "stderr"]
    text = "".join(stream["text"] for stream in streams)
    for entry in filters:
        action, *warning = entry.split(":", 2)
        if action == "ignore":
            message, category = warning
            text = re.sub(rf"^.*: {category}: {message}.*\n(  .*\n)?", "", text, flags=re.MULTILINE)
    return text


def test_complaints_are_what_no_filter_ignores() -> None:
    lines = "a.py:1: UserWarning: old is old; use new.\n  old()\na.py:2: UserWarning: other\n  other()\n"
    cells = [{"outputs": [{"output_type": "stream", "name": "stderr", "text": lines}]}]
    assert complaints(cells, ["error"]) == lines
    assert complaints(cells, ["error", "ignore:old is old:UserWarning"]) == lines[lines.index("a.py:2") :]


@pytest.mark.tutorials
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_quick_form_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """In an empty folder, with every warning shown and no network; it shows what is stored, and leaves no hook."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    offline = {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    for name, value in {"TL_SPD_QUICK": "1", "PYTHONWARNINGS": "default", **offline}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    stored = [kinds(cell) for cell in code_cells(notebook)]
    notebook.cells.append(nbformat.v4.new_code_cell(NO_HOOKS))
    about = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=about).execute()
    executed = code_cells(notebook)[:-1]
    assert complaints(executed, pytestconfig.getini("filterwarnings")) == ""
    shown = [[kind for kind in kinds(cell) if kind != "stderr"] for cell in executed]
    assert shown == stored
    written = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in written if file.parts[:2] != ("runs", "tutorials")] == []
