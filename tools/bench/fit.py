"""The plan's step time against measured steps: a device is fitted on some small runs and others are predicted.

``python tools/bench/step.py --fit`` runs it. Five numbers are fitted, none of which the config knows: operations a
second, seconds a layer and micro-batch in training and in sampling, seconds a pass, seconds a message. Every response
has the same length, so that what is compared is the model of time alone.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.config import Config, load_config
from megatron_grpo.plan import StepTime, predict
from megatron_grpo.plan.sizes import read_shape
from megatron_grpo.plan.traffic import DENSE_BYTES

Row = dict[str, Any]
Train = Callable[[Path, Sequence[str], int, Path], tuple[list[Row], Row]]

COMMON = ["anchor.cadence=1", "anchor.delay=0", "rollout.max_response=6"]
"""An anchor in every tick, and an end that every response reaches before its own."""
FITTED = {
    "one stage": ["parallel.pipeline=1", "boundary.codec=identity"],
    "two stages": [],
    "two stages, micro-batches of 8": ["train.micro_batch=8"],
}
PREDICTED = {
    "two stages, micro-batches of 16": ["train.micro_batch=16"],
    "two stages, half the batch": ["grpo.prompts_per_step=8"],
    "two stages, responses of 3": ["rollout.max_response=3"],
    "one stage, micro-batches of 8": ["parallel.pipeline=1", "boundary.codec=identity", "train.micro_batch=8"],
}
PARTS = {"rollout": "time/rollout", "train": "time/train", "anchor": "time/anchor"}
GOAL = 0.15
STEPS, ROUNDS = 12, 2
NOTHING = {"device_flop_s": 1e30, "overhead_s": 0.0, "decode_overhead_s": 0.0, "pass_overhead_s": 0.0, "latency_s": 0.0}
UNITS = {
    "seconds_per_flop": {"device_flop_s": 1.0},
    "overhead_s": {"overhead_s": 1.0},
    "decode_overhead_s": {"decode_overhead_s": 1.0},
    "pass_overhead_s": {"pass_overhead_s": 1.0},
    "latency_s": {"latency_s": 1.0},
}
"""What is fitted, each as a prediction in which it alone takes time: steps are sums of them, but for who waits."""


def measured_parts(rows: Sequence[Row], minibatches: int) -> dict[str, float]:
    """Seconds of a step by part: the least over steps, since what else the machine does only adds."""
    steps = [rows[start : start + minibatches] for start in range(0, len(rows), minibatches)]
    return {part: min(sum(row.get(key, 0.0) for row in step) for step in steps) for part, key in PARTS.items()}


def predicted_parts(step: StepTime) -> dict[str, float]:
    """The same parts of a prediction."""
    return {"rollout": step.rollout, "train": step.old_logprobs + step.fast, "anchor": step.anchor}


def prediction(config: Config, prompt: float, **device: float) -> dict[str, float]:
    """Seconds by part on local links, prompts being ``prompt`` tokens long."""
    given = NOTHING | device
    return predicted_parts(predict(config, link_bit_s=1e12, prompt_tokens=prompt, **given))


def fit_device(arms: Sequence[tuple[Config, dict[str, float]]], prompt: float) -> dict[str, float]:
    """The numbers of ``UNITS`` by which the predictions come closest, relative to what was measured."""
    rows, ones = [], []
    for config, measured in arms:
        units = [prediction(config, prompt, **unit) for unit in UNITS.values()]
        for part, seconds in measured.items():
            rows.append([unit[part] / seconds for unit in units])
            ones.append(1.0)
    table = np.array(rows)
    scale = table.max(axis=0)  # their sizes are far apart
    solution = least_squares(table / scale, np.array(ones)) / scale
    return dict(zip(UNITS, solution.tolist(), strict=True))


def least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 for which table x is closest to wanted: the best over all choices of which are not 0."""
    width = table.shape[1]
    best, least = np.zeros(width), float(wanted @ wanted)
    for chosen in map(list, chain.from_iterable(combinations(range(width), size) for size in range(1, width + 1))):
        x = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
        left = float(np.square(table[:, chosen] @ x - wanted).sum())
        if (x >= 0).all() and left < least:
            least, best = left, np.zeros(width)
            best[chosen] = x
    return best


def prompt_tokens(rows: Sequence[Row], config: Config) -> float:
    """Mean length of a prompt, from the bytes of a run on two stages whose responses are all as long as they may be."""
    dense = statistics.mean(row["boundary/bytes_dense_equivalent"] for row in rows)
    sequences = config.sequences_per_step / config.grpo.minibatches
    numbers = dense / (2 * DENSE_BYTES) / sequences / read_shape(config).hidden
    return numbers - config.rollout.max_response + 1


def fit_report(train: Train, config_path: Path) -> dict[str, Any]:
    """Measures every arm, fits on some, predicts all; ``error`` is predicted over measured time, less one."""
    runs: dict[str, list[Row]] = {name: [] for name in FITTED | PREDICTED}
    configs = {name: load_config(config_path, [*COMMON, *changes]) for name, changes in (FITTED | PREDICTED).items()}
    for name, changes in [*(FITTED | PREDICTED).items()] * ROUNDS:  # by turns: the machine's other work comes and goes
        with tempfile.TemporaryDirectory() as folder:
            runs[name] += train(config_path, [*COMMON, *changes], STEPS, Path(folder) / "run")[0]
    measured = {name: (config, measured_parts(runs[name], config.grpo.minibatches)) for name, config in configs.items()}
    prompt = prompt_tokens(runs["two stages"], configs["two stages"])
    found = fit_device([measured[name] for name in FITTED], prompt)
    device = {"device_flop_s": 1 / max(found["seconds_per_flop"], 1e-30)}
    device |= {key: found[key] for key in UNITS if key != "seconds_per_flop"}
    arms = {}
    for name, (config, parts) in measured.items():
        guess = prediction(config, prompt, **device)
        whole, expected = sum(parts.values()), sum(guess.values())
        arms[name] = {
            "fitted": name in FITTED,
            "measured_s": parts,
            "predicted_s": guess,
            "error_by_part": {part: guess[part] / parts[part] - 1 for part in parts},
            "error": expected / whole - 1,
        }
    errors = [abs(arms[name]["error"]) for name in PREDICTED]
    goal = {"value": statistics.mean(errors), "goal": GOAL, "met": statistics.mean(errors) <= GOAL}
    return {
        "device": device,
        "prompt_tokens": prompt,
        "arms": arms,
        "worst_error": max(errors),
        "goals": {"mean_error": goal},
    }
