"""Training steps of one rank with megatron-core's DistributedDataParallel and optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from moeref.megatron.build import Built
from moeref.megatron.replay import replaying
from moeref.megatron.training import Loss, accumulate, in_ddp
from moeref.replay import Routes


class Trainer:
    """The optimizer of a built model. Make it after `bridge.load`: its master weights are copies.

    `settings` are fields of megatron-core's OptimizerConfig. Gradient clipping needs a GPU: megatron-core asserts
    CUDA tensors there, so that it is off on a CPU unless `clip_grad` says otherwise.
    """

    def __init__(self, built: Built, lr: float, **settings: Any) -> None:
        config = built.config
        on_gpu = next(built.chunks[0].parameters()).is_cuda
        given = {"clip_grad": 1.0 if on_gpu else 0.0, "weight_decay": 0.0, "bf16": config.bf16, **settings}
        self.built = built
        self._wrapped = in_ddp(built.chunks)
        asked = OptimizerConfig(optimizer="adam", lr=lr, params_dtype=config.params_dtype, **given)
        # `groups.initialise` makes no second set of groups over gloo: only distributed checkpoints need them.
        self.optimizer = get_megatron_optimizer(asked, self._wrapped, use_gloo_process_groups=False)
        # The schedule scales the loss, and the router its auxiliary losses, by the optimizer's loss scale.
        config.grad_scale_func = self.optimizer.scale_loss

    def step(self, tokens_BS: torch.Tensor, loss: Loss, given: list[Routes] | None = None) -> float | None:
        """One step down the mean of `loss` over rows (microbatches), replaying routes if they are `given` for each.

        Returns the norm of the gradient, None where it is not clipped. Raises RuntimeError if the step was skipped,
        and as `replaying` does.
        """
        self.optimizer.zero_grad()
        with replaying(self.built.chunks, given) if given is not None else nullcontext():
            accumulate(self._wrapped, self.built.shard_map, tokens_BS, loss)
        done, norm, _ = self.optimizer.step()
        if not done:
            raise RuntimeError("the optimizer skipped the step: gradients are not finite")
        return None if norm is None else float(norm)
