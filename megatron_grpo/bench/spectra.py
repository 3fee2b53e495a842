"""How much of the rows' energy sits in how few directions and tokens. Legend: N rows, H hidden."""

import torch

ENERGY = 0.9


def rank_of_energy(x_NH: torch.Tensor, share: float = ENERGY) -> int:
    """The fewest orthogonal directions that hold ``share`` of the squared norm of the rows."""
    x_NH = x_NH.double()
    return _fewest(torch.linalg.eigvalsh(x_NH.T @ x_NH).clamp(min=0.0), share)


def tokens_of_energy(x_NH: torch.Tensor, share: float = ENERGY) -> float:
    """The smallest share of the rows that holds ``share`` of their squared norm."""
    return _fewest(x_NH.double().square().sum(dim=-1), share) / len(x_NH)


def _fewest(energies: torch.Tensor, share: float) -> int:
    falling = energies.sort(descending=True).values.cumsum(dim=0)
    return 1 + int((falling < share * falling[-1]).sum())


def centred_unit_rows(x_NH: torch.Tensor) -> torch.Tensor:
    """Rows of norm 1, less their mean: what is left when neither a few huge rows nor a common offset counts."""
    unit_NH = torch.nn.functional.normalize(x_NH, dim=-1)
    return unit_NH - unit_NH.mean(dim=0)


def forward_spectrum(x_NH: torch.Tensor) -> dict[str, float]:
    """Ranks that hold 90 % of the energy: of rows as they are, and of :func:`centred_unit_rows`."""
    return {
        "rank90": rank_of_energy(x_NH),
        "rank90_centred_unit_rows": rank_of_energy(centred_unit_rows(x_NH)),
        "tokens90": tokens_of_energy(x_NH),
    }


def backward_spectrum(x_NH: torch.Tensor) -> dict[str, float]:
    """Rank and share of the tokens that hold 90 % of the gradient's energy."""
    return {"rank90": rank_of_energy(x_NH), "tokens90": tokens_of_energy(x_NH)}
