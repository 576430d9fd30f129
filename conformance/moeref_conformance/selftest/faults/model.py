"""Bugs of what the model computes with: constants from its config that no tensor shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Change, each_chunk, facet, placed, read_as
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.gradients import configured
from moeref_conformance.selftest.faults.steps import with_first


def _rotary(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """The inverse frequencies of every rotary embedding pass through `wrong`."""

    def change(chunk: Any) -> None:
        for module in chunk.modules():
            if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
                module.inv_freq = wrong(module.inv_freq)

    return each_chunk(change)


def _with_theta_of_the_class(inv_freq: torch.Tensor) -> torch.Tensor:
    """θ is 10,000, as a config class has it that does not find the checkpoint's."""
    return 10_000.0 ** -torch.linspace(0, 1, len(inv_freq) + 1, dtype=inv_freq.dtype)[:-1]


def _norms(epsilon: float, part: str = "") -> Change:
    """The norms whose name contains `part` have this epsilon."""

    def change(chunk: Any) -> None:
        for name, module in chunk.named_modules():
            if part in name and isinstance(module, torch.nn.RMSNorm):
                module.eps = epsilon

    return each_chunk(change)


def _of_the_first_tokens(session: Session, cell: Cell, world: World) -> Any:
    """Tokens are kept by their shape."""
    good: Any = session.forward
    kept = dict[torch.Size, torch.Tensor]()

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = good.logits(kept.setdefault(tokens_BS.shape, tokens_BS))
        return found

    return facet(session, "forward", logits=logits)


