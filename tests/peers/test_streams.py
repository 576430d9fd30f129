"""What bridges export, as it comes, and a folder of safetensors, through every stage after a stream, byte for byte.

Nothing but the iterator joins the two. A session of a peer names it in MOEREF_PEER; the folder is streamed everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moeref import audit
from moeref.bridge import Checkpoint
from tests.peers.stages import BUCKETS, Deltas, Stream, changed, copies, differences

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "examples" / "defects"))
import by_hand  # noqa: E402

PEER = os.environ.get("MOEREF_PEER", "")
#: AReaL's first rank alone has what is sent.
RANKS = 1 if PEER == "areal" else 2
#: By stage, the names that are wrong.
Wrong = dict[str, list[str]]


def passed(stream: Stream, change: Callable[[], object], folder: str) -> Wrong:
    """Every stage over `stream`, which has the tensors of `folder` at first, and others after `change`."""
    own = copies(stream())
    wrong = {name: differences(stage(stream), own) for name, stage in BUCKETS.items()}
    wrong["checkpoint"] = differences(own, by_file(folder))
    was, deltas = audit.read(stream()), Deltas(stream)
    wrong["audit of the same"] = sorted(changed(audit.read(folder), stream))
    change()
    now = copies(stream())
    new = differences(now, own)
    assert 0 < len(new) < len(now)
    assert deltas.follow() < sum(tensor.nbytes for tensor in own.values()) / 4
    wrong["delta"] = differences(deltas.tensors, now)
    wrong["audit of others"] = sorted(changed(was, stream) ^ set(new))
    return wrong


def by_file(folder: str) -> dict[str, torch.Tensor]:
    with safe_open(Path(folder, "model.safetensors"), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)


def on_a_rank(peer: str, folder: str) -> Wrong:
    bridge = by_hand.PROJECTS[peer](folder)
    bridge.load()
    parameters = [parameter for chunk in bridge.chunks for parameter in chunk.parameters()]
    return passed(bridge.export, lambda: [nudge(parameter.data) for parameter in parameters[::3]], folder)


def nudge(tensor: torch.Tensor) -> None:
    tensor.view(-1)[::40] += 0.25


@pytest.fixture
def folder(tmp_path: Path) -> str:
    by_hand.checkpoint(str(tmp_path), by_hand.QWEN3)
    return str(tmp_path)


@pytest.mark.ranks
@pytest.mark.skipif(not PEER, reason="the session of each peer streams what that peer exports")
def test_every_stage_takes_what_a_peer_exports(folder: str) -> None:
    for wrong in by_hand.on_ranks(RANKS, on_a_rank, PEER, folder, expert_model_parallel_size=RANKS):
        assert {stage: names[:3] for stage, names in wrong.items() if names} == {}


def test_every_stage_takes_a_folder_of_safetensors(folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = str(tmp_path_factory.mktemp("served"))
    by_hand.checkpoint(copy, by_hand.QWEN3)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        with Checkpoint(copy) as checkpoint:
            yield from checkpoint.tensors()

    def change(tensors: dict[str, Any]) -> None:
        for name in sorted(tensors)[::3]:
            nudge(tensors[name])

    wrong = passed(stream, lambda: by_hand.edit(copy, change), folder)
    assert {stage: names[:3] for stage, names in wrong.items() if names} == {}
