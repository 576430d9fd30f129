"""What the adapters of the bridges share: process groups, settings for a CPU, the session, and a forward pass.

Nothing here maps names or weights; the bridges do. The forward pass is megatron-core's schedule over the bridge's
model, so a wrong logit comes from the model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeref_conformance.contract.api import Cell, Claims, Info, Layout, TensorMeta, Unsupported, World

if TYPE_CHECKING:
    import torch

#: What megatron-core's configuration needs where there is no GPU. None of it changes a shape, a name or a formula.
ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "moe_shared_expert_overlap": False,  # streams
    "deallocate_pipeline_outputs": False,  # wrong over gloo with the interleaved schedule
}

#: What peers claim alike: Transformer Engine's names over gloo, and full tensors for all ranks, without a plan. Each
#: has families of its own.
CLAIMS = Claims(
    facets=frozenset({"export"}),
    families=frozenset(),
    backends=frozenset({"gloo"}),
    norms=frozenset({"fused"}),
    experts=frozenset({"grouped"}),
    has_plan=False,
    lends=True,
    receivers="all",
)
#: Bytes of a bucket, where a peer has them: so few that a model of a few megabytes goes in many.
BUCKET = 2**16


def info(distribution: str, issues: str) -> Info:
    """Name and installed version. Raises ImportError, naming the session that installs the bridge, if it is missing."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f'{distribution} is not installed here; use nox -s "peers({distribution})"') from error
    return Info(name=distribution, version=version, issues=issues)


def source_info(name: str, issues: str) -> Info:
    """The commit that `peers.toml` pins for a peer whose source is on the path. Raises ImportError if it is not."""
    source = tomllib.loads(files(__package__).joinpath("peers.toml").read_text(encoding="utf-8"))[name]["source"]
    if importlib.util.find_spec(source["package"]) is None:
        raise ImportError(f'{source["package"]} is not on the path here; use nox -s "peers({name})"')
    return Info(name=name, version=f"main@{source['commit'][:9]}", issues=issues)


@contextmanager
def groups(cell: Cell) -> Iterator[None]:
    """megatron-core's process groups of the cell's layout, and its seeds."""
    from megatron.core import parallel_state, tensor_parallel

    layout = cell.layout
    if layout.first is not None or layout.last is not None or layout.embedding or layout.loss or layout.pipeline_layout:
        raise Unsupported(f"layout {layout.text}: the adapters build equal stages only")
    parallel_state.initialize_model_parallel(**_sizes(layout), create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def delta_nets(family: str) -> dict[str, Any]:
    """Settings with which megatron-core builds a family's gated delta nets without flash-linear-attention.

    None for other families. The deterministic form of its module is plain torch but for one function of that package,
    and is refused unless an environment variable of Transformer Engine says that attention is deterministic too.
    """
    if family not in ("qwen3_next", "qwen3_5_moe_text"):
        return {}
    import torch
    from megatron.core.ssm.gated_delta_net import common as home

    def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

    if home.chunk_gated_delta_rule is None:
        home.HAVE_FLA, home.l2norm = True, l2norm
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return {"deterministic_mode": True}


@dataclass
class BridgeExport:
    """Facet `export` from two calls of a bridge: one that loads a folder, one that yields names and tensors."""

    models: Sequence[torch.nn.Module]
    read: Callable[[str], object]
    write: Callable[[], Iterator[tuple[str, torch.Tensor]]]

    def chunks(self) -> Sequence[torch.nn.Module]:
        """The bridge's own modules, one per virtual stage."""
        return self.models

    def load(self, checkpoint: Path) -> None:
        """Load through the bridge, under no_grad: bridges copy into parameters in place."""
        import torch

        with torch.no_grad():
            self.read(str(checkpoint))

    def plan(self) -> Sequence[TensorMeta]:
        """No bridge has a plan, and no adapter claims one."""
        raise Unsupported("the bridge announces nothing before it streams")

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """What the bridge yields. It gives names and tensors only, so shape and dtype are read from the tensor."""
        import torch

        with torch.no_grad():
            for name, tensor in self.write():
                dtype = str(tensor.dtype).removeprefix("torch.")
                yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype), tensor
                del tensor


@dataclass
class BridgeForward:
    """Facet `forward`: the chunks under megatron-core's pipeline schedule, one row a microbatch."""

    models: Sequence[Any]
    cell: Cell
    vocabulary: int

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """`logits_BSV` in fp32 over the unpadded vocabulary on ranks of the last stage, None elsewhere."""
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows, length = list(tokens_BS), tokens_BS.shape[1]
        if self.cell.layout.vpp > 1:  # the interleaved schedule takes whole groups of PP microbatches
            rows += [rows[-1]] * (-len(rows) % self.cell.layout.pp)
        positions_1S = torch.arange(length)[None]
        mask_11SS = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

        def step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
            out = model(next(batches)[None], positions_1S, mask_11SS)
            return out, lambda logits, non_loss_data=True: logits

        for model in self.models:
            model.eval()
        single = len(self.models) == 1
        with torch.no_grad(), _without_mtp(self.models):
            stored = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(rows) if single else [iter(rows) for _ in self.models],
                model=self.models[0] if single else list(self.models),
                num_microbatches=len(rows),
                seq_length=length,
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        local_BSV = torch.cat(stored[: len(tokens_BS)])
        logits_BSV: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV)
        return logits_BSV[..., : self.vocabulary].float()


@contextmanager
def _without_mtp(models: Sequence[Any]) -> Iterator[None]:
    """Leave MTP layers out of the forward: only their loss needs them; megatron-core 0.16.1 fails without labels."""
    kept = [(model, model.mtp_process, model.config, model.config.mtp_num_layers) for model in models]
    for model, _, config, _ in kept:
        model.mtp_process, config.mtp_num_layers = False, None
    try:
        yield
    finally:
        for model, process, config, layers in reversed(
            kept
        ):  # chunks share a config, whose first value is the right one
            model.mtp_process, config.mtp_num_layers = process, layers


@dataclass
class BridgeSession:
    """One opened cell on one rank."""

    export: BridgeExport
    forward: BridgeForward | None = None
    names: None = None
    plan: None = None
    seeds: None = None


def _sizes(layout: Layout) -> dict[str, Any]:
    """The sizes as megatron-core names them, for its groups and for TransformerConfig."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def parallel_settings(cell: Cell) -> dict[str, Any]:
    """The layout as settings of TransformerConfig, and how pipeline stages communicate."""
    layout = cell.layout
    return {
        **_sizes(layout),
        "sequence_parallel": layout.tp > 1,  # megatron-core demands it for MoE training
        "moe_token_dispatcher_type": cell.dispatcher,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": False,
    }


def hf_config(world: World) -> Any:
    """The Hugging Face config as transformers reads it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(world.hf_config)


def torch_dtype(cell: Cell) -> torch.dtype:
    """The dtype of the parameters."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[cell.dtype]
