"""Builds real models from the records of run files: run by test_record_is_built.py, in a process of its own.

`python built_from_record.py OUT RUN_FILE...` builds each policy and reference on the first and the last rank, in
torch's fake process groups, with the kit's CPU substitutions and the model's sizes made small. It writes one JSON line
a model and rank: what differs between record and model, and what the loss of a field on the way to the builder changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

#: Small sizes by the keys of Hugging Face configs. Everything else, the number of experts too, is the model's own.
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A published config with small sizes, and everything else as it is."""
    small = {**config, **{key: size for key, size in SMALL.items() if config.get(key) is not None}}
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        small["mlp_layer_types"] = kinds[: SMALL["num_hidden_layers"]]
    return small


@contextlib.contextmanager
def world(layout: Any, rank: int) -> Iterator[None]:
    """megatron-core's real groups over torch's fake backend, as `rank` sees them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moeref import megatron

    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        megatron.initialise(layout)
        yield
    finally:
        with contextlib.suppress(Exception):
            megatron.shut_down()
        dist.destroy_process_group()


def fields_dropped(record: Any) -> Iterator[tuple[str, Any]]:
    """The record with one field lost on the way to the builder and replaced by another value."""
    from moeref.layout import Layout

    model, names, seeds = record.model, record.names, record.seeds
    other = {"R2": "R3", "R3": "R2", "off": "off"}
    yield "model", replace(record, model=replace(model, max_positions=2 * model.max_positions))
    yield "layout", replace(record, layout=Layout(ep=record.layout.world))
    norms = "separate" if names.norms == "fused" else "fused"
    yield "names", replace(record, names=replace(names, norms=norms))
    if record.replay != "off":
        yield "replay", replace(record, replay=other[record.replay])
    yield "seeds.seed", replace(record, seeds=replace(seeds, seed=seeds.seed + 1))
    formula = "distinct" if seeds.formula == "megatron" else "megatron"
    yield "seeds.formula", replace(record, seeds=replace(seeds, formula=formula))
    if record.layout.dp > 1:
        yield "seeds.per_dp", replace(record, seeds=replace(seeds, per_dp=not seeds.per_dp))
    yield "divisible_by", replace(record, divisible_by=record.divisible_by + 1)
    yield "core", replace(record, core="0.16.1" if not record.core.startswith("0.16") else "0.19.2")
    if record.kernels == "torch":
        yield "kernels", replace(record, kernels="te", names=replace(names, norms="fused"))


def settings_dropped(record: Any) -> Iterator[tuple[str, Any]]:
    """Effective settings without one that moeref writes, so that Megatron's own default stays, where the two differ."""
    from moeref.config import plain

    for name, trail in record.settings.trails.items():
        held, effective = trail[0], trail[-1]
        if held.origin == "provider default" and plain(held.value) != plain(effective.value):
            yield name, record.settings.with_settings({name: replace(held, origin="provider default")})


def findings(record: Any, rank: int, device: str = "cpu") -> dict[str, Any]:
    """What differs on `rank`, and for each field that is dropped whether the loss is refused or found."""
    from moeref import megatron
    from moeref.megatron.compare import differences

    built = megatron.build(record, rank, device)
    found: dict[str, Any] = {"differences": differences(record, built), "settings": {}, "derived": [], "dropped": {}}
    for name, without in settings_dropped(record):
        try:
            config, _ = megatron.transformer_config(_unchecked(record, without), device)
        except Exception as error:
            found["settings"][name] = [f"refused: {error}"]
            continue
        if getattr(config, name) == getattr(built.config, name):
            found["derived"].append(name)  # Megatron derives the same value
        else:
            found["settings"][name] = differences(record, replace(built, config=config))
    for name, changed in fields_dropped(record):
        reverse = differences(changed, built)
        try:
            loss: Any = differences(record, megatron.build(changed, rank, device))
        except Exception as error:
            loss = [f"refused: {error}"]
        found["dropped"][name] = {"loss": loss, "reverse": reverse}
    return found


def _unchecked(record: Any, settings: Any) -> Any:
    """The record with other settings, past the rules that it checks when it is made."""
    import copy

    other = copy.copy(record)
    object.__setattr__(other, "settings", settings)
    return other


def small_run(file: Path, folder: Path) -> Any:
    """The run of `file` with the same model in small sizes."""
    from moeref import families
    from moeref.check import read_run_file

    run = read_run_file(file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shrunk(families.known(run.model))))
    return replace(run, model=str(folder))


def main(out: str, *files: str) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core

    cpu.install("cpu", "megatron")
    from moeref.check import check_run

    with Path(out).open("w", encoding="utf-8") as lines:
        for number, file in enumerate(files):
            run = small_run(Path(file), Path(out).parent / f"model{number}")
            for name, report in check_run(run, core=megatron.core.__version__).items():
                assert report.record is not None, report.problems
                for rank in sorted({0, report.record.layout.world - 1}):
                    with world(report.record.layout, rank):
                        found = findings(report.record, rank)
                    print(json.dumps({"file": file, "model": name, "rank": rank, **found}), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
