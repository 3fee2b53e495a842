"""Sampling: filters by hand, draws against exact distributions. Legend: B sequences, V vocabulary."""

import math

import pytest
import torch

from megatron_grpo.ops.sampling import filter_logits, row_uniforms, sample

INF = math.inf
ALMOST_ONE = 1 - 2**-53


def _logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def _kept(logits_BV: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in filter_logits(logits_BV, top_k=top_k, top_p=top_p) > -INF]


def test_filters_that_are_off_change_nothing() -> None:
    logits_BV = _logits(0.5, 1e-30, 0.2, 0.3)
    assert torch.equal(filter_logits(logits_BV, top_k=0, top_p=1.0), logits_BV)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.45, [1]),
        (0, 0.55, [1, 3]),
        (0, 0.85, [0, 1, 3]),
        (0, 0.95, [0, 1, 2, 3]),
        (0, 1e-9, [1]),
        (2, 0.6, [1]),  # among the two kept the highest has 0.5 / 0.8 = 0.625
        (2, 0.65, [1, 3]),
    ],
)
def test_filters_by_hand(top_k: int, top_p: float, kept: list[int]) -> None:
    logits_BV = _logits(0.12, 0.5, 0.08, 0.3)
    filtered_BV = filter_logits(logits_BV, top_k=top_k, top_p=top_p)
    assert _kept(logits_BV, top_k=top_k, top_p=top_p) == [kept]
    assert torch.equal(filtered_BV[0, kept], logits_BV[0, kept])


def test_of_equal_logits_the_lower_ids_stay() -> None:
    logits_BV = torch.zeros(2, 6)
    assert _kept(logits_BV, top_k=3) == [[0, 1, 2]] * 2
    assert _kept(logits_BV, top_p=0.4) == [[0, 1, 2]] * 2


def test_rows_are_filtered_on_their_own() -> None:
    both_BV = torch.cat([_logits(0.9, 0.05, 0.05), _logits(0.3, 0.3, 0.4)])
    assert _kept(both_BV, top_p=0.8) == [[0], [0, 1, 2]]


def test_ids_that_are_out_stay_out() -> None:
    assert _kept(torch.tensor([[1.0, -INF, 0.0, -INF]]), top_k=4, top_p=0.999) == [[0, 2]]


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (0, 0.0), (0, 1.1), (0, -0.5), (0, math.nan)])
def test_filters_refuse_what_is_out_of_range(top_k: int, top_p: float) -> None:
    with pytest.raises(ValueError, match="top_"):
        filter_logits(torch.zeros(1, 4), top_k=top_k, top_p=top_p)


