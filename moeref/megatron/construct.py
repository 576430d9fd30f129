"""Constructs megatron-core's own config of a run and says what it refuses: a program that `moeref check` starts.

It reads a JSON object from its input: `kind` (the class), `values` (settings), `activation` and `dtype` (what is no
plain value). It writes one: `core`, `refusal` ("" if the config is made) and `stand_ins` (what only GPUs have and was
taken to be there). It imports nothing of moeref, and runs in a process of its own: stand-ins stay in it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import warnings
from typing import Any

#: What 0.16 does not even name where Transformer Engine is missing.
_FUSED_ROWS = (
    *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
    *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
)


def stand_in() -> list[str]:
    """Let Transformer Engine count as installed where it is not, in every version: the run's machine has it."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils

    try:
        import transformer_engine  # type: ignore[import-not-found]  # noqa: F401 -- only to see whether it is there
    except Exception:  # its libraries are looked for on import, and fail in many ways
        for module in (utils, transformer_config):
            module.is_te_min_version = lambda version, check_equality=True: True
        for module in (rope_utils, moe_utils):
            for name, value in list(vars(module).items()):
                if name.startswith("fused_") and value is None:
                    setattr(module, name, lambda *args, **kwargs: None)
        for name in set(_FUSED_ROWS) - vars(moe_utils).keys():
            setattr(moe_utils, name, lambda *args, **kwargs: None)
        return ["Transformer Engine"]
    return []


def construct(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    import torch
    from megatron.core import transformer
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.enums import AttnBackend

    values, dtype = request["values"], getattr(torch, request["dtype"])
    values["activation_func"] = quick_gelu if request["activation"] == "quick_gelu" else torch.nn.functional.silu
    residual = torch.float32 if values.get("fp32_residual_connection") else dtype
    values |= {"params_dtype": dtype, "pipeline_dtype": residual, "autocast_dtype": dtype}
    if isinstance(values.get("window_size"), list):  # JSON has no tuples
        values["window_size"] = tuple(values["window_size"])
    if isinstance(values.get("attention_backend"), str):
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    # megatron.core.__version__ ends with the commit of whatever checkout the environment lies in.
    answer = {"core": importlib.metadata.version("megatron-core"), "stand_ins": stand_in(), "refusal": ""}
    try:
        getattr(transformer, request["kind"])(**values)
    except Exception as error:  # whatever the config raises is its refusal
        answer["refusal"] = f"{type(error).__name__}: {error}"
    return answer


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(json.dumps(construct(json.load(sys.stdin))))
