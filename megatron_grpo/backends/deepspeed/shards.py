"""What a rank holds of its stage under ZeRO 0 to 3, and where each piece lies in the stage's parameters."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch

from megatron_grpo.conversion.engine_files import STATES, State
from megatron_grpo.conversion.fragments import Fragment

Shards = list[torch.Tensor]


class StageShards:
    """Gradients, weights and the optimizer's tensors, as DeepSpeed keeps them.

    Args:
        engine: DeepSpeed's.
        names: of the stage's parameters, in their order.
        data_rank: which share of each parameter ZeRO gives this rank.
        offloads: whether the optimizer, and with it the averaged gradients, are in host memory.
    """

    def __init__(
        self, engine: Any, names: dict[torch.nn.Parameter, str], *, zero_stage: int, data_rank: int, offloads: bool
    ) -> None:
        self._engine, self._names, self._parameters = engine, names, list(names)
        self._by_name: dict[str | None, torch.nn.Parameter] = {name: x for x, name in names.items()}
        self._zero_stage, self._data_rank, self._offloads = zero_stage, data_rank, offloads

    def gradients(self) -> list[tuple[torch.Tensor, torch.nn.Parameter | None]]:
        """Gradient shards with the parameter each belongs to (``None``: padding at the end of a partition)."""
        if self._zero_stage == 0:
            return [(parameter.grad, parameter) for parameter in self._parameters]
        if self._offloads:
            return [
                (_part(flat.grad, start, fragment.shape), self._by_name.get(fragment.name))
                for flat, places in self.masters()
                for fragment, start in places
            ]
        optimizer = self._engine.optimizer
        members = optimizer.params_in_partition if self._zero_stage < 3 else optimizer.fp16_groups
        pairs: list[tuple[torch.Tensor, torch.nn.Parameter | None]] = []
        for number, group in enumerate(members):
            gradients = optimizer.averaged_gradients[number]
            padding = [None] * (len(gradients) - len(group))
            pairs += zip(gradients, [*group, *padding], strict=True)
        return pairs

    def weights(self) -> Shards:
        """The weights as this rank holds them: ZeRO 3 its partition, else all; changes in place are the model's."""
        if self._zero_stage == 3:
            return [parameter.ds_tensor.data for parameter in self._parameters]
        return [parameter.data for parameter in self._parameters]

    def forget_gathered(self) -> None:
        """A parameter that a pass left gathered would go on with the weights of that pass."""
        if self._zero_stage == 3:
            self._engine.optimizer.empty_partition_cache()

    def gradient_fragments(self) -> list[Fragment]:
        """Where the shards of :meth:`gradients` lie in the stage's parameters."""
        if self._zero_stage == 0:
            return [_whole_fragment(name, parameter) for name, parameter in self._named()]
        if self._zero_stage == 3:
            groups = self._engine.optimizer.fp16_groups
            return [self._partition(parameter) for group in groups for parameter in group]
        return [fragment for _, places in self.masters() for fragment, _ in places]

    def weight_fragments(self) -> list[Fragment]:
        """Where the shards of :meth:`weights` lie in the stage's parameters."""
        if self._zero_stage == 3:
            return [self._partition(parameter) for parameter in self._parameters]
        return [_whole_fragment(name, parameter) for name, parameter in self._named()]

    def load_masters(self, slice_of: Callable[[str, State], torch.Tensor], updates: float) -> None:
        """Take over weights and Adam's moments from whatever they were saved by, at any topology and ZeRO stage.

        Args:
            slice_of: fp32, of a parameter's name on this stage: this tensor rank's slice.
            updates: that Adam has made.
        """
        optimizer = self._engine.optimizer if self._zero_stage == 0 else self._engine.optimizer.optimizer
        for flat, places in self.masters():
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
        if self._zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        self.forget_gathered()
        for target, x in zip(self.weights(), self.weight_fragments(), strict=True):
            target.copy_(x.cut(slice_of(str(x.name), "fp32")))

    def masters(self) -> list[tuple[torch.Tensor, list[tuple[Fragment, int]]]]:
        """The tensors that the optimizer steps, and which fragment begins where in each."""
        optimizer = self._engine.optimizer
        if self._zero_stage == 0:
            return [(parameter, [(_whole_fragment(name, parameter), 0)]) for name, parameter in self._named()]
        if self._zero_stage == 3:
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
        start = min(self._data_rank * share, parameter.ds_numel)
        return Fragment(self._names[parameter], start, min(share, parameter.ds_numel - start), torch.Size([share]))

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((self._names[parameter], parameter) for parameter in self._parameters)


def _part(flat: torch.Tensor | None, start: int, shape: torch.Size) -> torch.Tensor:
    assert flat is not None, "an offloaded optimizer's gradients lie in its own buffers"
    return flat[start : start + shape.numel()].view(shape)


def _whole_fragment(name: str, parameter: torch.nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter.shape)
