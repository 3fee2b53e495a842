"""Rewards against the public faults of reward parsers (cases A1 to A20) and the chain_sum rule."""

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from math_verify import LatexExtractionConfig, parse, verify

from megatron_grpo.config import ConfigError, DataConfig, RewardConfig
from megatron_grpo.data import build_task
from megatron_grpo.data.problem import Problem
from megatron_grpo.rollout.rewards import Rule, Verdict, build_rewards, build_rule, gold_check, score_batch
from megatron_grpo.rollout.rewards.exact import chain_sum_reward as SUM
from megatron_grpo.rollout.rewards.exact import exact_reward as EXACT
from megatron_grpo.rollout.rewards.extract import extract_answer
from megatron_grpo.rollout.rewards.formulas import decided, formulas_equal
from megatron_grpo.rollout.rewards.limit import GRACE_S, LimitedFunction, Outcome, Patience
from megatron_grpo.rollout.rewards.math import MathReward, is_small_formula

MATH = build_rule("math", RewardConfig())
GSM8K = build_rule("gsm8k", RewardConfig())
FLEXIBLE = build_rule("gsm8k", RewardConfig(flexible=True))
CHOICE = build_rule("choice", RewardConfig())
FORMAT = build_rule("format", RewardConfig())
OWN_RULES = (MATH, GSM8K, FLEXIBLE, CHOICE, FORMAT)


def questions(answers: list[str], task: str = "jsonl") -> list[Problem]:
    return [Problem(number, "", answer, task) for number, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("response", "finished", "want"),
    [
        ("=14", True, Verdict(1.0, True)),
        ("19,14=14", True, Verdict(1.0, True)),
        ("19,14,14=14", True, Verdict(1.0, True)),
        ("=15", True, Verdict(0.0, True)),
        ("19,14=14", False, Verdict(0.0, False)),
        ("14", True, Verdict(0.0, False)),
        ("=14=14", True, Verdict(0.0, False)),
        ("=", True, Verdict(0.0, False)),
        ("", True, Verdict(0.0, False)),
        ("=14 ", True, Verdict(0.0, True)),
        ("=014", True, Verdict(0.0, True)),
        ("=14</s>", True, Verdict(1.0, True)),
    ],
)
def test_chain_sum_pays_for_one_sign_and_the_answer(response: str, finished: bool, want: Verdict) -> None:
    assert SUM(response, "14", finished) == want


@pytest.mark.parametrize(
    ("response", "gold", "want"),
    [
        ("#### 18", "18", 1),
        ("#### $18", "18", 1),
        ("####18", "18", 1),
        ("####  18", "18", 1),
        ("#### **18**", "18", 1),
        ("**#### 18**", "18", 1),
        ("#### 18.", "18", 1),
        ("#### 18.00", "18", 1),
        ("#### 1,234", "1234", 1),
        ("#### 1,234", "1,234", 1),
        ("#### .5", "0.5", 1),
        ("#### -5", "-5", 1),
        ("#### \N{MINUS SIGN} 5", "-5", 1),
        ("#### 3/4", "3/4", 1),
        ("#### 1e3", "1000", 1),
        ("#### 1e3", "1", 0),
        ("#### x = 18", "18", 1),
        ("#### 18, 20", "18", 0),
        ("#### 18, 20", "20", 0),
        ("#### 18 20", "18", 0),
        ("#### .", "18", 0),
        ("#### ,", "18", 0),
        ("####", "18", 0),
        ("", "18", 0),
        ("#### 7\nwait\n#### 8", "8", 1),
        ("#### 7\nwait\n#### 8", "7", 0),
        ("The total is 18.", "18", 0),
        (r"\boxed{18}", "18", 1),
        ("#### 18", "81", 0),
        ("#### 018", "18", 1),
        ("#### 1,8", "18", 0),
    ],
)
def test_a2_gsm8k_answers(response: str, gold: str, want: int) -> None:
    assert MATH(response, gold, True).reward == want
    marked = "####" in response
    assert GSM8K(response, gold, True).reward == (want if marked else 0)
    assert FLEXIBLE(response, gold, True).reward == (want if marked else float("18" in response))


def test_a2_what_cannot_be_read_is_counted() -> None:
    for response in ("#### .", "#### ,", "####", "", "#### 18, 20", "The total is 18.", r"\boxed{18}"):
        assert GSM8K(response, "18", True) == Verdict(0.0, False)
    assert GSM8K("#### 17", "18", True) == Verdict(0.0, True)
    assert GSM8K("#### 18", "18", False) == Verdict(0.0, False)  # more digits may have followed
    assert FLEXIBLE("The total is 18.", "18", False) == Verdict(0.0, False)


