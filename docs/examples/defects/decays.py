"""megatron-bridge: a gated delta net's decays are held and sent in bfloat16, where Qwen3.5's files have float32.

megatron-core's module allocates them in `params_dtype`. A decay is the exponential of its parameter, so that rounding
changes it before the recurrence compounds it. Qwen3.5-MoE in bfloat16 is affected.
"""

from tempfile import TemporaryDirectory

from by_hand import QWEN35, checkpoint, megatron_bridge, on_ranks, tell

NAME = "model.layers.0.linear_attn.A_log"


def sent(folder: str) -> tuple[str, float]:
    """The dtype of the first layer's decays in an export, and how far they are from the file's."""
    import torch
    from moeref_conformance.targets.peers.common import delta_nets
    from safetensors.torch import load_file

    floats = dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.bfloat16)
    bridge = megatron_bridge(folder, bf16=True, **floats, **delta_nets(QWEN35["model_type"]))
    bridge.load()
    found, file = bridge.sent()[NAME], load_file(f"{folder}/model.safetensors")[NAME]
    return str(found.dtype), float((found.float() - file).abs().max())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, QWEN35)
        ((dtype, far),) = on_ranks(1, sent, folder)
    tell(dtype != "torch.float32", f"{NAME} is sent as {dtype}, and off by {far:.4f}")
