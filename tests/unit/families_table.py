"""README.md's table, families × what is judged × layouts, from the matrices: `python tests/unit/families_table.py`"""

from __future__ import annotations

from collections.abc import Sequence

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.requests.int4 import FAMILIES
from moeref_conformance.contract.requests.quantised import BLOCKS
from moeref_conformance.plan.matrix import load
from moeref_conformance.steps import quantised


def lines() -> list[str]:
    """The rows of the table, as Markdown."""
    cpu, static = load("cpu").cells, load("static").cells
    head = "| family | cells | layouts | checkpoints | also judged | published models, by name and shape |"
    made = [head, "|---|--:|--:|---|---|---|"]
    for family in dict.fromkeys(cell.family for cell in cpu):
        cells = [cell for cell in cpu if cell.family == family and cell.backend != "static"]
        sizes = sorted({cell.size for cell in static if cell.family == family})
        layouts = {cell.layout.text for cell in cells}
        fused = any(cell.expert_format == "fused" for cell in cells)
        fp8 = any(cell.fp8_checkpoint for cell in cells)
        int4 = any(cell.int4_checkpoint for cell in cells)
        mxfp4 = any(cell.mxfp4_checkpoint for cell in cells)
        packed = ", in FP8" * fp8 + ", in INT4" * int4 + ", in MXFP4" * mxfp4
        formats = "published" + packed + ", transformers 5's" * fused
        made.append(f"| `{family}` | {len(cells)} | {len(layouts)} | {formats} | {_also(cells)} | {', '.join(sizes)} |")
    return made


def _also(cells: Sequence[Cell]) -> str:
    has = {
        "gradients": any(cell.gradients for cell in cells),
        "bf16": any(cell.dtype == "bfloat16" for cell in cells),
        "CP": any(cell.layout.cp > 1 for cell in cells),
        "MTP": any(cell.mtp for cell in cells),
        "MTP left out": any(cell.mtp_left_out for cell in cells),
        "tied head": any(cell.tied for cell in cells),
        "replay": any(cell.replay != "off" for cell in cells),
        "router losses": any(cell.router_loss for cell in cells),
        "bias updates": any(cell.bias_update for cell in cells),
        "loss masks": any(cell.loss_mask for cell in cells),
        "optimizer steps": any(cell.optimizer_step for cell in cells),
        "FP8 blocks": any(quantised.asked(cell) and cell.family in BLOCKS for cell in cells),
        "INT4 groups": any(quantised.asked(cell) and cell.family in FAMILIES for cell in cells),
    }
    return ", ".join(name for name, judged in has.items() if judged)


if __name__ == "__main__":
    print("\n".join(lines()))
