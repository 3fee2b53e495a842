"""Families as tables: what config.json may say, and GPT-2's fused and transposed matrices."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import FAMILIES, SCORERS, model_shape
from megatron_grpo.conversion.names import TABLES, check_tensor_size, hf_shapes, megatron_shape, stage_table
from megatron_grpo.conversion.reader import HFReader, check_tensors, read_hf_config
from megatron_grpo.conversion.shards import to_hf, to_megatron
from tests.models import GPT2_SIZES, MODELS, SIZES, hf_weights, random_model, weights_at

LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], **SIZES, "sliding_window": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **SIZES}
GPT2 = {"architectures": ["GPT2LMHeadModel"], **GPT2_SIZES}


@pytest.mark.parametrize("name", MODELS)
def test_shape_and_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    random_model(name, tmp_path)
    shape = model_shape(read_hf_config(tmp_path))
    saved = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert hf_shapes(shape) == saved


def test_absent_fields_mean_what_transformers_makes_of_them() -> None:
    import transformers

    peer, shape = transformers.GPT2Config(**GPT2_SIZES), model_shape(GPT2)
    assert (shape.tied, shape.norm_eps, shape.ffn) == (peer.tie_word_embeddings, peer.layer_norm_epsilon, 4 * 24)
    given = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    given |= {"num_attention_heads": 8, "hidden_size": 32}
    peer = transformers.MistralConfig(**given)
    assert model_shape(given).kv_groups == peer.num_key_value_heads == 8
    assert transformers.MistralConfig().sliding_window == 4096, "what the refusal of an absent field rests on"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 4096}, "sliding_window=4096 in config.json .* model with sliding_window=null"),
        ({k: MISTRAL[k] for k in MISTRAL.keys() - {"sliding_window"}}, r"sliding_window=4096 \(left out\) in config"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window=4096 in config.json is not known here"),
        (LLAMA | {"logit_softcap": 30.0}, "logit_softcap=30.0 in config.json is not known here"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved=True"),
        (LLAMA | {"auto_map": {"AutoModel": "code.Model"}}, "auto_map=.* code that comes with a model is never run"),
        (LLAMA | {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        (LLAMA | {"rope_scaling": [2.0]}, "rope_scaling=.2.0. in config.json is not a table"),
        (GPT2 | {"activation_function": "relu"}, "activation_function=relu .* activation_function=gelu_new"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights=False"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True"),
        (GPT2 | {"n_head": 5}, "n_embd=24 is not a multiple of n_head=5; correct config.json"),
        (GPT2 | {"rope_theta": 1e4}, "rope_theta=10000.0 in config.json is not known here"),
        (LLAMA | {"is_causal": False}, "is_causal=False in config.json is not supported"),
        (LLAMA | {"use_rope": False}, "use_rope=False in config.json is not known here"),
        (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' .* is neither true nor false"),
        (LLAMA | {"num_hidden_layers": 10**12}, "is not a positive whole number up to"),
        (LLAMA | {"rms_norm_eps": 10**400}, "is not a positive number"),
        (LLAMA | {"layer_types": 5}, "is not a list of names"),
        ({"architectures": [["x"]]}, "is not a list of names"),
        ({"architectures": ["Gemma2ForCausalLM"]}, r"Gemma2ForCausalLM.* \(it scales its embedding .* caps logits"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM.* second RoPE base"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.* use a model of LlamaForCausalLM"),
    ],
)
def test_what_changes_the_forward_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    """E10: also what nobody here knows."""
    with pytest.raises(ConfigError, match=message):
        model_shape(config)


def test_what_says_nothing_is_taken() -> None:
    idle = {
        "use_mrope": False,
        "is_causal": True,
        "unsloth_version": "1",
        "_name_or_path": "x",
        "sliding_window": 32768,
        "new": None,
    }
    assert model_shape(QWEN2 | idle) == model_shape(QWEN2)


def test_every_family_has_its_table() -> None:
    assert FAMILIES.keys() | SCORERS.keys() == TABLES.keys()


# GPT-2


def gpt2_parts() -> tuple[dict[str, torch.Tensor], Any]:
    shape = model_shape(GPT2 | {"n_layer": 1})
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(*size, generator=generator) for name, size in hf_shapes(shape).items()}, shape


def test_gpt2_qkv_by_hand() -> None:
    """Conv1D keeps [in, out] with query, key and value side by side; Megatron wants [q, k, v] head by head."""
    parts, shape = gpt2_parts()
    weight = next(w for w in stage_table(shape, range(1), first=False, last=False) if w.megatron.endswith("qkv.weight"))
    fused = parts["transformer.h.0.attn.c_attn.weight"]
    whole = to_megatron((fused,), weight, shape)
    q, k, v = fused.T.split(24)
    want = torch.cat([x[head * 6 : head * 6 + 6] for head in range(4) for x in (q, k, v)])
    assert torch.equal(whole, want) and whole.shape == megatron_shape(shape, weight)
    assert torch.equal(to_hf(whole, weight, shape)[0], fused)


@pytest.mark.parametrize("split", [[3], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "gpt2_wide"])
def test_gpt2_to_stages_and_back_is_bit_equal(name: str, split: list[int], tensor: int, tmp_path: Path) -> None:
    round_trip(random_model(name, tmp_path), split, tensor)


@pytest.mark.parametrize(
    ("heads", "groups", "tensor"),
    [(*sizes, tensor) for sizes in [(14, 2), (12, 2), (16, 2)] for tensor in (1, 2)]
    + [(*sizes, tensor) for sizes in [(28, 4), (8, 8)] for tensor in (1, 2, 4)],
)
def test_qkv_bias_round_trip_is_bit_equal(heads: int, groups: int, tensor: int, tmp_path: Path) -> None:
    """E5: published (heads, KV groups) of real models, with biases and tied embeddings."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 2 * heads}
    round_trip(random_model("qwen2", tmp_path, **changes), [2, 1], tensor)


def round_trip(path: Path, split: list[int], tensor: int) -> None:
    shape = model_shape(read_hf_config(path))
    source = load_file(path / "model.safetensors")
    with HFReader(path) as reader:
        stages = {
            (stage, rank): weights_at(reader, shape, split, stage, rank, tensor)
            for stage in range(len(split))
            for rank in range(tensor)
        }
    back = hf_weights(stages, shape, split)
    assert back.keys() == source.keys() and all(torch.equal(back[name], source[name]) for name in source)


def test_a_body_saved_alone_is_read(tmp_path: Path) -> None:
    """OpenAI's GPT-2 on the hub has no ``transformer.`` in front of its names, and carries masks."""
    random_model("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    shape = model_shape(read_hf_config(tmp_path))
    with HFReader(tmp_path, TABLES[shape.family].prefix) as reader:
        check_tensors(reader, shape)
        assert all(torch.equal(reader.get(name), tensors[name]) for name in hf_shapes(shape))


def test_sizes_are_named_as_the_family_names_them() -> None:
    shape = dataclasses.replace(model_shape(GPT2), heads=5, kv_groups=5, ffn=96)
    with pytest.raises(ConfigError, match=r"--tensor=2 does not divide n_head=5 \(remainder 1\) .* use one of 1$"):
        check_tensor_size(shape, 2, "--tensor")
