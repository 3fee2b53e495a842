"""Tasks: streams are pure functions of (seed, index), validation is held out, bad rows are named."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from megatron_grpo.config import ConfigError, DataConfig
from megatron_grpo.data import Problem, build_task, encode_prompts
from megatron_grpo.data.jsonl import normalise_gold
from megatron_grpo.data.tasks import chain_sum_problem, is_held_out

POLICY = Path(__file__).parents[2] / "examples" / "tiny" / "policy"


def _sum_of(problem: Problem) -> str:
    """The answer by long addition of the prompt's digits."""
    tens = units = 0
    for term in problem.prompt.removesuffix(">").split("+"):
        assert len(term) == 2
        tens, units = tens + "0123456789".index(term[0]), units + "0123456789".index(term[1])
    return f"{(tens + units // 10) % 10}{units % 10}"


def test_chain_sum_by_hand() -> None:
    assert chain_sum_problem((12, 7, 95)) == Problem(120795, "12+07+95>", "14")
    assert chain_sum_problem((0, 0)) == Problem(0, "00+00>", "00")
    assert chain_sum_problem((99, 99, 99, 99)).answer == "96"


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_chain_sum_answers_and_lengths(terms: int) -> None:
    task = build_task(DataConfig(terms=terms, val_size=100), seed=1)
    problems = [task.train_problem(i) for i in range(300)] + task.validation()
    assert all(p.answer == _sum_of(p) for p in problems)
    assert {len(p.prompt) for p in problems} == {3 * terms}


def test_chain_sum_stream_depends_on_seed_and_index_alone() -> None:
    first, second = (build_task(DataConfig(), seed=5) for _ in range(2))
    backwards = [second.train_problem(i) for i in reversed(range(200))][::-1]
    assert [first.train_problem(i) for i in range(200)] == backwards
    other = build_task(DataConfig(), seed=6)
    assert sum(other.train_problem(i) == backwards[i] for i in range(200)) < 5


def test_chain_sum_validation_is_fixed_and_never_trained_on() -> None:
    held_out = build_task(DataConfig(terms=2, val_size=312), seed=0).validation()
    assert len({p.prompt for p in held_out}) == len({p.id for p in held_out}) == 312
    prompts = {p.prompt for p in held_out}
    for seed in (0, 1):
        task = build_task(DataConfig(terms=2, val_size=312), seed=seed)
        assert task.validation() == held_out
        trained = {task.train_problem(i).prompt for i in range(20_000)}
        assert not trained & prompts
        assert len(trained) > 7_000  # of the 10,000 problems, most are met


def test_about_one_problem_in_sixteen_is_held_out() -> None:
    share = sum(is_held_out((a, b)) for a in range(100) for b in range(100)) / 10_000
    assert share == pytest.approx(1 / 16, abs=0.01)


