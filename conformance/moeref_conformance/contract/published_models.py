"""Published models by name: their config, and the tensors, parameters and bytes of their weights in bf16.

The data is `published.json`, the kit's own: the target is given the config, without the counts. FP8 files are
counted as the bf16 they are turned into, without scales; the experts' bias counts as fp32.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

#: The size of a cell that is not a published model: a tiny one with random weights.
TINY = "tiny"
#: The seed of those weights.
TINY_SEED = 20_260_101


@dataclass(frozen=True, kw_only=True)
class Size:
    """One published model. `source` says what the counts were compared with."""

    name: str
    repository: str
    tensors: int
    parameters: int
    bytes: int
    source: str
    config: Mapping[str, Any]

    @property
    def axes(self) -> dict[str, Any]:
        """What the config decides of a cell. That of a model with a vision model has the text model's inside."""
        of_text = self.config.get("text_config", self.config)
        return {
            "family": self.config["model_type"],
            "layers": of_text["num_hidden_layers"],
            "dtype": of_text.get("dtype") or of_text["torch_dtype"],
            "tied": of_text["tie_word_embeddings"],
            "mtp": of_text.get("num_nextn_predict_layers") or 0,
        }


@functools.cache
def published() -> dict[str, Size]:
    """All published models by name, such as `qwen3-30b-a3b`."""
    entries = json.loads(files("moeref_conformance.contract").joinpath("published.json").read_text(encoding="utf-8"))
    return {name: Size(name=name, **entry) for name, entry in entries.items()}
