"""Vocabulary-parallel log-probs against torch's softmax. Legend: B sequences, R response, V vocabulary."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from megatron_grpo.ops.logprobs import (
    OneShard,
    VocabReduce,
    entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)

Result = tuple[torch.Tensor, ...]
INF, NAN = float("inf"), float("nan")


@dataclass
class _Meeting:
    """Where threads that stand for ranks put their parts and read those of the others."""

    size: int
    parts: list[torch.Tensor | None] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=20)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part
        self.barrier.wait()
        seen = [part.detach() for part in self.parts if part is not None]
        self.barrier.wait()
        return seen


@dataclass(frozen=True)
class _Shard:
    """One of several shards; backward of a sum is the identity, as with ranks that all hold the loss."""

    meeting: _Meeting
    rank: int
    start: int
    valid: int

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).amax(dim=0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.exchange(self.rank, x)
        return x + sum(part for rank, part in enumerate(parts) if rank != self.rank)


def _on_shards(
    logits_BRV: torch.Tensor, valid: int, shards: int, fn: Callable[[torch.Tensor, VocabReduce], Result]
) -> list[Result]:
    """``fn(shard of the logits, reduce)`` on each of ``shards`` threads."""
    meeting = _Meeting(shards)
    parts = logits_BRV.chunk(shards, dim=-1)
    starts = [sum(part.shape[-1] for part in parts[:rank]) for rank in range(shards)]
    with ThreadPoolExecutor(shards) as pool:
        futures = [
            pool.submit(fn, part, _Shard(meeting, rank, start, valid))
            for rank, (part, start) in enumerate(zip(parts, starts, strict=True))
        ]
        return [future.result(timeout=30) for future in futures]


def _case(
    *shape: int, valid: int | None = None, seed: int = 0, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * scale
    return logits, torch.randint(0, valid or shape[-1], shape[:-1], generator=generator)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_c7_logprobs_and_entropy_are_those_of_logits_over_temperature(temperature: float) -> None:
    logits_BRV, target_BR = _case(3, 4, 11)
    exact_BRV = (logits_BRV.double() / temperature).log_softmax(dim=-1)
    logp_BR, entropy_BR = token_logprobs_and_entropy(
        logits_BRV, target_BR, OneShard(11), temperature=temperature, with_entropy=True
    )
    assert entropy_BR is not None
    wanted_BR = exact_BRV.gather(-1, target_BR[..., None])[..., 0].float()
    torch.testing.assert_close(logp_BR, wanted_BR, atol=1e-5, rtol=1e-5)
    wanted_entropy_BR = -(exact_BRV.exp() * exact_BRV).sum(dim=-1).float()
    torch.testing.assert_close(entropy_BR, wanted_entropy_BR, atol=1e-5, rtol=1e-5)
    alone_BR = token_logprobs(logits_BRV, target_BR, OneShard(11), temperature=temperature)
    assert torch.equal(alone_BR, logp_BR)
    assert torch.equal(entropy(logits_BRV, OneShard(11), temperature=temperature), entropy_BR)


def test_entropy_is_optional_and_of_a_uniform_distribution_is_log_v() -> None:
    logits_BRV, target_BR = torch.full((1, 1, 8), 2.5), torch.zeros(1, 1, dtype=torch.int64)
    result = token_logprobs_and_entropy(logits_BRV, target_BR, OneShard(8), temperature=1.0, with_entropy=False)
    assert result[1] is None
    assert float(result[0]) == pytest.approx(-2.0794415, abs=1e-6)
    assert float(entropy(logits_BRV, OneShard(8), temperature=1.0)) == pytest.approx(2.0794415, abs=1e-6)


def test_gradients_are_those_of_log_softmax() -> None:
    logits_BRV, target_BR = _case(2, 5, 9)
    weight_BR = _case(2, 5, 1)[0][..., 0]
    ours_BRV = logits_BRV.clone().requires_grad_()
    logp_BR, entropy_BR = token_logprobs_and_entropy(
        ours_BRV, target_BR, OneShard(9), temperature=0.7, with_entropy=True
    )
    assert entropy_BR is not None
    ((logp_BR + 0.3 * entropy_BR) * weight_BR).sum().backward()
    peer_BRV = logits_BRV.clone().requires_grad_()
    all_BRV = (peer_BRV / 0.7).log_softmax(dim=-1)
    peer_entropy_BR = torch.distributions.Categorical(logits=peer_BRV / 0.7).entropy()
    peer_logp_BR = all_BRV.gather(-1, target_BR[..., None])[..., 0]
    ((peer_logp_BR + 0.3 * peer_entropy_BR) * weight_BR).sum().backward()
    assert ours_BRV.grad is not None
    torch.testing.assert_close(ours_BRV.grad, peer_BRV.grad, atol=1e-6, rtol=1e-5)


def test_gradcheck_by_finite_differences() -> None:
    logits_BRV, target_BR = _case(1, 2, 6, valid=4, scale=1.0)

    def both(logits: torch.Tensor) -> list[torch.Tensor]:
        pair = token_logprobs_and_entropy(logits, target_BR, OneShard(4), temperature=0.8, with_entropy=True)
        return [part for part in pair if part is not None]

    # fp32 maths: wide steps and tolerances
    assert torch.autograd.gradcheck(
        both, (logits_BRV.double().requires_grad_(),), eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0
    )


@pytest.mark.parametrize("garbage", [1e4, INF, NAN])
def test_c15_padding_rows_take_no_part(garbage: float) -> None:
    real_BRV, target_BR = _case(2, 3, 10)
    padded_BRV = torch.cat([real_BRV, torch.full((2, 3, 6), garbage)], dim=-1).requires_grad_()
    logp_BR, entropy_BR = token_logprobs_and_entropy(
        padded_BRV, target_BR, OneShard(10), temperature=1.0, with_entropy=True
    )
    assert entropy_BR is not None
    wanted_BR = real_BRV.log_softmax(dim=-1).gather(-1, target_BR[..., None])[..., 0]
    torch.testing.assert_close(logp_BR, wanted_BR)
    torch.testing.assert_close(entropy_BR, torch.distributions.Categorical(logits=real_BRV).entropy())
    (logp_BR + entropy_BR).sum().backward()
    assert padded_BRV.grad is not None
    assert torch.equal(padded_BRV.grad[..., 10:], torch.zeros(2, 3, 6))
    assert padded_BRV.grad.isfinite().all()


def test_a_padding_target_has_no_probability() -> None:
    logits_BRV = torch.zeros(1, 1, 4)
    logp_BR = token_logprobs(logits_BRV, torch.tensor([[3]]), OneShard(3), temperature=1.0)
    assert logp_BR.tolist() == [[-INF]]


@pytest.mark.parametrize(
    ("rows", "valid", "shards"),
    [(12, 12, 2), (12, 10, 2), (12, 5, 2), (12, 7, 3), (256, 40, 2)],  # some shards are padding alone
)
def test_c15_shards_equal_one_shard_forward_and_backward(rows: int, valid: int, shards: int) -> None:
    logits_BRV, target_BR = _case(3, 4, rows, valid=valid)
    weight_BR = _case(3, 4, 1)[0][..., 0]

    def run(part_BRV: torch.Tensor, reduce: VocabReduce) -> Result:
        part_BRV = part_BRV.clone().requires_grad_()
        logp_BR, entropy_BR = token_logprobs_and_entropy(
            part_BRV, target_BR, reduce, temperature=0.9, with_entropy=True
        )
        assert entropy_BR is not None
        ((logp_BR + entropy_BR) * weight_BR).sum().backward()
        assert part_BRV.grad is not None
        return logp_BR.detach(), entropy_BR.detach(), part_BRV.grad

    whole = run(logits_BRV, OneShard(valid))
    results = _on_shards(logits_BRV, valid, shards, run)
    for result in results:
        torch.testing.assert_close(result[0], whole[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(result[1], whole[1], atol=1e-5, rtol=0)
    gradient_BRV = torch.cat([result[2] for result in results], dim=-1)
    torch.testing.assert_close(gradient_BRV, whole[2], atol=1e-5, rtol=0)


def test_large_logits_do_not_overflow() -> None:
    logits_BRV = torch.tensor([[[1e4, 1e4, -1e4]]])
    logp_BR = token_logprobs(logits_BRV, torch.tensor([[1]]), OneShard(3), temperature=0.5)
    assert float(logp_BR) == pytest.approx(-0.6931472, abs=1e-6)
    assert float(entropy(logits_BRV, OneShard(3), temperature=0.5)) == pytest.approx(0.6931472, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_treated_in_fp32(dtype: torch.dtype) -> None:
    logits_BRV, target_BR = _case(2, 3, 50)
    logits_BRV = logits_BRV.to(dtype)
    logp_BR = token_logprobs(logits_BRV, target_BR, OneShard(50), temperature=0.7)
    exact_BRV = (logits_BRV.double() / 0.7).log_softmax(dim=-1)
    assert logp_BR.dtype == torch.float32
    wanted_BR = exact_BRV.gather(-1, target_BR[..., None])[..., 0].float()
    torch.testing.assert_close(logp_BR, wanted_BR, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -0.1, NAN])
def test_c7_temperature_must_be_positive(temperature: float) -> None:
    logits_BRV, target_BR = _case(1, 1, 4)
    with pytest.raises(ValueError, match="temperature="):
        token_logprobs(logits_BRV, target_BR, OneShard(4), temperature=temperature)
    with pytest.raises(ValueError, match="temperature="):
        entropy(logits_BRV, OneShard(4), temperature=temperature)