def test_a1_right_answer_before_long_chatter() -> None:
    chatter = "This sentence has nothing to do with the answer whatsoever.\n" * 8
    for rule in (MATH, GSM8K, FLEXIBLE):
        assert rule("2+40=42\n#### 42\n" + chatter, "42", True) == Verdict(1.0, True)
    assert MATH(r"\boxed{42}" + chatter, "42", True) == Verdict(1.0, True)


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("Answer: 42.", "42"),
        ("**Answer:** 42", "42"),
        ("Answer: 42.0", "42"),
        ("Answer: 42 apples", "42"),
        ("Answer: 42<|im_end|>", "42"),
        ("Answer: 3/4", r"\frac{3}{4}"),
        ("Answer: 0.5", r"\frac{1}{2}"),
        ("Answer: $42$", "42"),
        ("answer : 42", "42"),
        ("Answer: x=42", "42"),
        ("Answer: 42 meters", "42"),
        (r"Answer: \frac12", "0.5"),
        ("Answer: 41\nAnswer: 42", "42"),
        (r"\boxed{42}", "42"),
        (r"\boxed{42}" + "x" * 120, "42"),
        ("<answer> 42 </answer>", "42"),
    ],
)
def test_a3_answers_after_the_word(response: str, gold: str) -> None:
    assert MATH(response, gold, True) == Verdict(1.0, True)
    assert MATH(response, "43", True) == Verdict(0.0, True)


@pytest.mark.parametrize(
    ("said", "gold", "want"),
    [
        ("42.", "42", 1),
        ("42.0", "42", 1),
        ("42 apples", "42", 1),
        ("42 apples", "42 pears", 0),
        ("42 million", "42", 0),
        ("42 or 43", "42", 0),
        ("42x", "42", 0),
        ("42xy", "42ab", 0),
        ("$42$", "42", 1),
        ("3/4", r"\frac{3}{4}", 1),
        ("0.5", r"\frac{1}{2}", 1),
        (r"\frac12", "0.5", 1),
        ("-1/2", r"-\frac{1}{2}", 1),
        ("1,000", "1000", 1),
        (r"5\text{cm}", "5", 1),
        (r"5\text{ square cm}", r"5\text{ square cm}", 1),
        ("5 square cm", r"5\text{ square cm}", 1),
        (r"5\text{ cm}", "5", 1),
        ("2.0", "2", 1),
        (r"1\frac{1}{2}", r"\frac{3}{2}", 1),
        (r"\dfrac{6}{4}", "1.5", 1),
        ("1/0", "1", 0),
        (r"x^2+2x+1", r"(x+1)^2", 1),
        (r"x^2+2x+2", r"(x+1)^2", 0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1),
        (r"2^{10}", "1024", 1),
        ("(1, 2)", "(1,2)", 1),
        ("(2, 1)", "(1,2)", 0),
        ("Paris", "paris", 1),
        ("1{,}234", "1234", 1),
        (r"\cfrac{3}{4}", "0.75", 1),
        (r"18\ \text{dollars}", "18", 1),
        ("18 dollars", "18 dollar", 1),
        ("3 inches", "3 inch", 1),
        (r"90^{\circ}", "90", 1),
        (r"90^\circ", "90 degrees", 1),
        ("90\N{DEGREE SIGN}", r"90^{\circ}", 1),
        ("12_{3}", "12_3", 1),
        ("12_{3}", "12", 0),
        ("5 times", "5", 1),
        ("5 times ten", "5", 0),
        ("5 lakh", "5", 0),
    ],
)
def test_a3_a4_equal_values_pay_in_a_box(said: str, gold: str, want: int) -> None:
    verdict = MATH(rf"so \boxed{{{said}}}", gold, True)
    assert verdict == Verdict(float(want), True)
    assert MATH(rf"so \boxed{{{said}}}", rf"\boxed{{{gold}}}", True) == verdict


@pytest.mark.parametrize("response", [r"\boxed{}", r"\boxed{\frac}", r"\boxed{", r"\boxed{18", r"\boxed", "#### $"])
def test_a4_malformed_answers_count_as_unreadable(response: str) -> None:
    assert MATH(response, "18", True) == Verdict(0.0, False)


def test_a4_odd_boxes_raise_nothing() -> None:
    assert MATH(r"\boxed{\text{ a }\text{ b}}", "18", True) == Verdict(0.0, True)
    assert MATH(r"\fbox{7}", "7", True) == Verdict(1.0, True)
    assert MATH(r"\boxed{1} then \boxed{\frac{3}{4}}", "0.75", True).reward == 1


@pytest.mark.parametrize("gold", ["", " ", "None", "none", "null", r"\boxed{}"])
@pytest.mark.parametrize("response", ["", r"\boxed{}", "#### ", r"\boxed{None}", "#### none", r"\boxed{3}"])
def test_a4_a15_empty_gold_pays_nobody(gold: str, response: str) -> None:
    assert MATH(response, gold, True).reward == 0
    assert GSM8K(response, gold, True).reward == CHOICE(response, gold, True).reward == 0
    assert EXACT(response, gold, True).reward == 0
    assert SUM("=" + response, "", True).reward == 0


