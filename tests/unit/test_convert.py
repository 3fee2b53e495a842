"""`convert`: bit-equal there and back, whole or not at all, and a clear word for every damaged or hostile file."""

import io
import json
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import ConfigError, layer_split, load_config
from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.formats import recognise
from megatron_grpo.conversion.inspect import describe
from megatron_grpo.conversion.reader import read_hf_config
from tests.models import MODELS, random_model, write_hf

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOOLS = Path(__file__).parents[2] / "tools"


def run(source: Path, target: Path, **wish: Any) -> list[str]:
    """Convert in silence; what was said of the source."""
    said: list[str] = []
    convert(source, target, Wish(**wish), note=said.append, progress=lambda done, total: None)
    return said


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def metadata_of(megatron: Path) -> Any:
    return pickle.loads((megatron / "release/.metadata").read_bytes())


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2, tied, with QKV biases."""
    return random_model("qwen2", tmp_path_factory.mktemp("tied"))


@pytest.fixture
def megatron(tied: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage, in several files."""
    run(tied, tmp_path / "megatron", to="megatron", tensor=2, pipeline=2)
    return tmp_path / "megatron"


# There and back


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_family_comes_back_bit_equal(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    source = random_model(name, tmp_path / "hf")
    said = run(source, tmp_path / "megatron", to="megatron", tensor=tensor, pipeline=pipeline)
    assert "Hugging Face directory" in said[0]
    said = run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert "torch_dist" in said[0]
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert read_hf_config(tmp_path / "back") == read_hf_config(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


@pytest.mark.parametrize(("tensor", "pipeline"), [(8, 1), (4, 8), (1, 5), (2, 7)])
def test_layouts_in_any_direction(tensor: int, pipeline: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 16, "num_hidden_layers": 8}
    source = random_model("qwen2", tmp_path / "hf", **sizes)
    run(source, tmp_path / "one", to="megatron", tensor=tensor, pipeline=pipeline)
    files = len(list((tmp_path / "one/release").glob("*.distcp")))
    assert files == tensor * pipeline, "one for each rank"
    run(tmp_path / "one", tmp_path / "two", to="megatron", tensor=2, pipeline=3, dtype=None)
    run(tmp_path / "two", tmp_path / "back", to="hf")
    assert same_weights(source, tmp_path / "back")


@pytest.mark.parametrize(("layers", "pipeline", "split"), [(7, 2, [4, 3]), (30, 4, [8, 8, 7, 7]), (6, 4, [2, 2, 1, 1])])
def test_no_layer_is_lost_where_stages_are_uneven(layers: int, pipeline: int, split: list[int], tmp_path: Path) -> None:
    """D1: 30 layers on 4 stages are 8, 8, 7, 7. D4: 7 on 2 are 4, 3, and 6 on 4 are 2, 2, 1, 1."""
    source = random_model("llama", tmp_path / "hf", num_hidden_layers=layers)
    run(source, tmp_path / "megatron", to="megatron", pipeline=pipeline)
    norms = metadata_of(tmp_path / "megatron").storage_data
    key = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    files = [norms[MetadataIndex(key, torch.Size((layer, 0)))].relative_path for layer in range(layers)]
    assert [files.count(f"__{stage}_0.distcp") for stage in range(pipeline)] == split
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert same_weights(source, tmp_path / "back")


def test_an_interleaved_pipeline_loses_no_layers_because_there_is_none(tied: Path, tmp_path: Path) -> None:
    """D2: 80 layers on 16 stages are 5 each; a virtual size is no option, no key, and not read in a checkpoint."""
    source = random_model("llama", tmp_path / "hf", num_hidden_layers=80, hidden_size=8, intermediate_size=8)
    run(source, tmp_path / "megatron", to="megatron", pipeline=16)
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert same_weights(source, tmp_path / "back")
    assert len(list((tmp_path / "megatron/release").glob("*.distcp"))) == 16
    given = ["convert", str(source), str(tmp_path / "out"), "--to", "megatron", "--virtual-pipeline", "2"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2 and "--virtual-pipeline" in result.stderr
    with pytest.raises(ConfigError, match="virtual_pipeline"):
        load_config(TOOLS.parent / "examples/tiny/k5.yaml", ["parallel.virtual_pipeline=2"])
    (tmp_path / "legacy/mp_rank_00").mkdir(parents=True)
    torch.save({"model0": {}, "model1": {}}, tmp_path / "legacy/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(ConfigError, match=r"no table 'model' of one stage .interleaved schedules are not read"):
        run(tmp_path / "legacy", tmp_path / "out", to="hf", config_dir=source)


@pytest.mark.parametrize("layers", [43, 61, 78])
def test_any_number_of_stages_holds_every_layer(layers: int) -> None:
    """D4: as evenly as can be."""
    for pipeline in range(1, layers + 1):
        split = layer_split(layers, pipeline)
        assert len(split) == pipeline and sum(split) == layers and max(split) - min(split) <= 1


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [
        (50257, 1, 50304),
        (50257, 8, 51200),
        (32000, 4, 32256),
        (151665, 2, 151808),
        (151669, 4, 152064),
        (151936, 2, 152064),
        (128256, 8, 129024),
    ],
)
def test_vocabulary_is_padded_inside_and_true_outside(vocab: int, tensor: int, padded: int, tmp_path: Path) -> None:
    """E4, numbers of the published reports; what is padded already is not padded again."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 16, "num_hidden_layers": 1}
    source = random_model("llama", tmp_path / "hf", vocab_size=vocab, **sizes)
    run(source, tmp_path / "once", to="megatron", tensor=tensor)
    run(tmp_path / "once", tmp_path / "twice", to="megatron", tensor=tensor)
    for folder in ("once", "twice"):
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert metadata_of(tmp_path / folder).state_dict_metadata[key].size == (padded, 16)
    run(tmp_path / "twice", tmp_path / "back", to="hf")
    assert same_weights(source, tmp_path / "back")


def test_large_tensors_are_stored_in_blocks(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """61 rows of 24 numbers, 10 rows a block: 7 blocks, and the padding likewise."""
    monkeypatch.setattr("megatron_grpo.conversion.torch_dist.BLOCK_BYTES", 10 * 24 * 4 + 5)
    run(tied, tmp_path / "megatron", to="megatron", tensor=2, pipeline=2)
    entry = metadata_of(tmp_path / "megatron").state_dict_metadata["embedding.word_embeddings.weight"]
    sizes = [chunk.sizes[0] for chunk in entry.chunks]
    assert sizes == [10] * 6 + [1] + [10] * 6 + [7] + [10] * 12 + [8]
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert same_weights(tied, tmp_path / "back")


def test_a_tied_head_is_never_added(tmp_path: Path) -> None:
    """E2: 148 tensors stay 148, though the source carries its head once more; a head alone is no embedding."""
    source = random_model("gpt2", tmp_path / "hf", n_layer=12)
    tensors, embedding = load_file(source / WEIGHTS), "transformer.wte.weight"
    head = {"lm_head.weight": tensors[embedding].clone()}
    assert len(tensors) == 148
    save_file(tensors | head, source / WEIGHTS)
    run(source, tmp_path / "megatron", to="megatron", pipeline=3)
    assert "output_layer.weight" not in metadata_of(tmp_path / "megatron").state_dict_metadata
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in back)
    save_file({name: x for name, x in (tensors | head).items() if name != embedding}, source / WEIGHTS)
    with pytest.raises(ConfigError, match=f"tensor {embedding} .* is missing from"):
        run(source, tmp_path / "out", to="megatron")


def test_a_body_saved_alone_becomes_a_whole_model(tmp_path: Path) -> None:
    source = random_model("gpt2", tmp_path / "hf")
    tensors = load_file(source / WEIGHTS)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text((source / "config.json").read_text())
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "bare" / WEIGHTS)
    run(tmp_path / "bare", tmp_path / "back", to="hf")
    assert same_weights(source, tmp_path / "back")


def test_dtype_is_kept_or_the_one_asked_for(tied: Path, tmp_path: Path) -> None:
    source = load_file(tied / WEIGHTS)
    run(tied, tmp_path / "megatron", to="megatron", tensor=2, dtype="bfloat16")
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert all(torch.equal(back[name], source[name].bfloat16()) for name in source)
    assert read_hf_config(tmp_path / "back")["dtype"] == "bfloat16"
    run(tmp_path / "back", tmp_path / "wide", to="hf", dtype="float32")
    assert read_hf_config(tmp_path / "wide")["dtype"] == "float32"
    wide = load_file(tmp_path / "wide" / WEIGHTS)
    assert all(torch.equal(wide[name], source[name].bfloat16().float()) for name in source)


def test_mixed_dtypes_are_kept_or_named(tied: Path, tmp_path: Path) -> None:
    tensors = load_file(tied / WEIGHTS)
    mixed = {name: x if "norm" in name else x.bfloat16() for name, x in tensors.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text((tied / "config.json").read_text())
    save_file(mixed, tmp_path / "hf" / WEIGHTS)
    run(tmp_path / "hf", tmp_path / "megatron", to="megatron")
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert same_weights(tmp_path / "hf", tmp_path / "back")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(mixed | {name: tensors[name]}, tmp_path / "hf" / WEIGHTS)
    with pytest.raises(ConfigError, match=r"k_proj.weight and .* make one Megatron tensor .* give --dtype"):
        run(tmp_path / "hf", tmp_path / "out", to="megatron")
    run(tmp_path / "hf", tmp_path / "out", to="megatron", dtype="float32")


def test_tokenizer_and_generation_config_are_carried(tied: Path, tmp_path: Path) -> None:
    """E11: generation config, and the tokenizer of the very source, SentencePiece and fast."""
    others = {
        "generation_config.json": '{"eos_token_id": [2, 7]}',
        "tokenizer.model": "sentencepiece",
        "tokenizer.json": "fast",
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ x }}",
    }
    source = tmp_path / "hf"
    source.mkdir()
    for file in tied.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    for name, text in others.items():
        (source / name).write_text(text)
    run(source, tmp_path / "megatron", to="megatron")
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert {name: (tmp_path / "back" / name).read_text() for name in others} == others


def test_layers_kept_apart_are_read_too(tied: Path, megatron: Path, tmp_path: Path) -> None:
    """Megatron's newer way: a tensor for each layer, and the halves of gate over up as _w and _v."""
    metadata = metadata_of(megatron)
    entries, storage = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for chunk in entry.chunks:
            info = storage_of(metadata, key, chunk)
            if not key.startswith("decoder.layers."):
                entries[key] = entry
                storage[MetadataIndex(key, chunk.offsets)] = info
                continue
            layer, *offset = chunk.offsets
            name = key.replace("layers.", f"layers.{layer}.")
            rows = entry.size[1]
            if key.endswith("fc1.weight"):
                name, rows = f"{name}_{'w' if offset[0] < rows // 2 else 'v'}", rows // 2
                offset[0] %= rows
            rewrite(megatron / "release" / info.relative_path, info)
            size = torch.Size((rows, *entry.size[2:]))
            piece = type(chunk)(torch.Size(offset), chunk.sizes[1:])
            entries.setdefault(name, type(entry)(entry.properties, size, [])).chunks.append(piece)
            storage[MetadataIndex(name, piece.offsets)] = info
    metadata.state_dict_metadata, metadata.storage_data = entries, storage
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    run(megatron, tmp_path / "back", to="hf")
    assert same_weights(tied, tmp_path / "back")


def storage_of(metadata: Any, key: str, chunk: Any) -> Any:
    return metadata.storage_data[MetadataIndex(key, chunk.offsets)]


def rewrite(path: Path, info: Any) -> None:
    """Append the chunk once more, without its axis of layers, and say so in ``info``."""
    with path.open("r+b") as file:
        file.seek(info.offset)
        value = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)[0].clone()
        info.offset = file.seek(0, os.SEEK_END)
        torch.save(value, file)
        info.length = file.tell() - info.offset


# What is refused


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is no checkpoint that is known here"),
        ({"config.json": "{}"}, "is no checkpoint that is known here"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pickled weights .* save_pretrained it as safetensors"),
        ({"latest": "global_step3"}, "holds DeepSpeed's files without run.json"),
        ({"latest_checkpointed_iteration.txt": "soon"}, "says 'soon', neither an iteration nor release"),
        ({"latest_checkpointed_iteration.txt": "12"}, "iter_0000012 is missing, though"),
        (
            {"latest_checkpointed_iteration.txt": "12", "iter_0000012/x": ""},
            "iter_0000012 is no Megatron checkpoint that is known",
        ),
        ({"iter_0000012/x": ""}, "has neither .* nor latest_checkpointed_iteration.txt or metadata.json"),
        ({"metadata.json": '{"sharded_backend": "torch_dist"}'}, "add --config-from DIR"),
        ({"run.json": "{}"}, "has run.json, but neither engine/ nor zero/"),
        ({"checkpoints/latest": "tick000002"}, "has no checkpoint that its file latest names"),
        ({"checkpoints/latest": "../../x"}, "has no checkpoint that its file latest names"),
    ],
)
def test_what_is_no_checkpoint_is_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    """E8: without the tracker, or what it names, nothing is read and nothing starts at random."""
    source = tmp_path / "source"
    source.mkdir()
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "out", to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(ConfigError, match="is not there"):
        recognise(tmp_path / "none")
    with pytest.raises(ConfigError, match="is a file"):
        recognise(Path(__file__))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"to": "megatron", "tensor": 4},
            r"--tensor=4 does not divide num_key_value_heads=2 \(.*one of 1, 2$",
        ),
        ({"to": "megatron", "pipeline": 4}, "--pipeline=4 exceeds the model's 3 layers"),
        ({"to": "hf", "pipeline": 1}, "--pipeline=1 has no meaning with --to hf"),
        ({"to": "megatron", "data": 2}, "--data=2 has no meaning with --to megatron"),
        ({"to": "deepspeed-universal", "dtype": "bfloat16"}, "--dtype=bfloat16 has no meaning"),
        ({"to": "deepspeed-universal"}, "holds weights alone, without the state of an optimizer"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(wish: dict[str, Any], message: str, tied: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tied, tmp_path / "out", **wish)
    assert not list(tmp_path.iterdir())


def test_targets_that_hold_something_else_stay(tied: Path, megatron: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/text").write_text("mine")
    (tmp_path / "file").touch()
    for target, to, message in (
        (tmp_path / "thesis", "hf", "is not empty and holds no model"),
        (tmp_path / "file", "hf", "is a file"),
        (megatron, "hf", "own directory"),
        (megatron / "hf", "hf", "own directory"),
        (tmp_path, "megatron", "holds its source"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(megatron, target, to=to)
    with pytest.raises(ConfigError, match="is not empty and holds no model"):
        run(tied, tmp_path / "thesis", to="megatron")
    assert (tmp_path / "thesis/text").read_text() == "mine"


@pytest.mark.parametrize("config_of", ["llama", "qwen3"])
def test_a_config_of_another_model_is_refused(config_of: str, megatron: Path, tmp_path: Path) -> None:
    """E1: nothing is converted silently; an untied config misses its head, a biased model's biases are surplus."""
    other = random_model(config_of, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"describes another model than .*megatron/hf, which .* itself carries"):
        run(megatron, tmp_path / "out", to="hf", config_dir=other)
    shutil.rmtree(megatron / "hf")
    with pytest.raises(ConfigError, match=r"tensor .* (is missing from|is not a part of|has shape) .*same model"):
        run(megatron, tmp_path / "out", to="hf", config_dir=other)
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_named(tied: Path, tmp_path: Path) -> None:
    tensors = load_file(tied / WEIGHTS)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text((tied / "config.json").read_text())
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "hf" / WEIGHTS)
    with pytest.raises(ConfigError, match=r"model.norm.weight: .*float32 to torch.float16.; use a dtype with"):
        run(tmp_path / "hf", tmp_path / "out", to="megatron", dtype="float16")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "hf" / WEIGHTS)
    with pytest.raises(ConfigError, match=r"model.norm.weight: .* already in the source .* fetch the source again"):
        run(tmp_path / "hf", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_an_adapter_alone_is_refused(tied: Path, tmp_path: Path) -> None:
    """E11: a LoRA is never merged in silence."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 16}')
    (adapter / "adapter_model.safetensors").write_bytes((tied / WEIGHTS).read_bytes())
    with pytest.raises(ConfigError, match="is no checkpoint that is known here"):
        run(adapter, tmp_path / "out", to="megatron")
    merged = load_file(tied / WEIGHTS) | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 24)}
    (adapter / "config.json").write_text((tied / "config.json").read_text())
    save_file(merged, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight .1 in all. is not a part of the model"):
        run(adapter, tmp_path / "out", to="megatron")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "hf is no checkpoint"),
        (lambda folder: (folder / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004.safetensors is"),
        (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} is not an index"),
        (lambda folder: shard_at(folder, "../outside.safetensors"), "names shard '../outside.safetensors' outside"),
        (lambda folder: shard_at(folder, "/etc/passwd"), "names shard '/etc/passwd' outside"),
        (lambda folder: shard_at(folder, "model-00001-of-00004.safetensors"), "model-00001-of-00004.safetensors, whi"),
    ],
)
def test_missing_and_wrong_shards_end_with_2_and_their_name(
    damage: Callable[[Path], object], named: str, tied: Path, tmp_path: Path
) -> None:
    """E6; and a sound model in shards loses nothing where one ends."""
    tensors, source = load_file(tied / WEIGHTS), tmp_path / "hf"
    write_hf(source, tensors, tied, max_file_bytes=-(-sum(x.nbytes for x in tensors.values()) // 4) + 2000)
    assert len(list(source.glob("model-*-of-00004.safetensors"))) == 4
    run(source, tmp_path / "megatron", to="megatron")
    run(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert same_weights(tied, tmp_path / "back")
    (tmp_path / "outside.safetensors").write_bytes((tied / WEIGHTS).read_bytes())
    damage(source)
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", "megatron"])
    assert result.exit_code == 2 and named in result.stderr and not (tmp_path / "out").exists()


def shard_at(folder: Path, name: str) -> None:
    """Let the index put the final norm into another file."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))


# Damaged and hostile files


def largest(megatron: Path) -> Path:
    return max((megatron / "release").glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: largest(m).unlink(), "distcp is missing, though .metadata names it"),
        (lambda m: largest(m).write_bytes(largest(m).read_bytes()[:-100]), "distcp is truncated"),
        (lambda m: largest(m).write_bytes(bytes(largest(m).stat().st_size)), "distcp .* is damaged"),
        (lambda m: (m / "release/.metadata").unlink(), r"\.metadata cannot be read"),
        (lambda m: (m / "release/.metadata").write_bytes(b""), r"\.metadata is damaged"),
        (lambda m: (m / "release/.metadata").write_bytes(pickle.dumps({"a": 1})), r"\.metadata is not the metadata"),
        (lambda m: (m / "hf/config.json").write_text("{"), "config.json is not JSON"),
    ],
)
def test_damaged_checkpoints_are_named(
    damage: Callable[[Path], None], message: str, megatron: Path, tmp_path: Path
) -> None:
    damage(megatron)
    with pytest.raises(ConfigError, match=message):
        run(megatron, tmp_path / "out", to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.parametrize("name", [".metadata", "data"])
def test_no_flipped_bit_passes_unseen(name: str, tied: Path, megatron: Path, tmp_path: Path) -> None:
    """A flip is either found and named, or was in bytes without meaning: never another weight."""
    file = largest(megatron) if name == "data" else megatron / "release/.metadata"
    whole = file.read_bytes()
    generator = torch.Generator().manual_seed(4)
    found = 0
    for place in torch.randint(0, len(whole), (80,), generator=generator).tolist():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            run(megatron, tmp_path / "out", to="hf")
        except ConfigError:
            found += 1
        else:
            assert same_weights(tied, tmp_path / "out"), place
    assert found > 25


class Hostile:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_never_runs(megatron: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    sound = (megatron / "release/.metadata").read_bytes()
    (megatron / "release/.metadata").write_bytes(pickle.dumps(Hostile(trap)))
    with pytest.raises(ConfigError, match=r"asks to run posix.mkdir, which no checkpoint needs"):
        run(megatron, tmp_path / "out", to="hf")
    metadata = pickle.loads(sound)
    info = metadata.storage_data[MetadataIndex("decoder.final_layernorm.weight", torch.Size((0,)))]
    with (megatron / "release" / info.relative_path).open("r+b") as file:
        info.offset = file.seek(0, os.SEEK_END)
        torch.save(Hostile(trap), file)
        info.length = file.tell() - info.offset
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"final_layernorm.weight\) is damaged or holds more than a tensor"):
        run(megatron, tmp_path / "out", to="hf")
    assert not trap.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry, info: setattr(info, "relative_path", "../outside"), "names '../outside', no place in"),
        (lambda entry, info: setattr(info, "offset", -5), "no place in"),
        (lambda entry, info: setattr(info, "length", "long"), "is not the metadata"),
        (lambda entry, info: setattr(info, "transform_descriptors", ["zstd"]), "does not say where"),
        (lambda entry, info: entry.chunks.pop(), "do not cover it once"),
        (lambda entry, info: entry.chunks.append(entry.chunks[0]), "do not cover it once"),
        (lambda entry, info: setattr(entry, "size", torch.Size((10**15, 24))), "has shape"),
        (lambda entry, info: setattr(entry, "size", torch.Size((60, 24))), "has shape"),
        (lambda entry, info: setattr(entry.properties, "dtype", torch.float16), "which its metadata does not say"),
    ],
)
def test_metadata_that_lies_is_caught(
    change: Callable[[Any, Any], None], message: str, megatron: Path, tmp_path: Path
) -> None:
    metadata = metadata_of(megatron)
    key = "embedding.word_embeddings.weight"
    entry = metadata.state_dict_metadata[key]
    change(entry, metadata.storage_data[MetadataIndex(key, torch.Size((0, 0)))])
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=message):
        run(megatron, tmp_path / "out", to="hf")


