"""torch's dtypes by their names in `moeref.dtypes`, which needs no torch."""

from __future__ import annotations

import torch

from moeref.dtypes import DTYPES

TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
