"""What a Hugging Face config says about a model, and what its tensors are called in Megatron, as tables.

Supported are the dense decoders that share one forward: RMSNorm, SwiGLU, grouped queries, RoPE over the head.
A field that changes that forward and is not expressed here is refused, never ignored.
Megatron names are those of ``GPTModel`` with ``get_gpt_layer_local_spec`` (megatron-core 0.16.1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_grpo.config import ConfigError

How = Literal["column", "row", "replicated", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one architecture from another.

    Attributes:
        qkv_bias: query, key and value projections have biases.
        qk_norm: RMSNorm on each head's query and key.
        kv_groups: number of KV groups where config.json leaves it out; ``None`` is one per head.
        head_dim: head width where config.json leaves it out; ``None`` is hidden / heads.
    """

    qkv_bias: bool
    qk_norm: bool
    kv_groups: int | None
    head_dim: int | None


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=False, qk_norm=False, kv_groups=None, head_dim=None),
    "Qwen2ForCausalLM": Family(qkv_bias=True, qk_norm=False, kv_groups=32, head_dim=None),
    "Qwen3ForCausalLM": Family(qkv_bias=False, qk_norm=True, kv_groups=32, head_dim=128),
}

# Fields that change the forward: the one value expressed here, which is also what absence means, and why.
FIXED_FIELDS: Mapping[str, tuple[object, str]] = {
    "hidden_act": ("silu", "the MLP is SwiGLU"),
    "attention_bias": (
        False,
        "biases exist on query, key and value only, and only where the family has them",
    ),
    "mlp_bias": (False, "the MLP has no biases"),
    "use_sliding_window": (False, "every layer attends to the whole sequence"),
    "partial_rotary_factor": (1.0, "RoPE turns the whole head"),
    "pretraining_tp": (1, "projections are not split as in pre-training"),
    "quantization_config": (None, "weights must be plain floating point"),
}
FIXED_ROPE_FIELDS: Mapping[str, tuple[object, str]] = {
    "rope_type": ("default", "RoPE scaling is not applied"),
    "type": ("default", "RoPE scaling is not applied"),
    "partial_rotary_factor": (1.0, "RoPE turns the whole head"),
}
ROPE_FIELDS = frozenset(FIXED_ROPE_FIELDS) | {"rope_theta"}
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a dense decoder; ``vocab`` is the true vocabulary, without padding."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int


def model_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """Read the content of a config.json.

    Raises:
        ConfigError: the architecture is unknown, a size is missing or impossible, or a field changes the
            forward in a way that is not expressed here.
    """
    name = _family_name(hf_config)
    family = FAMILIES[name]
    _refuse_other_values(hf_config, FIXED_FIELDS, "")
    _refuse_sliding_layers(hf_config)
    hidden = _size(hf_config, "hidden_size")
    heads = _size(hf_config, "num_attention_heads")
    kv_groups = _size(hf_config, "num_key_value_heads", family.kv_groups, when_null=heads)
    if heads % kv_groups:
        raise ConfigError(
            f"num_key_value_heads={kv_groups} does not divide num_attention_heads={heads}: every group "
            "serves as many heads; correct config.json"
        )
    return ModelShape(
        family=name,
        layers=_size(hf_config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_groups=kv_groups,
        head_dim=_head_dim(hf_config, family, hidden, heads),
        ffn=_size(hf_config, "intermediate_size"),
        vocab=_size(hf_config, "vocab_size"),
        norm_eps=_positive(hf_config, "rms_norm_eps", DEFAULT_NORM_EPS),
        rope_theta=_rope_theta(hf_config),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=_size(hf_config, "max_position_embeddings"),
    )


def _family_name(hf_config: Mapping[str, Any]) -> str:
    names = hf_config.get("architectures") or [None]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ConfigError(
            f"architectures={hf_config.get('architectures')} in config.json is not supported; use a model of "
            + ", ".join(FAMILIES)
        )
    return str(names[0])


def _refuse_other_values(fields: Mapping[str, Any], fixed: Mapping[str, tuple[object, str]], prefix: str) -> None:
    for key, (allowed, why) in fixed.items():
        value = fields.get(key)
        if value is not None and value != allowed:
            raise ConfigError(
                f"{prefix}{key}={value} in config.json is not supported: {why}; use a model with {key}={allowed}"
            )


def _refuse_sliding_layers(hf_config: Mapping[str, Any]) -> None:
    kinds = set(hf_config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"layer_types={sorted(kinds)} in config.json is not supported: every layer attends to the whole "
            "sequence; use a model with full_attention only"
        )


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """The RoPE base, which config.json keeps at the top (transformers 4) or inside rope_parameters (5)."""
    found = set()
    if hf_config.get("rope_theta") is not None:
        found.add(_positive(hf_config, "rope_theta", DEFAULT_ROPE_THETA))
    for place in ("rope_parameters", "rope_scaling"):
        rope = hf_config.get(place) or {}
        _refuse_other_values(rope, FIXED_ROPE_FIELDS, f"{place}.")
        unknown = sorted(key for key, value in rope.items() if key not in ROPE_FIELDS and value is not None)
        if unknown:
            raise ConfigError(
                f"{place}.{unknown[0]}={rope[unknown[0]]} in config.json is not supported: only the base "
                "rope_theta is applied; use a model without RoPE scaling"
            )
        if rope.get("rope_theta") is not None:
            found.add(_positive(rope, "rope_theta", DEFAULT_ROPE_THETA))
    if len(found) > 1:
        raise ConfigError(f"rope_theta has several values in config.json ({sorted(found)}); keep the right one")
    return found.pop() if found else DEFAULT_ROPE_THETA


def _head_dim(hf_config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    when_absent = family.head_dim or hidden // heads
    if hf_config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; set head_dim in config.json"
        )
    head_dim = _size(hf_config, "head_dim", when_absent, when_null=when_absent)
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} in config.json is odd: RoPE turns pairs; use an even width")
    return head_dim


