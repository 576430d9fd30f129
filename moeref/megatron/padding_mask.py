"""Padding of packed samples, which counts in no loss of the routers and in no expert's bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model


def for_chunk(padding_BS: torch.Tensor, chunk: Any) -> torch.Tensor:
    """The `padding_mask` of GPTModel from the padding (True) of this CP rank's positions `[B, S/CP]`.

    With sequence parallelism megatron-core cuts it over TP where the embedding is. Other stages need their part of it.
    """
    if not chunk.config.sequence_parallel or get_attr_wrapped_model(chunk, "pre_process"):
        return padding_BS
    group = parallel_state.get_tensor_model_parallel_group()
    own: torch.Tensor = padding_BS.tensor_split(group.size(), 1)[group.rank()]
    return own


def losses(config: TransformerConfig) -> set[str]:
    """The losses of routers in a step: kinds of load balancing with a coefficient, and `z_loss`."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    return {kind for kind, coefficient in pairs if coefficient} | ({"z_loss"} if config.moe_z_loss_coeff else set())


def check_losses(config: TransformerConfig) -> None:
    """Raise ValueError for a loss of the routers that megatron-core takes over a pack where samples are meant."""
    if "seq_aux_loss" in losses(config):
        wanted = "set its coefficient to 0, take aux_loss, or rows that are not packed"
        raise ValueError(f"seq_aux_loss of packed samples: megatron-core computes it over the whole pack; {wanted}")


@contextmanager
def left_out_of_bias(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let routers count tokens for the experts' bias without padding inside the `with` block.

    megatron-core 0.16.1 and 0.19 lay the mask `[T]` along the experts of `[T, E]` (Megatron-LM#6111): they raise, or
    with as many tokens as experts leave out experts.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        vars(router)["_apply_expert_bias"] = partial(_count, router)
    try:
        yield
    finally:
        for router in routers:
            del vars(router)["_apply_expert_bias"]


def _count(router: TopKRouter, chosen_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    if padding_mask is not None:
        chosen_TE = chosen_TE & ~padding_mask[:, None]
    type(router)._apply_expert_bias(router, chosen_TE)
