"""Steps of Adam, by its formula: Kingma and Ba, arXiv:1412.6980, algorithm 1; decay as Loshchilov and Hutter's AdamW.

AdamW is algorithm 2 of arXiv:1711.05101, with its schedule multiplier as the rate. Rates that fall as a cosine are
those of equation 5 of arXiv:1608.03983, for one restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Settings(NamedTuple):
    """What AdamW is made with, and the norm to which longer gradients are clipped. The defaults are plain Adam's."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.0
    clip: float = 0.0  # 0: gradients are not clipped

    def scale(self, norm: float) -> float:
        """The factor by which clipping scales all gradients of a step whose norm this is."""
        return min(1.0, self.clip / norm) if self.clip else 1.0


#: Adam without clipping and decay.
PLAIN = Settings()


def read(settings: Mapping[str, float]) -> Settings:
    """Settings by the names of megatron-core's OptimizerConfig."""
    betas = (settings["adam_beta1"], settings["adam_beta2"])
    return Settings(betas, settings["adam_eps"], settings["weight_decay"], settings["clip_grad"])


class Schedule(NamedTuple):
    """Learning rates by steps: a line from 0 to the `highest` at step `warmup`, then a cosine to the `lowest` at `end`.

    Steps count from 0. Without a `cosine` a line leads down.
    """

    highest: float
    lowest: float
    warmup: float
    end: float
    cosine: bool = True

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Schedule:
        """A schedule by the names of Megatron-LM's arguments."""
        return cls(settings["lr"], settings["min_lr"], settings["lr_warmup_iters"], settings["lr_decay_iters"])

    def at(self, number: float) -> float:
        """The rate of this step."""
        if number < self.warmup:
            return self.highest * number / self.warmup
        part = min(1.0, (number - self.warmup) / (self.end - self.warmup))
        left = (1.0 + math.cos(math.pi * part)) / 2 if self.cosine else 1.0 - part
        return self.lowest + left * (self.highest - self.lowest)


def update(
    gradients: Sequence[torch.Tensor],
    rate: float,
    settings: Settings = PLAIN,
    norms: Sequence[float] = (),
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the last of these steps, each with its gradient, adds to the weights, in fp64.

    `norms` are those of the whole model's gradient in each step, for clipping. `held` are the weights before the last
    step, for the decay; without them there is none.
    """
    first, second, betas = torch.zeros(()).double(), torch.zeros(()).double(), settings.betas
    scales = [settings.scale(norm) for norm in norms] if settings.clip else [1.0] * len(gradients)
    for scale, gradient in zip(scales, gradients, strict=True):
        of = scale * gradient.double()
        first = betas[0] * first + (1 - betas[0]) * of
        second = betas[1] * second + (1 - betas[1]) * of.square()
    mean, square = (moment / (1 - beta ** len(gradients)) for moment, beta in zip((first, second), betas, strict=True))
    decay = 0.0 if held is None else settings.decay * held.double()
    return -rate * (mean / (square.sqrt() + settings.epsilon) + decay)


def corrected(number: int, betas: tuple[float, float] = PLAIN.betas) -> float:
    """The factor on the rate by which Adam corrects both moments in step `number`, were epsilon 0."""
    first, second = (1 - beta**number for beta in betas)
    return float(second**0.5 / first)


def norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