def _draw(
    logits_BV: torch.Tensor,
    uniforms: list[float],
    *,
    temperature: float | None = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    valid: int | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Draws from one row of logits, one for each uniform."""
    ids_B, logp_B = sample(
        logits_BV.expand(len(uniforms), -1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        valid=logits_BV.shape[-1] if valid is None else valid,
        uniform_B=torch.tensor(uniforms, dtype=torch.float64),
    )
    assert ids_B.dtype == torch.int64
    assert logp_B.dtype == torch.float32
    return ids_B.tolist(), logp_B


def test_a_draw_inverts_the_distribution_function() -> None:
    # the function is 0.25, 0.75, 1; dyadic probabilities leave round-off of about 1e-8 from the fp32 log
    ids, logp_B = _draw(_logits(0.25, 0.5, 0.25), [0.0, 0.24, 0.26, 0.74, 0.76, ALMOST_ONE])
    assert ids == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(logp_B.exp(), torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25, 0.25]))


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("garbage", [-INF, 1e4, INF, math.nan])
def test_c15_ids_without_probability_and_padding_never_come_out(uniform: float, garbage: float) -> None:
    logits_BV = torch.tensor([[-INF, -INF, 1.0, -INF, 2.0, -INF, -INF, garbage, garbage]])
    ids, logp_B = _draw(logits_BV, [uniform], valid=7)
    assert ids[0] in (2, 4)
    assert logp_B.isfinite().all()
    assert _draw(logits_BV, [uniform], temperature=None, valid=7)[0] == [4]
    assert _draw(logits_BV, [uniform], top_k=1, valid=7)[0] == [4]


def test_ends_of_the_uniform_give_the_first_and_last_possible_id() -> None:
    logits_BV = torch.tensor([[-INF, 0.0, 0.0, 0.0, -INF]])
    assert _draw(logits_BV, [0.0, ALMOST_ONE])[0] == [1, 3]
    assert _draw(logits_BV, [0.0, ALMOST_ONE], top_k=2)[0] == [1, 2]


def test_the_last_id_is_possible_for_sums_of_many_rounded_parts() -> None:
    for seed in range(20):
        logits_BV = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)) * 4
        logits_BV[:, 900:] = -INF
        ids, _ = _draw(logits_BV, [0.0, ALMOST_ONE])
        assert ids[0] == 0
        assert 890 < ids[1] < 900


def test_c10_logprob_is_that_of_the_drawn_id_untruncated_at_temperature() -> None:
    logits_BV = torch.tensor([[0.5, 2.0, 1.0, -1.0]])
    uniforms = [(step + 0.5) / 50 for step in range(50)]
    for options in ({}, {"top_k": 2}, {"top_p": 0.8}, {"top_k": 3, "top_p": 0.9}):
        ids, logp_B = _draw(logits_BV, uniforms, temperature=0.7, **options)
        wanted_V = (logits_BV.double() / 0.7).log_softmax(dim=-1)[0].float()
        torch.testing.assert_close(logp_B, wanted_V[ids], atol=1e-6, rtol=1e-6)
        assert len(set(ids)) > 1  # not the highest alone


def test_greedy_takes_the_lowest_of_the_highest_with_logprob_at_one() -> None:
    ids, logp_B = _draw(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [0.99], temperature=None)
    assert ids == [1]
    total = math.exp(1) + 2 * math.exp(3) + 1
    assert float(logp_B) == pytest.approx(3 - math.log(total), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature="):
        _draw(torch.zeros(1, 3), [0.5], temperature=temperature)


def test_draws_follow_the_filtered_distribution_at_temperature() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, -1.0, 1.5]])
    draws = 20_000
    uniforms_B = row_uniforms(5, torch.arange(draws), 3)
    ids_B, _ = sample(logits_BV.expand(draws, -1), temperature=1.5, top_k=4, top_p=1.0, valid=5, uniform_B=uniforms_B)
    weights = [math.exp(x / 1.5) for x in (0.0, 1.0, 2.0, -INF, 1.5)]
    expected_V = torch.tensor(weights, dtype=torch.float64) / sum(weights) * draws
    counts_V = ids_B.bincount(minlength=5).double()
    assert counts_V[3] == 0
    possible_V = expected_V > 0
    chi_square = ((counts_V - expected_V).square() / expected_V)[possible_V].sum()
    assert float(chi_square) < 16.3  # 3 degrees of freedom, 0.1 % point


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits_BV = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    uniform_B = row_uniforms(1, torch.arange(16), 0)
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "valid": 37}
    ids_B, logp_B = sample(logits_BV, uniform_B=uniform_B, **options)  # type: ignore[arg-type]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    mixed_B, _ = sample(logits_BV[order], uniform_B=uniform_B[order], **options)  # type: ignore[arg-type]
    assert torch.equal(mixed_B, ids_B[order])
    for row in range(16):
        one_B, logp_one_B = sample(
            logits_BV[row : row + 1],
            uniform_B=uniform_B[row : row + 1],
            **options,  # type: ignore[arg-type]
        )
        assert torch.equal(one_B, ids_B[row : row + 1])
        torch.testing.assert_close(logp_one_B, logp_B[row : row + 1], atol=1e-6, rtol=0)


def _uniform_by_integers(seed: int, row: int, position: int) -> float:
    """The same chain in Python's unbounded integers."""
    word, gamma = 2**64, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return z ^ (z >> 31)

    bits = mix((seed + gamma) % word)
    bits = mix((bits + row * gamma) % word)
    bits = mix((bits + position * gamma) % word)
    return (bits >> 11) / 2**53


def test_row_uniforms_are_those_of_the_integer_chain() -> None:
    rows = [0, 1, 2, 12345, 2**40 + 3, 2**63 - 1, -1]
    for seed in (0, 1, -5, 2**62 - 1, 2**64 + 7):
        for position in (0, 1, 27, 10**6):
            got = row_uniforms(seed, torch.tensor(rows), position)
            assert got.dtype == torch.float64
            assert got.tolist() == [_uniform_by_integers(seed, row, position) for row in rows]


def test_row_uniforms_first_word_is_the_published_one() -> None:
    # the first output of SplitMix64 from state 0 is 0xE220A8397B1DCDAF; row and position 0 mix it twice more
    word, z = 2**64, 0xE220A8397B1DCDAF
    for _ in range(2):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        z ^= z >> 31
    assert row_uniforms(0, torch.tensor([0]), 0).tolist() == [(z >> 11) / 2**53]


def test_row_uniforms_are_uniform_and_differ_along_every_axis() -> None:
    table = torch.stack([row_uniforms(3, torch.arange(500), position) for position in range(40)])
    values = table.flatten()
    assert len(values.unique()) == values.numel()
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    assert abs(float(values.mean()) - 0.5) < 4 * (1 / 12 / values.numel()) ** 0.5
    counts = (values * 100).long().bincount(minlength=100).double()
    expected = values.numel() / 100
    assert float((counts - expected).square().sum() / expected) < 148.2  # 99 degrees, 0.1 % point
    assert not torch.equal(row_uniforms(4, torch.arange(500), 0), table[0])


def test_row_uniforms_of_neighbours_are_uncorrelated() -> None:
    table = torch.stack([row_uniforms(seed, torch.arange(2000), position) for seed in (0, 1) for position in (0, 1)])
    centred = table - 0.5
    for first, second in ((0, 1), (0, 2), (1, 2)):
        correlation = float((centred[first] * centred[second]).mean() * 12)
        assert abs(correlation) < 4 / 2000**0.5
    assert abs(float((centred[0, 1:] * centred[0, :-1]).mean() * 12)) < 4 / 2000**0.5
