"""Reward models on Megatron's modules say what transformers' sequence classifiers say."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.score_model import last_token, load_score_model
from megatron_grpo.parallel.groups import Layout, build_groups
from tests.harness import run_ranks
from tests.ranks.support import SIZES, VOCAB

CPU = torch.device("cpu")
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def write_scorer(folder: Path, family: str = "Llama", **changes: Any) -> Path:
    """A random sequence classifier with one label in Hugging Face layout."""
    torch.manual_seed(13)
    sizes = SIZES | {"num_labels": 1} | ({"head_dim": 8} if family == "Qwen3" else {}) | changes
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def sequences() -> list[list[int]]:
    """Of 1 to 12 ids; one ends in the padding token, and one is nothing else."""
    generator = torch.Generator().manual_seed(4)
    lengths = [12, 1, 7, 3, 12, 5, 8]
    drawn = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [*drawn, [9, 8, 0], [0, 0]]


def values(rank: int, world: int, folders: list[str]) -> list[torch.Tensor]:
    groups = build_groups(Layout(tensor=world), 30.0)
    with megatron_runtime(CPU):
        models = [
            load_score_model(Path(folder), groups, dtype=torch.float32, micro_batch=4, device=CPU) for folder in folders
        ]
        return [model(sequences()) for model in models]


def by_transformers(folder: Path) -> torch.Tensor:
    """One by one, without padding but what the sequence itself has."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in sequences()])


@pytest.mark.parametrize("tensor", [1, 2])
def test_values_equal_transformers(tensor: int, tmp_path: Path) -> None:
    folders = [write_scorer(tmp_path / family, family) for family in FAMILIES]
    folders.append(write_scorer(tmp_path / "tied", tie_word_embeddings=True))
    for results in run_ranks(values, tensor, [str(folder) for folder in folders]):
        for folder, found_B in zip(folders, results, strict=True):
            wanted_B = by_transformers(folder)
            assert found_B.dtype == torch.float32 and wanted_B.std() > 0.1
            torch.testing.assert_close(found_B, wanted_B, atol=1e-4, rtol=1e-4)


def test_padding_at_the_end_is_passed_over() -> None:
    assert last_token([5, 6, 7], pad_id=0) == 2
    assert last_token([5, 2, 2], pad_id=2) == 0
    assert last_token([0, 0], pad_id=0) == 0
    assert last_token([5, 0], pad_id=None) == 1
