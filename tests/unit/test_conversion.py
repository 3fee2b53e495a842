"""Hugging Face <-> Megatron weights: numbers worked out by hand, and transformers' own models as peers."""

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.backends.huggingface import load_hf_config, load_tokenizer, reference_model
from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.files import stage_weights
from megatron_grpo.conversion.names import check_tensor_size, hf_shapes, padded_vocab
from megatron_grpo.conversion.reader import HFReader, hf_source
from megatron_grpo.conversion.shards import (
    fuse_gate_up,
    fuse_qkv,
    pad_vocab,
    shard,
    split_gate_up,
    split_qkv,
    strip_vocab,
    unshard,
)
from tests.models import hf_weights, write_hf

VOCAB, LAYERS = 70, 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_model(family: str) -> Any:
    """A random model: Llama untied, Qwen2 tied with biases, Qwen3 with qk-norm and wide heads."""
    import transformers

    torch.manual_seed(0)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    extra: dict[str, Any] = {
        "llama": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": False, "head_dim": 10},
    }[family]
    built = model(config(**SIZES, **extra))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.3)
    return built.eval()


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one_llama")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def broken(llama_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


def shape_of(path: Path) -> ModelShape:
    return model_shape(load_hf_config(path))


def all_stages(
    path: Path, split: list[int], tensor: int, dtype: torch.dtype = torch.float32
) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    ends = [sum(split[:n]) for n in range(len(split) + 1)]
    with hf_source(path, shape_of(path)) as source:
        return {
            (stage, rank): dict(
                stage_weights(
                    source,
                    shape_of(path),
                    range(*bounds),
                    first=stage == 0,
                    last=stage == len(split) - 1,
                    tensor_rank=rank,
                    tensor_size=tensor,
                    dtype=dtype,
                )
            )
            for stage, bounds in enumerate(pairwise(ends))
            for rank in range(tensor)
        }


# Shapes and names


@pytest.mark.parametrize(
    ("vocab", "padded"),
    [
        (50257, (50304, 50432, 50688, 51200)),
        (32000, (32000, 32000, 32256, 32768)),
        (151665, (151680, 151808, 152064, 152576)),
        (151936, (151936, 152064, 152064, 152576)),
        (128256, (128256, 128256, 128512, 129024)),
    ],
)
def test_padded_vocab_is_the_published_table(vocab: int, padded: tuple[int, ...]) -> None:
    """E4."""
    assert tuple(padded_vocab(vocab, tensor) for tensor in (1, 2, 4, 8)) == padded


def test_model_shape_reads_every_size(model_dir: Path) -> None:
    """E10: the norm's epsilon is the model's own."""
    shape = shape_of(model_dir)
    name = json.loads((model_dir / "config.json").read_text())["architectures"][0]
    expected = {
        "LlamaForCausalLM": (6, 1e-5, False, False, False),
        "Qwen2ForCausalLM": (6, 1e-6, True, True, False),
        "Qwen3ForCausalLM": (10, 1e-6, False, False, True),
    }[name]
    assert (shape.head_dim, shape.norm_eps, shape.tied, shape.qkv_bias, shape.qk_norm) == expected
    sizes = (
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_groups,
        shape.ffn,
        shape.vocab,
        shape.max_positions,
    )
    assert sizes == (5, 24, 4, 2, 40, 70, 64)


LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_theta": 1000000, "rope_scaling": None}, 1000000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, 1000000.0),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}, 7.0),
    ],
)
def test_rope_theta_is_found_in_both_places(rope: dict[str, Any], theta: float) -> None:
    """E10: transformers 5 keeps it inside rope_parameters."""
    assert model_shape(LLAMA | rope).rope_theta == theta


