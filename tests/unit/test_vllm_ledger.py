"""The ledger of vLLM's worker where an engine does not lead it: two of one id, drafts, a scheduler it does not follow.

`nox -s rollout` compares its labels with a real engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeref.provenance import ProvenanceError
from moeref.vllm import ledger
from moeref.vllm.ledger import Ledger


def step(
    new: dict[str, tuple[list[int], list[int], int]] | None = None,
    later: dict[str, tuple[int, int]] | None = None,
    count: int = 1,
    ended: tuple[str, ...] = (),
    drafts: tuple[str, ...] = (),
) -> Any:
    """What vLLM's scheduler says. new: id -> (prompt, blocks, computed); later: id -> (computed, sampled)."""
    new, later = new or {}, later or {}
    return SimpleNamespace(
        finished_req_ids=ended,
        num_scheduled_tokens={
            **{id_: len(p) - computed for id_, (p, _, computed) in new.items()},
            **dict.fromkeys(later, count),
        },
        scheduled_spec_decode_tokens={id_: [1] for id_ in drafts},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=id_, prompt_token_ids=p, block_ids=(blocks,), num_computed_tokens=computed)
            for id_, (p, blocks, computed) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(later),
            resumed_req_ids=set(),
            new_block_ids=[None] * len(later),
            num_computed_tokens=[computed for computed, _ in later.values()],
            num_output_tokens=[sampled for _, sampled in later.values()],
        ),
    )


A, B = "a-00000000", "a-11111111"
PROMPT = [7, 8, 9]


def test_a_prompt_that_hits_blocks_has_the_versions_that_wrote_them() -> None:
    found = Ledger(blocks=8, size=2)
    found.step(step({A: (PROMPT, [3, 4], 0)}), 5)
    found.step(step({"b-00000000": (PROMPT, [3, 6], 2)}, {A: (3, 1)}), 6)
    assert found.take("a") == {
        "tokens_T": [7, 8, 9, -1, -1],
        "weights_T": [-1, -1, -1, 5, 6],
        "kv_T": [-1, -1, -1, 5, 5],
        "route_T": [5, 5, 5, 6, -1],
        "logprob_T": [0, 0, 0, 1, 1],
    }
    assert found.take("b")["route_T"] == [5, 5, 6, -1]


def test_labels_are_told_once_and_of_one_request() -> None:
    found = Ledger(blocks=8, size=2)
    with pytest.raises(ProvenanceError, match="0 requests 'a' have labels"):
        found.take("a")
    found.step(step({A: (PROMPT, [3, 4], 0), B: (PROMPT, [5, 6], 0)}), 0)
    with pytest.raises(ProvenanceError, match="2 requests 'a' have labels"):
        found.take("a")
    found.step(step({"0_c-00000000": (PROMPT, [1, 2], 0)}, ended=(A, B, "unknown")), 0)
    assert found.take("c", 0)["weights_T"] == [-1, -1, -1, 0]
    with pytest.raises(ProvenanceError, match="0 requests '0_c'"):
        found.take("c", 0)
    found.step(step(ended=("0_c-00000000",)), 0)
    assert not found._requests


def test_old_labels_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WAITING", 1)
    found = Ledger(blocks=8, size=2)
    found.step(step({A: (PROMPT, [3, 4], 0), "b-00000000": (PROMPT, [5, 6], 0)}), 0)
    found.step(step(ended=(A,)), 0)
    found.step(step(ended=("b-00000000",)), 0)
    assert found.take("b")["weights_T"] == [-1, -1, -1, 0]
    with pytest.raises(ProvenanceError, match="0 requests 'a'"):
        found.take("a")
    assert not found._named


def test_what_is_not_followed_has_no_labels() -> None:
    found = Ledger(blocks=8, size=2)
    found.step(step({A: (PROMPT, [3, 4], 0), "b-00000000": (PROMPT, [5, 6], 0)}), 0)
    found.step(step(later={A: (2, 1), "b-00000000": (3, 1)}, drafts=("b-00000000",)), 0)
    found.step(step(later={A: (3, 2), "b-00000000": (4, 2)}), 0)
    with pytest.raises(ProvenanceError, match="2 of 4 tokens are computed, recorded 3 of 4"):
        found.take("a")
    with pytest.raises(ProvenanceError, match="no labels: drafts"):
        found.take("b")
