"""mcore-bridge: a parameter that the bridge does not know is left out of an export, and nothing is said.

Training changes it, and the engine never gets it. Models with modules of one's own are affected, and models of a newer
megatron-core.
"""

from tempfile import TemporaryDirectory

from by_hand import QWEN3, checkpoint, mcore_bridge, on_ranks, tell


def names(folder: str) -> list[list[str]]:
    """What is exported without and with one more parameter in the model."""
    import torch

    bridge = mcore_bridge(folder)
    bridge.load()
    before = sorted(bridge.sent())
    bridge.chunks[0].decoder.layers[0].mlp.scale = torch.nn.Parameter(torch.ones(4))
    return [before, sorted(bridge.sent())]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN3)
        ((before, after),) = on_ranks(1, names, folder)
    tell(before == after, f"decoder.layers.0.mlp.scale was added, and the export has the same {len(after)} names")
