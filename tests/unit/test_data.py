"""Tasks: streams are pure functions of (seed, index), validation is held out, bad rows are named."""

import itertools
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from megatron_grpo.config import ConfigError, DataConfig, RewardConfig
from megatron_grpo.config.problems import MixedSource
from megatron_grpo.data import Problem, Reading, Task, encode_prompts
from megatron_grpo.data import build_task as build
from megatron_grpo.data.mixture import shares
from megatron_grpo.data.tasks import chain_sum_problem, is_held_out
from megatron_grpo.rollout.rewards import build_rewards, gold_check
from megatron_grpo.rollout.rewards.gold import value_gold
from megatron_grpo.training.problems import digest_of

VALUES = gold_check(RewardConfig())


def build_task(data: DataConfig, seed: int) -> Task:
    """The task of a run whose rewards want values."""
    return build(data, seed, Reading(VALUES))


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
    assert task.validation() == [Problem(i + 1, f"Q: q{i} {{x}}\n", f"work\n#### {i}") for i in (10, 11, 12)]
    epochs = [[task.train_problem(e * 10 + i) for i in range(10)] for e in range(4)]
    assert all(sorted(p.id for p in epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(p.id for p in epoch) for epoch in epochs}) == 4
    again = build_task(data, seed=4)
    assert [again.train_problem(i) for i in reversed(range(40))][::-1] == list(itertools.chain(*epochs))
    assert [build_task(data, seed=5).train_problem(i) for i in range(10)] != epochs[0]


def test_jsonl_validation_from_its_own_file(write: Write) -> None:
    path, val_path = write(*_rows(4)), write(*_rows(3), name="val.jsonl")
    task = build_task(DataConfig(task="jsonl", path=path, val_path=val_path, val_size=2), seed=0)
    assert [(p.id, p.answer) for p in task.validation()] == [(5, "work\n#### 0"), (6, "work\n#### 1")]
    assert sorted(task.train_problem(i).id for i in range(4)) == [1, 2, 3, 4]


def test_validation_on_rows_that_are_trained_on_is_refused(write: Write) -> None:
    path = write(*_rows(10))
    apart = DataConfig(task="jsonl", path=path, rows=":6", val_path=path, val_rows="6:", val_size=4)
    assert [problem.answer for problem in build_task(apart, 0).validation()] == [row["answer"] for row in _rows(10)[6:]]
    for rows, val_rows, shared in ((None, None, 10), (":7", "6:", 1)):
        data = DataConfig(task="jsonl", path=path, rows=rows, val_path=path, val_rows=val_rows, val_size=4)
        with pytest.raises(ConfigError, match=f"{shared} validation rows of .*train.jsonl are trained on"):
            build_task(data, 0)


def test_jsonl_keys_numbers_blank_lines_and_line_separators(write: Write) -> None:
    rows = ['\ufeff{"q": "a\u2028b", "a": 1234.5}', "", {"q": "c", "a": "#### $1,234"}, {"q": "d", "a": 7}]
    data = DataConfig(task="jsonl", path=write(*rows), val_size=1, question_key="q", answer_key="a")
    task = build_task(data, seed=0)
    train = sorted((task.train_problem(i) for i in range(2)), key=lambda p: p.id)
    assert train == [Problem(1, "a\u2028b\n", "1234.5"), Problem(3, "c\n", "#### $1,234")]
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
        ({"question": "q", "answer": "3 * 60 = 180,\nso the answer is: 180"}, "prose"),
        ({"question": "q", "answer": "#### 4\n5"}, "prose"),
    ],
)
def test_a7_bad_rows_are_named_by_number(write: Write, row: object, why: str) -> None:
    path = write(*_rows(2), row, *_rows(1))
    with pytest.raises(ConfigError, match=rf"train\.jsonl line 3: .*({why}).*; fix or remove the line"):
        build_task(DataConfig(task="jsonl", path=path, val_size=1), seed=0)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("math", "Answer is forty two."),
        ("gsm8k", "Answer is forty two."),
        ("gsm8k", "3 * 60 = 180, so the answer is: 180"),
    ],
)
def test_a7_prose_is_refused_where_values_are_compared(write: Write, kind: str, answer: str) -> None:
    data = DataConfig(task="jsonl", path=write(*_rows(2), {"question": "q", "answer": answer}), val_size=1)
    with pytest.raises(ConfigError, match=r"train\.jsonl line 3: .*prose.*; fix or remove the line"):
        build(data, 0, Reading(gold_check(RewardConfig(kind=kind))))


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
    VALUES("jsonl", answer)
    assert value_gold(answer) == gold


