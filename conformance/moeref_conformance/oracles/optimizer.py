"""Steps of Adam, by its formula: Kingma and Ba, arXiv:1412.6980, algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

BETAS = (0.9, 0.999)
EPSILON = 1e-8


def update(
    gradients: Sequence[torch.Tensor], rate: float, betas: tuple[float, float] = BETAS, epsilon: float = EPSILON
) -> torch.Tensor:
    """What the last of these steps, each with its gradient, adds to the weights, in fp64."""
    first, second = torch.zeros(()).double(), torch.zeros(()).double()
    for gradient in gradients:
        of = gradient.double()
        first = betas[0] * first + (1 - betas[0]) * of
        second = betas[1] * second + (1 - betas[1]) * of.square()
    mean, square = (moment / (1 - beta ** len(gradients)) for moment, beta in zip((first, second), betas, strict=True))
    return -rate * mean / (square.sqrt() + epsilon)


def corrected(number: int) -> float:
    """The factor on the rate by which Adam corrects both moments in step `number`, were epsilon 0."""
    first, second = (1 - beta**number for beta in BETAS)
    return float(second**0.5 / first)


def norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
