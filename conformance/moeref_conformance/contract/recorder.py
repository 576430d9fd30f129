"""Records a run of any framework for `--target dump:DIR`. Needs torch and safetensors only: copy or import it.

In every rank, on a model that was given the checkpoint of `moeref-conformance inputs`:

    recorder = Recorder("dump", cell="qwen3_moe/tp2/gloo", rank=rank)
    recorder.model(chunks)                      # after loading: names, shapes and bytes of this rank's shards
    for name, tensor in recorder.export(pairs): # (HF name, full tensor or None), passed on unchanged
        ...
    recorder.logits(logits_BSV)                 # of the tokens, or None off the last stage
    recorder.close()                            # without it the record counts as broken off
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


class Recorder:
    """Writes `<folder>/<cell>/rank0003/`. Raises FileExistsError where a record is already: one run, one folder."""

    def __init__(self, folder: str | Path, cell: str, rank: int) -> None:
        self._folder = Path(folder) / cell.replace("/", "__") / f"rank{rank:04d}"
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            said = "there is a record already; delete it, or name another folder for this run"
            raise FileExistsError(f"{self._folder}: {said}") from None

    def step(self, name: str, value: Any = None, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """One step with its JSON-ready value and its tensors."""
        if tensors:
            whole = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in tensors.items()}
            save_file(whole, self._folder / f"{name}.safetensors")
        event = {"step": name, "phase": "ok", "at": time.time(), "seconds": 0.0, "value": value}
        with (self._folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def model(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Every parameter and persistent buffer of this rank's chunks, one chunk a virtual stage."""
        rows: list[dict[str, Any]] = []
        held: dict[str, torch.Tensor] = {}
        for number, chunk in enumerate(chunks):
            parameters = dict(chunk.named_parameters(remove_duplicate=False))
            for name, tensor in chunk.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor):
                    kind = "parameter" if name in parameters else "buffer"
                    rows.append({"chunk": number, "local": name, **_meta(tensor), "kind": kind})
                    held[f"{number}:{name}"] = tensor
        self.step("inventory", rows)
        self.step("shards", tensors=held)

    def export(self, pairs: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Pass an export through and record it when it ends. A rank that is not the writer gives None for tensors."""
        rows: list[dict[str, Any]] = []
        kept: dict[str, torch.Tensor] = {}
        sent: Counter[str] = Counter()
        for name, tensor in pairs:
            rows.append({"name": name, **_meta(tensor), "materialised": tensor is not None, "alive": 0})
            if tensor is not None:
                sent[name] += 1
                kept[name if sent[name] == 1 else f"{name}#{sent[name]}"] = tensor.detach().to("cpu", copy=True)
            yield name, tensor
        self.step("export", rows, kept)

    def logits(self, logits_BSV: torch.Tensor | None) -> None:
        """fp32 logits over the unpadded vocabulary, on last-stage ranks."""
        self.step("forward", {"has": logits_BSV is not None}, {} if logits_BSV is None else {"logits": logits_BSV})

    def close(self) -> None:
        """The record is whole."""
        self.step("close", False)


def _meta(tensor: torch.Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {"shape": None, "dtype": None}
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