# Whole or not at all


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("ending", ["interrupt", "terminate", "disk"])
def test_an_interrupted_conversion_leaves_the_old_one(
    to: Any, old: bool, ending: str, tied: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    if old:
        run(tied, target, to=to, dtype="float16")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            if ending == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            raise KeyboardInterrupt if ending == "interrupt" else OSError(28, "No space left on device")

    expected = {"interrupt": KeyboardInterrupt, "terminate": SystemExit, "disk": ConfigError}[ending]
    with pytest.raises(expected):
        convert(tied, target, Wish(to=to), note=lambda text: None, progress=stop)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if old else [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_older_checkpoint_is_replaced_whole(tied: Path, tmp_path: Path) -> None:
    run(tied, tmp_path / "out", to="megatron", tensor=2, pipeline=3)
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = tmp_path / f".out.{socket.gethostname()}.{gone.pid}.writing"
    left.mkdir()
    (left / "rubbish").write_text("of one that was killed")
    run(tied, tmp_path / "out", to="megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out/release").glob("*.distcp"))) == 1
    tracker = (tmp_path / "out/latest_checkpointed_iteration.txt").read_text()
    assert tracker == "release" and json.loads((tmp_path / "out/release/metadata.json").read_text())


def test_two_conversions_to_one_place_do_not_touch_each_other(tied: Path, tmp_path: Path) -> None:
    """One runs inside the other; both end whole, the one that ends last stays."""
    started = False

    def another(done: int, total: int) -> None:
        nonlocal started
        if not started:
            started = True
            given = [sys.executable, "-m", "megatron_grpo", "convert", tied, tmp_path / "out", "--to", "hf"]
            subprocess.run([*given, "--dtype", "float16"], check=True, capture_output=True)

    convert(tied, tmp_path / "out", Wish(to="hf"), note=lambda text: None, progress=another)
    assert started and same_weights(tied, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("to", "beside"), [("megatron", "iter_0001000"), ("hf", "tensorboard")])
