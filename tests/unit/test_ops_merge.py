"""The mergers' arithmetic by hand."""

import torch

from megatron_grpo.ops.merge import agreeing, agreement_sums, delayed_ef, ema, signed_ema

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


def test_signed_ema_fades_by_hand() -> None:
    # w = 0.75 / 2 = 0.375: agree g, disagree (1 - 2w) g = 0.25 g, m zero 0.625 g
    assert signed_ema(G, M, 0.25, fade=0.5).tolist() == [2.0, -0.5, 2.5, 0.0, -8.0]


def test_up_to_weight_one_half_no_sign_is_flipped() -> None:
    g, m = torch.randn(2, 1000, generator=torch.Generator().manual_seed(5))
    for alpha, fade in ((0.5, 1.0), (0.25, 2 / 3 - 1e-6), (0.0, 0.3)):
        assert bool((signed_ema(g, m, alpha, fade) * g >= 0).all())
    assert bool((signed_ema(g, m, 0.5, 0.999)[g * m < 0] * g[g * m < 0] > 0).all())
    assert bool((signed_ema(g, m, 0.49)[g * m < 0] * g[g * m < 0] < 0).all())


def test_agreeing_by_hand() -> None:
    assert agreeing(G, M).tolist() == [True, False, False, False, True]
    assert agreeing(torch.zeros(2), torch.zeros(2)).tolist() == [False, False]


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
