"""How far compression carries: ``python tools/bench/scaling.py [--figure PNG]``.

Puts a family of models through the plan's model of time: pipelines of 2 to 64 stages, hidden sizes of 1k to 16k,
links of 10 Mbit/s to 100 Gbit/s, uncompressed and by the recipe's codecs. Prints one JSON object and draws it. The
crossover is the rate of the links above which compression saves less than a tenth of a step; further up it breaks even,
and beyond that coding costs more than the wire. Latency is left out: it adds the same to both. Exits 1 when the results
contradict what must hold: compression never sends more, and a step never takes longer by more than its coding; on
faster links nothing takes longer; the crossover falls with the hidden size (products grow with its square, rows with
itself) and, from 4k on, rises with the number of stages while each has two layers or more (each has less to multiply,
and as much to send; with one layer it has as much to code as well, and in smaller models the head, which one stage has
whole, decides).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_grpo.config import Config, load_config
from megatron_grpo.conversion.families import ModelShape, model_shape
from megatron_grpo.plan import Device, step_time
from megatron_grpo.plan.network import Line, Network
from megatron_grpo.plan.traffic import longest_lengths, uncompressed

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/cluster/recipes/70b.yaml"
FIGURE = ROOT / "examples/cluster/scaling.png"
PIPELINES = (2, 4, 8, 16, 32, 64)
HIDDEN = (1024, 2048, 4096, 8192, 16384)
RATES = tuple(10 ** (7 + number / 2) for number in range(9))
LAYERS = 64
DEVICE = Device(200e12, 2e12)
GEOMETRY = ["parallel.tensor=1", "train.micro_batch=2", "deepspeed.config=deepspeed_configs/zero1.json"]
WORTH = 1 / 0.9
HEADLESS = 4096
COLOURS = ("#7fb3d9", "#4a90c2", "#1769aa", "#0f4c7d", "#d99a2b", "#a8641a")
INK, GREY, GRID = "#1f2933", "#67737f", "#e3e8ee"


@dataclass(frozen=True, slots=True)
class Point:
    """One run at one rate: seconds and pipeline bytes of a step, and what coding adds to one on perfect links."""

    pipeline: int
    hidden: int
    bit_s: float
    dense_s: float
    coded_s: float
    dense_bytes: float
    coded_bytes: float
    coding_s: float = 0.0


def family(hidden: int) -> ModelShape:
    """A Llama of 64 layers with heads of 128, a KV group for each 1024 columns and a feed-forward width of
    3.5 H, as the 70B one has."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 1024,
        "intermediate_size": 7 * hidden // 2,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return model_shape({"architectures": ["LlamaForCausalLM"], **sizes})


def measure(config: Config, shape: ModelShape, bit_s: float) -> Point:
    """One point: every boundary at that rate, all other links perfect."""
    stages, lengths = config.parallel.pipeline, longest_lengths(config)
    network = Network((Line(bit_s),) * (stages - 1))
    dense, coded = (step_time(one, shape, lengths, network, DEVICE) for one in (uncompressed(config), config))
    sent = (sum(dense.bytes.values()), sum(coded.bytes.values()))
    return Point(stages, shape.hidden, bit_s, dense.total, coded.total, *sent, coded.coding)


def crossover(points: Sequence[Point], worth: float = WORTH) -> float | None:
    """The rate at which dense takes ``worth`` times as long, between two points on a line of logarithms.

    ``None`` where it is beyond either end.
    """
    gains = [math.log(point.dense_s / point.coded_s) - math.log(worth) for point in points]
    for (before, after), (low, high) in zip(pairwise(gains), pairwise(points), strict=True):
        if before >= 0 > after:
            part = before / (before - after)
            return float(low.bit_s * (high.bit_s / low.bit_s) ** part)
    return None


