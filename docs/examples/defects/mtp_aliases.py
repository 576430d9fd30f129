"""megatron-bridge, miles, slime: two tensors of a multi-token prediction layer are never exported.

Published checkpoints of GLM-4.5 and DeepSeek-V3 repeat the embedding and the head in that layer, as
`layers.N.embed_tokens` and `layers.N.shared_head.head`, and engines load them from there.
"""

import sys
from tempfile import TemporaryDirectory
from typing import Any

from by_hand import GLM45, PROJECTS, checkpoint, edit, on_ranks, tell

LAYER = f"model.layers.{GLM45['num_hidden_layers']}."


def add_layer(tensors: dict[str, Any]) -> None:
    """A layer as published: the last one's weights, two norms, a projection, and the two that repeat."""
    import torch

    last = f"model.layers.{GLM45['num_hidden_layers'] - 1}."
    tensors |= {LAYER + name[len(last) :]: held + 1 for name, held in tensors.items() if name.startswith(last)}
    norm, width = tensors["model.norm.weight"], GLM45["hidden_size"]
    tensors |= {f"{LAYER}{name}.weight": norm + 1 for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{LAYER}eh_proj.weight"] = torch.randn(width, 2 * width)
    tensors[f"{LAYER}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{LAYER}shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def lacking(project: str, folder: str) -> list[str]:
    """Tensors of the checkpoint that the export does not have."""
    from safetensors import safe_open

    bridge = PROJECTS[project](folder, mtp_num_layers=1)
    bridge.load()
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        return sorted(set(file.keys()) - bridge.sent().keys())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, {**GLM45, "num_nextn_predict_layers": 1})
        edit(folder, add_layer)
        (names,) = on_ranks(1, lacking, sys.argv[1], folder)
    both = [f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight"]
    tell(names == both, f"of the checkpoint's tensors the export lacks {names}")
