"""Test vectors as data, for projects in other languages: what the oracles expect of a cell, as one JSON object.

`vectors.schema.json`, beside the files, describes them. Ranks, stages and names are megatron-core's and transformers'
own; paddings are found by counting rows; routes are those that replay is judged with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref_conformance.contract import topology
from moeref_conformance.contract.cells import Cell, Layout
from moeref_conformance.judges.seeds import formula
from moeref_conformance.oracles import dispatch, routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.placement import Placement
from moeref_conformance.oracles.stages import stage_layers

SCHEMA, VERSION = "vectors.schema.json", 1
#: Seeds and lengths of samples that vectors are given for.
SEEDS, LENGTHS = (1, 1234), (1, 13, 127, 4096)


def write(cells: Sequence[Cell], out: Path, work: Path) -> list[Path]:
    """Write one file for each cell, and the schema, into the new folder `out`. `work` keeps checkpoints meanwhile."""
    out.mkdir(parents=True)
    schema = files("moeref_conformance.contract").joinpath(SCHEMA).read_text(encoding="utf-8")
    (out / SCHEMA).write_text(schema, encoding="utf-8")
    written = []
    for cell in cells:
        written.append(out / f"{cell.id.replace('/', '__')}.json")
        written[-1].write_text(text(vectors(cell, work)), encoding="utf-8")
    return written


def text(made: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each rank."""
    ranks = ",\n  ".join(json.dumps(rank) for rank in made["ranks"])
    lines = (f" {json.dumps(key)}: " + (f"[\n  {ranks}]" if key == "ranks" else json.dumps(made[key])) for key in made)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def vectors(cell: Cell, work: Path) -> dict[str, Any]:
    """All vectors of a cell."""
    model, layout = expected(cell, work), cell.layout
    stages = sorted(stage_layers(cell).items())
    return {
        "version": VERSION,
        "cell": cell.id,
        "layout": layout.text,
        "config": model.config,
        "groups": topology.groups(layout),
        "stages": [{"pp": pp, "virtual": virtual, "layers": ids} for (pp, virtual), ids in stages],
        "ranks": [_rank(cell, model, rank) for rank in range(layout.world)],
        "padding": _padding(layout),
        "routes": _routes(model) if cell.replay == "R3" else [],
    }


def _rank(cell: Cell, model: Expected, rank: int) -> dict[str, Any]:
    """Coordinates, experts, the Hugging Face tensors of which the rank holds elements, and its seeds."""
    placed = Placement(cell, model.config, model.tensors)
    at = placed.coords(rank)
    ways = itertools.product(SEEDS, (False, True))
    return {
        "rank": rank,
        "coords": at,
        "experts": list(placed.expert_range(rank)),
        "tensors": sorted(placed.hf_names(rank)),
        "seeds": [{"seed": seed, "per_dp": per_dp, **formula(at, seed, per_dp)} for seed, per_dp in ways],
    }


def _padding(layout: Layout) -> list[dict[str, Any]]:
    """The shortest padded length of one sample, and the rows that each rank then has."""
    return [
        {"precision": precision, "length": length, "padded": padded, "rows": rows}
        for precision, wanted in dispatch.GEMM_ROWS.items()
        for length in LENGTHS
        for padded, rows in [_least(layout, length, wanted)]
    ]


def _least(layout: Layout, length: int, wanted: int) -> tuple[int, int]:
    tried = ((padded, dispatch.rank_rows(layout, (padded,), padded)) for padded in itertools.count(length))
    return next((padded, rows) for padded, rows in tried if rows is not None and rows % wanted == 0)


def _routes(model: Expected) -> list[dict[str, Any]]:
    """One set of routes by sample: experts by [token, layer, choice]; -1 is left to the router."""
    given = routed.given_routes(model, routed.SETS[0])
    return [{"sample": i, "shape": list(array.shape), "experts": array.tolist()} for i, array in enumerate(given)]
