"""The judges of FP8 in blocks and INT4 in groups, on records of the kit's own designs.

Who was given what, and tensors in other forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moeref_conformance.contract.api import Claims, TensorMeta
from moeref_conformance.contract.records import Observation, RankRecord, event, write_events
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.plain_fp8 import Named, Quantiser
from moeref_conformance.selftest.plain_int4 import Packer
from safetensors.torch import save_file

pytestmark = pytest.mark.cpu
RULES = sorted(rule for rule in JUDGES if rule.startswith("QNT-"))
CELL = cell("qwen3_moe", "ep2", dtype="bfloat16")
CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 1}
NAME = "model.layers.0.mlp.experts.1.up_proj.weight"
SCALES = f"{NAME}_scale_inv"
CLAIMS = Claims(facets=frozenset({"quantised", "export"}), families=frozenset(), backends=frozenset({"gloo"}))


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {NAME: (40, 20), "model.layers.0.mlp.gate.weight": (4, 20), f"{request.KEPT}.weight": (20, 16)}
    return {name: (0.1 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def sent(tensors: dict[str, torch.Tensor], tmp_path: Path) -> list[Named]:
    (tmp_path / "config.json").write_text(json.dumps(request.config(CONFIG)))
    metas = [
        (TensorMeta(name=n, shape=(), dtype=""), t)
        for n, t in request.weights(tensors, request.BLOCKS["qwen3_moe"]).items()
    ]
    session = SimpleNamespace(export=SimpleNamespace(stream=lambda: metas))
    return list(Quantiser(session, CELL).stream(tmp_path))


def red(
    tensors: dict[str, torch.Tensor],
    given: list[list[Named]],
    folder: Path,
    left: tuple[tuple[str, str], ...] = (),
    **claims: Any,
) -> dict[str, list[str]]:
    """What the rules that fail say of what each rank was given."""
    told = [{"names": [name for name, _ in of], "left": left, "overwritten": []} for of in given]
    write_events(folder, {rank: [event("quantised", "ok", value=value)] for rank, value in enumerate(told)})
    for rank, of in enumerate(given):
        save_file(dict(of), folder / f"rank{rank:04}" / "quantised.safetensors")
    records = [RankRecord(rank, folder / f"rank{rank:04}") for rank in range(len(given))]
    expected: Any = SimpleNamespace(config=CONFIG, tensors=tensors)
    case = Case(CELL, expected, Observation(CELL, records), None, replace(CLAIMS, **claims))
    outcomes = {rule: JUDGES[rule](case).findings for rule in RULES}
    return {rule: [finding.message for finding in found] for rule, found in outcomes.items() if found}


def test_what_the_writer_alone_is_given_is_green(
    tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path
) -> None:
    assert red(tensors, [sent, []], tmp_path) == {}


def test_shares_are_one(tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path) -> None:
    assert red(tensors, [sent[:2], sent[2:]], tmp_path / "share", receivers="share") == {}
    again = red(tensors, [sent, sent[:1]], tmp_path / "again", receivers="share")
    assert again == {"QNT-001": [f"{sent[0][0]}: was sent 2 times"]}
    assert set(red(tensors, [sent[:2], sent[2:]], tmp_path / "writer")) == {"QNT-001"}


def test_every_receiver_is_judged(tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path) -> None:
    assert red(tensors, [sent, sent], tmp_path / "all", receivers="all") == {}
    spoiled = [(n, -tensor if n == SCALES else tensor) for n, tensor in sent]
    for claim in ("all", "writer"):
        found = red(tensors, [sent, spoiled], tmp_path / claim / "other", receivers=claim)
        assert found.keys() - {"QNT-006"} == {"QNT-004"}
    missing = [f"{sent[0][0]}: was never sent"]
    assert red(tensors, [sent, sent[1:]], tmp_path / "short", receivers="all") == {"QNT-001": missing}
    assert red(tensors, [sent, []], tmp_path / "none", receivers="all") == {"QNT-001": [f"{NAME}: was never sent"]}


def test_what_the_stream_has_changed_is_told(
    tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path
) -> None:
    found = red(tensors, [[], sent], tmp_path, left=(("buffer", "0:a"), ("buffer", "0:b"), ("grad", "0:c")))
    changed = "the stream in FP8 changed the"
    assert found == {"QNT-007": [f"{changed} buffer of 0:a and 1 more", f"{changed} grad of 0:c"]}


def test_nothing_sent_and_nothing_recorded_are_findings(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    of_tensors = set(RULES) - {"QNT-007"}
    assert red(tensors, [[], []], tmp_path / "none") == {rule: ["no rank was given a tensor"] for rule in of_tensors}
    missing = red(tensors, [], tmp_path / "lost")
    assert missing.keys() == {*RULES}
    assert all("no record of step quantised" in said for of in missing.values() for said in of)


@pytest.mark.parametrize(
    ("name", "change", "rule", "says"),
    [
        (SCALES, lambda t: t.to(torch.float16), "QNT-003", r"are float16 \[3, 2\]"),
        (SCALES, lambda t: t[:, :1].contiguous(), "QNT-003", r"are float32 \[3, 1\]"),
        (SCALES, lambda t: t.masked_fill(t == t.max(), torch.inf), "QNT-004", "with scale inf"),
        (SCALES, lambda t: t.masked_fill(t == t.max(), torch.nan), "QNT-004", "with scale nan"),
        (SCALES, lambda t: -t, "QNT-004", "beyond the rounding"),
        (SCALES, lambda t: t * 1.125, "QNT-004", "beyond the rounding"),
        (NAME, lambda t: t.view(torch.uint8).roll(1, 0).view(t.dtype), "QNT-004", "beyond the rounding"),
        (NAME, lambda t: t.view(torch.int8), "QNT-002", r"is int8 \[40, 20\]"),
        (NAME, lambda t: t.view(torch.uint8).t().contiguous().view(t.dtype), "QNT-002", r"\[20, 40\]"),
        (f"{request.KEPT}.weight", lambda t: t.nextafter(torch.tensor(2.0).bfloat16()), "QNT-005", "differ"),
    ],
)
def test_what_is_otherwise_is_told(
    tensors: dict[str, torch.Tensor],
    sent: list[Named],
    tmp_path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    rule: str,
    says: str,
) -> None:
    changed = [(n, change(tensor) if n == name else tensor) for n, tensor in sent]
    found = red(tensors, [changed, []], tmp_path)
    # QNT-006 requires QNT-004.
    assert found.keys() - {"QNT-006"} == {rule}
    assert any(re.search(says, message) for message in found[rule]), found


def test_a_scale_that_is_larger_than_needed_is_told(
    tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path
) -> None:
    of = dict(sent)
    of[SCALES], of[NAME] = of[SCALES] * 2, (of[NAME].float() / 2).to(torch.float8_e4m3fn)
    found = red(tensors, [list(of.items()), []], tmp_path)
    assert found.keys() == {"QNT-006"}
    assert "that of block [0, 0] 2 times" in found["QNT-006"][0]


def test_a_scale_below_0_is_told_though_the_product_is_right(
    tensors: dict[str, torch.Tensor], sent: list[Named], tmp_path: Path
) -> None:
    of = dict(sent)
    of[SCALES], of[NAME] = -of[SCALES], (-of[NAME].float()).to(torch.float8_e4m3fn)
    found = red(tensors, [list(of.items()), []], tmp_path)
    assert found.keys() == {"QNT-006"}
    assert "scales are below 0, that of block [0, 0] -1 times" in found["QNT-006"][0]


KIMI = cell("kimi_k25", "tp2", dtype="bfloat16")
EXPERT = "language_model.model.layers.1.mlp.experts.1.up_proj.weight"
IN_INT4 = replace(CLAIMS, sends_int4=True)


def in_int4(folder: Path, change: Callable[[Named], torch.Tensor] | None = None, claims: Claims = IN_INT4) -> Any:
    """What the rules that fail say where a rank is given an expert in INT4, each tensor as `change` makes it."""
    torch.manual_seed(0)
    names = (EXPERT, "language_model.model.layers.1.mlp.gate.weight")
    tensors = {name: (0.1 * torch.randn(6, 24)).bfloat16() for name in names}
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}
    (folder / "config.json").write_text(json.dumps(request.asked("kimi_k25", config)))
    weights = request.weights(tensors, request.block("kimi_k25"))
    metas = [(TensorMeta(name=n, shape=(), dtype=""), t) for n, t in weights.items()]
    sent = Packer(SimpleNamespace(export=SimpleNamespace(stream=lambda: metas)), KIMI).stream(folder)
    given = [(name, change((name, tensor)) if change else tensor) for name, tensor in sent]
    told = {"names": [name for name, _ in given], "left": (), "overwritten": []}
    none = {"names": [], "left": (), "overwritten": []}
    write_events(folder, {rank: [event("quantised", "ok", value=of)] for rank, of in enumerate((told, none))})
    save_file(dict(given), folder / "rank0000" / "quantised.safetensors")
    save_file({}, folder / "rank0001" / "quantised.safetensors")
    records = [RankRecord(rank, folder / f"rank{rank:04}") for rank in range(2)]
    expected: Any = SimpleNamespace(config=config, tensors=tensors)
    case = Case(KIMI, expected, Observation(KIMI, records), None, claims)
    return {rule: outcome for rule in RULES if rule != "QNT-008" for outcome in [JUDGES[rule](case)]}


def test_what_is_packed_is_green_and_untested_where_it_is_not_claimed(tmp_path: Path) -> None:
    assert all(not outcome.findings and not outcome.untested for outcome in in_int4(tmp_path).values())
    not_claimed = in_int4(tmp_path, claims=CLAIMS).values()
    assert {outcome.untested for outcome in not_claimed} == {"the target claims sends_int4=False"}


@pytest.mark.parametrize(
    ("end", "change", "rule", "says"),
    [
        ("_packed", lambda t: t.long(), "QNT-002", r"_packed: is int64 \[6, 3\]"),
        ("_packed", lambda t: t.T.contiguous(), "QNT-002", r"is int32 \[3, 6\]"),
        ("_packed", lambda t: t.roll(1, 0), "QNT-004", "beyond the rounding of INT4"),
        ("_shape", lambda t: t.flip(0), "QNT-002", r"_shape: is int32 \[24, 6\]"),
        ("_shape", lambda t: t.float(), "QNT-002", "_shape: is float32"),
        ("_scale", lambda t: t[:, :1].contiguous(), "QNT-003", r"are bfloat16 \[6, 1\]"),
        ("_scale", lambda t: t.double(), "QNT-003", "are float64"),
        ("_scale", lambda t: t * 1.25, "QNT-004", "beyond the rounding of INT4"),
        ("_scale", lambda t: t.masked_fill(t == t.max(), torch.nan), "QNT-004", "with scale nan"),
        ("gate.weight", lambda t: t.nextafter(torch.tensor(2.0).bfloat16()), "QNT-005", "differ"),
    ],
)
def test_what_is_packed_otherwise_is_told(
    tmp_path: Path, end: str, change: Callable[[torch.Tensor], torch.Tensor], rule: str, says: str
) -> None:
    outcomes = in_int4(tmp_path, lambda pair: change(pair[1]) if pair[0].endswith(end) else pair[1])
    found = {name: outcome.findings for name, outcome in outcomes.items() if outcome.findings}
    assert found.keys() - {"QNT-006"} == {rule}
    assert any(re.search(says, finding.message) for finding in found[rule]), found


def test_a_scale_in_int4_that_is_larger_than_needed_is_told(tmp_path: Path) -> None:
    def larger(pair: Named) -> torch.Tensor:
        return pair[1] * 1.03 if pair[0].endswith("_scale") else pair[1]

    found = in_int4(tmp_path, larger)["QNT-006"].findings
    assert "scales are larger than needed, that of block [0, 0] 1.0" in found[0].message
