"""Matrix files: what they expand to, and what they refuse."""

import pytest
from kit_toy import MATRIX, cells
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.plan.machine import Machine
from moeref_conformance.plan.matrix import folder, load


def test_product_order_and_ids(tmp_path):
    matrix = cells(MATRIX, tmp_path)
    assert [cell.id for cell in matrix.cells] == [
        "qwen3_moe/one/gloo",
        "qwen3_moe/tp2/gloo",
        "qwen3_moe/pp2-vpp2/gloo",
        "glm4_moe/tp2/gloo",
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in folder().glob("*.toml")))
def test_shipped_matrices_are_well_formed(name):
    assert load(name).name == name


def test_cpu_covers_every_axis_alone_and_together():
    layouts = {cell.layout_name: cell.layout for cell in load("cpu").cells if cell.backend == "gloo"}
    assert len(layouts) >= 30
    assert max(layout.world for layout in layouts.values()) == 8
    for axis in ("tp", "pp", "ep"):
        rest = [other for other in ("tp", "pp", "ep", "vpp") if other != axis]
        alone = {getattr(v, axis) for v in layouts.values() if all(getattr(v, other) == 1 for other in rest)}
        assert {2, 4, 8} <= alone
    assert any(v.tp > 1 and v.pp > 1 and v.vpp > 1 and v.ep > 1 and v.expert_tp != v.tp for v in layouts.values())
    assert any(v.pipeline_layout for v in layouts.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "reads schema 1"),
        ("tp2 = { tp = 2 }", "tp2 = { tpp = 2 }", "unknown key 'tpp'; did you mean 'tp'"),
        ("tp2 = { tp = 2 }", 'tp2 = { tp = "2" }', "tp='2' is not an int"),
        ("tp2 = { tp = 2 }", "tp2 = { tp = 0 }", "must be at least 1"),
        ("tp2 = { tp = 2 }", "tp2 = { tp = 2, world = 3 }", "not a multiple of tp·pp·cp=2"),
        ("tp2 = { tp = 2 }", "tp2 = { tp = 2, vpp = 2 }", "needs pp"),
        ("tp2 = { tp = 2 }", "tp2 = { pp = 3 }", "4 layers do not divide.*give the layout `layers`"),
        ("tp2 = { tp = 2 }", "tp2 = { tp = 2 }\nidle = {}", "'idle' is in no grid"),
        ('layout = ["tp2"]', 'layout = ["tp3"]', "unknown layout 'tp3'; did you mean 'tp2'"),
        ('layout = ["tp2"]', 'layout = ["tp2", "tp2"]', "already there"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\ndtyp = ["float32"]', "unknown key 'dtyp'; did you mean 'dtype'"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\ndtype = ["float16"]', "unknown dtype 'float16'"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\ntied = "yes"', "not true or false"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nmtp = [true]', "not a number of layers"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nnorms = ["inside"]', "unknown norms 'inside'"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nrules = ["XXX"]', "no rule starts with 'XXX'"),
        ('layout = ["tp2"]', "layout = []", "non-empty list"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nneeds = ["fp9"]', "unknown need 'fp9'; did you mean 'fp8'"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\ngpus = true', "gpus=True is not a number of GPUs"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nkernels = ["tee"]', "unknown kernels 'tee'; did you mean 'te'"),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nkernels = ["te"]', 'kernels = "te" needs norms = "fused"'),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nprecision = ["mxfp8"]', 'precision = "mxfp8" needs kernels = "te"'),
        ('layout = ["tp2"]', 'layout = ["tp2"]\nprecision = ["fp8"]', "unknown precision 'fp8'"),
    ],
)
def test_mistakes_are_refused(tmp_path, old, new, message):
    with pytest.raises(BadInput, match=message):
        cells(MATRIX.replace(old, new), tmp_path)


def test_exclusion_needs_a_reason_and_a_match(tmp_path):
    def exclude(where, reason='reason = "covered elsewhere"'):
        return cells(f"{MATRIX}\n[[exclude]]\nwhere = {where}\n{reason}", tmp_path)

    matrix = exclude('{ layout = ["tp2", "one"], family = "qwen3_moe" }')
    assert [cell.id for cell in matrix.cells] == ["qwen3_moe/pp2-vpp2/gloo", "glm4_moe/tp2/gloo"]
    assert matrix.excluded[0] == ("qwen3_moe/one/gloo", "covered elsewhere")
    assert [c.id for c in exclude("{ vpp = 2 }").cells][-1] == "glm4_moe/tp2/gloo"
    with pytest.raises(BadInput, match="matches no cell"):
        exclude("{ tp = 16 }")
    with pytest.raises(BadInput, match="'reason' is missing"):
        exclude("{ tp = 2 }", "")
    with pytest.raises(BadInput, match="reason is empty"):
        exclude("{ tp = 2 }", 'reason = " "')
    with pytest.raises(BadInput, match="unknown key 'famly'; did you mean 'family'"):
        exclude('{ famly = "x" }')


