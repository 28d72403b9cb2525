"""docs/errors.md has every message that tl_spd can give, once, under a room that gives it, and no other.

Messages are read off the source text, pages off the Markdown. What a message fills in at run time is ``…`` in both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

import pytest

import tl_spd as spd
from tests.tiny import tiny_host
from tl_spd.analysis.adversarial import Adversary
from tl_spd.data import check_batch
from tl_spd.hosts import from_name
from tl_spd.sites import find_sites

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
HOLE = "…"


Names = dict[str, list[ast.expr]]


class Unreadable(Exception):
    """A message that is neither a text nor built from texts in the same function or by a helper with one return."""


def template(node: ast.expr, names: Names, helpers: Names) -> str:
    """The fixed words of the message ``node``, given what its function calls by name and what helpers return."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub(f"{HOLE}{HOLE}+", HOLE, "".join(template(part, names, helpers) for part in node.values))
    if isinstance(node, ast.FormattedValue):
        try:
            return template(node.value, names, helpers) if isinstance(node.value, ast.Name | ast.Call) else HOLE
        except Unreadable:
            return HOLE
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, names, helpers) + template(node.right, names, helpers)
    if isinstance(node, ast.Name) and len(given := names.get(node.id, [])) == 1:
        return template(given[0], {}, helpers)
    if isinstance(node, ast.Call) and len(given := helpers.get(ast.unparse(node.func), [])) == 1:
        return template(given[0], {}, {})
    raise Unreadable(f"line {node.lineno}: the message {ast.unparse(node)} is no text; write it where it is raised")


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def returned(source: str) -> Names:
    """What every function of ``source`` returns, by its name."""
    found: Names = {}
    for function in functions(ast.parse(source)):
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        found.setdefault(function.name, []).extend(values)
    return found


def message(node: ast.AST) -> ast.expr | None:
    """The message that ``node`` gives: by making an error or interrupt, by a warning, or by rewording one that passes.

    An exit status is none.
    """
    found = None
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func)
        if re.search(r"\b[A-Z]\w*(Error|Exit|Interrupt|Warning)$|^warnings\.warn$|^sys\.exit$|\.add_note$", name):
            found = node.args[0]
    if (
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]).endswith(".args")
        and isinstance(node.value, ast.Tuple)
    ):
        found = node.value.elts[0]
    return None if isinstance(found, ast.Constant) and isinstance(found.value, int) else found


def messages(source: str, helpers: Names) -> Iterator[str]:
    """The template of every message in ``source``, also of one made in a variable or by one of ``helpers``."""
    tree = ast.parse(source)
    for found in filter(None, map(message, ast.walk(tree))):
        around = [f for f in functions(tree) if f.lineno <= found.lineno <= (f.end_lineno or 0)]
        names: Names = {}
        for node in ast.walk(max(around, key=lambda f: f.lineno)) if around else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.setdefault(node.targets[0].id, []).append(node.value)
        yield " ".join(template(found, names, helpers).split())


def in_the_code() -> dict[str, set[str]]:
    """Every message of tl_spd -> the rooms that give it."""
    sources = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tl_spd").rglob("*.py"))}
    helpers: Names = {}
    for source in sources.values():
        for name, values in returned(source).items():
            helpers.setdefault(name, []).extend(values)
    found: dict[str, set[str]] = {}
    for file, source in sources.items():
        try:
            for text in messages(source, helpers):
                found.setdefault(text, set()).add(file.relative_to(ROOT / "tl_spd").with_suffix("").parts[0])
        except Unreadable as error:
            raise AssertionError(f"{file}, {error}") from None
    return found


def on_the_page(page: str) -> Iterator[tuple[int, str, str, int]]:
    """Line, room, message and number of explanations of every entry: a line of code with lines ``: ...`` behind it."""
    lines, room = page.splitlines(), ""
    for number, line in enumerate(lines):
        if line.startswith("## "):
            room = line[3:].strip()
        if code := re.fullmatch(r"(`+) ?(.+?) ?\1", line):
            end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
            yield number + 1, room, code[2], sum(each.startswith(": ") for each in lines[number:end])


