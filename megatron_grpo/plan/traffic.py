"""Bytes that cross the boundaries, from the config alone: what each pass of a step sends, and how often it runs.

A row is one token's numbers at one boundary. Of a sequence all tokens but the last cross.
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Literal

from megatron_grpo.config import DIRECTIONS, AnchorConfig, BoundaryConfig, Config, Direction
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.ops.budget import PROBES

from .sizes import BYTES

PACKED_BITS = {"int8": 8, "int4": 4, "int3": 3}
DENSE_BYTES = 2
ID_BYTES = 4
HASH_BYTES = 8

PassKind = Literal["fast", "old log-probs", "anchor", "checks"]


SIZES: dict[PassKind, str] = {"old log-probs": "old_logprob", "anchor": "anchor", "checks": "basis"}
"""What the bytes of such a pass count as; those of fast ones by direction."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a sequence.

    Attributes:
        prompt, response: means.
        longest: response of a batch: it decides how many columns are sampled and trained.
    """

    prompt: float
    response: float
    longest: float

    @property
    def rows(self) -> float:
        """Of one sequence that cross a boundary in one pass."""
        return self.prompt + self.response - 1

    @property
    def columns(self) -> float:
        """Of a training pass, padding included."""
        return self.prompt + self.longest - 1


@dataclass(frozen=True, slots=True)
class PassBytes:
    """One kind of training pass.

    Attributes:
        count: passes in one step, on average: an anchor every five ticks is 0.4 of a step with two.
        forward, backward: bytes of one row; ``backward`` is ``None`` where no gradients are wanted.
        coded: whether links that can be compressed are.
    """

    kind: PassKind
    count: float
    forward: float
    backward: float | None
    coded: bool

    @property
    def row(self) -> float:
        """Bytes of a row, both ways."""
        return self.forward + (self.backward or 0.0)


def longest_lengths(config: Config) -> Lengths:
    """Every sequence as long as it may be."""
    response = float(config.rollout.max_response)
    return Lengths(float(config.data.max_prompt), response, response)


def uncompressed(config: Config) -> Config:
    """The same run with plain bfloat16 boundaries, without anchor, merger or error feedback: what it is compared
    with."""
    boundary = BoundaryConfig(codec="identity", payload="bfloat16", basis="random")
    return config.model_copy(update={"boundary": boundary, "anchor": AnchorConfig(enabled=False)})


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


def row_bytes(boundary: BoundaryConfig, side: Direction, hidden: int, *, dense: bool = False) -> float:
    """Of one row in one direction, coded or uncompressed."""
    if dense:
        return float(hidden * BYTES[boundary.dense_payload(side)])
    return crossing_share(boundary, side, hidden) * DENSE_BYTES * hidden


def samples_by_codec(config: Config) -> bool:
    """Whether the sampler's boundaries are compressed; ``rollout.path=auto``, which is measured, counts as not."""
    return config.rollout.path == "codec"


