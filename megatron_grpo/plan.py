"""What a run would be, as tables: ranks, layers, batches, bytes. Needs no rank, no GPU and no engine."""

from contextlib import suppress

from rich.table import Table

from megatron_grpo.config import (
    DIRECTIONS,
    BoundaryConfig,
    Config,
    ConfigError,
    Direction,
    layer_split,
    reward_name,
)
from megatron_grpo.config.checks import read_model
from megatron_grpo.config.engine import read_settings

BYTES = {"float32": 4, "bfloat16": 2}
PACKED_BITS = {"int8": 8, "int4": 4, "int3": 3}
DENSE_BYTES = 2


def plan_tables(config: Config) -> list[Table]:
    """Tables for the terminal; parts that a config error makes unknowable are left out."""
    hidden, layers = _model_size(config)
    ranks = _table("Ranks", _ranks(config, layers))
    return [ranks, _table("One step", _batch(config)), _table("Boundary", _boundary(config, hidden))]


def training_shares(config: Config, hidden: int) -> dict[str, float]:
    """Predicted bytes of a tick over its dense equivalent (forward and backward in bfloat16), by kind.

    The old-log-prob pass is one forward, half of a dense equivalent, for every minibatch but the first (whose own
    forward serves, unless a basis may change inside the step); where the codec samples, only a dense tick needs it, and
    ``rollout.path=auto`` is taken as not sampling so. The anchor is a dense pass every ``anchor.cadence``
    ticks, and ``boundary.dense_every`` makes every so-manieth tick one. What a basis costs is not in it.
    """
    boundary = config.boundary
    dense = sum(BYTES[boundary.dense_payload(side)] / DENSE_BYTES for side in DIRECTIONS) / 2
    anchor = dense / config.anchor.cadence if config.anchor.enabled else 0.0
    minibatches = config.grpo.minibatches
    passes = minibatches if boundary.commit == "tick" else minibatches - 1
    forward, backward = (crossing_share(boundary, side, hidden) / 2 for side in DIRECTIONS)
    dense_ticks = 1 / boundary.dense_every if boundary.dense_every else 0.0
    coded = 1.0 - dense_ticks
    sampled = config.rollout.path == "codec" and boundary.commit == "step"  # the sampler's log-probs are the old ones
    return {
        "fast": coded * (forward + backward) + dense_ticks * dense,
        "old log-probs": ((0.0 if sampled else coded * forward) + dense_ticks * dense / 2) * passes / minibatches,
        "anchor": anchor,
    }


def crossing_share(boundary: BoundaryConfig, side: Direction, hidden: int) -> float:
    """Bits of one row in one direction over those in bfloat16: numbers x bits, and 16 of scale if packed."""
    codec, payload = boundary.codec_of(side), boundary.payload_of(side)
    dense_bits = 8 * DENSE_BYTES * hidden
    if codec == "token_waterfill" or (codec == "lowrank" and payload == "waterfill"):
        return boundary.budget_of(side)
    numbers = hidden if codec == "identity" else boundary.rank_of(hidden)
    if codec == "lowrank" and payload in PACKED_BITS:
        return (numbers * PACKED_BITS[payload] + 8 * DENSE_BYTES) / dense_bits
    return numbers * 8 * BYTES[boundary.dense_payload(side)] / dense_bits


def _model_size(config: Config) -> tuple[int | None, int | None]:
    try:
        model = read_model(config)
    except ConfigError:
        return None, None  # check_config reports it
    return model["hidden_size"], model["num_hidden_layers"]


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", min_width=72)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _ranks(config: Config, layers: int | None) -> dict[str, str]:
    parallel = config.parallel
    stages = (
        f"(pipeline {parallel.pipeline} + reward stage)" if parallel.reward_stage else f"pipeline {parallel.pipeline}"
    )
    factors = f"tensor {parallel.tensor} x {stages} x data {parallel.data}"
    rows = {"world": f"{config.world_size} = {factors}"}
    if layers is not None:
        split = layer_split(layers, parallel.pipeline)
        rows["layers per stage"] = f"{' + '.join(map(str, split))} = {layers}"
    try:
        stage = read_settings(config).get("zero_optimization", {}).get("stage", 0)
        rows["ZeRO"] = f"stage {stage} over {parallel.data} data-parallel rank{'s'[: parallel.data != 1]}"
    except ConfigError:
        pass  # check_config reports it
    rows["model"] = f"{config.model.path} ({config.model.dtype})"
    return rows


def _batch(config: Config) -> dict[str, str]:
    grpo, rollout, data, micro = config.grpo, config.rollout, config.parallel.data, config.train.micro_batch
    sequences = config.sequences_per_step
    rows = sequences / (data * grpo.minibatches)
    return {
        "sequences": f"{sequences} = {grpo.prompts_per_step} prompts x {grpo.group_size} responses",
        "ticks": f"{grpo.minibatches} of {rows:g} sequences on each of {data} replica{'s'[: data != 1]}",
        "micro-batches": (
            f"{rows / micro:g} of {micro} a tick; {config.sampling_micro_batches} at sampling, {config.in_flight} in "
            "flight"
        ),
        "problems": ", ".join(source.task for source in config.data.sources),
        "rewards": " + ".join(f"{weight:g} {reward_name(kind)}" for kind, weight in config.reward.weighted.items()),
        "lengths": f"prompt up to {config.data.max_prompt}, response up to {rollout.max_response} tokens",
        "run": f"{config.train.steps} steps = {config.ticks} ticks",
    }


def _boundary(config: Config, hidden: int | None) -> dict[str, str]:
    boundary, anchor = config.boundary, config.anchor
    rows: dict[str, str] = {}
    for side in DIRECTIONS:
        codec = boundary.codec_of(side)
        share = "" if hidden is None else f", {crossing_share(boundary, side, hidden):.1%} of a bfloat16 crossing"
        payload = "" if codec == "token_waterfill" else f", {boundary.payload_of(side)}"
        rows[side] = f"{codec}{payload}{share}"
    rows["anchor"] = (
        f"every {anchor.cadence} ticks, {anchor.delay} old, merger {config.merger.kind}" if anchor.enabled else "off"
    )
    if hidden is not None and config.parallel.pipeline > 1:
        shares = training_shares(config, hidden)
        parts = " + ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)
        if boundary.basis == "self":
            with suppress(ValueError):  # a size that no codec takes: check_config reports it
                rows["basis"] = _own_basis(boundary, hidden)
        rows["predicted bytes"] = f"{sum(shares.values()):.1%} of the dense equivalent ({parts})"
    return rows


def _own_basis(boundary: BoundaryConfig, hidden: int) -> str:
    """What is fitted: what crosses at a refresh, what is sampled uncompressed for the first, what both ends hold."""
    import torch  # nothing else here needs it

    from megatron_grpo.boundary.build import build_codecs

    codecs = build_codecs(boundary, hidden=hidden, index=0, seed=0, embedding_VH=torch.empty(0, hidden))
    sizes = [learner.flat().nbytes for _, learner in codecs.learners()]
    if not sizes:
        return "nothing is fitted"
    text = (
        f"{sum(sizes) / 1000:.1f} kB a boundary every {boundary.refresh_steps} steps (and after 2, 4, 8 ...); "
        f"{boundary.calibration} sequences uncompressed before the first step"
    )
    return text if boundary.prediction == "none" else text + "; both ends hold the token embedding, read from the model"
