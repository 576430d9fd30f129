"""Records of a faultless run, written by hand from the oracles, for tests that then tamper with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from moeref_conformance.contract import topology
from moeref_conformance.contract.api import FACETS, Cell, Claims, Layout
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.records import Observation, rank_dir
from moeref_conformance.judges import Case
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.placement import Placement
from safetensors.torch import load_file, save_file

ONE = Cell(family="glm4_moe", layout_name="one", layout=Layout(), layers=4)
MANY = Cell(family="glm4_moe", layout_name="many", layout=Layout(tp=2, pp=2, ep=2, etp=1), layers=4)


def claims_of(one: Cell) -> Claims:
    """Of a target that covers the cell, with all facets."""
    return Claims(facets=frozenset(FACETS), families=frozenset({one.family}), backends=frozenset({one.backend}))


def local_names(oracle: Placement, rank: int) -> Iterator[tuple[int, str]]:
    """(chunk, local name) of every tensor that Megatron's local layer spec builds on this rank for GLM-4.5."""
    stage, tied = oracle.coords(rank)["pp"], bool(oracle.config["tie_word_embeddings"])
    chunks = sorted(chunk for pp, chunk in oracle.layers if pp == stage)
    for chunk in chunks:
        if stage == 0 and chunk == 0:
            yield chunk, "embedding.word_embeddings.weight"
        for i, layer in enumerate(oracle.layer_ids(rank, chunk)):
            at = f"decoder.layers.{i}."
            rest = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
            rest += [f"self_attention.{n}" for n in ("linear_qkv.weight", "linear_proj.weight")]
            rest += [f"self_attention.{n}_layernorm.weight" for n in "qk"]
            if oracle.config.get("attention_bias"):
                rest.append("self_attention.linear_qkv.bias")
            if layer in oracle.moe_layers:
                rest.append("mlp.router.weight")
                if oracle.config["model_type"] == "glm4_moe":
                    rest += ["mlp.router.expert_bias"] + [f"mlp.shared_experts.linear_fc{f}.weight" for f in "12"]
                for expert in range(len(oracle.expert_range(rank))):
                    rest += [f"mlp.experts.local_experts.{expert}.linear_fc{f}.weight" for f in "12"]
            else:
                rest += [f"mlp.linear_fc{f}.weight" for f in "12"]
            yield from ((chunk, at + name) for name in rest)
        if stage == oracle.layout.pp - 1 and chunk == chunks[-1]:
            yield chunk, "decoder.final_layernorm.weight"
            if not tied or oracle.layout.pp > 1:
                yield chunk, "output_layer.weight"


