"""Packed samples in the oracle: what stands behind a row changes nothing in it, and rows weigh by their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_rows_are_as_transformers_computes_each_alone(family: str, tmp_path: Path) -> None:
    import transformers

    want = expected(cell(family, "one", layers=3, batch="packed"), tmp_path)
    assert len(set(want.lengths)) == len(want.lengths)
    assert all(length % 2 for length in want.lengths)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        want.dir / "checkpoint", dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    loss, native = torch.zeros(()), routed.under(want, "native")
    for number, length in enumerate(want.lengths):
        tokens_S = want.tokens_BS[number, :length]
        alone_SV = model(tokens_S[None]).logits[0]
        for batched_BSV in (want.logits_BSV, native.logits_BSV):
            torch.testing.assert_close(batched_BSV[number, :length], alone_SV.detach(), rtol=0, atol=2e-6)
        loss = loss + torch.nn.functional.cross_entropy(alone_SV, tokens_S.roll(-1), reduction="sum")
    (loss / sum(want.lengths)).backward()
    for name in ("model.norm.weight", "model.layers.2.self_attn.o_proj.weight", "lm_head.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        far = float((native.gradients[name] - gradient).abs().max() / gradient.abs().max())
        assert far < 1e-5, name


def test_places_behind_the_end_are_none(tmp_path: Path) -> None:
    want = expected(cell("qwen3_moe", "one", batch="packed"), tmp_path)
    places = {(row, position) for row, length in enumerate(want.lengths) for position in range(length)}
    assert {frozenset(of) for of in routed.under(want, "a").experts.values()} == {frozenset(places)}
    assert [len(routes) for routes in routed.given_routes(want, "a")] == [length - 1 for length in want.lengths]
