"""megatron-core's process groups for a layout, and its coordinates of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from moeref.layout import Layout, LayoutError


def initialise(layout: Layout, *, tied: bool = False) -> int:
    """Create megatron-core's groups on an initialised `torch.distributed`, and return this process's rank.

    tied: whether the head is the embedding. It decides which stages share the embedding where a layout string puts
    multi-token prediction layers before the last stage, and nothing elsewhere.

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
        get_embedding_ranks=lambda pp_ranks: embedding_ranks(layout, pp_ranks, tied=tied),
    )
    at = layout.coords(rank)
    for axis, value in coordinates().items():
        if getattr(at, axis) != value:
            raise LayoutError(f"{layout.text}: rank {rank} is {at.text}, but megatron-core says {axis}{value}")
    return rank


def embedding_ranks(layout: Layout, pp_ranks: Sequence[int], *, tied: bool) -> list[int]:
    """Which ranks of a pipeline group sum the gradients of the word embedding, as Megatron-LM's pretrain_gpt.py has it.

    Megatron's default is the first and the last. Multi-token prediction layers on another stage have a copy there, and
    the last then only if its head is tied: the head's own gradient would be added to the embedding's.
    """
    stages = layout.pipeline_layout and PipelineParallelLayerLayout(layout.pipeline_layout, layout.pp)
    config = SimpleNamespace(pipeline_model_parallel_layout=stages, mtp_num_layers=1 if stages else None)
    if set(mtp := get_mtp_ranks(list(pp_ranks), config)) <= {pp_ranks[-1]}:
        default: list[int] = parallel_state.default_embedding_ranks(pp_ranks)
        return default
    return [rank for rank in pp_ranks if rank in {pp_ranks[0], *mtp} or (tied and rank == pp_ranks[-1])]


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


def check(layout: Layout, *, shared: bool = False, tied: bool = False) -> None:
    """Raise LayoutError unless megatron-core is initialised with the group sizes of `layout`.

    shared: whether stages have copies of the embedding, `tied` or for multi-token prediction. Then its group must be
    theirs, or the copies would differ from the first step on.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise LayoutError(f"{layout.text}: megatron-core has no groups yet; call groups.initialise(layout) first")
    if wrong := [f"{axis}={size}" for axis, size in sizes().items() if size != getattr(layout, axis)]:
        raise LayoutError(f"{layout.text}: megatron-core was initialised with {', '.join(wrong)}")
    if shared and layout.pp > 1:
        _check_embedding(layout, tied)


def _check_embedding(layout: Layout, tied: bool) -> None:
    pp_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    want = embedding_ranks(layout, pp_ranks, tied=tied)
    group = parallel_state.get_embedding_group(check_initialized=False)
    have = dist.get_process_group_ranks(group) if dist.get_rank() in want and group is not None else []
    if dist.get_rank() in want and have != want:
        stages = f"ranks {want} hold the embedding, and megatron-core's group of it has {have or 'not this rank'}"
        raise LayoutError(f"{layout.text}: {stages}; call groups.initialise(layout, tied={tied})")


def shut_down() -> None:
    """Destroy megatron-core's groups."""
    parallel_state.destroy_model_parallel()
