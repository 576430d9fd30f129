"""Whether an environment that this project did not install has what a run imports.

`python -m moeref_conformance.plan.check_environment` prints one line, and exits with 2 if anything is missing. It
imports nothing of what it looks for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.checks import BadInput

#: Module -> its distribution, and the least version that works.
WANTED = {
    "torch": ("torch", "2.6"),
    "numpy": ("numpy", "1.26"),
    "megatron.core": ("megatron-core", "0.16"),
    "triton": ("triton", "3.2"),
    "packaging": ("packaging", "24"),
    "transformers": ("transformers", "4.57"),
    "safetensors": ("safetensors", "0.5"),
    "xxhash": ("xxhash", "3.4"),
    "rich": ("rich", "13"),
    "jinja2": ("jinja2", "3.1"),
}
#: Containers may install these under other names, so the module is enough. The others need a distribution too.
RENAMED = ("torch", "triton")


def missing() -> list[str]:
    """Each distribution that is missing or too old, in words."""
    lacking = []
    for module, (distribution, least) in WANTED.items():
        version = _version(distribution)
        if not _importable(module) or not (version or distribution in RENAMED):
            lacking.append(f"{distribution}>={least}" if least else distribution)
        elif least and version and _numbers(version) < _numbers(least):
            lacking.append(f"{distribution}>={least} (here {version})")
    return lacking


def require(*modules: str) -> None:
    """Raise BadInput, with the command that installs them, if any of these modules of WANTED is not here."""
    lacking = [WANTED[module][0] for module in modules if not _importable(module)]
    if lacking:
        said = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed here"
        raise BadInput(f"{said}; pip install 'moeref[kit]' brings what is needed")


def import_from_this_folder() -> None:
    """As with `python -m`: an adapter in the current folder can be named by module:attr."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def of_this_folder() -> str:
    """One line on a moeref in the current folder that takes the place of the installed one; empty if none does.

    Raises BadInput for a kit there that is not this one: the processes of ranks would run it.
    """
    kit, own = _found("moeref_conformance")[0], Path(__file__).resolve().parents[1]
    if kit and kit != own:
        raise BadInput(
            f"the ranks would run the kit of this folder ({kit}), and {own} is running: use `python -m "
            "moeref_conformance` to judge by that of this folder, or another folder"
        )
    here, installed = _found("moeref")
    other = here and installed and here != installed
    return f"moeref is that of this folder ({here}), not the installed one ({installed})" if other else ""


def _found(package: str) -> tuple[Path | None, Path | None]:
    """Where Python finds a package, and where it would without the current folder."""
    others = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()]
    specs = (PathFinder.find_spec(package, path) for path in (sys.path, others))
    first, second = (Path(spec.origin).resolve().parent if spec and spec.origin else None for spec in specs)
    return first, second


def lacks_transformers(cell: Cell) -> str:
    """Why the transformers here, of which the expected model is made, has none of the cell; empty if it has."""
    of_5 = cell.family in ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2")
    if cell.expert_format == "per_expert" and not of_5:
        return ""
    version = _version("transformers")
    if not version or _numbers(version) >= (5,):
        return ""
    what = cell.family if of_5 else "fused experts"
    return f"needs {what} of transformers 5; here is {version}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of the parent package; of a module that is blocked
        return False


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, itertools.takewhile(str.isdigit, version.partition("+")[0].split("."))))


def main() -> int:
    """Print what is missing, or else the versions, and give the exit code."""
    where = f"{sys.executable} (Python {sys.version.split()[0]})"
    if lacking := missing():
        print(f"{where} lacks {', '.join(lacking)}; install that there, without touching what is", file=sys.stderr)
        return 2
    have = ((distribution, _version(distribution)) for distribution, _ in WANTED.values())
    print(f"{where}: " + ", ".join(f"{name} {version}" for name, version in have if version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
