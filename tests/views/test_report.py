"""Reports: all that lies beside a Run can be read back from one file that loads nothing, and nothing in it becomes markup."""

from __future__ import annotations

import csv
import dataclasses
import json
import struct
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.tiny import tiny_decompose, tiny_host, tiny_run, tiny_tokenizer, tiny_tokens, unchanged
from tests.views.pages import CHROMIUM, JOINER, NASTY, VISIBLE, browse
from tl_spd import cli
from tl_spd.experiments.facts import FactsSettings
from tl_spd.experiments.induction import SITES, InductionSettings
from tl_spd.experiments.induction_target import InductionTask, build_target
from tl_spd.losses import Faithfulness
from tl_spd.sites import HookedTransformer
from tl_spd.storage import StorageError, read_folder, write_folder
from tl_spd.suppress import save_weights
from tl_spd.views import pieces
from tl_spd.views import report as module
from tl_spd.views.report import report

ACTIVE = pd.DataFrame(
    {"site": ["a", "a", "b", "b"], "position": ["s1", "m"] * 2, "threshold": 0.0, "active": [1.23456, 0, 2, 3]}
)
METRICS = pd.DataFrame({"metric": ["recon", "L0"], "site": ["all", "all"], "value": [0.000123456, float("nan")]})


class Page(HTMLParser):
    """Tables as lists of rows of texts, headings, summaries and paragraphs, elements with attributes, scripts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        else:
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open:
            self.texts[self.open][-1] += data

    def values(self, *names: str) -> list[str]:
        return [value or "" for _, attributes in self.tags for name, value in attributes.items() if name in names]

    def table(self, *columns: str) -> list[list[str]]:
        """The rows of the one table with these columns."""
        (found,) = [rows for rows in self.tables if rows[0] == list(columns)]
        return found[1:]


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    host = tiny_host("gpt2", dtype=torch.float32)
    host.set_tokenizer(tiny_tokenizer("right"), default_padding_side="right")
    return host


@pytest.fixture
def folder(model: HookedTransformer, tmp_path: Path) -> Path:
    """An experiment's folder: a Run that was trained a little, with tables beside it."""
    out = tmp_path / "mine"
    tiny_decompose(model, losses=[Faithfulness(2.0)], sites=("blocks.0.attn.W_[QK]", "blocks.1.mlp.W_out")).save(
        out / "run"
    )
    ACTIVE.to_csv(out / "active.csv", index=False)
    METRICS.to_csv(out / "metrics.csv", index=False)
    (out / "settings.json").write_text(
        json.dumps({"seed": 5, "commit": "abc123", "facts": {"pair": [{"prompt": "w1 w2"}]}})
    )
    return out


