"""Adapters on a real model in a rank: what two steps and a merge give, to compare with transformers in the parent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from moeref_conformance.contract.api import Cell, Claims, Info, Session, Target, World
from moeref_conformance.oracles.expected import read_checkpoint
from moeref_conformance.steps.gradients import batch, of_replica
from safetensors.torch import load_file, save_file

from moeref import bridge, families, megatron
from moeref.bridge.adapters import modules
from moeref.config import MoEConfig
from moeref.exporter import Plan, export
from moeref.layout import Layout
from moeref.megatron.offload import Offloaded
from moeref.megatron.optimizer import Schedule, Trainer
from moeref.record import Options, Record

R, ALPHA, RATE = 3, 4.5, 0.5
#: The folder of saved adapters, beside those of ranks.
KEPT = "adapters"


class Nothing:
    """A target that is never opened; `check` below is what the rank runs."""

    info = Info(name="lora", version="0")
    claims = Claims(
        facets=frozenset(),
        families=frozenset(families.FAMILIES),
        backends=frozenset({"gloo"}),
        experts=frozenset({"sequential", "grouped"}),
        norms=frozenset({"separate", "fused"}),
        loss_masks=True,
        mtp=1,
    )

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        raise NotImplementedError


target = Nothing()


def built(cell: Cell, inputs: dict[str, str], rank: int, **settings: Any) -> megatron.Built:
    model = families.read(inputs["hf_config"], cell.dtype)
    asked = MoEConfig(transformer_config_kwargs=settings)
    named: dict[str, Any] = {name: getattr(cell, name) for name in ("experts", "norms", "dispatcher")}
    options = Options(**named)
    one = megatron.build(Record.of(model, Layout.parse(cell.layout.text), asked, options), rank)
    bridge.load(one.shard_map, rank, one.chunks, inputs["checkpoint"])
    return one


def check(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Save what is streamed and computed; raise for what a rank sees itself."""
    layout = Layout.parse(cell.layout.text)
    rank = megatron.initialise(layout, tied=cell.tied)
    if "errors" in cell.tags:
        what_cannot_have_adapters_is_refused(cell, inputs)
        activations_may_be_recomputed(cell, inputs)
        an_optimizer_trains_adapters_alone(cell, inputs)
        a_restored_optimizer_goes_on(cell, inputs, folder)
        what_is_offloaded_makes_room_and_comes_back(cell, inputs, folder)
        saved_adapters_come_back(cell, inputs, folder / "adapters")
        the_how_to_runs_as_written(cell, inputs, folder)
        return
    if "read" in cell.tags:  # by one rank, what ranks of another layout have saved
        lora = megatron.Lora.saved(built(cell, inputs, rank), rank, folder.parents[1] / "run" / KEPT)
        read = {tensor.name: full for tensor, full in lora.stream() if full is not None}
        save_file(read, folder / "read.safetensors")
        return
    held = load_file(inputs["tokens"])
    mine = [batch(of_replica(held[name], cell, rank), cell) for name in ("tokens", "mask")]
    one = built(cell, inputs, rank)
    Steps(one, rank, held["tokens"], mine, folder, cell.tags or modules(one.shard_map.model)).run()


