"""Names of the experts' tensors that a checkpoint has in MXFP4, and the config that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What the names of a weight's two tensors end with.
BLOCKS, SCALES = "_blocks", "_scales"
#: As the configs of gpt-oss-20b and gpt-oss-120b say it.
_CONFIG: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def config(model: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that is published in MXFP4."""
    return {**model, "quantization_config": _CONFIG}
