"""Exporter bugs that spoil the training around an export: numbers drawn, modes, gradients and weights changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair
from moeref_conformance.selftest.faults.base import Fault, cell


def _once(act: Callable[[list[torch.nn.Module]], object], export: int = 0) -> border.Change:
    """The first export ends with `act(chunks)`, or that of this number."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        ended: list[bool] = []

        def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
            for meta, tensor in pairs:
                yield meta, tensor
                del tensor
            if len(ended) == export:
                act(list(session.export.chunks()))
            ended.append(True)

        return border.stream(session, rewrite)

    return wrap


def _of_each(act: Callable[[torch.nn.Parameter], object]) -> border.Change:
    return _once(lambda chunks: [act(parameter) for chunk in chunks for parameter in chunk.parameters()])


def _draw(chunks: list[torch.nn.Module]) -> None:
    torch.rand(1)


def _draw_from_a_tracker(chunks: list[torch.nn.Module]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        torch.rand(1)


def _names_a_file(chunks: list[torch.nn.Module]) -> None:
    random.random()


def _another_size(chunks: list[torch.nn.Module]) -> None:
    from megatron.core import parallel_state

    parallel_state.set_tensor_model_parallel_world_size(4)


def _engine_woken(chunks: list[torch.nn.Module]) -> None:
    torch.set_float32_matmul_precision("high")


def _copy_not_drawn(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        config: Any = chunk.config
        config.perform_initialization = False


def _no_grad(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def _no_main_grad(parameter: torch.nn.Parameter) -> None:
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.zero_()


def _rounded(parameter: torch.nn.Parameter) -> None:
    parameter.data.copy_(parameter.data.bfloat16())


def _hooked(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.register_forward_pre_hook(lambda *_: None)


def _built_again(chunks: list[torch.nn.Module]) -> None:
    """Every parameter is a new one with the same values, gradients and marks."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.nn.Parameter(old.data.clone(), old.requires_grad)
            new.grad = old.grad
            vars(new).update(vars(old))
            setattr(module, name, new)


def _until_a_step(spoil: border.Change, mend: Callable[[list[torch.nn.Module]], object]) -> border.Change:
    """What `spoil` has done stays until the next training step begins."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.gradients

        def gradients(tokens_BS: torch.Tensor) -> Any:
            mend(list(session.export.chunks()))
            return good.gradients(tokens_BS)

        return border.facet(spoil(session, cell, world), "gradients", gradients=gradients)

    return wrap


def _eval_if_broken_off(session: Any, cell: Cell, world: World) -> Any:
    """eval() before the export, and modes put back after its last tensor."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        modes = [(module, module.training) for chunk in session.export.chunks() for module in chunk.modules()]
        for module, _ in modes:
            module.training = False
        for meta, tensor in pairs:
            yield meta, tensor
            del tensor
        for module, mode in modes:
            module.training = mode

    return border.stream(session, rewrite)


def _fault(name: str, bug: str, wrap: border.Change, says: str, *also: str, layout: str = "pp2") -> Fault:
    return Fault(
        id=name,
        bug=bug,
        rules=("EXP-014",),
        also=also,
        cell=cell("qwen3_moe", layout),
        wrap=wrap,
        says=f"changed the {says}",
    )


FAULTS = (
    _fault(
        "draws-from-the-global-generator",
        "reported nowhere: an exporter draws a name or a sample of tensors to check, and dropout goes on elsewhere",
        _once(_draw),
        "generator of torch's on the CPU",
    ),
    _fault(
        "draws-from-numpy",
        "reported nowhere: an exporter seeds numpy to choose the tensors that it checks, and batches repeat",
        _once(lambda chunks: np.random.seed(0)),
        "generator of numpy's",
    ),
    _fault(
        "draws-from-a-tracker",
        "reported nowhere: modules are built for the export under Megatron's tracker, whose draws TP ranks share",
        _once(_draw_from_a_tracker),
        "generator of Megatron's model-parallel-rng",
    ),
    _fault(
        "second-export-draws",
        "reported nowhere: a file is named by chance from the second update on, and Python's shuffles go on elsewhere",
        _once(_names_a_file, export=1),
        "generator of Python's",
    ),
    _fault(
        "grad-mode-left-off",
        "reported nowhere: set_grad_enabled(False) before the export, and on again by the step that needs it",
        _until_a_step(_once(lambda chunks: torch.set_grad_enabled(False)), lambda chunks: torch.set_grad_enabled(True)),
        "setting of torch.is_grad_enabled()",
        "RUN-004",
    ),
    _fault(
        "products-in-tf32",
        "vLLM#29897 in kind: what starts an engine sets how fp32 is multiplied, also for a trainer in its process",
        _once(_engine_woken),
        "setting of torch.get_float32_matmul_precision()",
    ),
    _fault(
        "config-changed",
        "reported nowhere: a second model is built for the export from the config that is trained with, and not drawn",
        _once(_copy_not_drawn),
        "config of 0:.perform_initialization",
    ),
    _fault(
        "group-size-left",
        "reported nowhere: a converter is told of another size of TP through parallel_state, which keeps it",
        _once(_another_size),
        "setting of parallel_state.get_tensor_model_parallel_world_size()",
    ),
    _fault(
        "left-in-eval-when-broken-off",
        "W1 in kind: what was switched is put back after the last tensor, and not where a receiver fails",
        _eval_if_broken_off,
        "training mode of 0:",
        layout="one",
    ),
    _fault(
        "gradients-cleared",
        "reported nowhere: gradients are freed to make room for the gather, also those of a step under way",
        _of_each(_no_grad),
        "grad of 0:",
    ),
    _fault(
        "main-gradients-cleared",
        "reported nowhere: buffers of gradients are used for the gather, and zeroed",
        _of_each(_no_main_grad),
        "main_grad of 0:",
    ),
    _fault(
        "parameters-frozen",
        "reported nowhere: requires_grad is switched off in place of no_grad, and on again by the step that needs it",
        _until_a_step(
            _of_each(lambda parameter: parameter.requires_grad_(False)),
            lambda chunks: [chunk.requires_grad_(True) for chunk in chunks],
        ),
        "requires_grad of 0:",
    ),
    _fault(
        "parameters-rounded-in-place",
        "reported nowhere: what is sent in bf16 is rounded where it lies",
        _of_each(_rounded),
        "parameter of 0:",
        *("EXP-006", "FWD-001", "FWD-002"),
    ),
    _fault(
        "parameters-built-again",
        "torchtitan#3867 in the trainer: back from the CPU parameters are new ones, and the optimizer steps the old",
        _once(_built_again),
        "identity of 0:",
        "GRD-001",
    ),
    _fault(
        "hooks-left-behind",
        "reported nowhere: each export hangs a hook on the model, and takes none off",
        _once(_hooked),
        "hooks of 0:",
    ),
    _fault(
        "modules-left-in-eval",
        "reported nowhere: eval() before the export, and no train() after it",
        _once(lambda chunks: [chunk.eval() for chunk in chunks]),
        "training mode of 0:",
    ),
)
