"""Codes of 1 to 8 bits packed into bytes without a gap.

The codes, flattened in row-major order and padded with zeros to a multiple of 8 at the end, are cut into 8 runs of
equal length W. The j-th codes of the 8 runs share ``bits`` bytes, the first run in the lowest bits; byte k of every j
lies in the k-th W bytes of the packed vector. So packing is a handful of operations on contiguous bytes, the same on
every device and whatever the byte order of a machine.

Legend: M codes, W = ceil(M / 8), P packed bytes.
"""

import torch

CODE_BITS = 8
"""Widest code."""
_RUNS = 8


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` packed codes: bits * ceil(count / 8).

    Raises:
        ValueError: ``bits`` outside 1..8.
    """
    if not 1 <= bits <= CODE_BITS:
        raise ValueError(f"bits={bits} must be from 1 to {CODE_BITS}")
    return bits * -(-count // _RUNS)


def pack_bits(codes_M: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[packed_bytes(M, bits)]`` from uint8 codes of any shape, each below ``2**bits``.

    A code that is too large spoils its neighbours; nothing checks for it here.

    Raises:
        ValueError: ``bits`` outside 1..8.
    """
    codes_M = codes_M.flatten()
    width = packed_bytes(len(codes_M), bits) // bits
    if len(codes_M) < _RUNS * width:
        codes_M = torch.nn.functional.pad(codes_M, (0, _RUNS * width - len(codes_M)))
    packed_bW = codes_M.new_zeros(bits, width)
    for run, codes_W in enumerate(codes_M.view(_RUNS, width)):
        byte, shift = divmod(run * bits, 8)
        packed_bW[byte].add_(codes_W, alpha=1 << shift)  # shift and or in one pass: what leaves the byte is dropped
        if shift + bits > 8:
            packed_bW[byte + 1].bitwise_or_(codes_W >> (8 - shift))
    return packed_bW.flatten()


def unpack_bits(packed_P: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """uint8 codes ``[count]``, the exact inverse of :func:`pack_bits`.

    Args:
        packed_P: uint8; bytes after the first ``packed_bytes(count, bits)`` are ignored.

    Raises:
        ValueError: ``bits`` outside 1..8, or fewer bytes than the codes take.
    """
    size = packed_bytes(count, bits)
    if len(packed_P) < size:
        raise ValueError(f"{count} codes of {bits} bits take {size} bytes; {len(packed_P)} were given")
    packed_bW = packed_P[:size].view(bits, -1)
    codes_8W = packed_P.new_empty(_RUNS, size // bits)
    for run, codes_W in enumerate(codes_8W):
        byte, shift = divmod(run * bits, 8)
        torch.bitwise_right_shift(packed_bW[byte], shift, out=codes_W)
        if shift + bits > 8:
            codes_W.bitwise_or_(packed_bW[byte + 1] << (8 - shift))
        codes_W.bitwise_and_((1 << bits) - 1)
    return codes_8W.flatten()[:count]
