"""Padding, masks and splits of a batch, against values written out by hand."""

import pytest
import torch

from megatron_grpo.rollout.batch import Batch, pad_prompts


def batch() -> Batch:
    """Prompts of 3, 1 and 2 tokens on 3 columns; responses of 2, 4 and 1 tokens on 4."""
    tokens = torch.tensor(
        [
            [11, 12, 13, 14, 15, 0, 0],
            [0, 0, 21, 22, 23, 24, 25],
            [0, 31, 32, 33, 0, 0, 0],
        ]
    )
    return Batch(
        tokens_BS=tokens,
        prompt_columns=3,
        prompt_lengths_B=torch.tensor([3, 1, 2]),
        response_lengths_B=torch.tensor([2, 4, 1]),
        sampler_logp_BR=-torch.arange(12.0).view(3, 4),
        advantages_B=torch.tensor([1.0, -1.0, 0.5]),
    )


def bools(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def test_masks_by_hand() -> None:
    sequences = batch()
    assert len(sequences) == 3 and sequences.response_columns == 4 and sequences.response_tokens == 7
    assert torch.equal(sequences.responses_BR[2], torch.tensor([33, 0, 0, 0]))
    assert torch.equal(sequences.response_mask_BR, bools("1100", "1111", "1000"))
    assert torch.equal(sequences.input_tokens_BT()[1], torch.tensor([0, 0, 21, 22, 23, 24]))
    assert torch.equal(sequences.padding_BT(), bools("000000", "110000", "100000"))


def test_carrying_columns_are_those_a_prediction_needs() -> None:
    """prompt + response - 1 tokens a sequence: the last one sampled predicts nothing."""
    carrying = batch().carrying_BT()
    assert torch.equal(carrying, bools("111100", "001111", "011000"))
    assert carrying.sum(1).tolist() == [3 + 2 - 1, 1 + 4 - 1, 2 + 1 - 1]


def test_attention_looks_back_and_past_the_padding() -> None:
    masked = batch().attention_masked_B1TT()
    assert masked.shape == (3, 1, 6, 6)
    for row, padding in enumerate([0, 2, 1]):
        for query in range(6):
            for key in range(6):
                hidden = key > query or key < padding
                assert bool(masked[row, 0, query, key]) == hidden


def test_a_ragged_end_is_not_dropped() -> None:
    """Case D12: 5 sequences in micro-batches of 2 are 2, 2 and 1."""
    five = torch.arange(5)
    sequences = Batch(
        tokens_BS=five[:, None] + 10 * torch.arange(4),
        prompt_columns=2,
        prompt_lengths_B=torch.full((5,), 2),
        response_lengths_B=torch.tensor([1, 2, 1, 1, 1]),
        sampler_logp_BR=torch.zeros(5, 2),
        advantages_B=five.float(),
    )
    micros = sequences.split(2)
    assert [len(micro) for micro in micros] == [2, 2, 1]
    assert torch.equal(torch.cat([micro.tokens_BS for micro in micros]), sequences.tokens_BS)
    assert torch.cat([micro.advantages_B for micro in micros]).tolist() == [0, 1, 2, 3, 4]
    assert {micro.tokens_BS.shape[1] for micro in micros} == {4}


def test_rows_cut_unused_columns_and_keep_what_belongs_to_them() -> None:
    chosen = batch().rows(0, 1)
    assert chosen.tokens_BS.tolist() == [[11, 12, 13, 14, 15]]
    assert chosen.sampler_logp_BR.tolist() == [[0.0, -1.0]]
    assert chosen.response_lengths_B.tolist() == [2] and chosen.prompt_columns == 3
    last = batch().rows(1, 3)
    assert last.tokens_BS.shape == (2, 7) and last.advantages_B.tolist() == [-1.0, 0.5]


def test_advantages_are_replaced_in_a_copy() -> None:
    first = batch()
    second = first.with_advantages(torch.zeros(3))
    assert second.advantages_B.tolist() == [0.0, 0.0, 0.0]
    assert first.advantages_B.tolist() == [1.0, -1.0, 0.5]


def test_sequences_that_do_not_count_are_out_of_the_loss_and_stay_in_the_batch() -> None:
    whole = batch()
    assert torch.equal(whole.loss_mask_BR, whole.response_mask_BR) and whole.loss_sequences == 3
    some = whole.with_advantages(torch.zeros(3), bools("101")[0])
    assert torch.equal(some.response_mask_BR, bools("1100", "1111", "1000"))
    assert torch.equal(some.loss_mask_BR, bools("1100", "0000", "1000")) and some.loss_sequences == 2
    assert [part.loss_sequences for part in some.split(2)] == [1, 1]
    assert some.rows(1, 2).loss_mask_BR.tolist() == [[False] * 4]


def test_other_sequences_take_the_place_of_some() -> None:
    longer = Batch(
        tokens_BS=torch.tensor([[1, 2, 3, 4, 5]]),
        prompt_columns=4,
        prompt_lengths_B=torch.tensor([4]),
        response_lengths_B=torch.tensor([1]),
        sampler_logp_BR=torch.tensor([[-0.5]]),
        advantages_B=torch.zeros(1),
    )
    mixed = batch().with_rows(torch.tensor([1]), longer, pad_id=9)
    assert mixed.tokens_BS.tolist() == [
        [9, 11, 12, 13, 14, 15, 0, 0],
        [1, 2, 3, 4, 5, 9, 9, 9],
        [9, 0, 31, 32, 33, 0, 0, 0],
    ]
    assert mixed.prompt_columns == 4 and mixed.prompt_lengths_B.tolist() == [3, 4, 2]
    assert torch.equal(mixed.response_mask_BR, bools("1100", "1000", "1000"))
    assert mixed.sampler_logp_BR[1].tolist() == [-0.5, 0, 0, 0] and mixed.sampler_logp_BR[0].tolist() == [0, -1, -2, -3]


@pytest.mark.parametrize("pad", [0, 9])
def test_prompts_are_padded_on_the_left(pad: int) -> None:
    tokens, lengths = pad_prompts([[5, 6, 7], [8], [1, 2]], pad)
    assert tokens.tolist() == [[5, 6, 7], [pad, pad, 8], [pad, 1, 2]]
    assert lengths.tolist() == [3, 1, 2] and tokens.dtype == torch.int64
