"""The mergers' arithmetic by hand."""

import torch

from megatron_grpo.ops.merge import agreement_sums, delayed_ef, ema, signed_ema

G = torch.tensor([2.0, -2.0, 4.0, 0.0, -8.0])
M = torch.tensor([1.0, 3.0, 0.0, 5.0, -0.5])


def test_ema_by_hand() -> None:
    assert ema(M, G, 0.5).tolist() == [1.5, 0.5, 2.0, 2.5, -4.25]
    assert torch.equal(ema(M, G, 0.0), G)


def test_signed_ema_by_hand() -> None:
    # 0.25 g + 0.75 |g| sign(m): agree 2, disagree -0.5 + 1.5, m zero 1, g zero 0, agree -8
    assert signed_ema(G, M, 0.25).tolist() == [2.0, 1.0, 1.0, 0.0, -8.0]


def test_signed_ema_with_alpha_one_is_the_fast_gradient() -> None:
    assert torch.equal(signed_ema(G, M, 1.0), G)


def test_signed_ema_uses_the_sign_of_m_alone() -> None:
    assert torch.equal(signed_ema(G, M, 0.25), signed_ema(G, M * 1e-20, 0.25))


def test_delayed_ef_by_hand() -> None:
    assert delayed_ef(G, M, 0.5).tolist() == [2.5, -0.5, 4.0, 2.5, -8.25]
    # the anchor at the same weights and batch: G + (dense - G) is the dense gradient
    dense = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    assert torch.equal(delayed_ef(G, dense - G, 1.0), dense)


def test_agreement_sums_by_hand() -> None:
    # g m: 2 - 6 + 0 + 0 + 4; both nonzero at 0, 1 and 4, of which 0 and 4 agree
    sums = agreement_sums(G, M)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [0.0, 88.0, 35.25, 2.0, 3.0]


def test_agreement_sums_add_up_over_shards_of_any_shape() -> None:
    parts = agreement_sums(G[:2], M[:2]) + agreement_sums(G[2:].reshape(3, 1), M[2:].reshape(3, 1))
    assert torch.equal(parts, agreement_sums(G, M))


def test_agreement_sums_of_tiny_gradients_do_not_underflow() -> None:
    tiny = torch.full((4,), 1e-30)
    product = 4 * float(tiny[0].double()) ** 2
    torch.testing.assert_close(
        agreement_sums(tiny, -tiny),
        torch.tensor([-product, product, product, 0.0, 4.0], dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )
