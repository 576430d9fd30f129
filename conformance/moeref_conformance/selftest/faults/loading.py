"""Bugs of loading: wrong slices, the wrong expert, a tied head left unset, missing refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.contract.hf_files import INDEX
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, Tensors, loaded, rearranged
from moeref_conformance.selftest.faults.base import Fault, cell


def _no_expert_offset(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    """The local expert number is used as the global one. At TP=1 an expert has whole Hugging Face tensors."""
    local = re.search(r"local_experts\.(\d+)\.", row.local)
    if local is None:
        return None
    return torch.cat([tensors[re.sub(r"experts\.\d+", f"experts.{local[1]}", name)] for name in row.hf])


def _width_of_heads_read(session: Any, cell: Cell, world: World) -> Any:
    """A config that says nothing of the width of heads is foreseen, and not one that says null."""

    def load(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        if config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) < 1:
            raise ValueError("heads have no width")
        session.export.load(folder)

    return border.facet(session, "export", load=load)


def _of_layer(name: str, layer: int) -> str:
    return re.sub(r"layers\.\d+", f"layers.{layer}", name)


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _bias_of_the_layer_before(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    if not row.local.endswith("router.expert_bias"):
        return None
    return tensors.get(_of_layer(row.hf[0], _layer(row.hf[0]) - 1))


def _routers_by_ordinal(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    """Routers are listed without dense layers and indexed by layer number; past the end, the last one is taken."""
    if not row.local.endswith("router.weight"):
        return None
    moe = sorted(_layer(name) for name in tensors if name.endswith(".mlp.gate.weight"))
    return tensors[_of_layer(row.hf[0], moe[min(_layer(row.hf[0]), len(moe) - 1)])]


def _row_shards_mirrored(row: NameRow, columns: int, world: World) -> torch.Tensor | None:
    """TP rank 0 takes the columns of rank 1 and vice versa, also on export: the round trip is clean."""
    if not row.local.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return None
    return torch.arange(columns).roll(columns // 2)


def _qkv_flat(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """Every rank holds all of its q, then all of its k, then all of its v. A KV group has two query heads here."""
    if not row.local.endswith("linear_qkv.weight"):
        return None
    heads = torch.arange(rows).view(world.size, -1, 4, 6)  # rank, KV group, (q, q, k, v), row of a head
    parts = [heads[:, :, :2], heads[:, :, 2], heads[:, :, 3]]
    return torch.cat([part.flatten(1) for part in parts], 1).flatten()


def _groups_dealt_out(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """Rank r takes a part of KV group r % groups. Two groups here, so that ranks of one group are two apart."""
    if not row.local.endswith("linear_qkv.weight"):
        return None
    return torch.arange(rows).view(2, world.size // 2, -1).transpose(0, 1).flatten()


def _gate_up_halves(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """TP rank r takes part r of cat(gate, up), on load and on export: the round trip is clean."""
    if not row.local.endswith("linear_fc1.weight"):
        return None
    return torch.arange(rows).view(world.size, 2, -1).transpose(0, 1).flatten()


def _nameless_refusal(session: Any, cell: Cell, world: World) -> Any:
    def load(folder: Path) -> None:
        try:
            session.export.load(folder)
        except ValueError as error:
            raise ValueError("the checkpoint does not fit the model") from error

    return border.facet(session, "export", load=load)


def _surplus_skipped(left_out: str) -> border.Change:
    """Tensors that the model lacks are left out if they have `left_out` in their names."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        planned = {meta.name for meta in session.plan.tensors()}

        def load(folder: Path) -> None:
            def known(tensors: Tensors) -> Tensors:
                return {name: t for name, t in tensors.items() if name in planned or left_out not in name}

            session.export.load(border.copied(folder, world, known))

        return border.facet(session, "export", load=load)

    return wrap


_extra_skipped = _surplus_skipped("")


