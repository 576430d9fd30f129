"""The brute-force placement: stages by hand, shards that put together give the checkpoint, names without a home."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import handmade
import pytest
import torch
from moeref_conformance.api import Cell, Layout
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.placement import Placement, Unknown, plain_local, stage_layers

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected")


def cell(family: str = "glm4_moe", layers: int = 8, tied: bool = False, spelling: str = "per_expert", **layout: object):
    at = Layout(**layout)  # type: ignore[arg-type]
    return Cell(family=family, layout_name="x", layout=at, layers=layers, tied=tied, spelling=spelling)


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
        (7, {"pp": 2, "vpp": 2, "layout": "Et|tt|tt|ttL"}, [[0], [3, 4], [1, 2], [5, 6]]),
        (8, {"pp": 4, "layout": "Ett|ttt|tt|tL"}, [[0, 1], [2, 3, 4], [5, 6], [7]]),
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


Source = tuple[tuple[str, ...], int | None]


def by_source(placed: Placement) -> dict[Source, dict[tuple[int, int], torch.Tensor]]:
    """(hf names, expert) -> {(tp, etp): shard}; ranks with equal coordinates must agree."""
    found: dict[Source, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for rank in range(placed.layout.world):
        at = placed.coords(rank)
        for chunk, local in handmade.local_names(placed, rank):
            held = placed.held(rank, chunk, local, handmade.vocabulary_shape(placed))
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
@pytest.mark.parametrize("spelling", ["per_expert", "fused"])
def test_shards_together_are_the_checkpoint(layout: dict[str, int], spelling: str, work: Path) -> None:
    placed = oracle(work, spelling=spelling, **layout)
    seen: set[str] = set()
    for (names, expert), shards in by_source(placed).items():
        seen |= set(names)
        size, axis = (placed.layout.tp, 0) if expert is None else (placed.layout.expert_tp, 1)
        parts = [next(t for at, t in shards.items() if at[axis] == i) for i in range(size)]
        full = [placed.tensors[n] for n in names]
        if expert is not None and spelling == "fused":
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
            homes |= set(placed.held(rank, chunk, local, handmade.vocabulary_shape(placed)).hf)
        assert placed.hf_names(rank) == homes


def test_tied_head_on_the_last_stage_is_a_replica(work: Path) -> None:
    placed = oracle(work, tied=True, tp=2, pp=2)
    shape = handmade.vocabulary_shape(placed)
    last = next(r for r in range(4) if placed.coords(r) == {**placed.coords(r), "pp": 1, "tp": 1})
    head = placed.held(last, 0, "output_layer.weight", shape)
    assert not head.read
    assert head.hf == ()
    assert head.rows == 65
    assert torch.equal(head.tensor[:65], placed.tensors["model.embed_tokens.weight"][66:])


def test_grouped_and_wrapped_spellings(work: Path) -> None:
    placed = oracle(work, ep=4)
    a = placed.held(2, 0, "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight", ())
    b = placed.held(2, 0, "module.module.decoder.layers.3.mlp.experts.linear_fc1.weight1", ())
    assert (a.layer, a.expert) == (b.layer, b.expert) == (3, 9)
    assert torch.equal(a.tensor, b.tensor)
    norm = placed.held(0, 0, "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", ())
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
        held = placed.held(1, 0, prefix + local, ())
        assert held.hf == (f"model.layers.0.self_attn.{hf}.weight",)
        assert torch.equal(held.tensor, placed.tensors[held.hf[0]])
    for local, hf in (("linear_q_up_proj", "q_b_proj"), ("linear_kv_up_proj", "kv_b_proj")):
        full = placed.tensors[f"model.layers.0.self_attn.{hf}.weight"]
        parts = [placed.held(rank, 0, f"{prefix}{local}.weight", ()).tensor for rank in range(4)]
        assert torch.equal(torch.cat(parts), full)
    with pytest.raises(Unknown):
        placed.held(0, 0, prefix + "linear_qkv.weight", ())


def test_multi_token_prediction(work: Path) -> None:
    alone = {"pp": 4, "layout": "Ett|ttt|ttt|mL"}
    made = replace(cell(**alone), mtp=1)
    want = expected(made, work)
    placed = Placement(made, want.config, want.tensors)
    assert (placed.mtp, placed.final) == ((3, 0), (2, 0))
    inner = placed.held(3, 0, "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.5.linear_fc2.weight", ())
    assert (inner.layer, inner.expert) == (8, 5)
    assert torch.equal(inner.tensor, placed.tensors["model.layers.8.mlp.experts.5.down_proj.weight"])
    assert placed.held(3, 0, "mtp.layers.0.final_layernorm.weight", ()).hf == (
        "model.layers.8.shared_head.norm.weight",
    )
    for rank in (0, 3):
        held = placed.held(rank, 0, "embedding.word_embeddings.weight", (256, 40))
        assert held.hf == ("model.embed_tokens.weight", "model.layers.8.embed_tokens.weight")
        assert set(held.hf) <= placed.hf_names(rank)
    assert placed.held(2, 0, "decoder.final_layernorm.weight", ()).hf == ("model.norm.weight",)
    for rank, local in ((2, "mtp.layers.0.enorm.weight"), (3, "decoder.final_layernorm.weight")):
        with pytest.raises(Unknown):
            placed.held(rank, 0, local, ())
    assert "model.layers.8.eh_proj.weight" in placed.hf_names(3) - placed.hf_names(2)


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
        placed.held(0, 0, local, (66, 40))
    assert error.value.what == what
