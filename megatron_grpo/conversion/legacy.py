"""Megatron's older checkpoint, read: ``mp_rank_TT[_PPP]/model_optim_rng.pt`` of each rank, layers numbered from 0.

The files pickle a lot beside weights (arguments, optimizer, generators). They are read with ``weights_only``: what is
no tensor becomes a stand-in that does nothing, and what Megatron does not put there is refused.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.names import Weight, check_tensor_size, global_name, megatron_shape, stage_table
from megatron_grpo.conversion.pickles import check_sums, load_mapped
from megatron_grpo.conversion.shards import to_hf, unshard

RANK = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
FILES = ("model_optim_rng.pt", "model_rng.pt")
# Packages whose objects Megatron pickles beside the weights; none of them is imported for it.
INERT_PACKAGES = (
    "argparse",
    "collections",
    "enum",
    "megatron",
    "numpy",
    "pathlib",
    "torch",
    "transformer_engine",
    "types",
)
FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
Rank = Mapping[str, torch.Tensor]


class LegacyReader:
    """The weights of a model out of every rank's file; a stage's files are open while its weights are asked for.

    Raises:
        ConfigError: a rank is missing, a file is damaged or hostile, or a parameter is missing, surplus or misshapen.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self._directory, self._shape = directory, shape
        self._files = _rank_files(directory)
        self._tensor = 1 + max(tensor for tensor, _ in self._files)
        self._stages = 1 + max(stage for _, stage in self._files)
        check_tensor_size(shape, self._tensor, "the tensor size of the source")
        self._open: dict[int, list[Rank]] = {}
        self._place: dict[str, tuple[int, Weight]] = {}
        for file in self._files.values():
            check_sums(file)
        self._check_stages()

    def weight_dtype(self, weight: Weight) -> torch.dtype:
        """The dtype of ``weight``, as the first tensor rank has it."""
        stage, local = self._place[weight.megatron]
        return self._ranks(stage)[0][local.megatron].dtype

    def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
        """The Hugging Face tensors of ``weight``.

        Raises:
            ConfigError: the last stage's copy of a tied embedding differs from the first stage's.
        """
        stage, local = self._place[weight.megatron]
        slices = [rank[local.megatron] for rank in self._ranks(stage)]
        if weight.how == "vocab" and self._shape.tied and self._stages > 1:
            copies = [rank["output_layer.weight"] for rank in self._ranks(self._stages - 1)]
            if not all(torch.equal(one, other) for one, other in zip(slices, copies, strict=True)):
                raise ConfigError(f"{self._directory}: the last stage's copy of the tied embedding differs")
        return to_hf(unshard(slices, weight.how), weight, self._shape)

    def release(self) -> None:
        """Unmap the files."""
        self._open.clear()

    def _ranks(self, stage: int) -> list[Rank]:
        if stage not in self._open:
            self._open[stage] = [_load(self._files[tensor, stage]) for tensor in range(self._tensor)]
        return self._open[stage]

    def _check_stages(self) -> None:
        """Compare every file with the model's table, and note the stage of every weight."""
        first_layer = 0
        for stage in range(self._stages):
            ranks = self._ranks(stage)
            numbers = {int(name.split(".")[2]) for name in ranks[0] if name.startswith("decoder.layers.")}
            layers = range(first_layer, first_layer + len(numbers))
            first_layer = layers.stop
            table = stage_table(self._shape, layers, first=stage == 0, last=stage == self._stages - 1)
            local = {weight.megatron: weight for weight in table}
            for tensor, rank in enumerate(ranks):
                self._check_rank(self._files[tensor, stage], rank, local)
            for weight in local.values():
                self._place.setdefault(global_name(weight), (stage, weight))
            self.release()
        if first_layer != self._shape.layers:
            raise ConfigError(
                f"{self._directory} holds {first_layer} layers and config.json says {self._shape.layers}; use the "
                "config.json of the same model"
            )

    def _check_rank(self, file: Path, rank: Rank, table: Mapping[str, Weight]) -> None:
        wrong = sorted(rank.keys() ^ table.keys())
        if wrong:
            kind = "missing from" if wrong[0] in table else "not a part of the model of"
            raise ConfigError(f"tensor {wrong[0]} is {kind} {file}; use the config.json of the same model")
        for name, weight in table.items():
            wanted, found = list(megatron_shape(self._shape, weight)), list(rank[name].shape)
            if weight.how != "replicated":
                cut = 1 if weight.how == "row" else 0
                wanted[cut] = found[cut] if weight.how == "vocab" else wanted[cut] // self._tensor
            short = weight.how == "vocab" and found[0] * self._tensor < self._shape.vocab
            if found != wanted or short:
                raise ConfigError(
                    f"tensor {name} in {file} has shape {found}, but config.json makes it {wanted}; use the "
                    "config.json of the same model"
                )


def _rank_files(directory: Path) -> dict[tuple[int, int], Path]:
    """The file of every (tensor rank, stage)."""
    found: dict[tuple[int, int], Path] = {}
    for folder in directory.iterdir():
        match = RANK.match(folder.name)
        files = [folder / name for name in FILES if (folder / name).is_file()]
        if match and files:
            found[int(match[1]), int(match[2] or 0)] = files[0]
    tensors, stages = ({place[axis] for place in found} for axis in (0, 1))
    wanted = {(tensor, stage) for tensor in range(len(tensors)) for stage in range(len(stages))}
    if not found or found.keys() != wanted:
        raise ConfigError(
            f"{directory} lacks {' or '.join(FILES)} of a rank (found {sorted(found)}: tensor rank, stage); fetch it"
        )
    return found


def _load(file: Path) -> Rank:
    """Names and numbers of a rank, mapped and not read; norms that Transformer Engine fused get their plain names."""
    content = load_mapped(file, INERT_PACKAGES)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ConfigError(f"{file} has no table 'model' of one stage (interleaved schedules are not read)")
    rank = {name: tensor for name, tensor in model.items() if isinstance(tensor, torch.Tensor)}
    for fused, plain in FUSED_NORMS:
        rank = {name.replace(fused, plain): tensor for name, tensor in rank.items()}
    return {name: tensor for name, tensor in rank.items() if not name.endswith("_extra_state")}


def rank_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name, behind the folder of its rank, and mapped tensor of everything that every rank has."""
    for _, file in sorted(_rank_files(directory).items()):
        for name, tensor in _load(file).items():
            yield f"{file.parent.name} {name}", tensor
