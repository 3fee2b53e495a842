"""Packed codecs on their own: two ends agree bit for bit, tokens one by one are whole sequences, sizes, state.

Legend: N rows, B sequences, S columns, H hidden, V vocabulary, C numbers of context, r rank.
"""

from itertools import product
from math import log2
from typing import Any, Literal

import pytest
import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.build import BoundaryCodecs, build_codecs
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.boundary.crossing import Boundaries, Pass, build_boundaries
from megatron_grpo.boundary.feedback import FeedbackCodec
from megatron_grpo.boundary.token_waterfill import TokenWaterfillCodec
from megatron_grpo.boundary.transform import Transform, TransformCodec
from megatron_grpo.boundary.whitened import WhitenedCodec
from megatron_grpo.config import BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import project
from megatron_grpo.ops.rows import Rows, SequenceMemory, carrying_rows
from megatron_grpo.ops.transform import Moments, fit

H, V, SHARE = 24, 11, 0.25
CODE_BITS = 80  # 0.25 x 16 x 24 less 16 of scale
PREDICTIONS = ("none", "embedding", "embedding+previous")
WAYS: tuple[Direction, Direction] = ("forward", "backward")
# Padded on both sides, as prompts and responses are; the second sequence is a single token.
SPANS = ((0, 6), (2, 3), (1, 5), (2, 7), (0, 7))
B, S = len(SPANS), 7
CARRYING = torch.tensor([[start <= column < stop for column in range(S)] for start, stop in SPANS])
TOKENS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(1))
WHOLE = carrying_rows(CARRYING, TOKENS)
N = len(WHOLE)
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
STEPS = [(0, 3), *((column, column + 1) for column in range(3, S))]  # a prompt at once, then token by token


def hidden_states(seed: int = 0) -> torch.Tensor:
    """``[S, B, H]``: rows that depend on their token and on the row before, with norms over a factor of two."""
    generator = torch.Generator().manual_seed(seed)
    x_SBH = torch.randn(S, B, H, generator=generator)
    for column in range(S):
        x_SBH[column] += 2 * EMBEDDING[TOKENS[:, column]] + (x_SBH[column - 1] if column else 0)
    return x_SBH * (1 + torch.rand(S, B, 1, generator=generator))


def codecs(index: int = 0, **settings: Any) -> BoundaryCodecs:
    cfg = BoundaryConfig(**({"forward_budget": SHARE} | settings))
    return build_codecs(cfg, hidden=H, index=index, seed=3, embedding_VH=EMBEDDING)


def two_ends(predict: str, **settings: Any) -> tuple[TransformCodec, TransformCodec]:
    """Of one boundary, after one fit of the sender's, which crossed."""
    ends = []
    for _ in range(2):
        codec = codecs(predict=predict, **settings).forward
        assert isinstance(codec, TransformCodec)
        ends.append(codec)
    sender, receiver = ends
    for seed in range(4):
        sender.learner.observe(WHOLE.select(hidden_states(seed)), WHOLE)
    sender.learner.stage()
    receiver.learner.stage_flat(sender.learner.flat().clone())
    for end in ends:
        end.learner.commit()
    return sender, receiver


def by_steps(memory: SequenceMemory | None) -> list[Rows]:
    """The rows of WHOLE in the parts that decoding sends."""
    return [
        carrying_rows(CARRYING[:, first:last], TOKENS[:, first:last], start=first, memory=memory)
        for first, last in STEPS
    ]


