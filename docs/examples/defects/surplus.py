"""areal, mbridge, mcore-bridge, megatron-bridge, roll, slime: a tensor that no module asks for is not named.

A misspelt name, or a layer that the config does not count, stays on disk: the load raises nothing and logs nothing of
it. Published GLM-4.5 and DeepSeek-V3 hold tensors that a model without MTP has no place for.
"""

import contextlib
import io
import logging
import sys
import warnings
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, edit, on_ranks, tell

#: One of a layer that is there, unless another is asked for.
NAME = sys.argv[2] if len(sys.argv) > 2 else "model.layers.0.mlp.surplus.weight"


def said(project: str, folder: str) -> str:
    """What the load prints, logs and warns of."""
    bridge, heard = PROJECTS[project](folder), io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(heard))
    warnings.showwarning = lambda message, *_: heard.write(f"{message}\n")
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        bridge.load()
    return heard.getvalue()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        edit(folder, lambda tensors: tensors.update({NAME: tensors["lm_head.weight"].clone()}))
        (text,) = on_ranks(1, said, sys.argv[1], folder)
    tell(NAME not in text, f"the checkpoint holds {NAME}; the load returns and says nothing of it")
