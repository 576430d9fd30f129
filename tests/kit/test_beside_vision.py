"""Files of a text model beside a vision model: their names and config, and the text model that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from moeref_conformance.contract.hf_files import INDEX
from moeref_conformance.contract.published_models import published
from moeref_conformance.oracles import beside_vision, routed
from moeref_conformance.oracles.checkpoint import check_distinct, expected
from moeref_conformance.oracles.expected import Expected, read_checkpoint
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu
KIMI = cell("kimi_k25", "one", layers=4)
#: Keys that transformers writes and published files lack.
UNPUBLISHED = {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range", "use_cache"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(KIMI, tmp_path_factory.mktemp("expected"))


def test_files_have_both_models_and_the_expected_tensors_are_the_text_models(made: Expected) -> None:
    files = read_checkpoint(made.dir / "checkpoint")
    vision = {name for name in files if name.startswith(beside_vision.VISION)}
    assert len(vision) == 6
    assert made.tensors.keys() == files.keys() - vision
    assert all(name.startswith("language_model.") for name in made.tensors)
    assert {"language_model.lm_head.weight", "language_model.model.norm.weight"} <= made.tensors.keys()
    check_distinct(files)
    index = json.loads((made.dir / "checkpoint" / INDEX).read_text())["weight_map"]
    assert index.keys() == files.keys()
    assert {index[name] for name in vision} == set(index.values())


def test_the_config_is_as_the_published_one(made: Expected) -> None:
    whole = json.loads((made.dir / "config" / "config.json").read_text())
    like = published()["kimi-k2.5"].config
    assert whole.keys() <= like.keys()
    assert whole["text_config"].keys() - like["text_config"].keys() <= UNPUBLISHED
    assert made.config == whole["text_config"]
    assert made.config["model_type"] == "deepseek_v3"


def test_spoiled_tensors_are_the_text_models(made: Expected) -> None:
    assert made.missing in made.tensors
    assert made.unlike in made.tensors
    assert made.extra.startswith("language_model.")
    assert made.extra not in made.tensors
    assert made.left_over.keys() == {"language_model.model.norm.weight"}


def test_transformers_computes_with_the_text_model_of_the_files(made: Expected) -> None:
    with beside_vision.alone(made.dir / "checkpoint") as folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert not folder.exists()
    with torch.no_grad():
        logits_BSV = model(made.tokens_BS).logits
    torch.testing.assert_close(logits_BSV, made.logits_BSV, rtol=0, atol=2e-6)
    gradients = routed.under(made, "native").gradients
    assert gradients.keys() == made.tensors.keys()
    biases = {name for name, of in gradients.items() if bool(of.isnan().all())}
    assert biases == {name for name in made.tensors if name.endswith("e_score_correction_bias")}


def test_a_text_model_alone_is_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with beside_vision.alone(tmp_path) as folder:
        assert folder == tmp_path
    assert (beside_vision.prefix("deepseek_v3"), beside_vision.left_out("deepseek_v3")) == ("", ())


@pytest.mark.parametrize("more", [{"expert_format": "fused"}, {"tied": True}, {"mtp": 1}])
def test_other_files_have_no_recipe(more: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kimi_k25 has a recipe for untied files with a tensor for each expert"):
        expected(cell("kimi_k25", "one", layers=4, **more), tmp_path)
