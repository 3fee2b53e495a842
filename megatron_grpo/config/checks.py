"""Combinations that cannot work, found before any rank starts. Reads small files only."""

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from math import ceil, floor, gcd
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .engine import conflicts, read_settings
from .errors import ConfigError
from .files import data_errors, tokenizer_size, weight_errors
from .problems import TABLES, reward_name
from .root import Config
from .sections import DIRECTIONS, BoundaryConfig, GrpoConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_config(config: Config, *, sizes_alone: bool = False) -> list[str]:
    """Every combination error as ``key=value: why; remedy``; empty when the run can start.

    Args:
        sizes_alone: do without the model's weights and tokenizer, as a plan can.
    """
    errors = [
        *_placement(config),
        *_links(config),
        *_send_once(config),
        *_geometry(config),
        *_importance(config.grpo),
        *_rewards(config),
        *_idle(config),
        *_circuit(config),
        *_shared_basis(config),
        *_payloads(config.boundary),
        *_engine(config),
        *data_errors(config.data),
        *_logging(config),
    ]
    try:
        model = read_model(config)
    except ConfigError as error:
        return [str(error), *errors]
    files = [] if sizes_alone else [*weight_errors(Path(config.model.path)), *_tokenizer(config, model)]
    return [*files, *_model(config, model), *errors]


def read_model(config: Config) -> dict[str, Any]:
    """The model's Hugging Face ``config.json``. Errors: ConfigError when it is missing or lacks the sizes."""
    file = Path(config.model.path) / "config.json"
    key = f"model.path={config.model.path}"
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{key}: has no config.json; give a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: config.json cannot be read ({error}); correct it") from error
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if not isinstance(model, dict) or not all(type(model.get(name)) is int for name in names):
        if isinstance(model, dict) and model.get("architectures"):
            for unknown in _architecture(key, model):
                raise ConfigError(unknown)
        raise ConfigError(f"{key}: config.json lacks one of {', '.join(names)}; give a Hugging Face model directory")
    return model


