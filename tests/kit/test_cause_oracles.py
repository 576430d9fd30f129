"""What diagnoses of logits and gradients ask of transformers: terms of the loss, and hidden states that enter norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.requests.policy import WHOLE, advantages
from moeref_conformance.oracles import hidden_states, loss_terms, policy, routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("routes", ["", "a"])
@pytest.mark.parametrize("batch", ["single", "packed"])
def test_terms_of_tokens_make_the_gradient_of_the_head(batch: str, routes: str, tmp_path: Path) -> None:
    want = expected(cell("qwen3_moe", "one", batch=batch, replay="R3", loss_mask=True), tmp_path)
    terms = loss_terms.terms(want, routes=routes)
    trained_T = torch.tensor([bool(want.mask_BS[place]) for place in terms.places])
    made_VH = terms.logprob_TV[trained_T].T @ terms.states_TH[trained_T] / int(trained_T.sum())
    autograd_VH = routed.under(want, routes or "native").gradients["lm_head.weight"].double()
    assert float((made_VH - autograd_VH).abs().max()) < 1e-5 * float(autograd_VH.abs().max())


def test_terms_of_a_policy_make_its_gradient_of_the_head(tmp_path: Path) -> None:
    want = expected(cell("qwen3_moe", "one", loss_mask=True), tmp_path)
    terms = loss_terms.terms(want, WHOLE.temperature)
    gains_BS = advantages(want.tokens_BS).double()
    # The first token of a sample has none before it, by which a policy could have drawn it.
    trained = [number for number, (row, s) in enumerate(terms.places) if s and want.mask_BS[row, s]]
    gains_T1 = torch.stack([gains_BS[terms.places[number]] for number in trained])[:, None]
    by_logits_TV = gains_T1 * terms.logprob_TV[trained] + WHOLE.entropy * terms.entropy_TV[trained]
    made_VH = by_logits_TV.T @ terms.states_TH[trained] / len(trained)
    autograd_VH = policy.gradients(want)["lm_head.weight"].double()
    assert float((made_VH - autograd_VH).abs().max()) < 1e-5 * float(autograd_VH.abs().max())


def test_two_norms_a_layer_and_one_behind_them(tmp_path: Path) -> None:
    want = expected(cell("glm4_moe", "one", layers=3), tmp_path)
    entering = hidden_states.entering_norms(want)
    assert len(entering) == 2 * 3 + 1
    torch.testing.assert_close(entering[0], want.tensors["model.embed_tokens.weight"][want.tokens_BS])
    last_BSH = torch.nn.functional.rms_norm(entering[-1], entering[-1].shape[-1:], None, want.config["rms_norm_eps"])
    logits_BSV = last_BSH * want.tensors["model.norm.weight"] @ want.tensors["lm_head.weight"].T
    torch.testing.assert_close(logits_BSV, want.logits_BSV, rtol=0, atol=1e-5)
