"""Packed rows of a fitted transform: what a linear prediction leaves over, in few bits a channel.

The prediction uses what both ends know: the token's embedding, a frozen copy of which both hold, and the row before it
in its sequence as the receiver decoded it. With the latter, rows are coded column by column.
Legend: N rows, B sequences, H hidden, V vocabulary, C numbers of context.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from megatron_grpo.boundary.codec import Codec, Encoded, Learner
from megatron_grpo.ops.rows import Rows, SequenceMemory
from megatron_grpo.ops.transform import (
    Moments,
    Spec,
    decode_rows,
    encode_rows,
    fit,
    random_fit,
    unflatten,
    unit_rows,
)

HISTORY = 0.5
"""Weight that the rows of the fit before have in the next, so that a fit rests on more than one step's rows."""

Predict = Literal["none", "embedding", "embedding+previous"]


class Context:
    """What both ends know of a row before it crosses: ``[N, C]``, in the order of its parts.

    Args:
        predict: a flag for the first row of a sequence is always in it; further the embedding, and the row before.
        embedding_VH: where ``predict`` wants it.
    """

    def __init__(self, predict: Predict, hidden: int, embedding_VH: torch.Tensor | None) -> None:
        assert predict == "none" or embedding_VH is not None, "a prediction needs the embedding"
        self._embedding_VH = None if predict == "none" else embedding_VH
        self.sequential = predict == "embedding+previous"
        self.size = 1 + hidden * ("none", "embedding", "embedding+previous").index(predict)

    def rows(self, first_N: torch.Tensor, tokens_N: torch.Tensor | None, before_NH: torch.Tensor) -> torch.Tensor:
        parts = [first_N[:, None].float()]
        if self._embedding_VH is not None:
            assert tokens_N is not None, "rows without token ids cannot be predicted"
            self._embedding_VH = self._embedding_VH.to(tokens_N.device)
            parts.append(self._embedding_VH[tokens_N])
        if self.sequential:
            parts.append(before_NH)
        return torch.cat(parts, dim=-1)


