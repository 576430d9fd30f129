"""Facet `quantised`: weights whose blocks differ a thousandfold are sent in FP8 or INT4, after those of the cell.

They are loaded, and again written over those of the cell, as an optimizer writes. Then those of the cell are loaded.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Cell, Claims, Quantised
from moeref_conformance.contract.hf_files import weight_files
from moeref_conformance.contract.records import free_key
from moeref_conformance.contract.requests import int4
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.steps.bystanders import changed, in_training, state
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.tensors import copied, module_tensors, same_bytes


def asked(cell: Cell) -> bool:
    """Whether a cell is asked: in bf16, of families that are published in FP8 or INT4, and not again under replay.

    Such files have a tensor and scales of each expert, as checkpoints have them that are not fused.
    """
    published = cell.family in (*request.BLOCKS, *int4.FAMILIES) and cell.expert_format == "per_expert"
    return published and cell.dtype == "bfloat16" and cell.replay == "off" and not cell.quantised_checkpoint


def claimed(claims: Claims, cell: Cell) -> bool:
    """Whether a target claims the form that a cell asks for."""
    return claims.sends_int4 or cell.family not in int4.FAMILIES


def sent(quantised: Quantised, context: Context) -> dict[str, list[Any]]:
    """Save what this rank is given, by name.

    The value: the names, in order, what else the stream has changed, and which tensors held other values when it ended.
    """
    export, names = context.facet("export"), list[str]()
    given, kept = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    with tempfile.TemporaryDirectory(dir=context.world.workdir) as folder:
        checkpoint, config, before = _written(context, Path(folder))
        chunks = export.chunks()
        export.load(checkpoint)
        wanted = [held.detach().clone() for _, _, _, held in module_tensors(chunks)]
        export.load(context.input("checkpoint"))
        for _ in quantised.stream(before):  # other weights, of which nothing may be kept
            pass
        for (_, _, _, held), values in zip(module_tensors(chunks), wanted, strict=True):
            held.data.copy_(values)  # as an optimizer writes: the version of the tensor stays
        with in_training(chunks):
            was = state(chunks)
            for name, tensor in quantised.stream(config):
                if tensor is not None:
                    names.append(name)
                    key = free_key(given, name)
                    given[key], kept[key] = copied(tensor), tensor
            overwritten = [name for name, tensor in kept.items() if not same_bytes(tensor, given[name])]
            left = changed(was, state(chunks))
    context.save("quantised", given)
    export.load(context.input("checkpoint"))
    return {"names": names, "left": left, "overwritten": overwritten}


def _written(context: Context, folder: Path) -> tuple[Path, Path, Path]:
    """Folders of a checkpoint with the changed weights, in one file, and of two configs that ask for them quantised.

    In FP8 the second names no modules that stay as they are.
    """
    checkpoint, family = context.input("checkpoint"), context.cell.family
    tensors = {name: tensor for file in weight_files(checkpoint) for name, tensor in load_file(file).items()}
    model = json.loads((checkpoint / "config.json").read_text())
    asked = {name: request.asked(family, model, listed) for name, listed in {"config": True, "before": False}.items()}
    for name, config in {"checkpoint": model, **asked}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    weights = folder / "checkpoint"
    save_file(request.weights(tensors, request.block(family)), weights / "model.safetensors", metadata={"format": "pt"})
    return weights, folder / "config", folder / "before"


FACET = Facet(
    name="quantised",
    protocol=Quantised,
    needs=frozenset({"export"}),
    asked_in=asked,
    claimed=claimed,
    steps=(Step(name="quantised", ask=sent, stage=Stage.LOADED),),
)
