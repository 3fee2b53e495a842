"""YAML file and dotted overrides -> Config, with every error of a file reported at once."""

import difflib
import json
import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .checks import check_config
from .errors import ConfigError
from .problems import REWARD_MODEL, MixedSource
from .root import Config

Raw = dict[str, Any]

PATH_KEYS = (
    ("model", "path"),
    ("tokenizer", "path"),
    ("data", "path"),
    ("data", "val_path"),
    ("deepspeed", "config"),
)
PACKAGED = "deepspeed_configs"


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where 1e-6 is text; here it is a number, and a key given twice is an error.

    What ``<<`` brings in is no key of the mapping's own: those come first.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != _MERGE]
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{key}: is given twice{node.start_mark}; keep one")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply ``section.key=value`` overrides (values are YAML), resolve paths, validate.

    Errors: one ConfigError with a line for every wrong key, type, range and missing file.
    """
    file = Path(path).absolute()
    raw = _read(file)
    errors = _apply(raw, overrides or [])
    errors += _resolve_paths(raw, file.parent)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        errors += [_describe(detail) for detail in error.errors()]
        errors += _errors_beside(raw, error)
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def _errors_beside(raw: Raw, error: ValidationError) -> list[str]:
    """What else is wrong: combinations of the keys that are right, the wrong ones at their defaults."""
    rest = deepcopy(raw)
    for detail in error.errors():
        *sections, name = detail["loc"]
        parent: Any = rest
        for section in sections:
            parent = parent.get(section) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(name, None)
    try:
        return check_config(Config.model_validate(rest))
    except ValidationError:
        return []  # nothing to combine, such as no model


def write_resolved(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the resolved configuration as YAML, complete or not at all."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.tmp")
    aside.write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
    os.replace(aside, target)


def parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: is not valid YAML ({' '.join(str(error).split())}); correct it") from error


def _read(file: Path) -> Raw:
    if not file.is_file():
        raise ConfigError(f"config={file}: no such file; give the path of a YAML file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config={file}: is not UTF-8 text; give the path of a YAML file") from error
    raw = parse_yaml(text, f"config={file}")
    if not isinstance(raw, dict):
        raise ConfigError(f"config={file}: holds no sections; start with `model: {{path: ...}}`")
    return {section: {} if values is None else values for section, values in raw.items()}


def _apply(raw: Raw, overrides: list[str]) -> list[str]:
    """Put the overrides into ``raw``; returns an error line for each malformed one."""
    errors = []
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and section and name) or "." in name:
            errors.append(f"{override}: is not an override; write section.key=value, such as anchor.cadence=20")
            continue
        if not isinstance(raw.setdefault(section, {}), dict):
            continue  # reported by the validation of that section
        try:
            raw[section][name] = parse_yaml(text, override)
        except ConfigError as error:
            errors.append(str(error))
    return errors


def _resolve_paths(raw: Raw, folder: Path) -> list[str]:
    """Make the paths in ``raw`` absolute; returns an error line for each that is nowhere."""
    errors = []
    raw.setdefault("deepspeed", {})
    for section, name in PATH_KEYS:
        default = Config.model_fields["deepspeed"].default.config if section == "deepspeed" else None
        for holder, values in _holders(raw, section):
            value = values.get(name, default)
            if not isinstance(value, str):
                continue
            found = _find(value, folder)
            if found is None:
                errors.append(f"{holder}.{name}={value}: {_nowhere(folder)}")
            else:
                values[name] = str(found)
    return errors + _resolve_reward_models(raw.get("reward"), folder)


def _resolve_reward_models(reward: Any, folder: Path) -> list[str]:
    """The same of the reward models in section ``reward``, whose paths are parts of names."""
    errors = []

    def resolved(kind: Any) -> Any:
        path = kind.removeprefix(REWARD_MODEL) if isinstance(kind, str) and kind.startswith(REWARD_MODEL) else ""
        found = _find(path, folder)
        if path and found is None:
            errors.append(f"reward.kind={kind}: {_nowhere(folder)}")
        return f"{REWARD_MODEL}{found}" if path and found else kind

    if isinstance(reward, dict):
        if "kind" in reward:
            reward["kind"] = resolved(reward["kind"])
        if isinstance(reward.get("weights"), dict):
            reward["weights"] = {resolved(kind): weight for kind, weight in reward["weights"].items()}
    return errors


def _nowhere(folder: Path) -> str:
    return (
        f"not found in {folder}, the folders above it or {Path.cwd()}; "
        "give a path relative to the config file, or an absolute one"
    )


def _holders(raw: Raw, section: str) -> list[tuple[str, Raw]]:
    """Mappings with a section's paths, by the key in front: the section itself, and the tasks mixed in data."""
    values = raw.get(section)
    if not isinstance(values, dict):
        return []
    mixed = values.get("mix") if section == "data" else None
    entries = mixed if isinstance(mixed, list) else []
    inner = [(f"data.mix.{number}", entry) for number, entry in enumerate(entries) if isinstance(entry, dict)]
    return [(section, values), *inner]


