"""What the DeepSpeed file says about who holds what."""

from dataclasses import dataclass

from megatron_grpo.config import Config
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
    gathers_layers: bool = False
    anchor_on_host: tuple[str, ...] = ()


def read_engine(config: Config) -> Engine:
    """Errors: ConfigError, as ``config.engine.read_settings``."""
    zero = read_settings(config).get("zero_optimization", {})
    stage = zero.get("stage", 0)
    accumulates = BYTES[config.model.dtype] if stage < 2 else BYTES["float32"]
    return Engine(
        stage=stage,
        optimizer_on_host=stage > 0 and _device(zero, "offload_optimizer") != "none",
        weights_on_host=stage == 3 and _device(zero, "offload_param") != "none",
        gradient_bytes=accumulates,
        bucket=_number(zero, "reduce_bucket_size", 500_000_000),
        max_live=_number(zero, "stage3_max_live_parameters", 1_000_000_000),
    )


def _number(zero: dict[str, object], key: str, default: int) -> int:
    """A size that may be left out, or to DeepSpeed ("auto")."""
    value = zero.get(key)
    return int(value) if isinstance(value, int | float) else default


def _device(zero: dict[str, object], key: str) -> str:
    place = zero.get(key)
    return str(place.get("device", "none")) if isinstance(place, dict) else "none"
