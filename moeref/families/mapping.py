"""One line of a family's table: a Megatron parameter, the Hugging Face tensors it holds, and how TP splits it.

Everything here is data, without torch. `bridge` reads it to load, to export and to name parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from moeref.families.model import Model

Sharding = Literal["replicate", "vocab", "column", "row", "qkv", "gate_up", "gated_qkv", "gdn_in_proj", "gdn_conv1d"]
Where = Literal["first", "last", "layer", "dense", "moe", "attention", "gated_delta_net", "indexer", "mtp"]
#: Hugging Face files have tensors of each expert; or one of all experts of a layer; or the latter of the decoder's
#: layers alone, and the former of MTP layers, as Qwen3.5 has (miles' plugin for mbridge; Qwen3.6 has one of all there).
ExpertFormat = Literal["per_expert", "fused", "fused_decoder"]


@dataclass(frozen=True)
class HFPattern:
    """The name of a Hugging Face tensor, with `{layer}` and `{expert}`, and its dimensions as `Model.dims` names them.

    A tensor without `{expert}` for a parameter with it holds all experts, and its first dimension is the expert.
    """

    name: str
    dims: tuple[str, ...]
    transposed: bool = False  # the matrix is [in, out] here; Megatron's are [out, in]
    interleaved: bool = False  # gate and up alternate along the outputs; otherwise all of gate comes first


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """A Megatron parameter and the Hugging Face tensors whose elements it holds.

    sharding, over TP, or over ETP for a parameter with `{expert}`:
    `replicate` whole on every rank · `column` dim 0 split · `row` dim 1 split · `vocab` dim 0 split after padding with
    zeros · `qkv` per KV group [its q heads | k | v], contiguous groups to each rank · `gate_up` rank r holds
    cat(gate chunk r, up chunk r) · `gated_qkv`, `gdn_in_proj`, `gdn_conv1d`: see `bridge.gated_delta_net`.
    """

    megatron: str  # name in the local layer spec, below the chunk; {layer} and {expert}
    hf: tuple[HFPattern, ...]
    sharding: Sharding = "replicate"
    te_name: str = ""  # name in the Transformer Engine layer spec where it differs
    fused: HFPattern | None = None  # transformers 5's tensor in memory where it differs from the files'
    alias: HFPattern | None = None  # in files, each MTP layer holds a copy under this name
    where: Where = "layer"
    only_if: str = ""  # a switch of `Model` that must be true
    dtype: str = ""  # kept in this dtype whatever the model's is

    def __hash__(self) -> int:
        """Hash of the fields that differ between mappings of one family; hashing all of them is slow."""
        return hash((self.megatron, self.where))

    def present(self, model: Model, layer: int | None) -> bool:
        """Whether `model` has this parameter in `layer` (None: outside the layers; MTP layers follow the decoder's)."""
        if self.only_if and not getattr(model, self.only_if):
            return False
        if layer is None:
            return self.where in ("first", "last")
        if self.where == "mtp":
            return layer >= model.num_layers
        if self.where in ("dense", "moe"):
            # An MTP layer is of the kind of the last decoder layer, both in megatron-core and in the files.
            return model.moe_layers[min(layer, model.num_layers - 1)] == (self.where == "moe")
        if self.where == "indexer":  # MTP layers have one each
            return model.indexer is not None and (layer >= model.num_layers or model.indexer.layers[layer])
        if self.where in ("attention", "gated_delta_net"):
            net = model.gated_delta_net
            is_net = net is not None and layer < model.num_layers and net.layers[layer]
            return is_net == (self.where == "gated_delta_net")
        return self.where == "layer"


@dataclass(frozen=True)
class SpecNames:
    """Which names Megatron gives to parameters: they depend on the layer spec and on the version.

    norms: `separate` modules as in the local layer spec, or `fused` into the linears as in Transformer Engine's.
    experts: `sequential` or `grouped` modules. mtp: the module of the transformer layer inside an MTP layer;
    megatron-core 0.16 calls it `transformer_layer`.
    """

    norms: Literal["separate", "fused"] = "separate"
    experts: Literal["sequential", "grouped"] = "sequential"
    mtp: Literal["mtp_model_layer", "transformer_layer"] = "mtp_model_layer"

    def of(self, mapping: ParamMapping, *, mtp: bool = False) -> str:
        """The name pattern of `mapping`; with `mtp`, of a decoder parameter inside an MTP layer."""
        name = mapping.te_name if self.norms == "fused" and mapping.te_name else mapping.megatron
        if self.experts == "grouped" and "{expert}" in name:
            name = name.replace("local_experts.{expert}.", "") + "{expert}"
        return name.replace("decoder.layers.{layer}.", f"mtp.layers.{{layer}}.{self.mtp}.") if mtp else name


def beside_vision(mappings: Iterable[ParamMapping]) -> tuple[ParamMapping, ...]:
    """A text model's table beside a vision model: under `model.language_model`; `lm_head` stays where it is."""
    return tuple(
        replace(one, hf=tuple(map(_inside, one.hf)), fused=one.fused and _inside(one.fused)) for one in mappings
    )


def _inside(pattern: HFPattern) -> HFPattern:
    return replace(pattern, name=pattern.name.replace("model.", "model.language_model.", 1))