def test_a6_wrong_gold_pays_nobody_and_unreadable_gold_scores_nobody() -> None:
    assert MATH(r"\boxed{3}", "6", True).reward == 0
    for response in (r"\boxed{3}", r"\boxed{42}", "#### 42", "forty two"):
        assert MATH(response, "Answer is forty two.", True) == Verdict(None, False)
        assert GSM8K(response, "Answer is forty two.", True) == Verdict(None, False)
        assert CHOICE(response, "Answer is forty two.", True) == Verdict(None, False)
        assert EXACT(response, "Answer is\nforty two.", True) == Verdict(None, False)


def test_a8_works_in_threads() -> None:
    verdicts: list[Verdict] = []
    texts = [(r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"), (r"\boxed{\sqrt{8}}", r"2\sqrt{2}")] * 4
    threads = [
        threading.Thread(target=lambda r=r, g=g: verdicts.append(MATH(r, g, True)))  # type: ignore[misc]
        for r, g in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert verdicts == [Verdict(1.0, True)] * 8


def test_a10_model_text_is_never_evaluated(tmp_path: Path) -> None:
    trace = tmp_path / "x"
    code = f"__import__('os').system('touch {trace}')"
    for gold in ("42", code, r"x+1"):
        verdict = MATH(rf"\boxed{{{code}}}", gold, True)
        assert verdict.reward == float(gold == code)
    assert not trace.exists()


@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^9}}",
        "9^9^9^9",
        "9**9**9**9",
        "((9^{99})^{99})^{99}",
        "99999!!",
        r"\sum_{n=1}^{99999999} n",
        r"\int_0^1 e^{x^2} dx",
        "1e999999999",
        "9" * 10_000,
        "{" * 5_000,
        "(" * 5_000,
        r"\frac{" * 2_000,
        r"\boxed{" * 2_000,
        "{a+b+c+d+f+g+h}^{99}",
        "a" * 100_000,
    ],
)
def test_hostile_answers_score_nothing_quickly(hostile: str) -> None:
    started = time.monotonic()
    for gold in ("42", r"\sqrt{2}+x"):
        assert MATH(rf"\boxed{{{hostile}}}", gold, True).reward == 0
        assert MATH("#### " + hostile, gold, True).reward == 0
    assert time.monotonic() - started < 10


def test_the_allow_list_of_formulas() -> None:
    good = ["x+1", r"\frac{x^2}{3}", r"2\sqrt{3}", "(x+1)^3", r"2^{10}", r"e^{x}", r"\left(\frac12, 3\right)"]
    bad = ["9^9^9", "x^{y^2}", "(x+1)^9", "abs(1)exit", "x_1", "5!", "lambda", "'a'", r"\input{a}", "+1" * 50]
    assert [is_small_formula(text) for text in good] == [True] * len(good)
    assert [is_small_formula(text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        ("(x+1)^2", "x^2+2x+1"),
        ("(x+1)^2", "x^2+2x+2"),
        (r"\frac{x}{2}", "0.5x"),
        (r"\frac{1}{3}", "0.333333"),
        (r"\frac{1}{3}", "0.3333"),
        (r"\pi", "3.14159"),
        (r"\sqrt{2}+x", r"x+\frac{2}{\sqrt{2}}"),
        (r"\frac{1}{x}", r"\frac{1}{y}"),
        (r"\ln x", r"\sin x"),
        ("x", r"\sqrt{x^2}"),
    ],
)
def test_what_is_decided_early_is_what_math_verify_says(gold: str, said: str) -> None:
    read = [LatexExtractionConfig(boxed_match_priority=0)]
    terms = [parse(rf"\boxed{{{text}}}", read, fallback_mode="no_fallback") for text in (gold, said)]
    want = verify(*terms)
    assert formulas_equal(gold, said) == want
    assert decided(terms[0][0], terms[1][0]) in (want, None)


def test_a11_one_verdict_a_response_in_order() -> None:
    responses = [r"The answer is \boxed{42}", "no answer here", r"The answer is \boxed{137}"]
    (math,) = build_rewards(RewardConfig(kind="math"))
    verdicts = score_batch(math, responses, questions(["42"] * 3), [True] * 3)
    assert verdicts == [Verdict(1.0, True), Verdict(0.0, False), Verdict(0.0, True)]
    with pytest.raises(ValueError, match="shorter"):
        score_batch(math, responses, questions(["42"] * 2), [True] * 3)


@pytest.mark.parametrize("stop", ["<|im_end|>", "</s>", " <|eot_id|>\n", "<|im_end|><|endoftext|>"])
def test_a17_stop_tokens_change_nothing(stop: str) -> None:
    for response in ("#### 42", r"\boxed{42}", "Answer: 42"):
        assert MATH(response + stop, "42", True) == MATH(response, "42", True)
    assert EXACT("#### 42" + stop, "42", True) == Verdict(1.0, True)
    assert SUM("=14" + stop, "14", True) == Verdict(1.0, True)


