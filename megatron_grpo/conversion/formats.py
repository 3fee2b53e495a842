"""What kind of checkpoint a directory holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.reader import INDEX_FILE, WEIGHTS_FILE

Kind = Literal["hf", "megatron", "deepspeed-universal"]
RUN_FILE = "run.json"
ENGINE, ZERO = "engine", "zero"
"""In a checkpoint of a run: DeepSpeed's files by rank, or in a universal one its parameters."""
TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CARRIED = "hf"
"""Beside Megatron's own folders: config, generation config and tokenizer of the Hugging Face directory."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised checkpoint.

    Attributes:
        weights: the directory of the weights.
        carried: a directory with config.json and tokenizer, if the checkpoint has one.
        words: the format, for people.
    """

    kind: Literal["hf", "megatron", "legacy", "run", "universal"]
    weights: Path
    carried: Path | None
    words: str


def recognise(path: Path) -> Found:
    """Say what ``path`` holds, by the files that each format has; nothing is opened but small text files.

    Raises:
        ConfigError: it is no checkpoint, or one of a kind that is not read.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is {'a file' if path.exists() else 'not there'}; give the directory of a checkpoint")
    if (path / RUN_FILE).is_file():
        return _of_a_run(path)
    if (path / TRACKER_FILE).is_file():
        return _megatron(_tracked(path), path)
    if _is_torch_dist(path) or _is_legacy(path):
        return _megatron(path, path.parent)
    if (path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file():
        return Found("hf", path, path, "Hugging Face directory, safetensors")
    if (path / "checkpoints").is_dir():
        return _of_a_run(_latest(path / "checkpoints"))
    if any(path.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{path} is a Hugging Face directory with pickled weights (pytorch_model.bin), which may run code when "
            "they are read; load it with transformers and save_pretrained it as safetensors"
        )
    if (path / "latest").is_file() or any(path.glob("*model_states.pt")) or (path / "zero").is_dir():
        raise ConfigError(
            f"{path} holds DeepSpeed's files without {RUN_FILE}, which says how the ranks cut the model; give a "
            "checkpoint of a run of megatron-grpo, or the Hugging Face export of this one"
        )
    raise ConfigError(
        f"{path} is no checkpoint that is known here: it has neither {WEIGHTS_FILE} or {INDEX_FILE} (Hugging Face) nor "
        f"{TRACKER_FILE} or metadata.json (Megatron) nor {RUN_FILE} (a run); give the directory that has"
    )


def _of_a_run(path: Path) -> Found:
    """A checkpoint of a run, as its ranks wrote it or without a topology."""
    carried = path / CARRIED if (path / CARRIED / "config.json").is_file() else None
    if (path / ENGINE).is_dir():
        return Found("run", path, carried, f"checkpoint of a run, DeepSpeed's files, {path.name}")
    if (path / ZERO).is_dir():
        return Found("universal", path, carried, "universal DeepSpeed checkpoint")
    raise ConfigError(f"{path} has {RUN_FILE}, but neither {ENGINE}/ nor {ZERO}/; fetch the checkpoint again")


def _latest(checkpoints: Path) -> Path:
    """The checkpoint of a run directory that the run would go on from."""
    tracker = checkpoints / "latest"
    name = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    if not name:  # as a resumed run would, where a stop left no word
        name = max((file.parent.name for file in checkpoints.glob(f"tick*/{RUN_FILE}")), default="")
    if Path(name).name != name or not (checkpoints / name / RUN_FILE).is_file():
        raise ConfigError(
            f"{checkpoints} has no checkpoint that its file latest names; give the checkpoint's directory"
        )
    return checkpoints / name


def _tracked(path: Path) -> Path:
    """The folder of the iteration that the tracker names."""
    text = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConfigError(f"{path / TRACKER_FILE} says {text[:40]!r}, neither an iteration nor {RELEASE}; correct it")
    folder = path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing, though {path / TRACKER_FILE} names it; fetch the checkpoint again")
    return folder


def _megatron(weights: Path, root: Path) -> Found:
    carried = root / CARRIED if (root / CARRIED / "config.json").is_file() else None
    if _is_torch_dist(weights):
        return Found("megatron", weights, carried, f"Megatron distributed checkpoint, torch_dist, {weights.name}")
    if _is_legacy(weights):
        return Found("legacy", weights, carried, f"Megatron checkpoint, a file for each rank, {weights.name}")
    raise ConfigError(
        f"{weights} is no Megatron checkpoint that is known here (torch_dist, or mp_rank_*); save it as torch_dist"
    )


def _is_legacy(path: Path) -> bool:
    return any(folder.is_dir() for folder in path.glob("mp_rank_*"))


def _is_torch_dist(path: Path) -> bool:
    try:
        backend = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(backend, dict) and backend.get("sharded_backend") == "torch_dist"
