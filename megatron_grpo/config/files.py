"""Checks of the files a run reads: weights, tokenizer, jsonl rows."""

import json
from collections.abc import Iterator
from pathlib import Path

from .errors import ConfigError
from .sections import DataConfig


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
    """Missing, empty and malformed jsonl files; the first bad row of each."""
    if data.task != "jsonl":
        return
    if data.path is None:
        yield "data.path=null: data.task=jsonl reads a file; set data.path"
        return
    try:
        rows = _count_rows(Path(data.path), "data.path", data)
        if data.val_path is not None:
            _count_rows(Path(data.val_path), "data.val_path", data)
        elif rows <= data.val_size:
            yield (
                f"data.val_size={data.val_size}: leaves none of the {rows} rows of {data.path} to train on; "
                f"use fewer than {rows} or give data.val_path"
            )
    except ConfigError as error:
        yield str(error)


def _count_rows(file: Path, key: str, data: DataConfig) -> int:
    """Rows of a jsonl file, each with a question and an answer."""
    wanted = (data.question_key, data.answer_key)
    rows = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _check_row(line, f"{key}={file}: row {number}", wanted)
                    rows += 1
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={file}: cannot be read ({error}); give a UTF-8 file of JSON lines") from error
    if rows == 0:
        raise ConfigError(f"{key}={file}: is empty; give a file with one JSON object a line")
    return rows


def _check_row(line: str, row: str, wanted: tuple[str, str]) -> None:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{row} is not JSON ({error}); write one JSON object a line") from error
    lacking = [name for name in wanted if not isinstance(record, dict) or name not in record]
    if lacking:
        raise ConfigError(f"{row} has no {lacking[0]!r}; add it, or set data.question_key and data.answer_key")