def test_equal_rows_are_different_problems(write: Write) -> None:
    """Case B8: a problem is its row, not its text."""
    data = DataConfig(task="jsonl", path=write(*_rows(1) * 4), val_size=1)
    task = build_task(data, seed=0)
    assert sorted(task.train_problem(i).id for i in range(3)) == [1, 2, 3]
    assert len({task.train_problem(i).prompt for i in range(3)}) == 1


@pytest.mark.parametrize(
    ("part", "ids"),
    [("2:5", [3, 4, 5]), (":3", [1, 2, 3]), ("-3:", [8, 9, 10]), ("5:-2", [6, 7, 8]), (None, list(range(1, 11)))],
)
def test_slices_count_from_zero_and_keep_row_numbers(write: Write, part: str | None, ids: list[int]) -> None:
    """G12: negative ones too."""
    data = DataConfig(task="jsonl", path=write(*_rows(10)), val_path=write(*_rows(4), name="val.jsonl"), val_size=2)
    data = data.model_copy(update={"rows": part, "val_rows": "1:3"})
    task = build_task(data, seed=0)
    assert sorted(task.train_problem(i).id for i in range(len(ids))) == ids
    assert [problem.answer for problem in task.validation()] == ["work\n#### 1", "work\n#### 2"]
    with pytest.raises(ConfigError, match=r"data\.val_size=3: the validation table has 2 rows; use at most 2"):
        build_task(data.model_copy(update={"val_size": 3}), seed=0)
    with pytest.raises(ConfigError, match=r"data\.rows=20:30 leaves no row"):
        build_task(data.model_copy(update={"rows": "20:30"}), seed=0)


def test_long_prompts_are_refused_by_row_or_left_out(write: Write) -> None:
    rows = [{"question": "x" * length, "answer": "1"} for length in (3, 9, 4, 5)]
    data = DataConfig(task="jsonl", path=write(*rows), val_size=1, prompt_template="{question}")
    with pytest.raises(ConfigError, match=r"line 2: its prompt of 9 tokens is longer than data\.max_prompt=5 \(use at"):
        build(data, 0, Reading(length=len, max_prompt=5))
    task = build(data, 0, Reading(length=len, max_prompt=5, drops=True))
    assert sorted(task.train_problem(i).id for i in range(2)) == [1, 3]
    assert [problem.id for problem in task.validation()] == [4]
    with pytest.raises(ConfigError, match=r"data\.max_prompt=2 leaves no row"):
        build(data, 0, Reading(length=len, max_prompt=2, drops=True))


