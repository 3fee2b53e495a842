"""Sweeps without training: the file, the statistics, which runs are started, kept, refused and reported."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config import Config, ConfigError, load_config, write_resolved
from megatron_grpo.launch import local
from megatron_grpo.report.stats import student_quantile
from megatron_grpo.sweep import room, runner
from megatron_grpo.sweep.folder import changed_keys, is_finished, locked
from megatron_grpo.sweep.results import row_metrics, run_metrics, spread, sweep_results
from megatron_grpo.sweep.runner import Runner
from megatron_grpo.sweep.spec import Sweep, load_sweep
from megatron_grpo.sweep.view import Lines, Standing, arms_table
from tests.contracts.test_imports import ENGINES, loaded_after
from tests.unit.test_config import home

__all__ = ["home"]

ARMS = """\
base: run.yaml
seeds: [0, 1]
arms:
  k5: {}
  k20: {anchor.cadence: 20, optim.lr: 1e-6}
"""


def sweep_of(home: Path, text: str = ARMS, name: str = "arms.yaml") -> Sweep:
    (home / name).write_text(text)
    return load_sweep(home / name)


def refused(home: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sweep_of(home, text)
    return str(caught.value).splitlines()


class TestFile:
    def test_arms_and_seeds_in_the_order_they_run(self, home: Path) -> None:
        sweep = sweep_of(home)
        assert sweep.name == "arms"
        assert [run.name for run in sweep.runs] == ["k5/seed0", "k20/seed0", "k5/seed1", "k20/seed1"]
        cadences = {(run.arm, run.cfg.train.seed): (run.cfg.anchor.cadence, run.cfg.optim.lr) for run in sweep.runs}
        assert cadences == {
            ("k5", 0): (5, 5e-5),
            ("k5", 1): (5, 5e-5),
            ("k20", 0): (20, 1e-6),
            ("k20", 1): (20, 1e-6),
        }

    def test_long_form_has_its_own_seeds_and_base(self, home: Path) -> None:
        (home / "other.yaml").write_text("model: {path: model}\nanchor: {cadence: 7}\n")
        asks = "{data.task: 'reasoning_gym:chain_sum', data.prompt_template: 'a: {question}'}"
        text = ARMS + f"  own: {{set: {asks}, seeds: [4], base: other.yaml}}\n"
        own = sweep_of(home, text, "sweep.yaml")
        assert own.name == home.name
        (run,) = own.arms[-1].runs
        assert (run.name, run.cfg.anchor.cadence, run.cfg.train.seed) == ("own/seed4", 7, 4)
        assert run.cfg.data.prompt_template == "a: {question}"

    def test_every_error_of_every_arm_at_once(self, home: Path) -> None:
        text = ARMS + "  big: {boundary.rank: 900}\n  big2: {boundary.rank: 900}\n  odd: {anchor.cadense: 5}\n"
        text += "  s: {train.seed: 3}\n  again: {anchor.cadence: 5}\n  a/b: {anchor.cadence: 6}\nreference: dense\n"
        assert refused(home, text) == [
            "arms.a/b: cannot name a folder; start with a letter or digit and use letters, digits and . _ + -",
            "reference=dense: is no arm; use one of k5, k20, big, big2, odd, s, again, a/b",
            "arm big, big2: boundary.rank=900 exceeds hidden size 96; use at most 96",
            "arm odd: anchor.cadense=5: unknown key; did you mean anchor.cadence",
            "arm s: train.seed=3: is set by the sweep; use seeds",
            "arms k5, again: resolve to the same config; keep one, or change an override",
        ]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("base: run.yaml\nseeds: [0]\n", "arms: is missing; a sweep needs base, seeds and arms"),
            ("[1]\n", "holds no keys; write base, seeds and arms"),
            (ARMS + "sed: 1\n", "sed: unknown key; a sweep has base, seeds, reference, arms"),
            (ARMS.replace("[0, 1]", "[0, -1]"), "seeds.1=-1: must be at least 0; use 0 or more"),
            (ARMS.replace("[0, 1]", "[]"), "seeds=[]: is empty; name at least one"),
            (ARMS.replace("[0, 1]", "[2, 2]"), "seeds=[2, 2]: has a seed twice; keep one"),
            (ARMS + "  k5: {}\n", "k5: is given twice"),
            (ARMS + "  20: {}\n", "arms.20.[key]=20: must be text; put it in quotes"),
            (
                ARMS + "  x: {seeds: [1], boundary.rank: 4}\n",
                "arms.x.boundary.rank: unknown key; an arm has set, seeds, base; put overrides below set",
            ),
            (ARMS.replace("run.yaml", "none.yaml"), "arm k5, k20: config="),
        ],
    )
    def test_wrong_form_in_words(self, home: Path, text: str, line: str) -> None:
        assert any(line in said for said in refused(home, text))


class TestStatistics:
    def test_spread_by_hand(self) -> None:
        # Mean 3; squares 4 + 1 + 0 + 9 = 14, over n - 1 = 3, over n = 4.
        four = spread([1.0, 2.0, None, 3.0, 6.0])
        assert (four["mean"], four["n"], four["values"]) == (3.0, 4, [1.0, 2.0, None, 3.0, 6.0])
        assert four["stderr"] == pytest.approx(math.sqrt(14 / 12))
        assert spread([0.5]) == {"mean": 0.5, "stderr": None, "n": 1, "values": [0.5]}

    @pytest.mark.parametrize(
        ("freedom", "printed"),
        [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (120, 1.980)],
    )
    def test_t_quantile_as_in_printed_tables(self, freedom: int, printed: float) -> None:
        assert student_quantile(freedom) == pytest.approx(printed, abs=6e-4)

    def test_rows(self) -> None:
        rows: list[dict[str, float | None]] = [
            {"tick": tick, "policy/clip_frac": tick / 100, "rollout/response_length": float(tick)} for tick in range(20)
        ]
        for tick, score in ((3, 0.1), (7, 0.2), (11, 0.4), (15, None), (19, 0.9)):
            rows[tick]["val/score"] = score
        rows[4] |= {"merger/weight": 0.5, "rollout/truncated_frac": 1.0}
        rows[9] |= {"merger/weight": 0.0}
        assert row_metrics(rows) == pytest.approx(
            {
                "val/score/last3": 0.5,  # .2, .4 and .9: a validation without a value is none
                "merger/weight/mean": 0.25,
                "policy/clip_frac/max": 0.19,
                "rollout/response_length/last_tenth": 18.5,  # ticks 18 and 19; tick 4 is too early for truncation
            }
        )
        assert row_metrics([]) == {}

    def test_a_run_gives_the_numbers_of_its_summary(self, tmp_path: Path) -> None:
        write_run(tmp_path, {"val/score": {"first": 0.1, "last": 0.4}, "training_share": None, "peak_memory_mb": [5.0]})
        assert run_metrics(tmp_path) == {"val/score/first": 0.1, "val/score/last": 0.4, "val/score/last3": 0.4}

    def test_differences_are_paired_by_seed(self, home: Path) -> None:
        sweep = sweep_of(home, ARMS.replace("[0, 1]", "[0, 1, 2, 3]") + "reference: k5\n")
        scores = {"k5": [0.5, 0.6, 0.9, 0.1], "k20": [0.4, 0.4, 0.6]}  # the last seed of k20 is not there yet
        finished = {
            f"{arm}/seed{seed}": {"s": value} for arm, each in scores.items() for seed, value in enumerate(each)
        }
        results = sweep_results(sweep, finished)
        assert results["arms"]["k20"]["seeds"] == [0, 1, 2]
        assert results["arms"]["k20"]["planned"] == [0, 1, 2, 3]
        assert results["arms"]["k20"]["runs"] == ["k20/seed0", "k20/seed1", "k20/seed2"]
        assert results["arms"]["k20"]["overrides"] == {"anchor.cadence": 20, "optim.lr": 1e-6}
        assert results["arms"]["k20"]["metrics"]["s"]["mean"] == pytest.approx(1.4 / 3)
        assert set(results["paired"]) == {"k20"}
        difference = results["paired"]["k20"]["metrics"]["s"]  # -.1, -.2, -.3: deviation .1
        assert difference["mean"] == pytest.approx(-0.2)
        assert difference["n"] == 3
        assert difference["stderr"] == pytest.approx(0.1 / math.sqrt(3))
        assert difference["interval"] == pytest.approx([-0.2 - 4.3027 * 0.057735, -0.2 + 4.3027 * 0.057735], abs=1e-5)
        json.dumps(results, allow_nan=False)

    def test_one_pair_has_no_interval(self, home: Path) -> None:
        results = sweep_results(
            sweep_of(home, ARMS + "reference: k5\n"), {"k5/seed1": {"s": 1.0}, "k20/seed1": {"s": 3.0}}
        )
        assert results["paired"]["k20"] == {
            "seeds": [1],
            "metrics": {"s": {"mean": 2.0, "stderr": None, "n": 1, "values": [2.0], "interval": None}},
        }


def write_run(run_dir: Path, summary: Mapping[str, Any], score: float = 0.4, status: str = "finished") -> None:
    """What a run leaves behind, in short."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").write_text(json.dumps({"status": status, **summary}))
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 0, "tick": 0, "val/score": score}) + "\n")


