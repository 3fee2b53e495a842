"""How a stage whose weights ZeRO 3 has cut over the replicas comes by them for sampling."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

from megatron_grpo.backends.memory import free_bytes
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.training.policy import Policy

SHARE_OF_FREE = 0.5
"""Of the memory that is free, for whole weights and the KV cache; the rest is for what a forward allocates."""


def weights_for_sampling(
    policy: Policy, mode: Literal["auto", "once", "layer"], *, sequences: int, columns: int
) -> AbstractContextManager[None]:
    """The stage's weights for the length of a rollout; below ZeRO 3 they are there. Collective: the data group.

    Args:
        mode: ``rollout.gather``.
        sequences: in flight at a time.
        columns: of the longest sequence.
    """
    engine = policy.engine
    if engine.zero_stage < 3:
        return engine.whole_parameters()
    if mode == "auto":
        needed = engine.whole_bytes() + policy.lean.cache_bytes(sequences, columns)
        lacking = torch.tensor(int(needed > SHARE_OF_FREE * free_bytes(policy.device)), device=policy.device)
        mode = "layer" if bool(sum_over(lacking, policy.groups.data)) else "once"
    if mode == "once":
        return engine.whole_parameters()
    return policy.lean.by_layer(engine.whole_parameters, policy.groups.data)
