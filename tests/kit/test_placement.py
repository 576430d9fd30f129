"""The brute-force placement: stages by hand, shards that put together give the checkpoint, names without a home."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import handmade
import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.placement import Placement, Unknown, plain_local, stage_layers

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected")


def cell(
    family: str = "glm4_moe", layers: int = 8, tied: bool = False, expert_format: str = "per_expert", **layout: object
):
    at = Layout(**layout)  # type: ignore[arg-type]
    return Cell(family=family, layout_name="x", layout=at, layers=layers, tied=tied, expert_format=expert_format)


def oracle(work: Path, **more: object) -> Placement:
    made = cell(**more)  # type: ignore[arg-type]
    want = expected(made, work)
    return Placement(made, want.config, want.tensors)


@pytest.mark.parametrize(
    ("layers", "layout", "stages"),
    [
        (8, {"pp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, {"pp": 2, "vpp": 2}, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (8, {"pp": 4, "first": 1, "last": 3}, [[0], [1, 2], [3, 4], [5, 6, 7]]),
        (
            12,
            {"pp": 4, "vpp": 2, "first": 2, "last": 2},
            [[0], [6], [1, 2], [7, 8], [3, 4], [9, 10], [5], [11]],
        ),
        (7, {"pp": 2, "embedding": True}, [[0, 1, 2], [3, 4, 5, 6]]),
        (6, {"pp": 4, "vpp": 2, "embedding": True, "loss": True}, [[], [3], [0], [4], [1], [5], [2], []]),
        (7, {"pp": 2, "vpp": 2, "pipeline_layout": "Et|tt|tt|ttL"}, [[0], [3, 4], [1, 2], [5, 6]]),
        (8, {"pp": 4, "pipeline_layout": "Ett|ttt|tt|tL"}, [[0, 1], [2, 3, 4], [5, 6], [7]]),
    ],
)
def test_stages(layers: int, layout: dict[str, object], stages: list[list[int]]) -> None:
    found = stage_layers(cell(layers=layers, **layout))
    assert [found[key] for key in sorted(found)] == stages


def test_the_global_virtual_size_is_put_back() -> None:
    from megatron.core import parallel_state

    before = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stage_layers(cell(pp=2, vpp=4))
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == before


def test_a_norm_over_all_heads_is_whole_or_a_ranks_heads(work: Path) -> None:
    """megatron-core has one for each head, of which no rank holds a part."""
    placed = oracle(work, family="minimax_m2", layers=2, tp=2)
    norm = placed.tensors["model.layers.0.self_attn.q_norm.weight"]
    q = "decoder.layers.0.self_attention.q_layernorm.weight"
    for rank in (0, 1):
        whole, half = (placed.shard(rank, 0, q, [rows]).tensor for rows in (128, 64))
        assert torch.equal(whole, norm)
        assert torch.equal(half, norm[64 * rank : 64 * (rank + 1)])
    placed = oracle(work, family="minimax_m2", layers=2, tp=16)  # two ranks have the same KV head
    norm = placed.tensors["model.layers.0.self_attn.k_norm.weight"]
    assert torch.equal(placed.shard(5, 0, q.replace("q_", "k_"), [8]).tensor, norm[16:24])
    placed = oracle(work, layers=2, tp=2)
    assert placed.shard(1, 0, q, [4]).tensor.shape == (8,)


Source = tuple[tuple[str, ...], int | None]


def by_source(placed: Placement) -> dict[Source, dict[tuple[int, int], torch.Tensor]]:
    """(hf names, expert) -> {(tp, etp): shard}; ranks with equal coordinates must agree."""
    found: dict[Source, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for rank in range(placed.layout.world):
        at = placed.coords(rank)
        for chunk, local in handmade.local_names(placed, rank):
            held = placed.shard(rank, chunk, local, handmade.vocabulary_shape(placed))
            if held.read:
                key = (at["tp"], at["etp"])
                assert torch.equal(found[held.hf, held.expert].setdefault(key, held.tensor), held.tensor)
    return found


LAYOUTS = [
    {},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "ep": 4, "etp": 2},
    {"ep": 2, "etp": 4},
    {"tp": 8},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: "-".join(f"{k}{v}" for k, v in at.items()) or "one")
@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_shards_together_are_the_checkpoint(layout: dict[str, int], expert_format: str, work: Path) -> None:
    placed = oracle(work, expert_format=expert_format, **layout)
    seen: set[str] = set()
    for (names, expert), shards in by_source(placed).items():
        seen |= set(names)
        size, axis = (placed.layout.tp, 0) if expert is None else (placed.layout.expert_tp, 1)
        parts = [next(t for at, t in shards.items() if at[axis] == i) for i in range(size)]
        full = [placed.tensors[n] for n in names]
        if expert is not None and expert_format == "fused":
            full = list(full[0][expert].chunk(2)) if "gate_up" in names[0] else [full[0][expert]]
        check(placed, names, full, parts)
    assert seen == set(placed.tensors)


def check(placed: Placement, names: tuple[str, ...], full: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    """Put shards together by tensor algebra, which is not how the oracle took them apart."""
    if len(full) == 3:
        heads, groups = (placed.config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        width, per = full[1].shape[0] // groups, heads // groups
        fused = torch.cat(parts).reshape(groups, per + 2, width, *full[0].shape[1:])
        assert torch.equal(fused[:, :per].reshape(full[0].shape), full[0])
        assert torch.equal(fused[:, per].reshape(full[1].shape), full[1])
        assert torch.equal(fused[:, per + 1].reshape(full[2].shape), full[2])
    elif len(full) == 2:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        assert torch.equal(torch.cat(gates), full[0])
        assert torch.equal(torch.cat(ups), full[1])
    elif parts[0].shape == full[0].shape:
        assert all(torch.equal(part, full[0]) for part in parts)
    elif "embed_tokens" in names[0] or "lm_head" in names[0]:
        joined = torch.cat(parts)
        assert torch.equal(joined[: len(full[0])], full[0])
        assert not joined[len(full[0]) :].any()
    else:
        assert torch.equal(torch.cat(parts, dim=1), full[0])


def test_names_of_a_rank_without_modules(work: Path) -> None:
    placed = oracle(work, tp=2, pp=2, vpp=2, ep=2, etp=1)
    for rank in range(placed.layout.world):
        homes: set[str] = set()
        for chunk, local in handmade.local_names(placed, rank):
            homes |= set(placed.shard(rank, chunk, local, handmade.vocabulary_shape(placed)).hf)
        assert placed.hf_names(rank) == homes


def test_tied_head_on_the_last_stage_is_a_replica(work: Path) -> None:
    placed = oracle(work, tied=True, tp=2, pp=2)
    shape = handmade.vocabulary_shape(placed)
    last = next(r for r in range(4) if placed.coords(r) == {**placed.coords(r), "pp": 1, "tp": 1})
    head = placed.shard(last, 0, "output_layer.weight", shape)
    assert not head.read
    assert head.hf == ()
    assert head.rows == 65
    assert torch.equal(head.tensor[:65], placed.tensors["model.embed_tokens.weight"][66:])


def test_grouped_and_wrapped_spellings(work: Path) -> None:
    placed = oracle(work, ep=4)
    a = placed.shard(2, 0, "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight", ())
    b = placed.shard(2, 0, "module.module.decoder.layers.3.mlp.experts.linear_fc1.weight1", ())
    assert (a.layer, a.expert) == (b.layer, b.expert) == (3, 9)
    assert torch.equal(a.tensor, b.tensor)
    norm = placed.shard(0, 0, "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", ())
    assert norm.hf == ("model.layers.1.input_layernorm.weight",)
    assert plain_local("module.module.x") == "x"


def test_latent_attention(work: Path) -> None:
    placed, prefix = oracle(work, family="deepseek_v3", tp=4), "decoder.layers.0.self_attention."
    whole = {
        "linear_q_down_proj.weight": "q_a_proj",
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm",
        "q_layernorm.weight": "q_a_layernorm",
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm",
        "kv_layernorm.weight": "kv_a_layernorm",
    }
    for local, hf in whole.items():
        held = placed.shard(1, 0, prefix + local, ())
        assert held.hf == (f"model.layers.0.self_attn.{hf}.weight",)
        assert torch.equal(held.tensor, placed.tensors[held.hf[0]])
    for local, hf in (("linear_q_up_proj", "q_b_proj"), ("linear_kv_up_proj", "kv_b_proj")):
        full = placed.tensors[f"model.layers.0.self_attn.{hf}.weight"]
        parts = [placed.shard(rank, 0, f"{prefix}{local}.weight", ()).tensor for rank in range(4)]
        assert torch.equal(torch.cat(parts), full)
    with pytest.raises(Unknown):
        placed.shard(0, 0, prefix + "linear_qkv.weight", ())


def test_gpt_oss(work: Path) -> None:
    """Pairs of columns are taken apart by reshaping, matrices turned by transposing, for two ETP ranks."""
    placed = oracle(work, family="gpt_oss", ep=2, tp=2)
    at = [next(r for r in range(4) if (c := placed.coords(r))["ep"] == 1 and c["etp"] == etp) for etp in range(2)]
    expert, hf = "decoder.layers.3.mlp.experts.local_experts.1.", "model.layers.3.mlp.experts."
    parts = {
        name: [placed.shard(rank, 0, expert + name, ()).tensor for rank in at]
        for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
    }
    for name, source in (("linear_fc1.weight", "gate_up_proj"), ("linear_fc1.bias", "gate_up_proj_bias")):
        pairs = placed.tensors[hf + source][7].T.unflatten(0, (-1, 2))
        halves = [torch.cat(both) for both in zip(*(part.chunk(2) for part in parts[name]), strict=True)]
        assert all(torch.equal(half, pairs[:, i]) for i, half in enumerate(halves))
    assert torch.equal(torch.cat(parts["linear_fc2.weight"], dim=1).T, placed.tensors[hf + "down_proj"][7])
    assert all(torch.equal(part, placed.tensors[hf + "down_proj_bias"][7]) for part in parts["linear_fc2.bias"])
    sinks = [placed.shard(r, 0, "decoder.layers.3.self_attention.core_attention.softmax_offset", ()) for r in range(4)]
    by_tp = [next(h for r, h in enumerate(sinks) if placed.coords(r)["tp"] == tp).tensor for tp in range(2)]
    assert torch.equal(torch.cat(by_tp), placed.tensors["model.layers.3.self_attn.sinks"])
    grouped = placed.shard(at[0], 0, "decoder.layers.3.mlp.experts.linear_fc1.bias1", ())
    assert (grouped.layer, grouped.expert) == (3, 7)
    assert torch.equal(grouped.tensor, parts["linear_fc1.bias"][0])


def test_gated_delta_nets(work: Path) -> None:
    """Put together by reshapes: 8 key heads of 22 channels with 2 value heads of 10 each, on 4 ranks."""
    placed, prefix = oracle(work, family="qwen3_next", layers=4, tp=4), "decoder.layers.0.self_attention."
    hf = {name.removeprefix("model.layers.0.linear_attn."): t for name, t in placed.tensors.items()}

    def parts(local: str) -> list[torch.Tensor]:
        return [placed.shard(rank, 0, prefix + local, ()).tensor for rank in range(4)]

    cuts = [part.split([44, 44, 40, 40, 4, 4]) for part in parts("in_proj.weight")]
    q, k, v, z, b, a = (torch.cat(section) for section in zip(*cuts, strict=True))
    qkvz = [q.view(8, 22, 40), k.view(8, 22, 40), v.view(8, 20, 40), z.view(8, 20, 40)]
    assert torch.equal(torch.cat(qkvz, 1).reshape(-1, 40), hf["in_proj_qkvz.weight"])
    assert torch.equal(torch.cat([b.view(8, 2, 40), a.view(8, 2, 40)], 1).reshape(-1, 40), hf["in_proj_ba.weight"])
    channels = zip(*(part.split([44, 44, 40]) for part in parts("conv1d.weight")), strict=True)
    assert torch.equal(torch.cat([torch.cat(section) for section in channels]), hf["conv1d.weight"])
    assert torch.equal(torch.cat(parts("A_log")), hf["A_log"])
    assert torch.equal(torch.cat(parts("dt_bias")), hf["dt_bias"])
    assert torch.equal(torch.cat(parts("out_proj.weight"), 1), hf["out_proj.weight"])
    assert all(torch.equal(part, hf["norm.weight"]) for part in parts("out_norm.weight"))
    with pytest.raises(Unknown):
        placed.shard(0, 0, prefix + "linear_qkv.weight", ())


def test_gated_queries(work: Path) -> None:
    placed = oracle(work, family="qwen3_next", layers=4, tp=4)
    local, hf = "decoder.layers.2.self_attention.linear_qkv.weight", "model.layers.2.self_attn."
    fused = torch.cat([placed.shard(rank, 0, local, ()).tensor for rank in range(4)]).view(8, 48, 40)
    both = torch.stack([fused[:, :16].reshape(8, 2, 8, 40), fused[:, 16:32].reshape(8, 2, 8, 40)], 2)
    assert torch.equal(both.reshape(-1, 40), placed.tensors[hf + "q_proj.weight"])
    assert torch.equal(fused[:, 32:40].reshape(-1, 40), placed.tensors[hf + "k_proj.weight"])
    assert torch.equal(fused[:, 40:].reshape(-1, 40), placed.tensors[hf + "v_proj.weight"])


def test_multi_token_prediction(work: Path) -> None:
    alone = {"pp": 4, "pipeline_layout": "Ett|ttt|ttt|mL"}
    made = replace(cell(**alone), mtp=1)
    want = expected(made, work)
    placed = Placement(made, want.config, want.tensors)
    assert (placed.mtp, placed.final) == ((3, 0), (2, 0))
    inner = placed.shard(3, 0, "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.5.linear_fc2.weight", ())
    assert (inner.layer, inner.expert) == (8, 5)
    assert torch.equal(inner.tensor, placed.tensors["model.layers.8.mlp.experts.5.down_proj.weight"])
    assert placed.shard(3, 0, "mtp.layers.0.final_layernorm.weight", ()).hf == (
        "model.layers.8.shared_head.norm.weight",
    )
    for rank in (0, 3):
        held = placed.shard(rank, 0, "embedding.word_embeddings.weight", (256, 40))
        assert held.hf == ("model.embed_tokens.weight", "model.layers.8.embed_tokens.weight")
        assert set(held.hf) <= placed.hf_names(rank)
    assert placed.shard(2, 0, "decoder.final_layernorm.weight", ()).hf == ("model.norm.weight",)
    for rank, local in ((2, "mtp.layers.0.enorm.weight"), (3, "decoder.final_layernorm.weight")):
        with pytest.raises(Unknown):
            placed.shard(rank, 0, local, ())
    assert "model.layers.8.eh_proj.weight" in placed.hf_names(3) - placed.hf_names(2)


def test_an_mtp_layer_that_files_have_apart(work: Path) -> None:
    made = replace(cell("qwen3_next", layers=4, pp=2), mtp=1)
    want = expected(made, work)
    placed = Placement(made, want.config, want.tensors)
    inner = placed.shard(1, 0, "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.5.linear_fc2.weight", ())
    assert (inner.layer, inner.expert, inner.hf) == (4, 5, ("mtp.layers.0.mlp.experts.5.down_proj.weight",))
    around = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "final_layernorm": "norm",
    }
    for local, hf in around.items():
        assert placed.shard(1, 0, f"mtp.layers.0.{local}.weight", ()).hf == (f"mtp.{hf}.weight",)
        assert placed.hf_numbers(f"mtp.{hf}.weight") == (4, None)
    assert placed.shard(1, 0, "embedding.word_embeddings.weight", (256, 40)).hf == ("model.embed_tokens.weight",)
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= placed.hf_names(1) - placed.hf_names(0)
    assert placed.hf_numbers("mtp.layers.0.mlp.experts.5.down_proj.weight") == (4, 5)
    assert placed.hf_numbers("mtp.head.weight") == (None, None)


@pytest.mark.parametrize(
    ("local", "what"),
    [
        ("decoder.layers.4.input_layernorm.weight", "layer"),
        ("decoder.layers.2.mlp.experts.local_experts.8.linear_fc1.weight", "expert"),
        ("decoder.layers.0.mlp.router.expert_bias", "module"),
        ("decoder.layers.1.self_attention.linear_kv.weight", "module"),
        ("output_layer.weight", "module"),
        ("kit_unmapped.weight", "module"),
    ],
)
def test_names_that_megatron_lacks(local: str, what: str, work: Path) -> None:
    placed = oracle(work, pp=2, ep=2)
    with pytest.raises(Unknown) as error:
        placed.shard(0, 0, local, (66, 40))
    assert error.value.what == what
