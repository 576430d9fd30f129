"""mbridge, verl: without EP, experts are gathered over TP and not over expert TP.

At TP1 with expert TP 2 every rank sends half of each expert under the whole expert's name. Layouts with EP1 and an
expert TP other than TP are affected; at TP2 with expert TP 1 mbridge stops at an assertion, and verl sends each expert
joined with itself.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, on_ranks, tell

NAME = "model.layers.0.mlp.experts.0.down_proj.weight"


def shape(project: str, folder: str) -> list[int]:
    """Of one expert's weight, as this rank exports it."""
    bridge = PROJECTS[project](folder)
    bridge.load()
    return list(bridge.sent()[NAME].shape)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        shapes = on_ranks(2, shape, sys.argv[1], folder, expert_tensor_parallel_size=2)
    whole = [QWEN3["hidden_size"], QWEN3["moe_intermediate_size"]]
    tell(shapes != [whole, whole], f"the two ranks export {NAME} as {shapes}; the checkpoint's is {whole}")
