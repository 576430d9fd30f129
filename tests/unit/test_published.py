"""Published sizes: what the catalog offers, and that each model has as many tensors and parameters as its files.

The counts are those of the files on the hub. Files in FP8 hold scales besides (91,991 tensors for DeepSeek-V3, 139,644
for Kimi-K2); Kimi-K2 and Moonlight also hold a rotary buffer a layer.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib.resources import files
from math import prod

import pytest

from moeref import families
from moeref.bridge import ShardMap
from moeref.exporter import Plan
from moeref.families import FamilyError
from moeref.layout import Layout

pytestmark = pytest.mark.cpu

#: name -> (tensors, parameters), aliases in MTP layers and experts' biases counted.
COUNTS = {
    "deepseek-v3": (91_991 - 45_808, 684_489_845_504),
    "glm-4.5": (44_691, 358_337_791_296),
    "glm-4.5-air": (18_329, 110_468_824_832),
    "glm-4.7-flash": (9_703, 31_221_488_576),
    "gpt-oss-120b": (36 * 17 + 3, 116_829_156_672),
    "gpt-oss-20b": (24 * 17 + 3, 20_914_757_184),
    "kimi-k2": (139_644 - 69_608 - 61, 1_026_408_232_448),
    # Of the text model's 208,215, a matrix of an expert has three.
    "kimi-k2.5": (208_550 - 335 - 2 * 60 * 384 * 3, 1_026_408_232_448),
    "minimax-m2": (62 * (10 + 256 * 3) + 3, 228_689_764_864),
    "mixtral-8x7b": (995, 46_702_792_704),
    "moonlight-16b-a3b": (5_317, 15_960_110_208),
    # In files, 1,650,471,424 more in an MTP layer, which a run has if it says so.
    "qwen3-next-80b-a3b": (74_391, 81_324_862_720 - 1_650_471_424),
    "qwen3-235b-a22b": (94 * (128 * 3 + 9) + 3, 235_093_634_560),
    "qwen3-30b-a3b": (48 * (128 * 3 + 9) + 3, 30_532_122_624),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_model_has_the_tensors_of_its_files(name: str) -> None:
    model = families.read(families.known(name))
    tensors = Plan(ShardMap(model, Layout())).tensors
    assert (len(tensors), sum(prod(t.shape) for t in tensors)) == COUNTS[name]
    assert len({t.name for t in tensors}) == len(tensors)


def test_indexers_are_the_rest_of_sparse_models() -> None:
    """README of GLM-5: 744B parameters. Indexers are in 21 of GLM-5.2's 78 layers."""

    def count(name: str) -> int:
        model = families.read(families.known(name)).with_mtp(0)
        return sum(prod(t.shape) for t in Plan(ShardMap(model, Layout())).tensors)

    each = 32 * 128 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144
    assert count("glm-5") == 743_911_218_432
    assert count("glm-5") - count("glm-5.2") == (78 - 21) * each
    of_61 = 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)
    assert count("deepseek-v3.2") - count("deepseek-v3") == of_61


def test_qwen3_next_has_the_rest_of_its_files_in_an_mtp_layer() -> None:
    tensors = Plan(ShardMap(families.read(families.known("qwen3-next-80b-a3b")).with_mtp(1), Layout())).tensors
    assert sum(prod(t.shape) for t in tensors) == 81_324_862_720


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("qwen3.5-35b-a3b", (693, 785), (34_660_610_688, 35_951_822_704 - 446_571_248 - 34_660_610_688)),
        ("qwen3.5-122b-a10b", (831, 785), (122_111_526_912, None)),
        ("qwen3.5-397b-a17b", (1_038, 1_553), (396_346_350_336, 6_595_568_128)),
    ],
)
def test_qwen3_5_has_the_tensors_of_its_files(
    name: str, tensors: tuple[int, int], parameters: tuple[int, int | None]
) -> None:
    """(of the text model, of its MTP layer). The files also have 333 tensors of a vision model, which loading skips."""
    model = families.read(families.known(name))
    found = Plan(ShardMap(model, Layout(), expert_format="fused_decoder")).tensors
    of_mtp = [t for t in found if t.name.startswith("mtp.")]
    assert (len(found) - len(of_mtp), len(of_mtp)) == tensors
    sizes = [sum(prod(t.shape) for t in of) for of in (found, of_mtp)]
    assert sizes[0] - sizes[1] == parameters[0]
    assert sizes[1] == (parameters[1] or sizes[1])


