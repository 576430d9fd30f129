"""What unedited megatron-core needs to run on a machine without a GPU: a table of substitutions, each with its reason.

Where a GPU is used only the entries marked `anywhere` are installed: they replace nothing of CUDA, but add what
megatron-core's local layer spec lacks without Transformer Engine and Apex. The two stages follow the import order:
"torch" entries must be in place before megatron-core is imported (it captures collectives at import), "megatron"
entries patch its modules. Numerics are torch's own CPU kernels throughout; no entry computes a part of a model. They
are tested with megatron-core 0.16.1 and 0.19.2 with the local (not Transformer Engine) layer spec.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from moeref_conformance.worlds.uneven import padded
from torch.distributed import distributed_c10d as c10d
from torch.utils import _device

CPU = torch.device("cpu")
Stage = Literal["torch", "megatron"]


@dataclass(frozen=True)
class Substitution:
    """One entry: `install` puts it in place for the rest of the process; `reason` says what fails without it."""

    name: str
    stage: Stage
    reason: str
    install: Callable[[], None]
    anywhere: bool = False


def current_device() -> None:
    """`torch.cuda.current_device()` returns the CPU device."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


def synchronize() -> None:
    """`torch.cuda.synchronize()` does nothing: CPU work is finished when the call returns."""
    torch.cuda.synchronize = lambda device=None: None


class Event:
    """An event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """All work is done."""
        return True


class Stream:
    """A stream on which everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def wait_stream(self, stream: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        """The event given, or a new one."""
        return event or Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """All work is done."""
        return True


def streams() -> None:
    """Streams and events are stand-ins: one default stream, and `with torch.cuda.stream(...)` changes nothing."""
    default = Stream()

    torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda device=None: default  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda device=None: default  # type: ignore[assignment,return-value]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]


#: What makes a tensor on a given device: functions of torch, and methods of a tensor.
FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )


def device_literals() -> None:
    """`device="cuda"` arguments, `Tensor.cuda()` and `Tensor.to("cuda")` mean the CPU, and no memory is pinned.

    The functions are wrapped one by one. A torch function mode would do the same in fewer lines, but it also intercepts
    every other call of torch, which took a fifth of a rank's CPU time.
    """
    # `with torch.device("meta")` knows these functions by identity: let torch look them up before they are wrapped.
    _device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))

    @functools.wraps(torch.Tensor.cuda)
    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign,assignment]


def _on_cpu(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if len(args) > 1 and _is_cuda(args[1]):  # tensor.to("cuda")
            args = (args[0], CPU, *args[2:])
        return real(*args, **kwargs)

    return call


def tensor_types() -> None:
    """`Tensor.type()` without arguments names CUDA's type of a tensor, such as torch.cuda.BFloat16Tensor."""
    real = torch.Tensor.type

    @functools.wraps(real)
    def of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and self.device == CPU else found

    torch.Tensor.type = of  # type: ignore[method-assign,assignment]


def cuda_random() -> None:
    """The CUDA generator is the CPU generator."""
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]


def eager() -> None:
    """`torch.compile` leaves functions as they are, and so does not import its compiler, which takes seconds."""

    def compile(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile


def uneven_all_gather() -> None:
    """`all_gather` of pieces with unequal first dimensions, which are padded to the largest and then trimmed.

    With `async_op=True` uneven pieces are refused, since the trimming needs the result.
    """
    real = c10d.all_gather

    @functools.wraps(real)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        outputs, mine, trim = padded(tensor_list, tensor)
        if mine is tensor:
            return real(tensor_list, tensor, group, async_op)
        if async_op:
            raise NotImplementedError("uneven all_gather over gloo is not available with async_op=True")
        real(outputs, mine, group)
        return trim()

    c10d.all_gather = all_gather
    dist.all_gather = all_gather


def optimizers() -> None:
    """Adam, and the products of clipping, are torch's, also where Transformer Engine or Apex is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformer_engine.pytorch")  # the rest of it stays
    for name in ("transformer_engine.pytorch.optimizers", "apex", "amp_C"):
        sys.modules[name] = None  # type: ignore[assignment]


def megatron_random() -> None:
    """megatron-core's get/set of the CUDA generator state uses the CPU generator."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def splits_to_numpy() -> None:
    """`maybe_move_tensor_to_cpu(as_numpy=True)` gives numpy for a CPU tensor too."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = move


def router_gemm() -> None:
    """`moe_utils.te_general_gemm` exists, as None, where Transformer Engine is missing (0.16.1 leaves it undefined)."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def router_product() -> None:
    """Routers multiply by torch, also where Transformer Engine is installed."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def latent_attention_linear() -> None:
    """`multi_latent_attention.TELinear` is a class, without instances, where Transformer Engine is missing.

    0.16.1 has a MagicMock there and asks `isinstance(linear, TELinear)`, so that no MLA layer can be built.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type | None):
        multi_latent_attention.TELinear = type("TELinear", (), {})


