"""The whole plan of a run that the checks let pass, as numbers; ``view`` shows them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron_grpo.config import Config
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.launch.hosts import Host

from .links import LinkLoad, link_loads
from .memory import StageMemory, stage_memory
from .network import Placement, Rates, placement_of
from .sizes import StageSize, parameter_count, read_shape, stage_sizes
from .time import Device, StepTime, step_time
from .traffic import Lengths, longest_lengths, step_bytes, uncompressed
from .zero import Engine, read_engine


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would be, every sequence as long as it may be.

    Attributes:
        parameters: of the whole model.
        links, time: of this config; ``dense_links`` and ``dense`` of the same with bfloat16 boundaries, no anchor.
        by_codec: bytes of a step that samples through the codec, where ``rollout.path`` leaves it open.
    """

    config: Config
    shape: ModelShape
    parameters: int
    sizes: list[StageSize]
    engine: Engine
    placement: Placement
    device: Device
    lengths: Lengths
    memory: list[StageMemory]
    links: list[LinkLoad]
    dense_links: list[LinkLoad]
    time: StepTime
    dense: StepTime
    by_codec: dict[str, float] | None

    def host_of(self, rank: int) -> str | None:
        """``None`` where hosts are not known."""
        return self.placement.names[rank] if self.placement.names else None

    def as_json(self) -> dict[str, Any]:
        """Every number: bytes, seconds, bits a second."""
        return {
            "world": self.config.world_size,
            "parameters": self.parameters,
            "zero_stage": self.engine.stage,
            "ranks": list(self._ranks()),
            "batch": {
                "sequences": self.config.sequences_per_step,
                "ticks": self.config.grpo.minibatches,
                "micro_batches": self.config.micro_batches,
                "micro_batch": self.config.train.micro_batch,
                "sampling_micro_batches": self.config.sampling_micro_batches,
                "in_flight": self.config.in_flight,
                "tokens": asdict(self.lengths),
            },
            "links": [
                asdict(load) | {"dense_bytes": dense.bytes}
                for load, dense in zip(self.links, self.dense_links, strict=True)
            ],
            "bytes_per_step": {"config": dict(self.time.bytes), "dense": dict(self.dense.bytes)},
            "memory": [
                {"stage": stage, "parts": entry.parts, "peak": entry.peak, "host": entry.host, "disk": entry.disk}
                for stage, entry in enumerate(self.memory)
            ],
            "seconds_per_step": {"config": _seconds(self.time), "dense": _seconds(self.dense)},
        }

    def _ranks(self) -> list[dict[str, Any]]:
        """Those of a reward stage have no layers of the policy."""
        parallel = self.config.parallel
        parts: list[dict[str, Any]] = [
            {"layers": [size.layers.start, size.layers.stop - 1], "parameters": size.parameters} for size in self.sizes
        ]
        parts += [{"layers": None, "parameters": None}] * parallel.reward_stage
        return [
            {
                "rank": rank,
                "stage": stage,
                "replica": (rank - stage * parallel.data * parallel.tensor) // parallel.tensor,
                "shard": rank % parallel.tensor,
                "host": self.host_of(rank),
                **part,
            }
            for stage, part in enumerate(parts)
            for rank in self.placement.ranks(stage)
        ]


def _seconds(time: StepTime) -> dict[str, float]:
    return {**time.parts, "total": time.total, "compute": time.compute, "coding": time.coding, "wire": time.wire}


def build_plan(config: Config, hosts: Sequence[Host], rates: Rates, device: Device) -> Plan:
    """The plan of a config that has no errors.

    Raises:
        ConfigError: it does not fit the hosts.
    """
    shape, engine, lengths = read_shape(config), read_engine(config), longest_lengths(config)
    sizes = stage_sizes(shape, pipeline=config.pipeline_ranks, tensor=config.parallel.tensor)
    placement = placement_of(config, hosts)
    network = placement.network(rates)
    loads = partial(
        link_loads, shape=shape, sizes=sizes, lengths=lengths, engine=engine, placement=placement, rates=rates
    )
    by_codec = config.model_copy(update={"rollout": config.rollout.model_copy(update={"path": "codec"})})
    return Plan(
        config=config,
        shape=shape,
        parameters=parameter_count(shape),
        sizes=sizes,
        engine=engine,
        placement=placement,
        device=device,
        lengths=lengths,
        memory=stage_memory(config, shape),
        links=loads(config),
        dense_links=loads(uncompressed(config)),
        time=step_time(config, shape, lengths, network, device),
        dense=step_time(uncompressed(config), shape, lengths, network, device),
        by_codec=step_bytes(by_codec, shape, lengths) if config.rollout.path == "auto" else None,
    )