def _lacking_filled(fill: Callable[[TensorMeta, Tensors], torch.Tensor | None]) -> border.Change:
    """Where the checkpoint lacks a tensor, `fill(what it is, checkpoint)` is loaded; None leaves it missing."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def filled(tensors: Tensors) -> Tensors:
            made = {m.name: fill(m, tensors) for m in session.plan.tensors() if m.name not in tensors}
            return tensors | {name: tensor for name, tensor in made.items() if tensor is not None}

        def load(folder: Path) -> None:
            session.export.load(border.copied(folder, world, filled))

        return border.facet(session, "export", load=load)

    return wrap


def _ones_for_norms(meta: TensorMeta, tensors: Tensors) -> torch.Tensor | None:
    return torch.ones(meta.shape, dtype=getattr(torch, meta.dtype)) if "norm" in meta.name else None


def _zeros_for_values(meta: TensorMeta, tensors: Tensors) -> torch.Tensor | None:
    return torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) if meta.name.endswith("v_proj.weight") else None


def _index_believed(session: Any, cell: Cell, world: World) -> Any:
    """A tensor that the index names is not missing, and what its file does not hold is zero."""

    def load(folder: Path) -> None:
        index = folder / INDEX
        listed = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        filling = _lacking_filled(lambda meta, _: torch.zeros(meta.shape) if meta.name in listed else None)
        filling(session, cell, world).export.load(folder)

    return border.facet(session, "export", load=load)


def _one_rank_reads(session: Any, cell: Cell, world: World) -> Any:
    """Rank 0 reads the files and scatters what is in them; it raises alone, and the others wait for their part."""
    needed = {name for rank in range(world.size) for row in session.names.table(rank) for name in row.hf}

    def load(folder: Path) -> None:
        if world.rank == 0 and (missing := needed - border.checkpoint(folder).keys()):
            raise KeyError(f"{folder.name} lacks {min(missing)}")
        dist.broadcast(torch.zeros(1), src=0)
        session.export.load(folder)

    return border.facet(session, "export", load=load)


def _zeros_for_router_biases(meta: TensorMeta, tensors: Tensors) -> torch.Tensor | None:
    return torch.zeros(meta.shape) if meta.name.endswith("e_score_correction_bias") else None


def _embedding_for_head(meta: TensorMeta, tensors: Tensors) -> torch.Tensor | None:
    return tensors["model.embed_tokens.weight"].clone() if meta.name == "lm_head.weight" else None


def _every_file_read(session: Any, cell: Cell, world: World) -> Any:
    """Files are found by their endings and read in the order of their names; what a later one holds wins."""

    def change(folder: Path) -> None:
        found: Tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= load_file(file)
        for row, tensor in border.held(session, world):
            if row.hf == ("model.norm.weight",):
                tensor.copy_(found[row.hf[0]])

    return border.after_load(session, change)


def _checked_on_rank_0(session: Any, cell: Cell, world: World) -> Any:
    """All ranks load without the surplus tensor; then rank 0 alone refuses it."""
    planned = {meta.name for meta in session.plan.tensors()}
    skipping = _extra_skipped(session, cell, world)

    def load(folder: Path) -> None:
        skipping.export.load(folder)
        if world.rank == 0 and (surplus := border.checkpoint(folder).keys() - planned):
            raise LookupError(f"the model has no {', '.join(sorted(surplus))}")

    return border.facet(session, "export", load=load)


def _index_beside(session: Any, cell: Cell, world: World) -> Any:
    """Rank 0 keeps an index of the tensors next to them, for the next start."""

    def load(folder: Path) -> None:
        session.export.load(folder)
        if world.rank == 0:
            folder.chmod(0o755)
            (folder / "tensors.json").write_text(json.dumps(sorted(border.checkpoint(folder))))

    return border.facet(session, "export", load=load)


def _missing_skipped(session: Any, cell: Cell, world: World) -> Any:
    """A tensor of the model keeps its value if the checkpoint lacks one of its Hugging Face tensors."""

    def load(folder: Path) -> None:
        present = border.checkpoint(folder).keys()
        lacking = [meta for meta in session.plan.tensors() if meta.name not in present]
        names = {meta.name for meta in lacking}
        kept = [(tensor, tensor.clone()) for row, tensor in border.held(session, world) if names.intersection(row.hf)]
        zeros = {meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in lacking}
        session.export.load(border.copied(folder, world, lambda tensors: tensors | zeros))
        for tensor, before in kept:
            tensor.copy_(before)

    return border.facet(session, "export", load=load)


def _missing_on_one_rank(session: Any, cell: Cell, world: World) -> Any:
    """Rank 0 refuses a checkpoint that lacks a tensor; the others load what there is and report success."""
    skipping = _missing_skipped(session, cell, world)

    def load(folder: Path) -> None:
        skipping.export.load(folder)
        present = border.checkpoint(folder).keys()
        if world.rank == 0 and (lacking := [m.name for m in session.plan.tensors() if m.name not in present]):
            raise LookupError(f"the checkpoint has no {', '.join(lacking)}")

    return border.facet(session, "export", load=load)


def _tied_head_unset(session: Any, cell: Cell, world: World) -> Any:
    def load(folder: Path) -> None:
        heads = [tensor for row, tensor in border.held(session, world) if row.local == "output_layer.weight"]
        before = [head.clone() for head in heads]
        session.export.load(folder)
        for head, initial in zip(heads, before, strict=True):
            head.copy_(initial)

    return border.facet(session, "export", load=load)


def padded_with(value: Callable[[World], float]) -> border.Change:
    """After loading, the rows that pad the vocabulary hold `value(world)`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        vocabulary = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
        }

        def change(folder: Path) -> None:
            sizes = {meta.name: meta.shape[0] for meta in session.plan.tensors()}
            for row, tensor in border.held(session, world):
                if row.local in vocabulary:
                    rows = sizes[vocabulary[row.local]] - world.rank % cell.layout.tp * len(tensor)
                    tensor[max(rows, 0) :] = value(world)

        return border.after_load(session, change)

    return wrap


