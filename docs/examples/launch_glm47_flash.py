"""Launches the run of glm47_flash_grpo.yaml: every value is read from there, none stands here.

`python docs/examples/launch_glm47_flash.py` checks the run and prints the page; under torchrun, with a
checkpoint as argument, every rank builds the policy, loads it and seeds its generators.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moeref.check import Report, check, model_of
from moeref.check.page import show
from moeref.check.runfile import read_run_file
from moeref.config import MoEConfig
from moeref.layout import Layout

RUN = read_run_file(Path(__file__).with_name("glm47_flash_grpo.yaml"))


def preflight() -> dict[str, Report]:
    """The reports of policy and reference."""
    asked = {name: MoEConfig.from_mapping(settings) for name, settings in RUN.models.items()}
    return {name: check(RUN.model, RUN.layout, asked=moe, **RUN.options) for name, moe in asked.items()}


def build(report: Report, checkpoint: str) -> None:
    """One rank of one model, with what was checked and nothing else: groups, seeds, chunks, weights."""
    import torch.distributed as dist

    from moeref import bridge, megatron
    from moeref.megatron import seeding

    dist.init_process_group()
    layout, (_, model) = Layout.parse(RUN.layout), model_of(checkpoint)
    rank = megatron.initialise(layout)
    seeding.seed_rank(layout, RUN.seed)
    assert report.record is not None
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    built = megatron.build(model, layout, rank, device=device, experts="grouped", asked=report.record.asked)
    bridge.load(built.shard_map, rank, built.chunks, checkpoint)


def main() -> int:
    """Check; with a checkpoint as argument, build."""
    reports = preflight()
    show(reports["policy"])
    if not all(report.works for report in reports.values()):
        return 1
    for checkpoint in sys.argv[1:]:
        build(reports["policy"], checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
