"""The table of settings that megatron-core's config classes take, and that a layer or the first step refuses, ignores
or computes wrongly.

`tests/upstream/test_first_steps.py` shows each with megatron-core's own router, experts and schedules.
"""

from __future__ import annotations

from moeref.config.rule import Effective, Rule

_BALANCING, _BIAS, _SCORES = (
    "moe_router_load_balancing_type",
    "moe_router_enable_expert_bias",
    "moe_router_score_function",
)
_GROUPS, _CHOICE, _TOPK = "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk"
_SCALE, _LOSS, _FUSED = "moe_router_topk_scaling_factor", "moe_aux_loss_coeff", "moe_router_fusion"
_RANDOM, _BIASED, _ON_INPUT = "moe_router_force_load_balancing", "moe_router_force_biased", "moe_apply_probs_on_input"
_GRANULARITY, _METHOD, _LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
_OVERLAP, _BATCH, _DROPOUT, _LINEAR_BIAS = (
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "bias_dropout_fusion",
    "add_bias_linear",
)
_GROUP, _RING = "microbatch_group_size_per_vp_stage", "use_ring_exchange_p2p"
_SINKHORN, _QUANTILE = "sinkhorn", "quantile_balancing"


def _sinkhorn_alone(now: Effective) -> bool:
    """Whether a router by Sinkhorn is asked for what it does not read."""
    return now[_BALANCING] == _SINKHORN and (
        now[_SCORES] not in (None, "softmax") or now[_SCALE] not in (None, 0, 1) or bool(now[_CHOICE])
    )