def test_text_form_of_a_layout_with_commas_in_its_string(tmp_path):
    text = MATRIX.replace("pp2-vpp2 = { pp = 2, vpp = 2 }", 'pp2-vpp2 = "pp=2,vpp=2,pipeline_layout=Et|tt,|ttt|ttL"')
    layout = cells(text, tmp_path).cells[2].layout
    assert (layout.pp, layout.vpp, layout.pipeline_layout) == (2, 2, "Et|tt,|ttt|ttL")
    written = text.replace("pp=2,vpp=2,pipeline_layout=Et|tt,|ttt|ttL", layout.text)
    assert cells(written, tmp_path).cells[2].layout == layout


def test_layers_are_part_of_the_variant(tmp_path):
    text = MATRIX.replace("pp2-vpp2 = { pp = 2, vpp = 2 }", "pp2-vpp2 = { pp = 2, embedding = true, layers = 7 }")
    assert cells(text, tmp_path).cells[2].layers == 7


def test_selection_by_id_glob_and_tag(tmp_path):
    matrix = cells(MATRIX, tmp_path)
    assert len(matrix.select([])) == 4
    assert [c.id for c in matrix.select(["*/tp2/*"])] == ["qwen3_moe/tp2/gloo", "glm4_moe/tp2/gloo"]
    assert len(matrix.select(["real"])) == 3
    with pytest.raises(BadInput, match="did you mean 'qwen3_moe/tp2/gloo'"):
        matrix.select(["qwen3_moe/tp3/gloo"])


def test_hash_follows_the_cells_and_not_the_spelling(tmp_path):
    matrix = cells(MATRIX, tmp_path)
    assert matrix.hash == cells(f"# a comment\n{MATRIX}", tmp_path).hash
    assert matrix.hash != cells(MATRIX.replace("tp2 = { tp = 2 }", "tp2 = { tp = 4 }"), tmp_path).hash
    assert matrix.hash != cells(MATRIX.replace('layout = ["tp2"]', 'layout = ["tp2"]\nrules = ["RUN"]'), tmp_path).hash


def test_unknown_matrix_names_the_shipped_ones():
    with pytest.raises(BadInput, match="did you mean 'smoke'"):
        load("smok")
    with pytest.raises(BadInput, match="cannot be read"):
        load("nowhere/x.toml")


ON_GPUS = MATRIX.replace('backend = ["gloo"]\nfamily = ["glm', 'backend = ["gpu"]\nfamily = ["glm')


def test_what_cells_need_of_a_machine_is_part_of_them(tmp_path):
    grid = 'layout = ["tp2"]\ngpus = 8\nneeds = ["deep_ep"]\nnorms = ["fused"]\nkernels = ["te"]'
    matrix = cells(ON_GPUS.replace('layout = ["tp2"]', f'{grid}\nprecision = ["", "mxfp8"]'), tmp_path)
    found = matrix.select(["glm4_moe*"])
    assert [cell.id for cell in found] == ["glm4_moe+fused-norms+te/tp2/gpu", "glm4_moe+fused-norms+te+mxfp8/tp2/gpu"]
    assert {(cell.gpus, cell.needs) for cell in found} == {(8, ("deep_ep",))}
    assert matrix.hash != cells(ON_GPUS, tmp_path).hash


def test_two_worlds_that_become_one_are_refused(tmp_path):
    matrix = cells(ON_GPUS.replace('"gpu"', '"gpu", "nccl"'), tmp_path)
    with pytest.raises(BadInput, match="glm4_moe/tp2/nccl and glm4_moe/tp2/gpu would both be glm4_moe/tp2/nccl"):
        matrix.on(Machine(gpus=("a", "b")))


def test_an_axis_at_its_default_does_not_change_the_hash(tmp_path):
    assert cells(MATRIX, tmp_path).hash == "e0043dc5"
    assert cells(MATRIX.replace('layout = ["tp2"]', 'layout = ["tp2"]\nreplay = ["off"]'), tmp_path).hash == "e0043dc5"
