"""mbridge: a tensor that the checkpoint lacks is refused by the rank that reads it, and the others wait for that rank.

They stand in `scatter` until the collective's timeout, half an hour by default. Incomplete checkpoints under tensor
parallelism are affected.
"""

import time
from tempfile import TemporaryDirectory

from by_hand import PATIENCE, QWEN3, checkpoint, edit, mbridge, on_ranks, tell


def outcome(folder: str) -> tuple[str, float]:
    """What loading raises on this rank, and after how many seconds."""
    import torch.distributed as dist

    bridge, start, error = mbridge(folder), time.monotonic(), ""
    try:
        bridge.load()
    except Exception as raised:
        error = type(raised).__name__
    took = time.monotonic() - start
    if dist.get_rank() == 0:  # a rank that ends is noticed by the others; one that handles its error is not
        time.sleep(PATIENCE + 20)
    return error, took


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        edit(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
        (first, soon), (second, late) = on_ranks(2, outcome, folder, tensor_model_parallel_size=2)
    said = f"rank 0 raises {first} after {soon:.0f} s, rank 1 {second} after {late:.0f} s of a timeout of {PATIENCE} s"
    tell(bool(first) and late >= PATIENCE, said)
