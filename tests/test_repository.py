"""House rules of the repository, read off its source text; nothing of tl_spd is imported.

Every rule is a function from a room's name and source to the list of what breaks it. Each is tried on a small source
that breaks it, so that a rule that can no longer fail is noticed, and then on every file of tl_spd.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tl_spd"

# The dependency order: a room imports only from rooms before it, and within itself where it is a folder.
ROOMS = [
    *("sites", "hooks", "wiring", "checks", "data", "components", "kernels", "gates", "attend", "importance"),
    *("masks", "storage", "run", "install", "suppress", "losses", "engine", "settings", "memory", "train"),
    *("analysis", "hosts", "views", "experiments", "cli"),
]
OVER_PUBLIC_API = {"views", "experiments", "cli"}  # may say `import tl_spd`
KNOW_THE_HOST = {"sites", "hosts"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str, str], list[str]]


def room_of(module: str) -> str:
    """``tl_spd.analysis.tracing`` -> ``analysis``; the package itself -> ``""``."""
    return module.split(".")[1] if "." in module else ""


def imports(source: str, module: str = "tl_spd.x") -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported anywhere; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            parent = ".".join(filter(None, [base, node.module]))
            yield from ((node.lineno, f"{parent}.{alias.name}") for alias in node.names)


def rule_file_length(module: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def rule_function_length(module: str, source: str) -> list[str]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    return [
        f"line {f.lineno}: {f.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        for f in found
        if (length := f.end_lineno - f.lineno + 1) > MAX_FUNCTION_LINES
    ]


def rule_one_room_knows_the_host(module: str, source: str) -> list[str]:
    if room_of(module) in KNOW_THE_HOST:
        return []
    return [
        f"line {line}: imports {name}; only {sorted(KNOW_THE_HOST)} may"
        for line, name in imports(source, module)
        if name.split(".")[0] == "transformer_lens"
    ]


def rule_dependency_order(module: str, source: str) -> list[str]:
    room, problems = room_of(module), []
    if not room:
        return []  # the package itself re-exports from everywhere
    if room not in ROOMS:
        return [f"is no room in ROOMS: give {room!r} its place in the dependency order"]
    for line, name in imports(source, module):
        top, _, rest = name.partition(".")
        wanted = rest.split(".")[0]
        if top != "tl_spd" or wanted == room:
            continue
        if wanted not in ROOMS:
            if room not in OVER_PUBLIC_API:
                problems.append(f"line {line}: imports {name} from the package; name the room that defines it")
        elif ROOMS.index(wanted) > ROOMS.index(room):
            problems.append(f"line {line}: imports {name}; {wanted} comes after {room}")
    return problems


def rule_docstrings(module: str, source: str) -> list[str]:
    """Modules, public classes and functions; a method in at least one of the file's classes that define it."""
    tree = ast.parse(source)
    public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
    problems = [] if ast.get_docstring(tree) or not tree.body else ["the module has no docstring"]
    problems += [f"line {n.lineno}: {n.name} has no docstring" for n in public if not ast.get_docstring(n)]
    methods: dict[str, list[Function]] = {}
    for cls in (n for n in public if isinstance(n, ast.ClassDef)):
        for m in cls.body:
            if isinstance(m, Function) and not m.name.startswith("_"):
                methods.setdefault(m.name, []).append(m)
    for name, same in methods.items():
        if name != "forward" and not any(ast.get_docstring(m) for m in same):
            problems.append(f"line {same[0].lineno}: method {name} has no docstring")
    return problems


def rule_nothing_is_unpickled(module: str, source: str) -> list[str]:
    problems = [
        f"line {line}: imports {name}"
        for line, name in imports(source, module)
        if name.split(".")[0] in PICKLES or name == "torch.load"
    ]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        called = ast.unparse(node.func)
        if called == "torch.load" and keywords.get("weights_only") != "True":
            problems.append(f"line {node.lineno}: torch.load without weights_only=True")
        if keywords.get("allow_pickle", "False") != "False":
            problems.append(f"line {node.lineno}: {called} allows pickles")
    return problems


RULES: list[Rule] = [
    rule_file_length,
    rule_function_length,
    rule_one_room_knows_the_host,
    rule_dependency_order,
    rule_docstrings,
    rule_nothing_is_unpickled,
]

