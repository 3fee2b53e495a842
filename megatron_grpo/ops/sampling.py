"""Drawing the next id: temperature, top-k, top-p, and uniforms that belong to a sequence and a position.

Legend: B sequences, V vocabulary (padding rows included).
"""

import torch

from megatron_grpo.ops.logprobs import OneShard, token_logprobs

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 53


def filter_logits(logits_BV: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with -inf outside the ids that may be drawn.

    top_k keeps exactly the k highest (0 keeps all); of those, top_p keeps the fewest highest whose
    probability, normalised among them, reaches top_p (1 keeps all; Holtzman et al. 2020). Of equal logits the
    lower id is higher. The highest always stays.

    Raises:
        ValueError: ``top_k`` below 0 or ``top_p`` outside (0, 1].
    """
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be 0 (off) or more")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1 (off)")
    if top_k == 0 and top_p == 1.0:
        return logits_BV
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    drop_BV = torch.zeros_like(ordered_BV, dtype=torch.bool)
    if top_k > 0:
        drop_BV[:, top_k:] = True
    if top_p < 1.0:
        probability_BV = ordered_BV.double().masked_fill(drop_BV, -torch.inf).softmax(dim=-1)
        before_BV = probability_BV.cumsum(dim=-1)[:, :-1]
        drop_BV[:, 1:] |= before_BV >= top_p
    return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), -torch.inf)


def sample(
    logits_BV: torch.Tensor,
    *,
    temperature: float | None,
    top_k: int,
    top_p: float,
    valid: int,
    uniform_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id a row by inverting the distribution function at ``uniform_B``.

    Args:
        logits_BV: any float dtype; rows of the vocabulary from ``valid`` on are padding and never come out.
        temperature: ``None`` is greedy: the highest logit, of equal ones the lowest id; filters do nothing.
        uniform_B: in ``[0, 1)``, see :func:`row_uniforms`. A row's id depends on its logits and this alone.

    Returns:
        ids int64 ``[B]`` and their log-probabilities fp32 ``[B]`` in the untruncated distribution at
        ``temperature`` (at 1 when greedy).

    Raises:
        ValueError: ``temperature`` not above 0, or a filter out of range.
    """
    padding_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device) >= valid
    masked_BV = logits_BV.float().masked_fill(padding_V, -torch.inf)
    if temperature is None:
        ids_B = masked_BV.argmax(dim=-1)
    elif temperature > 0:
        ids_B = _invert(filter_logits(masked_BV / temperature, top_k=top_k, top_p=top_p), uniform_B)
    else:
        raise ValueError(f"temperature={temperature} must be above 0; greedy decoding takes None")
    scale = 1.0 if temperature is None else temperature
    logp_B1 = token_logprobs(logits_BV[:, None], ids_B[:, None], OneShard(valid), temperature=scale)
    return ids_B, logp_B1[:, 0]


def _invert(logits_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first id of positive probability whose distribution function exceeds the uniform, int64 ``[B]``.

    In fp64. Where round-off leaves the uniform above the whole sum, the last id of positive probability.
    """
    probability_BV = logits_BV.double().softmax(dim=-1)
    reached_BV = probability_BV.cumsum(dim=-1)
    possible_BV = probability_BV > 0
    # a parallel cumsum need not rise evenly: possible_BV, not the sum alone, keeps impossible ids out
    hit_BV = possible_BV & (reached_BV > uniform_B.double()[:, None])
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    last_B = torch.where(possible_BV, ids_V, 0).amax(dim=-1)
    return torch.where(hit_BV.any(dim=-1), hit_BV.int().argmax(dim=-1), last_B)


def row_uniforms(seed: int, row_ids_B: torch.Tensor, position: int) -> torch.Tensor:
    """fp64 ``[B]`` in ``[0, 1)``, a pure function of (seed, row id, position).

    A counter instead of a generator: the finaliser of SplitMix64 (Steele et al. 2014), chained over seed, row
    and position; its top 53 bits.

    Args:
        row_ids_B: int64, any values.
    """
    row_ids_B = row_ids_B.long()
    bits_B = _mix(torch.full_like(row_ids_B, _signed(seed + _GAMMA)))
    bits_B = _mix(bits_B + row_ids_B * _signed(_GAMMA))
    bits_B = _mix(bits_B + _signed(position * _GAMMA))
    return _shift_right(bits_B, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 words; products wrap."""
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own fills with the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of ``word``."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
