"""Everything of the policy that one rank holds: its stage, engine, boundaries, sampler; and how it is put together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.backends.deepspeed import PolicyEngine, deepspeed_runtime
from megatron_grpo.backends.huggingface import load_hf_config
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.decode import LeanStage
from megatron_grpo.backends.megatron.model import Stage, build_stage
from megatron_grpo.backends.megatron.p2p import CodecP2PCommunicator
from megatron_grpo.boundary.build import DTYPES, BoundaryCodecs, build_codecs
from megatron_grpo.config import Config, layer_split
from megatron_grpo.conversion.names import ModelShape, model_shape
from megatron_grpo.parallel.collectives import VocabShards
from megatron_grpo.parallel.groups import ParallelGroups
from megatron_grpo.parallel.link import Ledger
from megatron_grpo.rollout.sampler import PipelineSampler


@dataclass(frozen=True, slots=True)
class Policy:
    """One rank's part of the policy. Build it with :func:`policy_runtime`."""

    stage: Stage
    engine: PolicyEngine
    link: CodecP2PCommunicator
    ledger: Ledger
    sampler: PipelineSampler
    lean: LeanStage
    vocab: VocabShards
    groups: ParallelGroups
    device: torch.device

    @property
    def shape(self) -> ModelShape:
        return self.stage.shape


@contextmanager
def policy_runtime(
    cfg: Config, groups: ParallelGroups, settings: dict[str, Any], device: torch.device
) -> Iterator[Policy]:
    """Build this rank's part of the policy; engines' globals are put right for the block and restored after.

    Collective: every rank. ``settings`` is the resolved DeepSpeed JSON.
    """
    with ExitStack() as stack:
        stack.enter_context(megatron_runtime(device))
        stack.enter_context(deepspeed_runtime(groups))
        model_dir = Path(cfg.model.path)
        shape = model_shape(load_hf_config(model_dir))
        stage = build_stage(
            model_dir,
            shape,
            groups,
            split=tuple(layer_split(shape.layers, groups.layout.pipeline)),
            dtype=DTYPES[cfg.model.dtype],
            recompute=cfg.model.recompute,
            device=device,
        )
        ledger = Ledger()
        link = build_link(cfg, stage, groups, ledger)
        engine = PolicyEngine(stage.module, groups, settings, cfg.optim, tied_copy=_tied_copy(stage, groups))
        lean = LeanStage(stage)
        sampler = PipelineSampler(
            lean, link, groups, in_flight=cfg.in_flight, ledger=ledger, hidden=shape.hidden, device=device
        )
        vocab = VocabShards(groups.tensor, stage.vocab_start, shape.vocab)
        yield Policy(stage, engine, link, ledger, sampler, lean, vocab, groups, device)


def build_link(cfg: Config, stage: Stage, groups: ParallelGroups, ledger: Ledger) -> CodecP2PCommunicator:
    """The hook of this rank: codecs of the boundary before and after its stage."""

    def codecs(index: int) -> BoundaryCodecs | None:
        if not 0 <= index < groups.layout.pipeline - 1:
            return None
        return build_codecs(cfg.boundary, hidden=stage.shape.hidden, index=index, seed=cfg.train.seed)

    return CodecP2PCommunicator(
        groups.pipeline,
        stage.module.config,
        previous=codecs(groups.at.pipeline - 1),
        following=codecs(groups.at.pipeline),
        ledger=ledger,
        tp_group=groups.tensor,
    )


def _tied_copy(stage: Stage, groups: ParallelGroups) -> torch.nn.Parameter | None:
    """The last stage's copy of a tied embedding: the first stage counts it."""
    if not stage.shape.tied or groups.is_first_stage or not groups.is_last_stage:
        return None
    parameter: torch.nn.Parameter = stage.module.shared_embedding_or_output_weight()
    return parameter
