"""What DeepSpeed must be told and corrected in before a stage's engine is built."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator

from megatron_grpo.backends.patching import replaced
from megatron_grpo.parallel.groups import ParallelGroups


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
