"""The search for a backward budget, against a walk up the rungs."""

from itertools import pairwise

import pytest
import torch

from megatron_grpo.ops.budget import PROBES, RUNGS, lowest_rung

TARGETS = [0.01, 0.3, 0.5, 0.8, 0.95, 0.999]


def walked(cosines: list[float], target: float) -> float:
    for share, cosine in zip(RUNGS, cosines, strict=True):
        if cosine >= target:
            return share
    return RUNGS[-1]


def test_rungs_are_quarter_octaves_around_the_default() -> None:
    assert RUNGS[4] == 0.015 and len(RUNGS) == 16
    assert all(high / low == pytest.approx(2**0.25) for low, high in pairwise(RUNGS))


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_walk_finds(seed: int) -> None:
    """Of cosines that rise, with what the found one has; asking for four, or for the last one as well."""
    cosines = torch.rand(len(RUNGS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table = dict(zip(RUNGS, cosines.sort().values.tolist(), strict=True))
    for target in TARGETS:
        asked: list[float] = []

        def cosine_at(share: float, asked: list[float] = asked) -> float:
            asked.append(share)
            return table[share]

        share, found = lowest_rung(cosine_at, target)
        assert share == walked(list(table.values()), target) and found == table[share]
        assert len(asked) == PROBES + (share == RUNGS[-1] and share not in asked[:PROBES])
        assert len(asked) <= PROBES + 1 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("seed", range(20))
def test_a_higher_target_never_takes_less(seed: int) -> None:
    """Whatever the cosines, such as ones that noise has put out of order."""
    cosines = torch.rand(len(RUNGS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    table = dict(zip(RUNGS, cosines, strict=True))
    shares = [lowest_rung(table.__getitem__, target)[0] for target in TARGETS]
    assert shares == sorted(shares)
