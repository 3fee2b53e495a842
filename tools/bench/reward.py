"""What scoring costs: ``python tools/bench/reward.py [--answers N] [--steps N]``.

Scores answers as models write them, a third of them right, on one core, and prints one JSON object: answers a second
of every rule, and of math-verify's formulas, which go to a process of their own. Then runs `examples/reward_stage` with
and without its reward stage: how much of the stage's scoring passed while the policy sampled, and what scoring added to
the steps. Exits 1 when a goal is missed.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_grpo.config import RewardConfig
from megatron_grpo.rollout.rewards import Rule, build_rule
from megatron_grpo.rollout.rewards.exact import chain_sum_reward, exact_reward

GOALS = {"rules": 5000.0, "formulas": 200.0, "hidden": 0.8}
"""Answers a second, at least; and the share of the reward stage's scoring."""

EXAMPLE = Path(__file__).parents[2] / "examples/reward_stage/run.yaml"
QUICK = ("train.eval_every=1000", "train.save_every=1000", "data.val_size=8", "logging.tensorboard=false")

GROUP = 8
"""Answers to one gold."""

THOUGHT = "First I add the two numbers, then I take away what was eaten, so that some are left over. "

Answers = list[tuple[str, str]]
"""Response and gold."""


def words(draw: random.Random) -> str:
    """Some thoughts of a usual length, 100 to 1500 characters."""
    return THOUGHT * draw.randrange(1, 17)


def numbers(draw: random.Random, write: Callable[[str], str]) -> tuple[str, str]:
    gold = str(draw.randrange(1000))
    said = gold if draw.random() < 1 / 3 else str(draw.randrange(1000))
    return words(draw) + write(said), gold


def letters(draw: random.Random) -> tuple[str, str]:
    return words(draw) + f"\nAnswer: ({draw.choice('ABCD')}) as I said", draw.choice("ABCD")


def formulas(draw: random.Random) -> Answers:
    """A group's answers to one gold: a third of them right in other words, no two wrong ones alike."""
    number = draw.randrange(2, 1000)  # hardly any gold twice: the parser remembers
    kinds: list[tuple[str, Callable[[int], str]]] = [
        (rf"\sqrt{{{4 * number}}}", lambda n: rf"2\sqrt{{{n}}}"),
        (f"(x+{number})^2", lambda n: f"x^2+{2 * n}x+{n**2}"),
        (rf"\frac{{x}}{{{number}}}", lambda n: f"x/{n}"),
        (f"{number}x+3", lambda n: f"3+{n}x"),
    ]
    gold, say = draw.choice(kinds)
    said = [say(number if draw.random() < 1 / 3 else draw.randrange(1000, 100_000)) for _ in range(GROUP)]
    return [(words(draw) + rf"\boxed{{{text}}}", gold) for text in said]


def workloads(draw: random.Random, count: int) -> dict[str, tuple[Rule, Answers]]:
    """Rules by name, each with the answers that it is for."""
    cfg = RewardConfig()

    def many(make: Callable[[], tuple[str, str]]) -> Answers:
        return [make() for _ in range(count)]

    marked = many(lambda: numbers(draw, lambda said: f"\n#### {said}"))
    boxed = many(lambda: numbers(draw, lambda said: rf"so it is \boxed{{{said}}}"))
    thoughts = many(lambda: (f"<think>{words(draw)}</think>4", ""))
    return {
        "chain_sum": (chain_sum_reward, many(lambda: numbers(draw, lambda said: f"={said}"))),
        "exact": (exact_reward, marked),
        "gsm8k": (build_rule("gsm8k", cfg), marked),
        "math, numbers": (build_rule("math", cfg), boxed),
        "choice": (build_rule("choice", cfg), many(lambda: letters(draw))),
        "format": (build_rule("format", cfg), thoughts),
    }


def rate(rule: Rule, answers: Answers) -> float:
    """Answers a second, after a first one that starts what must be started."""
    rule(*answers[0], True)
    start = time.perf_counter()
    for response, gold in answers:
        rule(response, gold, True)
    return len(answers) / (time.perf_counter() - start)


def run_example(steps: int, *, stage: bool) -> list[dict[str, float]]:
    """The last row of each step of the example, with or without its reward stage."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"train.steps={steps}", f"parallel.reward_stage={str(stage).lower()}", *QUICK]
        command = [sys.executable, "-m", "megatron_grpo", "train", str(EXAMPLE), *settings, "--run-dir", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=EXAMPLE.parents[2])
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "time/reward" in row]


def reward_stage(steps: int) -> dict[str, float]:
    """Seconds a step of what scoring adds, with the stage and without it, and the share that the stage hides.

    The two runs train alike, or it is no comparison.
    """
    behind, within = (run_example(steps, stage=stage) for stage in (True, False))
    assert [row["policy/grad_norm"] for row in behind] == [row["policy/grad_norm"] for row in within]
    added, hidden, alone = (
        sum(row[key] for row in rows) / steps
        for rows, key in ((behind, "time/reward"), (behind, "time/reward_hidden"), (within, "time/reward"))
    )
    return {"added_s": added, "hidden_s": hidden, "share": hidden / (added + hidden), "added_without_stage_s": alone}


def measure(count: int, steps: int) -> dict[str, object]:
    """The whole report."""
    draw = random.Random(0)
    rates = {name: rate(rule, answers) for name, (rule, answers) in workloads(draw, count).items()}
    symbolic = [answer for _ in range(max(10, count // (10 * GROUP))) for answer in formulas(draw)]
    values = {"rules": min(rates.values()), "formulas": rate(build_rule("math", RewardConfig()), symbolic)}
    stage = reward_stage(steps)
    values["hidden"] = stage["share"]
    return {
        "answers": count,
        "reward_stage": stage,
        "answers_per_second": rates,
        "goals": {
            key: {"value": value, "goal": GOALS[key], "met": value >= GOALS[key]} for key, value in values.items()
        },
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="of each rule; a tenth of it for formulas")
    parser.add_argument("--steps", type=int, default=10, help="of each run of the example")
    args = parser.parse_args()
    report = measure(args.answers, args.steps)
    print(json.dumps(report, indent=2))
    goals = report["goals"]
    assert isinstance(goals, dict)
    return 0 if all(goal["met"] for goal in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