BREAKS = [
    (rule_file_length, "tl_spd.masks", "x = 1\n" * 401),
    (rule_function_length, "tl_spd.masks", "class A:\n    def f(self):\n" + "        x = 1\n" * 60),
    (rule_one_room_knows_the_host, "tl_spd.masks", "from transformer_lens.hook_points import HookPoint"),
    (rule_one_room_knows_the_host, "tl_spd.views.html", "def f():\n    import transformer_lens as tl"),
    (rule_dependency_order, "tl_spd.masks", "from tl_spd.install import decomposed"),
    (rule_dependency_order, "tl_spd.masks", "from .install import decomposed"),
    (rule_dependency_order, "tl_spd.masks", "def f():\n    import tl_spd.train"),
    (rule_dependency_order, "tl_spd.analysis.activity", "from tl_spd import hosts"),
    (rule_dependency_order, "tl_spd.analysis.activity", "from tl_spd import Run"),
    (rule_dependency_order, "tl_spd.analysis.activity", "from ..views import report"),
    (rule_dependency_order, "tl_spd.helpers", ""),
    (rule_docstrings, "tl_spd.masks", "x = 1"),
    (rule_docstrings, "tl_spd.masks", '"""Room."""\ndef f(): ...'),
    (rule_docstrings, "tl_spd.masks", '"""Room."""\nclass A: ...'),
    (rule_docstrings, "tl_spd.masks", '"""Room."""\nclass A:\n    """A."""\n    def f(self): ...'),
    (rule_nothing_is_unpickled, "tl_spd.masks", "import pickle"),
    (rule_nothing_is_unpickled, "tl_spd.masks", "from torch import load"),
    (rule_nothing_is_unpickled, "tl_spd.masks", "torch.load(path)"),
    (rule_nothing_is_unpickled, "tl_spd.masks", "torch.load(path, weights_only=False)"),
    (rule_nothing_is_unpickled, "tl_spd.masks", "np.load(path, allow_pickle=True)"),
]

KEEPS = '''"""Room."""
import torch
from tl_spd import sites
from tl_spd.masks import ones

def f(path):
    """Public."""
    return torch.load(path, weights_only=True)

class A:
    """Public."""
    def hooks(self):
        """Interface."""
    def _private(self): ...

class B:
    """Public."""
    def hooks(self): ...
    def forward(self): ...
'''


@pytest.mark.parametrize(("rule", "module", "source"), BREAKS)
def test_rule_can_fail(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source)


@pytest.mark.parametrize("rule", RULES)
def test_rule_can_pass(rule: Rule) -> None:
    assert rule("tl_spd.losses", KEEPS) == []


@pytest.mark.parametrize("rule", RULES)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no source found in {PACKAGE}"
    problems = []
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        problems += [f"{file.relative_to(ROOT)}: {problem}" for problem in rule(module, text)]
    assert not problems, "\n" + "\n".join(problems)


def constraint_lines(name: str = "constraints.txt") -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_are_plain_pins() -> None:
    """A name, ``==``, a public version, perhaps a Python version: no option, address or local build."""
    pin = re.compile(r'[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+(; python_(full_)?version (<|>=) "3\.\d+(\.\d+)?")?')
    lines = constraint_lines() + constraint_lines("constraints-oldest.txt")
    assert [line for line in lines if not pin.fullmatch(line)] == []


def needs() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(map(Requirement, sum(project["optional-dependencies"].values(), project["dependencies"])))


def test_nothing_is_asked_for_twice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in (project["dependencies"], *project["optional-dependencies"].values()):
        names = [canonicalize_name(Requirement(need).name) for need in asked]
        assert sorted(names) == sorted(set(names))


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    pins = [line.split("==") for line in constraint_lines("constraints-oldest.txt")]
    oldest = {canonicalize_name(name): Version(version) for name, version in pins}
    assert len(oldest) == len(pins), "a package is pinned twice"
    for need in needs():
        bounds = [Version(part.version) for part in need.specifier if part.operator == ">="]
        assert bounds == [oldest.get(canonicalize_name(need.name))], f"{need} was not tested at its lower bound"


def test_every_dependency_is_pinned_within_its_range() -> None:
    for python in ("3.10", "3.11"):
        pins = {}
        for line in map(Requirement, constraint_lines()):
            if line.marker is None or line.marker.evaluate({"python_version": python}):
                assert pins.setdefault(canonicalize_name(line.name), line) is line, f"{line.name} is pinned twice"
        for need in needs():
            assert canonicalize_name(need.name) in pins, f"{need.name} has no pin for Python {python}"
            version = next(iter(pins[canonicalize_name(need.name)].specifier)).version
            assert need.specifier.contains(version), f"{need} does not allow the pin {version}"


def test_nothing_names_a_registry() -> None:
    """Where packages come from is the machine's choice."""
    files = [
        ROOT / name
        for name in (
            "constraints.txt",
            "constraints-oldest.txt",
            "pyproject.toml",
            "Makefile",
            ".ci/run",
            ".ci/versions",
        )
    ]
    assert [file.name for file in files if "://" in file.read_text(encoding="utf-8")] == []