def test_shares_are_exact_and_add_up() -> None:
    assert shares(1000, [2.0, 1.0]) == [667, 333]
    assert shares(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert shares(1000, [0.7, 0.3]) == [700, 300]


def test_tasks_are_mixed_by_weight_and_keep_their_epochs(write: Write) -> None:
    mix = [
        MixedSource(task="jsonl", path=write(*_rows(30)), weight=3.0),
        MixedSource(task="chain_sum", terms=2),
    ]
    task = build_task(DataConfig(mix=tuple(mix), val_size=10), seed=1)
    stream = [task.train_problem(i) for i in range(3000)]
    for block in (stream[:1000], stream[1000:2000], stream[2000:]):
        assert sum(problem.task == "jsonl" for problem in block) == 750
    rows = [problem.id for problem in stream if problem.task == "jsonl"]
    held_out = [problem for problem in task.validation() if problem.task == "jsonl"]
    assert len(task.validation()) == 10 and len(held_out) == 1 + 6  # one each, and 3/4 of the rest
    epoch = 30 - len(held_out)
    assert all(len(set(rows[start : start + epoch])) == epoch for start in range(0, 2000, epoch))
    assert not {problem.id for problem in stream} & {problem.id for problem in task.validation()}
    again = build_task(DataConfig(mix=tuple(mix), val_size=10), seed=1)
    places = [2999, 17, 1000]
    assert [again.train_problem(i) for i in places] == [stream[i] for i in places]
    assert again.train_problem(2**40 + 5).prompt  # no walk over what comes before
    with pytest.raises(ConfigError, match=r"data\.mix: weight 1\.0 of 5001\.0 is less than one problem in 1000"):
        build_task(DataConfig(mix=(mix[0].model_copy(update={"weight": 5000.0}), mix[1]), val_size=10), seed=1)


TABLE = {"question": ["a", "b", "c", "d"], "answer": ["#### 1", "2", "3", "4"], "other": [1, 2, 3, 4]}
WANT = [("a\n", "1"), ("b\n", "2"), ("c\n", "3"), ("d\n", "4")]


def _read(data: DataConfig) -> list[tuple[str, str]]:
    """The training rows in file order."""
    task = build_task(data, seed=0)
    first = task.train_problem(0)
    problems = {first.id: first}
    for index in range(1, 100):
        problem = task.train_problem(index)
        problems[problem.id] = problem
    return [(problems[number].prompt, value_gold(problems[number].answer)) for number in sorted(problems)]


@pytest.mark.needs("pyarrow")
def test_parquet_files(tmp_path: Path) -> None:
    pyarrow = import_module("pyarrow")
    parquet = import_module("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(TABLE), path)
    data = DataConfig(task="parquet", path=str(path), val_size=1)
    assert _read(data) == WANT[:3]
    with pytest.raises(ConfigError, match=r"rows\.parquet has no column 'q'; set data\.question_key"):
        build_task(data.model_copy(update={"question_key": "q"}), seed=0)
    (tmp_path / "bad.parquet").write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read \(.*\); give a Parquet file"):
        build_task(data.model_copy(update={"path": str(tmp_path / "bad.parquet")}), seed=0)
    parquet.write_table(pyarrow.table({**TABLE, "answer": ["1", "2", None, "4"]}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet row 3: 'answer' is neither a text nor a number; fix or"):
        build_task(data, seed=0)


@pytest.mark.needs("datasets")
def test_saved_datasets_and_their_splits(tmp_path: Path) -> None:
    """What the package datasets writes: one dataset in two shards, and a dict of splits."""
    datasets = import_module("datasets")
    whole = datasets.Dataset.from_dict(TABLE)
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    one = DataConfig(task="folder", path=str(tmp_path / "one"), val_size=1)
    assert _read(one) == WANT[:3]
    shuffled = whole.select([3, 2, 1, 0])
    datasets.DatasetDict({"train": whole, "test": shuffled}).save_to_disk(tmp_path / "two")
    two = DataConfig(task="folder", path=str(tmp_path / "two"), val_split="test", val_size=2)
    assert _read(two) == WANT
    assert [problem.answer for problem in build_task(two, seed=0).validation()] == ["4", "3"]
    with pytest.raises(ConfigError, match=r"data\.split=dev: .*two has train, test; use one of them"):
        build_task(two.model_copy(update={"split": "dev"}), seed=0)


@pytest.mark.needs("pyarrow")
def test_folders_of_parquet_files(tmp_path: Path) -> None:
    pyarrow = import_module("pyarrow")
    parquet = import_module("pyarrow.parquet")
    table = pyarrow.table(TABLE)
    hub = tmp_path / "hub"
    (hub / "main").mkdir(parents=True)
    for name, part in [
        ("train-00000-of-00002", table[:2]),
        ("train-00001-of-00002", table[2:]),
        ("test-00000-of-00001", table[3:]),
    ]:
        parquet.write_table(part, hub / "main" / f"{name}.parquet")
    data = DataConfig(task="folder", path=str(hub), val_split="test", val_size=1)
    assert _read(data) == WANT
    assert [problem.answer for problem in build_task(data, seed=0).validation()] == ["4"]
    with pytest.raises(ConfigError, match=r"data\.split=dev: .*hub has test, train; use one of them"):
        build_task(data.model_copy(update={"split": "dev"}), seed=0)
    plain = tmp_path / "plain"
    plain.mkdir()
    parquet.write_table(table, plain / "part0.parquet")
    assert _read(DataConfig(task="folder", path=str(plain), val_size=1)) == WANT[:3]
    for path, why in [(tmp_path / "no", "is no folder"), (tmp_path, None), (plain / "part0.parquet", "is no folder")]:
        if why:
            with pytest.raises(ConfigError, match=why):
                build_task(DataConfig(task="folder", path=str(path)), seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a saved dataset nor Parquet"):
        build_task(DataConfig(task="folder", path=str(tmp_path / "empty")), seed=0)


def test_without_pyarrow_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"need pyarrow, which is not installed; pip install 'megatron-grpo\[data\]'"):
        build_task(DataConfig(task="parquet", path=str(tmp_path / "rows.parquet")), seed=0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"data\.task=reasoning_gym:x: needs reasoning-gym, which is not installed"):
        build_task(DataConfig(task="reasoning_gym:x"), seed=0)


@pytest.mark.needs("reasoning_gym")
def test_reasoning_gym_streams_and_its_own_rules() -> None:
    gym = import_module("reasoning_gym")
    data = DataConfig(task="reasoning_gym:spell_backward", options={"min_word_len": 3, "max_word_len": 4}, val_size=20)
    task, other = build_task(data, seed=1), build_task(data, seed=2)
    stream = [task.train_problem(i) for i in range(1200)]
    places = [1199, 3, 500]
    assert [build_task(data, seed=1).train_problem(i) for i in places] == [stream[i] for i in places]
    held_out = task.validation()
    assert held_out == other.validation() and len({problem.prompt for problem in held_out}) == 20
    assert not {problem.prompt for problem in held_out} & {problem.prompt for problem in stream}
    assert sum(other.train_problem(i).prompt == stream[i].prompt for i in range(100)) < 10
    (own,) = build_rewards(RewardConfig())
    scorer = gym.get_score_answer_fn("spell_backward")
    for problem in stream[:20]:
        for said, response in [
            (problem.answer, problem.answer),
            (problem.answer, f"#### {problem.answer}"),
            (problem.answer, f"<answer>{problem.answer}</answer>"),
            (problem.answer[:-1] + "q", problem.answer[:-1] + "q"),
        ]:
            assert own.score(response, problem, True).reward == pytest.approx(scorer(said, problem.entry))


@pytest.mark.needs("reasoning_gym")
def test_no_model_text_is_run_by_reasoning_gyms_rules(tmp_path: Path) -> None:
    """Case A10: some of its rules read answers with eval; n_queens and spiral_matrix do."""
    trace = tmp_path / "x"
    (own,) = build_rewards(RewardConfig(time_limit=2.0))
    hostile = [
        f"__import__('os').system('touch {trace}')",
        f"open('{trace}', 'w')",
        f"[open][0]('{trace}', 'w')",
        f"(open)('{trace}', 'w')",
        "[open for x in [1]]",
        "9**9**9**9",
        "9**99999999",
        "[0]*10**11",
        f"(open#!\n('{trace}', 'w'))",
        f'(eval#!\n(chr#!\n(111)+\'pen("{trace}","w")\'))',
        "_\uff3fimport_\uff3f('os')",
        "[].append",
        "[open][0]",
    ]
    for name in ("n_queens", "spiral_matrix", "countdown", "polynomial_multiplication", "binary_matrix"):
        problem = build(DataConfig(task=f"reasoning_gym:{name}", val_size=1), 0).train_problem(0)
        for text in hostile:
            reward = own.score(f"#### {text}", problem, True).reward
            assert reward is not None and 0.0 <= reward < 0.1
        if problem.answer:
            assert own.score(problem.answer, problem, True).reward == 1.0
    assert not trace.exists()


@pytest.mark.needs("reasoning_gym")
def test_what_reasoning_gym_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"reasoning_gym:leg_countin: is not a task .* such as leg_counting"):
        build_task(DataConfig(task="reasoning_gym:leg_countin"), seed=0)
    with pytest.raises(
        ConfigError, match=r"data\.options=\{'legs': 5\}: reasoning_gym:leg_counting does not take them"
    ):
        build_task(DataConfig(task="reasoning_gym:leg_counting", options={"legs": 5}), seed=0)
    small = DataConfig(task="reasoning_gym:spell_backward", options={"min_word_len": 3, "max_word_len": 3})
    with pytest.raises(ConfigError, match=r"tokens is longer than data\.max_prompt=3 \(use at least \d+, or .*drop\)$"):
        build(small.model_copy(update={"val_size": 1}), 0, Reading(length=len, max_prompt=3))
    with pytest.raises(ConfigError, match=r"data\.val_size=1: .* made 0 different problems that fit"):
        build(small.model_copy(update={"val_size": 1}), 0, Reading(length=len, max_prompt=3, drops=True))


class _Bytes:
    """One id a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_a_fingerprint_says_whether_the_stream_is_the_same(write: Write) -> None:
    """Any row counts, the last one of the order too; where the file lies does not."""

    def of(*rows: object, name: str = "train.jsonl", seed: int = 0, **settings: Any) -> str:
        data = DataConfig(task="jsonl", path=write(*rows, name=name), val_size=1, **settings)
        return build_task(data, seed).fingerprint()

    rows = _rows(300)
    once = of(*rows)
    assert of(*rows, name="moved.jsonl") == once
    for place in (0, 150, 298):
        changed = [row | {"answer": "7"} if number == place else row for number, row in enumerate(rows)]
        assert of(*changed) != once
    others = (of(*rows[:-1]), of(*rows, seed=1), of(*rows, prompt_template="Q: {question}"), of(*rows[1:], rows[0]))
    assert len({once, *others}) == 5
    sums = [build_task(DataConfig(terms=terms, val_size=8), seed).fingerprint() for terms in (2, 3) for seed in (0, 1)]
    assert len(set(sums)) == 4
    weights = ((1.0, 1.0), (1.0, 3.0))
    mixed = [[MixedSource(task="chain_sum", terms=n + 2, weight=w) for n, w in enumerate(pair)] for pair in weights]
    assert len({build_task(DataConfig(mix=tuple(mix), val_size=8), 0).fingerprint() for mix in mixed}) == 2
    gym = [("chain_sum", {}), ("chain_sum", {"max_terms": 3}), ("leg_counting", {})]
    tasks = [DataConfig(task=f"reasoning_gym:{name}", options=options, val_size=4) for name, options in gym]
    made = [build_task(data, 0).fingerprint() for data in (*tasks, tasks[0])]
    assert len(set(made)) == 3 and made[0] == made[3]
    lengths = [(300, True), (400, True), (300, False), (400, False)]  # what is too long is left out, or an error
    cut = [build(tasks[0], 0, Reading(VALUES, len, most, drops)).fingerprint() for most, drops in lengths]
    assert len(set(cut)) == 3 and cut[2] == cut[3]


class _Chat(_Bytes):
    """Its template puts the system message first."""

    has_chat_template = True

    def encode_chat(self, text: str, system: str | None) -> list[int]:
        return list(f"{system}|{text}".encode())


def test_the_digest_of_a_run_says_how_prompts_are_put() -> None:
    """The same problems, as they stand or as a message, are not the same to a policy."""
    settings: list[dict[str, Any]] = [{}, {"chat": True}, {"chat": True, "system": "Be brief."}, {"terms": 2}]
    configs = [DataConfig(val_size=8, **each) for each in settings]
    digests = [digest_of(build_task(data, 0), _Chat(), data) for data in configs]  # type: ignore[arg-type]  # no file
    assert len(set(digests)) == 4
    assert digests[1] == digest_of(build_task(configs[1], 0), _Chat(), configs[1])  # type: ignore[arg-type]  # no file


def test_a_digest_makes_few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks of reasoning-gym take a tenth of a second for each."""
    data = DataConfig(task="reasoning_gym:leg_counting", val_size=4)
    task = build_task(data, 0)
    asked: list[int] = []
    make = task.train_problem
    monkeypatch.setattr(task, "train_problem", lambda index: asked.append(index) or make(index))
    assert digest_of(task, _Bytes(), data)  # type: ignore[arg-type]  # no file
    assert set(asked) == {0}


def test_prompts_are_encoded_in_order_and_bounded() -> None:
    problems = [Problem(3, "ab", "1"), Problem(8, "abc", "2")]
    assert encode_prompts(_Bytes().encode, problems, 3) == [[97, 98], [97, 98, 99]]
    with pytest.raises(ConfigError, match=r"data\.max_prompt=2 .* problem 8 of 3 tokens; use at least 3"):
        encode_prompts(_Bytes().encode, problems, 2)
    with pytest.raises(ConfigError, match="problem 5 has an empty prompt"):
        encode_prompts(_Bytes().encode, [Problem(5, "", "1")], 2)


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
    assert encode_prompts(tokenizer.encode, [chain_sum_problem((12, 7, 95))], 10) == [tokenizer.encode("12+07+95>")]
