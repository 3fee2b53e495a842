"""DeepSpeed as the engine of one pipeline stage: ZeRO 0 to 3 over the data-parallel group, under Megatron's schedule.

DeepSpeed's own PipelineEngine refuses ZeRO 2 and 3. That limit is its own: here Megatron's schedule runs the pipeline,
and DeepSpeed sees one model per stage whose gradients it reduces once a tick (``coalesce_grad_reduction``).
Gradients are handled as this rank's *shards*: a list of tensors that the engine will consume, to be read and changed in
place. A rule that works elementwise on shards is the same rule at every ZeRO stage.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator

from megatron_grpo.backends.apex import nvidia_apex_available
from megatron_grpo.backends.data_link import DataLink
from megatron_grpo.backends.patching import replaced
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import OptimConfig, offloads
from megatron_grpo.conversion.engine_files import STATES, State
from megatron_grpo.conversion.fragments import Fragment
from megatron_grpo.ops.host import host_copy
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.groups import ParallelGroups

Shards = list[torch.Tensor]


class Mpu:
    """The Megatron topology as DeepSpeed asks for it (its ``mpu=`` argument).

    ``get_model_parallel_rank`` is the *tensor* rank: DeepSpeed counts a replicated parameter on rank 0 alone, and with
    the rank inside tensor x pipeline it would lose the norm weights of later stages.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.model

    def get_model_parallel_world_size(self) -> int:
        return self._groups.layout.tensor * self._groups.layout.pipeline

    def get_model_parallel_rank(self) -> int:
        return self._groups.at.tensor

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.layout.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.at.tensor

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.pipeline

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.layout.pipeline

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.at.pipeline

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.data

    def get_data_parallel_world_size(self) -> int:
        return self._groups.layout.data

    def get_data_parallel_rank(self) -> int:
        return self._groups.at.data


@contextmanager
def deepspeed_runtime(groups: ParallelGroups) -> Iterator[None]:
    """The two corrections that DeepSpeed needs, for the length of the block.

    ZeRO 3 checks that all ranks fetch the same parameters, over the whole world; stages hold different ones, so the
    check would hang. It is made within the data-parallel group, where it means something.

    On CPU DeepSpeed compiles a shared-memory all-reduce at start. A rank killed while it compiles leaves a lock on
    which every later run waits for ever; gloo does the work.
    """

    def same_in_data_group(ints: list[int]) -> None:
        device = get_accelerator().current_device_name()
        mine = torch.tensor(ints, dtype=torch.int64, device=device)
        low, high = (torch.tensor([bound], device=device) for bound in (len(ints), -len(ints)))
        for bound in (low, high):
            dist.all_reduce(bound, op=dist.ReduceOp.MIN, group=groups.data)
        first = mine.clone() if low.item() == -high.item() else None
        if first is not None and ints:
            dist.broadcast(first, src=dist.get_global_rank(groups.data, 0), group=groups.data)
        if first is None or not torch.equal(first, mine):
            raise RuntimeError(f"rank {groups.rank} fetches other parameters than the first rank of its data group")

    with ExitStack() as stack:
        name = "assert_ints_same_as_other_ranks"
        stack.enter_context(replaced(partitioned_param_coordinator, name, same_in_data_group))
        stack.enter_context(replaced(_backend_module(), "build_shm_op", lambda: None))
        yield


