"""Checks of the files a run reads: weights, tokenizer, and that there are rows."""

import json
from collections.abc import Iterator
from pathlib import Path

from .errors import ConfigError
from .problems import TABLES, DataConfig

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def holds_sizes_alone(folder: Path) -> bool:
    """Whether a model directory is a config.json without weights and tokenizer: enough for a plan."""
    return (folder / "config.json").is_file() and not any((folder / name).exists() for name in WEIGHTS + TOKENIZERS)


def weight_errors(folder: Path) -> Iterator[str]:
    """Missing safetensors files of a Hugging Face directory."""
    if (folder / "model.safetensors").is_file():
        return
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        yield f"model.path={folder}: has no model.safetensors; give a directory with safetensors weights"
        return
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        yield f"model.path={folder}: {index.name} cannot be read ({error}); fetch the model again"
        return
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        yield f"model.path={folder}: lacks {', '.join(missing)}; fetch the model again"


def tokenizer_size(folder: Path) -> int:
    """Smallest vocabulary that holds every token id. Errors: ConfigError without a readable tokenizer."""
    fast, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    try:
        if fast.is_file():
            return _fast_size(fast)
        if pieces.is_file():
            return _sentencepiece_size(pieces)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise ConfigError(f"tokenizer.path={folder}: cannot be read ({error}); fetch the tokenizer again") from error
    raise ConfigError(
        f"tokenizer.path={folder}: has neither tokenizer.json nor tokenizer.model; give a tokenizer directory"
    )


def _fast_size(file: Path) -> int:
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()  # Unigram lists its pieces in order
    added = [token["id"] for token in tokenizer.get("added_tokens") or []]
    return 1 + max([-1, *map(int, ids), *map(int, added)])


def _sentencepiece_size(file: Path) -> int:
    from sentencepiece import SentencePieceProcessor

    return int(SentencePieceProcessor(model_file=str(file)).get_piece_size())


def data_errors(data: DataConfig) -> Iterator[str]:
    """Sources without the path they need. What stands in the rows is for the data package to check."""
    for number, source in enumerate(data.sources):
        key = f"data.mix.{number}" if data.mix else "data"
        if source.task in TABLES and source.path is None:
            yield f"{key}.path=null: {key}.task={source.task} reads a file; set {key}.path"
    if data.system is not None and not data.chat:
        yield "data.system: is a message of a chat template; set data.chat=true, or leave it out"
