"""Where a checkpoint stood, and whether a run may go on from it. No engine and no process group."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.config import Config, ConfigError
from megatron_grpo.conversion.formats import RUN_FILE, ZERO

TOPOLOGY = ("parallel", "deepspeed", "model")
"""Settings that may differ from those under which a universal checkpoint was written."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done (the data position follows from it), and what a resumed summary still needs."""

    steps: int
    validation_start: dict[str, float]


def fixed_settings(cfg: Config) -> dict[str, Any]:
    """What a checkpoint's state means only under: a run that goes on must have the same."""
    whole = cfg.dump()
    del whole["anchor"]["alarm"]  # a run that the alarm stopped may go on under another
    return {
        **{key: whole[key] for key in ("boundary", "anchor", "merger")},
        "parallel": {key: whole["parallel"][key] for key in ("tensor", "pipeline", "data", "placement")},
        "deepspeed": {"zero_stage": cfg.zero_stage},
        "model": {"dtype": cfg.model.dtype},
        "grpo": {"minibatches": cfg.grpo.minibatches},
        "train": {"seed": cfg.train.seed},
    }


def is_universal(checkpoint: Path) -> bool:
    """Whether a checkpoint of a run has no topology."""
    return (checkpoint / ZERO).is_dir()


def read_progress(checkpoint: Path, cfg: Config) -> Progress:
    """Where the run of ``checkpoint`` stood.

    Raises:
        ConfigError: it was written under settings that its state does not fit, each named.
    """
    state = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    written, universal = state["settings"], is_universal(checkpoint)
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
    return Progress(state["steps"], state["validation_start"])
