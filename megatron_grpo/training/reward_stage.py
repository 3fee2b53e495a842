"""The reward stage: one more pipeline stage, behind the policy's, that judges while the policy samples.

The last policy stage says at first what is to come (prompts and problems), then hands on every finished micro-batch
(``isend``, so it goes on sampling), and at last takes the scores back. Each tensor shard talks to the shard behind it.
Legend: B sequences of a micro-batch, K rewards, R response columns.
"""

import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron_grpo.backends.huggingface import Tokenizer, load_tokenizer
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.backends.reward_models import check_reward_models
from megatron_grpo.config import Config
from megatron_grpo.data.problem import Problem
from megatron_grpo.parallel.groups import ParallelGroups
from megatron_grpo.parallel.link import Ledger
from megatron_grpo.rollout.sampler import Finished
from megatron_grpo.training.judge import Ids, build_judge
from megatron_grpo.training.scoring import LocalPlace, Pieces, Place, Scorer
from megatron_grpo.training.timeline import Timeline

Request = tuple[Sequence[Ids], Sequence[Problem]]


class RewardStage:
    """The last policy stage's side: has batches judged on the reward stage.

    Args:
        groups: of a rank of the last policy stage, in a world with a reward stage.
        rewards: K.
        ledger: counts what crosses, the scores that come back too.
    """

    def __init__(self, groups: ParallelGroups, rewards: int, ledger: Ledger) -> None:
        self._groups, self._rewards, self._ledger = groups, rewards, ledger

    def open(self, prompts: Sequence[Ids], problems: Sequence[Problem]) -> "RewardStageJob":
        self._ask((prompts, problems))
        return RewardStageJob(self._groups, self._ledger, (self._rewards + 1, len(prompts)))

    def end(self) -> None:
        """Let the reward stage end."""
        self._ask(None)

    def _ask(self, request: Request | None) -> None:
        self._ledger.add("pipeline", "reward", "forward", sent=len(pickle.dumps(request)))
        dist.send_object_list([request], dst=self._groups.reward_stage_rank, group=self._groups.reward)


class RewardStageJob:
    """One batch on its way through the reward stage."""

    def __init__(self, groups: ParallelGroups, ledger: Ledger, shape: tuple[int, int]) -> None:
        self._groups, self._ledger, self._shape = groups, ledger, shape
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def add(self, done: Finished) -> None:
        rows = torch.tensor([done.rows.start, done.rows.stop, done.responses_BR.shape[1]])
        for message in (rows, torch.cat([done.lengths_B[:, None], done.responses_BR], dim=1).int().cpu()):
            work = dist.isend(message, dst=self._groups.reward_stage_rank, group=self._groups.reward)
            assert work is not None
            self._ledger.add("pipeline", "reward", "forward", sent=message.nbytes)
            self._sent.append((work, message))

    def result(self) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        groups, patience = self._groups, timedelta(seconds=self._groups.timeout_s)
        for work, _ in self._sent:
            work.wait(patience)
        rows, count = self._shape
        said = torch.zeros(rows * count + 1, dtype=torch.float64)
        if groups.at.tensor == 0:
            reply = dist.irecv(said, src=groups.reward_stage_rank, group=groups.reward)
            assert reply is not None
            reply.wait(patience)
            self._ledger.add("pipeline", "reward", "backward", sent=said.nbytes)
        waited = time.perf_counter() - start
        return said[:-1].view(rows, count), max(0.0, said[-1].item() - waited)


def serve(cfg: Config, groups: ParallelGroups, device: torch.device, timeline: Timeline | None = None) -> None:
    """A reward rank's part in the run: judge what comes, until the policy says that it has ended.

    SIGTERM is for the policy to act on, which still needs its scores then.
    """
    signal.signal(signal.SIGTERM, _ignored)
    tokenizer = load_tokenizer(Path(cfg.tokenizer.path or cfg.model.path))
    check_reward_models(cfg)
    with megatron_runtime(device):
        judge = build_judge(cfg, tokenizer, groups, device, timeline)
        while (request := _request(groups)) is not None:
            pieces, busy = Pieces(judge, *request), 0.0
            while not pieces.is_complete:
                rows, responses = _responses(groups)
                start = time.perf_counter()
                pieces.add(rows, responses)
                busy += time.perf_counter() - start
            if groups.at.tensor == 0:
                said = torch.cat([pieces.table.double().flatten(), torch.tensor([busy], dtype=torch.float64)])
                dist.send(said, dst=groups.last_stage_rank, group=groups.reward)


def _ignored(number: int, frame: FrameType | None) -> None:
    """A handler, and not ``SIG_IGN``, which child processes would inherit."""


def _request(groups: ParallelGroups) -> Request | None:
    received: list[Request | None] = [None]
    dist.recv_object_list(received, src=groups.last_stage_rank, group=groups.reward)
    return received[0]


def _responses(groups: ParallelGroups) -> tuple[slice, list[list[int]]]:
    """A finished micro-batch: its rows, and what was sampled."""
    rows = torch.zeros(3, dtype=torch.int64)
    dist.recv(rows, src=groups.last_stage_rank, group=groups.reward)
    start, stop, columns = rows.tolist()
    table = torch.zeros(stop - start, 1 + columns, dtype=torch.int32)
    dist.recv(table, src=groups.last_stage_rank, group=groups.reward)
    return slice(start, stop), [ids[:length] for length, *ids in table.tolist()]


@contextmanager
def scorer_of(
    cfg: Config,
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    device: torch.device,
    ledger: Ledger,
    timeline: Timeline | None = None,
) -> Iterator[Scorer]:
    """A policy rank's scorer; the reward stage, where there is one, ends with the block, unless an exception leaves it:
    that ends the processes.

    Call inside ``megatron_runtime``. Collective: every policy rank.
    """
    place: Place | None = None
    if groups.is_last_stage:
        if groups.reward is None:
            place = LocalPlace(build_judge(cfg, tokenizer, groups, device, timeline))
        else:
            place = RewardStage(groups, len(cfg.reward.weighted), ledger)
    yield Scorer(cfg.reward, place, groups, timeline)
    if isinstance(place, RewardStage):
        place.end()
