"""From what each rank knows to one metrics row, equal on every rank, in two reductions a tick."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_grpo.config import GrpoConfig
from megatron_grpo.ops.advantages import dead_groups
from megatron_grpo.parallel.collectives import broadcast_from, sum_over
from megatron_grpo.parallel.groups import ParallelGroups
from megatron_grpo.parallel.link import byte_metrics
from megatron_grpo.training.loss import SUMS
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.scoring import RewardTimes
from megatron_grpo.training.tick import TickReport


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """What a step's rollout took.

    Attributes:
        seconds: of sampling and scoring.
        reward: of scoring alone.
        tokens: of all responses that were sampled, those that others took the place of included.
        fresh: sequences that were drawn to take others' places.
    """

    seconds: float
    reward: RewardTimes
    tokens: int
    fresh: int = 0


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """What a replica knows of its step's samples; every rank of the replica holds the same. NaN is no score.

    Attributes:
        reward_BG: what the advantages are made of, by prompt and sample.
        raw_BG: the same without what depends on the response's length.
        part_KB: the rewards that it is the sum of.
    """

    reward_BG: torch.Tensor
    raw_BG: torch.Tensor
    part_KB: torch.Tensor
    parsed_B: torch.Tensor
    lengths_B: torch.Tensor
    truncated_B: torch.Tensor
    times: RolloutTimes

    def sums(self) -> torch.Tensor:
        """fp64: sequences, scored ones, reward, squared reward, parse failures, tokens, truncated, drawn anew,
        groups, dead groups, tokens sampled; then the sum and the number of scores of each part."""
        reward = self.reward_BG.double()
        values = [
            float(reward.numel()),
            (~reward.isnan()).sum(),
            reward.nansum(),
            reward.square().nansum(),
            (~self.parsed_B).sum(),
            self.lengths_B.sum(),
            self.truncated_B.sum(),
            float(self.times.fresh),
            float(len(reward)),
            dead_groups(self.raw_BG).sum(),
            float(self.times.tokens),
        ]
        for part_B in self.part_KB.double():
            values += [part_B.nansum(), (~part_B.isnan()).sum()]
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=reward.device) for value in values])


class Measure:
    """Makes rows. Every rank calls :meth:`row` for every tick: no reduction is left to the ranks that own a number."""

    def __init__(self, policy: Policy, terms: GrpoConfig, rewards: Sequence[str]) -> None:
        self._policy = policy
        self._terms, self._rewards = terms, tuple(rewards)
        self._gaps: list[torch.Tensor] = []
        self._gap_sums = torch.zeros(2, dtype=torch.float64)
        groups = policy.groups
        self._leads_replica = groups.at.pipeline == 0 and groups.at.tensor == 0
        self._owns_loss = groups.is_last_stage and groups.at.tensor == 0

    def row(self, report: TickReport, figures: RolloutFigures | None) -> dict[str, float]:
        """The metrics of one tick: sums over the world, then ratios. Collective: every rank."""
        policy = self._policy
        device = policy.device
        bytes_sent = sum_over(policy.ledger.take().to(device), policy.groups.policy)
        sums = report.sums if self._owns_loss else torch.zeros_like(report.sums)
        width = 11 + 2 * len(self._rewards)
        rollout = torch.zeros(width, dtype=torch.float64, device=device)
        if figures is not None and self._leads_replica:
            rollout = figures.sums()
        errors = policy.boundaries.take_errors().to(device)
        table = sum_over(torch.cat([sums, rollout, errors.flatten()]), policy.groups.policy)
        tokens, clipped, entropy, kl, compared, gap = table[:6].tolist()
        row: dict[str, float] = dict(byte_metrics(bytes_sent.cpu()))
        row |= report.values
        row |= {"policy/clip_frac": clipped / max(tokens, 1.0)}
        if self._terms.entropy_coef != 0.0:
            row["policy/entropy"] = entropy / max(tokens, 1.0)
        if self._terms.kl_coef != 0.0:
            row["policy/kl"] = kl / max(tokens, 1.0)
        row |= q_errors(table[len(SUMS) + width :].view_as(errors))
        for key in ("time/train", "time/anchor", "time/merge"):
            row[key] = report.seconds.get(key, 0.0)
        self._gaps.append(report.gaps)
        self._gap_sums += torch.tensor([gap, compared])
        if figures is not None:
            row["rollout/logprob_gap"] = (self._gap_sums[0] / self._gap_sums[1].clamp(min=1.0)).item()
            row["rollout/logprob_gap_median"] = gap_median(torch.cat(self._gaps), policy.groups, device)
            self._gaps.clear()
            self._gap_sums.zero_()
            times = figures.times
            sampling = times.seconds - times.reward.added
            row |= rollout_metrics(table[len(SUMS) : len(SUMS) + width].tolist(), sampling, self._rewards)
            row["time/rollout"] = sampling
            row |= {"time/reward": times.reward.added, "time/reward_hidden": times.reward.hidden}
        return row


def gap_median(gaps: torch.Tensor, groups: ParallelGroups, device: torch.device) -> float:
    """Median over all replicas' response tokens of ``gaps`` (the last stage's count), known to every rank.

    Collective: every rank.
    """
    if groups.layout.data > 1 and groups.is_last_stage:
        counts = [torch.zeros(1, dtype=torch.int64, device=gaps.device) for _ in range(groups.data.size())]
        dist.all_gather(counts, torch.tensor([len(gaps)], device=gaps.device), group=groups.data)
        width = int(max(count.item() for count in counts))
        padded = torch.nn.functional.pad(gaps.float(), (0, width - len(gaps)), value=float("nan"))
        parts = [torch.empty_like(padded) for _ in range(groups.data.size())]
        dist.all_gather(parts, padded, group=groups.data)
        gaps = torch.cat(parts)
    median = gaps.float().nanmedian() if len(gaps) else torch.zeros((), device=gaps.device)
    value = torch.zeros(1, device=device) + median
    return broadcast_from(value, groups.last_stage_rank, groups.pipeline).item()


def mean_of(values: torch.Tensor, groups: ParallelGroups, device: torch.device) -> float:
    """Mean over all replicas of ``values`` (the last stage's count), known to every rank. Collective: every rank."""
    sums = torch.tensor([values.double().sum(), len(values)], dtype=torch.float64, device=device)
    total, count = broadcast_from(sum_over(sums, groups.data), groups.last_stage_rank, groups.pipeline).tolist()
    return float(total / max(count, 1.0))


def q_errors(table: torch.Tensor) -> dict[str, float]:
    """Q error of each direction, norm(X - decoded) / norm(X), and drift, norm(X - kept) / norm(X): means over
    boundaries; absent where nothing crossed, or served."""
    metrics = {}
    for number, key in enumerate(("boundary/q_error_fwd", "boundary/q_error_bwd", "boundary/drift")):
        residual, norm = table[:, number].unbind(-1)
        if bool((norm > 0).any()):
            metrics[key] = (residual[norm > 0] / norm[norm > 0]).sqrt().mean().item()
    return metrics


def rollout_metrics(sums: list[float], seconds: float, rewards: Sequence[str]) -> dict[str, float]:
    """Rates from :meth:`RolloutFigures.sums` over replicas. Each of several ``rewards`` has its own mean, if it scored
    anything."""
    sequences, scored, reward, squares, failed, tokens, truncated, fresh, groups, dead, drawn, *parts = sums
    mean = reward / max(scored, 1.0)
    variance = max(0.0, squares / max(scored, 1.0) - mean * mean)
    metrics = {
        "reward/mean": mean,
        "reward/std": variance**0.5,
        "reward/parse_fail_frac": failed / sequences,
        "reward/unscored_frac": 1.0 - scored / sequences,
        "reward/zero_std_frac": dead / groups,
        "rollout/response_length": tokens / sequences,
        "rollout/truncated_frac": truncated / sequences,
        "rollout/resampled_frac": fresh / sequences,
        "rollout/tokens_per_s": drawn / seconds,
    }
    if len(rewards) > 1:
        for name, total, count in zip(rewards, parts[::2], parts[1::2], strict=True):
            if count > 0:
                metrics[f"rewards/{name}"] = total / count
    return metrics
