"""The audit: each kind of damage to a real tiny checkpoint of transformers is named, and no other kind is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeref import audit
from moeref.audit import AuditError, Manifest, compare
from moeref.audit.manifest import fingerprint, group, place
from moeref.cli import main
from tests.unit.deltas import bits
from tests.unit.models import SIZES

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1"
GATE, UP, DOWN = (f"{LAYER}.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down"))
Q, K, V = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models as transformers writes them: qwen3_moe with an expert a tensor, gpt_oss with gate and up fused."""
    import transformers

    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("checkpoints")
    small: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "dtype": torch.bfloat16, "attention_bias": False}
    qwen = transformers.Qwen3MoeConfig(**small, num_experts=4)
    small.pop("moe_intermediate_size")
    oss = transformers.GptOssConfig(**small | {"num_local_experts": 4, "rope_parameters": None})
    for name, config in (("qwen3_moe", qwen), ("gpt_oss", oss)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():  # what initialisation leaves at 0 or 1 would hide damage
            torch.nn.init.normal_(parameter.data)
        model.save_pretrained(folder / name, max_shard_size="200KB")
    return {name: folder / name for name in ("qwen3_moe", "gpt_oss")}


def tensors(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def qwen(checkpoints: dict[str, Path]) -> Tensors:
    return tensors(checkpoints["qwen3_moe"])


# --- damage: what is done, the kind that is said, of which tensors


def exchange(a: str, b: str) -> Callable[[Tensors], None]:
    """Tensors whose names hold `a` get those of `b`, and the reverse."""

    def damage(w: Tensors) -> None:
        old = dict(w)
        w |= {name: old[name.replace(a, b)] for name in old if a in name}
        w |= {name: old[name.replace(b, a)] for name in old if b in name}

    return damage


def on(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def damage(w: Tensors) -> None:
        w[name] = change(w[name])

    return damage


def set_rows(rows: slice, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        new[rows] = value
        return new

    return change


def unchunked(w: Tensors) -> None:
    """Two ranks' [gate | up] joined, and the halves taken for gate and up (Megatron-Bridge#1817)."""
    (g0, g1), (u0, u1) = w[GATE].chunk(2), w[UP].chunk(2)
    w[GATE], w[UP] = torch.cat([g0, u0]), torch.cat([g1, u1])


def qkv_fused_order(w: Tensors) -> None:
    """Rows of Megatron's parameter, which goes by group, cut as if all of q came first (NeMo-RL#2802)."""
    groups = SIZES["num_key_value_heads"]
    parts = [w[name].view(groups, -1, w[name].shape[1]) for name in (Q, K, V)]
    fused = torch.cat(parts, 1).flatten(0, 1)
    w[Q], w[K], w[V] = (part.clone() for part in fused.split([len(w[name]) for name in (Q, K, V)]))


def shift(w: Tensors) -> None:
    """Layer 1 holds layer 0's tensors, layer 2 layer 1's."""
    old = dict(w)
    for name in old:
        if (layer := place(name).layer) in (1, 2):
            w[name] = old[name.replace(f".{layer}.", f".{layer - 1}.", 1)]


def rename(w: Tensors) -> None:
    w["model.decoder.norm.weight"] = w.pop("model.norm.weight")


def drop(w: Tensors) -> None:
    del w[GATE]


ATTENTION = [K, Q, V]
DAMAGE: dict[str, tuple[str, Callable[[Tensors], None], list[str] | int]] = {
    "experts": ("expert", exchange(".experts.1.", ".experts.2."), 3 * 2 * 3),
    "gate and up": ("gate and up", exchange(f"{LAYER}.mlp.experts.3.gate", f"{LAYER}.mlp.experts.3.up"), [GATE, UP]),
    "layer": ("layer shift", shift, 2 * (3 * 4 + 9)),
    "transposed": ("transposed", on(DOWN, lambda t: t.t().contiguous()), [DOWN]),
    "zero": ("zero", on(GATE, torch.zeros_like), [GATE]),
    "NaN": ("NaN", on(GATE, set_rows(slice(2, 3), math.nan)), [GATE]),
    "fp32": ("dtype", on("model.norm.weight", torch.Tensor.float), ["model.norm.weight"]),
    "fp8": ("rounded", on(GATE, lambda t: t.to(torch.float8_e4m3fn)), [GATE]),
    "rounded": ("rounded", on(GATE, lambda t: t.to(torch.float8_e4m3fn).to(t.dtype)), [GATE]),
    "unchunked": ("unchunked shards", unchunked, [GATE, UP]),
    "QKV": ("QKV", qkv_fused_order, ATTENTION),
    "padded": (
        "padded rows",
        on("lm_head.weight", lambda t: torch.cat([t, torch.zeros_like(t[:5])])),
        ["lm_head.weight"],
    ),
    "rows": ("rows missing", on("lm_head.weight", lambda t: t[:-3]), ["lm_head.weight"]),
    "dimension": ("wrong dimension", on(DOWN, lambda t: torch.cat(t.chunk(4, 1))), [DOWN]),
    "ungathered rows": ("shard", on(DOWN, lambda t: t.chunk(2)[1]), [DOWN]),
    "ungathered columns": ("shard", on(DOWN, lambda t: t.chunk(4, 1)[0]), [DOWN]),
    "one shard for all": ("shard", on(DOWN, lambda t: torch.cat([t.chunk(2, 1)[1]] * 2, 1)), [DOWN]),
    "ranks reversed": ("shards", on(DOWN, lambda t: torch.cat(t.chunk(4, 1)[::-1], 1)), [DOWN]),
    "missing": ("missing", drop, [GATE]),
    "extra": ("extra", lambda w: w.update({"x": torch.ones(3)}), ["x"]),
    "one element": ("values", on(GATE, set_rows(slice(7, 8), 0.5)), [GATE]),
    "noise": ("values", on(DOWN, lambda t: t + 1), [DOWN]),
    "permuted": ("values", on(DOWN, lambda t: t.flip(0).flip(1)), [DOWN]),
    "shape": ("shape", on(DOWN, lambda t: t.flip(0).reshape(-1)), [DOWN]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_each_damage_is_named_and_no_other(case: str, qwen: Tensors, checkpoints: dict[str, Path]) -> None:
    kind, damage, names = DAMAGE[case]
    damage(qwen)
    report = compare(checkpoints["qwen3_moe"], qwen)
    assert set(report.kinds) == {kind}
    assert not report.same
    found = [finding.name for finding in report.findings]
    assert (len(found) if isinstance(names, int) else found) == names


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_healthy_checkpoint_has_no_findings(family: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoints[family]
    held = tensors(folder)
    report = compare(folder, iter(held.items()), previous=folder)
    assert report.same
    assert list(report.lines()) == [f"{len(held)} tensors expected, none not as expected"]
    for given in (folder, folder / "model.safetensors.index.json", held, Manifest.of(held.items())):
        assert compare(given, held).same


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("gate and up", lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
        ("interleaved", lambda t: torch.cat([t[..., ::2], t[..., 1::2]], -1)),
        ("unchunked shards", lambda t: t.unflatten(-1, (2, 4, -1)).transpose(-3, -2).flatten(-3)),
        ("transposed", lambda t: t.transpose(1, 2).contiguous()),
        ("expert", lambda t: t.flip(0)),
        ("expert", lambda t: torch.cat(t.chunk(2)[::-1])),  # two EP ranks in the other order
        ("expert", lambda t: t[[0, 0, 2, 3]]),
        ("shard", lambda t: t.chunk(2)[1]),
        ("values", lambda t: t.flip(-1).flip(1)),
    ],
)
def test_fused_experts(kind: str, damage: Callable[[torch.Tensor], torch.Tensor], checkpoints: dict[str, Path]) -> None:
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    held = tensors(checkpoints["gpt_oss"])
    held[name] = damage(held[name])
    (finding,) = compare(checkpoints["gpt_oss"], held).findings
    assert (finding.name, finding.kind) == (name, kind)


def test_sentences_say_where_and_what(qwen: Tensors, checkpoints: dict[str, Path]) -> None:
    exchange(".experts.1.", ".experts.2.")(qwen)
    report = compare(checkpoints["qwen3_moe"], qwen)
    assert report.findings[0].text == "holds the values of expert 2"
    assert report.counts("group")["expert"] == (36, 18)
    assert report.counts("layer")["1"] == (21, 6)
    page = list(report.lines())
    assert page[0] == "66 tensors expected, 18 not as expected"
    assert "model.layers.0.mlp.experts.1.down_proj.weight (and 5 like it): holds the values of expert 2" in page[1]
    assert page[-1] == "  by layer: 0 6 of 21, 1 6 of 21, 2 6 of 21"

    first = qwen[GATE].clone()
    qwen[GATE][7, 5] = 0.0
    qwen[GATE][8] = 0.0
    finding = next(f for f in compare(checkpoints["qwen3_moe"], qwen).findings if f.name == GATE)
    was = int(bits(first)[7 * 24 + 5]) & 0xFFFF
    assert finding.text == (
        f"25 of 1344 elements differ in rows 7 to 8, first at [7, 5]: {was:#06x} expected, 0x0000 found"
    )


def test_a_stale_version_is_known_by_the_previous_one(qwen: Tensors, checkpoints: dict[str, Path]) -> None:
    previous = {name: tensor + 1 for name, tensor in qwen.items()}
    qwen[GATE] = previous[GATE]
    for before in (previous, Manifest.of(previous.items())):
        (finding,) = compare(checkpoints["qwen3_moe"], qwen, previous=before).findings
        assert (finding.name, finding.kind) == (GATE, "stale")
    assert compare(checkpoints["qwen3_moe"], qwen).kinds == {"values": 1}


def test_a_renamed_tensor_is_found_again(qwen: Tensors, checkpoints: dict[str, Path]) -> None:
    rename(qwen)
    report = compare(checkpoints["qwen3_moe"], qwen)
    assert report.kinds == {"missing": 1, "renamed": 1}
    assert report.findings[0].text == "not expected; it holds the values of model.norm.weight, which is missing"


@pytest.mark.parametrize(("shape", "kind"), [((0, 4), "rows missing"), ((4, 0), "shape")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"])
def test_a_tensor_that_came_without_elements_has_another_shape(shape: tuple[int, ...], kind: str, name: str) -> None:
    report = compare({name: torch.ones(4, 4)}, {name: torch.empty(shape)})
    assert [finding.kind for finding in report.findings] == [kind]


def test_tensors_that_are_constant_on_both_sides_are_no_damage(qwen: Tensors) -> None:
    """Norms of ones are equal in all layers: none of them is another's, and zero is only said of what was not zero."""
    same = {name: torch.ones_like(t) if "norm" in name else t for name, t in qwen.items()}
    same[GATE] = torch.zeros_like(same[GATE])
    assert compare(same, {name: t.clone() for name, t in same.items()}).same


# --- streams and manifests


def test_streams_are_read_once_and_only_what_differs_is_kept(qwen: Tensors, checkpoints: dict[str, Path]) -> None:
    clean = {name: tensor.clone() for name, tensor in qwen.items()}
    qkv_fused_order(qwen)
    for a, b in (
        (clean, iter(qwen.items())),
        (iter(clean.items()), qwen),
        (checkpoints["qwen3_moe"], iter(qwen.items())),
    ):
        assert compare(a, b).kinds == {"QKV": 3}
    report = compare(clean, iter(qwen.items()), keep=0)
    assert report.kinds == {"values": 3}
    assert "the found side has hashes alone" in report.findings[0].text
    report = compare(iter(clean.items()), iter(qwen.items()))
    assert "the expected side has hashes alone" in report.findings[0].text


def test_a_stream_of_partly_changed_units_is_tried_with_what_did_not_change(qwen: Tensors) -> None:
    """v stays as it was, so that the stream does not keep it."""
    clean = {name: tensor.clone() for name, tensor in qwen.items()}
    qwen[V] = torch.ones_like(qwen[V])
    clean[V] = torch.ones_like(clean[V])
    clean[K] = torch.ones_like(clean[K])
    qwen[K] = torch.ones_like(qwen[K])
    assert compare(clean, iter({**qwen, Q: qwen[Q] + 1}.items())).kinds == {"values": 1}


def test_manifests_are_saved_and_tell_by_hashes(qwen: Tensors, tmp_path: Path) -> None:
    manifest = Manifest.of([*qwen.items(), ("none", None)])
    manifest.save(tmp_path / "m.json")
    assert Manifest.load(tmp_path / "m.json") == manifest
    exchange(".experts.1.", ".experts.2.")(qwen)
    assert set(compare(tmp_path / "m.json", qwen).kinds) == {"expert"}
    assert set(compare(manifest, Manifest.of(qwen.items())).kinds) == {"expert"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "x"}', '{"format": "moeref-manifest-1", "tensors": {"a": 1}}',
     '{"format": "moeref-manifest-1", "tensors": {"a": ["f", "x", "h", 0.0, 0.0, 0]}}',
     '{"format": "moeref-manifest-1", "tensors": {"a": ["f", [1], "h", "x", 0.0, 0]}}'],
)  # fmt: skip
def test_other_files_are_no_manifests(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(AuditError, match=r"m\.json"):
        Manifest.load(tmp_path / "m.json")


def test_a_name_that_comes_twice_is_refused(qwen: Tensors) -> None:
    with pytest.raises(AuditError, match=r"model\.norm\.weight comes twice"):
        Manifest.of([*qwen.items(), ("model.norm.weight", qwen["model.norm.weight"])])


# --- statistics and names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_statistics_are_those_of_torch(dtype: torch.dtype, sign: int) -> None:
    wide = torch.randn(300_001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = (wide.abs() * sign if sign else wide).to(dtype)
    values = tensor.double()
    one = fingerprint(tensor)
    assert (one.least, one.greatest, one.nans) == (float(values.min()), float(values.max()), 0)
    tensor[70_000], tensor[9] = math.nan, -math.inf
    one, values = fingerprint(tensor), tensor.double()
    assert (one.least, one.greatest, one.nans) == (-math.inf, float(values[~values.isnan()].max()), 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool])
def test_statistics_of_integers(dtype: torch.dtype) -> None:
    values = {torch.uint8: [3, 250, 127, 5], torch.bool: [0, 1, 1, 0]}.get(dtype, [3, 127, 100, -5])
    tensor = torch.tensor(values).to(dtype)
    one = fingerprint(tensor)
    assert (one.least, one.greatest) == (float(tensor.long().min()), float(tensor.long().max()))
    assert fingerprint(torch.empty(0, dtype=dtype))[3:] == (None, None, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e8m0fnu])
def test_statistics_where_bits_are_in_another_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    values = tensor.float()
    usual = values[~values.isnan()]
    assert fingerprint(tensor)[3:] == (float(usual.min()), float(usual.max()), 1)


def test_a_tensor_without_elements_is_refused() -> None:
    with pytest.raises(AuditError, match=r"x: .* has no elements to compare"):
        Manifest.of([("x", torch.empty(3, device="meta"))])


def test_nothing_but_nan_has_no_extremes() -> None:
    assert fingerprint(torch.full((3,), math.nan))[3:] == (None, None, 3)
    assert fingerprint(torch.tensor([0.0, -0.0])).zero


@pytest.mark.parametrize(
    ("name", "is_of", "at"),
    [
        ("model.layers.7.mlp.experts.31.up_proj.weight", "expert", (7, 31)),
        ("model.layers.7.mlp.shared_experts.up_proj.weight", "shared expert", (7, None)),
        ("model.layers.0.mlp.gate.weight", "router", (0, None)),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router", (0, None)),
        ("model.layers.0.mlp.gate_proj.weight", "MLP", (0, None)),
        ("model.layers.0.self_attn.q_norm.weight", "norm", (0, None)),
        ("model.layers.0.self_attn.q_proj.weight", "attention", (0, None)),
        ("model.layers.3.mlp.experts.gate_up_proj", "expert", (3, None)),
        ("model.embed_tokens.weight", "embedding", (None, None)),
        ("lm_head.weight", "head", (None, None)),
        ("strange", "other", (None, None)),
    ],
)
def test_groups_and_places(name: str, is_of: str, at: tuple[int | None, int | None]) -> None:
    assert group(name) == is_of
    assert place(name)[:2] == at


# --- the command line


def test_the_command(checkpoints: dict[str, Path], qwen: Tensors, tmp_path: Path, capsys: Any) -> None:
    good, bad, manifest = str(checkpoints["qwen3_moe"]), tmp_path / "bad.safetensors", str(tmp_path / "m.json")
    exchange(GATE, UP)(qwen)
    qwen["model.norm.weight"][0] = math.inf
    save_file(qwen, bad)
    assert main(["audit", good, "--save", manifest]) == 0
    assert main(["audit", good]) == 2
    assert "give FOUND, or --save FILE" in capsys.readouterr().err
    assert main(["audit", good, manifest]) == 0
    capsys.readouterr()
    assert main(["audit", manifest, str(bad), "--previous", manifest]) == 1
    assert "gate and up: model.layers.1.mlp.experts.3.gate_proj.weight" in capsys.readouterr().out
    assert main(["audit", good, str(bad), "--json"]) == 1
    plain = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert plain["kinds"] == {"gate and up": 2, "values": 1}
    assert plain["findings"][0]["layer"] == 1
    assert plain["findings"][2]["found"]["greatest"] == "inf"
    assert (audit.read(good), plain["same"]) == (Manifest.load(manifest), False)


@pytest.mark.parametrize("given", ["nowhere", ".", "cut.safetensors", "text.json"])
def test_bad_input_is_one_sentence(given: str, tmp_path: Path, capsys: Any, checkpoints: dict[str, Path]) -> None:
    (tmp_path / "cut.safetensors").write_bytes(next(checkpoints["qwen3_moe"].glob("*.safetensors")).read_bytes()[:-1])
    (tmp_path / "text.json").write_text("text")
    assert main(["audit", str(checkpoints["qwen3_moe"]), str(tmp_path / given)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moeref: ")
    assert said.count("\n") == 1
