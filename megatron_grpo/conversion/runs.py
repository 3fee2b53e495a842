"""Checkpoints of a run, read as models: the weights of every stage and tensor rank, put together.

A run checkpoint is a directory with ``run.json`` (where the run stood, and under which settings), ``engine/``
(DeepSpeed's files), ``rankNNNNN.pt`` (what each rank of ours remembers) and ``hf/`` (config and tokenizer).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.config import ConfigError, layer_split
from megatron_grpo.conversion.engine_files import EngineFiles, State
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.formats import ENGINE, RUN_FILE
from megatron_grpo.conversion.names import Weight, global_name, slice_shape, stage_table
from megatron_grpo.conversion.shards import strip_vocab, to_hf, unshard
from megatron_grpo.parallel.groups import Layout


@dataclass(frozen=True, slots=True)
class Topology:
    """How a run spreads the model.

    Attributes:
        layout: its ranks; with ``parallel.placement=one_process`` the pipeline is one rank.
        stages: of the pipeline, wherever they run.
    """

    layout: Layout
    stages: int

    @property
    def spread(self) -> bool:
        """Whether each stage has ranks of its own."""
        return self.layout.pipeline == self.stages

    @property
    def words(self) -> str:
        """Stages and where they run, for people."""
        return f"{self.stages} stage{'s' if self.stages > 1 else ''}" + ("" if self.spread else " in one process")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What ``run.json`` says of the run that wrote a checkpoint; ``content`` is the whole file."""

    content: Mapping[str, Any]
    topology: Topology
    zero_stage: int
    dtype: torch.dtype


def read_run(checkpoint: Path) -> RunFacts:
    """The facts of a run checkpoint, or of a universal one.

    Raises:
        ConfigError: ``run.json`` is missing, damaged or of another kind.
    """
    file = checkpoint / RUN_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        settings = content["settings"]
        parallel, together = settings["parallel"], settings["parallel"]["placement"] == "one_process"
        layout = Layout(1 if together else parallel["pipeline"], parallel["data"], parallel["tensor"])
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        topology = Topology(layout, parallel["pipeline"])
        counts = (layout.pipeline, layout.data, layout.tensor, topology.stages, content["steps"] + 1)
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ValueError(f"steps and ranks {counts}")
        if settings["deepspeed"]["zero_stage"] not in (0, 1, 2, 3) or not isinstance(content["validation_start"], dict):
            raise ValueError("zero_stage or validation_start")
        return RunFacts(content, topology, settings["deepspeed"]["zero_stage"], dtype[settings["model"]["dtype"]])
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a checkpoint of a run") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} does not describe a run ({error!r}); restore the file") from error


class MasterWeights(ABC):
    """What a run trains, as the fp32 master weights and Adam's moments, whatever they are stored in: a ``Source``."""

    def __init__(self, facts: RunFacts, shape: ModelShape) -> None:
        self._dtype, self._shape = facts.dtype, shape

    @abstractmethod
    def tensor(self, weight: Weight, state: State) -> torch.Tensor:
        """Megatron's whole tensor of ``weight``, fp32, without padding of the vocabulary; it may be mapped."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory of what was read."""

    def weight_dtype(self, weight: Weight) -> torch.dtype:
        """The dtype that the run trains in; it is a rounding of the master weights."""
        return self._dtype

    def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
        """The Hugging Face tensors of ``weight``, fp32."""
        return to_hf(self.tensor(weight, "fp32"), weight, self._shape)


class RunReader(MasterWeights):
    """The weights and Adam's moments of a run checkpoint, each put together when it is asked for.

    Raises:
        ConfigError: a file is missing, damaged or hostile, or a parameter is missing, surplus or misshapen.
    """

    def __init__(self, checkpoint: Path, facts: RunFacts, shape: ModelShape) -> None:
        super().__init__(facts, shape)
        self._checkpoint, self._layout = checkpoint, facts.topology.layout
        self._files = EngineFiles(checkpoint / ENGINE, facts.topology.layout, facts.zero_stage)
        self._place: dict[str, tuple[int, Weight]] = {}
        self._copy: Weight | None = None
        for stage in range(facts.topology.layout.pipeline):
            self._check_stage(stage)
            self._files.release()

    @property
    def step(self) -> float:
        """Updates that Adam has made."""
        return self._files.step(0)

    @property
    def deepspeed_version(self) -> str:
        """Of the DeepSpeed that wrote the checkpoint."""
        return self._files.version

    def tensor(self, weight: Weight, state: State) -> torch.Tensor:
        """Megatron's whole tensor of ``weight``, fp32, without padding of the vocabulary; it may be mapped.

        Raises:
            ConfigError: the last stage's copy of a tied embedding differs from the first stage's.
        """
        stage, local = self._place[weight.megatron]
        whole = self._whole(stage, local, state)
        if weight.how == "vocab" and self._copy is not None:
            copy = self._whole(self._layout.pipeline - 1, self._copy, state)
            if not torch.equal(whole, copy):
                raise ConfigError(
                    f"{self._checkpoint}: the last stage's copy of the tied embedding differs from the first stage's "
                    f"({state}); the run that wrote it did not keep them equal"
                )
        return whole

    def release(self) -> None:
        """Unmap the files."""
        self._files.release()

    def _whole(self, stage: int, local: Weight, state: State) -> torch.Tensor:
        slices = [self._files.slice(stage, tensor, local.megatron, state) for tensor in range(self._layout.tensor)]
        whole = unshard(slices, local.how)
        return strip_vocab(whole, self._shape.vocab) if local.how == "vocab" else whole

    def _check_stage(self, stage: int) -> None:
        """Compare what tensor ranks of ``stage`` hold with the model's table, and note the stage of every weight."""
        for local in stage_weights_of(self._shape, self._layout.pipeline, stage):
            self._place.setdefault(global_name(local), (stage, local))
            if self._shape.tied and local.megatron == "output_layer.weight":
                self._copy = local
        table = {x.megatron: x for x in stage_weights_of(self._shape, self._layout.pipeline, stage)}
        for tensor in range(self._layout.tensor):
            shapes = self._files.shapes(stage, tensor)
            wrong = sorted(shapes.keys() ^ table.keys())
            if wrong:
                raise ConfigError(
                    f"{self._checkpoint}: parameter {wrong[0]} ({len(wrong)} in all) of stage {stage} is "
                    f"{'missing' if wrong[0] in table else 'surplus'}; use the config.json of the trained model"
                )
            for name, weight in table.items():
                wanted = slice_shape(self._shape, weight, self._layout.tensor)
                if tuple(shapes[name]) != wanted:
                    raise ConfigError(
                        f"{self._checkpoint}: parameter {name} of stage {stage} has shape {list(shapes[name])}, but "
                        f"config.json makes it {list(wanted)}; use the config.json of the trained model"
                    )


def stage_weights_of(shape: ModelShape, stages: int, stage: int) -> list[Weight]:
    """The parameters of ``stage`` as the trainer cuts the model into ``stages``."""
    split = layer_split(shape.layers, stages)
    layers = range(sum(split[:stage]), sum(split[: stage + 1]))
    return list(stage_table(shape, layers, first=stage == 0, last=stage == stages - 1))