def _few(now: Effective) -> bool:
    """Whether the groups that are chosen have fewer experts than a token takes, or a token takes fewer than groups."""
    groups, choice, experts, topk = (now[name] or 0 for name in (_GROUPS, _CHOICE, "num_moe_experts", _TOPK))
    if not choice or groups < 1 or experts % groups:
        return False  # core_rules refuses these
    return bool(topk < choice or choice * (experts // groups) < topk)


def _uniform(now: Effective) -> bool:
    return bool(now[_GRANULARITY] == "full" and now[_METHOD] == "uniform")


RULES: tuple[Rule, ...] = (
    Rule(
        "sinkhorn-takes-no-loss", "run", (_BALANCING, _LOSS),
        "Sinkhorn balances without a loss",
        f"ask for {_LOSS}=0", "TopKRouter.sinkhorn_load_balancing: AssertionError",
        lambda now: now[_BALANCING] == _SINKHORN and now[_LOSS] not in (None, 0),
    ),
    Rule(
        "sinkhorn-weighs-by-softmax", "run", (_BALANCING, _SCORES, _SCALE, _CHOICE),
        "Sinkhorn takes weights of a softmax over all experts, and reads no score function, factor or groups",
        "use another balancing", "TopKRouter.sinkhorn_load_balancing",
        _sinkhorn_alone,
    ),
    Rule(
        "bias-needs-topk", "run", (_BALANCING, _BIAS),
        "this balancing chooses experts itself and ignores their bias",
        "use another balancing", "TopKRouter.routing",
        lambda now: now[_BIAS] and now[_BALANCING] in (_SINKHORN, _QUANTILE),
    ),
    Rule(
        "quantiles-are-plain", "run", (_BALANCING, _FUSED, _GROUPS, _CHOICE),
        "quantile balancing takes no fused router and no groups",
        "drop these, or use another balancing", "TopKRouter.quantile_balancing: AssertionError",
        lambda now: now[_BALANCING] == _QUANTILE
        and (bool(now[_FUSED]) or now[_GROUPS] is not None or now[_CHOICE] is not None),
    ),
    Rule(
        "groups-hold-the-chosen", "run", (_TOPK, _CHOICE, _GROUPS, "num_moe_experts"),
        "the groups that are chosen hold fewer experts than a token takes, or are more than these experts",
        "give moe_router_num_groups and moe_router_group_topk of the model", "group_limited_topk",
        _few,
    ),
    Rule(
        "groups-need-a-choice", "run", (_GROUPS, _CHOICE),
        "without a number of groups to choose, groups are ignored",
        f"give {_CHOICE} too", "topk_routing_with_score_function",
        lambda now: now.asked(_GROUPS) and (now[_GROUPS] or 0) > 1 and not now[_CHOICE],
    ),
    Rule(
        "replay-needs-the-model-s-logits", "run", ("moe_enable_routing_replay", _RANDOM, _BIASED),
        "replayed experts would get weights of random logits",
        "drop what forces them, which is for benchmarks", "TopKRouter.forward",
        lambda now: now["moe_enable_routing_replay"] and (bool(now[_RANDOM]) or now[_BIASED] is not None),
    ),
    Rule(
        "weights-on-inputs-need-one-expert", "run", (_ON_INPUT, _TOPK),
        "weights go onto the input of experts only where a token takes one",
        f"drop {_ON_INPUT}", "SequentialMLP.forward, TEGroupedMLP.forward: AssertionError",
        lambda now: now[_ON_INPUT] and now[_TOPK] != 1,
    ),
    Rule(
        "full-recompute-goes-on", "run", (_GRANULARITY, _METHOD, _LAYERS),
        "a uniform recomputation by less than one layer never ends",
        f"ask for {_LAYERS}=1", "checkpointed_forward",
        lambda now: _uniform(now) and now[_LAYERS] is not None and now[_LAYERS] < 1,
    ),
    Rule(
        "mtp-is-recomputed-alone", "run", ("mtp_num_layers", _METHOD, _LAYERS),
        "layers for multi-token prediction are recomputed one by one",
        f"ask for {_LAYERS}=1", "MultiTokenPredictionLayer: AssertionError",
        lambda now: _uniform(now) and now["mtp_num_layers"] and now[_LAYERS] != 1,
    ),
    Rule(
        "overlap-needs-virtual-stages", "run", (_OVERLAP,),
        "point-to-point communication overlaps in the interleaved schedule only",
        "drop it, or give vpp=", "forward_backward_pipelining_without_interleaving: ValueError",
        lambda now: now[_OVERLAP] and now.layout.pp > 1 and now.layout.vpp == 1,
    ),
    Rule(
        "overlap-is-unbatched", "run", (_OVERLAP, _BATCH),
        "point-to-point communication that overlaps is not batched",
        f"ask for {_BATCH}=False", "forward_backward_pipelining_with_interleaving: ValueError",
        lambda now: now[_OVERLAP] and now[_BATCH] and now.layout.vpp > 1,
    ),
    Rule(
        "microbatch-groups-fill-the-pipeline", "run", (_GROUP,),
        "a group of microbatches of a virtual stage is smaller than the pipeline",
        "ask for pp or more, or drop it", "forward_backward_pipelining_with_interleaving: ValueError",
        lambda now: now.layout.vpp > 1 and type(now[_GROUP]) is int and now[_GROUP] < now.layout.pp,
    ),
    Rule(
        "ring-exchange-needs-its-torch", "run", (_RING,),
        "stages would exchange by torch.distributed.ring_exchange, which no published torch has",
        "drop it", "P2PCommunicator: AttributeError",
        lambda now: now[_RING] and now.layout.pp > 1,
    ),
    Rule(
        "te-groups-biases-unfused", "run", (_DROPOUT, _LINEAR_BIAS, "kernels", "experts"),
        "Transformer Engine's grouped experts with biases are not fused with dropout",
        f"ask for {_DROPOUT}=False", "TEGroupedMLP.__init__: AssertionError",
        lambda now: now[_DROPOUT] and now[_LINEAR_BIAS] and now["kernels"] == "te" and now["experts"] == "grouped",
    ),
    Rule(
        "latent-attention-has-its-scale", "run", ("softmax_scale", "multi_latent_attention"),
        "multi-latent attention works its scale out and ignores this one",
        "drop softmax_scale", "MultiLatentAttention.__init__",
        lambda now: now["multi_latent_attention"] and now["softmax_scale"] is not None,
    ),
)  # fmt: skip
