"""What the extras let in: the versions that verdicts are published for, and those of frameworks that lag behind."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest
from fenced import ROOT
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.plan import check_environment
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OLDEST = dict(re.findall(r'"([a-z-]+)==([\d.]+)"', (ROOT / "noxfile.py").read_text(encoding="utf-8")))


def requirements(extra: str) -> dict[str, Requirement]:
    """What an extra asks for, by distribution, those of the extras that it names among them."""
    found: dict[str, Requirement] = {}
    for text in EXTRAS[extra]:
        wanted = Requirement(text)
        if wanted.name == PROJECT["name"]:
            for other in wanted.extras:
                found |= requirements(other)
        else:
            found[wanted.name] = wanted
    return found


@pytest.mark.parametrize(
    ("name", "versions"),
    [("megatron-core", ("0.16.1", "0.17.0", "0.18.0", "0.19.2")), ("transformers", ("4.57.6", "5.0.0", "5.12.1"))],
)
def test_kit_lets_in_what_frameworks_have(name: str, versions: tuple[str, ...]) -> None:
    bounds = requirements("kit")[name].specifier
    assert [version for version in versions if version not in bounds] == []
    assert not {"0.20.0", "6.0.0", "0.15.0", "4.56.0"} & set(bounds.filter(["0.20.0", "6.0.0", "0.15.0", "4.56.0"]))


@pytest.mark.parametrize("pins", ["py311", "py312"])
def test_pins_lie_within_the_bounds(pins: str) -> None:
    lines = (ROOT / "constraints" / f"{pins}.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    wanted = {name: r for extra in ("kit", "yaml", "zstd") for name, r in requirements(extra).items()}
    assert {name for name, r in wanted.items() if pinned[name].split(" ")[0] not in r.specifier} == set()


def test_the_session_of_the_oldest_installs_the_least_that_kit_lets_in() -> None:
    (least,) = [s.version for s in requirements("kit")["transformers"].specifier if s.operator == ">="]
    assert OLDEST["transformers"].startswith(f"{least}.")
    assert check_environment.WANTED["transformers"][1] == least


def test_extras_are_named_by_what_they_enable() -> None:
    assert set(EXTRAS) == {"kit", "megatron", "gpu", "bridge", "vllm", "yaml", "zstd"}


def test_what_transformers_4_lacks_is_untested_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Cell(family="qwen3_moe", layout_name="one", layout=Layout())
    fused, lite = replace(plain, expert_format="fused"), replace(plain, family="glm4_moe_lite")
    assert [check_environment.lacks_transformers(cell) for cell in (plain, fused, lite)] == ["", "", ""]
    monkeypatch.setattr(check_environment, "_version", lambda name: OLDEST["transformers"])
    assert check_environment.lacks_transformers(plain) == ""
    assert check_environment.lacks_transformers(fused) == "needs fused experts of transformers 5; here is 4.57.6"
    assert check_environment.lacks_transformers(lite) == "needs glm4_moe_lite of transformers 5; here is 4.57.6"
