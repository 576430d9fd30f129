"""What megatron-core itself does with settings that `moeref.config.step_rules` refuses, on one gloo rank of a CPU.

A program of tests calls `outcome(rule)`: the text of the error of a first step, `ignored` if a setting changes nothing,
or what came of it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction

TOKENS, EXPERTS, TOP_K = 8, 16, 4
_SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_ffn_hidden_size": 8,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "use_cpu_initialization": True,
}
_BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


def groups() -> ProcessGroupCollection:
    """megatron-core's process groups of this one rank."""
    if not dist.is_initialized():
        where = (Path(tempfile.mkdtemp()) / "store").as_uri()
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def config(kind: type = TransformerConfig, **settings: Any) -> Any:
    return kind(**{**_SIZES, **settings})


def routed(before: Callable[[Any], None] = lambda router: None, **settings: Any) -> torch.Tensor:
    """The weights that a router gives the experts of the same tokens."""
    torch.manual_seed(0)
    router: Any = TopKRouter(config(**settings), pg_collection=groups())
    router.set_layer_number(1)
    before(router)
    weights: torch.Tensor = router(torch.randn(TOKENS, 1, 8))[0]
    return weights.detach()


class _Core(torch.nn.Module):
    """Takes what latent attention gives its core, which megatron-core's own for a CPU does not."""

    def __init__(self, *of: Any, softmax_scale: float, **more: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale


def model(kind: type = TransformerConfig, **settings: Any) -> Any:
    groups()
    made = config(kind, **settings)
    latent = kind is MLATransformerConfig
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, multi_latent_attention=latent)
    if latent:
        spec.submodules.self_attention.submodules.core_attention = _Core
    mtp = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False) if made.mtp_num_layers else None
    return GPTModel(made, spec, vocab_size=32, max_sequence_length=16, mtp_block_spec=mtp)


def stepped(**settings: Any) -> None:
    """A forward of a model; a TimeoutError at the hundredth part of its two layers that is kept for recomputation.

    The parts are counted: by the clock the memory of a slow machine may end first.
    """
    parts, checkpoint = itertools.count(1), tensor_parallel.checkpoint

    def counted(*of: Any) -> Any:
        if next(parts) == 100:
            raise TimeoutError("it never ends")
        return checkpoint(*of)

    made = model(**settings)
    tokens, mask = torch.arange(TOKENS)[None], torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "checkpoint", counted)
        made(tokens, tokens, mask, labels=tokens)


def _same(one: torch.Tensor, other: torch.Tensor) -> str:
    return "ignored" if torch.equal(one, other) else "heeded"


def _biased(router: Any) -> None:
    router.expert_bias.copy_(torch.linspace(0, 5, EXPERTS))


def _replayed(router: Any) -> None:
    router.router_replay.set_target_indices(torch.arange(TOP_K).expand(TOKENS, TOP_K).contiguous())
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _sinkhorn(**settings: Any) -> str:
    balancing: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn"}
    return _same(routed(**balancing, **settings), routed(**balancing))


def _bias_under(kind: str) -> str:
    settings: dict[str, Any] = {**_BIAS, "moe_router_load_balancing_type": kind}
    return _same(routed(_biased, **settings), routed(**settings))


def _random_logits(**settings: Any) -> str:
    replay: dict[str, Any] = {"moe_enable_routing_replay": True}
    other = _same(routed(_replayed, **replay, **settings), routed(_replayed, **replay))
    return {"ignored": "the model's weights", "heeded": "other weights"}[other]


def _quantiles(**settings: Any) -> Any:
    return routed(moe_router_load_balancing_type="quantile_balancing", **settings)


def _groups(number: int, chosen: int, **settings: Any) -> str:
    """Whether the experts of all tokens are in as many groups as are chosen."""
    weights = routed(moe_router_num_groups=number, moe_router_group_topk=chosen, **settings)
    within = weights.reshape(TOKENS, number, -1).ne(0).any(-1).sum(-1)
    whole = bool(weights.isfinite().all()) and weights.ne(0).sum(-1).eq(settings.get("moe_router_topk", TOP_K)).all()
    return "as asked for" if whole and bool(within.le(chosen).all()) else "others"


