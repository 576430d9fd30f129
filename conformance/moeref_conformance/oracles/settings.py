"""What TransformerConfig has to hold for a cell: from transformers' config class, the checkpoint, and the layout.

The checkpoint's tensors say what exists (a bias, a norm, shared experts, routers of which layers) and how large it is.
transformers' config object gives the settings that no tensor shows.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moeref_conformance.contract import activations
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.oracles import dialect, mtp_names
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.recipes import IN_FP32

#: With the type of Megatron's field; a file may have 32 for 32.0.
_YARN: dict[str, type[int] | type[float]] = {
    "original_max_position_embeddings": int,
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), float),
}
_ROUTER = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.weight$")
#: Values that mean the same to megatron-core, by name.
_SAME: dict[str, tuple[Any, ...]] = {
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None, 1),
    "moe_shared_expert_intermediate_size": (None, 0),
    "mtp_num_layers": (None, 0),
    "rope_scaling": (None, False),
    "seq_len_interpolation_factor": (None, 1.0),
    "virtual_pipeline_model_parallel_size": (None, 1),
}
#: Settings that change what a model computes, as Megatron has them where a model wants nothing of the kind. The kit's
#: families want those of `_of_every_layer` and `_computing` alone. An older megatron-core that lacks one does the same.
NEUTRAL: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "fp16": False,
    "glu_linear_offset": 0.0,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "moe_apply_probs_on_input": False,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False,
    "moe_router_topk_limited_devices": None,
    "moe_token_dropping": False,
    "mtp_use_repeated_layer": False,
    "no_rope_freq": None,
    "qk_clip": False,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "use_mup": False,
    "window_size": None,
}
#: Kinds of load balancing that are no loss: the router chooses other experts by them.
BALANCERS = ("quantile_balancing", "sinkhorn")
#: Lists of a number a layer, for which megatron-core takes one number too: whether layer i has a 1 then.
_EVERY: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda i, every: i % every == 0,
    "linear_attention_freq": lambda i, every: (i + 1) % every != 0,
    "window_attn_skip_freq": lambda i, every: (i + 1) % every != 0,
}


def of_the_model(cell: Cell, expected: Expected) -> dict[str, Any]:
    """TransformerConfig's names with the values that this model needs."""
    config, tensors = _config(expected.config), expected.tensors
    layers = int(config.num_hidden_layers)
    routers = {int(m[1]): t for name, t in tensors.items() if (m := _ROUTER.match(name)) and int(m[1]) < layers}
    experts, hidden = next(iter(routers.values())).shape

    def rows(*ends: str) -> int | None:
        """Rows of the first tensor whose name ends so; None if there is none."""
        return next((int(t.shape[0]) for name, t in tensors.items() if name.endswith(ends)), None)

    bias = rows(".e_score_correction_bias") is not None
    groups = int(getattr(config, "n_group", None) or 1)
    values = {
        "num_layers": layers,
        "hidden_size": int(hidden),
        "num_attention_heads": int(config.num_attention_heads),
        "layernorm_epsilon": float(config.rms_norm_eps),
        "num_moe_experts": int(experts),
        "moe_router_topk": int(config.num_experts_per_tok),
        "moe_ffn_hidden_size": int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size),
        "moe_layer_freq": [int(layer in routers) for layer in range(layers)],
        "moe_router_enable_expert_bias": bias,
        "moe_router_score_function": "sigmoid" if bias else "softmax",
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": int(config.topk_group) if groups > 1 else None,
        # Megatron renormalises the weights of the chosen experts unless a softmax comes first.
        "moe_router_pre_softmax": not bias and not getattr(config, "norm_topk_prob", True),
        "moe_router_topk_scaling_factor": float(getattr(config, "routed_scaling_factor", None) or 1.0),
        "moe_shared_expert_intermediate_size": rows(
            ".mlp.shared_experts.gate_proj.weight", ".mlp.shared_expert.gate_proj.weight"
        ),
        "mtp_num_layers": 0 if cell.mtp_left_out else mtp_names.number(vars(config)) or cell.mtp,
        "qk_layernorm": rows(".q_norm.weight", ".kv_a_layernorm.weight") is not None,
    }
    if len(routers) < layers:
        values["ffn_hidden_size"] = rows(".mlp.gate_proj.weight")
    values |= NEUTRAL | _of_every_layer(config, {name.partition(".self_attn.")[2] for name in tensors}, rows)
    values |= _computing(config, rows(".self_attn.q_proj.weight"))
    if not cell.precision:
        values |= {"fp4": None, "fp8": None}
    if rows(".kv_a_proj_with_mqa.weight") is not None:
        return {**values, "multi_latent_attention": True, **_latent(config)}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**values, "num_query_groups": int(config.num_key_value_heads), "kv_channels": int(width)}


def where_given(expected: Expected) -> dict[str, Any]:
    """What a config may leave out and must not contradict: Megatron's defaults, and what GPTModel takes beside it."""
    config = _config(expected.config)
    rope = _rope(config)
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    values: dict[str, Any] = {
        activations.SETTING: _activation(config),
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": float(share),
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
    }
    if getattr(config, "kv_lora_rank", None):  # latent attention scales by its own formula, whatever the config says
        return values
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values |= {"softmax_scale": width**-0.5, "rope_scaling": False, "seq_len_interpolation_factor": None}
    return values | _grouped_rope(rope)


