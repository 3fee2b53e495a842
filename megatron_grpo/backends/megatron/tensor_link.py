"""The hook inside tensor parallelism: the sums over tensor ranks in a layer, made of coordinates in a basis.

Entered by the layer spec. Row-parallel outputs are summed forward, and their backward is the projector itself, without
traffic; gradients of column-parallel inputs are summed backward. Every row crosses, padding included, as in Megatron;
only rows that carry a token teach. The sums in the embedding, the output layer and the log-probs stay as they are.
Legend: S sequence, B micro-batch, N = S x B rows, H hidden, r rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_grpo.boundary.crossing import Boundaries
from megatron_grpo.boundary.tensor import WAYS, Place, TensorBases
from megatron_grpo.ops.lowrank import digest, expand, project
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.link import BFLOAT16_BYTES, Ledger, Link


class TensorLink:
    """Sums over the tensor ranks of a stage. Its modules are built with it; :meth:`connect` comes before any pass.

    Args:
        group: the tensor ranks of this stage.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._boundaries: Boundaries | None = None
        self._ledger = Ledger()

    def connect(self, boundaries: Boundaries, ledger: Ledger) -> None:
        """Sum as the current pass of ``boundaries`` says, by its bases, and count into ``ledger`` from now on."""
        self._boundaries, self._ledger = boundaries, ledger

    def basis_now(self, layer: int, place: Place) -> torch.Tensor | None:
        """Q ``[H, r]`` that a sum of the current pass goes through; ``None`` where it is uncompressed."""
        dense = self._connected.current.dense_in(WAYS[place])
        return None if dense else self._bases.basis(layer, place).current

    def total(self, layer: int, place: Place, part: torch.Tensor, *, recorded: bool = False) -> torch.Tensor:
        """The sum of every rank's ``part`` ``[..., H]``, of its dtype, without gradient. Collective: the tensor ranks.

        Each rank counts what it contributes: ``[N, r]``, or ``[N, H]`` uncompressed, in the dense payload's format.

        Args:
            part: ``[S, B, H]`` in a pass that teaches.
            recorded: whether autograd records this sum. Micro-batches come in order among those that it does and among
                those that it does not; recomputed activations mix the two.
        """
        plan, way, bases = self._connected.current, WAYS[place], self._bases
        part_NH = part.detach().reshape(-1, part.shape[-1])
        basis = bases.basis(layer, place).to(part.device)
        dense = plan.dense_in(way)
        wire = (part_NH if dense else project(part_NH, basis.current)).to(bases.dtype(way), copy=True)
        self._ledger.add("tensor", plan.kind, way, sent=wire.nbytes, dense=part_NH.numel() * BFLOAT16_BYTES)
        sum_over(wire, self._group)
        total_NH = wire.to(part.dtype) if dense else expand(wire, basis.current, part.dtype)
        teaches_both = plan.teaches_both(way)
        if teaches_both or plan.observe == "sender":
            rows = plan.next_rows(f"tensor {layer} {place} {recorded}", part.shape[0], part.shape[1], part.device)
            real_NH = rows.select(total_NH)
            p_Nr = project(real_NH, basis.current) if dense else rows.select(wire)
            basis.observe_part(real_NH if teaches_both else rows.select(part_NH), p_Nr)
        return total_NH.view_as(part)

    def refresh(self, data: dist.ProcessGroup, *, parts: bool) -> None:
        """Stage what was learned. Collective: every rank; after a pass that taught ``parts``, or whole sums.

        After a pass whose sums were whole, each rank has the same sketches; of parts they are summed. What crosses
        counts as basis. Ranks compare digests; where one differs (QR may, across hardware), the first rank's is sent:
        to every replica, then in each to every shard.
        """
        open_bases = [(way, basis) for way, basis in self._bases.all() if basis.is_open]
        for way, basis in open_bases:
            for sketch_Hr in basis.sums():
                if data.size() > 1:
                    self._ledger.add("data", "basis", way, sent=sketch_Hr.nbytes)
                    sum_over(sketch_Hr, data)
                if parts:
                    self._ledger.add("tensor", "basis", way, sent=sketch_Hr.nbytes)
                    sum_over(sketch_Hr, self._group)
            basis.stage()
        if open_bases:
            flats = [basis.flat() for _, basis in open_bases]
            self._agree(flats, data, "data")
            self._agree(flats, self._group, "tensor")

    def _agree(self, flats: list[torch.Tensor], group: dist.ProcessGroup, link: Link) -> None:
        """Every rank of ``group`` goes on with its first one's bits."""
        if group.size() == 1:
            return
        mine = torch.cat([digest(flat) for flat in flats])
        first, leader, leads = mine.clone(), dist.get_global_rank(group, 0), group.rank() == 0
        dist.broadcast(first, src=leader, group=group)
        self._ledger.add(link, "basis", "backward", sent=mine.nbytes if leads else 0)
        differ = (mine != first).long()
        for flat, differs in zip(flats, sum_over(differ, group).tolist(), strict=True):
            if differs:
                self._ledger.add(link, "basis", "backward", sent=flat.nbytes if leads else 0)
                dist.broadcast(flat, src=leader, group=group)  # in place: what is staged

    @property
    def _connected(self) -> Boundaries:
        assert self._boundaries is not None, "the link is connected before a pass"
        return self._boundaries

    @property
    def _bases(self) -> TensorBases:
        bases = self._connected.tensor
        assert bases is not None, "boundaries of a compressed tensor link have bases"
        return bases


