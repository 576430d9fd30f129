"""How to add a family, followed to the letter: the page's file is enough, and no other file is touched."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from fenced import ROOT, blocks
from moeref_conformance.oracles import recipes
from moeref_conformance.plan import matrix

from moeref import families
from moeref.bridge import ShardMap, bind, hf_tensors, load
from moeref.exporter import Plan
from moeref.families import FamilyError
from moeref.layout import Layout
from tests.unit.models import SIZES
from tests.unit.test_loader import holder, write

pytestmark = pytest.mark.cpu
PAGE = (ROOT / "docs" / "how-to" / "add-a-family.md").read_text(encoding="utf-8")
FAMILY, RECIPE = "moeref/families/<model_type>.py", "conformance/moeref_conformance/oracles/recipes.py"
CONFIG = {**SIZES, "model_type": "toy_moe", "num_experts": 16}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's family, in a folder of its own, found as any other family is."""
    with pytest.raises(FamilyError, match="unknown model_type 'toy_moe'"):
        families.read(CONFIG)
    (source,) = (block for block in blocks(PAGE, "python") if "MAPPINGS" in block)
    (tmp_path / "toy_moe.py").write_text(source + '\n\nALIASES = ("toy_moe_2",)\n', encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = families.discover()
    assert found.keys() - families.FAMILIES.keys() == {"toy_moe"}
    assert all(found[name] == family for name, family in families.FAMILIES.items())
    monkeypatch.setattr(families, "FAMILIES", found)


def test_the_page_lists_the_files_and_they_are_two() -> None:
    (table,) = re.findall(r"^## Files\n.*?\n\n(\| file .*?)\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE) == [FAMILY, RECIPE]
    assert (ROOT / RECIPE).is_file()
    for name in families.FAMILIES:
        assert (ROOT / FAMILY.replace("<model_type>", name)).is_file()


@pytest.mark.usefixtures("toy")
def test_the_new_family_is_read_mapped_and_loaded(tmp_path: Path) -> None:
    model = families.read(CONFIG)
    assert (model.family, model.experts, model.moe_layers) == ("toy_moe", 16, (True,) * 4)
    shards = ShardMap(model, Layout.parse("tp=2,ep=2,etp=1"))
    assert len(Plan(shards).tensors) == 3 + 4 * (9 + 3 * 16)
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(shards)}
    write(tmp_path / "hf", tensors)
    for rank in range(2):
        chunks = holder(shards, rank)
        load(shards, rank, chunks, tmp_path / "hf")
        for shard, tensor in bind(shards, rank, chunks):
            for region in shard.regions:
                expected = tensors[shard.param.hf[region.tensor].name][region.hf_index]
                assert torch.equal(tensor[region.shard_index], expected)


@pytest.mark.usefixtures("toy")
def test_the_recipe_of_the_new_family_makes_the_tensors_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own model, of the two entries that the page asks for."""
    cell = dataclasses.replace(matrix.load("smoke").cells[0], family="toy_moe")
    with pytest.raises(ValueError, match="family toy_moe has no recipe"):
        recipes.model(cell)
    monkeypatch.setitem(recipes._CLASSES, "toy_moe", "Qwen3Moe")
    monkeypatch.setitem(recipes._FAMILY, "toy_moe", {"head_dim": 6, "num_experts": 16})
    made = recipes.model(cell)
    tensors = made.state_dict()
    model = families.read({**made.config.to_dict(), "model_type": "toy_moe"}, "float32")
    shards = ShardMap(model, Layout()).for_checkpoint(set(tensors))
    assert {t.name: t.shape for t in hf_tensors(shards)} == {name: tuple(t.shape) for name, t in tensors.items()}
