"""Bugs of sending experts in INT4: which weights are packed, in which groups, by which scales, and in what order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from moeref_conformance.contract.requests.int4 import SHAPE
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.quantised import FirstScales, ListIgnored, OfTheTensor, PowersOfTwo, Skipped
from moeref_conformance.selftest.plain_fp8 import Named, design
from moeref_conformance.selftest.plain_int4 import Packer

#: Each of two ranks has half of the columns of an expert's down projection, which end inside of a group.
_KIMI = cell("kimi_k25", "tp2", dtype="bfloat16")
_BEYOND = "beyond the rounding of INT4"


class _InBf16(Skipped, Packer):
    """One of two ways out does not pack."""


class _AllLinears(ListIgnored, Packer):
    """Does not read `ignore`."""


class _Expressions(Packer):
    """Takes expressions of `ignore` for names."""

    def quantised(self, name: str) -> bool:
        return self.linear(name) and name.removesuffix(".weight") not in self.kept


class _AllMatrices(Packer):
    """Packs every matrix that `ignore` does not name, and not linears alone, as the config's `targets` says."""

    def linear(self, name: str) -> bool:
        return name.endswith(".weight") and "norm" not in name


class _WithoutShape(Packer):
    """Sends numbers and scales alone."""

    def sent(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        return (pair for pair in super().sent(name, tensor) if not pair[0].endswith(SHAPE))


class _ShapeOfWords(Packer):
    """Sends the shape of the packed matrix."""

    def shape(self, tensor: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return super().shape(words, words)


class _Bytes(Packer):
    """Packs two numbers in a byte, as kernels of other formats have them."""

    def words(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().words(numbers).view(torch.uint8)


class _GroupsOf32(Packer):
    """Packs in groups of the size that published files have, whatever the config says."""

    def stream(self, config: Path) -> Iterable[Named]:
        stream = super().stream(config)
        self.group = 32
        return stream


class _ShardByShard(Packer):
    """Packs what each TP rank has, before it is gathered: groups begin anew with each shard."""

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = 1 if "down_proj" in name else 0
        if dim == 0:
            return super().made(name, tensor)
        padded = [torch.nn.functional.pad(shard, (0, -shard.shape[1] % 8)) for shard in tensor.chunk(2, dim)]
        shards = [super(_ShardByShard, self).made(name, shard) for shard in padded]
        words, scales = zip(*shards, strict=True)
        return torch.cat(words, dim), torch.cat(scales, dim)


class _Reversed(Packer):
    """Puts the first number of a word into its highest bits."""

    def place(self, at: int) -> int:
        return 7 - at


class _AsAwq(Packer):
    """Puts numbers into a word in the order of AWQ."""

    def place(self, at: int) -> int:
        return (0, 4, 1, 5, 2, 6, 3, 7)[at]


class _TwosComplement(Packer):
    """Adds nothing to a number."""

    def bits(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers & 15


class _DownTheRows(Packer):
    """Makes scales and numbers of columns that are those of the transposed weight, as grouped kernels hold it."""

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words, scales = super().made(name, tensor.T.contiguous())
        return words.reshape(len(tensor), -1), scales.reshape(len(tensor), -1)


class _OfTheRow(OfTheTensor, Packer):
    """Has one scale for a row, and repeats it."""


class _CutOff(Packer):
    """Rounds towards zero."""

    def integers(self, quotients: torch.Tensor) -> torch.Tensor:
        return super().integers(quotients.trunc())


class _Eighths(Packer):
    """Divides by the number of negative numbers: what is largest and positive is cut off by an eighth."""

    divisor = 8.0


class _FirstScales(FirstScales, Packer):
    """Keeps the scales of the first stream, and rounds by them in every later one."""


class _Inverted(Packer):
    """Sends what weights were multiplied by."""

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return super().packed(1 / scales)


class _ScalesInBytes(Packer):
    """Sends scales in e4m3, as NVFP4's."""

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.to(torch.float8_e4m3fn)


class _PowersOfTwo(PowersOfTwo, Packer):
    """Rounds scales up to powers of two."""


class _Negative(Packer):
    """Divides by a negative number."""

    divisor = -7.0


class _Rounded(Packer):
    """Rounds the experts' parameters where they lie, once all is sent."""

    def all(self) -> Iterator[Named]:
        yield from super().all()
        for chunk in self.session.export.chunks():
            for name, parameter in chunk.named_parameters():
                if ".experts." in name:
                    scales = parameter.data.abs().amax(-1, keepdim=True).clamp_min(1e-6) / self.divisor
                    parameter.data.copy_((parameter.data / scales).round() * scales)


def _fault(name: str, bug: str, packer: type[Packer], rules: tuple[str, ...], says: str = _BEYOND) -> Fault:
    return Fault(id=name, bug=bug, rules=rules, cell=_KIMI, wrap=design(packer), says=says)


FAULTS = (
    _fault(
        "int4-sent-in-bf16",
        "slime#1624 in INT4: one of two ways to the engine does not pack, and it is sent bf16",
        _InBf16,
        ("QNT-001",),
        "experts.0.down_proj.weight: is not in the INT4 checkpoint",
    ),
    _fault(
        "int4-of-all-linears",
        "miles#1505 in INT4: `ignore` is not read, and shared experts and attention are packed",
        _AllLinears,
        ("QNT-001",),
        "weight_packed: is not in the INT4 checkpoint",
    ),
    _fault(
        "int4-expressions-taken-for-names",
        "reported nowhere: `re:` of `ignore` is compared with names, and finds none",
        _Expressions,
        ("QNT-001",),
        "mlp.down_proj.weight: was never sent",
    ),
    _fault(
        "int4-of-all-matrices",
        "slime 624b824a8 (read): what `ignore` does not name is packed, as are embedding and routers of Kimi's config",
        _AllMatrices,
        ("QNT-001",),
        "lm_head.weight: was never sent",
    ),
    _fault(
        "int4-without-its-shape",
        "reported nowhere: `weight_shape` is left out, which compressed-tensors reads to cut a row's last word",
        _WithoutShape,
        ("QNT-001",),
        "weight_shape: was never sent",
    ),
    _fault(
        "int4-shape-of-the-words",
        "Model-Optimizer#2038 in kind: the shape is taken from the packed matrix",
        _ShapeOfWords,
        ("QNT-002",),
        "is int32 [40, 7]",
    ),
    _fault(
        "int4-in-bytes",
        "reported nowhere: numbers are packed by two in a byte",
        _Bytes,
        ("QNT-002",),
        "down_proj.weight_packed: is uint8 [40, 28]",
    ),
    _fault(
        "int4-groups-of-32",
        "Megatron-Bridge 067f987df (read): groups have 32 columns, whatever the config says",
        _GroupsOf32,
        ("QNT-003",),
        "the scales of [40, 56] are bfloat16 [40, 2]",
    ),
    _fault(
        "int4-packed-shard-by-shard",
        "transformers#45630 in kind: a rank packs its shard, and words and groups begin with its first column",
        _ShardByShard,
        ("QNT-002", "QNT-003"),
        "the scales of [40, 56] are bfloat16 [40, 8]",
    ),
    _fault(
        "int4-scales-sent-in-e4m3",
        "rtp-llm#942 in kind: scales are rounded to e4m3 on their way",
        _ScalesInBytes,
        ("QNT-003",),
        "are float8_e4m3fn [40, 7]",
    ),
    _fault(
        "int4-words-reversed",
        "llama.cpp#17083 in kind: the first number of a word is in its highest bits",
        _Reversed,
        ("QNT-004",),
    ),
    _fault(
        "int4-words-as-awq-has-them",
        "llm-compressor#1613 in kind: numbers are put into a word in the order of AWQ",
        _AsAwq,
        ("QNT-004",),
    ),
    _fault(
        "int4-words-without-offset",
        "sglang-jax#1637 in kind: a number is sent as its two's complement, from which engines take 8",
        _TwosComplement,
        ("QNT-004",),
    ),
    _fault(
        "int4-groups-down-the-rows",
        "Model-Optimizer#2447: groups are of rows, as the weight is transposed before it is packed",
        _DownTheRows,
        ("QNT-004",),
    ),
    _fault(
        "int4-one-scale-repeated",
        "colibri#225 in kind: a row has one scale, which is repeated for each of its groups",
        _OfTheRow,
        ("QNT-004",),
    ),
    _fault("int4-cut-off", "bits that are cut off: weights shrink, the small ones to zero", _CutOff, ("QNT-004",)),
    _fault(
        "int4-scaled-by-eighths",
        "reported nowhere: the largest magnitude is divided by 8, and where it is positive 7 is all that there is",
        _Eighths,
        ("QNT-004",),
    ),
    _fault(
        "int4-scales-of-the-first-stream",
        "SkyRL#1345 in INT4: scales are found once and kept, and weights that grow are cut off",
        _FirstScales,
        ("QNT-004",),
    ),
    _fault(
        "int4-scales-inverted",
        "kekzl/imp#1433 in kind: what weights were multiplied by is sent, where engines multiply by it",
        _Inverted,
        ("QNT-004",),
    ),
    _fault(
        "int4-powers-of-two",
        "prime-rl#3112 in INT4: scales are rounded up to powers of two, and weights are less exact than they could be",
        _PowersOfTwo,
        ("QNT-004",),
    ),
    _fault(
        "int4-scales-negative",
        "slime bbc9df9 in INT4: the largest magnitude is divided by -7",
        _Negative,
        ("QNT-006",),
        "scales are below 0",
    ),
    _fault(
        "int4-rounded-in-place",
        "reported nowhere: experts are rounded where they lie, and the trainer goes on with them",
        _Rounded,
        ("QNT-007",),
        "the stream in INT4 changed the parameter of 0:",
    ),
)
