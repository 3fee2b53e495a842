"""Decoding with the weights of one stage, without Megatron's modules around them.

Megatron's module path recomputes RoPE in every layer, repeats K and V for grouped queries and copies caches; the same
weights in a plain function are about three times faster at small sizes. Numbers agree with the module's to rounding.
Legend: B micro-batch, n new columns, L columns so far, H hidden, G KV groups, r query heads a group, D head width,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_grpo.backends.megatron.model import Stage
from megatron_grpo.boundary.tensor import Place
from megatron_grpo.ops.rows import Rows
from megatron_grpo.parallel.collectives import gather_last_dim


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    projection: torch.Tensor
    norm_mlp: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor


@dataclass(slots=True)
class _Cache:
    """Keys and values of one micro-batch: ``[layers, 2, B, G, columns, D]``; attention looks where ``visible_BL``."""

    kv: torch.Tensor
    visible_BL: torch.Tensor
    padded: bool


Cross = Callable[[torch.Tensor, Rows], torch.Tensor]
Parameters = tuple[torch.nn.Parameter, ...]


class Gather(Protocol):
    """Makes parameters whole on every replica for the length of a block."""

    def __call__(self, *some: torch.nn.Parameter) -> AbstractContextManager[None]: ...


def _whole_already(*some: torch.nn.Parameter) -> AbstractContextManager[None]:
    return nullcontext()


class LeanStage:
    """``rollout.sampler.DecodeStage`` over the parameters of a Megatron stage, which it reads, never copies.

    Under ZeRO 3 call it where parameters are whole, or inside :meth:`by_layer`.

    Args:
        cross: where all stages are in one process, by layer: the boundary after it, rows to rows.
    """

    def __init__(self, stage: Stage, cross: dict[int, Cross] | None = None) -> None:
        self._stage = stage
        self._cross = cross or {}
        self._tensor_group = stage.collection.tp
        self._gather: Gather = _whole_already
        self._replicas: dist.ProcessGroup | None = None
        shape = stage.shape
        assert (shape.norm, shape.positions, shape.activation) == ("RMSNorm", "rope", "swiglu"), shape.family
        size = self._tensor_group.size()
        self._groups, self._width = shape.kv_groups // size, shape.head_dim
        self._queries = shape.heads // shape.kv_groups
        self._eps = shape.norm_eps
        self._caches: dict[int, _Cache] = {}
        frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self._angles = torch.outer(torch.arange(shape.max_positions).float(), frequencies).repeat(1, 2)

    def open(self, place: int, padding_BP: torch.Tensor, columns: int) -> None:
        """Start a micro-batch in ``place``: an empty cache of ``columns`` columns."""
        batch, prompt = padding_BP.shape
        parameter = self._stage.module.decoder.layers[0].input_layernorm.weight
        visible_BL = torch.ones(batch, columns, dtype=torch.bool, device=parameter.device)
        visible_BL[:, :prompt] = ~padding_BP
        kv = parameter.new_zeros(len(self._stage.layers), 2, batch, self._groups, columns, self._width)
        self._caches[place] = _Cache(kv, visible_BL, padded=bool(padding_BP.any()))

    def close(self) -> None:
        """Drop every cache."""
        self._caches.clear()

    def cache_bytes(self, sequences: int, columns: int) -> int:
        """Of the KV caches of so many sequences in flight."""
        itemsize = self._stage.module.decoder.layers[0].input_layernorm.weight.itemsize
        return len(self._stage.layers) * 2 * sequences * self._groups * columns * self._width * itemsize

    @contextmanager
    def by_layer(self, gather: Gather, replicas: dist.ProcessGroup) -> Iterator[None]:
        """Inside the block the weights of a layer are whole while it runs, and no longer. Collective: ``replicas``.

        Gathering is collective and replicas sample responses of different lengths: one that has left its block gathers
        along, layer by layer, until all have.
        """
        self._gather, self._replicas = gather, replicas
        try:
            yield
            while self._announce(working=False):
                for some in self._portions():
                    with gather(*some):
                        pass
        finally:
            self._gather, self._replicas = _whole_already, None

    def _announce(self, *, working: bool) -> bool:
        """Tell the other replicas whether this one has a forward to run now; returns whether any has."""
        if self._replicas is None or self._replicas.size() == 1:
            return working
        device = self._stage.module.decoder.layers[0].input_layernorm.weight.device
        any_works = torch.tensor(int(working), device=device)
        dist.all_reduce(any_works, op=dist.ReduceOp.MAX, group=self._replicas)
        return working or bool(any_works)

    def _portions(self) -> Iterator[Parameters]:
        """What :meth:`forward` gathers, in order."""
        module = self._stage.module
        if module.pre_process:
            yield (module.embedding.word_embeddings.weight,)
        for layer in module.decoder.layers:
            yield tuple(layer.parameters())
        if module.post_process:
            yield (module.decoder.final_layernorm.weight, self._head)

    @property
    def _head(self) -> torch.nn.Parameter:
        module = self._stage.module
        head: torch.nn.Parameter = (
            module.shared_embedding_or_output_weight() if self._stage.shape.tied else module.output_layer.weight
        )
        return head

    def forward(self, place: int, x: torch.Tensor, start: int, rows: Rows) -> torch.Tensor:
        """See ``DecodeStage.forward``."""
        module, cache = self._stage.module, self._caches[place]
        self._announce(working=True)
        portions = self._portions()
        if module.pre_process:
            with self._gather(*next(portions)):
                x = self._embed(x)
        columns = x.shape[1]
        angles = self._angles[start : start + columns].to(x.device)
        cos_n1D, sin_n1D = (wave(angles).to(x.dtype)[:, None] for wave in (torch.cos, torch.sin))
        mask = self._mask(cache, start, columns)
        for number, layer in enumerate(module.decoder.layers):
            with self._gather(*next(portions)):
                x = self._layer(number, _weights(layer), cache.kv[number], x, start, cos_n1D, sin_n1D, mask)
            if number in self._cross:
                crossed_NH = self._cross[number](rows.select(x.transpose(0, 1)), rows)
                x = rows.scatter(crossed_NH, columns).transpose(0, 1).contiguous()
        if not module.post_process:
            return x
        with self._gather(*next(portions)):
            last_BH = F.rms_norm(x[:, -1], x.shape[-1:], module.decoder.final_layernorm.weight, self._eps)
            return gather_last_dim(F.linear(last_BH, self._head), self._tensor_group)

    def _embed(self, ids_Bn: torch.Tensor) -> torch.Tensor:
        table = self._stage.module.embedding.word_embeddings.weight
        if self._tensor_group.size() == 1:
            return F.embedding(ids_Bn, table)
        local = ids_Bn - self._tensor_group.rank() * len(table)
        inside = (local >= 0) & (local < len(table))
        rows = F.embedding(local.clamp(0, len(table) - 1), table) * inside[..., None]
        return self._sum(rows)

    def _mask(self, cache: _Cache, start: int, columns: int) -> torch.Tensor | None:
        """Where each new column looks, ``[B, 1, n, L]``; ``None`` where it looks everywhere before it.

        A padding column sees itself, so that no row of the softmax is empty.
        """
        if columns == 1:
            return cache.visible_BL[:, None, None, : start + 1] if cache.padded else None
        assert start == 0, "several columns at once are a prompt"
        causal = torch.ones(columns, columns, dtype=torch.bool, device=cache.visible_BL.device).tril()
        eye = torch.eye(columns, dtype=torch.bool, device=causal.device)
        return (causal & cache.visible_BL[:, None, :columns] | eye)[:, None]

    def _layer(
        self,
        number: int,
        w: _Layer,
        kv: torch.Tensor,
        x_BnH: torch.Tensor,
        start: int,
        cos_n1D: torch.Tensor,
        sin_n1D: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, columns, hidden = x_BnH.shape
        groups, queries, width = self._groups, self._queries, self._width
        mixed = F.linear(F.rms_norm(x_BnH, (hidden,), w.norm_in, self._eps), w.qkv, w.qkv_bias)
        mixed = mixed.view(batch, columns, groups, queries + 2, width)
        q = mixed[..., :queries, :].reshape(batch, columns, groups * queries, width)
        k, v = mixed[..., queries, :], mixed[..., queries + 1, :]
        if w.q_norm is not None and w.k_norm is not None:
            q = F.rms_norm(q, (width,), w.q_norm, self._eps)
            k = F.rms_norm(k, (width,), w.k_norm, self._eps)
        q, k = _rotate(q, cos_n1D, sin_n1D), _rotate(k, cos_n1D, sin_n1D)
        kv[0, :, :, start : start + columns] = k.transpose(1, 2)
        kv[1, :, :, start : start + columns] = v.transpose(1, 2)
        keys, values = kv[:, :, :, : start + columns]
        if columns == 1:
            # The r query heads of a group as r query columns: K and V are never repeated.
            seen = F.scaled_dot_product_attention(q.view(batch, groups, queries, width), keys, values, attn_mask=mask)
            mixed = seen.reshape(batch, 1, -1)
        else:
            seen = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=queries > 1
            )
            mixed = seen.transpose(1, 2).reshape(batch, columns, -1)
        x_BnH = x_BnH + self._sum_parts(number, "linear_proj", F.linear(mixed, w.projection))
        gate, up = F.linear(F.rms_norm(x_BnH, (hidden,), w.norm_mlp, self._eps), w.fc1).chunk(2, dim=-1)
        return x_BnH + self._sum_parts(number, "linear_fc2", F.linear(F.silu(gate) * up, w.fc2))

    def _sum_parts(self, number: int, place: Place, part_BnH: torch.Tensor) -> torch.Tensor:
        """As the trainer sums this stage's layer ``number``: over the compressed link where there is one."""
        link = self._stage.tensor_link
        return self._sum(part_BnH) if link is None else link.total(self._stage.layers[number], place, part_BnH)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._tensor_group.size() > 1:
            dist.all_reduce(x, group=self._tensor_group)
        return x


def _rotate(x_BnhD: torch.Tensor, cos_n1D: torch.Tensor, sin_n1D: torch.Tensor) -> torch.Tensor:
    """RoPE on halves, in the tensor's own dtype, as Megatron does it."""
    low, high = x_BnhD.chunk(2, dim=-1)
    return x_BnhD * cos_n1D + torch.cat((-high, low), dim=-1) * sin_n1D


def _weights(layer: torch.nn.Module) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=attention.linear_qkv.weight,
        qkv_bias=attention.linear_qkv.bias,
        q_norm=getattr(attention.q_layernorm, "weight", None),
        k_norm=getattr(attention.k_layernorm, "weight", None),
        projection=attention.linear_proj.weight,
        norm_mlp=layer.pre_mlp_layernorm.weight,
        fc1=mlp.linear_fc1.weight,
        fc2=mlp.linear_fc2.weight,
    )
