"""Rank entries that build a real megatron-core GPTModel with experts and run its forward schedule."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from moeref_conformance.contract.api import Cell, Layout, Target, World

LAYERS, HIDDEN, VOCAB, SEQUENCE, EXPERTS = 4, 32, 64, 16, 4


def config(layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=32,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=32,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.tp > 1,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        deallocate_pipeline_outputs=False,
    )


def groups(layout: Layout) -> None:
    """Megatron's process groups, and a seed."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )
    model_parallel_cuda_manual_seed(1)


def build(layout: Layout) -> list[GPTModel]:
    """The chunks of this rank, with parameters that depend only on the global name and the full shape being equal."""
    groups(layout)
    cfg, chunks = config(layout), []
    for stage in range(layout.vpp):
        vp = {"vp_stage": stage} if layout.vpp > 1 else {}
        chunks.append(
            GPTModel(
                config=cfg,
                transformer_layer_spec=get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, **vp),
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **vp),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **vp),
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                **vp,
            )
        )
    return chunks


def fill(chunks: list[GPTModel]) -> None:
    """Column by column the same values whatever the split: each element from its layer, expert, and full position."""
    tp, etp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    with torch.no_grad():
        for chunk in chunks:
            offsets = {f"decoder.layers.{i}.": layer.layer_number for i, layer in enumerate(chunk.decoder.layers)}
            for name, parameter in chunk.named_parameters():
                layer = next((n for prefix, n in offsets.items() if name.startswith(prefix)), 0)
                expert, key = 0, name.split(".", 3)[-1] if layer else name
                if "local_experts." in name:
                    local = int(name.split("local_experts.")[1].split(".")[0])
                    expert = local + parallel_state.get_expert_model_parallel_rank() * len(
                        chunk.decoder.layers[0].mlp.experts.local_experts
                    )
                    key = name.split("local_experts.")[1].split(".", 1)[1]
                split = getattr(parameter, "tensor_model_parallel", False)
                size, at = (1, 0) if not split else _split("local_experts." in name, tp, etp)
                dim = parameter.partition_dim if split else 0
                full = list(parameter.shape)
                full[dim] *= size
                generator = torch.Generator().manual_seed(layer * 1000 + expert * 37 + sum(map(ord, key)))
                values = torch.randn(full, generator=generator) * 0.2 + (1.0 if "norm" in key else 0.0)
                parameter.copy_(_shard(values, key, dim, size, at))


def _split(expert: bool, tp: int, etp: int) -> tuple[int, int]:
    if expert:
        return parallel_state.get_expert_tensor_parallel_world_size(), etp
    return parallel_state.get_tensor_model_parallel_world_size(), tp


def _shard(values: torch.Tensor, key: str, dim: int, size: int, at: int) -> torch.Tensor:
    """A gated linear_fc1 holds gate and up one after the other in every shard."""
    if "linear_fc1" in key and size > 1:
        return torch.cat([half.chunk(size, dim)[at] for half in values.chunk(2, dim)], dim)
    return values.chunk(size, dim)[at]


def forward(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Logits of two microbatches, gathered over tensor parallel ranks, saved by ranks of the last stage."""
    chunks = build(cell.layout)
    fill(chunks)
    tokens_BS = torch.randint(VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
    position_S = torch.arange(SEQUENCE)[None]

    def step(batches, model, *rest):  # type: ignore[no-untyped-def]
        out = model(next(batches)[None], position_S, None)
        return out, lambda logits, non_loss_data=False: logits

    with torch.no_grad():
        logits = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(tokens_BS) for _ in chunks] if len(chunks) > 1 else iter(tokens_BS),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if logits:
        local = torch.cat(logits)
        pieces = [torch.empty_like(local) for _ in range(cell.layout.tp)]
        dist.all_gather(pieces, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        torch.save(torch.cat(pieces, -1), folder / "logits.pt")


def backward(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """One training step of the schedule: the collectives of the backward pass, then the gradient reduction of norms."""
    chunks = build(cell.layout)
    fill(chunks)
    norms = [p for n, p in chunks[0].named_parameters() if "norm" in n]
    assert norms
    assert all(getattr(p, "sequence_parallel", False) == (cell.layout.tp > 1) for p in norms)
    tokens_BS = torch.randint(VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))

    def step(batches, model, *rest):  # type: ignore[no-untyped-def]
        tokens = next(batches)[None]
        loss = model(tokens, torch.arange(SEQUENCE)[None], None, labels=tokens)
        return loss, lambda out: (out.mean(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(tokens_BS) for _ in chunks] if len(chunks) > 1 else iter(tokens_BS),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=2,
        seq_length=SEQUENCE,
        micro_batch_size=1,
    )
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in norms)
