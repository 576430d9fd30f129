"""What the scripts of this folder share: tiny checkpoints, ranks over gloo, and each project's own calls.

Of the kit only the stand-ins for CUDA and Transformer Engine are used, and what its adapters do around a trainer's
converters: slime's and miles' plain model and arguments, AReaL's engine without a trainer, ROLL's arguments. Nothing
here compares or judges; the scripts do.
"""

from __future__ import annotations

import copy
import multiprocessing
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from moeref_conformance.worlds import cpu

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN3 = {**_SIZES, "model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True}
MIXTRAL = {**_SIZES, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}
GLM45 = {
    **_SIZES,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
DEEPSEEK = {
    **_SIZES,
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
QWEN35 = {
    **_SIZES,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
#: How long a rank waits for another in a collective, in seconds.
PATIENCE = 40


@dataclass
class Bridge:
    """The model that a project built on this rank, and its two calls on it."""

    chunks: list[Any]
    load: Callable[[], object]
    export: Callable[[], Iterator[tuple[str, Any]]]

    def sent(self) -> dict[str, Any]:
        """What it exports, copied as it comes."""
        return {name: tensor.clone() for name, tensor in self.export()}


def checkpoint(folder: str, config: dict[str, Any]) -> None:
    """Write `config.json` and the random weights that transformers makes of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)), dtype=torch.float32)
    for weight in model.parameters():  # transformers starts with small weights, biases of 0 and norms of 1
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)


def edit(folder: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a checkpoint, by name."""
    from safetensors.torch import load_file, save_file

    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def on_ranks(count: int, body: Callable[..., Any], *words: Any, **sizes: int) -> list[Any]:
    """What `body(*words)` returns on each of `count` ranks, in megatron-core's groups of `sizes`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        return [run.result() for run in [pool.submit(_rank, r, count, port, body, words, sizes) for r in range(count)]]


def _rank(rank: int, count: int, port: int, body: Callable[..., Any], words: Any, sizes: dict[str, int]) -> Any:
    import torch.distributed as dist

    prepare()
    from megatron.core import parallel_state, tensor_parallel

    address, patience = f"tcp://localhost:{port}", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=patience)
    parallel_state.initialize_model_parallel(
        **sizes, create_gloo_process_groups=False, distributed_timeout_minutes=PATIENCE / 60
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    return body(*words)


def prepare() -> None:
    """Let megatron-core and the projects run without a GPU."""
    from moeref_conformance.targets.peers import before_megatron

    cpu.install("cpu", "torch")
    before_megatron("mbridge", "cpu")  # the same for all
    cpu.install("cpu", "megatron")


def settings() -> dict[str, Any]:
    """The layout of the groups, and what a CPU needs, as settings of TransformerConfig."""
    from megatron.core import parallel_state as groups
    from moeref_conformance.targets.peers.common import ON_CPU

    tensor = groups.get_tensor_model_parallel_world_size()
    return {
        **ON_CPU,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": groups.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": groups.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": groups.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": tensor > 1,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
    }


def mbridge(folder: str, **more: Any) -> Bridge:
    """mbridge's README: AutoBridge, get_model, load_weights, export_weights."""
    import torch
    from mbridge import AutoBridge
    from transformers import AutoConfig

    config, given = AutoConfig.from_pretrained(folder), settings()
    for name, value in (config.rope_parameters or {}).items():  # where transformers 4 had them, and mbridge looks
        if name in ("rope_theta", "partial_rotary_factor"):
            setattr(config, name, value)
    rows = given["tensor_model_parallel_size"]
    bridge = AutoBridge.from_config(config, dtype=torch.float32, make_vocab_size_divisible_by=rows)
    bridge.set_extra_args(**given, **more)
    models = bridge.get_model(bf16=False, use_cpu_initialization=True)
    chunks = [getattr(model, "module", model) for model in models]
    return _calls(chunks, lambda: bridge.load_weights(models, folder), lambda: bridge.export_weights(models))


def mcore_bridge(folder: str, **more: Any) -> Bridge:
    """mcore-bridge's README: hf_to_mcore_config, get_mcore_model, load_weights, export_weights."""
    import mcore_bridge as package
    import torch
    from transformers import AutoConfig

    given = package.hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    config = package.ModelConfig(**{**given, **settings(), "params_dtype": torch.float32, **more})
    models = package.get_mcore_model(config)
    bridge = config.bridge
    return _calls(models, lambda: bridge.load_weights(models, folder), lambda: bridge.export_weights(models))


def megatron_bridge(folder: str, **more: Any) -> Bridge:
    """megatron-bridge's README: AutoBridge, to_megatron_provider, provide_distributed_model, *_hf_weights."""
    import torch
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    # The first two are kernels of Transformer Engine; the vocabulary is padded to a multiple of TP.
    plain = {"moe_permute_fusion": False, "cross_entropy_loss_fusion": False, "should_pad_vocab": True}
    floats = dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32)
    for name, value in {
        **settings(),
        **plain,
        "make_vocab_size_divisible_by": 1,
        **floats,
        "bf16": False,
        **more,
    }.items():
        setattr(provider, name, value)
    provider.finalize()
    models = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, bf16=provider.bf16
    )
    return _calls(
        models,
        lambda: bridge.load_hf_weights(models),
        lambda: bridge.export_hf_weights(models, show_progress=False),
    )


def slime(folder: str, mtp_num_layers: int = 0, dtype: str = "float32") -> Bridge:
    """slime's load_hf_weights and HfWeightIteratorDirect, on megatron-core's own model."""
    from moeref_conformance.targets.peers import plain_model, slime_calls
    from moeref_conformance.targets.peers import slime as adapter
    from transformers import AutoConfig

    adapter.Slime().preload()
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.utils.distributed_utils import init_gloo_group

    init_gloo_group()
    config, cell = AutoConfig.from_pretrained(folder), _cell(folder, mtp=mtp_num_layers, dtype=dtype)
    chunks = plain_model.build(config, cell)
    models, words = [plain_model.Wrapped(chunk) for chunk in chunks], slime_calls.arguments(config, cell)
    return _calls(chunks, lambda: load_hf_weights(words, models, folder), lambda: adapter.sent(config, cell, chunks))


def miles(folder: str, mtp_num_layers: int = 0) -> Bridge:
    """mbridge's load_weights with miles' models, and miles' HfWeightIteratorDirect, on megatron-core's own model."""
    from moeref_conformance.targets.peers import mbridge_calls, plain_model
    from moeref_conformance.targets.peers import miles as adapter

    adapter.Miles().preload()
    adapter.share_groups()
    cell = _cell(folder, mtp=mtp_num_layers)
    bridge = mbridge_calls.bridge_of(cell, Namespace(hf_config=folder), pads=False)
    chunks = plain_model.build(bridge.hf_config, cell)
    return _calls(
        chunks, lambda: bridge.load_weights(chunks, folder), lambda: adapter.sent(bridge.hf_config, cell, chunks)
    )


def areal(folder: str) -> Bridge:
    """AReaL's `_load_model_from_hf` and `_update_weights_via_registry`, on a model of mbridge's."""
    from moeref_conformance.targets.peers import areal as adapter
    from moeref_conformance.targets.peers import mbridge_calls, plain_model

    adapter.AReaL().preload()
    bridge = mbridge_calls.bridge_of(_cell(folder), Namespace(hf_config=folder))
    models = bridge.get_model(bf16=False, use_cpu_initialization=True)
    loading = adapter.given(bridge, models)
    sending = adapter.given(bridge, [plain_model.Wrapped(model) for model in models])
    return _calls(models, lambda: loading._load_model_from_hf(folder), lambda: adapter.sent(sending))


def roll(folder: str, **more: Any) -> Bridge:
    """mcore_adapter's AutoModel and ROLL's gather_all_hf_weights."""
    from moeref_conformance.targets.peers import roll as adapter

    adapter.Roll().preload()
    models = adapter.model(folder, adapter.arguments(_cell(folder), **more))
    return _calls(list(models), lambda: adapter.load(models, folder), lambda: adapter.sent(list(models)))


def _cell(folder: str, **more: Any) -> Any:
    """The layout of the groups as a cell, for what adapters take from one."""
    from megatron.core import parallel_state as groups
    from moeref_conformance.contract.cells import Cell, Layout
    from transformers import AutoConfig

    layout = Layout(
        tp=groups.get_tensor_model_parallel_world_size(),
        pp=groups.get_pipeline_model_parallel_world_size(),
        ep=groups.get_expert_model_parallel_world_size(),
    )
    return Cell(family=AutoConfig.from_pretrained(folder).model_type, layout_name="", layout=layout, **more)


def verl(folder: str, **more: Any) -> Bridge:
    """A model of mbridge's, as verl has it by default, and the per_tensor_generator of its asynchronous trainers."""
    from moeref_conformance.targets.peers import verl as adapter
    from transformers import AutoConfig

    adapter.Verl().preload()
    built, config = mbridge(folder, **more), AutoConfig.from_pretrained(folder)
    return _calls(built.chunks, built.load, lambda: adapter.sent(config, built.chunks))


PROJECTS: dict[str, Callable[..., Bridge]] = {
    "areal": areal,
    "mbridge": mbridge,
    "mbridge-main": mbridge,
    "mcore-bridge": mcore_bridge,
    "megatron-bridge": megatron_bridge,
    "miles": miles,
    "roll": roll,
    "slime": slime,
    "verl": verl,
}


def _calls(chunks: list[Any], load: Callable[[], object], export: Callable[[], Iterator[tuple[str, Any]]]) -> Bridge:
    """The two calls under no_grad: bridges copy into parameters in place."""
    import torch

    @torch.no_grad()
    def stream() -> Iterator[tuple[str, Any]]:
        yield from export()

    return Bridge(chunks, torch.no_grad()(load), stream)


def away(bridge: Bridge, folder: str) -> float:
    """The largest difference of the model's logits from transformers', on one rank."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens, positions = torch.arange(12)[None], torch.arange(12)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        return float((bridge.chunks[0].eval()(tokens, positions, mask) - right).abs().max())


def tell(shown: bool, evidence: str) -> NoReturn:
    """Print the evidence. Exit with 0 where the defect is shown, with 1 where it is mended."""
    print(f"{'shown' if shown else 'mended'}: {evidence}")
    sys.exit(not shown)
