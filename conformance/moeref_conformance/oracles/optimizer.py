"""The first step of Adam, by its formula: Kingma and Ba, arXiv:1412.6980, algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch

EPSILON = 1e-8


def update(gradient: torch.Tensor, rate: float) -> torch.Tensor:
    """What the first step adds to the weights, in fp64; a later one adds the same while the gradient stays the same.

    Both moments are then the gradient and its square, once their bias is corrected.
    """
    of = gradient.double()
    return -rate * of / (of.abs() + EPSILON)


def norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
