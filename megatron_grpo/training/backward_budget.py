"""``boundary.backward_budget=auto``: how many bytes gradients take, by what these leave of the weights' gradient.

What is held is the cosine of the coded with the uncompressed gradient of the weights themselves: rows with little
energy may decide it where their activations are large, so what is lost of the rows does not tell.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_grpo.anchor.gate import cosine
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import BoundaryConfig, layer_split
from megatron_grpo.ops.budget import lowest_rung
from megatron_grpo.ops.merge import agreement_sums
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.training.loss import Replay
from megatron_grpo.training.policy import Policy

LAYERS = "decoder.layers."


class BackwardBudget:
    """The budget in force, the same at every boundary.

    Args:
        stages: of the pipeline.
        run_pass: forward and backward of a minibatch; gradients end up in the engine. Collective: every rank.
    """

    def __init__(
        self, cfg: BoundaryConfig, policy: Policy, stages: int, run_pass: Callable[[Replay, Pass], Any]
    ) -> None:
        self._target, self._policy, self._run_pass = cfg.backward_cosine, policy, run_pass
        self._boundaries = stages - 1
        split = layer_split(policy.shape.layers, stages)
        self._stage_of = [stage for stage, size in enumerate(split) for _ in range(size)]
        self.share = cfg.budget_of("backward")

    def check(self, replay: Replay) -> dict[str, float]:
        """Choose the budget by a minibatch at the weights as they are; metric keys. Collective: every rank.

        One uncompressed backward pass, then one through every budget that is asked for, without error feedback, whose
        remainders stay as they are. All of it counts as basis, and no gradient is left behind. A gradient of zeros, or
        one that is not finite, says nothing.
        """
        self._run_pass(replay, Pass("basis", dense_gradients=True, reuses=replay.step))
        dense = [gradient.clone() for _, gradient in self._gradients()]
        norms = self._compared(dense)[:, 1]
        self._policy.engine.discard_gradients()
        if not bool((norms.isfinite() & (norms > 0)).all()):
            return {}

        def cosine_at(share: float) -> float:
            self.use(share)
            self._run_pass(replay, Pass("basis", reuses=replay.step))
            table = self._compared(dense)
            self._policy.engine.discard_gradients()
            return min(cosine(sums) for sums in table)

        share, found = lowest_rung(cosine_at, self._target)
        self.use(share)
        return {"boundary/backward_budget": share, "boundary/backward_cosine": found}

    def use(self, share: float) -> None:
        """Put a budget to use. Every rank alike."""
        self.share = share
        self._policy.boundaries.set_backward_budget(share)

    def _gradients(self) -> list[tuple[int, torch.Tensor]]:
        """This rank's shards that count, of layers behind which there is a boundary, each with its stage."""
        engine, first = self._policy.engine, self._policy.stage.layers.start
        shards = zip(engine.gradient_fragments(), engine.gradients(), engine.counted_once(), strict=True)
        found = []
        for fragment, gradient, counts in shards:
            if counts and fragment.name is not None and fragment.name.startswith(LAYERS):
                stage = self._stage_of[first + int(fragment.name.removeprefix(LAYERS).split(".")[0])]
                if stage < self._boundaries:
                    found.append((stage, gradient))
        return found

    def _compared(self, dense: list[torch.Tensor]) -> torch.Tensor:
        """``ops.merge.agreement_sums`` of the engine's gradients with ``dense``, fp64 ``[stages - 1, 5]``, the same on
        every rank. Collective: every rank."""
        table = torch.zeros(self._boundaries, 5, dtype=torch.float64, device=self._policy.device)
        for (stage, gradient), other in zip(self._gradients(), dense, strict=True):
            table[stage] += agreement_sums(gradient, other).to(table.device)
        return sum_over(table, self._policy.groups.policy)
