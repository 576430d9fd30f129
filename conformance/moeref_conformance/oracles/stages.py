"""Which layers each pipeline stage has, according to megatron-core's own functions."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache

import torch

from moeref_conformance.contract.api import Cell, Layout

#: Cells are judged in several threads, and megatron-core keeps the virtual size in a global.
_MEGATRON_GLOBALS = threading.Lock()


def stage_layers(cell: Cell) -> dict[tuple[int, int], list[int]]:
    """(pp rank, virtual stage) -> global layer numbers in local order. See `_stage_layers`."""
    with _MEGATRON_GLOBALS:
        return _stage_layers(cell.layout, cell.layers, cell.mtp)


def mtp_stage(cell: Cell) -> tuple[int, int]:
    """(pp rank, virtual stage) of the multi-token prediction layers: the last, unless a layout string says `m`."""
    if cell.layout.pipeline_layout is None:
        return cell.layout.pp - 1, cell.layout.vpp - 1
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    custom = PipelineParallelLayerLayout.from_str(cell.layout.pipeline_layout, cell.layout.pp).layout
    return next((pp, vp) for pp, stages in enumerate(custom) for vp, s in enumerate(stages) if LayerType.mtp in s)


@lru_cache(maxsize=256)
def _stage_layers(at: Layout, layers: int, mtp: int) -> dict[tuple[int, int], list[int]]:
    """(pp rank, virtual stage) -> global layer numbers, by megatron-core's own functions on a real TransformerConfig.

    Raises ValueError for a layout that does not hold every layer once: such a cell has no right answer.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = at.vpp if at.vpp > 1 and at.pipeline_layout is None else None
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=at.pp,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=at.first,
        num_layers_in_last_pipeline_stage=at.last,
        account_for_embedding_in_pipeline_split=at.embedding,
        account_for_loss_in_pipeline_split=at.loss,
        pipeline_model_parallel_layout=at.pipeline_layout,
        mtp_num_layers=mtp or None,
    )
    stages = config.virtual_pipeline_model_parallel_size
    stage_ids = {}
    # A layout string looks at the process-wide virtual size to decide whether to look at the virtual stage at all.
    before = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)
    try:
        for pp, stage in itertools.product(range(at.pp), range(stages or 1)):
            vp_stage = None if stages is None else stage
            if at.pipeline_layout is not None:
                custom = config.pipeline_model_parallel_layout
                ids = list(custom.get_layer_id_list(LayerType.decoder, vp_stage=stage, pp_rank=pp))
            else:
                count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp)
                start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp)
                ids = list(range(start, start + count))
            stage_ids[pp, stage] = ids
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(before)
    if sorted(i for ids in stage_ids.values() for i in ids) != list(range(layers)):
        raise ValueError(f"{at.text}: megatron-core's stages {stage_ids} do not hold each of {layers} layers once")
    return stage_ids
