"""The limits by hand."""

import pytest

from megatron_grpo.config import TrainConfig
from megatron_grpo.training.brakes import Brakes

Rows = list[dict[str, float]]


def stops(rows: Rows, **limits: float) -> list[str | None]:
    brakes = Brakes(TrainConfig(**limits))  # type: ignore[arg-type]
    return [brakes.update({"tick": tick} | row).stop for tick, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("limits", "key", "values", "stopped", "sentence"),
    [
        (
            {"stop_gap": 0.1},
            "rollout/logprob_gap",
            [0.02, 0.1, 0.11],
            [False, False, True],
            "the log-prob gap 0.11 nats at tick 2 is above train.stop_gap=0.1",
        ),
        (
            {"stop_grad_norm": 5.0},
            "policy/grad_norm",
            [1.0, 50.0, 2.0],
            [False, True, False],
            "the gradient norm 50 at tick 1 is above train.stop_grad_norm=5.0",
        ),
        (
            {"stop_skipped": 2},
            "train/skipped",
            [1, 1, 2, 3, 4],
            [False, False, False, True, True],
            "the loss or its gradient was not finite in 2 ticks up to 3 in a row: train.stop_skipped=2",
        ),
        (
            {"stop_length_growth": 2.0},
            "rollout/response_length",
            [10.0, 19.0, 20.0, 25.0],
            [False, False, False, True],
            "responses of 25.0 tokens at tick 3 are 2.5 times as long as the first step's: "
            "above train.stop_length_growth=2.0",
        ),
    ],
)
def test_each_limit(
    limits: dict[str, float], key: str, values: list[float], stopped: list[bool], sentence: str
) -> None:
    """Case C16 is the first."""
    rows: Rows = [{key: value} for value in values]
    said = stops(rows, **limits)
    assert [stop is not None for stop in said] == stopped
    assert next(filter(None, said)) == sentence
    if limits:
        assert stops(rows) == [None] * len(rows)  # without a limit nothing stops


def test_rows_without_a_steps_keys_are_nothing_to_judge() -> None:
    rows: Rows = [{"train/skipped": 0}, {"train/skipped": 0, "rollout/response_length": 4.0}, {"train/skipped": 0}]
    everything = {"stop_gap": 0.1, "stop_grad_norm": 1.0, "stop_skipped": 1, "stop_length_growth": 1.5}
    assert stops(rows, **everything) == [None] * 3


def test_a_resumed_run_remembers_the_first_length_and_what_was_skipped() -> None:
    cfg = TrainConfig(stop_length_growth=2.0, stop_skipped=2)
    before, after = Brakes(cfg), Brakes(cfg)
    before.update({"tick": 0, "rollout/response_length": 10.0, "train/skipped": 1})
    after.load_state_dict(before.state_dict())
    assert "2.1 times" in str(after.update({"tick": 1, "rollout/response_length": 21.0, "train/skipped": 1}).stop)
    again = Brakes(cfg)
    again.load_state_dict(before.state_dict())
    assert "in 2 ticks up to 1 in a row" in str(again.update({"tick": 1, "train/skipped": 2}).stop)


def test_a14_a_reward_that_reads_nothing_is_said_once() -> None:
    brakes = Brakes(TrainConfig())
    shares = [0.5, 0.95, 1.0, 0.2, 1.0]
    said = [brakes.update({"tick": tick, "reward/parse_fail_frac": share}).notice for tick, share in enumerate(shares)]
    assert [notice is not None for notice in said] == [False, True, False, False, True]
    assert str(said[1]).startswith("no answer could be read in 95% of the responses at tick 1: see that reward.kind")


def test_responses_without_a_score_are_said_when_they_begin() -> None:
    brakes = Brakes(TrainConfig())
    rows = [{"reward/parse_fail_frac": 0.0, "reward/unscored_frac": share} for share in (0.0, 0.125, 0.5, 0.0, 0.25)]
    said = [brakes.update({"tick": tick} | row).notice for tick, row in enumerate(rows)]
    assert [notice is not None for notice in said] == [False, True, False, False, True]
    assert str(said[1]).startswith("12.5% of the responses at tick 1 have no score and are left out")
