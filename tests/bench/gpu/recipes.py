"""Rows that FP8 GEMMs take: found by trial for each recipe, and held against what padding plans give.

A linear multiplies three times: rows are a free dimension forward and in the gradient of its input, and the contraction
in the gradient of its weight, where most limits are. Tried are torch's scaled GEMMs and, where it is installed,
Transformer Engine's linears under megatron-core's own context. A kernel takes a multiple if it takes odd numbers of
it, and if what it answers is right: computed again in fp32 from the same fp8 values.
A kernel that refuses a length that a plan gives is a failure; one that takes less than that is a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeref.dispatcher import padding
from tests.bench.gpu import models
from tests.bench.gpu.figures import Disagreement, Figure, distance

#: Rows that any kernel of this kind takes. One that refuses them cannot be run here at all.
PLENTY = 512
#: How kernels refuse: torch by RuntimeError and its subclasses and ValueError, Transformer Engine also by assertion.
REFUSALS = (RuntimeError, ValueError, AssertionError, TypeError, AttributeError)
Product = Callable[[int], float]  # computes with so many rows, and answers how far it is from right


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """For every recipe of the table: the least multiple of rows each kernel takes."""
    table = dict.fromkeys(padding.RECIPES, 1) if spoil else padding.RECIPES
    found = []
    for recipe, multiple in table.items():
        for name, product in (*_torch(recipe, device, sizes), *_engine(recipe, device, sizes)):
            found.append(judged(f"{recipe}: {name}", product, multiple, sizes.multiples))
    for name, product in _attention(device):
        found.append(judged(name, product, padding.FUSED_ATTENTION, sizes.multiples))
    return found


def judged(what: str, product: Product, multiple: int, tried: Sequence[int]) -> Figure:
    """The least multiple of those `tried` that `product` takes.

    Raises Disagreement if it refuses `multiple`, which padding plans promise.
    """
    if why := refusal(product, PLENTY):
        return Figure(what, None, note=f"cannot be run here: {why}")
    if why := refusal(product, multiple):
        raise Disagreement(f"{what} refuses multiples of {multiple}, which padding plans give: {why}")
    taken = [multiple, *(rows for rows in tried if not refusal(product, rows))]
    note = "takes less than the table gives" if min(taken) < multiple else ""
    return Figure(what, float(min(taken)), "rows at least", f"table: {multiple}", note)


def refusal(product: Product, rows: int) -> str:
    """Why one of 1, 3 and 5 times `rows` is refused or computed wrongly; empty if all are taken."""
    for times in (1, 3, 5):
        try:
            away = product(rows * times)
        except REFUSALS as error:
            return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not away <= 1:
            return f"{rows * times} rows are computed wrongly"
    return ""


def _torch(recipe: str, device: torch.device, sizes: models.Sizes) -> list[tuple[str, Product]]:
    """torch's GEMMs with the scales of `recipe`: forward (rows free), and the weight's gradient (rows contracted)."""
    if recipe == "nvfp4":
        return []
    kind = "blockwise" if recipe == "blockwise" else "mxfp8" if recipe == "mxfp8" else "tensorwise"
    # A hybrid format has e5m2 gradients.
    grad = torch.float8_e5m2 if kind == "tensorwise" else torch.float8_e4m3fn
    wide, high = sizes.widths
    return [
        ("torch, forward", lambda rows: _away(device, kind, (rows, wide, high), torch.float8_e4m3fn)),
        ("torch, weight's gradient", lambda rows: _away(device, kind, (high, rows, wide), grad, both_along=True)),
    ]


def _away(
    device: torch.device, kind: str, shape: tuple[int, int, int], left: torch.dtype, both_along: bool = False
) -> float:
    """Distance of one product [M, K] · [K, N] from right, in units of what bf16 outputs allow. All scales are 1/2."""
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(m * 7 + k)
    a_MK = torch.randn(m, k, generator=generator, device=device).to(left)
    b_NK = torch.randn(n, k, generator=generator, device=device).to(torch.float8_e4m3fn)
    got_MN = _product(kind, a_MK, b_NK, both_along)
    return distance(got_MN, a_MK.float() @ b_NK.float().T / 4) / 1e-2


def _product(kind: str, a_MK: torch.Tensor, b_NK: torch.Tensor, both_along: bool) -> torch.Tensor:
    (m, k), n = a_MK.shape, len(b_NK)
    if kind == "tensorwise":
        half = torch.tensor(0.5, device=a_MK.device)
        return torch._scaled_mm(a_MK, b_NK.T, scale_a=half, scale_b=half, out_dtype=torch.bfloat16)
    scaled_mm, types = torch.nn.functional.scaled_mm, torch.nn.functional.ScalingType
    blocks = -(-k // 128)
    if kind == "mxfp8":
        # Equal scales, so that their order in memory makes no difference; only their number has to be right.
        a_scale, b_scale = (_halves(_up(rows, 128) * _up(-(-k // 32), 4), like=a_MK) for rows in (m, n))
        one, swizzle = types.BlockWise1x32, torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
        scales = a_scale.to(torch.float8_e8m0fnu), one, b_scale.to(torch.float8_e8m0fnu), one
        return scaled_mm(a_MK, b_NK.T, *scales, swizzle_a=swizzle, swizzle_b=swizzle)
    # The scales of activations lie rows first, those of weights blocks of the contraction first, four at a time.
    a_scale = _halves(blocks, m, like=a_MK).T
    if both_along:
        b_scale, b_type = _halves(blocks, n, like=a_MK).T, types.BlockWise1x128
    else:
        b_scale, b_type = _halves(-(-n // 128), _up(blocks, 4), like=a_MK).T, types.BlockWise128x128
    return scaled_mm(a_MK, b_NK.T, a_scale, types.BlockWise1x128, b_scale, b_type)


def _halves(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, 0.5, device=like.device)


def _up(length: int, multiple: int) -> int:
    return padding.round_up(length, multiple)


def _engine(recipe: str, device: torch.device, sizes: models.Sizes) -> list[tuple[str, Product]]:
    """Transformer Engine's linears, forward and backward, in megatron-core's context for `recipe`."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from moeref.layout import Layout
    from moeref.megatron import transformer_config
    from moeref.record import Options, Record

    if not HAVE_TE or device.type == "cpu" or recipe == "nvfp4":
        return []
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from megatron.core.fp8_utils import get_fp8_context

    options = Options(kernels="te", precision=recipe)
    config, _ = transformer_config(Record.of(sizes.model(layers=1), Layout(), options=options), device.type)
    how = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    plain, experts = te.Linear(*sizes.widths, **how), te.GroupedLinear(3, *sizes.widths, **how)

    def run(module: Any, rows: int, *splits: list[int]) -> float:
        x_RH = torch.randn(rows, sizes.widths[0], device=device, dtype=torch.bfloat16, requires_grad=True)
        with get_fp8_context(config):
            y_RH = module(x_RH, *splits)
        y_RH.float().square().sum().backward()
        weights = [p for name, p in sorted(module.named_parameters()) if name.startswith("weight")]
        pieces = torch.split(x_RH.detach(), splits[0]) if splits else (x_RH.detach(),)
        expected = torch.cat([piece.float() @ w.float().T for piece, w in zip(pieces, weights, strict=True)])
        return distance(y_RH, expected) / 0.1  # values of three significant bits on both sides

    return [
        ("Transformer Engine's Linear", partial(run, plain)),
        ("Transformer Engine's GroupedLinear", lambda rows: run(experts, 3 * rows, [rows, 0, 2 * rows])),
    ]


def _attention(device: torch.device) -> list[tuple[str, Product]]:
    """Transformer Engine's causal attention in bf16 and in FP8, forward and backward, against torch's in fp32."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE or device.type == "cpu":
        return []
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling  # type: ignore[import-not-found]

    heads, channels = 8, 128
    attention = te.DotProductAttention(heads, channels, qkv_format="sbhd", attn_mask_type="causal")

    def run(rows: int, fp8: bool) -> float:
        shape = rows, 1, heads, channels
        qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        with te.fp8_autocast(enabled=fp8, fp8_recipe=DelayedScaling(fp8_dpa=True)):
            out_SBC = attention(*qkv)
        out_SBC.float().square().sum().backward()
        q, k, v = (t.detach().float().permute(1, 2, 0, 3) for t in qkv)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return distance(out_SBC, expected.permute(2, 0, 1, 3).reshape(out_SBC.shape)) / (0.1 if fp8 else 1e-2)

    return [(f"attention, {name}", partial(run, fp8=fp8)) for name, fp8 in (("bf16", False), ("FP8", True))]