def cut_at_once(groups: ParallelGroups, settings: dict[str, Any]) -> Callable[[torch.nn.Parameter], None]:
    """What ZeRO 3 does to a parameter, to be called as soon as it has its values: no rank ever holds its stage whole.

    What it returns is collective over the data-parallel group, whose first rank's values count; below ZeRO 3 it does
    nothing. Call inside :func:`deepspeed_runtime`.

    The parameters are converted by ``zero.Init``, one after another, but the module is not built in its context: that
    makes RoPE's frequencies as short as the weights are, and Megatron writes to a tied head after it is cut.
    """
    if settings["zero_optimization"]["stage"] < 3:
        return lambda parameter: None
    deepspeed.init_distributed(dist_init_required=False)
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    cut: list[torch.nn.Parameter] = []

    def convert(parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(dtype)  # as the engine does with whole ones
        if cut:
            cut[0].convert_to_zero_parameters([parameter])
        else:
            one = torch.nn.ParameterList([parameter])
            deepspeed.zero.Init(one, data_parallel_group=groups.data, config_dict_or_path=settings, mpu=Mpu(groups))
        cut.append(parameter)

    return convert


def _backend_module() -> ModuleType:
    """``deepspeed.comm.torch``, which as an attribute is hidden by the torch that its package imports."""
    return import_module("deepspeed.comm.torch")


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
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._by_name: dict[str | None, torch.nn.Parameter] = {name: x for x, name in self._names.items()}
        self._parameters = list(self._names)
        settings = {key: value for key, value in settings.items() if key != "optimizer"}
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, mpu=Mpu(groups), dist_init_required=False
        )
        self.engine.checkpoint_mp_rank = groups.at.pipeline * groups.layout.tensor + groups.at.tensor

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
                gradients = {name: parameter.grad for name, parameter in self._named() if parameter.grad is not None}
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
        return [gradient for gradient, _ in self._shards()]

    def _shards(self) -> list[tuple[torch.Tensor, torch.nn.Parameter | None]]:
        """Gradient shards with the parameter each belongs to (``None``: padding at the end of a partition)."""
        if self.zero_stage == 0:
            return [(parameter.grad, parameter) for parameter in self._parameters]
        if self._offloads:
            return [
                (_part(flat.grad, start, fragment.shape), self._by_name.get(fragment.name))
                for flat, places in self._masters()
                for fragment, start in places
            ]
        optimizer = self.engine.optimizer
        members = optimizer.params_in_partition if self.zero_stage < 3 else optimizer.fp16_groups
        pairs: list[tuple[torch.Tensor, torch.nn.Parameter | None]] = []
        for number, group in enumerate(members):
            gradients = optimizer.averaged_gradients[number]
            padding = [None] * (len(gradients) - len(group))
            pairs += zip(gradients, [*group, *padding], strict=True)
        return pairs

    def counted_once(self) -> list[bool]:
        """For each shard whether this rank counts it in a sum over the world (replicas and tied copies count once)."""
        first_replica = self.zero_stage > 0 or self.groups.at.data == 0
        return [first_replica and parameter is not None and self._owns(parameter) for _, parameter in self._shards()]

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
        return [host_copy(tensor) if on_host else tensor.clone() for tensor in self._weight_storage()]

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
        self._forget_gathered()
        for mine, other in zip(self._weight_storage(), weights, strict=True):
            before = mine.clone()
            mine.copy_(other)
            other.copy_(before)

    def _forget_gathered(self) -> None:
        """A parameter that a pass left gathered would go on with the weights of that pass."""
        if self.zero_stage == 3:
            self.engine.optimizer.empty_partition_cache()

    def _load(self, weights: Shards) -> None:
        self._forget_gathered()
        for target, source in zip(self._weight_storage(), weights, strict=True):
            target.copy_(source)

    def _weight_storage(self) -> Shards:
        if self.zero_stage == 3:
            return [parameter.ds_tensor.data for parameter in self._parameters]
        return [parameter.data for parameter in self._parameters]

    def gradient_fragments(self) -> list[Fragment]:
        """Where the shards of :meth:`gradients` lie in the stage's parameters."""
        if self.zero_stage == 0:
            return [_whole_fragment(name, parameter) for name, parameter in self._named()]
        if self.zero_stage == 3:
            groups = self.engine.optimizer.fp16_groups
            return [self._partition(parameter) for group in groups for parameter in group]
        return [fragment for _, places in self._masters() for fragment, _ in places]

    def weight_fragments(self) -> list[Fragment]:
        """Where the shards of :meth:`weights` lie in the stage's parameters."""
        if self.zero_stage == 3:
            return [self._partition(parameter) for parameter in self._parameters]
        return [_whole_fragment(name, parameter) for name, parameter in self._named()]

    def load_masters(self, slice_of: Callable[[str, State], torch.Tensor], updates: float) -> None:
        """Take over weights and Adam's moments from whatever they were saved by, at any topology and ZeRO stage.

        Args:
            slice_of: fp32, of a parameter's name on this stage: this tensor rank's slice.
            updates: that Adam has made.
        """
        optimizer = self.engine.optimizer if self.zero_stage == 0 else self.engine.optimizer.optimizer
        for flat, places in self._masters():
            state: dict[str, torch.Tensor] = {key: torch.zeros_like(flat.data) for key in STATES[1:]}
            for fragment, start in places:
                if fragment.name is not None:
                    for key in STATES:
                        target = (flat.data if key == "fp32" else state[key]).view(-1)
                        shard = fragment.cut(slice_of(fragment.name, key)).flatten()
                        target[start : start + len(shard)] = shard
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.tensor(updates)
            optimizer.state[flat] = state
        if not isinstance(optimizer, torch.optim.AdamW):  # Apex counts once for a group
            for group in optimizer.param_groups:
                group["step"] = int(updates)
        if self.zero_stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        self._load([x.cut(slice_of(str(x.name), "fp32")) for x in self.weight_fragments()])

    def _masters(self) -> list[tuple[torch.Tensor, list[tuple[Fragment, int]]]]:
        """The tensors that the optimizer steps, and which fragment begins where in each."""
        optimizer = self.engine.optimizer
        if self.zero_stage == 0:
            return [(parameter, [(_whole_fragment(name, parameter), 0)]) for name, parameter in self._named()]
        if self.zero_stage == 3:
            flats, members = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
            fragments = [[self._partition(parameter) for parameter in group] for group in members]
        else:
            flats, members = optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition
            fragments = [[self._range(parameter) for parameter in group] for group in members]
        masters = []
        for flat, group in zip(flats, fragments, strict=True):
            ends = list(accumulate(fragment.shape.numel() for fragment in group))
            left = flat.numel() - (ends[-1] if ends else 0)
            if left:  # at the end of the last data rank's partition
                group, ends = [*group, Fragment(None, 0, 0, torch.Size([left]))], [*ends, flat.numel()]
            masters.append((flat, list(zip(group, [0, *ends], strict=False))))
        return masters

    def _range(self, parameter: torch.nn.Parameter) -> Fragment:
        """ZeRO 1 and 2: what this rank's range holds of a parameter."""
        address = parameter._hp_mapping.lp_fragment_address
        whole = address.numel == parameter.numel()
        shape = parameter.shape if whole else torch.Size([address.numel])
        return Fragment(self._names[parameter], address.start, address.numel, shape)

    def _partition(self, parameter: torch.nn.Parameter) -> Fragment:
        """ZeRO 3: this rank's share of a parameter; the last ones may be padded."""
        share = parameter.ds_tensor.numel()
        start = min(self.groups.at.data * share, parameter.ds_numel)
        return Fragment(self._names[parameter], start, min(share, parameter.ds_numel - start), torch.Size([share]))

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((self._names[parameter], parameter) for parameter in self._parameters)

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


def _part(flat: torch.Tensor | None, start: int, shape: torch.Size) -> torch.Tensor:
    assert flat is not None, "an offloaded optimizer's gradients lie in its own buffers"
    return flat[start : start + shape.numel()].view(shape)


def _whole_fragment(name: str, parameter: torch.nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter.shape)