class Transform(Learner):
    """The fit in use, the one staged, and the open moments. See ``ops.transform``.

    Args:
        spec: sizes; equal at both ends.
        seed: of the random basis before the first fit.
        purpose: names what this learner keeps in a sequence's memory; different for every boundary.
        by_energy: fit on rows as they are instead of normalised ones.
        by_gradients: weigh errors by the gradients with respect to the rows.
        learns: whether rows are observed at all.
    """

    def __init__(
        self,
        spec: Spec,
        context: Context,
        seed: int,
        *,
        purpose: str,
        by_energy: bool,
        by_gradients: bool,
        learns: bool,
    ) -> None:
        self._purpose = purpose
        self.current = random_fit(spec, seed, torch.device("cpu"))
        self.spec, self._context = spec, context
        self._by_energy, self._by_gradients, self._learns = by_energy, by_gradients, learns
        self._staged: torch.Tensor | None = None
        self._staged_analysis: torch.Tensor | None = None
        self._moments: Moments | None = None
        self._history: Moments | None = None

    @property
    def wants_gradients(self) -> bool:
        return self._learns and self._by_gradients

    @property
    def is_open(self) -> bool:
        return self._moments is not None

    def to(self, device: torch.device) -> "Transform":
        """This fit, living on ``device`` from now on."""
        if self.current.basis_HK.device != device:
            self.current = unflatten(self.current.flat_n.to(device), self.spec, self.current.analysis_HK)
        return self

    def observe(self, x_NH: torch.Tensor, rows: Rows) -> None:
        if not self._learns:
            return
        if self._moments is None:
            self._moments = self._no_moments(x_NH.device)
        unit_NH, walk = unit_rows(x_NH), Walk(rows, self._purpose, x_NH)
        for column in walk.columns():
            walk.leave(column, unit_NH[column])
        self._moments.add(x_NH, self._context.rows(walk.first_N, rows.tokens_N, walk.before_NH))

    def observe_gradient(self, grad_NH: torch.Tensor) -> None:
        if not self.wants_gradients:
            return
        if self._moments is None:
            self._moments = self._no_moments(grad_NH.device)
        self._moments.add_gradients(grad_NH)

    def sums(self) -> list[torch.Tensor]:
        return [] if self._moments is None else self._moments.tensors()

    def stage(self) -> None:
        moments, self._moments = self._moments, None
        if moments is None or not all(bool(part.isfinite().all()) for part in moments.tensors()):
            return
        if self._history is None:
            self._history = self._no_moments(moments.second_DD.device)
        for old, new in zip(self._history.tensors(), moments.tensors(), strict=True):
            old.mul_(HISTORY).add_(new)
        if bool(self._history.tally_4[0] > 0):
            fitted = fit(self._history, self.spec)
            self._staged, self._staged_analysis = fitted.flat_n, fitted.analysis_HK

    def _moments_of(self, sums: list[torch.Tensor]) -> Moments:
        second_DD, tally_4, *gradient = sums
        return Moments(second_DD, tally_4, gradient[0] if gradient else None, self._by_energy)

    def _no_moments(self, device: torch.device) -> Moments:
        return Moments.zeros(
            self.spec.hidden, self._context.size, device, by_energy=self._by_energy, by_gradients=self._by_gradients
        )

    def flat(self) -> torch.Tensor:
        return self.current.flat_n if self._staged is None else self._staged

    def stage_flat(self, flat: torch.Tensor) -> None:
        self._staged, self._staged_analysis = flat, None

    def commit(self) -> None:
        if self._staged is not None:
            self.current = unflatten(self._staged, self.spec, self._staged_analysis)
            self._staged = self._staged_analysis = None

    def state_dict(self) -> dict[str, Any]:
        history = None if self._history is None else [part.clone() for part in self._history.tensors()]
        return {
            "current": self.current.flat_n,
            "analysis": self.current.analysis_HK,
            "staged": self._staged,
            "staged_analysis": self._staged_analysis,
            "history": history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current = unflatten(state["current"], self.spec, state["analysis"])
        self._staged, self._staged_analysis = state["staged"], state["staged_analysis"]
        history = state["history"]
        self._history = None if history is None else self._moments_of(history)
        self._moments = None


class Walk:
    """Rows in their order, each with what went before it in its sequence, in this micro-batch or an earlier one.

    Attributes:
        first_N: whether a row is the first of its sequence; true of a column once it is reached.
        before_NH: the unit row before it, zeros before the first; likewise.
    """

    def __init__(self, rows: Rows, purpose: str, like_NH: torch.Tensor) -> None:
        self._rows = rows
        memory = SequenceMemory() if rows.memory is None else rows.memory
        self._last_BH, self._begun_B = memory.of(purpose, rows.batch, like_NH.shape[-1], like_NH.device)
        self.first_N = torch.zeros(len(rows), dtype=torch.bool, device=like_NH.device)
        self.before_NH = torch.zeros(len(rows), like_NH.shape[-1], device=like_NH.device)

    def columns(self) -> Iterator[slice]:
        """One column after the other; :meth:`leave` each before the next is reached."""
        for column in self._rows.columns():
            sequences = self._rows.sequences_N[column]
            self.first_N[column] = ~self._begun_B[sequences]
            self.before_NH[column] = self._last_BH[sequences]
            yield column

    def leave(self, column: slice, unit_NH: torch.Tensor | None = None) -> None:
        """Go on from a column, whose unit rows the next ones may want to know."""
        sequences = self._rows.sequences_N[column]
        self._begun_B[sequences] = True
        if unit_NH is not None:
            self._last_BH[sequences] = unit_NH


class TransformCodec(Codec):
    """Codes of :class:`Transform`'s fit: one uint8 vector, of a size that follows from the rows alone.

    Args:
        purpose: names what this codec keeps in a sequence's memory; different for every boundary.
    """

    def __init__(self, learner: Transform, context: Context, purpose: str) -> None:
        self.learner: Transform = learner
        self._context, self._purpose = context, purpose

    def payload(self, rows: Rows) -> torch.Tensor:
        return torch.empty(sum(self._sizes(rows)), dtype=torch.uint8, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        fit = self.learner.to(x_NH.device).current
        walk, decoded_NH = Walk(rows, self._purpose, x_NH), torch.empty(x_NH.shape, device=x_NH.device)
        payloads = []
        for part in self._parts(walk, rows):
            payload, decoded_NH[part] = encode_rows(fit, x_NH[part], self._known(walk, rows, part))
            payloads.append(payload)
            self._leave(walk, part, decoded_NH)
        packed = torch.cat(payloads) if payloads else self.payload(rows)
        return Encoded(packed, decoded_NH.to(x_NH.dtype))

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        fit = self.learner.to(payload.device).current
        decoded_NH = torch.empty(len(rows), fit.spec.hidden, device=payload.device)
        walk, payloads = Walk(rows, self._purpose, decoded_NH), iter(torch.split(payload, self._sizes(rows)))
        for part in self._parts(walk, rows):
            known = self._known(walk, rows, part)
            decoded_NH[part] = decode_rows(fit, next(payloads), len(known), known)
            self._leave(walk, part, decoded_NH)
        return decoded_NH.to(dtype)

    def _parts(self, walk: Walk, rows: Rows) -> Iterator[slice]:
        """Rows that are coded at once: a column where it needs the one before, else all."""
        if self._context.sequential:
            yield from walk.columns()
            return
        for column in walk.columns():
            walk.leave(column)
        yield slice(0, len(rows))

    def _sizes(self, rows: Rows) -> list[int]:
        counts = [part.stop - part.start for part in rows.columns()] if self._context.sequential else [len(rows)]
        return [self.learner.spec.payload_bytes(count) for count in counts]

    def _known(self, walk: Walk, rows: Rows, part: slice) -> torch.Tensor:
        tokens_N = None if rows.tokens_N is None else rows.tokens_N[part]
        return self._context.rows(walk.first_N[part], tokens_N, walk.before_NH[part])

    def _leave(self, walk: Walk, part: slice, decoded_NH: torch.Tensor) -> None:
        if self._context.sequential:
            walk.leave(part, unit_rows(decoded_NH[part]))
