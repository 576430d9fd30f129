"""Adapters by their definition: which linears have one, what they merge to, and their gradients by the chain rule.

The gradient of a weight is transformers' autograd's, on a checkpoint with the adapters merged. It gives those of the
two factors of its adapter: nothing here knows how a target computes with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from moeref_conformance.contract.requests.adapters import RANK, SCALE

#: What PEFT's names have before those of the model.
PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")
Tensors = Mapping[str, torch.Tensor]


def adapted(tensors: Tensors, modules: Sequence[str]) -> list[str]:
    """The names of the weights that have an adapter: of linears of the decoder's layers with such ends."""
    ends = re.compile(rf"model\.layers\.\d+\.(?:.+\.)?({'|'.join(modules)})\.weight")
    return [name for name in sorted(tensors) if ends.fullmatch(name)]


def peft(weight: str, factor: str) -> str:
    """The name of a factor of the adapter of a weight."""
    return f"{PREFIX}{weight.removesuffix('weight')}{factor}.weight"


def shapes(tensors: Tensors, weights: Sequence[str]) -> dict[str, list[int]]:
    """The shapes of both factors of these weights' adapters, by PEFT's names: [RANK, in] and [out, RANK]."""
    found = dict[str, list[int]]()
    for name in weights:
        out, within = tensors[name].shape
        found[peft(name, "lora_A")], found[peft(name, "lora_B")] = [RANK, within], [out, RANK]
    return found


def merged(tensors: Tensors, adapters: Tensors, weights: Sequence[str]) -> dict[str, torch.Tensor]:
    """All tensors in fp32, those of `weights` with their adapters, which are added in fp64."""
    found = dict(tensors)
    for name in weights:
        a_RI, b_OR = (adapters[peft(name, factor)].double() for factor in FACTORS)
        found[name] = (tensors[name].double() + SCALE * b_OR @ a_RI).float()
    return found


def rounding(tensors: Tensors, adapters: Tensors, name: str) -> torch.Tensor:
    """How far a merged weight may be off by sums in its dtype, in any order and with the scale on any factor.

    One in bf16 may be a sum in fp32 that is rounded once, or one in bf16 of a product of factors in bf16: then both
    factors, the scaled one, the product and the sum are rounded, each by half a unit in the last place.
    """
    a_RI, b_OR = (adapters[peft(name, factor)].double() for factor in FACTORS)
    product_OI = SCALE * b_OR.abs() @ a_RI.abs()
    if tensors[name].dtype == torch.bfloat16:
        sum_OI = (tensors[name].double() + SCALE * b_OR @ a_RI).abs()
        return 1.02 * 2.0**-8 * (sum_OI + (RANK + 2) * product_OI)
    return 2.0**-22 * (tensors[name].double().abs() + (RANK + 2) * product_OI)


def gradients(of_weights: Tensors, adapters: Tensors, weights: Sequence[str]) -> dict[str, torch.Tensor]:
    """The gradient in fp64 of each factor, by PEFT's names: with W + s·B·A, dB = s·dW·Aᵀ and dA = s·Bᵀ·dW.

    `of_weights` has dW of each of `weights`. For a factor that several linears share, add up what each of them gives.
    """
    found = dict[str, torch.Tensor]()
    for name in weights:
        a_RI, b_OR = (adapters[peft(name, factor)].double() for factor in FACTORS)
        dw_OI = of_weights[name].double()
        found[peft(name, "lora_A")] = SCALE * b_OR.T @ dw_OI
        found[peft(name, "lora_B")] = SCALE * dw_OI @ a_RI.T
    return found


def layer(name: str) -> str:
    """The number of a factor's layer, as its name has it."""
    return name.partition(".layers.")[2].partition(".")[0]


def sharing(sent: Sequence[Tensors]) -> list[list[str]]:
    """Names of factors of a layer that are one: they hold the same in all streams."""
    groups = dict[tuple[object, ...], list[str]]()
    for name in sorted(sent[0]):
        values = tuple(of[name].numpy().tobytes() for of in sent)
        key = layer(name), name.rsplit(".", 2)[1], tuple(sent[0][name].shape), values
        groups.setdefault(key, []).append(name)
    return list(groups.values())