def _find(value: str, folder: Path) -> Path | None:
    """The file or folder that ``value`` names: beside the config, above it, here, or in the package."""
    path = Path(value).expanduser()
    candidates = [base / path for base in (folder, *folder.parents, Path.cwd())]
    if path.parts[:1] == (PACKAGED,):
        package = Path(__file__).resolve().parent.parent
        candidates += [package / path, package.parent / path]  # a wheel's copy, a checkout's
    return next((candidate.absolute() for candidate in candidates if candidate.exists()), None)


def _describe(detail: ErrorDetails) -> str:
    """One pydantic error as ``key=value: why; remedy``."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "missing":
        return f"{key}: is missing; add {key} to the config"
    shown = key if isinstance(detail["input"], dict) else f"{key}={_show(detail['input'])}"
    if detail["type"] == "extra_forbidden":
        return f"{shown}: {_unknown(location)}"
    if detail["type"] == "value_error":
        return f"{shown}: {detail['ctx']['error']}"
    return f"{shown}: {'; '.join(explain(detail))}{_default(location)}"


def _show(value: Any) -> str:
    """A value as the config writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _section(name: str) -> type[BaseModel]:
    model = Config.model_fields[name].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def _unknown(location: list[str]) -> str:
    """Why and remedy of an unknown section or key: the nearest known one, or the section that has it."""
    if len(location) == 1:
        near = difflib.get_close_matches(location[0], Config.model_fields, n=1)
        known = ", ".join(near or Config.model_fields)
        return f"unknown section; {'did you mean' if near else 'use one of'} {known}"
    if len(location) > 2:
        return f"unknown key; use one of {', '.join(MixedSource.model_fields)}"
    section, name = location
    keys = list(_section(section).model_fields)
    near = [f"{section}.{other}" for other in difflib.get_close_matches(name, keys, n=1)]
    near = near or [f"{other}.{name}" for other in Config.model_fields if name in _section(other).model_fields]
    if near:
        return f"unknown key; did you mean {' or '.join(near)}"
    return f"unknown key; {section} has {', '.join(keys)}"


_TYPES = {
    "int_type": ("must be a whole number", "use an integer"),
    "float_type": ("must be a number", "write one without quotes"),
    "bool_type": ("must be true or false", "use one of them"),
    "string_type": ("must be text", "put it in quotes"),
    "finite_number": ("must be finite", "use a finite number"),
    "tuple_type": ("must be a list", "write it in brackets, such as [pipeline]"),
    "too_short": ("is empty", "name at least one"),
    "model_type": ("must be a section", "write its keys below it, indented"),
}
_RANGES = {
    "greater_than": ("gt", "must be above {}", "use a value above {}"),
    "greater_than_equal": ("ge", "must be at least {}", "use {} or more"),
    "less_than": ("lt", "must be below {}", "use a value below {}"),
    "less_than_equal": ("le", "must be at most {}", "use {} or less"),
}


def explain(detail: ErrorDetails) -> tuple[str, str]:
    """Why and remedy of a wrong type, range or choice."""
    kind = detail["type"]
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _RANGES:
        bound, why, remedy = _RANGES[kind]
        limit = f"{detail['ctx'][bound]:g}"
        return why.format(limit), remedy.format(limit)
    if kind == "literal_error":
        return "is not one of the choices", f"use {detail['ctx']['expected']}"
    return detail["msg"], "correct it"


def _default(location: list[str]) -> str:
    """`` (default 5)`` for a key that has one."""
    if len(location) < 2:
        return ""
    field = _section(location[0]).model_fields[location[1]]
    return "" if field.is_required() else f" (default {_show(field.default)})"
