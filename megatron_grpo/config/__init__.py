"""Configuration: sections, loading, checks, DeepSpeed settings. Imports neither torch nor an engine."""

from .checks import check_config
from .engine import deepspeed_settings, offloads
from .errors import ConfigError
from .files import holds_sizes_alone
from .loading import load_config, write_resolved
from .problems import DataConfig, RewardConfig, SourceConfig, reward_name
from .root import Config, layer_split
from .sections import (
    DIRECTIONS,
    AnchorConfig,
    BoundaryConfig,
    Codec,
    DeepSpeedConfig,
    Direction,
    GrpoConfig,
    LoggingConfig,
    MergerConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Payload,
    RolloutConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "DIRECTIONS",
    "AnchorConfig",
    "BoundaryConfig",
    "Codec",
    "Config",
    "ConfigError",
    "DataConfig",
    "DeepSpeedConfig",
    "Direction",
    "GrpoConfig",
    "LoggingConfig",
    "MergerConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Payload",
    "RewardConfig",
    "RolloutConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
    "check_config",
    "deepspeed_settings",
    "holds_sizes_alone",
    "layer_split",
    "load_config",
    "offloads",
    "reward_name",
    "write_resolved",
]