def test_absent_fields_mean_what_transformers_makes_of_them() -> None:
    import transformers

    for name, config in (("Llama", transformers.LlamaConfig), ("Qwen3", transformers.Qwen3Config)):
        given = LLAMA | {
            "architectures": [f"{name}ForCausalLM"],
            "num_attention_heads": 32,
            "hidden_size": 64,
        }
        del given["num_key_value_heads"]
        peer, shape = config(**given), model_shape(given)
        assert (shape.kv_groups, shape.head_dim) == (peer.num_key_value_heads, peer.head_dim)
        assert (shape.norm_eps, shape.tied) == (peer.rms_norm_eps, peer.tie_word_embeddings)
        assert shape.rope_theta == peer.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures="),
        ({"architectures": None}, "architectures=None"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.'sliding_attention'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type=linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type=llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type=yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor=0.25"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor=2.0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta has several values"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size=24 is not a multiple"),
        ({"head_dim": 5}, "head_dim=5"),
    ],
)
def test_what_changes_the_forward_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    """E10: linear RoPE scaling is never lost in silence. E11: nor are experts."""
    with pytest.raises(ConfigError, match=message):
        model_shape(LLAMA | change)


def test_hf_shapes_are_those_of_transformers(model_dir: Path) -> None:
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(model_dir / "model.safetensors").items()}
    assert hf_shapes(shape_of(model_dir)) == saved


# Shards


def test_fused_qkv_by_hand() -> None:
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = fuse_qkv(q, k, v, heads=4, groups=2)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard(fused, "qkv", 1, 2).tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize(
    ("heads", "groups", "tensor"),
    [(*sizes, tensor) for sizes in [(14, 2), (12, 2), (16, 2)] for tensor in (1, 2)]
    + [(*sizes, tensor) for sizes in [(28, 4), (8, 8)] for tensor in (1, 2, 4)],
)
@pytest.mark.parametrize("rest", [(5,), ()], ids=["weight", "bias"])
def test_qkv_round_trip_is_bit_exact(heads: int, groups: int, tensor: int, rest: tuple[int, ...]) -> None:
    width = 6
    q, k, v = (torch.randn(n * width, *rest) for n in (heads, groups, groups))
    parts = [shard(fuse_qkv(q, k, v, heads, groups), "qkv", rank, tensor) for rank in range(tensor)]
    for rank, part in enumerate(parts):
        own_q, own_k, own_v = split_qkv(part, heads // tensor, groups // tensor)
        assert torch.equal(own_q, q.chunk(tensor)[rank])
        assert torch.equal(own_k, k.chunk(tensor)[rank])
        assert torch.equal(own_v, v.chunk(tensor)[rank])
    back = split_qkv(unshard(parts, "qkv"), heads, groups)
    assert all(torch.equal(got, want) for got, want in zip(back, (q, k, v), strict=True))


def test_tensor_size_that_cuts_a_group_is_refused_with_the_reason() -> None:
    """D7: Qwen2.5-0.5B has 14 heads in 2 groups. E5: 64 heads in 2 groups would leave some of 8 ranks without keys."""
    qwen_half = dataclasses.replace(model_shape(LLAMA), heads=14, kv_groups=2, ffn=4864)
    check_tensor_size(qwen_half, 2)
    with pytest.raises(ConfigError) as caught:
        check_tensor_size(qwen_half, 4)
    reason = "num_attention_heads=14 (remainder 2) and num_key_value_heads=2 (remainder 2)"
    for part in ("parallel.tensor=4", reason, "use one of 1, 2"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"tensor=8 does not divide num_key_value_heads=2 .* use one of 1, 2$"):
        check_tensor_size(dataclasses.replace(qwen_half, heads=64), 8)


def test_every_cut_by_hand() -> None:
    table = torch.arange(8).reshape(4, 2)
    assert shard(table, "column", 1, 2).tolist() == [[4, 5], [6, 7]]
    assert shard(table, "vocab", 0, 4).tolist() == [[0, 1]]
    assert shard(table, "row", 1, 2).tolist() == [[1], [3], [5], [7]]
    assert shard(table, "gate_up", 1, 2).tolist() == [[2, 3], [6, 7]]
    assert shard(table, "replicated", 1, 2) is table
    for how in ("column", "vocab", "row", "gate_up", "qkv", "replicated"):
        assert torch.equal(unshard([shard(table, how, rank, 2) for rank in range(2)], how), table)
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3 does not divide dimension 0"):
        shard(table, "column", 0, 3)


def test_gate_up_and_vocabulary_padding() -> None:
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    assert fuse_gate_up(gate, up).flatten().tolist() == [1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(split_gate_up(fuse_gate_up(gate, up)), (gate, up), strict=True))
    assert pad_vocab(gate, 4).flatten().tolist() == [1, 2, 0, 0]
    assert torch.equal(strip_vocab(pad_vocab(gate, 4), 2), gate)


# Directories


@pytest.mark.parametrize("split", [[5], [3, 2], [2, 2, 1]], ids=str)
@pytest.mark.parametrize("tensor", [1, 2])
def test_hf_to_stages_to_hf_is_bit_equal(model_dir: Path, split: list[int], tensor: int) -> None:
    source = load_file(model_dir / "model.safetensors")
    back = hf_weights(all_stages(model_dir, split, tensor), shape_of(model_dir), split)
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in source)


