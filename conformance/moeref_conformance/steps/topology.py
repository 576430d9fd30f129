"""Where a rank is in megatron-core's process groups."""

from __future__ import annotations

from typing import Any

import torch

from moeref_conformance.contract.topology import AXES


def process_groups() -> dict[str, Any] | None:
    """This rank's place in every group and the members of its groups; None if the target initialised none."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        return None
    groups = {
        "tp": ps.get_tensor_model_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "ep": ps.get_expert_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "edp": ps.get_expert_data_parallel_group(),
        "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
        "tp_cp": ps.get_tensor_and_context_parallel_group(),
        "mp": ps.get_model_parallel_group(),
        "etp_ep": ps.get_expert_tensor_and_model_parallel_group(),
        "emp": ps.get_expert_tensor_model_pipeline_parallel_group(),
    }
    members = {axis: torch.distributed.get_process_group_ranks(group) for axis, group in groups.items()}
    place: dict[str, Any] = {axis: torch.distributed.get_rank(groups[axis]) for axis in AXES}
    return {**place, "groups": members}
