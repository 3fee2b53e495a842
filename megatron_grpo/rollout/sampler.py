"""Sampling as a pipeline program: micro-batches circle through the stages, ids come back from the last one.

Every rank runs the same loop over the micro-batches in flight, a column of each in turn. Sends never block and receives
follow one order, so a stage works on one micro-batch while the others hold the rest. Where a batch is cut into more
than are in flight, a finished one makes room for the next. Legend: B micro-batch, P prompt columns, R response columns,
N live rows, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_grpo.ops.rows import Origin, Rows, SequenceMemory, carrying_rows
from megatron_grpo.ops.sampling import row_uniforms, sample
from megatron_grpo.parallel.groups import ParallelGroups
from megatron_grpo.parallel.link import Kind, Ledger
from megatron_grpo.rollout.batch import Batch, pad_prompts


class DecodeStage(Protocol):
    """The layers of one stage with a KV cache for each place in flight."""

    def open(self, place: int, padding_BP: torch.Tensor, columns: int) -> None:
        """Make an empty cache of ``columns`` columns; ``padding_BP`` is True on left padding."""
        ...

    def forward(self, place: int, x: torch.Tensor, start: int, rows: Rows) -> torch.Tensor:
        """Run columns from ``start``: ids ``[B, n]`` on the first stage, hidden ``[B, n, H]`` elsewhere.

        ``rows`` are those that carry tokens.

        Returns hidden ``[B, n, H]``, or on the last stage the logits ``[B, V]`` of the last column, whole on every
        tensor rank.
        """
        ...


class RowLink(Protocol):
    """The boundary to the next and from the previous stage. ``kind`` is what the ledger calls the current pass."""

    @property
    def kind(self) -> Kind: ...

    def send_rows(self, x_NH: torch.Tensor, rows: Rows) -> dist.Work: ...

    def receive_rows(self, rows: Rows) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How the next id is drawn. ``temperature`` ``None`` is greedy. ``valid`` is the true vocabulary size."""

    temperature: float | None
    top_k: int
    top_p: float
    max_response: int
    valid: int
    end_ids: frozenset[int]
    pad_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A micro-batch of which every response has ended.

    Attributes:
        rows: of the batch.
        responses_BR: int64 ids, padded on the right.
        lengths_B: tokens of each, the end token included.
    """

    rows: slice
    responses_BR: torch.Tensor
    lengths_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Columns that go through the stages at once: the prompt, or the id drawn last.

    Attributes:
        carrying_Bn: True on columns whose rows cross (no padding, no finished sequence).
        start: first column in the sequence.
    """

    ids_Bn: torch.Tensor
    carrying_Bn: torch.Tensor
    start: int


@dataclass(slots=True)
class _Micro:
    """One micro-batch in flight."""

    rows: slice
    origin: Origin
    ids_BR: torch.Tensor
    logp_BR: torch.Tensor
    live_B: torch.Tensor
    lengths_B: torch.Tensor
    column: int = 0  # to be decided next
    memory: SequenceMemory = field(default_factory=SequenceMemory)
    sends: list[dist.Work] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.column == self.ids_BR.shape[1] or not bool(self.live_B.any())

    def wait_for_sends(self) -> None:
        """Let go of what was sent for the column before: its ids are back, so all of it has arrived."""
        for work in self.sends:
            work.wait()
        self.sends.clear()

    def record(self, column: int, ids_N: torch.Tensor, rule: SamplingRule) -> None:
        """Enter the ids drawn for the live rows; rows that drew an end token are live no more."""
        live_B = self.live_B.clone()
        self.ids_BR[live_B, column] = ids_N.long()
        self.lengths_B += live_B
        ends = torch.tensor(sorted(rule.end_ids), device=ids_N.device)
        self.live_B[live_B] = ~torch.isin(ids_N.long(), ends)


