"""mbridge, roll: the router's weights are not those of the config, in Mixtral or in Qwen3-MoE.

`moe_router_pre_softmax` takes softmax over all experts, then the best: their weights do not add up to 1. mbridge sets
it for Mixtral, whose weights do. Neither sets it for Qwen3-MoE, so that they do, also where `norm_topk_prob` is false,
the default of transformers. Everybody who trains these models is affected; weights round-trip, so no byte shows it.
"""

import sys
from tempfile import TemporaryDirectory

from by_hand import MIXTRAL, PROJECTS, QWEN3, away, checkpoint, on_ranks, tell

#: By family: a config, and the setting with which the logits are transformers'.
CASES = {"mixtral": (MIXTRAL, False), "qwen3_moe": ({**QWEN3, "norm_topk_prob": False}, True)}


def differences(project: str, folder: str, right: bool) -> list[float]:
    """How far logits are from transformers', as the project builds the model and with the other setting."""
    found = []
    for settings in ({}, {"moe_router_pre_softmax": right}):
        bridge = PROJECTS[project](folder, **settings)
        bridge.load()
        found.append(away(bridge, folder))
    return found


if __name__ == "__main__":
    config, right = CASES[sys.argv[2]]
    with TemporaryDirectory() as folder:
        checkpoint(folder, config)
        ((as_built, other),) = on_ranks(1, differences, sys.argv[1], folder, right)
    said = f"logits differ by {as_built:.2g}; with moe_router_pre_softmax={right} by {other:.2g}"
    tell(as_built > 100 * other, said)
