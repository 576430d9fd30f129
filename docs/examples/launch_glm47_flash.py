"""Launches the run of glm47_flash_grpo.yaml: every value is read from that file.

`python docs/examples/launch_glm47_flash.py` checks the run and prints the page. Under torchrun, with a checkpoint as
argument, every rank also builds the policy from the record of the check, seeds its generators and loads the weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moeref import families
from moeref.check import Report, check_run, read_run_file
from moeref.check.page import show
from moeref.record import Record

RUN = read_run_file(Path(__file__).with_name("glm47_flash_grpo.yaml"))


def preflight() -> dict[str, Report]:
    """The reports of policy and reference."""
    return check_run(RUN)


def build(record: Record, checkpoint: str) -> None:
    """One rank of one model, built from the record alone. Raises ValueError for the checkpoint of another model."""
    import torch.distributed as dist

    from moeref import bridge, megatron

    if families.read(checkpoint, record.model.param_dtype) != record.model:
        raise ValueError(f"{checkpoint} is not the {RUN.model} that was checked")
    dist.init_process_group()
    rank = megatron.initialise(record.layout, tied=record.model.tied)
    built = megatron.build(record, rank, device=f"cuda:{os.environ['LOCAL_RANK']}")
    bridge.load(built.shard_map, rank, built.chunks, checkpoint)


def main() -> int:
    """Check; with a checkpoint as argument, build."""
    reports = preflight()
    show(reports["policy"])
    for checkpoint in sys.argv[1:]:
        if record := reports["policy"].record:
            build(record, checkpoint)
    return 0 if all(report.works for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
