"""Megatron's checkpoints of a file per rank: read exactly, and nothing that lies beside the weights is run."""

import argparse
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_grpo.config import ConfigError, layer_split
from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.files import stage_weights
from megatron_grpo.conversion.inspect import describe
from megatron_grpo.conversion.reader import HFReader, read_hf_config
from tests.models import random_model

FILE = "model_optim_rng.pt"
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def write_legacy(source: Path, target: Path, tensor: int, pipeline: int, *, fused: bool) -> Path:
    """As Megatron-LM's ``save_checkpoint`` with ``--ckpt-format torch`` lays it out.

    Args:
        fused: norms under the names that they have with Transformer Engine.
    """
    shape = model_shape(read_hf_config(source))
    split = layer_split(shape.layers, pipeline)
    with HFReader(source) as reader:
        for stage in range(pipeline):
            layers = range(sum(split[:stage]), sum(split[: stage + 1]))
            for rank in range(tensor):
                weights = stage_weights(
                    reader,
                    shape,
                    layers,
                    first=stage == 0,
                    last=stage == pipeline - 1,
                    tensor_rank=rank,
                    tensor_size=tensor,
                    dtype=torch.float32,
                )
                model: OrderedDict[str, torch.Tensor | None] = OrderedDict()
                for name, value in weights:
                    for plain, other in FUSED.items():
                        name = name.replace(plain, other) if fused else name
                    model[name] = value
                model["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                folder = target / "iter_0000012" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
                folder.mkdir(parents=True)
                torch.save(beside() | {"model": model}, folder / FILE)
    (target / "latest_checkpointed_iteration.txt").write_text("12\n")
    return target


def beside() -> dict[str, Any]:
    """What Megatron keeps beside the weights: plain values, and objects of several packages."""
    generators = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    given = argparse.Namespace(bf16=True, params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    return {
        "args": given,
        "checkpoint_version": 3.0,
        "iteration": 12,
        "rng_state": [generators],
        "optimizer": {"lr": 1.0},
    }


def back(source: Path, target: Path, config: Path, to: Any = "hf") -> list[str]:
    said: list[str] = []
    convert(source, target, Wish(to=to, config_dir=config), note=said.append, progress=lambda done, total: None)
    return said


@pytest.mark.parametrize(("name", "fused"), [("qwen2", True), ("gpt2", False), ("qwen3", True)])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_tensor_is_read_bit_equal(name: str, fused: bool, tensor: int, pipeline: int, tmp_path: Path) -> None:
    source = random_model(name, tmp_path / "hf")
    legacy = write_legacy(source, tmp_path / "legacy", tensor, pipeline, fused=fused)
    assert "a file for each rank, iter_0000012" in back(legacy, tmp_path / "back", source)[0]
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_it_becomes_a_distributed_checkpoint(tmp_path: Path) -> None:
    source = random_model("qwen2", tmp_path / "hf")
    legacy = write_legacy(source, tmp_path / "legacy", 2, 2, fused=True)
    back(legacy / "iter_0000012", tmp_path / "dist", source, to="megatron")
    back(tmp_path / "dist", tmp_path / "back", source)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    lines = list(describe(legacy))
    assert "mp_rank_01_001 decoder.layers.0.self_attention.linear_qkv.bias [24] float32" in lines


Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    return write_legacy(random_model("qwen2", tmp_path / "hf"), tmp_path / "legacy", 2, 2, fused=False)


class Hostile:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].pop("decoder.layers.0.mlp.linear_fc2.weight"), "linear_fc2.weight is missing from"),
        (lambda c: c["model"].update(extra=torch.zeros(1)), "tensor extra is not a part of the model of"),
        (
            lambda c: c["model"].update({"decoder.final_layernorm.weight": torch.zeros(7)}),
            r"shape \[7\], but",
        ),
        (lambda c: c["model"]["output_layer.weight"].add_(1), "copy of the tied embedding differs"),
        (lambda c: c.update(model=None), "has no table 'model'"),
        (lambda c: c.update(args=Hostile(Path("/tmp/legacy-trap"))), "asks to run posix.mkdir, which no checkpoint"),
    ],
)
def test_a_rank_that_is_not_of_the_model_is_named(change: Change, message: str, legacy: Path, tmp_path: Path) -> None:
    file = legacy / "iter_0000012/mp_rank_01_001" / FILE
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    with pytest.raises(ConfigError, match=message):
        back(legacy, tmp_path / "out", tmp_path / "hf")
    assert not (tmp_path / "out").exists() and not Path("/tmp/legacy-trap").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), r"lacks model_optim_rng.pt or model_rng.pt of a rank \(found"),
        (lambda file: file.write_bytes(file.read_bytes()[:-50]), "is damaged"),
        (lambda file: file.write_bytes(flipped(file.read_bytes())), "is damaged"),
        (lambda file: file.write_text("text"), "is damaged"),
    ],
)
def test_damaged_files_are_named(damage: Callable[[Path], object], message: str, legacy: Path, tmp_path: Path) -> None:
    damage(legacy / "iter_0000012/mp_rank_01_001" / FILE)
    with pytest.raises(ConfigError, match=message):
        back(legacy, tmp_path / "out", tmp_path / "hf")


def flipped(raw: bytes) -> bytes:
    """One bit of a number of the third layer is another."""
    changed = bytearray(raw)
    changed[len(raw) // 2] ^= 4
    return bytes(changed)


def test_missing_layers_are_counted(legacy: Path, tmp_path: Path) -> None:
    other = random_model("qwen2", tmp_path / "other", num_hidden_layers=5)
    with pytest.raises(ConfigError, match=r"holds 3 layers and config.json says 5"):
        back(legacy, tmp_path / "out", other)
