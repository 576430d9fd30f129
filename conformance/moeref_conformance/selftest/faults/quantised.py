"""Bugs of FP8 in blocks: what is quantised, in which blocks, by which scales, and how it is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Swapped, after_load
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.roles import everywhere
from moeref_conformance.selftest.plain_fp8 import FP8, LARGEST, Named, Quantiser, design, next_power

_QWEN = cell("qwen3_moe", "tp2", dtype="bfloat16")
#: With a dense layer, latent attention and experts with a bias.
_DEEPSEEK = cell("deepseek_v3", "ep2", layers=3, dtype="bfloat16")
_MTP = cell("deepseek_v3", "ep2", layers=3, mtp=1, dtype="bfloat16")
#: With two gated delta nets, the linears of which Megatron joins, and gated attention.
_DELTA = cell("qwen3_5_moe_text", "tp2", layers=3, dtype="bfloat16")
#: With the same modules, whose rows files have by key head.
_BY_HEAD = cell("qwen3_next", "tp2", layers=3, dtype="bfloat16")


class Skipped(Quantiser):
    """One of two ways out does not quantise."""

    def quantised(self, name: str) -> bool:
        return False


class _GatesKept(Quantiser):
    """Takes what has a gate in its name for a router, which stays as it is."""

    def quantised(self, name: str) -> bool:
        return super().quantised(name) and ".mlp.gate" not in name


class _ShortList(Quantiser):
    """Has a list of linears, in which the down projection of keys and values is missing."""

    def linear(self, name: str) -> bool:
        return super().linear(name) and "kv_a_proj" not in name


class _MtpUnknown(Quantiser):
    """Looks for linears of multi-token prediction layers under a name that Megatron has given up."""

    def linear(self, name: str) -> bool:
        return super().linear(name) and int(name.split(".")[2]) < self.cell.layers


class _MtpProjected(Quantiser):
    """Quantises every projection of a layer: that of a multi-token prediction layer's two inputs with them."""

    def linear(self, name: str) -> bool:
        return super().linear(name) or name.endswith(".eh_proj.weight")


class _DeltaNetsForgotten(Quantiser):
    """Has a list of linears, in which those of gated delta nets are missing."""

    def linear(self, name: str) -> bool:
        return super().linear(name) and ".linear_attn." not in name


class _DecaysToo(Quantiser):
    """Quantises what becomes decays and strengths of updates, whatever the list says."""

    def quantised(self, name: str) -> bool:
        return super().quantised(name) or name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))


class _StrengthsToo(Quantiser):
    """Quantises every linear of a gated delta net, whatever the list says."""

    def quantised(self, name: str) -> bool:
        return super().quantised(name) or name.endswith(".in_proj_ba.weight")


