"""What the tensors of a model are called in Megatron and in Hugging Face directories, as tables.

Megatron names are those of ``GPTModel`` with ``get_gpt_layer_local_spec`` (megatron-core 0.16.1).
Legend of dimensions: 1 one, A queries, keys and values together, D head width, F feed-forward, H hidden, K keys (KV
groups x D), P positions, Q queries (heads x D), V vocabulary.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import FAMILIES, SCORERS, ModelShape

How = Literal["column", "row", "replicated", "qkv", "gate_up", "vocab"]


def padded_vocab(vocab: int, tensor: int, multiple: int = 128) -> int:
    """Vocabulary rows in Megatron: the smallest multiple of ``multiple * tensor`` that holds ``vocab``."""
    block = multiple * tensor
    return -(-vocab // block) * block


def check_tensor_size(shape: ModelShape, tensor: int, option: str = "parallel.tensor") -> None:
    """Refuse a tensor-parallel size that would cut a head, a KV group or a column of the MLP.

    Args:
        option: what the user calls the size.

    Raises:
        ConfigError: names each size that does not divide, and the sizes that do.
    """
    key = {**FAMILIES, **SCORERS}[shape.family].sizes
    sizes = {key["heads"]: shape.heads, key["ffn"]: shape.ffn}
    if "kv_groups" in key:
        sizes[key["kv_groups"]] = shape.kv_groups
    bad = [f"{name}={size} (remainder {size % tensor})" for name, size in sizes.items() if size % tensor]
    if bad:
        good = [n for n in range(1, shape.kv_groups + 1) if all(size % n == 0 for size in sizes.values())]
        raise ConfigError(
            f"{option}={tensor} does not divide {' and '.join(bad)} of this model; use one of "
            f"{', '.join(map(str, good))}"
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter.

    Attributes:
        megatron: its name in the layer or, out of ``stage_table``, in the stage.
        hf: the Hugging Face tensors it is made of; a single one for ``qkv`` is query over key over value.
        dims: the dimensions of each of them.
        how: how tensor parallelism cuts it.
        transposed: Hugging Face keeps the matrix as ``[in, out]``.
        layer: number of its layer in the whole model; ``None`` outside the layers.
    """

    megatron: str
    hf: tuple[str, ...]
    dims: tuple[str, ...]
    how: How
    transposed: bool = False
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The parameters of an architecture; ``{}`` in a Hugging Face name is the number of the layer.

    Attributes:
        prefix: begins every Hugging Face name but the head's, and is left out where only the body was saved.
    """

    embedding: tuple[Weight, ...]
    layer: tuple[Weight, ...]
    final: tuple[Weight, ...]
    head: Weight
    prefix: str


def _weight(megatron: str, hf: str, dims: str, how: How, *, transposed: bool = False) -> Weight:
    return Weight(megatron, tuple(hf.split()), tuple(dims.split()), how, transposed)


def _llama_qkv(kind: str, dims: str) -> Weight:
    names = " ".join(f"model.layers.{{}}.self_attn.{which}_proj.{kind}" for which in "qkv")
    return _weight(f"self_attention.linear_qkv.{kind}", names, dims, "qkv")


_L = "model.layers.{}"
LLAMA_LAYER = (
    _weight("input_layernorm.weight", f"{_L}.input_layernorm.weight", "H", "replicated"),
    _llama_qkv("weight", "QH KH KH"),
    _weight("self_attention.linear_proj.weight", f"{_L}.self_attn.o_proj.weight", "HQ", "row"),
    _weight("pre_mlp_layernorm.weight", f"{_L}.post_attention_layernorm.weight", "H", "replicated"),
    _weight("mlp.linear_fc1.weight", f"{_L}.mlp.gate_proj.weight {_L}.mlp.up_proj.weight", "FH FH", "gate_up"),
    _weight("mlp.linear_fc2.weight", f"{_L}.mlp.down_proj.weight", "HF", "row"),
)
QKV_BIAS = (_llama_qkv("bias", "Q K K"),)
QK_NORM = (
    _weight("self_attention.q_layernorm.weight", f"{_L}.self_attn.q_norm.weight", "D", "replicated"),
    _weight("self_attention.k_layernorm.weight", f"{_L}.self_attn.k_norm.weight", "D", "replicated"),
)
LLAMA = Table(
    embedding=(_weight("embedding.word_embeddings.weight", "model.embed_tokens.weight", "VH", "vocab"),),
    layer=LLAMA_LAYER,
    final=(_weight("decoder.final_layernorm.weight", "model.norm.weight", "H", "replicated"),),
    head=_weight("output_layer.weight", "lm_head.weight", "VH", "vocab"),
    prefix="model.",
)

_T = "transformer.h.{}"
GPT2 = Table(
    embedding=(
        _weight("embedding.word_embeddings.weight", "transformer.wte.weight", "VH", "vocab"),
        _weight("embedding.position_embeddings.weight", "transformer.wpe.weight", "PH", "replicated"),
    ),
    layer=(
        _weight("input_layernorm.weight", f"{_T}.ln_1.weight", "H", "replicated"),
        _weight("input_layernorm.bias", f"{_T}.ln_1.bias", "H", "replicated"),
        _weight("self_attention.linear_qkv.weight", f"{_T}.attn.c_attn.weight", "HA", "qkv", transposed=True),
        _weight("self_attention.linear_qkv.bias", f"{_T}.attn.c_attn.bias", "A", "qkv"),
        _weight("self_attention.linear_proj.weight", f"{_T}.attn.c_proj.weight", "QH", "row", transposed=True),
        _weight("self_attention.linear_proj.bias", f"{_T}.attn.c_proj.bias", "H", "replicated"),
        _weight("pre_mlp_layernorm.weight", f"{_T}.ln_2.weight", "H", "replicated"),
        _weight("pre_mlp_layernorm.bias", f"{_T}.ln_2.bias", "H", "replicated"),
        _weight("mlp.linear_fc1.weight", f"{_T}.mlp.c_fc.weight", "HF", "column", transposed=True),
        _weight("mlp.linear_fc1.bias", f"{_T}.mlp.c_fc.bias", "F", "column"),
        _weight("mlp.linear_fc2.weight", f"{_T}.mlp.c_proj.weight", "FH", "row", transposed=True),
        _weight("mlp.linear_fc2.bias", f"{_T}.mlp.c_proj.bias", "H", "replicated"),
    ),
    final=(
        _weight("decoder.final_layernorm.weight", "transformer.ln_f.weight", "H", "replicated"),
        _weight("decoder.final_layernorm.bias", "transformer.ln_f.bias", "H", "replicated"),
    ),
    head=LLAMA.head,
    prefix="transformer.",
)

TABLES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": replace(LLAMA, layer=LLAMA_LAYER + QKV_BIAS),
    "Qwen3ForCausalLM": replace(LLAMA, layer=LLAMA_LAYER + QK_NORM),
    "GPT2LMHeadModel": GPT2,
}
SCORE_HEAD = _weight("output_layer.weight", "score.weight", "1H", "replicated")
TABLES |= {
    name: replace(TABLES[name.replace("ForSequenceClassification", "ForCausalLM")], head=SCORE_HEAD) for name in SCORERS
}
# Buffers that old exports carry; they follow from the config.
DERIVED_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def embedding_name(shape: ModelShape) -> str:
    """The word embedding in a Hugging Face directory."""
    return TABLES[shape.family].embedding[0].hf[0]


def head_name(shape: ModelShape) -> str:
    """The head in a Hugging Face directory; a tied model need not have it."""
    return TABLES[shape.family].head.hf[0]


def stage_table(shape: ModelShape, layers: range, *, first: bool, last: bool) -> Iterator[Weight]:
    """The parameters of a stage that holds the global ``layers``, numbered from 0 in Megatron.

    A tied model has its head in the embedding; where the last stage is not the first, it holds a copy of it.
    """
    table = TABLES[shape.family]
    if first:
        yield from table.embedding
    for local, layer in enumerate(layers):
        for weight in table.layer:
            yield replace(
                weight,
                megatron=f"decoder.layers.{local}.{weight.megatron}",
                hf=tuple(name.format(layer) for name in weight.hf),
                layer=layer,
            )
    if last:
        yield from table.final
        if not shape.tied:
            yield table.head
        elif not first:
            yield replace(table.head, hf=table.embedding[0].hf)


def model_table(shape: ModelShape) -> Iterator[Weight]:
    """The parameters of the model on one stage: Megatron's names with the global numbers of layers."""
    return stage_table(shape, range(shape.layers), first=True, last=True)


