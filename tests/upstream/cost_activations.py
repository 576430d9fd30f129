"""What a forward of megatron-core saves: run by test_costs_against_megatron.py, in a process of its own.

Each case is a forward and a backward of one rank. Hooks on saved tensors follow the bytes of all storages that are
saved at one time, parameters apart, and the most is written. Attention is replaced by one that saves what flash
attention does, which needs a GPU: queries, keys, values, output and log-sum-exp. All else is megatron-core's.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from built_from_record import world


class Flash(torch.autograd.Function):
    """Attention without a mask, of [S, B, heads, D], which saves what flash attention saves. Its gradients are 0."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (one.repeat_interleave(q.shape[2] // k.shape[2], 2).float() for one in (k, v))
        scores = torch.einsum("sbhd,tbhd->bhst", q.float(), keys)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhst,tbhd->sbhd", (scores - lse[..., None]).exp(), values).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(one) for one in ctx.saved_tensors[:3])


class Core(torch.nn.Module):
    """In place of a core attention."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        out: torch.Tensor = Flash.apply(q, k, v)
        return out.flatten(2)


class Trace:
    """Bytes of saved storages now and at most. A storage in `ignored` is not counted."""

    def __init__(self, ignored: set[int]) -> None:
        self.ignored, self.now, self.most = ignored, 0, 0
        self._holders: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Saved:
        return Saved(tensor, self)

    def hold(self, storage: torch.UntypedStorage, by: int) -> None:
        at = storage.data_ptr()
        if at in self.ignored:
            return
        self._holders[at] += by
        if self._holders[at] == (1 if by > 0 else 0):
            self.now += by * storage.nbytes()
            self.most = max(self.most, self.now)


class Saved:
    """A saved tensor, which counts as long as autograd holds it."""

    def __init__(self, tensor: torch.Tensor, trace: Trace) -> None:
        self.tensor, self.trace = tensor, trace
        trace.hold(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.trace.hold(self.tensor.untyped_storage(), -1)


def traced(config: dict[str, Any], layout: Any, settings: dict[str, Any], length: int) -> int:
    """The most bytes that one microbatch of `length` tokens has saved at a time, with its logits."""
    from moeref import families, megatron
    from moeref.config import MoEConfig
    from moeref.record import Options, Record

    asked = MoEConfig(moe_router_load_balancing_type="none", transformer_config_kwargs=settings)
    record = Record.of(families.read(config, "bfloat16"), layout, asked, Options(precision=None))
    (chunk,) = megatron.build(record, 0).chunks
    for module in chunk.modules():
        if hasattr(module, "core_attention"):
            module.core_attention = Core()
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    trace = Trace({one.untyped_storage().data_ptr() for one in (*chunk.parameters(), *chunk.buffers())})
    tokens = torch.arange(length)[None] % 7
    logits: list[Saved] = []

    def until_their_gradient(_: Any, __: Any, out: Any) -> None:
        logits.append(trace.pack(out[0]))
        out[0].register_hook(lambda _: logits.clear())

    chunk.output_layer.register_forward_hook(until_their_gradient)
    chunk.train()
    with torch.autograd.graph.saved_tensors_hooks(trace.pack, lambda saved: saved.tensor):
        loss = chunk(tokens, tokens, None, labels=tokens).sum()
        loss.backward()
    return trace.most


def main(out: str, cases: list[dict[str, Any]]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core

    cpu.install("cpu", "megatron")
    assert megatron.core
    from moeref.layout import Layout

    with Path(out).open("w", encoding="utf-8") as lines:
        for case in cases:
            layout = Layout.parse(case["layout"])
            with world(layout, 0):
                found = traced(case["config"], layout, case["settings"], case["length"])
            print(json.dumps(found), file=lines)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
