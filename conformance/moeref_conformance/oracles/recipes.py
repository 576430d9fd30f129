"""The tiny models: their sizes by family, and transformers' own modules made from them.

Sizes are rectangular and pairwise distinct, so that no transpose or swapped axis can hide. Most vocabularies divide by
nothing, so that padding shows; Mixtral's is even, DeepSeek's needs no padding at TP 1 and 2. Constants such as θ differ
from the defaults of transformers' classes, so that a default that is taken for the config's value shows. Qwen3's tied
models do not renormalise the weights of the chosen experts, its others do. Two KV groups have as many query heads as
the sizes give, so that TP ranks share a group and cut it inside heads; there Qwen3 and Qwen3-Next choose six experts.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.oracles import dialect, mtp_names

_COMMON: dict[str, Any] = {
    "hidden_size": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 56,
    "intermediate_size": 144,
    "vocab_size": 131,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
#: Sizes for FP8 kernels: at TP and ETP 2, every width that a recipe quantises is a multiple of 128.
_QUANTISED: dict[str, Any] = {
    "hidden_size": 384,
    "head_dim": 32,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 512,
}
#: Under CP Transformer Engine has flash attention and cuDNN's alone, which takes heads of a multiple of 8 in 16 bits.
_FUSED_ATTENTION = {"head_dim": 32}
#: Multi-latent attention. Queries and keys are 18 wide per head, values 6.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 16,
}
#: Each query attends to 7 keys. Of 8 heads of an indexer all are seldom below zero at once, where scores are equal.
_SPARSE: dict[str, Any] = {
    "index_topk": 7,
    "index_head_dim": 12,
    "index_n_heads": 8,
    "num_experts": 16,  # published configs leave it out, and transformers has 256
}

#: Gated delta nets, gated attention and a gated shared expert.
_HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 16,
    "shared_expert_intermediate_size": 72,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 22,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    # A gated delta net normalises sums that nearly cancel: a smaller epsilon makes logits of fp32's rounding.
    "rms_norm_eps": 1e-3,
}

#: Sizes that kernels of inference engines take on a CPU, and a length of two blocks of a KV cache.
_SERVED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
#: The same for latent attention, whose kernel decodes with 512 + 64 dimensions.
_SERVED_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}


#: Where microbatches have several samples, so that these cells differ in more than rows: a dense layer after one with
#: experts, queries without a latent (as Moonlight's), queries and keys without norms (as GLM-4.5-Air's). Of gpt-oss and
#: Qwen3.5 they have layers with full attention without a period, see `_kinds`.
_SEVERAL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [1]},
    "deepseek_v3": {"q_lora_rank": None},
    "glm4_moe": {"use_qk_norm": False, "n_shared_experts": 2},
}


#: Where experts are in MXFP4, whose blocks have 32 numbers of the input.
_IN_BLOCKS = {"hidden_size": 96, "intermediate_size": 96}

#: In fused files. Qwen3's experts are as published ones: gate and up together are less than the hidden size, so that a
#: side that is told by its length shows, and divide by 8 ranks as all widths do; other experts are wide. The heads of
#: Mixtral are as published ones: their width is null, and the hidden size holds all of them.
_FUSED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16},
    "mixtral": {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": None},
}


#: What layers without full attention have, by families whose config names the kind of each layer.
_OTHER_KIND = {"gpt_oss": "sliding_attention", "qwen3_5_moe_text": "linear_attention", "glm_moe_dsa": "shared"}


def _kinds(cell: Cell) -> dict[str, Any]:
    """The kinds of layers: full attention in those of 1, 2, 5, 6, …, so that no period gives them."""
    if cell.family == "glm_moe_dsa":  # every second layer attends to the keys of the one before
        return {"indexer_types": ["shared" if layer % 2 else "full" for layer in range(cell.layers)]}
    full = [layer % 4 in (1, 2) for layer in range(cell.layers)]
    return {"layer_types": ["full_attention" if one else _OTHER_KIND[cell.family] for one in full]}


def _rotary(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _part_rotary(theta: float, part: float) -> dict[str, Any]:
    """Rotary embeddings of a part of each head, which transformers also keeps under its older name."""
    return {"partial_rotary_factor": part, "rope_parameters": {**_rotary(theta), "partial_rotary_factor": part}}


#: Two of Qwen3's 3 frequencies stay, one is mixed; where they part is rounded, unlike gpt-oss's. Every number tells:
#: attention_factor scales cos and sin, as what YaRN computes of the factor does gpt-oss's, which is 1.14 here.
_LONG: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 3_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 0.035,
    "beta_slow": 0.0025,
    "attention_factor": 1.3,
}

#: Of norms: so large that another one shows in the last norm, whose input is.
_EPSILON = 5e-4

_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 6, "num_experts": 16, "rope_parameters": _rotary(3_000.0), "rms_norm_eps": 5e-5},
    # Mixtral's only width is intermediate_size. Its sizes divide by 3 and 6, and by 8 ranks into one expert each.
    "mixtral": {
        "head_dim": 6,
        "num_attention_heads": 24,
        "num_key_value_heads": 12,
        "num_local_experts": 8,
        "intermediate_size": 72,
        "vocab_size": 134,
        "rms_norm_eps": _EPSILON,
        "rope_parameters": _rotary(3_000.0),
    },
    "glm4_moe": {
        **_part_rotary(2_000.0, 0.75),
        "head_dim": 8,
        "rms_norm_eps": 1e-4,  # Megatron's default of 1e-5 shows in the norms of queries and keys alone
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    # 16 experts in 4 groups of which 2 are chosen, and YaRN with two mscales: two of its 4 frequencies stay, one is
    # mixed, one slows down.
    "deepseek_v3": {
        **_LATENT,
        "vocab_size": 256,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.2,
        "first_k_dense_replace": 2,
        # transformers' class has neither field; the published config does, and bridges read them.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 8_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 0.05,
            "beta_slow": 0.004,
            "mscale": 0.8,
            "mscale_all_dim": 1.0,
        },
    },
    # One norm over all heads of queries, one over all of keys. Experts have the only width, as Mixtral's.
    "minimax_m2": {
        **_part_rotary(7_000.0, 0.75),
        "head_dim": 8,
        "num_local_experts": 16,
        "intermediate_size": 56,
        "rms_norm_eps": 1e-4,  # as glm4_moe's
        # transformers' class has none of these; the published config does, and engines read them.
        "rotary_dim": 6,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        # As published, beside files that have no such layer.
        "use_mtp": True,
        "num_mtp_modules": 3,
        "mtp_transformer_layers": 1,
    },
    # A gated delta net in two layers of three, which no pipeline stage is a multiple of; the first layer is dense.
    "qwen3_next": {
        **_HYBRID,
        **_part_rotary(5_000.0, 0.75),
        "mlp_only_layers": [0],
    },
    # Experts in every layer.
    "qwen3_5_moe_text": {
        **_HYBRID,
        # As published, where positions have three axes; of text all three are the same.
        "rope_parameters": {
            **_rotary(5_000.0),
            "partial_rotary_factor": 0.75,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 1],
        },
    },
    # The window is shorter than a sequence. One of the 5 frequencies of YaRN stays, two are mixed, two slow down.
    "gpt_oss": {
        "head_dim": 10,
        "num_local_experts": 12,
        "intermediate_size": 40,  # published: the hidden size, so that no shape tells a transposed down projection
        "sliding_window": 5,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    },
    # transformers leaves the latent norms at an epsilon of 1e-6 whatever rms_norm_eps says, so _COMMON's 1e-6 stays.
    "glm4_moe_lite": {
        **_LATENT,
        "first_k_dense_replace": 1,  # published; transformers reads `mlp_layer_types`, whose default says the same
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.6,
        "rope_parameters": _rotary(1_000_000.0),
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_SPARSE,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.9,
        "rope_parameters": _rotary(4_000.0),
    },
}
# DeepSeek-V3 with other sizes, as Kimi-K2.5: all experts are in one group, one layer is dense. transformers leaves the
# latent norms at an epsilon of 1e-6, where published configs say 1e-5 of all.
_FAMILY["kimi_k25"] = {
    **_FAMILY["deepseek_v3"],
    "vocab_size": 133,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_FAMILY["deepseek_v3"]["rope_parameters"], "rope_theta": 6_000.0, "mscale": 1.0},
    # Of pre-training: transformers' class has neither, and no loss of routers.
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
_FAMILY["deepseek_v32"] = {**_FAMILY["deepseek_v3"], **_SPARSE}
#: Keys of `_COMMON` that a family's config does not have.
_ABSENT = {
    "mixtral": ("moe_intermediate_size", "norm_topk_prob"),
    "gpt_oss": ("moe_intermediate_size", "norm_topk_prob"),
    "minimax_m2": ("moe_intermediate_size", "norm_topk_prob"),
    "qwen3_5_moe_text": ("intermediate_size", "norm_topk_prob"),
}
#: Parameters that a model in bf16 keeps in fp32, as published files do, by the ends of their names.
IN_FP32 = {
    "minimax_m2": (".mlp.gate.weight", ".block_sparse_moe.gate.weight"),
    "qwen3_5_moe_text": (".linear_attn.A_log", ".linear_attn.norm.weight"),
}
#: transformers' name of each family: `…Config` and `…ForCausalLM`.
_CLASSES = {
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
    "mixtral": "Mixtral",
    "minimax_m2": "MiniMaxM2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v32": "DeepseekV32",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "gpt_oss": "GptOss",
    "kimi_k25": "DeepseekV3",  # the class of its text model
}


#: Tokens of a sequence by family. Sequence parallelism cuts them into TP parts, CP into 2·CP.
_LENGTH = {"mixtral": 24, "deepseek_v3": 24, "deepseek_v32": 24, "gpt_oss": 20}
#: Of two sequences in a microbatch, where a gated delta net computes chunks of 64 tokens: a state goes on into a second
#: chunk, which is no whole one.
_OF_DELTA_NETS = 144


def _has_delta_nets(cell: Cell) -> bool:
    return "linear_num_key_heads" in _FAMILY.get(cell.family, ())


def rows(cell: Cell) -> tuple[int, int]:
    """Number of sequences and their length: few, or under an FP8 recipe what its blocks of 128 rows divide at TP 2.

    Where microbatches have several sequences there are two microbatches, and of two about as many tokens in all, but
    of gated delta nets more. A loss mask has another one for each of four sequences.
    """
    if cell.backend == ENGINE:
        return 4, 150
    length = 256 if cell.precision else _LENGTH.get(cell.family, 16)
    if cell.batch == "pairs" and _has_delta_nets(cell):
        length = _OF_DELTA_NETS
    number = 2 * cell.rows
    return max(4, number) if cell.loss_mask else number, length - 3 if cell.batch == "packed" else length // cell.rows


def lengths(cell: Cell) -> list[int]:
    """Tokens of each sequence: all of `rows`, or of packed ones unequal odd numbers, one of them 1.

    The order by length, up or down, is not its own inverse.
    """
    number, longest = rows(cell)
    return [longest - 4, 5, longest, 1, 7, longest - 2] if cell.batch == "packed" else [longest] * number


def trained(tokens_BS: torch.Tensor) -> torch.Tensor:
    """The loss mask of rows: all after a prompt but a tool's answer; the last two; none; of others all but the first.

    So unequal numbers of tokens count in rows, in microbatches and in replicas.
    """
    mask_BS = tokens_BS >= 0
    mask_BS[:, 0] = False
    middle, length = tokens_BS.shape[1] // 2, int(mask_BS[1].sum()) + 1
    mask_BS[0, :3] = mask_BS[0, middle : middle + 2] = False
    mask_BS[1, : length - 2] = False
    mask_BS[2] = False
    return mask_BS


def _of_groups(cell: Cell) -> dict[str, Any]:
    """What two KV groups change. Of Qwen3 the epsilon is so large that it shows in the last norm, too.

    Of routers with a softmax so many experts are chosen that logits of some are negative.
    """
    if not cell.shared_groups:
        return {}
    of_family: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"rope_parameters": _LONG, "rms_norm_eps": _EPSILON, "num_experts_per_tok": 6},
        "qwen3_next": {"num_experts_per_tok": 6},
    }
    return {"num_key_value_heads": 2, **of_family.get(cell.family, {})}


def _of_batch(cell: Cell) -> dict[str, Any]:
    """What microbatches of several samples change. Experts are in the last layer under any number of layers.

    Adapters, which are trained where there is a loss mask, are of latent queries too.
    """
    alike = cell.batch == "single" or (cell.family == "qwen3_moe" and cell.layers < 3)
    alike = alike or (cell.family == "deepseek_v3" and cell.loss_mask)
    if alike:
        return {}
    longer: dict[str, Any] = {}
    if cell.batch == "pairs" and _has_delta_nets(cell):
        longer["max_position_embeddings"] = 256
        if cell.family == "qwen3_next" and cell.layers % 2 == 0:  # experts in every second layer, the last among them
            longer["decoder_sparse_step"] = 2
    return longer | (_kinds(cell) if cell.family in _OTHER_KIND else _SEVERAL.get(cell.family, {}))


def _of_files(cell: Cell) -> dict[str, Any]:
    """What files with fused experts, or with experts in MXFP4, change."""
    if cell.mxfp4_checkpoint:
        return _IN_BLOCKS
    return _FUSED.get(cell.family, {}) if cell.expert_format != "per_expert" and not cell.precision else {}


def _served(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a family at the sizes of an engine."""
    made = {**values, **_SERVED}
    if "kv_lora_rank" in values:  # latent heads have two widths
        made |= _SERVED_LATENT
        del made["head_dim"]
    if "rotary_dim" in values:  # of heads that are wider now
        made["rotary_dim"] = int(made["head_dim"] * made["rope_parameters"]["partial_rotary_factor"])
    if made["rope_parameters"]["rope_type"] == "yarn":
        made["rope_parameters"] = {**made["rope_parameters"], "original_max_position_embeddings": 128}
    return made


