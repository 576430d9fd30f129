"""The steps of a rank against small targets of plain torch modules: the records, and what they have to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moeref_conformance.contract.api import Cell, Claims, Info, Layout, NameRow, TensorMeta, World
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.oracles.expected import read_checkpoint
from moeref_conformance.steps.run import StepRaised, run_rank
from moeref_conformance.steps.tensors import deepest, give_new_memory
from safetensors.torch import save_file

pytestmark = pytest.mark.cpu
CELL = Cell(family="toy", layout_name="one", layout=Layout())


class Toy:
    """A target whose model is one linear layer and a buffer; its export is right unless a subclass spoils it."""

    info = Info(name="toy", version="0")
    claims = Claims(
        facets=frozenset({"names", "export", "forward"}), families=frozenset({"toy"}), backends=frozenset({"gloo"})
    )

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 4, bias=False)
        self.model.register_buffer("bias_E", torch.zeros(4))
        self.model.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.names = self.export = self.forward = self

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        yield self

    def table(self, rank: int) -> list[NameRow]:
        return [NameRow(chunk=0, local="weight", global_name="w", hf=("w",), shape=(4, 3), dtype="float32")]

    def chunks(self) -> list[torch.nn.Module]:
        return [self.model]

    def held(self) -> dict[str, torch.Tensor]:
        return {"w": self.model.weight, "b": self.model.get_buffer("bias_E")}

    def load(self, checkpoint: Path) -> None:
        tensors = read_checkpoint(checkpoint)
        if set(tensors) != {"w", "b"}:
            raise ValueError(f"names differ: {set(tensors) ^ {'w', 'b'}}")
        with torch.no_grad():
            for name, tensor in self.held().items():
                tensor.copy_(tensors[name])

    def plan(self) -> list[TensorMeta]:
        unknown = [n for n, _ in self.model.named_parameters() if n != "weight"]
        if unknown:
            raise ValueError(f"no place for {unknown}")
        return [TensorMeta(name=n, shape=tuple(t.shape), dtype="float32") for n, t in self.held().items()]

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for meta in self.plan():
            yield meta, self.held()[meta.name].detach().clone()

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        return self.model.weight.detach()[tokens_BS % 4]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    right = {"w": torch.randn(4, 3), "b": torch.randn(4)}
    spoiled = {
        "checkpoint": right,
        "checkpoint_extra": {**right, "x": torch.ones(1)},
        "checkpoint_missing": {"w": right["w"]},
        "checkpoint_unlike": {**right, "b": torch.ones(1)},
    }
    for name, tensors in spoiled.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    save_file({"tokens": torch.arange(6).reshape(2, 3)}, tmp_path / "tokens.safetensors")
    folders = {name: str(tmp_path / name) for name in spoiled}
    return {**folders, "hf_config": str(tmp_path), "tokens": str(tmp_path / "tokens.safetensors")}


def recorded(target: Toy, inputs: dict[str, str], tmp_path: Path) -> RankRecord:
    world = World(backend="gloo", rank=0, size=1, device="cpu", workdir=tmp_path, hf_config=tmp_path)
    run_rank(target, CELL, world, inputs, tmp_path / "rank0000")  # type: ignore[arg-type]
    return RankRecord(0, tmp_path / "rank0000")


def test_all_steps_in_order(inputs: dict[str, str], tmp_path: Path) -> None:
    record = recorded(Toy(), inputs, tmp_path)
    right = read_checkpoint(Path(inputs["checkpoint"]))
    assert [e["step"] for e in record.events if e["phase"] == "begin"] == [
        *("open", "topology", "names", "inventory", "begun", "load", "shards", "plan", "export", "left", "forward"),
        "around_forward",
        *("change", "broken_off", "export_changed", "kept", "move", "own", "refuse_parameter", "refuse_buffer"),
        *("refuse_extra", "refuse_missing", "refuse_unlike", "around_loads", "settings", "close"),
    ]
    assert record.value("topology") is None
    assert record.value("names")[0]["hf"] == ["w"]
    assert [(t["local"], t["kind"]) for t in record.value("inventory")] == [
        ("weight", "parameter"),
        ("bias_E", "buffer"),
    ]
    assert torch.equal(record.tensors("shards")["0:weight"], right["w"])
    assert record.value("plan") == [
        {"name": "w", "shape": [4, 3], "dtype": "float32"},
        {"name": "b", "shape": [4], "dtype": "float32"},
    ]
    assert [(m["materialised"], m["alive"]) for m in record.value("export")] == [(True, 0), (True, 0)]
    for name, tensor in right.items():
        assert torch.equal(record.tensors("export")[name], tensor)
        assert torch.equal(record.tensors("export_changed")[name], tensor * -0.5)
    assert record.tensors("forward")["logits"].shape == (2, 3, 3)
    assert record.value("kept") == {"overwritten": [], "left": []}
    assert record.value("settings") == []
    assert record.value("own") == {
        "changed": [],
        "later": [],
        "outdated": [],
        "lost": [],
        "again": ["w", "b"],
        "stale": [],
    }
    for step, name in (("refuse_parameter", "kit_unmapped.weight"), ("refuse_extra", "x"), ("refuse_missing", "b")):
        assert name in record.error(step)["message"]  # type: ignore[index]


class Aliasing(Toy):
    """Hands out the live weights."""

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for meta in self.plan():
            yield meta, self.held()[meta.name].detach()


class Hoarding(Toy):
    """Keeps all that it handed out."""

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        kept = list(super().stream())
        yield from kept


class OneBuffer(Toy):
    """Sends every tensor twice, the second time from the buffer of the first."""

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for meta, tensor in super().stream():
            yield meta, tensor
            yield meta, tensor


class Lending(Aliasing):
    """Hands out the live weights, to be read only."""

    claims = replace(Toy.claims, lends=True)


class Reusing(Toy):
    """Sends all tensors in one buffer."""

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        buffer = torch.empty(12)
        for meta, tensor in super().stream():
            assert tensor is not None
            yield meta, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


class Holding(Toy):
    """Sends what lies in the memory that weights had at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = {name: tensor.data for name, tensor in super().held().items()}

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for meta in self.plan():
            yield meta, self.first[meta.name].clone()


