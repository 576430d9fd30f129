"""Models the benches run: widths of Qwen3-30B-A3B on a GPU, or a few channels where only the code is to be tried."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moeref import families
from moeref.bridge import load
from moeref.config import MoEConfig
from moeref.exporter import Plan, export
from moeref.layout import Layout
from moeref.record import Options, Record

if TYPE_CHECKING:
    from moeref.megatron import Built


@dataclass(frozen=True)
class Sizes:
    """`tokens` of one sequence; `config` replaces keys of the published config; `dtype` is what weights are held in."""

    tokens: int
    layers: int
    config: dict[str, Any]
    dtype: str
    rounds: int
    microbatches: int = 4
    #: Of FP8 GEMMs: channels in and out, whole blocks of every recipe; and the multiples of rows to try.
    widths: tuple[int, int] = (256, 384)
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def model(self, *, layers: int, dtype: str = "", **more: Any) -> families.Model:
        """The model with that many layers, and further keys changed."""
        whole = {**families.known("qwen3-30b-a3b"), **self.config, "num_hidden_layers": layers, **more}
        return families.read(whole, dtype or self.dtype)


#: Every width as published. Three layers and the vocabulary are 5 GB in bf16.
PUBLISHED = Sizes(tokens=4096, layers=3, config={}, dtype="bfloat16", rounds=9)
_NARROW = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128}
#: For a CPU: it shows that the code runs and compares, and says nothing about time.
NARROW = Sizes(
    tokens=24,
    layers=2,
    config={**_NARROW, "moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 4},
    dtype="float32",
    rounds=2,
    microbatches=2,
    widths=(32, 48),  # without a GPU every product is a loop
    multiples=(1, 16, 128),
)
SIZES = {"published": PUBLISHED, "narrow": NARROW}


def made(
    model: families.Model,
    device: torch.device,
    *,
    drawn_on: str = "",
    overrides: dict[str, Any] | None = None,
    **how: Any,
) -> Built:
    """One rank's chunk on `device`, filled by `fill`. `groups.initialise` comes first."""
    from moeref import megatron

    asked = MoEConfig(transformer_config_kwargs=overrides or {})
    built = megatron.build(Record.of(model, Layout(), asked, Options(**how)), 0, str(device))
    fill(built.chunks[0], drawn_on)
    return built


def fill(module: torch.nn.Module, on: str = "") -> None:
    """Seeded normal values by parameter name, around 1 for vectors (norms). With `on="cpu"` alike on every device."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            where = torch.device(on) if on else parameter.device
            generator = torch.Generator(where).manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator, device=where)
            parameter.copy_(1 + 0.1 * drawn if parameter.dim() == 1 else 0.02 * drawn)


def twin(built: Built, device: torch.device, folder: Path, **how: Any) -> Built:
    """The same model with the same weights, built otherwise: exported to `folder` and loaded."""
    from safetensors.torch import save_file

    from moeref import megatron

    stream = export(Plan(built.shard_map), 0, built.chunks)
    save_file({meta.name: full.cpu() for meta, full in stream if full is not None}, folder / "model.safetensors")
    other = megatron.build(Record.of(built.record.model, Layout(), options=Options(**how)), 0, str(device))
    load(other.shard_map, 0, other.chunks, folder)
    return other


def tokens(sizes: Sizes, vocab: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded token ids and their positions, [1, S] each."""
    drawn = torch.randint(0, vocab, (1, sizes.tokens), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device), torch.arange(sizes.tokens, device=device)[None]


def spoil(module: torch.nn.Module) -> None:
    """Change one weight matrix, the last: a comparison that does not notice compares nothing."""
    *_, last = (p for p in module.parameters() if p.dim() > 1)
    with torch.no_grad():
        last.mul_(-1)
