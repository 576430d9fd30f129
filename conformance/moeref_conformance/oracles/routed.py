"""transformers' own module under given routes: its logits, and the experts of its tokens.

A torch function mode replaces the result of the one `topk` by which a router chooses experts. Scores, normalisation and
everything else stay transformers' own, and so does the choice for rows without a route.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from moeref_conformance.oracles.expected import Expected

#: Row of a route that the engine did not give.
MISSING = -1


@dataclass(frozen=True)
class Routed:
    """What transformers computes: `logits_BSV`, and experts by (sample, position) of every MoE layer."""

    logits_BSV: torch.Tensor
    experts: Mapping[int, Mapping[tuple[int, int], frozenset[int]]]


class _Forced(TorchFunctionMode):
    """Replaces the indices that `topk(scores [T, E], k)` returns, in rows that have a route."""

    def __init__(self, experts: int, top_k: int, target_TK: torch.Tensor) -> None:
        super().__init__()
        self._experts, self._top_k, self._target = experts, top_k, target_TK
        self.chosen: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return answer
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.shape[-1] != self._experts or k != self._top_k:
            return answer
        given = self._target[:, :1] >= 0
        self.chosen = torch.where(given, self._target, answer.indices)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


def given_routes(expected: Expected, stream: int) -> list[np.ndarray[Any, Any]]:
    """Routes as an engine sends them, one array [S - 1, layers, top-k] of int32 a sample. No router would choose them.

    Random distinct experts in MoE layers, zeros in dense ones; the last token has no row, and one row in the middle of
    the last sample is -1.
    """
    shape = _shape(expected)
    rng = np.random.default_rng(1000 + stream)
    samples, length = expected.tokens_BS.shape
    samples_routes = []
    for number in range(samples):
        idx_TLK = rng.random((length - 1, shape.layers, shape.experts)).argsort(axis=2)[:, :, : shape.top_k]
        idx_TLK[:, [not moe for moe in shape.moe]] = 0
        if number == samples - 1:
            idx_TLK[length // 2] = MISSING
        samples_routes.append(idx_TLK.astype(np.int32))
    return samples_routes


def write(expected: Expected) -> Path:
    """The route sets `a` and `b` as a file for the ranks, one tensor a sample."""
    file = expected.dir / "routes.safetensors"
    if not file.exists():
        sets = {name: given_routes(expected, stream) for stream, name in enumerate("ab")}
        save_file(
            {f"{name}.{i}": torch.from_numpy(s) for name, found in sets.items() for i, s in enumerate(found)}, file
        )
    return file


#: Cells are judged in several threads, and a module's hooks run in the forwards of all of them.
_ONE_AT_A_TIME = threading.Lock()
_DONE: dict[tuple[str, str], Routed] = {}


def under(expected: Expected, which: str) -> Routed:
    """What transformers computes under the route set `a` or `b`, or with `native` routes; computed once a variant."""
    key = str(expected.dir), which
    with _ONE_AT_A_TIME:
        if key not in _DONE:
            _DONE[key] = routed(expected, None if which == "native" else given_routes(expected, "ab".index(which)))
        return _DONE[key]


def routed(expected: Expected, routes: Sequence[np.ndarray[Any, Any]] | None) -> Routed:
    """transformers' forward of the cell's tokens under `routes` as `given_routes` makes them; native without."""
    model, shape = _model(str(expected.inputs["checkpoint"])), _shape(expected)
    samples, length = expected.tokens_BS.shape
    target_BSLK = np.full((samples, length, shape.layers, shape.top_k), MISSING, np.int64)
    for number, sample in enumerate(routes or ()):
        target_BSLK[number, : len(sample)] = sample
    experts: dict[int, dict[tuple[int, int], frozenset[int]]] = {}
    modes: dict[int, _Forced] = {}
    handles, stack = [], ExitStack()
    for layer, module in enumerate(model.model.layers):
        if not shape.moe[layer]:
            continue

        def enter(_: Any, __: Any, layer: int = layer) -> None:
            target_TK = torch.from_numpy(target_BSLK[:, :, layer].reshape(-1, shape.top_k))
            modes[layer] = _Forced(shape.experts, shape.top_k, target_TK)
            stack.enter_context(modes[layer])

        def leave(_: Any, __: Any, ___: Any, layer: int = layer) -> None:
            stack.pop_all().close()
            chosen = modes[layer].chosen
            if chosen is None:
                raise RuntimeError(f"layer {layer}: no topk over the experts was seen")
            rows = chosen.reshape(samples, length, -1).tolist()
            experts[layer] = {(b, s): frozenset(rows[b][s]) for b in range(samples) for s in range(length)}

        block = next(m for m in module.children() if hasattr(m, "experts"))
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        with torch.no_grad():
            logits_BSV = model(expected.tokens_BS).logits.float().contiguous()
    finally:
        for handle in handles:
            handle.remove()
    return Routed(logits_BSV, experts)


@dataclass(frozen=True)
class _Shape:
    layers: int
    experts: int
    top_k: int
    moe: tuple[bool, ...]


def _shape(expected: Expected) -> _Shape:
    config, names = expected.config, expected.tensors.keys()
    layers = int(config["num_hidden_layers"])
    experts = next(int(config[k]) for k in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(k))
    routers = (".mlp.gate.weight", ".block_sparse_moe.gate.weight", ".mlp.router.weight")
    moe = tuple(any(f"model.layers.{i}{name}" in names for name in routers) for i in range(layers))
    return _Shape(layers, experts, int(config["num_experts_per_tok"]), moe)


@functools.lru_cache(maxsize=2)
def _model(folder: str) -> Any:
    """transformers' module with the checkpoint's weights, in fp32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()