class Versioned(Toy):
    """Sends again what it sent until a version counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, list[Any]] = {}

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        version = self.model.weight._version
        if version not in self.sent:
            self.sent[version] = [*super().stream()]
        return iter([(meta, tensor.clone()) for meta, tensor in self.sent[version]])


class Permissive(Toy):
    """Refuses nothing."""

    def plan(self) -> list[TensorMeta]:
        return [TensorMeta(name=n, shape=tuple(t.shape), dtype="float32") for n, t in self.held().items()]

    def load(self, checkpoint: Path) -> None:
        tensors = read_checkpoint(checkpoint)
        for name, tensor in self.held().items():
            tensor.data.copy_(tensors.get(name, torch.zeros(())))


class Leaving(Toy):
    """Leaves settings of torch otherwise than it found them."""

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)
        yield self

    def table(self, rank: int) -> list[NameRow]:
        torch.set_default_dtype(torch.float32)
        return super().table(rank)

    def load(self, checkpoint: Path) -> None:
        torch.set_default_device("meta")
        try:
            super().load(checkpoint)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float64)

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        torch.set_autocast_enabled("cpu", True)
        return super().logits(tokens_BS)


class LeavingBroken(Leaving):
    """The same, and fails in the middle of the export."""

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        raise RuntimeError("connection lost")


class Broken(Toy):
    """Fails in the middle of the export, and once more when it is closed."""

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        yield self
        raise AssertionError("not reached")

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        yield next(super().stream())
        raise RuntimeError("connection lost")


def test_an_alias_is_seen_and_put_back(inputs: dict[str, str], tmp_path: Path) -> None:
    target = Aliasing()
    record = recorded(target, inputs, tmp_path)
    assert record.value("own")["changed"] == ["0:weight", "0:bias_E"]
    assert target.model.weight.any()


def test_a_hoard_is_counted(inputs: dict[str, str], tmp_path: Path) -> None:
    assert [m["alive"] for m in recorded(Hoarding(), inputs, tmp_path).value("export")] == [0, 1]


def test_a_shared_buffer_is_seen_in_the_later_tensor(inputs: dict[str, str], tmp_path: Path) -> None:
    record = recorded(OneBuffer(), inputs, tmp_path)
    assert record.value("own") == {
        "changed": [],
        "later": ["w", "b"],
        "outdated": [],
        "lost": [],
        "again": ["w", "w", "b", "b"],
        "stale": [],
    }
    assert set(record.tensors("export")) == {"w", "w#2", "b", "b#2"}


def test_what_is_lent_is_not_written_to(inputs: dict[str, str], tmp_path: Path) -> None:
    assert recorded(Lending(), inputs, tmp_path).value("own") == {
        "changed": [],
        "later": [],
        "outdated": [],
        "lost": [],
        "again": ["w", "b"],
        "stale": [],
    }


def test_a_reused_buffer_is_seen_in_what_was_kept(inputs: dict[str, str], tmp_path: Path) -> None:
    record = recorded(Reusing(), inputs, tmp_path)
    assert record.value("kept") == {"overwritten": ["w"], "left": []}
    assert record.value("own") == {
        "changed": [],
        "later": [],
        "outdated": [],
        "lost": [],
        "again": ["w", "b"],
        "stale": [],
    }


def test_weights_change_without_their_version(inputs: dict[str, str], tmp_path: Path) -> None:
    record = recorded(Versioned(), inputs, tmp_path)
    assert torch.equal(record.tensors("export_changed")["w"], record.tensors("export")["w"])


def test_weights_in_new_memory_are_asked_for(inputs: dict[str, str], tmp_path: Path) -> None:
    target = Holding()
    record = recorded(target, inputs, tmp_path)
    assert torch.equal(record.tensors("export_changed")["w"], read_checkpoint(Path(inputs["checkpoint"]))["w"] * -0.5)
    assert record.value("own") == {
        "changed": [],
        "later": [],
        "outdated": ["w"],
        "lost": [],
        "again": ["w", "b"],
        "stale": [],
    }
    # The buffer got a new storage, and the tensor that is held has moved with it.
    assert target.first["b"].data_ptr() == target.held()["b"].data_ptr()


def test_the_deepest_module_is_the_last_of_those_with_parameters() -> None:
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(2))
    chunk = torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(2, 2)})
    assert deepest(chunk) is layers[1][0]
    assert deepest(torch.nn.ReLU()).extra_repr() == ""


def test_what_is_planted_is_removed(inputs: dict[str, str], tmp_path: Path) -> None:
    target = Permissive()
    recorded(target, inputs, tmp_path)
    assert [name for name, _ in target.model.named_modules()] == [""]


def test_tensors_that_share_memory_move_together() -> None:
    flat = torch.arange(6.0)
    parts, alone = [flat[:2], flat[2:]], [torch.ones(3), torch.ones(3)]
    held = [tensor.data for tensor in alone]
    give_new_memory([*parts, *alone, torch.empty(0)])
    assert torch.equal(torch.cat(parts), torch.arange(6.0))
    assert parts[1].data_ptr() == parts[0].data_ptr() + 8 == flat.data_ptr() + 8
    assert [tensor.tolist() for tensor in alone] == [[1.0] * 3] * 2
    for tensor in alone:
        tensor.zero_()
    # The storage of the first was replaced below what is held, `.data` of the second was not.
    assert [tensor.tolist() for tensor in held] == [[0.0] * 3, [1.0] * 3]


def test_nothing_refused_is_on_record(inputs: dict[str, str], tmp_path: Path) -> None:
    record = recorded(Permissive(), inputs, tmp_path)
    for step in ("refuse_parameter", "refuse_extra", "refuse_missing", "refuse_unlike"):
        assert record.has(step)
        assert record.error(step) is None


@pytest.fixture
def own_settings() -> Iterator[None]:
    """Settings of torch are put back after the test."""
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


DTYPE = "torch.get_default_dtype()"
OPENED = ["open", DTYPE, "torch.float32", "torch.bfloat16"]
LOADED = ["load", DTYPE, "torch.float32", "torch.float64"]


@pytest.mark.usefixtures("own_settings")
def test_settings_that_steps_leave_are_told_with_the_step(inputs: dict[str, str], tmp_path: Path) -> None:
    """A session may begin without gradients; that a step puts back what it was made with is nothing."""
    cast = ["forward", "torch.is_autocast_enabled('cpu')", "False", "True"]
    assert recorded(Leaving(), inputs, tmp_path).value("settings") == [OPENED, LOADED, cast]


@pytest.mark.usefixtures("own_settings")
def test_settings_are_told_of_a_rank_that_raised_later(inputs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StepRaised, match="step export"):
        recorded(LeavingBroken(), inputs, tmp_path)
    assert RankRecord(0, tmp_path / "rank0000").value("settings") == [OPENED, LOADED]


def test_an_error_ends_the_rank_and_tells_the_step(inputs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StepRaised, match="step export: RuntimeError: connection lost"):
        recorded(Broken(), inputs, tmp_path)
    record = RankRecord(0, tmp_path / "rank0000")
    error = record.error("export")
    assert error is not None
    assert error["type"] == "RuntimeError"
    assert "in stream" in error["traceback"]
    assert not record.has("forward")


def test_a_claimed_facet_that_is_none(inputs: dict[str, str], tmp_path: Path) -> None:
    target = Toy()
    target.export = None  # type: ignore[assignment]
    with pytest.raises(StepRaised, match="claims the facet 'export'"):
        recorded(target, inputs, tmp_path)
