"""What coding the rows of a boundary costs: the products that ``ops`` makes of them, without torch.

Left out is what is not a product (quantising, packing, and what a launch takes on a GPU), and what is not done to every
row (fitting). Legend: H hidden, C numbers that a row is predicted from, K channels, r rank.
"""

from dataclasses import dataclass
from math import inf

from megatron_grpo.config import BoundaryConfig, Direction

from .sizes import BYTES
from .traffic import DENSE_BYTES, context_size, waterfill_channels

FLAGS = 2
"""What a packed row is predicted from beside its context."""
HADAMARD, DENSE = 64, 256
"""The largest factors of ``ops.token_waterfill.Rotation``: of a power of two, and of what is none."""


@dataclass(frozen=True, slots=True)
class Work:
    """Float32 operations of one row, of products over all rows at once and of products column by column."""

    at_once: float = 0.0
    by_column: float = 0.0

    @property
    def total(self) -> float:
        return self.at_once + self.by_column

    def seconds(self, rows: float, columns: float, flop_s: float, memory_byte_s: float = inf) -> float:
        """Of so many rows that lie in ``columns`` columns: products, or reading their matrices where that is slower.

        A matrix has a number for every two operations on a row, and is read anew for every column.
        """
        read = BYTES["float32"] / 2 / memory_byte_s
        at_once = max(rows * self.at_once / flop_s, self.at_once * read)
        return at_once + max(rows * self.by_column / flop_s, columns * self.by_column * read)


@dataclass(frozen=True, slots=True)
class Coding:
    """The work of the two ends of a boundary in one direction.

    Attributes:
        encode: of the sender, who decodes as well: it measures what is lost, or goes on from what the receiver has.
        decode: of the receiver.
    """

    encode: Work = Work()
    decode: Work = Work()


def coding_work(boundary: BoundaryConfig, side: Direction, hidden: int) -> Coding:
    """Of a row that crosses coded. At most: a fit may leave channels without bits, and those are not multiplied."""
    codec, payload = boundary.codec_of(side), boundary.payload_of(side)
    if codec == "token_waterfill":
        rotated = rotation_flops(hidden) * min(1.0, 8 * DENSE_BYTES * boundary.budget_of(side))  # rows of one bit each
        return Coding(Work(2 * rotated), Work(rotated))
    if codec != "lowrank":
        return Coding()
    if not boundary.packed(side) or (side == "backward" and payload != "waterfill"):
        product = 2.0 * hidden * boundary.rank_of(hidden)
        return Coding(Work(2 * product), Work(product))
    kept = waterfill_channels(boundary, side, hidden) if payload == "waterfill" else boundary.rank_of(hidden)
    context = FLAGS + context_size(boundary, side, hidden)
    channels = 2.0 * hidden * kept
    if side == "forward" and boundary.prediction == "embedding+previous":
        known, before = 2.0 * hidden * (context - hidden), 2.0 * hidden * hidden
        # Analysis is at once; the row before takes part in it, in the prediction, and is what was rebuilt.
        return Coding(Work(known + channels, before + 2 * channels), Work(known, before + channels))
    predicted = 2.0 * hidden * context
    return Coding(Work(predicted + 2 * channels), Work(predicted + channels))


def rotation_flops(hidden: int) -> float:
    """Of one row through ``ops.token_waterfill.Rotation``: two a coordinate and row of every factor."""
    power = hidden & -hidden
    odd = hidden // power
    if odd > DENSE:
        return 2.0 * hidden * hidden
    factors = odd if odd > 1 else 0
    while power > 1:
        factor = min(power, HADAMARD)
        factors, power = factors + factor, power // factor
    return 2.0 * hidden * factors
