"""`compare`: differences by hand, formats against each other, and what both stacks compute."""

import json
import math
import runpy
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from megatron_grpo.backends.huggingface import reference_model
from megatron_grpo.bench.logits import Text, logit_gap, prompt_ids
from megatron_grpo.cli import app
from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.compare import difference, examine_pair
from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.names import Weight, model_table
from megatron_grpo.conversion.sources import all_parts
from tests.models import random_model

WEIGHTS = "model.safetensors"
ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def changed(source: Path, target: Path, change: dict[str, Any]) -> Path:
    """A copy with other tensors under some names: ``change`` maps a name to a function of the old one."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / WEIGHTS)
    save_file(tensors | {name: make(tensors[name]) for name, make in change.items()}, target / WEIGHTS)
    return target


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model("qwen2", tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def megatron(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("megatron") / "m"
    wish = Wish(to="megatron", tensor=2, pipeline=2)
    convert(tied, target, wish, note=lambda text: None, progress=lambda done, total: None)
    return target


@pytest.mark.parametrize(
    ("a", "b", "equal", "largest", "relative"),
    [
        ([3.0, 4.0], [3.0, 4.0], True, 0.0, 0.0),
        ([3.0, 4.0], [3.0, 5.0], False, 1.0, 0.2),
        ([3.0, 4.0, 0.0, 0.0], [0.0, 4.0, 0.0, -4.0], False, 4.0, 1.0),
        ([0.0, 1.0], [-0.0, 1.0], False, 0.0, 0.0),
        ([0.0, 0.0], [0.0, 1.0], False, 1.0, math.inf),
        ([1.0, math.nan], [1.0, math.nan], True, 0.0, 0.0),
        ([1.0, math.nan], [1.0, 2.0], False, math.inf, math.inf),
        ([1.0, 2.0], [1.0, math.inf], False, math.inf, math.inf),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 100])
def test_difference_by_hand(
    a: list[float], b: list[float], equal: bool, largest: float, relative: float, block: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("megatron_grpo.conversion.compare.BLOCK", block)
    found = difference("x", torch.tensor([a]), torch.tensor([b]))
    assert (found.equal, found.largest, found.shape) == (equal, largest, (1, len(a)))
    assert found.relative == pytest.approx(relative, rel=1e-15)


def test_another_dtype_differs_though_its_numbers_do_not() -> None:
    found = difference("x", torch.tensor([0.5, 2.0]), torch.tensor([0.5, 2.0], dtype=torch.bfloat16))
    assert (found.equal, found.largest, found.relative) == (False, 0.0, 0.0)
    assert found.dtypes == (torch.float32, torch.bfloat16)


def test_a_layer_is_released_before_the_next_is_read(tied: Path) -> None:
    shape = examine_pair(tied, tied)[0].shape
    calls: list[int | str | None] = []

    class Recorder:
        def weight_dtype(self, weight: Weight) -> torch.dtype:
            raise NotImplementedError

        def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
            calls.append(weight.layer)
            return ()

        def release(self) -> None:
            calls.append("released")

    names = [weight.megatron for weight, _ in all_parts(Recorder(), shape)]
    assert names == [weight.megatron for weight in model_table(shape)]
    per_layer = [["released", *[layer] * 7] for layer in range(3)]
    assert calls == [None, *chain(*per_layer), "released", None]


def test_formats_hold_the_same(tied: Path, megatron: Path) -> None:
    result = command(tied, megatron, "--json", "-")
    assert result.exit_code == 0 and "torch_dist" in result.stderr
    found, tensors = json.loads(result.stdout), load_file(tied / WEIGHTS)
    assert found["equal"] and found["different"] == 0 and found["largest"] == 0.0 and found["logits"] is None
    assert {each["name"]: each["shape"] for each in found["weights"]} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert found["numbers"] == sum(tensor.numel() for tensor in tensors.values())
    assert "equal bit for bit: 38 tensors" in command(megatron, tied).stdout, "12 a layer, embedding and norm"


def test_what_differs_is_listed_worst_first(tied: Path, megatron: Path, tmp_path: Path) -> None:
    norm, bias = "model.norm.weight", "model.layers.1.self_attn.k_proj.bias"
    other = changed(tied, tmp_path / "b", {norm: lambda x: x * 2, bias: lambda x: -x})
    result = command(megatron, other, "--json", tmp_path / "out.json")
    assert result.exit_code == 1 and "different: 2 of 38 tensors" in result.stdout
    assert result.stdout.index(bias) < result.stdout.index(norm)
    found = {each["name"]: each for each in json.loads((tmp_path / "out.json").read_text())["weights"]}
    assert (found[norm]["relative"], found[bias]["relative"]) == (1.0, 2.0)
    assert [name for name, each in found.items() if not each["equal"]] == [bias, norm]


def test_a_common_dtype_may_be_asked_for(tied: Path, tmp_path: Path) -> None:
    rounded = dict.fromkeys(load_file(tied / WEIGHTS), torch.Tensor.bfloat16)
    other = changed(tied, tmp_path / "b", rounded)
    assert command(tied, other).exit_code == 1
    assert command(tied, other, "--dtype", "bfloat16").exit_code == 0


def test_different_models_are_refused_by_their_fields(tied: Path, tmp_path: Path) -> None:
    other = random_model("qwen2", tmp_path / "b", num_hidden_layers=2, rms_norm_eps=1e-3)
    result = command(tied, other)
    assert result.exit_code == 2 and "layers=3 and 2, norm_eps=1e-06 and 0.001; compare two of" in result.stderr
    result = command(tied, random_model("llama", tmp_path / "c"))
    assert result.exit_code == 2 and "family=Qwen2ForCausalLM and LlamaForCausalLM" in result.stderr


def test_damage_and_wrong_options_end_with_2(tied: Path, tmp_path: Path) -> None:
    broken = changed(tied, tmp_path / "b", {})
    whole = (broken / WEIGHTS).read_bytes()
    (broken / WEIGHTS).write_bytes(whole[:-50])
    for arguments, message in (
        ((tied, broken), "is not a readable safetensors file"),
        ((tied, tmp_path / "none"), "is not there"),
        ((tied, tied, "--prompts", "x.jsonl"), "is for --logits"),
        ((tied, tied, "--json", tmp_path / "none/x.json"), "is not there; make it first"),
        ((tied, tied, "--logits", "--prompts", "x.jsonl"), "there is no tokenizer in"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2 and message in result.stderr and not result.stdout


def test_a_checkpoint_without_config_borrows_one(tied: Path, megatron: Path, tmp_path: Path) -> None:
    (tmp_path / "release").symlink_to(megatron / "release")
    assert "add --config-from" in command(tied, tmp_path / "release").stderr
    assert command(tied, tmp_path / "release", "--config-from", tied).exit_code == 0


def test_tool_does_the_same(tied: Path, megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = changed(tied, tmp_path / "b", {"model.norm.weight": lambda x: x + 1})
    for pair, code in (((tied, megatron), 0), ((tied, other), 1), ((tied, tmp_path), 2)):
        monkeypatch.setattr(sys, "argv", ["compare_checkpoints", *map(str, pair)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools/compare_checkpoints.py"), run_name="__main__")
        assert ended.value.code == code


# Logits


def test_logit_gap_by_hand() -> None:
    """A prompt of one token and answers of two: the rows that decide are the first two of three."""
    texts = [Text([5, 1, 0], 1), Text([5, 1, 1], 1)]
    first = [torch.zeros(3, 2), torch.zeros(3, 2)]
    second = [torch.tensor([[0.0, 1.0], [4.0, 1.0], [0.0, 3.0]]), torch.tensor([[0.0, 1.0], [5.0, -6.0], [9.0, 0.0]])]
    gap = logit_gap("x", texts, first, second)
    assert (gap.largest, gap.same_answers, gap.texts) == (9.0, 1, 2)
    assert gap.median == 1.0, "the lower middle of 0 0 0 0 1 1 1 3 4 5 6 9"


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3"])
def test_both_stacks_compute_the_same_and_differences_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """E1, of tied models and others. Twice the last norm is twice every logit, and no other answer."""
    source = random_model(name, tmp_path / "a")
    norm = "transformer.ln_f.weight" if name == "gpt2" else "model.norm.weight"
    bias = {"transformer.ln_f.bias": lambda x: 2 * x} if name == "gpt2" else {}
    doubled = changed(source, tmp_path / "b", {norm: lambda x: 2 * x, **bias})
    other = tmp_path / "m"
    convert(doubled, other, Wish(to="megatron"), note=lambda text: None, progress=lambda done, total: None)
    result = command(source, other, "--logits", "--json", "-")
    own, theirs, between = json.loads(result.stdout)["logits"]
    assert result.exit_code == 1
    assert own["largest"] < 1e-4 and theirs["largest"] < 1e-4
    assert [gap["same_answers"] for gap in (own, theirs, between)] == [8, 8, 8] and between["texts"] == 8
    peer, logits = reference_model(source, torch.float32), []
    peer.generation_config.eos_token_id = None
    with torch.no_grad():
        for ids in prompt_ids(examine_pair(source, source)[0], None):
            text_1S = peer.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)
            logits.append(peer(text_1S).logits.abs().flatten())
    assert between["largest"] == pytest.approx(torch.cat(logits).max().item(), abs=1e-4)
    assert between["median"] == pytest.approx(torch.cat(logits).median().item(), abs=1e-4)


def test_answers_that_differ_are_counted(tied: Path, tmp_path: Path) -> None:
    """The negative of the last norm makes the least likely token the most likely."""
    other = changed(tied, tmp_path / "b", {"model.norm.weight": torch.neg})
    result = command(tied, other, "--logits")
    assert result.exit_code == 1 and result.stdout.count("8 of 8") == 2 and result.stdout.count("0 of 8") == 1


def test_prompts_come_from_the_tokenizer_where_there_is_one(tied: Path, tmp_path: Path) -> None:
    policy, _ = examine_pair(ROOT / "examples/tiny/policy", ROOT / "examples/tiny/policy")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "12+07+95>"}\n{"prompt": "1"}\n')
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny/policy")
    assert prompt_ids(policy, file)[0] == [1, *tokenizer("12+07+95>", add_special_tokens=False)["input_ids"]]
    assert len(prompt_ids(policy, file)) == 2 and len(prompt_ids(policy, None)) == 8
    small, _ = examine_pair(tied, tied)
    fixed = prompt_ids(small, None)
    assert [len(ids) for ids in fixed] == [16] * 8 and all(token < 61 for ids in fixed for token in ids)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        prompt_ids(policy, file)