@dataclass
class FakeChild:
    """A run that ends at its nth look, with a code; on success it leaves what a run leaves."""

    run_dir: Path
    looks: int
    exit_code: int
    stopped: int = 0
    killed: bool = False

    def code(self) -> int | None:
        self.looks -= 1
        if self.killed or self.looks < 0:
            if self.exit_code == 0:
                write_run(self.run_dir, {})
            return -9 if self.killed else self.exit_code
        return None

    def stop(self) -> None:
        self.stopped += 1

    def kill(self) -> None:
        self.killed = True


@dataclass
class FakeStarter:
    codes: dict[str, int] = field(default_factory=dict)
    looks: int = 0
    children: dict[str, FakeChild] = field(default_factory=dict)
    at_once: int = 0

    def __call__(self, cfg: Config, run_dir: Path, gpus: Sequence[int]) -> FakeChild:
        name = f"{run_dir.parent.name}/{run_dir.name}"
        run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(cfg, run_dir / "config.yaml")
        child = self.children[name] = FakeChild(run_dir, self.looks, self.codes.get(name, 0))
        self.at_once = max(self.at_once, sum(each.looks >= 0 for each in self.children.values()))
        return child


class Signals(list[int]):
    """The list of signals received: as long, look by look, as it is told, and then as at the last look."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = list(lengths)

    def __len__(self) -> int:
        return self._lengths.pop(0) if len(self._lengths) > 1 else self._lengths[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.0)


def run_all(
    sweep: Sweep, folder: Path, starter: FakeStarter, jobs: int | None = 1, received: Sequence[int] = ()
) -> tuple[Runner, list[str]]:
    """The runner after its work, and the lines it said."""
    folder.mkdir(exist_ok=True)
    ran = Runner(sweep, folder, sweep.runs, starter, jobs)
    with (folder / "said").open("w") as said:
        ran.run(Lines(said), received)
    return ran, (folder / "said").read_text().splitlines()


@pytest.mark.usefixtures("quick")
class TestRunner:
    def test_a_failed_run_stops_no_other_and_is_tried_again(self, home: Path) -> None:
        sweep, folder = sweep_of(home), home / "out"
        starter = FakeStarter(codes={"k20/seed0": 1})
        ran, said = run_all(sweep, folder, starter)
        assert list(starter.children) == ["k5/seed0", "k20/seed0", "k5/seed1", "k20/seed1"]
        assert ran.failed == {"k20/seed0": 1}
        assert [line.split("  ")[0] for line in said] == [
            "k5/seed0 finished",
            "k20/seed0 FAILED, exit code 1",
            "k5/seed1 finished",
            "k20/seed1 finished",
        ]
        results = json.loads((folder / "results.json").read_text())
        assert results["arms"]["k20"]["seeds"] == [1]
        assert results["arms"]["k5"]["metrics"]["val/score/last3"]["mean"] == 0.4

        again = FakeStarter()
        ran, _ = run_all(sweep, folder, again)
        assert list(again.children) == ["k20/seed0"]
        assert ran.failed == {}
        assert json.loads((folder / "results.json").read_text())["arms"]["k20"]["seeds"] == [0, 1]

    def test_a_run_that_ends_well_but_left_no_summary_failed(self, home: Path) -> None:
        class Silent(FakeStarter):
            def __call__(self, cfg: Config, run_dir: Path, gpus: Sequence[int]) -> FakeChild:
                child = super().__call__(cfg, run_dir, gpus)
                child.run_dir = home / "elsewhere"
                return child

        ran, _ = run_all(sweep_of(home), home / "out", Silent())
        assert ran.failed == dict.fromkeys(["k5/seed0", "k20/seed0", "k5/seed1", "k20/seed1"], 1)

    @pytest.mark.parametrize(("jobs", "at_once"), [(1, 1), (3, 3), (None, 2)])
    def test_as_many_at_once_as_asked(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, jobs: int | None, at_once: int
    ) -> None:
        monkeypatch.setattr(room, "cores", lambda: 5)  # runs of two ranks
        starter = FakeStarter(looks=3)
        run_all(sweep_of(home), home / "out", starter, jobs)
        assert starter.at_once == at_once
        assert len(starter.children) == 4

    def test_a_signal_stops_the_running_and_starts_no_more(self, home: Path) -> None:
        starter = FakeStarter(codes={"k20/seed0": 143}, looks=6)
        ran, _ = run_all(sweep_of(home), home / "out", starter, 2, Signals(0, 0, 1))
        assert {name: (child.stopped, child.killed) for name, child in starter.children.items()} == {
            "k5/seed0": (1, False),
            "k20/seed0": (1, False),
        }
        assert ran.failed == {}
        assert ran.results["arms"]["k5"]["seeds"] == [0]  # it finished while the other was waited for

    def test_a_second_signal_kills(self, home: Path) -> None:
        starter = FakeStarter(looks=10**6)
        ran, _ = run_all(sweep_of(home), home / "out", starter, 1, Signals(0, 1, 1, 2))
        assert starter.children["k5/seed0"].killed
        assert ran.failed == {}


@pytest.fixture
def in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sweep of ARMS, finished in ``out``; nothing real can be started."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    monkeypatch.setattr(runner, "require_engines", lambda: None)
    run_all(sweep_of(home), home / "out", FakeStarter())
    monkeypatch.setattr(runner, "ForkedRun", FakeStarter())
    yield home


class TestFolder:
    def test_a_changed_config_is_refused_by_name(self, in_home: Path) -> None:
        (in_home / "arms.yaml").write_text(ARMS.replace("cadence: 20", "cadence: 10"))
        with pytest.raises(ConfigError) as caught:
            runner.run_sweep(in_home / "arms.yaml", out=in_home / "out")
        lines = str(caught.value).splitlines()
        assert len(lines) == 2
        assert lines[0].startswith(f"{in_home}/out/k20/seed0: was made with another config (anchor.cadence=20, now 10)")
        assert "--fresh k20" in lines[0]

    def test_fresh_starts_that_arm_alone_anew(self, in_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (in_home / "arms.yaml").write_text(ARMS.replace("cadence: 20", "cadence: 10"))
        (in_home / "out/k20/seed1/old").touch()
        assert runner.run_sweep(in_home / "arms.yaml", out=in_home / "out", fresh=["k20"]) == 0
        assert not (in_home / "out/k20/seed1/old").exists()
        assert list(runner.ForkedRun.children) == ["k20/seed0", "k20/seed1"]  # type: ignore[attr-defined]  # the fake
        now = ["anchor.cadence=10", "optim.lr=1e-6", "train.seed=1"]
        assert changed_keys(in_home / "out/k20/seed1", load_config(in_home / "run.yaml", now)) == ""
        assert "arms: 4/4 runs" in capsys.readouterr().out

    def test_only_leaves_the_other_arms_alone(self, in_home: Path) -> None:
        (in_home / "arms.yaml").write_text(ARMS.replace("cadence: 20", "cadence: 10"))
        assert runner.run_sweep(in_home / "arms.yaml", out=in_home / "out", only=["k5"]) == 0
        results = json.loads((in_home / "out/results.json").read_text())
        assert (results["arms"]["k5"]["n"], results["arms"]["k20"]["n"]) == (2, 0)

    def test_a_failure_shows_the_end_of_its_console(
        self, in_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(runner, "ForkedRun", FakeStarter(codes={"k5/seed0": 1}))
        (in_home / "out/k5/seed0/summary.json").unlink()
        (in_home / "out/k5/seed0/console.txt").write_text("".join(f"line {number}\n" for number in range(40)))
        assert runner.run_sweep(in_home / "arms.yaml", out=in_home / "out") == 1
        error = capsys.readouterr().err
        assert "k5/seed0 failed with exit code 1" in error
        assert "line 39" in error and "line 25" in error and "line 24" not in error

    def test_unknown_arms_and_a_launcher_are_refused(self, in_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match=r"--only=x: is no arm of this sweep; use k5, k20\n--fresh=y"):
            runner.run_sweep(in_home / "arms.yaml", out=in_home / "out", only=["k5", "x"], fresh=["y"])
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError, match="without a launcher"):
            runner.run_sweep(in_home / "arms.yaml", out=in_home / "out")

    def test_a_folder_takes_one_sweep_at_a_time(self, tmp_path: Path) -> None:
        with (
            locked(tmp_path / "out"),
            pytest.raises(ConfigError, match="another sweep is running"),
            locked(tmp_path / "out"),
        ):
            pass
        with locked(tmp_path / "out"):
            pass

    @pytest.mark.parametrize(
        ("status", "finished"), [("finished", True), ("stopped_by_alarm", True), ("stopped", False)]
    )
    def test_which_runs_are_done(self, tmp_path: Path, status: str, finished: bool) -> None:
        assert not is_finished(tmp_path)
        write_run(tmp_path, {}, status=status)
        assert is_finished(tmp_path) == finished


class TestRoom:
    def test_gpus_are_shared_out(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (local, room):
            monkeypatch.setattr(module, "visible_gpus", lambda: [4, 5, 6])
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        two, one = (load_config(home / "run.yaml", [f"parallel.pipeline={stages}"]) for stages in (2, 1))
        assert room.place(two, [], None) == [4, 5]
        assert room.place(one, [(two, [4, 5])], None) == [6]
        assert room.place(two, [(two, [4, 5])], None) is None
        assert room.place(two, [(two, [4, 5])], 2) == [6, 4]
        assert room.place(load_config(home / "run.yaml", ["parallel.backend=gloo"]), [], None) == []

    def test_threads_count_as_cores(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "cores", lambda: 6)
        cfg = load_config(home / "run.yaml", ["parallel.threads=2", "parallel.backend=gloo"])
        assert room.place(cfg, [], None) == []
        assert room.place(cfg, [(cfg, [])], None) is None


def test_table_shows_what_is_known(home: Path) -> None:
    sweep = sweep_of(home, ARMS + "reference: k5\n")
    scores = {"val/score/last3": 0.5, "val/score_sampled/last3": 0.25, "training_share": 0.05}
    finished = {"k5/seed0": scores, "k5/seed1": scores | {"val/score/last3": 0.7}, "k20/seed0": scores}
    standing = Standing(total=4, done=3, ticks_left=1, ticks_made=0, running={"k20": "seed 1 50%"}, began=0.0)
    table = arms_table(sweep_results(sweep, finished), standing)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells == [
        ["k5", "k20"],
        ["2/2", "1/2"],
        ["", "seed 1 50%"],
        ["0.600 ± 0.100", "0.500"],
        ["0.250 ± 0.000", "0.250"],
        ["5.0%", "5.0%"],
        ["", "+0.000"],
    ]
    assert str(table.title) == "arms: 3/4 runs, left ?"


def test_importing_a_sweep_loads_no_engine() -> None:
    assert not loaded_after("import megatron_grpo.sweep.runner") & set(ENGINES)
