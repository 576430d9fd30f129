"""Sequential experts under the parameter names of Transformer Engine's grouped linears, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP


class GroupedNames(torch.nn.Module):
    """The parameters of a SequentialMLP as `linear_fc{1,2}.weight{i}` and, if experts have biases, `.bias{i}`.

    The forward is the SequentialMLP's. Shapes do not change: TE's grouped linear also has one [out, in] weight per
    expert.
    """

    def __init__(self, sequential: SequentialMLP) -> None:
        super().__init__()
        # Not registered as a submodule: its parameters must appear once, under the grouped names.
        object.__setattr__(self, "_sequential", sequential)
        for linear in ("linear_fc1", "linear_fc2"):
            holder = torch.nn.Module()
            for i, expert in enumerate(sequential.local_experts):
                for name, parameter in getattr(expert, linear).named_parameters():
                    holder.register_parameter(f"{name}{i}", parameter)
            setattr(self, linear, holder)

    @property
    def sequential(self) -> SequentialMLP:
        """The module that computes."""
        return self.__dict__["_sequential"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the SequentialMLP."""
        forward: Callable[..., Any] = self.sequential
        return forward(*args, **kwargs)


def with_grouped_names(chunk: GPTModel) -> GPTModel:
    """Replace every SequentialMLP of `chunk` by GroupedNames, in place."""
    for module in list(chunk.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(experts, SequentialMLP):
            module.experts = GroupedNames(experts)
    return chunk
