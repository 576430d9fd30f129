"""A name for an activation function, by what it computes: two functions have one name if they give the same numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

#: Megatron's setting that holds the function of the MLPs and of the experts.
SETTING = "activation_func"
_POINTS = (-2.0, -0.5, 0.75, 3.0)
_KNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu of tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # gpt-oss's, in megatron-core and in transformers
    "relu": functional.relu,
    "squared relu": lambda x: functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


_OTHER = "a function with values "


def is_name(value: object) -> bool:
    """Whether `named` gives such a name; nothing else that a config may hold there is compared."""
    return isinstance(value, str) and (value in _KNOWN or value.startswith(_OTHER))


def named(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The function's name or, without one, its values at a few points; None if it takes no fp32 tensor on the CPU."""
    values = _values(function)
    if values is None:
        return None
    for name, known in _KNOWN.items():
        if torch.allclose(values, known(torch.tensor(_POINTS)), atol=1e-6):
            return name
    return f"{_OTHER}{', '.join(f'{value:.6g}' for value in values.tolist())} at {_POINTS}"


def _values(function: Callable[[torch.Tensor], Any]) -> torch.Tensor | None:
    # Without the compiler that some of Megatron's functions ask for. A rank that compiles nothing is spared its import,
    # which takes as long as all else that a small cell does.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with torch.no_grad(), eager:
            made = function(torch.tensor(_POINTS))
    except Exception:  # kernels for GPUs, or a function of two tensors
        return None
    return made if isinstance(made, torch.Tensor) and made.shape == (len(_POINTS),) else None
