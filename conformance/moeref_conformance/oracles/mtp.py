"""Gradients of a step with multi-token prediction layers, which transformers does not build: written apart.

As DeepSeek-V3's report and Megatron define it: layer k takes the hidden states that the one before it gives (the first
those after the decoder's final norm) and the embedding of the token k positions on, each normalised; a projection of
[embedding, hidden state] enters a layer like the decoder's, and the shared head, after a norm, predicts the token
k + 1 positions on. The layer itself is transformers' own. Names here are the standard ones (`mtp_names`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, rms_norm

from moeref_conformance.contract.requests.policy import Loss
from moeref_conformance.oracles import mtp_names, policy
from moeref_conformance.oracles.dialect import as_named, read_config
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.published import COPIES
from moeref_conformance.oracles.recipes import MAKING
from moeref_conformance.oracles.routed import IGNORED, forcing, given_routes, labels, unlisted

#: Megatron-Core's default of `mtp_loss_scaling_factor`, which the losses of all layers share.
FACTOR = 0.1
#: Of a layer, beside what a decoder layer has.
AROUND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
#: Families whose norms scale by 1 + weight.
ZERO_CENTRED = ("qwen3_next", "qwen3_5_moe_text")


#: Rows and positions that a rank computes of a microbatch.
Part = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Design:
    """The loss of multi-token prediction layers, as `Claims.mtp_detached`, `mtp_mask` and `mtp_mean` describe it."""

    #: It trains these layers alone: no decoder, embedding or head.
    detached: bool = False
    #: It counts a prediction only where the step trains on all tokens from the next one to the predicted one.
    path: bool = False
    #: It is the mean over these of the mean over a part's tokens, 0 for a part without any. Empty: over all tokens.
    parts: tuple[Part, ...] = ()
    #: Parts weigh by the number of tokens that the decoder trains on in them; else they weigh alike.
    by_tokens: bool = False
    #: The policy's loss that is the decoder's own; else that is cross entropy.
    policy: Loss | None = None


OF_ALL = Design()

#: Cells are judged in several threads.
_ONE_AT_A_TIME = threading.Lock()
_DONE: dict[tuple[str, str, bool, Design, int | None], Step] = {}


@dataclass(frozen=True)
class Step:
    """What a step computes. `gradients` are by the checkpoint's names, those of `routed` and of the layers.

    `experts` are those of each layer by (sample, position), as `routed.Routed` has them, up to the last token that the
    layer embeds: layer k embeds the token k positions on, which the last k of a row have not.
    """

    gradients: Mapping[str, torch.Tensor]
    experts: Mapping[int, Mapping[tuple[int, int], frozenset[int]]]


def under(
    expected: Expected,
    which: str = "native",
    missing: bool = True,
    design: Design = OF_ALL,
    counted: int | None = None,
) -> Step:
    """A step under the route set `a` or `b`, or with `native` routes; these layers' own routers choose always.

    The loss is the decoder's mean over tokens, and FACTOR times the mean over layers of each layer's mean over the
    tokens of all rows that have a label: of the first `counted` rows, or of all. The copies of embedding and head have
    the gradient of both uses. Computed once for equal checkpoints.
    """
    with _ONE_AT_A_TIME:
        key = expected.digest, which, missing, design, counted
        if key not in _DONE:
            routes = () if which == "native" else given_routes(expected, which, missing)
            _DONE[key] = _computed(expected, routes, design, counted)
        return _DONE[key]


def _computed(expected: Expected, routes: Sequence[Any], design: Design, counted: int | None) -> Step:
    layers, number = int(expected.config["num_hidden_layers"]), mtp_names.number(expected.config)
    family, model = str(expected.config["model_type"]), _model(expected, layers + number)
    names = {name: mtp_names.standard(family, layers, name) for name in expected.tensors}
    around = {
        name: tensor.float().requires_grad_()
        for name, tensor in zip(names.values(), expected.tensors.values(), strict=True)
        if any(name == f"model.layers.{layers + k}.{part}.weight" for k in range(number) for part in AROUND)
    }
    parameters = {**dict(model.named_parameters()), **around}
    with forcing(expected, routes, more=number) as forced:
        labels_of = partial(labels, expected, counted=counted, path=design.path)
        of_policy = partial(policy.loss, expected, design.policy) if design.policy else None
        decoder, ahead = _losses(model, layers, around, expected.tokens_BS.clamp_min(0), labels_of, design, of_policy)
    of = partial(torch.autograd.grad, inputs=list(parameters.values()), retain_graph=True, materialize_grads=True)
    by_module = dict(zip(parameters, of(decoder + ahead), strict=True))
    if design.detached:
        alone = dict(zip(parameters, of(decoder), strict=True))
        by_module |= {name: alone[name] for name in alone if not _in_layers(name, layers)}
    own = as_named(model, {name: by_module[name] for name in by_module if name not in around}, names.values())
    made = {mtp_names.standard(family, layers, name): gradient for name, gradient in own.items()}
    made |= {name: by_module[name] for name in around}
    for k in range(number):  # copies, which not all files have
        copied = (made["model.embed_tokens.weight"], made["lm_head.weight"])
        made |= dict(zip((f"model.layers.{layers + k}.{name}" for name in COPIES), copied, strict=True))
    nan = torch.tensor(torch.nan)
    gradients = {name: made.get(names[name], nan.expand(tensor.shape)) for name, tensor in expected.tensors.items()}
    chosen = enumerate(forced.chosen[-number:], 1)
    return Step(gradients, {layers + k - 1: _by_place(expected, of_TK, k) for k, of_TK in chosen})


def _by_place(expected: Expected, chosen_TK: torch.Tensor, ahead: int) -> dict[tuple[int, int], frozenset[int]]:
    rows = chosen_TK.reshape(*expected.tokens_BS.shape, -1).tolist()
    return {(b, s): frozenset(rows[b][s]) for b, n in enumerate(expected.lengths) for s in range(n - ahead)}


def _in_layers(name: str, layers: int) -> bool:
    """Whether a tensor is one of a multi-token prediction layer, after so many decoder layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= layers


