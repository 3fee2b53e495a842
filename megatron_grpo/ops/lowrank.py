"""Low-rank coding of boundary rows by an orthonormal basis, with PowerSGD's power step (Vogels et al. 2019).

Legend: N rows, H hidden, r rank. A basis is always fp32: in bf16 a QR loses orthogonality.
"""

import hashlib

import torch

_SEED_BITS = 62


def seed_of(seed: int, boundary: int, direction: str) -> int:
    """A generator seed in ``[0, 2**62)`` for one direction of one boundary; equal in every process."""
    digest = hashlib.sha256(f"{seed}/{boundary}/{direction}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def random_basis(hidden: int, rank: int, seed: int) -> torch.Tensor:
    """An orthonormal ``[H, r]`` fp32 basis on the CPU, orth(randn); equal seeds give equal bits.

    Raises:
        ValueError: ``rank`` outside 1..``hidden``.
    """
    if not 1 <= rank <= hidden:
        raise ValueError(f"rank={rank} must be from 1 to the hidden size {hidden}")
    generator = torch.Generator().manual_seed(seed)
    return orthonormal(torch.randn(hidden, rank, generator=generator))


def orthonormal(sketch_Hr: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns ``[H, r]`` fp32 that span the sketch, with R_ii >= 0 so that they are unique.

    Householder QR in fp32, whatever the dtype of the sketch. Where the sketch lacks rank (a zero one
    included), the missing columns are completed orthonormally. A sketch that is not finite gives a basis that
    is not finite.
    """
    return orthonormal_with_spread(sketch_Hr)[0]


def orthonormal_with_spread(sketch_Hr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`orthonormal` and the spread ``[r]`` of the rows' coordinates in it, scaled to a maximum of 1.

    In a power sketch X^T (X Q) near convergence R_ii is the energy of coordinate i, so the spread is sqrt(R_ii).
    """
    q_Hr, r_rr = torch.linalg.qr(sketch_Hr.float(), mode="reduced")
    diagonal_r = r_rr.diagonal()
    spread_r = (diagonal_r.abs() / diagonal_r.abs().max()).sqrt()
    return torch.where(diagonal_r < 0, -q_Hr, q_Hr), spread_r


def project(x_NH: torch.Tensor, basis_Hr: torch.Tensor) -> torch.Tensor:
    """P = X Q, ``[N, r]``, computed and returned in fp32 (in fp64 for fp64 rows)."""
    maths = torch.promote_types(x_NH.dtype, torch.float32)
    return x_NH.to(maths) @ basis_Hr.to(maths)


def expand(p_Nr: torch.Tensor, basis_Hr: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """P Q^T, ``[N, H]`` of ``dtype``, computed in fp32 (in fp64 for fp64 coordinates)."""
    maths = torch.promote_types(p_Nr.dtype, torch.float32)
    return (p_Nr.to(maths) @ basis_Hr.to(maths).T).to(dtype)


def power_sketch(x_NH: torch.Tensor, basis_Hr: torch.Tensor) -> torch.Tensor:
    """One power step X^T (X Q), ``[H, r]`` fp32; sketches of parts of the rows add up."""
    x_NH = x_NH.float()
    return x_NH.T @ (x_NH @ basis_Hr.float())


def error_sums(x_NH: torch.Tensor, decoded_NH: torch.Tensor) -> torch.Tensor:
    """``[sum of squared residuals, sum of squares of x]``, fp64 ``[2]``: they add up over parts of the rows.

    Differences and squares are taken in fp32, the sums in fp64.
    """
    x_NH = x_NH.float()
    residual_NH = x_NH - decoded_NH.float()
    sums = [part.square().sum(dtype=torch.float64) for part in (residual_NH, x_NH)]
    return torch.stack(sums)


def relative_error(x_NH: torch.Tensor, decoded_NH: torch.Tensor) -> torch.Tensor:
    """norm(x - decoded) / norm(x), Frobenius, an fp64 scalar; 0 without residual, also for zero rows."""
    residual, total = error_sums(x_NH, decoded_NH)
    return torch.where(residual == 0, 0.0, (residual / total).sqrt())


def digest(state: torch.Tensor) -> torch.Tensor:
    """Digest of the exact bits: the first 8 bytes of their SHA-256 as int64 ``[1]``, on the tensor's device."""
    data = state.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    first = int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
    return torch.tensor([first], dtype=torch.int64, device=state.device)


def worth_compressing(rows: int, cols: int, rank: int, min_rate: float) -> bool:
    """Whether two factors of ``rank`` are smaller than a ``rows x cols`` matrix by more than ``min_rate``.

    The rule of PyTorch's PowerSGD hook: (rows + cols) * rank * min_rate < rows * cols.
    """
    return (rows + cols) * rank * min_rate < rows * cols