class Steps:
    """Two steps of plain SGD, and everything that is asked before and after."""

    def __init__(
        self,
        one: megatron.Built,
        rank: int,
        tokens_BS: torch.Tensor,
        mine: list[torch.Tensor],
        folder: Path,
        asked: Sequence[str],
    ) -> None:
        self.one, self.rank, self.tokens_BS, self.mine, self.folder = one, rank, tokens_BS, mine, folder
        self.before = {key: tensor.clone() for key, tensor in bridge.inventory(one.chunks).items()}
        self.lora = megatron.Lora(one, rank, r=R, alpha=ALPHA, modules=asked)

    def run(self) -> None:
        self.save("fresh", self.lora.stream())
        self.ask("fresh")
        for number in (1, 2):
            self.step()
            self.save(f"step{number}", self.lora.stream())
        self.ask("trained")
        with self.lora.off():
            self.ask("base")
            self.unchanged()
        with self.lora.merged():
            self.save("merged", export(Plan(self.one.shard_map), self.rank, self.one.chunks))
        self.save("again", self.lora.stream())
        self.ask("after")
        self.lora.save(self.folder.parent / KEPT)
        with self.lora.off():
            self.unchanged()

    def save(self, name: str, stream: Iterable[tuple[Any, torch.Tensor | None]]) -> None:
        found = {tensor.name: full.clone() for tensor, full in stream if full is not None}
        if found:
            save_file(found, self.folder / f"{name}.safetensors")

    def ask(self, name: str) -> None:
        logits_BSV = megatron.logits(self.one.chunks, self.one.shard_map, self.tokens_BS)
        if logits_BSV is not None:
            save_file({"logits": logits_BSV.contiguous()}, self.folder / f"logits-{name}.safetensors")

    def step(self) -> None:
        tokens_BS, mask_BS = self.mine
        gradients = megatron.gradients(self.one.chunks, self.one.shard_map, tokens_BS, mask_BS=mask_BS)
        parameters = self.lora.parameters()
        assert gradients.keys() == parameters.keys()
        for key, parameter in parameters.items():
            parameter.data -= RATE * gradients[key]

    def unchanged(self) -> None:
        now = bridge.inventory(self.one.chunks)
        assert now.keys() == self.before.keys()
        assert all(torch.equal(tensor, self.before[key]) for key, tensor in now.items())


def what_cannot_have_adapters_is_refused(cell: Cell, inputs: dict[str, str]) -> None:
    one = built(cell, inputs, 0)
    given: dict[str, Any] = {"r": 2, "alpha": 2.0, "modules": ["q_proj"]}
    with pytest.raises(bridge.BridgeError, match=r"glm4_moe: no linear is named gate: adapters go to down_proj, gate_"):
        megatron.Lora(one, 0, **{**given, "modules": ["q_proj", "gate"]})
    with pytest.raises(bridge.BridgeError, match="glm4_moe: no module is named"):
        megatron.Lora(one, 0, **{**given, "modules": []})
    with pytest.raises(bridge.BridgeError, match="glm4_moe: adapters of rank 0: "):
        megatron.Lora(one, 0, **{**given, "r": 0})
    assert all(parameter.requires_grad for parameter in one.chunks[0].parameters())
    lora = megatron.Lora(one, 0, **given)
    with pytest.raises(bridge.BridgeError, match="glm4_moe, rank 0: the model has adapters"):
        megatron.Lora(one, 0, **given)
    with lora.merged(), pytest.raises(RuntimeError, match="merged already"), lora.merged():
        pass
    assert {name.split(".")[-2] for _, name in lora.parameters()} == {"q_proj", "linear_qkv"}
    assert [t.name.split(".")[-2] for t, _ in lora.stream()] == ["lora_A", "lora_B"] * cell.layers
    assert lora.config()["target_modules"] == ["q_proj"]


