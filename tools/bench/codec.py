"""What packed payloads cost: ``python tools/bench/codec.py [--quick]``.

Prints one JSON object on stdout and exits 1 when a goal is missed. Everything runs in this process on one thread. What
is compared is timed in turns, so that a busy machine slows all of it alike; medians are reported.

- ``formats``: each at 5 % of the bytes of a bfloat16 crossing. ``encode`` and ``decode`` are what the format adds to
  the two matrix products x Q and P Q^T (numbers to bytes, bytes to numbers), ``products`` these two at the rank that
  the format affords, ``ratio`` the first two over the third. Of waterfill and token_waterfill the whole encode and
  decode are timed, as a run has them; the latter has no basis and is set against the products of bfloat16.
  ``column_ms`` is both over the columns of 32 sequences: with the row before as a predictor they are coded one by one.
- ``packing``: 2**21 codes of 1 to 8 bits, packed and unpacked, results allocated, over a copy of as many float32
  numbers into memory that is there already. The goals are upper bounds for the worst width.

Legend: N rows, H hidden, r rank.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch

from megatron_grpo.boundary.build import build_codecs
from megatron_grpo.boundary.transform import Predict, TransformCodec
from megatron_grpo.config import BoundaryConfig
from megatron_grpo.ops.bits import pack_bits, unpack_bits
from megatron_grpo.ops.lowrank import random_basis
from megatron_grpo.ops.quantize import absmax_codes, absmax_values
from megatron_grpo.ops.rows import Rows, carrying_rows
from megatron_grpo.ops.token_waterfill import Rotation, decode, encode

GOALS = {"pack_over_copy": 2.0, "unpack_over_copy": 2.0}
SHARE = 0.05
BFLOAT16_BITS = 16
SEQUENCES = 32
VOCABULARY = 1000
PACKED = 2**21
"""Codes that are packed: enough for the work, not the calls, to be what is timed."""

Work = Callable[[], Any]
Format = tuple[int, Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Rank, encode from ``[N, r]`` to what crosses, decode."""


