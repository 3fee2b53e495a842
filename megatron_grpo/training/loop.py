"""A run on the ranks it was given: from config to trained policy."""

import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_grpo.anchor.alarm import Alarm
from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.backends.reward_models import check_reward_models
from megatron_grpo.config import Config, ConfigError, deepspeed_settings, write_resolved
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.groups import Layout, ParallelGroups, build_groups
from megatron_grpo.parallel.placement import check_tensor_hosts, use_interface
from megatron_grpo.parallel.watch import GRACE_S, LostPeerError, Watch
from megatron_grpo.training.checkpoint import load_checkpoint, load_universal, save_checkpoint
from megatron_grpo.training.export import export_policy
from megatron_grpo.training.files import CheckpointError, CheckpointFolder
from megatron_grpo.training.metrics import NullRecorder, Recorder, RunRecord
from megatron_grpo.training.policy import Policy, policy_runtime
from megatron_grpo.training.problems import build_problems, digest_of
from megatron_grpo.training.resume import Progress, check_problems, is_universal, read_progress
from megatron_grpo.training.reward_stage import scorer_of, serve
from megatron_grpo.training.scoring import check_scored
from megatron_grpo.training.step import Row, StepRunner
from megatron_grpo.training.timeline import Timeline
from megatron_grpo.training.view import build_view

CONFIG_ERROR_GRACE_S = 10.0
"""The launcher ends the other ranks sooner once rank 0 has ended."""

STOPPED_BY_SIGNAL = 143
"""Exit code after SIGTERM: 128 + 15, with a checkpoint written."""

STOPPED_BY_ALARM = 3
"""Exit code when ``anchor.alarm: stop`` or a limit of ``train`` ended the run, with a checkpoint written; 1 is a
failure, 2 a config error."""


def train(cfg: Config, run_dir: Path, resume: str | None) -> int:
    """Run (or go on with) a training run. Called by every rank, under a launcher that set RANK and WORLD_SIZE.

    Args:
        resume: ``auto``, a checkpoint, a run directory, or ``None`` to start anew.

    Returns:
        The exit code: 0 (of a reward rank always), 143 after SIGTERM, or 3 when the collapse alarm
        (``anchor.alarm: stop``) or a limit (``train.stop_gap`` and the like) stopped the run. An exception on any rank
        ends its process at once with its traceback and code 1, so that the launcher ends the others; on other hosts
        they end with a sentence that names it and its host, as they do when a rank is killed or does not answer.
    """
    try:
        with process_group(cfg) as (groups, device):
            run_dir = _common(run_dir)
            if not groups.is_reward_stage:
                return _Run(cfg, run_dir, groups, device).go(resume)
            serve(cfg, groups, device, _timeline(cfg, run_dir, groups))
            return 0
    except ConfigError as error:
        # Every rank finds the same mistake; the first one says it, the others only if it does not.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(CONFIG_ERROR_GRACE_S)
        _end(2, str(error))
    except CheckpointError as error:
        _end(1, str(error))
    except LostPeerError as error:
        time.sleep(GRACE_S)  # let the launcher see the other one first
        _end(1, f"rank {os.environ['RANK']} failed: {error} ({str(error.__cause__).splitlines()[0]})")
    except Exception:
        _end(1, f"rank {os.environ.get('RANK', '0')} failed:\n{traceback.format_exc()}")


