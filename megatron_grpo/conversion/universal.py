"""Universal checkpoints: the state of a run without a topology, in the directory that DeepSpeed's own tools use.

``zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold Megatron's whole tensors under the names of the whole model
(layers numbered through), the vocabulary unpadded, each with what DeepSpeed needs to cut it. ``state/`` is ours (see
``run_state``), ``run.json`` says where the run stood, ``hf/`` carries config and tokenizer.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.engine_files import STATES, State
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.formats import ZERO
from megatron_grpo.conversion.names import Weight, megatron_shape, model_table, stored_name
from megatron_grpo.conversion.pickles import check_sums, load_mapped, save_tensors
from megatron_grpo.conversion.run_state import FOLDER, RUN_STATE, RankStates, run_state
from megatron_grpo.conversion.runs import MasterWeights, RunFacts, RunReader

OPTIMIZER_STATE = "optimizer_state.pt"
MUCH_BYTES = 2**24
"""What was mapped of a tensor larger than this is given back at once, and not after its layer."""


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, contiguous, with a storage that holds nothing else: ``torch.save`` writes whole storages."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def deepspeed_entry(weight: Weight, whole: torch.Tensor) -> dict[str, Any]:
    """What ``deepspeed.checkpoint`` expects in a parameter's file, so that it cuts the tensor as Megatron does."""
    entry: dict[str, Any] = {"param": alone(whole), "cat_dim": 1 if weight.how == "row" else 0}
    if weight.how == "vocab":
        entry["vocab_tensor"] = True
    if weight.how == "gate_up":
        entry["param_n_sub_params"] = 2
    return entry


def universal_bytes(shape: ModelShape) -> dict[str, int]:
    """Bytes of weights and moments, by parameter."""
    return {x.megatron: len(STATES) * 4 * math.prod(megatron_shape(shape, x)) for x in model_table(shape)}


def write_universal(
    checkpoint: Path, facts: RunFacts, shape: ModelShape, folder: Path, done: Callable[[int], None]
) -> None:
    """Write ``zero/`` and ``state/`` of a universal checkpoint, a parameter at a time.

    Args:
        folder: exists.
        done: hears of the bytes of each parameter.

    Raises:
        ConfigError: a file of ``checkpoint`` is missing, damaged or hostile.
    """
    reader, states = RunReader(checkpoint, facts, shape), RankStates(checkpoint, facts, shape)
    sizes = universal_bytes(shape)
    (folder / FOLDER).mkdir()
    save_tensors(run_state(states, facts), folder / FOLDER / RUN_STATE)
    for layer in _layers(shape):
        for weight in layer:
            _write_parameter(reader, weight, folder / ZERO / weight.megatron)
            tensors = {key: alone(tensor) for key, tensor in states.tensors(weight).items()}
            save_tensors(tensors, folder / FOLDER / f"{weight.megatron}.pt")
            done(sizes[weight.megatron])
        reader.release()
        states.release()
    _write_optimizer(reader, folder / ZERO)


def _layers(shape: ModelShape) -> Iterator[list[Weight]]:
    """Parameters of one layer, or outside of all, together: what is mapped is given back between them."""
    layer: list[Weight] = []
    for weight in model_table(shape):
        if layer and weight.layer != layer[-1].layer:
            yield layer
            layer = []
        layer.append(weight)
    yield layer


def _write_parameter(reader: RunReader, weight: Weight, folder: Path) -> None:
    folder.mkdir(parents=True)
    for state in STATES:
        whole = reader.tensor(weight, state)
        save_tensors(deepspeed_entry(weight, whole), folder / f"{state}.pt")
        if whole.nbytes > MUCH_BYTES:
            del whole
            reader.release()
    save_tensors(torch.tensor(reader.step), folder / "step.pt")


def _write_optimizer(reader: RunReader, folder: Path) -> None:
    """What DeepSpeed's own loaders ask for beside the parameters; learning rates are the config's."""
    step = {"step": torch.tensor(reader.step)}
    groups: list[dict[str, Any]] = [{"params": []}]
    save_tensors(
        {
            "param_groups": groups,
            "ds_version": reader.deepspeed_version,
            "optimizer_state_dict": {"state": {0: step}, "param_groups": groups},
        },
        folder / OPTIMIZER_STATE,
    )


class UniversalReader(MasterWeights):
    """The weights and Adam's moments of a universal checkpoint, each read, and its checksums compared, when asked for.

    Raises:
        ConfigError: a parameter has no file.
    """

    def __init__(self, folder: Path, facts: RunFacts, shape: ModelShape) -> None:
        super().__init__(facts, shape)
        self._folder = folder
        self._checked: set[Path] = set()
        wanted = {weight.megatron for weight in model_table(shape)}
        there = (
            {path.name for path in (folder / ZERO).iterdir() if path.is_dir()} if (folder / ZERO).is_dir() else set()
        )
        for name in sorted(wanted ^ there):
            kind = "missing from" if name in wanted else "not a part of the model of"
            raise ConfigError(f"parameter {name} is {kind} {folder / ZERO}; use the config.json of the trained model")

    @property
    def step(self) -> float:
        """Updates that Adam has made."""
        first = next(model_table(self._shape))
        return float(self._read(self._folder / ZERO / first.megatron / "step.pt"))

    def tensor(self, weight: Weight, state: State) -> torch.Tensor:
        """Megatron's whole tensor of a ``weight`` of any stage, fp32, mapped, without padding of the vocabulary.

        Raises:
            ConfigError: the file is missing, damaged, hostile or holds another shape.
        """
        file = self._folder / ZERO / stored_name(self._shape, weight) / f"{state}.pt"
        content = self._read(file)
        tensor = content.get("param") if isinstance(content, dict) else None
        wanted = megatron_shape(self._shape, weight)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != wanted or tensor.dtype != torch.float32:
            raise ConfigError(f"{file} holds no fp32 parameter of shape {list(wanted)}; use another checkpoint")
        return tensor

    def release(self) -> None:
        """Nothing is kept between two weights."""

    def _read(self, file: Path) -> Any:
        if file not in self._checked:
            check_sums(file)
            self._checked.add(file)
        return load_mapped(file)
