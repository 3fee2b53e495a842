"""The collapse alarm: its score by hand, what it does to M's weight, and recorded runs.

``tests/data/alarm`` holds columns of metrics.jsonl, one value a tick, of runs of 70 steps on the tiny task (two stages,
rank 5 of 96, lr 5e-5), named by cadence = delay and what else differs: ``a5`` alpha 0.5, ``d8`` decay 0.8, ``agree``
the agreement gate, ``codec20`` no merger; ``s1`` and ``s2`` are seeds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.anchor.alarm import Alarm, AlarmState
from megatron_grpo.config import AnchorConfig, MergerConfig

Row = dict[str, float | None]
RECORDED = Path(__file__).parents[1] / "data/alarm"
COLLAPSED = ("k20_s1", "k20_s2", "k50_s1", "k50_s2")
SLOWLY = ("k10_s1", "k20_a5_s1")
HEALTHY = (
    *("dense_s1", "codec20_s1", "k5_s1", "k5_s2", "k20_a75_s1", "k50_a8_s1"),
    *("k20_d8_s1", "k20_d9_s1", "k50_d8_s1", "k20_agree_s1"),
)


def rows_of(ticks: int, cadence: int, weight: float, agreement: float = 0.5) -> list[Row]:
    """A run with C = K = ``cadence``, held at one weight: M arrives at tick C and every C ticks after."""
    rows: list[Row] = []
    for tick in range(ticks):
        row: Row = {"tick": tick, "merger/weight": 0.0}
        if tick >= cadence:
            row |= {"anchor/age": cadence + tick % cadence, "merger/weight": weight, "anchor/sign_agreement": agreement}
        rows.append(row)
    return rows


def alarm_of(cadence: int, alarm: str = "warn", **merger: Any) -> Alarm:
    return Alarm(
        AnchorConfig.model_validate({"enabled": True, "cadence": cadence, "delay": cadence, "alarm": alarm}),
        MergerConfig.model_validate({"alpha": 0.25} | merger),
    )


def states(alarm: Alarm, rows: list[Row]) -> list[AlarmState]:
    return [alarm.update(row) for row in rows]


def test_without_an_anchor_there_is_nothing_to_warn_of() -> None:
    alarm = Alarm(AnchorConfig(enabled=False, cadence=20, delay=20, alarm="stop"), MergerConfig(alpha=0.25))
    rows: list[Row] = [{"tick": tick, "rollout/response_length": 5.0 + tick} for tick in range(60)]
    assert all(state.score == 0.0 and not state.fired for state in states(alarm, rows))


def test_score_by_hand() -> None:
    """C = K = 20, weight 3/4, chance agreement, limit 4.5: eight ticks of M, 9/16 each, fill it, the last at tick 27.

    Seen 25 ticks ahead that is tick 2. From tick 14 on the whole hold, 20 x 9/16 by tick 39, lies ahead or behind.
    """
    seen = states(alarm_of(20), rows_of(60, 20, 0.75))
    assert [state.score for state in seen[:4]] == pytest.approx([6 / 8, 7 / 8, 1.0, 9 / 8])
    assert [state.score for state in seen[14:]] == pytest.approx([2.5] * 46)
    assert [state.fired for state in seen] == [False] * 2 + [True] * 58
    assert [state.notice is not None for state in seen] == [False] * 2 + [True] + [False] * 57
    notice = seen[2].notice
    assert notice is not None and "tick 2" in notice and "merger.decay=0.8" in notice


@pytest.mark.parametrize(
    ("cadence", "weight", "agreement", "merger", "score"),
    [
        (5, 0.75, 0.5, {}, 5 / 8),
        (50, 0.1, 0.5, {"alpha": 0.9}, 50 * 0.01 / 4.5),
        (20, 0.5, 0.75, {"alpha": 0.5}, 20 * 0.25 / 4.5),  # chance was assumed before M came
        (20, 0.0, 0.5, {"kind": "none"}, 0.0),
        (20, 0.0, 0.5, {"alpha": 1.0}, 0.0),
    ],
)
def test_largest_score_of_a_run(
    cadence: int, weight: float, agreement: float, merger: dict[str, Any], score: float
) -> None:
    seen = states(alarm_of(cadence, **merger), rows_of(200, cadence, weight, agreement))
    assert max(state.score for state in seen) == pytest.approx(score)
    # Measured agreement counts in the end: 1 - 0.75 is half of what chance gives.
    assert seen[-1].score == pytest.approx(score * min(1.0, 2.0 * (1.0 - agreement)), rel=1e-3)


def test_a_decaying_weight_adds_up_to_a_geometric_sum() -> None:
    """0.75^2 (1 + 0.64 + ...) = 1.5625, below the limit however long M is held."""
    alarm = alarm_of(50, decay=0.8)
    rows = rows_of(100, 50, 0.75)
    for row in rows[50:]:
        row["merger/weight"] = 0.75 * 0.8 ** (int(row["anchor/age"] or 0) - 50)
    seen = states(alarm, rows)
    assert max(state.score for state in seen) == pytest.approx(1.5625 * (1 - 0.64**50) / 4.5)
    assert not any(state.fired for state in seen)


def test_an_anchor_that_never_learns_leaves_the_old_pattern_in_force() -> None:
    """C = 5 is harmless unless a fire is lost: at tick 10 M has been used six times, with four to come, not 1 and 4."""
    rows = rows_of(20, 5, 0.75)
    for row in rows[10:]:
        row["anchor/age"] = 5 + (row["tick"] or 0) - 5
    seen = states(alarm_of(5), rows)
    assert [state.score for state in seen[:11]] == pytest.approx([5 / 8] * 10 + [10 / 8])


def test_symptoms_raise_a_score_by_half_at_most() -> None:
    """Ten steps: the mean length of the last five is 25 % above that of the five before; then it is 10 times that."""
    rows = rows_of(10, 5, 0.75)
    plain = states(alarm_of(5), rows)[-1].score
    for growth, factor in ((1.25, 1.5), (1.125, 1.25), (10.0, 1.5), (0.5, 1.0)):
        for row in rows:
            row |= {"rollout/response_length": 8.0 if row["tick"] < 5 else 8.0 * growth, "rollout/truncated_frac": 0.0}  # type: ignore[operator]  # a tick is a number
        assert states(alarm_of(5), rows)[-1].score == pytest.approx(factor * plain)
    for row in rows:
        row |= {"rollout/response_length": 8.0, "rollout/truncated_frac": 0.0 if row["tick"] < 5 else 0.025}  # type: ignore[operator]
    assert states(alarm_of(5), rows)[-1].score == pytest.approx(1.25 * plain)


def test_adapt_lowers_the_weight_while_it_stands_and_raises_it_after() -> None:
    alarm = alarm_of(20, "adapt")
    factors: list[float] = []
    stands: list[bool] = []
    for row in rows_of(80, 20, 0.75)[:3]:
        alarm.update(row)
    assert alarm.factor == 0.8  # the alarm went off at tick 2
    for tick in range(3, 200):
        now: Row = {"tick": tick, "merger/weight": 0.0}
        if tick >= 20:
            now |= {"anchor/age": 20 + tick % 20, "merger/weight": 0.75 * alarm.factor, "anchor/sign_agreement": 0.5}
        before = alarm.factor
        stands.append(alarm.update(now).fired)
        factors.append(alarm.factor)
        assert alarm.factor == pytest.approx(before * 0.8 if stands[-1] else min(1.0, before * 1.02))
    assert True in stands and False in stands
    # Whatever the weight was in any 20 ticks, it never added up to what the alarm allows by much.
    squares = [(0.75 * factor) ** 2 for factor in factors[17:]]
    assert max(sum(squares[start : start + 20]) for start in range(len(squares) - 20)) < 1.2 * 4.5


@pytest.mark.parametrize("alarm", ["off", "warn", "stop"])
def test_only_adapt_touches_the_weight(alarm: str) -> None:
    watching = alarm_of(20, alarm)
    assert any(state.fired for state in states(watching, rows_of(60, 20, 0.75)))
    assert watching.factor == 1.0


def recorded(name: str) -> tuple[list[Row], AnchorConfig, MergerConfig]:
    run = json.loads((RECORDED / f"{name}.json").read_text())
    columns = run["columns"]
    rows: list[Row] = [
        {"tick": tick} | {key: column[tick] for key, column in columns.items() if column[tick] is not None}
        for tick in range(len(columns["merger/weight"] if "merger/weight" in columns else columns["val/score"]))
    ]
    anchored = any(row.get("anchor/age") is not None for row in rows)
    return rows, AnchorConfig(**run["anchor"] | {"enabled": anchored}), MergerConfig(**run["merger"])


def first_drop(rows: list[Row], key: str) -> int | None:
    """The first tick at which the validation is 0.10 below its best so far."""
    best = 0.0
    for row in rows:
        score = row.get(key)
        if score is not None:
            best = max(best, score)
            if score <= best - 0.10 + 1e-9:
                return int(row["tick"] or 0)
    return None


@pytest.mark.parametrize("name", COLLAPSED)
def test_fires_twenty_ticks_before_a_collapse(name: str) -> None:
    rows, anchor, merger = recorded(name)
    alarm = Alarm(anchor, merger)
    first = next(int(row["tick"] or 0) for row in rows if alarm.update(row).fired)
    for key in ("val/score", "val/score_sampled"):
        drop = first_drop(rows, key)
        assert drop is not None and first <= drop - 20


@pytest.mark.parametrize("name", HEALTHY)
def test_keeps_quiet_in_runs_without_a_stale_pattern(name: str) -> None:
    rows, anchor, merger = recorded(name)
    assert not any(state.fired for state in states(Alarm(anchor, merger), rows))


def held_too_long(rows: list[Row], anchor: AnchorConfig) -> float:
    """The trivial rule, continuous: the most ticks that M was held."""
    ages = [age for row in rows if (age := row.get("anchor/age")) is not None]
    return max(ages, default=anchor.delay) - anchor.delay


def pairs(scores: list[float], others: list[float]) -> Iterator[float]:
    for high in scores:
        for low in others:
            yield 1.0 if high > low else 0.5 if high == low else 0.0


def test_it_tells_runs_apart_better_than_the_time_that_m_was_held() -> None:
    """AUC over runs, from what was known by tick 39: before or at the first sign of any collapse recorded here."""
    scores: dict[str, tuple[float, float]] = {}
    for name in COLLAPSED + SLOWLY + HEALTHY:
        rows, anchor, merger = recorded(name)
        early = rows[:40]
        scores[name] = (max(s.score for s in states(Alarm(anchor, merger), early)), held_too_long(early, anchor))
    auc = []
    for rule in (0, 1):
        wins = list(pairs([scores[n][rule] for n in COLLAPSED + SLOWLY], [scores[n][rule] for n in HEALTHY]))
        auc.append(sum(wins) / len(wins))
    assert auc[0] == 1.0
    assert auc[1] < 0.8


def test_resume_goes_on_where_the_checkpoint_was() -> None:
    rows, anchor, merger = recorded("k20_s1")
    anchor = anchor.model_copy(update={"alarm": "adapt"})
    whole, first, second = Alarm(anchor, merger), Alarm(anchor, merger), Alarm(anchor, merger)
    expected = states(whole, rows)
    states(first, rows[:47])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert states(second, rows[47:]) == expected[47:]
    assert second.factor == whole.factor != 1.0