def _end(code: int, why: str) -> NoReturn:
    """End this process at once: destroying process groups with a collective under way would wait for other ranks."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


@contextmanager
def process_group(cfg: Config) -> Iterator[tuple[ParallelGroups, torch.device]]:
    """The world of this run, every link with ``parallel.timeout_s``; seeds and threads set. Collective: every rank.

    The launcher's environment describes the world; without one it is this process alone.
    """
    parallel = cfg.parallel
    backend = parallel.backend
    if backend == "auto":
        cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
        backend = "nccl" if cuda else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(parallel.threads)
    torch.manual_seed(cfg.train.seed)
    random.seed(cfg.train.seed)
    timeout = timedelta(seconds=parallel.timeout_s)
    use_interface(parallel.interface)
    watch: AbstractContextManager[Watch | None] = nullcontext()
    if "RANK" in os.environ:
        os.environ["MASTER_ADDR"] = os.environ["MASTER_ADDR"].strip("[]")  # of an IPv6 address; torch takes it bare
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        if world > 1:
            watch = Watch(store.clone(), rank, world, silence_s=parallel.timeout_s)
            check_tensor_hosts(watch.hosts, parallel.tensor)
    else:  # one process, started by hand; DeepSpeed asks the environment
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group(backend, timeout=timeout, rank=0, world_size=1, store=dist.HashStore())
    layout = Layout(pipeline=cfg.pipeline_ranks, data=parallel.data, tensor=parallel.tensor)
    with watch:
        yield build_groups(layout, parallel.timeout_s, reward_stage=parallel.reward_stage), device
        dist.barrier()
    dist.destroy_process_group()


def _common(run_dir: Path) -> Path:
    """Rank 0's run directory: without ``--run-dir`` each rank has named one by its own clock. Collective."""
    name = [str(run_dir)]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def _timeline(cfg: Config, run_dir: Path, groups: ParallelGroups) -> Timeline | None:
    return Timeline(run_dir, groups.rank) if cfg.logging.timeline else None


