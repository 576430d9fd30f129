"""What megatron-core does with each combination of the enumerated space: run by test_dispatcher_against_megatron.py.

`python dispatcher_outcomes.py OUT [DISPATCHER]` writes a line on the installation, then one per combination (of that
dispatcher): stage, class and message of the exception, or nothing. Groups are torch's fake ones: construction forms
groups of any size in one process and moves no data. The CPU substitutions of the kit stand in for CUDA devices, as in
every rank of its gloo world. What is built is unedited; only its weights are not filled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: tp, sequence parallel, ep, etp; 8 experts. The one with ep=3 does not divide them.
LAYOUTS = (
    (1, False, 1, 1),
    (1, False, 2, 1),
    (1, False, 1, 2),
    (1, False, 3, 1),
    (1, True, 2, 1),
    (2, True, 1, 2),
    (2, True, 2, 1),
    (2, True, 2, 2),
    (2, False, 2, 1),
)
#: Dispatcher, backend, moe_enable_deepep.
CHOICES = (
    ("allgather", "deepep", False),
    ("allgather", "hybridep", False),
    ("allgather", None, True),
    ("alltoall", "deepep", False),
    ("alltoall", None, False),
    ("alltoall", "hybridep", True),
    ("flex", None, False),
    ("flex", None, True),
    ("flex", "deepep", False),
    ("flex", "deepep", True),
    ("flex", "hybridep", False),
    ("flex", "hybridep", True),
)
FIELDS = {
    "precision": ("bf16", "fp8", "fp4"),
    "capacity_factor": (None, 1.0),
    "pad_to_capacity": (False, True),
    "variable_lengths": (False, True),
    "pad_for_quantization": (False, True),
    "shared_overlap": (False, True),
}
#: Settings that meet few others: each with every layout and choice, at the first value of FIELDS otherwise.
SINGLY: tuple[dict[str, Any], ...] = (
    {"balancing": "sinkhorn", "capacity_factor": 1.0},
    {"balancing": "sinkhorn"},
    {"precision": "fp32"},
    {"precision": "fp32", "shared_overlap": True},
    {"capacity_factor": -1.0},
    {"capacity_factor": -1.0, "pad_to_capacity": True},
    {"drop_policy": "first", "capacity_factor": 1.0},
    {"drop_policy": "position", "capacity_factor": 1.0},
    {"capacity_factor": 8.0, "pad_to_capacity": True},
    {"permute_fusion": True},
    {"bias": True},
    {"bias": True, "shared_experts": False},
    {"pad_uneven_rows": True},
    {"equal_rows": False},
    {"equal_rows": False, "pad_uneven_rows": True},
    {"shared_experts": False, "shared_overlap": True},
    {"shared_experts": False, "precision": "fp4"},
    {"grouped_gemm": True},
    {"grouped_gemm": True, "precision": "fp8"},
    {"topk": 4, "capacity_factor": 0.5, "pad_to_capacity": True},
)
DEFAULTS = {"shared_experts": True, "experts": 8, "topk": 2, "balancing": "aux_loss"}


def combinations(only: str = "") -> Iterator[dict[str, Any]]:
    """Fields of `Setup`, with the layout as a tuple; layout by layout. `only` names the one dispatcher wanted."""
    for layout in LAYOUTS:
        for dispatcher, backend, flag in (choice for choice in CHOICES if only in ("", choice[0])):
            head = {"layout": layout, "dispatcher": dispatcher, "backend": backend, "enable_deepep": flag}
            for values in itertools.product(*FIELDS.values()):
                yield {**DEFAULTS, **head, **dict(zip(FIELDS, values, strict=True))}
            for alone in SINGLY:
                yield {**DEFAULTS, **head, **{name: values[0] for name, values in FIELDS.items()}, **alone}


def config_fields(setup: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """TransformerConfig arguments; a setting that this version lacks and that is off is left out."""
    import torch

    tp, sp, ep, etp = setup["layout"]
    precision = setup["precision"]
    chosen = {
        "moe_token_dispatcher_type": setup["dispatcher"],
        "moe_flex_dispatcher_backend": setup["backend"],
        "moe_enable_deepep": setup["enable_deepep"],
        "tensor_model_parallel_size": tp,
        "sequence_parallel": sp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "params_dtype": torch.float32 if precision == "fp32" else torch.bfloat16,
        "bf16": precision != "fp32",
        "fp8": "e4m3" if precision == "fp8" else None,
        "fp4": "e2m1" if precision == "fp4" else None,
        "num_moe_experts": setup["experts"],
        "moe_router_topk": setup["topk"],
        "moe_expert_capacity_factor": setup["capacity_factor"],
        "moe_pad_expert_input_to_capacity": setup["pad_to_capacity"],
        "moe_token_drop_policy": setup.get("drop_policy", "probs"),
        "moe_router_load_balancing_type": setup["balancing"],
        "variable_seq_lengths": setup["variable_lengths"],
        "moe_router_padding_for_quantization": setup["pad_for_quantization"],
        "moe_shared_expert_intermediate_size": 8 if setup["shared_experts"] else None,
        "moe_shared_expert_overlap": setup["shared_overlap"],
        "moe_permute_fusion": setup.get("permute_fusion", False),
        "moe_grouped_gemm": setup.get("grouped_gemm", False),
        "add_bias_linear": setup.get("bias", False),
        "moe_hybridep_pad_uneven_dispatch_inputs": setup.get("pad_uneven_rows", False),
    }
    plain = {
        "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "moe_ffn_hidden_size": 8,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "hidden_dropout": 0.0,
        "perform_initialization": False,
    }  # fmt: skip
    return plain | {name: value for name, value in chosen.items() if name in fields or value}


@contextlib.contextmanager
def world(layout: tuple[int, bool, int, int]) -> Iterator[None]:
    """megatron-core's real groups over torch's fake backend, as rank 0 of the smallest world sees them."""
    import math

    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp, _, ep, etp = layout
    dist.init_process_group("fake", rank=0, world_size=math.lcm(tp, ep * etp), store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def outcome(setup: dict[str, Any], fields: set[str]) -> list[str]:
    """[] if config and layer can be made, else stage, exception class and message."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    try:
        config = TransformerConfig(**config_fields(setup, fields))
    except Exception as error:
        return ["config", type(error).__name__, str(error)]
    try:
        # Local experts throughout: grouped GEMM needs Transformer Engine and is no matter of the dispatcher's.
        spec = get_moe_module_spec(use_te=False, num_experts=setup["experts"], moe_grouped_gemm=False)
        layer = spec(config=config, layer_number=1) if callable(spec) else build_module(spec, config, layer_number=1)
    except Exception as error:
        return ["construction", type(error).__name__, str(error)]
    assert layer.token_dispatcher is not None
    return []


def main(out: str, only: str = "") -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import dataclasses

    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core.transformer.moe.moe_layer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import fused_a2a

    cpu.install("cpu", "megatron")
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    packages = {"deep_ep": fused_a2a.HAVE_DEEP_EP, "hybrid_ep": fused_a2a.HAVE_HYBRIDEP}
    packages["transformer_engine"] = megatron.core.transformer.moe.moe_layer.HAVE_TE
    with Path(out).open("w", encoding="utf-8") as file:
        head = {"core": megatron.core.__version__, "packages": [name for name, has in packages.items() if has]}
        print(json.dumps(head), file=file)
        for layout, setups in itertools.groupby(combinations(only), key=lambda setup: setup["layout"]):
            with world(layout):
                for setup in setups:
                    print(json.dumps(outcome(setup, fields)), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
