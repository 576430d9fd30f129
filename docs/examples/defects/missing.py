"""megatron-bridge, mbridge-main: a tensor that the checkpoint lacks is a line in the log, and the load returns.

The parameter keeps what it was initialised with. An incomplete checkpoint is affected, or one with a renamed tensor.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, edit, on_ranks, tell

NAME = "model.layers.0.self_attn.o_proj.weight"


def is_untouched(project: str, folder: str) -> bool:
    """Whether the parameter without a tensor is, after the load, what it was before."""
    bridge = PROJECTS[project](folder)
    parameter = bridge.chunks[0].decoder.layers[0].self_attention.linear_proj.weight
    before = parameter.detach().clone()
    bridge.load()
    return bool((parameter == before).all())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        edit(folder, lambda tensors: tensors.pop(NAME))
        (untouched,) = on_ranks(1, is_untouched, sys.argv[1], folder)
    tell(untouched, f"the checkpoint lacks {NAME}; the load returns and the parameter keeps its initial values")
