"""The trained policy as a Hugging Face directory."""

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_grpo.conversion.files import hf_weights, write_hf
from megatron_grpo.training.policy import Policy

StageWeights = dict[tuple[int, int], dict[str, torch.Tensor]]


def export_policy(policy: Policy, target: Path, *, source: Path, tokenizer: Path) -> None:
    """Write the policy to ``target``, with the config of ``source`` and the files of ``tokenizer``.

    Collective: every rank. Rank 0 gathers the first replica's stages; it needs room for the whole model in host memory.
    """
    groups = policy.groups
    with policy.engine.whole_parameters():
        if groups.at.data == 0:
            mine = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in policy.stage.module.named_parameters()
            }
            place = (groups.at.pipeline, groups.at.tensor)
            gathered: list[tuple[tuple[int, int], dict[str, torch.Tensor]] | None] = [None] * groups.model.size()
            dist.gather_object((place, mine), gathered if groups.rank == 0 else None, dst=0, group=groups.model)
            if groups.rank == 0:
                stages: StageWeights = dict(item for item in gathered if item is not None)
                write_hf(
                    target, hf_weights(stages, policy.shape, list(policy.stage.split)), source, tokenizer_dir=tokenizer
                )
    dist.barrier()
