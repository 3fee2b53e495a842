"""Hugging Face directories through transformers: tokenizer, config, and the model itself as a reference.

transformers is imported by the functions that need it, never on import of this module. Legend: B sequences, T input
columns, H hidden, V vocabulary.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        vocabulary: the id of every token.
        size: one more than the largest id, to compare with the vocabulary of the model.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_ids = eos_ids
        own_eos: int | None = tokenizer.eos_token_id
        fallback = min(eos_ids) if own_eos is None else own_eos
        self.pad_id: int = fallback if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size: int = 1 + max(self.vocabulary.values())
        marked = tokenizer.encode("0")
        self._adds_bos = self.bos_id is not None and marked[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, after BOS where the tokenizer puts one; never an end marker: prompts go on."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [self.bos_id, *ids] if self._adds_bos and self.bos_id is not None else ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_chat(self, text: str, system: str | None = None) -> list[int]:
        """Ids of ``text`` as a user's message that waits for the answer; :meth:`encode` without a chat template."""
        if not self.has_chat_template:
            return self.encode(text)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        whole: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False)
        return ids

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


def model_of_tensors(config_dir: Path, tensors: "Iterable[tuple[str, torch.Tensor]]") -> Any:
    """transformers' own model in float32, on the CPU, in evaluation mode, with weights from anywhere.

    Args:
        config_dir: has config.json.
        tensors: every parameter under its name, once; a tied head is none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(str(config_dir), local_files_only=True)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            parameters.pop(name).copy_(tensor)
    assert not parameters, sorted(parameters)
    model.generation_config = GenerationConfig()
    return model.eval()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """``ids`` and the ``count`` tokens that a model of :func:`model_of_tensors` finds most likely after them."""
    import torch

    whole_1S = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count)
    found: list[int] = whole_1S[0].tolist()
    return found


class CausalModel:
    """A dense decoder as transformers runs it, in evaluation mode, with the outputs of its layers within reach.

    Attributes:
        layers: the decoder layers, in order.
        embedding_VH: the input embedding's weight.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers: Sequence[torch.nn.Module] = model.model.layers
        self.embedding_VH: torch.Tensor = model.get_input_embeddings().weight
        model.requires_grad_(False)

    @property
    def hidden(self) -> int:
        return self.embedding_VH.shape[1]

    @property
    def vocabulary(self) -> int:
        return self.embedding_VH.shape[0]

    @property
    def device(self) -> "torch.device":
        return self.embedding_VH.device

    def logits(self, tokens_BT: "torch.Tensor", padding_BT: "torch.Tensor", *, keep: int) -> "torch.Tensor":
        """Logits ``[B, keep, V]`` of the last ``keep`` columns; ``padding_BT`` is True on left padding."""
        whole = self._run(tokens_BT, padding_BT, cache=None, use_cache=False, keep=keep)
        logits_BKV: torch.Tensor = whole.logits
        return logits_BKV

    def advance(
        self, tokens_Bn: "torch.Tensor", padding_BT: "torch.Tensor", cache: Any | None
    ) -> tuple["torch.Tensor", Any]:
        """Run the last n of T columns after those in ``cache`` (``None`` at first).

        Returns logits ``[B, V]`` of the last column, and the cache of all T columns.
        """
        whole = self._run(tokens_Bn, padding_BT, cache=cache, use_cache=True, keep=1)
        return whole.logits[:, -1], whole.cache

    def _run(self, tokens_Bn: "torch.Tensor", padding_BT: "torch.Tensor", *, keep: int, **options: Any) -> Any:
        carrying_BT = (~padding_BT).long()
        positions_BT = (carrying_BT.cumsum(dim=1) - 1).clamp(min=0)
        return self._model(
            input_ids=tokens_Bn,
            attention_mask=carrying_BT,
            position_ids=positions_BT[:, -tokens_Bn.shape[1] :],
            logits_to_keep=keep,
            **options,
        )

    @contextmanager
    def crossing(self, after: Sequence[int], cross: Callable[[int, "torch.Tensor"], "torch.Tensor"]) -> Iterator[None]:
        """Within it, what leaves layer ``after[i]`` (counted from 1) is replaced by ``cross(i, x [B, n, H])``."""

        def hook(index: int) -> Callable[..., "torch.Tensor"]:
            return lambda module, inputs, output: cross(index, output)

        handles = [self.layers[count - 1].register_forward_hook(hook(index)) for index, count in enumerate(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def load_causal_model(path: Path, device: "torch.device") -> CausalModel:
    """The model of a Hugging Face directory in float32; nothing is downloaded.

    Raises:
        ConfigError: transformers cannot load it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    load_hf_config(path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no model that transformers can load ({error}); give a Hugging Face model directory"
        ) from error
    return CausalModel(model.eval().to(device))


def convert_gguf(file: Path, out: Path) -> None:
    """Write model and tokenizer of a GGUF file as a float32 Hugging Face directory. Needs gguf and accelerate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers refuses to save what it read from GGUF, though the weights are ordinary numbers by then
    del read.config.quantization_config
    auto: Any = AutoModelForCausalLM
    plain = auto.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(out))
