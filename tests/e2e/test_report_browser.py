"""The report page in headless Chromium, from disk: no console message, nothing fetched, every figure drawn."""

import json
import math
import random
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from megatron_grpo.report import write_report
from megatron_grpo.report.figures import PANELS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
BLUE, VERMILLION = (0, 114, 178), (213, 94, 0)
HOSTILE = "<img src=x onerror=alert(1)>&lt;b&gt;%{x}"
TICKS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

# Runs inside the page once it is drawn, and tells the frame around it what it sees.
PROBE = """
<script>addEventListener("load", () => {
  const plots = [...document.querySelectorAll(".plot")];
  const widths = () => plots.map((div) => div.querySelector(".main-svg").getBoundingClientRect().width);
  const shown = () => plots.map((div) => div.data.filter((trace) => trace.visible && trace.meta.arm === 0).length);
  const seen = { inner: innerWidth, scroll: document.documentElement.scrollWidth };
  const isDrawn = (path) => (path.getAttribute("d") || "").length > 8;
  const hasMarks = (trace) => [...trace.querySelectorAll("path")].some(isDrawn);
  seen.drawn = plots.map((div) => [...div.querySelectorAll(".trace")].filter(hasMarks).length);
  seen.visible = plots.map((div) => div.data.filter((trace) => trace.visible).length);
  seen.widths = widths();
  seen.labels = [...document.querySelectorAll(".ytick text")].map((text) => text.textContent);
  seen.before = shown();
  document.querySelector("button[data-group=arm]")?.click();
  seen.after = shown();
  dispatchEvent(new Event("beforeprint"));
  seen.paper = widths();
  seen.open = document.querySelector("details").open;
  dispatchEvent(new Event("afterprint"));
  parent.postMessage(JSON.stringify(seen), "*");
});</script></body>"""
FRAME = """<body style="margin:0"><iframe src="{page}" style="border:0;width:{width}px;height:900px"></iframe>
<pre id="seen"></pre><script>addEventListener("message", (event) => {{ seen.textContent = event.data; }});</script>"""


def write_run(path: Path, arm: int, seed: int) -> None:
    """A run with every key that a panel shows; ``arm`` shifts the curves, ``seed`` adds noise."""
    noise = random.Random(1000 * arm + seed)
    path.mkdir(parents=True)
    config = {"anchor": {"cadence": 5 + arm}, "data": {"prompt_template": HOSTILE}, "train": {"seed": seed}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    keys = [panel.key for panels in PANELS.values() for panel in panels]
    with (path / "metrics.jsonl").open("w") as lines:
        for tick in range(TICKS):
            row: dict[str, float] = {"step": tick // 2, "tick": tick, "time/step": 0.5}
            for key in keys:
                if not key.startswith("val/") or tick % 10 == 9:
                    row[key] = 0.5 + 0.3 * math.tanh(tick / 20) - 0.02 * arm + noise.gauss(0, 0.02)
            for kind in ("fast", "anchor", "old_logprob", "basis", "rollout", "dense_equivalent", "dense_total"):
                row[f"boundary/bytes_{kind}"] = round(1e5 * (1 + noise.random()))
            lines.write(json.dumps(row) + "\n")
    (path / "summary.json").write_text('{"status": "finished"}')


def chromium(page: str, *options: str, profile: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    own = (f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--enable-logging=stderr", "--v=0")
    command = [CHROMIUM, *FLAGS, *own, *options, page]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


def probe(page: Path, width: int, tmp_path: Path) -> dict[str, Any]:
    """What the page's probe sees in a window ``width`` pixels wide; asserts a silent console."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=probed.as_uri(), width=width))
    result = chromium(frame.as_uri(), "--dump-dom", "--window-size=1600,1000", profile=tmp_path / "profile")
    assert re.findall(r".*CONSOLE.*", result.stderr) == []
    found = re.search(r'<pre id="seen">(.+?)</pre>', result.stdout, re.DOTALL)
    assert found, "the page did not finish"
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run, of two arms of three seeds (one with a hostile name), and of 20 arms of three seeds."""
    root = tmp_path_factory.mktemp("report")
    write_run(root / "run", 0, 0)
    for sweep, names in (("two", ["plain", HOSTILE]), ("many", [f"arm{index:02d}" for index in range(20)])):
        for index, name in enumerate(names):
            for seed in range(3):
                write_run(root / sweep / name / f"seed{seed}", index, seed)
    sources = {"one": root / "run", "two": root / "two", "many": root / "many"}
    return {name: write_report([source], root / f"{name}.html")[0] for name, source in sources.items()}


PANEL_COUNT = sum(len(panels) for panels in PANELS.values())


@pytest.mark.parametrize("width", [400, 1300])
@pytest.mark.parametrize(("name", "arms"), [("one", 1), ("two", 2), ("many", 20)])
def test_every_figure_is_drawn_and_nothing_is_fetched(
    name: str, arms: int, width: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    assert "content=\"default-src 'none';" in pages[name].read_text(encoding="utf-8")  # a fetch is a console error
    seen = probe(pages[name], width, tmp_path)
    assert seen["inner"] == width
    assert seen["scroll"] <= width  # a wide table scrolls in its own box
    assert all(0 < plot <= width for plot in seen["widths"])
    curves = 4 if arms == 2 else arms  # bands: of one seed there are none, of many arms too many
    byte_figures = 1 if arms == 1 else 2
    assert Counter(seen["drawn"]) == Counter({curves: PANEL_COUNT}) + Counter({7: byte_figures})
    assert seen["drawn"] == seen["visible"]


def test_buttons_hide_an_arm_and_paper_gets_figures_that_fit(pages: dict[str, Path], tmp_path: Path) -> None:
    seen = probe(pages["two"], 1300, tmp_path)
    assert seen["before"].count(2) == PANEL_COUNT  # line and band
    assert set(seen["after"]) == {0}
    assert set(seen["paper"]) == {330, 680}
    assert seen["open"] is True


def test_names_are_shown_as_text(pages: dict[str, Path], tmp_path: Path) -> None:
    labels = probe(pages["two"], 1300, tmp_path)["labels"]
    assert "plain" in labels
    assert f"{HOSTILE[:23]}…" in labels


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screen_shows_curves_in_the_colours_of_the_arms(scheme: str, pages: dict[str, Path], tmp_path: Path) -> None:
    picture = tmp_path / "shot.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    options = [f"--screenshot={picture}", "--window-size=1300,2600", *dark]
    chromium(pages["two"].as_uri(), *options, profile=tmp_path / "profile")
    colors = Counter(Image.open(picture).convert("RGB").get_flattened_data())
    paper, _ = colors.most_common(1)[0]
    assert sum(paper) > 700 if scheme == "light" else sum(paper) < 100
    assert colors[BLUE] > 2000
    assert colors[VERMILLION] > 2000


def test_prints_on_pages(pages: dict[str, Path], tmp_path: Path) -> None:
    chromium(pages["two"].as_uri(), f"--print-to-pdf={tmp_path / 'page.pdf'}", profile=tmp_path / "profile")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf[:5] == b"%PDF-"
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9


def test_many_arms_stay_a_file_to_send(pages: dict[str, Path]) -> None:
    assert pages["many"].stat().st_size < 8_000_000