class PipelineSampler:
    """Samples whole batches. Every rank of a replica calls :meth:`sample` with the same arguments.

    Args:
        stage: this rank's layers.
        link: this rank's boundaries.
        groups: where this rank stands.
        stages: of the policy; the ids go back to all but the last, wherever they are.
        in_flight: micro-batches in the pipeline at a time; at least the number of stages keeps every stage busy.
        micro_batches: that a batch is cut into.
        ledger: counts the ids that go back.
        device: where the work happens.
    """

    def __init__(
        self,
        stage: DecodeStage,
        link: RowLink,
        groups: ParallelGroups,
        *,
        stages: int,
        in_flight: int,
        micro_batches: int,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        self._stage, self._link, self._groups = stage, link, groups
        self._stages, self._in_flight, self._micro_batches = stages, in_flight, micro_batches
        self._ledger, self._device = ledger, device

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        row_ids: torch.Tensor,
        rule: SamplingRule,
        hand_on: Callable[[Finished], None] = lambda done: None,
        first: int = 0,
    ) -> Batch:
        """Sample one response a prompt. Collective over the replica.

        Args:
            prompts: ids of each prompt.
            row_ids: int64 ``[B]``; with the rule's seed and the column they alone decide a draw, so a sequence is the
                same in any batch, in any number of micro-batches.
            first: number of the first sequence in the rollout, of which others may have been drawn before.
            hand_on: given every micro-batch as soon as it has ended, each once, on every rank.

        Returns:
            The same batch on every rank, advantages zero. Sampler log-probs are true on the last stage, zero elsewhere.
        """
        tokens_BP, lengths_B = pad_prompts(prompts, rule.pad_id)
        tokens_BP, lengths_B = tokens_BP.to(self._device), lengths_B.to(self._device)
        prompt_columns = tokens_BP.shape[1]
        drawn = Origin(torch.arange(first, first + len(prompts), device=self._device), prompt_columns - lengths_B)
        micros = self._split(drawn, rule)
        padding_BP = torch.arange(prompt_columns, device=self._device) < (prompt_columns - lengths_B)[:, None]
        waiting = iter(micros)
        flight: list[_Micro | None] = list(islice(waiting, self._in_flight))
        while any(flight):
            for place, micro in enumerate(flight):
                if micro is None:
                    continue
                self._learn(micro, rule)
                if micro.is_finished:
                    hand_on(Finished(micro.rows, micro.ids_BR, micro.lengths_B))
                    flight[place] = micro = next(waiting, None)
                    if micro is None:
                        continue
                if micro.column == 0:
                    padding = padding_BP[micro.rows]
                    self._stage.open(place, padding, prompt_columns + rule.max_response - 1)
                    block = _Block(tokens_BP[micro.rows], ~padding, start=0)
                else:
                    ids = micro.ids_BR[:, micro.column - 1 : micro.column]
                    block = _Block(ids, micro.live_B[:, None], start=prompt_columns + micro.column - 1)
                self._advance(place, micro, block, row_ids, rule)
        return self._assemble(tokens_BP, lengths_B, drawn, micros)

    def _split(self, drawn: Origin, rule: SamplingRule) -> list[_Micro]:
        """About equal micro-batches, at most ``micro_batches``."""
        batch = len(drawn.owners_B)
        size = -(-batch // self._micro_batches)
        micros = []
        for start in range(0, batch, size):
            count = min(size, batch - start)
            ids_BR = torch.full((count, rule.max_response), rule.pad_id, dtype=torch.int64, device=self._device)
            micros.append(
                _Micro(
                    rows=slice(start, start + count),
                    origin=Origin(drawn.owners_B[start : start + count], drawn.padding_B[start : start + count]),
                    ids_BR=ids_BR,
                    logp_BR=torch.zeros(count, rule.max_response, device=self._device),
                    live_B=torch.ones(count, dtype=torch.bool, device=self._device),
                    lengths_B=torch.zeros(count, dtype=torch.int64, device=self._device),
                )
            )
        return micros

    def _advance(self, place: int, micro: _Micro, block: "_Block", row_ids: torch.Tensor, rule: SamplingRule) -> None:
        """One micro-batch through this stage; the last stage draws the next ids and sends them back."""
        ids_Bn, carrying_Bn, start, column = block.ids_Bn, block.carrying_Bn, block.start, micro.column
        rows = carrying_rows(carrying_Bn, ids_Bn, start=start, memory=micro.memory, origin=micro.origin)
        x = ids_Bn
        if not self._groups.is_first_stage:
            x = rows.scatter(self._link.receive_rows(rows), ids_Bn.shape[1]).transpose(0, 1)
        micro.column += 1
        out = self._stage.forward(place, x, start, rows)
        if not self._groups.is_last_stage:
            micro.sends.append(self._link.send_rows(rows.select(out.transpose(0, 1)), rows))
            return
        uniforms_B = row_uniforms(rule.seed, row_ids[micro.rows].to(self._device), column)
        ids_B, logp_B = sample(
            out,
            temperature=rule.temperature,
            top_k=rule.top_k,
            top_p=rule.top_p,
            valid=rule.valid,
            uniform_B=uniforms_B,
        )
        micro.logp_BR[:, column] = torch.where(micro.live_B, logp_B, 0.0)
        ids_N = ids_B[micro.live_B].to(torch.int32)
        self._send_back(micro, ids_N)
        micro.record(column, ids_N, rule)

    def _learn(self, micro: _Micro, rule: SamplingRule) -> None:
        """Enter what the last stage drew for the live rows, which it alone knows yet; then nothing is on its way."""
        if not self._groups.is_last_stage and micro.column > 0:
            ids_N = torch.empty(int(micro.live_B.sum()), dtype=torch.int32, device=self._device)
            dist.recv(ids_N, src=self._groups.last_stage_rank, group=self._groups.feedback)
            micro.record(micro.column - 1, ids_N, rule)
        micro.wait_for_sends()

    def _send_back(self, micro: _Micro, ids_N: torch.Tensor) -> None:
        for stage in range(self._groups.layout.pipeline - 1):
            peer = dist.get_global_rank(self._groups.feedback, stage)
            work = dist.isend(ids_N, dst=peer, group=self._groups.feedback)
            assert work is not None
            micro.sends.append(work)
        size = ids_N.nbytes * (self._stages - 1)
        self._ledger.add("pipeline", self._link.kind, "backward", sent=size, dense=size)

    def _assemble(
        self, tokens_BP: torch.Tensor, prompt_lengths_B: torch.Tensor, drawn: Origin, micros: list[_Micro]
    ) -> Batch:
        lengths_B = torch.cat([micro.lengths_B for micro in micros])
        width = int(lengths_B.max())
        responses_BR = torch.cat([micro.ids_BR for micro in micros])[:, :width]
        return Batch(
            tokens_BS=torch.cat([tokens_BP, responses_BR], dim=1),
            prompt_columns=tokens_BP.shape[1],
            prompt_lengths_B=prompt_lengths_B,
            response_lengths_B=lengths_B,
            sampler_logp_BR=torch.cat([micro.logp_BR for micro in micros])[:, :width],
            advantages_B=torch.zeros(len(lengths_B), device=self._device),
            drawn_B=drawn.owners_B,
        )
