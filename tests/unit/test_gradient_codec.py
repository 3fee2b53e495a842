"""PowerSGD on one matrix: against a slow reference over replicas, and at its edges (cases H1, H4)."""

import numpy as np
import torch

from megatron_grpo.boundary.gradients import GradientCodec
from megatron_grpo.ops.lowrank import random_basis

M, N, R, REPLICAS = 12, 7, 3, 3


def codecs(rank: int = R) -> list[GradientCodec]:
    return [GradientCodec(torch.Size([M, N]), rank, seed=4) for _ in range(REPLICAS)]


def tick(replicas: list[GradientCodec], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each replica uses, the two means taken as ranks would; it is used where it is finite."""
    left = torch.stack([codec.left(grad) for codec, grad in zip(replicas, grads, strict=True)]).mean(0)
    right = torch.stack([codec.right(left) for codec in replicas]).mean(0)
    decoded = [codec.decode(right) for codec in replicas]
    for codec in replicas:
        codec.settle(used=bool(decoded[0].isfinite().all()))
    return decoded


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(M, N, generator=generator) for _ in range(REPLICAS)]


def test_three_ticks_are_those_of_the_paper() -> None:
    """Algorithm 1 of Vogels et al. with the error feedback of algorithm 2, in float64 by hand."""
    q = random_basis(N, R, 4).double().numpy()
    lost = [np.zeros((M, N)) for _ in range(REPLICAS)]
    replicas = codecs()
    for seed in range(3):
        grads = gradients(seed)
        wanted = [grad.double().numpy() + e for grad, e in zip(grads, lost, strict=True)]
        p, _ = np.linalg.qr(sum(w @ q for w in wanted))
        q = sum(w.T @ p for w in wanted) / REPLICAS
        lost = [w - p @ q.T for w in wanted]
        for decoded in tick(replicas, grads):
            np.testing.assert_allclose(decoded.numpy(), p @ q.T, rtol=1e-4, atol=1e-5)


def test_full_rank_is_the_mean_and_loses_nothing() -> None:
    replicas = codecs(N)
    grads = gradients(0)
    mean = torch.stack(grads).mean(0)
    for decoded in tick(replicas, grads):
        torch.testing.assert_close(decoded, mean, rtol=1e-4, atol=1e-5)
    # Each remembers what the mean lacks of its own gradient; over the replicas that is nothing.
    assert torch.stack([codec.state_dict()["lost"] for codec in replicas]).sum(0).abs().max() < 1e-5


def test_zeros_decode_to_zeros_and_leave_the_basis_as_it_was() -> None:
    replicas = codecs()
    tick(replicas, gradients(0))
    fresh = codecs()
    before = fresh[0].state_dict()["q"]
    for decoded in tick(fresh, [torch.zeros(M, N)] * REPLICAS):
        assert torch.equal(decoded, torch.zeros(M, N))
    assert torch.equal(fresh[0].state_dict()["q"], before)
    assert tick(fresh, gradients(1))[0].norm() > 0


def test_a_rank_above_the_true_one_is_finite_and_exact() -> None:
    outer = torch.outer(torch.arange(1.0, M + 1), torch.linspace(-1, 1, N))
    for decoded in tick(codecs(), [outer, 2 * outer, 3 * outer]):
        torch.testing.assert_close(decoded, 2 * outer, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_not_finite_is_seen_and_forgotten() -> None:
    replicas = codecs()
    tick(replicas, gradients(0))
    before = [codec.state_dict() for codec in replicas]
    bad = gradients(1)
    bad[1][3, 2] = float("nan")
    assert not any(bool(decoded.isfinite().all()) for decoded in tick(replicas, bad))
    for codec, state in zip(replicas, before, strict=True):
        assert all(torch.equal(codec.state_dict()[key], state[key]) for key in ("q", "lost"))
    assert all(bool(decoded.isfinite().all()) for decoded in tick(replicas, gradients(2)))


def test_a_finite_gradient_that_is_not_used_changes_nothing() -> None:
    """As where another matrix of the model made the tick void: the next tick is the one after the last that counted."""
    replicas, others = codecs(), codecs()
    for some in (replicas, others):
        tick(some, gradients(0))
    left = torch.stack([codec.left(grad) for codec, grad in zip(replicas, gradients(1), strict=True)]).mean(0)
    right = torch.stack([codec.right(left) for codec in replicas]).mean(0)
    for codec in replicas:
        codec.decode(right)
        codec.settle(used=False)
    for mine, theirs in zip(tick(replicas, gradients(2)), tick(others, gradients(2)), strict=True):
        assert torch.equal(mine, theirs)
