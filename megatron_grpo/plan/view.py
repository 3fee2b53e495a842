"""What a run would be, as tables: ranks, layers, batches, bytes. Needs no rank, no GPU and no engine."""

from contextlib import suppress

from rich.table import Table

from megatron_grpo.config import (
    DIRECTIONS,
    BoundaryConfig,
    Config,
    ConfigError,
    layer_split,
    reward_name,
)
from megatron_grpo.config.checks import read_model
from megatron_grpo.config.engine import read_settings

from .traffic import crossing_share, training_shares


def plan_tables(config: Config) -> list[Table]:
    """Tables for the terminal; parts that a config error makes unknowable are left out."""
    hidden, layers = _model_size(config)
    ranks = _table("Ranks", _ranks(config, layers))
    return [ranks, _table("One step", _batch(config)), _table("Boundary", _boundary(config, hidden))]


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
