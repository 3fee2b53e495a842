"""Packed rows of a fitted transform: what a linear prediction leaves over, in few bits a channel.

The prediction uses what both ends know: the token's embedding, a frozen copy of which both hold, and the row before it
in its sequence as the receiver decoded it. With the latter, rows are coded column by column.
Legend: N rows, B sequences, H hidden, V vocabulary, C numbers of context.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from megatron_grpo.boundary.codec import Codec, Encoded, Learner
from megatron_grpo.ops.rows import Rows, Walk
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
    """What both ends know of a row before it crosses.

    Args:
        predict: a flag for the first row of a sequence is always in it; further the embedding, and the row before.
        embedding_VH: where ``predict`` wants it.

    Attributes:
        size: numbers, C, the row before among them.
        chained: whether it is.
    """

    def __init__(self, predict: Predict, hidden: int, embedding_VH: torch.Tensor | None) -> None:
        assert predict == "none" or embedding_VH is not None, "a prediction needs the embedding"
        self._embedding_VH = None if predict == "none" else embedding_VH
        self.chained = predict == "embedding+previous"
        self.size = 1 + hidden * ("none", "embedding", "embedding+previous").index(predict)

    def known(self, first_N: torch.Tensor, tokens_N: torch.Tensor | None) -> torch.Tensor:
        """All but the row before, ``[N, C]`` or ``[N, C - H]``."""
        first_N1 = first_N[:, None].float()
        if self._embedding_VH is None:
            return first_N1
        assert tokens_N is not None, "rows without token ids cannot be predicted"
        self._embedding_VH = self._embedding_VH.to(tokens_N.device)
        return torch.cat([first_N1, self._embedding_VH[tokens_N]], dim=-1)


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
        walk = Walk(rows, self._purpose, x_NH.shape[-1])
        context_NC = self._context.known(walk.first_N, rows.tokens_N)
        if self._context.chained:
            unit_NH = unit_rows(x_NH)
            context_NC = torch.cat([context_NC, walk.before(unit_NH)], dim=-1)
            walk.leave(unit_NH)
        self._moments.add(x_NH, context_NC)

    def observe_gradient(self, grad_NH: torch.Tensor) -> None:
        if not self.wants_gradients:
            return
        if self._moments is None:
            self._moments = self._no_moments(grad_NH.device)
        self._moments.add_gradients(grad_NH)

    def add(self, sums: Sequence[torch.Tensor]) -> None:
        """Observe at once what another learner of the same context and metric has: its :meth:`sums`."""
        if self._moments is None:
            self._moments = self._no_moments(sums[0].device)
        for mine, theirs in zip(self._moments.tensors(), sums, strict=True):
            mine.add_(theirs)

    def sums(self) -> list[torch.Tensor]:
        return [] if self._moments is None else self._moments.tensors()

    def stage(self) -> None:
        moments, self._moments = self._moments, None
        if moments is None or not all(bool(part.isfinite().all()) for part in moments.tensors()):
            return
        if self._history is None:
            self._history = self._no_moments(moments.second_DD.device)
        weight = HISTORY if bool(moments.tally_4[0] > 0) else 1.0  # gradients alone age nothing
        for old, new in zip(self._history.tensors(), moments.tensors(), strict=True):
            old.mul_(weight).add_(new)
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


class TransformCodec(Codec):
    """Codes of :class:`Transform`'s fit: one uint8 vector, of a size that follows from the rows alone.

    Args:
        purpose: names what this codec keeps in a sequence's memory; different for every boundary.
    """

    def __init__(self, learner: Transform, context: Context, purpose: str) -> None:
        self.learner: Transform = learner
        self._context, self._purpose = context, purpose

    def payload(self, rows: Rows) -> torch.Tensor:
        size = self.learner.spec.payload_bytes(len(rows))
        return torch.empty(size, dtype=torch.uint8, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        fit = self.learner.to(x_NH.device).current
        payload, decoded_NH = encode_rows(fit, x_NH, *self._before(rows))
        return Encoded(payload, decoded_NH.to(x_NH.dtype))

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        fit = self.learner.to(payload.device).current
        return decode_rows(fit, payload, len(rows), *self._before(rows)).to(dtype)

    def _before(self, rows: Rows) -> tuple[torch.Tensor, Walk | None]:
        """What is known of the rows, and the way along them where the row before belongs to it."""
        walk = Walk(rows, self._purpose, self.learner.spec.hidden)
        return self._context.known(walk.first_N, rows.tokens_N), walk if self._context.chained else None
