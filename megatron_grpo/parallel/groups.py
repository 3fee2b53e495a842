"""Where a rank stands in (pipeline, data, tensor), and the process groups it belongs to.

Groups are built here by hand, not by Megatron's ``parallel_state``: that module cannot split a world which the policy
does not fill, and the groups are arguments everywhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Group = dist.ProcessGroup

PATIENCE = timedelta(days=365)
"""How long a reward rank waits for its next request: a run that fails closes the link."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place: pipeline stage, data-parallel replica, tensor-parallel shard."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of the policy. Tensor ranks are neighbours (one node), pipeline stages are furthest apart.

    rank = (pipeline * data_size + data) * tensor_size + tensor

    A reward stage is one stage more, at the end: the policy's ranks are the same with and without it.
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

    def with_reward_stage(self) -> "Layout":
        """The world that has a reward stage, too."""
        return replace(self, pipeline=self.pipeline + 1)

    def reward_groups(self) -> list[list[int]]:
        """Last policy stage and reward stage behind it, in a world that has one."""
        return [ranks[-2:] for ranks in self.with_reward_stage().pipeline_groups()]


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The process groups of this rank.

    ``embedding`` joins the first and last stage; stages between have none. ``alone`` holds this rank only (Megatron's
    context-parallel group). ``feedback`` is the pipeline once more, for the sampler's token ids: on NCCL two directions
    over one communicator could wait for each other.

    ``policy`` holds the ranks of all policy stages: the world, but for a reward stage. ``reward`` joins the last policy
    stage and the reward stage, tensor shard by tensor shard; on gloo, since text and ids cross it from memory to
    memory, and a reward rank may wait for them however long a step takes. A reward rank's other groups are those of a
    pipeline that it is all of; ``layout`` is the policy's on every rank.
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
    policy: Group
    reward: Group | None
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

    @property
    def reward_stage_rank(self) -> int:
        """Global rank of the reward stage behind this pipeline."""
        return self.layout.rank_of(Coordinates(self.layout.pipeline, self.at.data, self.at.tensor))

    @property
    def is_reward_stage(self) -> bool:
        return self.at.pipeline == self.layout.pipeline

    def one_stage(self) -> "ParallelGroups":
        """The tensor ranks of this stage as a whole pipeline: those of a model that is not the policy."""
        return replace(
            self,
            layout=replace(self.layout, pipeline=1),
            at=replace(self.at, pipeline=0),
            pipeline=self.alone,
            feedback=self.alone,
            model=self.tensor,
            embedding=None,
        )


def build_groups(layout: Layout, timeout_s: float, *, reward_stage: bool = False) -> ParallelGroups:
    """Create every group of ``layout``. Collective: every rank of the world, in the same order.

    Args:
        timeout_s: seconds after which a link that does not answer is an error.
        reward_stage: the world has that stage, too.

    Raises:
        ValueError: the world has another size than that.
    """
    world, whole = dist.get_world_size(), layout.with_reward_stage() if reward_stage else layout
    if world != whole.world_size:
        raise ValueError(f"the layout needs {whole.world_size} ranks, the world has {world}")
    rank = dist.get_rank()
    behind = range(layout.world_size, world)

    def among(partition: list[list[int]], **options: Any) -> Group | None:
        options = {"timeout": timedelta(seconds=timeout_s)} | options
        made = {tuple(ranks): dist.new_group(ranks, **options) for ranks in partition}
        return next((group for ranks, group in made.items() if rank in ranks), None)

    def mine(partition: list[list[int]]) -> Group:
        group = among(partition)
        assert group is not None, "the partition covers the world"
        return group

    pipelines = [*layout.pipeline_groups(), *([r] for r in behind)]
    models = [*layout.model_groups(), *(ranks for ranks in whole.tensor_groups() if ranks[0] in behind)]
    everybody = dist.group.WORLD
    assert everybody is not None, "the world is initialised"
    return ParallelGroups(
        layout=layout,
        rank=rank,
        at=layout.coordinates(rank),
        tensor=mine(whole.tensor_groups()),
        pipeline=mine(pipelines),
        feedback=mine(pipelines),
        data=mine(whole.data_groups()),
        model=mine(models),
        embedding=among(layout.embedding_groups()),
        alone=mine([[r] for r in range(world)]),
        policy=mine([list(range(layout.world_size)), list(behind)]) if reward_stage else everybody,
        reward=among(layout.reward_groups(), backend="gloo", timeout=PATIENCE) if reward_stage else None,
        timeout_s=timeout_s,
    )


@contextmanager
def policy_world(groups: ParallelGroups) -> Iterator[None]:
    """Inside the block the world is ``groups.policy``, for a library that asks for the world. Policy ranks enter it."""
    whole = dist.group.WORLD
    dist.group.WORLD = groups.policy
    try:
        yield
    finally:
        dist.group.WORLD = whole


@contextmanager
def one_process() -> Iterator[ParallelGroups]:
    """A world of this process alone, for the length of the block."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it and leaves it out of __all__
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield build_groups(Layout(), timeout_s=60.0)
    finally:
        dist.destroy_process_group()
