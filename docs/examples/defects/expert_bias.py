"""slime: the float32 bias of each expert is rounded to bfloat16 when a checkpoint is loaded.

The cast of the model to bfloat16 casts the router's bias too, and megatron-core makes float32 of it again before a
state dict is loaded or a batch routed; slime copies into it before either. Models whose router has such a bias, as
GLM-4.5 and DeepSeek-V3, choose by rounded biases.
"""

from tempfile import TemporaryDirectory

from by_hand import GLM45, checkpoint, edit, on_ranks, slime, tell

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
VALUES = [1.001, 1.002, 1.003, 1.004]


def loaded(folder: str) -> list[float]:
    """The biases of a layer's experts, as the router reads them."""
    bridge = slime(folder, dtype="bfloat16")
    bridge.load()
    router = bridge.chunks[0].decoder.layers[1].mlp.router
    router._maintain_float32_expert_bias()  # as its forward begins
    return router.expert_bias.tolist()


def plant(tensors: dict) -> None:
    """Biases that bfloat16 does not tell apart."""
    import torch

    tensors[NAME] = torch.tensor(VALUES)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, GLM45)
        edit(folder, plant)
        (found,) = on_ranks(1, loaded, folder)
    tell(len(set(found)) < len(VALUES), f"the checkpoint holds {VALUES}; the router has {found}")