def sent(sender: Codec, receiver: Codec, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
    """What the receiver makes of rows; the sender knows it bit for bit."""
    encoded = sender.encode(x_NH, rows)
    blank = receiver.payload(rows)
    assert encoded.payload.shape == blank.shape and encoded.payload.dtype == blank.dtype == torch.uint8
    decoded = receiver.decode(encoded.payload, rows, x_NH.dtype)
    assert encoded.decoded_NH is not None and torch.equal(decoded.nan_to_num(99.0), encoded.decoded_NH.nan_to_num(99.0))
    return decoded


def error(decoded_NH: torch.Tensor, x_NH: torch.Tensor) -> float:
    return float((decoded_NH - x_NH).norm() / x_NH.norm())


@pytest.mark.parametrize("predict", PREDICTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_by_token_is_the_whole_sequence(predict: str, dtype: torch.dtype) -> None:
    """Each end with a memory of its own: equal bits at both, and what a training pass over everything decodes."""
    sender, receiver = two_ends(predict)
    x_SBH = hidden_states(9).to(dtype)
    whole = WHOLE.scatter(sent(sender, receiver, WHOLE.select(x_SBH), WHOLE), S)
    mine, theirs = SequenceMemory(), SequenceMemory()
    for (first, last), here, there in zip(STEPS, by_steps(mine), by_steps(theirs), strict=True):
        x_NH = here.select(x_SBH[first:last])
        encoded = sender.encode(x_NH, here)
        decoded = receiver.decode(encoded.payload, there, dtype)
        assert encoded.decoded_NH is not None and torch.equal(decoded, encoded.decoded_NH)
        torch.testing.assert_close(there.scatter(decoded, last - first), whole[first:last], atol=1e-5, rtol=1e-5)
    assert error(WHOLE.select(whole).float(), WHOLE.select(x_SBH).float()) < 0.3


def test_more_to_predict_from_leaves_less_error() -> None:
    x_NH = WHOLE.select(hidden_states(9))
    none, embedding, previous = (error(sent(*two_ends(predict), x_NH, WHOLE), x_NH) for predict in PREDICTIONS)
    assert previous < 0.9 * embedding and embedding < 0.9 * none


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_a_row_codes_alike_in_any_order_of_sequences(predict: str) -> None:
    ends, x_SBH = two_ends(predict), hidden_states(9)
    whole_SBH = WHOLE.scatter(sent(*ends, WHOLE.select(x_SBH), WHOLE), S)
    for order in ([4, 2, 0, 3, 1], [3, 1], [2]):
        rows = carrying_rows(CARRYING[order], TOKENS[order])
        decoded = sent(*ends, rows.select(x_SBH[:, order]), rows)
        torch.testing.assert_close(rows.scatter(decoded, S), whole_SBH[:, order], atol=1e-5, rtol=1e-5)


def test_payloads_have_the_promised_bytes() -> None:
    """Whole rows in one piece, rounded up to a byte; a column that crosses alone likewise: of 76 bits, half is lost."""
    column = next(column for column, count in enumerate(CARRYING.sum(0).tolist()) if count % 2)
    alone = carrying_rows(CARRYING[:, column : column + 1], TOKENS[:, column : column + 1])
    for (share, bits), predict in product(((SHARE, CODE_BITS), (92 / 384, 76)), PREDICTIONS):
        codec = two_ends(predict, forward_budget=share)[0]
        for rows in (WHOLE, alone):
            assert len(codec.payload(rows)) == 2 * len(rows) + (len(rows) * bits + 7) // 8
    fixed = codecs(forward_payload="int3", rank=5, predict="none").forward
    assert len(fixed.payload(WHOLE)) == 2 * N + (N * 5 * 3 + 7) // 8


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_no_rows_zero_rows_and_bad_rows(predict: str) -> None:
    """A row that is not finite is NaN at both ends, and no other; what follows it in its sequence changes."""
    ends, x_SBH = two_ends(predict), hidden_states(9)
    empty = carrying_rows(torch.zeros(B, S, dtype=torch.bool), TOKENS)
    assert sent(*ends, torch.empty(0, H), empty).shape == (0, H)
    good_SBH = WHOLE.scatter(sent(*ends, WHOLE.select(x_SBH), WHOLE), S)
    x_SBH[2, 3, 5], x_SBH[6, 4] = torch.inf, 0.0
    decoded_SBH = WHOLE.scatter(sent(*ends, WHOLE.select(x_SBH), WHOLE), S)
    assert bool(decoded_SBH[2, 3].isnan().all()) and not decoded_SBH[6, 4].any()
    decoded_SBH[2, 3] = good_SBH[2, 3] = decoded_SBH[6, 4] = good_SBH[6, 4] = 0.0
    assert bool(decoded_SBH.isfinite().all())
    assert error(decoded_SBH[3:, 3], x_SBH[3:, 3]) < 0.6
    if predict == "embedding+previous":
        decoded_SBH[3:, 3] = good_SBH[3:, 3] = 0.0
    assert torch.equal(decoded_SBH, good_SBH)


def moments_by_hand(x_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of [1, huge, first, embedding, unit row before, unit row] twice, and the tally: sequence after sequence."""
    second, tally = torch.zeros(2 + 1 + 3 * H, 2 + 1 + 3 * H, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for sequence, (start, stop) in enumerate(SPANS):
        before = torch.zeros(H, dtype=torch.float64)
        for column in range(start, stop):
            x = x_SBH[column, sequence].double()
            unit = x / x.square().mean().sqrt()
            flags = torch.tensor([1.0, 0.0, float(column == start)], dtype=torch.float64)
            z = torch.cat([flags, EMBEDDING[TOKENS[sequence, column]].double(), before, unit])
            second += torch.outer(z, z)
            tally += torch.tensor([1.0, 1.0, log2(x.norm().item()), 0.0], dtype=torch.float64)
            before = unit
    return second, tally


def middle() -> Boundaries:
    """Both boundaries of the middle one of three stages."""
    return build_boundaries(
        BoundaryConfig(predict="embedding+previous"), stages=3, stage=1, hidden=H, seed=3, embedding_VH=EMBEDDING
    )


def learner_of(boundaries: Boundaries, index: int) -> Transform:
    learner = boundaries.crossings[index].codecs.forward.learner
    assert isinstance(learner, Transform)
    return learner


def test_what_a_learner_remembers_of_a_sequence_is_its_own() -> None:
    """Two boundaries and two ends learn from rows that share one memory, as a stage's do while it samples."""
    x = [hidden_states(20), hidden_states(21)]
    boundaries, memory = middle(), SequenceMemory()
    plan = Pass("basis", dense=True, observe="both")
    for (first, last), rows in zip(STEPS, by_steps(memory), strict=True):
        received = rows.select(x[0][first:last]).bfloat16()
        boundaries.crossings[0].decode("forward", received, rows, plan, torch.float32)
        boundaries.crossings[1].encode("forward", rows.select(x[1][first:last]), rows, plan)
    for index in range(2):
        second, tally = moments_by_hand(x[index].bfloat16())
        second_DD, tally_4, gradient_HH = learner_of(boundaries, index).sums()
        torch.testing.assert_close(second_DD.double(), second, atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(tally_4, tally, atol=1e-4, rtol=0)
        assert not gradient_HH.any()


def test_coding_and_learning_do_not_share_what_they_remember() -> None:
    """Sampling through the codec while the sender learns: moments are of its own rows, codes as without learning."""
    x_SBH, boundaries, memory, quiet = hidden_states(20), middle(), SequenceMemory(), SequenceMemory()
    for (first, last), rows, alone in zip(STEPS, by_steps(memory), by_steps(quiet), strict=True):
        x_NH = rows.select(x_SBH[first:last])
        learning = boundaries.crossings[1].encode("forward", x_NH, rows, Pass("rollout", observe="sender"))
        assert torch.equal(
            learning.payload, boundaries.crossings[1].encode("forward", x_NH, alone, Pass("rollout")).payload
        )
    second_DD, *_ = learner_of(boundaries, 1).sums()
    torch.testing.assert_close(second_DD.double(), moments_by_hand(x_SBH)[0], atol=1e-3, rtol=1e-5)


def test_a_fit_waits_for_the_commit_and_crosses_as_one_vector() -> None:
    sender, receiver = (codecs().forward.learner for _ in range(2))
    assert isinstance(sender, Transform) and isinstance(receiver, Transform)
    old = sender.flat().clone()
    # channels kept: all 24 of 56; features: 2 flags, the first row's, 24 of the embedding and 24 of the row before
    assert old.dtype == torch.bfloat16 and old.shape == (1 + 24 + (2 + 1 + 24 + 24 + 24) * 24,)
    assert torch.equal(old, receiver.flat())
    sender.stage()
    assert torch.equal(sender.flat(), old)  # nothing was seen
    sender.observe(WHOLE.select(hidden_states()), WHOLE)
    assert sender.is_open and torch.equal(sender.flat(), old)
    sender.stage()
    assert not sender.is_open and not torch.equal(sender.flat(), old) and torch.equal(sender.current.flat_n, old)
    receiver.stage_flat(sender.flat().clone())
    for end in (sender, receiver):
        end.commit()
    assert torch.equal(sender.current.flat_n, receiver.current.flat_n) and not torch.equal(sender.current.flat_n, old)


def test_a_fit_remembers_half_of_what_was_before_over_a_resume() -> None:
    first, resumed, fresh = (codecs(predict="embedding+previous").forward.learner for _ in range(3))
    assert isinstance(first, Transform) and isinstance(resumed, Transform) and isinstance(fresh, Transform)
    first.observe(WHOLE.select(hidden_states(0)), WHOLE)
    first.stage()  # staged, and not in force
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(resumed.flat(), first.flat()) and torch.equal(resumed.current.flat_n, first.current.flat_n)
    for learner in (first, resumed, fresh):
        learner.commit()
        learner.observe(WHOLE.select(hidden_states(1)), WHOLE)
        learner.stage()
    assert torch.equal(resumed.flat(), first.flat())
    both = [old / 2 + new for old, new in zip(*map(moments_by_hand, map(hidden_states, (0, 1))), strict=True)]
    expected = fit(Moments(both[0].float(), both[1], torch.zeros(H, H)), first.spec)
    first.commit()
    fresh.commit()
    torch.testing.assert_close(first.current.spread_K, expected.spread_K, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(first.current.weights_FH, expected.weights_FH, atol=0.01, rtol=0)
    assert (fresh.current.weights_FH - expected.weights_FH).abs().max() > 0.1


@pytest.mark.parametrize("observe", ["sender", "both", "gradients"])
def test_gradients_teach_the_rows_that_go_forward(observe: Literal["sender", "both", "gradients"]) -> None:
    """As the forward sender decodes them, and where both ends learn, at the gradient's sender, too; once at each."""
    x_NH, grad_NH = WHOLE.select(hidden_states(1)), WHOLE.select(hidden_states(2))
    plan = Pass("basis", dense=observe == "both", observe=observe)
    ends = middle().crossings
    encoded = ends[0].encode("backward", grad_NH, WHOLE, plan)
    ends[1].encode("forward", x_NH, WHOLE, plan)
    received_NH = ends[1].decode("backward", encoded.payload, WHOLE, plan, torch.float32)
    upper, lower = (ends[index].codecs.forward.learner for index in range(2))
    assert isinstance(upper, Transform) and isinstance(lower, Transform)
    assert torch.equal(lower.sums()[2], received_NH.T @ received_NH) and lower.sums()[1][3] > 0
    assert lower.sums()[1][0] == (0 if observe == "gradients" else N)
    assert torch.equal(received_NH, grad_NH.bfloat16().float()) == (observe != "sender")
    if observe != "sender":
        assert torch.equal(upper.sums()[2], lower.sums()[2])
    else:
        assert not upper.is_open


def test_gradients_alone_let_no_row_fade() -> None:
    learner = codecs().forward.learner
    assert isinstance(learner, Transform)
    learner.observe(WHOLE.select(hidden_states(1)), WHOLE)
    learner.stage()
    rows, *_ = before = [part.clone() for part in learner.state_dict()["history"]]
    learner.observe_gradient(WHOLE.select(hidden_states(2)))
    learner.stage()
    after = learner.state_dict()["history"]
    assert torch.equal(after[0], rows) and torch.equal(after[1][:3], before[1][:3])
    assert after[1][3] == N and not torch.equal(after[2], before[2])


@pytest.mark.parametrize("settings", [{"metric": "none"}, {"basis": "random"}])
def test_gradients_teach_nothing_without_a_metric(settings: dict[str, Any]) -> None:
    learner = codecs(**settings).forward.learner
    assert isinstance(learner, Transform) and not learner.wants_gradients
    learner.observe_gradient(WHOLE.select(hidden_states(1)))
    assert not learner.is_open


def whitened(bits: int, rounding: str = "nearest") -> WhitenedCodec:
    """With a basis that learned, so that its spread is not flat."""
    settings: dict[str, Any] = {"codec": "lowrank", "backward_payload": f"int{bits}", "rank": 5, "rounding": rounding}
    codec = codecs(basis="anchor", **settings).backward  # fp32, so that Q is orthonormal
    assert isinstance(codec, WhitenedCodec)
    codec.learner.observe(WHOLE.select(hidden_states(0)), WHOLE)
    codec.learner.stage()
    codec.learner.commit()
    return codec


def decoded(codec: Codec, x_NH: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x_NH, WHOLE).payload, WHOLE, x_NH.dtype)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_whitened_gradients_have_the_promised_bytes_and_lose_what_their_levels_lose(bits: int) -> None:
    """Five coordinates of ``bits``, in eights, and two bytes of scale; one is off by half a level, of 2^bits - 1."""
    codec, x_NH = whitened(bits), WHOLE.select(hidden_states(9))
    payload = codec.encode(x_NH, WHOLE).payload
    assert len(payload) == len(codec.payload(WHOLE)) == 2 * N + (5 * N + 7) // 8 * bits
    spread_r = codec.learner.spread
    assert spread_r.max() == 1 and 0.05 < spread_r.min() < 0.8
    z_Nr = project(x_NH, codec.learner.current) / spread_r
    level_N1 = z_Nr.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    wrong_Nr = (project(decoded(codec, x_NH), codec.learner.current) / spread_r - z_Nr).abs()
    assert bool((wrong_Nr <= level_N1 / 2 + 2.0**-8 * z_Nr.abs() + 1e-4).all())
    x_NH[4], x_NH[7, 3], kept = 0.0, torch.nan, decoded(codec, x_NH)
    bad_NH = decoded(codec, x_NH)
    assert not bad_NH[4].any() and bool(bad_NH[7].isnan().all())
    assert torch.equal(bad_NH.nan_to_num(0.0)[:4], kept[:4]) and bool(bad_NH[8:].isfinite().all())


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """2000 draws of at most half a level's deviation, to 6 standard errors, and the scale's rounding to bfloat16."""
    x_NH, draws = WHOLE.select(hidden_states(9)), 2000
    codec, nearest = whitened(3, "stochastic"), whitened(3)
    basis, spread_r = codec.learner.current, codec.learner.spread
    z_Nr = project(x_NH, basis) / spread_r
    mean_NH = torch.stack([decoded(codec, x_NH) for _ in range(draws)]).mean(0)
    allowed_Nr = 6 * 0.5 * z_Nr.abs().amax(1, keepdim=True) / 3 / draws**0.5 + 2.0**-8 * z_Nr.abs() + 1e-4
    assert bool(((project(mean_NH, basis) / spread_r - z_Nr).abs() <= allowed_Nr).all())
    assert not bool(((project(decoded(nearest, x_NH), basis) / spread_r - z_Nr).abs() <= allowed_Nr).all())


@pytest.mark.parametrize(("share", "size"), [(0.02, 23), (0.1, 111), (0.5, 552)])
def test_token_waterfill_has_the_promised_bytes(share: float, size: int) -> None:
    """23 rows x 24 x 2 bytes x share, rounded up."""
    codec = codecs(backward_budget=share, error_feedback=False).backward
    assert isinstance(codec, TokenWaterfillCodec)
    payload = codec.encode(WHOLE.select(hidden_states(9)), WHOLE).payload
    assert N == 23 and len(payload) == len(codec.payload(WHOLE)) == size


@pytest.mark.parametrize("settings", [{"backward_budget": 0.2}, {"codec": "lowrank", "backward_payload": "int4"}])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_error_feedback_loses_nothing_in_the_end(settings: dict[str, Any], rounding: str) -> None:
    """What was decoded and the remainder are what went in."""
    codec = codecs(error_feedback=True, rounding=rounding, **settings).backward
    assert isinstance(codec, FeedbackCodec)
    put_in, came_out = torch.zeros(N, H), torch.zeros(N, H)
    for seed in range(5):
        x_NH = WHOLE.select(hidden_states(seed))
        put_in += x_NH
        came_out += decoded(codec, x_NH)
    lost_NH = codec.state_dict()["lost"][WHOLE.positions_N, WHOLE.sequences_N]
    torch.testing.assert_close(came_out + lost_NH, put_in, atol=1e-3, rtol=0)
    assert lost_NH.abs().max() > 0.1


@pytest.mark.parametrize("settings", [{}, {"codec": "lowrank", "payload": "int4"}])
def test_state_survives_a_checkpoint(settings: dict[str, Any]) -> None:
    """With a fit staged and not in force, draws made, and a remainder kept: both go on with equal bits."""
    cfg = BoundaryConfig(rounding="stochastic", error_feedback=True, **settings)
    first, second = (
        build_boundaries(cfg, stages=2, stage=None, hidden=H, seed=1, embedding_VH=EMBEDDING) for _ in range(2)
    )
    for way in WAYS:
        first.crossings[0].encode(way, WHOLE.select(hidden_states(0)), WHOLE, Pass("fast", observe="sender"))
    for _, learner in first.crossings[0].codecs.learners():
        learner.stage()
    second.load_state_dict(first.state_dict())
    for seed in (1, 2):
        for way in WAYS:
            payloads = [
                ends.crossings[0].encode(way, WHOLE.select(hidden_states(seed)), WHOLE, Pass("fast")).payload
                for ends in (first, second)
            ]
            assert torch.equal(*payloads)
        first.commit()
        second.commit()


def test_the_basis_of_whitened_gradients_is_the_backward_one() -> None:
    pair = codecs(codec="lowrank", payload="int4")
    learners = dict(pair.learners())
    assert isinstance(learners["forward"], Transform) and isinstance(learners["backward"], Basis)
    assert [way for way, _ in codecs().learners()] == ["forward"]