def training_passes(config: Config, hidden: int) -> list[PassBytes]:
    """The training passes of a step on each minibatch, with how often each runs.

    Old log-probs are one forward for every minibatch but the first (whose own forward serves, unless a basis may change
    inside the step); where the codec samples, only a dense tick needs them. A reference policy adds one forward a tick.
    The anchor is a dense pass every ``anchor.cadence`` ticks, its gradients in ``boundary.anchor_budget`` if there is
    one; ``boundary.dense_every`` makes every so-manieth tick dense. With ``boundary.send_once`` rows that were sampled
    serve every pass but the reference policy's, and, where they are coded, but a dense one; what they have moved since
    the first tick crosses at most (``delta``). ``boundary.backward_budget=auto`` counts as what it starts from; each of
    its checks is one pass that is dense backward, and some that are coded.
    """
    boundary, ticks = config.boundary_at_work, config.grpo.minibatches
    coded, dense = ([row_bytes(boundary, side, hidden, dense=plain) for side in DIRECTIONS] for plain in (False, True))
    dense_share = 1 / boundary.dense_every if boundary.dense_every else 0.0
    once = boundary.send_once != "off"
    coded_rows = 0.0 if once else coded[0]
    dense_rows = 0.0 if once and not samples_by_codec(config) else dense[0]
    moved = (ticks - 1) / ticks if boundary.send_once == "delta" else 0.0
    packed = moved * boundary.delta_budget * DENSE_BYTES * hidden
    old_coded, old_dense = _old_logprobs(config)
    reference = ticks if config.grpo.kl_coef > 0 else 0
    anchors = ticks / config.anchor.cadence if config.anchor.enabled else 0.0
    budget = boundary.anchor_budget
    replayed = dense[1] if budget is None else budget * DENSE_BYTES * hidden
    checks = 1 / boundary.backward_check if boundary.budgets_itself else 0.0
    passes = [
        PassBytes("fast", ticks * (1 - dense_share), coded_rows + packed, coded[1], True),
        PassBytes("fast", ticks * dense_share, dense_rows + moved * dense[0], dense[1], False),
        PassBytes("old log-probs", old_coded * (1 - dense_share), coded_rows, None, True),
        PassBytes("old log-probs", old_dense * dense_share, dense_rows, None, False),
        PassBytes("old log-probs", reference * (1 - dense_share), coded[0], None, True),
        PassBytes("old log-probs", reference * dense_share, dense[0], None, False),
        PassBytes("anchor", anchors, dense_rows, replayed, False),
        PassBytes("checks", checks, coded_rows, dense[1], True),
        PassBytes("checks", checks * PROBES, coded_rows, coded[1], True),
    ]
    return [part for part in passes if part.count > 0]


def _old_logprobs(config: Config) -> tuple[int, int]:
    """Old-log-prob passes of a step whose ticks are all coded, and of one whose ticks are all dense.

    None where the sampler's log-probs serve: the rule of ``training.step.StepRunner``.
    """
    boundary, ticks = config.boundary, config.grpo.minibatches
    later = ticks if boundary.commit == "tick" else ticks - 1
    if samples_by_codec(config):
        return (0 if boundary.commit == "step" else later), later
    if boundary.send_once == "off":
        return later, later
    return (later if "tensor" in boundary.links else 0), 0


def training_shares(config: Config, hidden: int) -> dict[str, float]:
    """Predicted bytes of a tick over its dense equivalent (forward and backward in bfloat16), by kind.

    See :func:`training_passes`. What a basis costs is not in it.
    """
    whole = config.grpo.minibatches * len(DIRECTIONS) * DENSE_BYTES * hidden
    shares: dict[str, float] = dict.fromkeys(("fast", "old log-probs", "anchor"), 0.0)
    for part in training_passes(config, hidden):
        shares[part.kind] = shares.get(part.kind, 0.0) + part.count * part.row / whole
    return shares


def basis_bytes(boundary: BoundaryConfig, hidden: int) -> int:
    """What crosses one boundary when its fits do (``boundary.basis=self``); 0 where nothing is fitted.

    The sizes of ``ops.transform.Spec.flat_size`` and of ``boundary.basis.Basis.flat``, without torch.
    """
    return sum(_fit_bytes(boundary, side, hidden) for side in DIRECTIONS[: 1 if boundary.shared_basis else 2])


