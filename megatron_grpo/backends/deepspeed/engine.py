"""DeepSpeed as the engine of one pipeline stage: ZeRO 0 to 3 over the data-parallel group, under Megatron's schedule.

DeepSpeed's own PipelineEngine refuses ZeRO 2 and 3. That limit is its own: here Megatron's schedule runs the pipeline,
and DeepSpeed sees one model per stage whose gradients it reduces once a tick (``coalesce_grad_reduction``).
Gradients are handled as this rank's *shards*: a list of tensors that the engine will consume, to be read and changed in
place. A rule that works elementwise on shards is the same rule at every ZeRO stage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from megatron_grpo.backends.apex import nvidia_apex_available
from megatron_grpo.backends.data_link import DataLink
from megatron_grpo.backends.deepspeed.runtime import Mpu
from megatron_grpo.backends.deepspeed.shards import Shards, StageShards
from megatron_grpo.backends.patching import replaced
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import OptimConfig, offloads
from megatron_grpo.ops.host import host_copy
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.groups import ParallelGroups


def _adamw(module: torch.nn.Module, optim: OptimConfig, *, on_host: bool) -> torch.optim.Optimizer:
    """AdamW; NVIDIA Apex's fused one where that is installed and steps on a GPU.

    Args:
        on_host: it steps what DeepSpeed offloads to the host; beside a GPU in torch's fused loop, which vectorises.
    """
    kind: Any = torch.optim.AdamW
    is_cuda = next(module.parameters()).is_cuda
    if is_cuda and on_host:
        kind = partial(torch.optim.AdamW, fused=True)
    elif is_cuda and nvidia_apex_available():
        kind = import_module("apex.optimizers").FusedAdam
    optimizer: torch.optim.Optimizer = kind(
        module.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    return optimizer


class PolicyEngine:
    """A stage's module, its optimizer and its ZeRO shards.

    Args:
        module: the stage; its parameters are trained.
        groups: where this rank stands.
        settings: DeepSpeed JSON with every "auto" resolved; gradient accumulation 1, clipping off (it is done here,
            over the true global norm).
        tied_copy: the parameter of this stage that is a copy of another stage's (tied embeddings), if any.
        data_link: averages gradients instead of the engine, where the data link is compressed (ZeRO 0 and 1).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        groups: ParallelGroups,
        settings: dict[str, Any],
        optim: OptimConfig,
        *,
        tied_copy: torch.nn.Parameter | None = None,
        data_link: DataLink | None = None,
    ) -> None:
        self.module = module
        self.groups = groups
        self.zero_stage: int = settings["zero_optimization"]["stage"]
        self._tied_copy = tied_copy
        self.data_link = data_link
        assert data_link is None or self.zero_stage < 2, "config.checks refuses it"
        self._offloads = offloads(settings, "optimizer")
        optimizer = _adamw(module, optim, on_host=self._offloads)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._parameters = list(names)
        settings = {key: value for key, value in settings.items() if key != "optimizer"}
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, mpu=Mpu(groups), dist_init_required=False
        )
        self.engine.checkpoint_mp_rank = groups.at.pipeline * groups.layout.tensor + groups.at.tensor
        self.shards = StageShards(
            self.engine, names, zero_stage=self.zero_stage, data_rank=groups.at.data, offloads=self._offloads
        )

    @contextmanager
    def accumulating(self, finish: Callable[[], None], plan: Pass) -> Iterator[None]:
        """Backward passes inside the block add up; at its end gradients are averaged over the data-parallel group.

        Args:
            finish: called after the last backward and before the reduction, when every parameter's ``.grad`` is whole:
                sums over other groups belong there.
            plan: what the passes are for, as the data link asks.
        """
        if self.data_link is not None:
            with self._already_averaged():
                yield
                finish()
                gradients = {
                    name: parameter.grad
                    for name, parameter in self.module.named_parameters()
                    if parameter.grad is not None
                }
                assert len(gradients) == len(self._parameters), "every parameter has a gradient"
                self.data_link.average(gradients, plan)
            return
        if self.zero_stage == 0:
            yield
            finish()
            for parameter in self._parameters:
                assert parameter.grad is not None
                sum_over(parameter.grad, self.groups.data).div_(self.groups.layout.data)
            return
        with self._reduced_once():
            yield
            finish()

    @contextmanager
    def _reduced_once(self) -> Iterator[None]:
        """At the end of the block the engine averages and cuts up what its backward passes have added up."""
        with self.engine.coalesce_grad_reduction():
            yield
        if self._offloads:
            get_accelerator().synchronize()  # gradients are on their way to the host

    @contextmanager
    def _already_averaged(self) -> Iterator[None]:
        """At the end of the block the engine cuts gradients up as they are: they are averaged inside it.

        ZeRO 1 does both in one go, and its one door to the wire is ``average_tensor``.
        """
        if self.zero_stage == 0:
            yield
            return
        nothing = replaced(self.engine.optimizer, "average_tensor", lambda tensor, dtype: None)
        with nothing, self._reduced_once():
            yield

    def gradients(self) -> Shards:
        """This rank's gradient shards of the tick, in a fixed order; changes in place reach the optimizer."""
        return [gradient for gradient, _ in self.shards.gradients()]

    def counted_once(self) -> list[bool]:
        """For each shard whether this rank counts it in a sum over the world (replicas and tied copies count once)."""
        first_replica = self.zero_stage > 0 or self.groups.at.data == 0
        return [
            first_replica and parameter is not None and self._owns(parameter)
            for _, parameter in self.shards.gradients()
        ]

    def _owns(self, parameter: torch.nn.Parameter) -> bool:
        if parameter is self._tied_copy:
            return False
        sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        return sharded or self.groups.at.tensor == 0

    def gradient_norm(self) -> torch.Tensor:
        """L2 norm of the whole model's gradient, fp64 scalar. Collective: every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.gradient_device)
        for gradient, counts in zip(self.gradients(), self.counted_once(), strict=True):
            if counts:
                total += gradient.double().square().sum()
        return sum_over(total.to(self._parameters[0].device), self.groups.policy).sqrt()

    @property
    def gradient_device(self) -> torch.device:
        """Where :meth:`gradients` are: in host memory with the optimizer that is offloaded to it."""
        return torch.device("cpu") if self._offloads else self._parameters[0].device

    def step(self, lr: float) -> None:
        """One optimizer step from :meth:`gradients`, which are consumed. Collective over the data-parallel group."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self.data_link is not None:
            self.data_link.settle(used=True)

    def discard_gradients(self) -> None:
        """Forget the gradients of the last :meth:`accumulating` block, as if it had not run."""
        if self.data_link is not None:
            self.data_link.settle(used=False)
        for parameter in self._parameters:
            parameter.grad = None
        if self.zero_stage == 0:
            return
        optimizer = self.engine.optimizer
        if self._offloads:
            optimizer.reset_cpu_buffers()
        for number in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[number] = None
        if self.zero_stage < 3:
            for number in list(optimizer.all_grad_tensors):
                optimizer.all_grad_tensors[number] = None
            optimizer.micro_step_id = -1
        else:
            optimizer.micro_step_id = 0
            optimizer._epilogue_ran_this_backward = False
            # A step would let go of every parameter; the embedding, whose input has no gradient, is still held.
            optimizer.empty_partition_cache()

    def weights(self, *, on_host: bool = False) -> Shards:
        """A copy of the weights as this rank holds them (ZeRO 3: its partition), in host memory if so asked."""
        return [host_copy(tensor) if on_host else tensor.clone() for tensor in self.shards.weights()]

    @contextmanager
    def at_weights(self, weights: Shards) -> Iterator[None]:
        """Inside the block the module has other weights, and ``weights`` has the module's; then back, bit for bit.

        Changing places takes the memory of one shard.
        """
        self._swap(weights)
        try:
            yield
        finally:
            self._swap(weights)

    def _swap(self, weights: Shards) -> None:
        self.shards.forget_gathered()
        for mine, other in zip(self.shards.weights(), weights, strict=True):
            before = mine.clone()
            mine.copy_(other)
            other.copy_(before)

    def whole_bytes(self) -> int:
        """Of the stage's weights on this tensor rank, were they whole."""
        return sum(getattr(x, "ds_numel", x.numel()) * x.itemsize for x in self._parameters)

    @contextmanager
    def whole_parameters(self, *some: torch.nn.Parameter) -> Iterator[None]:
        """Inside the block these parameters, or all, are whole on every rank. Collective: the data-parallel group."""
        if self.zero_stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(some or self._parameters):
            yield

    def save(self, folder: Path, tag: str) -> None:
        """Write this engine's state under ``folder/tag``. Collective: every rank of the world."""
        self.engine.save_checkpoint(str(folder), tag=tag, save_latest=False)

    def load(self, folder: Path, tag: str) -> None:
        """Read what :meth:`save` wrote at the same topology. Collective: every rank of the world."""
        loaded, _ = self.engine.load_checkpoint(str(folder), tag=tag)
        if loaded is None:
            raise FileNotFoundError(f"no engine state in {folder / tag}")
