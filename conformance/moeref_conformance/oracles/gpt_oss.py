"""Tables for gpt-oss: biases, and the experts of a layer in one tensor.

`gate_up_proj[e]` is [hidden, 2·width] with gate in columns 0, 2, 4 … and up in 1, 3, 5 …; `down_proj[e]` is
[width, hidden]. Megatron's fc1 of an expert is [all gate rows of the rank; all its up rows] of `hidden` columns, its
fc2 is [hidden, width of the rank]. The bias of fc1 goes with its rows, the bias of fc2 is whole on every rank.
"""

from __future__ import annotations

import torch

from moeref_conformance.oracles.shares import Share, each, whole

LAYER = each(
    whole,
    ("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    ("mlp.router.weight", "mlp.router.weight"),
    ("mlp.router.bias", "mlp.router.bias"),
) | each(Share.rows, ("self_attention.core_attention.softmax_offset", "self_attn.sinks"))


def _fc1(share: Share, full: torch.Tensor) -> torch.Tensor:
    mine = share.mine(full.shape[-1] // 2)
    columns = [2 * j for j in mine] + [2 * j + 1 for j in mine]
    return full[..., columns].movedim(-1, 0).contiguous()


def _fc2(share: Share, full: torch.Tensor) -> torch.Tensor:
    return share.rows(full).T.contiguous()


EXPERT = (
    each(
        _fc1,
        ("linear_fc1.weight", "mlp.experts.gate_up_proj"),
        ("linear_fc1.bias", "mlp.experts.gate_up_proj_bias"),
    )
    | each(_fc2, ("linear_fc2.weight", "mlp.experts.down_proj"))
    | each(whole, ("linear_fc2.bias", "mlp.experts.down_proj_bias"))
)