def test_a17_an_answer_that_was_cut_off_is_no_answer() -> None:
    assert MATH("#### 1", "1", False) == Verdict(0.0, False)
    assert MATH("#### 1\nand so", "1", False) == Verdict(1.0, True)
    assert MATH(r"\boxed{1} and so", "1", False) == Verdict(1.0, True)
    assert EXACT("#### 1", "1", False) == Verdict(0.0, False)


def test_exact_on_jsonl_compares_text() -> None:
    assert EXACT("reason\n#### 18", "18", True) == Verdict(1.0, True)
    assert EXACT(" 18\n", "18", True) == Verdict(1.0, True)
    assert EXACT("#### 18.0", "18", True) == Verdict(0.0, True)


@pytest.mark.parametrize("text", ["New York", "no solution", "Paris, France", "Answer is forty two."])
def test_exact_on_rows_compares_one_line_of_any_text(text: str) -> None:
    gold_check(RewardConfig(kind="exact"))("jsonl", f"work\n#### {text}")
    assert [EXACT(said, text, True).reward for said in (text, f"so\n#### {text} ", text.lower() + "x")] == [1, 1, 0]
    for answer in (f"{text}\nor so", text * 30):
        with pytest.raises(ValueError, match="prose"):
            gold_check(RewardConfig(kind="exact"))("jsonl", answer)
    with pytest.raises(ValueError, match="prose"):
        gold_check(RewardConfig(kind="math"))("jsonl", text)


def test_exact_is_the_own_rule_of_each_problems_task() -> None:
    (own,) = build_rewards(RewardConfig())
    assert (own.name, own.weight) == ("exact", 1.0)
    problems = [*questions(["14"], "chain_sum"), *questions(["14"])]
    assert score_batch(own, ["=14", "=14"], problems, [True] * 2) == [Verdict(1.0, True), Verdict(0.0, True)]


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("B", 1),
        ("b", 1),
        ("(B)", 1),
        ("B.", 1),
        ("B) because it is", 1),
        ("**B**", 1),
        (r"so \boxed{\text{B}}", 1),
        (r"\boxed{(B)}", 1),
        ("A or C?\nAnswer: (B) Paris", 1),
        ("Answer: B: Paris", 1),
        ("#### B", 1),
        ("Answer: A\nAnswer: B", 1),
        ("The answer is (B)", 1),
        ("The answer is A. No, the answer is **B**.\nBye", 1),
        ("A) is wrong, so the answer is B: Paris", 1),
        ("B. The answer is obvious", 1),
        ("A", 0),
        ("Answer: (C)", 0),
        ("B? The answer is C.", 0),
    ],
)
def test_choices_by_hand(response: str, want: int) -> None:
    for gold in ("B", "b", "(B)", "B.", "work\n#### B"):
        assert CHOICE(response, gold, True) == Verdict(float(want), True)


@pytest.mark.parametrize(
    "response",
    [
        "Both are right",
        "A or B",
        "AB",
        "",
        "Answer: Berlin",
        "B and C",
        "42",
        "(B) or (A)",
        "B) or C)",
        "(B), (C)",
        "The answer is A or B",
        "The answer is Berlin",
    ],
)
def test_what_is_no_single_choice_is_counted(response: str) -> None:
    assert CHOICE(response, "B", True) == Verdict(0.0, False)
    assert CHOICE(response, "", True) == Verdict(0.0, False)


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("<think>a</think>b", 1),
        ("<think></think>\nb", 1),
        ("<think>a</think>b<|im_end|>", 1),
        ("<think>a b", 0),
        ("a</think>b", 0),
        ("hm <think>a</think>b", 0),
        ("<think>a<think>b</think></think>c", 0),
        ("<think>a</think>b<think>c</think>d", 0),
        ("</think>a<think>", 0),
        ("", 0),
    ],
)
def test_a20_thoughts_stand_in_one_block_in_front(response: str, want: int) -> None:
    assert FORMAT(response, "whatever", True) == Verdict(float(want), True)