def problems(page: str, code: dict[str, set[str]]) -> list[str]:
    """What to add to the page, to remove from it and to move, in words."""
    entries, found = list(on_the_page(page)), []
    missing = [message for message in code if message not in {message for _, _, message, _ in entries}]
    for message in missing:
        ticks = "``" if "`" in message else "`"
        found.append(f"add under '## {sorted(code[message])[0]}':\n{ticks}{message}{ticks}\n: why\n: what to do\n")
    seen: set[str] = set()
    for line, room, message, explained in entries:
        if message not in code:
            near = get_close_matches(message, missing, n=1)
            found.append(f"line {line}: no message of the code; remove it{f', or make it: {near[0]}' if near else ''}")
        elif message in seen:
            found.append(f"line {line}: is there twice, remove one: {message}")
        elif room not in code[message]:
            found.append(f"line {line}: move it from '## {room}' to '## {sorted(code[message])[0]}': {message}")
        elif explained != 2:
            found.append(f"line {line}: say in two lines ': ...' why it is raised and what to do: {message}")
        seen.add(message)
    return found


def test_the_page_has_every_message_once_and_no_other() -> None:
    found = problems(PAGE.read_text(encoding="utf-8"), in_the_code())
    assert not found, f"{len(found)} changes to docs/errors.md are wanted:\n" + "\n".join(found)


SOURCE = """
def f(k, file):
    where = f"In {file}:"
    why = "a"
    why = "b"
    if k < 1:
        raise ValueError("k must be at least 1, "
                         f"found {k!r}.")
    if k > 2:
        raise storage.StorageError(f"{where} too much {why} ({k:.2f}).") from None
    message = "Plain `words`."
    raise KeyError(message)

def g(names):
    warnings.warn("Lower it.", stacklevel=2)
    return TypeError("No " + "names.")

def words(name):
    return f"{name[0]}{name[1:]} is odd."

def h(error):
    raise ValueError(f"Step {k}: {words(error)}")
    raise NotImplementedError
    raise error
    sys.exit(130)
    raise KeyboardInterrupt(f"Stopped at {k}.")
    error.args = (f"Kept in {k}.",)
    raise g(1)
"""


def test_messages_are_read_off_the_source() -> None:
    assert sorted(messages(SOURCE, returned(SOURCE))) == [
        "In …: too much … (…).",
        "Kept in ….",
        "Lower it.",
        "No names.",
        "Plain `words`.",
        "Step …: … is odd.",
        "Stopped at ….",
        "k must be at least 1, found ….",
    ]
    with pytest.raises(Unreadable, match=r"make\(\)"):
        list(messages("raise ValueError(make())", {}))


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        ("## a\n`k is ….`\n: Why.\n: Do.\n", []),
        ("## b\n``k is ….``\n: Why.\n: Do.\n", []),
        ("## a\n", ["add under '## a':\n`k is ….`\n: why\n: what to do\n"]),
        ("## c\n`k is ….`\n: Why.\n: Do.\n", ["line 2: move it from '## c' to '## a': k is …."]),
        ("## a\n`k is ….`\n: Why.\n", ["line 2: say in two lines ': ...' why it is raised and what to do: k is …."]),
        ("## a\n`k is ….`\n: W.\n: D.\n\n`k is ….`\n: W.\n: D.\n", ["line 6: is there twice, remove one: k is …."]),
        ("## a\n`k is ….`\n: W.\n: D.\n\n`Old.`\n: W.\n: D.\n", ["line 6: no message of the code; remove it"]),
    ],
)
def test_each_problem_of_a_page_is_seen(page: str, wanted: list[str]) -> None:
    assert problems(page, {"k is ….": {"a", "b"}}) == wanted


RAISED: list[Callable[[], object]] = [
    lambda: spd.Schedule(warmup=-1),
    lambda: Adversary(steps=-1),
    lambda: spd.load("nowhere", tiny_host()),
    lambda: check_batch([[1, 2]], tiny_host()),
    lambda: find_sites(tiny_host(), "blocks.*.W_Z"),
    lambda: from_name("gtp2"),
]


@pytest.mark.parametrize("call", RAISED)
def test_a_message_as_it_is_raised_is_found_on_the_page(call: Callable[[], object]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whichever it is, the page must have it
        call()
    entries = [message for _, _, message, _ in on_the_page(PAGE.read_text(encoding="utf-8"))]
    told = [entry for entry in entries if len(entry.replace(HOLE, "")) > 20]  # a shorter one could match by chance
    patterns = [".*".join(map(re.escape, entry.split(HOLE))) for entry in told]
    assert sum(re.fullmatch(pattern, str(raised.value), re.S) is not None for pattern in patterns) == 1, raised.value
