"""The inference engine's side: whether the model divides there, and the bytes of a weight sync.

What is refused is what vLLM 0.30.0 and SGLang (commit 008d7d0) assert when they build the model. Both split attention
heads, repeat KV heads where there are fewer than ranks, and pad the vocabulary to a multiple of 64. vLLM's expert
parallelism spans all tp·dp ranks of a stage and deals experts out evenly or with one more on the first ranks
(`determine_expert_map`); SGLang's needs experts that divide, and cuts each over the tp/ep ranks that remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeref.config.errors import nearest
from moeref.costs.training import CostError
from moeref.families import Model
from moeref.layout import Layout

ENGINES = ("vllm", "sglang")
_VOCAB = 64
_MOST = 65_536


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Parallel sizes of one engine instance. ep: 1 is no expert parallelism.

    dp: in vLLM replicas of the attention, of tp ranks each; in SGLang data-parallel attention inside the tp ranks.
    """

    name: str
    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Engine:
        """Read `vllm:tp=8,ep=8`. Raises CostError for an unknown engine or size."""
        name, _, rest = text.partition(":")
        if name not in ENGINES:
            raise CostError(f"engine {name!r} is none of {', '.join(ENGINES)}")
        sizes: dict[str, int] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in ("tp", "ep", "dp", "pp") or key in sizes:
                raise CostError(f"engine {text}: {key!r} is none of tp, ep, dp, pp, once each{nearest(key, _SIZES)}")
            if not (value.isascii() and value.isdigit() and len(value) < 6 and 1 <= int(value) <= _MOST):
                raise CostError(f"engine {text}: {key}={value} must be a number from 1 to {_MOST}")
            sizes[key] = int(value)
        return cls(name=name, **sizes)

    @property
    def ranks(self) -> int:
        """Its GPUs, which receive weights. SGLang's data-parallel attention is inside its tp."""
        return self.tp * self.pp * (self.dp if self.name == "vllm" else 1)

    @property
    def attention(self) -> int:
        """Ranks over which heads are split."""
        return self.tp if self.name == "vllm" else max(1, self.tp // self.dp)

    @property
    def expert_slices(self) -> int:
        """Ranks over which one expert is cut."""
        if self.name == "sglang":
            return max(1, self.tp // self.ep)
        return 1 if self.ep > 1 else self.tp * self.dp

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name."""
        return {name: getattr(self, name) for name in _SIZES}

    def problems(self, model: Model) -> Iterator[tuple[str, str]]:
        """(what the engine refuses, fix)."""
        yield from self._of_sizes()
        heads, split = model.heads, self.attention
        if heads % split:
            yield f"{heads} attention heads do not divide over {split} ranks", f"use a tp that divides {heads}"
        groups = model.kv_groups
        if model.mla is None and groups % split and split % groups:
            text = f"{groups} KV heads neither divide over {split} ranks nor repeat evenly"
            yield text, f"use a tp that divides {groups} or is a multiple of it"
        if model.moe_ffn % self.expert_slices:
            text = f"experts of {model.moe_ffn} are cut over {self.expert_slices} ranks, which do not divide them"
            yield text, "use more ep or less tp"
        if self.name == "sglang" and model.experts % self.ep:
            yield f"{model.experts} experts do not divide over ep={self.ep}", f"use an ep that divides {model.experts}"
        padded = -(-model.vocab // _VOCAB) * _VOCAB
        if padded % split:
            yield f"the vocabulary, padded to {padded}, does not divide over {split} ranks", "use a tp that divides 64"

    def _of_sizes(self) -> Iterator[tuple[str, str]]:
        if self.name == "vllm" and self.ep not in (1, self.tp * self.dp):
            text = f"ep={self.ep}, but vLLM's expert parallelism spans all tp·dp = {self.tp * self.dp} ranks of a stage"
            yield text, f"write ep={self.tp * self.dp}, or ep=1 for none"
        if self.name == "sglang":
            for axis in ("ep", "dp"):
                if self.tp % getattr(self, axis):
                    yield f"{axis}={getattr(self, axis)} does not divide tp={self.tp}", f"use a {axis} that divides tp"

    def facts(self, model: Model) -> Iterator[str]:
        """How the model lies there, as far as it is not simply divided."""
        split = self.attention
        if model.mla is None and split > model.kv_groups and not split % model.kv_groups:
            yield f"each of the {model.kv_groups} KV heads is on {split // model.kv_groups} ranks"
        padded = -(-model.vocab // _VOCAB) * _VOCAB
        if padded != model.vocab:
            yield f"the vocabulary of {model.vocab} is padded to {padded}"
        if self.ep > 1:
            least, more = divmod(model.experts, self.ep)
            yield f"{least} experts on a rank" + (f", {least + 1} on the first {more}" if more else "")


_SIZES = ("tp", "ep", "dp", "pp")


@dataclass(frozen=True)
class EngineSide:
    """An engine's instance with the model: facts, bytes of a full sync and of a delta to it, and ranks that send."""

    engine: Engine
    facts: tuple[str, ...]
    full_bytes: int
    delta_bytes: int | None
    senders: int

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready values."""
        engine = {"name": self.engine.name, "sizes": self.engine.sizes, "receivers": self.engine.ranks}
        own = {name: value for name, value in vars(self).items() if name != "engine"}
        return {**engine, **own, "facts": list(self.facts)}


def delta_share(density: float, width: int) -> float:
    """Bytes of a delta in those of all elements, when this share of elements has changed, anywhere with equal chance.

    The smallest form of `moeref.delta` without zstd; headers and hashes are not counted. width: bytes of an element.
    Raises CostError for a density outside 0 … 1.
    """
    if not 0 <= density <= 1:
        raise CostError(f"density {density!r} is not between 0 and 1")
    forms = {
        "index": density * (2 + width) + 4 / 65_536,
        "bitmask": 1 / 8 + density * width,
        "full": float(width),
    }
    return min(forms.values()) / width


def senders(layout: Layout) -> int:
    """Ranks that hold a part of what is sent, of one replica of each parameter."""
    dense = {layout.rank_of(tp=tp, pp=pp) for tp in range(layout.tp) for pp in range(layout.pp)}
    stages = range(layout.pp)
    experts = {
        layout.expert_rank_of(etp=etp, ep=ep, pp=pp)
        for etp in range(layout.etp)
        for ep in range(layout.ep)
        for pp in stages
    }
    return len(dense | experts)