def _grouped_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The kind of GPTModel's embedding or, of YaRN, its numbers: under `rope` a target may bring YaRN's frequencies."""
    if not _is_yarn(rope):
        return {} if "mrope_section" in rope else {"position_embedding_type": "rope"}  # of text, mrope is the same
    names = {"rotary_scaling_factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings"}
    names |= {name: name for name in ("beta_fast", "beta_slow")}
    numbers = {f"yarn_{name}": float(rope[key]) for name, key in names.items() if key in rope}
    return {**numbers, "yarn_correction_range_round_to_int": bool(rope.get("truncate", True))}


def yarn_factors(expected: Expected, given: Mapping[str, Any]) -> tuple[float, float] | None:
    """The factors of cos and sin under YaRN: transformers' attention_factor, and megatron-core's under `given`.

    None without YaRN, and where the settings do not have its numbers.
    """
    config, latent = _config(expected.config), "multi_latent_attention" in given and given["multi_latent_attention"]
    prefix, scale = ("", "rotary_scaling_factor") if latent else ("yarn_", "yarn_rotary_scaling_factor")
    if not _is_yarn(_rope(config)) or scale not in given or scale in unread(given):
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    want = float(ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[1])
    mscales = [given.get(prefix + name) for name in ("mscale", "mscale_all_dim")]
    return want, _concentration(float(given[scale]), *mscales)


def _concentration(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """megatron-core's, of YarnRotaryEmbedding: a quotient of 0.1·m·ln(factor) + 1 for both m, each 1 without both."""
    if mscale is None or all_dim is None:
        mscale, all_dim = 1.0, 0.0
    grow = math.log(factor) if factor > 1 else 0.0
    return float((0.1 * mscale * grow + 1) / (0.1 * all_dim * grow + 1))


def unread(given: Mapping[str, Any]) -> set[str]:
    """Names that megatron-core does not read beside the others of this config, whatever they hold."""
    names = set()
    if given.get("moe_router_score_function") == "sigmoid":  # recipes of DeepSeek-V3 ask for a softmax before top-k
        names.add("moe_router_pre_softmax")
    if given.get("rope_type") == "rope" and not given.get("mscale_all_dim"):  # of YaRN; 40 is the default
        names.add("rotary_scaling_factor")
    if given.get("position_embedding_type", "yarn") != "yarn":
        names |= {name for name in given if name.startswith("yarn_")}
    return names