USERS_OWN = """
from functools import partial
from megatron_grpo.rollout.rewards import Verdict
import os, time

def length(response, answer, finished):
    print("this is no answer")
    return len(response) / 10

def paid(amount, response, answer, finished):
    return amount

half = partial(paid, 0.5)

class Rule:
    def __call__(self, response, answer, finished):
        return Verdict(0.25, response == answer)

rule = Rule()

def odd(response, answer, finished):
    if response == "none":
        return None
    if response == "raise":
        raise RuntimeError("no")
    if response == "slow":
        time.sleep(60)
    if response == "busy":
        9 ** 9 ** 9
    if response == "exit":
        raise SystemExit(3)
    if response == "crash":
        os.abort()
    if response == "dict":
        return {"acc": True, "score": "1"}
    if response == "text":
        return "1"
    if response == "nan":
        return float("nan")
    return 1
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own.py").write_text(USERS_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_a19_functions_partials_and_objects_score() -> None:
    for name, want in [
        ("length", Verdict(0.3, True)),
        ("half", Verdict(0.5, True)),
        ("rule", Verdict(0.25, False)),
    ]:
        (reward,) = build_rewards(RewardConfig(kind=f"python:users_own:{name}"))
        assert score_batch(reward, ["abc"], questions(["x"]), [True]) == [want]


@pytest.mark.usefixtures("own")
def test_a13_what_a_function_of_ones_own_does_wrong() -> None:
    rule = build_rule("python:users_own:odd", RewardConfig(time_limit=0.5))
    seen = [rule(text, "", True) for text in ("fine", "none", "raise", "exit", "crash", "slow", "busy", "fine")]
    silent, failed, late, one = Verdict(None, True), Verdict(None, False), Verdict(0.0, False), Verdict(1.0, True)
    assert seen == [one, silent, failed, failed, failed, late, late, one]
    for text in ("dict", "text", "nan"):
        with pytest.raises(
            ConfigError, match=r"reward\.kind=python:users_own:odd: returned .*; return a finite number"
        ):
            rule(text, "", True)


def test_slow_calls_share_their_patience_until_the_next_batch() -> None:
    """Calls that end late use it up, starts included, whoever made them; the last of them is cut short and said to be
    untried, since it had less than its limit. Then none is tried."""
    patience = Patience(60.0)
    sleep, power = (LimitedFunction(x, limit_s=2.0, patience=patience) for x in ("time:sleep", "builtins:pow"))
    assert power(2, 10) == Outcome(value=1024)
    assert sleep(30) == Outcome(late=True) and patience.left < 58.0
    patience.left = 1.5  # which a start may use up
    assert [sleep(30).untried, sleep(0.0)] == [True, Outcome(untried=True)]
    assert -GRACE_S - 5.0 < patience.left <= 0.0
    assert power(2, 10) == Outcome(untried=True)
    math = MathReward(patience=patience)
    assert math(r"\boxed{x+1}", "1+x", True) == Verdict(None, False)  # which needs a process
    assert math(r"\boxed{3}", "3", True) == Verdict(1.0, True)
    patience.renew()
    assert power(2, 10) == Outcome(value=1024)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module:f", "cannot be imported .*no_such_module"),
        ("users_own:g", "cannot be imported .*g"),
        ("users_own:USERS", "cannot be imported"),
        ("users_own:__name__", "is a str, not a function"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_function_that_is_not_there_is_a_config_error(target: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.kind=python:{target}: .*{why}"):
        build_rewards(RewardConfig(kind=f"python:{target}"))


def test_a8_the_time_limit_holds_in_threads_and_in_subprocesses() -> None:
    """A sleep and a power that never comes back to Python; the next call finds a new process."""
    sleep = LimitedFunction("time:sleep", limit_s=0.3)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(sleep(seconds) for seconds in (30, 0.0, 30)))
    thread.start()
    thread.join(timeout=60)
    assert outcomes == [Outcome(late=True), Outcome(), Outcome(late=True)]
    busy = LimitedFunction("builtins:pow", limit_s=0.3)
    assert busy(9, 9**9) == Outcome(late=True)
    assert busy(2, 10) == Outcome(value=1024)
    assert busy("a", 1).error == "TypeError: unsupported operand type(s) for ** or pow(): 'str' and 'int'"
    code = (
        "import threading\n"
        "from megatron_grpo.config import RewardConfig\n"
        "from megatron_grpo.rollout.rewards import build_rule\n"
        "rule = build_rule('math', RewardConfig())\n"
        "said = []\n"
        "ask = lambda: said.append(rule(r'\\boxed{\\sqrt{8}}', r'2\\sqrt{2}', True).reward)\n"
        "thread = threading.Thread(target=ask); thread.start(); thread.join(); print(said)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[1.0]\n"


def test_a_process_that_cannot_start_leaves_samples_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rules' own processes; what a library says of one pair is the answer's fault."""
    (own,) = build_rewards(RewardConfig())
    asked = Problem(1, "", "4", "reasoning_gym:basic_arithmetic", {"answer": "4"})
    absent = LimitedFunction("no_such_module:f", limit_s=1.0)
    assert [absent(1), LimitedFunction("builtins:int", limit_s=1.0)("x").untried] == [Outcome(untried=True), False]
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert LimitedFunction("builtins:int", limit_s=1.0)(1) == Outcome(untried=True)
    assert MathReward()(r"\boxed{x+1}", "1+x", True) == Verdict(None, False)
    assert own.score("5", asked, True) == Verdict(None, False)


