"""One tick: the anchor where it is due, the fast pass, the merge, clipping, the update.

The circuit of a tick, in order: remember -> anchor -> fast -> merge -> clip -> step.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_grpo.anchor.alarm import Alarm
from megatron_grpo.anchor.gate import build_gate, cosine
from megatron_grpo.anchor.merger import Fading, Shards, build_memory, build_merger
from megatron_grpo.anchor.schedule import AnchorSchedule
from megatron_grpo.anchor.snapshots import Snapshot, Snapshots
from megatron_grpo.backends.megatron.schedule import finish_gradients, forward_backward
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import Config, OptimConfig
from megatron_grpo.ops.host import keeping
from megatron_grpo.ops.merge import agreement_sums
from megatron_grpo.ops.signs import Signal
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.training.backward_budget import BackwardBudget
from megatron_grpo.training.loss import SUMS, PolicyLoss, Replay, model_inputs
from megatron_grpo.training.policy import Policy

CLIP_EPS = 1e-6
"""Added to the norm when clipping, as torch does."""

NEGLIGIBLE = 1e-12
"""An M of at most this norm merges nothing."""


@dataclass(slots=True)
class TickReport:
    """What one tick tells the metrics. Sums are this rank's; norms and agreement are the whole model's.

    Attributes:
        sums: ``loss.SUMS`` over this replica's minibatch, on the last stage; zero elsewhere.
        gaps: |trainer - sampler| of the compared tokens of this replica, on the last stage.
        values: metric keys that are already global.
        seconds: by metric key.
    """

    sums: torch.Tensor
    gaps: torch.Tensor
    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, key: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.sums.is_cuda:
            torch.cuda.synchronize(self.sums.device)
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start


class TickRunner:
    """Runs ticks and holds what lasts between them: M, the merger, snapshots. Every rank calls everything.

    Args:
        cfg: the whole config; this is where its parts come together.
        policy: this rank's part of the policy.
    """

    def __init__(self, cfg: Config, policy: Policy) -> None:
        self._cfg, self._policy = cfg, policy
        self._loss = PolicyLoss(cfg.grpo, cfg.rollout, policy.vocab)
        self._schedule = AnchorSchedule(cfg.anchor.cadence, cfg.anchor.delay) if cfg.anchor.enabled else None
        device, self._on_host = policy.engine.gradient_device, cfg.anchor.place == "cpu"
        self._keep = keeping(device, on_host=self._on_host)
        self._memory = build_memory(cfg.anchor, cfg.merger, self._keep, device)
        self._merger = build_merger(cfg.merger, self._keep)
        self._fading = Fading(cfg.merger.decay, cfg.merger.hold)
        self._gate = build_gate(cfg.merger, self._keep)
        self.alarm = Alarm(cfg.anchor, cfg.merger)
        self._snapshots = Snapshots(self._keep)
        self._budget = (
            BackwardBudget(cfg.boundary, policy, cfg.parallel.pipeline, self._pass)
            if cfg.boundary.budgets_itself
            else None
        )
        self._last_arrival: int | None = None
        self.skipped = 0

    def rollouts(self) -> set[int]:
        """Steps whose rollouts a later anchor replays."""
        return {step for step in self._snapshots.steps() if step is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the engine and the codecs."""
        return {
            "memory": self._memory.state_dict(),
            "merger": self._merger.state_dict(),
            "gate": self._gate.state_dict(),
            "alarm": self.alarm.state_dict(),
            "snapshots": self._snapshots.state_dict(),
            "last_arrival": self._last_arrival,
            "skipped": self.skipped,
            "backward_budget": None if self._budget is None else self._budget.share,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memory.load_state_dict(state["memory"])
        self._merger.load_state_dict(state["merger"])
        self._gate.load_state_dict(state["gate"])
        self.alarm.load_state_dict(state["alarm"])
        self._snapshots.load_state_dict(state["snapshots"])
        self._last_arrival = state["last_arrival"]
        self.skipped = state["skipped"]
        if self._budget is not None:
            self._budget.use(state["backward_budget"])

    def run(
        self,
        tick: int,
        replay: Replay,
        *,
        uncompressed: bool,
        learn: bool = False,
        delta: bool = False,
        check: bool = False,
    ) -> TickReport:
        """One tick on ``replay``. Collective: every rank.

        Args:
            uncompressed: boundaries cross dense, and what learns from such passes learns from this one.
            learn: senders learn from their own rows (``boundary.basis=self``); the caller refreshes.
            delta: what kept rows have moved crosses (``boundary.send_once=delta``).
            check: the backward budget is chosen anew, where it is chosen at all.
        """
        policy, schedule = self._policy, self._schedule
        device = policy.device
        report = TickReport(torch.zeros(len(SUMS), dtype=torch.float64, device=device), torch.empty(0, device=device))
        remembers = schedule is not None and schedule.remembers(tick)
        if remembers:
            self._snapshots.put(tick, Snapshot(policy.engine.weights(on_host=self._on_host), replay.paired()))
        fires = schedule is not None and schedule.fires(tick)
        with report.timed("time/anchor"):
            arrived = fires and self._fire(tick)
        with report.timed("time/train"):
            if check and self._budget is not None:
                report.values |= self._budget.check(replay)
            self._fast(replay, report, uncompressed=uncompressed, learn=learn, delta=delta)
        with report.timed("time/merge"):
            self._merge(tick, report, remembers=remembers, fires=fires, arrived=arrived)
        with report.timed("time/train"):
            self._update(tick, report)
        return report

    def _pass(self, replay: Replay, plan: Pass) -> list[Any]:
        """Forward and backward of a minibatch; gradients end up averaged in the engine's shards."""
        policy = self._policy
        inputs, plan.rows = model_inputs(replay, self._cfg.train.micro_batch)
        finish = partial(finish_gradients, policy.stage, policy.groups.embedding)
        # The engine averages over replicas; the loss is a sum over them.
        with policy.engine.accumulating(finish, plan):
            return forward_backward(
                policy.stage, policy.link, inputs, plan, self._loss, scale=policy.groups.layout.data
            )

    def observe(self, replay: Replay, plan: Pass) -> None:
        """A pass that only teaches: its gradients are dropped. Collective: every rank."""
        self._pass(replay, plan)
        self._policy.engine.discard_gradients()

    def _fast(self, replay: Replay, report: TickReport, *, uncompressed: bool, learn: bool, delta: bool) -> None:
        both = uncompressed and self._learns_from_dense
        plan = Pass(
            "fast",
            dense=uncompressed,
            observe="both" if both else "sender" if learn else None,
            reuses=replay.step,
            delta=delta,
        )
        collected = self._pass(replay, plan)
        if collected:
            report.sums = torch.stack([sums for sums, _ in collected]).sum(0)
            report.gaps = torch.cat([gaps for _, gaps in collected])
        if both:
            self._refresh()

    @property
    def _learns_from_dense(self) -> bool:
        return self._cfg.boundary.basis == "anchor"

    def _fire(self, tick: int) -> bool:
        """Replay the remembered tick uncompressed, in place; M learns its gradient, the bases learn its boundaries.

        With ``boundary.anchor_budget`` gradients are coded all the same, and no basis learns.

        Returns:
            Whether M learned: a gradient that is not finite is left out.
        """
        assert self._schedule is not None
        policy = self._policy
        snapshot = self._snapshots.get(tick - self._schedule.delay)
        with policy.engine.at_weights(snapshot.weights):
            plan = Pass(
                "anchor",
                dense=True,
                observe="both" if self._learns_from_dense else None,
                reuses=snapshot.batch.step,
            )
            self._pass(snapshot.batch, plan)
        finite = bool(policy.engine.gradient_norm().isfinite())
        if finite:
            self._memory.arrive(policy.engine.gradients())
        policy.engine.discard_gradients()
        if self._learns_from_dense:
            self._refresh()
        return finite

    def _refresh(self) -> None:
        """After a dense pass: what it taught is staged, and with ``boundary.commit: tick`` in force at once."""
        self._policy.link.refresh(self._policy.groups.data)
        if self._cfg.boundary.commit == "tick":
            self._policy.boundaries.commit()

    def _merge(self, tick: int, report: TickReport, *, remembers: bool, fires: bool, arrived: bool) -> None:
        schedule, memory, merger = self._schedule, self._memory, self._merger
        if schedule is None:
            return
        fast = self._policy.engine.gradients()
        self._remember_fast(tick, fast, kept=remembers and merger.needs_fast)
        report.values["anchor/fired"] = float(fires)
        if arrived and memory.m is not None:
            self._last_arrival = tick
            merger.arrive(memory.m, self._snapshots.get(tick - schedule.delay).fast)
        if fires:
            self._snapshots.forget(tick - schedule.delay)
        age = schedule.age(tick, self._last_arrival)
        report.values["merger/weight"] = 0.0
        if age is None or memory.m is None:
            return
        report.values["anchor/age"] = float(age)
        sums, gate_sums = self._agreement(fast, memory.m)
        report.values |= agreement_metrics(sums, cosine_too=memory.has_size)
        if self._gate.mean is not None and memory.has_size:
            report.values["merger/gate_cos"] = cosine(gate_sums)
        share = self._gate.share(gate_sums)
        if sums[2].sqrt() > NEGLIGIBLE and share > 0.0:
            fade = self._fading.left(age - schedule.delay) * self.alarm.factor
            guide = self._gate.mean if self._gate.elementwise else None
            report.values["merger/weight"] = share * merger.merge(fast, memory.m, fade=fade, mean=guide)

    def _remember_fast(self, tick: int, fast: Shards, *, kept: bool) -> None:
        """The fast gradient as the merger (``kept``) and the gate want it. Collective: every rank.

        One that is not finite is left out: it would poison the ticks to come.
        """
        if not (kept or self._gate.watches) or not bool(self._policy.engine.gradient_norm().isfinite()):
            return
        if kept:
            self._snapshots.get(tick).fast = self._keep(gradient.float().clone() for gradient in fast)
        self._gate.watch(fast)

    def _agreement(self, fast: Shards, m: Signal) -> tuple[torch.Tensor, torch.Tensor]:
        """``ops.merge.agreement_sums`` over the whole model: of the fast gradient with M ``[5]``; and of its running
        mean with M, then the number of elements ``[6]`` (zeros where no mean is kept). Collective: every rank."""
        total = torch.zeros(11, dtype=torch.float64, device=self._policy.device)
        means: Signal | list[None] = self._gate.mean or [None] * len(fast)
        for gradient, anchor, mean, counts in zip(fast, m, means, self._policy.engine.counted_once(), strict=True):
            if counts:
                total[:5] += agreement_sums(gradient, anchor).to(total.device)
                if mean is not None:
                    total[5:10] += agreement_sums(mean, anchor).to(total.device)
                    total[10] += mean.numel()
        total = sum_over(total, self._policy.groups.policy)
        return total[:5], total[5:]

    def _update(self, tick: int, report: TickReport) -> None:
        """Clip by the true global norm and step; a gradient that is not finite skips the tick, on every rank alike."""
        engine, optim = self._policy.engine, self._cfg.optim
        norm = engine.gradient_norm()
        lr = learning_rate(optim, tick)
        report.values |= {"policy/grad_norm": norm.item(), "train/lr": lr}
        if not bool(norm.isfinite()):
            self.skipped += 1
            engine.discard_gradients()
        else:
            factor = (optim.clip / (norm + CLIP_EPS)).clamp(max=1.0)
            for gradient in engine.gradients():
                gradient.mul_(factor.to(gradient.device))
            engine.step(lr)
        report.values["train/skipped"] = float(self.skipped)


def learning_rate(optim: OptimConfig, tick: int) -> float:
    """Of ``tick``, from 0: up to ``lr`` in equal steps over ``warmup_ticks``, then that. It follows from the tick
    alone, so a resumed run has no schedule to find its place in."""
    return optim.lr * min(1.0, (tick + 1) / max(1, optim.warmup_ticks))


def agreement_metrics(sums: torch.Tensor, *, cosine_too: bool) -> dict[str, float]:
    """Sign agreement, and where M has more than signs the cosine, of the fast gradient with M.

    ``sums``: ``ops.merge.agreement_sums``.
    """
    *_, agree, compared = sums.tolist()
    metrics = {"anchor/sign_agreement": agree / compared if compared > 0 else 0.0}
    return metrics | ({"anchor/cos_fast": cosine(sums)} if cosine_too else {})
