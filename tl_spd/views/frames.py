"""What the plots have in common: checks of tables, the optional packages, colours, and labels that any font can draw.

Colours are Okabe and Ito's (told apart by the colour-blind) and matplotlib's cividis (monotone in lightness); lines also
differ in dashes and markers and bars in hatching, so that a grey copy can be read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from tl_spd.views.view import visible

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)), (0, (1, 3)))
MARKERS = "osD^vPX"
HEAT = "cividis"


def checked(table: pd.DataFrame, columns: Sequence[str], source: str) -> pd.DataFrame:
    """``table``, after checking that it has rows and ``columns``.

    Raises:
        ValueError: a column is missing, or there are no rows; names ``source``, which makes such tables.
    """
    if missing := [name for name in columns if name not in table.columns]:
        raise ValueError(
            f"The table lacks {missing}; it has {list(table.columns)}. {source} makes what is wanted here."
        )
    if table.empty:
        raise ValueError(f"The table has no rows, so there is nothing to show. {source} makes what is wanted here.")
    return table


def line(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the ``index``-th of several lines."""
    turn = index % len(COLORS)
    return {"color": COLORS[turn], "linestyle": DASHES[turn], "marker": MARKERS[turn], "markersize": 3.5}


def pyplot() -> Any:
    """matplotlib.pyplot, or an error that says which extra it is in."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("This figure needs matplotlib, which is optional: pip install 'tl_spd[plots]'.") from error
    return plt


def graph_objects() -> Any:
    """plotly.graph_objects, or an error that says which extra it is in."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ImportError("This plot needs plotly, which is optional: pip install 'tl_spd[plots]'.") from error
    return go


def axes(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure of ``width x height`` inches and its axes, row by row.

    It is closed in pyplot at once: nothing of it stays there, and Jupyter shows it where it is returned, not twice.
    """
    plt = pyplot()
    figure, made = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)
    plt.close(figure)
    return figure, list(made.flat)


def drawable(text: str) -> str:
    """:func:`~tl_spd.views.view.visible`, with characters that the fonts in use lack as escapes too."""
    return "".join(c if _drawn(ord(c), _families()) else c.encode("unicode_escape").decode() for c in visible(text))


def _families() -> tuple[str, ...]:
    return tuple(pyplot().rcParams["font.family"])


@functools.lru_cache(maxsize=4096)
def _drawn(code: int, families: tuple[str, ...]) -> bool:
    from matplotlib import font_manager

    fonts = [
        font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family=[family])))
        for family in families
    ]
    return any(font.get_char_index(code) for font in fonts)
