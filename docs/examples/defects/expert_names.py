"""mbridge, verl: whatever has `mlp.experts.linear_fc2` in its name is sent as an expert's weight.

A parameter below that module goes out at EP1 under the name of a weight, without an expert's number. Adapters and other
parameters inside expert modules are affected.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, on_ranks, tell


def added(project: str, folder: str) -> list[str]:
    """Names that the export has once a parameter stands below an expert module."""
    import torch

    bridge = PROJECTS[project](folder)
    bridge.load()
    before = bridge.sent()
    bridge.chunks[0].decoder.layers[0].mlp.experts.linear_fc2.scale = torch.nn.Parameter(torch.ones(4))
    try:
        return sorted(bridge.sent().keys() - before)
    except ValueError:  # refused
        return []


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        (names,) = on_ranks(1, added, sys.argv[1], folder)
    said = f"decoder.layers.0.mlp.experts.linear_fc2.scale was added, and the export sends {names}"
    tell(any(name.endswith("down_proj.weight") for name in names), said)
