"""Which stages share the word embedding, and that a model whose copies are not summed is not built."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeref.layout import Layout, LayoutError
from moeref.megatron import groups

pytestmark = pytest.mark.cpu
BEFORE = "Ett|tttt|ttm|L"


@pytest.mark.parametrize(
    ("pattern", "tied", "stages"),
    [
        (None, False, [0, 3]),
        ("Ett|tttt|tt|L", False, [0, 3]),
        ("Ett|ttt|ttt|mL", True, [0, 3]),
        ("Ett|ttt|ttt|mL", False, [0, 3]),
        (BEFORE, False, [0, 2]),
        (BEFORE, True, [0, 2, 3]),
        ("Et|t|t|t|t|t|tm|L", False, [0, 2]),
    ],
)
def test_they_are_megatrons_default_unless_mtp_layers_are_elsewhere(
    pattern: str | None, tied: bool, stages: list[int]
) -> None:
    vpp = len(pattern.split("|")) // 4 if pattern else 1
    layout = Layout(pp=4, vpp=vpp, pipeline_layout=pattern)
    pp_ranks = [1, 5, 9, 13]
    assert groups.embedding_ranks(layout, pp_ranks, tied=tied) == [pp_ranks[stage] for stage in stages]


def test_groups_of_another_head_are_refused() -> None:
    layout = Layout(pp=4, pipeline_layout=BEFORE)
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        groups.initialise(layout)
        assert dist.get_process_group_ranks(parallel_state.get_embedding_group()) == [0, 2]
        groups.check(layout, shared=True)
        groups.check(layout, tied=True)
        with pytest.raises(LayoutError, match=r"ranks \[0, 2, 3\] hold the embedding, .* has \[0, 2\]"):
            groups.check(layout, shared=True, tied=True)
    finally:
        with contextlib.suppress(Exception):
            groups.shut_down()
        dist.destroy_process_group()
