"""Small random models of every family that is converted, as transformers writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_grpo.backends.megatron.model import stage_layers
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.files import hf_directory, stage_weights
from megatron_grpo.conversion.names import hf_shapes, stage_table
from megatron_grpo.conversion.reader import HFReader
from megatron_grpo.conversion.shards import to_hf, unshard

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"rms_norm_eps": 1e-3, "rope_theta": 500.0}),
    "smollm2": ("Llama", SIZES | {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("Mistral", SIZES | {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2", SIZES | {"tie_word_embeddings": True, "sliding_window": None}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 10}),
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt2_wide": ("GPT2", GPT2_SIZES | {"n_inner": 20, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False}),
}


def random_model(name: str, folder: Path, **changes: Any) -> Path:
    """Weights far from their usual start, biases and norms included, so that nothing hides in a near-identity."""
    kind, sizes = MODELS[name]
    sizes = sizes | changes
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(5)
    model = getattr(transformers, kind + suffix)(getattr(transformers, f"{kind}Config")(**sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def weights_at(
    reader: HFReader, shape: ModelShape, split: Sequence[int], stage: int, rank: int, tensor: int
) -> dict[str, torch.Tensor]:
    """The fp32 parameters of one rank of a pipeline of ``split`` layers a stage."""
    return dict(
        stage_weights(
            reader,
            shape,
            stage_layers(tuple(split), stage),
            first=stage == 0,
            last=stage == len(split) - 1,
            tensor_rank=rank,
            tensor_size=tensor,
            dtype=torch.float32,
        )
    )


def ids_of(columns: int = 20) -> torch.Tensor:
    """Token ids ``[2, columns]``, always the same."""
    return torch.randint(0, 61, (2, columns), generator=torch.Generator().manual_seed(2))


def hf_weights(
    stage_dicts: Mapping[tuple[int, int], Mapping[str, torch.Tensor]], shape: ModelShape, split: list[int]
) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of all stages: the exact inverse of ``stage_weights`` over every rank.

    Args:
        stage_dicts: by (stage, tensor rank), complete.
        split: layers of every stage.
    """
    tensor_size = 1 + max(rank for _, rank in stage_dicts)
    assert len(stage_dicts) == len(split) * tensor_size and sum(split) == shape.layers
    tensors: dict[str, torch.Tensor] = {}
    for stage in range(len(split)):
        ranks = [stage_dicts[stage, rank] for rank in range(tensor_size)]
        layers = stage_layers(tuple(split), stage)
        table = list(stage_table(shape, layers, first=stage == 0, last=stage == len(split) - 1))
        assert all(part.keys() == {weight.megatron for weight in table} for part in ranks)
        for weight in table:
            whole = unshard([part[weight.megatron] for part in ranks], weight.how)
            for name, tensor in zip(weight.hf, to_hf(whole, weight, shape), strict=True):
                assert name not in tensors or torch.equal(tensors[name], tensor), "copies of a tied embedding"
                tensors[name] = tensor.contiguous()
    return {name: tensors[name] for name in hf_shapes(shape)}


def write_hf(directory: Path, tensors: Mapping[str, torch.Tensor], source_dir: Path, **options: Any) -> None:
    """``hf_directory`` with tensors that are all there."""
    plan = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with hf_directory(directory, plan, source_dir, **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
