"""What scoring costs: ``python tools/bench/reward.py [--answers N]``.

Scores answers as models write them, a third of them right, on one core, and prints one JSON object: answers a second
of every rule, and of math-verify's formulas, which go to a process of their own. Exits 1 when a goal is missed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable

from megatron_grpo.config import RewardConfig
from megatron_grpo.rollout.rewards import Rule, build_rule
from megatron_grpo.rollout.rewards.exact import chain_sum_reward, exact_reward

GOALS = {"rules": 5000.0, "formulas": 200.0}
"""Answers a second, at least."""

THOUGHT = "First I add the two numbers, then I take away what was eaten, so that some are left over. "
FORMULAS = [(r"\sqrt{8}", r"2\sqrt{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{x}{2}", "x/2"), ("2x+3", "x+3")]

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


def formulas(draw: random.Random) -> tuple[str, str]:
    gold, said = draw.choice(FORMULAS)
    return words(draw) + rf"\boxed{{{said}}}", gold


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


def measure(count: int) -> dict[str, object]:
    """The whole report."""
    draw = random.Random(0)
    rates = {name: rate(rule, answers) for name, (rule, answers) in workloads(draw, count).items()}
    symbolic = [formulas(draw) for _ in range(max(50, count // 10))]
    values = {"rules": min(rates.values()), "formulas": rate(build_rule("math", RewardConfig()), symbolic)}
    return {
        "answers": count,
        "answers_per_second": rates,
        "goals": {
            key: {"value": value, "goal": GOALS[key], "met": value >= GOALS[key]} for key, value in values.items()
        },
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="of each rule; a tenth of it for formulas")
    report = measure(parser.parse_args().answers)
    print(json.dumps(report, indent=2))
    goals = report["goals"]
    assert isinstance(goals, dict)
    return 0 if all(goal["met"] for goal in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
