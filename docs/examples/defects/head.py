"""areal, mcore-bridge, slime: an untied model is loaded without `lm_head.weight`, and nothing is said.

AReaL and slime take the checkpoint for a tied one, whatever `tie_word_embeddings` says, and give the head the
embedding's values. mcore-bridge leaves the head as it was initialised. Untied models loaded from an incomplete
checkpoint are affected.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, edit, on_ranks, tell


def head(project: str, folder: str) -> str:
    """What the head holds after a load that had nothing for it."""
    bridge = PROJECTS[project](folder)
    held = dict(bridge.chunks[0].named_parameters())
    weight, before = held["output_layer.weight"], held["output_layer.weight"].detach().clone()
    bridge.load()
    if (weight == held["embedding.word_embeddings.weight"]).all():
        return "the embedding's values"
    return "its initial values" if (weight == before).all() else "other values"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
        (holds,) = on_ranks(1, head, sys.argv[1], folder)
    tell(holds != "other values", f"the load returns, and the untied head has {holds}")
