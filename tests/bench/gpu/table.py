"""The figures of `bench-gpu.json` as Markdown: `python -m tests.bench.gpu.table [FILE] [--under HEADING]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.gpu.figures import Figure, path
from tests.bench.gpu.ranks import BENCHES

TITLES = {
    "grouped": "Experts: grouped GEMM and one after the other",
    "layers": "One layer: Transformer Engine and the local spec",
    "recipes": "Rows that FP8 kernels take",
    "exchange": "DeepEP and HybridEP with unequal tokens",
    "exporting": "Export to host memory",
    "replaying": "Recording and replaying routes",
    "forward": "fp32 forward on the GPU and on a CPU",
}
HEAD = "| what | figure | against | |\n| --- | ---: | --- | --- |"


def rendered(known: Mapping[str, Any], heading: str = "##") -> str:
    """Facts of the machine, then a section of Markdown for each bench, in order; what was not measured, and why."""
    facts = [f"{name}: {value}" for name, value in known.get("about", {}).items()]
    parts = ["\n".join(f"- {fact}" for fact in facts)] if facts else []
    for bench in BENCHES:
        parts += [f"{heading} {TITLES[bench]}", _body(known["benches"].get(bench, {"skipped": "not run"}))]
    return "\n\n".join(parts) + "\n"


def _body(entry: Mapping[str, Any]) -> str:
    if "skipped" in entry:
        return f"Not measured: {entry['skipped']}."
    return "\n".join([HEAD, *(_row(Figure(**figure)) for figure in entry["figures"])])


def _row(figure: Figure) -> str:
    if figure.value is None:
        value = "–"
    else:
        # What is counted is whole; everything else has three digits.
        digits = f"{figure.value:.0f}" if figure.value == int(figure.value) else f"{figure.value:.3g}"
        value = "yes" if figure.unit == "yes" else f"{digits} {figure.unit}".strip()
    cells = figure.what, value, figure.against, figure.note
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=path())
    parser.add_argument("--under", default="##", metavar="HEADING", help="marks of each section's heading")
    given = parser.parse_args()
    known = json.loads(given.file.read_text(encoding="utf-8")) if given.file.exists() else {"benches": {}}
    print(rendered(known, given.under), end="")


if __name__ == "__main__":
    main()
