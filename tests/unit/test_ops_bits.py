"""Packed codes: exact inverses, sizes, and bytes worked out by hand. Legend: M codes."""

import pytest
import torch

from megatron_grpo.ops.bits import pack_bits, packed_bytes, unpack_bits


def _codes(count: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * 8 + bits)
    return torch.randint(0, 2**bits, (count,), generator=generator, dtype=torch.uint8)


def _slow_pack(codes: list[int], bits: int) -> list[int]:
    """The layout bit by bit: the codes of one group lie a run apart, and so do the bytes of one group."""
    width = -(-len(codes) // 8)
    codes = codes + [0] * (8 * width - len(codes))
    packed = [0] * (bits * width)
    for group in range(width):
        word = sum(codes[run * width + group] << (run * bits) for run in range(8))
        for byte in range(bits):
            packed[byte * width + group] = word >> (8 * byte) & 255
    return packed


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1003])
def test_layout_size_and_inverse(bits: int, count: int) -> None:
    codes_M = _codes(count, bits)
    packed = pack_bits(codes_M, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == _slow_pack(codes_M.tolist(), bits)
    assert len(packed) == packed_bytes(count, bits) == bits * ((count + 7) // 8)
    assert torch.equal(unpack_bits(packed, count, bits), codes_M)


def test_eight_codes_of_three_bits_by_hand() -> None:
    # 7<<0 | 0<<3 | 5<<6 | 2<<9 | 1<<12 | 3<<15 | 6<<18 | 4<<21 = 0x999547
    packed = pack_bits(torch.tensor([7, 0, 5, 2, 1, 3, 6, 4], dtype=torch.uint8), 3)
    assert packed.tolist() == [0x47, 0x95, 0x99]


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_codes_of_any_shape_and_stride_and_bytes_that_follow(bits: int) -> None:
    codes = _codes(60, bits).view(10, 6)
    packed = pack_bits(codes.T, bits)
    assert torch.equal(packed, pack_bits(codes.T.contiguous().flatten(), bits))
    followed = torch.cat([packed, torch.full((3,), 255, dtype=torch.uint8)])
    assert torch.equal(unpack_bits(followed, 60, bits), codes.T.flatten())


def test_packing_leaves_its_input_alone() -> None:
    for bits in (5, 8):
        codes_M = _codes(64, bits)
        kept = codes_M.clone()
        unpack_bits(pack_bits(codes_M, bits), 64, bits).zero_()
        assert torch.equal(codes_M, kept)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_must_fit_into_a_byte(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits={bits} "):
        packed_bytes(8, bits)
    with pytest.raises(ValueError, match=f"bits={bits} "):
        pack_bits(torch.zeros(8, dtype=torch.uint8), bits)


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="9 codes of 3 bits take 6 bytes; 5 were given"):
        unpack_bits(torch.zeros(5, dtype=torch.uint8), 9, 3)
