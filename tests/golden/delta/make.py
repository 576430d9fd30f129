"""Writes the golden deltas of format 1: `python -m tests.golden.delta.make`. A new format gets files of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from moeref.delta import Delta, State, save

#: A name -> (dtype, elements, every how many elements one changes; 0: none).
TENSORS = {
    "model.layers.0.mlp.experts.0.up_proj.weight": (torch.bfloat16, 2000, 97),
    "model.layers.0.mlp.gate.e_score_correction_bias": (torch.float32, 64, 5),
    "model.layers.0.input_layernorm.weight": (torch.bfloat16, 48, 1),
    "model.layers.0.mlp.experts.0.down_proj.weight": (torch.float8_e4m3fn, 1200, 3),
    "model.norm.weight": (torch.bfloat16, 48, 0),
}


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Versions 1 and 2: every `each`-th element changes, none at 0; NaN, infinity and −0 are among the elements."""
    base, new = {}, {}
    for name, (dtype, elements, each) in TENSORS.items():
        counter = torch.arange(elements * dtype.itemsize, dtype=torch.int64)
        base[name] = (counter * 167 % 256).to(torch.uint8).view(dtype)
        new[name] = base[name].clone()
        if each:
            raw = new[name].view(torch.uint8).view(elements, dtype.itemsize)
            raw[::each, 0] ^= 3
    special = torch.tensor([0x7FC0, 0x7F80, -(2**15)], dtype=torch.int16).view(torch.bfloat16)
    new["model.layers.0.input_layernorm.weight"][:3] = special
    return base, new


def main() -> None:
    """Write both files beside this module."""
    base, new = tensors()
    for stem, zstd in (("plain", False), ("zstd", True)):
        made = Delta(State.of(1, base.items()), base, new.items(), 2, zstd=zstd)
        save(Path(__file__).with_name(f"{stem}.delta"), made)


if __name__ == "__main__":
    main()
