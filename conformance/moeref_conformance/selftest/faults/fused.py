"""Bugs of fused and separate experts: one spelling is read, announced or sent where the other is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, TensorMeta, World
from moeref_conformance.contract.hf_files import weight_files
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, Tensors
from moeref_conformance.selftest.faults.base import Fault, cell

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def _fused(meta: TensorMeta, experts: int) -> TensorMeta | None:
    """The fused tensor that a tensor of expert 0 stands for, and None for those of other experts and for `up`."""
    match = _EXPERT.match(meta.name)
    if match is None:
        return meta
    stack, number, part = match.groups()
    if int(number) or part == "up":
        return None
    rows, columns = meta.shape
    name, rows = (f"{stack}.down_proj", rows) if part == "down" else (f"{stack}.gate_up_proj", 2 * rows)
    return replace(meta, name=name, shape=(experts, rows, columns))


def _stacked(name: str, tensors: Tensors) -> torch.Tensor:
    """The fused tensor `name` of these, or the tensor of that name."""
    stack, _, part = name.rpartition(".")
    if name in tensors:
        return tensors[name]
    parts = ("down",) if part == "down_proj" else ("gate", "up")
    experts = 1 + max(int(m[2]) for other in tensors if (m := _EXPERT.match(other)) and m[1] == stack)
    each = ([tensors[f"{stack}.{i}.{half}_proj.weight"] for half in parts] for i in range(experts))
    return torch.stack([torch.cat(halves) for halves in each])


#: The plan names fused experts, whatever is sent.
_plan_fused = border.planned(lambda metas: [told for meta in metas if (told := _fused(meta, 16)) is not None])


def _sent_fused(session: Any, cell: Cell, world: World) -> Any:
    """Plan and stream have the experts of a layer as one tensor."""
    return border.stream(_plan_fused(session, cell, world), _together)


def _together(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Experts that are sent one by one are sent as one tensor."""
    metas, tensors = border.collected(pairs)
    for meta in metas:
        told = _fused(meta, 16)
        if told is not None:
            yield told, _stacked(told.name, tensors) if tensors else None


def _mtp_per_expert(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """The fused experts of an MTP layer are sent one by one, by the names of a checkpoint per expert."""
    for meta, tensor in pairs:
        stack, _, part = meta.name.rpartition(".")
        if stack != "model.layers.2.mlp.experts":
            yield meta, tensor
        else:
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            experts, rows, columns = meta.shape
            for expert, (half, name) in product(range(experts), enumerate(names)):
                own = None if tensor is None else tensor[expert].chunk(len(names))[half].clone()
                yield replace(meta, name=f"{stack}.{expert}.{name}.weight", shape=(rows // len(names), columns)), own
                del own
        del tensor


def _left_as_built(*parts: str) -> border.Change:
    """Loading writes to copies of the parameters whose local names contain all `parts`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def load(folder: Path) -> None:
            held = border.inventory(session).items()
            mine = [tensor for (_, name), tensor in held if all(part in name for part in parts)]
            before = [tensor.clone() for tensor in mine]
            session.export.load(folder)
            for tensor, old in zip(mine, before, strict=True):
                tensor.copy_(old)

        return border.facet(session, "export", load=load)

    return wrap


def _file_by_file(session: Any, cell: Cell, world: World) -> Any:
    """A tensor of the model whose parts lie in more than one file is never put together, and stays as it was built."""

    def load(folder: Path) -> None:
        places = {name: file for file in weight_files(folder) for name in load_file(file)}
        held = border.held(session, world)
        parted = [tensor for row, tensor in held if len({places.get(name) for name in row.hf}) > 1]
        before = [tensor.clone() for tensor in parted]
        session.export.load(folder)
        for tensor, old in zip(parted, before, strict=True):
            tensor.copy_(old)

    return border.facet(session, "export", load=load)


FAULTS = (
    Fault(
        id="plan-of-fused-experts",
        bug="Megatron-Bridge#4212, torchtitan#4583: without a checkpoint at hand, experts are announced fused",
        rules=("EXP-004",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_plan_fused,
        says="gate_up_proj",
        one_rank=True,
    ),
    Fault(
        id="experts-sent-fused",
        bug="prime-rl#1812: transformers 5's fused experts go to an engine that loads a tensor for each",
        rules=("EXP-001",),
        also=("EXP-005",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sent_fused,
        says="gate_up_proj",
        one_rank=True,
    ),
    Fault(
        id="mtp-experts-not-fused",
        bug="Megatron-Bridge#4329: MTP layers have names per expert, and the checkpoint has their experts fused",
        rules=("EXP-001",),
        also=("EXP-004",),
        cell=cell("glm4_moe", "ep2", mtp=1, expert_format="fused"),
        wrap=lambda session, cell, world: border.stream(session, _mtp_per_expert),
        says="model.layers.2.mlp.experts.down_proj was never sent",
        one_rank=True,
    ),
    Fault(
        id="fused-experts-of-mtp-not-read",
        bug="Megatron-Bridge#3740: the fused experts of MTP layers are looked for per expert, and not found",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007",),
        cell=cell("glm4_moe", "ep2", mtp=1, expert_format="fused"),
        wrap=_left_as_built("mtp.", ".experts."),
        diagnosis="an initial value",
        one_rank=True,
    ),
    Fault(
        id="mtp-experts-fused-as-the-decoders",
        bug="ISEEKYAN/mbridge#145 the other way round: Qwen3.5's MTP layer is sent as Qwen3.6's, all experts in one",
        rules=("EXP-001",),
        also=("EXP-004", "EXP-005"),
        cell=cell("qwen3_5_moe_text", "ep2", mtp=1, expert_format="fused_decoder"),
        wrap=lambda session, cell, world: border.stream(session, _together),
        says="mtp.layers.0.mlp.experts.0.down_proj.weight was never sent",
        one_rank=True,
    ),
    Fault(
        id="experts-of-mtp-not-read-beside-fused-ones",
        bug="ISEEKYAN/mbridge#145 in kind: files have the form of one layer, and the MTP layer's experts are not found",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007",),
        cell=cell("qwen3_5_moe_text", "ep2", mtp=1, expert_format="fused_decoder"),
        wrap=_left_as_built("mtp.", ".experts."),
        diagnosis="an initial value",
        one_rank=True,
    ),
    Fault(
        id="fused-not-read-into-separate",
        bug="Megatron-Bridge#4706: a mapping for fused tensors exists for grouped experts alone",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "ep2", expert_format="fused"),
        wrap=_left_as_built(".local_experts."),
        diagnosis="an initial value",
        one_rank=True,
    ),
    Fault(
        id="grouped-read-into-a-copy",
        bug="torchtitan#3867: weights are written to the copies that a state_dict hook has made",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "ep2", experts="grouped", norms="fused"),
        wrap=_left_as_built("layers.0.mlp.experts.linear_fc1"),
        diagnosis="an initial value",
        one_rank=True,
    ),
    Fault(
        id="joined-file-by-file",
        bug="EfficientMoE/MoE-Infinity#154, vLLM#58142 in kind: parts are put together within a file, and else dropped",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_file_by_file,
        diagnosis="an initial value",
        one_rank=True,
    ),
    Fault(
        id="norm-left-as-built",
        bug="prime-rl#2714 in kind: one small tensor of each layer is not loaded, and its memory stays as it was",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_left_as_built("q_layernorm"),
        diagnosis="an initial value, never loaded",
        one_rank=True,
    ),
)
