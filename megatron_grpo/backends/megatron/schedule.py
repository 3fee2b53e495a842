"""One pass of micro-batches through the pipeline, on Megatron's own schedules.

Legend: S sequence, B micro-batch, V vocabulary shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)

from megatron_grpo.backends.megatron.in_process import InProcessLink
from megatron_grpo.backends.megatron.model import Stage
from megatron_grpo.backends.megatron.p2p import CodecP2PCommunicator
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.parallel.collectives import sum_over


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What every stage needs of a micro-batch.

    Attributes:
        tokens_BS: int64 ids, prompts padded on the left, responses on the right.
        masked_B1SS: bool, True where attention must not look.
        payload: what the last stage's function needs beside the logits.
    """

    tokens_BS: torch.Tensor
    masked_B1SS: torch.Tensor
    payload: Any = None


LossFunction = Callable[[torch.Tensor, ModelInput], tuple[torch.Tensor, Any]]
"""(logits [B, S, V], micro-batch) -> (this micro-batch's share of the loss, anything to collect). Last stage only."""

Link = CodecP2PCommunicator | InProcessLink

ReadFunction = Callable[[torch.Tensor, ModelInput], Any]


def forward_backward(
    stage: Stage,
    link: Link,
    inputs: Sequence[ModelInput],
    plan: Pass,
    loss: LossFunction,
    scale: float,
) -> list[Any]:
    """Forward and backward of every micro-batch; gradients add up in ``.grad``. Collective over the pipeline.

    The loss of a pass is the *sum* of what ``loss`` returns, times ``scale``, for any number of micro-batches:
    Megatron's division by their number is undone here.

    Returns:
        What ``loss`` collected, in order, on the last stage; empty elsewhere.
    """

    def summed(logits: torch.Tensor, batch: ModelInput) -> tuple[torch.Tensor, Any]:
        value, collected = loss(logits, batch)
        return value * (scale * len(inputs)), collected

    return _run(stage, link, inputs, plan, summed, forward_only=False)


def forward_only(stage: Stage, link: Link, inputs: Sequence[ModelInput], plan: Pass, read: ReadFunction) -> list[Any]:
    """Forward of every micro-batch without gradients; ``read`` sees the logits on the last stage. Collective."""
    with torch.no_grad():
        return _run(stage, link, inputs, plan, read, forward_only=True)


def _run(
    stage: Stage,
    link: Link,
    inputs: Sequence[ModelInput],
    plan: Pass,
    function: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    batch, sequence = inputs[0].tokens_BS.shape
    assert all(micro.tokens_BS.shape == (batch, sequence) for micro in inputs), (
        "micro-batches of one pass have one shape"
    )

    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro: ModelInput = next(iterator)
        output = model(micro.tokens_BS, None, micro.masked_B1SS)
        return output, lambda logits, non_loss_data=False: function(logits, micro)

    pipelined = stage.collection.pp.size() > 1
    schedule = forward_backward_pipelining_without_interleaving if pipelined else forward_backward_no_pipelining
    with link.boundaries.running(plan):
        results: list[Any] = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(inputs),
            model=stage.module,
            num_microbatches=len(inputs),
            seq_length=sequence,
            micro_batch_size=batch,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=link,
            pg_collection=stage.collection,
        )
    return results


def finish_gradients(stage: Stage, embedding: dist.ProcessGroup | None) -> None:
    """Sums that cross stages and tensor ranks, after the last backward. Collective: every rank of the replica.

    Tied embeddings: both copies get the sum of their gradients, so that they stay equal. Query/key norms under tensor
    parallelism: each rank saw its own heads only.
    """
    if stage.shape.tied and embedding is not None and embedding.size() > 1:
        gradient = stage.module.shared_embedding_or_output_weight().grad
        sum_over(gradient, embedding)
    if stage.shape.qk_norm and stage.collection.tp.size() > 1:
        for name, parameter in stage.module.named_parameters():
            if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                sum_over(parameter.grad, stage.collection.tp)
