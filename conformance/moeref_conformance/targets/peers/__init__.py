"""Released bridges and sources at a pinned commit as targets: the names in `peers.toml`, each in its own environment.

`nox -s "peers(<name>)"` makes that environment and judges the bridge in `matrices/peers.toml`. An adapter is thin, and
imports its bridge only in `preload`, which a world calls once before it forks ranks. So naming a target, or listing
what it claims, imports no bridge. `before_megatron` gives a process what bridges need on a machine without a GPU: a
stand-in for Transformer Engine, and a scatter of contiguous pieces. Runs of moeref load none of this.
"""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any

#: Target name -> `module:attr` of its adapter, for every entry of `peers.toml`.
PEERS = {
    name: f"moeref_conformance.targets.peers.{name.replace('-', '_')}:target"
    for name in tomllib.loads(files(__name__).joinpath("peers.toml").read_text(encoding="utf-8"))
}


def before_megatron(spec: str, device: str) -> None:
    """Prepare this process for the peer `spec`, before megatron-core is imported. Other targets need nothing.

    On a GPU Transformer Engine is the real one. Raises RuntimeError as `te.install` does.
    """
    if spec not in PEERS or device != "cpu":
        return
    from moeref_conformance.targets.peers import te

    te.install()
    _contiguous_scatter()


def _contiguous_scatter() -> None:
    """Make `torch.distributed.scatter` send contiguous copies of pieces.

    Bridges split a weight on the host and move the pieces to the GPU, which makes them contiguous. On a CPU nothing
    moves, and gloo silently sends wrong bytes of a strided piece.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    real = c10d.scatter

    @functools.wraps(real)
    def scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        pieces = None if scatter_list is None else [piece.contiguous() for piece in scatter_list]
        return real(tensor, pieces, *args, **kwargs)

    c10d.scatter = dist.scatter = scatter
