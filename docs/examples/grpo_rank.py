"""A trainer's rank of grpo_moe.py: Megatron's policy and reference, their logprobs with replay, a step, a push.

Shape suffixes: B rows (samples, each a microbatch), S tokens of a row, V vocabulary, G sampled tokens of a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from moeref_conformance import authors

CUDA = torch.cuda.device_count() > 0
if not CUDA:
    authors.megatron_on_cpu()  # before anything imports megatron-core
import torch.distributed as dist  # noqa: E402

from docs.examples.grpo_moe import Size  # noqa: E402
from moeref import bridge, exporter, megatron, replay, sync  # noqa: E402
from moeref import vllm as engines  # noqa: E402
from moeref.megatron.optimizer import Trainer  # noqa: E402
from moeref.megatron.replay import recording, replaying  # noqa: E402

BETA, CLIP, LR = 0.04, 0.2, 1e-3
BUCKET_BYTES = 1 << 19


class Rank:
    """One rank. Policy and reference are two models of one record and one checkpoint."""

    def __init__(self, rank: int, size: Size, meet: str) -> None:
        layout, self.device = size.layout, torch.device("cuda", rank) if CUDA else torch.device("cpu")
        backend = "nccl" if CUDA else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=layout.world)
        self.rank, self.at, self.layout = megatron.initialise(layout), layout.coords(rank), layout
        built = [megatron.build(record, rank, device=str(self.device)) for record in size.records()]
        self.policy, self.reference = built
        for one in built:
            bridge.load(one.shard_map, rank, one.chunks, size.checkpoint)
        # Without the kit's substitutions megatron-core's optimizer of bf16 parameters accepts CUDA tensors only.
        steps = CUDA or size.dtype == "float32"
        self.trainer = Trainer(self.policy, LR) if steps else None
        self.engine: sync.WeightSync | None = None

    def _mine(self, samples: list[engines.Sample]) -> list[engines.Sample]:
        """The samples of this data-parallel replica."""
        return samples[self.at.dp :: self.layout.dp]

    def _routes(self, samples: list[engines.Sample]) -> list[replay.Routes]:
        """For each microbatch the rows that this rank's routers see."""
        rows = [replay.packed([sample.routes]) for sample in samples]
        return [replay.shard_to_rank(row, self.layout, self.rank) for row in rows]

    def _tokens(self, samples: list[engines.Sample]) -> torch.Tensor:
        return torch.stack([torch.from_numpy(sample.tokens_T) for sample in samples]).to(self.device)

    def _logprobs(self, built: megatron.Built, samples: list[engines.Sample]) -> list[torch.Tensor] | None:
        """Of the sampled tokens, on the last stage."""
        tokens_BS = self._tokens(samples)
        logits_BSV = megatron.logits(built.chunks, built.shard_map, tokens_BS)
        if logits_BSV is None:
            return None
        return [sampled(logits_SV, sample) for logits_SV, sample in zip(logits_BSV, samples, strict=True)]

    def logprobs(self, samples: list[engines.Sample], replayed: bool) -> Any:
        """The policy's logprobs with the engine's routes, or with its own, which are returned too."""
        mine = self._mine(samples)
        if replayed:
            with replaying(self.policy.chunks, self._routes(mine)):
                found, routes = self._logprobs(self.policy, mine), None
        else:
            with recording(self.policy.chunks) as recorded:
                found = self._logprobs(self.policy, mine)
            routes = [recorded.routes(number) for number in range(recorded.microbatches)]
        return (None if found is None else [one.cpu().numpy() for one in found]), routes

    def step(self, samples: list[engines.Sample], old: list[Any], advantages: list[float]) -> float:
        """A step of GRPO: clipped ratio to `old`, k3 to the reference. The engine's routes are replayed."""
        mine, share = self._mine(samples), slice(self.at.dp, None, self.layout.dp)
        olds, gains = [torch.from_numpy(one).to(self.device) for one in old[share]], advantages[share]
        references, losses = self._logprobs(self.reference, mine), []

        def loss(logits_1SV: torch.Tensor, rows: Sequence[int], _: torch.Tensor) -> torch.Tensor:
            (row,) = rows
            new_G = sampled(logits_1SV[0], mine[row])
            ratio_G = (new_G - olds[row]).exp()
            gain_G = torch.minimum(ratio_G * gains[row], ratio_G.clamp(1 - CLIP, 1 + CLIP) * gains[row])
            assert references is not None
            d_G = references[row] - new_G
            value = (BETA * (d_G.exp() - 1 - d_G) - gain_G).mean()
            losses.append(float(value.detach()))
            return value

        tokens_BS = self._tokens(mine)
        sampled_BS = torch.stack([torch.arange(tokens_BS.shape[1]) >= sample.prompt for sample in mine])
        assert self.trainer is not None
        self.trainer.step(tokens_BS, loss, self._routes(mine), sampled_BS)
        return sum(losses) / max(len(losses), 1)

    def push(self, version: int, place: engines.Place, control: Connection[Any, Any] | None) -> int:
        """Send the policy's weights to the engine as `version`; returns the bytes that rank 0 sent."""
        plan = exporter.Plan(self.policy.shard_map)
        with exporter.export(plan, self.rank, self.policy.chunks, version=version) as stream:
            if control is None:
                for _ in stream:
                    pass
                return 0
            try:
                if self.engine is None:
                    engine = engines.Engine(engines.Piped(control), place)
                    self.engine = sync.WeightSync(engine, bucket_bytes=BUCKET_BYTES)
                return self.engine.update(stream, version).receipt.nbytes
            finally:
                control.send((None, None))  # `serve` of the controller ends


def sampled(logits_SV: torch.Tensor, sample: engines.Sample) -> torch.Tensor:
    """The logprobs `[G]` of the sampled tokens: a row of logits is of the token after it."""
    tokens_S = torch.from_numpy(sample.tokens_T).to(logits_SV.device)
    logprobs_SV = logits_SV[sample.prompt - 1 : -1].log_softmax(-1)
    return logprobs_SV.gather(1, tokens_S[sample.prompt :, None])[:, 0]


def main(rank: int, arguments: tuple[Any, ...], calls: Connection[Any, Any], control: Any, host: str | None) -> None:
    """Answer calls until the controller goes. `host`: see `Devices.host`."""
    if host:
        os.environ["NCCL_HOSTID"] = host
    torch.set_num_threads(1)
    me = Rank(rank, *arguments)
    while (call := calls.recv()) is not None:
        name, values = call
        if name == "push":
            values = (*values, control)
        calls.send(getattr(me, name)(*values))
    dist.destroy_process_group()
