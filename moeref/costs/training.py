"""How a model is trained, as far as it decides memory: the fields have megatron-core's and Megatron-LM's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moeref.config.errors import nearest
from moeref.layout import Layout

#: Bytes of an element by the names that frameworks write; `fp8` and `uint8` are Transformer Engine's scaled moments.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_DTYPES = {
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": tuple(BYTES),
    "exp_avg_sq_dtype": tuple(BYTES),
}


class CostError(ValueError):
    """A value from which no cost can be computed."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides memory and batches. The defaults are what RL frameworks set, not what megatron-core does.

    trains: False for a model that only runs forward, such as a reference. use_distributed_optimizer,
    use_precision_aware_optimizer, store_param_remainders and the dtypes: as in megatron-core's OptimizerConfig, for
    Adam. grad_reduce_in_fp32: of DistributedDataParallelConfig. micro_batch_size: sequences of one forward.
    global_batch_size: sequences of one step over all replicas.

    Raises CostError for values that megatron-core refuses together, and for those that are not of their type.
    """

    trains: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    micro_batch_size: int = 1
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _DTYPES:
                self._set_dtype(field.name, value)
            elif field.type == "bool" and type(value) is not bool:
                raise CostError(f"{field.name}={value!r} is neither true nor false")
            elif field.type.startswith("int") and (type(value) is not int or value < 1) and value is not None:
                raise CostError(f"{field.name}={value!r} must be an integer and at least 1")
        self._check()

    def _set_dtype(self, name: str, value: object) -> None:
        known = _NAMES.get(str(value).removeprefix("torch."), str(value))
        if known not in _DTYPES[name]:
            raise CostError(f"{name}={value!r} is none of {', '.join(_DTYPES[name])}")
        object.__setattr__(self, name, known)

    def _check(self) -> None:
        """Refuse what `OptimizerConfig.__post_init__` refuses."""
        changed = [name for name in _DTYPES if getattr(self, name) != "fp32"]
        if not self.use_precision_aware_optimizer and changed:
            raise CostError(f"{changed[0]}={getattr(self, changed[0])} needs use_precision_aware_optimizer=true")
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise CostError("use_precision_aware_optimizer=true needs use_distributed_optimizer=true")

    def microbatches(self, layout: Layout) -> int | None:
        """Microbatches of a step on a replica; None if the global batch is not given."""
        if self.global_batch_size is None:
            return None
        return max(1, self.global_batch_size // (self.micro_batch_size * layout.dp))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Training:
        """The training of values by name. Raises CostError for an unknown name, and as the class does."""
        for name in values:
            if name not in TRAINING:
                raise CostError(f"unknown setting of training {name!r}{nearest(str(name), TRAINING)}")
        return cls(**values)


TRAINING = tuple(field.name for field in fields(Training))
