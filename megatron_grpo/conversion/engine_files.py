"""DeepSpeed's checkpoint of a run, read: weights and Adam's moments of every rank, at ZeRO 0 to 3.

Every (stage, tensor rank) is a model of its own to DeepSpeed, ``mp_rank_MM`` with MM = stage * tensor size + tensor
rank: its parameters are flattened one after another, and ZeRO gives each data rank a part. Files are found by number,
never by the order of their names. They pickle settings beside tensors; those become stand-ins that do nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.pickles import check_sums, load_mapped, refuse_code
from megatron_grpo.parallel.groups import Coordinates, Layout

State = Literal["fp32", "exp_avg", "exp_avg_sq"]
STATES: tuple[State, ...] = get_args(State)
"""What an optimizer knows of a parameter, as DeepSpeed calls it: the master weight and Adam's moments."""

INERT_PACKAGES = ("deepspeed",)
NO_PARAMETER = "_extra_state"
VERSION = "ds_version"


@dataclass(frozen=True, slots=True)
class RankParameters:
    """What all data ranks together hold of one (stage, tensor rank).

    Attributes:
        shapes: of the slices, by the parameter's name on its stage.
        parts: flat fp32 parts by name and state, in the order of data ranks; mapped, not read.
        step: Adam's count of updates.
        version: of the DeepSpeed that wrote the files.
    """

    shapes: Mapping[str, torch.Size]
    parts: Mapping[tuple[str, State], Sequence[torch.Tensor]]
    step: float
    version: str


