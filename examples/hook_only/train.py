"""An ordinary Megatron-core training script with a compressed pipeline boundary.

Everything here is Megatron's own: its parallel state, GPTModel, 1F1B schedule, and a torch optimizer. What this package
adds is marked ``# +``: three lines that make the communicator, and the two arguments that hand it to the schedule.
Start it with one rank a stage, on GPUs or without:

    DS_ACCELERATOR=cpu deepspeed --num_gpus 2 examples/hook_only/train.py
    torchrun --nproc_per_node 2 examples/hook_only/train.py

Legend: B micro-batch, S sequence.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.megatron.p2p import CodecP2PCommunicator
from megatron_grpo.boundary.crossing import Pass, build_boundaries
from megatron_grpo.config import BoundaryConfig
from megatron_grpo.parallel.link import Ledger, byte_metrics

VOCAB, HIDDEN, LAYERS = 128, 64, 4
MICRO_BATCHES, BATCH, SEQUENCE = 4, 8, 32
SEED = 0
BOUNDARY = BoundaryConfig(codec="lowrank", rank=8, payload="bfloat16")


def build_model(device: torch.device) -> GPTModel:
    """This rank's stage of a small GPT."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return model.to(device)


def random_data(device: torch.device) -> list[torch.Tensor]:
    """Micro-batches ``[B, S + 1]`` of random ids, the same on every rank and in every step: something to memorise."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (MICRO_BATCHES, BATCH, SEQUENCE + 1)
    return list(torch.randint(VOCAB, shape, generator=generator).to(device))


def forward_step(iterator: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's forward-step function: next-token loss on the last stage."""
    tokens = next(iterator)
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    output = model(tokens[:, :-1], None, later)

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        # A copy: the schedule divides the loss by the number of micro-batches in place.
        return value, {"loss": value.detach().clone()}

    return output, loss


def train(steps: int, refresh_every: int) -> list[dict[str, float]]:
    """Train in an initialised world, every rank a stage. Returns loss (true on the last stage) and bytes by step.

    Args:
        refresh_every: every so many steps, from step 0 on, one goes uncompressed and the bases learn from it.
    """
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with megatron_runtime(device):  # what Megatron needs on a machine without CUDA
        return train_stage(steps, refresh_every, device)


def train_stage(steps: int, refresh_every: int, device: torch.device) -> list[dict[str, float]]:
    """The training loop of one rank, as :func:`train` says."""
    torch.manual_seed(SEED)
    model, data = build_model(device), random_data(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, stages = groups.pp.rank(), groups.pp.size()

    boundaries = build_boundaries(BOUNDARY, stages=stages, stage=stage, hidden=HIDDEN, seed=SEED)  # +
    ledger = Ledger()  # +
    link = CodecP2PCommunicator(groups.pp, model.config, boundaries=boundaries, stage=stage, ledger=ledger)  # +

    history = []
    for step in range(steps):
        observe = step % refresh_every == 0
        with boundaries.running(Pass("fast", dense=observe, observe="both" if observe else None)):
            losses = forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step,
                data_iterator=iter(data),
                model=model,
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=False,
                p2p_communicator=link,  # +
                pg_collection=groups,  # +
            )
        if observe:
            link.refresh(groups.dp)
            boundaries.commit()
        optimizer.step()
        optimizer.zero_grad()
        history.append(report(step, losses, ledger, groups, device))
    sent, dense = (sum(row[key] for row in history) for key in ("sent", "dense"))
    if stage == stages - 1:
        print(f"saved {dense - sent:,} of {dense:,} bytes ({100 * (1 - sent / dense):.1f} %)", flush=True)
    return history


def report(
    step: int,
    losses: list[dict[str, torch.Tensor]],
    ledger: Ledger,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> dict[str, float]:
    """Sum the ledgers of all ranks and print a line on the last stage. Collective."""
    counts = ledger.take().to(device)
    dist.all_reduce(counts)
    sizes = byte_metrics(counts.cpu())
    sent = sizes["boundary/bytes_fast"] + sizes["boundary/bytes_basis"]
    dense = sizes["boundary/bytes_dense_equivalent"]
    mean = torch.stack([micro["loss"] for micro in losses]).mean().item() if losses else 0.0
    if groups.pp.rank() == groups.pp.size() - 1:
        print(f"step {step:3d}  loss {mean:.4f}  sent {sent:,} of {dense:,} bytes", flush=True)
    return {"loss": mean, "sent": sent, "dense": dense}


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT over compressed pipeline boundaries.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--refresh-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher; LOCAL_RANK is used")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args.steps, args.refresh_every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