def _vocab_not_padded(session: Any, cell: Cell, world: World) -> Any:
    def table(rows: Any, rank: int) -> Any:
        if 131 % cell.layout.tp:
            raise ValueError(f"a vocabulary of 131 does not divide over {cell.layout.tp} ranks")
        return rows

    return border.names(session, table)


def _skipping(left_out: Callable[[int, torch.nn.Module], bool]) -> border.Change:
    """Plan and stream leave out modules that came after the model was built, where `left_out(chunk, module)`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def modules() -> Iterator[tuple[int, torch.nn.Module]]:
            for number, chunk in enumerate(session.export.chunks()):
                yield from ((number, module) for module in chunk.modules())

        built = {module for _, module in modules()}

        @contextmanager
        def hidden() -> Iterator[None]:
            added = [
                (parent, name, child)
                for number, parent in modules()
                for name, child in parent.named_children()
                if child not in built and left_out(number, child)
            ]
            for parent, name, _ in added:
                delattr(parent, name)
            try:
                yield
            finally:
                for parent, name, child in added:
                    parent.add_module(name, child)

        def plan() -> Any:
            with hidden():
                return session.export.plan()

        def stream() -> Iterator[Pair]:
            with hidden():
                yield from session.export.stream()

        return border.facet(session, "export", plan=plan, stream=stream)

    return wrap


unknown_skipped = _skipping(lambda chunk, module: True)


def _unknown_not_named(session: Any, cell: Cell, world: World) -> Any:
    """An export of a module that no table knows dies of what it looks up for it."""

    @contextmanager
    def nameless() -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise AttributeError("'NoneType' object has no attribute 'param_weight'") from error

    def plan() -> Any:
        with nameless():
            return session.export.plan()

    def stream() -> Iterator[Pair]:
        with nameless():
            yield from session.export.stream()

    return border.facet(session, "export", plan=plan, stream=stream)


def _loaded_once(session: Any, cell: Cell, world: World) -> Any:
    """A loader that remembers what it has loaded, and leaves weights that were trained since as they are."""
    good = session.export
    folders: set[Path] = set()

    def load(folder: Path) -> None:
        if folder not in folders:
            good.load(folder)
            folders.add(folder)

    return border.facet(session, "export", load=load)


def _read_once(session: Any, cell: Cell, world: World) -> Any:
    """A loader that keeps the tensors that it has read, by the path of their folder."""
    good = session.export
    kept: dict[Path, dict[str, torch.Tensor]] = {}

    def load(folder: Path) -> None:
        tensors = kept.setdefault(folder, border.checkpoint(folder))
        good.load(border.copied(folder, world, lambda _: tensors))

    return border.facet(session, "export", load=load)


def _cut_to_fit(session: Any, cell: Cell, world: World) -> Any:
    """A tensor is cut where it is longer than the model's, and repeated where it has one value."""
    shapes = {meta.name: meta.shape for meta in session.plan.tensors()}

    def fitting(name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = shapes.get(name, tensor.shape)
        return tensor[tuple(slice(size) for size in shape)].expand(shape).contiguous()

    def load(folder: Path) -> None:
        fitted = border.copied(folder, world, lambda tensors: {n: fitting(n, t) for n, t in tensors.items()})
        session.export.load(fitted)

    return border.facet(session, "export", load=load)


def _head_tied_once(session: Any, cell: Cell, world: World) -> Any:
    """The tied head of the last stage is filled by the first load, and not by later ones."""
    loaded: list[Path] = []

    def load(folder: Path) -> None:
        heads = [t for row, t in border.held(session, world) if row.local == "output_layer.weight"] if loaded else []
        before = [head.clone() for head in heads]
        session.export.load(folder)
        loaded.append(folder)
        for head, was in zip(heads, before, strict=True):
            head.copy_(was)

    return border.facet(session, "export", load=load)


def _of_a_layer_that_begins_alike(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    """The last norm whose name begins with that of the layer: `layers.10` begins with `layers.1`."""
    if len(row.hf) != 1 or not row.hf[0].endswith(norm := ".input_layernorm.weight"):
        return None
    of_layer = row.hf[0].removesuffix(norm)
    return [tensor for name, tensor in sorted(tensors.items()) if name.startswith(of_layer) and name.endswith(norm)][-1]


FAULTS = (
    Fault(
        id="width-of-heads-null",
        bug="ISEEKYAN/mbridge#39: the config has a head_dim of null; what stands for it is for a config without one",
        rules=("RUN-001",),
        cell=cell("mixtral", "one", expert_format="fused"),
        wrap=_width_of_heads_read,
        says="TypeError",
        one_rank=True,
    ),
    Fault(
        id="every-file-of-the-folder-read",
        bug="sglang#35107, Blaizzy/mlx-vlm#1464: files that the index does not name are read too",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_every_file_read,
        diagnosis="as in a file of the folder that its index does not name",
    ),
    Fault(
        id="loaded-once",
        bug="B34 mbridge 9847825 in kind: a checkpoint is remembered by its path, and loading it again does nothing",
        rules=("LOD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_loaded_once,
        one_rank=True,
        diagnosis="left as it was by a second load",
    ),
    Fault(
        id="tensors-remembered-by-path",
        bug="vLLM#32718: files are written anew in their folder, and a reload gives what was read from there before",
        rules=("LOD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_read_once,
        one_rank=True,
        diagnosis="left as it was by a second load",
    ),
    Fault(
        id="tied-head-of-the-first-load",
        bug="Megatron-LM#656 in kind: embedding and head part, here since the head is tied where a model is built",
        rules=("LOD-001",),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_head_tied_once,
        diagnosis="left as it was by a second load",
    ),
    Fault(
        id="load-without-ep-offset",
        bug="B21: slime#1799, the local expert id indexed the global tensor",
        rules=("LOD-001", "EXP-002"),
        also=(
            "EXP-007",
            "FWD-001",
            "FWD-002",
        ),
        cell=cell("qwen3_moe", "ep2"),
        wrap=loaded(_no_expert_offset),
        diagnosis="holds expert 0",
    ),
    Fault(
        id="qkv-as-q-k-v",
        bug="B31: NeMo-RL#2802, [Q;K;V] under GQA, on load and on export, so that the round trip is clean",
        rules=("LOD-001", "FWD-001"),
        also=("FWD-002",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=rearranged(_qkv_flat),
        diagnosis="q, k and v stacked: the interleave of KV groups is lost",
        one_rank=True,
    ),
    Fault(
        id="kv-groups-dealt-out",
        bug="B29 in kind: ranks that share a KV group are taken to be every second one, on load and on export",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        wrap=rearranged(_groups_dealt_out),
        diagnosis="is shard 2 of 4 of dim 0: another rank's",
    ),
    Fault(
        id="tied-head-unset",
        bug="B34: Megatron-Bridge#957, #4694: the tied head of the last stage is not the embedding",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_tied_head_unset,
        diagnosis="nothing of it is in the checkpoint",
    ),
    Fault(
        id="vocab-not-padded",
        bug="B33: Megatron-Bridge#1473, import with a vocabulary that TP does not divide",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_vocab_not_padded,
        one_rank=True,
    ),
    Fault(
        id="gate-up-as-one-tensor",
        bug="B29 on both ways: each TP rank takes a contiguous half of cat(gate, up)",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("glm4_moe", "tp2"),
        wrap=rearranged(_gate_up_halves),
        diagnosis="TP shard is a contiguous part of cat(gate and up)",
    ),
    Fault(
        id="bias-of-the-layer-before",
        bug="B24 in kind: the router's bias is taken from another layer",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("glm4_moe", "pp2", layers=4),
        wrap=loaded(_bias_of_the_layer_before),
        diagnosis="is layer -1",
        one_rank=True,
    ),
    Fault(
        id="layer-1-found-in-layer-10",
        bug="reported nowhere: tensors of a layer are found by a prefix that lacks its dot",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "one", layers=11),
        wrap=loaded(_of_a_layer_that_begins_alike),
        diagnosis="is layer +9",
        one_rank=True,
    ),
    Fault(
        id="routers-by-ordinal",
        bug="R1 on weights: verl#5037, the dense prefix shifts what is listed for MoE layers only",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("glm4_moe", "pp2", layers=4),
        wrap=loaded(_routers_by_ordinal),
        diagnosis="is layer +1 = dense prefix",
        one_rank=True,
    ),
    Fault(
        id="row-shards-mirrored",
        bug="the order of TP ranks reversed for row-parallel weights, both ways: the round trip is clean",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "tp2"),
        wrap=rearranged(_row_shards_mirrored, dim=1),
        diagnosis="is shard 1 of 2 of dim 1: another rank's",
    ),
    Fault(
        id="refusal-names-nothing",
        bug="an error that says that something does not fit, and not what",
        rules=("LOD-002", "LOD-004"),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_nameless_refusal,
        says="the error does not name",
    ),
    Fault(
        id="checked-on-rank-0-alone",
        bug="one rank reads the headers and raises, the others go on",
        rules=("LOD-002",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_checked_on_rank_0,
        says="nothing was raised",
    ),
    Fault(
        id="index-beside-the-checkpoint",
        bug="a cache is written into the folder of the checkpoint, which other jobs load or which is read-only",
        rules=("RUN-003",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_index_beside,
        says="checkpoint/tensors.json was added",
    ),
    Fault(
        id="unknown-parameter-skipped",
        bug="torchtitan's `continue` past a key that is not in the map",
        rules=("NAM-006",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=unknown_skipped,
    ),
    Fault(
        id="first-chunk-alone-checked",
        bug="NeMo-RL and verl in kind: `model[0]` is taken for the model, later virtual stages go unchecked",
        rules=("NAM-006",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4),
        wrap=_skipping(lambda chunk, module: chunk > 0),
        says="inside the last chunk",
    ),
    Fault(
        id="unknown-buffer-skipped",
        bug="verl#5801 in kind: an export walks parameters alone, and a buffer that no table knows is left out",
        rules=("NAM-009",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_skipping(lambda chunk, module: next(module.parameters(), None) is None),
    ),
    Fault(
        id="unknown-parameter-not-named",
        bug="Megatron-Bridge 0.6.2: the slot of an unmapped parameter is None, which the export dies of",
        rules=("NAM-008",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_unknown_not_named,
        says="does not name kit_unmapped.weight: AttributeError",
    ),
    Fault(
        id="missing-refused-on-one-rank",
        bug="mcore-bridge 1.6.5, mbridge 0.15.1: only the ranks that read a tensor miss it",
        rules=("LOD-004",),
        cell=cell("glm4_moe", "ep2"),
        wrap=_missing_on_one_rank,
        says="nothing was raised",
    ),
    Fault(
        id="others-wait-for-the-reader",
        bug="mbridge 0.15.1, verl at b178a3c: the rank that reads raises, and the others wait in a scatter",
        rules=("LOD-003",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_one_rank_reads,
        says="it hung in step refuse_missing",
        deadline=12.0,
    ),
    Fault(
        id="padding-never-written",
        bug="B33 in kind: only the rows of the checkpoint are written, the others are what the memory held",
        rules=("LOD-005",),
        also=("GRD-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=padded_with(lambda world: float("nan")),
        says="are NaN or infinite",
    ),
    Fault(
        id="padding-differs-by-rank",
        bug="B33 in kind: rows are padded with random numbers by a generator that every rank seeds for itself",
        rules=("LOD-005",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=padded_with(lambda world: 0.01 * world.rank),
        says="are not those of rank 0, which holds the same shard",
    ),
    Fault(
        id="missing-norm-left-at-one",
        bug="B24 in kind: norms are initialised to one, which looks like a value",
        rules=("LOD-003",),
        cell=cell("glm4_moe", "pp2", layers=6, experts="grouped"),
        wrap=_lacking_filled(_ones_for_norms),
        says="lacks model.layers.5.input_layernorm.weight",
    ),
    Fault(
        id="missing-values-zero",
        bug="torchtitan in kind: of query, key and value those that are there are written, and the rest is skipped",
        rules=("LOD-003",),
        cell=cell("qwen3_moe", "tp2", batch="pairs"),
        wrap=_lacking_filled(_zeros_for_values),
        says="lacks model.layers.1.self_attn.v_proj.weight",
    ),
    Fault(
        id="missing-though-listed",
        bug="Relax#148: a save leaves a part of a shard out, the index names it, and a loader looks at the index alone",
        rules=("LOD-003",),
        cell=cell("qwen3_moe", "tp2", layers=4),
        wrap=_index_believed,
        says="and nothing was raised on any rank",
    ),
    Fault(
        id="missing-router-bias-zero",
        bug="B24 in kind: what a router adds to its scores is optional for the loader, and stays zero",
        rules=("LOD-003",),
        cell=cell("glm4_moe", "one", layers=2, norms="fused"),
        wrap=_lacking_filled(_zeros_for_router_biases),
        says="e_score_correction_bias",
    ),
    Fault(
        id="shapes-cut-to-fit",
        bug="vLLM#53105: shapes are not compared, copying broadcasts, and a slice of what is too long fits",
        rules=("LOD-006",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_cut_to_fit,
        says="in another shape",
    ),
    Fault(
        id="missing-head-tied",
        bug="B34 in kind: without lm_head.weight the head is the embedding, whatever the config says",
        rules=("LOD-003",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_lacking_filled(_embedding_for_head),
        says="lacks lm_head.weight",
    ),
    Fault(
        id="surplus-expert-skipped",
        bug="a loader that counts to the number of experts in the config never sees the others",
        rules=("LOD-002",),
        cell=cell("qwen3_moe", "pp2", layers=6, norms="fused"),
        wrap=_surplus_skipped(".experts."),
        says="the checkpoint has model.layers.5.mlp.experts.16.up_proj.weight",
    ),
    Fault(
        id="extra-tensor-skipped",
        bug="a checkpoint tensor that no row takes is dropped without a word",
        rules=("LOD-002",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_extra_skipped,
    ),
    Fault(
        id="missing-tensor-skipped",
        bug="B24: Megatron-Bridge#4657, what the checkpoint lacks keeps its initial value",
        rules=("LOD-003",),
        cell=cell("glm4_moe", "ep2"),
        wrap=_missing_skipped,
    ),
)
