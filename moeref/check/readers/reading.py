"""What a reader makes of a framework's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moeref.check.report import Problem
from moeref.check.value import Value
from moeref.families import Model
from moeref.layout import Layout

#: Fields of megatron-core's configs -> axes of the layout: how many ranks an axis has, and how stages are cut.
SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
STAGES = {
    "num_layers_in_first_pipeline_stage": "first",
    "num_layers_in_last_pipeline_stage": "last",
    "account_for_embedding_in_pipeline_split": "embedding",
    "account_for_loss_in_pipeline_split": "loss",
    "pipeline_model_parallel_layout": "pipeline_layout",
}


#: Fields of megatron-core's OptimizerConfig that decide memory.
OPTIMIZER = (
    *("use_distributed_optimizer", "use_precision_aware_optimizer", "store_param_remainders"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)


def under(prefix: str, axes: Mapping[str, str], *without: str) -> dict[str, str]:
    """These axes by the dotted paths of their fields, `without` some fields."""
    return {f"{prefix}{name}": axis for name, axis in axes.items() if name not in without}


@dataclass
class Reading:
    """What a configuration says, under the names that `moeref.check.check` takes."""

    framework: str
    #: A published name, or a path.
    model: Value | None = None
    #: Axes of the layout's text.
    layout: dict[str, Value] = field(default_factory=dict)
    #: Arguments of `check`.
    options: dict[str, Value] = field(default_factory=dict)
    #: Samples of a step of the optimizer, where a batch has several.
    step: Value | None = None
    #: Fields of TransformerConfig.
    settings: dict[str, Value] = field(default_factory=dict)
    #: Fields of `moeref.costs.Training`.
    training: dict[str, Value] = field(default_factory=dict)
    #: Settings that the framework's bridge makes of the model's own config, by family; `settings` go over them. None if
    #: there is no bridge, or once those of the model's family are taken over.
    by_family: dict[str, dict[str, Value]] | None = None
    #: Arguments of the model that TransformerConfig lacks (see `checked.BESIDE`).
    beside: dict[str, Value] = field(default_factory=dict)
    #: Arguments whose value only the framework or a shell could compute, by their name for `check`.
    computed: dict[str, Value] = field(default_factory=dict)
    #: What concerns other parts of the framework.
    elsewhere: list[Value] = field(default_factory=list)
    #: What the reader does not know.
    unread: list[Value] = field(default_factory=list)
    #: What the framework itself refuses, or builds in a way that moeref does not map; more by layout and by model.
    problems: list[Problem] = field(default_factory=list)
    by_layout: list[Callable[[Layout], Problem | None]] = field(default_factory=list)
    by_model: list[Callable[[Model], Problem | None]] = field(default_factory=list)
    #: Settings that the framework compares with the model's files, and refuses if they differ.
    as_files: dict[str, Value] = field(default_factory=dict)
    #: Whether layers come from a spec of their own, which also says what attention they have.
    own_attention: bool = False
    #: Settings that are given, and that the framework does not pass on.
    lost: dict[str, Value] = field(default_factory=dict)
    #: The pattern of pipeline stages that the framework makes for a model on a layout's axes.
    stages: Callable[[Model, Mapping[str, Value]], Value] | None = None

    @property
    def values(self) -> Mapping[str, Value]:
        """Every value that the check takes, by its name there."""
        model = {"model": self.model} if self.model else {}
        return {**model, **self.layout, **self.options, **self.settings, **self.training, **self.beside}