def contradictions(
    curves: dict[tuple[int, int], list[Point]], crossings: dict[tuple[int, int], float | None]
) -> list[str]:
    """What must hold and does not, in words."""
    found = []
    for (pipeline, hidden), points in curves.items():
        name = f"{pipeline} stages, hidden {hidden}"
        if any(p.coded_bytes > p.dense_bytes or p.coded_s > p.dense_s + p.coding_s for p in points):
            found.append(f"{name}: compression sends more, or takes longer than coding explains")
        if any(b.dense_s > a.dense_s or b.coded_s > a.coded_s for a, b in pairwise(points)):
            found.append(f"{name}: a faster link takes longer")
    lines = [[crossings[pipeline, hidden] for hidden in HIDDEN[::-1]] for pipeline in PIPELINES]
    thick = [pipeline for pipeline in PIPELINES if 2 * pipeline <= LAYERS]
    lines += [[crossings[pipeline, hidden] for pipeline in thick] for hidden in HIDDEN if hidden >= HEADLESS]
    for line in lines:
        if any(low is None or high is None or low > high for low, high in pairwise(line)):
            found.append(f"crossovers are not monotone: {line}")
    return found


def draw(
    curves: dict[tuple[int, int], list[Point]], crossings: dict[tuple[int, int], float | None], file: Path
) -> None:
    """Left: time of a step against the rate, at hidden 8192. Right: the crossovers of all, and where it breaks even."""
    figure = Figure((11, 4.6), dpi=130, layout="constrained", facecolor="white")
    times, rates = figure.subplots(1, 2)
    for pipeline, colour in zip(PIPELINES, COLOURS, strict=True):
        points = curves[pipeline, 8192]
        axis = [point.bit_s for point in points]
        times.plot(axis, [point.dense_s for point in points], color=colour, linestyle="--", linewidth=1.3)
        times.plot(axis, [point.coded_s for point in points], color=colour, linewidth=1.8, label=f"{pipeline} stages")
        at = crossings[pipeline, 8192]
        if at is not None:
            low, high = next((a, b) for a, b in pairwise(points) if a.bit_s <= at <= b.bit_s)
            part = math.log(at / low.bit_s) / math.log(high.bit_s / low.bit_s)
            times.plot([at], [low.coded_s * (high.coded_s / low.coded_s) ** part], "o", color=colour, markersize=6)
        found = [(hidden, crossings[pipeline, hidden]) for hidden in HIDDEN]
        rates.plot(*zip(*((h, rate) for h, rate in found if rate), strict=True), "o-", color=colour, markersize=4)
        even = [(hidden, crossover(curves[pipeline, hidden], worth=1.0)) for hidden in HIDDEN]
        rates.plot(*zip(*((h, rate) for h, rate in even if rate), strict=True), ":", color=colour, linewidth=1.1)
    times.set(xscale="log", yscale="log", xlabel="rate of a link, bit/s", ylabel="seconds a step")
    times.set_title("Hidden 8192: dense (dashed), compressed, crossover", loc="left", color=INK, fontsize=10)
    times.legend(frameon=False, fontsize=8)
    rates.set(xscale="log", yscale="log", xlabel="hidden size", ylabel="bit/s")
    rates.set_xticks(HIDDEN, [f"{hidden // 1024}k" for hidden in HIDDEN])
    rates.minorticks_off()
    rates.set_title(
        "Rate up to which it saves a tenth of a step (dotted: anything)", loc="left", color=INK, fontsize=10
    )
    for axes in (times, rates):
        _plain(axes)
    figure.savefig(file)


def _plain(axes: Axes) -> None:
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)


def report(figure: Path | None) -> dict[str, Any]:
    """All points, the crossovers, and what contradicts."""
    curves: dict[tuple[int, int], list[Point]] = {}
    for pipeline in PIPELINES:
        config = load_config(RECIPE, [*GEOMETRY, f"parallel.pipeline={pipeline}"])
        for hidden in HIDDEN:
            curves[pipeline, hidden] = [measure(config, family(hidden), rate) for rate in RATES]
    crossings = {key: crossover(points) for key, points in curves.items()}
    if figure is not None:
        draw(curves, crossings, figure)
    return {
        "points": [asdict(point) for points in curves.values() for point in points],
        "crossovers": [
            {"pipeline": p, "hidden": h, "bit_s": rate, "even_bit_s": crossover(curves[p, h], worth=1.0)}
            for (p, h), rate in crossings.items()
        ],
        "contradictions": contradictions(curves, crossings),
    }


def main() -> int:
    """Print the report; 1 when it contradicts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURE, help="PNG to draw")
    result = report(parser.parse_args().figure)
    print(json.dumps(result))
    return 1 if result["contradictions"] else 0


if __name__ == "__main__":
    sys.exit(main())
