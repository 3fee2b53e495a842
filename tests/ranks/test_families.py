"""Every family on Megatron's modules: logits of random small models against transformers' own."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.backends.huggingface import load_hf_config, reference_model
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.model import build_stage, whole_logits
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.reader import hf_source
from megatron_grpo.parallel.groups import Layout, build_groups
from tests.harness import run_ranks
from tests.models import MODELS, ids_of, random_model


def logits(rank: int, world: int, path: Path) -> torch.Tensor:
    """Megatron's logits ``[B, S, V]`` of ``ids_of``, with as many tensor ranks as there are."""
    groups = build_groups(Layout(tensor=world, pipeline=1, data=1), 60.0)
    shape = model_shape(load_hf_config(path))
    ids_BS = ids_of()
    with megatron_runtime(torch.device("cpu")), torch.no_grad():
        with hf_source(path, shape) as source:
            stage = build_stage(
                source,
                shape,
                groups,
                split=(shape.layers,),
                dtype=torch.float32,
                recompute=False,
                device=torch.device("cpu"),
            )
        mine = whole_logits(stage, ids_BS)
    shards = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(shards, mine.contiguous())
    return torch.cat(shards, dim=-1)[..., : shape.vocab]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_logits_are_those_of_transformers(name: str, tensor: int, tmp_path: Path) -> None:
    """E1: tied or not. E10: norm epsilons and RoPE bases far from the usual."""
    path = random_model(name, tmp_path)
    with torch.no_grad():
        want = reference_model(path, torch.float32)(ids_of()).logits
    assert want.std() > 0.1, "numbers that say something"
    for got in run_ranks(logits, tensor, path):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
