"""Prepares a process in the megatron-bridge session, where that package is installed, before its tests import it."""

from __future__ import annotations

import importlib.metadata

try:
    importlib.metadata.distribution("megatron-bridge")
except importlib.metadata.PackageNotFoundError:
    pass  # elsewhere every test here is skipped, with that reason
else:
    import torch
    from moeref_conformance.targets.peers import before_megatron
    from moeref_conformance.worlds import cpu

    if not torch.cuda.is_available():
        cpu.install("cpu", "torch")
        before_megatron("megatron-bridge", "cpu")
        cpu.install("cpu", "megatron")