def _architecture(key: str, model: dict[str, Any]) -> Iterator[str]:
    architectures = model.get("architectures") or ["none"]
    if architectures[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        yield f"{key}: architecture {architectures[0]} is not supported in training; use one of {supported}"


def _model(config: Config, model: dict[str, Any]) -> Iterator[str]:
    yield from _architecture(f"model.path={config.model.path}", model)
    hidden, layers, boundary = model["hidden_size"], model["num_hidden_layers"], config.boundary_at_work
    codecs = {boundary.codec_of("forward"), boundary.codec_of("backward")}
    if codecs != {"identity"} and boundary.rank is not None and boundary.rank > hidden:
        yield f"boundary.rank={boundary.rank} exceeds hidden size {hidden}; use at most {hidden}"
    yield from budget_errors(boundary, hidden)
    yield from _link_ranks(config, model)
    stages = config.parallel.pipeline
    if stages > layers:
        yield f"parallel.pipeline={stages} exceeds the model's {layers} layers; use at most {layers}"
    yield from _tensor(config.parallel.tensor, model)
    positions = model.get("max_position_embeddings")
    longest = config.data.max_prompt + config.rollout.max_response
    if positions is not None and longest > positions:
        response, prompt = config.rollout.max_response, config.data.max_prompt
        yield (
            f"rollout.max_response={response}: with data.max_prompt={prompt} makes {longest} tokens and the "
            f"model has {positions} positions; use at most {positions} for both together"
        )


LEAST_BITS = 0.1
"""A number, on average, for token_waterfill: one row in ten at one bit a number."""


def budget_errors(boundary: BoundaryConfig, hidden: int) -> Iterator[str]:
    """Budgets that rows of that width cannot take.

    A waterfilled row has 16 bits of scale, and then 1 bit to 8 bits a channel: the sizes of ``ops.transform``.
    """
    by_tokens = {
        f"{side}_budget": boundary.budget_of(side)
        for side in DIRECTIONS
        if boundary.codec_of(side) == "token_waterfill"
    }
    for name, share in {**by_tokens, "anchor_budget": boundary.anchor_budget}.items():
        if share is not None and share < LEAST_BITS / 16:
            yield (
                f"boundary.{name}={share}: a row of token_waterfill takes a bit to say whether it is sent, and "
                f"its codes; use at least {ceil(1e4 * LEAST_BITS / 16) / 1e4}"
            )
    for side in DIRECTIONS:
        budget = boundary.budget_of(side)
        bits = floor(budget * 16 * hidden + 1e-6) - 16
        if boundary.packed(side) and boundary.payload_of(side) == "waterfill" and not 1 <= bits <= 8 * hidden:
            least, most = ceil(17e4 / (16 * hidden)) / 1e4, floor(1e4 * (0.5 + 1 / hidden)) / 1e4
            yield (
                f"boundary.{side}_budget={budget}: rows of hidden size {hidden} take a share from {least} to {most} "
                "with payload waterfill; use one between them, or another payload"
            )


def _tensor(tensor: int, model: dict[str, Any]) -> Iterator[str]:
    """Every tensor rank holds whole heads and whole key/value groups."""
    heads = model["num_attention_heads"]
    groups, width = model.get("num_key_value_heads") or heads, model["intermediate_size"]
    if any(count % tensor for count in (heads, groups, width)):
        fits = [size for size in range(1, groups + 1) if not any(count % size for count in (heads, groups, width))]
        yield (
            f"parallel.tensor={tensor}: must divide {heads} attention heads, {groups} key/value groups and "
            f"{width} feed-forward columns; use {_either(fits)}"
        )


def _placement(config: Config) -> Iterator[str]:
    if config.parallel.placement == "ranks":
        return
    for key in ("tensor", "data"):
        size = getattr(config.parallel, key)
        if size > 1:
            yield f"parallel.{key}={size}: one process holds one replica whole; use 1, or parallel.placement=ranks"
    if config.model.recompute:
        yield (
            "model.recompute=true: would cross the boundaries twice inside one process; "
            "use false, or parallel.placement=ranks"
        )


def _send_once(config: Config) -> Iterator[str]:
    boundary, path = config.boundary, config.rollout.path
    if boundary.send_once == "delta" and path != "dense":
        yield (
            f"boundary.send_once=delta: is the difference from rows that crossed uncompressed, and "
            f"rollout.path={path} may code them; use rollout.path=dense, or send_once=reuse"
        )
    if boundary.send_once == "off" or path != "dense":
        return
    at_work = {"forward_codec": "identity", "predict": "none", "shared_basis": False}
    if boundary.forward_codec is None:  # as a file that a run wrote has one, and a budget beside it
        at_work |= {"forward_budget": None}
    for key, value in at_work.items():
        given = getattr(boundary, key)
        if given not in (None, value):
            yield (
                f"boundary.{key}={given}: does nothing without rollout.path=codec or auto: with send_once="
                f"{boundary.send_once} rows cross forward in sampling alone; leave it out"
            )


def _links(config: Config) -> Iterator[str]:
    """Links that are to be compressed and are not there, or cannot be."""
    boundary, parallel = config.boundary, config.parallel
    named = f"boundary.links=[{', '.join(boundary.links)}]"
    for link, size in (("tensor", parallel.tensor), ("data", parallel.data)):
        if link in boundary.links and parallel.placement == "one_process":
            yield f"{named}: one process has no {link} link; leave {link} out, or use parallel.placement=ranks"
        elif link in boundary.links and size == 1:
            yield f"{named}: parallel.{link}=1 makes no {link} link; leave {link} out, or use parallel.{link}=2 or more"
    if "pipeline" not in boundary.links:
        for name in ("codec", "forward_codec", "backward_codec"):
            value = getattr(boundary, name)
            if value not in (None, "identity"):
                yield f"boundary.{name}={value}: is the pipeline's, which {named} lacks; leave it out, or add pipeline"
    if "data" not in boundary.links:
        return
    if config.anchor.enabled and config.merger.kind == "delayed_ef":
        yield (
            "merger.kind=delayed_ef: adds what compression took from a gradient, and so does the data link's error "
            f"feedback ({named}): it would count twice; use merger.kind=signed_ema or none, or leave data out of links"
        )
    if boundary.gradient_warmup >= config.ticks:
        yield (
            f"boundary.data_warmup={boundary.gradient_warmup}: the run has {config.ticks} ticks, none of which would "
            f"cross the data link compressed; use at most {config.ticks - 1}, or leave data out of links"
        )
    with suppress(ConfigError):  # _engine reports it
        stage = read_settings(config).get("zero_optimization", {}).get("stage", 0)
        if stage > 1:
            yield (
                f"{named}: ZeRO {stage} cuts gradients up before anyone has one whole; use "
                "deepspeed.config=deepspeed_configs/zero1.json (or zero0), or leave data out"
            )


def _link_ranks(config: Config, model: dict[str, Any]) -> Iterator[str]:
    """Ranks that the model is too small for."""
    boundary, hidden, tensor = config.boundary, model["hidden_size"], config.parallel.tensor
    if "tensor" in boundary.links and boundary.tensor_rank_of(hidden) > hidden:
        yield f"boundary.tensor_rank={boundary.tensor_rank} exceeds hidden size {hidden}; use at most {hidden}"
    if "data" in boundary.links:
        widths = [rows // tensor for rows in (model["vocab_size"], 2 * model["intermediate_size"])]
        most = max((width * hidden - 1) // (2 * (width + hidden)) for width in widths)
        if boundary.gradient_rank > most:
            yield (
                f"boundary.data_rank={boundary.gradient_rank}: halves the bytes of no weight matrix of this model; "
                f"use at most {most}, or leave data out of links"
            )


def _geometry(config: Config) -> Iterator[str]:
    grpo, data, micro = config.grpo, config.parallel.data, config.train.micro_batch
    shares = data * grpo.minibatches
    if grpo.prompts_per_step % shares:
        fills = micro // gcd(micro, grpo.group_size)  # groups that make whole micro-batches
        near = _nearest_multiples(grpo.prompts_per_step, shares * fills)
        yield (
            f"grpo.prompts_per_step={grpo.prompts_per_step}: whole groups cannot be dealt to {shares} shares "
            f"(parallel.data={data} x grpo.minibatches={grpo.minibatches}); use {_either(near)}"
        )
    elif config.rows_per_minibatch % micro:
        rows = config.rows_per_minibatch
        near = _nearest_divisors(micro, rows)
        yield (
            f"train.micro_batch={micro}: does not divide the {rows} sequences of one minibatch on one rank; "
            f"use {_either(near)}"
        )
    stages = config.pipeline_ranks
    if config.in_flight < stages:
        yield f"rollout.in_flight={config.in_flight} leaves stages idle; use at least {stages}"
    if config.sampling_micro_batches < config.in_flight:
        yield (
            f"rollout.micro_batches={config.rollout.micro_batches}: are fewer than the {config.in_flight} in flight; "
            f"use at least {config.in_flight}"
        )


def _importance(grpo: GrpoConfig) -> Iterator[str]:
    if grpo.is_cap is not None and grpo.is_floor > grpo.is_cap:
        yield f"grpo.is_floor={grpo.is_floor}: is above grpo.is_cap={grpo.is_cap}; use at most {grpo.is_cap}"


def _rewards(config: Config) -> Iterator[str]:
    reward, limit = config.reward, config.rollout.max_response
    if reward.overlong_buffer > limit:
        yield (
            f"reward.overlong_buffer={reward.overlong_buffer}: is longer than a response, "
            f"rollout.max_response={limit}; use at most {limit}"
        )
    for kind in reward.weighted:
        if kind in ("math", "gsm8k", "choice") and any(source.task == "chain_sum" for source in config.data.sources):
            yield f"reward.kind={kind}: answers of data.task=chain_sum have no #### or box; use exact"
    names = [reward_name(kind) for kind in reward.weighted]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"reward.weights: {name} are several, which the metrics would mix; give their folders different names"


def _idle(config: Config) -> Iterator[str]:
    """Keys that say something which nothing would heed."""
    grpo, reward, data = config.grpo, config.reward, config.data
    boundary = config.boundary
    links = boundary.links
    chosen = ("backward_budget",) if boundary.budgets_itself else ()
    crosses = config.parallel.pipeline > 1 and "pipeline" in links
    task = "" if data.mix else data.task  # a mixture's entries have settings of their own
    made, rows = task.startswith("reasoning_gym:"), task in TABLES
    tables = any(source.val_path or source.val_split for source in data.sources)
    idle: tuple[tuple[str, BaseModel, tuple[str, ...], bool, str], ...] = (
        ("grpo", grpo, ("is_floor", "is_correction"), grpo.is_cap is not None, "grpo.is_cap"),
        ("grpo", grpo, ("resample_rounds",), grpo.dead_groups == "resample", "grpo.dead_groups=resample"),
        ("reward", reward, ("overlong_weight",), reward.overlong_buffer > 0, "reward.overlong_buffer"),
        ("reward", reward, ("flexible",), "gsm8k" in reward.weighted, "the reward gsm8k"),
        ("reward", reward, ("kind",), not reward.weights, "an empty reward.weights, which names the rewards"),
        ("data", data, ("task", "path"), not data.mix, "an empty data.mix, whose entries name the tasks"),
        ("data", data, ("terms",), task == "chain_sum", "data.task=chain_sum"),
        ("data", data, ("options",), made, "data.task=reasoning_gym:NAME"),
        ("data", data, ("prompt_template",), made or rows, "a data.task that asks questions"),
        ("data", data, ("rows", "question_key", "answer_key", "val_path"), rows, "rows of a table"),
        ("data", data, ("split", "val_split"), task == "folder", "data.task=folder"),
        ("data", data, ("val_rows",), tables, "data.val_path or val_split"),
        ("boundary", boundary, ("send_once", *chosen), config.parallel.pipeline > 1, "parallel.pipeline=2 or more"),
        ("boundary", boundary, ("cache_place", "cache_gib"), boundary.send_once != "off", "boundary.send_once"),
        ("boundary", boundary, ("delta_tolerance", "delta_budget"), boundary.send_once == "delta", "send_once=delta"),
        ("boundary", boundary, ("backward_cosine", "backward_check"), boundary.budgets_itself, "backward_budget=auto"),
        ("boundary", boundary, ("anchor_budget",), crosses and config.anchor.enabled, "an anchor between stages"),
        ("boundary", boundary, ("tensor_rank",), "tensor" in links, "tensor in boundary.links"),
        ("boundary", boundary, ("data_rank", "data_warmup"), "data" in links, "data in boundary.links"),
    )
    for name, section, keys, heeded, needed in idle:
        for key in keys:
            value = getattr(section, key)
            if not heeded and value != type(section).model_fields[key].default:
                yield f"{name}.{key}={value}: does nothing without {needed}; leave it out"


def _nearest_multiples(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def _nearest_divisors(value: int, number: int) -> list[int]:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return [
        *[size for size in divisors if size < value][-1:],
        *[size for size in divisors if size > value][:1],
    ]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


def _circuit(config: Config) -> Iterator[str]:
    """The anchor feeds the basis and the merger."""
    if config.boundary.commit == "tick" and config.boundary.basis != "anchor":
        yield (
            f"boundary.commit=tick: basis={config.boundary.basis} changes between steps alone; "
            "use boundary.basis=anchor, or commit=step"
        )
    if config.anchor.enabled:
        yield from _signs(config)
        yield from _coded_anchor(config)
        return
    boundary = config.boundary_at_work
    learns = "lowrank" in (boundary.codec_of("forward"), boundary.codec_of("backward")) or "tensor" in boundary.links
    if boundary.basis == "anchor" and learns and boundary.dense_every == 0:
        yield (
            "boundary.basis=anchor: is never refreshed with anchor.enabled=false; use boundary.basis=self or random, "
            "boundary.dense_every, or anchor.enabled=true"
        )


def _signs(config: Config) -> Iterator[str]:
    """Signs alone have no size: no correction, running mean or cosine can be made of them."""
    merger, beta = config.merger, config.anchor.beta
    if not merger.packed_signs:
        return
    if merger.kind != "signed_ema":
        yield (
            f"merger.packed_signs=true: merger.kind={merger.kind} does not use signs alone; "
            "use merger.kind=signed_ema or packed_signs=false"
        )
    if beta != 0.0:
        yield (
            f"merger.packed_signs=true: with anchor.beta={beta} M is a running mean, which one bit cannot hold; "
            "set anchor.beta=0.0 or packed_signs=false"
        )
    if merger.gate == "cosine":
        yield "merger.packed_signs=true: signs alone have no cosine; use merger.gate=agreement, or packed_signs=false"


def _coded_anchor(config: Config) -> Iterator[str]:
    """What an anchor's gradients must not lose."""
    named = f"boundary.anchor_budget={config.boundary.anchor_budget}"
    if config.boundary.anchor_budget is None:
        return
    if config.merger.kind != "signed_ema":
        yield (
            f"{named}: keeps the signs of M, and merger.kind={config.merger.kind} does not use signs alone; "
            "use merger.kind=signed_ema, or leave it out"
        )
    if config.boundary.basis == "anchor":
        yield (
            f"{named}: boundary.basis=anchor is fitted to what anchors send uncompressed; use boundary.basis=self or "
            "random, or leave it out"
        )


def _shared_basis(config: Config) -> Iterator[str]:
    boundary = config.boundary
    if not boundary.shared_basis:
        return
    if {boundary.codec_of("forward"), boundary.codec_of("backward")} != {"lowrank"}:
        yield (
            "boundary.shared_basis=true: needs the lowrank codec in both directions; "
            "set boundary.codec=lowrank, or shared_basis=false"
        )
    elif boundary.packed("forward") or boundary.packed("backward"):
        yield (
            "boundary.shared_basis=true: packed payloads fit each direction on its own; "
            "set boundary.payload=bfloat16, or shared_basis=false"
        )


def _shorthands(boundary: BoundaryConfig) -> Iterator[str]:
    for name in ("codec", "payload", "budget"):
        value = getattr(boundary, name)
        both = [getattr(boundary, f"{side}_{name}") for side in DIRECTIONS]
        if value is not None and None not in both and any(other != value for other in both):
            yield (
                f"boundary.{name}={value}: has no effect beside forward_{name}={both[0]} and "
                f"backward_{name}={both[1]}; set these two, or leave them null"
            )


def _payloads(boundary: BoundaryConfig) -> Iterator[str]:
    """What a payload asks of its codec."""
    yield from _shorthands(boundary)
    if boundary.codec_of("forward") == "token_waterfill":
        yield (
            "boundary.forward_codec=token_waterfill: shares bits out over a micro-batch, and activations must code "
            "alike token by token; use it as boundary.backward_codec"
        )
    for side in DIRECTIONS:
        codec, payload = boundary.codec_of(side), boundary.payload_of(side)
        if codec in ("identity", "mask") and payload not in ("float32", "bfloat16"):
            yield (
                f"boundary.{side}_payload={payload}: {codec} sends numbers as they are; use float32 or bfloat16, "
                f"or boundary.{side}_codec=lowrank"
            )
    backward, payload = boundary.codec_of("backward"), boundary.payload_of("backward")
    if boundary.budgets_itself and backward != "token_waterfill":
        yield (
            f"boundary.backward_budget=auto: is chosen for token_waterfill, and {backward} is another codec; "
            "use boundary.backward_codec=token_waterfill, or a number"
        )
    rounds = backward == "token_waterfill" or (boundary.packed("backward") and payload != "waterfill")
    if boundary.rounding == "stochastic" and not rounds:
        yield (
            f"boundary.rounding=stochastic: {backward} in {payload} is not rounded at random; "
            "use boundary.backward_codec=token_waterfill, or rounding=nearest"
        )
    if boundary.prediction != "none" and not boundary.packed("forward"):
        yield (
            f"boundary.predict={boundary.predict}: needs a packed forward payload; "
            "use boundary.forward_payload=waterfill (or int8, int4, int3), or predict=none"
        )


def _engine(config: Config) -> list[str]:
    try:
        errors = conflicts(config, read_settings(config))
    except ConfigError as error:
        return [str(error)]
    if config.rollout.gather != "auto" and config.zero_stage < 3:
        errors.append(
            f"rollout.gather={config.rollout.gather}: does nothing below ZeRO 3, and deepspeed.config="
            f"{config.deepspeed.config} has stage {config.zero_stage}; leave it out"
        )
    if config.model.dtype == "bfloat16" and config.zero_stage == 0:
        errors.append(
            "model.dtype=bfloat16: ZeRO 0 keeps no float32 masters, so that small updates are lost; "
            "use deepspeed_configs/zero1.json, or model.dtype=float32"
        )
    return errors


def _tokenizer(config: Config, model: dict[str, Any]) -> Iterator[str]:
    folder = Path(config.tokenizer.path or config.model.path)
    try:
        size = tokenizer_size(folder)
    except ConfigError as error:
        yield str(error)
        return
    if size > model["vocab_size"]:
        yield (
            f"tokenizer.path={folder}: has {size} tokens but the model's vocabulary {model['vocab_size']}; "
            "use the tokenizer that the model was trained with"
        )


def _logging(config: Config) -> Iterator[str]:
    if config.logging.wandb and find_spec("wandb") is None:
        yield "logging.wandb=true: wandb is not installed; install megatron-grpo[wandb] or set it to false"