def _of_every_layer(config: Any, attention: set[str], rows: Callable[..., int | None]) -> dict[str, Any]:
    """Norms, dropout, biases, windows, sinks and gates; `attention` has the names of the tensors of attention."""
    values: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,  # no module of these families has one, and Megatron's default is 0.1
        "attention_dropout": float(getattr(config, "attention_dropout", None) or 0.0),
        "add_bias_linear": "o_proj.bias" in attention,
        "moe_shared_expert_gate": rows(".mlp.shared_expert_gate.weight") is not None,
        "softmax_type": "learnable" if "sinks" in attention else "vanilla",
    }
    if not values["add_bias_linear"]:  # which includes the bias of q, k and v
        values["add_qkv_bias"] = "q_proj.bias" in attention
    kinds = list(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        values["window_size"] = [int(config.sliding_window) - 1, 0]  # tokens before and after the query's own
        values["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    if "linear_attention" in kinds:
        values["linear_attention_freq"] = [int(kind == "linear_attention") for kind in kinds]
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        values |= {f"linear_{name}": int(getattr(config, f"linear_{name}")) for name in names}
    elif "indexer.wk.weight" in attention:
        values |= _sparse(config)
    else:
        values["experimental_attention_variant"] = None
    return values


def _sparse(config: Any) -> dict[str, Any]:
    """DeepSeek sparse attention as transformers' indexer computes it; the epsilon of its norm is a constant.

    transformers 5.12 turns halves, whatever `indexer_rope_interleave` says (transformers#46842); engines read it.
    """
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    full = [layer for layer, kind in enumerate(kinds) if kind == "full"]
    every = {"dsa_indexer_topk_freq": full[-1] - full[-2]} if len(full) > 1 else {}
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": int(config.index_n_heads),
        "dsa_indexer_head_dim": int(config.index_head_dim),
        "dsa_indexer_topk": int(config.index_topk),
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rope_interleaved": bool(getattr(config, "indexer_rope_interleave", False)),
        "dsa_indexer_scoring_relu": True,
        **every,
    }


def _computing(config: Any, rows_of_q: int | None) -> dict[str, Any]:
    """Those of NEUTRAL that the model wants otherwise: gpt-oss's activation, Qwen3-Next's gates and norms."""
    if config.model_type == "gpt_oss":  # transformers' GptOssExperts, whose limit is a constant, as is `up + 1`
        return {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    if config.model_type in ("qwen3_next", "qwen3_5_moe_text"):  # transformers' RMSNorm of these: by 1 + weight
        gated = rows_of_q == 2 * config.num_attention_heads * config.head_dim
        return {"attention_output_gate": gated, "layernorm_zero_centered_gamma": True}
    return {}


def _activation(config: Any) -> str | None:
    """The name of transformers' activation; GptOssExperts computes its own, whatever hidden_act says."""
    from transformers.activations import ACT2FN

    if config.model_type == "gpt_oss":
        return "quick_gelu"
    return activations.named(ACT2FN[config.hidden_act])


def router_dtype(cell: Cell, expected: Expected) -> tuple[str | None, ...]:
    """Values of moe_router_dtype under which the router computes its logits at least as precisely as transformers'.

    None is the parameters' dtype.
    """
    more = ("fp32", "fp64")
    published = str(expected.config.get("dtype") or expected.config.get("torch_dtype"))
    narrow = "bfloat16" in (cell.dtype, published)
    return more if narrow and _logits_dtype(expected.config) is torch.float32 else (None, *more)


def _logits_dtype(values: dict[str, Any]) -> torch.dtype:
    """The dtype in which transformers' router, in bf16, multiplies hidden states by its weight."""
    from transformers import AutoModelForCausalLM

    config = _config(values)
    module = inspect.getmodule(AutoModelForCausalLM._model_mapping[type(config)])
    kinds = [kind for name, kind in vars(module).items() if re.search(r"Top[kK]Router$", name)]
    if not kinds:  # in transformers 4 the others have a linear
        return torch.bfloat16
    products = _Products()
    with torch.device("meta"), products:
        router = kinds[0](config)
        if not any(name.endswith(".gate.weight") for name in IN_FP32.get(config.model_type, ())):
            router.to(torch.bfloat16)
        # MiniMax-M2's is given the experts' bias.
        more = [torch.empty(len(router.weight))] * (len(inspect.signature(router.forward).parameters) - 1)
        router(torch.empty(2, config.hidden_size, dtype=torch.bfloat16), *more)
    return products.dtypes[0]


class _Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes = list[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.append(made.dtype)
        return made


def of_the_layout(layout: Layout) -> dict[str, Any]:
    """The parallel sizes; sequence parallelism goes with TP, since megatron-core trains experts so alone."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "account_for_embedding_in_pipeline_split": layout.embedding,
        "account_for_loss_in_pipeline_split": layout.loss,
        "sequence_parallel": layout.tp > 1,
    }


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the expert tensor size that megatron-core makes of None, or of nothing: the tensor size."""
    experts, dense = "expert_tensor_parallel_size", "tensor_model_parallel_size"
    if given.get(experts) is not None or dense not in given:
        return dict(given)
    return {**given, experts: given[dense]}


def may_lack(name: str, want: Any) -> bool:
    """Whether a config that leaves a setting out has `want`: megatron-core's default, or what an older one does.

    Where None is as good as what is wanted, None is the default there (tests/kit/test_settings.py).
    """
    if name in NEUTRAL:
        return bool(want == NEUTRAL[name])
    return want is None or want in _SAME.get(name, ())


def fits(name: str, want: Any, have: Any) -> bool:
    """Whether megatron-core makes the same of both. A size is no float."""
    if type(want) is int and isinstance(have, float):
        return False
    alike = _SAME.get(name, ())
    if want in alike and have in alike:
        return True
    if name == activations.SETTING:
        return not activations.is_name(have) or bool(want == have)
    if name == "softmax_scale":  # None is 1/sqrt(width) of a head
        return have is None or math.isclose(want, have, rel_tol=1e-6)
    if name in _EVERY and isinstance(have, int) and not isinstance(have, bool):
        have = [int(_EVERY[name](i, have)) for i in range(len(want))]
    return isinstance(want, bool) == isinstance(have, bool) and bool(want == have)


def _latent(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    yarn = {name: kind(rope[name]) for name, kind in _YARN.items() if name in rope} | {"rope_type": "yarn"}
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rotary_base": float(rope["rope_theta"]),
        "rotary_scaling_factor": float(rope.get("factor") or 1.0),
        **(yarn if _is_yarn(rope) else {}),
    }


def _rope(config: Any) -> dict[str, Any]:
    # transformers 4 keeps the keys of the file.
    return getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}


def _is_yarn(rope: dict[str, Any]) -> bool:
    return "yarn" in (rope.get("rope_type"), rope.get("type"))


def _config(values: dict[str, Any]) -> Any:
    """transformers' config object; for a type that it does not know, DeepSeek-V3's, whose keys such configs have."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = values["model_type"]
    if kind not in CONFIG_MAPPING_NAMES:
        kind = "deepseek_v3"
    unread = {"model_type", "quantization_config"}
    if "kv_lora_rank" in values:  # an older transformers takes it for qk_rope_head_dim
        unread.add("head_dim")
    rest = {k: copy.deepcopy(v) for k, v in values.items() if k not in unread}
    return dialect.completed(AutoConfig.for_model(kind, **rest))
