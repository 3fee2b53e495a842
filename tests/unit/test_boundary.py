"""Codecs on their own: shapes, exactness, agreement of two ends, staging. Legend: N rows, H hidden, r rank."""

from typing import Any

import pytest
import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.build import BoundaryCodecs, build_codecs
from megatron_grpo.boundary.identity import IdentityCodec
from megatron_grpo.boundary.lowrank import LowRankCodec
from megatron_grpo.boundary.mask import MaskCodec
from megatron_grpo.config import BoundaryConfig

N, H, R = 13, 24, 5
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 300])


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codecs(index: int = 0, seed: int = 1, **settings: Any) -> BoundaryCodecs:
    return build_codecs(BoundaryConfig(**({"rank": R} | settings)), hidden=H, index=index, seed=seed)


def reference_orth(x: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt in fp64, column by column: the one orthonormalisation with a positive diagonal."""
    columns: list[torch.Tensor] = []
    for column in x.double().unbind(1):
        for _ in range(2):
            for earlier in columns:
                column = column - (earlier @ column) * earlier
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


@pytest.mark.parametrize("kind, width", [("identity", H), ("lowrank", R), ("mask", R)])
@pytest.mark.parametrize("payload, bytes_each", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_payload_has_the_promised_bytes(kind: str, width: int, payload: str, bytes_each: int, direction: str) -> None:
    """N x width numbers, in what is sent and in what is received into."""
    codec = codecs(codec=kind, payload=payload).choose(direction, dense=False)
    sent = codec.encode(rows(), POSITIONS)
    blank = codec.payload(N)
    assert sent.nbytes == blank.nbytes == N * width * bytes_each
    assert sent.shape == blank.shape and sent.dtype == blank.dtype and sent.is_contiguous()
    decoded = codec.decode(sent, POSITIONS, torch.float32)
    assert decoded.shape == (N, H) and decoded.dtype == torch.float32


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_are_fine(kind: str, dtype: torch.dtype) -> None:
    codec = codecs(codec=kind).choose("forward", dense=False)
    none = torch.empty(0, dtype=torch.int64)
    sent = codec.encode(torch.empty(0, H, dtype=dtype), none)
    assert codec.decode(sent, none, dtype).shape == (0, H)


def test_identity_is_exact_in_the_dtype_of_the_model() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        codec = IdentityCodec(H, dtype)
        x = rows(dtype=dtype)
        assert torch.equal(codec.decode(codec.encode(x, POSITIONS), POSITIONS, dtype), x)


def test_identity_in_bfloat16_rounds_each_number_to_nearest() -> None:
    codec = IdentityCodec(H, torch.bfloat16)
    x = rows()
    decoded = codec.decode(codec.encode(x, POSITIONS), POSITIONS, torch.float32)
    # 8 bits of mantissa: half a unit in the last place is 2^-9 of the power of two below
    assert bool(((decoded - x).abs() <= 2.0**-8 * x.abs()).all())
    assert not torch.equal(decoded, x)


def test_lowrank_is_the_projector() -> None:
    codec = codecs(codec="lowrank", payload="float32").choose("forward", dense=False)
    assert isinstance(codec, LowRankCodec)
    q = codec.basis.current.double()
    torch.testing.assert_close(q.T @ q, torch.eye(R, dtype=torch.float64), atol=1e-5, rtol=0)
    expected = rows().double() @ q @ q.T
    decoded = codec.decode(codec.encode(rows(), POSITIONS), POSITIONS, torch.float32)
    torch.testing.assert_close(decoded.double(), expected, atol=1e-5, rtol=1e-5)


def test_lowrank_at_full_rank_loses_nothing() -> None:
    codec = LowRankCodec(Basis(H, H, seed=3), torch.float32)
    decoded = codec.decode(codec.encode(rows(), POSITIONS), POSITIONS, torch.float32)
    torch.testing.assert_close(decoded, rows(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
def test_a_row_codes_alike_in_any_batch(kind: str) -> None:
    """So that prefill and decoding agree: a row's payload depends on the row and its place alone."""
    codec = codecs(codec=kind, payload="float32").choose("forward", dense=False)
    whole = codec.encode(rows(), POSITIONS)
    alone = torch.cat([codec.encode(rows()[i : i + 1], POSITIONS[i : i + 1]) for i in range(N)])
    torch.testing.assert_close(alone, whole, atol=1e-6, rtol=1e-6)


def test_mask_keeps_exactly_k_numbers_scaled_by_h_over_k() -> None:
    codec = MaskCodec(H, R, torch.float32, seed=4)
    decoded = codec.decode(codec.encode(rows(), POSITIONS), POSITIONS, torch.float32)
    kept = decoded != 0
    assert kept.sum(1).tolist() == [R] * N
    torch.testing.assert_close(decoded[kept], rows()[kept] * (H / R))


def test_mask_is_drawn_anew_each_step_and_for_each_place() -> None:
    codec = MaskCodec(H, R, torch.float32, seed=5)

    def kept() -> torch.Tensor:
        return codec.decode(codec.encode(torch.ones(N, H), POSITIONS), POSITIONS, torch.float32) != 0

    first = kept()
    assert torch.equal(first[0], first[5]) and not torch.equal(first[0], first[1])
    codec.begin_step(1)
    second = kept()
    assert not torch.equal(first, second)
    codec.begin_step(0)
    assert torch.equal(kept(), first)


def test_mask_mean_over_steps_is_the_row() -> None:
    """H/k scaling makes the mean right: 3000 draws, to 6 standard errors of the largest entry."""
    codec = MaskCodec(H, R, torch.float32, seed=6)
    x, place = rows()[:1], torch.tensor([7])
    total = torch.zeros(1, H)
    for step in range(3000):
        codec.begin_step(step)
        total += codec.decode(codec.encode(x, place), place, torch.float32)
    deviation = x.abs() * (H / R - 1) ** 0.5 / 3000**0.5
    assert bool(((total / 3000 - x).abs() <= 6 * deviation + 1e-4).all())


@pytest.mark.parametrize("kind", ["lowrank", "mask"])
def test_two_ends_agree_without_a_message(kind: str) -> None:
    """Each end builds its codecs from the same settings; what one encodes the other decodes."""
    for direction in ("forward", "backward"):
        sender = codecs(codec=kind, payload="float32").choose(direction, dense=False)
        receiver = codecs(codec=kind, payload="float32").choose(direction, dense=False)
        sent = sender.encode(rows(), POSITIONS)
        expected = sender.decode(sent, POSITIONS, torch.float32)
        assert torch.equal(receiver.decode(sent, POSITIONS, torch.float32), expected)


def test_bases_differ_between_boundaries_directions_and_seeds() -> None:
    def basis(index: int, direction: str, seed: int) -> torch.Tensor:
        codec = codecs(index, seed, codec="lowrank").choose(direction, dense=False)
        assert codec.basis is not None
        return codec.basis.current

    bases = [basis(i, way, s) for i in (0, 1) for way in ("forward", "backward") for s in (1, 2)]
    for number, first in enumerate(bases):
        assert not any(torch.equal(first, second) for second in bases[number + 1 :])


def test_refresh_is_one_power_step_and_waits_for_the_commit() -> None:
    """Q' = orth(sum X^T X Q) over what was seen, used only after ``commit``."""
    basis = Basis(H, R, seed=7)
    old = basis.current.clone()
    for seed in range(3):
        basis.observe(rows(seed))
    assert torch.equal(basis.current, old) and basis.sketch is not None
    staged = basis.stage(basis.sketch).clone()
    gram = sum(rows(seed).double().T @ rows(seed).double() for seed in range(3))
    torch.testing.assert_close(staged.double(), reference_orth(gram @ old.double()), atol=2e-5, rtol=0)
    assert torch.equal(basis.current, old)
    basis.commit()
    assert torch.equal(basis.current, staged) and basis.staged is None and basis.sketch is None
    basis.commit()
    assert torch.equal(basis.current, staged)


def test_power_steps_find_the_space_of_the_rows() -> None:
    """Rows of true rank r are coded without loss after refreshes; at the random start almost all is lost."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(N, R, generator=generator) @ torch.randn(R, H, generator=generator)
    codec = LowRankCodec(Basis(H, R, seed=9), torch.float32)

    def error() -> float:
        decoded = codec.decode(codec.encode(x, POSITIONS), POSITIONS, torch.float32)
        return ((x - decoded).norm() / x.norm()).item()

    assert error() > 0.7
    for _ in range(2):
        codec.observe(x)
        assert codec.basis.sketch is not None
        codec.basis.stage(codec.basis.sketch)
        codec.commit()
    assert error() < 1e-4


def test_zero_rows_are_coded_and_learnt_as_zeros() -> None:
    """Case H1: nothing divides by the norm of nothing."""
    codec = LowRankCodec(Basis(H, R, seed=10), torch.float32)
    zeros = torch.zeros(N, H)
    codec.observe(zeros)
    assert codec.basis.sketch is not None
    q = codec.basis.stage(codec.basis.sketch)
    codec.commit()
    torch.testing.assert_close(q.T @ q, torch.eye(R), atol=1e-5, rtol=0)
    assert torch.equal(codec.decode(codec.encode(zeros, POSITIONS), POSITIONS, torch.float32), zeros)


def test_rank_above_the_true_rank_is_finite() -> None:
    """Case H1: rows that span one direction, five columns of Q."""
    codec = LowRankCodec(Basis(H, R, seed=11), torch.float32)
    x = torch.arange(1.0, N + 1)[:, None] * rows()[:1]
    for _ in range(3):
        codec.observe(x)
        assert codec.basis.sketch is not None
        codec.basis.stage(codec.basis.sketch)
        codec.commit()
    q = codec.basis.current
    torch.testing.assert_close(q.T @ q, torch.eye(R), atol=1e-5, rtol=0)
    decoded = codec.decode(codec.encode(x, POSITIONS), POSITIONS, torch.float32)
    torch.testing.assert_close(decoded, x, atol=1e-3, rtol=1e-4)


def test_a_shared_basis_learns_from_the_forward_rows_alone() -> None:
    pair = codecs(codec="lowrank", shared_basis=True)
    assert isinstance(pair.forward, LowRankCodec) and isinstance(pair.backward, LowRankCodec)
    assert pair.forward.basis is pair.backward.basis
    pair.backward.observe(rows())
    assert pair.forward.basis.sketch is None
    pair.forward.observe(rows())
    assert pair.forward.basis.sketch is not None


def test_a_random_basis_never_learns() -> None:
    pair = codecs(codec="lowrank", basis="random")
    for codec in (pair.forward, pair.backward):
        assert isinstance(codec, LowRankCodec)
        codec.observe(rows())
        assert codec.basis.sketch is None


def test_directions_may_differ() -> None:
    pair = codecs(forward_codec="identity", backward_codec="mask", forward_payload="float32")
    assert pair.forward.encode(rows(), POSITIONS).nbytes == N * H * 4
    assert pair.backward.encode(rows(), POSITIONS).nbytes == N * R * 2
    assert pair.choose("forward", dense=True).encode(rows(), POSITIONS).nbytes == N * H * 4
    assert pair.choose("backward", dense=True).encode(rows(), POSITIONS).nbytes == N * H * 2


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
def test_state_survives_a_checkpoint(kind: str) -> None:
    """With a basis staged but not committed, and a step begun."""
    first = codecs(codec=kind).choose("forward", dense=False)
    second = codecs(codec=kind, seed=1).choose("forward", dense=False)
    first.begin_step(3)
    if isinstance(first, LowRankCodec):
        first.observe(rows())
        assert first.basis.sketch is not None
        first.basis.stage(first.basis.sketch)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.encode(rows(1), POSITIONS), second.encode(rows(1), POSITIONS))
    first.commit()
    second.commit()
    assert torch.equal(first.encode(rows(1), POSITIONS), second.encode(rows(1), POSITIONS))
