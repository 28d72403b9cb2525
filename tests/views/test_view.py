"""Views: nothing of a model or a prompt becomes markup, one file holds all, and the optional packages stay optional."""

from __future__ import annotations

import base64
import importlib
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from circuitsvis.utils.render import RenderedHTML

import tl_spd
from tests.views.pages import JOINER, NASTY, VISIBLE, data_of
from tl_spd import views
from tl_spd.views import Panel, View, document
from tl_spd.views.view import LABEL, bundle, harmless, short, visible


class Elements(HTMLParser):
    """Every element that a browser would make of a page, with the text inside each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


def elements(source: str) -> Elements:
    parser = Elements()
    parser.feed(source)
    parser.close()
    return parser


def nasty_view() -> View:
    panel = Panel("ColoredTokens", {"tokens": NASTY, "values": [0.5] * len(NASTY)}, NASTY[2])
    return View(NASTY[2], {NASTY[3]: [panel], NASTY[4]: [panel]}, note=NASTY[4], picker=NASTY[7])


def test_what_a_reader_sees_of_every_token() -> None:
    assert [visible(token) for token in NASTY] == VISIBLE
    assert [harmless(token).replace(JOINER, "") for token in NASTY] == VISIBLE


def test_harmless_tokens_are_text_where_they_are_read_as_html() -> None:
    found = HTMLParser(convert_charrefs=True)
    texts: list[str] = []
    found.handle_data = texts.append  # type: ignore[method-assign]
    found.handle_starttag = found.handle_endtag = found.handle_comment = pytest.fail  # type: ignore[assignment]
    for token in NASTY:
        found.feed(harmless(token) + " ")
    found.close()
    assert "".join(texts).replace(JOINER, "") == " ".join(VISIBLE) + " "


def test_short_keeps_what_fits_and_says_where_it_cuts() -> None:
    assert short("a" * LABEL, LABEL) == "a" * LABEL
    assert short("a" * 15 + "b", LABEL) == "a" * 13 + "…"


@pytest.mark.parametrize("kind", ["local_src", "cdn_src", "page"])
def test_nothing_handed_over_becomes_an_element(kind: str) -> None:
    view = nasty_view()
    source = document(NASTY[2], [view]) if kind == "page" else getattr(view, kind)
    plain = View("x", {"x": []})
    expected = document("x", [plain]) if kind == "page" else getattr(plain, kind)
    found, wanted = elements(source), elements(expected)
    assert found.tags == [*wanted.tags[: wanted.tags.index("h3") + 1], "p", *wanted.tags[wanted.tags.index("h3") + 1 :]]
    assert len(found.scripts) == 1
    assert not any(name.startswith("on") for name, _ in found.attributes)


def test_data_arrive_as_they_were_given() -> None:
    data = data_of(nasty_view())
    assert data["choices"][0]["panels"][0]["props"]["tokens"] == NASTY
    assert [choice["label"] for choice in data["choices"]] == [NASTY[3], NASTY[4]]
    assert data["picker"] == NASTY[7]
    assert "<" not in nasty_view().script


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = View("x", {"x": [Panel("ColoredTokens", {"values": [float("nan")]})]}).script


def test_a_view_without_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to show"):
        View("x", {})


def test_a_view_is_circuitsvis_own_object_and_jupyter_gets_it_without_looking_for_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("circuitsvis.utils.render.internet_on", lambda: pytest.fail("asked for the network"))
    view = nasty_view()
    assert isinstance(view, RenderedHTML)
    assert view._repr_html_() == view.__html__() == view.local_src
    packed = re.findall(r'atob\("([^"]+)"\)', view.local_src)
    assert [zlib.decompress(base64.b64decode(text)).decode() for text in packed] == [bundle()]
    assert "unpkg.com" not in view.local_src
    assert str(view) == view.show_code() == view.cdn_src
    assert len(view.cdn_src) < 10_000 < len(view.local_src) < 500_000


def test_the_bundle_is_circuitsvis_own_but_for_what_would_end_or_leave_the_script() -> None:
    import circuitsvis

    original = (Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    code, _, rest = original.partition("\n//# sourceMappingURL")
    assert "\n" not in rest.strip()
    assert bundle().replace("<\\/script", "</script") == code + "\n"
    assert re.search("</script|<!--", bundle()) is None


def test_a_saved_view_is_one_file_that_may_request_nothing(tmp_path: Path) -> None:
    view = nasty_view()
    view.save(tmp_path / "view.html")
    source = (tmp_path / "view.html").read_text(encoding="utf-8")
    found = elements(source)
    assert any(
        name == "content" and value and value.startswith("default-src 'none'") for name, value in found.attributes
    )
    assert not any(name == "src" for name, _ in found.attributes)
    assert {value for name, value in found.attributes if name == "href"} == {"data:,"}
    assert source.count(view.script) == 1


def test_a_document_of_several_views_holds_the_bundle_once() -> None:
    first, second = nasty_view(), nasty_view()
    source = document("both", ["<h1>Both</h1>", first, "<p>between</p>", second])
    assert first.id != second.id
    assert source.count(bundle()) == 1
    order = [source.index(part) for part in ("<h1>", first.body, "<p>between", second.body, bundle(), first.script)]
    assert order == sorted(order)
    assert "CircuitsVis" not in document("none", ["<p>text</p>"])


def test_plots_name_their_extra_where_a_package_is_missing_and_views_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("matplotlib", "matplotlib.pyplot", "plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    g = {"s": torch.ones(1, 1, 1)}
    with pytest.raises(ImportError, match=r"needs matplotlib, .* pip install 'tl_spd\[plots\]'"):
        views.plot_history(pd.DataFrame({"step": [1], "loss": [1.0], "L0": [1.0]}))
    with pytest.raises(ImportError, match=r"needs plotly, .* pip install 'tl_spd\[plots\]'"):
        views.plot_importance(["a"], g, "s")
    assert views.show_importance(["a"], g, {"s": [0]}).local_src


def test_importing_views_needs_neither_plotting_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tl_spd, "views", views)  # put back afterwards, like the modules
    for name in [name for name in sys.modules if name.startswith("tl_spd.views")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("matplotlib", "plotly"):
        monkeypatch.setitem(sys.modules, name, None)
    again = importlib.import_module("tl_spd.views")
    assert again is not views
    assert [name for name in vars(again) if name.startswith(("plot_", "show_"))]
