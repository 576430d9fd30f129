"""Brute force: what every local Megatron tensor of every rank must hold, byte for byte.

Written to be slow and obvious: rows are picked one by one. Layer numbers come from megatron-core's own functions,
coordinates from its RankGenerator (`topology`). The tables below say, name by name, of which Hugging Face tensors a
local tensor is made.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell
from moeref_conformance.oracles import gpt_oss, hybrid
from moeref_conformance.oracles.stages import mtp_stage, stage_layers

_EXPERT_HF = re.compile(r"\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.")
_GATE_HF = re.compile(r"\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.weight$")
_LAYER_HF = re.compile(r"^model\.layers\.(\d+)\.")
_LAYER_LOCAL = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_MTP_LOCAL = re.compile(r"^mtp\.layers\.(\d+)\.(?:(?:mtp_model_layer|transformer_layer)\.)?(.+)$")
_EXPERT_LOCAL = re.compile(
    r"^mlp\.experts\.(?:local_experts\.(?P<seq>\d+)\.linear_fc[12]\.(?:weight|bias)"
    r"|linear_fc[12]\.(?:weight|bias)(?P<grp>\d+))$"
)
#: Rest of the local name -> rest of the Hugging Face name, for tensors every TP rank holds whole.
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
#: Around the transformer layer of a multi-token prediction layer.
_MTP_WHOLE = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
#: The same for multi-latent attention, where q_layernorm means something else.
_LATENT_WHOLE = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}
#: Multi-latent attention's projections whose rows are one head after the other.
_LATENT_HEADS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}


#: Hugging Face tensors, and what a rank holds of them.
Sources = tuple[tuple[str, ...], Callable[[], torch.Tensor]]


class ExpectedShard:
    """What a local tensor must hold: `hf` are the Hugging Face tensors, `tensor` the values, made when first asked for.

    `rows` counts the rows that are compared: a padded vocabulary has more, with any content.
    `read` is False for a replica that no export reads (a tied head on the last stage).
    """

    def __init__(
        self,
        make: Callable[[], torch.Tensor],
        hf: tuple[str, ...],
        layer: int | None = None,
        expert: int | None = None,
        rows: int | None = None,
        read: bool = True,
    ) -> None:
        self._make, self.hf, self.layer, self.expert, self.rows, self.read = make, hf, layer, expert, rows, read

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """The values this rank must hold, in the shape of the local tensor."""
        return self._make()


class Unknown(LookupError):
    """A local name that Megatron would not have at this place. `what` is layer, expert or module."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Placement:
    """The placement of one checkpoint under one layout. `tensors` are the full Hugging Face tensors by name."""

    def __init__(self, cell: Cell, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.cell, self.layout, self.config, self.tensors = cell, cell.layout, config, tensors
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
        self.experts = int(experts or 0)
        self.latent, self.hybrid = bool(config.get("kv_lora_rank")), config.get("model_type") == "qwen3_next"
        self.fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
        self.layers = stage_layers(cell)
        end = max(self.layers, key=lambda stage: (stage[1], stage[0]))
        #: Where the multi-token prediction layers are, and the final norm, which with them follows the last layer.
        self.mtp = mtp_stage(cell) if cell.mtp else (-1, -1)
        self.final = next(s for s, ids in self.layers.items() if cell.layers - 1 in ids) if cell.mtp else end
        self.moe_layers = {hf_numbers(name)[0] for name in tensors if _GATE_HF.search(name)}
        self.mixtral = any(".block_sparse_moe." in name for name in tensors)
        self.sinks = any(name.endswith(".self_attn.sinks") for name in tensors)
        self._coords: dict[int, dict[str, int]] = {}
        self._largest: dict[str, float] = {}

    def largest(self, name: str) -> float:
        """The largest absolute value of a Hugging Face tensor."""
        if name not in self._largest:
            self._largest[name] = float(self.tensors[name].abs().max())
        return self._largest[name]

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's coordinates (`topology.coords`)."""
        if rank not in self._coords:
            self._coords[rank] = topology.coords(self.layout, rank)
        return self._coords[rank]

    def expert_range(self, rank: int) -> range:
        """Global numbers of the experts this rank holds: ep_rank · (E / EP) onwards."""
        each = self.experts // self.layout.ep
        start = self.coords(rank)["ep"] * each
        return range(start, start + each)

    def layer_ids(self, rank: int, chunk: int) -> list[int]:
        """Global layer numbers of one chunk of this rank, in local order; empty for a chunk that does not exist."""
        return self.layers.get((self.coords(rank)["pp"], chunk), [])

    def hf_names(self, rank: int) -> set[str]:
        """All Hugging Face tensors of which this rank holds elements that an export reads; needs no module."""
        pp, experts = self.coords(rank)["pp"], self.expert_range(rank)
        mine = {layer for (stage, _), layers in self.layers.items() if stage == pp for layer in layers}
        names = set()
        for name in self.tensors:
            layer, expert = hf_numbers(name)
            if name.endswith(".embed_tokens.weight"):
                here = pp in (0, self.mtp[0])
            elif name.endswith(".shared_head.head.weight"):
                here = pp == self.layout.pp - 1
            elif layer is not None and layer >= self.cell.layers:
                here = pp == self.mtp[0] and (expert is None or expert in experts)
            elif layer is not None:
                here = layer in mine and (expert is None or expert in experts)
            elif name == "model.norm.weight":
                here = pp == self.final[0]
            else:
                here = pp == self.layout.pp - 1
            if here:
                names.add(name)
        return names

    def numbers(self, rank: int, chunk: int, local: str) -> tuple[int | None, int | None]:
        """(global layer, global expert) of a local name; None where there is no such number. Raises Unknown."""
        mtp, match = _MTP_LOCAL.match(plain_local(local)), _LAYER_LOCAL.match(plain_local(local))
        if mtp is not None and (self.coords(rank)["pp"], chunk) == self.mtp:
            match, ids = mtp, list(range(self.cell.layers, self.cell.layers + self.cell.mtp))
        elif match is None:
            return None, None
        else:
            ids = self.layer_ids(rank, chunk)
        index = int(match[1])
        if index >= len(ids):
            raise Unknown("layer", f"chunk {chunk} of rank {rank} has {len(ids)} layers, so there is no {local}")
        expert = _EXPERT_LOCAL.match(match[2])
        if expert is None:
            return ids[index], None
        here, experts = int(expert["seq"] or expert["grp"]), self.expert_range(rank)
        if here >= len(experts):
            raise Unknown("expert", f"rank {rank} has {len(experts)} experts, so there is no {local}")
        return ids[index], experts[here]

    def shard(self, rank: int, chunk: int, local: str, shape: Sequence[int]) -> ExpectedShard:
        """What this local tensor holds. `shape` is asked only for the padded rows of a vocabulary. Raises Unknown."""
        name, at = plain_local(local), self.coords(rank)
        layer, expert = self.numbers(rank, chunk, local)
        if layer is None:
            return self._outer(name, at, chunk, shape)
        mtp = _MTP_LOCAL.match(name)
        rest, prefix = mtp[2] if mtp else name.split(".", 3)[3], f"model.layers.{layer}."
        if expert is not None:
            return self._expert(prefix, layer, expert, rest, at["etp"])
        for look_up in (self._whole, self._around_mtp if mtp else None, self._attention, self._mlp):
            if look_up and (sources := look_up(prefix, rest, at["tp"])):
                names, make = sources
                return ExpectedShard(make, names, layer)
        raise Unknown("module", f"no Megatron module known to the oracle has a tensor {local}")

    def _whole(self, prefix: str, rest: str, tp: int) -> Sources | None:
        """Tensors that every TP rank holds whole."""
        table = _LATENT_WHOLE if self.latent and "attention" in rest else _WHOLE
        if self.hybrid:
            table = {**_WHOLE, **hybrid.WHOLE}
        if self.sinks:
            table = {**_WHOLE, **gpt_oss.WHOLE}
        if rest not in table:
            return None
        mixtral_router = rest == "mlp.router.weight" and self.mixtral
        source = self._need(prefix + ("block_sparse_moe.gate.weight" if mixtral_router else table[rest]))
        return (source,), lambda: self.tensors[source]

    def _around_mtp(self, prefix: str, rest: str, tp: int) -> Sources | None:
        """What a multi-token prediction layer has around its transformer layer."""
        if rest in _MTP_WHOLE:
            source = self._need(prefix + _MTP_WHOLE[rest])
            return (source,), lambda: self.tensors[source]
        if rest == "eh_proj.weight":
            source = self._need(prefix + rest)
            return (source,), lambda: _row_shard(self.tensors[source], tp, self.layout.tp)
        return None

    def _attention(self, prefix: str, rest: str, tp: int) -> Sources | None:
        """Tensors of attention that are cut over TP ranks."""
        if self.hybrid and rest in hybrid.CUT:
            rests, make = hybrid.CUT[rest]
            sources = {name: self._need(prefix + name) for name in rests}
            heads = hybrid.Heads(self.config, tp, self.layout.tp)
            given = {name: self.tensors[source] for name, source in sources.items()}
            return tuple(sources.values()), lambda: make(heads, given)
        if self.latent and rest in _LATENT_HEADS:
            source = self._need(prefix + _LATENT_HEADS[rest])
            return (source,), lambda: self._heads(source, tp)
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            kind = rest.rsplit(".", 1)[1]
            parts = tuple(self._need(f"{prefix}self_attn.{x}_proj.{kind}") for x in "qkv")
            return parts, lambda: self._qkv(parts, tp)
        if self.sinks and rest == "self_attention.core_attention.softmax_offset":
            sinks = self._need(prefix + "self_attn.sinks")
            return (sinks,), lambda: self._heads(sinks, tp)
        if rest == "self_attention.linear_proj.weight":
            output = self._need(prefix + "self_attn.o_proj.weight")
            return (output,), lambda: _column_shard(self.tensors[output], tp, self.layout.tp)
        return None

    def _mlp(self, prefix: str, rest: str, tp: int) -> Sources | None:
        """A dense MLP, or shared experts."""
        mlp, _, linear = rest.rpartition("linear_")
        if mlp not in ("mlp.", "mlp.shared_experts."):
            return None
        base = prefix + (mlp.replace("experts", "expert") if self.hybrid else mlp)
        if linear == "fc1.weight":
            gate, up = self._need(f"{base}gate_proj.weight"), self._need(f"{base}up_proj.weight")
            return (gate, up), lambda: _gate_up(self.tensors[gate], self.tensors[up], tp, self.layout.tp)
        if linear == "fc2.weight":
            down = self._need(f"{base}down_proj.weight")
            return (down,), lambda: _column_shard(self.tensors[down], tp, self.layout.tp)
        return None

    def _outer(self, name: str, at: Mapping[str, int], chunk: int, shape: Sequence[int]) -> ExpectedShard:
        """Embedding, final norm and head, at the first and the last stage only."""
        first = (at["pp"], chunk) in ((0, 0), self.mtp)
        last = at["pp"] == self.layout.pp - 1 and chunk == max(c for _, c in self.layers)
        tied = bool(self.config.get("tie_word_embeddings"))
        if name == "embedding.word_embeddings.weight" and first:
            return self._vocabulary("model.embed_tokens.weight", at["tp"], shape, read=True)
        if name == "output_layer.weight" and last:
            return self._vocabulary(
                "model.embed_tokens.weight" if tied else "lm_head.weight", at["tp"], shape, not tied
            )
        if name == "decoder.final_layernorm.weight" and (at["pp"], chunk) == self.final:
            source = self._need("model.norm.weight")
            return ExpectedShard(lambda: self.tensors[source], (source,))
        raise Unknown("module", f"Megatron has no tensor {name} at pipeline rank {at['pp']}, chunk {chunk}")

    def _need(self, name: str) -> str:
        if name not in self.tensors:
            raise Unknown("module", f"the checkpoint has no {name}")
        return name

    def _vocabulary(self, source: str, tp: int, shape: Sequence[int], read: bool) -> ExpectedShard:
        """Rows tp·n … tp·n+n−1 of the vocabulary, n being the target's choice; rows past its end are padding."""
        full, n = self.tensors[self._need(source)], int(shape[0])
        rows = range(min(tp * n, len(full)), min(tp * n + n, len(full)))

        def make() -> torch.Tensor:
            return torch.cat([full[list(rows)], full.new_zeros(n - len(rows), *full.shape[1:])])

        alias = "embed_tokens.weight" if "embed" in source else "shared_head.head.weight"
        after = range(self.cell.layers, self.cell.layers + self.cell.mtp)
        names = (source, *(self._need(f"model.layers.{layer}.{alias}") for layer in after))
        return ExpectedShard(make, names if read else (), rows=len(rows), read=read)

    def _qkv(self, parts: tuple[str, ...], tp: int) -> torch.Tensor:
        """For each KV group of this TP rank: its query heads, then its key head, then its value head, row by row."""
        q, k, v = (self.tensors[name] for name in parts)
        heads, groups = int(self.config["num_attention_heads"]), int(self.config["num_key_value_heads"])
        width = q.shape[0] // heads
        parts_of_groups: list[torch.Tensor] = []
        for group in range(groups):
            if group * self.layout.tp // groups != tp:
                continue
            for head in range(heads):
                if head * groups // heads == group:
                    parts_of_groups.append(q[[head * width + i for i in range(width)]])
            of_group = [group * width + i for i in range(width)]
            parts_of_groups += [k[of_group], v[of_group]]
        return torch.cat(parts_of_groups)

    def _heads(self, source: str, tp: int) -> torch.Tensor:
        """The rows of this TP rank's attention heads; each head has equally many."""
        full, heads = self.tensors[source], int(self.config["num_attention_heads"])
        width = len(full) // heads
        mine = [head for head in range(heads) if head * self.layout.tp // heads == tp]
        return full[[head * width + i for head in mine for i in range(width)]]

    def _expert(self, prefix: str, layer: int, expert: int, rest: str, etp: int) -> ExpectedShard:
        """fc1 or fc2 of one expert, from either expert_format of the checkpoint."""
        size, first = self.layout.expert_tp, "linear_fc1" in rest
        if self.sinks:
            hf, make = gpt_oss.EXPERT["linear_fc1" if first else "linear_fc2", "bias" if ".bias" in rest else "weight"]
            source = self._need(prefix + hf)
            return ExpectedShard(lambda: make(self.tensors[source], expert, etp, size), (source,), layer, expert)
        if self.fused:
            name = self._need(f"{prefix}mlp.experts.{'gate_up_proj' if first else 'down_proj'}")
            full = self.tensors[name][expert]
            half = len(full) // 2
            if first:
                return ExpectedShard(lambda: _gate_up(full[:half], full[half:], etp, size), (name,), layer, expert)
            return ExpectedShard(lambda: _column_shard(full, etp, size), (name,), layer, expert)
        base = f"{prefix}{'block_sparse_moe' if self.mixtral else 'mlp'}.experts.{expert}."
        names = ("w1", "w3", "w2") if self.mixtral else ("gate_proj", "up_proj", "down_proj")
        if first:
            gate, up = self._need(f"{base}{names[0]}.weight"), self._need(f"{base}{names[1]}.weight")
            return ExpectedShard(
                lambda: _gate_up(self.tensors[gate], self.tensors[up], etp, size), (gate, up), layer, expert
            )
        down = self._need(f"{base}{names[2]}.weight")
        return ExpectedShard(lambda: _column_shard(self.tensors[down], etp, size), (down,), layer, expert)


def _gate_up(gate: torch.Tensor, up: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rank's chunk of gate, then its chunk of up."""
    return torch.cat([_row_shard(gate, rank, size), _row_shard(up, rank, size)])


def _row_shard(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rank-th of `size` equal runs of rows."""
    count = full.shape[0]
    return full[[i for i in range(count) if i * size // count == rank]]


def _column_shard(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rank-th of `size` equal runs of columns."""
    width = full.shape[1]
    return full[:, [j for j in range(width) if j * size // width == rank]]


def plain_local(local: str) -> str:
    """A local name without the `module.` of wrappers around the chunk."""
    while local.startswith("module."):
        local = local.removeprefix("module.")
    return local


def hf_numbers(name: str) -> tuple[int | None, int | None]:
    """(layer, expert) that a Hugging Face name spells."""
    layer, expert = _LAYER_HF.match(name), _EXPERT_HF.search(name)
    return int(layer[1]) if layer else None, int(expert[1]) if expert else None
