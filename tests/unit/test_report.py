"""The report: arms and their names, statistics by hand, the table, hostile names, runs that are not whole."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo.config import ConfigError
from megatron_grpo.report import write_report
from megatron_grpo.report.arms import Arm, build_arms
from megatron_grpo.report.figures import MOST_BARS, MOST_POINTS, PANELS, bytes_a_tick, bytes_over_ticks, curve
from megatron_grpo.report.runs import read_runs
from megatron_grpo.report.stats import Estimate, estimate, paired_difference, student_quantile
from megatron_grpo.training.metrics import METRIC_KEYS

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {"anchor": {"cadence": 5, "delay": 5}, "merger": {"kind": "signed_ema"}, "train": {"seed": 0}}

Rows = Sequence[Mapping[str, Any]]


def write_run(path: Path, overrides: Mapping[str, Any] | None = None, rows: Rows = (), *, tail: str = "") -> Path:
    """A run directory with dotted overrides of CONFIG; ``tail`` is put after the rows, as it is."""
    config = {section: dict(values) for section, values in CONFIG.items()}
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def scored(score: float) -> Rows:
    """One step of two ticks: 30 + 10 training bytes of 160, with sampling 90 of 300."""
    return [
        {"step": 0, "tick": 0, "boundary/bytes_fast": 10, "boundary/bytes_rollout": 50}
        | {"boundary/bytes_dense_equivalent": 80, "boundary/bytes_dense_total": 220},
        {"step": 0, "tick": 1, "boundary/bytes_fast": 20, "boundary/bytes_anchor": 10, "time/step": 3.0}
        | {"boundary/bytes_dense_equivalent": 80, "boundary/bytes_dense_total": 80, "val/score": score},
    ]


def arms_of(*paths: Path) -> list[Arm]:
    return build_arms(read_runs(paths))


class Page(HTMLParser):
    """Tags, text and tables of a page, as a browser would read them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self._in: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "onerror", "onload")]
        self._in.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._in:
            self.scripts[-1] += data
        elif "style" not in self._in:
            self.text += data
            if "td" in self._in or "th" in self._in:
                self.rows[-1][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


# Student's t, two-sided 95 %, as printed in tables.
@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_student_quantile_is_the_printed_one(df: int, quantile: float) -> None:
    assert student_quantile(df) == pytest.approx(quantile, abs=5e-4)


def test_estimate_by_hand() -> None:
    # Mean 4, squared deviations 4 + 0 + 4 over n - 1 = 2: variance 4; standard error 2 / sqrt(3).
    found = estimate([2.0, 4.0, 6.0])
    assert found == Estimate(4.0, pytest.approx(2 / 3**0.5), 3)
    assert found.half_width == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert estimate([5.0]) == Estimate(5.0, None, 1)
    assert estimate([]) is None


def test_differences_are_paired_by_seed() -> None:
    # Seeds 0 and 2 are in both: differences 0.1 and 0.3, whatever the order.
    found = paired_difference({"2": 0.8, "0": 0.5, "7": 9.0}, {"0": 0.4, "1": 9.0, "2": 0.5})
    assert found == Estimate(pytest.approx(0.2), pytest.approx(0.1), 2)
    assert paired_difference({"0": 1.0}, {"1": 1.0}) is None


def test_runs_that_differ_in_the_seed_alone_are_one_arm(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", {"train.seed": 10}),
        write_run(tmp_path / "b", {"merger.kind": "none"}),
        write_run(tmp_path / "c", {"train.seed": 9}),
    ]
    arms = arms_of(*runs, runs[0])  # a run given twice counts once
    assert [[run.path.name for run in arm.runs] for arm in arms] == [["c", "a"], ["b"]]
    assert [arm.name for arm in arms] == ["merger.kind=signed_ema", "merger.kind=none"]


def test_names_are_the_shortest_difference(tmp_path: Path) -> None:
    """Of a 2 x 2 without one corner, the corner next to both others needs two keys, those one."""
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", {"anchor.cadence": 20}),
        write_run(tmp_path / "c", {"anchor.delay": 20}),
    ]
    assert [arm.name for arm in arms_of(*runs)] == [
        "anchor.cadence=5 anchor.delay=5",
        "anchor.cadence=20",
        "anchor.delay=20",
    ]
    assert [arm.name for arm in arms_of(runs[1])] == ["b"]


def test_sweep_names_arms_by_folder_in_its_order_reference_first(tmp_path: Path) -> None:
    for name, cadence in (("k5", 5), ("dense", 1), ("k20", 20)):
        for seed in (0, 1):
            write_run(tmp_path / "sweep" / name / f"seed{seed}", {"anchor.cadence": cadence, "train.seed": seed})
    (tmp_path / "sweep/k5/seed2").mkdir()  # begun, nothing written yet
    (tmp_path / "sweep/results.json").write_text(json.dumps({"arms": {"k20": {}, "k5": {}}, "reference": "k5"}))
    arms = arms_of(tmp_path / "sweep")
    assert [(arm.name, [run.seed for run in arm.runs]) for arm in arms] == [
        ("k5", ["0", "1"]),
        ("k20", ["0", "1"]),
        ("dense", ["0", "1"]),  # results.json does not know it yet
    ]


