"""The expected model of a cell, as judges and oracles read it: checkpoint, tokens and logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from moeref_conformance.contract.hf_files import weight_files
from moeref_conformance.oracles import beside_vision

#: A tensor that `checkpoint_extra` may have too many.
EXTRA = "model.layers.0.kit_extra.weight"
#: A file that an earlier save with more shards has left. The index does not name it.
LEFT_OVER = "model-00099-of-00099.safetensors"


@dataclass(frozen=True)
class Expected:
    """The checkpoint of one variant on disk, and what transformers makes of it.

    `dir` holds the `inputs` and nothing else; ranks get copies of them (see `steps.run.run_rank`). `missing` is the
    tensor that `checkpoint_missing` lacks, `extra` the one that `checkpoint_extra` has too many, `unlike` the one that
    `checkpoint_unlike` has in another shape. Tensors with a prefix of `left_out` are in the files and not in the model.
    `logits_BSV` are in fp32, by transformers' own module with eager attention; the weights are the checkpoint's.
    `plain` has the tensors of a checkpoint in FP8 as they are loaded; no logits are expected of it.
    """

    dir: Path
    inputs: dict[str, str]
    missing: str
    extra: str = EXTRA
    unlike: str = ""
    left_out: tuple[str, ...] = ()
    plain: Mapping[str, torch.Tensor] | None = field(default=None, repr=False, compare=False)
    logits_BSV: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json, as published ones are or, where experts are fused, as transformers 5 writes it. Of a text
        model beside a vision model its own, inside of it."""
        return beside_vision.text_config(json.loads((self.dir / "config" / "config.json").read_text()))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the model by Hugging Face name, in the order of their names."""
        found = self.plain if self.plain is not None else read_checkpoint(self.dir / "checkpoint")
        return {name: of for name, of in found.items() if not name.startswith(self.left_out)}

    @cached_property
    def left_over(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint's file that its index does not name, by Hugging Face name."""
        file = self.dir / "checkpoint" / LEFT_OVER
        return load_file(file) if file.exists() else {}

    @cached_property
    def tokens_BS(self) -> torch.Tensor:
        """int64 token ids, the same for every cell, and -1 after the end of a row that is shorter than others."""
        return load_file(self.dir / "tokens.safetensors")["tokens"]

    @cached_property
    def mask_BS(self) -> torch.Tensor:
        """True for the tokens that a step trains on: all, unless the cell has a loss mask."""
        held = load_file(self.dir / "tokens.safetensors")
        return held.get("mask", self.tokens_BS >= 0)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each row; -1 follows them."""
        return tuple(int(number) for number in (self.tokens_BS >= 0).sum(1))

    @cached_property
    def digest(self) -> str:
        """Equal for equal checkpoints and tokens, whatever the variant."""
        files = [self.dir / "tokens.safetensors", *sorted((self.dir / "checkpoint").iterdir())]
        found = xxhash.xxh3_64()
        for file in files:
            found.update(file.read_bytes())
        return found.hexdigest()


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, sorted by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        tensors.update(load_file(file))
    return dict(sorted(tensors.items()))
