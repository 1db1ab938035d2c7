"""What fixed point costs a step's gradient: energy lost to clipping, and the sum's error, tensor by tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Shares of squared L2 norms; a root of one is the share of the norm itself."""

    lost_energy: float
    """What clipping cut off single microbatches' gradients, over their energy."""
    quantising_energy: float
    """What clipping and rounding together took from single microbatches' gradients, over their energy."""
    error_energy: float
    """|fixed point sum - fp64 sum|² / |fp64 sum|²."""
    fp32_error_energy: float
    """The same for a plain fp32 sum of the same gradients."""
    clipped: int
    elements: int

    def as_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


class Measurement:
    """Collects one step; a tensor's leaves and microbatches are added one by one, before they are quantised."""

    def __init__(self) -> None:
        self._exact: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        self._lost: dict[str, float] = {}
        self._quantising: dict[str, float] = {}
        self._energy: dict[str, float] = {}
        self._clipped: dict[str, int] = {}
        self._elements: dict[str, int] = {}

    def add(self, name: str, gradient: Tensor, blocks: list[tuple[Tensor, Tensor]], qmax: int) -> None:
        """``blocks``: views of the gradient with the factor 2^-k of each of their blocks."""
        if name not in self._exact:
            self._exact[name] = torch.zeros_like(gradient, dtype=torch.float64)
            self._plain[name] = torch.zeros_like(gradient)
        self._exact[name] += gradient
        self._plain[name] += gradient
        energy = torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
        self._energy[name] = self._energy.get(name, 0.0) + energy
        self._elements[name] = self._elements.get(name, 0) + gradient.numel()
        for view, down in blocks:
            scaled = view * down
            off = (scaled - scaled.round().clamp_(-qmax, qmax)).square_().sum(-1, keepdim=True).double()
            taken = (off / down.double().square()).sum().item()
            self._quantising[name] = self._quantising.get(name, 0.0) + taken
            over = (scaled.abs() >= qmax + 0.5).nonzero(as_tuple=True)
            excess = (scaled[over].abs().double() - qmax) / down.expand_as(view)[over].double()
            self._lost[name] = self._lost.get(name, 0.0) + excess.square().sum().item()
            self._clipped[name] = self._clipped.get(name, 0) + len(excess)

    def result(self, name: str, fixed_sum: Tensor) -> Measured:
        exact = self._exact[name]
        whole = exact.square().sum().item()
        error = (fixed_sum.to(torch.float64) - exact).square().sum().item()
        plain = (self._plain[name].to(torch.float64) - exact).square().sum().item()
        return Measured(
            lost_energy=_share(self._lost[name], self._energy[name]),
            quantising_energy=_share(self._quantising[name], self._energy[name]),
            error_energy=_share(error, whole),
            fp32_error_energy=_share(plain, whole),
            clipped=self._clipped[name],
            elements=self._elements[name],
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
