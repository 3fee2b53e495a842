"""The trained policy as a Hugging Face directory, weight by weight: no rank needs room for the model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_grpo.backends.megatron.model import stage_layers
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.files import hf_directory
from megatron_grpo.conversion.names import Weight, hf_shapes, slice_shape, stage_table
from megatron_grpo.conversion.shards import to_hf, unshard
from megatron_grpo.parallel.groups import Coordinates
from megatron_grpo.training.policy import Policy


def export_policy(policy: Policy, target: Path, *, source: Path, tokenizer: Path) -> None:
    """Write the policy to ``target``, with the config of ``source`` and the files of ``tokenizer``.

    Collective: every rank. Rank 0 writes; the ranks of the first replica send it their slices, weight by weight.

    Raises:
        ValueError: the two copies of a tied embedding differ.
    """
    parameters = dict(policy.stage.module.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    with ExitStack() as stack:
        writer = None
        if policy.groups.rank == 0:
            plan = {name: (shape, dtype) for name, shape in hf_shapes(policy.shape).items()}
            writer = stack.enter_context(hf_directory(target, plan, source, tokenizer_dir=tokenizer))
        before: tuple[tuple[str, ...], tuple[torch.Tensor, ...]] = ((), ())
        for stage, weight in transfers(policy.shape, policy.stage.split):
            slices = _collect(policy, parameters, stage, weight)
            if writer is None:
                continue
            parts = to_hf(unshard(slices, weight.how), weight, policy.shape)
            if weight.hf != before[0]:
                for name, part in zip(weight.hf, parts, strict=True):
                    writer.write(name, part)
            elif not torch.equal(parts[0], before[1][0]):
                raise ValueError(f"{weight.megatron} of stage {stage} differs from the embedding it is tied to")
            before = (weight.hf, parts)
    dist.barrier(policy.groups.policy)


def transfers(shape: ModelShape, split: tuple[int, ...]) -> Iterator[tuple[int, Weight]]:
    """Every stage and weight, in the one order that all ranks follow; the two copies of a tied embedding in a row."""
    last = len(split) - 1
    tables = [
        list(stage_table(shape, stage_layers(split, stage), first=stage == 0, last=stage == last))
        for stage in range(len(split))
    ]
    copies = [(last, tables[last].pop())] if shape.tied and last > 0 else []
    order = [(stage, weight) for stage, table in enumerate(tables) for weight in table]
    yield order[0]
    yield from copies
    yield from order[1:]


def _collect(
    policy: Policy, parameters: Mapping[str, torch.nn.Parameter], stage: int, weight: Weight
) -> list[torch.Tensor]:
    """On rank 0 every different slice of ``weight``, on the CPU; empty elsewhere. Collective: every rank."""
    groups = policy.groups
    owners = 1 if weight.how == "replicated" else groups.layout.tensor
    own: torch.Tensor | None = None
    if groups.at.pipeline == stage:
        with policy.engine.whole_parameters(parameters[weight.megatron]):
            if groups.at.data == 0 and groups.at.tensor < owners:
                own = parameters[weight.megatron].detach().clone()
    if groups.rank != 0:
        if own is not None:
            dist.send(own, dst=0, group=groups.model)
        return []
    shape, dtype = slice_shape(policy.shape, weight, groups.layout.tensor), next(iter(parameters.values())).dtype
    slices = []
    for tensor_rank in range(owners):
        sender = groups.layout.rank_of(Coordinates(stage, 0, tensor_rank))
        piece = own
        if piece is None or sender != 0:
            piece = torch.empty(shape, dtype=dtype, device=policy.device)
            dist.recv(piece, src=sender, group=groups.model)
        slices.append(piece.cpu())
    return slices