def _fit_bytes(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    if boundary.codec_of(side) != "lowrank":
        return 0
    if not boundary.packed(side):
        own = boundary.dense_payload(side) if boundary.basis == "self" else "float32"
        return BYTES[own] * fit_size(boundary, side, hidden)
    return DENSE_BYTES * fit_size(boundary, side, hidden)


def fit_size(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    """Numbers of one direction's fit: Q and its spread, or norm, spreads, prediction and directions."""
    rank, payload = boundary.rank_of(hidden), boundary.payload_of(side)
    if not boundary.packed(side) or (side == "backward" and payload in PACKED_BITS):
        return (hidden + 1) * rank
    kept = rank if payload in PACKED_BITS else waterfill_channels(boundary, side, hidden)
    return 1 + kept + (2 + context_size(boundary, side, hidden) + kept) * hidden


def sums_bytes(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    """What a learner of one direction sums over replicas before it fits: sketch, or second moments, in float32."""
    if boundary.codec_of(side) != "lowrank":
        return 0
    if not boundary.packed(side) or (side == "backward" and boundary.payload_of(side) in PACKED_BITS):
        return BYTES["float32"] * hidden * boundary.rank_of(hidden)
    return BYTES["float32"] * moments_size(boundary, side, hidden) + 4 * 8  # and a tally of four


def moments_size(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    """Numbers of ``ops.transform.Moments``."""
    by_gradients = side == "forward" and boundary.metric == "gradient"
    return (2 + context_size(boundary, side, hidden) + hidden) ** 2 + by_gradients * hidden**2


@dataclass(frozen=True, slots=True)
class BasisBytes:
    """What new fits cost, of one tensor rank of one replica.

    Attributes:
        refreshes: in one step, on average; the more frequent first ones are not in it.
        fit: bytes that cross each boundary at a refresh.
        sums: bytes that an inner stage hands into sums over replicas at a refresh.
    """

    refreshes: float
    fit: int
    sums: int


def basis_traffic(config: Config, hidden: int) -> BasisBytes:
    """With ``boundary.basis=self`` the sender of each direction sums, fits and sends; with ``anchor`` both ends sum and
    fit, after every uncompressed pass, and compare a hash."""
    boundary, ticks = config.boundary_at_work, config.grpo.minibatches
    sides = DIRECTIONS[: 1 if boundary.shared_basis else 2]
    sums = sum(sums_bytes(boundary, side, hidden) for side in sides)
    if boundary.basis == "self":
        return BasisBytes(1 / boundary.refresh_steps, basis_bytes(boundary, hidden), sums)
    if boundary.basis == "random":
        return BasisBytes(0.0, 0, 0)
    anchors = 1 / config.anchor.cadence if config.anchor.enabled else 0.0
    dense = 1 / boundary.dense_every if boundary.dense_every else 0.0
    learners = sum(boundary.codec_of(side) == "lowrank" for side in sides)
    return BasisBytes(ticks * (anchors + dense), 2 * HASH_BYTES * learners, 2 * sums)


def context_size(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    """Numbers that a packed row is predicted from: a flag, the embedding, the row before."""
    chain = ("none", "embedding", "embedding+previous").index(boundary.prediction if side == "forward" else "none")
    return 1 + hidden * chain


def waterfill_channels(boundary: BoundaryConfig, side: Direction, hidden: int) -> int:
    """Channels that ``ops.transform.waterfill_spec`` keeps: 0.7 for each bit of a row's codes."""
    code_bits = floor(boundary.budget_of(side) * 8 * DENSE_BYTES * hidden + 1e-6) - 16
    return min(hidden, ceil(0.7 * max(code_bits, 1)))


def step_bytes(config: Config, shape: ModelShape, lengths: Lengths) -> dict[str, float]:
    """Payload bytes of a step over all boundaries and replicas, by kind; see ``time.StepTime.bytes``."""
    boundary, hidden = config.boundary_at_work, shape.hidden
    boundaries = config.parallel.pipeline - 1
    rows = config.sequences_per_step / config.grpo.minibatches * lengths.rows * boundaries
    sizes = dict.fromkeys(("fast_fwd", "fast_bwd", "old_logprob", "anchor", "basis", "rollout", "ids"), 0.0)
    for part in training_passes(config, hidden):
        if part.kind == "fast":
            sizes["fast_fwd"] += part.count * rows * part.forward
            sizes["fast_bwd"] += part.count * rows * (part.backward or 0.0)
        else:
            sizes[SIZES[part.kind]] += part.count * rows * part.row
    row = row_bytes(boundary, "forward", hidden, dense=not samples_by_codec(config))
    sizes["rollout"] = config.sequences_per_step * lengths.rows * boundaries * row
    sizes["ids"] = config.sequences_per_step * lengths.response * boundaries * ID_BYTES
    learned, data = basis_traffic(config, hidden), config.parallel.data
    ranks = boundaries * data * config.parallel.tensor if config.pipeline_ranks > 1 else 0
    sizes["basis"] += learned.refreshes * ranks * (learned.fit + (learned.sums if data > 1 else 0))
    return sizes
