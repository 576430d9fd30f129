"""The expected checkpoints: what transformers wrote, distinct values, two spoiled copies, logits that follow."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.published_models import published
from moeref_conformance.oracles import checkpoint, mtp, recipes, routed, spoiled, sync
from moeref_conformance.oracles.checkpoint import INDEX, check_distinct, expected
from moeref_conformance.oracles.dialect import read_config
from moeref_conformance.oracles.expected import read_checkpoint
from moeref_conformance.plan.matrix import load
from safetensors.torch import load_file

from moeref import families
from moeref import layout as layouts
from moeref.bridge import ShardMap
from moeref.megatron import precision

pytestmark = pytest.mark.cpu
#: Tokens of a sequence and the vocabulary, of families that have their own.
SHAPES = {"mixtral": (24, 134), "deepseek_v3": (24, 256), "deepseek_v32": (24, 256), "gpt_oss": (20, 131)}
FAMILIES = (
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "glm4_moe_lite",
    "mixtral",
    "minimax_m2",
    "gpt_oss",
    "glm_moe_dsa",
    "deepseek_v32",
)
VARIANTS = ({}, {"dtype": "bfloat16"}, {"tied": True}, {"expert_format": "fused"}, {"layers": 6})


def cell(family: str = "glm4_moe", **more: object) -> Cell:
    return Cell(family=family, layout_name="one", layout=Layout(), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected")


def test_no_two_tokens_have_one_hidden_state() -> None:
    """Routes are told by these. They are equal where samples begin alike, or one with the same token twice."""
    for one in {replace(one, layout=Layout(), layout_name="one") for one in load("cpu").cells if one.replay != "off"}:
        vocab = int(recipes.model(one).config.vocab_size)
        tokens_BS = checkpoint._tokens(one, vocab)
        assert bool((tokens_BS[:, 0] != tokens_BS[:, 1]).all()), one.id
        assert len(set(tokens_BS[:, 0].tolist())) == len(tokens_BS), one.id
        assert int(tokens_BS.max()) < vocab, one.id


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", VARIANTS, ids=lambda m: "+".join(map(str, m.values())) or "plain")
def test_variant(family: str, more: dict[str, object], work: Path) -> None:
    want = cell(family, **more)
    made = expected(want, work)
    check_distinct(made.tensors)
    assert made.config["num_hidden_layers"] == want.layers
    assert made.config["tie_word_embeddings"] is want.tied
    assert ("lm_head.weight" in made.tensors) is not want.tied
    fused = any("gate_up_proj" in name for name in made.tensors)
    assert fused is (want.expert_format == "fused" or family == "gpt_oss")
    widths = ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    keys = ("hidden_size", "intermediate_size", "vocab_size", *(k for k in widths if made.config.get(k)))
    sizes = [made.config[k] for k in keys]
    assert len(set(sizes)) == len(sizes) - (family == "gpt_oss")  # whose experts are square
    dtype = getattr(torch, want.dtype)
    for name, tensor in made.tensors.items():
        in_fp32 = "e_score" in name or (family == "minimax_m2" and name.endswith(".gate.weight"))
        assert tensor.dtype == (torch.float32 if in_fp32 else dtype), name
        if "e_score" in name:
            assert (tensor.bfloat16().float() != tensor).all()
    assert made.logits_BSV.shape == (2, *SHAPES.get(family, (16, 131)))
    assert made.logits_BSV.dtype == torch.float32
    assert made.tokens_BS.dtype == torch.int64


@pytest.mark.parametrize("family", FAMILIES)
def test_per_expert_files_are_sharded_with_an_index(family: str, work: Path) -> None:
    made = expected(cell(family), work)
    index = json.loads((made.dir / "checkpoint" / INDEX).read_text())
    assert set(index["weight_map"]) == set(made.tensors)
    assert len(set(index["weight_map"].values())) >= 3
    place = {name.rpartition("self_attn.")[2]: file for name, file in index["weight_map"].items() if "layers.3" in name}
    if "k_proj.weight" in place:  # the linears of latent attention Megatron has one by one
        assert place["q_proj.weight"] == place["v_proj.weight"] != place["k_proj.weight"]
    last = {"mixtral": "block_sparse_moe.experts.7.w2.weight", "gpt_oss": "mlp.experts.down_proj_bias"}
    last["minimax_m2"] = "block_sparse_moe.experts.15.w2.weight"
    assert f"model.layers.3.{last.get(family, 'mlp.experts.15.down_proj.weight')}" in made.tensors


#: Keys that transformers writes and published files lack. They decide nothing, but for the width of Mixtral's heads.
UNPUBLISHED = {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range", "use_cache"}
UNPUBLISHED_OF = {"mixtral": {"head_dim", "rope_scaling", "router_jitter_noise"}}
UNPUBLISHED_OF["minimax_m2"] = {"rope_scaling", "attention_dropout"}
UNPUBLISHED_OF["minimax_m2"] |= {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
#: transformers takes this number of experts for that of the others, where published configs have its default.
UNPUBLISHED_OF |= {family: {"num_experts"} for family in ("glm_moe_dsa", "deepseek_v32")}
#: What transformers' object has of the file it came from.
OF_FILES = {"architectures", "dtype", "transformers_version", "_name_or_path", "num_nextn_predict_layers"}


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next"])
def test_the_config_has_the_keys_of_published_ones(family: str, work: Path) -> None:
    made = expected(cell(family, mtp=int("glm" in family), dtype="bfloat16"), work).config
    like = {key for size in published().values() if size.config["model_type"] == family for key in size.config}
    assert made.keys() - like <= UNPUBLISHED | UNPUBLISHED_OF.get(family, set())
    rope = {"rope_parameters"} if family == "glm_moe_dsa" else {"rope_theta", "rope_scaling"}
    assert {"num_hidden_layers", "architectures", *rope} <= made.keys()


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next"])
def test_transformers_reads_the_model_that_it_made_from_the_published_keys(family: str, work: Path) -> None:
    from transformers import AutoConfig

    made = AutoConfig.from_pretrained(expected(cell(family), work).dir / "config").to_dict()
    made["rope_parameters"].pop("type", None)  # the older name, which transformers keeps beside its own
    want = recipes.model(cell(family)).config.to_dict()
    if family == "minimax_m2":  # the part of a head that turns is in rotary_dim, which transformers 5.12 does not read
        assert want.pop("partial_rotary_factor") == want["rope_parameters"].pop("partial_rotary_factor") == 0.75
        made["rope_parameters"].pop("partial_rotary_factor", None)
    assert {k: v for k, v in made.items() if k not in OF_FILES} == {k: v for k, v in want.items() if k not in OF_FILES}


def test_where_experts_are_fused_the_config_is_transformers_5s(work: Path) -> None:
    made = expected(cell("qwen3_moe", expert_format="fused"), work).config
    assert {"num_local_experts", "rope_parameters", "dtype"} <= made.keys()
    assert not {"num_experts", "rope_theta", "torch_dtype"} & made.keys()


@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_widths_of_experts_divide_over_8_ranks(family: str, expert_format: str) -> None:
    config = recipes.model(cell(family, expert_format=expert_format)).config
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    assert width % 8 == 0
    if (family, expert_format) == ("qwen3_moe", "fused"):  # gate and up together are less than the hidden size
        assert 2 * width < config.hidden_size


def test_mtp_layers_are_like_the_last_and_hold_the_embedding_and_the_head(work: Path) -> None:
    made, plain = expected(cell(mtp=2), work), expected(cell(), work)
    assert made.config["num_nextn_predict_layers"] == 2
    assert torch.equal(made.logits_BSV, plain.logits_BSV)
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in plain.tensors.items())
    parts = {n.removeprefix("model.layers.3.") for n in plain.tensors if n.startswith("model.layers.3.")}
    parts |= {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    parts |= {"embed_tokens.weight", "shared_head.head.weight"}
    more = made.tensors.keys() - plain.tensors.keys()
    assert more == {f"model.layers.{layer}.{part}" for layer in (4, 5) for part in parts}
    assert torch.equal(made.tensors["model.layers.5.embed_tokens.weight"], made.tensors["model.embed_tokens.weight"])
    assert made.tensors["model.layers.4.eh_proj.weight"].shape == (40, 80)
    index = json.loads((made.dir / "checkpoint" / INDEX).read_text())
    assert set(index["weight_map"]) == set(made.tensors)
    with pytest.raises(ValueError, match="untied checkpoints"):
        expected(cell(mtp=1, tied=True), work)


def test_the_mtp_layer_of_qwen3_next_is_apart_and_like_the_last(work: Path) -> None:
    made, last = expected(cell("qwen3_next", layers=4, mtp=1), work), "model.layers.3."
    assert f"{last}self_attn.q_proj.weight" in made.tensors
    parts = {f"mtp.layers.0.{n.removeprefix(last)}" for n in made.tensors if n.startswith(last)}
    around = {f"mtp.{part}.weight" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert {name for name in made.tensors if name.startswith("mtp.")} == parts | around
    assert made.tensors["mtp.fc.weight"].shape == (40, 80)
    left_out = expected(replace(cell("qwen3_next", layers=4), mtp_left_out=True), work)
    assert (left_out.left_out, left_out.config["num_nextn_predict_layers"]) == (("mtp.",), 1)


def test_scales_in_fp8_are_in_another_file_than_their_weights(work: Path) -> None:
    made = expected(cell("qwen3_moe", dtype="bfloat16", fp8_checkpoint=True), work)
    places = json.loads((made.dir / "checkpoint" / INDEX).read_text())["weight_map"]
    scales = {name: place for name, place in places.items() if name.endswith("_scale_inv")}
    assert scales
    assert all(place != places[name.removesuffix("_scale_inv")] for name, place in scales.items())
    assert made.tensors.keys() == places.keys() - scales.keys()
    assert {str(tensor.dtype) for tensor in made.tensors.values()} == {"torch.bfloat16"}
    assert made.missing in scales
    assert made.unlike in scales
    with pytest.raises(ValueError, match="a checkpoint in FP8 has a recipe for"):
        expected(cell("qwen3_moe", fp8_checkpoint=True), work)


def test_every_kind_of_tensor_is_missing_in_one_variant_and_too_many_in_another() -> None:
    cells = {made.variant: made for made in load("cpu").cells}.values()
    for kinds in (spoiled.missing_kinds, spoiled.surplus_kinds, spoiled.unlike_kinds):
        assert {spoiled.chosen(made, kinds(made)) for made in cells} == {k for made in cells for k in kinds(made)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_every_kind_has_a_name(family: str, expert_format: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cell(family)
    tensors = expected(one, work).tensors
    if expert_format == "fused" or family == "gpt_oss":
        one = replace(one, expert_format="fused")
        tensors = {**tensors, "model.layers.3.mlp.experts.down_proj": torch.ones(1)}
    lacking, held = set(), set()
    for kinds, names in ((spoiled.missing_kinds(one), lacking), (spoiled.surplus_kinds(one), held)):
        for kind in kinds:
            monkeypatch.setattr(spoiled, "chosen", lambda cell, kinds, kind=kind: kind)
            names.add(spoiled.missing(one, tensors) if names is lacking else spoiled.surplus(one, tensors)[0])
        assert len(names) == len(kinds)
    for kind in spoiled.unlike_kinds(one):
        monkeypatch.setattr(spoiled, "chosen", lambda cell, kinds, kind=kind: kind)
        name, tensor = spoiled.unlike(one, tensors)
        assert tensor.shape != tensors[name].shape
    assert lacking <= tensors.keys()
    assert not held & tensors.keys()


@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_spoiled_copies(expert_format: str, work: Path) -> None:
    made = expected(cell(expert_format=expert_format), work)
    extra = read_checkpoint(Path(made.inputs["checkpoint_extra"]))
    missing = read_checkpoint(Path(made.inputs["checkpoint_missing"]))
    unlike = read_checkpoint(Path(made.inputs["checkpoint_unlike"]))
    assert set(extra) - set(made.tensors) == {made.extra}
    assert set(made.tensors) - set(missing) == {made.missing}
    assert {name for name, tensor in made.tensors.items() if unlike[name].shape != tensor.shape} == {made.unlike}
    assert extra[made.extra].dtype == made.tensors[made.missing].dtype
    for name, tensor in made.tensors.items():
        assert torch.equal(extra[name], tensor)
    for folder, tensors in (("checkpoint_extra", extra), ("checkpoint_missing", missing)):
        index = made.dir / folder / INDEX
        if expert_format == "per_expert":
            data = json.loads(index.read_text())
            listed = {made.missing} if tensors is missing and spoiled.is_listed(cell()) else set()
            assert set(data["weight_map"]) == set(tensors) | listed
            assert data["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_it_back_to_the_same_logits(family: str, work: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = expected(cell(family), work)
    folder = made.inputs["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder, config=read_config(folder), attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(model(made.tokens_BS).logits, made.logits_BSV)


def test_spellings_hold_the_same_weights(work: Path) -> None:
    per_expert, fused = expected(cell(), work), expected(cell(expert_format="fused"), work)
    gate_up = fused.tensors["model.layers.3.mlp.experts.gate_up_proj"]
    parts = [per_expert.tensors[f"model.layers.3.mlp.experts.5.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(gate_up[5], torch.cat(parts))
    assert torch.equal(per_expert.logits_BSV, fused.logits_BSV)


def test_no_file_holds_what_a_rank_must_not_find(work: Path) -> None:
    made = expected(cell(replay="R3"), work)
    folders = {"config", "checkpoint", *(f"checkpoint_{kind}" for kind in ("extra", "missing", "unlike"))}
    assert {path.name for path in made.dir.iterdir()} == {*folders, "tokens.safetensors", "routes.safetensors"}
    assert {Path(path).name for path in made.inputs.values()} == {path.name for path in made.dir.iterdir()}
    for file in made.dir.rglob("*.safetensors"):
        assert not any(torch.equal(tensor, made.logits_BSV) for tensor in load_file(file).values())


def test_answers_are_made_again_where_another_process_left_its_files(tmp_path: Path) -> None:
    first = expected(cell(), tmp_path)
    del checkpoint._ANSWERS[tmp_path / cell().variant]
    checkpoint._read.cache_clear()
    second = expected(cell(), tmp_path)
    assert (second.dir, second.missing) == (first.dir, first.missing)
    assert torch.equal(second.logits_BSV, first.logits_BSV)
    assert not list(tmp_path.glob(".making-*"))


def test_a_file_that_the_index_does_not_name_is_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    made = expected(cell("qwen3_moe"), tmp_path)
    assert made.left_over.keys() == {"model.norm.weight"} < made.tensors.keys()
    assert not torch.equal(made.left_over["model.norm.weight"], made.tensors["model.norm.weight"])


def test_deterministic_and_cached(tmp_path: Path) -> None:
    first = expected(cell(), tmp_path / "a")
    began = time.monotonic()
    second = expected(cell(), tmp_path / "b")
    assert time.monotonic() - began < 5
    assert all(torch.equal(t, second.tensors[n]) for n, t in first.tensors.items())
    stamp = (first.dir / "checkpoint" / "config.json").stat().st_mtime_ns
    again = expected(replace(cell(), layout=Layout(tp=2), layout_name="tp2"), tmp_path / "a")
    assert again.dir == first.dir
    assert (again.dir / "checkpoint" / "config.json").stat().st_mtime_ns == stamp
    assert not list((tmp_path / "a").glob(".making-*"))


@pytest.mark.parametrize("load", ["routed", "mtp", "sync"])
def test_a_model_is_tied_though_another_thread_loads_one(
    load: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While transformers loads a model, its class ties no weights, whichever thread makes one."""
    source = expected(cell("glm4_moe"), work)
    folder = Path(source.inputs["checkpoint"])
    made, here = list[Any](), threading.current_thread()
    beside = threading.Thread(target=lambda: made.append(recipes.model(cell("qwen3_moe", tied=True))))
    begin = transformers.Glm4MoeForCausalLM.__init__

    def begin_another(model: Any, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is here:
            beside.start()
            beside.join(0.5)
        begin(model, *args, **kwargs)

    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "__init__", begin_another)
    loads = {
        "routed": lambda: routed._model.__wrapped__(str(folder), torch.float32),
        "mtp": lambda: mtp._model(source, int(source.config["num_hidden_layers"])),
        "sync": lambda: sync.model.__wrapped__(folder),
    }
    loads[load]()
    beside.join()
    assert made[0].lm_head.weight is made[0].model.embed_tokens.weight