def test_every_config_has_a_source_and_the_other_way_round() -> None:
    folder = files("moeref.families").joinpath("published")
    configs = {path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json")}
    assert configs == set(families.published()) == set(tomllib.loads(folder.joinpath("sources.toml").read_text()))
    for source in families.sources().values():
        assert source.repository.count("/") == 1
        assert source.weights in ("bf16", "fp8", "int4", "mxfp4")
        assert source.checked


def test_a_source_has_what_its_entry_says() -> None:
    entries = tomllib.loads(files("moeref.families").joinpath("published/sources.toml").read_text())
    families.sources.cache_clear()
    found = families.sources()
    assert list(found) == sorted(entries)
    for name, entry in entries.items():
        told = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(found[name]).items()}
        assert told == {"same": [], "variants": {}, **entry}


def test_sources_are_read_as_they_stand() -> None:
    folder = files("moeref.families").joinpath("published")
    for name, told in tomllib.loads(folder.joinpath("sources.toml").read_text(encoding="utf-8")).items():
        source = families.sources()[name]
        lists = {"checked": tuple(told["checked"]), "same": tuple(told.get("same", ()))}
        assert vars(source) == {"variants": {}, **told, **lists}


def test_variants_have_the_shapes_of_their_model() -> None:
    for name, source in families.sources().items():
        base = vars(families.read(families.known(name)))
        for repository, keys in source.variants.items():
            variant = vars(families.read(families.known(repository)))
            others = {field for field in base if variant[field] != base[field]}
            assert 0 < len(others) <= len(keys), repository
            assert others <= {"max_positions", "rope_theta", "fp8_block"}, (repository, others)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(FamilyError, match="unknown model 'kimi-k3'; did you mean kimi-k2"):
        families.known("kimi-k3")
    with pytest.raises(FamilyError, match=r"did you mean qwen3-30b-a3b\?"):
        families.known("Qwen3-30B")
    with pytest.raises(FamilyError, match=r"did you mean gpt-oss-20b\?"):
        families.known("gpt")
    with pytest.raises(
        FamilyError,
        match=r"^unknown model 'xyzzy'; give a config\.json or its folder, or one of .* known by name: deepseek-v3, ",
    ):
        families.known("xyzzy")


def test_a_known_config_is_the_callers_own() -> None:
    families.known("kimi-k2")["num_hidden_layers"] = 3
    assert families.known("kimi-k2")["num_hidden_layers"] == 61


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    config = families.known("kimi-k2")
    assert config["model_type"] == "kimi_k2"
    assert families.read(config) == families.read({**config, "model_type": "deepseek_v3"})


def test_a_published_fp8_config_is_read_and_other_quantisation_refused() -> None:
    kimi = families.known("kimi-k2")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert families.read({**kimi, "quantization_config": fp8}) == replace(families.read(kimi), fp8_block=(128, 128))
    for change in (
        {"quant_method": "compressed-tensors"},
        {"weight_block_size": None},
        {"weight_block_size": [128, "128"]},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
    ):
        with pytest.raises(FamilyError, match=r"kimi_k2: the checkpoint is quantised \(.*turn it into bf16 first"):
            families.read({**kimi, "quantization_config": {**fp8, **change}})


def test_configs_are_plain_json_in_one_order() -> None:
    for name in families.published():
        text = files("moeref.families").joinpath("published", f"{name}.json").read_text()
        config = json.loads(text)
        keys = list(config)
        assert keys == ["model_type", *sorted(keys[1:])]
        assert "quantization_config" not in config