def _losses(
    model: Any,
    layers: int,
    around: Mapping[str, torch.Tensor],
    tokens_BS: torch.Tensor,
    labels_of: Callable[[int], torch.Tensor],
    design: Design = OF_ALL,
    of_policy: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's loss and the weighted one of all layers, on labels so many tokens ahead.

    The decoder's is `of_policy` of its logits, if that is given.

    Whatever stands after the end of a row: it changes no token of it.
    """
    decoder, given = model.model, {}
    after, decoder.layers = decoder.layers[layers:], decoder.layers[:layers]
    model.config.num_hidden_layers = layers
    handle = decoder.layers[-1].register_forward_pre_hook(lambda _, __, kwargs: given.update(kwargs), with_kwargs=True)
    norm = partial(_norm, eps=model.config.rms_norm_eps, base=float(model.config.model_type in ZERO_CENTRED))
    with torch.enable_grad():
        hidden_BSH = decoder(tokens_BS, use_cache=False).last_hidden_state
        handle.remove()
        given.pop("hidden_states", None)
        logits_BSV, own_BS, added = model.lm_head(hidden_BSH), labels_of(0), torch.zeros(())
        loss = of_policy(logits_BSV) if of_policy else _mean(logits_BSV, own_BS)
        weighing_BS = own_BS if design.by_tokens else None
        for k, layer in enumerate(after, 1):
            enorm, hnorm, eh_proj, last = (around[f"model.layers.{layers + k - 1}.{part}.weight"] for part in AROUND)
            embedded_BSH = decoder.embed_tokens(tokens_BS.roll(-k, 1))  # what wraps is after every label
            normed = [norm(embedded_BSH, enorm), norm(hidden_BSH, hnorm)]
            out = layer(torch.cat(normed, -1) @ eh_proj.T, **given)
            hidden_BSH = norm(out[0] if isinstance(out, tuple) else out, last)
            added = added + FACTOR / len(after) * _mean(
                model.lm_head(hidden_BSH), labels_of(k), design.parts, weighing_BS
            )
    return loss, added


def _norm(hidden_BSH: torch.Tensor, weight: torch.Tensor, eps: float, base: float) -> torch.Tensor:
    return rms_norm(hidden_BSH, weight.shape, base + weight, eps)


def _mean(
    logits_BSV: torch.Tensor,
    labels_BS: torch.Tensor,
    parts: Sequence[Part] = (),
    weighing_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean cross entropy over the tokens of all rows that have a label, or of the means over those of each part.

    A part counts by its labels in `weighing_BS`, or all count alike.
    """
    every = (tuple(range(len(labels_BS))), tuple(range(labels_BS.shape[1])))
    means, weights = [], []
    for rows, at in parts or [every]:
        of = torch.tensor(rows)[:, None], torch.tensor(at)
        own, within = labels_BS[of].flatten(), logits_BSV[of].flatten(0, 1)
        total = cross_entropy(within, own, ignore_index=IGNORED, reduction="sum")
        means.append(total / max(int((own != IGNORED).sum()), 1))
        weights.append(1 if weighing_BS is None else int((weighing_BS[of] != IGNORED).sum()))
    return torch.stack(means) @ (torch.tensor(weights) / sum(weights))


def _model(expected: Expected, layers: int) -> Any:
    """transformers' module with so many decoder layers, those of multi-token prediction among them, in fp32."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = expected.inputs["checkpoint"]
    config = read_config(folder)
    decoder = config.num_hidden_layers
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):  # of each layer
        if kinds := getattr(config, name, None):
            after = "full" if name == "indexer_types" else kinds[-1]
            setattr(config, name, [*kinds, *[after] * (layers - len(kinds))])
    config.num_hidden_layers = layers
    apart = config.model_type in mtp_names.APART
    renamed = {r"^mtp\.layers\.0\.": f"model.layers.{decoder}."} if apart else None
    with unlisted(), MAKING:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            key_mapping=renamed,
        )
    return model.eval()
