"""The API reference has every public name: each room has its page, and the built pages have each function and class.

What is public is read off the source text and off ``import tl_spd``; what is documented off the pages, and off the
inventory that a build writes.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tl_spd as spd
from tests.test_package import PUBLIC
from tests.test_repository import ROOMS

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api"
PROGRAM = "tl_spd.cli"  # a table of commands, and --help, in the place of its classes


def modules() -> dict[str, ast.Module]:
    """Every module of tl_spd but the package itself -> its syntax tree."""
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in (ROOT / "tl_spd").rglob("*.py")}
    named = {name.removesuffix(".__init__"): ast.parse(f.read_text(encoding="utf-8")) for name, f in files.items()}
    return {name: tree for name, tree in named.items() if name != "tl_spd"}


def public(tree: ast.Module) -> list[str]:
    """The module's own public functions and classes, with the public methods that have a docstring."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and ast.get_docstring(inner):
                    names.append(f"{node.name}.{inner.name}")
    return names


def pages() -> dict[str, str]:
    return {page.stem: page.read_text(encoding="utf-8") for page in API.glob("*.md")}


def test_every_module_is_on_the_page_of_its_room() -> None:
    wanted = {(name.split(".")[1], name) for name in modules() if name != PROGRAM}
    found = {(page, name) for page, text in pages().items() for name in re.findall(r"automodule:: (\S+)", text)}
    assert found == wanted


def test_the_pages_stand_in_the_order_of_the_rooms() -> None:
    listed = re.findall(r"```\{toctree\}\n[^`]*?\n\n([^`]*)```", pages()["index"])
    assert "\n".join(listed).split() == ROOMS


def test_nothing_is_left_out_of_a_module_unless_it_stands_apart() -> None:
    for page, text in pages().items():
        left_out = {name.strip() for line in re.findall(r":exclude-members: (.*)", text) for name in line.split(",")}
        assert left_out == {name.split(".")[-1] for name in re.findall(r"autodata:: (\S+)", text)}, page


def test_the_first_page_has_the_public_names_as_they_are() -> None:
    paths = re.findall(r"^   ~(tl_spd\.\S+)$", pages()["index"], re.M)
    assert sorted(path.rpartition(".")[2] for path in paths) == sorted(PUBLIC)
    for path in paths:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is getattr(spd, name)


def test_every_command_is_in_the_table() -> None:
    commands = re.findall(r"^\| `([a-z-]+)` \|", pages()["cli"], re.M)
    assert commands == [name.lower() for name in public(modules()[PROGRAM]) if name[0].isupper() and "." not in name]


class Addresses(HTMLParser):
    """What a page makes the browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "prefetch"):
            self.found.append(str(given["href"]))


@pytest.mark.slow
def test_a_build_without_warnings_has_every_public_name_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    options = ["-q", "-n", "-W", "--keep-going", "-E", "-d", str(tmp_path / "trees"), "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, _, _, _, packed = (tmp_path / "html" / "objects.inv").read_bytes().split(b"\n", 4)
    documented = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines() if " py:" in line}
    wanted = {f"{name}.{own}" for name, tree in modules().items() if name != PROGRAM for own in public(tree)}
    assert len(wanted) > 200
    assert sorted(wanted - documented) == []
    for page in (tmp_path / "html").rglob("*.html"):
        addresses = Addresses()
        addresses.feed(page.read_text(encoding="utf-8"))
        assert [address for address in addresses.found if re.match(r"(https?:)?//", address)] == []
