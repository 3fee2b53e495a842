"""Reward models that cannot score what the policy writes are refused in words, before any rank starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_grpo.backends.reward_models import check_reward_models
from megatron_grpo.config import Config, ConfigError
from megatron_grpo.conversion.families import model_shape, scorer_shape
from megatron_grpo.conversion.names import hf_shapes
from megatron_grpo.conversion.reader import read_hf_config
from tests.models import SIZES

TINY = Path(__file__).parents[2] / "examples/tiny/policy"


def write(folder: Path, kind: str = "ForSequenceClassification", **changes: Any) -> Path:
    config = transformers.LlamaConfig(**(SIZES | {"vocab_size": 64, "num_labels": 1, "pad_token_id": 0} | changes))
    torch.manual_seed(3)
    getattr(transformers, f"Llama{kind}")(config).save_pretrained(folder)
    return folder


def check(folder: Path, **parallel: int) -> None:
    check_reward_models(
        Config.model_validate(
            {
                "model": {"path": str(TINY)},
                "reward": {"kind": f"model:{folder}"},
                "parallel": parallel,
                "rollout": {"max_response": 28},
                "data": {"max_prompt": 20},
            }
        )
    )


def refused(folder: Path, **parallel: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder, **parallel)
    said = str(caught.value)
    assert said.startswith(f"reward.kind=model:{folder}: ")
    return said


def test_a_classifier_with_one_label_will_do_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "judge")
    check(folder)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    check(folder, tensor=2)


def test_its_tensors_are_the_body_and_one_row(tmp_path: Path) -> None:
    """Tied embeddings tie a head over the vocabulary, never a score."""
    fields = read_hf_config(write(tmp_path / "judge", tie_word_embeddings=True))
    shapes = hf_shapes(scorer_shape(fields))
    body = hf_shapes(model_shape(fields | {"architectures": ["LlamaForCausalLM"]}))
    assert shapes == body | {"score.weight": (1, 24)}


def test_other_models_are_refused(tmp_path: Path) -> None:
    assert "'LlamaForCausalLM'] in config.json is not supported" in refused(write(tmp_path / "policy", "ForCausalLM"))
    assert "3 labels in config.json" in refused(write(tmp_path / "classes", num_labels=3))
    assert "2 labels in config.json" in refused(write(tmp_path / "default", num_labels=2))
    assert "47 positions" in refused(write(tmp_path / "short", max_position_embeddings=47))
    assert "vocabulary of 30" in refused(write(tmp_path / "small", vocab_size=30))
    assert "parallel.tensor=4 does not divide" in refused(write(tmp_path / "judge"), tensor=4)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert "holds neither model.safetensors" in refused(bare)
    halves = [write(tmp_path / name, num_labels=count) for name, count in (("one", 1), ("two", 2))]
    shutil.copy(halves[1] / "model.safetensors", halves[0])
    assert "tensor score.weight" in refused(halves[0]) and "[2, 24]" in refused(halves[0])


def test_a_tokenizer_of_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    a, b = "y", "z"
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    assert "its tokenizer is not the policy's" in refused(folder)
