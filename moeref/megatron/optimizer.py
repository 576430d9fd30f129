"""Training steps of one rank with megatron-core's DistributedDataParallel and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.utils.hooks import RemovableHandle

from moeref.bridge.agreement import all_or_none
from moeref.megatron import device
from moeref.megatron.build import Built
from moeref.megatron.offload import Offloaded
from moeref.megatron.replay import replaying
from moeref.megatron.snapshot import tensors_of
from moeref.megatron.training import Loss, accumulate, in_ddp
from moeref.replay import Routes

#: What of a trainer is offloaded.
_WEIGHTS, _OPTIMIZER = "weights", "optimizer"


class NotFiniteError(RuntimeError):
    """A gradient of some rank is not finite, and all ranks have skipped the step."""


@dataclass(frozen=True)
class Schedule:
    """Learning rates by the number of steps that an optimizer has taken, as megatron-core has them.

    The first step is at the rate 0, unless there is no warm-up. Step number `warmup`, counted from 0, has the highest
    rate, step number `end` and later ones have `min_lr`. `style` is `constant`, `linear`, `cosine` or
    `inverse-square-root`. megatron-core raises AssertionError for a warm-up that does not end before `end`.
    """

    end: int
    warmup: int = 0
    style: str = "linear"
    min_lr: float = 0.0


class Trainer:
    """The optimizer of a built model. Call `reload` whenever weights are loaded after it is made.

    Below fp32 its master weights are fp32 copies of the weights, and steps write these back. So a step is refused where
    the weights are not those of their copies: it would undo the load.

    `settings` are fields of megatron-core's OptimizerConfig. Gradient clipping needs a GPU: megatron-core asserts
    CUDA tensors there, so that it is off on a CPU unless `clip_grad` says otherwise. Biases and parameters of one
    dimension do not decay. The learning rate is `lr`; with a `schedule` that is the highest, and each step that is not
    skipped moves on to the next rate.
    """

    def __init__(self, built: Built, lr: float, schedule: Schedule | None = None, **settings: Any) -> None:
        config = built.config
        self._on_gpu = next(built.chunks[0].parameters()).is_cuda
        given = {"clip_grad": 1.0 if self._on_gpu else 0.0, "weight_decay": 0.0, "bf16": config.bf16, **settings}
        if schedule:
            given["min_lr"] = schedule.min_lr
        self.built = built
        self._offloaded = dict[str, Offloaded]()
        self._hooks = list[RemovableHandle]()
        self._wrapped = in_ddp(built.chunks)
        asked = OptimizerConfig(optimizer="adam", lr=lr, params_dtype=config.params_dtype, **given)
        # `groups.initialise` makes no second set of groups over gloo: only distributed checkpoints need them.
        self.optimizer = get_megatron_optimizer(asked, self._wrapped, use_gloo_process_groups=False)
        self._schedule = schedule
        # megatron-core says which groups do not decay, and leaves it to its OptimizerParamScheduler to set that.
        self._scheduler = _scheduler(self.optimizer, asked, schedule or Schedule(end=1, style="constant"))
        # The schedule scales the loss, and the router its auxiliary losses, by the optimizer's loss scale.
        config.grad_scale_func = self.optimizer.scale_loss

    def reload(self) -> None:
        """Make the master weights anew, of the weights as they are now. Moments of the optimizer stay as they are."""
        self._check_here()
        self.optimizer.reload_model_params()

    def offload(self) -> None:
        """Give back the memory of weights, buffers and optimizer, and of gradients, which are dropped.

        An engine on the same GPU has it then; values wait in host memory, and what is offloaded already stays so. Until
        `onload` a forward raises RuntimeError, and so do calls of this trainer. Each rank calls it for itself.
        """
        if _OPTIMIZER not in self._offloaded:
            self.optimizer.zero_grad()
            self._offloaded[_OPTIMIZER] = Offloaded(self._states())
            self._drop_gradients()
        if _WEIGHTS not in self._offloaded:
            self._offloaded[_WEIGHTS] = Offloaded(tensors_of(self.built.chunks))
            self._hooks = [chunk.register_forward_pre_hook(self._check_here) for chunk in self.built.chunks]
        if self._on_gpu:
            torch.cuda.empty_cache()

    def onload(self, *, weights_only: bool = False) -> None:
        """Take back what `offload` has given away, bit for bit.

        With `weights_only` that is weights and buffers, to export them or to ask for logits; the rest comes with a call
        without it. What is there already stays as it is. Where the GPU has no room, torch.OutOfMemoryError is raised,
        and what has none stays offloaded: call again once there is.
        """
        if _WEIGHTS in self._offloaded:
            self._offloaded[_WEIGHTS].back()
            del self._offloaded[_WEIGHTS]
            while self._hooks:
                self._hooks.pop().remove()
        if not weights_only and _OPTIMIZER in self._offloaded:
            try:
                for one in self._wrapped:
                    one.restore_grad_buffers(synchronize=self._on_gpu)
                self._offloaded[_OPTIMIZER].back()
            except BaseException:
                self._drop_gradients()
                raise
            del self._offloaded[_OPTIMIZER]

    def step(
        self,
        tokens_BS: torch.Tensor,
        loss: Loss,
        given: list[Routes] | None = None,
        mask_BS: torch.Tensor | None = None,
    ) -> float | None:
        """One step down the mean of `loss` over rows (microbatches), replaying routes if they are `given` for each.

        Multi-token prediction layers train on tokens where `mask_BS` is True: without it on prompts too.

        Returns the norm of the gradient, also where `clip_grad` is 0; None where megatron-core's optimizer computes
        none. Raises RuntimeError for weights that changed since the last step or `reload`; ValueError for a `mask_BS`
        that is not bool or of another shape; other errors as `replaying` does. All ranks raise NotFiniteError where a
        gradient of one is infinite or NaN: the step is skipped, and the next one goes on as if it had not been asked.
        Only routers' biases per expert, if they are updated, have moved by then.
        """
        self._check_here()
        self._check_masters()
        self.optimizer.zero_grad()
        with replaying(self.built.chunks, given) if given is not None else nullcontext():
            accumulate(self._wrapped, self.built.shard_map, tokens_BS, loss, mask_BS=mask_BS)
        # Where a loss is scaled, megatron-core looks itself, and lowers the scale; in bf16 and fp32 it does not look.
        done, norm, _ = self.optimizer.step() if self._is_scaled() or self._is_finite() else (False, None, None)
        if not done:
            raise NotFiniteError("the step is skipped on all ranks: gradients are not finite")
        if self._schedule:
            self._scheduler.step(1)
        return None if norm is None else float(norm)

    def save(self, folder: str | Path) -> None:
        """Write what the optimizer holds on this rank to a file in `folder`: moments, step counts and master weights,
        and where in its schedule it is.

        All ranks call it, with one folder or each with its own. Below fp32 the model's weights are the rounded masters:
        keep them too, of the same step. Raises OSError if the file cannot be written.
        """
        self._check_here()
        file = self._file(folder)
        half = file.with_name(f"{file.name}.tmp")
        state = dict_list_map_outplace(_bare, self.optimizer.state_dict())
        torch.save({**self._place(), "state": state, "scheduler": self._scheduler.state_dict()}, half)
        half.replace(file)

    def restore(self, folder: str | Path) -> None:
        """Go on as the trainer did that was saved to `folder`, with its learning rates, bit for bit.

        All ranks call it, of a trainer that was made with the same `lr`, schedule and settings, once the weights of
        then are loaded; below fp32 a step is refused from others. Raises FileNotFoundError where the folder has no file
        of this rank and as many ranks, ValueError for one of another family, layout, schedule, parameters or groups of
        them, and RuntimeError where another rank has raised.
        """
        self._check_here()
        of = self.built.shard_map
        where = f"{folder}: {of.model.family}, rank {dist.get_rank()} of {of.layout.text}"
        with all_or_none(0, device.of(self.built.chunks), None, lambda reason: RuntimeError(f"{where}: {reason}")):
            saved = torch.load(self._file(folder), map_location="cpu", weights_only=True)
            for what, here in self._place().items():
                for there, own in zip_longest(saved.get(what, ()), here, fillvalue="nothing"):
                    if there != own:
                        raise ValueError(f"{where}: the saved optimizer has {what} {there}, this one {own}")
        self.optimizer.load_state_dict(saved["state"])
        if self._schedule:
            self._scheduler.num_steps = 0  # what it loads is added to the steps that it has taken
            self._scheduler.load_state_dict(saved["scheduler"])

    def _drop_gradients(self) -> None:
        """Give back the memory of gradients."""
        for one in self._wrapped:
            one.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=False)

    def _check_here(self, *of_forward: Any) -> None:
        if self._offloaded:
            what = " and ".join(sorted(self._offloaded))
            raise RuntimeError(f"{self.built.shard_map.model.family}: offloaded: {what}; call `onload` first")

    def _states(self) -> list[torch.Tensor]:
        """What the optimizer holds besides the model's own weights: moments, step counts, and master weights."""
        own = {id(of) for of in tensors_of(self.built.chunks)}
        held = dict[int, torch.Tensor]()
        for one in _chained(self.optimizer):
            inner = one.optimizer
            given = [of for group in inner.param_groups for of in group["params"]] if inner else []
            state = [of for of_one in (inner.state.values() if inner else ()) for of in of_one.values()]
            tensors = (of for of in [*given, *state] if isinstance(of, torch.Tensor))
            held |= {id(of): of for of in tensors if id(of) not in own}
        return list(held.values())

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"optimizer-{dist.get_rank():05}-of-{dist.get_world_size():05}.pt"

    def _place(self) -> dict[str, list[str]]:
        """What has to be equal where a state is restored."""
        of, chunks = self.built.shard_map, enumerate(self.built.chunks)
        named = [(n, *pair) for n, chunk in chunks for pair in chunk.named_parameters()]
        return {
            "family": [of.model.family],
            "layout": [of.layout.text],
            "schedule": [str(self._schedule)] if self._schedule else [],
            "parameter": [f"{n}:{name} {list(p.shape)} {p.dtype}" for n, name, p in named if p.requires_grad],
        }

    def _is_scaled(self) -> bool:
        return any(getattr(one, "grad_scaler", None) for one in _chained(self.optimizer))

    def _is_finite(self) -> bool:
        """Whether all gradients of all ranks are finite. The experts of a rank may be on no other."""
        buffers = (of for one in self._wrapped for of in [*one.buffers, *one.expert_parallel_buffers])
        largest = [torch.linalg.vector_norm(of.grad_data, torch.inf) for of in buffers]
        bad = sum((~of.isfinite() for of in largest), torch.zeros((), device=device.of(self.built.chunks)))
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return not bool(bad)

    def _check_masters(self) -> None:
        pairs = list(_masters(self.optimizer))
        # One answer for all, since a GPU waits for each that Python reads.
        if pairs and bool(torch.stack([(weight != main.to(weight.dtype)).any() for weight, main in pairs]).any()):
            stale = next(weight for weight, main in pairs if not torch.equal(weight, main.to(weight.dtype)))
            named = (pair for chunk in self.built.chunks for pair in chunk.named_parameters())
            name = next((name for name, parameter in named if parameter is stale), "a parameter")
            raise RuntimeError(
                f"{name} is not what its fp32 master weight is, so a step would undo the change: call `reload` after "
                "weights are loaded or changed"
            )


def _scheduler(optimizer: Any, asked: OptimizerConfig, of: Schedule) -> OptimizerParamScheduler:
    """The scheduler of an optimizer, which sets learning rates and weight decay of its groups of parameters."""
    decay = asked.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=asked.lr,
        min_lr=of.min_lr,
        lr_warmup_steps=of.warmup,
        lr_decay_steps=of.end,
        lr_decay_style=of.style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=of.end,
        wd_incr_style="constant",
    )


def _bare(value: Any) -> Any:
    """A tensor without the marks that Megatron has put on it; other values as they are."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _chained(optimizer: Any) -> list[Any]:
    """The optimizers that one of megatron-core's consists of, such as one of experts and one of the rest."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The weights that have fp32 copies in a megatron-core optimizer, with these; in fp32 there are none."""
    for one in _chained(optimizer):
        groups = (getattr(one, name, ()) for name in ("float16_groups", "fp32_from_float16_groups"))
        for weights, mains in zip(*groups, strict=True):
            yield from zip(weights, mains, strict=True)
