"""The command around :func:`~megatron_grpo.bench.gap.run_gap`: options in, progress, tables, JSON and figure out."""

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_grpo.bench.gap import GapSettings, pieces_of_work, run_gap
from megatron_grpo.bench.output import SCREEN, check_folder, plain_table, write_json
from megatron_grpo.config import ConfigError

Number = TypeVar("Number", int, float)

KEYS = {
    "model": "the directory",
    "layers": "of the model",
    "hidden": "width of a boundary row",
    "after": "layers (counted from 1) with a boundary behind them",
    "settings": "what was measured on, see GapSettings",
    "tokens/fit": "rows that cross a boundary, in the texts fitted on",
    "tokens/test": "rows that cross a boundary, in the texts measured on",
    "tokens/test_response": "sampled tokens, over which gaps are taken",
    "spectra": "a list, one entry a boundary",
    "spectra/forward/rank90": "directions that hold 90 % of the energy of the activations",
    "spectra/forward/rank90_centred_unit_rows": "the same with rows of norm 1 less their mean",
    "spectra/forward/tokens90": "share of the tokens that holds 90 % of the energy",
    "spectra/backward/rank90": "as forward, of the gradients",
    "spectra/backward/tokens90": "as forward, of the gradients",
    "forward": "a list: codecs of activations, at all boundaries at once",
    "forward/codec": "its name",
    "forward/share": "byte share asked for; null where a codec has but one size",
    "forward/bytes": "bytes sent as a share of the same rows in bfloat16",
    "forward/error": "norm(row - decoded) / norm(row) over all rows, a list by boundary",
    "forward/error_median": "the median of that over the rows, a list by boundary",
    "forward/gap_median": "median |log-prob coded - dense| over response tokens, nats",
    "forward/gap_mean": "mean of the same",
    "forward/kl": "mean KL(dense, coded) over response tokens, nats",
    "forward/rollout_gap_median": "median |trainer - sampler| log-prob where both go through the codec, nats",
    "forward/rollout_gap_mean": "mean of the same; round-off that moves a number to another code shows here",
    "limits": "a list: the linear Gaussian codec at its rate-distortion limit",
    "limits/predict": "none, or embedding+previous",
    "limits/share": "of the bits of a bfloat16 crossing",
    "limits/gap_median": "as forward",
    "limits/gap_mean": "as forward",
    "limits/kl": "as forward",
    "backward": "a list: codecs of activation gradients, at all boundaries at once",
    "backward/codec": "as forward",
    "backward/share": "as forward",
    "backward/bytes": "as forward",
    "backward/error": "as forward",
    "backward/error_median": "as forward",
    "backward/cosine": "of each stage's gradient with the dense one (its decoder layers as one vector), a list",
    "backward/norm_ratio": "of the same two gradients, coded over dense",
    "seconds": "the whole measurement",
}
"""The keys of the JSON object, nested ones joined by a slash. What is not finite is null."""


def bench_gap(
    model_dir: Path,
    boundaries: int,
    shares: str,
    *,
    after: str | None = None,
    settings: GapSettings | None = None,
    device: str = "auto",
    json_file: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Measure, and write tables to stdout, or JSON where ``json_file`` is ``-``; progress goes to stderr.

    Raises:
        ConfigError: an option that cannot be read or does not fit the model.
    """
    byte_shares = _numbers("--bytes", shares, float)
    cuts = None if after is None else _numbers("--after", after, int)
    check_folder("--json", json_file)
    check_folder("--figure", figure)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, total = Console(file=sys.stderr), pieces_of_work(len(byte_shares))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading", total=total)
        numbers = count(1)

        def note(done: str) -> None:
            progress.update(task, advance=1, description=done)
            if not console.is_terminal:
                console.print(f"{next(numbers)}/{total} {done}")

        result = run_gap(
            model_dir,
            boundaries,
            byte_shares,
            after=cuts,
            settings=settings,
            device=device,
            note=note,
        )
    if json_file is not None:
        write_json(result, json_file)
    if json_file != SCREEN:
        console = Console()
        for table in gap_tables(result):
            console.print(table)
    if figure is not None:
        from megatron_grpo.bench.figure import draw_gap

        draw_gap(result, figure)


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option}={text}: is no list of {word} with commas between them") from None


def gap_tables(result: Mapping[str, Any]) -> list[Table]:
    """The result for the terminal: ranks, forward, limits, backward."""
    return [_spectra(result), _forward(result), _backward(result)]


def _spectra(result: Mapping[str, Any]) -> Table:
    table = plain_table(
        f"What holds 90 % of the energy, of {result['hidden']} directions",
        "after layer",
        "X, rank",
        "X of unit rows, centred, rank",
        "dX, rank",
        "dX, tokens",
    )
    for layer, spectrum in zip(result["after"], result["spectra"], strict=True):
        forward, backward = spectrum["forward"], spectrum["backward"]
        ranks = (forward["rank90"], forward["rank90_centred_unit_rows"], backward["rank90"])
        table.add_row(str(layer), *map(str, ranks), f"{backward['tokens90']:.0%}")
    return table


def _forward(result: Mapping[str, Any]) -> Table:
    columns = ("codec", "bytes", "error", "of a token", "gap, median", "mean", "KL", "rollout gap", "mean")
    table = plain_table("Activations coded (nats; errors are means over the boundaries)", *columns)
    for row in result["forward"]:
        table.add_row(
            row["codec"],
            f"{row['bytes']:.2%}",
            _mean(row["error"]),
            _mean(row["error_median"]),
            *(f"{row[key]:.4f}" for key in ("gap_median", "gap_mean", "kl")),
            *(f"{row[key]:.0e}" for key in ("rollout_gap_median", "rollout_gap_mean")),
        )
    for row in result["limits"]:
        name = "limit" if row["predict"] == "none" else f"limit, {row['predict']}"
        gaps = (f"{row[key]:.4f}" for key in ("gap_median", "gap_mean", "kl"))
        table.add_row(name, f"{row['share']:.2%}", "", "", *gaps, "", "", style="dim")
    return table


def _backward(result: Mapping[str, Any]) -> Table:
    columns = ("codec", "bytes", "error", "of a token", "cosine by stage", "norm by stage")
    table = plain_table("Gradients coded: parameter gradient of each stage against the dense one", *columns)
    for row in result["backward"]:
        errors = (_mean(row["error"]), _mean(row["error_median"]))
        stages = (" / ".join(f"{value:.2f}" for value in row[key]) for key in ("cosine", "norm_ratio"))
        table.add_row(row["codec"], f"{row['bytes']:.2%}", *errors, *stages)
    return table


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}"
