"""Sphinx settings of the documentation: `make docs` builds it, offline, with every warning an error."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

from sphinx.util import inspect

project = "tl_spd"
author = "the tl_spd authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build"]
default_role = "code"
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

# A name that leads nowhere is an error, except the names of other libraries: they are not looked up on the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(builtins|circuitsvis|collections|jaxtyping|pandas|pathlib|torch|transformer_lens|typing|weakref)\..*"),
    ("py:class", "Tensor"),  # of an annotation like Float[Tensor, "batch pos"]
    ("py:class", r"'[a-z_ ]*'"),  # axes of a shape
    ("py:class", r"tl_spd\.\w+\._\w+"),  # a base class of the room's own
]

html_theme = "furo"
html_title = "tl_spd"
html_static_path = ["_static"]
html_css_files = ["tl_spd.css"]
html_show_sphinx = False
html_show_copyright = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_mock_imports = [] if find_spec("triton") else ["triton"]
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False
maximum_signature_line_length = 88
napoleon_attr_annotations = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"


def complete(app: Any, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Two things that the extensions do not do by themselves.

    On an attribute, napoleon would take words before a colon for its type: an empty comment in front stops that. Behind a
    class's first paragraph stands what it is a kind of, unless that is nothing or the room's own.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]
    if what in ("class", "exception"):
        bases = [base for base in obj.__mro__[1:] if not base.__name__.startswith("_")]
        if bases[0] is not object:
            end = lines.index("") if "" in lines else len(lines)
            lines[end:end] = ["", f"A :py:obj:`~{bases[0].__module__}.{bases[0].__qualname__}`."]


class Dots:
    """Stands for a default that is too long to show."""

    def __repr__(self) -> str:
        return "..."


def short_defaults(app: Any, what: str, name: str, obj: Any, options: object, signature: str, returns: str) -> Any:
    """The signature of a dataclass, where Sphinx has no source text of the defaults: factories and long values as dots."""
    if not (what == "class" and dataclasses.is_dataclass(obj)):
        return None
    found, kept = inspect.signature(obj), []
    for parameter in found.parameters.values():
        shown = "" if parameter.default is parameter.empty else repr(parameter.default)
        if shown == "<factory>" or len(shown) > 60:
            parameter = parameter.replace(default=Dots())
        if not parameter.name.startswith("_"):
            kept.append(parameter)
    short = found.replace(parameters=kept, return_annotation=found.empty)
    return inspect.stringify_signature(short, unqualified_typehints=True), ""


def setup(app: Any) -> None:
    """Called by Sphinx when it starts."""
    app.connect("autodoc-process-signature", short_defaults)
    app.connect("autodoc-process-docstring", complete, priority=100)  # before napoleon, which has 500
