"""The floating-point dtypes of checkpoints and parameters, by their names in Hugging Face configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """Bytes of one element, and the name of an unquantised run in this dtype; "" if that is not supported."""

    bytes: int
    precision: str = ""


DTYPES = {"float32": DType(4, "fp32"), "bfloat16": DType(2, "bf16"), "float16": DType(2)}
#: From each plain precision to the name of its dtype.
NAMES = {dtype.precision: name for name, dtype in DTYPES.items() if dtype.precision}


def index_bytes(experts: int) -> int:
    """Bytes of an expert's index in routes."""
    return 1 if experts <= 256 else 2
