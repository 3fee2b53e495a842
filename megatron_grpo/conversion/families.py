"""What a Hugging Face config says about a model, family by family, as tables.

Supported are dense decoders that ``GPTModel`` with ``get_gpt_layer_local_spec`` (megatron-core 0.16.1) computes.
A field that changes the forward and is not expressed here is refused, never ignored; so is a field nobody here knows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_grpo.config import ConfigError

Norm = Literal["RMSNorm", "LayerNorm"]
Positions = Literal["rope", "learned"]
Activation = Literal["swiglu", "gelu_tanh"]
Head = Literal["vocabulary", "score"]
"""What a model says of a column: how likely each next token is, or one number."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Fixed:
    """A field that changes the forward.

    Attributes:
        allowed: the values expressed here; null is always one of them.
        why: what every model here does instead.
        absent: the value that transformers takes where config.json leaves the field out.
    """

    allowed: tuple[object, ...]
    why: str
    absent: object = None


FIXED_FIELDS: Mapping[str, Fixed] = {
    "pruned_heads": Fixed(({},), "every layer has all heads"),
    "is_encoder_decoder": Fixed((False,), "the model is a decoder"),
    "is_causal": Fixed((True,), "a token sees those before it alone", absent=True),
    "add_cross_attention": Fixed((False,), "the model is a decoder alone"),
    "quantization_config": Fixed((), "weights must be plain floating point"),
    "auto_map": Fixed((), "code that comes with a model is never run"),
}
LLAMA_FIXED: Mapping[str, Fixed] = {
    **FIXED_FIELDS,
    "hidden_act": Fixed(("silu",), "the MLP is SwiGLU"),
    "attention_bias": Fixed((False,), "biases exist on query, key and value only, and only where the family has them"),
    "mlp_bias": Fixed((False,), "the MLP has no biases"),
    "use_sliding_window": Fixed((False,), "every layer attends to the whole sequence"),
    "partial_rotary_factor": Fixed((1.0,), "RoPE turns the whole head"),
    "rope_interleaved": Fixed((False,), "RoPE turns halves, not neighbours"),
    "pretraining_tp": Fixed((1,), "projections are not split as in pre-training"),
}
MISTRAL_FIXED: Mapping[str, Fixed] = {
    **LLAMA_FIXED,
    "sliding_window": Fixed((None,), "every layer attends to the whole sequence", absent=4096),
}
GPT2_FIXED: Mapping[str, Fixed] = {
    **FIXED_FIELDS,
    "activation_function": Fixed(("gelu_new", "gelu_pytorch_tanh"), "the MLP has the tanh form of GELU"),
    "scale_attn_weights": Fixed((True,), "attention is scaled by the root of the head width"),
    "scale_attn_by_inverse_layer_idx": Fixed((False,), "every layer scales its attention alike"),
}
FIXED_ROPE_FIELDS: Mapping[str, Fixed] = {
    "rope_type": Fixed(("default",), "RoPE scaling is not applied"),
    "type": Fixed(("default",), "RoPE scaling is not applied"),
    "partial_rotary_factor": Fixed((1.0,), "RoPE turns the whole head"),
}
ROPE_FIELDS = frozenset(FIXED_ROPE_FIELDS) | {"rope_theta"}
DEFAULT_ROPE_THETA = 10000.0
LARGEST_SIZE = 2**24
LARGEST_NUMBER = 1e15

# Fields without a part in the forward: names, ids, initialisation, dropout, sampling, and the marks of other tools.
IDLE_FIELDS = _words(
    """
    architectures model_type name_or_path torch_dtype dtype transformers_version tokenizer_class prefix
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    initializer_range use_cache return_dict output_hidden_states output_attentions torchscript use_bfloat16
    chunk_size_feed_forward gradient_checkpointing attention_dropout hidden_dropout is_decoder
    problem_type id2label label2id finetuning_task task_specific_params tie_encoder_decoder
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    is_llama_config transformers.js_config unsloth_version unsloth_fixed tf_legacy_loss use_mrope
    """
)
LLAMA_IDLE = IDLE_FIELDS | {"rope_theta", "rope_scaling", "rope_parameters", "layer_types", "head_dim"}
QWEN_IDLE = LLAMA_IDLE | {"sliding_window", "max_window_layers"}
GPT2_IDLE = IDLE_FIELDS | _words(
    """
    n_ctx output_past resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """
)

