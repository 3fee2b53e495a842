"""Two checkpoints of any format, tensor by tensor: memory holds a layer of each, never a model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.convert import opened
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.formats import recognise
from megatron_grpo.conversion.sources import Checkpoint, all_parts, examine

BLOCK = 2**20
"""Numbers that are compared at once, in float64."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor in two checkpoints, A and B.

    Attributes:
        name: in Hugging Face directories.
        dtypes: of A and of B, as they were compared.
        equal: the same dtype and the same bits.
        largest: max \\|A - B\\|; infinite where one of them is not finite.
        relative: norm(A - B) / norm(A); infinite where A is zero and B is not.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    equal: bool
    largest: float
    relative: float


def examine_pair(one: Path, other: Path, config_from: Path | None = None) -> tuple[Checkpoint, Checkpoint]:
    """What the two are.

    Args:
        config_from: Hugging Face directory of the model, for a checkpoint that carries no config.

    Raises:
        ConfigError: one is no checkpoint, or they are of different models; names the fields that differ.
    """
    a, b = (examine(path, found := recognise(path), found.carried or config_from) for path in (one, other))
    unequal = [
        f"{field.name}={getattr(a.shape, field.name)} and {getattr(b.shape, field.name)}"
        for field in fields(ModelShape)
        if getattr(a.shape, field.name) != getattr(b.shape, field.name)
    ]
    if unequal:
        raise ConfigError(f"{one} and {other} are different models: {', '.join(unequal)}; compare two of one model")
    return a, b


def compare_weights(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None = None, *, done: Callable[[], None] = lambda: None
) -> Iterator[TensorDifference]:
    """Compare every tensor of two checkpoints of one model, in the order of the model.

    Args:
        dtype: both are rounded to it first; ``None`` takes them as they are.
        done: called after every weight.

    Raises:
        ConfigError: a checkpoint is damaged or does not hold the model that its config describes.
    """
    with opened(a.found, a.shape) as source_a, opened(b.found, b.shape) as source_b:
        pairs = zip(all_parts(source_a, a.shape), all_parts(source_b, b.shape), strict=True)
        for (weight, parts_a), (_, parts_b) in pairs:
            for name, part_a, part_b in zip(weight.hf, parts_a, parts_b, strict=True):
                yield difference(name, part_a.to(dtype or part_a.dtype), part_b.to(dtype or part_b.dtype))
            done()


def difference(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    """Compare two tensors of one shape."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    equal = a.dtype == b.dtype
    largest = squared = squared_a = 0.0
    for start in range(0, len(flat_a), BLOCK):
        block_a, block_b = flat_a[start : start + BLOCK], flat_b[start : start + BLOCK]
        exact_a = block_a.double()
        squared_a += exact_a.square().sum().item()
        if a.dtype == b.dtype and torch.equal(block_a.view(torch.uint8), block_b.view(torch.uint8)):
            continue
        equal = False
        gap = (exact_a - block_b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, gap.max().item())
        squared += gap.square().sum().item()
    relative = math.inf
    if squared == 0 or (squared_a > 0 and math.isfinite(squared)):
        relative = math.sqrt(squared / squared_a) if squared else 0.0
    return TensorDifference(name, tuple(a.shape), (a.dtype, b.dtype), equal, largest, relative)
