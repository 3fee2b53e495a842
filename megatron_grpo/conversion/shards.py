"""Tensor-parallel slices of fused weights, as pure functions with exact inverses.

Megatron keeps one QKV matrix, ordered by KV group (``[q..q, k, v]`` of group 0, then of group 1, ...), so a
contiguous block of rows is whole groups; and one matrix for gate over up, of which each rank holds its slice
of the gate over its slice of the up.
``to_megatron`` and ``to_hf`` go from the tensors of a ``Weight`` to Megatron's whole one and back.
Legend: Q rows of all queries (heads * D), K rows of all keys (groups * D), D head width, F feed-forward,
H hidden, V vocabulary. A bias is the same without H. Dtypes and devices are those of the input.
"""

from collections.abc import Sequence

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.names import How, Weight, padded_vocab


def fuse_qkv(q_QH: torch.Tensor, k_KH: torch.Tensor, v_KH: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """``[Q, H]``, ``[K, H]``, ``[K, H]`` -> ``[Q + 2K, H]`` by KV group; biases likewise, without H."""
    width = q_QH.shape[0] // heads
    rest = q_QH.shape[1:]
    queries = q_QH.reshape(groups, heads // groups * width, *rest)
    keys, values = (x.reshape(groups, width, *rest) for x in (k_KH, v_KH))
    return torch.cat((queries, keys, values), dim=1).flatten(0, 1)


def split_qkv(qkv: torch.Tensor, heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of ``fuse_qkv``: queries, keys and values, contiguous."""
    width = qkv.shape[0] // (heads + 2 * groups)
    by_group = qkv.reshape(groups, -1, *qkv.shape[1:])
    queries, keys, values = torch.split(by_group, [heads // groups * width, width, width], dim=1)
    return queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)


def fuse_gate_up(gate_FH: torch.Tensor, up_FH: torch.Tensor) -> torch.Tensor:
    """``[F, H]`` gate over ``[F, H]`` up -> ``[2F, H]``."""
    return torch.cat((gate_FH, up_FH))


def split_gate_up(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``fuse_gate_up``."""
    gate_FH, up_FH = gate_up.chunk(2)
    return gate_FH, up_FH


def to_megatron(parts: Sequence[torch.Tensor], weight: Weight, shape: ModelShape) -> torch.Tensor:
    """The whole Megatron tensor, unpadded and uncut; it may be a view of a part."""
    turned = [part.t() if weight.transposed else part for part in parts]
    if weight.how == "qkv":
        keys = shape.kv_groups * shape.head_dim
        q, k, v = turned if len(turned) == 3 else torch.split(turned[0], [turned[0].shape[0] - 2 * keys, keys, keys])
        return fuse_qkv(q, k, v, shape.heads, shape.kv_groups)
    return fuse_gate_up(*turned) if weight.how == "gate_up" else turned[0]


def to_hf(whole: torch.Tensor, weight: Weight, shape: ModelShape) -> tuple[torch.Tensor, ...]:
    """The inverse of ``to_megatron`` over a tensor that may be padded: the tensors of ``weight.hf``, maybe views."""
    parts: tuple[torch.Tensor, ...] = (whole,)
    if weight.how == "qkv":
        parts = split_qkv(whole, shape.heads, shape.kv_groups)
        parts = parts if len(weight.hf) == 3 else (torch.cat(parts),)
    elif weight.how == "gate_up":
        parts = split_gate_up(whole)
    elif weight.how == "vocab":
        parts = (strip_vocab(whole, shape.vocab),)
    return tuple(part.t() if weight.transposed else part for part in parts)


def shard(tensor: torch.Tensor, how: How, rank: int, size: int) -> torch.Tensor:
    """Slice of tensor rank ``rank`` out of ``size``; it may be a view of ``tensor``.

    ``column``, ``vocab`` (padded first) and ``qkv`` (fused first) cut dimension 0, ``row`` dimension 1,
    ``gate_up`` both halves of dimension 0, ``replicated`` nothing. That a ``qkv`` block is whole KV groups is
    the caller's to check (``names.check_tensor_size``).

    Raises:
        ConfigError: ``size`` does not divide the dimension.
    """
    if how == "replicated":
        return tensor
    if how == "gate_up":
        return fuse_gate_up(*(_block(half, 0, rank, size) for half in split_gate_up(tensor)))
    return _block(tensor, 1 if how == "row" else 0, rank, size)


def slice_of(whole: torch.Tensor, weight: Weight, shape: ModelShape, rank: int, size: int) -> torch.Tensor:
    """The slice of tensor rank ``rank`` out of Megatron's whole tensor, whose vocabulary is not padded yet."""
    padded = pad_vocab(whole, padded_vocab(shape.vocab, size)) if weight.how == "vocab" else whole
    return shard(padded, weight.how, rank, size)


def unshard(shards: list[torch.Tensor], how: How) -> torch.Tensor:
    """The inverse of ``shard``: slices in rank order to the whole tensor; ``replicated`` takes the first."""
    if how == "replicated":
        return shards[0]
    if how == "gate_up":
        gates, ups = zip(*(split_gate_up(part) for part in shards), strict=True)
        return torch.cat((*gates, *ups))
    return torch.cat(shards, dim=1 if how == "row" else 0)


def _block(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    length = tensor.shape[dim]
    if length % size:
        raise ConfigError(
            f"parallel.tensor={size} does not divide dimension {dim} of a weight of shape "
            f"{list(tensor.shape)}; use a divisor of {length}"
        )
    return tensor.narrow(dim, rank * (length // size), length // size)


def pad_vocab(table_VH: torch.Tensor, padded: int) -> torch.Tensor:
    """Append zero rows up to ``padded`` rows."""
    missing = padded - table_VH.shape[0]
    return torch.cat((table_VH, table_VH.new_zeros(missing, *table_VH.shape[1:])))


def strip_vocab(table_VH: torch.Tensor, vocab: int) -> torch.Tensor:
    """The inverse of ``pad_vocab``: the first ``vocab`` rows."""
    return table_VH[:vocab]
