"""Token texts that are hard to show, and what the tests read off views."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tl_spd.views import View

UNCHANGED = [
    *(
        "<|endoftext|>",
        "The",
        " <script>alert(1)</script>",
        "</script>",
        "<img src=x onerror=\"document.title='hacked'\">",
    ),
    *(
        "&amp;",
        "&lt",
        "<!--",
        ' "quoted"',
        "'s",
        "\\",
        " שלום",
        " 🦊",
        "👨\u200d👩\u200d👧",
        "�",
        "<0x0A>",
        " ",
        "${x}",
        "`",
        "]]>",
    ),
    *(
        "<svg onload=alert(1)>",
        '"><b>',
        "' onx='1",
        "</style>",
        "</title>",
        "<!--<script>",
        "javascript:alert(1)",
        "{{x}}",
    ),
    *("🇩🇪", "👍🏽", "❤\ufe0f", "مرحبا", "<0xE2>", "Ġthe", "Ċ", "▁the"),
]
ESCAPED = {
    "\n": r"\n", "\t": r"\t", "\u202eabc": r"\u202eabc", "\u2028": r"\u2028", "\u200f": r"\u200f", "\ud83d": r"\ud83d",
    "\x00": r"\x00", "": '""', "\u2066x": r"\u2066x", "\u2069": r"\u2069", "\u061c": r"\u061c", "\u200e": r"\u200e", "\r": r"\r",
    "\x1b[31m": r"\x1b[31m", "\ufeff": r"\ufeff", "\x85": r"\x85", "\u200b": r"\u200b",
}  # fmt: skip
NASTY = [*UNCHANGED, *ESCAPED]
VISIBLE = [*UNCHANGED, *ESCAPED.values()]
"""What a reader should see of each of ``NASTY``."""

JOINER = "\u2060"


def importances(C: int = 3, sites: tuple[str, ...] = ("a", "b"), batch: int = 2) -> dict[str, torch.Tensor]:
    """Values that are 0 in about half of all places, one position for each of ``NASTY``."""
    generator = torch.Generator().manual_seed(0)
    return {site: (torch.rand(batch, len(NASTY), C, generator=generator) * 2 - 1).clamp(min=0) for site in sites}


def data_of(view: View) -> dict[str, Any]:
    """The data that the view's script hands over, as the browser will read them."""
    found = re.fullmatch(r'tlSpdShow\(CircuitsVis, "[^"]+", (.*)\);', view.script, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def panels(view: View) -> dict[str, list[dict[str, Any]]]:
    """Choice -> its panels."""
    return {choice["label"]: choice["panels"] for choice in data_of(view)["choices"]}


# --- a browser -------------------------------------------------------------------------------------------------------

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ),
]


def browse(page: Path, probe: str = "null", width: int = 1000) -> tuple[Any, list[str]]:
    """What the JavaScript expression ``probe`` is (as JSON) on a page ``width`` wide (at least 500), and its console's lines."""
    assert CHROMIUM is not None
    script = (
        '<script>addEventListener("load", () => setTimeout(() => { const out = document.createElement("pre"); '
        f'out.id = "probe"; out.textContent = JSON.stringify({probe}); document.body.append(out); }}, 1000));</script>'
    )
    source = page.read_text(encoding="utf-8")
    assert "</body>" in source
    page.write_text(source.replace("</body>", script + "</body>"), encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            CHROMIUM,
            *FLAGS,
            f"--window-size={width},900",
            f"--user-data-dir={profile}",
            page.resolve().as_uri(),
        ]
        environment = {**os.environ, "HOME": profile}
        done = subprocess.run(command, capture_output=True, timeout=240, env=environment, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found is not None, done.stderr.decode()[-2000:]
    return json.loads(html.unescape(found.group(1))), [t for t in done.stderr.decode().splitlines() if "CONSOLE" in t]
