"""Changes moeref bit by bit, and lists the changes that no cell notices: what the kit does not see of a target.

A changed function is a bug in a target that is right otherwise. Only cells judge it; moeref's own tests are not run. A
change that is left makes no difference, or the difference is one that nothing asks for, or a rule has a gap.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.plan import matrix
from moeref_conformance.steps.run import run_rank
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.mutate import Mutant, applied, command, drawn, modules_of, mutants, reached

MATRIX = matrix.load("cpu")
#: Every facet of a model, and every axis of a layout, in few ranks.
CELLS = (
    *(f"qwen3_moe/{layout}/gloo" for layout in ("one", "tp2", "pp2", "cp2", "ep2")),
    *("qwen3_moe+R3/one/gloo", "qwen3_moe+R3/tp2/gloo", "glm4_moe+R3+packed/one/gloo", "qwen3_moe+R2/cp2/gloo"),
    *("qwen3_moe+loss-mask/one/gloo", "qwen3_moe+tied/ep2/gloo", "qwen3_moe+optimizer-step/one/gloo"),
    *("glm4_moe+bias-update/dp2/gloo", "glm4_moe+mtp1+loss-mask/one/gloo", "glm4_moe+mtp2+pairs+bias-update/ep2/gloo"),
    *("qwen3_moe+pairs+aux_loss/ep2/gloo", "glm4_moe+bfloat16/pp2-vpp2/gloo", "deepseek_v3/ep2/gloo"),
    *("qwen3_next/tp2/gloo", "gpt_oss+pairs/pp2-vpp2/gloo", "qwen3_moe+bfloat16+fp8-checkpoint/tp2-ep2-etp1/gloo"),
)
#: Seconds that a rank may take with a change: one that waits for ever is noticed.
DEADLINE = 60.0
REACHED, CHANGED, SEEN = "reached:", "changed:", "reached.json"


def run(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], folder: Path) -> None:
    """The rank entry: a cell with the change that its tags name, or by which it says what it reaches."""
    plain = replace(cell, tags=())
    (tag,) = cell.tags
    if tag.startswith(CHANGED):
        with applied(Mutant(*json.loads(tag.removeprefix(CHANGED)), text="")):
            run_rank(target, plain, world, inputs, folder)
        return
    modules = json.loads(tag.removeprefix(REACHED))
    for module in modules:
        importlib.import_module(module)
    with reached(modules) as since:
        run_rank(target, plain, world, inputs, folder)
        folder.joinpath(SEEN).write_text(json.dumps(sorted(since())))


@dataclass
class Cells:
    """The cells that judge changes, each with the functions that its ranks reach."""

    world: ForkedWorld
    inputs: Path
    found: dict[Cell, set[tuple[str, str]]] = field(default_factory=dict)

    def look(self, cells: list[Cell], modules: list[str]) -> None:
        """Run each cell once, and keep them, fast ones first. Raises RuntimeError for one that is red by itself."""
        seconds = dict[Cell, float]()
        for number, cell in enumerate(cells, 1):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                if red := self._red(cell, REACHED + json.dumps(modules), Path(folder)):
                    raise RuntimeError(f"{cell.id} is red without a change: {', '.join(red)}")
                seen = [json.loads(file.read_text()) for file in Path(folder).rglob(SEEN)]
            self.found[cell] = {(module, function) for one in seen for module, function in one}
            seconds[cell] = time.monotonic() - began
            print(f"{number}/{len(cells)} cells pass without a change", file=sys.stderr, flush=True)
        self.found = {cell: self.found[cell] for cell in sorted(seconds, key=seconds.__getitem__)}

    def reaching(self, mutant: Mutant) -> list[Cell]:
        """The cells whose ranks run the function of a change."""
        return [cell for cell, functions in self.found.items() if (mutant.module, mutant.function) in functions]

    def notices(self, mutant: Mutant) -> tuple[str, list[str]] | None:
        """The first cell that notices a change, and its red rules; None if no cell does."""
        tag = CHANGED + json.dumps([mutant.module, mutant.function, mutant.node])
        for cell in self.reaching(mutant):
            with tempfile.TemporaryDirectory() as folder:
                if red := self._red(cell, tag, Path(folder)):
                    return cell.id, red
        return None

    def _red(self, cell: Cell, tag: str, folder: Path) -> list[str]:
        """The red rules of the matrix in a cell. The one-rank run that layouts are compared with has the tag too."""
        bench = Bench(self.world, folder, MoerefTarget(), inputs=self.inputs, keeps=True)
        outcomes = bench.judge(replace(cell, tags=(tag,)), one_rank=True, deadline=DEADLINE)
        return [rule for rule, of in outcomes.items() if of.findings and rule in MATRIX.rules[cell.id]]


def can_be_applied(mutant: Mutant) -> bool:
    """Whether the function is there and takes the code, which it does not if that has other variables."""
    try:
        with applied(mutant):
            return True
    except (LookupError, ValueError):
        return False


def main(words: list[str]) -> int:
    """Try mutants of moeref's modules in cells, and print those that no cell notices."""
    parser = command("mutate_target", main.__doc__, ["megatron", "replay", "exporter", "bridge"])
    parser.add_argument("--cell", action="append", help=f"a pattern; {len(CELLS)} cells if none is said")
    asked = parser.parse_args(words)
    patterns = asked.cell or CELLS
    cells = [cell for cell in MATRIX.cells if any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in patterns)]
    modules = modules_of("moeref", asked.packages)
    with (
        tempfile.TemporaryDirectory() as inputs,
        ForkedWorld("moeref", entry="tests.kit.mutate_target:run", grace=1.0, deadline=DEADLINE) as world,
    ):
        world.start()
        held = Cells(world, Path(inputs))
        held.look(cells, [module.__name__ for module in modules])
        found = [mutant for module in modules for mutant in mutants(module) if held.reaching(mutant)]
        found = [mutant for mutant in found if can_be_applied(mutant)]
        chosen = drawn(found, asked)
        print(f"{len(chosen)} of {len(found)} mutants, seed {asked.seed}", flush=True)
        left, by = 0, Counter[str]()
        for number, mutant in enumerate(chosen, 1):
            if noticed := held.notices(mutant):
                by[noticed[1][0]] += 1
            else:
                left += 1
                print(f"{mutant.module}: {mutant.function}: {mutant.text}", flush=True)
            print(f"{number}/{len(chosen)} tried, {left} left", file=sys.stderr, flush=True)
    print("noticed first by " + ", ".join(f"{rule} {times}" for rule, times in by.most_common()))
    print(f"{left} of {len(chosen)} left")
    return 0


if __name__ == "__main__":
    # Under `-m` this file is a second module called __main__; go on in the importable one.
    from tests.kit.mutate_target import main as change_and_judge

    sys.exit(change_and_judge(sys.argv[1:]))
