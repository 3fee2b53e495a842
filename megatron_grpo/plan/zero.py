"""What the DeepSpeed file says about who holds what."""

from dataclasses import dataclass

from megatron_grpo.config import Config, offloads
from megatron_grpo.config.engine import read_settings

from .sizes import BYTES


@dataclass(frozen=True, slots=True)
class Engine:
    """Where weights, gradients and the optimizer's state are.

    Attributes:
        stage: of ZeRO.
        optimizer_on_host, weights_on_host: moved to the host's memory.
        gradient_bytes: of a number of the gradients that are averaged over replicas.
        bucket: ZeRO 3: numbers that its buffer for gradients holds.
        max_live: ZeRO 3: numbers of whole weights that a training pass may hold.
        gathers_layers: ZeRO 3 samples with one whole layer at a time, not with the whole stage.
        anchor_on_host: ``snapshots`` and ``M`` where they are in the host's memory.
    """

    stage: int
    optimizer_on_host: bool
    weights_on_host: bool
    gradient_bytes: int
    bucket: int
    max_live: int
    gathers_layers: bool
    anchor_on_host: tuple[str, ...]


def read_engine(config: Config) -> Engine:
    """Errors: ConfigError, as ``config.engine.read_settings``. ``rollout.gather=auto`` is taken as once."""
    settings, anchor = read_settings(config), config.anchor
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    moved = ("snapshots",) if config.merger.packed_signs else ("snapshots", "M")
    return Engine(
        stage=stage,
        optimizer_on_host=stage > 0 and offloads(settings, "optimizer"),
        weights_on_host=stage == 3 and offloads(settings, "param"),
        gradient_bytes=BYTES[config.model.dtype] if stage < 2 else BYTES["float32"],
        bucket=_number(zero, "reduce_bucket_size", 500_000_000),
        max_live=_number(zero, "stage3_max_live_parameters", 1_000_000_000),
        gathers_layers=config.rollout.gather == "layer",
        anchor_on_host=moved if anchor.enabled and anchor.place == "cpu" else (),
    )


def _number(zero: dict[str, object], key: str, default: int) -> int:
    """A size that may be left out, or to DeepSpeed ("auto")."""
    value = zero.get(key)
    return int(value) if isinstance(value, int | float) else default
