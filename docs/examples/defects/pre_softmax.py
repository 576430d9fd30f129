"""mbridge: the router's weights are not those of the config, in Mixtral, and in Qwen3-MoE without renormalisation.

Mixtral's setting `moe_router_pre_softmax` takes softmax over all experts, then the best: their weights do not add up to
1, and Mixtral's do. For Qwen3-MoE it is always off, so they do, also where `norm_topk_prob` is false, the default of
transformers. Everybody who trains these models is affected; weights round-trip, so no byte shows it.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import MIXTRAL, QWEN3, away, checkpoint, mbridge, on_ranks, tell

#: By family: a config, and the setting with which the logits are transformers'.
CASES = {"mixtral": (MIXTRAL, False), "qwen3_moe": ({**QWEN3, "norm_topk_prob": False}, True)}


def differences(folder: str, right: bool) -> list[float]:
    """How far logits are from transformers', as mbridge builds the model and with the other setting."""
    found = []
    for settings in ({}, {"moe_router_pre_softmax": right}):
        bridge = mbridge(folder, **settings)
        bridge.load()
        found.append(away(bridge, folder))
    return found


if __name__ == "__main__":
    config, right = CASES[sys.argv[1]]
    with TemporaryDirectory() as folder:
        checkpoint(folder, config)
        ((as_built, other),) = on_ranks(1, differences, folder, right)
    said = f"logits differ by {as_built:.2g}; with moe_router_pre_softmax={right} by {other:.2g}"
    tell(as_built > 100 * other, said)
