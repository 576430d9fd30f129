"""transformers' own module under given routes or its own: logits, experts of the tokens, gradients of a step.

A torch function mode replaces the result of the one `topk` by which a router chooses experts. Scores, normalisation and
everything else stay transformers' own, and so does the choice for rows without a route.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from moeref_conformance.contract.requests.forward import FACTOR, KEPT
from moeref_conformance.contract.requests.replay import WHOLE
from moeref_conformance.oracles import balancing as balancing_losses
from moeref_conformance.oracles import beside_vision
from moeref_conformance.oracles.dialect import as_named, of_5, read_config
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.recipes import MAKING, cast
from moeref_conformance.oracles.shares import ROUTERS

#: Row of a route that the engine did not give.
MISSING = -1
#: The label of a token that counts in no loss: what cross_entropy leaves out.
IGNORED = -100
#: Two sets of routes.
SETS = ("a", "b")
#: The set and the number of a sample without any route: in a microbatch of pairs it is the first, in a pack the last.
WITHOUT = ("b", 2)


#: Experts by layer, sample and position, for tokens whose route is not given.
Chosen = frozenset[tuple[int, int, int, frozenset[int]]]
#: The kind of a loss of routers, and the rows of each microbatch.
Balancing = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Routed:
    """What transformers computes; logits are in fp32.

    `experts` has those of every MoE layer by (sample, position), and `entering` the hidden states [B, S, H] that enter
    it. `gradients` are autograd's by the checkpoint's names, of the mean of the cross entropy of the next token, the
    first token of a row following its last, over all tokens that are trained on; NaN for a tensor that is no parameter.
    """

    logits_BSV: torch.Tensor
    experts: Mapping[int, Mapping[tuple[int, int], frozenset[int]]]
    entering: Mapping[int, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


class OfWeights(NamedTuple):
    """Logits and gradients, as in `Routed`, and the least margin by which a router chooses for each token."""

    logits_BSV: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    margin_BS: torch.Tensor


class Forced(TorchFunctionMode):
    """Replaces the indices of every `topk(scores [T, E], k)` of a forward, one a MoE layer, in rows that have a route.

    `target_TLK` has the routes of the MoE layers, `chosen` what was chosen, layer by layer.
    """

    def __init__(self, experts: int, target_TLK: torch.Tensor) -> None:
        super().__init__()
        self._experts, self._target_TLK = experts, target_TLK
        self.chosen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return answer
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.shape[-1] != self._experts or k != self._target_TLK.shape[2]:
            return answer
        target_TK = self._target_TLK[:, len(self.chosen)]
        chosen_TK = torch.where(target_TK[:, :1] >= 0, target_TK, answer.indices)
        self.chosen.append(chosen_TK)
        return torch.return_types.topk((scores.gather(-1, chosen_TK), chosen_TK))


class _Margins(TorchFunctionMode):
    """Records of every `topk(scores [T, N], k)` what was chosen and by how much, over experts and groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen_TK, self.margin_T = torch.empty(0), torch.tensor(torch.inf)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk) and args[0].ndim == 2 and answer.indices.shape[1] < len(args[0][0]):
            k = answer.indices.shape[1]
            best_TK = args[0].sort(descending=True).values  # by no topk, which would come here again
            self.margin_T = torch.minimum(self.margin_T, best_TK[:, k - 1] - best_TK[:, k])
            self.chosen_TK = answer.indices
        return answer


def choices(expected: Expected, layer: int, rows_TH: torch.Tensor, near: float) -> list[frozenset[int] | None]:
    """The experts that transformers' router of this layer takes in fp32 for each of the hidden states that enter it.

    None where it chooses by no more than `near`.
    """
    with alone(expected) as model, _Margins() as seen:
        model.model.layers[layer].mlp(rows_TH.float()[None])
    rows = zip(seen.chosen_TK.tolist(), seen.margin_T.tolist(), strict=True)
    return [frozenset(chosen) if margin > near else None for chosen, margin in rows]