def test_several_rewards_have_names_and_weights() -> None:
    rewards = build_rewards(RewardConfig(weights={"gsm8k": 1.0, "format": 0.2}))
    assert [(reward.name, reward.weight) for reward in rewards] == [("gsm8k", 1.0), ("format", 0.2)]
    problems = questions(["4"])
    assert [score_batch(reward, ["<think>2+2</think>#### 4"], problems, [True]) for reward in rewards] == [
        [Verdict(1.0, True)],
        [Verdict(1.0, True)],
    ]


@pytest.mark.parametrize("text", ["1,234", "$5", "18.", "+3", "\N{MINUS SIGN}5", "Paris", r"\frac{1}{2}"])
def test_the_very_text_of_a_gold_pays(text: str) -> None:
    gold_check(RewardConfig(kind="exact"))("jsonl", text)
    assert EXACT(text, text, True).reward == 1.0


@pytest.mark.parametrize(
    ("kind", "answer", "want"),
    [
        ("math", "Answer is forty two.", "prose"),
        ("math", r"\text{}", "empty"),
        ("math", r"\boxed{}", "empty"),
        ("math", r"\boxed{None}", "empty"),
        ("math", r"#### \text{None}", "empty"),
        ("math", r"so it is \boxed{\text{}}", "empty"),
        ("math", "<answer> </answer>", "empty"),
        ("exact", "<answer> </answer>", "empty"),
        ("gsm8k", r"#### \text{null}", "empty"),
        ("exact", r"\boxed{None}", "empty"),
        ("choice", r"\text{none}", "empty"),
        ("gsm8k", "3 pi", "not a number"),
        ("math", r"\frac{}{}", "cannot be read"),
        ("gsm8k", "Paris", "not a number"),
        ("gsm8k", "5 times ten", "prose"),
        ("gsm8k", "5 tenths", "not a number"),
        ("gsm8k", "5 lakh", "not a number"),
        ("choice", "Paris", "not one letter"),
        ("choice", " ", "empty"),
        ("gsm8k", "None", "empty"),
    ],
)
def test_a_gold_that_a_reward_cannot_read_is_refused(kind: str, answer: str, want: str) -> None:
    with pytest.raises(ValueError, match=want):
        gold_check(RewardConfig(kind=kind))("jsonl", answer)
    with pytest.raises(ValueError, match=want):  # whichever of several it is
        gold_check(RewardConfig(weights={"format": 1.0, kind: 1.0}))("jsonl", answer)


@pytest.mark.parametrize(
    ("rule", "response", "answer"),
    [
        (EXACT, "#### 1234", "work #### $1,234."),
        (EXACT, "Paris", "Paris"),
        (MATH, r"\boxed{0.5}", r"\frac{1}{2}"),
        (MATH, r"\boxed{1234}", "work\n#### $1,234."),
        (MATH, r"\boxed{5}", r"We find that the sum is $\boxed{5}$."),
        (GSM8K, "#### 18", "18 dollars"),
        (CHOICE, "B", "(b)"),
        (FORMAT, "<think>a</think>b", "Answer is forty two."),
    ],
)
def test_each_reward_reads_the_answer_as_it_was_written(rule: Rule, response: str, answer: str) -> None:
    kind = {EXACT: "exact", MATH: "math", GSM8K: "gsm8k", CHOICE: "choice", FORMAT: "format"}[rule]
    gold_check(RewardConfig(kind=kind))("jsonl", answer)
    assert rule(response, answer, True).reward == 1.0


@pytest.mark.parametrize(
    ("said", "value"),
    [
        *(("3 pi", 3), ("2 xy", 2), ("2 squared", 2), ("5 factorial", 5), ("3 quarters", 3), ("1 half", 1)),
        *(("5 thirds", 5), ("5 thirteen", 5), ("2 times pi", 2), ("5 bn", 5), ("3 halves", 3), ("2 theta", 2)),
        *(("7 hundredths", 7), ("4 cubed", 4), ("9 ln", 9), ("2 fifths", 2), ("6 first", 6), ("8 modulo", 8)),
    ],
)
def test_a_word_that_makes_another_number_of_it_is_no_unit(said: str, value: int) -> None:
    assert MATH(rf"\boxed{{{said}}}", str(value), True).reward == 0.0
    assert GSM8K(f"#### {said}", str(value), True).reward == 0.0


@pytest.mark.parametrize("letter", ["m", "g", "l", "s", "h", "c", "x", "e", "i", "k"])
def test_a_letter_after_a_number_is_a_variable(letter: str) -> None:
    """Also of those that math-verify takes for units."""
    for said in (f"5 {letter}", f"5{letter}", rf"5\text{{ {letter}}}"):
        assert MATH(rf"\boxed{{{said}}}", "5", True).reward == 0.0
        assert MATH(r"\boxed{5}", said, True).reward == float("text" in said)  # which a gold says is no formula
        assert GSM8K(f"#### {said}", "5", True) == Verdict(0.0, False)