def _size(fields: Mapping[str, Any], key: str, when_absent: int | None = None, *, when_null: int | None = None) -> int:
    """A positive integer; an absent field means ``when_absent``, and a null one ``when_null``."""
    value = fields.get(key, when_absent)
    value = when_null if value is None else value
    if value is None:
        raise ConfigError(f"{key} is missing from config.json; restore the file as the model's authors published it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r} in config.json is not a positive whole number; correct it")
    return value


def _positive(fields: Mapping[str, Any], key: str, when_absent: float) -> float:
    value = fields.get(key)
    value = when_absent if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{key}={value!r} in config.json is not a positive number; correct it")
    return float(value)


def padded_vocab(vocab: int, tensor: int, multiple: int = 128) -> int:
    """Vocabulary rows in Megatron: the smallest multiple of ``multiple * tensor`` that holds ``vocab``."""
    block = multiple * tensor
    return -(-vocab // block) * block


def check_tensor_size(shape: ModelShape, tensor: int) -> None:
    """Refuse a tensor-parallel size that would cut a head, a KV group or a column of the MLP.

    Raises:
        ConfigError: names each size that does not divide, and the sizes that do.
    """
    sizes = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_groups,
        "intermediate_size": shape.ffn,
    }
    bad = [f"{name}={size} (remainder {size % tensor})" for name, size in sizes.items() if size % tensor]
    if bad:
        good = [n for n in range(1, shape.kv_groups + 1) if all(size % n == 0 for size in sizes.values())]
        raise ConfigError(
            f"parallel.tensor={tensor} does not divide {' and '.join(bad)} of this model; "
            f"use one of {', '.join(map(str, good))}"
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter: the Hugging Face tensors it is made of, and how tensor parallelism cuts it."""

    megatron: str
    hf: tuple[str, ...]
    how: How


def _attention_weights(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{which}_proj.{kind}" for which in "qkv")


LAYER_WEIGHTS = (
    Weight("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
    Weight("self_attention.linear_qkv.weight", _attention_weights("weight"), "qkv"),
    Weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "row"),
    Weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
    Weight("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Weight("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "row"),
)
QKV_BIAS_WEIGHTS = (Weight("self_attention.linear_qkv.bias", _attention_weights("bias"), "qkv"),)
QK_NORM_WEIGHTS = (
    Weight("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    Weight("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)
EMBEDDING = Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
HEAD = Weight("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_HEAD = Weight(HEAD.megatron, EMBEDDING.hf, "vocab")


def stage_table(shape: ModelShape, layers: range, *, first: bool, last: bool) -> Iterator[Weight]:
    """The parameters of a stage that holds the global ``layers``, numbered from 0 in Megatron.

    A tied model has its head in the embedding; where the last stage is not the first, it holds a copy of it.
    """
    if first:
        yield EMBEDDING
    per_layer = LAYER_WEIGHTS + QKV_BIAS_WEIGHTS * shape.qkv_bias + QK_NORM_WEIGHTS * shape.qk_norm
    for local, layer in enumerate(layers):
        for weight in per_layer:
            hf_names = tuple(f"model.layers.{layer}.{name}" for name in weight.hf)
            yield Weight(f"decoder.layers.{local}.{weight.megatron}", hf_names, weight.how)
    if last:
        yield FINAL_NORM
        if not shape.tied:
            yield HEAD
        elif not first:
            yield TIED_HEAD


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face directory; a tied model has no ``lm_head``."""
    queries, keys, hidden = shape.heads * shape.head_dim, shape.kv_groups * shape.head_dim, shape.hidden
    by_ending: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "q_norm.weight": (shape.head_dim,),
        "k_norm.weight": (shape.head_dim,),
        "o_proj.weight": (hidden, queries),
        "gate_proj.weight": (shape.ffn, hidden),
        "up_proj.weight": (shape.ffn, hidden),
        "down_proj.weight": (hidden, shape.ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (shape.vocab, hidden),
        "lm_head.weight": (shape.vocab, hidden),
    }
    table = stage_table(shape, range(shape.layers), first=True, last=True)
    names = (name for weight in table for name in weight.hf)
    return {name: by_ending[".".join(name.split(".")[-2:])] for name in names}
