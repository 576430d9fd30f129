"""Megatron's process groups for a layout, and the check that they are what the layout says."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from moeref.layout import Layout, LayoutError


def initialise(layout: Layout) -> int:
    """Create megatron-core's groups on an initialised `torch.distributed` and return this process's rank.

    Raises LayoutError if the world has another size than the layout, or if megatron-core places this rank elsewhere
    than `Layout.coords` does.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != layout.world:
        raise LayoutError(f"{layout.text}: torch.distributed has {world} ranks, the layout wants {layout.world}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order=layout.order,
        create_gloo_process_groups=False,
    )
    at = layout.coords(rank)
    real = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
    }
    for axis, value in real.items():
        if getattr(at, axis) != value:
            raise LayoutError(f"{layout.text}: rank {rank} is {at.text}, but megatron-core says {axis}{value}")
    return rank


def shut_down() -> None:
    """Forget megatron-core's groups."""
    parallel_state.destroy_model_parallel()
