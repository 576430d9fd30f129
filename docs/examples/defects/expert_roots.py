"""miles, slime: below an expert module, a parameter without an expert's number has one name on all EP ranks.

Each rank takes itself for the one that holds it, and broadcasts its own: the ranks disagree on the collective's root.
Adapters and other parameters inside expert modules are affected, with EP.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import PROJECTS, QWEN3, checkpoint, on_ranks, tell


class Asked(Exception):
    """The broadcast was asked for. It is not begun: with two roots it need not end."""


def root(project: str, folder: str) -> int:
    """The rank that this rank takes for the root of that parameter's broadcast."""
    import torch
    import torch.distributed as dist

    bridge, real = PROJECTS[project](folder), dist.broadcast

    def broadcast(tensor: torch.Tensor, src: int, *words: object, **more: object) -> object:
        if tensor.numel() == 3:
            raise Asked(src)
        return real(tensor, src, *words, **more)

    bridge.load()
    bridge.chunks[0].decoder.layers[0].mlp.experts.linear_fc2.scale = torch.nn.Parameter(torch.ones(3))
    dist.broadcast = broadcast
    try:
        bridge.sent()
    except Asked as asked:
        return asked.args[0]
    return -1


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        first, second = on_ranks(2, root, sys.argv[1], folder, expert_model_parallel_size=2)
    tell(first != second, f"rank 0 broadcasts it from rank {first}, and rank 1 from rank {second}")
