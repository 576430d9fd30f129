"""Zigzag parts against megatron-core's own cut of a batch, under torch's fake process group."""

import inspect

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeref.layout import sequence

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_zigzag_is_megatrons(cp):
    length = 2 * cp * 3
    more = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    for rank in range(cp):
        dist.init_process_group("fake", rank=rank, world_size=cp, store=FakeStore())
        try:
            batch = {"tokens": torch.arange(length)[None]}
            cut = get_batch_on_this_cp_rank(batch, cp_group=dist.group.WORLD, **more)["tokens"][0]
        finally:
            dist.destroy_process_group()
        assert tuple(cut.tolist()) == sequence.zigzag(length, cp, rank)
