"""`moeref check --json` follows the schema that is shipped with it."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest

from moeref.cli import main

jsonschema = pytest.importorskip("jsonschema", reason="pip install --group test brings jsonschema")

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(importlib.resources.files("moeref.check").joinpath("schema.json").read_text(encoding="utf-8"))
QWEN = ["qwen3-30b-a3b", "--layout", "tp=2,ep=8,etp=1,world=16", "--no-verify"]
RUNS = {
    "works": QWEN,
    "all figures": [*QWEN, "--seq-length", "5000", "--replay", "R3", "--hbm", "80", "--gpus-per-node", "8"],
    "an engine": [*QWEN, "--engine", "vllm:tp=8,ep=8", "--density", "0.01"],
    "an engine that refuses": [*QWEN, "--engine", "sglang:tp=3"],
    "a layout that is none": ["qwen3-30b-a3b", "--layout", "tp=3,world=8"],
    "layers that do not divide": ["kimi-k2", "--layout", "pp=16"],
    "seeds that collide": ["kimi-k2", "--layout", "tp=8,pp=16,ep=64,etp=1,world=1024,first=3,last=2", "--seed-per-dp"],
    "not known": [*QWEN, "--set", "use_mup=true"],
    "a dispatcher that is refused": [*QWEN, "--dispatcher", "allgather", "--set", "moe_expert_capacity_factor=1.0"],
    "a framework's files": ["--from", "slime", str(ROOT / "docs/examples/slime_qwen3_30b.sh"), "--no-verify"],
    "a run file": [str(ROOT / "docs/examples/glm47_flash_grpo.yaml"), "--no-verify"],
}


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_json_follows_the_schema(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 7\n3000\n")
    assert main(["check", *arguments, "--lengths", str(lengths), "--json"]) in (0, 1, 3)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(capsys.readouterr().out))


def test_the_schema_is_one_and_names_every_figure() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    report = SCHEMA["$defs"]["report"]
    assert set(report["required"]) == set(report["properties"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate({"verdict": "works"})