class _AsMegatronHasThem(Quantiser):
    """Makes scales of the rows as Megatron has them, and puts the rows of the weight alone into the file's order."""

    def stream(self, config: Path) -> Iterable[Named]:
        self.model = json.loads((config / "config.json").read_text())
        return super().stream(config)

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not name.endswith(".in_proj_qkvz.weight"):
            return super().made(name, tensor)
        heads, of_values = self.model["linear_num_key_heads"], self.model["linear_num_value_heads"]
        key, value = heads * self.model["linear_key_head_dim"], of_values * self.model["linear_value_head_dim"]
        rows = torch.arange(len(tensor)).view(heads, -1)
        parts = torch.split(rows, [size // heads for size in (key, key, value, value)], 1)
        order = torch.cat([part.flatten() for part in parts])
        weight, scales = super().made(name, tensor[order])
        return weight.view(torch.uint8)[order.argsort()].view(FP8), scales


class _PartByPart(Quantiser):
    """Quantises the queries, keys and values of a gated delta net apart, as Megatron's heads have them."""

    def stream(self, config: Path) -> Iterable[Named]:
        model = json.loads((config / "config.json").read_text())
        self.keys = model["linear_num_key_heads"] * model["linear_key_head_dim"]
        return super().stream(config)

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not name.endswith(".in_proj_qkv.weight"):
            return super().made(name, tensor)
        parts = torch.tensor_split(tensor, (self.keys, 2 * self.keys))
        weights, scales = zip(*(super(_PartByPart, self).made(name, part) for part in parts), strict=True)
        return torch.cat([weight.view(torch.uint8) for weight in weights]).view(FP8), torch.cat(scales)


class ListIgnored(Quantiser):
    """Does not read `modules_to_not_convert`."""

    def quantised(self, name: str) -> bool:
        return self.linear(name)


class _BeginsAlike(Quantiser):
    """Keeps whatever begins with a name of the list."""

    def quantised(self, name: str) -> bool:
        return self.linear(name) and not name.startswith(tuple(self.kept))


class FirstScales(Quantiser):
    """Keeps the scales of the first stream, as calibration does, and takes them for every later one."""

    def __init__(self, session: Any, cell: Cell) -> None:
        super().__init__(session, cell)
        self.first: dict[tuple[str, int], torch.Tensor] = {}

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.name, self.block_number = name, 0
        return super().made(name, tensor)

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        self.block_number += 1
        return self.first.setdefault((self.name, self.block_number), super().scale(part, whole))


class _KeptUntilLoaded(Quantiser):
    """Keeps what it has made of a weight until weights are loaded."""

    def __init__(self, session: Any, cell: Cell) -> None:
        super().__init__(session, cell)
        self.held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.held.setdefault(name, super().made(name, tensor))


def _kept_until_loaded(session: Session, cell: Cell, world: World) -> Any:
    quantiser = _KeptUntilLoaded(session, cell)
    loading = after_load(session, lambda folder: quantiser.held.clear())
    return Swapped(loading, quantised=quantiser)


class _RoutersToo(Quantiser):
    """Quantises every matrix of a layer, whatever the list says."""

    def quantised(self, name: str) -> bool:
        return super().quantised(name) or name.endswith(".mlp.gate.weight")


class _AllInBf16(Quantiser):
    """Casts what it does not quantise."""

    def as_it_is(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16()


class _Packed(Quantiser):
    """Stacks the experts of a layer, and their scales."""

    def ordered(self, stream: Iterable[Named]) -> Iterator[Named]:
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, tensor in stream:
            packed = re.sub(r"experts\.\d+\.", "experts.", name)
            if packed == name:
                yield name, tensor
            else:
                stacks.setdefault(packed, []).append(tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor)
        for name, tensors in stacks.items():
            whole = torch.stack(tensors)
            yield name, whole.view(FP8) if whole.dtype == torch.uint8 else whole


class _Floored(Quantiser):
    """Counts whole blocks only, and leaves the rest zero."""

    def number(self, size: int, of: int) -> int:
        return max(1, size // of)


class _ShardByShard(Quantiser):
    """Quantises what each TP rank has, before it is gathered: blocks begin anew with each shard."""

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        shards = [super(_ShardByShard, self).made(name, shard) for shard in tensor.chunk(self.cell.layout.tp, dim)]
        weights, scales = zip(*shards, strict=True)
        return torch.cat([weight.view(torch.uint8) for weight in weights], dim).view(FP8), torch.cat(scales, dim)


class _ForTheKernel(Quantiser):
    """Sends the exponents of scales, four in an integer and columns first, as a kernel takes them."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return next_power(super().scale(part, whole))

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        padded = torch.nn.functional.pad(exponents, (0, -scales.shape[1] % 4))
        return padded.view(torch.int32).t().contiguous()


class _Unguarded(Quantiser):
    """Divides by the scale of a block of zeros."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return part.abs().max() / LARGEST


class OfTheTensor(Quantiser):
    """Has one scale for a whole tensor, and repeats it."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return super().scale(whole.float(), whole)


class _PaddedWithTheLast(Quantiser):
    """Fills blocks at the ends up with the last element of the matrix."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        largest = part.abs().max()
        if part.shape != self.block:
            largest = torch.maximum(largest, whole[-1, -1].abs().float())
        return largest / LARGEST if largest > 0 else torch.tensor(1.0)


class _Inverted(Quantiser):
    """Sends what weights were multiplied by."""

    def told(self, scale: torch.Tensor) -> torch.Tensor:
        return 1 / scale


class _Negative(Quantiser):
    """Divides the largest magnitude of a block by the least number of the format, which is negative."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return -super().scale(part, whole)


class _RoundedAfter(Quantiser):
    """Rounds scales up to powers of two, of weights that were divided by the scales before."""

    def told(self, scale: torch.Tensor) -> torch.Tensor:
        return next_power(scale)


class _CutOff(Quantiser):
    """Rounds towards zero."""

    def rounded(self, part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        down = (part / scale).to(FP8)
        beyond = (down.float().abs() > (part / scale).abs()) & (down.float() != 0)
        return (down.view(torch.uint8) - beyond.to(torch.uint8)).view(FP8)


class PowersOfTwo(Quantiser):
    """Rounds scales up to powers of two, and then divides by them."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return next_power(super().scale(part, whole))


class _E5M2(Quantiser):
    """Takes the FP8 of gradients."""

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scales = super().made(name, tensor)
        return weight.to(torch.float8_e5m2), scales


class _InPlace(Quantiser):
    """Rounds each parameter where it lies, once all is sent."""

    def all(self) -> Iterator[Named]:
        yield from super().all()
        for chunk in self.session.export.chunks():
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.data.to(FP8))


class _GradientsFreed(Quantiser):
    """Frees gradients to make room for the scales."""

    def all(self) -> Iterator[Named]:
        for chunk in self.session.export.chunks():
            chunk.zero_grad(set_to_none=True)
        yield from super().all()


class _ScalesInOneBuffer(Quantiser):
    """Puts the scales of every weight where those of the one before lie."""

    buffer = torch.empty(0)

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        if self.buffer.numel() < scales.numel():
            self.buffer = torch.empty(2**12)
        return self.buffer[: scales.numel()].view(scales.shape).copy_(scales)


class _ScalesOfOthersUnset(Quantiser):
    """Ranks other than the first hand on buffers of scales that nobody filled."""

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return scales if dist.get_rank() == 0 else torch.ones_like(scales)


class _FormatIgnored(Quantiser):
    """Does not read `scale_fmt`."""

    def all(self) -> Iterator[Named]:
        self.powers = False
        yield from super().all()


class _Squeezed(Quantiser):
    """Takes every dimension of 1 from the scales of an expert for the one that a gather over EP has put in front."""

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scales = super().made(name, tensor)
        return weight, scales[None].squeeze() if ".experts." in name else scales


def _all_receive(session: Session, cell: Cell, world: World) -> Any:
    return design(_ScalesOfOthersUnset)(everywhere(session, cell, world), cell, world)


FAULTS = (
    Fault(
        id="quantisation-skipped",
        bug="slime#1624: bridge mode skips quantisation, and an engine in FP8 gets bf16",
        rules=("QNT-001", "QNT-002"),
        cell=_QWEN,
        wrap=design(Skipped),
        says="is bfloat16",
    ),
    Fault(
        id="gate-projections-taken-for-gates",
        bug="prime-rl#2442: the gate projection of dense layers stays in bf16, as the router's gate does",
        rules=("QNT-001", "QNT-002"),
        cell=_DEEPSEEK,
        wrap=design(_GatesKept),
        says="model.layers.0.mlp.gate_proj.weight: is bfloat16",
    ),
    Fault(
        id="linears-not-listed",
        bug="slime#1683: a list of linears that misses some, which are sent in bf16",
        rules=("QNT-001", "QNT-002"),
        cell=_DEEPSEEK,
        wrap=design(_ShortList),
        says="kv_a_proj_with_mqa.weight_scale_inv: was never sent",
    ),
    Fault(
        id="mtp-linears-in-bf16",
        bug="miles#1307 in kind: linears of MTP layers are looked for under another name, and sent in bf16",
        rules=("QNT-001", "QNT-002"),
        cell=_MTP,
        wrap=design(_MtpUnknown),
        says="is bfloat16",
    ),
    Fault(
        id="mtp-projection-quantised",
        bug="mcore-bridge#35: what joins the inputs of an MTP layer is quantised, which files have in bf16",
        rules=("QNT-001", "QNT-005"),
        cell=_MTP,
        wrap=design(_MtpProjected),
        says="model.layers.3.eh_proj.weight",
    ),
    Fault(
        id="linears-of-delta-nets-not-listed",
        bug="slime#1683: the linears of Qwen3.5's gated delta nets are on no list, and are sent in bf16",
        rules=("QNT-001", "QNT-002"),
        cell=_DELTA,
        wrap=design(_DeltaNetsForgotten),
        says="linear_attn.in_proj_qkv.weight: is bfloat16",
    ),
    Fault(
        id="decays-of-delta-nets-quantised",
        bug="sglang#30598: in_proj_a and in_proj_b are quantised, which Qwen's files keep in bf16",
        rules=("QNT-001", "QNT-005"),
        cell=_DELTA,
        wrap=design(_DecaysToo),
        says="linear_attn.in_proj_a.weight_scale_inv: is not in the FP8 checkpoint",
    ),
    Fault(
        id="strengths-of-delta-nets-quantised",
        bug="vLLM#25079: in_proj_ba of Qwen3-Next is taken for a linear in FP8, which its files keep in bf16",
        rules=("QNT-001", "QNT-005"),
        cell=_BY_HEAD,
        wrap=design(_StrengthsToo),
        says="linear_attn.in_proj_ba.weight_scale_inv: is not in the FP8 checkpoint",
    ),
    Fault(
        id="delta-nets-quantised-as-megatron-has-them",
        bug="Model-Optimizer#2447 in kind: scales are of rows in another order than the weight's that is sent",
        rules=("QNT-004",),
        cell=_BY_HEAD,
        wrap=design(_AsMegatronHasThem),
        says="linear_attn.in_proj_qkvz.weight: ",
    ),
    Fault(
        id="delta-nets-quantised-part-by-part",
        bug="mcore-bridge#30 in kind: scales of queries, keys and values are made apart, and blocks begin with each",
        rules=("QNT-003",),
        cell=_DELTA,
        wrap=design(_PartByPart),
        says="the scales of [512, 40]",
    ),
    Fault(
        id="modules-to-not-convert-ignored",
        bug="miles#1505: a module that has to stay in bf16 is quantised",
        rules=("QNT-001", "QNT-005"),
        cell=_QWEN,
        wrap=design(ListIgnored),
        says="o_proj.weight_scale_inv: is not in the FP8 checkpoint",
    ),
    Fault(
        id="kept-by-how-names-begin",
        bug="sglang#23467, transformers#47990: `mlp.gate` of the list is found in `mlp.gate_proj`, which stays in bf16",
        rules=("QNT-001", "QNT-002"),
        cell=_DEEPSEEK,
        wrap=design(_BeginsAlike),
        says="model.layers.0.mlp.gate_proj.weight: is bfloat16",
    ),
    Fault(
        id="scales-of-the-first-stream",
        bug="SkyRL#1345 in FP8: scales are found once and kept, and weights that grow are cut off at 448",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(FirstScales),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="fp8-kept-until-a-load",
        bug="in kind: weights in FP8 are cached, and a load empties the cache, a step of the optimizer does not",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=_kept_until_loaded,
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="routers-quantised",
        bug="verl b178a3cd5 (read): for SGLang it quantises what has `gate` or `mlp` in its name, routers among it",
        rules=("QNT-001", "QNT-005"),
        cell=_DEEPSEEK,
        wrap=design(_RoutersToo),
        says="mlp.gate.weight_scale_inv: is not in the FP8 checkpoint",
    ),
    Fault(
        id="kept-tensors-rounded",
        bug="miles#811 in FP8: what is not quantised is cast to bf16, the experts' bias among it",
        rules=("QNT-005",),
        cell=_DEEPSEEK,
        wrap=design(_AllInBf16),
        says="e_score_correction_bias",
    ),
    Fault(
        id="quantised-experts-packed",
        bug="Model-Optimizer#2334: experts of a layer come packed, where a loader takes a tensor and scales of each",
        rules=("QNT-001",),
        cell=_QWEN,
        wrap=design(_Packed),
        says="experts.down_proj.weight: is not in the FP8 checkpoint",
    ),
    Fault(
        id="blocks-floored",
        bug="B44: blocks are counted by a division that floors, and the last rows and columns have no scale",
        rules=("QNT-003",),
        cell=_QWEN,
        wrap=design(_Floored),
        says="the scales of",
    ),
    Fault(
        id="quantised-shard-by-shard",
        bug="a quantiser that runs before the shards of a tensor are gathered: blocks begin anew with each shard",
        rules=("QNT-003",),
        cell=_QWEN,
        wrap=design(_ShardByShard),
        says="the scales of",
    ),
    Fault(
        id="scales-packed-for-a-kernel",
        bug="slime#2271: scales as a kernel takes them, exponents packed by column, where files have one float a block",
        rules=("QNT-003",),
        cell=_QWEN,
        wrap=design(_ForTheKernel),
        says="are int32",
    ),
    Fault(
        id="scales-of-one-column-squeezed",
        bug="Megatron-Bridge#5731: where scales of experts are gathered, those of one row or column lose a dimension",
        rules=("QNT-003",),
        cell=cell("qwen3_next", "ep2", layers=3, dtype="bfloat16"),
        wrap=design(_Squeezed),
        says="the scales of [40, 56] are float32 [2]",
    ),
    Fault(
        id="fp8-of-gradients",
        bug="e5m2, the format of gradients in Transformer Engine's hybrid recipe, where the config says e4m3",
        rules=("QNT-002",),
        cell=_QWEN,
        wrap=design(_E5M2),
        says="is float8_e5m2",
    ),
    Fault(
        id="zero-block-divided",
        bug="B45: the scale of a block of zeros is zero, and its weights are NaN",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(_Unguarded),
        says="with scale 0",
    ),
    Fault(
        id="one-scale-for-a-tensor",
        bug="a scale of the whole tensor, repeated for every block: small blocks are lost beside large ones",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(OfTheTensor),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="blocks-padded-with-the-last-element",
        bug="NeMo-RL 7ea279abf (read): blocks at the ends are filled up with the last element, which may be large",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(_PaddedWithTheLast),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="scales-inverted",
        bug="`weight_scale_inv` taken for the inverse of the scale, by which weights were multiplied",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(_Inverted),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="scales-rounded-after-the-weights",
        bug="transformers 5.12.1 (read): `Fp8Quantize` rounds scales to powers of two when it has made the weights",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(_RoundedAfter),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="fp8-rounded-towards-zero",
        bug="bits that are cut off: every weight shrinks, by up to an eighth",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=design(_CutOff),
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="scales-negative",
        bug="slime bbc9df9: the largest magnitude of a block is divided by -448, the least number of e4m3",
        rules=("QNT-006",),
        cell=_QWEN,
        wrap=design(_Negative),
        says="scales are below 0",
    ),
    Fault(
        id="powers-of-two-unasked",
        bug="prime-rl#3112: scales are powers of two whatever engine it is, and weights less exact than they could be",
        rules=("QNT-006",),
        cell=_QWEN,
        wrap=design(PowersOfTwo),
        says="scales are larger than needed",
    ),
    Fault(
        id="scale-format-ignored",
        bug="sglang#13067, transformers#47030 in kind: scales in fp32 for kernels that take their exponents alone",
        rules=("QNT-008",),
        cell=_DEEPSEEK,
        wrap=design(_FormatIgnored),
        says="scales are no powers of two",
    ),
    Fault(
        id="scales-of-other-receivers-unset",
        bug="W16 in FP8: every rank has an engine, and only the first is given the scales; others keep their ones",
        rules=("QNT-004",),
        cell=_QWEN,
        wrap=_all_receive,
        claims={"receivers": "all"},
        says="beyond the rounding of e4m3",
    ),
    Fault(
        id="scales-in-one-buffer",
        bug="pytorch/ao#3835 in kind: scales of all weights have one buffer, and who fills a bucket has the last ones",
        rules=("QNT-001",),
        cell=_QWEN,
        wrap=design(_ScalesInOneBuffer),
        says="held other values at the end of the stream",
    ),
    Fault(
        id="quantised-in-place",
        bug="reported nowhere: what is sent in FP8 is rounded where it lies, and the trainer goes on with it",
        rules=("QNT-007",),
        cell=_QWEN,
        wrap=design(_InPlace),
        says="the stream in FP8 changed the parameter of 0:",
    ),
    Fault(
        id="quantised-without-gradients",
        bug="reported nowhere: gradients are freed to make room for the scales, also those of a step under way",
        rules=("QNT-007",),
        cell=_QWEN,
        wrap=design(_GradientsFreed),
        says="the stream in FP8 changed the grad of 0:",
    ),
)