class EngineFiles:
    """The files of an engine's checkpoint; those of a stage are mapped while its parameters are asked for.

    Args:
        folder: the tag's directory.
        layout: of the run that wrote it.
        zero_stage: of that run.
        check: compare every checksum first.

    Raises:
        ConfigError: a rank's file is missing, damaged or hostile.
    """

    def __init__(self, folder: Path, layout: Layout, zero_stage: int, *, check: bool = True) -> None:
        self._folder, self._layout, self._zero = folder, layout, zero_stage
        self._open: dict[tuple[int, int], RankParameters] = {}
        for file in self._all_files() if check else ():
            check_sums(file)

    def shapes(self, stage: int, tensor: int) -> Mapping[str, torch.Size]:
        """Shapes of the slices of a tensor rank, by the parameter's name on ``stage``."""
        return self._rank(stage, tensor).shapes

    def step(self, stage: int) -> float:
        """Updates that Adam has made."""
        return self._rank(stage, 0).step

    @property
    def version(self) -> str:
        """Of the DeepSpeed that wrote the files."""
        return self._rank(0, 0).version

    def slice(self, stage: int, tensor: int, name: str, state: State) -> torch.Tensor:
        """fp32 slice of ``name`` on a tensor rank; it may be mapped.

        Raises:
            ConfigError: the parts of data ranks do not add up to it.
        """
        rank = self._rank(stage, tensor)
        parts, shape = rank.parts[name, state], rank.shapes[name]
        if sum(len(part) for part in parts) != math.prod(shape):
            raise ConfigError(
                f"{self._folder}: the data ranks hold {sum(len(part) for part in parts)} numbers of {name} ({state}), "
                f"whose shape {list(shape)} has {math.prod(shape)}; fetch the checkpoint again"
            )
        return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(shape)

    def release(self) -> None:
        """Unmap the files."""
        self._open.clear()

    def _rank(self, stage: int, tensor: int) -> RankParameters:
        place = (stage, tensor)
        if place not in self._open:
            read = {0: self._read_zero_0, 1: self._read_zero_12, 2: self._read_zero_12, 3: self._read_zero_3}
            try:
                self._open[place] = read[self._zero](stage * self._layout.tensor + tensor)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self._folder}: the files of stage {stage}, tensor rank {tensor} are not those of ZeRO "
                    f"{self._zero} ({error!r}); fetch the checkpoint again"
                ) from error
        return self._open[place]

    def refuse_code(self) -> None:
        """Look through every file before something unpickles it freely, as DeepSpeed does; tensors are not read.

        Raises:
            ConfigError: a file is missing, damaged, or asks to run something.
        """
        for file in self._all_files():
            refuse_code(file, INERT_PACKAGES)

    def check_rank(self, at: Coordinates) -> None:
        """Compare the checksums of what the rank ``at`` loads.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        model = at.pipeline * self._layout.tensor + at.tensor
        check_sums(self._model_file(model, at.data))
        if self._zero > 0:
            check_sums(self._optimizer_file(model, at.data))

    def _all_files(self) -> Iterator[Path]:
        for model in range(self._layout.pipeline * self._layout.tensor):
            for data in range(self._layout.data):
                if data == 0 or self._zero == 3:
                    yield self._model_file(model, data)
                if self._zero > 0:
                    yield self._optimizer_file(model, data)

    def _model_file(self, model: int, data: int = 0) -> Path:
        prefix = f"zero_pp_rank_{data}_" if self._zero == 3 else ""
        return self._folder / f"{prefix}mp_rank_{model:02d}_model_states.pt"

    def _optimizer_file(self, model: int, data: int) -> Path:
        plain = self._folder / f"zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"
        bf16 = plain.with_name(f"bf16_{plain.name}")
        return bf16 if bf16.is_file() else plain

    def _optimizers(self, model: int) -> list[dict[str, Any]]:
        return [
            load_mapped(self._optimizer_file(model, data), INERT_PACKAGES)["optimizer_state_dict"]
            for data in range(self._layout.data)
        ]

    def _read_zero_0(self, model: int) -> RankParameters:
        """Weights are the module's; Adam numbers parameters in the order of the module."""
        content = load_mapped(self._model_file(model), INERT_PACKAGES)
        weights = {name: x for name, x in content["module"].items() if not name.endswith(NO_PARAMETER)}
        adam, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
        parts: dict[tuple[str, State], list[torch.Tensor]] = {}
        for number, (name, weight) in enumerate(weights.items()):
            parts[name, "fp32"] = [weight.float().flatten()]
            for state in STATES[1:]:
                if adam[number][state].shape != weight.shape:
                    raise ConfigError(f"{self._model_file(model)}: {state} number {number} is not that of {name}")
                parts[name, state] = [adam[number][state].flatten()]
        return RankParameters(
            {name: x.shape for name, x in weights.items()}, parts, _step(adam[0], groups), content[VERSION]
        )

    def _read_zero_12(self, model: int) -> RankParameters:
        """Each data rank has one range of every group, and says where in it which parameter lies."""
        content = load_mapped(self._model_file(model), INERT_PACKAGES)
        shapes = _merged(content["param_shapes"])
        parts: dict[tuple[str, State], list[torch.Tensor]] = {(name, x): [] for name in shapes for x in STATES}
        optimizers = self._optimizers(model)
        for optimizer in optimizers:
            adam = optimizer["base_optimizer_state"]["state"]
            for group, fragments in enumerate(optimizer["param_slice_mappings"]):
                flat = {"fp32": optimizer["single_partition_of_fp32_groups"][group], **adam[group]}
                for name, fragment in fragments.items():
                    start, count = fragment.state["start"], fragment.state["numel"]
                    for state in STATES:
                        parts[name, state].append(flat[state][start : start + count])
        base = optimizers[0]["base_optimizer_state"]
        return RankParameters(shapes, parts, _step(base["state"][0], base["param_groups"]), content[VERSION])

    def _read_zero_3(self, model: int) -> RankParameters:
        """Each parameter is cut evenly among data ranks, the last part padded; every sub-group is a flat tensor."""
        content = load_mapped(self._model_file(model), INERT_PACKAGES)
        groups = content["param_shapes"]
        shapes = _merged(groups)
        parts: dict[tuple[str, State], list[torch.Tensor]] = {(name, x): [] for name in shapes for x in STATES}
        optimizers = self._optimizers(model)
        for data, optimizer in enumerate(optimizers):
            adam = optimizer["optimizer_state_dict"]["state"]
            for number, group in enumerate(groups):
                flat = {"fp32": optimizer["fp32_flat_groups"][number], **adam[number]}
                start = 0
                for name, shape in group.items():
                    share = -(-math.prod(shape) // self._layout.data)
                    count = max(0, min(share, math.prod(shape) - data * share))
                    for state in STATES:
                        parts[name, state].append(flat[state][start : start + count])
                    start += share
        base = optimizers[0]["optimizer_state_dict"]
        return RankParameters(shapes, parts, _step(base["state"][0], base["param_groups"]), content[VERSION])


def _merged(groups: Sequence[Mapping[str, torch.Size]]) -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for group in groups for name, shape in group.items()}


def _step(adam: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> float:
    """Some optimizers count in the state of each parameter, some once for a group."""
    return float(adam["step"] if "step" in adam else groups[0]["step"])