def test_one_folder_name_in_two_sweeps_stays_two_arms(tmp_path: Path) -> None:
    write_run(tmp_path / "one/k5/seed0")
    write_run(tmp_path / "two/k5/seed0", {"anchor.delay": 7})
    names = [arm.name for arm in arms_of(tmp_path / "one", tmp_path / "two")]
    assert names == ["k5 (anchor.delay=5)", "k5 (anchor.delay=7)"]


def test_curve_is_mean_and_error_over_the_seeds_that_have_a_value(tmp_path: Path) -> None:
    key = "policy/clip_frac"
    first = [{"tick": 0, key: 1.0}, {"tick": 1, key: 3.0}, {"tick": 2, key: 5.0}]
    second = [{"tick": 0, key: 2.0}, {"tick": 1, key: None}]
    runs = [write_run(tmp_path / "a", rows=first), write_run(tmp_path / "b", {"train.seed": 1}, second)]
    (arm,) = arms_of(*runs)
    found = curve(arm, key, longest=3)
    assert found is not None
    assert (found.ticks, found.mean, found.n) == ([0, 1, 2], [1.5, 3.0, 5.0], [2, 1, 1])
    assert found.stderr == [pytest.approx(0.5), None, None]  # sqrt(0.5) / sqrt(2)
    assert curve(arm, "anchor/age", longest=3) is None


