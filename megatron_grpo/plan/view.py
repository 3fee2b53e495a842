"""The plan as tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

from megatron_grpo.config import (
    DIRECTIONS,
    BoundaryConfig,
    Config,
    ConfigError,
    holds_sizes_alone,
    layer_split,
    reward_name,
)
from megatron_grpo.config.checks import read_model

from .build import Plan
from .network import Line
from .traffic import basis_bytes, crossing_share, training_shares
from .zero import read_engine

BYTE_ROWS = {
    "fast_fwd": "fast, forward",
    "fast_bwd": "fast, backward",
    "old_logprob": "old log-probs",
    "anchor": "anchor",
    "basis": "basis",
    "rollout": "sampling",
    "ids": "sampled ids",
}
TIME_ROWS = {
    "rollout": "sampling",
    "old_logprobs": "old log-probs",
    "fast": "fast",
    "anchor": "anchor",
    "data": "gradients and weights between replicas",
    "basis": "basis",
    "optimizer": "optimizer",
}


def outline_tables(config: Config) -> list[Table]:
    """What is known of any config: parts that an error makes unknowable are left out."""
    hidden, layers = _model_size(config)
    ranks = _pairs("Ranks", _ranks(config, layers))
    return [ranks, _pairs("One step", _batch(config)), _pairs("Boundary", _boundary(config, hidden))]


def plan_tables(plan: Plan) -> list[Table]:
    """What follows from a config without errors: who is where, bytes, memory, time."""
    links = [_links(plan)] if plan.links else []
    crossing = [_bytes(plan)] if any(plan.time.bytes.values()) else []
    return [_map(plan), *links, *crossing, _memory(plan), _time(plan)]


def size_text(size: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def rate_text(line: Line) -> str:
    """The rate of a link, when a message begins to arrive, and how many pairs of ranks share it."""
    scale, unit = (1e9, "Gbit/s") if line.bit_s >= 1e9 else (1e6, "Mbit/s")
    alone = f"{line.bit_s / scale:.4g} {unit}, {1e3 * line.latency_s:g} ms"
    return alone if line.shared == 1 else f"{alone}, for {line.shared}"


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 3600:.3g} h"


def _model_size(config: Config) -> tuple[int | None, int | None]:
    try:
        model = read_model(config)
    except ConfigError:
        return None, None  # check_config reports it
    return model["hidden_size"], model["num_hidden_layers"]


def _pairs(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", min_width=72)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with a header; all columns but the first are numbers or words as they come."""
    table = Table(title=title, title_justify="left", min_width=72)
    table.add_column(columns[0], style="cyan")
    for name in columns[1:]:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
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
        stage = read_engine(config).stage
        text = f"stage {stage} over {parallel.data} data-parallel rank{'s'[: parallel.data != 1]}"
        if stage > 1 and config.pipeline_ranks > 1:
            text += " of each stage, whose gradients are reduced after Megatron's schedule, not in it"
        rows["ZeRO"] = text
    except ConfigError:
        pass  # check_config reports it
    folder = Path(config.model.path)
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    alone = "; sizes alone: train needs weights and a tokenizer, too" if holds_sizes_alone(folder) else ""
    rows["model"] = f"{here} ({config.model.dtype}){alone}"
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
    boundary, anchor = config.boundary_at_work, config.anchor
    rows: dict[str, str] = {}
    for side in DIRECTIONS:
        codec = boundary.codec_of(side)
        share = "" if hidden is None else f", {crossing_share(boundary, side, hidden):.1%} of a bfloat16 crossing"
        payload = "" if codec == "token_waterfill" else f", {boundary.payload_of(side)}"
        rows[side] = f"{codec}{payload}{share}"
    if boundary.budgets_itself:
        rows["backward"] += f" at first; auto chooses anew every {boundary.backward_check} steps, not foreseen here"
    if boundary.send_once != "off":
        rows["forward"] += ", in sampling alone" if config.rollout.path == "dense" else ", once, in sampling"
        rows["send once"] = f"{boundary.send_once}, kept on {boundary.cache_place}"
    rows["anchor"] = (
        f"every {anchor.cadence} ticks, {anchor.delay} old, merger {config.merger.kind}" if anchor.enabled else "off"
    )
    if hidden is not None and config.parallel.pipeline > 1:
        shares = training_shares(config, hidden)
        parts = " + ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)
        if boundary.basis == "self":
            rows["basis"] = _own_basis(boundary, hidden)
        rows["predicted bytes"] = f"{sum(shares.values()):.1%} of the dense equivalent ({parts})"
    return rows


def _own_basis(boundary: BoundaryConfig, hidden: int) -> str:
    """What is fitted: what crosses at a refresh, what is sampled uncompressed for the first, what both ends hold."""
    size = basis_bytes(boundary, hidden)
    if not size:
        return "nothing is fitted"
    text = (
        f"{size / 1000:.1f} kB a boundary every {boundary.refresh_steps} steps (and after 2, 4, 8 ...); "
        f"{boundary.calibration} sequences uncompressed before the first step"
    )
    return text if boundary.prediction == "none" else text + "; both ends hold the token embedding, read from the model"


