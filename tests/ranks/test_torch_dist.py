"""What we write opens with megatron-core's own loader at any layout, and what megatron-core saves we read."""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file
from transformers import LlamaConfig

from megatron_grpo.backends.huggingface import load_hf_config, reference_model
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.model import POSITIONS, stage_layers, stage_spec, transformer_config
from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.names import padded_vocab
from megatron_grpo.conversion.reader import HFReader
from tests.harness import run_ranks
from tests.models import ids_of, random_model, weights_at

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
Stage = dict[str, torch.Tensor]


def megatron_model(shape: ModelShape, tensor: int, split: list[int]) -> GPTModel:
    """GPTModel in Megatron's own global groups; the weights are noise."""
    config = transformer_config(shape, tensor=tensor, pipeline=len(split), dtype=torch.float32, recompute=False)
    if len(set(split)) > 1:
        config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage = split[0], split[-1]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        stage_spec(shape, stage_layers(tuple(split), stage)),
        vocab_size=padded_vocab(shape.vocab, tensor),
        max_sequence_length=shape.max_positions,
        pre_process=stage == 0,
        post_process=stage == len(split) - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type=POSITIONS[shape.positions],
        rotary_base=shape.rope_theta,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(9))
    return model


def test_c13_a_model_made_with_dropout_has_none_here() -> None:
    """Old, reference and new log-probs of one policy are equal in whatever mode it runs."""
    shape = model_shape(LlamaConfig(architectures=["LlamaForCausalLM"], attention_dropout=0.1).to_dict())
    config = transformer_config(shape, tensor=1, pipeline=1, dtype=torch.float32, recompute=False)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)


def load_and_save(
    rank: int, world: int, source: Path, shape: ModelShape, tensor: int, split: list[int], again: Path
) -> tuple[tuple[int, int], Stage, torch.Tensor | None]:
    """Load with Megatron, save with Megatron; where this rank is, what it has, and logits if it has the whole model."""
    parallel_state.initialize_model_parallel(tensor, len(split))
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    with megatron_runtime(torch.device("cpu")), torch.no_grad():
        model = megatron_model(shape, tensor, split)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(source))
        weights = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        model.load_state_dict(weights, strict=False)
        dist_checkpointing.save(model.sharded_state_dict(), str(again))
        logits = None
        if world == 1:
            ids_BS = ids_of()
            length = ids_BS.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
            logits = model(ids_BS, torch.arange(length).expand_as(ids_BS), mask)[..., : shape.vocab]
        return place, {name: parameter.clone() for name, parameter in model.named_parameters()}, logits


def quiet(text: str) -> None:
    pass


def no_bar(done: int, total: int) -> None:
    pass


def to_and_fro(path: Path, tmp_path: Path, written: tuple[int, int], tensor: int, split: list[int]) -> None:
    """HF -> torch_dist at ``written`` -> Megatron at (tensor, split) -> Megatron's torch_dist -> HF."""
    ours, theirs, back = tmp_path / "ours", tmp_path / "theirs", tmp_path / "back"
    convert(path, ours, Wish(to="megatron", tensor=written[0], pipeline=written[1]), note=quiet, progress=no_bar)
    theirs.mkdir()
    shape = model_shape(load_hf_config(path))
    world = tensor * len(split)
    results = run_ranks(load_and_save, world, ours / "release", shape, tensor, split, theirs)
    with HFReader(path) as reader:
        for (stage, rank), got, logits in results:
            want = weights_at(reader, shape, split, stage, rank, tensor)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)
            if logits is not None:
                with torch.no_grad():
                    peer = reference_model(path, torch.float32)(ids_of()).logits
                torch.testing.assert_close(logits, peer, rtol=0, atol=1e-4)
    convert(theirs, back, Wish(to="hf", config_dir=path), note=quiet, progress=no_bar)
    source, again = load_file(path / "model.safetensors"), load_file(back / "model.safetensors")
    assert again.keys() == source.keys() and all(torch.equal(again[name], source[name]) for name in source)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_tied_biased_model_at_every_layout(tensor: int, pipeline: int, tmp_path: Path) -> None:
    path = random_model("qwen2", tmp_path / "hf", num_hidden_layers=4)
    to_and_fro(path, tmp_path, (2, 2), tensor, [4 // pipeline] * pipeline)


@pytest.mark.parametrize(
    ("name", "written", "tensor", "split"),
    [("qwen3", (1, 1), 2, [2, 1]), ("gpt2", (4, 3), 2, [3]), ("gpt2_wide", (1, 2), 1, [2, 1])],
)
def test_other_families_and_uneven_splits(
    name: str, written: tuple[int, int], tensor: int, split: list[int], tmp_path: Path
) -> None:
    to_and_fro(random_model(name, tmp_path / "hf"), tmp_path, written, tensor, split)