def test_what_lies_in_the_folder_can_be_read_back(folder: Path, tmp_path: Path) -> None:
    out = report(folder, tmp_path / "new" / "report.html")
    assert out == tmp_path / "new" / "report.html"
    page = read(out)
    assert page.texts["title"] == ["Decomposition: mine"]
    assert "9 rank-1 subcomponents (C) of 3 weights, trained for 4 steps." in page.texts["p"][0]
    assert "Vector (d_gate 2, start 1.0)" in page.texts["p"][0]
    weights = page.table("weight", "layer", "d_in", "d_out", "C")
    assert weights[0] == ["blocks.0.attn.W_Q", "0", "6", "8", "3"]
    assert weights[2] == ["blocks.1.mlp.W_out", "1", "12", "6", "3"]
    ours, theirs = (dict(rows[1:]) for rows in page.tables if rows[0] == ["setting", "value"])
    assert (ours["steps"], ours["seed"], ours["optimizer.lr"]) == ("4", "0", "0.001")
    assert json.loads(ours["losses.0"]) == {"kind": "Faithfulness", "coeff": 2.0}
    assert theirs == {"seed": "5", "commit": "abc123", "facts.pair.0": '{"prompt": "w1 w2"}'}
    assert page.table("site", "position", "threshold", "active")[0] == ["a", "s1", "0", "1.235"]
    assert page.table("metric", "site", "value") == [["recon", "all", "0.0001235"], ["L0", "all", ""]]
    assert page.texts["summary"][1:] == ["metrics.csv (2 rows)", "active.csv (4 rows)"]
    how = dict(page.table("what", "value"))
    record = json.loads((folder / "run" / "record.json").read_text())
    assert how["seed"] == "0"
    assert how["version of torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert how["commit (settings)"] == "abc123"
    assert how["digest of the Run's tensors"] == record["tensors"]["blake2b"]
    assert how["blocks.0.attn.W_Q"] == record["fingerprint"]["blocks.0.attn.W_Q"]
    assert str(folder / "run") in out.read_text()
    assert "CircuitsVis" not in out.read_text()


def test_the_page_loads_nothing_and_carries_its_pictures(
    folder: Path, model: HookedTransformer, tmp_path: Path
) -> None:
    page = read(report(folder, tmp_path / "r.html", model, ["w1 w2 w3"]))
    sources = page.values("src", "href", "srcset", "data", "action", "poster")
    assert not [source for source in sources if not source.startswith("data:")]
    assert page.values("content")[1].startswith("default-src 'none'")
    pictures = [b64decode(source.partition("base64,")[2]) for source in page.values("src")]
    assert len(pictures) == 2  # curves, active by position
    for picture in pictures:
        width, height = struct.unpack(">II", picture[16:24])  # PNG's header
        assert picture[:4] == b"\x89PNG"
        assert width > 300
        assert height > 100
    assert page.values("alt") == page.texts["figcaption"] != ["", ""]
    style = " ".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style


def shown(path: Path) -> list[dict[str, Any]]:
    """What each view hands to the browser, in order."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("tlSpdShow(CircuitsVis")]
    return [json.loads(line.partition('", ')[2].removesuffix(");")) for line in lines]


def test_views_show_the_importances_of_the_prompts(folder: Path, model: HookedTransformer, tmp_path: Path) -> None:
    run = tiny_run(model, ("blocks.0.attn.W_[QK]", "blocks.1.mlp.W_out"))
    run.save(folder / "run")
    with unchanged(model):
        path = report(folder, tmp_path / "r.html", model, ["w1 w2 w3", "w4"])
    importance, active, *attention = shown(path)
    first = importance["choices"][0]
    site, index = first["label"].rsplit(" ", 1)
    tokens = torch.tensor([[1, 3, 4, 5]])  # [BOS] w1 w2 w3
    g = run.importances(model, tokens)
    assert first["panels"][0]["props"]["tokens"] == ["[BOS]", "w1", "w2", "w3"]
    assert first["panels"][0]["props"]["values"] == pytest.approx(g[site][0, :, int(index)].tolist(), abs=1e-4)
    assert [len(choice["panels"]) for choice in importance["choices"]] == [2] * 9
    counts = sum((g[name][0] > 0).sum(1) for name in run.components)
    assert active["choices"][0]["panels"][0]["props"]["values"] == counts.tolist()
    assert active["choices"][0]["panels"][0]["props"]["maxValue"] == 9
    assert [choice["panels"][0]["props"]["maxValue"] for choice in active["choices"][1:]] == [3] * 3  # of C = 3
    other = run.importances(model, torch.tensor([[1, 6]]))
    means = torch.cat([g[site][0], other[site][0]]).mean(0)
    assert int(index) == int(means.argmax())
    assert [len(view["choices"]) for view in attention] == [2, 2]  # two prompts, one layer of two heads
    assert path.read_text().count("var CircuitsVis") == 1
    assert path.stat().st_size < 15_000_000


def test_a_sparse_subcomponent_of_the_last_site_is_shown_first() -> None:
    start, always, once = torch.tensor([1.0, 0, 0, 0]), torch.ones(4), torch.tensor([0.5, 0, 0.9, 0])
    choices = {"a 0": [once], "b 2": [always], "b 0": [start], "b 1": [once]}
    assert module._sparsest(choices) == "b 1"  # 0.6 above its mean behind the first token, the others 0
    assert module._sparsest({"b 0": [torch.ones(1)]}) == "b 0"


@pytest.mark.parametrize(("rows", "wanted"), [(40, "scroll"), (41, "scroll long")])
def test_tables_are_shown_in_full_up_to_forty_rows(rows: int, wanted: str) -> None:
    assert Page(pieces.table(["a"], [[i] for i in range(rows)])).values("class")[0] == wanted


def test_only_so_many_subcomponents_of_a_site_and_rows_of_a_table(
    folder: Path, model: HookedTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run(model, ("blocks.0.attn.W_[QK]",)).save(folder / "run")
    monkeypatch.setattr(module, "MOST_SUBCOMPONENTS", 2)
    monkeypatch.setattr(module, "MOST_ROWS", 3)
    path = report(folder, tmp_path / "r.html", model, tiny_tokens())
    assert [choice["label"].split()[0] for choice in shown(path)[0]["choices"]] == ["blocks.0.attn.W_Q"] * 2 + [
        "blocks.0.attn.W_K"
    ] * 2
    page = read(path)
    assert "active.csv (4 rows; the first 3 are shown)" in page.texts["summary"]
    assert len(page.table("site", "position", "threshold", "active")) == 3
    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    with pytest.raises(ValueError, match="give fewer or shorter prompts"):
        report(folder, tmp_path / "big.html", model, tiny_tokens())
    assert not (tmp_path / "big.html").exists()


NOT_IN_TABLES = ("\ud83d", "\x00")  # no file can hold the one; pandas 2 on Python 3.10 loses the other


def hostile(tmp_path: Path) -> tuple[Path, HookedTransformer]:
    """A folder whose name, settings, history, table and tokens all try to be markup."""
    host = tiny_host("gpt2", dtype=torch.float32, d_vocab=len(NASTY), n_ctx=len(NASTY))
    host.tokenizer = type(
        "Texts", (), {"decode": lambda self, ids: NASTY[ids[0]], "padding_side": "right", "pad_token_id": None}
    )()
    run = tiny_run(host, "blocks.0.attn.W_Q")
    run.settings = {NASTY[2]: {"a": NASTY}, "steps": NASTY[4], "seed": NASTY[3]} | dict.fromkeys(NASTY, NASTY[4])
    run.history = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "L0": [3.0, 2.0], "$x_{": 1.0, "_<b>\u202e": 0.5})
    folder = tmp_path / "<img src=x onerror=alert(1)>&amp;"
    run.save(folder / "run")
    texts = [text for text in NASTY if text not in NOT_IN_TABLES]
    table = pd.DataFrame({NASTY[2]: texts, "<b>": range(len(texts)), "prompt": NASTY[4]})
    table.to_csv(folder / "<i>&lt;.csv", index=False, quoting=csv.QUOTE_ALL)  # else a lone \\r would end a row
    traced = pd.DataFrame({"kind": "$", "layer": 0, "position": range(4), "token": NASTY[2:6], "effect": 0.1})
    traced.assign(prompt=NASTY[2], p_clean=0.5, p_corrupted=0.1).to_csv(folder / "trace.csv", index=False)
    (folder / "settings.json").write_text(json.dumps({NASTY[3]: NASTY[2]}))
    return folder, host


def test_nothing_hostile_becomes_markup(tmp_path: Path) -> None:
    folder, host = hostile(tmp_path)
    path = report(folder, tmp_path / "r.html", host, torch.arange(len(NASTY))[None], "tl-spd <script>")
    page = read(path)
    allowed = "html head meta link title style body h1 h2 h3 p div table thead tbody tr th td details summary figure figcaption"
    assert {tag for tag, _ in page.tags} == {*allowed.split(), "img", "code", "script"}
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert all(source.startswith("data:image/png;base64,") for source in page.values("src"))
    assert page.texts["title"] == ["Decomposition: <img src=x onerror=alert(1)>&amp;"] == page.texts["h1"]
    assert "<i>&lt;.csv" in "".join(page.texts["summary"])
    rows = page.table(NASTY[2], "<b>", "prompt")
    assert [row[0] for row in rows] == [VISIBLE[NASTY.index(t)] if t else "" for t in NASTY if t not in NOT_IN_TABLES]
    assert "tl-spd <script>" in page.texts["code"]
    assert "\u202e" not in path.read_text(encoding="utf-8").partition("<script>")[0]


def test_errors_say_what_would_work_before_anything_is_written(
    folder: Path, model: HookedTransformer, tmp_path: Path
) -> None:
    out = tmp_path / "r.html"
    with pytest.raises(
        StorageError, match=r"neither record.json nor run/record.json in it\. Give the folder that --out"
    ):
        report(tmp_path, out)
    with pytest.raises(StorageError, match="no such folder"):
        report(tmp_path / "nowhere", out)
    with pytest.raises(IsADirectoryError, match=r"is a folder; name the file to write, for example .*report\.html"):
        report(folder, tmp_path)
    with pytest.raises(ValueError, match=r"other weights: blocks\.0\.attn\.W_Q differs"):
        report(folder, out, tiny_host("gpt2", seed=1, dtype=torch.float32), tiny_tokens())
    with pytest.raises(ValueError, match="both the host and prompts"):
        report(folder, out, model)
    with pytest.raises(ValueError, match="both the host and prompts"):
        report(folder, out, prompts=["w1"])
    with pytest.raises(ValueError, match="at least one prompt"):
        report(folder, out, model, [])
    with pytest.raises(ValueError, match="no tokenizer"):
        report(folder, out, tiny_host("gpt2", dtype=torch.float32), ["w1"])
    (folder / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary.json cannot be read as JSON"):
        report(folder, out)
    (folder / "summary.json").write_text('{"target": "no target"}')
    (folder / "foreign.csv").write_text("")
    with pytest.raises(ValueError, match=r"foreign.csv cannot be read as a table"):
        report(folder, out)
    assert not out.exists()


def test_a_run_by_itself_and_one_in_its_experiments_folder(
    folder: Path, model: HookedTransformer, tmp_path: Path
) -> None:
    assert report(folder / "run", tmp_path / "a.html").read_text() == report(folder, tmp_path / "b.html").read_text()
    tiny_decompose(model, steps=1).save(tmp_path / "alone")
    METRICS.to_csv(tmp_path / "alone" / "evaluation.csv")
    page = read(report(tmp_path / "alone", tmp_path / "c.html"))
    assert page.texts["summary"] == ["evaluation.csv (2 rows)"]
    assert "img" not in page.texts
    assert any("Fewer than two steps" in text for text in page.texts["p"])


TABLES = {
    "Causal trace of “w1”": dict(
        prompt="w1", kind="mlp", layer=[0, 1], position=0, token="7", effect=[0.1, 0.2], p_clean=0.5, p_corrupted=0.1
    ),
    "Probability of the answer with one layer's output at zero": dict(
        kind="mlp", layer=[0, 1], prompt="w1", p_before=0.5, p_after=[0.1, 0.2]
    ),
    "Output KL by rank-1 pieces kept": dict(method="spd", seed=0, kept=[1, 2], kl=[0.5, 0.1]),
    "Training of the target": dict(
        step=[1, 2], loss=1.0, accuracy=0.5, attention_m_on_s1=0.1, attention_s2_on_m=0.2
    ),
    "Suppressed for “w1”, chosen by effect": dict(
        target="w1", choice="effect", group=["fact", "facts"], control="random", prompt=["w1", "w2"],
        logp_before=-1.0, logp_after=-2.0,
    ),
}  # fmt: skip


def test_tables_are_drawn_by_their_columns(folder: Path, tmp_path: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"target": {"phase_change_step": 2}}))
    for place, columns in enumerate(TABLES.values()):
        pd.DataFrame(columns).to_csv(folder / f"{place}.csv", index=False)
    captions = read(report(folder, tmp_path / "r.html")).texts["figcaption"]
    first = ["Loss terms and L0 by training step", "Active subcomponents per token, importance above 0"]
    assert captions == [*first, *TABLES]


# --- the command -----------------------------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["tl-spd", "report", *map(str, arguments)])
    cli.main()


def test_the_command_rebuilds_an_induction_target_and_names_its_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = InductionSettings.preset("cpu", 3)
    target = build_target(InductionTask(), seed=4)
    folder = tmp_path / "in duction"
    tiny_run(target, SITES).save(folder / "run")
    save_weights(target, folder / "target.safetensors")
    (folder / "settings.json").write_text(json.dumps(settings.plain()))
    call(monkeypatch, folder, "-o", tmp_path / "r.html")
    assert f"The report is in {tmp_path / 'r.html'}" in capsys.readouterr().out
    assert read(tmp_path / "r.html").texts["code"][0] == f"tl-spd induction --preset cpu --seed 3 --out '{folder}'"
    importance, _, *attention = shown(tmp_path / "r.html")
    tokens = importance["choices"][0]["panels"][0]["props"]["tokens"]
    assert len(tokens) == 64
    assert tokens.count("s ") == 2
    assert [len(view["choices"]) for view in attention] == [2, 2, 2]
    (folder / "settings.json").write_text(json.dumps(dataclasses.replace(settings, steps=7).plain()))
    call(monkeypatch, folder, "-o", tmp_path / "r.html")
    assert "No one command is known" in (tmp_path / "r.html").read_text()


def test_the_command_takes_a_host_and_prompts(
    folder: Path,
    model: HookedTransformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "load_host", lambda name: {"mine": model}[name])
    call(monkeypatch, folder, "-o", tmp_path / "r.html", "--host", "mine")
    (panel,) = shown(tmp_path / "r.html")[0]["choices"][0]["panels"]
    assert panel["props"]["tokens"] == ["[BOS]", "w1", "w2"]  # the pair of the settings
    call(monkeypatch, folder, "-o", tmp_path / "r.html", "--host", "mine", "--prompts", "w3", "w4")
    assert len(shown(tmp_path / "r.html")[0]["choices"][0]["panels"]) == 2
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, folder, "-o", tmp_path / "r.html", "--prompts", "w3")
    assert "give --host too" in capsys.readouterr().err


def test_a_facts_preset_is_named_by_its_settings() -> None:
    settings = FactsSettings.preset("quick", 2)
    plain = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    assert cli._command(plain, Path("x")) == "tl-spd facts --preset quick --seed 2 --out x"
    assert cli._command(plain | {"k": 9}, Path("x")) == ""


# --- a browser -------------------------------------------------------------------------------------------------------

USED = """(() => {
  const state = () => [...document.querySelectorAll(".tl-spd-view")].map((root) => ({
    captions: [...root.querySelectorAll("figcaption")].map((node) => node.textContent),
    tokens: [...root.querySelectorAll(".colored-tokens > span")].map((node) => node.textContent),
    colors: [...root.querySelectorAll(".colored-tokens > span > span")].map((node) => node.style.backgroundColor) }));
  const before = state(), select = document.querySelector("select");
  select.selectedIndex = select.options.length - 1;
  select.dispatchEvent(new Event("change"));
  document.querySelectorAll("summary").forEach((node) => node.click());
  return { before: before[0], after: state()[0], picked: select.selectedOptions[0].textContent,
    open: [...document.querySelectorAll("details")].map((node) => node.open),
    cells: [...document.querySelectorAll("details td")].map((node) => node.textContent),
    pictures: [...document.images].map((image) => image.complete && image.naturalWidth > 100),
    scripts: document.querySelectorAll("script").length,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:")),
    inside: [innerWidth, document.documentElement.scrollWidth > document.documentElement.clientWidth] };
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium was found")
@pytest.mark.parametrize("width", [500, 1300])
def test_a_hostile_report_in_a_browser(width: int, tmp_path: Path) -> None:
    folder, host = hostile(tmp_path)
    path = report(folder, tmp_path / "r.html", host, torch.arange(len(NASTY))[None])
    found, console = browse(path, USED, width)
    assert console == []
    assert found["requests"] == []
    assert found["inside"] == [width, False]
    assert all(found["pictures"])
    assert len(found["pictures"]) == 2
    assert [token.replace(JOINER, "").replace("\xa0", " ") for token in found["before"]["tokens"]] == VISIBLE
    assert found["after"]["captions"] == [f"Prompt 0: {found['picked']}, 0 to 1"] != found["before"]["captions"]
    assert found["after"]["colors"] != found["before"]["colors"]
    assert found["open"] == [True, True, False]  # what was closed is open and the other way round
    assert VISIBLE[2] in found["cells"]
    assert found["scripts"] == 2  # the page's and the probe's


SPOILT: dict[str, tuple[str, str, str]] = {
    "a record of other parts": ("run/record.json", "history", "damaged or incomplete"),
    "a deep settings file": ("settings.json", "[" * 100_000, r"settings\.json cannot be read as JSON"),
    "numbers that are texts": (
        "active.csv",
        "site,position,threshold,active\na,m,<b>,x\n",
        r"active\.csv cannot be drawn \(.*\); move it elsewhere",
    ),
    "a table of one prompt": (
        "zero_out.csv",
        "kind,layer,prompt,p_before,p_after\n,,,,\n",
        r"zero_out\.csv cannot be drawn",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_files_are_refused_in_one_sentence(case: str, folder: Path, tmp_path: Path) -> None:
    name, content, message = SPOILT[case]
    if name.endswith("record.json"):
        record, tensors = read_folder(folder / "run")
        del record[content], record["tensors"], record["schema_version"]
        write_folder(folder / "run", record, tensors)
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        report(folder, tmp_path / "r.html")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("settings", "more"),
    [({"task": {"vocab": "x"}}, ()), ({"task": 3}, ()), ({"task": {"length": 1}}, ()), ({"facts": 3}, ("--host", "x"))],
)
def test_the_command_refuses_spoilt_settings(
    settings: dict[str, Any],
    more: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "target.safetensors").touch()
    monkeypatch.setattr(sys, "argv", ["tl-spd", "report", str(folder), *more])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert f"of {folder}. Found: damaged or incomplete files" in capsys.readouterr().err
