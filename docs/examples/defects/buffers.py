"""areal, mbridge, miles, slime: of persistent buffers only the experts' biases are exported.

Another one is left out, and nothing is said. Models with a buffer that training changes are affected.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, on_ranks, tell


def names(project: str, folder: str) -> list[list[str]]:
    """What is exported without and with one more persistent buffer in the model."""
    import torch

    bridge = PROJECTS[project](folder)
    bridge.load()
    before = sorted(bridge.sent())
    bridge.chunks[0].decoder.layers[1].mlp.register_buffer("scale", torch.ones(4))
    return [before, sorted(bridge.sent())]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        ((before, after),) = on_ranks(1, names, sys.argv[1], folder)
    tell(before == after, f"decoder.layers.1.mlp.scale was added, and the export has the same {len(after)} names")
