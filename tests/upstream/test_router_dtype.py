"""The router's dtype: with moeref's setting Megatron chooses transformers' experts in bf16, by default it does not."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear, topk_routing_with_score_function
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from moeref.config import resolve
from moeref.layout import Layout
from tests.unit.models import model

pytestmark = pytest.mark.cpu
TOKENS, HIDDEN, EXPERTS, TOP_K = 4096, 4096, 128, 8  # sizes of GLM-4.5-Air
DTYPES = {None: torch.bfloat16, "fp32": torch.float32}


def agreement(dtype: torch.dtype) -> float:
    """Share of tokens whose experts are those of transformers' router, which has the same weight and input in bf16."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_size": HIDDEN}
    router = Glm4MoeTopkRouter(AutoConfig.for_model("glm4_moe", **sizes)).bfloat16()
    torch.nn.init.normal_(router.weight, std=0.02)
    x_TH, bias_E = torch.randn(TOKENS, HIDDEN).bfloat16(), 0.01 * torch.randn(EXPERTS)
    wanted_TK = (router(x_TH).sigmoid() + bias_E).topk(TOP_K).indices
    logits_TE = router_gating_linear(x_TH, router.weight.data, None, dtype)
    map_TE = topk_routing_with_score_function(logits_TE, TOP_K, score_function="sigmoid", expert_bias=bias_E)[1]
    return float(map_TE.gather(1, wanted_TK).all(1).float().mean())


def test_megatron_routes_as_transformers_with_moerefs_dtype_only() -> None:
    setting = resolve(model("glm4_moe"), Layout()).by_name["moe_router_dtype"]
    assert (setting.value, setting.origin) == ("fp32", "hf")
    assert agreement(DTYPES[setting.value]) == 1
    assert agreement(DTYPES[None]) < 0.99


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "mixtral", "gpt_oss"])
def test_no_dtype_is_set_where_transformers_routes_in_that_of_the_parameters(family: str) -> None:
    assert "moe_router_dtype" not in resolve(model(family), Layout()).by_name
