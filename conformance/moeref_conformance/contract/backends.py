"""The backends of a cell: where its ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A backend with rank processes: torch's backend for the default group, and the device of a rank."""

    process_group: str
    device: str

    @property
    def on_gpu(self) -> bool:
        """Tensors of the model live on a GPU."""
        return self.device != "cpu"

    def device_of(self, local: int) -> str:
        """The device of the rank that has this index among the ranks on its machine."""
        return self.device.format(local=local)


#: The backend in which one rank sends weights to an inference engine of the target.
ENGINE = "engine"
#: The backends whose ranks are processes. In gloo-cuda all ranks share one GPU; in nccl each has its own.
RANK_BACKENDS: Mapping[str, Backend] = {
    "gloo": Backend("gloo", "cpu"),
    "gloo-cuda": Backend("staged", "cuda:0"),
    "nccl": Backend("nccl", "cuda:{local}"),
    ENGINE: Backend("gloo", "cpu"),
}

#: All backends. The static one has no ranks: names and settings are asked for in one process.
BACKENDS = ("static", *RANK_BACKENDS)
#: Those without ranks of Megatron. For all others rules say `gloo`.
WITHOUT_MEGATRON = ("static", ENGINE)
GPU_BACKENDS = tuple(name for name, backend in RANK_BACKENDS.items() if backend.on_gpu)
#: In a matrix: the machine chooses one of GPU_BACKENDS.
ANY_GPU = "gpu"
