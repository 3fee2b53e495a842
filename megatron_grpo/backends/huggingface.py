"""Hugging Face directories through transformers: tokenizer, config, and the model itself as a reference.

transformers is imported by the functions that need it, never on import of this module.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config import ConfigError

if TYPE_CHECKING:
    import torch


class Tokenizer:
    """Text to ids and back, and the ids that matter for sampling.

    Attributes:
        bos_id: put before every text, if the tokenizer does so; ``None`` if there is none.
        eos_ids: any of them ends a response: the tokenizer's and those of generation_config.json.
        pad_id: the tokenizer's, or an end id where it has none.
        size: one more than the largest id, to compare with the vocabulary of the model.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_ids = eos_ids
        own_eos: int | None = tokenizer.eos_token_id
        fallback = min(eos_ids) if own_eos is None else own_eos
        self.pad_id: int = fallback if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.size: int = 1 + max(tokenizer.get_vocab().values())
        marked = tokenizer.encode("0")
        self._adds_bos = self.bos_id is not None and marked[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, after BOS where the tokenizer puts one; never an end marker: prompts go on."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [self.bos_id, *ids] if self._adds_bos and self.bos_id is not None else ids

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids`` without special tokens, every space as it was."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; nothing is downloaded.

    Raises:
        ConfigError: transformers cannot load it, or nothing says which token ends a response.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ConfigError(f"tokenizer.path={path} is not a directory; give one with tokenizer.json or tokenizer.model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer.path={path} holds no tokenizer that transformers can load ({error}); "
            "give a directory with tokenizer.json or tokenizer.model"
        ) from error
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    eos_ids = frozenset(own + _generation_eos_ids(Path(path)))
    if not eos_ids:
        raise ConfigError(
            f"tokenizer.path={path} names no end token, so that no response would ever end; "
            "set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
        )
    return Tokenizer(tokenizer, eos_ids)


def _generation_eos_ids(path: Path) -> list[int]:
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    found = _read_json(file).get("eos_token_id")
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]


def load_hf_config(path: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path={path} holds no config.json; give a Hugging Face model directory")
    return _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; restore the file")
    return content


def reference_model(path: Path, dtype: "torch.dtype") -> Any:
    """transformers' own model of the directory, on the CPU, in evaluation mode, as a peer to compare with."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    return model.eval()
