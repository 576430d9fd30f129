"""What the author of an adapter or of a recorded run may call on a machine without a GPU.

`megatron_on_cpu()` in a script of your own, before it imports megatron-core; the worlds of the kit do it for a target.
`transformer_engine()` in either, for a layer spec that needs Transformer Engine:

    from moeref_conformance import authors

    authors.transformer_engine()  # at the top of an adapter; its world does the rest
    authors.megatron_on_cpu(plain_te=True)  # in a script: both
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from moeref_conformance.targets.peers import te
from moeref_conformance.worlds import cpu


def transformer_engine() -> bool:
    """Let megatron-core build plain torch modules under Transformer Engine's names, where that package is missing.

    Names, shapes and tensor-parallel marks of parameters are Transformer Engine's own; nothing is fused or quantised.
    Returns whether the modules are plain; with an installed Transformer Engine nothing is done. Raises RuntimeError
    where megatron-core was imported before: it has looked for the package by then.
    """
    if not te.stands_in() and importlib.util.find_spec(te.NAME) is not None:
        return False
    te.install()
    return True


def megatron_on_cpu(*, plain_te: bool = False) -> tuple[str, ...]:
    """Make this process fit for unedited megatron-core over gloo: what it calls of CUDA is replaced, nothing computed.

    Imports megatron-core. Call it before anything else does, in every rank; again is harmless. With
    `plain_te`, `transformer_engine()` is called at its time. Returns what was substituted; the page "CPU
    substitutions" has the reasons. Raises RuntimeError where torch sees a GPU, or megatron-core was imported before.
    """
    if "megatron.core" in sys.modules and not cpu.installed():
        raise RuntimeError("megatron-core is imported already, and keeps what it found of torch: call this first")
    cpu.install("cpu", "torch")
    if plain_te:
        transformer_engine()
    importlib.import_module("megatron.core")
    return cpu.install("cpu", "megatron")


__all__ = ["megatron_on_cpu", "transformer_engine"]