def test_a_short_chain_sum_refuses_a_large_validation() -> None:
    with pytest.raises(ConfigError, match=r"data\.val_size=400 .* at most 312"):
        build_task(DataConfig(terms=2, val_size=400), seed=0)


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (objects, or raw text) to a file and gives its path."""

    def to_file(*rows: object, name: str = "train.jsonl") -> str:
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to_file


def _rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"q{i}", "answer": f"work\n#### {i}"} for i in range(count)]


def test_jsonl_uses_every_row_once_an_epoch_and_holds_out_the_last(write: Write) -> None:
    data = DataConfig(task="jsonl", path=write(*_rows(13)), val_size=3, prompt_template="Q: {question} {x}\n")
    task = build_task(data, seed=4)
    assert task.validation() == [Problem(i + 1, f"Q: q{i} {{x}}\n", str(i)) for i in (10, 11, 12)]
    epochs = [[task.train_problem(e * 10 + i) for i in range(10)] for e in range(4)]
    assert all(sorted(p.id for p in epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(p.id for p in epoch) for epoch in epochs}) == 4
    again = build_task(data, seed=4)
    assert [again.train_problem(i) for i in reversed(range(40))][::-1] == list(itertools.chain(*epochs))
    assert [build_task(data, seed=5).train_problem(i) for i in range(10)] != epochs[0]


def test_jsonl_validation_from_its_own_file(write: Write) -> None:
    path, val_path = write(*_rows(4)), write(*_rows(3), name="val.jsonl")
    task = build_task(DataConfig(task="jsonl", path=path, val_path=val_path, val_size=2), seed=0)
    assert [(p.id, p.answer) for p in task.validation()] == [(5, "0"), (6, "1")]
    assert sorted(task.train_problem(i).id for i in range(4)) == [1, 2, 3, 4]


def test_jsonl_keys_numbers_blank_lines_and_line_separators(write: Write) -> None:
    rows = ['\ufeff{"q": "a\u2028b", "a": 1234.5}', "", {"q": "c", "a": "#### $1,234"}, {"q": "d", "a": 7}]
    data = DataConfig(task="jsonl", path=write(*rows), val_size=1, question_key="q", answer_key="a")
    task = build_task(data, seed=0)
    train = sorted((task.train_problem(i) for i in range(2)), key=lambda p: p.id)
    assert train == [Problem(1, "a\u2028b\n", "1234.5"), Problem(3, "c\n", "1234")]
    assert task.validation() == [Problem(4, "d\n", "7")]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON|nested"),
        ("[1]", "not a JSON object"),
        ({"question": "q"}, "no key 'answer'"),
        ({"answer": "1"}, "no key 'question'"),
        ({"question": 3, "answer": "1"}, "'question' is not a text"),
        ({"question": " ", "answer": "1"}, "'question' is not a text"),
        ({"question": "q", "answer": True}, "neither a text nor a number"),
        ({"question": "q", "answer": None}, "neither a text nor a number"),
        ('{"question": "q", "answer": NaN}', "NaN"),
        ({"question": "q", "answer": "work ####  "}, "empty"),
        ({"question": "q", "answer": "None"}, "empty"),
        ({"question": "q", "answer": "3 * 60 = 180, so the answer is: 180"}, "prose"),
        ({"question": "q", "answer": "Answer is forty two."}, "prose"),
        ({"question": "q", "answer": "#### 4\n5"}, "prose"),
    ],
)
def test_a7_bad_rows_are_named_by_number(write: Write, row: object, why: str) -> None:
    path = write(*_rows(2), row, *_rows(1))
    with pytest.raises(ConfigError, match=rf"train\.jsonl line 3: .*({why}).*; fix or remove the line"):
        build_task(DataConfig(task="jsonl", path=path, val_size=1), seed=0)


def test_jsonl_files_that_cannot_be_used(write: Write, tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9", "answer": "1"}')
    for path, why in [
        (str(tmp_path / "absent.jsonl"), "cannot be read"),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "latin.jsonl"), "line 1: it is not UTF-8"),
        (write("", name="empty.jsonl"), "no rows"),
        (write(*_rows(3)), r"data\.val_size=3 leaves no row .* at most 2"),
    ]:
        with pytest.raises(ConfigError, match=why):
            build_task(DataConfig(task="jsonl", path=path, val_size=3), seed=0)
    with pytest.raises(ConfigError, match=r"data\.path"):
        build_task(DataConfig(task="jsonl"), seed=0)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1 + 1 = <<1+1=2>>2\n#### 2", "2"),
        ("#### 1 #### 1,234,567", "1234567"),
        ("$5.50", "5.50"),
        ("18.", "18"),
        ("-$3", "-3"),
        ("- 3", "-3"),
        ("\N{MINUS SIGN}3", "-3"),
        ("+7", "7"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"5\text{ square cm}", r"5\text{ square cm}"),
        ("3/4", "3/4"),
        ("18 dollars", "18 dollars"),
        ("Paris", "Paris"),
    ],
)
def test_gold_is_normalised(answer: str, gold: str) -> None:
    assert normalise_gold(answer) == gold


class _Bytes:
    """One id a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_prompts_are_encoded_in_order_and_bounded() -> None:
    problems = [Problem(3, "ab", "1"), Problem(8, "abc", "2")]
    assert encode_prompts(_Bytes(), problems, 3) == [[97, 98], [97, 98, 99]]
    with pytest.raises(ConfigError, match=r"data\.max_prompt=2 .* problem 8 of 3 tokens; use at least 3"):
        encode_prompts(_Bytes(), problems, 2)
    with pytest.raises(ConfigError, match="problem 5 has an empty prompt"):
        encode_prompts(_Bytes(), [Problem(5, "", "1")], 2)


def test_the_tiny_tokenizer_is_its_sentencepiece_model_and_loses_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    pieces = SentencePieceProcessor(model_file=str(POLICY / "tokenizer.model"))
    assert len(tokenizer) == pieces.get_piece_size() == 64
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (pieces.unk_id(), pieces.bos_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 2, 3)
    for text in ("12+07+95>", "19,14=14", "  a  b ", " ", "x\n\ny", "Apples", "s> /s> #### 42"):
        ids = tokenizer.encode(text)
        assert ids == [1, *pieces.encode(text)]
        assert tokenizer.decode(ids[1:]) == text.replace("A", "<unk>")
        assert tokenizer.decode([*ids, 2, 3], skip_special_tokens=True) == text.replace("A", "")
    every = list(range(4, 64))
    assert tokenizer.encode(tokenizer.decode(every), add_special_tokens=False) == every
    assert encode_prompts(tokenizer, [chain_sum_problem((12, 7, 95))], 10) == [tokenizer.encode("12+07+95>")]