def test_a_directory_with_more_than_a_model_is_never_replaced(to: Any, beside: str, tied: Path, tmp_path: Path) -> None:
    """A training run's checkpoints have a tracker too."""
    run(tied, tmp_path / "out", to=to)
    (tmp_path / "out" / beside).mkdir()
    with pytest.raises(ConfigError, match=f"holds {beside} beside the model; give a new directory"):
        run(tied, tmp_path / "out", to=to)
    assert (tmp_path / "out" / beside).is_dir() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_flipped_bit_of_a_safetensors_header_passes_unseen(tied: Path, tmp_path: Path) -> None:
    """The format has no checksum over its numbers; its header cannot lie about them."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text((tied / "config.json").read_text())
    whole = (tied / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    found = 0
    for place in torch.randint(0, header, (60,), generator=torch.Generator().manual_seed(6)).tolist():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        (tmp_path / "hf" / WEIGHTS).write_bytes(flipped)
        try:
            run(tmp_path / "hf", tmp_path / "out", to="megatron")
        except ConfigError:
            found += 1
        else:
            run(tmp_path / "out", tmp_path / "back", to="hf")
            assert same_weights(tied, tmp_path / "back"), place
    assert found > 40


# The command


def test_command_says_what_it_reads_and_converts(tied: Path, tmp_path: Path) -> None:
    given = ["convert", str(tied), str(tmp_path / "out"), "--to", "megatron", "--tensor", "2", "--dtype", "bfloat16"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert "Hugging Face directory, safetensors; Qwen2ForCausalLM, 3 layers" in result.stderr
    assert "100%" not in result.stdout and "/s" in result.stderr and not result.stdout
    assert recognise(tmp_path / "out").kind == "megatron"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--to", "megatron", "--tensor", "4"], "config error: --tensor=4 does not divide"),
        (["--to", "hf", "--tensor", "2"], "config error: --tensor=2 has no meaning"),
        (["--to", "onnx"], "onnx"),
        ([], "--to"),
    ],
)
def test_command_ends_with_2_on_a_wrong_wish(given: list[str], message: str, tied: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(tied), str(tmp_path / "out"), *given])
    assert result.exit_code == 2 and message in result.stderr
    assert not list(tmp_path.iterdir())


def test_tools_do_the_same(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        return int(str(ended.value.code))

    assert tool("convert_hf_to_megatron", tied, tmp_path / "m", "--tensor", 2) == 0
    assert tool("convert_megatron_to_hf", tmp_path / "m", tmp_path / "hf") == 0
    assert same_weights(tied, tmp_path / "hf")
    assert tool("inspect_checkpoint", tmp_path / "m") == 0
    assert tool("inspect_checkpoint", tmp_path / "hf") == 0
    for name in ("convert_hf_to_megatron", "convert_megatron_to_hf"):
        assert tool(name, tmp_path, tmp_path / "out") == 2
    assert tool("inspect_checkpoint", tmp_path) == 2


def test_inspection_by_hand(tied: Path, megatron: Path) -> None:
    lines = list(describe(megatron))
    assert "torch_dist" in lines[0] and "family='Qwen2ForCausalLM', layers=3" in lines[1]
    assert "decoder.layers.self_attention.linear_qkv.bias [3, 48] float32, 6 chunks" in lines
    assert "embedding.word_embeddings.weight [256, 24] float32, 3 chunks" in lines, "61 rows, 67 and 128 of padding"
    assert "model.layers.2.self_attn.k_proj.bias [12] F32" in list(describe(tied))
