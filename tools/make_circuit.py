"""Draw the circuit of a run: ``python tools/make_circuit.py`` writes examples/circuit.svg and examples/circuit.png.

Lengths on the canvas are in units of 0.1 inch. Legend of the labels: N rows, H hidden, r rank, C cadence, K delay.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTH, HEIGHT = 120, 74
PIXELS_PER_INCH = 150

INK, GREY, PAPER = "#1f2933", "#67737f", "#ffffff"
STAGE, LINK = "#eef3f8", "#f6f4ef"
FAST, ANCHOR, SAMPLE, UPDATE = "#1769aa", "#c2571a", "#5f7a2c", "#5b4a8a"
STAGES = (2.0, 82.0)
"""Left edges of the two stages."""
STAGE_WIDTH = 36.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Lane:
    """One crossing of the link at height ``y``.

    Attributes:
        name, when: written at the outer edges of the two stages.
        left, right: what the crossing is at either end.
        message: what is on the wire.
        head, width: matplotlib's arrow style and line width.
    """

    y: float
    color: str
    name: str
    when: str
    left: str
    right: str
    message: str
    head: str
    width: float


LANES = (
    Lane(
        y=61.0,
        color=SAMPLE,
        name="sample",
        when="once a step",
        left="prompts",
        right="draw ids",
        message="rows forward, token ids back",
        head="<|-|>",
        width=1.4,
    ),
    Lane(
        y=53.0,
        color=FAST,
        name="forward",
        when="every tick",
        left=r"$X$   $[N, H]$",
        right=r"$P\,Q_{\mathrm{fwd}}^{\top}$",
        message=r"$P = X\,Q_{\mathrm{fwd}}$    $[N, r]$",
        head="-|>",
        width=1.4,
    ),
    Lane(
        y=45.0,
        color=FAST,
        name="backward",
        when="every tick",
        left=r"$P\,Q_{\mathrm{bwd}}^{\top}$",
        right=r"$dX$   $[N, H]$",
        message=r"$P = dX\,Q_{\mathrm{bwd}}$    $[N, r]$",
        head="<|-",
        width=1.4,
    ),
    Lane(
        y=37.0,
        color=ANCHOR,
        name="anchor",
        when=r"every $C$ ticks",
        left=r"weights of $t-K$",
        right=r"weights of $t-K$",
        message=r"$X$ and $dX$ whole    $[N, H]$",
        head="<|-|>",
        width=4.5,
    ),
)


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], *, face: str, edge: str) -> None:
    """A rounded rectangle; ``corner`` is its lower left one."""
    style = "round,pad=0,rounding_size=1"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, fc=face, ec=edge, lw=1.1))


def label(
    axes: Axes, x: float, y: float, text: str, *, color: str = INK, size: float = 10.5, bold: bool = False
) -> None:
    """Centred text."""
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, color=color, fontsize=size, ha="center", va="center", fontweight=weight)


def arrow(axes: Axes, start: Point, end: Point, color: str, *, head: str = "-|>", width: float = 1.4) -> None:
    """A straight arrow; ``head`` is matplotlib's arrow style."""
    shape = FancyArrowPatch(
        start,
        end,
        arrowstyle=head,
        color=color,
        lw=width,
        mutation_scale=11 + 2 * width,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(shape)


def draw_stages(axes: Axes) -> None:
    """The two stages and the link between them."""
    gap = STAGES[0] + STAGE_WIDTH
    axes.add_patch(Rectangle((gap, 32), STAGES[1] - gap, 39.5, fc=LINK, ec="none"))
    label(axes, WIDTH / 2, 68.6, "pipeline link (slow)", color=GREY, size=11, bold=True)
    contents = (("stage 0", "embedding, first layers"), ("stage 1", "last layers, head, loss"))
    for left, (name, parts) in zip(STAGES, contents, strict=True):
        box(axes, (left, 32), (STAGE_WIDTH, 39.5), face=STAGE, edge="#b6c2cf")
        label(axes, left + 7, 68.6, name, size=12, bold=True)
        label(axes, left + 24, 68.6, parts, color=GREY, size=10)


def draw_lane(axes: Axes, lane: Lane) -> None:
    """What crosses, and what it is at either end."""
    width, margin = 19.0, 2.0
    lefts = (STAGES[0] + STAGE_WIDTH - width - margin, STAGES[1] + margin)
    for left, text in zip(lefts, (lane.left, lane.right), strict=True):
        box(axes, (left, lane.y - 2.4), (width, 4.8), face=PAPER, edge=lane.color)
        label(axes, left + width / 2, lane.y, text, color=lane.color)
    outer = (STAGE_WIDTH - width - margin) / 2
    label(axes, STAGES[0] + outer, lane.y, lane.name, color=lane.color, bold=True)
    label(axes, STAGES[1] + STAGE_WIDTH - outer, lane.y, lane.when, color=GREY)
    ends = ((lefts[0] + width + 0.6, lane.y), (lefts[1] - 0.6, lane.y))
    arrow(axes, *ends, lane.color, head=lane.head, width=lane.width)
    label(axes, WIDTH / 2, lane.y + 2.4, lane.message, color=lane.color, size=11)


def draw_update(axes: Axes, left: float) -> None:
    """From the two gradients of a stage to its optimizer."""
    fast, anchor = left + 7.5, left + 28.5
    for x, text, color in ((fast, r"$G_{\mathrm{comp}}$", FAST), (anchor, r"$M$", ANCHOR)):
        box(axes, (x - 5.5, 23.6), (11, 5), face=PAPER, edge=color)
        label(axes, x, 26.1, text, color=color, size=12)
        arrow(axes, (x, 32), (x, 28.9), color)
        arrow(axes, (x, 23.6), (x, 20.6), color)
    box(axes, (left, 15.4), (STAGE_WIDTH, 5), face="#f1eef8", edge=UPDATE)
    label(axes, left + STAGE_WIDTH / 2, 17.9, "merge → clip → AdamW (ZeRO shard)", color=UPDATE)


def draw_basis(axes: Axes) -> None:
    """How the basis is refreshed at both ends."""
    arrow(axes, (WIDTH / 2, 32), (WIDTH / 2, 28.9), ANCHOR)
    box(axes, (41, 15.4), (38, 13.2), face="#fdf3ea", edge=ANCHOR)
    label(axes, WIDTH / 2, 26, r"$Q \leftarrow \mathrm{orth}\,(\Sigma\,X^{\top} X\, Q)$", color=ANCHOR, size=12)
    label(axes, WIDTH / 2, 22.2, "at both ends, from rows that both hold:", color=GREY, size=9.5)
    label(axes, WIDTH / 2, 19.8, "only a hash crosses;", color=GREY, size=9.5)
    label(axes, WIDTH / 2, 17.4, "in use from the next step on", color=GREY, size=9.5)


def draw_ticks(axes: Axes) -> None:
    """The life of an anchor, on a line of ticks."""
    line, remembered, fire, following = 8.2, 24.0, 64.0, 96.0
    arrow(axes, (4, line), (117, line), INK, width=1.1)
    label(axes, 114, line - 2.4, "ticks", color=GREY, size=9.5)
    for number in range(13):
        x = remembered - 16 + 8 * number
        axes.plot([x, x], [line - 0.5, line + 0.5], color=INK, lw=1)
    for x, name, event in (
        (remembered, "$t-K$", "weights and minibatch kept"),
        (fire, "$t$", "replayed: $M$ and $Q$ learn"),
        (following, "$t+C$", "next fire"),
    ):
        axes.plot([x], [line], marker="o", ms=8, color=ANCHOR)
        label(axes, x, line + 2.6, name, color=ANCHOR, size=11)
        label(axes, x, line - 2.4, event, color=GREY, size=9.5)
    for start, end, text in ((remembered, fire, "delay $K$"), (fire, following, "cadence $C$: $M$ is held")):
        arrow(axes, (start + 4.2, line + 2.6), (end - 4.2, line + 2.6), ANCHOR, head="<|-|>", width=0.8)
        middle = (start + end) / 2
        gap = {"fc": PAPER, "ec": "none", "pad": 2}
        axes.text(middle, line + 2.6, text, color=ANCHOR, fontsize=9.5, ha="center", va="center", bbox=gap)


def draw() -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(WIDTH / 10, HEIGHT / 10), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    draw_stages(axes)
    for lane in LANES:
        draw_lane(axes, lane)
    for left in STAGES:
        draw_update(axes, left)
    draw_basis(axes)
    draw_ticks(axes)
    return figure


def main() -> None:
    """Write both files; the same input gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "circuit", "font.family": "DejaVu Sans"}):
        figure = draw()
        figure.savefig(EXAMPLES / "circuit.svg", metadata={"Date": None})
        figure.savefig(EXAMPLES / "circuit.png", dpi=PIXELS_PER_INCH)


if __name__ == "__main__":
    main()