#: transformers makes one model at a time: while one is loaded, its class ties no weights, in whatever thread.
MAKING = threading.Lock()


def model(cell: Cell) -> Any:
    """transformers' module of the cell's family, in eval mode, with random weights of its own.

    Raises ValueError for a family without a recipe.
    """
    import transformers

    if cell.family not in _FAMILY:
        raise ValueError(f"cell {cell.id}: family {cell.family} has no recipe; known: {', '.join(_FAMILY)}")
    name = _CLASSES[cell.family]
    config_of = getattr(transformers, f"{name}Config")
    model_of = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    values = {**_COMMON, **_FAMILY[cell.family], "num_hidden_layers": cell.layers, "tie_word_embeddings": cell.tied}
    if cell.precision:
        if cell.family != "qwen3_moe":
            raise ValueError(f"cell {cell.id}: family {cell.family} has no sizes for FP8; qwen3_moe has")
        values |= _QUANTISED
    if cell.kernels == "te" and cell.layout.cp > 1:
        values |= _FUSED_ATTENTION
    values |= _of_groups(cell) | _of_batch(cell) | _of_files(cell)
    if cell.backend == ENGINE:
        values = _served(values)
    if cell.checkpoint_mtp:
        values[mtp_names.key(cell.family)] = cell.checkpoint_mtp
    values = {k: v for k, v in values.items() if k not in _ABSENT.get(cell.family, ())}
    if cell.family == "qwen3_moe" and cell.tied:
        values["norm_topk_prob"] = False
    if cell.family in ("qwen3_next", "qwen3_5_moe_text"):
        # As published, the last layer has attention where one of multi-token prediction is like it.
        values["full_attention_interval"] = min(4 if cell.checkpoint_mtp else 3, cell.layers)
    if not dialect.of_5():
        values = dialect.as_published({**values, "model_type": cell.family})
    config = config_of(**values)
    config._attn_implementation = "eager"
    with MAKING:
        return model_of(config).eval()


def cast(model: Any, dtype: torch.dtype) -> None:
    """Turn parameters into `dtype` but for those that stay fp32, as buffers do, the experts' bias among them."""
    for name, parameter in model.named_parameters():
        if not name.endswith(IN_FP32.get(model.config.model_type, ())):
            parameter.data = parameter.data.to(dtype)
