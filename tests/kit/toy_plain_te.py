"""An adapter whose layer spec needs Transformer Engine, and a rank entry that says what it was built of."""

from __future__ import annotations

import json
from pathlib import Path

from moeref_conformance import authors
from moeref_conformance.contract.api import Cell, Layout, Target, World

PLAIN = authors.transformer_engine()

import toy_targets  # noqa: E402

target = toy_targets.Toy()


def build() -> dict[str, str]:
    """Parameters of a layer of megatron-core's Transformer Engine spec, by name, and the modules that hold them."""
    import toy_megatron
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.spec_utils import build_module

    config = toy_megatron.config(Layout())
    toy_megatron.groups(Layout())
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True).layer_specs[0]
    layer = build_module(spec, config=config, layer_number=1)
    held = {name: type(module).__mro__ for name, module in layer.named_modules()}
    return {
        name: next(k.__module__ for k in held[name.rpartition(".")[0]] if not k.__module__.startswith("megatron"))
        for name, _ in layer.named_parameters()
    }


def writes(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    (folder / "built.json").write_text(json.dumps(build()))
