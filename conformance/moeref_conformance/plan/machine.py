"""What this machine has that cells need: which of them it can run, on which backend, and why not the others.

`detect` asks a process of its own, because a process that has initialised CUDA cannot fork ranks any more. Transformer
Engine itself says whether FP8 can be computed.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeref_conformance.contract.backends import ANY_GPU, GPU_BACKENDS
from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.checks import BadInput

#: What a cell may need besides GPUs: its name in a matrix, and in a report.
NEEDS = {
    "transformer_engine": "Transformer Engine",
    "deep_ep": "DeepEP",
    "hybrid_ep": "DeepEP's hybrid-ep branch",
    "fp8": "FP8",
}
#: The function of Transformer Engine that tells whether an FP8 recipe can be computed.
RECIPES = {
    "delayed": "check_fp8_support",
    "tensorwise": "check_fp8_support",
    "blockwise": "check_fp8_block_scaling_support",
    "mxfp8": "check_mxfp8_support",
}
_WORDS = NEEDS | {recipe: f"FP8 of the recipe {recipe}" for recipe in RECIPES} | {"nccl": "NCCL"}
_IMPLIED = {"flex-deepep": "deep_ep", "flex-hybridep": "hybrid_ep"}
SECONDS = 120.0  # for imports of torch and Transformer Engine


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`gpus` are the names of the visible GPUs, `has` what there is of `NEEDS`, `RECIPES` and NCCL.

    `why_not` has the reason for each that is missing ("gpu" too), phrased to follow its name. `ranks` is how many
    processes torchrun started on all its machines, each with a GPU of its own; 0 without torchrun.
    """

    gpus: Sequence[str] = ()
    has: Collection[str] = ()
    why_not: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0

    @property
    def count(self) -> int:
        """Ranks that can have a GPU of their own."""
        return (self.ranks or len(self.gpus)) if self.gpus else 0

    def backend(self, cell: Cell, asked: str = "auto") -> str:
        """The backend the cell has here: `asked`, or if the cell leaves it open, NCCL where its ranks fit the GPUs.

        A machine with fewer GPUs than `cell.gpus`, or none, answers as one that has just that many.
        """
        if cell.backend == "static" or (asked == "auto" and cell.backend != ANY_GPU):
            return cell.backend
        if asked != "auto":
            return asked
        # Each process of torchrun has a GPU of its own, so none is shared.
        fits = cell.layout.world <= max(self.count, cell.gpus, 1) or bool(self.ranks)
        return "nccl" if fits else "gloo-cuda"

    def lacks(self, cell: Cell) -> str:
        """What the cell needs and this machine lacks, as a reason for the report; empty if it can run."""
        wanted = needs(cell)
        if cell.backend in GPU_BACKENDS or cell.gpus or wanted:
            if not self.count:
                return f"needs a GPU, and there is none here: {self.why_not.get('gpu', 'for no known reason')}"
            least = max(cell.gpus, cell.layout.world if cell.backend == "nccl" else 1)
            if least > self.count:
                where = f"torchrun started {self.ranks} ranks" if self.ranks else f"this machine has {self.count}"
                return f"needs {least} GPUs, {where}"
            if cell.backend not in GPU_BACKENDS:
                return f"needs a GPU, and world {cell.backend} has none"
        for need in (*wanted, *(["nccl"] if cell.backend == "nccl" else [])):
            if need not in self.has:
                return f"needs {_WORDS[need]}, {self.why_not.get(need, 'which is not installed here')}"
        return ""


def needs(cell: Cell) -> tuple[str, ...]:
    """What the cell needs besides GPUs: what its axes imply, and what its matrix says."""
    implied = ["transformer_engine"] if cell.kernels == "te" or cell.precision else []
    implied += [cell.precision] if cell.precision else []
    implied += [_IMPLIED[cell.dispatcher]] if cell.dispatcher in _IMPLIED else []
    return tuple(dict.fromkeys([*implied, *cell.needs]))


def concerned(cell: Cell) -> bool:
    """Whether the machine decides if or how the cell runs."""
    return cell.backend in (ANY_GPU, *GPU_BACKENDS) or bool(cell.gpus or needs(cell))


