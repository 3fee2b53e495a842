"""Where weights come from: what converting, comparing and building a stage have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.formats import CARRIED, Found
from megatron_grpo.conversion.names import Weight, model_table
from megatron_grpo.conversion.reader import read_hf_config


class Source(Protocol):
    """An open checkpoint that holds exactly the weights of its model, as the Hugging Face tensors each is made of."""

    def weight_dtype(self, weight: Weight) -> torch.dtype: ...

    def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
        """The tensors of ``weight.hf``; the next call may overwrite them."""

    def release(self) -> None:
        """Give back the memory of what was read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of which format and model are known; nothing is open.

    Attributes:
        config_dir: has config.json and, where the checkpoint carries one, the tokenizer.
    """

    found: Found
    config_dir: Path
    shape: ModelShape

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"{self.found.words}; {self.shape.family}, {self.shape.layers} layers"


def examine(path: Path, found: Found, config_dir: Path | None) -> Checkpoint:
    """Read what the config of ``path``, recognised as ``found``, says of the model.

    Raises:
        ConfigError: there is no ``config_dir``, or it describes no model that is known here.
    """
    if config_dir is None:
        raise ConfigError(f"{path} has no {CARRIED}/config.json, which says what the model is; add --config-from DIR")
    return Checkpoint(found, config_dir, model_shape(read_hf_config(config_dir)))


def all_parts(source: Source, shape: ModelShape) -> Iterator[tuple[Weight, tuple[torch.Tensor, ...]]]:
    """Every weight of the model with its Hugging Face tensors, in order; a layer is released when the next begins."""
    layer = None
    for weight in model_table(shape):
        if weight.layer != layer:
            source.release()
            layer = weight.layer
        yield weight, source.parts(weight)
