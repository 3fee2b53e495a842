"""The ledger: bytes that this rank handed to the transport, by link, kind and direction."""

from collections import Counter
from typing import Literal

import torch

from megatron_grpo.config import DIRECTIONS, Direction

Link = Literal["pipeline", "tensor", "data"]
Kind = Literal["fast", "old_logprob", "anchor", "basis", "rollout", "validation"]

LINKS: tuple[Link, ...] = ("pipeline", "tensor", "data")
KINDS: tuple[Kind, ...] = ("fast", "old_logprob", "anchor", "basis", "rollout", "validation")
DENSE_KINDS: tuple[Kind, ...] = ("fast", "old_logprob", "rollout")
"""What a step sends without an anchor and without bases."""
BFLOAT16_BYTES = 2

Entry = tuple[str, str, str]
_ENTRIES: tuple[Entry, ...] = tuple((link, kind, way) for link in LINKS for kind in KINDS for way in DIRECTIONS)


class Ledger:
    """Counts bytes at the sender. Two numbers an entry: what was sent, and what bf16 `identity` would have sent.

    A message is counted once, by the rank that sends it, so a sum over ranks is the traffic of the run.
    """

    def __init__(self) -> None:
        self._sent: Counter[Entry] = Counter()
        self._dense: Counter[Entry] = Counter()

    def add(self, link: Link, kind: Kind, direction: Direction, *, sent: int, dense: int = 0) -> None:
        """Record one message of ``sent`` bytes whose uncompressed bf16 form has ``dense`` bytes."""
        self._sent[link, kind, direction] += sent
        self._dense[link, kind, direction] += dense

    def sent(self, link: Link, kind: Kind, direction: Direction) -> int:
        return self._sent[link, kind, direction]

    def take(self) -> torch.Tensor:
        """This rank's counts since the last call, as int64 ``[2 * entries]`` ready for a sum over ranks; then zero."""
        counts = [self._sent[entry] for entry in _ENTRIES] + [self._dense[entry] for entry in _ENTRIES]
        self._sent.clear()
        self._dense.clear()
        return torch.tensor(counts, dtype=torch.int64)


def byte_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Metric keys from a sum of :meth:`Ledger.take` over ranks.

    Those by kind cross pipeline links, basis also data links. What else crosses a compressed tensor or data link has a
    key of the link, without validation; of a sum over ranks each counts what it contributes. Beside it stands what
    would cross uncompressed, without anchor and bases: bfloat16 rows, gradients as the engine holds them.
    """
    half = len(_ENTRIES)
    sent = dict(zip(_ENTRIES, counts[:half].tolist(), strict=True))
    dense = dict(zip(_ENTRIES, counts[half:].tolist(), strict=True))

    def total(table: dict[Entry, int], kind: str, links: tuple[str, ...] = ("pipeline",)) -> int:
        return sum(table[link, kind, way] for link in links for way in DIRECTIONS)

    metrics = {
        "boundary/bytes_fast": total(sent, "fast"),
        "boundary/bytes_fast_fwd": sent["pipeline", "fast", "forward"],
        "boundary/bytes_fast_bwd": sent["pipeline", "fast", "backward"],
        "boundary/bytes_anchor": total(sent, "anchor"),
        "boundary/bytes_basis": total(sent, "basis", ("pipeline", "data")),
        "boundary/bytes_old_logprob": total(sent, "old_logprob"),
        "boundary/bytes_rollout": total(sent, "rollout"),
        "boundary/bytes_dense_equivalent": total(dense, "fast"),
        "boundary/bytes_dense_total": sum(total(dense, kind) for kind in DENSE_KINDS),
    }
    for link in ("tensor", "data"):
        whole = sum(total(dense, kind, (link,)) for kind in DENSE_KINDS)
        if whole:  # nothing else counts what the link would send: it is compressed
            kinds = (kind for kind in KINDS if kind != "validation" and (link, kind) != ("data", "basis"))
            metrics[f"boundary/bytes_{link}"] = sum(total(sent, kind, (link,)) for kind in kinds)
            metrics[f"boundary/bytes_{link}_dense"] = whole
    return metrics
