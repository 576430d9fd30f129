"""A run of moeref outside the kit that records itself: what a framework's own script would do with `recorder.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from moeref_conformance import authors
from safetensors.torch import load_file

authors.megatron_on_cpu()  # a run on GPUs has no such line
from moeref_conformance.contract.recorder import Recorder  # noqa: E402

from moeref import bridge, exporter, families, megatron  # noqa: E402
from moeref.layout import Layout  # noqa: E402
from moeref.record import Record  # noqa: E402

if __name__ == "__main__":
    made, folder, cell = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{made}/store", rank=int(os.environ["RANK"]), world_size=2)
    layout = Layout.parse("tp=2")
    rank = megatron.initialise(layout)
    built = megatron.build(Record.of(families.read(made / "checkpoint"), layout), rank)
    bridge.load(built.shard_map, rank, built.chunks, made / "checkpoint")

    recorder = Recorder(folder, cell, rank)
    recorder.model(built.chunks)
    stream = exporter.export(exporter.Plan(built.shard_map), rank, built.chunks)
    for _ in recorder.export((tensor.name, full) for tensor, full in stream):
        pass
    recorder.logits(megatron.logits(built.chunks, built.shard_map, load_file(made / "tokens.safetensors")["tokens"]))
    recorder.close()
    dist.destroy_process_group()