def global_name(weight: Weight) -> str:
    """The Megatron name of a stage's ``weight`` where the layers of the whole model are numbered through."""
    return re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{weight.layer}.", weight.megatron)


def stored_name(shape: ModelShape, weight: Weight) -> str:
    """Under which name of :func:`model_table` a stage's ``weight`` is found: a tied head is the embedding."""
    tied_copy = shape.tied and weight.megatron == TABLES[shape.family].head.megatron
    return TABLES[shape.family].embedding[0].megatron if tied_copy else global_name(weight)


def part_shapes(shape: ModelShape, weight: Weight) -> tuple[tuple[int, ...], ...]:
    """The shapes of ``weight.hf``."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_groups * shape.head_dim
    size = {
        "1": 1,
        "A": queries + 2 * keys,
        "D": shape.head_dim,
        "F": shape.ffn,
        "H": shape.hidden,
        "K": keys,
        "P": shape.max_positions,
        "Q": queries,
        "V": shape.vocab,
    }
    return tuple(tuple(size[dim] for dim in dims) for dims in weight.dims)


def megatron_shape(shape: ModelShape, weight: Weight) -> tuple[int, ...]:
    """The shape of the whole Megatron tensor, before it is padded and cut."""
    parts = [part[::-1] if weight.transposed else part for part in part_shapes(shape, weight)]
    return (sum(part[0] for part in parts), *parts[0][1:])


def slice_shape(shape: ModelShape, weight: Weight, tensor: int) -> tuple[int, ...]:
    """The shape of each tensor rank's slice of the Megatron tensor, vocabulary padding included."""
    sizes = list(megatron_shape(shape, weight))
    if weight.how == "vocab":
        sizes[0] = padded_vocab(shape.vocab, tensor)
    if weight.how != "replicated":
        sizes[1 if weight.how == "row" else 0] //= tensor
    return tuple(sizes)


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face directory; a tied model has no ``lm_head``."""
    return {
        name: part
        for weight in model_table(shape)
        for name, part in zip(weight.hf, part_shapes(shape, weight), strict=True)
    }
