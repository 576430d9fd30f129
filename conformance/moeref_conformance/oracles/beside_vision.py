"""Text models that files hold beside a vision model: their names there, their config, and the tensors of the rest.

transformers 5.12 has no class of Kimi-K2.5, whose text model is DeepSeek-V3. Its oracle is that model's: files of a
cell are its, with other names (`wrap`), and are read as they were (`alone`). Names are those of published files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.hf_files import weight_files

#: What the names of the text model begin with, by family.
_PREFIX = {"kimi_k25": "language_model."}
#: What those of the vision model begin with, and of what takes its outputs to the text model.
VISION = ("vision_tower.", "mm_projector.")
#: Some of these tensors. The norm and the projection end like the text model's.
_REST = {
    "vision_tower.patch_embed.proj.weight": (18, 3, 2, 2),
    "vision_tower.encoder.blocks.0.wqkv.weight": (54, 18),
    "vision_tower.encoder.blocks.0.mlp.fc0.bias": (26,),
    "vision_tower.encoder.final_layernorm.weight": (18,),
    "mm_projector.proj.0.weight": (72, 72),
    "mm_projector.pre_norm.weight": (18,),
}


def prefix(family: str) -> str:
    """What the names of the text model begin with in files; empty for a family without a vision model."""
    return _PREFIX.get(family, "")


def left_out(family: str) -> tuple[str, ...]:
    """The beginnings of names that are in files and in no language model."""
    return VISION if prefix(family) else ()


def own(name: str) -> str:
    """The name of a tensor in the text model alone."""
    return name.removeprefix("language_model.")


def text(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the text model, by their names in it."""
    return {own(name): of for name, of in tensors.items() if not name.startswith(left_out(family))}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model: the one inside of `config`, or `config` itself."""
    return dict(config.get("text_config") or config)


def wrap(family: str, folder: Path, generator: torch.Generator) -> None:
    """Turn the folder of a text model into that of the whole model. One of the vision model's tensors is in each file
    of the first, so that no file is one of the two alone."""
    config = json.loads((folder / "config.json").read_text())
    dtype = config.pop("torch_dtype")
    whole = {"model_type": family, "dtype": dtype, "text_config": {**config, "dtype": dtype}}
    whole |= {"architectures": ["KimiK25ForConditionalGeneration"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    rest = {n: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for n, shape in _REST.items()}
    files = sorted(folder.glob("*.safetensors"))
    for number, file in enumerate(files):
        held = {prefix(family) + name: tensor for name, tensor in load_file(file).items()}
        held |= {name: tensor for at, (name, tensor) in enumerate(rest.items()) if at % len(files) == number}
        save_file(held, file, metadata={"format": "pt"})


@contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """The folder of a checkpoint's text model: `folder` itself, or where it has a vision model another."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" not in config:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config["text_config"]))
        tensors = {name: of for file in weight_files(folder) for name, of in load_file(file).items()}
        held = text(config["model_type"], tensors)
        save_file(held, Path(made) / "model.safetensors", metadata={"format": "pt"})
        yield Path(made)
