"""The files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names; of a folder without one all safetensors files. In the order of their names."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