@dataclass(frozen=True, slots=True)
class _Site:
    """Where in the model a sum is made."""

    link: TensorLink
    layer: int
    place: Place

    def total(self, part: torch.Tensor, *, recorded: bool = False) -> torch.Tensor:
        return self.link.total(self.layer, self.place, part, recorded=recorded)


class _SumOfParts(torch.autograd.Function):
    """Row-parallel: the projected sum; the gradient of each part is the projected gradient, of no traffic."""

    @staticmethod
    def forward(ctx: Any, part_SBH: torch.Tensor, site: _Site, recorded: bool) -> torch.Tensor:
        total_SBH = site.total(part_SBH, recorded=recorded)
        ctx.basis_Hr = site.link.basis_now(site.layer, site.place)
        return total_SBH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_SBH,) = grads
        if ctx.basis_Hr is None:
            return grad_SBH, None, None
        return expand(project(grad_SBH, ctx.basis_Hr), ctx.basis_Hr, grad_SBH.dtype), None, None


class _SharedInput(torch.autograd.Function):
    """Column-parallel: every rank has the input; its gradient is the projected sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x_SBH: torch.Tensor, site: _Site) -> torch.Tensor:
        ctx.site = site
        return x_SBH.view_as(x_SBH)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.site.total(grads[0]), None


class ProjectedRowLinear(RowParallelLinear):
    """Megatron's row-parallel weight, whose output goes over a :class:`TensorLink`."""

    def __init__(self, *args: Any, site: _Site, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.input_is_parallel and self.skip_bias_add and not self.sequence_parallel
        self._site = site

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        """``[S, B, H]``, and the bias that the caller adds."""
        part_SBH = F.linear(input_, self.weight)
        return _SumOfParts.apply(part_SBH, self._site, torch.is_grad_enabled()), self.bias


class ProjectedColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel weight, whose input's gradient goes over a :class:`TensorLink`."""

    def __init__(self, *args: Any, site: _Site, **kwargs: Any) -> None:
        super().__init__(*args, disable_grad_reduce=True, **kwargs)
        assert not self.sequence_parallel
        self._site = site

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """As Megatron's."""
        return super().forward(_SharedInput.apply(input_, self._site), *args, **kwargs)


def linked(layer_spec: ModuleSpec, link: TensorLink, layer: int) -> ModuleSpec:
    """The spec of layer number ``layer`` with its four weights on ``link``."""

    def at(place: Place) -> ModuleSpec:
        module = ProjectedRowLinear if WAYS[place] == "forward" else ProjectedColumnLinear
        return ModuleSpec(module=module, params={"site": _Site(link, layer, place)})

    parts = layer_spec.submodules
    attention, mlp = parts.self_attention, parts.mlp
    attention_parts = replace(attention.submodules, linear_qkv=at("linear_qkv"), linear_proj=at("linear_proj"))
    mlp_parts = replace(mlp.submodules, linear_fc1=at("linear_fc1"), linear_fc2=at("linear_fc2"))
    return replace(
        layer_spec,
        submodules=replace(
            parts,
            self_attention=replace(attention, submodules=attention_parts),
            mlp=replace(mlp, submodules=mlp_parts),
        ),
    )