def _queries_normed(chunk: Any) -> None:
    """Queries come from a linear with a norm fused into it, although there is no latent to normalise."""

    def normed(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.rms_norm(args[0], args[0].shape[-1:]), *args[1:]

    for name, module in chunk.named_modules():
        if name.endswith("linear_q_proj"):
            module.register_forward_pre_hook(normed)


def _yarn_of_the_class(chunk: Any) -> None:
    """YaRN's frequencies part where megatron-core's class has it by default."""
    for module in chunk.modules():
        if hasattr(module, "beta_fast"):
            module.beta_fast, module.beta_slow = 32.0, 1.0
            module.forward.cache_clear()


@contextmanager
def _positions_of_the_first(cell: Cell, world: World) -> Iterator[None]:
    """cos and sin of positions are kept from the first forward; later positions take those of its last."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    good, lengths = RotaryEmbedding.forward, dict[Any, int]()

    def forward(self: Any, max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows: torch.Tensor = good(self, max_seq_len, *args, **kwargs)
        return rows[torch.arange(len(rows)).clamp_max(lengths.setdefault(self, len(rows)) - 1)]

    with mock.patch.object(RotaryEmbedding, "forward", forward):
        yield


def _biases_rounded(chunk: Any) -> None:
    """Routers add their bias in bf16, and hold it in fp32."""

    def enter(router: Any, _: Any) -> None:
        held[router] = router.expert_bias.clone()
        router.expert_bias.copy_(router.expert_bias.bfloat16())

    def leave(router: Any, *_: Any) -> None:
        router.expert_bias.copy_(held.pop(router))

    held = dict[Any, torch.Tensor]()
    for module in chunk.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def _logits_in_bf16(chunk: Any) -> None:
    """Routers multiply in the dtype of their weight, whatever the config says."""

    def gating(router: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, router.weight).float()

    for module in chunk.modules():
        if hasattr(module, "gating"):
            module.gating = partial(gating, module)


def _without_attention_factor(cell: Cell, world: World) -> tuple[Cell, World]:
    """Of YaRN's keys the ones that say how to scale cos and sin are not read, where factor alone would do."""

    def without(config: dict[str, Any]) -> dict[str, Any]:
        kept = {name: config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
        return {n: {k: v for k, v in of.items() if k != "attention_factor"} for n, of in kept.items() if of}

    return cell, read_as(world, without)


def _as_plain_rope(cell: Cell, world: World) -> tuple[Cell, World]:
    """Of a rope that has a factor the theta alone is read."""

    def plain(config: dict[str, Any]) -> dict[str, Any]:
        kept = {"rope_type": "default", "rope_theta": (config.get("rope_parameters") or config)["rope_theta"]}
        return {"rope_scaling": None} if "rope_scaling" in config else {"rope_parameters": kept}

    return cell, read_as(world, plain)


def _theta_of_the_class(cell: Cell, world: World) -> tuple[Cell, World]:
    """Beside a rope's factor the theta is that of transformers' class."""

    def without(config: dict[str, Any]) -> dict[str, Any]:
        of_class = {"rope_theta": 10_000.0}
        return {"rope_parameters": config["rope_parameters"] | of_class} if "rope_parameters" in config else of_class

    return cell, read_as(world, without)


def _whole_heads_under_axes(cell: Cell, world: World) -> tuple[Cell, World]:
    """Where positions have axes, heads are rotated whole, whatever part the config says."""

    def whole(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["rope_parameters"]
        return {"rope_parameters": rope | {"partial_rotary_factor": 1.0}} if "mrope_section" in rope else {}

    return cell, read_as(world, whole)


def _first_memory(session: Session, cell: Cell, world: World) -> Any:
    """Forwards read the memory that experts' weights had in the first one."""
    good, export = cast("Any", session.forward), cast("Any", session.export)
    first = dict[torch.nn.Parameter, torch.Tensor]()

    def logits(tokens_BS: torch.Tensor) -> Any:
        (chunk,) = export.chunks()
        experts = (of for name, of in chunk.named_parameters() if ".experts." in name)
        with placed({parameter: first.setdefault(parameter, parameter.data) for parameter in experts}):
            return good.logits(tokens_BS)

    return facet(session, "forward", logits=logits)


FAULTS = (
    Fault(
        id="whole-heads-under-axes",
        bug="maxtext#4616: the rotary class of positions with three axes knows no partial_rotary_factor",
        rules=("FWD-001",),
        diagnosis="hidden states differ from the attention of layer 1 on",
        cell=cell("qwen3_5_moe_text", "one"),
        given=_whole_heads_under_axes,
        one_rank=True,
        says="logits differ from transformers",
    ),
    Fault(
        id="attention-factor-not-read",
        bug="vLLM#48351: YaRN's attention_factor is on no list of keys: cos and sin are scaled by what factor gives",
        rules=("CFG-001", "FWD-001"),
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        given=_without_attention_factor,
        one_rank=True,
        says="multiply cos and sin by 1.13863, not 1.3",
    ),
    Fault(
        id="rope-that-users-add-not-read",
        bug="LlamaFactory#9589, Automodel#1398: YaRN that users add to a model without it does not reach Megatron",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        given=_as_plain_rope,
        one_rank=True,
        diagnosis="from the attention of layer 0 on",
    ),
    Fault(
        id="theta-lost-beside-a-factor",
        bug="Megatron-Bridge#3077: YaRN that users add takes the place of all that a rope has, theta too",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        given=_theta_of_the_class,
        one_rank=True,
        diagnosis="from the attention of layer 0 on",
    ),
    Fault(
        id="experts-of-the-first-forward",
        bug="Automodel#3606, Primus#983: copies of experts' weights are kept, whatever the optimizer does",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "tp2-ep2-etp1", experts="grouped"),
        wrap=with_first("forward", "logits", ".experts."),
        says="once weights have changed, differ from transformers",
    ),
    Fault(
        id="experts-in-the-memory-of-the-first-forward",
        bug="Primus#975, Megatron-LM#6963: experts compute from one buffer, and weights cut from it get other memory",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "tp2-ep2-etp1", experts="grouped"),
        wrap=_first_memory,
        says="once weights have changed in new memory, differ from transformers",
    ),
    Fault(
        id="routers-of-the-first-forward",
        bug="sglang#35883: a copy of the routers in fp32 is made once, and routes stay those of earlier weights",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "tp2"),
        wrap=with_first("forward", "logits", ".router.weight"),
        says="once weights have changed, differ from transformers",
    ),
    Fault(
        id="latents-of-the-first-forward",
        bug="sglang#4961 in kind: what latent attention makes of a weight is made once",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "tp2", layers=3),
        wrap=with_first("forward", "logits", ".linear_kv_up_proj.weight"),
        says="once weights have changed, differ from transformers",
    ),
    Fault(
        id="sinks-of-the-first-forward",
        bug="sglang#29916: a copy of the sinks is made in the first forward, and stays as it is when they are updated",
        rules=("FWD-001",),
        cell=cell("gpt_oss", "one"),
        wrap=with_first("forward", "logits", ".softmax_offset"),
        says="once weights have changed, differ from transformers",
    ),
    Fault(
        id="frequencies-in-bf16",
        bug="transformers#25681: a model is cast to bf16 with the frequencies of positions, as long contexts show",
        rules=("CFG-009",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16"),
        wrap=_rotary(lambda inv_freq: inv_freq.bfloat16()),
        one_rank=True,
        says="are rounded to bf16",
    ),
    Fault(
        id="logits-of-the-first-tokens",
        bug="reported nowhere: a buffer of tokens is kept by its shape, and not filled again",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_of_the_first_tokens,
        one_rank=True,
    ),
    Fault(
        id="positions-of-the-first-forward",
        bug="transformers#29496 in kind: what is kept for the positions of one forward is taken for a longer one",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one"),
        patch=_positions_of_the_first,
        one_rank=True,
    ),
    Fault(
        id="biases-added-in-bf16",
        bug="B41 in the trainer: miles#811, the experts' bias is held in fp32 and rounded where it is added",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "one"),
        wrap=each_chunk(_biases_rounded),
        one_rank=True,
    ),
    Fault(
        id="biases-added-in-the-dtype-of-the-model",
        bug="B41 in kind: miles#811, routers add their bias in the dtype of the model, which shows in bf16 alone",
        rules=("RPL-002",),
        cell=cell("glm4_moe", "one", dtype="bfloat16", replay="R3"),
        wrap=each_chunk(_biases_rounded),
        says="its router chooses in fp32",
        one_rank=True,
    ),
    Fault(
        id="router-multiplies-in-bf16",
        bug="prime-rl#2952, vLLM#14027 in kind: scores are computed in fp32, of logits that were rounded to bf16",
        rules=("CFG-013",),
        cell=cell("glm4_moe", "one", dtype="bfloat16", replay="R3"),
        wrap=each_chunk(_logits_in_bf16),
        says="as logits in fp32 do not have it",
        one_rank=True,
    ),
    Fault(
        id="queries-normed-without-a-latent",
        bug="Megatron-Bridge#5261: with q_lora_rank=null queries have a norm, which the checkpoint does not know",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "one", layers=3, batch="pairs"),
        wrap=each_chunk(_queries_normed),
        one_rank=True,
    ),
    Fault(
        id="weights-not-renormalised",
        bug="Megatron-Bridge#4946: moe_router_pre_softmax is a constant, whatever norm_topk_prob says",
        rules=("CFG-001", "FWD-001"),
        diagnosis="hidden states differ from the MLP or MoE of layer 0 on",
        also=("CFG-004",),
        cell=cell("qwen3_moe", "one"),
        wrap=configured(moe_router_pre_softmax=True),
        says="moe_router_pre_softmax",
        one_rank=True,
    ),
    Fault(
        id="weights-always-renormalised",
        bug="Megatron-Bridge#4946: trained as if norm_topk_prob were true, which is megatron-core's default",
        rules=("CFG-001", "FWD-001"),
        also=("CFG-004",),
        cell=cell("qwen3_moe", "one", tied=True),
        wrap=configured(moe_router_pre_softmax=False),
        says="moe_router_pre_softmax",
        one_rank=True,
    ),
    Fault(
        id="norm-epsilon-of-the-class",
        bug="rms_norm_eps of the checkpoint is not read, and the class has a default",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_norms(1e-6),
        one_rank=True,
    ),
    Fault(
        id="query-norm-epsilon-of-megatron",
        bug="norms of queries and keys that are built without the config's epsilon, and have Megatron's default",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "one"),
        wrap=_norms(1e-5, "q_layernorm"),
        one_rank=True,
    ),
    Fault(
        id="latent-norm-epsilon-of-megatron",
        bug="norms of latents that are built without the config's epsilon, and have Megatron's default",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "one", layers=3),
        wrap=_norms(1e-5, "kv_layernorm"),
        one_rank=True,
    ),
    Fault(
        id="final-norm-epsilon-of-megatron",
        bug="Megatron-Bridge#5712 in kind: a norm that is built apart from the others has the default of its class",
        rules=("FWD-001",),
        diagnosis="hidden states agree up to the last norm",
        cell=cell("qwen3_moe", "one", shared_groups=True, layers=4),
        wrap=_norms(1e-5, "final_layernorm"),
        one_rank=True,
    ),
    Fault(
        id="routed-scale-of-the-class",
        bug="routed_scaling_factor of the checkpoint is not read, and the class has DeepSeek-V3's as its default",
        rules=("CFG-001", "FWD-001"),
        also=("CFG-004",),
        cell=cell("deepseek_v3", "one", layers=3),
        wrap=configured(moe_router_topk_scaling_factor=2.5),
        says="moe_router_topk_scaling_factor",
        one_rank=True,
    ),
    Fault(
        id="rope-theta-of-the-class",
        bug="slime#1734: rope_theta is read under its old name, which has a default in transformers 5",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_rotary(_with_theta_of_the_class),
        one_rank=True,
    ),
    Fault(
        id="yarn-of-the-class",
        bug="beta_fast and beta_slow of rope_scaling are parsed and never passed on, and the class has defaults",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "one", layers=3),
        wrap=each_chunk(_yarn_of_the_class),
        one_rank=True,
    ),
    Fault(
        id="rotary-fraction-of-a-fraction",
        bug="Megatron-Bridge#4271 in kind: partial_rotary_factor is applied to what is rotated already",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "one"),
        wrap=_rotary(lambda inv_freq: inv_freq[:-1].clone()),
        one_rank=True,
    ),
)
