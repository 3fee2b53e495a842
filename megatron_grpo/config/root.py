"""The whole configuration, and the numbers that follow from it."""

import json
from pathlib import Path
from typing import Any

from pydantic import model_validator

from .problems import DataConfig, RewardConfig
from .sections import (
    AnchorConfig,
    BoundaryConfig,
    DeepSpeedConfig,
    GrpoConfig,
    LoggingConfig,
    MergerConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    Section,
    TokenizerConfig,
    TrainConfig,
)


class Config(Section):
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    parallel: ParallelConfig = ParallelConfig()
    boundary: BoundaryConfig = BoundaryConfig()
    anchor: AnchorConfig = AnchorConfig()
    merger: MergerConfig = MergerConfig()
    grpo: GrpoConfig = GrpoConfig()
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    train: TrainConfig = TrainConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_beside_model(cls, raw: Any) -> Any:
        """``tokenizer.path`` is ``model.path`` unless it is given."""
        if not isinstance(raw, dict):
            return raw
        model, tokenizer = raw.get("model"), raw.get("tokenizer", {})
        path = model.get("path") if isinstance(model, dict) else getattr(model, "path", None)
        if not isinstance(path, str) or not isinstance(tokenizer, dict) or tokenizer.get("path") is not None:
            return raw
        return raw | {"tokenizer": tokenizer | {"path": path}}

    @property
    def pipeline_ranks(self) -> int:
        """Ranks that one replica's stages are spread over, for each tensor shard."""
        return 1 if self.parallel.placement == "one_process" else self.parallel.pipeline

    @property
    def world_size(self) -> int:
        """Ranks of the run: tensor x (pipeline + reward stage) x data; stages in one process are one."""
        return self.parallel.tensor * (self.pipeline_ranks + self.parallel.reward_stage) * self.parallel.data

    @property
    def in_flight(self) -> int:
        """Micro-batches that the sampler keeps under way."""
        return self.rollout.in_flight or self.pipeline_ranks

    @property
    def sampling_micro_batches(self) -> int:
        """Micro-batches that the sampler cuts a batch into."""
        return self.rollout.micro_batches or self.in_flight

    @property
    def sequences_per_step(self) -> int:
        """Responses of one step, over all data-parallel ranks."""
        return self.grpo.prompts_per_step * self.grpo.group_size

    @property
    def rows_per_minibatch(self) -> int:
        """Sequences of one tick on one data-parallel rank."""
        return self.sequences_per_step // (self.parallel.data * self.grpo.minibatches)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one tick on one data-parallel rank."""
        return self.rows_per_minibatch // self.train.micro_batch

    @property
    def ticks(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.steps * self.grpo.minibatches

    @property
    def boundary_at_work(self) -> BoundaryConfig:
        """The ``boundary`` section, without a forward codec where no pass would use one: rows that are sent once, while
        sampling, and uncompressed."""
        boundary = self.boundary
        if boundary.send_once == "off" or self.rollout.path != "dense":
            return boundary
        plain = {
            "codec": None,
            "forward_codec": "identity",
            "forward_payload": boundary.dense_payload("forward"),
            "backward_codec": boundary.codec_of("backward"),
            "predict": None,
            "shared_basis": False,
        }
        return boundary.model_copy(update=plain)

    @property
    def zero_stage(self) -> int:
        """ZeRO stage named by the DeepSpeed file; read at each call."""
        settings = json.loads(Path(self.deepspeed.config).read_text(encoding="utf-8"))
        stage: int = settings.get("zero_optimization", {}).get("stage", 0)
        return stage

    def dump(self) -> dict[str, Any]:
        """Every key with its value, as plain YAML types; reads back as a config that means and dumps the same."""
        return self.model_copy(update={"boundary": self.boundary_at_work.resolved()}).model_dump(mode="json")


def layer_split(layers: int, stages: int) -> list[int]:
    """Layers of each stage: as even as possible, extra ones on the earlier stages (7 on 2: 4 + 3)."""
    each, extra = divmod(layers, stages)
    return [each + (stage < extra) for stage in range(stages)]