def activations_may_be_recomputed(cell: Cell, inputs: dict[str, str]) -> None:
    """Bit for bit the gradients of a step that keeps them, also in the first layer, behind the frozen embedding."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    tokens_BS = load_file(inputs["tokens"])["tokens"]
    found = []
    for settings in ({}, full):
        one = built(cell, inputs, 0, **settings)
        lora = megatron.Lora(one, 0, r=R, alpha=ALPHA, modules=["q_proj", "v_proj", "down_proj"])
        for (_, name), parameter in lora.parameters().items():
            parameter.data += 0.1 if name.endswith("lora_B") else 0.0
        found.append(megatron.gradients(one.chunks, one.shard_map, tokens_BS))
    kept, recomputed = found
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(tensor, recomputed[key]) for key, tensor in kept.items())
    # Some experts have no token.
    assert all(tensor.any() for (_, name), tensor in kept.items() if ".local_experts." not in name)


def an_optimizer_trains_adapters_alone(cell: Cell, inputs: dict[str, str]) -> None:
    one = built(cell, inputs, 0)
    before = {key: tensor.clone() for key, tensor in bridge.inventory(one.chunks).items()}
    lora = megatron.Lora(one, 0, r=R, alpha=ALPHA, modules=["q_proj", "down_proj"])
    trainer, tokens_BS = Trainer(one, lr=0.1), load_file(inputs["tokens"])["tokens"]

    def loss(logits_BSV: torch.Tensor, rows: Any, at_S: torch.Tensor) -> torch.Tensor:
        return logits_BSV.logsumexp(-1).mean()

    assert trainer.step(tokens_BS, loss)
    assert all(p.any() for (_, name), p in lora.parameters().items() if ".local_experts." not in name)
    with lora.off():
        assert all(torch.equal(tensor, before[key]) for key, tensor in bridge.inventory(one.chunks).items())


def a_restored_optimizer_goes_on(cell: Cell, inputs: dict[str, str], folder: Path) -> None:
    """Bit for bit, at the rate of then; and what is no state of this model is refused."""
    one, other = built(cell, inputs, 0), built(cell, inputs, 0)
    lora = megatron.Lora(one, 0, r=R, alpha=ALPHA, modules=["q_proj", "down_proj"])
    trainer, tokens_BS = Trainer(one, lr=0.1), load_file(inputs["tokens"])["tokens"]

    def loss(logits_BSV: torch.Tensor, rows: Any, at_S: torch.Tensor) -> torch.Tensor:
        return logits_BSV.logsumexp(-1).mean()

    def stepped(by: Trainer, rows: int) -> dict[tuple[int, str], torch.Tensor]:
        by.step(tokens_BS[:rows], loss)
        return {key: parameter.detach().clone() for key, parameter in lora.parameters().items()}

    saved = stepped(trainer, 1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.03
    trainer.save(folder)
    on = stepped(trainer, 2)
    for key, parameter in lora.parameters().items():
        parameter.data.copy_(saved[key])
    again = Trainer(one, lr=0.1)
    again.restore(folder)
    resumed = stepped(again, 2)
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in on.items())
    with pytest.raises(ValueError, match=r"glm4_moe, rank 0 of tp=1,.* has parameter 0:adapters.*, this one 0:embed"):
        Trainer(other, lr=0.1).restore(folder)
    with pytest.raises(ValueError, match=r"the saved optimizer has schedule nothing, this one Schedule\(end=9, "):
        Trainer(one, lr=0.1, schedule=Schedule(end=9)).restore(folder)
    (file,) = folder.glob("optimizer-*")
    torch.save({**torch.load(file), "layout": ["tp=2"]}, file)
    with pytest.raises(ValueError, match="the saved optimizer has layout tp=2, this one tp=1,"):
        again.restore(folder)
    file.rename(folder / file.name.replace("of-00001", "of-00002"))
    with pytest.raises(FileNotFoundError, match=r"optimizer-00000-of-00001\.pt"):
        again.restore(folder)


def what_is_offloaded_makes_room_and_comes_back(cell: Cell, inputs: dict[str, str], folder: Path) -> None:
    """With the room that weights alone need in between; until then it computes nothing. OPT-011 judges the rest.

    What finds no room on its way back can be taken back later.
    """
    one = built(cell, inputs, 0)
    trainer, tokens_BS = Trainer(one, lr=0.1), load_file(inputs["tokens"])["tokens"]

    def loss(logits_BSV: torch.Tensor, rows: Any, at_S: torch.Tensor) -> torch.Tensor:
        return logits_BSV.logsumexp(-1).mean()

    def held() -> tuple[int, int]:
        """Elements of the model, and of moments and gradients."""
        adams = [by.optimizer.state for by in trainer.optimizer.chained_optimizers]
        state = [of for adam in adams for moments in adam.values() for of in moments.values()]
        gradients = [of.main_grad for chunk in one.chunks for of in chunk.parameters()]
        rest = sum(of.untyped_storage().nbytes() for of in [*state, *gradients] if isinstance(of, torch.Tensor))
        return sum(of.numel() for of in bridge.inventory(one.chunks).values()), rest

    trainer.offload()
    trainer.onload()
    trainer.step(tokens_BS, loss)
    before = {key: of.clone() for key, of in bridge.inventory(one.chunks).items()}
    model, rest = held()
    trainer.offload()
    trainer.offload()
    assert held() == (0, 0)
    for call in (lambda: megatron.logits(one.chunks, one.shard_map, tokens_BS), lambda: trainer.save(folder)):
        with pytest.raises(RuntimeError, match="glm4_moe: offloaded: optimizer and weights; call `onload` first"):
            call()
    with pytest.raises(bridge.BridgeError, match=r"is \[0\]"):
        bridge.loader.bind(one.shard_map, 0, one.chunks)
    full = torch.OutOfMemoryError("the engine still has the memory")
    with mock.patch.object(Offloaded, "back", side_effect=full), pytest.raises(torch.OutOfMemoryError):
        trainer.onload(weights_only=True)
    assert held() == (0, 0)
    trainer.onload(weights_only=True)
    assert held() == (model, 0)
    with mock.patch.object(Offloaded, "back", side_effect=full), pytest.raises(torch.OutOfMemoryError):
        trainer.onload()
    assert held() == (model, 0)
    assert megatron.logits(one.chunks, one.shard_map, tokens_BS) is not None
    with pytest.raises(RuntimeError, match="glm4_moe: offloaded: optimizer; call `onload` first"):
        trainer.step(tokens_BS, loss)
    trainer.onload()
    assert held() == (model, rest)
    assert all(torch.equal(of, before[key]) for key, of in bridge.inventory(one.chunks).items())


def saved_adapters_come_back(cell: Cell, inputs: dict[str, str], folder: Path) -> None:
    """Bit for bit, with their scale; what is no folder of adapters, or of others, is refused."""
    folder.mkdir()
    one = built(cell, inputs, 0)
    lora = megatron.Lora(one, 0, r=R, alpha=ALPHA, modules=["q_proj", "down_proj"])
    for parameter in lora.parameters().values():
        parameter.data.normal_()
    lora.save(folder)
    before = {tensor.name: full.clone() for tensor, full in lora.stream() if full is not None}
    lora.detach()
    again = megatron.Lora.saved(one, 0, folder)
    assert again.scale == ALPHA / R
    after = {tensor.name: full.clone() for tensor, full in again.stream() if full is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(of, before[name]) for name, of in after.items())
    again.detach()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(bridge.BridgeError, match="down_proj"):
        megatron.Lora.saved(one, 0, folder)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="is none of LoRA's"):
        megatron.Lora.saved(one, 0, folder)


def the_how_to_runs_as_written(cell: Cell, inputs: dict[str, str], folder: Path) -> None:
    """The block of docs/how-to/train-adapters.md; fresh adapters change no weight."""
    page = (Path(__file__).parents[2] / "docs/how-to/train-adapters.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\{code-block\} python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {
        "built": built(cell, inputs, 0),
        "rank": 0,
        "tokens_BS": load_file(inputs["tokens"])["tokens"],
        "folder": folder,
    }
    exec(compile(block, "train-adapters.md", "exec"), names)
    assert names["reference_BSV"] is not None
    assert {name.rsplit(".", 2)[1] for name in names["adapter"]} == {"lora_A", "lora_B"}
    assert names["base"].keys() == names["weights"].keys()
    assert all(torch.equal(of, names["weights"][name]) for name, of in names["base"].items())
    loaded = {k: of for k, of in read_checkpoint(Path(inputs["checkpoint"])).items() if k in names["weights"]}
    assert loaded.keys() == names["weights"].keys()
    assert all(torch.equal(of, names["weights"][name]) for name, of in loaded.items())