def test_loading_leaves_the_default_dtype_of_all_threads(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = expected(cell("glm4_moe", dtype="bfloat16"), work).inputs["checkpoint"]
    begin, seen = transformers.Glm4MoeForCausalLM.__init__, list[torch.dtype]()

    def look(model: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(torch.get_default_dtype())
        begin(model, *args, **kwargs)

    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "__init__", look)
    model = routed._model.__wrapped__(folder, torch.bfloat16)
    assert seen == [torch.float32]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family llama has no recipe"):
        expected(cell("llama"), tmp_path)
    with pytest.raises(ValueError, match="dtype int8 has no recipe"):
        expected(cell(dtype="int8"), tmp_path)


def test_equal_rows_are_noticed() -> None:
    row = torch.randn(1, 4)
    with pytest.raises(ValueError, match=r"b\[0\] equals a\[1\]"):
        check_distinct({"a": torch.cat([torch.randn(1, 4), row]), "b": row})


def test_the_fp8_model_has_sizes_that_every_recipe_takes(work: Path) -> None:
    cells = [cell for cell in load("gpu").cells if cell.precision]
    made = expected(cells[0], work)
    check_distinct(made.tensors)
    model = families.read(made.dir / "checkpoint", "bfloat16")
    for layout, recipe in {(cell.layout.text, cell.precision) for cell in cells}:
        at = layouts.Layout.parse(layout)
        table = ShardMap(model, at, families.SpecNames(norms="fused", experts="grouped"))
        config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)
        for rank in range(at.world):
            precision.check_widths(table, rank, config)
        precision.check_length(config, at, made.tokens_BS.shape[1])


def test_under_cp_heads_have_a_width_that_transformer_engine_takes(work: Path) -> None:
    cells = [cell for cell in load("gpu").cells if cell.kernels == "te" and cell.layout.cp > 1]
    assert {expected(cell, work).config["head_dim"] % 8 for cell in cells} == {0}


def test_a_family_without_sizes_for_fp8_is_named(work: Path) -> None:
    with pytest.raises(ValueError, match="family glm4_moe has no sizes for FP8"):
        expected(cell(precision="mxfp8"), work)
