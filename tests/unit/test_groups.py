"""Where ranks stand: tables by hand, and what any layout must satisfy."""

from itertools import product

import pytest

from megatron_grpo.parallel.groups import Coordinates, Layout

EVERY = [Layout(p, d, t) for p, d, t in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 4))]
PARTITIONS = ["tensor_groups", "pipeline_groups", "data_groups", "model_groups"]


def test_two_by_two_by_two_by_hand() -> None:
    """rank = (pipeline * 2 + data) * 2 + tensor."""
    layout = Layout(pipeline=2, data=2, tensor=2)
    assert layout.world_size == 8
    assert layout.coordinates(6) == Coordinates(pipeline=1, data=1, tensor=0)
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.pipeline_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.model_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.embedding_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_four_stages_by_hand() -> None:
    """Middle stages own no embedding; one stage is first and last."""
    assert Layout(pipeline=4).embedding_groups() == [[0, 3]]
    assert Layout(pipeline=4).pipeline_groups() == [[0, 1, 2, 3]]
    assert Layout(pipeline=4).data_groups() == [[0], [1], [2], [3]]
    assert Layout(tensor=2).embedding_groups() == [[0], [1]]


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_ranks_and_coordinates_are_inverse(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size == layout.pipeline * layout.data * layout.tensor
    assert [layout.rank_of(at) for at in places] == list(range(layout.world_size))


@pytest.mark.parametrize("layout", EVERY, ids=str)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_each_rank_is_in_exactly_one_group(layout: Layout, partition: str) -> None:
    groups = getattr(layout, partition)()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_a_group_varies_one_coordinate(layout: Layout) -> None:
    """Case D11: the ranks of one pipeline differ in the stage alone, those of a replica in all but ``data``."""
    for field, partition in (("tensor", "tensor_groups"), ("pipeline", "pipeline_groups"), ("data", "data_groups")):
        for group in getattr(layout, partition)():
            places = [layout.coordinates(rank) for rank in group]
            assert [getattr(at, field) for at in places] == list(range(getattr(layout, field)))
            others = {"tensor", "pipeline", "data"} - {field}
            assert all(len({getattr(at, other) for at in places}) == 1 for other in others)
    for group in layout.model_groups():
        assert len({layout.coordinates(rank).data for rank in group}) == 1
        assert len(group) == layout.pipeline * layout.tensor


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_a_reward_stage_leaves_the_ranks_before_it_as_they_are(layout: Layout) -> None:
    whole = layout.with_reward_stage()
    assert whole.world_size == layout.world_size + layout.tensor * layout.data
    for rank in range(layout.world_size):
        assert whole.coordinates(rank) == layout.coordinates(rank)


def test_each_shard_of_the_last_stage_meets_the_shard_behind_it() -> None:
    layout = Layout(pipeline=2, data=2, tensor=2)
    assert layout.reward_groups() == [[4, 8], [5, 9], [6, 10], [7, 11]]
    assert Layout().reward_groups() == [[0, 1]]
