"""Everything of the policy that one rank holds: its stage, engine, boundaries, sampler; and how it is put together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.backends.data_link import DataLink
from megatron_grpo.backends.deepspeed.engine import PolicyEngine
from megatron_grpo.backends.deepspeed.runtime import cut_at_once, deepspeed_runtime
from megatron_grpo.backends.huggingface import load_hf_config
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.decode import Cross, LeanStage
from megatron_grpo.backends.megatron.in_process import InProcessLink
from megatron_grpo.backends.megatron.model import Stage, build_stage
from megatron_grpo.backends.megatron.p2p import CodecP2PCommunicator
from megatron_grpo.backends.megatron.schedule import Link
from megatron_grpo.boundary.build import DTYPES
from megatron_grpo.boundary.crossing import Boundaries, build_boundaries
from megatron_grpo.config import Config, layer_split
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.conversion.files import read_embedding
from megatron_grpo.conversion.reader import hf_source
from megatron_grpo.parallel.collectives import VocabShards
from megatron_grpo.parallel.groups import ParallelGroups, policy_world
from megatron_grpo.parallel.link import Ledger
from megatron_grpo.rollout.sampler import PipelineSampler
from megatron_grpo.training.timeline import TimedStage, Timeline


@dataclass(frozen=True, slots=True)
class Policy:
    """One rank's part of the policy. Build it with :func:`policy_runtime`."""

    stage: Stage
    engine: PolicyEngine
    link: Link
    ledger: Ledger
    sampler: PipelineSampler
    lean: LeanStage
    vocab: VocabShards
    groups: ParallelGroups
    device: torch.device

    @property
    def shape(self) -> ModelShape:
        return self.stage.shape

    @property
    def boundaries(self) -> Boundaries:
        return self.link.boundaries


@contextmanager
def policy_runtime(
    cfg: Config,
    groups: ParallelGroups,
    settings: dict[str, Any],
    device: torch.device,
    timeline: Timeline | None = None,
) -> Iterator[Policy]:
    """Build this rank's part of the policy; engines' globals are put right for the block and restored after.

    Collective: every policy rank. ``settings`` is the resolved DeepSpeed JSON.
    """
    with ExitStack() as stack:
        stack.enter_context(megatron_runtime(device))
        stack.enter_context(policy_world(groups))
        stack.enter_context(deepspeed_runtime(groups))
        model_dir = Path(cfg.model.path)
        shape = model_shape(load_hf_config(model_dir))
        with hf_source(model_dir, shape) as source:
            stage = build_stage(
                source,
                shape,
                groups,
                split=tuple(layer_split(shape.layers, groups.layout.pipeline)),
                dtype=DTYPES[cfg.model.dtype],
                recompute=cfg.model.recompute,
                device=device,
                compress_tensor_link="tensor" in cfg.boundary.links,
                settle=cut_at_once(groups, settings),
            )
        ledger = Ledger()
        link, lean = build_link(cfg, stage, groups, ledger)
        engine = PolicyEngine(
            stage.module,
            groups,
            settings,
            cfg.optim,
            tied_copy=_tied_copy(stage, groups),
            data_link=_data_link(cfg, stage, groups, ledger),
        )
        sampler = PipelineSampler(
            lean if timeline is None else TimedStage(lean, timeline),
            link,
            groups,
            stages=cfg.parallel.pipeline,
            in_flight=cfg.in_flight,
            micro_batches=cfg.sampling_micro_batches,
            ledger=ledger,
            device=device,
        )
        vocab = VocabShards(groups.tensor, stage.vocab_start, shape.vocab)
        yield Policy(stage, engine, link, ledger, sampler, lean, vocab, groups, device)


def build_link(cfg: Config, stage: Stage, groups: ParallelGroups, ledger: Ledger) -> tuple[Link, LeanStage]:
    """The boundaries of this rank under the trainer's schedule, and the sampler's stage between them."""
    stages, here = cfg.parallel.pipeline, groups.at.pipeline
    together = cfg.parallel.placement == "one_process"
    tensor_link = stage.tensor_link
    boundary = cfg.boundary_at_work
    boundaries = build_boundaries(
        boundary,
        stages=stages,
        stage=None if together else here,
        hidden=stage.shape.hidden,
        seed=cfg.train.seed,
        embedding_VH=(
            read_embedding(Path(cfg.model.path), stage.shape) if boundary.prediction != "none" and stages > 1 else None
        ),
        layers=None if tensor_link is None else stage.layers,
    )
    if tensor_link is not None:
        tensor_link.connect(boundaries, ledger)
    if together:
        return _joined(InProcessLink(boundaries, ledger), stage, cfg)
    link = CodecP2PCommunicator(
        groups.pipeline,
        stage.module.config,
        boundaries=boundaries,
        stage=here,
        ledger=ledger,
        tp_group=groups.tensor,
        tensor_link=tensor_link,
    )
    return link, LeanStage(stage)


def _data_link(cfg: Config, stage: Stage, groups: ParallelGroups, ledger: Ledger) -> DataLink | None:
    """What averages gradients over replicas, where that link is compressed."""
    if "data" not in cfg.boundary.links:
        return None
    return DataLink(cfg.boundary, dict(stage.module.named_parameters()), groups.data, ledger, cfg.train.seed)


def _joined(link: InProcessLink, stage: Stage, cfg: Config) -> tuple[InProcessLink, LeanStage]:
    """Boundaries inside one module, for the trainer and for the sampler."""
    ends = accumulate(layer_split(stage.shape.layers, cfg.parallel.pipeline))
    cuts = {end - 1: index for index, end in enumerate(ends) if end < stage.shape.layers}
    link.install(stage.module, cuts)

    def crossing(index: int) -> Cross:
        return lambda x_NH, rows: link.cross_rows(index, "forward", x_NH, rows, link.boundaries.current)

    return link, LeanStage(stage, {layer: crossing(index) for layer, index in cuts.items()})


def _tied_copy(stage: Stage, groups: ParallelGroups) -> torch.nn.Parameter | None:
    """The last stage's copy of a tied embedding: the first stage counts it."""
    if not stage.shape.tied or groups.is_first_stage or not groups.is_last_stage:
        return None
    parameter: torch.nn.Parameter = stage.module.shared_embedding_or_output_weight()
    return parameter
