"""Made-up machines: which cells of the GPU matrix run on them, in which world, and why the others do not."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import kit_toy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moeref_conformance.contract.api import Cell, Claims, Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.plan import check_environment, gpu_requirements, machine, matrix
from moeref_conformance.plan.machine import NEEDS, RECIPES, Machine
from moeref_conformance.run.machinery import Machinery
from moeref_conformance.run.runner import run

from tests import warm

GPU = matrix.load("gpu")
EVERYTHING = frozenset({*NEEDS, *RECIPES, "nccl"})
NONE = Machine(why_not={"gpu": "no NVIDIA device"})


def of(gpus: int, *has: str, ranks: int = 0) -> Machine:
    """A machine with some GPUs and packages."""
    return Machine(gpus=("H100",) * gpus, has=frozenset({"nccl", *has}), ranks=ranks)


def worlds(here: Machine, tag: str = "") -> Counter[str]:
    """Cells of the GPU matrix by world, or by the reason why they do not run."""
    cells = GPU.on(here).cells
    return Counter(here.lacks(cell) or cell.backend for cell in cells if not tag or tag in cell.tags)


def test_one_gpu_with_everything_runs_all_that_is_meant_for_one():
    assert set(worlds(of(1, *EVERYTHING), "gpu1")) == {"nccl", "gloo-cuda"}
    assert worlds(of(1, *EVERYTHING), "gpu8") == {"needs 8 GPUs, this machine has 1": 20}
    assert worlds(of(1, *EVERYTHING), "multinode") == {"needs 16 GPUs, this machine has 1": 14}
    cells = [cell for cell in GPU.on(of(1, *EVERYTHING)).cells if "gpu1" in cell.tags]
    assert {cell.backend for cell in cells if cell.layout.world == 1} == {"nccl"}
    assert {cell.backend for cell in cells if cell.layout.world > 1} == {"gloo-cuda"}
    assert len(cells) <= 125  # bearable on one GPU


def test_four_gpus_share_only_for_wider_layouts():
    for cell in GPU.on(of(4, *EVERYTHING)).cells:
        if "gpu1" in cell.tags:
            assert cell.backend == ("nccl" if cell.layout.world <= 4 else "gloo-cuda")


def test_eight_gpus_share_none():
    assert set(worlds(of(8, *EVERYTHING), "gpu1")) == set(worlds(of(8, *EVERYTHING), "gpu8")) == {"nccl"}
    assert set(worlds(of(8, *EVERYTHING), "multinode")) == {"needs 16 GPUs, this machine has 8"}


def test_sixteen_ranks_of_torchrun_run_the_whole_matrix():
    assert worlds(of(8, *EVERYTHING, ranks=16)) == {"nccl": len(GPU.cells)}
    few = of(4, *EVERYTHING, ranks=4)
    assert worlds(few, "gpu8") == {"needs 8 GPUs, torchrun started 4 ranks": 20}
    assert "needs 8 GPUs, torchrun started 4 ranks" in worlds(few, "gpu1")  # nobody shares a GPU there


def test_packages_that_are_absent_are_named():
    found = worlds(of(8))
    assert {reason for reason in found if reason.startswith("needs") and "GPUs" not in reason} == {
        "needs Transformer Engine, which is not installed here",
        "needs DeepEP, which is not installed here",
        "needs DeepEP's hybrid-ep branch, which is not installed here",
    }
    hopper = replace(
        of(1, "transformer_engine", "fp8", "delayed", "tensorwise", "blockwise"),
        why_not={"mxfp8": "which cannot be computed here: compute capability 10.0 is needed"},
    )
    assert worlds(hopper, "fp8") == {
        "nccl": 3,
        "gloo-cuda": 3,
        "needs 8 GPUs, this machine has 1": 4,
        "needs FP8 of the recipe mxfp8, which cannot be computed here: compute capability 10.0 is needed": 2,
    }
    no_nccl = Machine(gpus=("A100",), why_not={"nccl": "which this torch is built without"})
    assert worlds(no_nccl, "tied") == {"needs NCCL, which this torch is built without": 1, "gloo-cuda": 2}


def test_needs_of_a_matrix_count_like_those_of_axes():
    cell = Cell(family="qwen3_moe", layout_name="one", layout=Layout(), backend="nccl", needs=("fp8", "deep_ep"))
    assert machine.needs(cell) == ("fp8", "deep_ep")
    assert of(1, "deep_ep").lacks(cell) == "needs FP8, which is not installed here"
    assert of(1, "deep_ep", "fp8").lacks(cell) == ""


def test_on_a_cpu_nothing_of_a_gpu_runs():
    te = Cell(family="qwen3_moe", layout_name="one", layout=Layout(), backend="gloo", kernels="te", norms="fused")
    assert of(1, *EVERYTHING).lacks(te) == "needs a GPU, and world gloo has none"
    plain = replace(te, kernels="torch")
    assert NONE.lacks(plain) == of(8).lacks(plain) == ""


@given(
    gpus=st.integers(0, 9),
    has=st.frozensets(st.sampled_from(sorted(EVERYTHING))),
    ranks=st.sampled_from([0, 0, 2, 16]),
    asked=st.sampled_from(["auto", "gloo", "gloo-cuda", "nccl"]),
)
def test_a_cell_runs_only_where_all_it_needs_is_there(gpus, has, ranks, asked):
    here = Machine(gpus=("X",) * gpus, has=has, ranks=ranks if gpus else 0)
    for cell in GPU.on(here, asked).cells:
        if here.lacks(cell):
            continue
        assert cell.backend == asked or (asked == "auto" and cell.backend in ("nccl", "gloo-cuda"))
        assert set(machine.needs(cell)) <= has
        assert cell.gpus <= here.count
        if cell.backend == "gloo":
            assert not machine.needs(cell)
        else:
            assert gpus
            assert cell.backend == "gloo-cuda" or ("nccl" in has and cell.layout.world <= here.count)
            assert not (ranks and gpus and asked == "auto") or cell.backend == "nccl"


def test_a_machine_without_gpus_names_the_worlds_of_the_smallest_that_would_do():
    cells = {cell.layout_name: cell.backend for cell in GPU.on(NONE).cells if cell.variant == "qwen3_moe"}
    assert (cells["one"], cells["tp2"], cells["ep16"]) == ("nccl", "gloo-cuda", "nccl")
    assert {world for cell in GPU.on(NONE).cells if "gpu8" in cell.tags for world in [cell.backend]} == {"nccl"}


@pytest.mark.parametrize("here", [NONE, of(0), of(1), of(8), of(8, *EVERYTHING)])
def test_requirements_count_every_cell_once(here):
    rows = gpu_requirements.requirements(GPU.cells)
    assert [int(row[1]) for row in rows][-1] == len(GPU.cells) == sum(int(row[1]) for row in rows[:-1])
    for row in rows:
        for counted in row[2:]:
            assert sum(int(part.split()[0]) for part in counted.split(", ")) == int(row[1])


class AllTarget(kit_toy.Target):
    """Claims every cell of the GPU matrix."""

    claims = Claims(
        facets=frozenset({"names", "export", "forward"}),
        families=frozenset(cell.family for cell in GPU.cells),
        backends=frozenset({"static", "gloo", "gloo-cuda", "nccl"}),
        expert_formats=frozenset({"per_expert", "fused"}),
        norms=frozenset({"separate", "fused"}),
        experts=frozenset({"sequential", "grouped"}),
        dispatchers=frozenset({"alltoall", "allgather", "flex-deepep", "flex-hybridep"}),
        replay=frozenset({"off", "R2", "R3"}),
        kernels=frozenset({"torch", "te"}),
        precisions=frozenset({"", *RECIPES}),
        mtp=1,
        optimizer_steps=True,
    )


class OnlyStart(kit_toy.ToyWorld):
    """Counts how often a world of this kind was started."""

    def __init__(self):
        super().__init__()
        self.started = 0

    def __enter__(self):
        self.started += 1
        return self


def judged(folder, here, **settings):
    """Results of a toy run over the GPU matrix on a made-up machine, and the worlds that it used."""
    kit_toy.everything = AllTarget()
    sys.modules.setdefault("kit_toy", kit_toy)
    plan = kit_toy.prepared(here, target="kit_toy:everything", matrix="gpu", jobs=1, **settings)
    used = {kind: OnlyStart() for kind in ("gloo", "gloo-cuda", "nccl")}
    parts = Machinery(
        worlds={kind: lambda plan, kind=kind: used[kind] for kind in used},
        expect=lambda cell, folder: SimpleNamespace(inputs={"hf_config": str(folder)}),
        judges=dict.fromkeys(load_rules(), lambda case: kit_toy.Outcome()),
    )
    return run(plan, folder / "out", lambda *_: None, parts), used


def test_without_a_gpu_every_cell_is_untested_nothing_starts_and_the_run_is_incomplete(tmp_path):
    results, used = judged(tmp_path, NONE)
    assert results.exit_code == 3
    assert all(standing.words in ("", "undecided on") for standing in results.headline.standings)
    assert (results.headline.passing, results.headline.claimed > len(GPU.cells)) == (0, True)
    assert {v.status for v in results.verdicts} == {"untested", "unclaimed"}
    reasons = {v.reason for v in results.verdicts if v.status == "untested"}
    assert reasons == {"needs a GPU, and there is none here: no NVIDIA device"}
    assert [world.started for world in used.values()] == [0, 0, 0]
    assert "GPU" not in results.header["versions"]


def test_no_cell_is_green_that_did_not_run(tmp_path):
    here = replace(of(1), versions={"GPU": "1 × H100"})
    results, used = judged(tmp_path, here, cells=("gpu1", "gpu8"))
    ran = {cell for world in used.values() for cell in world.ran}
    green = {v.cell for v in results.verdicts if v.status == "pass"}
    assert green == {cell for cell in ran if cell in results.table}
    assert {cell.id for cell in GPU.on(here).cells if "gpu1" in cell.tags and not here.lacks(cell)} == green
    assert not any("+te" in cell or "flex" in cell for cell in green)
    assert results.exit_code == 3  # Transformer Engine and seven GPUs are wanting
    assert results.header["versions"]["GPU"] == "1 × H100"
    assert (used["nccl"].started, used["gloo-cuda"].started, used["gloo"].started) == (1, 1, 0)


def test_ranks_that_share_a_gpu_are_compared_with_one_rank_over_nccl(tmp_path):
    cells = ("qwen3_moe/tp2/gpu", "qwen3_moe/ep2/gpu")
    _, used = judged(tmp_path, of(1), cells=cells)
    assert used["nccl"].ran == ["qwen3_moe/one/nccl"]
    assert used["gloo-cuda"].ran == ["qwen3_moe/tp2/gloo-cuda", "qwen3_moe/ep2/gloo-cuda"]
    other = tmp_path / "other"
    other.mkdir()
    _, used = judged(other, of(1), cells=cells, backend="gloo-cuda")
    assert used["gloo-cuda"].ran[0] == "qwen3_moe/one/gloo-cuda"
    assert not used["nccl"].started


def test_deepep_is_compared_with_one_rank_that_needs_none(tmp_path):
    _, used = judged(tmp_path, of(8, "deep_ep"), cells=("*+flex-deepep/ep8/*",))
    assert {cell for cell in used["nccl"].ran if "/one/" in cell} == {"qwen3_moe+bfloat16+fused-norms+grouped/one/nccl"}


def test_ids_select_with_the_world_of_the_file_and_the_chosen_one(tmp_path):
    for pattern in ("qwen3_moe/tp2/gpu", "qwen3_moe/tp2/gloo-cuda"):
        plan = kit_toy.prepared(of(1), target="moeref", matrix="gpu", cells=(pattern,))
        assert [cell.id for cell in plan.cells] == ["qwen3_moe/tp2/gloo-cuda"]
    with pytest.raises(BadInput, match="no cell or tag matches"):
        kit_toy.prepared(of(2), target="moeref", matrix="gpu", cells=("qwen3_moe/tp2/gloo-cuda",))


def test_one_world_for_all_cells_with_ranks():
    plan = kit_toy.prepared(of(1), target="moeref", matrix="smoke", backend="nccl")
    assert {cell.backend for cell in plan.cells} == {"static", "nccl"}
    assert plan.lacks(plan.cells[-1]) == "needs 4 GPUs, this machine has 1"
    with pytest.raises(BadInput, match="backend='cuda' is none of auto, gloo"):
        kit_toy.prepared(of(1), target="moeref", matrix="smoke", backend="cuda")


def test_the_hash_is_that_of_the_file_whatever_the_machine():
    assert GPU.on(of(1)).hash == GPU.on(of(8)).hash == GPU.hash


def test_under_torchrun_a_cell_wider_than_its_ranks_is_untested(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = kit_toy.prepared(target="moeref", matrix="smoke", backend="gloo")
    reasons = {cell.layout.world: plan.lacks(cell) for cell in plan.cells if cell.backend == "gloo"}
    assert reasons == {1: "", 2: "", 4: "has 4 ranks, and torchrun started 2"}
    assert plan.workers == 1


def test_more_ranks_than_gpus_on_a_machine_of_torchrun_are_refused(monkeypatch):
    found = {"gpus": ["H100"] * 4, "has": ["nccl"], "why_not": {}, "versions": {}}
    monkeypatch.setattr(machine, "_ask", lambda: found)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(BadInput, match="started 8 ranks on a machine with 4 GPUs: give --nproc-per-node 4"):
        machine.detect.__wrapped__()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.detect.__wrapped__().count == 16


def test_looking_for_gpus_ends_in_facts_or_in_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = "import runpy\nrunpy.run_module('moeref_conformance.plan.machine', run_name='__main__')"
    done = warm.run(program, cwd=tmp_path, forget=["moeref_conformance"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gpus"] == []
    assert "built without CUDA" in found["why_not"]["gpu"] or "hides all of them" in found["why_not"]["gpu"]


def test_looking_for_gpus_that_breaks_is_a_reason(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "_devices", lambda: True)
    found = machine._ask()
    assert "looking for GPUs ended with exit code -6" in found["why_not"]["gpu"]
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: no such file')")
    assert machine._ask()["why_not"]["gpu"] == "torch cannot be imported: libcudart.so: no such file"


def test_the_project_s_requirements_are_what_is_looked_for():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["kit"]]
    asked += project["optional-dependencies"]["megatron"]
    names = {text.split(";")[0].strip() for text in asked if not text.startswith("moeref")}
    wanted = {f"{name}>={least}" if least else name for name, least in check_environment.WANTED.values()}
    plain = {name.split("<")[0].rstrip(",") for name in names if not name.startswith(("megatron-core", "pytest"))}
    # What judges does without shtab, which prints completions.
    assert plain - {"shtab>=1.13"} == {text for text in wanted if not text.startswith("megatron-core")}
    assert check_environment.missing() == []


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    more = {"nowhere_at_all": ("nowhere", "1.2"), "torch": ("torch", "99")}
    monkeypatch.setattr(check_environment, "WANTED", check_environment.WANTED | more)
    assert check_environment.main() == 2
    said = capsys.readouterr().err
    assert "nowhere>=1.2" in said
    assert "torch>=99 (here 2." in said
    assert said.count("\n") == 1