def started() -> int:
    """How many processes torchrun started on all machines, if it started this one; else 0."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


@functools.cache
def detect() -> Machine:
    """This machine, or under torchrun all of its machines, which are assumed to be alike.

    Raises `BadInput` if torchrun started more ranks on this machine than it has GPUs.
    """
    machine = Machine(**_ask(), ranks=started())
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if machine.ranks and machine.gpus and here > len(machine.gpus):
        have = len(machine.gpus)
        raise BadInput(f"torchrun started {here} ranks on a machine with {have} GPUs: give --nproc-per-node {have}")
    return machine


def _ask() -> dict[str, Any]:
    if not _devices():
        return _nothing("no NVIDIA device under /dev (no driver, or nothing is passed into this container)")
    # As multiprocessing does, so that the process can import what this one can.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    command, env = [sys.executable, "-m", "moeref_conformance.plan.machine"], {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, env=env)
        # Imports may print lines before it.
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _nothing(f"looking for GPUs took more than {SECONDS:g} s")
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return _nothing(f"looking for GPUs ended with exit code {done.returncode}: {last}")
    return facts


def _devices() -> bool:
    # Windows Subsystem for Linux names the device otherwise.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _nothing(why: str) -> dict[str, Any]:
    return {"gpus": [], "has": [], "why_not": {"gpu": why}, "versions": {}}


def examine() -> dict[str, Any]:
    """The facts of `Machine` about this process's machine. Initialises CUDA: not for a process that forks ranks."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return _nothing(f"torch cannot be imported: {error}")
    if why := _no_gpu(torch):
        return _nothing(why)
    facts: dict[str, Any] = {"gpus": [], "has": [], "why_not": {}, "versions": {}}
    _gpus(facts, torch)
    _nccl(facts, torch)
    _packages(facts)
    _recipes(facts)
    return facts


def _gpus(facts: dict[str, Any], torch: Any) -> None:
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        size = f"{gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        facts["gpus"].append(f"{gpu.name} ({size})")
    names = dict.fromkeys(facts["gpus"])
    facts["versions"] |= {
        "GPU": ", ".join(f"{facts['gpus'].count(name)} × {name}" for name in names),
        "driver": _driver(),
        "CUDA": str(torch.version.cuda),
    }


def _nccl(facts: dict[str, Any], torch: Any) -> None:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        facts["has"].append("nccl")
        facts["versions"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        facts["why_not"]["nccl"] = "which this torch is built without"


def _no_gpu(torch: Any) -> str:
    """Why torch sees no GPU although there are devices; empty if it sees one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all of them"
    try:
        torch.cuda.init()
        return "" if torch.cuda.device_count() else "torch counts none"
    except Exception as error:  # RuntimeError, AssertionError, and whatever the driver's libraries raise
        return str(error).strip().splitlines()[0]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # the driver's version is only told, nothing depends on it
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


def _packages(facts: dict[str, Any]) -> None:
    """Add the packages that can be imported, and why others cannot."""
    import importlib

    from moeref_conformance.contract.results import version_of

    for need, module, name, distribution in (
        ("transformer_engine", "transformer_engine.pytorch", "Linear", "transformer-engine"),
        ("deep_ep", "deep_ep", "Buffer", "deep_ep"),
        ("hybrid_ep", "deep_ep", "HybridEPBuffer", "deep_ep"),
    ):
        try:
            getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:
                facts["why_not"][need] = f"which cannot be imported here: {error}"
        except Exception as error:  # native libraries that do not load raise OSError, RuntimeError and others
            facts["why_not"][need] = f"which cannot be imported here: {str(error).splitlines()[0]}"
        else:
            facts["has"].append(need)
            facts["versions"][distribution] = version_of(distribution) or "unknown version"


def _recipes(facts: dict[str, Any]) -> None:
    """Add the FP8 recipes that can be computed, and why others cannot."""
    for recipe, function in RECIPES.items():
        able, why = _supports(function) if "transformer_engine" in facts["has"] else (False, "no Transformer Engine")
        if able:
            facts["has"].append(recipe)
        else:
            facts["why_not"][recipe] = f"which cannot be computed here: {why}"
    if "delayed" in facts["has"]:
        facts["has"].append("fp8")
    else:
        facts["why_not"]["fp8"] = facts["why_not"]["delayed"]


def _supports(function: str) -> tuple[bool, str]:
    import importlib

    # Transformer Engine 2.8 moved these functions from the second module to the first.
    for module in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        try:
            able, why = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError):  # this version has it in the other module, or does not have it
            continue
        return bool(able), str(why)
    return False, f"Transformer Engine has no {function}"


if __name__ == "__main__":
    print(json.dumps(examine()))
