"""One pipeline stage as a Megatron-core GPTModel, with weights from a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_grpo.backends.megatron.tensor_link import TensorLink, linked
from megatron_grpo.conversion.families import Activation, ModelShape, Positions
from megatron_grpo.conversion.files import stage_weights
from megatron_grpo.conversion.names import padded_vocab, stage_table
from megatron_grpo.conversion.sources import Source
from megatron_grpo.parallel.groups import ParallelGroups

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
Settle = Callable[[torch.nn.Parameter], None]

POSITIONS: Mapping[Positions, str] = {"rope": "rope", "learned": "learned_absolute"}


class ScoreHead(torch.nn.Module):
    """Megatron's output layer of a sequence classifier with one label: ``[S, B, H]`` to fp32 ``[S, B, 1]``.

    Whole on every tensor rank: what comes in is.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden, dtype=dtype))

    def forward(self, x_SBH: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """As Megatron calls it; its options say how a vocabulary is cut."""
        return F.linear(x_SBH.float(), self.weight.float()), None


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage of a model on this rank.

    Attributes:
        module: the GPTModel of these layers (embedding on the first stage, head on the last).
        shape: the whole model's shape.
        layers: global numbers of this stage's layers.
        split: layers of every stage.
        tensor_link: what its layers sum over, where the tensor link is compressed.
    """

    module: GPTModel
    shape: ModelShape
    layers: range
    split: tuple[int, ...]
    collection: ProcessGroupCollection
    tensor_link: TensorLink | None = None

    @property
    def vocab_start(self) -> int:
        """First vocabulary row of this tensor rank's slice of the head."""
        return self.collection.tp.rank() * (
            padded_vocab(self.shape.vocab, self.collection.tp.size()) // self.collection.tp.size()
        )


def collection_of(groups: ParallelGroups) -> ProcessGroupCollection:
    """Our groups under Megatron's names."""
    return ProcessGroupCollection(
        tp=groups.tensor,
        pp=groups.pipeline,
        mp=groups.model,
        embd=groups.embedding if groups.is_first_stage or groups.is_last_stage else None,
        pos_embd=None,
        cp=groups.alone,
        tp_cp=groups.tensor,
        ep=groups.alone,
        dp=groups.data,
        dp_cp=groups.data,
    )


def transformer_config(
    shape: ModelShape, *, tensor: int, pipeline: int, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron's config of a dense decoder: no dropout, softmax in fp32, and what the shape says."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        kv_channels=shape.head_dim,
        normalization=shape.norm,
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=shape.activation == "swiglu",
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def stage_spec(shape: ModelShape, layers: range, tensor_link: TensorLink | None = None) -> TransformerBlockSubmodules:
    """The modules of a stage of these layers.

    "RMSNorm" here means torch's norm, of the kind that the config names: by any other word Megatron would take its norm
    from whatever package is called apex.
    """
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    specs = [layer_spec if tensor_link is None else linked(layer_spec, tensor_link, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def stage_layers(split: tuple[int, ...], stage: int) -> range:
    """Global layer numbers of ``stage``."""
    return range(sum(split[:stage]), sum(split[: stage + 1]))


def build_stage(
    source: Source,
    shape: ModelShape,
    groups: ParallelGroups,
    *,
    split: tuple[int, ...],
    dtype: torch.dtype,
    recompute: bool,
    device: torch.device,
    compress_tensor_link: bool = False,
    settle: Settle = lambda parameter: None,
) -> Stage:
    """Build this rank's stage and load its weights. Call inside ``megatron_runtime``.

    The stage is built without memory and takes its parameters one by one.

    Args:
        source: holds the weights of ``shape``.
        split: layers of every stage; uneven splits are fine.
        compress_tensor_link: sums over tensor ranks go over a ``TensorLink``, which is to be connected.
        settle: called with every parameter as soon as it has its values, in the same order on all replicas.

    Raises:
        ConfigError: the tensor-parallel size does not divide the model.
    """
    tensor = groups.layout.tensor
    layers = stage_layers(split, groups.at.pipeline)
    config = transformer_config(shape, tensor=tensor, pipeline=groups.layout.pipeline, dtype=dtype, recompute=recompute)
    collection = collection_of(groups)
    scores = shape.head == "score"
    tensor_link = TensorLink(groups.tensor) if compress_tensor_link else None
    unsent = copy(collection)
    unsent.embd = None  # Megatron would send a tied embedding's copy, which is loaded here
    with torch.device("meta"):
        module = GPTModel(
            config,
            stage_spec(shape, layers, tensor_link),
            vocab_size=padded_vocab(shape.vocab, tensor),
            max_sequence_length=shape.max_positions,
            pre_process=groups.is_first_stage,
            post_process=groups.is_last_stage,
            share_embeddings_and_output_weights=shape.tied or scores,  # Megatron then makes no output weight
            position_embedding_type=POSITIONS[shape.positions],
            rotary_base=shape.rope_theta,
            pg_collection=unsent,
        )
        if scores and groups.is_last_stage:
            module.output_layer, module.share_embeddings_and_output_weights = ScoreHead(shape.hidden, dtype), False
    weights = stage_weights(
        source,
        shape,
        layers,
        first=groups.is_first_stage,
        last=groups.is_last_stage,
        tensor_rank=groups.at.tensor,
        tensor_size=tensor,
        dtype=dtype,
    )
    load_weights(module, weights, device, settle)
    mark_sharded(module, shape, layers, groups)
    return Stage(module.to(device), shape, layers, split, collection, tensor_link)


def whole_logits(stage: Stage, ids_BS: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, S, V]`` of sequences without padding. Call inside ``megatron_runtime``.

    Args:
        stage: holds every layer; where tensor ranks cut it, the result is this rank's slice of the padded vocabulary.
    """
    length = ids_BS.shape[1]
    unseen_SS = torch.ones(length, length, dtype=torch.bool, device=ids_BS.device).triu(1)[None, None]
    positions_BS = torch.arange(length, device=ids_BS.device).expand_as(ids_BS)
    logits_BSV: torch.Tensor = stage.module(ids_BS, positions_BS, unseen_SS)
    return logits_BSV[..., : stage.shape.vocab] if stage.collection.tp.size() == 1 else logits_BSV


def mark_sharded(module: torch.nn.Module, shape: ModelShape, layers: range, groups: ParallelGroups) -> None:
    """Say of each parameter whether tensor ranks hold slices of it or copies, under Megatron's name for that.

    Megatron itself says so only where it initialises weights.
    """
    parameters = dict(module.named_parameters())
    for weight in stage_table(shape, layers, first=groups.is_first_stage, last=groups.is_last_stage):
        parameters[weight.megatron].tensor_model_parallel = weight.how != "replicated"


def load_weights(
    module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device, settle: Settle
) -> None:
    """Put ``weights`` on ``device`` in place of a meta module's parameters; all must be named, and nothing else."""
    missing = {name for name, _ in module.named_parameters()}
    for name, tensor in weights:
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        empty = getattr(holder, leaf)
        assert empty.shape == tensor.shape, (name, empty.shape, tensor.shape)
        parameter = torch.nn.Parameter(tensor.to(device, empty.dtype))
        parameter.__dict__.update(empty.__dict__)  # what Megatron notes on it
        setattr(holder, leaf, parameter)
        settle(parameter)
        missing.remove(name)
    assert not missing, sorted(missing)
