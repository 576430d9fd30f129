"""The released bridges as targets: `--target mcore-bridge`, `mbridge`, `megatron-bridge`, each in its own environment.

`nox -s "peers(<name>)"` makes that environment and judges the bridge in `matrices/peers.toml`. An adapter is as thin
as can be and imports its bridge in `preload`, which the world calls once before it forks ranks; naming a target, or
listing what it claims, imports no bridge. `before_megatron` gives a process what the bridges need on a machine without
a GPU: the stand-in for Transformer Engine and contiguous scatters. moeref's own runs never load any of this.
"""

from __future__ import annotations

import functools
from typing import Any

#: Target name -> `module:attr` of its adapter.
PEERS = {
    name: f"moeref_conformance.targets.peers.{module}:target"
    for name, module in (
        ("mbridge", "mbridge"),
        ("mcore-bridge", "mcore_bridge"),
        ("megatron-bridge", "megatron_bridge"),
    )
}


def before_megatron(spec: str, device: str) -> None:
    """Prepare this process for the peer `spec` before megatron-core is imported; for other targets do nothing.

    On a GPU Transformer Engine is the real one. Raises RuntimeError as `te.install` does.
    """
    if spec not in PEERS or device != "cpu":
        return
    from moeref_conformance.targets.peers import te

    te.install()
    _contiguous_scatter()


def _contiguous_scatter() -> None:
    """Scatter copies of pieces that are not contiguous.

    Bridges split a weight on the host and move the pieces to the GPU, which makes them contiguous; on a CPU the move is
    none, and gloo sends wrong bytes of a strided piece without a word.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    real = c10d.scatter

    @functools.wraps(real)
    def scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        pieces = None if scatter_list is None else [piece.contiguous() for piece in scatter_list]
        return real(tensor, pieces, *args, **kwargs)

    c10d.scatter = dist.scatter = scatter
