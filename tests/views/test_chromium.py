"""Saved views in a real browser: what it shows, that the picker works, and that nothing is requested or complained about."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.views.pages import CHROMIUM, JOINER, NASTY, VISIBLE, browse, importances
from tl_spd.analysis.activity import top_examples
from tl_spd.views import (
    View,
    document,
    show_active,
    show_attention,
    show_importance,
    show_top_examples,
    show_vocabulary,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium was found")]

SHOWN = """(() => {
  const texts = (root, query) => [...root.querySelectorAll(query)].map((node) => node.textContent);
  const state = (root) => ({
    captions: texts(root, "figcaption"), tokens: texts(root, ".colored-tokens > span"),
    colors: [...root.querySelectorAll(".colored-tokens > span > span")].map((node) => node.style.backgroundColor),
    cells: texts(root, "td"), charts: [...root.querySelectorAll("canvas")].map((node) => node.width > 50),
  });
  const views = [...document.querySelectorAll(".tl-spd-view")].map((root) => {
    const before = state(root), select = root.querySelector("select");
    if (select) { select.selectedIndex = 1; select.dispatchEvent(new Event("change")); }
    return { before, root, picked: select && [...select.options].map((option) => option.textContent) };
  });
  return {
    views: views.map(({ before, picked }) => ({ before, picked })), title: document.title,
    foreign: document.querySelectorAll("img, iframe, .tl-spd-view script").length,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    inside: [innerWidth, document.documentElement.scrollWidth > document.documentElement.clientWidth],
  };
})()"""


def plain(texts: list[str]) -> list[str]:
    return [text.replace(JOINER, "").replace("\xa0", " ") for text in texts]


def test_the_console_is_read_and_pages_may_request_nothing(tmp_path: Path) -> None:
    """The checks below can fail."""
    page = tmp_path / "page.html"
    page.write_text(document("x", ["<img src='http://127.0.0.1:9/a.png'><script>throw Error('loud')</script>"]))
    found, console = browse(page, "document.images[0].complete && document.images[0].naturalWidth")
    assert found == 0
    assert any("loud" in text for text in console)
    assert any("Content Security Policy" in text for text in console)


@pytest.mark.parametrize("width", [500, 1300])
def test_all_views_on_one_page(width: int, tmp_path: Path) -> None:
    g = importances()
    table = top_examples(g, torch.arange(2 * len(NASTY)).reshape(2, -1), k=2)
    pattern = {0: torch.softmax(torch.full((1, 2, len(NASTY), len(NASTY)), -1e9).triu(1), -1)}
    effects = {
        "site": "s",
        "subcomponent": [0, 1],
        "side": "raised",
        "rank": 0,
        "text": NASTY[2:4],
        "effect": [0.5, -1],
    }
    views = [
        show_importance(NASTY, g, {"a": [0, 1]}),
        show_active(NASTY, g),
        show_attention(NASTY, pattern, pattern),
        show_top_examples(table, [NASTY, NASTY], g, "a"),
        show_vocabulary(pd.DataFrame(effects)),
    ]
    page = tmp_path / "page.html"
    page.write_text(document("page", views), encoding="utf-8")
    found, console = browse(page, SHOWN, width)
    assert console == []
    assert found["inside"] == [width, False]
    assert (found["requests"], found["foreign"], found["title"]) == ([], 0, "page")
    importance, active, attention, examples, vocabulary = found["views"]
    assert plain(importance["before"]["tokens"]) == plain(active["before"]["tokens"]) == VISIBLE
    assert importance["picked"] == ["a 0", "a 1"]
    white = [color == "rgb(255, 255, 255)" for color in importance["before"]["colors"]]
    assert white == (g["a"][0, :, 0] < 0.002).tolist()
    assert attention["before"]["charts"] == [True] * 3
    assert len(examples["before"]["captions"]) == 2
    assert vocabulary["before"]["cells"] == [VISIBLE[2].replace(" ", "·"), "0.5000"]


CONTRAST = """(() => [...document.querySelectorAll(".colored-tokens > span > span")].map((node) =>
  [node.style.color, node.style.backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)]))()"""


def test_every_token_is_written_in_the_colour_of_more_contrast(tmp_path: Path) -> None:
    g = {"a": torch.linspace(0, 1, 41)[None, :, None]}
    page = tmp_path / "page.html"
    show_importance(["x"] * 41, g).save(page)
    found, _ = browse(page, CONTRAST)
    for color, levels in found:
        red, green, blue = (((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in levels)
        luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        on_black, on_white = (luminance + 0.05) / 0.05, 1.05 / (luminance + 0.05)
        assert color == ("black" if on_black > on_white else "white"), levels
    assert {color for color, _ in found} == {"black", "white"}


CUT = """[...document.querySelectorAll("canvas")].map((node) => {
  const box = node.closest("figure > div").getBoundingClientRect(), own = node.getBoundingClientRect();
  return own.left >= box.left && own.right <= box.right; })"""


@pytest.mark.parametrize("width", [500, 1300])
def test_attention_plots_are_not_cut_at_their_sides(width: int, tmp_path: Path) -> None:
    pattern = {0: torch.ones(1, 1, 3, 3) / 3}
    page = tmp_path / "page.html"
    show_attention(["a", "b", "c"], pattern, pattern).save(page)
    assert browse(page, CUT, width)[0] == [True] * 3


PICK = """(() => {
  const select = document.querySelector(".tl-spd-view select");
  const before = document.querySelector("figcaption").textContent;
  select.selectedIndex = 1;
  select.dispatchEvent(new Event("change"));
  return [before, document.querySelector("figcaption").textContent, document.querySelectorAll("figure").length];
})()"""


@pytest.mark.parametrize("kind", ["saved", "notebook"])
def test_the_picker_shows_what_is_picked(kind: str, tmp_path: Path) -> None:
    view: View = show_importance(NASTY, importances(), {"a": [0], "b": [2]})
    page = tmp_path / "page.html"
    if kind == "saved":
        view.save(page)
    else:
        source = f"<!doctype html><html><head><meta charset='utf-8'></head><body>{view._repr_html_()}</body></html>"
        page.write_text(source, encoding="utf-8")
    found, console = browse(page, PICK)
    assert found == ["Importance of a, subcomponent 0", "Importance of b, subcomponent 2", 1]
    assert console == []
