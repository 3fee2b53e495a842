"""What two checkpoints of one model compute: logits and greedy answers, in transformers and in Megatron, in float32.

Both stacks get their weights straight from the checkpoints. Legend: S tokens of a prompt and its answer, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_grpo.backends.huggingface import greedy, load_tokenizer, model_of_tensors
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.model import build_stage, whole_logits
from megatron_grpo.bench.prompts import built_in_prompts, file_prompts
from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.convert import opened
from megatron_grpo.conversion.sources import Checkpoint, all_parts
from megatron_grpo.parallel.groups import one_process

PROMPTS = 8
PROMPT_TOKENS = 16
"""Of a prompt where there is no tokenizer."""
ANSWER_TOKENS = 32
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its greedy answer, which begins at ``start``; an answer does not stop at end markers."""

    ids: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class LogitGap:
    """Two ways to compute the same texts, of which the first wrote the answers.

    Attributes:
        pair: what they are.
        largest: max \\|difference\\| over all logits of all texts.
        median: of the same.
        same_answers: texts to which the second gives the same greedy answer, of ``texts``.
    """

    pair: str
    largest: float
    median: float
    same_answers: int
    texts: int


def compare_logits(a: Checkpoint, b: Checkpoint, prompts: Path | None, note: Callable[[str], None]) -> list[LogitGap]:
    """A and B, each in Megatron against transformers, and B against A in transformers.

    Args:
        prompts: JSON lines; built-in prompts by default, and fixed token ids where A carries no tokenizer.
        note: hears what is computed next.

    Raises:
        ConfigError: a checkpoint is damaged, or the prompts do not fit it.
    """
    ids = prompt_ids(a, prompts)
    with torch.no_grad():
        note("A in transformers")
        texts_a, peer_a, _ = _in_transformers(a, ids, [])
        note("A in Megatron")
        gaps = [logit_gap("A: Megatron against transformers", texts_a, peer_a, _in_megatron(a, texts_a))]
        note("B in transformers")
        texts_b, peer_b, b_on_a = _in_transformers(b, ids, texts_a)
        gaps.append(logit_gap("transformers: B against A", texts_a, peer_a, b_on_a))
        del peer_a, b_on_a
        note("B in Megatron")
        gaps.insert(1, logit_gap("B: Megatron against transformers", texts_b, peer_b, _in_megatron(b, texts_b)))
    return gaps


def prompt_ids(checkpoint: Checkpoint, file: Path | None) -> list[list[int]]:
    """Token ids of the prompts, cut so that the answers fit into the positions of the model.

    Raises:
        ConfigError: there is no tokenizer for the ``file``, or it is one of another model.
    """
    shape, folder = checkpoint.shape, checkpoint.config_dir
    room = shape.max_positions - _answer_tokens(checkpoint)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        if file is not None:
            raise ConfigError(f"--prompts={file}: there is no tokenizer in {folder} to read it with; leave it out")
        size = (PROMPTS, min(PROMPT_TOKENS, room))
        fixed: list[list[int]] = torch.randint(shape.vocab, size, generator=torch.Generator().manual_seed(0)).tolist()
        return fixed
    tokenizer = load_tokenizer(folder)
    texts = built_in_prompts(PROMPTS, seed=0) if file is None else file_prompts(file)
    prompts = [tokenizer.encode_chat(text)[:room] for text in texts]
    highest = max(max(ids) for ids in prompts)
    if highest >= shape.vocab:
        raise ConfigError(f"the tokenizer in {folder} gives token {highest}, and the model has {shape.vocab}")
    return prompts


def _answer_tokens(checkpoint: Checkpoint) -> int:
    return min(ANSWER_TOKENS, checkpoint.shape.max_positions // 2)


def _in_transformers(
    checkpoint: Checkpoint, prompts: Sequence[list[int]], others: Sequence[Text]
) -> tuple[list[Text], list[torch.Tensor], list[torch.Tensor]]:
    """The checkpoint's answers with their logits ``[S, V]``, and its logits of ``others``."""
    with opened(checkpoint.found, checkpoint.shape) as source:
        parts = all_parts(source, checkpoint.shape)
        named = (pair for weight, tensors in parts for pair in zip(weight.hf, tensors, strict=True))
        model = model_of_tensors(checkpoint.config_dir, named)
    texts = [Text(greedy(model, ids, _answer_tokens(checkpoint)), len(ids)) for ids in prompts]
    own, other = ([model(torch.tensor([text.ids])).logits[0] for text in given] for given in (texts, others))
    return texts, own, other


def _in_megatron(checkpoint: Checkpoint, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Logits ``[S, V]`` of every text."""
    shape = checkpoint.shape
    with one_process() as groups, megatron_runtime(CPU):
        with opened(checkpoint.found, shape) as source:
            stage = build_stage(
                source, shape, groups, split=(shape.layers,), dtype=torch.float32, recompute=False, device=CPU
            )
        return [whole_logits(stage, torch.tensor([text.ids]))[0] for text in texts]


def logit_gap(
    pair: str, texts: Sequence[Text], first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> LogitGap:
    """Compare logits ``[S, V]`` of each text; an answer is the same where each of its tokens is the most likely one."""
    gaps = torch.cat([(x - y).abs().flatten() for x, y in zip(first, second, strict=True)])
    same = [
        y_SV[text.start - 1 : -1].argmax(dim=-1).tolist() == text.ids[text.start :]
        for text, y_SV in zip(texts, second, strict=True)
    ]
    return LogitGap(pair, gaps.max().item(), gaps.median().item(), sum(same), len(same))
