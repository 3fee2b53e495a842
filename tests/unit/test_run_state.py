"""What a run remembers, between topologies, by hand; ranks and engines are in tests/ranks/test_universal.py."""

from typing import Any

import pytest
import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.fragments import Fragment
from megatron_grpo.conversion.run_state import dealt


def replay(tokens: list[list[int]], prompt: int, advantages: list[float]) -> dict[str, Any]:
    tokens_BS = torch.tensor(tokens)
    responses = tokens_BS[:, prompt:]
    return {
        "batch": {
            "tokens_BS": tokens_BS,
            "prompt_columns": prompt,
            "prompt_lengths_B": (tokens_BS[:, :prompt] != 0).sum(1),
            "response_lengths_B": (responses != 0).sum(1),
            "sampler_logp_BR": -responses.float(),
            "advantages_B": torch.tensor(advantages),
        },
        "old_logp_BR": None,
        "reference_logp_BR": -10.0 * responses,
        "tokens": 9,
        "sequences": 4,
        "old_is_sampled": False,
    }


LEFT = replay([[0, 1, 2, 3], [4, 5, 6, 7]], 2, [0.5, -0.5])
RIGHT = replay([[8, 9, 1, 1, 1, 1], [0, 3, 2, 2, 0, 0]], 3, [1.5, -1.5])


def test_two_ranks_become_one_whose_padding_is_the_widest() -> None:
    whole = dealt([LEFT, RIGHT], 1, 0)
    batch = whole["batch"]
    assert batch["prompt_columns"] == 3
    assert batch["tokens_BS"].tolist() == [
        [0, 0, 1, 2, 3, 0],
        [0, 4, 5, 6, 7, 0],
        [8, 9, 1, 1, 1, 1],
        [0, 3, 2, 2, 0, 0],
    ]
    assert batch["prompt_lengths_B"].tolist() == [1, 2, 3, 2]
    assert batch["response_lengths_B"].tolist() == [2, 2, 3, 1]
    assert batch["sampler_logp_BR"].tolist() == [[-2, -3, 0], [-6, -7, 0], [-1, -1, -1], [-2, 0, 0]]
    assert whole["reference_logp_BR"].tolist() == [[-20, -30, 0], [-60, -70, 0], [-10, -10, -10], [-20, 0, 0]]
    assert whole["old_logp_BR"] is None and (whole["tokens"], whole["sequences"]) == (9, 4)


def test_two_ranks_become_four_with_a_sequence_each() -> None:
    parts = [dealt([LEFT, RIGHT], 4, rank)["batch"] for rank in range(4)]
    assert [part["advantages_B"].tolist() for part in parts] == [[0.5], [-0.5], [1.5], [-1.5]]
    assert parts[3]["tokens_BS"].tolist() == [[0, 3, 2, 2, 0, 0]]


def test_as_many_ranks_keep_what_they_had() -> None:
    assert dealt([LEFT, RIGHT], 2, 1) is RIGHT


def test_ranks_that_cannot_share_it_evenly_are_refused() -> None:
    """No sequence is lost: 4 on 3 ranks."""
    with pytest.raises(ConfigError, match=r"parallel.data=3: .* a minibatch of 4 sequences"):
        dealt([LEFT, RIGHT], 3, 0)


def test_a_fragment_is_a_range_and_its_padding() -> None:
    slice_ = torch.arange(6.0).view(2, 3)
    last = Fragment("w", 4, 2, torch.Size([4]))
    assert last.cut(slice_).tolist() == [4, 5, 0, 0]
    flat = torch.full((6,), -1.0)
    last.put(torch.tensor([4.0, 5, 9, 9]), flat)
    assert flat.tolist() == [-1, -1, -1, -1, 4, 5]
    whole = Fragment("w", 0, 6, torch.Size([2, 3])).cut(slice_)
    assert torch.equal(whole, slice_) and whole.data_ptr() != slice_.data_ptr()
