"""The floating-point dtypes of checkpoints and parameters: one row each, by the name that Hugging Face configs use."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One dtype. `precision` is what a run in plain arithmetic of this dtype is called; "" where none is offered."""

    torch: torch.dtype
    precision: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return self.torch.itemsize


DTYPES = {
    "float32": DType(torch.float32, "fp32"),
    "bfloat16": DType(torch.bfloat16, "bf16"),
    "float16": DType(torch.float16),
}
TORCH = {name: dtype.torch for name, dtype in DTYPES.items()}
#: The dtype's name of each plain precision.
NAMES = {dtype.precision: name for name, dtype in DTYPES.items() if dtype.precision}
