"""An adapter to start from. It builds a Qwen3-MoE model by megatron-core alone; `yours` marks what your framework does.

    moeref-conformance smoke --target adapter:target --cell qwen3_moe/tp2/gloo

It runs as it stands, and the report says that `load` is still to be written. Then widen: more of `claims.families`, the
other facets (`moeref_conformance.contract.api` describes each), other designs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.api import Cell, Claims, Info, TensorMeta, World

# Where the layer spec needs Transformer Engine, before anything imports megatron-core:
#     from moeref_conformance import authors; authors.transformer_engine()
# and below norms=frozenset({"fused"}), experts=frozenset({"grouped"}).


class Export:
    """Facet `export`: all ranks make the same calls in the same order."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self.models = models

    def chunks(self) -> Sequence[torch.nn.Module]:
        """The modules of this rank, one per virtual stage. The kit reads their parameters, and changes them."""
        return self.models

    def load(self, checkpoint: Path) -> None:
        """Fill this rank's parameters from a Hugging Face folder, or raise, naming what does not fit."""
        raise NotImplementedError(f"yours: load {checkpoint} into self.models")

    def plan(self) -> Sequence[TensorMeta]:
        """What `stream` will yield, before anything is sent. Asked only if claims say has_plan=True."""
        return []

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """Every full Hugging Face tensor: on the writer its values, on other ranks None; `claims.receivers` for all."""
        for name, tensor in self.exported():
            dtype = str(tensor.dtype).removeprefix("torch.")
            writer = torch.distributed.get_rank() == 0
            yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype), tensor if writer else None

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of each, as your framework gives them."""
        raise NotImplementedError("yours: export self.models under Hugging Face's names")


class Session:
    """One opened cell on one rank: the facets that are claimed."""

    def __init__(self, export: Export) -> None:
        self.export = export


class Adapter:
    """What `--target` names. It opens one cell on each rank, in a process of its own."""

    info = Info(name="my-framework", version="0")  # yours
    #: Read before anything is built. A cell that is not claimed is counted; one that is claimed and refused fails.
    claims = Claims(
        facets=frozenset({"export"}),
        families=frozenset({"qwen3_moe"}),
        backends=frozenset({"gloo"}),
        dtypes=frozenset({"float32"}),
        tied=False,
        has_plan=False,
    )

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:
        """Groups, then the model of `world.hf_config`; torch.distributed is initialised already."""
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(**sizes(cell))
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        try:
            yield Session(Export(build(cell, json.loads((world.hf_config / "config.json").read_text()))))
        finally:
            parallel_state.destroy_model_parallel()


def sizes(cell: Cell) -> dict[str, Any]:
    """The layout in megatron-core's words, for its groups and for TransformerConfig."""
    layout = cell.layout
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def build(cell: Cell, hf: dict[str, Any]) -> list[torch.nn.Module]:
    """The model chunks of this rank: yours, in place of this Qwen3-MoE by megatron-core."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config, models = transformer_config(cell, hf), []
    for stage in range(cell.layout.vpp):
        virtual = {"vp_stage": stage} if cell.layout.vpp > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False, **virtual),
            vocab_size=-(-hf["vocab_size"] // cell.layout.tp) * cell.layout.tp,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_theta"],
            **virtual,
        )
        models.append(model)
    return models


def transformer_config(cell: Cell, hf: dict[str, Any]) -> Any:
    """megatron-core's settings. What a CPU lacks (fused kernels, overlap) is off; shapes and names do not change."""
    from megatron.core.transformer import TransformerConfig

    on_cpu = ("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm")
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        qk_layernorm=True,
        ffn_hidden_size=hf["intermediate_size"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        num_moe_experts=hf["num_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=cell.dispatcher,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=cell.layout.tp > 1,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **dict.fromkeys(on_cpu, False),
        **sizes(cell),
    )


target = Adapter()