@pytest.mark.parametrize(
    "unit",
    ["apples", "men", "kg", "square feet", "times", "marbles", "days", "percent", "mph", "degrees Celsius", "inches"],
)
def test_a_unit_of_the_list_counts_unless_the_gold_has_another(unit: str) -> None:
    for rule, said in ((MATH, rf"\boxed{{18 {unit}}}"), (GSM8K, f"#### 18 {unit}")):
        assert [rule(said, gold, True).reward for gold in ("18", f"18 {unit}", "18 pears", "19")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("gold", "others"),
    [
        (r"5\text{ cm}^2", ["5 cm", "5 square m", "6"]),
        (r"$5\,\text{cm}^{2}$.", ["5 cm", r"5\text{ cm}^3", "25"]),
        (r"5\text{ m}", ["5 g", r"5\text{ cm}", "5m^2"]),
        (r"5\text{ m}/\text{s}", ["5 m", r"5\text{ m}/\text{h}"]),
        ("5 km/h", ["5 km", "5 km/s", "4"]),
        ("5 dollars per hour", ["5 dollars", "5 dollars per day"]),
        ("5 feet^2", ["5 feet", "25"]),
        ("5cm", ["5 kg"]),
    ],
)
def test_text_after_a_golds_number_is_its_unit(gold: str, others: list[str]) -> None:
    gold_check(RewardConfig(kind="math"))("jsonl", gold)
    for said, want in [("5", 1), ("5.0", 1), (gold, 1), (gold.replace(" ", ""), 1), *((other, 0) for other in others)]:
        assert MATH(rf"\boxed{{{said}}}", gold, True).reward == want


@pytest.mark.parametrize("gold", [r"5\text{ million}", r"5\text{ squared}", "5 x/y", "5 ab^2", "5 alpha^2", "5 zeta^2"])
def test_what_makes_another_number_of_a_gold_is_no_unit(gold: str) -> None:
    assert MATH(r"\boxed{5}", gold, True).reward == 0.0


@pytest.mark.parametrize(
    ("said", "gold", "want"),
    [
        *(("p", "P", 0), ("mN", "Mn", 0), ("AB", "ab", 0), (r"\SIN x", r"\sin x", 0), (r"\Delta", r"\delta", 0)),
        *(
            ("5 mN", r"5\text{ Mn}", 0),
            ("Paris", "paris", 1),
            ("PARIS", "Paris", 1),
            ("yes", "Yes", 1),
            ("AB", "A B", 1),
        ),
        *(("p-P", "P-p", 0), ("M+m", "m+M", 1), ("2P+P", "3P", 1)),
    ],
)
def test_only_words_are_the_same_in_any_case(said: str, gold: str, want: int) -> None:
    assert MATH(rf"\boxed{{{said}}}", gold, True).reward == want


@pytest.mark.parametrize("said", ["18cm", "\u20ac18", "\u00a318", "18\u20ac", "18kg.", "18 dollars"])
def test_units_and_signs_of_money_may_touch_a_number(said: str) -> None:
    assert [GSM8K(f"#### {said}", gold, True) for gold in ("18", said, "19")] == [
        *[Verdict(1.0, True)] * 2,
        Verdict(0.0, True),
    ]
    assert GSM8K("#### 18cm", "18 kg", True) == Verdict(0.0, True)


@pytest.mark.parametrize("word", ["widgets", "seventeenths", "zillion", "square", "dollars percent"])
def test_any_other_word_counts_only_where_the_gold_names_it(word: str) -> None:
    """What a policy says is no unit because nobody has thought of the word; what the data says is."""
    assert GSM8K(f"#### 18 {word}", "18", True) == Verdict(0.0, False)
    assert MATH(rf"\boxed{{18 {word}}}", "18", True).reward == 0.0
    assert MATH(rf"\boxed{{18 {word}}}", f"18 {word}", True).reward == 1.0
    assert [rule(said, "18 widgets", True).reward for rule, said in ((GSM8K, "#### 18"), (MATH, "#### 18"))] == [1, 1]
    assert GSM8K("#### 18 widget", "work\n#### 18 widgets", True).reward == 1.0
    assert GSM8K("#### 18 dollars", "18 widgets", True) == Verdict(0.0, True)


@pytest.mark.parametrize(
    ("sentence", "gold", "want"),
    [
        *(("The total is 18.", "18", 1), ("So 18 widgets are left.", "18", 1), ("It weighs 18kg.", "18", 1)),
        *(("It must be 18 I believe", "18", 1), ("so 18 i", "18", 0), ("It costs \u20ac18", "18", 1)),
        *(("I get 18 and that is it", "18", 1), ("It is 3/4.", "3/4", 1), ("It is 3/4.", "4", 0)),
        *(("It is 1e3", "1000", 1), ("It is 1e3", "3", 0), ("about 5 million", "5", 0), ("about 5k", "5", 0)),
        *(("so 5!", "5", 0), (r"so 5\pi", "5", 0), ("so 2 x", "2", 0), ("so 2^3 = 2 thirds", "2", 0)),
    ],
)
def test_without_a_marker_the_last_number_of_a_sentence_counts(sentence: str, gold: str, want: int) -> None:
    assert FLEXIBLE(sentence, gold, True).reward == want


