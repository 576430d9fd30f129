"""The expected tensors of a published model: names, shapes and dtypes as transformers itself would save them.

transformers builds the full module on the meta device, where no weight exists, and its own conversion turns what is in
memory into what is in files. Multi-token prediction layers, which it does not build, are added as they are published.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.published_models import Size, published
from moeref_conformance.oracles import beside_vision, mtp_names
from moeref_conformance.oracles.dialect import in_files
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.recipes import cast

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Of a multi-token prediction layer: the embedding and the head once more.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class ExpectedSize(Expected):
    """A published model without weights: `tensors` are on the meta device, and `inputs` has the config alone."""

    size: str = ""
    expert_format: str = "per_expert"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by Hugging Face name, in the order of their names."""
        return tensors(self.size, self.expert_format)


def expected(cell: Cell, workdir: Path) -> ExpectedSize:
    """The expected tensors of the cell's published model. Its config.json is written to `workdir/<size>/config`.

    Raises RuntimeError if transformers' counts are not the published ones.
    """
    folder = workdir / cell.size
    path = folder / "config" / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(published()[cell.size].config, indent=2))
    tensors(cell.size, cell.expert_format)
    return ExpectedSize(
        dir=folder, inputs={"hf_config": str(path.parent)}, missing="", size=cell.size, expert_format=cell.expert_format
    )


@functools.lru_cache(maxsize=2)
def tensors(name: str, expert_format: str) -> dict[str, torch.Tensor]:
    """The tensors of a published model by name, on the meta device; `expert_format` as in `Cell`."""
    on_meta = derived(published()[name].config, expert_format)
    if expert_format == "per_expert":
        check_counts(published()[name], on_meta)
    return on_meta


def derived(config: Mapping[str, Any], expert_format: str) -> dict[str, torch.Tensor]:
    """The tensors that a Hugging Face config gives, on the meta device, in the order of their names."""
    config, prefix = beside_vision.text_config(config), beside_vision.prefix(str(config["model_type"]))
    model, mtp = _model(config), mtp_names.number(config)
    if expert_format == "fused" and mtp:
        raise ValueError("multi-token prediction layers are published per expert, not fused")
    state = dict(model.state_dict())
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    if expert_format == "per_expert":
        state = in_files(model, state)
    for number in range(mtp):
        state |= mtp_layer(str(config["model_type"]), int(config["num_hidden_layers"]), number, state)
    return {prefix + name: tensor for name, tensor in sorted(state.items())}


def _model(config: Mapping[str, Any]) -> Any:
    """transformers' module on the meta device, its parameters in the published dtypes; buffers stay fp32."""
    import transformers

    model_of = getattr(transformers, config["architectures"][0])
    # A copy, because transformers changes the tables of a config that it is given.
    known = {k: v for k, v in copy.deepcopy(dict(config)).items() if k not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = model_of(model_of.config_class(**known))
    cast(model, DTYPES[str(config.get("dtype") or config["torch_dtype"])])
    return model


def mtp_layer(family: str, layers: int, number: int, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One multi-token prediction layer, as it is published: a layer like the decoder's last, three norms, a
    projection of embedding and hidden state, and, but for those of `mtp_names.APART`, the embedding and the head once
    more (COPIES). Where the last layer shares an indexer, this one has its own (ROCm/ATOM#1362)."""
    embedding, norm, head = (state[f"{n}.weight"] for n in ("model.embed_tokens", "model.norm", "lm_head"))
    first, last = "model.layers.0.", f"model.layers.{layers - 1}."
    found = {name.removeprefix(first): tensor for name, tensor in state.items() if f"{first}self_attn.indexer." in name}
    found |= {name.removeprefix(last): tensor for name, tensor in state.items() if name.startswith(last)}
    found |= {f"{n}.weight": norm for n in ("enorm", "hnorm", "shared_head.norm")}
    found["eh_proj.weight"] = norm.new_empty(len(norm), 2 * len(norm))
    if family not in mtp_names.APART:
        found |= dict(zip(COPIES, (embedding, head), strict=True))
    return {mtp_names.in_files(family, layers, number, rest): tensor for rest, tensor in found.items()}


def aliases(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tensors that `tensors` leaves out because they repeat another one, and which: a tied head, COPIES."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    found = {head: embedding}
    for layer in range(cell.layers, cell.layers + cell.mtp * (cell.family not in mtp_names.APART)):
        names = (f"model.layers.{layer}.{name}" for name in COPIES)
        found |= dict(zip(names, (embedding, head if head in tensors else embedding), strict=True))
    return {name: of for name, of in found.items() if name not in tensors and of in tensors}


def check_counts(size: Size, state: Mapping[str, torch.Tensor]) -> None:
    """RuntimeError unless there are as many tensors, parameters and bytes as were published."""
    held = {
        "tensors": len(state),
        "parameters": sum(t.numel() for t in state.values()),
        "bytes": sum(t.numel() * t.element_size() for t in state.values()),
    }
    for what, number in held.items():
        if number != getattr(size, what):
            raise RuntimeError(
                f"{size.name}: transformers has {number:,} {what}, published are {getattr(size, what):,}"
            )
