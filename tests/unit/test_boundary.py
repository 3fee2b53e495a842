"""Codecs and crossings on their own: shapes, exactness, agreement of two ends, staging, learning, feedback.

Legend: N rows, H hidden, r rank.
"""

from typing import Any

import pytest
import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.build import BoundaryCodecs, build_codecs
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.boundary.crossing import Boundaries, Crossing, Pass, build_boundaries
from megatron_grpo.boundary.feedback import FeedbackCodec
from megatron_grpo.boundary.identity import IdentityCodec
from megatron_grpo.boundary.lowrank import LowRankCodec
from megatron_grpo.boundary.mask import MaskCodec
from megatron_grpo.config import BoundaryConfig, Direction
from megatron_grpo.ops.rows import Rows, carrying_rows

N, H, R = 13, 24, 5
WAYS: tuple[Direction, Direction] = ("forward", "backward")
# Four sequences: the first three from column 0 on, of which two share it, and one row far to the right.
LENGTHS, FAR = (5, 4, 3), 300


def places() -> Rows:
    carrying_BS = torch.zeros(4, FAR + 1, dtype=torch.bool)
    for sequence, length in enumerate(LENGTHS):
        carrying_BS[sequence, :length] = True
    carrying_BS[3, FAR] = True
    return carrying_rows(carrying_BS)


PLACES = places()


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some(*numbers: int) -> Rows:
    """The rows of PLACES with these numbers."""
    chosen = list(numbers)
    parts = (PLACES.index_N[chosen], PLACES.positions_N[chosen], PLACES.sequences_N[chosen])
    return Rows(*parts, tokens_N=None, batch=PLACES.batch)


def there_and_back(codec: Codec, x_NH: torch.Tensor, at: Rows = PLACES) -> torch.Tensor:
    return codec.decode(codec.encode(x_NH, at).payload, at, x_NH.dtype)


def q_of(codec: Codec) -> torch.Tensor:
    assert isinstance(codec.learner, Basis)
    return codec.learner.current


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
@pytest.mark.parametrize("direction", WAYS)
def test_payload_has_the_promised_bytes(
    kind: str, width: int, payload: str, bytes_each: int, direction: Direction
) -> None:
    """N x width numbers, in what is sent and in what is received into."""
    codec = codecs(codec=kind, payload=payload).choose(direction, dense=False)
    sent = codec.encode(rows(), PLACES).payload
    blank = codec.payload(PLACES)
    assert sent.nbytes == blank.nbytes == N * width * bytes_each
    assert sent.shape == blank.shape and sent.dtype == blank.dtype and sent.is_contiguous()
    decoded = codec.decode(sent, PLACES, torch.float32)
    assert decoded.shape == (N, H) and decoded.dtype == torch.float32


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feedback", [False, True])
def test_no_rows_are_fine(kind: str, dtype: torch.dtype, feedback: bool) -> None:
    codec = codecs(codec=kind, error_feedback=feedback).choose("backward", dense=False)
    assert there_and_back(codec, torch.empty(0, H, dtype=dtype), some()).shape == (0, H)


def test_identity_is_exact_in_the_dtype_of_the_model() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = rows(dtype=dtype)
        assert torch.equal(there_and_back(IdentityCodec(H, dtype), x), x)


def test_identity_in_bfloat16_rounds_each_number_to_nearest() -> None:
    x = rows()
    decoded = there_and_back(IdentityCodec(H, torch.bfloat16), x)
    # 8 bits of mantissa: half a unit in the last place is 2^-9 of the power of two below
    assert bool(((decoded - x).abs() <= 2.0**-8 * x.abs()).all())
    assert not torch.equal(decoded, x)


def test_lowrank_is_the_projector() -> None:
    codec = codecs(codec="lowrank", payload="float32").choose("forward", dense=False)
    assert isinstance(codec, LowRankCodec)
    q = q_of(codec).double()
    torch.testing.assert_close(q.T @ q, torch.eye(R, dtype=torch.float64), atol=1e-5, rtol=0)
    expected = rows().double() @ q @ q.T
    torch.testing.assert_close(there_and_back(codec, rows()).double(), expected, atol=1e-5, rtol=1e-5)


