"""Along which dimension megatron-core cuts a tensor over TP, or over ETP for experts, by the module it is in.

ColumnParallelLinear, VocabParallelEmbedding and what belongs to a head are cut along dimension 0, RowParallelLinear
along dimension 1; biases of the latter, norms, routers and the down projections of latent attention are whole.
Where there are modules, NAM-005 compares the same tables with megatron-core's own shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_COLUMN = re.compile(
    r"(?:^|\.)(?:(?:linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|in_proj|conv1d)\.(?:weight|bias)"
    r"|linear_fc1\.(?:weight|bias)\d*|eh_proj\.weight|A_log|dt_bias|softmax_offset)$"
)
_ROW = re.compile(r"(?:^|\.)(?:(?:linear_proj|out_proj)\.weight|linear_fc2\.weight\d*)$")
#: Padded: the rows of all ranks together may be more than the vocabulary has.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@lru_cache(maxsize=65_536)
def cut(local: str) -> int | None:
    """The dimension along which a tensor of this local name is cut; None for one that every rank holds whole."""
    if local in VOCABULARY or _COLUMN.search(local):
        return 0
    return 1 if _ROW.search(local) else None


def whole(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of Hugging Face tensors laid one below the other; None if their rows differ."""
    rest = {shape[1:] for shape in parts}
    return (sum(shape[0] for shape in parts), *rest.pop()) if len(rest) == 1 else None


def shard(full: tuple[int, ...], dim: int | None, size: int) -> tuple[int, ...]:
    """`full` cut into `size` equal parts along `dim`; ValueError if it does not divide."""
    if dim is None:
        return full
    if full[dim] % size:
        raise ValueError(f"{list(full)} does not divide by {size} along dimension {dim}")
    return (*full[:dim], full[dim] // size, *full[dim + 1 :])