def median_times(works: Sequence[Work], repeats: int) -> list[float]:
    """Median seconds of each, timed in turns after one untimed turn."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + 1):
        for work, seconds in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if repeat:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def bfloat16(hidden: int) -> Format:
    return max(1, int(SHARE * hidden)), lambda p_Nr: p_Nr.bfloat16(), lambda payload: payload.float()


def whitened(hidden: int, bits: int) -> Format:
    """Symmetric codes under a bfloat16 scale of each row's own."""
    rank = min(hidden, max(1, int((SHARE * BFLOAT16_BITS * hidden - BFLOAT16_BITS) / bits)))

    def pack(p_Nr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes_Nr, scale_N = absmax_codes(p_Nr, bits)
        return pack_bits(codes_Nr, bits), scale_N.bfloat16()

    def unpack(payload: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        packed, scale_N = payload
        codes = unpack_bits(packed, len(scale_N) * rank, bits)
        return absmax_values(codes.view(-1, rank), scale_N, bits)

    return rank, pack, unpack


def forward_codec(hidden: int, rows: Rows, x_NH: torch.Tensor, predict: Predict) -> TransformCodec:
    """What crosses forward by default, fitted on the rows."""
    embedding_VH = torch.randn(VOCABULARY, hidden, generator=torch.Generator().manual_seed(1))
    cfg = BoundaryConfig(predict=predict, forward_budget=SHARE)
    codec = build_codecs(cfg, hidden=hidden, index=0, seed=0, embedding_VH=embedding_VH).forward
    assert isinstance(codec, TransformCodec)
    codec.learner.observe(x_NH, rows)
    codec.learner.stage()
    codec.learner.commit()
    return codec


def products(x_NH: torch.Tensor, basis_Hr: torch.Tensor) -> torch.Tensor:
    """x Q and P Q^T, which any codec with a basis pays for."""
    return (x_NH @ basis_Hr) @ basis_Hr.T


def measure_formats(rows: int, hidden: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds and ratios by format."""
    formats = {"bfloat16": bfloat16(hidden)} | {f"int{bits}": whitened(hidden, bits) for bits in (8, 4, 3)}
    generator = torch.Generator().manual_seed(0)
    x_NH = torch.randn(rows, hidden, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    unit_NH = torch.randn(rows, hidden, generator=generator)
    report = {}
    for name, (rank, pack, unpack) in formats.items():
        basis_Hr, p_Nr = random_basis(hidden, rank, 0), unit_NH[:, :rank].contiguous()
        works = [partial(pack, p_Nr), partial(unpack, pack(p_Nr)), partial(products, x_NH, basis_Hr)]
        report[name] = compared(median_times(works, repeats)) | {"rank": rank}
    rotation, basis_Hr = Rotation(hidden, 0), random_basis(hidden, formats["bfloat16"][0], 0)
    payload = encode(x_NH, rotation, SHARE)
    works = [
        partial(encode, x_NH, rotation, SHARE),
        partial(decode, payload, rows, hidden, rotation, SHARE, torch.float32),
        partial(products, x_NH, basis_Hr),
    ]
    report["token_waterfill"] = compared(median_times(works, repeats))
    columns = rows // SEQUENCES
    x_NH, known = x_NH[: columns * SEQUENCES], torch.randint(0, VOCABULARY, (SEQUENCES, columns), generator=generator)
    places = carrying_rows(torch.ones(SEQUENCES, columns, dtype=torch.bool), known)
    for predict in get_args(Predict):
        codec = forward_codec(hidden, places, x_NH, predict)
        basis_HA = codec.learner.current.basis_HK[:, : codec.learner.current.active]
        works = [
            partial(codec.encode, x_NH, places),
            partial(codec.decode, codec.encode(x_NH, places).payload, places, torch.float32),
            partial(products, x_NH, basis_HA),
        ]
        found = compared(median_times(works, repeats))
        found["column_ms"] = round((found["encode_ms"] + found["decode_ms"]) / columns, 3)
        report[f"waterfill, {predict}"] = found | {"rank": basis_HA.shape[1]}
    return report


def compared(seconds: Sequence[float]) -> dict[str, float]:
    """Encode, decode and products in milliseconds, and their ratio."""
    names = ("encode_ms", "decode_ms", "products_ms")
    times = {name: round(1e3 * value, 4) for name, value in zip(names, seconds, strict=True)}
    return times | {"ratio": round((seconds[0] + seconds[1]) / seconds[2], 3)}


def measure_packing(count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Times of packing and unpacking over that of the copy, by bits."""
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randn(count, generator=generator), torch.empty(count)
    report = {}
    for bits in range(1, 9):
        codes = torch.randint(0, 2**bits, (count,), generator=generator, dtype=torch.uint8)
        packed = pack_bits(codes, bits)
        works = [
            partial(pack_bits, codes, bits),
            partial(unpack_bits, packed, count, bits),
            partial(target.copy_, source),
        ]
        pack, unpack, copy = median_times(works, repeats)
        report[str(bits)] = {"pack_over_copy": round(pack / copy, 3), "unpack_over_copy": round(unpack / copy, 3)}
    return report


def measure(rows: int, hidden: int, repeats: int) -> dict[str, Any]:
    """The whole report."""
    packing = measure_packing(PACKED, repeats)
    worst = {key: max(ratios[key] for ratios in packing.values()) for key in GOALS}
    return {
        "rows": rows,
        "hidden": hidden,
        "share": SHARE,
        "repeats": repeats,
        "formats": measure_formats(rows, hidden, repeats),
        "packing": packing,
        "goals": {key: {"value": worst[key], "goal": GOALS[key], "met": worst[key] <= GOALS[key]} for key in GOALS},
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, repeats = (min(1024, arguments.rows), 7) if arguments.quick else (arguments.rows, 25)
    report = measure(rows, arguments.hidden, repeats)
    print(json.dumps(report, indent=2))
    return 0 if all(goal["met"] for goal in report["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
