"""Where a rank stands in (pipeline, data, tensor), and the process groups it belongs to.

Groups are built here by hand, not by Megatron's ``parallel_state``: that module cannot split a world which the policy
does not fill, and the groups are arguments everywhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place: pipeline stage, data-parallel replica, tensor-parallel shard."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a world. Tensor ranks are neighbours (one node), pipeline stages are furthest apart.

    rank = (pipeline * data_size + data) * tensor_size + tensor
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def rank_of(self, at: Coordinates) -> int:
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def coordinates(self, rank: int) -> Coordinates:
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline, data, tensor)

    def tensor_groups(self) -> list[list[int]]:
        return [
            [self.rank_of(Coordinates(p, d, t)) for t in range(self.tensor)]
            for p in range(self.pipeline)
            for d in range(self.data)
        ]

    def pipeline_groups(self) -> list[list[int]]:
        return [
            [self.rank_of(Coordinates(p, d, t)) for p in range(self.pipeline)]
            for d in range(self.data)
            for t in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        return [
            [self.rank_of(Coordinates(p, d, t)) for d in range(self.data)]
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def model_groups(self) -> list[list[int]]:
        """One replica each: its tensor x pipeline ranks."""
        return [
            [self.rank_of(Coordinates(p, d, t)) for p in range(self.pipeline) for t in range(self.tensor)]
            for d in range(self.data)
        ]

    def embedding_groups(self) -> list[list[int]]:
        """First and last stage of every pipeline: the two owners of a tied embedding."""
        return [sorted({ranks[0], ranks[-1]}) for ranks in self.pipeline_groups()]


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The process groups of this rank.

    ``embedding`` joins the first and last stage; stages between have none. ``alone`` holds this rank only (Megatron's
    context-parallel group). ``feedback`` is the pipeline once more, for the sampler's token ids: on NCCL two directions
    over one communicator could wait for each other.
    """

    layout: Layout
    rank: int
    at: Coordinates
    tensor: Group
    pipeline: Group
    feedback: Group
    data: Group
    model: Group
    embedding: Group | None
    alone: Group
    timeout_s: float

    @property
    def is_first_stage(self) -> bool:
        return self.at.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pipeline == self.layout.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this pipeline's last stage."""
        return self.layout.rank_of(Coordinates(self.layout.pipeline - 1, self.at.data, self.at.tensor))


def build_groups(layout: Layout, timeout_s: float) -> ParallelGroups:
    """Create every group of ``layout``. Collective: every rank of the world, in the same order.

    Args:
        timeout_s: seconds after which a link that does not answer is an error.

    Raises:
        ValueError: the world has another size than the layout.
    """
    world = dist.get_world_size()
    if world != layout.world_size:
        raise ValueError(f"the layout needs {layout.world_size} ranks, the world has {world}")
    rank = dist.get_rank()

    def among(partition: list[list[int]]) -> Group | None:
        made = {tuple(ranks): dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in partition}
        return next((group for ranks, group in made.items() if rank in ranks), None)

    def mine(partition: list[list[int]]) -> Group:
        group = among(partition)
        assert group is not None, "the partition covers the world"
        return group

    return ParallelGroups(
        layout=layout,
        rank=rank,
        at=layout.coordinates(rank),
        tensor=mine(layout.tensor_groups()),
        pipeline=mine(layout.pipeline_groups()),
        feedback=mine(layout.pipeline_groups()),
        data=mine(layout.data_groups()),
        model=mine(layout.model_groups()),
        embedding=among(layout.embedding_groups()),
        alone=mine([[r] for r in range(world)]),
        timeout_s=timeout_s,
    )


@contextmanager
def one_process() -> Iterator[ParallelGroups]:
    """A world of this process alone, for the length of the block."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it and leaves it out of __all__
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield build_groups(Layout(), timeout_s=60.0)
    finally:
        dist.destroy_process_group()