def weighed(
    expected: Expected, layer: int, rows_TH: torch.Tensor, went: Sequence[frozenset[int]]
) -> list[dict[int, float]]:
    """The weights that transformers' router of this layer has in fp32, for these hidden states, of the experts to which
    they `went`; of its own choice where these are not top-k.

    Empty under transformers 4, whose MoE blocks hand no weights on.
    """
    found: list[dict[int, float]] = []

    def keep(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        found.extend(dict(zip(*row, strict=True)) for row in zip(args[1].tolist(), args[2].tolist(), strict=True))

    shape = _shape(expected)
    whole = [len(of) == shape.top_k and max(of) < shape.experts for of in went]
    target = [sorted(of) if fits else [MISSING] * shape.top_k for of, fits in zip(went, whole, strict=True)]
    forced = Forced(shape.experts, torch.tensor(target)[:, None])
    with alone(expected) as model, forced:
        mlp = model.model.layers[layer].mlp
        handle = mlp.experts.register_forward_pre_hook(keep) if of_5() else None
        mlp(rows_TH.float()[None])
        if handle is not None:
            handle.remove()
    return found or [{} for _ in rows_TH]


def given_routes(expected: Expected, name: str, missing: bool = True) -> list[np.ndarray[Any, Any]]:
    """The routes of set `a` or `b` as an engine sends them, one array [S - 1, layers, top-k] of int32 a sample.

    Random distinct experts in MoE layers, which no router would choose, zeros in dense ones; the last token has no row.
    Two rows that follow each other have the same route, to the first experts, as padding has it. With `missing` rows of
    the last sample are -1: one in the middle, and of a longer one the first and the last; and in set `b` of more than
    two samples all rows of the third.
    """
    shape = _shape(expected)
    rng = np.random.default_rng(1000 + SETS.index(name))
    samples_routes = []
    for number, length in enumerate(expected.lengths):
        idx_TLK = rng.random((length - 1, shape.layers, shape.experts)).argsort(axis=2)[:, :, : shape.top_k]
        idx_TLK[:, [not moe for moe in shape.moe]] = 0
        if number == 0:
            idx_TLK[1:3, shape.routed] = np.arange(shape.top_k)
        if missing and number == len(expected.lengths) - 1:
            idx_TLK[[0, length // 2, length - 2] if length > 8 else length // 2] = MISSING
        elif missing and (name, number) == WITHOUT:
            idx_TLK[:] = MISSING
        samples_routes.append(idx_TLK.astype(np.int32))
    return samples_routes


def _as_sent(name: str, idx_TLK: np.ndarray[Any, Any]) -> torch.Tensor:
    """In a dtype of engines: int32, or in set `b` uint16, which has no -1, and int16."""
    narrow = np.int16 if idx_TLK.min(initial=0) < 0 else np.uint16
    return torch.from_numpy(idx_TLK.astype(narrow if name.endswith("b") else np.int32))


def write(expected: Expected) -> Path:
    """The route sets as a file for the ranks, one tensor a sample: `a`, `b`, and without missing rows `whole-a`, …"""
    file = expected.dir / "routes.safetensors"
    if not file.exists():
        sets = {name: given_routes(expected, name) for name in SETS}
        sets |= {f"{WHOLE}{name}": given_routes(expected, name, missing=False) for name in SETS}
        save_file({f"{name}.{i}": _as_sent(name, s) for name, found in sets.items() for i, s in enumerate(found)}, file)
    return file


#: Cells are judged in several threads.
_ONE_AT_A_TIME = threading.Lock()
_DONE: dict[tuple[Any, ...], Routed] = {}
_OF_CHANGED: dict[str, torch.Tensor] = {}


def under(
    expected: Expected,
    which: str,
    missing: bool = True,
    chosen: Chosen = frozenset(),
    dtype: torch.dtype = torch.float32,
    negated: bool = False,
    balancing: Balancing | None = None,
    counted: int | None = None,
    rolled: int = 0,
) -> Routed:
    """What transformers computes in `dtype` under the route set `a` or `b`, or with `native` routes.

    Tokens without a route take the experts `chosen`, else the router's; the weights of routers may be `negated`.
    Gradients are those of a loss with `balancing`, if there is one, and of the first `counted` rows, of all without.
    Each sample has the routes of the one `rolled` places before it. Computed once for equal checkpoints.
    """
    key = expected.digest, which, missing, chosen, dtype, negated, balancing, counted, rolled
    with _ONE_AT_A_TIME:
        if key not in _DONE:
            given = () if which == "native" else given_routes(expected, which, missing)
            given = [given[number - rolled] for number in range(len(given))] if rolled else given
            _DONE[key] = routed(expected, given, chosen, dtype, negated, balancing, counted)
        return _DONE[key]


@dataclass(frozen=True)
class Rounding:
    """transformers in bf16 beside itself in fp32 under the same routes.

    `logits` is the distance of all logits, as `apart` has it. `exact` and `rounded` are the gradients in fp32 and in
    bf16, by the checkpoint's names.
    """

    logits: float
    exact: Mapping[str, torch.Tensor]
    rounded: Mapping[str, torch.Tensor]


def rounding(expected: Expected, which: str, missing: bool) -> Rounding:
    """The rounding of bf16, where every token takes the experts that it has in fp32 under the route set `a` or `b`."""
    exact = under(expected, which, missing)
    taken = frozenset(
        (layer, *place, own) for layer, by_place in exact.experts.items() for place, own in by_place.items()
    )
    rounded = under(expected, "native", chosen=taken, dtype=torch.bfloat16)
    logits = apart([(rounded.logits_BSV, exact.logits_BSV)])
    return Rounding(logits, exact.gradients, rounded.gradients)


def apart(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far the first of each pair is from the second: the Euclidean distance of all, relative to their length."""
    both = [(got.double(), want.double()) for got, want in pairs]
    far = sum(float((got - want).square().sum()) for got, want in both)
    length = sum(float(want.square().sum()) for _, want in both)
    return float((far / length) ** 0.5) if length else 0.0 if far == 0.0 else float("inf")


def routed(
    expected: Expected,
    routes: Sequence[np.ndarray[Any, Any]] = (),
    chosen: Chosen = frozenset(),
    dtype: torch.dtype = torch.float32,
    negated: bool = False,
    balancing: Balancing | None = None,
    counted: int | None = None,
) -> Routed:
    """transformers' step with the cell's tokens under `routes` as `given_routes` makes them; native without."""
    model, layers = _model(str(expected.inputs["checkpoint"]), dtype), _shape(expected).routed
    if negated:
        model = _negated(model)
    samples, length = expected.tokens_BS.shape
    with torch.enable_grad():
        with forcing(expected, routes, chosen) as forced, _entering(model, layers) as entering:
            logits_BSV = model(expected.tokens_BS.clamp_min(0)).logits.float()  # causal: padding changes no token
        more = _of_routers(model, expected, entering, balancing)
        gradients = _gradients(model, logits_BSV, expected, more, counted)
    experts = {}
    for layer, chosen_TK in zip(layers, forced.chosen, strict=True):
        rows = chosen_TK.reshape(samples, length, -1).tolist()
        experts[layer] = {(b, s): frozenset(rows[b][s]) for b, n in enumerate(expected.lengths) for s in range(n)}
    detached = {layer: entering_BSH.detach() for layer, entering_BSH in entering.items()}
    return Routed(logits_BSV.detach().contiguous(), experts, detached, gradients)


def _of_routers(
    model: Any, expected: Expected, entering: Mapping[int, torch.Tensor], balancing: Balancing | None
) -> torch.Tensor | float:
    """The loss of the routers; 0 without one."""
    if balancing is None:
        return 0.0
    logits_LBSE = [entering_BSH @ model.model.layers[i].mlp.gate.weight.T for i, entering_BSH in entering.items()]
    sigmoid = any(name.endswith(".e_score_correction_bias") for name in expected.tensors)
    return balancing_losses.added(*balancing, logits_LBSE, _shape(expected).top_k, sigmoid, expected.lengths)


def forcing(
    expected: Expected, routes: Sequence[np.ndarray[Any, Any]] = (), chosen: Chosen = frozenset(), more: int = 0
) -> Forced:
    """What forces the routes on the next forward of the cell's tokens; `more` routers after the decoder's are free."""
    shape, (samples, length) = _shape(expected), expected.tokens_BS.shape
    target_BSLK = np.full((samples, length, shape.layers + more, shape.top_k), MISSING, np.int64)
    for number, sample in enumerate(routes):
        target_BSLK[number, : len(sample), : shape.layers] = sample
    for layer, row, position, own in chosen:
        target_BSLK[row, position, layer] = sorted(own)
    layers = [*shape.routed, *range(shape.layers, shape.layers + more)]
    return Forced(shape.experts, torch.from_numpy(target_BSLK[:, :, layers].reshape(-1, len(layers), shape.top_k)))


@contextmanager
def _entering(model: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The hidden states that enter the MoE blocks of these layers in a forward."""
    with inputs_of({layer: model.model.layers[layer].mlp for layer in layers}) as found:
        yield found


@contextmanager
def inputs_of(modules: Mapping[int, torch.nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
    """What enters these modules in a forward, under the same numbers."""
    found: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: found.update({number: args[0]})

    handles = [module.register_forward_pre_hook(keep(number)) for number, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def entering(
    expected: Expected, modules: Callable[[Any], Sequence[torch.nn.Module]], routes: str = "", missing: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [B, S, V] in fp32 of the cell's tokens, and what enters `modules` of the model on the way.

    Under the route set `routes`, with `missing` rows or without, else under the routers' own.
    """
    given = given_routes(expected, routes, missing) if routes else ()
    with alone(expected) as model, forcing(expected, given), inputs_of(dict(enumerate(modules(model)))) as found:
        logits_BSV = model(expected.tokens_BS.clamp_min(0)).logits.float()
    return logits_BSV, [found[number] for number in sorted(found)]


def _gradients(
    model: Any, logits_BSV: torch.Tensor, expected: Expected, more: torch.Tensor | float, counted: int | None
) -> dict[str, torch.Tensor]:
    """The gradients under the names of the checkpoint, as transformers' own writer splits and names its tensors.

    more: what a step adds to the loss. counted: how many rows the loss is of.
    """
    labels_BS = labels(expected, counted=counted)
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
    return _of_loss(model, loss + more, expected)


def of_loss(
    expected: Expected,
    loss: Callable[[torch.Tensor], torch.Tensor],
    routes: Sequence[np.ndarray[Any, Any]] = (),
    balancing: Balancing | None = None,
    dtype: torch.dtype = torch.float32,
) -> Mapping[str, torch.Tensor]:
    """The gradients of a `loss` of the logits [B, S, V] in fp32, as in `Routed`, under `routes` as in `routed`.

    With that of `balancing` added, if there is one. Of a model in `dtype`.
    """
    with _ONE_AT_A_TIME, torch.enable_grad():
        model = _model(str(expected.inputs["checkpoint"]), dtype)
        with forcing(expected, routes), _entering(model, _shape(expected).routed) as entering:
            logits_BSV = model(expected.tokens_BS.clamp_min(0)).logits.float()
        more = _of_routers(model, expected, entering, balancing)
        return _of_loss(model, loss(logits_BSV) + more, expected)


def of_weights(expected: Expected, tensors: Mapping[str, torch.Tensor]) -> OfWeights:
    """What transformers computes with other weights, under the routers' own routes."""
    with tempfile.TemporaryDirectory() as folder, _ONE_AT_A_TIME, torch.enable_grad():
        for file in ("config.json", "generation_config.json"):
            if (source := Path(expected.inputs["checkpoint"]) / file).exists():
                shutil.copyfile(source, Path(folder, file))
        save_file(dict(tensors), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = _model.__wrapped__(folder, torch.float32)
        with _Margins() as seen:
            logits_BSV = model(expected.tokens_BS.clamp_min(0)).logits.float()
        margin_BS = seen.margin_T.detach().expand(expected.tokens_BS.numel()).view_as(expected.tokens_BS)
        gradients = _gradients(model, logits_BSV, expected, 0.0, None)
        return OfWeights(logits_BSV.detach().contiguous(), gradients, margin_BS)


def _of_loss(model: Any, loss: torch.Tensor, expected: Expected) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    gradients = as_named(model, dict(zip(parameters, found, strict=True)), expected.tensors)
    nan = torch.tensor(torch.nan)
    return {n: gradients.get(beside_vision.own(n), nan.expand(t.shape)) for n, t in expected.tensors.items()}


def labels(expected: Expected, ahead: int = 0, counted: int | None = None, path: bool = False) -> torch.Tensor:
    """What each token is to predict: the label of the token `ahead` of it in its row.

    A token's label is the one after it, and the first one after the last, where a step trains on that; with `path`,
    where it trains on those on the way to it too. IGNORED for tokens without one, and after the first `counted` rows.
    """
    labels_BS = torch.full_like(expected.tokens_BS, IGNORED)
    for row, length in enumerate(expected.lengths):
        next_S, trained_S = (of[row, :length].roll(-1) for of in (expected.tokens_BS, expected.mask_BS))
        within = max(length - ahead, 0)
        on_the_way = [trained_S[step : within + step] for step in range(0 if path else ahead, ahead + 1)]
        labels_BS[row, :within] = next_S[ahead:].where(torch.stack(on_the_way).all(0), IGNORED)
    labels_BS[counted if counted is not None else len(labels_BS) :] = IGNORED
    return labels_BS


@dataclass(frozen=True)
class _Shape:
    layers: int
    experts: int
    top_k: int
    moe: tuple[bool, ...]

    @property
    def routed(self) -> list[int]:
        """The layers with a router."""
        return [layer for layer, moe in enumerate(self.moe) if moe]


def _shape(expected: Expected) -> _Shape:
    config, names = expected.config, {beside_vision.own(name) for name in expected.tensors}
    layers = int(config["num_hidden_layers"])
    experts = next(int(config[k]) for k in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(k))
    moe = tuple(any(f"model.layers.{i}.{name}" in names for name in ROUTERS) for i in range(layers))
    return _Shape(layers, experts, int(config["num_experts_per_tok"]), moe)


@contextmanager
def alone(expected: Expected) -> Iterator[Any]:
    """transformers' module in fp32 with the checkpoint's weights, without gradients, for one thread at a time."""
    with _ONE_AT_A_TIME, torch.no_grad():
        yield _model(str(expected.inputs["checkpoint"]), torch.float32)


@functools.lru_cache(maxsize=2)
def _model(folder: str, dtype: torch.dtype) -> Any:
    """transformers' module with the checkpoint's weights."""
    import transformers

    with unlisted(), MAKING, beside_vision.alone(Path(folder)) as of_text:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            # Loaded in another dtype, that would be torch's default of all threads until then.
            of_text,
            config=read_config(of_text),
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
    cast(model, dtype)
    return model.eval()


def _negated(model: Any) -> Any:
    """A copy of the module whose routers have their weight negated."""
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if name.endswith((".gate.weight", ".router.weight")):
            parameter.data.neg_()
    return other


def with_last_layer_changed(model: Any) -> Any:
    """A copy of the module whose last layer has its weights multiplied by FACTOR, but for what is `KEPT`."""
    other, last = copy.deepcopy(model), f".layers.{model.config.num_hidden_layers - 1}."
    for name, parameter in other.named_parameters():
        if last in name and not KEPT.search(name):
            parameter.data.mul_(FACTOR)
    return other


def of_changed_weights(expected: Expected) -> torch.Tensor:
    """Logits in fp32 `with_last_layer_changed`."""
    with alone(expected) as model:
        if expected.digest not in _OF_CHANGED:
            logits_BSV = with_last_layer_changed(model)(expected.tokens_BS.clamp_min(0)).logits.float()
            _OF_CHANGED[expected.digest] = logits_BSV.contiguous()
        return _OF_CHANGED[expected.digest]


@contextmanager
def unlisted() -> Iterator[None]:
    """transformers does not list the tensors of multi-token prediction layers, which its modules lack."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
