"""What megatron-core says to a layout: its config, process groups and the layers of every stage."""

from __future__ import annotations

import itertools
from typing import Any


def refusal_of_layout(text: str, model: Any) -> str:
    """Why megatron-core makes no config, groups or stages of a layout that `text` writes; "" if it makes them."""
    from megatron.core.transformer import TransformerConfig

    from moeref.check.readers.reading import SIZES, STAGES
    from moeref.layout import text as layout_text

    sizes = layout_text.read(text)
    given = {field: sizes[axis] for field, axis in {**SIZES, **STAGES}.items() if axis in sizes}
    if given.get("virtual_pipeline_model_parallel_size") == 1:
        del given["virtual_pipeline_model_parallel_size"]
    try:
        config = TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden,
            num_attention_heads=model.heads,
            num_query_groups=None if model.mla else model.kv_groups,
            kv_channels=model.head_dim,
            mtp_num_layers=model.mtp_layers or None,
            num_moe_experts=model.experts,
            add_bias_linear=model.linear_bias,
            pipeline_dtype=object(),
            **given,
        )
        stages = stages_of(config)
        held = [layer for layers in stages.values() for layer in layers]
        if sorted(held) != list(range(model.num_layers)):
            return f"stages hold {held}"
        if model.experts % config.expert_model_parallel_size:
            return "BaseMoELayer: experts do not divide over the expert parallel ranks"
    except Exception as error:  # whatever is raised is the refusal
        return f"{type(error).__name__}: {error}"
    return ""


def stages_of(config: Any) -> dict[tuple[int, int], tuple[int, ...]]:
    """The decoder layers of every (pipeline rank, virtual stage), after the process groups. Raises as megatron-core."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from tests.upstream import megatron_arguments

    dense = config.tensor_model_parallel_size * config.context_parallel_size
    expert = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    megatron_arguments.groups(config, config.pipeline_model_parallel_size * dense * expert)
    vpp = config.virtual_pipeline_model_parallel_size
    found = {}
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    try:
        for pp, vp in itertools.product(range(config.pipeline_model_parallel_size), range(vpp or 1)):
            if pattern := config.pipeline_model_parallel_layout:
                found[pp, vp] = tuple(pattern.get_layer_id_list(LayerType.decoder, vp_stage=vp, pp_rank=pp))
                continue
            where = (config, vp if vpp else None, pp)
            first = get_transformer_layer_offset(*where)
            found[pp, vp] = tuple(range(first, first + get_num_layers_to_build(*where)))
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    return found
