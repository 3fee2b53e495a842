"""The DeepSpeed file: what it may say beside the config, and the settings the engine is started with."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .root import Config

Settings = dict[str, Any]
AUTO = "auto"
SILENT = 1_000_000_000


def read_settings(config: Config) -> Settings:
    """The DeepSpeed file as written. Errors: ConfigError for other than a JSON object with a ZeRO stage."""
    path = Path(config.deepspeed.config)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"deepspeed.config={path}: no such file; give the path of a DeepSpeed JSON file") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed.config={path}: cannot be read as JSON ({error}); correct it") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"deepspeed.config={path}: is not a JSON object; start from deepspeed_configs/zero1.json")
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else zero
    if type(stage) is not int or stage not in range(4):
        raise ConfigError(f"deepspeed.config={path}: zero_optimization.stage is {stage!r}; use 0, 1, 2 or 3")
    return settings


def offloads(settings: Settings, part: str) -> bool:
    """Whether DeepSpeed keeps that part, ``optimizer`` or ``param``, in host memory."""
    return bool(_get(settings, ("zero_optimization", f"offload_{part}", "device")) == "cpu")


def _offload_errors(file: str, settings: Settings) -> Iterator[str]:
    """What an offload section asks for that is not done here."""
    stage = _get(settings, ("zero_optimization", "stage")) or 0
    for part, least in (("optimizer", 1), ("param", 3)):
        key = f"zero_optimization.offload_{part}"
        section = _get(settings, ("zero_optimization", f"offload_{part}"))
        if section is None:
            continue
        device = section.get("device", "none") if isinstance(section, dict) else section
        if device not in ("none", "cpu"):
            yield f'{file}: {key}.device is {device} but only host memory is used; set it to "cpu" or "none"'
        elif device == "cpu" and stage < least:
            yield f"{file}: {key} needs ZeRO {least} or more and the stage is {stage}; remove it or raise the stage"
        elif device == "cpu" and section.get("ratio", 1.0) != 1.0:
            yield f"{file}: {key}.ratio is {section['ratio']} but all of it is offloaded here; set it to 1.0"
    for old in ("cpu_offload", "cpu_offload_params"):
        if _get(settings, ("zero_optimization", old)):
            new = "offload_optimizer" if old == "cpu_offload" else "offload_param"
            yield f'{file}: zero_optimization.{old} is an old name; write {new}: {{"device": "cpu"}}'


def conflicts(config: Config, settings: Settings) -> list[str]:
    """An error line for each key of the DeepSpeed file that contradicts the config; "auto" always agrees."""
    file = f"deepspeed.config={config.deepspeed.config}"
    errors = []
    for path, wanted, source in _governed(config):
        value = _get(settings, path)
        if value not in (None, AUTO) and value != wanted:
            errors.append(f'{file}: {".".join(path)} is {value} but {source}; set it to "auto" or {json.dumps(wanted)}')
    errors += _offload_errors(file, settings)
    schedule = settings.get("scheduler")
    if isinstance(schedule, dict) and any(value != AUTO for value in schedule.get("params", {}).values()):
        errors.append(f"{file}: scheduler is set but the schedule is optim.warmup_ticks; remove it")
    return errors


def deepspeed_settings(config: Config) -> Settings:
    """Settings for ``deepspeed.initialize``: every "auto" replaced, batch sizes those of one tick.

    Gradient clipping is always off in the engine: the trainer clips, by the norm over all stages.
    Errors: ConfigError when the file contradicts the config.
    """
    settings = deepcopy(read_settings(config))
    errors = conflicts(config, settings)
    if errors:
        raise ConfigError("\n".join(errors))
    settings.pop("scheduler", None)
    for path, wanted, _ in _governed(config):
        _set(settings, path, wanted)
    settings |= {
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    settings["zero_optimization"].setdefault("stage", 0)
    if settings.get("steps_per_print", AUTO) == AUTO:
        settings["steps_per_print"] = SILENT
    without_auto: Settings = _drop_auto(settings)
    return without_auto


def _governed(config: Config) -> list[tuple[tuple[str, ...], Any, str]]:
    """Keys of the DeepSpeed file that the config decides: (path, value, where the value comes from)."""
    optim, rows, data = config.optim, config.rows_per_minibatch, config.parallel.data
    half = config.model.dtype == "bfloat16"
    geometry = (
        f"grpo and parallel give train_batch_size {rows * data} = {rows} a tick and rank "
        f"(train_micro_batch_size_per_gpu) x 1 (gradient_accumulation_steps) x {data} data-parallel ranks"
    )
    schedule = "Megatron's schedule accumulates micro-batches"
    adam = ("optimizer", "params")
    return [
        (("gradient_clipping",), optim.clip, f"optim.clip is {optim.clip}"),
        (("optimizer", "type"), "AdamW", "the optimizer is AdamW"),
        ((*adam, "lr"), optim.lr, f"optim.lr is {optim.lr}"),
        (
            (*adam, "betas"),
            [optim.beta1, optim.beta2],
            f"optim.beta1, beta2 are {optim.beta1}, {optim.beta2}",
        ),
        ((*adam, "eps"), optim.eps, f"optim.eps is {optim.eps}"),
        ((*adam, "weight_decay"), optim.weight_decay, f"optim.weight_decay is {optim.weight_decay}"),
        (("train_batch_size",), rows * data, geometry),
        (("train_micro_batch_size_per_gpu",), rows, geometry),
        (("gradient_accumulation_steps",), 1, schedule),
        (("bf16", "enabled"), half, f"model.dtype is {config.model.dtype}"),
        (("fp16", "enabled"), False, f"model.dtype is {config.model.dtype}"),
        (("data_types", "grad_accum_dtype"), _accumulation(config), f"model.dtype is {config.model.dtype}"),
        (("zero_optimization", "overlap_comm"), False, "gradients are reduced once a tick"),
        (("zero_optimization", "stage3_param_persistence_threshold"), 0, "every parameter is partitioned"),
    ]


def _accumulation(config: Config) -> str:
    """Format in which gradients add up.

    With a bfloat16 model, float32 needs ZeRO 2 or 3: below them DeepSpeed refuses it (ZeRO 0) or
    answers with an optimizer that cannot reduce once a tick (ZeRO 1).
    """
    return "bf16" if config.model.dtype == "bfloat16" and config.zero_stage < 2 else "fp32"


def _get(settings: Settings, path: tuple[str, ...]) -> Any:
    value: Any = settings
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _set(settings: Settings, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(settings.get(name), dict):
            settings[name] = {}
        settings = settings[name]
    settings[path[-1]] = value


def _drop_auto(value: Any) -> Any:
    """Without the "auto" values that nothing here decides: DeepSpeed's own defaults hold."""
    if isinstance(value, dict):
        return {key: _drop_auto(item) for key, item in value.items() if item != AUTO}
    return value
