"""What each of two ranks does in `test_shard_folders`: load a model, and save it with the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from moeref import families
from moeref.bridge import ShardMap, load
from moeref.layout import Layout
from moeref.shards import ShardError, save
from tests.unit.test_loader import holder


def rank(rank: int, folder: str, broken: bool) -> None:
    """`broken`: rank 1 cannot write, and both have to raise."""
    at = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{at / 'store'}", rank=rank, world_size=2)
    shard_map = ShardMap(families.read(at / "hf"), Layout.parse("pp=2"))
    chunks = holder(shard_map, rank)
    load(shard_map, rank, chunks, at / "hf")
    if not broken:
        save(shard_map, rank, chunks, at / "live", at / "hf" / "config.json")
    else:
        if rank == 1:
            at = at / "elsewhere"
            shutil.copytree(Path(folder) / "hf", at / "hf")
            (at / "live").write_text("a file where the folder should be")
        with pytest.raises((ShardError, OSError)) as error:
            save(shard_map, rank, chunks, at / "live", at / "hf" / "config.json")
        assert rank == 1 or "the folder is not whole" in str(error.value), str(error.value)
    dist.destroy_process_group()