class _Run:
    """One run, from its first step to its policy."""

    def __init__(self, cfg: Config, run_dir: Path, groups: ParallelGroups, device: torch.device) -> None:
        self._cfg, self._run_dir, self._groups, self._device = cfg, run_dir, groups, device
        self._checkpoints = CheckpointFolder(run_dir / "checkpoints", cfg.train.keep)
        self._signalled = False
        self._stop = self._alarmed = False
        self._limit: str | None = None

    def go(self, resume: str | None) -> int:
        cfg = self._cfg
        signal.signal(signal.SIGTERM, self._on_signal)
        tokenizer = load_tokenizer(Path(cfg.tokenizer.path or cfg.model.path))
        task = build_problems(cfg, tokenizer)
        check_reward_models(cfg)
        checkpoint = self._checkpoints.resolve(resume, note=self._say) if resume else None
        progress = Progress(0, {}, digest_of(task, tokenizer, cfg.data))
        if checkpoint is not None:
            problems, progress = progress.problems, read_progress(checkpoint, cfg)
            check_problems(checkpoint, progress, problems)
            progress = replace(progress, problems=problems)  # an older checkpoint has none
        timeline = _timeline(cfg, self._run_dir, self._groups)
        with (
            policy_runtime(cfg, self._groups, deepspeed_settings(cfg), self._device, timeline) as policy,
            scorer_of(cfg, tokenizer, self._groups, self._device, policy.ledger, timeline) as scorer,
        ):
            steps = StepRunner(cfg, policy, task, scorer, tokenizer)
            if checkpoint is not None:
                self._load(checkpoint, policy, steps)
            record = self._open_record(progress)
            if checkpoint is None:
                steps.calibrate()
            if not progress.validation_start:
                progress = replace(progress, validation_start=check_scored(cfg.reward, steps.validate()))
            record.log(_scores("before training", progress.validation_start))
            progress = self._steps(steps, policy, record, progress)
            if self._stop:
                record.close({"status": "stopped", "validation_start": progress.validation_start})
                return STOPPED_BY_SIGNAL
            if self._alarmed:
                status = "stopped_by_alarm" if self._limit is None else "stopped_by_limit"
                record.close({"status": status, "validation_start": progress.validation_start})
                return STOPPED_BY_ALARM
            target = self._run_dir / "policy"
            export_policy(
                policy, target, source=Path(cfg.model.path), tokenizer=Path(cfg.tokenizer.path or cfg.model.path)
            )
            record.close(
                {
                    "status": "finished",
                    "policy": str(target),
                    "validation_start": progress.validation_start,
                    "peak_memory_mb": self._peak_memory(),
                }
            )
        return 0

    def _load(self, checkpoint: Path, policy: Policy, steps: StepRunner) -> None:
        if not is_universal(checkpoint):
            load_checkpoint(checkpoint, policy, steps)
            return
        for sentence in load_universal(self._cfg, checkpoint, policy, steps):
            self._say(sentence)

    def _steps(self, steps: StepRunner, policy: Policy, record: RunRecord, progress: Progress) -> Progress:
        """Run the steps that are left, saving as ``train.save_every`` says, at the end, and where the run is stopped.

        SIGTERM stops it after the step under way; so do a limit and the collapse alarm, with ``anchor.alarm: stop``,
        unless that step is the last. A step in which no response has a score stops it before that step.
        """
        train = self._cfg.train
        for step in range(progress.steps, train.steps):
            rows = steps.run(step)
            if not rows:
                self._unscored(step, record)
                save_checkpoint(self._cfg, self._checkpoints, policy, steps, progress)
                break
            done = step + 1
            # What all ranks agree on, not what a handler may set on one of them at any moment. No validation then: the
            # launcher kills what has not ended 30 s after SIGTERM.
            self._stop = self._any_rank(self._signalled)
            notices, stands = self._watch(rows, steps.ticks.alarm)
            states = [steps.brakes.update(row) for row in rows]
            notices += [state.notice for state in states if state.notice]
            self._limit = next((state.stop for state in states if state.stop), None)
            alarmed = stands and self._cfg.anchor.alarm == "stop"
            self._alarmed = (alarmed or self._limit is not None) and done < train.steps
            if self._limit is not None and not self._alarmed:
                notices.append(f"{self._limit}; it was the last step")
            validates = done % train.eval_every == 0 or done == train.steps or self._alarmed
            if validates and not self._stop:
                rows[-1] |= steps.validate()
            for row in rows:
                record.write_row(row)
            for notice in notices:
                record.log(notice)
            progress = replace(progress, steps=done)
            if done % train.save_every == 0 or done == train.steps or self._stop or self._alarmed:
                save_checkpoint(self._cfg, self._checkpoints, policy, steps, progress)
            if self._stop:
                record.log(f"SIGTERM: stopped after step {done}, checkpoint saved; go on with --resume auto")
                break
            if self._alarmed:
                why = "by the alarm" if self._limit is None else f"because {self._limit}"
                record.log(f"stopped {why}, after step {done}, checkpoint saved; go on with --resume auto")
                break
        return progress

    def _unscored(self, step: int, record: RunRecord) -> None:
        """Stop before ``step``."""
        self._alarmed, self._limit = True, f"no response of step {step} has a score"
        record.log(
            f"stopped because {self._limit}: each failed, as it says above, or was not done in half of "
            f"parallel.timeout_s={self._cfg.parallel.timeout_s:g}; the checkpoint is that of before the step, go on "
            "with --resume auto"
        )

    def _watch(self, rows: list[Row], alarm: Alarm) -> tuple[list[str], bool]:
        """Show a step's rows to the alarm and add its keys to them: what it says, and whether it stands at any of them.

        Rows are equal on every rank, so alarms are.
        """
        if self._cfg.anchor.alarm == "off":
            return [], False
        states = [alarm.update(row) for row in rows]
        for row, state in zip(rows, states, strict=True):
            row |= {"alarm/score": state.score, "alarm/fired": float(state.fired)}
        return [state.notice for state in states if state.notice], any(state.fired for state in states)

    def _open_record(self, progress: Progress) -> RunRecord:
        if self._groups.rank != 0:
            return NullRecorder()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(self._cfg, self._run_dir / "config.yaml")
        ticks = progress.steps * self._cfg.grpo.minibatches
        return Recorder(
            self._run_dir,
            self._cfg.logging,
            build_view(),
            self._cfg.ticks,
            self._cfg.world_size,
            resumed_tick=ticks - 1 if ticks else None,
        )

    def _any_rank(self, flag: bool) -> bool:
        """Whether any rank says so: all must stop at the same step. Collective: every rank."""
        return bool(sum_over(torch.tensor([int(flag)], device=self._device), self._groups.policy).item())

    def _peak_memory(self) -> list[float]:
        """Largest resident size of each rank, in MB. Collective: every rank."""
        peaks = torch.zeros(self._groups.layout.world_size, dtype=torch.float64, device=self._device)
        peaks[self._groups.rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return [round(value, 1) for value in sum_over(peaks, self._groups.policy).tolist()]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _say(self, text: str) -> None:
        if self._groups.rank == 0:
            print(text, flush=True)


def _scores(when: str, row: Row | dict[str, Any]) -> str:
    return f"validation {when}: " + ", ".join(f"{key.removeprefix('val/')} {value:.3f}" for key, value in row.items())
