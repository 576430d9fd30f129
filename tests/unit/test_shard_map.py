"""The shard map over whole layouts: every tensor is somewhere, nothing twice, and owners hold what they are said to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from moeref import bridge, families
from moeref.bridge import BridgeError, ShardMap
from moeref.bridge.shard_map import hashed
from moeref.dtypes import DTYPES
from moeref.exporter import ExportError, Plan
from moeref.families import SpecNames
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
    "pp=2,vpp=2,pipeline_layout=Et|tt||tL",
    "tp=2,world=8",
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_unit_is_held_by_its_owners(name: str, text: str, tied: bool) -> None:
    shard_map = ShardMap(model(name, tie_word_embeddings=tied), Layout.parse(text))
    held: dict[str, set[int]] = {}
    for rank in range(shard_map.layout.world):
        shards = shard_map.local_shards(rank)
        keys = [(p.chunk, p.local_name) for p in shards]
        assert len(set(keys)) == len(keys)
        for p in shards:
            held.setdefault(p.param.name, set()).add(rank)
    params = {u.name for u in shard_map.global_params}
    replicas = {u.name for u in shard_map.global_params if not u.exports}
    assert held.keys() - replicas == params - replicas
    for param in shard_map.global_params:
        if param.exports:
            owners = shard_map.owners(param)
            assert len(set(owners)) == len(owners)
            assert set(owners) <= held[param.name]


@pytest.mark.parametrize("hf", ["per_expert", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("text", ["tp=2,pp=2,vpp=2,ep=2,etp=1", "ep=2,etp=2", "tp=4,cp=2,ep=4,etp=2", "tp=8,ep=8"])
def test_the_owners_shards_hold_every_element_once(name: str, hf: str, text: str) -> None:
    shard_map = ShardMap(model(name), Layout.parse(text), expert_format=hf)  # type: ignore[arg-type]
    times = {t.name: np.zeros(t.shape, dtype=int) for param in shard_map.global_params for t in param.hf}
    for param in shard_map.global_params:
        for rank in shard_map.owners(param):
            (shard,) = (p for p in shard_map.local_shards(rank) if p.param is param)
            set_here = np.zeros(shard.shape, dtype=int)
            for region in shard.regions:
                times[param.hf[region.tensor].name][region.hf_index] += 1
                set_here[region.shard_index] += 1
            assert set_here.max(initial=0) <= 1
            assert set_here.min() == 1 or param.mapping.sharding == "vocab"
    assert [name for name, counts in times.items() if (counts != 1).any()] == []


def test_a_shard_that_cannot_be_names_the_layout() -> None:
    shard_map = ShardMap(model("qwen3_moe", num_attention_heads=24, num_key_value_heads=12), Layout.parse("tp=8"))
    with pytest.raises(BridgeError, match=r"linear_qkv.*12 KV groups are neither a .* of 8 ranks \(layout tp=8,"):
        shard_map.local_shards(0)
    with pytest.raises(
        BridgeError,
        match=r"^qwen3_moe: 16 attention heads do not divide over tp=3; use a tp that divides 16 \(layout tp=3,",
    ):
        ShardMap(model("qwen3_moe"), Layout.parse("tp=3"))


@pytest.mark.parametrize("hf", ["per_expert", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_does_not_depend_on_the_layout(name: str, hf: str) -> None:
    plans = []
    for text in LAYOUTS:
        for experts in ("sequential", "grouped"):
            names = SpecNames(experts=experts)  # type: ignore[arg-type]
            plans.append(Plan(ShardMap(model(name), Layout.parse(text), names, hf)).tensors)
    assert all(plan == plans[0] for plan in plans)
    names = [t.name for t in plans[0]]
    assert len(set(names)) == len(names)
    if name == "qwen3_moe" and hf == "per_expert":
        assert len(names) == 4 * (3 * 16 + 9) + 3  # L·(3E+9)+3, as Qwen3-30B-A3B's 18,867


def test_tied_head() -> None:
    tied, untied = (model("qwen3_moe", tie_word_embeddings=t) for t in (True, False))
    for text, copies in (("tp=1", 0), ("pp=2", 1), ("pp=2,vpp=2", 1)):
        shard_map = ShardMap(tied, Layout.parse(text))
        last = [p for p in shard_map.local_shards(shard_map.layout.world - 1) if p.local_name == "output_layer.weight"]
        assert len(last) == copies
        assert all(p.param.hf[0].name == "model.embed_tokens.weight" and p.param.exports is False for p in last)
        assert all(p.param.dtype == "float32" for p in last)
        assert "lm_head.weight" not in {t.name for t in Plan(shard_map).tensors}
    assert "lm_head.weight" in {t.name for t in Plan(ShardMap(untied, Layout())).tensors}


def test_global_names_count_layers_and_experts_of_the_whole_model() -> None:
    layout = Layout.parse("pp=2,ep=4")
    shard_map = ShardMap(model("glm4_moe", num_nextn_predict_layers=1), layout)
    assert len({u.name for u in shard_map.global_params}) == len(shard_map.global_params)
    shards = {p.local_name: p.param.name for p in shard_map.local_shards(layout.expert_rank_of(etp=0, ep=3, pp=1))}
    for local, name in {
        "decoder.layers.0.input_layernorm.weight": "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight": (
            "decoder.layers.3.mlp.experts.local_experts.14.linear_fc2.weight"
        ),
        "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.2.linear_fc1.weight": (
            "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.14.linear_fc1.weight"
        ),
        "mtp.layers.0.enorm.weight": "mtp.layers.0.enorm.weight",
        "output_layer.weight": "output_layer.weight",
    }.items():
        assert shards[local] == name


def test_names_in_either_spec() -> None:
    names = {
        key: {
            p.local_name
            for p in ShardMap(model("glm4_moe"), Layout(), SpecNames(norms=key[0], experts=key[1])).local_shards(0)
        }  # type: ignore[arg-type]
        for key in (("separate", "sequential"), ("fused", "grouped"))
    }
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in names["separate", "sequential"]
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight3" in names["fused", "grouped"]
    assert "decoder.layers.0.input_layernorm.weight" in names["separate", "sequential"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names["fused", "grouped"]
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names["fused", "grouped"]
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names["fused", "grouped"]


STRINGS = ["pp=4,pipeline_layout=Ett|t|t|mL", "pp=4,pipeline_layout=Et|tt|tm|L"]
MTP_LAYOUTS = ["tp=1", "tp=2,pp=2", "pp=2,vpp=2,ep=2", *STRINGS]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_mtp_units_are_held_by_their_owners(name: str) -> None:
    m = model(name, num_nextn_predict_layers=1)
    plans = []
    for text in MTP_LAYOUTS:
        shard_map = ShardMap(m, Layout.parse(text))
        held = {(p.param.name, rank) for rank in range(shard_map.layout.world) for p in shard_map.local_shards(rank)}
        assert {u.name for u in shard_map.global_params} == {name for name, _ in held}
        assert all((param.name, rank) in held for param in shard_map.global_params for rank in shard_map.owners(param))
        plans.append(Plan(shard_map).tensors)
    assert all(plan == plans[0] for plan in plans)
    sent = [t.name for t in plans[0]]
    assert len(set(sent)) == len(sent)
    assert {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"} <= set(sent)


def test_where_mtp_layers_the_final_norm_and_the_second_embedding_are() -> None:
    names = ("embedding.word_embeddings", "decoder.final_layernorm", "output_layer", "mtp.layers.0.eh_proj")
    expected = {
        "pp=4": [names[:1], (), (), (names[0], *names[1:])],
        "pp=4,pipeline_layout=Ett|t|t|mL": [names[:1], (), names[1:2], (names[0], *names[2:])],
        "pp=4,pipeline_layout=Et|tt|tm|L": [names[:1], (), (names[0], names[1], names[3]), names[2:3]],
    }
    for text, stages in expected.items():
        shard_map = ShardMap(model("glm4_moe", num_nextn_predict_layers=1), Layout.parse(text))
        for rank, wanted in enumerate(stages):
            held = {p.local_name.removesuffix(".weight") for p in shard_map.local_shards(rank)}
            assert held & set(names) == set(wanted), (text, rank)


def test_names_of_mtp_layers() -> None:
    m = model("deepseek_v3", num_nextn_predict_layers=1)
    names = SpecNames(norms="fused", experts="grouped", mtp="transformer_layer")
    fused = {p.local_name for p in ShardMap(m, Layout(), names).local_shards(0)}
    assert {
        "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight15",
        "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight",
        "mtp.layers.0.enorm.weight",
    } <= fused
    separate = {p.local_name for p in ShardMap(m, Layout()).local_shards(0)}
    assert "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.15.linear_fc2.weight" in separate


def test_files_of_qwen3_next_have_its_mtp_layer_apart() -> None:
    layer = model("qwen3_next", num_nextn_predict_layers=1).num_layers
    files = ShardMap(model("qwen3_next", num_nextn_predict_layers=1), Layout())
    names = {param.name: [t.name for t in param.hf] for param in files.global_params if param.layer == layer}
    around = {name: hf for name, hf in names.items() if ".mtp_model_layer." not in name}
    assert around == {
        "mtp.layers.0.enorm.weight": ["mtp.pre_fc_norm_embedding.weight"],
        "mtp.layers.0.hnorm.weight": ["mtp.pre_fc_norm_hidden.weight"],
        "mtp.layers.0.eh_proj.weight": ["mtp.fc.weight"],
        "mtp.layers.0.final_layernorm.weight": ["mtp.norm.weight"],
    }
    inner = {hf for name in names.keys() - around.keys() for hf in names[name]}
    assert all(hf.startswith("mtp.layers.0.") for hf in inner)
    assert {hf.split(".")[3] for hf in inner} == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    fused = files.in_format("fused")
    assert files.for_checkpoint({"mtp.layers.0.mlp.experts.gate_up_proj"}) == fused


def test_mixtral_in_memory_says_mlp() -> None:
    names = {
        hf: {
            t.name
            for t in Plan(ShardMap(model("mixtral"), Layout(), expert_format=hf)).tensors
            if ".layers.3." in t.name
        }  # type: ignore[arg-type]
        for hf in ("per_expert", "fused")
    }
    per_expert, fused = names["per_expert"] - names["fused"], names["fused"] - names["per_expert"]
    assert all(".block_sparse_moe." in name for name in per_expert)
    assert len(per_expert) == 16 * 3 + 1
    assert {name.removeprefix("model.layers.3.mlp.") for name in fused} == {
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }


def test_names_of_latent_attention() -> None:
    names = {
        norms: {
            p.local_name.removeprefix("decoder.layers.2.")
            for p in ShardMap(m, Layout(), SpecNames(norms=norms)).local_shards(0)
        }  # type: ignore[arg-type]
        for norms in ("separate", "fused")
        for m in [model("deepseek_v3")]
    }
    assert names["separate"] - names["fused"] == {
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.kv_layernorm.weight",
        *(f"decoder.layers.{i}.self_attention.{p}_layernorm.weight" for i in (0, 1, 3) for p in ("q", "kv")),
    }
    assert {"input_layernorm.weight", "pre_mlp_layernorm.weight"} <= names["fused"]
    assert "self_attention.linear_q_up_proj.layer_norm_weight" in names["fused"]
    assert "self_attention.linear_kv_up_proj.layer_norm_weight" in names["fused"]


def test_mla_splits_up_projections_by_heads_and_keeps_the_rest_whole() -> None:
    held = {p.local_name: p.shape for p in ShardMap(model("deepseek_v3"), Layout.parse("tp=4")).local_shards(1)}
    prefix = "decoder.layers.0.self_attention.linear_"
    assert {k.removeprefix(prefix): v for k, v in held.items() if k.startswith(prefix)} == {
        "q_down_proj.weight": (26, 24),
        "q_up_proj.weight": (4 * 18, 26),
        "kv_down_proj.weight": (28, 24),
        "kv_up_proj.weight": (4 * 16, 20),
        "proj.weight": (24, 4 * 6),
    }


def test_heads_are_not_split() -> None:
    with pytest.raises(BridgeError, match="16 attention heads do not divide over tp=3"):
        ShardMap(model("deepseek_v3"), Layout.parse("tp=3"))


def test_impossible_layouts_are_refused_before_any_work() -> None:
    with pytest.raises(LayoutError, match="num_experts=16"):
        ShardMap(model("qwen3_moe"), Layout.parse("ep=3"))
    with pytest.raises(LayoutError, match="4"):
        ShardMap(model("qwen3_moe"), Layout.parse("pp=3"))


def test_ranks_of_one_position_share_their_shards() -> None:
    shard_map = ShardMap(model("qwen3_moe"), Layout.parse("tp=2,ep=2,etp=1,world=4"))
    assert [shard_map.position(rank) for rank in range(4)] == [(0, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 0), (0, 1, 1, 0)]
    assert shard_map.local_shards(0) is shard_map.local_shards(2)
    assert shard_map.local_shards(0) is not shard_map.local_shards(1)


@pytest.mark.parametrize("hf", ["per_expert", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_shard_of_a_parameter_is_the_one_its_rank_holds(name: str, hf: Any) -> None:
    shard_map = ShardMap(model(name), Layout.parse("ep=2,etp=2"), expert_format=hf)
    _, _, tp, etp = shard_map.position(1)
    for shard in shard_map.local_shards(1):
        param = shard.param
        assert shard_map.shard(param, tp if param.expert is None else etp) == (shard.shape, shard.regions)


def test_experts_with_tensors_of_their_own_are_of_one_kind_and_share_one_cut() -> None:
    files = ShardMap(model("qwen3_moe"), Layout.parse("ep=2"))
    for shard_map, kinds in ((files, 1), (files.in_format("fused"), 8)):
        held = [s for s in shard_map.local_shards(0) if s.param.layer == 1 and s.local_name.endswith("fc1.weight")]
        assert len(held) == 8
        assert len({shard_map.kind(s.param) for s in held}) == kinds
        # A large model has hundreds of thousands of them: one object for what is alike.
        assert len({id(s.regions) for s in held}) == kinds
        assert len({id(s.param.hf) for s in held}) == 9 - kinds


def test_one_map_a_format() -> None:
    shard_map = ShardMap(model("qwen3_moe"), Layout.parse("ep=2"), SpecNames(norms="fused"), divisible_by=1)
    assert shard_map.in_format("per_expert") is shard_map
    fused = shard_map.in_format("fused")
    assert fused == ShardMap(shard_map.model, shard_map.layout, shard_map.names, "fused", 1)
    assert len({shard_map, fused, fused.in_format("per_expert")}) == 2


def test_a_mapping_is_hashed_by_what_differs_within_a_family() -> None:
    for name in CONFIGS:
        table = families.mappings(model(name))
        assert len({hash(mapping) for mapping in table}) == len(set(table)) == len(table)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_names_of_a_checkpoint_say_its_format(name: str) -> None:
    files = ShardMap(model(name), Layout())
    memory = files.in_format("fused")
    names = [{t.name for param in shard_map.global_params for t in param.hf} for shard_map in (files, memory)]
    assert files.for_checkpoint(names[0]) is files
    assert memory.for_checkpoint(names[0]) == files
    if names[0] != names[1]:  # gpt-oss has one format
        assert files.for_checkpoint(names[1]) == memory
        assert files.for_checkpoint(names[1] - names[0]) == memory
    assert files.for_checkpoint({"model.layers.99.mlp.experts.gate_up_proj"}) is files


def test_the_names_of_an_mtp_layer_alone_say_the_format_too() -> None:
    files = ShardMap(model("glm4_moe", num_nextn_predict_layers=1), Layout())
    fused = files.in_format("fused")
    names = {t.name for param in fused.global_params for t in param.hf if param.layer == 4 and param.expert == 0}
    assert files.for_checkpoint(names) == fused


def _plan(
    writer: int = 0,
    layout: str = "tp=2",
    of: dict[str, Any] | None = None,
    to: dict[str, Any] | None = None,
    **facts: Any,
) -> Plan:
    return Plan(ShardMap(model("qwen3_moe", **(of or {})), Layout.parse(layout), **facts), writer, **(to or {}))


@pytest.mark.parametrize(
    "otherwise",
    [
        {"writer": 1},
        {"to": {"receivers": "share"}},
        {"to": {"receivers": "all"}},
        {"to": {"receivers": "node", "ranks_per_node": 1}},
        {"layout": "pp=2"},
        {"layout": "tp=2,order=tp-cp-ep-pp-dp"},
        {"divisible_by": 64},
        {"expert_format": "fused"},
        {"names": SpecNames(norms="fused")},
        {"names": SpecNames(experts="grouped")},
        # The same shapes, cut otherwise: half as many heads of twice the width.
        {"of": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}},
        {"of": {"tie_word_embeddings": True}},
        {"of": {"rms_norm_eps": 1e-5}},
    ],
    ids=str,
)
def test_a_plan_that_differs_has_another_digest(otherwise: dict[str, Any]) -> None:
    assert _plan().digest == _plan().digest
    assert 0 <= _plan().digest < 2**63
    assert max(hashed(number) for number in range(20)) >= 2**62  # all 63 bits are used
    assert _plan(**otherwise).digest != _plan().digest


def test_the_digest_does_not_depend_on_what_was_asked_before() -> None:
    asked = _plan()
    assert asked.shard_map.local_shards(1)
    assert asked.digest == _plan().digest


@pytest.mark.parametrize("writer", [5, 2, -1, True, None, 0.0, "0"])
def test_a_writer_that_is_no_rank_is_refused(writer: Any) -> None:
    with pytest.raises(ExportError, match=f"^writer={writer!r} is none of the 2 ranks of tp=2"):
        _plan(writer=writer)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_the_sizes_of_a_checkpoint_are_counted_without_its_tensors(family: str, expert_format: Any) -> None:
    shard_map = ShardMap(model(family), Layout.parse("tp=1"), expert_format=expert_format)
    tensors = {t.name: t for param in shard_map.global_params if param.exports for t in param.hf}.values()
    sizes = [(math.prod(t.shape), math.prod(t.shape) * DTYPES[t.dtype].bytes) for t in tensors]
    elements, size = (sum(column) for column in zip(*sizes, strict=True))
    assert shard_map.hf_sizes() == (len(tensors), elements, size)


def test_the_room_gives_what_it_lists_and_nothing_else() -> None:
    for name in bridge.__all__:
        assert getattr(getattr(bridge, name), "__name__", name) == name
    with pytest.raises(AttributeError, match=r"^module 'moeref\.bridge' has no attribute 'lod'$"):
        bridge.lod  # noqa: B018
