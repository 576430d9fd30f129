"""The device of a rank: checked before a model is built, and later read from its parameters.

megatron-core always allocates on the current CUDA device, while plain torch modules and inputs are created on the host.
Only this module decides on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from moeref.config import ConfigError


def checked(device: str) -> torch.device:
    """`device` with its index. Raises ConfigError unless it is "cpu" or this process's current CUDA device."""
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise ConfigError(f"device {device!r}: megatron-core runs on 'cpu' or 'cuda:N'")
    try:
        current = int(torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"device {device!r}: torch has no CUDA device here ({error})") from error
    if found.index not in (None, current):
        raise ConfigError(
            f"device {device!r}, but megatron-core allocates on the current device cuda:{current}; "
            f"call torch.cuda.set_device({found.index}) first"
        )
    return torch.device("cuda", current)


def of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the chunks' parameters, to which inputs are moved; the CPU without parameters."""
    return next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))


@contextmanager
def host_for_cuda() -> Iterator[None]:
    """While this is open, megatron-core allocates on the host where torch has no GPU.

    Routers with an expert bias, latent attention and gated delta nets allocate on `torch.cuda.current_device()`,
    whatever `use_cpu_initialization` says. With a GPU nothing is changed.
    """
    if torch.cuda.is_available():
        yield
        return
    real = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = real
