"""One rank started the usual way, a Python process that imports everything itself: compared with the fork server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moeref_conformance.contract.api import Cell, Layout, World
from moeref_conformance.worlds import cpu


def main(request: str, rank: int) -> None:
    """Run the probe of one rank of the cell described in the file `request`."""
    asked = json.loads(Path(request).read_text())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cpu.install("cpu", "torch")
    import megatron.core  # noqa: F401

    cpu.install("cpu", "megatron")
    from moeref_conformance.resolve import resolve
    from moeref_conformance.steps.run import run_rank

    cell = Cell(**{**asked["cell"], "layout": Layout(**asked["cell"]["layout"]), "tags": ()})
    size, folder = cell.layout.world, Path(asked["folder"]) / f"rank{rank:04d}"
    (folder / "scratch").mkdir(parents=True)
    dist.init_process_group("gloo", init_method=f"file://{asked['folder']}/store", rank=rank, world_size=size)
    world = World(
        backend="gloo",
        rank=rank,
        size=size,
        device="cpu",
        workdir=folder / "scratch",
        hf_config=Path(asked["inputs"]["hf_config"]),
    )
    run_rank(resolve(asked["target"]), cell, world, asked["inputs"], folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