def test_stage_contents_by_hand(model_dir: Path) -> None:
    source, shape = load_file(model_dir / "model.safetensors"), shape_of(model_dir)
    stages = all_stages(model_dir, [3, 2], 2)
    last = stages[1, 1]
    assert torch.equal(
        last["decoder.layers.0.mlp.linear_fc1.weight"],
        torch.cat([source[f"model.layers.3.mlp.{which}_proj.weight"][20:] for which in ("gate", "up")]),
    )
    assert torch.equal(
        last["decoder.layers.1.self_attention.linear_proj.weight"],
        source["model.layers.4.self_attn.o_proj.weight"][:, 2 * shape.head_dim :],
    )
    head = source["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    # 70 rows padded to 256: rank 0 holds 128 rows, of which 58 are zero, and rank 1 padding alone.
    assert torch.equal(stages[1, 0]["output_layer.weight"], torch.cat((head, torch.zeros(58, 24))))
    assert torch.equal(last["output_layer.weight"], torch.zeros(128, 24))
    assert "embedding.word_embeddings.weight" not in last
    whole = all_stages(model_dir, [5], 1)[0, 0]
    assert ("output_layer.weight" in whole) == (not shape.tied)


def test_stage_tensors_take_the_dtype(llama_dir: Path) -> None:
    stage = all_stages(llama_dir, [5], 1, torch.bfloat16)[0, 0]
    assert {tensor.dtype for tensor in stage.values()} == {torch.bfloat16}
    assert all(tensor.is_contiguous() for tensor in stage.values())


def test_export_loads_in_transformers_with_the_same_logits(model_dir: Path, tmp_path: Path) -> None:
    tensors = hf_weights(all_stages(model_dir, [2, 2, 1], 2), shape_of(model_dir), [2, 2, 1])
    ids_BS = torch.arange(16).reshape(2, 8)
    want = reference_model(model_dir, torch.float32)(ids_BS).logits
    for name, limit in (("one", 5_000_000_000), ("many", 30_000)):
        write_hf(tmp_path / name, tensors, model_dir, max_file_bytes=limit)
        assert torch.equal(reference_model(tmp_path / name, torch.float32)(ids_BS).logits, want)
        with HFReader(tmp_path / name) as reader:
            assert reader.names == hf_shapes(shape_of(model_dir)).keys()
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    assert not list(tmp_path.glob(".*")), "no temporary folder stays"


def test_export_carries_the_other_files_and_its_own_dtype(broken: Path, tmp_path: Path) -> None:
    others = {
        "generation_config.json": "{}",
        "tokenizer.json": "t",
        "tokenizer_config.json": "c",
        "merges.txt": "m",
    }
    for name, text in others.items():
        (broken / name).write_text(text)
    tokenizer_dir = tmp_path / "tokenizer"
    tokenizer_dir.mkdir()
    (tokenizer_dir / "tokenizer.json").write_text("another")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(broken / "model.safetensors").items()}
    write_hf(tmp_path / "out", tensors, broken)
    assert {name: (tmp_path / "out" / name).read_text() for name in others} == others
    assert load_hf_config(tmp_path / "out") == load_hf_config(broken) | {"dtype": "bfloat16"}
    write_hf(tmp_path / "out", tensors, broken, tokenizer_dir=tokenizer_dir)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "another"
    assert not (tmp_path / "out" / "merges.txt").exists()


