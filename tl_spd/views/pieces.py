"""Pieces of HTML for a report: its style, tables, pictures, and texts that are not trusted.

Texts are cut to ``MOST_TEXT`` characters and escaped; characters that cannot be seen or that turn the text's direction are
spelled out. Numbers are rounded to four significant digits.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tl_spd.views.view import short, visible

MOST_TEXT = 300
"""Most characters of a text."""
MOST_FULL = 40
"""A table of more rows scrolls by itself."""
DPI = 110
"""Pixels per inch of pictures."""

STYLE = """<style>
body { font: 15px/1.5 sans-serif; color: #111; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 8px 0; } h2 { font-size: 20px; margin: 28px 0 8px; } h3 { font-size: 16px; margin: 18px 0 4px; }
p { margin: 4px 0 10px; max-width: 75em; } img { max-width: 100%; } .picture { margin: 8px 0 16px; overflow-x: auto; }
.scroll { overflow: auto; margin: 4px 0 12px; border: 1px solid #ddd; width: fit-content; max-width: 100%; }
.long { max-height: 34em; } .picture { isolation: isolate; } .picture img { mix-blend-mode: multiply; }
.scroll, .picture { /* a shadow at every edge behind which there is more */
  background:
    linear-gradient(90deg, #fff 50%, #fff0) left / 40px 100%, linear-gradient(270deg, #fff 50%, #fff0) right / 40px 100%,
    linear-gradient(0deg, #fff 50%, #fff0) bottom / 100% 40px, linear-gradient(90deg, #0006, #0000) left / 14px 100%,
    linear-gradient(270deg, #0006, #0000) right / 14px 100%, linear-gradient(0deg, #0006, #0000) bottom / 100% 14px;
  background-attachment: local, local, local, scroll, scroll, scroll; background-repeat: no-repeat; }
.report { border-collapse: collapse; font-size: 14px; overflow-wrap: normal; }
.report th { text-align: left; padding: 2px 8px; border-bottom: 1px solid #999; }
.report th { background: #fff; position: sticky; top: 0; }
.report td { padding: 2px 8px; border-bottom: 1px solid #ddd; vertical-align: top; unicode-bidi: isolate; }
.report td { white-space: pre-wrap; min-width: 3em; max-width: 60em; }
.report th.number, .report td.number { text-align: right; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; font-weight: bold; } details { margin: 6px 0; }
code { background: #f2f2f2; padding: 1px 4px; } body .tl-spd-view { padding: 8px 0 12px; }
</style>"""


def read_json(file: Path) -> dict[str, Any]:
    """What is in a JSON file that need not exist."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({error}); move it elsewhere.") from error
    return found if isinstance(found, dict) else {}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[list[Any]]:
    """Rows ``name, value``; what is nested gets dotted names, lists of plain values stay together."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            yield from ([f"{prefix}{name}.{i}", json.dumps(entry, ensure_ascii=False)] for i, entry in enumerate(value))
        else:
            yield [f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]


def text(value: object, most: int = MOST_TEXT) -> str:
    """At most ``most`` characters of ``value``, fit to stand in HTML, between elements or in an attribute."""
    return html.escape(visible(short(str(value), most)))


def cell(value: Any) -> str:
    """A cell of a table; NaN and empty texts leave it empty."""
    if isinstance(value, float):
        return f'<td class="number">{"" if value != value else f"{value:.4g}"}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="number">{value}</td>'
    return f"<td>{text(value) if str(value) else ''}</td>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that scrolls by itself where it is too wide or has many rows."""
    rows = [tuple(row) for row in rows]
    first = [cell(value).startswith("<td class") for value in (rows[0] if rows else columns)]
    kinds = [' class="number"' if number else "" for number in first]
    head = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    made = f'<table class="report"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll{" long" if len(rows) > MOST_FULL else ""}" tabindex="0">{made}</div>'


def picture(figure: Any, caption: str) -> str:
    """The figure as a picture that the page carries."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI)
    source = base64.b64encode(data.getvalue()).decode()
    least = f"min-width: {0.65 * DPI * figure.get_figwidth():.0f}px"  # a narrow screen scrolls it, rather than shrink it more
    image = f'<img alt="{text(caption)}" style="{least}" src="data:image/png;base64,{source}">'
    return f"<figure class='picture'><figcaption>{text(caption)}</figcaption>{image}</figure>"