def sequence_parallel_norm() -> None:
    """`WrappedTorchNorm` is built with the flag hidden, then its parameters are marked `sequence_parallel`.

    A norm acts on each token alone, so under sequence parallelism only the gradient reduction differs, and that is
    what the attribute on the parameter asks `finalize_model_grads` for.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    real = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return real(cls, config, *args, **kwargs)
        hidden = copy.copy(config)
        hidden.sequence_parallel = False
        norm = real(cls, hidden, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = new


SUBSTITUTIONS = (
    Substitution("current_device", "torch", "allocations name torch.cuda.current_device()", current_device),
    Substitution("synchronize", "torch", "pipeline point-to-point synchronises after a batch", synchronize),
    Substitution("streams", "torch", "the all-to-all dispatcher and shared experts use streams", streams),
    Substitution("device_literals", "torch", 'schedules allocate on device="cuda", rope pins memory', device_literals),
    Substitution("tensor_types", "torch", "optimizers below fp32, and clipping, ask for CUDA's types", tensor_types),
    Substitution("cuda_random", "torch", "model-parallel seeding keeps states of the CUDA generator", cuda_random),
    Substitution("eager", "torch", "megatron-core compiles small functions, once more in every rank", eager),
    Substitution("uneven_all_gather", "torch", "gloo refuses uneven pieces (ETP > 1, all-to-all)", uneven_all_gather),
    Substitution("optimizers", "torch", "kernels of Transformer Engine and Apex need a GPU", optimizers),
    Substitution("megatron_random", "megatron", "its state helpers call into the CUDA generator", megatron_random),
    Substitution("splits_to_numpy", "megatron", "splits stay CPU tensors, which all_to_all refuses", splits_to_numpy),
    Substitution("router_gemm", "megatron", "0.16.1 leaves te_general_gemm undefined without TE", router_gemm, True),
    Substitution("router_product", "megatron", "Transformer Engine's GEMM needs a GPU", router_product),
    Substitution(
        "latent_attention_linear", "megatron", "0.16.1 asks isinstance(…, a mock)", latent_attention_linear, True
    ),
    Substitution(
        "sequence_parallel_norm", "megatron", "WrappedTorchNorm refuses the flag", sequence_parallel_norm, True
    ),
)

_installed: list[str] = []


def installed() -> tuple[str, ...]:
    """The names of all entries that are in place in this process."""
    return tuple(_installed)


def install(device: str, stage: Stage) -> tuple[str, ...]:
    """Install the entries of `stage` once and return the names of all that are in place now.

    For a CUDA `device` these are the entries marked `anywhere`. Raises RuntimeError for device "cpu" where torch sees a
    GPU: the substitutions would redirect real GPU work (hide it with CUDA_VISIBLE_DEVICES=""), ValueError for another
    device.
    """
    on_gpu = device.split(":")[0] == "cuda"
    if device != "cpu" and not on_gpu:
        raise ValueError(f"device {device!r}: use 'cpu' or 'cuda:N'")
    if not on_gpu and torch.cuda.is_available():
        raise RuntimeError(
            "torch sees a GPU, so the CPU substitutions are refused; set CUDA_VISIBLE_DEVICES='' for a CPU world"
        )
    for entry in SUBSTITUTIONS:
        if entry.stage == stage and entry.name not in _installed and (entry.anywhere or not on_gpu):
            entry.install()
            _installed.append(entry.name)
    return tuple(_installed)
