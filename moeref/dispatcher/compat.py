"""What other systems pad to, by name: facts about their code, to compare with and to reproduce their runs.

Each system is a function from a `Run` to `Multiples`. moeref's own plan is in `padding`. The commits that were read:

- ms-swift: modelscope/ms-swift 3602360a, swift/megatron/utils/utils.py `get_padding_to`, and swift/template/base.py
  for the 2·CP of a sample; `ms-swift#8393` is the pull request of that number (closed, not merged).
- skyrl: NovaSky-AI/SkyRL a9564572, skyrl/backends/skyrl_train/distributed/megatron/packing_utils.py.
- verl: verl-project/verl 1dda039b, verl/models/mcore/util.py `preprocess_packed_seqs`.
- nemo-rl: NVIDIA-NeMo/RL 7ea279ab, nemo_rl/models/megatron/data.py `_get_pack_sequence_parameters_for_megatron`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeref.dispatcher.padding import Packed, PaddingError, round_up
from moeref.dispatcher.setup import Choice


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings on which the padding of a system depends. `fp8` and `fp4` are formats, `recipe` is megatron-core's.

    `max_length` is the length to which ms-swift#8393 pads with a backend that exchanges equal pieces (its seq_length or
    max_length).
    """

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    fp8: str | None = None
    fp4: str | None = None
    recipe: str | None = "delayed"
    fused_attention: bool = False
    dispatcher: Choice = Choice.ALLTOALL
    max_length: int | None = None

    @property
    def split(self) -> int:
        """The number of tensor parallel ranks over which rows are split."""
        return self.tp if self.sequence_parallel else 1

    @property
    def equal_pieces(self) -> bool:
        """Whether the backend exchanges equal pieces. The systems ask for the only such backend by its name."""
        return self.dispatcher.row is not None and self.dispatcher.row.equal_rows


@dataclass(frozen=True)
class Multiples:
    """Multiples of each sample's length and of the packed sequence's, in rows."""

    sample: int
    total: int


def _chunks(run: Run) -> int:
    return 2 * run.cp if run.cp > 1 else 1


def ms_swift(run: Run) -> Multiples:
    """TP (with SP) times CP times the recipe's rows; with fused attention the maximum of that and 64 rows per rank."""
    split = run.split * run.cp
    total = split
    if run.recipe == "blockwise":
        total *= 128
    elif run.recipe == "mxfp8":
        total *= 32
    elif run.fp8 is not None or run.fp4 is not None:
        total *= 16
    if run.fused_attention:
        total = max(total, split * 64)
    return Multiples(_chunks(run), total)


def ms_swift_8393(run: Run) -> Multiples:
    """The pull request: times 8 and at least 16 under fp8; for equal pieces the multiple is the maximum length."""
    split = run.split * run.cp
    total = split
    if run.recipe == "blockwise":
        total *= 128
    elif run.fp8 is not None:
        total = max(total * 8, 16)
    if run.fused_attention:
        total = max(total, split * 64)
    if run.equal_pieces and run.max_length is not None:
        total = run.max_length
    return Multiples(_chunks(run), total)


def skyrl(run: Run) -> Multiples:
    """Per sample only: TP (with or without SP) times 2·CP, and under fp8 16 rows per CP rank for every recipe."""
    layout = run.tp * _chunks(run)
    sample = math.lcm(layout, 16 * run.cp) if run.fp8 is not None else layout
    return Multiples(sample, 1)


def verl(run: Run) -> Multiples:
    """Per sample TP·2·CP, under fp8 also 16 rows; under fp8 the packed sequence 128·TP·2·CP for every recipe."""
    layout = run.tp * _chunks(run)
    if run.fp8 not in ("e4m3", "hybrid"):
        return Multiples(layout, 1)
    return Multiples(math.lcm(16, layout), layout * 128)


def nemo_rl(run: Run) -> Multiples:
    """Per sample TP (with SP) times 2·CP; the packed sequence that times the recipe's rows, for equal pieces 128."""
    layout = run.split * _chunks(run)
    rows = 1
    if run.fp8 is not None:
        rows = {"blockwise": 128, "mxfp8": 32}.get(run.recipe or "", 16)
    if run.equal_pieces:
        rows = max(rows, 128)
    return Multiples(layout, layout * rows if rows > 1 else 1)


SYSTEMS: dict[str, Callable[[Run], Multiples]] = {
    "ms-swift": ms_swift,
    "ms-swift#8393": ms_swift_8393,
    "skyrl": skyrl,
    "verl": verl,
    "nemo-rl": nemo_rl,
}


def multiples(system: str, run: Run) -> Multiples:
    """The multiples to which `system` pads a packed run. Raises PaddingError for an unknown system."""
    if system not in SYSTEMS:
        raise PaddingError(f"system {system!r} is none of {', '.join(SYSTEMS)}")
    return SYSTEMS[system](run)


def pack(system: str, run: Run, lengths: Sequence[int]) -> Packed:
    """Padded lengths as in `system`: each sample is padded, then the packed sequence at its end.

    `rows` per rank is rounded down, because not every system makes the total divisible. Raises PaddingError for an
    unknown system.
    """
    found = multiples(system, run)
    samples = tuple(round_up(length, found.sample) for length in lengths)
    total = round_up(sum(samples), found.total)
    return Packed(samples, total, total // (run.cp * run.split))
