"""Ranks and groups of the static matrix against megatron-core's own groups, up to 8192 ranks.

`initialize_model_parallel` runs unchanged under torch's fake process group, as a handful of ranks of each world. Groups
of other ranks are not made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Layout as KitLayout
from moeref_conformance.plan import matrix
from moeref_conformance.steps.topology import process_groups
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeref.layout import Layout
from tests.upstream.own_groups import own_groups

pytestmark = pytest.mark.cpu

#: One layout of every kind: no TP, CP, VPP, a long pipeline, and the two of 8192 ranks.
NAMES = (
    "tp1-ep128-w8192",
    "tp4-cp2-pp4-ep16-etp1-last22-w256",
    "tp4-pp4-vpp2-ep8-last22-w512",
    "tp8-pp16-ep64-etp1-first3-last2-w8192",
)
#: The kit's name of a group -> moeref's.
KINDS = {
    **{kind: kind for kind in ("tp", "pp", "cp", "dp", "ep", "etp", "edp", "mp")},
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "etp_ep": "etp-ep",
    "emp": "etp-ep-pp",
}


@contextlib.contextmanager
def real_groups(layout: KitLayout, rank: int) -> Iterator[None]:
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        with own_groups(rank):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        dist.destroy_process_group()
        logging.disable(logging.NOTSET)


def samples(world: int) -> list[int]:
    """First and last, and two in between that no power of two divides."""
    return [0, world // 3, 2 * world // 3 + 1, world - 1]


@pytest.mark.parametrize("name", NAMES)
def test_sampled_ranks_sit_where_megatron_puts_them(name: str) -> None:
    layout = next(cell.layout for cell in matrix.load("static").cells if cell.layout_name == name)
    ours = Layout.parse(layout.text)
    oracle = topology.groups(layout)
    for rank in samples(layout.world):
        with real_groups(layout, rank):
            real = process_groups()
        assert real is not None
        groups = real.pop("groups")
        assert topology.coords(layout, rank) == real
        at = ours.coords(rank)
        assert {axis: getattr(at, axis) for axis in topology.AXES} == real
        for kind, members in groups.items():
            assert list(ours.group_of(KINDS[kind], rank)) == members
            assert members in oracle[kind]