LLAMA_SIZES: Mapping[str, str] = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
GPT2_SIZES: Mapping[str, str] = {
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "ffn": "n_inner",
    "vocab": "vocab_size",
    "positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one architecture from another; the defaults are Llama's.

    Attributes:
        sizes: the key of each size in config.json.
        fixed: fields that change the forward, with what is expressed of them.
        idle: fields without a part in the forward.
        qkv_bias: query, key and value projections have biases.
        linear_bias: all projections have biases.
        qk_norm: RMSNorm on each head's query and key.
        kv_groups: number of KV groups where config.json leaves it out; ``None`` is one per head.
        head_dim: head width where config.json leaves it out; ``None`` is hidden / heads.
        norm_eps: where config.json leaves it out; ``tied`` likewise.
        head: a ``score`` head is never tied to the embedding.
    """

    sizes: Mapping[str, str] = field(default_factory=lambda: LLAMA_SIZES)
    fixed: Mapping[str, Fixed] = field(default_factory=lambda: LLAMA_FIXED)
    idle: frozenset[str] = LLAMA_IDLE
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    kv_groups: int | None = None
    head_dim: int | None = None
    norm: Norm = "RMSNorm"
    positions: Positions = "rope"
    activation: Activation = "swiglu"
    norm_eps: float = 1e-6
    tied: bool = False
    head: Head = "vocabulary"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(fixed=MISTRAL_FIXED, kv_groups=8),
    "Qwen2ForCausalLM": Family(idle=QWEN_IDLE, qkv_bias=True, kv_groups=32),
    "Qwen3ForCausalLM": Family(idle=QWEN_IDLE, qk_norm=True, kv_groups=32, head_dim=128),
    "GPT2LMHeadModel": Family(
        sizes=GPT2_SIZES,
        fixed=GPT2_FIXED,
        idle=GPT2_IDLE,
        qkv_bias=True,
        linear_bias=True,
        norm="LayerNorm",
        positions="learned",
        activation="gelu_tanh",
        norm_eps=1e-5,
        tied=True,
    ),
}

SCORERS: Mapping[str, Family] = {
    name.replace("ForCausalLM", "ForSequenceClassification"): replace(
        family, idle=family.idle | {"num_labels"}, head="score"
    )
    for name, family in FAMILIES.items()
    if name.endswith("ForCausalLM")
}
"""Sequence classifiers over the same bodies; one with a single label is a reward model."""
DEFAULT_LABELS = 2
"""What transformers takes where config.json says nothing."""

_GEMMA = "scales its embedding by the root of the hidden size and its norms by 1 + weight"
_GEMMA3 = f"{_GEMMA}, normalises what attention and MLP return, and has a second RoPE base for its sliding windows"
# Architectures that Megatron's local layer spec cannot compute: what they do that it does not.
REFUSED: Mapping[str, str] = {
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": f"{_GEMMA}, caps logits softly, and normalises what attention and MLP return",
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


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
    linear_bias: bool
    norm: Norm
    positions: Positions
    activation: Activation
    head: Head


def scorer_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """Read the config.json of a sequence classifier with one label.

    Raises:
        ConfigError: it is another model, has several labels, or see :func:`model_shape`.
    """
    shape = model_shape(hf_config, SCORERS)
    labels = hf_config.get("num_labels") or len(hf_config.get("id2label") or range(DEFAULT_LABELS))
    if labels != 1:
        raise ConfigError(
            f"{labels} labels in config.json: a reward is one number; use a sequence classifier with num_labels=1"
        )
    return shape


def model_shape(hf_config: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES) -> ModelShape:
    """Read the content of a config.json.

    Args:
        families: the architectures that will do.

    Raises:
        ConfigError: the architecture is unknown, a size is missing or impossible, a field changes the
            forward in a way that is not expressed here, or nobody here knows what a field does.
    """
    name = _family_name(hf_config, families)
    family = families[name]
    _refuse_other_values(hf_config, family.fixed, "")
    _refuse_sliding_layers(hf_config)
    _refuse_unknown(hf_config, family)
    key = family.sizes
    hidden, heads = _size(hf_config, key["hidden"]), _size(hf_config, key["heads"])
    return ModelShape(
        family=name,
        layers=_size(hf_config, key["layers"]),
        hidden=hidden,
        heads=heads,
        kv_groups=_kv_groups(hf_config, family, heads),
        head_dim=_head_dim(hf_config, family, hidden, heads),
        ffn=_ffn(hf_config, family, hidden),
        vocab=_size(hf_config, key["vocab"]),
        norm_eps=_positive(hf_config, key["norm_eps"], family.norm_eps),
        rope_theta=_rope_theta(hf_config),
        tied=family.head == "vocabulary" and _flag(hf_config, "tie_word_embeddings", family.tied),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=_size(hf_config, key["positions"]),
        linear_bias=family.linear_bias,
        norm=family.norm,
        positions=family.positions,
        activation=family.activation,
        head=family.head,
    )


def _family_name(hf_config: Mapping[str, Any], families: Mapping[str, Family]) -> str:
    names = hf_config.get("architectures") or [None]
    if not isinstance(names, list) or not all(isinstance(name, str | None) for name in names):
        raise ConfigError(f"architectures={names!r} in config.json is not a list of names; correct it")
    if len(names) == 1 and names[0] in families:
        return str(names[0])
    why = f" (it {REFUSED[names[0]]}, which Megatron's local layer spec cannot)" if names[0] in REFUSED else ""
    raise ConfigError(
        f"architectures={hf_config.get('architectures')} in config.json is not supported{why}; use a model of "
        + ", ".join(families)
    )


def _refuse_other_values(fields: Mapping[str, Any], fixed: Mapping[str, Fixed], prefix: str) -> None:
    for key, rule in fixed.items():
        value = fields.get(key, rule.absent)
        if value is not None and value not in rule.allowed:
            usual = rule.allowed[0] if rule.allowed else None
            raise ConfigError(
                f"{prefix}{key}={value}{'' if key in fields else ' (left out)'} in config.json is not supported: "
                f"{rule.why}; use a model with {key}={'null' if usual is None else usual}"
            )


def _refuse_sliding_layers(hf_config: Mapping[str, Any]) -> None:
    kinds = hf_config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"layer_types={kinds!r} in config.json is not a list of names; correct it")
    kinds = set(kinds) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"layer_types={sorted(kinds)} in config.json is not supported: every layer attends to the whole "
            "sequence; use a model with full_attention only"
        )


def _refuse_unknown(hf_config: Mapping[str, Any], family: Family) -> None:
    """A field that is null says nothing; those of transformers' own book-keeping start with _."""
    known = family.idle | family.fixed.keys() | set(family.sizes.values()) | {"tie_word_embeddings"}
    unknown = sorted(
        key for key, value in hf_config.items() if key not in known and not key.startswith("_") and value is not None
    )
    if unknown:
        raise ConfigError(
            f"{unknown[0]}={hf_config[unknown[0]]} in config.json is not known here and may change what the model "
            "computes; remove it if it does not, or use another model"
        )


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """The RoPE base, which config.json keeps at the top (transformers 4) or inside rope_parameters (5)."""
    found = set()
    if hf_config.get("rope_theta") is not None:
        found.add(_positive(hf_config, "rope_theta", DEFAULT_ROPE_THETA))
    for place, rope in _rope_fields(hf_config):
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


def _rope_fields(hf_config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place in ("rope_parameters", "rope_scaling"):
        rope = hf_config.get(place) or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{place}={rope!r} in config.json is not a table of fields; correct it")
        yield place, rope


def _kv_groups(hf_config: Mapping[str, Any], family: Family, heads: int) -> int:
    if "kv_groups" not in family.sizes:
        return heads
    key = family.sizes["kv_groups"]
    groups = _size(hf_config, key, family.kv_groups, when_null=heads)
    if heads % groups:
        raise ConfigError(
            f"{key}={groups} does not divide {family.sizes['heads']}={heads}: every group "
            "serves as many heads; correct config.json"
        )
    return groups


def _head_dim(hf_config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    when_absent = family.head_dim or hidden // heads
    if hf_config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        remedy = "set head_dim in config.json" if "head_dim" in family.idle else "correct config.json"
        raise ConfigError(
            f"{family.sizes['hidden']}={hidden} is not a multiple of {family.sizes['heads']}={heads}; {remedy}"
        )
    head_dim = _size(hf_config, "head_dim", when_absent, when_null=when_absent)
    if head_dim % 2 and family.positions == "rope":
        raise ConfigError(f"head_dim={head_dim} in config.json is odd: RoPE turns pairs; use an even width")
    return head_dim


def _ffn(hf_config: Mapping[str, Any], family: Family, hidden: int) -> int:
    """GPT-2 leaves the width of its MLP out where it is four times the hidden size."""
    usual = 4 * hidden if family.activation == "gelu_tanh" else None
    return _size(hf_config, family.sizes["ffn"], usual, when_null=usual)


def _size(fields: Mapping[str, Any], key: str, when_absent: int | None = None, *, when_null: int | None = None) -> int:
    """A positive integer; an absent field means ``when_absent``, and a null one ``when_null``."""
    value = fields.get(key, when_absent)
    value = when_null if value is None else value
    if value is None:
        raise ConfigError(f"{key} is missing from config.json; restore the file as the model's authors published it")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise ConfigError(
            f"{key}={value!r} in config.json is not a positive whole number up to {LARGEST_SIZE}; correct it"
        )
    return value


def _flag(fields: Mapping[str, Any], key: str, when_absent: bool) -> bool:
    value = fields.get(key)
    value = when_absent if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} in config.json is neither true nor false; correct it")
    return value


def _positive(fields: Mapping[str, Any], key: str, when_absent: float) -> float:
    value = fields.get(key)
    value = when_absent if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
        raise ConfigError(f"{key}={value!r} in config.json is not a positive number; correct it")
    return float(value)
