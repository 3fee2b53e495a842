"""The sweep file: arms x seeds, every run resolved and checked before any of them starts.

base: base.yaml                     # a run's config, relative to the sweep file
seeds: [0, 1, 2]                    # train.seed of every arm; arms are paired by it
reference: dense                    # optional: the arm that the others are compared with
arms:
  dense: {boundary.codec: identity, anchor.enabled: false, merger.kind: none}
  k5: {}                            # overrides by dotted key, as on the command line
  k5_ranks: {set: {parallel.placement: ranks}, seeds: [0, 1], base: other.yaml}      # the long form
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from megatron_grpo.config import Config, ConfigError, check_config, load_config
from megatron_grpo.config.loading import explain, parse_yaml
from megatron_grpo.config.sections import Natural, Section
from megatron_grpo.launch import device_ids

ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")

Seeds = Annotated[list[Natural], Field(min_length=1)]


class ArmSpec(Section):
    set: dict[str, Any] = Field(default={})
    """Overrides of the base by dotted key."""
    seeds: Seeds | None = None
    """The sweep's when absent."""
    base: str | None = None
    """The sweep's when absent."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        """A mapping of dotted keys only (or nothing) is ``set`` itself."""
        if raw is None:
            return {}
        return {"set": raw} if isinstance(raw, dict) and all("." in str(key) for key in raw) else raw


class SweepSpec(Section):
    """A sweep file as it is written."""

    base: str
    """YAML file of a run, relative to the sweep file."""
    seeds: Seeds
    """Values of train.seed."""
    reference: str | None = None
    """Arm whose scores are subtracted from those of the others, seed by seed."""
    arms: Annotated[dict[str, ArmSpec], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Run:
    """One arm at one seed."""

    arm: str
    seed: int
    cfg: Config

    @property
    def name(self) -> str:
        """Its run directory, relative to that of the sweep."""
        return f"{self.arm}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    overrides: dict[str, Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str
    reference: str | None
    arms: tuple[Arm, ...]

    @property
    def runs(self) -> list[Run]:
        """Seed by seed, so that arms can be compared long before the last run."""
        seeds = list(dict.fromkeys(run.seed for arm in self.arms for run in arm.runs))
        return [run for seed in seeds for arm in self.arms for run in arm.runs if run.seed == seed]


def load_sweep(file: Path) -> Sweep:
    """Read a sweep file and resolve the config of every run.

    The sweep is named after the file, or after its folder when the file is ``sweep.yaml``.
    Errors: one ConfigError with a line for everything wrong, each naming the arms it is about.
    """
    spec = _read(file)
    errors = _spec_errors(spec)
    arms, said_by = [], dict[str, list[str]]()
    for name, arm in spec.arms.items():
        try:
            cfg = _resolved(file.parent / (arm.base or spec.base), arm.set)
        except ConfigError as error:
            for line in str(error).splitlines():
                said_by.setdefault(line, []).append(name)
            continue
        arms.append(Arm(name, arm.set, tuple(Run(name, seed, _seeded(cfg, seed)) for seed in arm.seeds or spec.seeds)))
    errors += [f"arm {', '.join(names)}: {line}" for line, names in said_by.items()]
    errors += _duplicates(arms)
    if errors:
        raise ConfigError("\n".join(errors))
    name = file.stem if file.stem != "sweep" else file.absolute().parent.name
    return Sweep(name, spec.reference, tuple(arms))


def _read(file: Path) -> SweepSpec:
    if not file.is_file():
        raise ConfigError(f"sweep={file}: no such file; give the path of a YAML file with base, seeds and arms")
    try:
        raw = parse_yaml(file.read_text(encoding="utf-8"), f"sweep={file}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"sweep={file}: is not UTF-8 text; give the path of a YAML file") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"sweep={file}: holds no keys; write base, seeds and arms")
    try:
        return SweepSpec.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(detail) for detail in error.errors())) from error


def _describe(detail: ErrorDetails) -> str:
    """One pydantic error of the sweep file as ``key: why; remedy``."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{key}: is missing; a sweep needs base, seeds and arms"
    if detail["type"] == "extra_forbidden":
        if len(detail["loc"]) == 1:
            return f"{key}: unknown key; a sweep has {', '.join(SweepSpec.model_fields)}"
        return f"{key}: unknown key; an arm has {', '.join(ArmSpec.model_fields)}; put overrides below set"
    return f"{key}={json.dumps(detail['input'], default=str)}: {'; '.join(explain(detail))}"


def _spec_errors(spec: SweepSpec) -> list[str]:
    """What a sweep file says wrongly although each of its keys is well formed."""
    errors = [
        f"arms.{name}: cannot name a folder; start with a letter or digit and use letters, digits and . _ + -"
        for name in spec.arms
        if not ARM_NAME.fullmatch(name)
    ]
    seeds = {"seeds": spec.seeds} | {f"arms.{name}.seeds": arm.seeds or [] for name, arm in spec.arms.items()}
    errors += [f"{key}={given}: has a seed twice; keep one" for key, given in seeds.items() if _repeats(given)]
    if spec.reference is not None and spec.reference not in spec.arms:
        errors.append(f"reference={spec.reference}: is no arm; use one of {', '.join(spec.arms)}")
    return errors


def _repeats(seeds: Sequence[int]) -> bool:
    return len(set(seeds)) < len(seeds)


def _resolved(base: Path, overrides: dict[str, Any]) -> Config:
    """The checked config of an arm, at its base's seed. Errors: ConfigError with a line for everything wrong."""
    if "train.seed" in overrides:
        raise ConfigError(f"train.seed={overrides['train.seed']}: is set by the sweep; use seeds")
    cfg = load_config(base, [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()])
    errors = check_config(cfg)
    if errors:
        raise ConfigError("\n".join(errors))
    device_ids(cfg.world_size, cfg.parallel)
    return cfg


def _seeded(cfg: Config, seed: int) -> Config:
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"seed": seed})})


def _duplicates(arms: Sequence[Arm]) -> list[str]:
    """A line for each group of arms that would make the same runs."""
    alike: dict[str, list[str]] = {}
    for arm in arms:
        alike.setdefault(_seeded(arm.runs[0].cfg, 0).model_dump_json(), []).append(arm.name)
    return [
        f"arms {', '.join(names)}: resolve to the same config; keep one, or change an override"
        for names in alike.values()
        if len(names) > 1
    ]
