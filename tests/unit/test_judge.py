"""What the judge's table says, and that its pieces come together in the order of the batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.data import Problem
from megatron_grpo.rollout.rewards import NamedReward, Patience, Question, Verdict
from megatron_grpo.training.judge import UNSCORED, Judge
from megatron_grpo.training.scoring import Pieces

TINY = Path(__file__).parents[2] / "examples/tiny/policy"
TOKENIZER = load_tokenizer(TINY)
PROMPTS = [[1, 5], [1, 6, 7], [1, 8], [1, 9]]
PROBLEMS = [Problem(number, "", str(number)) for number in range(4)]


def lengths(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """A model that says how many tokens it was given."""
    return torch.tensor([float(len(ids)) for ids in sequences])


def rule(response: str, question: Question, finished: bool) -> Verdict:
    """1 where the response is the answer and ended; no word about 3; the answer to 2 cannot be read."""
    if question.answer == "3":
        return Verdict(None, True)
    return Verdict(float(response == question.answer and finished), question.answer != "2")


def responses() -> list[list[int]]:
    end = TOKENIZER.eos_ids
    digits = [TOKENIZER.encode(str(number))[1:] for number in range(4)]
    return [[*digits[0], *end], digits[1], [*digits[2], *end], [*digits[3], *end]]


def judge(**models: Any) -> Judge:
    return Judge(("model", "rule"), [NamedReward("rule", 2.0, rule)], models, TOKENIZER)


def test_rules_read_text_and_models_read_all_ids() -> None:
    table = judge(model=lengths)(PROMPTS, responses(), PROBLEMS)
    assert table[0].tolist() == [4.0, 4.0, 4.0, 4.0]  # prompt, response and end
    assert table[1, :3].tolist() == [1.0, 0.0, 1.0] and table[1, 3].isnan()  # the second never ended
    assert table[2].tolist() == [1.0, 1.0, 0.0, 1.0]


def test_what_a_model_says_that_is_no_number_is_no_score() -> None:
    said = torch.tensor([1.0, float("inf"), float("nan"), -2.0])
    table = judge(model=lambda sequences: said)(PROMPTS, responses(), PROBLEMS)
    assert table[0, [0, 3]].tolist() == [1.0, -2.0] and bool((table[0, 1:3] == UNSCORED).all())


def test_pieces_come_in_any_order() -> None:
    whole = judge(model=lengths)(PROMPTS, responses(), PROBLEMS)
    pieces = Pieces(judge(model=lengths), PROMPTS, PROBLEMS)
    for rows in (slice(3, 4), slice(0, 1), slice(1, 3)):
        assert not pieces.is_complete
        with pytest.raises(AssertionError, match="every row was judged"):
            _ = pieces.table
        pieces.add(rows, responses()[rows])
    assert pieces.is_complete
    torch.testing.assert_close(pieces.table, whole, equal_nan=True)


def test_a_rule_that_fails_is_told_from_one_that_has_nothing_to_say() -> None:
    def fails(response: str, question: Question, finished: bool) -> Verdict:
        return Verdict(None, question.answer == "0")

    table = Judge(("rule",), [NamedReward("rule", 1.0, fails)], {}, TOKENIZER)(PROMPTS, responses(), PROBLEMS)
    assert table[0, 0].isnan() and table[0, 1:].tolist() == [UNSCORED] * 3


def test_a_batch_has_its_patience_once() -> None:
    """Whatever the number of its pieces: the others wait for all of them."""
    patience = Patience(5.0)
    slow = Judge(("rule",), [NamedReward("rule", 1.0, rule)], {}, TOKENIZER, patience=patience)
    patience.left = 1.0
    pieces = Pieces(slow, PROMPTS, PROBLEMS)
    assert patience.left == 5.0
    patience.left = 2.0
    pieces.add(slice(0, 2), responses()[:2])
    assert patience.left == 2.0
