"""The table over whole layouts: every tensor is somewhere, nothing is twice, and owners own what they are said to."""

from __future__ import annotations

import pytest

from moeref.bridge import Table
from moeref.exporter import Plan
from moeref.families import Spelling
from moeref.layout import Layout, LayoutError
from tests.unit.models import CONFIGS, model

pytestmark = pytest.mark.cpu
LAYOUTS = [
    "tp=1",
    "tp=2",
    "tp=8",
    "pp=4",
    "pp=2,vpp=2",
    "ep=8",
    "tp=2,ep=4,etp=1",
    "ep=2,etp=2",
    "tp=2,pp=2,vpp=2,ep=2,etp=1",
    "tp=2,pp=2,vpp=2,ep=2,etp=2",
    "tp=2,cp=2,pp=2,ep=4,etp=1",
    "pp=2,first=1",
    "pp=2,vpp=2,layout=Et|tt||tL",
    "tp=2,world=8",
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_unit_is_held_by_its_owners(name: str, text: str, tied: bool) -> None:
    table = Table(model(name, tie_word_embeddings=tied), Layout.parse(text))
    held: dict[str, set[int]] = {}
    for rank in range(table.layout.world):
        placed = table.placed(rank)
        keys = [(p.chunk, p.local) for p in placed]
        assert len(set(keys)) == len(keys)
        for p in placed:
            held.setdefault(p.unit.name, set()).add(rank)
    units = {u.name for u in table.units}
    replicas = {u.name for u in table.units if not u.exports}
    assert held.keys() - replicas == units - replicas
    for unit in table.units:
        if unit.exports:
            owners = table.owners(unit)
            assert len(set(owners)) == len(owners)
            assert set(owners) <= held[unit.name]


@pytest.mark.parametrize("hf", ["per_expert", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_does_not_depend_on_the_layout(name: str, hf: str) -> None:
    plans = []
    for text in LAYOUTS:
        for experts in ("sequential", "grouped"):
            spelling = Spelling(experts=experts, hf=hf)  # type: ignore[arg-type]
            plans.append(Plan(Table(model(name), Layout.parse(text), spelling)).tensors)
    assert all(plan == plans[0] for plan in plans)
    names = [t.name for t in plans[0]]
    assert len(set(names)) == len(names)
    if name == "qwen3_moe" and hf == "per_expert":
        assert len(names) == 4 * (3 * 16 + 9) + 3  # L·(3E+9)+3, as Qwen3-30B-A3B's 18,867


def test_tied_head() -> None:
    tied, untied = (model("qwen3_moe", tie_word_embeddings=t) for t in (True, False))
    for text, copies in (("tp=1", 0), ("pp=2", 1), ("pp=2,vpp=2", 1)):
        table = Table(tied, Layout.parse(text))
        last = [p for p in table.placed(table.layout.world - 1) if p.local == "output_layer.weight"]
        assert len(last) == copies
        assert all(p.unit.hf[0].name == "model.embed_tokens.weight" and not p.unit.exports for p in last)
        assert "lm_head.weight" not in {t.name for t in Plan(table).tensors}
    assert "lm_head.weight" in {t.name for t in Plan(Table(untied, Layout())).tensors}


def test_spellings_of_megatron_names() -> None:
    names = {
        key: {p.local for p in Table(model("glm4_moe"), Layout(), Spelling(norms=key[0], experts=key[1])).placed(0)}  # type: ignore[arg-type]
        for key in (("apart", "sequential"), ("fused", "grouped"))
    }
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in names["apart", "sequential"]
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight3" in names["fused", "grouped"]
    assert "decoder.layers.0.input_layernorm.weight" in names["apart", "sequential"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names["fused", "grouped"]
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names["fused", "grouped"]
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names["fused", "grouped"]


def test_impossible_layouts_are_refused_before_any_work() -> None:
    with pytest.raises(LayoutError, match="num_experts=16"):
        Table(model("qwen3_moe"), Layout.parse("ep=3"))
    with pytest.raises(LayoutError, match="4"):
        Table(model("qwen3_moe"), Layout.parse("pp=3"))