def test_long_runs_are_averaged_to_few_points(tmp_path: Path) -> None:
    """1200 ticks are three to a point; a ramp keeps its line."""
    rows = [
        {"step": tick // 4, "tick": tick, "policy/kl": float(tick), "boundary/bytes_fast": 7} for tick in range(1200)
    ]
    (arm,) = arms_of(write_run(tmp_path / "a", rows=rows))
    found = curve(arm, "policy/kl", longest=1200)
    assert found is not None
    assert len(found.ticks) == MOST_POINTS == 400
    assert found.ticks[:2] == found.mean[:2] == [1.0, 4.0]
    bars = bytes_over_ticks(arm)
    assert bars is not None
    assert bars.width % 4 == 0  # whole steps
    assert len(bars.ticks) <= MOST_BARS
    assert set(bars.by_kind["fast"]) == {7.0}


def test_bytes_a_tick_by_hand(tmp_path: Path) -> None:
    (arm,) = arms_of(write_run(tmp_path / "a", rows=scored(0.5)))
    wanted = {"fast": 15.0, "old_logprob": 0.0, "anchor": 5.0, "basis": 0.0, "rollout": 25.0}
    assert bytes_a_tick(arm) == wanted | {"dense_equivalent": 80.0, "dense_total": 150.0}
    bars = bytes_over_ticks(arm)
    assert bars is not None
    assert (bars.ticks, bars.width) == ([0.5], 2)
    assert bars.by_kind == {kind: [value] for kind, value in wanted.items()}


def test_table_by_hand(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{kind}{seed}", {"merger.kind": kind, "train.seed": seed}, scored(score))
        for kind, scores in (("signed_ema", (0.5, 0.7)), ("none", (0.4, 0.5)))
        for seed, score in enumerate(scores)
    ]
    write_report(runs, tmp_path / "report.html")
    head, first, second, *settings = Page(tmp_path / "report.html").rows
    cells = dict(zip(head, zip(first, second, strict=True), strict=True))
    assert cells["arm"] == ("merger.kind=signed_ema", "merger.kind=none")
    assert cells["n"] == ("2", "2")
    assert cells["greedy, last"] == ("0.600 ± 0.100", "0.450 ± 0.050")
    assert cells["sampled, last"] == ("-", "-")
    # Differences -0.1 and -0.2: mean -0.15, standard error 0.05, times 12.706.
    assert cells["difference, greedy"] == ("", "-0.150[-0.785, +0.485]")
    assert cells["training bytes"] == ("25.0 %", "25.0 %")  # 40 of 160
    assert cells["all traffic"] == ("30.0 %", "30.0 %")  # 90 of 300
    assert cells["seconds a tick"][0] == "1.500 ± 0.000"
    assert settings[0] == ["arm", "seeds", "ticks", "merger.kind"]
    assert settings[2] == ["merger.kind=none", "0, 1", "2", "none"]


def test_best_counts_the_validation_before_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", rows=scored(0.5))
    (run / "summary.json").write_text(json.dumps({"status": "finished", "val/score": {"first": 0.9, "last": 0.5}}))
    write_report([run], tmp_path / "report.html")
    cells = dict(zip(*Page(tmp_path / "report.html").rows[:2], strict=True))
    assert (cells["greedy, last"], cells["greedy, best"]) == ("0.500", "0.900")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;$\\frac{"


def test_hostile_names_and_values_are_text(tmp_path: Path) -> None:
    folder = HOSTILE.replace("/", "\u2215")  # a folder's name cannot hold a slash
    runs = [
        write_run(tmp_path / "sweep" / folder / "seed0", {"data.prompt_template": HOSTILE}, scored(0.5)),
        write_run(tmp_path / "sweep" / "_$x^" / "seed0", {HOSTILE: HOSTILE, "train.seed": HOSTILE}, scored(0.5)),
    ]
    for run in runs:
        (run / "summary.json").write_text(json.dumps({"status": HOSTILE}))
    written = write_report([tmp_path / "sweep"], tmp_path / "report.html")
    page = Page(written[0])
    assert len(page.scripts) == 3
    assert "img" not in page.tags
    assert page.links == []
    assert [arm["name"] for arm in page.data["arms"]] == [folder, "_$x^"]
    assert page.rows[1][0] == folder
    assert HOSTILE in page.text
    assert [path.suffix for path in written] == [".html", ".png", ".png"]  # learning and bytes


@pytest.mark.parametrize(
    ("rows", "tail", "words"),
    [
        ([], "", "no tick recorded yet; running, 0 ticks"),
        ([], '{"tick": 0, "val/sc', "No tick has been recorded yet"),
        (scored(0.5)[1:], "", "running, 2 ticks"),
        (scored(0.5), '{"tick": 2, "val/sc', "running, 2 ticks"),
        ([], '{"tick": 0, "val/score": NaN, "policy/kl": Infinity, "boundary/bytes_fast": null}\n', "1 tick"),
        ([], '{"tick": 0, "val/score": "0.9", "policy/kl": [1], "time/step": true}\n', "1 tick"),
        ([], f'{{"tick": 0, "policy/kl": {"9" * 400}}}\n', "1 tick"),
        (scored(0.5), '[1]\nnull\n{"tick": "x"}\n', "3 lines of metrics.jsonl left out"),
    ],
)
def test_runs_that_are_not_whole_are_reported_with_a_word(rows: Rows, tail: str, words: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", rows=rows, tail=tail)
    page = Page(write_report([run], tmp_path / "report.html")[0])
    assert words in page.text
    assert [cell for cell in page.rows[1] if "nan" in cell] == []
    assert page.rows[1][2] == ("0.500" if rows else "-")  # the last greedy validation


def test_a_run_without_any_metrics_beside_a_whole_one(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "a", rows=scored(0.5))
    bare = write_run(tmp_path / "b", {"anchor.delay": 1})
    (bare / "metrics.jsonl").unlink()
    (bare / "summary.json").write_text("[")
    page = Page(write_report([whole, bare], tmp_path / "report.html")[0])
    assert "anchor.delay=1, seed 0: no tick recorded yet" in page.text
    assert page.rows[2][:3] == ["anchor.delay=1", "1", "-"]
    assert [plot["type"] for plot in page.data["plots"]] == ["curves", "arms", "ticks"]


def test_written_files_are_a_page_alone_and_figures(tmp_path: Path) -> None:
    rows = [dict(row) | {"policy/clip_frac": 0.0, "anchor/age": 5.0} for row in scored(0.5)]
    written = write_report([write_run(tmp_path / "a", rows=rows)], tmp_path / "new/k5.html")
    names = ["k5.html", "k5-learning.png", "k5-telemetry.png", "k5-bytes.png", "k5-anchor.png"]
    assert [path.name for path in written] == names
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in written[1:])
    page = Page(written[0])
    assert page.links == []
    assert "plotly.js" in page.scripts[1][:200]
    assert "anchor.cadence=5" in page.text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "run: is not a directory; give"),
        (lambda path: path.write_text(""), "run: is not a directory; give"),
        (lambda path: path.mkdir(), "run: holds neither a run (config.yaml) nor a sweep"),
        (lambda path: (write_run(path) / "config.yaml").write_text("{"), "run: config.yaml cannot be read"),
        (lambda path: (write_run(path) / "config.yaml").write_text("[1]"), "holds no sections"),
        (lambda path: (write_run(path) / "config.yaml").write_text("a: {b: &x [*x]}"), "config.yaml cannot be read"),
    ],
)
def test_what_is_no_run_is_refused_by_name(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"; (give|restore)") as refused:
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert words in str(refused.value)
    assert not (tmp_path / "report.html").exists()


def test_every_wrong_path_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]


@pytest.mark.parametrize("out", ["taken", "file/report.html"])
def test_an_out_that_cannot_be_written_is_refused(out: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"--out=.*{out}: .*; give"):
        write_report([write_run(tmp_path / "run", rows=scored(0.5))], tmp_path / out)


def test_panels_show_metrics_that_exist() -> None:
    keys = {panel.key for panels in PANELS.values() for panel in panels}
    assert keys <= set(METRIC_KEYS)


def test_import_loads_no_engine_and_no_drawing(tmp_path: Path) -> None:
    code = "import sys\nfrom megatron_grpo.report import write_report\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "megatron", "deepspeed", "matplotlib", "plotly"} & set(result.stdout.split())