def test_failed_export_leaves_the_old_one(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(llama_dir / "model.safetensors")
    write_hf(tmp_path / "out", tensors, llama_dir)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_grpo.conversion.writer.HFWriter.write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_hf(tmp_path / "out", {name: tensor + 1 for name, tensor in tensors.items()}, llama_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(kept[name], tensors[name]) for name in tensors)


def test_export_never_replaces_what_is_not_an_export(llama_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(llama_dir / "model.safetensors")
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no model"):
        write_hf(tmp_path, tensors, llama_dir)
    with pytest.raises(ConfigError, match="own directory"):
        write_hf(llama_dir, tensors, llama_dir)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


# Hostile directories


def read_all(path: Path) -> None:
    all_stages(path, [5], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight .1 in all. is missing"),
        ({"model.extra.weight": torch.zeros(1)}, "model.extra.weight .1 in all. is not a part"),
        (
            {"model.norm.weight": torch.zeros(23)},
            r"model.norm.weight .* has shape \[23\], .* makes it \[24\]",
        ),
        ({"model.norm.weight": torch.zeros(24, dtype=torch.int8)}, "model.norm.weight .* is I8"),
    ],
)
def test_wrong_tensors_are_named(broken: Path, change: dict[str, Any], message: str) -> None:
    tensors = load_file(broken / "model.safetensors") | change
    save_file({name: x for name, x in tensors.items() if x is not None}, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_all(broken)


def test_rotary_buffers_of_old_exports_are_ignored(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(tensors, broken / "model.safetensors")
    read_all(broken)


def test_tied_head_may_be_there_again_but_not_differ(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in hf_weights(all_stages(tmp_path, [5], 1), shape_of(tmp_path), [5])
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.weight .* differs from model.embed_tokens.weight"):
        read_all(tmp_path)


def test_directory_without_weights_is_refused(broken: Path) -> None:
    """E8: training never starts from random weights."""
    (broken / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor .* never starts from random weights"):
        read_all(broken)


def test_truncated_file_is_named(broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        read_all(broken)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ("{}", "is not an index"),
        ('{"weight_map": []}', "is not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside its directory"),
        (
            '{"weight_map": {"model.norm.weight": "part.safetensors", "a": "part.safetensors"}}',
            "tensor a in .*part",
        ),
    ],
)
def test_bad_index_is_named(broken: Path, index: str, message: str) -> None:
    (broken / "model.safetensors").rename(broken / "part.safetensors")
    (broken / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=message), HFReader(broken) as reader:
        reader.get("model.norm.weight")


# Tokenizer


def write_tokenizer(path: Path, *, eos: bool) -> None:
    """Byte-level characters with BOS in front, as Llama 3 has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    names = {"bos_token": "<s>"} | ({"eos_token": "</s>"} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(path)


def test_tokenizer_ids_and_exact_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 5]}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.size) == (
        256,
        {257, 5},
        257,
        258,
    )
    for text in (" 1 , 2 .  don 't\n", "=14", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 256 and 257 not in ids
        assert tokenizer.decode([*ids, 257]) == text


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos=False)
    with pytest.raises(ConfigError, match="names no end token"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path).pad_id == 7


def test_bad_tokenizer_and_config_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        load_hf_config(tmp_path)
