"""Rewards against the public faults of reward parsers (cases A1 to A19) and the chain_sum rule."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_grpo.config import ConfigError, RewardConfig
from megatron_grpo.rollout.rewards import Verdict, build_reward, score_batch
from megatron_grpo.rollout.rewards.math import extract_answer, is_small_formula

MATH = build_reward(RewardConfig(kind="math"), "jsonl")
SUM = build_reward(RewardConfig(kind="exact"), "chain_sum")
EXACT = build_reward(RewardConfig(kind="exact"), "jsonl")


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


def test_a1_right_answer_before_long_chatter() -> None:
    chatter = "This sentence has nothing to do with the answer whatsoever.\n" * 8
    assert MATH("2+40=42\n#### 42\n" + chatter, "42", True) == Verdict(1.0, True)


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
    assert EXACT(response, gold.strip() if gold == " " else gold, True).reward == (
        1.0 if gold.strip() and response.removeprefix("#### ") == gold else 0.0
    )
    assert SUM("=" + response, "", True).reward == 0


def test_a6_wrong_or_unreadable_gold_pays_nobody() -> None:
    assert MATH(r"\boxed{3}", "6", True).reward == 0
    for response in (r"\boxed{3}", r"\boxed{42}", "#### 42", "forty two"):
        assert MATH(response, "Answer is forty two.", True).reward == 0


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


def test_a11_one_verdict_a_response_in_order() -> None:
    responses = [r"The answer is \boxed{42}", "no answer here", r"The answer is \boxed{137}"]
    verdicts = score_batch(MATH, responses, ["42"] * 3, [True] * 3)
    assert verdicts == [Verdict(1.0, True), Verdict(0.0, False), Verdict(0.0, True)]
    with pytest.raises(ValueError, match="shorter"):
        score_batch(MATH, responses, ["42"] * 2, [True] * 3)


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


def test_a19_any_callable_scores() -> None:
    def paid(amount: float, response: str, answer: str, finished: bool) -> Verdict:
        return Verdict(amount, True)

    assert score_batch(partial(paid, 0.5), ["a"], ["b"], [True]) == [Verdict(0.5, True)]


def test_math_does_not_fit_chain_sum() -> None:
    with pytest.raises(ConfigError, match=r"reward\.kind=math.*chain_sum.*use exact"):
        build_reward(RewardConfig(kind="math"), "chain_sum")


def test_extraction_takes_the_last_answer() -> None:
    assert extract_answer("#### 1\n#### 2", finished=True) == "2"
    assert extract_answer(r"\boxed{a{b}c} \boxed{d", finished=True) == "a{b}c"
    assert extract_answer(r"#### \boxed{5}", finished=True) == "5"
    assert extract_answer("nothing", finished=True) is None
