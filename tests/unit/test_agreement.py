"""Work that ranks begin and end together, in two real gloo processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from moeref.bridge import BridgeError, ShardMap, hf_tensors, load
from moeref.bridge.agreement import all_or_none, check_place, device_of, failures
from moeref.layout import Layout
from moeref.torch_dtypes import TORCH
from tests.unit.models import model
from tests.unit.test_loader import holder

CPU = torch.device("cpu")
LAYOUT = Layout.parse("tp=2").text
WORDS = "ä" * 239 + "xyz"  # 481 bytes


def _rank(work: Callable[[int], Any], rank: int, world: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        said = work(rank)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_bytes(pickle.dumps(said))
    store.set(f"finished {rank}", "")
    store.wait([f"finished {each}" for each in range(world)])  # who leaves closes connections that others still use
    dist.destroy_process_group()


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """What `work(rank)` gives in each of two processes, or its error in words. They are forked: a mutant is in both."""

    def run(work: Callable[[int], Any], world: int = 2) -> list[Any]:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=_rank, args=(work, rank, world, tmp_path)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()  # one that waits for another would outlive the test
        return [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(world)]

    return run


def agreed(digests: list[int], refuses: int = -1) -> Callable[[int], str]:
    def work(rank: int) -> str:
        with all_or_none(digests[rank], CPU, None, BridgeError):
            if rank == refuses:
                raise ValueError("no room")
        return "done"

    return work


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (agreed([5, 5]), ["done", "done"]),
        (agreed([0, 0]), ["done", "done"]),
        (agreed([5, 2**62]), ["BridgeError: ranks [1] plan otherwise", "BridgeError: ranks [0] plan otherwise"]),
        (agreed([5, 5], 1), ["BridgeError: ranks [1] refused (their own error says why)", "ValueError: no room"]),
        (agreed([0, 0], 0), ["ValueError: no room", "BridgeError: ranks [0] refused (their own error says why)"]),
        (lambda rank: failures("", CPU, None), [{}, {}]),
        (lambda rank: failures(f"é{rank}", CPU, None), [{0: "é0", 1: "é1"}] * 2),
        (lambda rank: failures(WORDS * rank, CPU, None), [{1: WORDS[:-1]}] * 2),
        (lambda rank: failures("xyz" + "ä" * 239 * rank, CPU, None), [{0: "xyz", 1: "xyz" + "ä" * 238 + "\ufffd"}] * 2),
        (lambda rank: failures("a\udc80" * rank, CPU, None), [{1: "a?"}] * 2),
        (lambda rank: check_place(Layout.parse("tp=2"), rank, None), [None, None]),
    ],
)
def test_ranks_end_together(ranks: Callable[..., list[Any]], work: Callable[[int], Any], said: list[Any]) -> None:
    assert ranks(work) == said


def test_a_process_alone_says_only_its_own_failure() -> None:
    assert failures("no room", CPU, None) == {0: "no room"}
    assert failures("", CPU, None) == {}
    with all_or_none(5, CPU, None, BridgeError):
        pass


def test_a_rank_in_another_place_is_refused(ranks: Callable[..., list[Any]]) -> None:
    def work(rank: int) -> list[str]:
        first = dist.new_group([0])
        said = []
        for text, here, group in (("tp=4", rank, None), ("tp=2", 1 - rank, None), ("tp=1", 0, first)):
            layout = Layout.parse(text)
            try:
                check_place(layout, here, group)
            except BridgeError as error:
                said.append(str(error).replace(layout.text, text))
        return said

    advice = "give the group that holds the layout's ranks in order"
    zero, one = ranks(work)
    assert zero == [
        f"rank 0 of tp=4, which has 4 ranks: this process is rank 0 of a group of 2; {advice}",
        f"rank 1 of tp=2, which has 2 ranks: this process is rank 0 of a group of 2; {advice}",
    ]
    assert one[:2] == [
        f"rank 1 of tp=4, which has 4 ranks: this process is rank 1 of a group of 2; {advice}",
        f"rank 0 of tp=2, which has 2 ranks: this process is rank 1 of a group of 2; {advice}",
    ]
    assert one[2:] == ["rank 0 of tp=1: this process is not in the group"]


def test_only_the_ranks_of_a_group_take_part(ranks: Callable[..., list[Any]], checkpoint: Path) -> None:
    def work(rank: int) -> dict[int, str] | None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        check_place(Layout.parse("tp=2"), rank - 1, group)
        with all_or_none(5, CPU, group, BridgeError):
            pass
        shard_map = ShardMap(model("qwen3_moe"), Layout.parse("tp=2"))
        load(shard_map, rank - 1, holder(shard_map, rank - 1), checkpoint, group)
        return failures(f"é{rank}X", CPU, group)

    assert ranks(work, 3) == [None, {0: "é1X", 1: "é2X"}, {0: "é1X", 1: "é2X"}]


def test_without_a_process_group_a_layout_has_one_rank() -> None:
    check_place(Layout.parse("tp=1"), 0, None)
    with pytest.raises(BridgeError, match="this process is rank 0 of a group of 1; give the group"):
        check_place(Layout.parse("tp=2"), 0, None)


def test_tensors_are_exchanged_where_the_parameters_are(ranks: Callable[..., list[Any]]) -> None:
    empty, meta = torch.nn.Module(), torch.nn.Linear(1, 1, device="meta")
    assert device_of([], None) == device_of([empty], None) == CPU
    assert device_of([empty, meta], None) == torch.device("meta")
    assert ranks(lambda rank: str(device_of([torch.nn.Linear(1, 1)], None))) == ["cpu", "cpu"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    shard_map = ShardMap(model("qwen3_moe"), Layout.parse("tp=1"))
    tensors = {t.name: torch.ones(t.shape, dtype=TORCH[t.dtype]) for t in hf_tensors(shard_map)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loading(
    folder: Path, layouts: tuple[str, str] = ("tp=2", "tp=2"), lacks: int = -1, spoiled: int = -1
) -> Callable[[int], Any]:
    def work(rank: int) -> list[float]:
        shard_map = ShardMap(model("qwen3_moe"), Layout.parse(layouts[rank]))
        chunks = holder(shard_map, rank % shard_map.layout.world)
        if rank == spoiled:  # storage that cannot be written: seen only when it is
            parameter = next(chunks[0].parameters())
            parameter.data = parameter.data[:1].expand_as(parameter)
        load(shard_map, rank, chunks if rank != lacks else [], folder)
        return sorted({float(p.detach().max()) for chunk in chunks for p in chunk.parameters()})

    return work


def test_ranks_load_together_or_not_at_all(ranks: Callable[..., list[Any]], checkpoint: Path) -> None:
    assert ranks(loading(checkpoint)) == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("wrong", "first", "second"),
    [
        (
            {"lacks": 1},
            "BridgeError: qwen3_moe, rank 0: ranks [1] refused (their own error says why); nothing was written",
            f"BridgeError: qwen3_moe, rank 1 (tp1 pp0 ep0 etp1 dp0), layout {LAYOUT}: chunk 0 has no",
        ),
        (
            {"layouts": ("tp=2", "ep=2")},
            "BridgeError: qwen3_moe, rank 0: ranks [1] plan otherwise; nothing was written",
            "BridgeError: qwen3_moe, rank 1: ranks [0] plan otherwise; nothing was written",
        ),
        (
            {"spoiled": 1},
            "BridgeError: qwen3_moe, rank 0: ranks [1] refused (their own error says why); the model is loaded in part",
            "RuntimeError: ",
        ),
    ],
)
def test_no_rank_loads_alone(
    ranks: Callable[..., list[Any]], checkpoint: Path, wrong: dict[str, Any], first: str, second: str
) -> None:
    said = ranks(loading(checkpoint, **wrong))
    assert said[0] == first
    assert said[1].startswith(second)