def _map(plan: Plan) -> Table:
    """A line a stage: its layers, its ranks (replica by replica, each with its tensor shards) and their hosts."""
    rows = []
    for stage, size in enumerate(plan.sizes):
        ranks = plan.placement.ranks(stage)
        layers = f"{size.layers.start} to {size.layers.stop - 1}"
        rows.append((str(stage), _span(ranks), _hosts(plan, ranks), layers, f"{size.parameters / 1e6:.4g} M"))
    if plan.config.parallel.reward_stage:
        ranks = plan.placement.ranks(len(plan.sizes))
        rows.append(("reward", _span(ranks), _hosts(plan, ranks), "", ""))
    title = f"Stages of {plan.parameters:,} parameters"
    return _grid(title, ("stage", "ranks", "hosts", "layers", "parameters a rank"), rows)


def _hosts(plan: Plan, ranks: range) -> str:
    return ", ".join(dict.fromkeys(filter(None, map(plan.host_of, ranks)))) or "not given"


def _span(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"


def _links(plan: Plan) -> Table:
    rows = [
        (
            *(load.name, load.where, rate_text(load.line), load.carries),
            *(size_text(load.bytes), time_text(load.seconds), size_text(dense.bytes)),
        )
        for load, dense in zip(plan.links, plan.dense_links, strict=True)
    ]
    return _grid("Links", ("link", "where", "rate", "carries", "bytes a tick", "alone", "dense"), rows)


def _bytes(plan: Plan) -> Table:
    ticks = plan.config.grpo.minibatches
    rows = []
    for kind, name in BYTE_ROWS.items():
        own, dense = plan.time.bytes[kind] / ticks, plan.dense.bytes[kind] / ticks
        if own or dense:
            rows.append((name, size_text(own), size_text(dense)))
    own, dense = (sum(step.bytes.values()) / ticks for step in (plan.time, plan.dense))
    rows.append(("all", f"{size_text(own)}, {own / dense:.1%}" if dense else "0 B", size_text(dense)))
    if plan.by_codec is not None and dense:
        coded = sum(plan.by_codec.values()) / ticks
        rows.append(("all, if auto samples through the codec", f"{size_text(coded)}, {coded / dense:.1%}", ""))
    return _grid("Bytes a tick over all boundaries", ("kind", "this config", "dense"), rows)


def _memory(plan: Plan) -> Table:
    """A column for stages that are alike."""
    columns = [
        (list(stages), plan.memory[first])
        for first, stages in _alike([(entry.parts, entry.host, entry.disk) for entry in plan.memory])
    ]
    names = list(dict.fromkeys(name for _, entry in columns for name in entry.parts))
    rows = [(name, *(size_text(entry.parts.get(name, 0.0)) for _, entry in columns)) for name in names]
    rows.append(("most at once", *(size_text(entry.peak) for _, entry in columns)))
    for where, sizes in (
        ("on the host", [entry.host for _, entry in columns]),
        ("on disk", [entry.disk for _, entry in columns]),
    ):
        moved = dict.fromkeys(name for of_stage in sizes for name in of_stage)
        rows += [(f"{name}, {where}", *(size_text(of_stage.get(name, 0.0)) for of_stage in sizes)) for name in moved]
    heads = [f"stage {a[0]}" if len(a) == 1 else f"stages {a[0]} to {a[-1]}" for a, _ in columns]
    return _grid("Memory of a rank, at the longest lengths", ("part", *heads), rows)


def _alike(entries: Sequence[object]) -> Iterable[tuple[int, list[int]]]:
    """Runs of neighbours that are equal: the first of each, and all of them."""
    for _, run in groupby(range(len(entries)), key=lambda index: entries[index]):
        numbers = list(run)
        yield numbers[0], numbers


def _time(plan: Plan) -> Table:
    own, dense = plan.time, plan.dense
    rows = [
        (name, time_text(own.parts[key]), time_text(dense.parts[key]))
        for key, name in TIME_ROWS.items()
        if own.parts[key] or dense.parts[key]
    ]
    rows += [
        ("a step", f"{time_text(own.total)}, {dense.total / own.total:.3g} times faster", time_text(dense.total)),
        ("with perfect links", time_text(own.compute), time_text(dense.compute)),
        ("on the wire", f"{own.wire / own.total:.0%}", f"{dense.wire / dense.total:.0%}"),
        ("the run", time_text(own.total * plan.config.train.steps), time_text(dense.total * plan.config.train.steps)),
    ]
    speed = f"{plan.device.flop_s / 1e12:g} TFLOP/s"
    return _grid(f"Predicted time of a step, {speed} a rank", ("part", "this config", "dense"), rows)
