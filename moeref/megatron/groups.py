"""megatron-core's process groups for a layout, and its coordinates of this rank."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from moeref.layout import Layout, LayoutError


def initialise(layout: Layout) -> int:
    """Create megatron-core's groups on an initialised `torch.distributed`, and return this process's rank.

    Raises LayoutError if the world size is not the layout's, or if megatron-core's coordinates of this rank differ from
    `Layout.coords`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != layout.world:
        raise LayoutError(f"{layout.text}: torch.distributed has {world} ranks, the layout has {layout.world}")
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
    for axis, value in coordinates().items():
        if getattr(at, axis) != value:
            raise LayoutError(f"{layout.text}: rank {rank} is {at.text}, but megatron-core says {axis}{value}")
    return rank


def coordinates() -> dict[str, int]:
    """This rank's coordinate on each axis according to megatron-core."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "edp": parallel_state.get_expert_data_parallel_rank(),
    }


def sizes() -> dict[str, int]:
    """The sizes of megatron-core's groups by axis; without edp, which follows from the others."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def check(layout: Layout) -> None:
    """Raise LayoutError unless megatron-core is initialised with the group sizes of `layout`."""
    if not parallel_state.model_parallel_is_initialized():
        raise LayoutError(f"{layout.text}: megatron-core has no groups yet; call groups.initialise(layout) first")
    if wrong := [f"{axis}={size}" for axis, size in sizes().items() if size != getattr(layout, axis)]:
        raise LayoutError(f"{layout.text}: megatron-core was initialised with {', '.join(wrong)}")


def shut_down() -> None:
    """Destroy megatron-core's groups."""
    parallel_state.destroy_model_parallel()
