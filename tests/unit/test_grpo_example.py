"""The loop of docs/examples/grpo_moe.py at its published size: all arguments come from the run file that is checked."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from docs.examples import launch_glm47_flash as launcher
from docs.examples.grpo_moe import Size
from moeref import families
from moeref.check import read_run_file
from moeref.vllm import arguments

CONFIG = Path(families.__file__).with_name("published").joinpath("glm-4.7-flash.json").read_text()
RUN = Path(launcher.__file__).with_name("glm47_flash_grpo.yaml")


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(arguments, "installed", lambda: ("0.30.0", False))
    (tmp_path / "config.json").write_text(CONFIG)
    return str(tmp_path)


def test_the_published_size_is_what_was_checked(checkpoint: str) -> None:
    size = Size.of_run(read_run_file(RUN), checkpoint, gpus=2)
    checked = launcher.preflight()
    assert size.records() == (checked["policy"].record, checked["reference"].record)
    assert pickle.loads(pickle.dumps(size)) == size  # the ranks get it
    found = size.engine_args()
    wanted = {
        "model": checkpoint,
        "dtype": "bfloat16",
        "max_model_len": launcher.RUN.options["seq_length"],
        "tensor_parallel_size": 2,
        "enable_return_routed_experts": True,
    }
    assert wanted.items() <= found.items()
    assert size.records()[0].replay == "R3"


def test_another_model_is_refused(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG.replace('"num_hidden_layers": 47', '"num_hidden_layers": 46'))
    with pytest.raises(ValueError, match=r"is not the glm-4\.7-flash that was checked"):
        Size.of_run(read_run_file(RUN), checkpoint)