def vocabulary_shape(oracle: Placement) -> tuple[int, int]:
    """Rows per TP rank with the vocabulary padded to a multiple of TP, and the hidden size."""
    tp = oracle.layout.tp
    return -(-int(oracle.config["vocab_size"]) // tp), int(oracle.config["hidden_size"])


def global_name(oracle: Placement, rank: int, chunk: int, local: str) -> str:
    layer, expert = oracle.numbers(rank, chunk, local)
    parts = local.split(".")
    if layer is not None:
        parts[2] = str(layer)
    if expert is not None:
        parts[6] = str(expert)
    return ".".join(parts)


def write_run(cell: Cell, expected: Expected, folder: Path) -> Path:
    """All records of a run in which everything is right; rank 0 is the writer."""
    oracle = Placement(cell, expected.config, expected.tensors)
    metas = [
        {"name": n, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for n, t in expected.tensors.items()
    ]
    for rank in range(cell.layout.world):
        here = rank_dir(folder, rank)
        here.mkdir(parents=True)
        rows, inventory, shards = [], [], {}
        for chunk, local in local_names(oracle, rank):
            held = oracle.shard(rank, chunk, local, vocabulary_shape(oracle))
            dtype = str(held.tensor.dtype).removeprefix("torch.")
            fact = {"chunk": chunk, "local": local, "shape": list(held.tensor.shape), "dtype": dtype}
            rows.append({**fact, "global_name": global_name(oracle, rank, chunk, local), "hf": list(held.hf)})
            kind = "buffer" if local.endswith("expert_bias") else "parameter"
            inventory.append({**fact, "kind": kind})
            shards[f"{chunk}:{local}"] = held.tensor.clone()
        stream = [{**meta, "materialised": rank == 0, "alive": 0, "graph": False} for meta in metas]
        last = oracle.coords(rank)["pp"] == cell.layout.pp - 1
        groups = topology.groups(cell.layout)
        members = {kind: next(g for g in found if rank in g) for kind, found in groups.items()}
        events: list[tuple[str, Any]] = [
            ("open", None),
            ("topology", {**topology.coords(cell.layout, rank), "groups": members}),
            ("names", rows),
            ("inventory", inventory),
            ("load", None),
            ("shards", None),
            ("plan", metas),
            ("export", stream),
            ("left", []),
            ("forward", {"has": last}),
            ("around_forward", []),
            ("change", None),
            ("broken_off", []),
            ("export_changed", stream),
            ("kept", {"overwritten": [], "left": []}),
            ("move", None),
            ("own", {"changed": [], "later": [], "outdated": [], "lost": [], "again": None, "stale": []}),
        ]
        lines = [
            {"step": s, "phase": "ok", "at": float(i), "seconds": 0.0, "value": v} for i, (s, v) in enumerate(events)
        ]
        for step, name in (
            ("refuse_parameter", "kit_unmapped.weight"),
            ("refuse_buffer", "kit_unmapped.weight"),
            ("refuse_extra", expected.extra),
            ("refuse_missing", expected.missing),
            ("refuse_unlike", expected.unlike),
        ):
            error = {"type": "ValueError", "message": f"no place for {name}", "traceback": ""}
            lines.append({"step": step, "phase": "raised", "at": 20.0, "seconds": 0.0, "error": error})
        lines.append({"step": "around_loads", "phase": "ok", "at": 25.0, "seconds": 0.0, "value": {}})
        lines.append({"step": "settings", "phase": "ok", "at": 28.0, "seconds": 0.0, "value": []})
        lines.append({"step": "close", "phase": "ok", "at": 30.0, "seconds": 0.0, "value": False})
        (here / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        save_file(shards, here / "shards.safetensors")
        if rank == 0:
            save_file(expected.tensors, here / "export.safetensors")
            changed = {n: t * -0.5 for n, t in expected.tensors.items()}
            save_file(changed, here / "export_changed.safetensors")
        if last:
            save_file({"logits": expected.logits_BSV}, here / "forward.safetensors")
    return folder


def read_run(cell: Cell, folder: Path, exits: list[RankExit] | None = None) -> Observation:
    """The records, with all ranks finished unless said otherwise."""
    fine = [RankExit(r, 0, None, False, "close", "", "", finished=True) for r in range(cell.layout.world)]
    return Observation.read(cell, folder, RunOutcome(tuple(exits or fine), 0.0))


@dataclass
class Run:
    """A copy of the good run that a test may spoil."""

    case: Case
    folder: Path

    def events(self, rank: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Apply `change` to the events of one rank."""
        path = rank_dir(self.folder, rank) / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        change(events)
        path.write_text("".join(json.dumps(e) + "\n" for e in events))
        self.reread()

    def value(self, rank: int, step: str, change: Callable[[Any], Any]) -> None:
        """Replace the value of a step by what `change` makes of it (in place if it returns None)."""

        def edit(events: list[dict[str, Any]]) -> None:
            event = next(e for e in events if e["step"] == step)
            new = change(event.get("value"))
            event["value"] = event.get("value") if new is None else new

        self.events(rank, edit)

    def tensors(self, rank: int, step: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Apply `change` to the tensors of a step."""
        path = rank_dir(self.folder, rank) / f"{step}.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path)

    def reread(self, exits: list[RankExit] | None = None) -> None:
        self.case.observation = read_run(self.case.cell, self.folder, exits)
