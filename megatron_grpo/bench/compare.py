"""The command ``compare``: two checkpoints in, progress, tables and JSON out."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_grpo.bench.output import SCREEN, check_folder, plain_table, write_json
from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.compare import TensorDifference, compare_weights, examine_pair
from megatron_grpo.conversion.convert import DTYPES, DtypeName
from megatron_grpo.conversion.names import model_table
from megatron_grpo.conversion.sources import Checkpoint

if TYPE_CHECKING:
    from megatron_grpo.bench.logits import LogitGap

MOST_ROWS = 40


def compare_on_screen(
    one: Path,
    other: Path,
    *,
    dtype: DtypeName | None = None,
    config_from: Path | None = None,
    logits: bool = False,
    prompts: Path | None = None,
    json_file: Path | None = None,
) -> bool:
    """Compare, and print tables or, where ``json_file`` is ``-``, JSON; says whether every tensor has the same bits.

    Raises:
        ConfigError: the two cannot be compared, or an option does not fit.
    """
    check_folder("--json", json_file)
    if prompts is not None and not logits:
        raise ConfigError(f"--prompts={prompts}: is for --logits; add that, or leave it out")
    a, b = examine_pair(one, other, config_from)
    screen = Console(stderr=True)
    for letter, path, checkpoint in (("A", one, a), ("B", other, b)):
        print(f"{letter}: {path}: {checkpoint.words}", file=sys.stderr)
    with Progress(console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("weights", total=sum(1 for _ in model_table(a.shape)))
        chosen = DTYPES[dtype] if dtype else None
        found = list(compare_weights(a, b, chosen, done=lambda: bar.advance(task)))
    gaps = _logits(a, b, prompts) if logits else None
    result = _result(one, other, found, gaps)
    if json_file is not None:
        write_json(result, json_file)
    if json_file != SCREEN:
        console = Console()
        for table in _tables(found, gaps):
            console.print(table)
        console.print(_totals(result), highlight=False)
    return bool(result["equal"])


def _logits(a: Checkpoint, b: Checkpoint, prompts: Path | None) -> "list[LogitGap]":
    from megatron_grpo.bench.logits import compare_logits  # its engines take seconds to import

    return compare_logits(a, b, prompts, note=lambda text: print(text, file=sys.stderr))


def _result(
    one: Path, other: Path, found: Sequence[TensorDifference], gaps: "Sequence[LogitGap] | None"
) -> dict[str, Any]:
    """The JSON object: every tensor, in the order of the model."""
    different = [each for each in found if not each.equal]
    tensors = [asdict(each) | {"dtypes": [_dtype(dtype) for dtype in each.dtypes]} for each in found]
    return {
        "a": str(one),
        "b": str(other),
        "equal": not different,
        "tensors": len(found),
        "different": len(different),
        "numbers": sum(math.prod(each.shape) for each in found),
        "largest": max(each.largest for each in found),
        "weights": tensors,
        "logits": None if gaps is None else [asdict(gap) for gap in gaps],
    }


def _tables(found: Sequence[TensorDifference], gaps: "Sequence[LogitGap] | None") -> list[Table]:
    tables = []
    worst = sorted((each for each in found if not each.equal), key=lambda each: (-each.relative, -each.largest))
    if worst:
        table = plain_table("Tensors that differ, worst first", "tensor", "shape", "dtypes", "max |A - B|", "relative")
        for each in worst[:MOST_ROWS]:
            dtypes = " / ".join(dict.fromkeys(map(_dtype, each.dtypes)))
            table.add_row(each.name, str(list(each.shape)), dtypes, f"{each.largest:.3g}", f"{each.relative:.3g}")
        if len(worst) > MOST_ROWS:
            table.add_row(f"and {len(worst) - MOST_ROWS} more; --json lists all")
        tables.append(table)
    if gaps is not None:
        table = plain_table("Logits, float32", "pair", "max |difference|", "median", "same greedy answer")
        for gap in gaps:
            answers = f"{gap.same_answers} of {gap.texts}"
            table.add_row(gap.pair, f"{gap.largest:.2g}", f"{gap.median:.2g}", answers)
        tables.append(table)
    return tables


def _totals(result: dict[str, Any]) -> str:
    numbers = f"{result['tensors']} tensors, {result['numbers']:,} numbers"
    if result["equal"]:
        return f"equal bit for bit: {numbers}"
    return f"different: {result['different']} of {numbers}; max |A - B| {result['largest']:.3g}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
