"""Megatron-core on a machine without CUDA: every patch of it, in one place, scoped and reversible.

megatron-core 0.16 names CUDA in four places that a dense model touches: the device of received tensors and of the token
counter in the schedules, ``Tensor.cuda`` on tied embeddings, and the CUDA generator around dropout and recomputation.
Nothing of that is patched for a run on CUDA.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random

from megatron_grpo.backends.patching import replaced


class _TorchOnCpu:
    """``torch`` for the schedules module: the same names, but ``device="cuda"`` makes a CPU tensor."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return torch.zeros(*args, **kwargs)


class _OneGenerator:
    """Megatron's tracker of CUDA generators, for models without dropout: there is nothing to fork."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        assert not states, "this tracker keeps no states"

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def _identity(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


@contextmanager
def megatron_runtime(device: torch.device) -> Iterator[None]:
    """Everything Megatron keeps in globals that the stages need, for the length of the block, on CPU or CUDA."""
    with ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replaced(owner, name, value))

        swap(megatron_random, "_CUDA_RNG_STATE_TRACKER", _OneGenerator())
        swap(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
        swap(parallel_state, "_GLOBAL_MEMORY_BUFFER", None)
        parallel_state._set_global_memory_buffer()
        if device.type == "cpu":
            swap(torch.cuda, "current_device", lambda: "cpu")
            swap(torch.cuda, "synchronize", lambda device=None: None)
            swap(torch.Tensor, "cuda", _identity)
            swap(schedules, "torch", _TorchOnCpu(torch))
            swap(megatron_random, "_get_cuda_rng_state", lambda *a, **k: torch.get_rng_state())
            swap(megatron_random, "_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state))
        yield
