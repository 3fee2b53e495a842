"""Where a checkpoint stood, and whether a run may go on from it. No engine and no process group."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.config import Config, ConfigError
from megatron_grpo.conversion.engine_files import EngineFiles
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.formats import CARRIED, ENGINE, ZERO
from megatron_grpo.conversion.reader import read_hf_config
from megatron_grpo.conversion.runs import read_run

TOPOLOGY = ("parallel", "deepspeed", "model")
"""Settings that may differ from those under which a universal checkpoint was written."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done (the data position follows from it), and what a resumed summary still needs.

    ``problems`` is the digest of what it trains on (`training.problems.digest_of`); empty: not noted.
    """

    steps: int
    validation_start: dict[str, float]
    problems: str = ""


def fixed_settings(cfg: Config) -> dict[str, Any]:
    """What a checkpoint's state means only under: a run that goes on must have the same."""
    whole = cfg.dump()
    del whole["anchor"]["alarm"]  # a run that the alarm stopped may go on under another
    del whole["anchor"]["place"]
    return {
        **{key: whole[key] for key in ("boundary", "anchor", "merger")},
        "parallel": {key: whole["parallel"][key] for key in ("tensor", "pipeline", "data", "placement")},
        "deepspeed": {"zero_stage": cfg.zero_stage},
        "model": {"dtype": cfg.model.dtype},
        "grpo": {key: whole["grpo"][key] for key in ("minibatches", "prompts_per_step")},
        "train": {"seed": cfg.train.seed},
    }


def is_universal(checkpoint: Path) -> bool:
    """Whether a checkpoint of a run has no topology."""
    return (checkpoint / ZERO).is_dir()


def read_progress(checkpoint: Path, cfg: Config) -> Progress:
    """Where the run of ``checkpoint`` stood.

    Raises:
        ConfigError: it is damaged, or was written of another model or under settings that its state does not fit, each
            named.
    """
    state = read_run(checkpoint).content
    written, universal = state["settings"], is_universal(checkpoint)
    _check_model(checkpoint, cfg)
    differing = [
        (section, f"{section}.{key}={value!r}: {checkpoint} was written with {written[section].get(key)!r}")
        for section, values in fixed_settings(cfg).items()
        for key, value in values.items()
        if written[section].get(key) != value and not (universal and section in TOPOLOGY)
    ]
    if differing:
        sections, sentences = zip(*differing, strict=True)
        remedy = "resume with the same"
        if set(sections) <= set(TOPOLOGY):
            remedy += f", or from DIR after: megatron-grpo convert {checkpoint} DIR --to deepspeed-universal"
        raise ConfigError("\n".join((*sentences, remedy)))
    return Progress(state["steps"], state["validation_start"], state.get("problems", ""))


def check_problems(checkpoint: Path, progress: Progress, problems: str) -> None:
    """Refuse to go on with other problems: a place in one stream means nothing in another. Raises ConfigError."""
    if progress.problems not in ("", problems):
        raise ConfigError(
            f"{checkpoint} was trained on other problems than data gives now (rows, their order, template or task "
            "settings differ); resume with the same data, or start anew from its policy"
        )


def _check_model(checkpoint: Path, cfg: Config) -> None:
    """Compare the model that ``checkpoint`` carries with that of ``cfg``."""
    carried, given = (model_shape(read_hf_config(path)) for path in (checkpoint / CARRIED, Path(cfg.model.path)))
    for name in carried.__dataclass_fields__:
        before, now = getattr(carried, name), getattr(given, name)
        if before != now:
            raise ConfigError(
                f"model.path={cfg.model.path} has {name}={now}, and {checkpoint} is of a model with {before}; resume "
                "with the model that was trained"
            )


def refuse_code(checkpoint: Path) -> None:
    """Look through DeepSpeed's files before it unpickles them freely; a universal checkpoint is never read so.

    Raises:
        ConfigError: a file is missing or damaged, or asks to run something.
    """
    if not is_universal(checkpoint):
        facts = read_run(checkpoint)
        EngineFiles(checkpoint / ENGINE, facts.topology.layout, facts.zero_stage, check=False).refuse_code()
