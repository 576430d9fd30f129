"""A stand-in for `transformer_engine` on a CPU, made of `te_modules`.

The bridges import Transformer Engine, which cannot be imported without CUDA. `install()` puts a package of that name
into `sys.modules` with the names that megatron-core's wrappers (`megatron.core.extensions`) and the bridges use.
Importing any other name fails, as with an older version.

Call `install()` before megatron-core is imported; `peers.before_megatron` does, and for other targets
`moeref_conformance.authors`.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from moeref_conformance.targets.peers import te_modules as modules

NAME = "transformer_engine"
#: For megatron-core's `is_te_min_version`: the first version with attention sinks.
VERSION = "2.8.0"


def _absent(name: str) -> type:
    """A class that can be named and subclassed, but not instantiated."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the stand-in for Transformer Engine has no {name}")

    return type(name, (), {"__init__": refuse})


class FP8GlobalStateManager:
    """Reports that nothing is quantised."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """False."""
        return False


@contextlib.contextmanager
def _off(enabled: bool = False, **_: Any) -> Iterator[None]:
    """A context manager that raises NotImplementedError if quantisation is enabled."""
    if enabled:
        raise NotImplementedError("the stand-in for Transformer Engine does not quantise")
    yield


_FP8 = {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": _off, "fp8_model_init": _off}
_MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    ".common": {},
    ".common.recipe": {name: _absent(name) for name in ("DelayedScaling", "Format")},
    ".pytorch": {
        **{kind.__name__: kind for kind in (modules.Linear, modules.LayerNormLinear, modules.GroupedLinear)},
        **{kind.__name__: kind for kind in (modules.RMSNorm, modules.LayerNorm, modules.DotProductAttention)},
        "TransformerLayer": _absent("TransformerLayer"),
        **_FP8,
    },
    ".pytorch.fp8": _FP8,
    ".pytorch.attention": {},
    ".pytorch.distributed": {name: _absent(name) for name in ("CudaRNGStatesTracker", "activation_recompute_forward")},
    ".pytorch.tensor": {"QuantizedTensor": _absent("QuantizedTensor")},
    ".pytorch.router": {
        name: _absent(name)
        for name in ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    },
    ".pytorch.ops": {name: _absent(name) for name in ("FusibleOperation", "Sequential")},
}


def stands_in() -> bool:
    """Whether `import transformer_engine` finds the stand-in."""
    return getattr(sys.modules.get(NAME), "__stand_in__", False)


def install() -> None:
    """Put the stand-in where `import transformer_engine` finds it.

    Raises RuntimeError if a Transformer Engine is installed (the stand-in would hide it) or megatron-core has already
    been imported without one.
    """
    if stands_in():
        return
    if importlib.util.find_spec(NAME) is not None:
        raise RuntimeError("Transformer Engine is installed here: use it, or an environment without it")
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron-core has been imported without Transformer Engine: install the stand-in first")
    for path, contents in _MODULES.items():
        module = ModuleType(NAME + path, "A stand-in; see moeref_conformance.targets.peers.te.")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []  # a package, so that an import from it says what is missing
        vars(module).update(contents, __stand_in__=True)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)


__all__ = ["NAME", "VERSION", "install", "stands_in"]