def _schedule(run: Callable[..., Any], chunks: int, **settings: Any) -> Any:
    made = model(**settings)
    step: dict[str, Any] = {"num_microbatches": 1, "seq_length": TOKENS, "micro_batch_size": 1}
    many: Any = [made] * chunks if chunks > 1 else made
    data: Any = [None] * chunks if chunks > 1 else None
    return run(forward_step_func=None, data_iterator=data, model=many, **step)


def _ring() -> Any:
    """Stages exchange once."""
    made = P2PCommunicator(groups().pp, config(use_ring_exchange_p2p=True, pipeline_dtype=torch.float32))
    sent = {"tensor_send_next": torch.ones(1), "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
    return made._communicate(**sent, tensor_shape=(1,))


def _scale() -> str:
    settings = {**_LATENT, "multi_latent_attention": True, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    made = model(MLATransformerConfig, softmax_scale=0.5, **settings)
    used = made.decoder.layers[0].self_attention.core_attention.softmax_scale
    return "heeded" if used == 0.5 else "ignored"


#: What is done, by rule; several settings of one rule in a list.
DONE: dict[str, list[Callable[[], Any]]] = {
    "sinkhorn-takes-no-loss": [lambda: routed(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.01)],
    "sinkhorn-weighs-by-softmax": [
        lambda: _sinkhorn(moe_router_score_function="sigmoid"),
        lambda: _sinkhorn(moe_router_topk_scaling_factor=2.5),
        lambda: _sinkhorn(moe_router_num_groups=4, moe_router_group_topk=1),
    ],
    "bias-needs-topk": [lambda: _bias_under("sinkhorn"), lambda: _bias_under("quantile_balancing")],
    "quantiles-are-plain": [
        lambda: _quantiles(moe_router_fusion=True),
        lambda: _quantiles(moe_router_num_groups=4, moe_router_group_topk=4),
        lambda: _quantiles(moe_router_num_groups=4),
    ],
    "groups-hold-the-chosen": [
        lambda: _groups(8, 1),
        lambda: _groups(8, 3, moe_router_topk=8, moe_router_pre_softmax=True),
    ],
    "groups-need-a-choice": [lambda: _same(routed(moe_router_num_groups=4), routed())],
    "replay-needs-the-model-s-logits": [
        lambda: _random_logits(moe_router_force_load_balancing=True),
        lambda: _random_logits(moe_router_force_biased=2.0),
    ],
    "weights-on-inputs-need-one-expert": [lambda: stepped(moe_apply_probs_on_input=True)],
    "full-recompute-goes-on": [lambda: stepped(**_FULL, recompute_num_layers=0)],
    "mtp-is-recomputed-alone": [lambda: stepped(**_FULL, recompute_num_layers=2, mtp_num_layers=1)],
    "overlap-needs-virtual-stages": [
        lambda: _schedule(schedules.forward_backward_pipelining_without_interleaving, 1, overlap_p2p_comm=True)
    ],
    "overlap-is-unbatched": [
        lambda: _schedule(
            schedules.forward_backward_pipelining_with_interleaving, 2, overlap_p2p_comm=True, batch_p2p_comm=True
        )
    ],
    "microbatch-groups-fill-the-pipeline": [
        lambda: _schedule(
            schedules.forward_backward_pipelining_with_interleaving,
            2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            microbatch_group_size_per_vp_stage=0,  # the pipeline has one stage
        )
    ],
    "ring-exchange-needs-its-torch": [lambda: _ring()],
    "te-groups-biases-unfused": [
        lambda: TEGroupedMLP(1, config(add_bias_linear=True, bias_dropout_fusion=True), None, groups())
    ],
    "latent-attention-has-its-scale": [_scale],
}
#: What is done for comparison, which comes out as it should.
GOOD: dict[str, Callable[[], Any]] = {
    "bias": lambda: _bias_under("none"),
    "groups": lambda: _groups(8, 2),
    "scaling": lambda: _same(routed(moe_router_topk_scaling_factor=2.5), routed()),
    "replay": lambda: _random_logits(),
    "recompute": lambda: stepped(**_FULL, recompute_num_layers=1, mtp_num_layers=1),
    "quantiles": lambda: _quantiles(),
}


def outcome(done: Callable[[], Any]) -> str:
    """What came of it: the error's class and text, or what it returned."""
    try:
        made = done()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return made if isinstance(made, str) else "runs"