def test_the_library_of_formulas_is_loaded_before_the_clock_runs() -> None:
    """It takes longer to import than this limit, and far less to compare two terms."""
    assert MathReward(limit_s=1.0)(r"\boxed{2x+x}", "3x", True) == Verdict(1.0, True)


def test_extraction_takes_the_last_answer() -> None:
    assert extract_answer("#### 1\n#### 2", finished=True) == "2"
    assert extract_answer(r"\boxed{a{b}c} \boxed{d", finished=True) == "a{b}c"
    assert extract_answer(r"#### \boxed{5}", finished=True) == "5"
    assert extract_answer("nothing", finished=True) is None


@pytest.mark.parametrize(
    "unit",
    [
        *("A", "\u4e2d", "\n", " ", "7", "1,", "-", "{", "}", "####", "\\boxed{", "\\text{", "<answer>", "</answer>"),
        *("</s>", "<|im_end|>", "<|", "Answer:", "answer ", "answer is ", "<think>"),
    ],
)
def test_long_runs_take_linear_time(unit: str) -> None:
    """100,000 characters, alone, before and after something: a rule that is quadratic takes many seconds."""
    run = unit * (100_000 // len(unit))
    for rule, gold in [(rule, "B" if rule is CHOICE else "18") for rule in (*OWN_RULES, SUM, EXACT)]:
        for response in (run, run + "x", "#### 19" + run + "x"):
            started = time.process_time()
            verdict = rule(response, gold, True)
            assert time.process_time() - started < 0.5
            assert verdict.reward == 0.0


def test_the_last_closed_box_counts_up_to_its_longest() -> None:
    assert extract_answer(r"\boxed{1} \boxed{" + "x" * 200 + "}", finished=True) == "x" * 200
    assert extract_answer(r"\boxed{1} \boxed{" + "x" * 201 + "}", finished=True) == "1"
    assert extract_answer(r"} \boxed{a \fbox {b{c}} d} \boxed{e", finished=True) == "b{c}"


FRAGMENTS = (
    *(
        "####",
        "#### ",
        "\\boxed{",
        "\\fbox{",
        "}",
        "{",
        "\\frac{",
        "\\frac12",
        "\\sqrt{2}",
        "\\text{",
        "Answer:",
        "**",
        "$",
    ),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<|im_end|>",
        "</s>",
        "\n",
        "\r\n",
        "=",
        "-",
        "3/4",
        "1e99",
        "1,234",
    ),
    *(
        "(B)",
        "B.",
        "none",
        "nan",
        "inf",
        "x^2",
        "^",
        "__import__('os')",
        "\N{MINUS SIGN}",
        "\u0663",
        "\u00b2",
        "\ud800",
        "\x00",
    ),
)


def hostile_text(draw: random.Random) -> str:
    """Random bytes as text, with what the rules look for strewn in."""
    parts = [draw.randbytes(draw.randrange(12)).decode(draw.choice(["latin-1", "utf-8"]), "replace") for _ in range(4)]
    parts += draw.choices(FRAGMENTS, k=draw.randrange(10))
    draw.shuffle(parts)
    return "".join(parts)


@pytest.mark.needs("reasoning_gym")
@pytest.mark.usefixtures("own")
def test_20000_hostile_texts_raise_nothing_and_stay_in_range() -> None:
    """As responses and, one in four times, as golds, in a minute."""
    draw, started = random.Random(0), time.monotonic()
    rules: list[Rule] = [MATH, GSM8K, FLEXIBLE, CHOICE, FORMAT, SUM, EXACT]
    rules.append(build_rule("python:users_own:half", RewardConfig()))
    (own,) = build_rewards(RewardConfig())
    task = build_task(DataConfig(task="reasoning_gym:basic_arithmetic", val_size=4), seed=0)
    asked = task.validation()
    golds = ["18", "B", r"\frac{3}{4}", "x+1"]
    seen: list[set[float | None]] = [set() for _ in rules]
    for number in range(20_000):
        response = hostile_text(draw)
        gold = hostile_text(draw) if number % 4 == 0 else golds[number % len(golds)]
        for rule, values in zip(rules, seen, strict=True):
            verdict = rule(response, gold, number % 3 > 0)
            assert isinstance(verdict.parsed, bool)
            values.add(verdict.reward)
        said = own.score(response, asked[number % 4], number % 3 > 0).reward
        assert said is not None and 0.0 <= said <= 1.0
    assert seen[:3] == [{0.0, 1.0, None}] * 3 and seen[7] == {0.5}
    assert all(values <= {0.0, 1.0, None} for values in seen[:7])
    assert time.monotonic() - started < 60.0  # on the clock, since children work, too
