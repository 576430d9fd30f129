"""The floating-point dtypes of checkpoints and parameters, by their names in Hugging Face configs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One dtype. `precision` names an unquantised run in this dtype; "" if that is not supported."""

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
#: From each plain precision to the name of its dtype.
NAMES = {dtype.precision: name for name, dtype in DTYPES.items() if dtype.precision}
