"""View: circuitsvis's own elements, with titles and a picker, in a notebook, on a page of its own or beside others in a report.

1. A view is a list of choices; a choice is a list of panels; a panel is a circuitsvis element (``ColoredTokens``, ...) with its
   properties, or a ``Table`` of texts and numbers, for which circuitsvis has none. Several choices get a picker.
2. In a notebook circuitsvis' bundle travels with the view, compressed (half a megabyte each), so that nothing is loaded from
   elsewhere; ``str(view)`` is the small version that loads it from circuitsvis' CDN, as with circuitsvis' own objects.
3. ``save`` writes one file that needs no network and may not use it: its content security policy forbids every request.

What is shown comes from models and prompts and is not trusted: everything is handed over as JSON without a ``<``, and set as
text. circuitsvis itself sets tokens as HTML; :func:`harmless` makes them mean themselves there.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import circuitsvis
from circuitsvis.utils.render import RenderedHTML

STYLE = """
.tl-spd-view { background: #fff; color: #111; padding: 8px 12px 12px; font: 15px/1.5 sans-serif; overflow-wrap: anywhere; }
.tl-spd-view h3 { margin: 0 0 4px; font-size: 17px; }
.tl-spd-view p { margin: 0 0 8px; color: #444; font-size: 14px; }
.tl-spd-view select { font: inherit; max-width: 100%; }
.tl-spd-view .panels { display: flex; flex-wrap: wrap; gap: 12px 24px; margin-top: 10px; }
.tl-spd-view figure { margin: 0; flex: 1 1 100%; min-width: 0; }
.tl-spd-view .row figure { flex: 1 1 270px; max-width: 460px; }
.tl-spd-view .row figure > div { padding: 0 16px; overflow: hidden; } /* circuitsvis takes 15 of it back */
.tl-spd-view figcaption { font-size: 14px; color: #333; margin-bottom: 3px; }
.tl-spd-view table { border-collapse: collapse; font-size: 14px; }
.tl-spd-view th { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid #999; }
.tl-spd-view td { padding: 2px 14px 2px 0; border-bottom: 1px solid #ddd; white-space: pre-wrap; unicode-bidi: isolate; }
.tl-spd-view td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""

RUNTIME = """
function tlSpdShow(circuitsvis, id, data) {
  const root = document.getElementById(id);
  let count = 0;
  const add = (parent, tag, text, name) => {
    const node = parent.appendChild(document.createElement(tag));
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  };
  const table = (parent, { columns, rows, digits }) => {
    const node = add(parent, "table");
    const head = add(add(node, "thead"), "tr"), body = add(node, "tbody");
    columns.forEach((name) => { add(head, "th", name).scope = "col"; });
    rows.forEach((row) => {
      const line = add(body, "tr");
      row.forEach((cell) => typeof cell === "number" ? add(line, "td", cell.toFixed(digits), "number") : add(line, "td", cell));
    });
  };
  const legible = (token) => { // black or white, whichever has more contrast, as WCAG 2 measures it
    const light = token.style.backgroundColor.match(/[0-9.]+/g).slice(0, 3).map((c) => ((c / 255 + 0.055) / 1.055) ** 2.4);
    token.style.color = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.179 ? "black" : "white";
  };
  const show = (choice) => {
    panels.replaceChildren();
    data.choices[choice].panels.forEach(({ element, props, title }) => {
      const figure = add(panels, "figure");
      if (title) add(figure, "figcaption", title);
      if (element === "Table") { table(figure, props); return; }
      const place = add(figure, "div");
      place.id = id + "-" + count++;
      circuitsvis.render(place.id, circuitsvis[element], { ...data.shared, ...props });
    });
  };
  if (data.choices.length > 1) {
    const label = add(root, "label", data.picker + " "), select = add(label, "select");
    data.choices.forEach((choice, index) => { add(select, "option", choice.label).value = index; });
    select.value = data.first;
    select.addEventListener("change", () => show(select.value));
  }
  const panels = add(root, "div", "", data.row ? "panels row" : "panels");
  new MutationObserver(() => panels.querySelectorAll(".colored-tokens > span > span").forEach(legible))
    .observe(panels, { childList: true, subtree: true });
  show(data.first);
}
"""

UNPACK = """
const bytes = Uint8Array.from(atob("{packed}"), (c) => c.charCodeAt(0));
const source = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
const CircuitsVis = new Function((await source) + "; return CircuitsVis;")();
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
img-src data:; font-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>body {{ margin: 12px auto; max-width: 1400px; padding: 0 8px; }}</style>
</head>
<body>
{body}
<script>
{script}
</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Panel:
    """One element with its properties: the name of a circuitsvis element, or ``Table`` with ``columns, rows, digits``."""

    element: str
    props: Mapping[str, Any]
    title: str = ""


class View(RenderedHTML):
    """Panels on one subject, shown by Jupyter as they are.

    Args:
        title: what is shown; the page's title too.
        choices: name -> panels; one is shown, a picker gives the others where there are any.
        first: which one is shown; default the first.
        note: how to read it.
        picker: what is chosen.
        shared: properties that all circuitsvis panels have.
        row: put panels side by side where there is room.
    """

    def __init__(
        self,
        title: str,
        choices: Mapping[str, Sequence[Panel]],
        *,
        note: str = "",
        first: str | None = None,
        picker: str = "Show",
        shared: Mapping[str, Any] | None = None,
        row: bool = False,
    ):
        if not choices:
            raise ValueError("A view needs at least one choice; there is nothing to show.")
        self.title, self.note, self.id = title, note, f"tl-spd-{uuid4().hex[:12]}"
        listed = [{"label": label, "panels": [vars(panel) for panel in panels]} for label, panels in choices.items()]
        place = 0 if first is None else list(choices).index(first)
        self.data = {"picker": picker, "row": row, "first": place, "shared": dict(shared or {}), "choices": listed}

    @property
    def body(self) -> str:
        """The HTML in which :attr:`script` puts the panels."""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        heading = f"<h3>{html.escape(self.title)}</h3>"
        return f'<div class="tl-spd-view" id="{self.id}"><style>{STYLE}</style>{heading}{note}</div>'

    @property
    def script(self) -> str:
        """JavaScript that fills :attr:`body`; wants :func:`bundle` and ``RUNTIME`` in front of it, once for all views."""
        data = json.dumps(self.data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return f'tlSpdShow(CircuitsVis, "{self.id}", {data});'

    @property
    def local_src(self) -> str:
        """HTML with circuitsvis' bundle inside, compressed; needs no network."""
        return f'{self.body}\n<script type="module">\n{_unpack_bundle()}\n{RUNTIME}\n{self.script}\n</script>'

    @property
    def cdn_src(self) -> str:
        """HTML that loads circuitsvis from its CDN."""
        source = f"https://unpkg.com/circuitsvis@{circuitsvis.__version__}/dist/cdn/esm.js"
        imported = f'import * as CircuitsVis from "{source}";'
        return f'{self.body}\n<script type="module">\n{imported}\n{RUNTIME}\n{self.script}\n</script>'

    def _repr_html_(self) -> str:
        return self.local_src  # circuitsvis would look for the network first

    def save(self, path: str | Path) -> None:
        """Write the view to ``path`` as one HTML file that works offline."""
        Path(path).write_text(document(self.title, [self]), encoding="utf-8")


def document(title: str, parts: Sequence[View | str]) -> str:
    """One HTML page of views and pieces of HTML (trusted as they are), with circuitsvis' bundle once; makes no requests."""
    views = [part for part in parts if isinstance(part, View)]
    body = "\n".join(part.body if isinstance(part, View) else part for part in parts)
    scripts = [bundle(), RUNTIME, *(view.script for view in views)] if views else []
    return PAGE.format(title=html.escape(title), body=body, script="\n".join(scripts))


@functools.cache
def bundle() -> str:
    """circuitsvis' JavaScript, which defines ``CircuitsVis``, fit to stand inside a script element."""
    source = (files("circuitsvis") / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    return source.replace("</script", r"<\/script").partition("//# sourceMappingURL")[0]


@functools.cache
def _unpack_bundle() -> str:
    """JavaScript of a module that defines ``CircuitsVis`` by unpacking :func:`bundle`."""
    packed = base64.b64encode(zlib.compress(bundle().encode(), 9)).decode()
    return UNPACK.replace("{packed}", packed)


# --- tokens ----------------------------------------------------------------------------------------------------------

LABEL = 14
"""Most characters of a token beside a heatmap; more would leave too little room for the heatmap."""
JOINERS = "\u200c\u200d"
"""Invisible, but parts of ordinary words and emoji."""


def visible(token: str) -> str:
    r"""``token`` with characters that cannot be seen, or that turn the text's direction, as escapes: ``\n``, ``\u202e``."""
    shown = [c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in token]
    return "".join(shown) or '""'


def short(text: str, most: int) -> str:
    """At most ``most`` characters of ``text``."""
    return text if len(text) <= most else text[: most - 1] + "…"


def harmless(token: str) -> str:
    """:func:`visible`, and the same whether read as HTML or as text: an invisible U+2060 follows every ``<`` and ``&``."""
    return visible(token).replace("<", "<\u2060").replace("&", "&\u2060")