def test_lowrank_at_full_rank_loses_nothing() -> None:
    codec = LowRankCodec(Basis(H, H, seed=3), torch.float32)
    torch.testing.assert_close(there_and_back(codec, rows()), rows(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
def test_a_row_codes_alike_in_any_batch(kind: str) -> None:
    """So that prefill and decoding agree: a row's payload depends on the row and its place alone."""
    codec = codecs(codec=kind, payload="float32").choose("forward", dense=False)
    whole = codec.encode(rows(), PLACES).payload
    alone = torch.cat([codec.encode(rows()[i : i + 1], some(i)).payload for i in range(N)])
    torch.testing.assert_close(alone, whole, atol=1e-6, rtol=1e-6)


def test_mask_keeps_exactly_k_numbers_scaled_by_h_over_k() -> None:
    decoded = there_and_back(MaskCodec(H, R, torch.float32, seed=4), rows())
    kept = decoded != 0
    assert kept.sum(1).tolist() == [R] * N
    torch.testing.assert_close(decoded[kept], rows()[kept] * (H / R))


def test_mask_is_drawn_anew_each_step_and_for_each_place() -> None:
    codec = MaskCodec(H, R, torch.float32, seed=5)

    def kept() -> torch.Tensor:
        return there_and_back(codec, torch.ones(N, H)) != 0

    first = kept()
    assert PLACES.positions_N[:4].tolist() == [0, 0, 0, 1]
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[3])
    codec.begin_step(1)
    second = kept()
    assert not torch.equal(first, second)
    codec.begin_step(0)
    assert torch.equal(kept(), first)


def test_mask_mean_over_steps_is_the_row() -> None:
    """H/k scaling makes the mean right: 3000 draws, to 6 standard errors of the largest entry."""
    codec = MaskCodec(H, R, torch.float32, seed=6)
    x, place = rows()[:1], some(9)
    total = torch.zeros(1, H)
    for step in range(3000):
        codec.begin_step(step)
        total += there_and_back(codec, x, place)
    deviation = x.abs() * (H / R - 1) ** 0.5 / 3000**0.5
    assert bool(((total / 3000 - x).abs() <= 6 * deviation + 1e-4).all())


@pytest.mark.parametrize("kind", ["lowrank", "mask"])
@pytest.mark.parametrize("basis", ["anchor", "self", "random"])
def test_two_ends_agree_without_a_message(kind: str, basis: str) -> None:
    """Each end builds its codecs from the same settings; what one encodes the other decodes."""
    for direction in WAYS:
        sender = codecs(codec=kind, payload="float32", basis=basis).choose(direction, dense=False)
        receiver = codecs(codec=kind, payload="float32", basis=basis).choose(direction, dense=False)
        sent = sender.encode(rows(), PLACES).payload
        expected = sender.decode(sent, PLACES, torch.float32)
        assert torch.equal(receiver.decode(sent, PLACES, torch.float32), expected)


def test_bases_differ_between_boundaries_directions_and_seeds() -> None:
    def basis(index: int, direction: Direction, seed: int) -> torch.Tensor:
        return q_of(codecs(index, seed, codec="lowrank").choose(direction, dense=False))

    bases = [basis(i, way, s) for i in (0, 1) for way in WAYS for s in (1, 2)]
    for number, first in enumerate(bases):
        assert not any(torch.equal(first, second) for second in bases[number + 1 :])


@pytest.mark.parametrize("normalised", [False, True])
def test_refresh_is_one_power_step_and_waits_for_the_commit(normalised: bool) -> None:
    """Q' = orth(sum X^T X Q) over what was seen, or over rows of norm 1, used only after ``commit``."""
    basis = Basis(H, R, seed=7, normalised=normalised)
    old = basis.current.clone()
    for seed in range(3):
        basis.observe(rows(seed), PLACES)
    assert torch.equal(basis.current, old) and basis.is_open
    basis.stage()
    staged = basis.flat().clone()
    gram = torch.zeros(H, H, dtype=torch.float64)
    for seed in range(3):
        x = rows(seed).double()
        gram += x.T @ (x / x.square().sum(1, keepdim=True) if normalised else x)
    expected = reference_orth(gram @ old.double())
    torch.testing.assert_close(staged[:H].double(), expected, atol=2e-5, rtol=0)
    # R_ii of the sketch is the energy along column i, so the spread is its root, over the largest
    spread = (expected.T @ gram @ old.double()).diagonal().sqrt()
    torch.testing.assert_close(staged[H].double(), spread / spread.max(), atol=1e-4, rtol=0)
    assert torch.equal(basis.current, old) and not basis.is_open
    for _ in range(2):
        basis.commit()
        assert torch.equal(basis.current, staged[:H]) and torch.equal(basis.spread, staged[H])
        assert torch.equal(basis.flat(), staged)


@pytest.mark.parametrize("dtype, bytes_each", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_what_the_sender_staged_crosses_as_one_vector(dtype: torch.dtype, bytes_each: int) -> None:
    """Before anything was learned, when nothing could be, and after a fit: both ends come to equal bits."""
    sender, receiver = (Basis(H, R, seed=8, dtype=dtype) for _ in range(2))
    for teach in (None, torch.zeros(N, H), rows()):
        if teach is not None:
            sender.observe(teach, PLACES)
        sender.stage()
        message = sender.flat().clone()
        assert message.nbytes == (H + 1) * R * bytes_each and message.shape == receiver.flat().shape
        receiver.stage_flat(message)
        sender.commit()
        receiver.commit()
        assert torch.equal(sender.current, receiver.current) and torch.equal(sender.spread, receiver.spread)
        assert torch.equal(sender.current.to(dtype).float(), sender.current)
    assert not torch.allclose(sender.current, Basis(H, R, seed=8).current, atol=0.1)


def test_power_steps_find_the_space_of_the_rows() -> None:
    """Rows of true rank r are coded without loss after refreshes; at the random start almost all is lost."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(N, R, generator=generator) @ torch.randn(R, H, generator=generator)
    codec = LowRankCodec(Basis(H, R, seed=9), torch.float32)

    def error() -> float:
        return ((x - there_and_back(codec, x)).norm() / x.norm()).item()

    assert error() > 0.7
    for _ in range(2):
        learn(codec.learner, x)
    assert error() < 1e-4


def learn(basis: Basis, x_NH: torch.Tensor) -> None:
    basis.observe(x_NH, PLACES)
    basis.stage()
    basis.commit()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_rows_that_teach_nothing_leave_the_basis_as_it_is(bad: float) -> None:
    """Case H1: no gradient crossed, or a bad one; zeros are coded as zeros."""
    codec = LowRankCodec(Basis(H, R, seed=10), torch.float32)
    before = codec.learner.current.clone()
    learn(codec.learner, torch.full((N, H), bad))
    assert torch.equal(codec.learner.current, before) and not codec.learner.is_open
    assert torch.equal(there_and_back(codec, torch.zeros(N, H)), torch.zeros(N, H))


def test_rank_above_the_true_rank_is_finite() -> None:
    """Case H1: rows that span one direction, five columns of Q."""
    codec = LowRankCodec(Basis(H, R, seed=11), torch.float32)
    x = torch.arange(1.0, N + 1)[:, None] * rows()[:1]
    for _ in range(3):
        learn(codec.learner, x)
    q = codec.learner.current
    torch.testing.assert_close(q.T @ q, torch.eye(R), atol=1e-5, rtol=0)
    assert bool(codec.learner.spread.isfinite().all())
    torch.testing.assert_close(there_and_back(codec, x), x, atol=1e-3, rtol=1e-4)


def crossing(**settings: Any) -> Crossing:
    return Crossing(codecs(**settings))


DENSE = Pass("anchor", dense=True, observe="both")


def test_a_shared_basis_learns_from_the_forward_rows_alone() -> None:
    """At the lower end, which sends forward and receives backward, and at the upper end."""
    for sends in (True, False):
        whole = crossing(codec="lowrank", shared_basis=True)
        ((way, basis),) = whole.codecs.learners()
        assert way == "forward" and whole.codecs.backward.learner is basis
        if sends:
            whole.decode("backward", rows().bfloat16(), PLACES, DENSE, torch.float32)
        else:
            whole.encode("backward", rows(), PLACES, DENSE)
            whole.encode("backward", rows(), PLACES, Pass("fast", observe="sender"))
        assert not basis.is_open
        whole.encode("forward", rows(), PLACES, DENSE)
        assert basis.is_open


def test_a_random_basis_never_learns() -> None:
    whole = crossing(codec="lowrank", basis="random")
    for way in WAYS:
        whole.encode(way, rows(), PLACES, DENSE)
    assert [basis.is_open for _, basis in whole.codecs.learners()] == [False, False]


@pytest.mark.parametrize("direction", WAYS)
def test_both_ends_learn_from_the_rows_as_they_were_decoded(direction: Direction) -> None:
    lower, upper = crossing(codec="lowrank"), crossing(codec="lowrank")
    payload = lower.encode(direction, rows(), PLACES, DENSE).payload
    assert payload.shape == upper.blank(direction, PLACES, DENSE).shape == (N, H)
    upper.decode(direction, payload, PLACES, DENSE, torch.float32)
    x = rows().bfloat16().float()
    for end in (lower, upper):
        basis = dict(end.codecs.learners())[direction]
        (sketch,) = basis.sums()
        expected = x.double().T @ x.double() @ q_of(end.codecs.choose(direction, dense=False)).double()
        torch.testing.assert_close(sketch.double(), expected, atol=1e-4, rtol=1e-5)
    (first,), (second,) = (dict(end.codecs.learners())[direction].sums() for end in (lower, upper))
    assert torch.equal(first, second)


@pytest.mark.parametrize("feedback", [False, True])
def test_the_sender_learns_from_its_own_rows_and_the_receiver_from_nothing(feedback: bool) -> None:
    """Compressed: what it had, not what it sent, nor what it carried over from before."""
    plan = Pass("fast", observe="sender")
    lower, upper = (crossing(codec="lowrank", basis="self", error_feedback=feedback) for _ in range(2))
    for seed in range(2):
        payload = upper.encode("backward", rows(seed), PLACES, plan).payload
        lower.decode("backward", payload, PLACES, plan, torch.float32)
    (sketch,) = dict(upper.codecs.learners())["backward"].sums()
    gram = rows(0).double().T @ rows(0).double() + rows(1).double().T @ rows(1).double()
    expected = gram @ q_of(upper.codecs.backward).double()
    torch.testing.assert_close(sketch.double(), expected, atol=1e-4, rtol=1e-5)
    assert dict(lower.codecs.learners())["backward"].sums() == []
    assert dict(upper.codecs.learners())["forward"].sums() == []


def test_only_the_fast_pass_is_measured_and_errors_are_taken_once() -> None:
    """Squared error and squared norm of what this rank sent, by boundary and direction; two calls add up to one."""
    cfg = BoundaryConfig(codec="lowrank", rank=R, payload="float32")
    middle = build_boundaries(cfg, stages=4, stage=1, hidden=H, seed=1)
    assert sorted(middle.crossings) == [0, 1]
    expected = torch.zeros(3, 3, 2, dtype=torch.float64)
    crossed_here: list[tuple[int, Direction, int]] = [(0, "backward", 0), (1, "forward", 1), (1, "forward", 2)]
    for index, way, seed in crossed_here:
        crossed = middle.crossings[index]
        crossed.encode(way, rows(seed), PLACES, Pass("fast"))
        crossed.encode(way, rows(seed), PLACES, Pass("anchor", dense=True))
        crossed.encode(way, rows(seed), PLACES, Pass("old_logprob"))
        q = q_of(crossed.codecs.choose(way, dense=False)).double()
        x = rows(seed).double()
        expected[index, WAYS.index(way)] += torch.stack([(x - x @ q @ q.T).square().sum(), x.square().sum()])
    torch.testing.assert_close(middle.take_errors(), expected, atol=1e-4, rtol=1e-5)
    assert not middle.take_errors().any()


def test_a_stage_holds_the_boundaries_it_is_an_end_of() -> None:
    cfg = BoundaryConfig(codec="lowrank", rank=R)

    def held(stage: int | None) -> list[int]:
        return sorted(build_boundaries(cfg, stages=4, stage=stage, hidden=H, seed=1).crossings)

    assert [held(stage) for stage in (0, 1, 2, 3, None)] == [[0], [0, 1], [1, 2], [2], [0, 1, 2]]
    alone = build_boundaries(cfg, stages=1, stage=0, hidden=H, seed=1)
    assert alone.crossings == {} and not alone.learns and not alone.take_errors().any()


def test_a_pass_is_under_way_inside_its_block_alone() -> None:
    boundaries = Boundaries({}, 0)
    outer, inner = Pass("rollout"), Pass("anchor", dense=True)
    with boundaries.running(outer):
        with pytest.raises(RuntimeError, match="inside"), boundaries.running(inner):
            assert boundaries.current is inner
            raise RuntimeError("inside")
        assert boundaries.current is outer
    assert boundaries.current.kind == "fast" and not boundaries.current.dense


def test_each_stream_takes_the_micro_batches_rows_in_order() -> None:
    plan = Pass("fast", rows=[some(0), some(1, 2)])
    device = torch.device("cpu")
    assert plan.next_rows("send_next", 5, 4, device) is plan.next_rows("recv_next", 5, 4, device)
    assert len(plan.next_rows("send_next", 5, 4, device)) == 2
    assert len(Pass("fast").next_rows("send_next", 5, 4, device)) == 20


def test_directions_may_differ() -> None:
    pair = codecs(forward_codec="identity", backward_codec="mask", forward_payload="float32")

    def sent(codec: Codec) -> int:
        return codec.encode(rows(), PLACES).payload.nbytes

    assert sent(pair.forward) == N * H * 4
    assert sent(pair.backward) == N * R * 2
    assert sent(pair.choose("forward", dense=True)) == N * H * 4
    assert sent(pair.choose("backward", dense=True)) == N * H * 2


@pytest.mark.parametrize("kind", ["lowrank", "mask"])
@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
def test_error_feedback_loses_nothing_in_the_end(kind: str, payload: str) -> None:
    """Sum over micro-batches of what was decoded, and the remainder, is the sum of what went in.

    Micro-batches of several widths; places that one does not use keep their remainder.
    """
    inner = codecs(codec=kind, payload=payload).backward
    codec = FeedbackCodec(inner)
    micros = [some(0, 2, 3, 7), some(*range(N)), some(1, 12), some(*range(12))]
    put_in, came_out = (torch.zeros(FAR + 1, 4, H, dtype=torch.float64) for _ in range(2))
    for seed, at in enumerate(micros):
        x = rows(seed)[: len(at)]
        encoded = codec.encode(x, at)
        where = (at.positions_N, at.sequences_N)
        put_in[where] += x.double()
        decoded = codec.decode(encoded.payload, at, torch.float32)
        came_out[where] += decoded.double()
        assert encoded.decoded_NH is not None and torch.equal(encoded.decoded_NH, decoded)
        codec.begin_step(seed)
    lost = codec.state_dict()["lost"].double()
    torch.testing.assert_close(came_out + lost, put_in, atol=1e-4, rtol=0)
    assert lost.abs().max() > 0.1


def test_error_feedback_starts_as_the_codec_alone_and_drops_what_is_not_finite() -> None:
    plain, codec = (codecs(codec="lowrank", error_feedback=on).backward for on in (False, True))
    assert torch.equal(codec.encode(rows(), PLACES).payload, plain.encode(rows(), PLACES).payload)
    bad = rows(1)
    bad[3, 4] = float("inf")
    codec.encode(bad, PLACES)
    assert bool(there_and_back(codec, rows(2)).isfinite().all())
    forward = codecs(codec="lowrank", error_feedback=True).forward
    assert isinstance(forward, LowRankCodec) and isinstance(codec, FeedbackCodec)


@pytest.mark.parametrize("kind", ["identity", "lowrank", "mask"])
@pytest.mark.parametrize("feedback", [False, True])
def test_state_survives_a_checkpoint(kind: str, feedback: bool) -> None:
    """With a basis staged but not committed, a step begun, and a remainder kept."""
    cfg = BoundaryConfig(codec=kind, rank=R, error_feedback=feedback)  # type: ignore[arg-type]  # from parametrize
    first, second = (build_boundaries(cfg, stages=2, stage=None, hidden=H, seed=1) for _ in range(2))
    first.begin_step(3)
    for way in WAYS:
        first.crossings[0].encode(way, rows(), PLACES, Pass("fast", observe="sender"))
    for _, learner in first.crossings[0].codecs.learners():
        learner.stage()
    second.load_state_dict(first.state_dict())
    for seed in (1, 2):
        for way in WAYS:
            payloads = [
                ends.crossings[0].encode(way, rows(seed), PLACES, Pass("fast")).payload for ends in (first, second)
            ]
            assert torch.equal(*payloads)
        first.commit()
        second.commit()
