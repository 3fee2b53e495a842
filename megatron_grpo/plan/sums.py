"""What ranks add up besides what crosses boundaries: outputs over tensor ranks, gradients over replicas."""

from megatron_grpo.config import BoundaryConfig, Config, Direction

from .sizes import BYTES, StageSize
from .traffic import PassBytes
from .zero import Engine


def tensor_row(config: Config, hidden: int, side: Direction, *, coded: bool) -> int:
    """Bytes of one row in a sum over tensor ranks; a compressed link adds up its coordinates."""
    boundary = config.boundary
    if "tensor" not in boundary.links:
        return hidden * BYTES[config.model.dtype]
    width = boundary.tensor_rank_of(hidden) if coded else hidden
    return width * BYTES[boundary.dense_payload(side)]


def tensor_basis_bytes(boundary: BoundaryConfig, size: StageSize, hidden: int) -> int:
    """The bases of a stage's four sums a layer, in float32; as much is added up at a refresh."""
    if "tensor" not in boundary.links:
        return 0
    return 4 * len(size.layers) * hidden * boundary.tensor_rank_of(hidden) * BYTES["float32"]


def gradient_payload(config: Config, size: StageSize, engine: Engine, part: PassBytes) -> int:
    """Bytes of a rank's gradients as they are averaged over replicas; after the warm-up, where they are compressed."""
    boundary = config.boundary
    if part.kind == "checks" and "data" in boundary.links:
        return 0  # nobody will use them
    factors = "data" in boundary.links and part.kind == "fast" and part.coded
    return engine.gradient_bytes * (size.factored(boundary.gradient_rank) if factors else size.parameters)


def residual_bytes(boundary: BoundaryConfig, size: StageSize) -> int:
    """What compressed gradients leave behind on a rank: the remainder of every factored matrix and its last factor."""
    if "data" not in boundary.links:
        return 0
    rank = boundary.gradient_rank
    return BYTES["float32"] * sum(rows * columns + columns * rank for rows, columns in size.worth_factoring(rank))
