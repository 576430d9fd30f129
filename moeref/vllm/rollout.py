"""What one rollout returns, from vLLM's objects or from the JSON of its server: tokens, logprobs, routes, versions.

Shape suffixes: T tokens of prompt and completion, G sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moeref import provenance, replay
from moeref.families import Model
from moeref.provenance import NONE, Provenance
from moeref.vllm.arguments import EngineError
from moeref.vllm.control import Control, InProcess
from moeref.vllm.ledger import Labels


@dataclass(frozen=True)
class Sample:
    """A completion with its prompt. Logprobs are those of the sampled tokens before temperature and top-p.

    `made` says of each token what made it, as the engine's workers recorded it. `prompt` is the number of its tokens.
    `routes` has a row for each token; that of the last one, which the engine never ran, is MISSING. It is None if
    routes were not asked for. `reason` is why the completion ended.
    """

    made: Provenance
    prompt: int
    logprobs_G: npt.NDArray[np.float64]
    routes: replay.Routes | None
    reason: str

    @property
    def tokens_T(self) -> npt.NDArray[np.int64]:
        """Prompt and completion."""
        return self.made.tokens_T

    @property
    def versions_G(self) -> npt.NDArray[np.int64]:
        """The version of the weights that each token was sampled with."""
        return self.made.weights_T[self.prompt :]

    @property
    def mask_T(self) -> npt.NDArray[np.bool_]:
        """True for sampled tokens."""
        return np.arange(len(self.tokens_T)) >= self.prompt


def sampling(max_tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams whose samples can be trained on: raw logprobs, no tokeniser.

    Raises EngineError for a `seed`: with that of a request the CPU's build stops. The engine has a seed of its own.
    """
    if "seed" in changes:
        raise EngineError("a request's seed stops the CPU engine of vllm 0.30; set the engine's seed instead")
    return {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "detokenize": False, **changes}


def generate(
    llm: Any, model: Model, prompts: Sequence[Sequence[int]], params: Any, *, routes: bool = True
) -> list[Sample]:
    """Samples of an `LLM` of this process, in the order of the prompts; `params.n` of each.

    Raises EngineError if routes were asked for and are absent.
    """
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    control = InProcess(llm)
    return [sample for output in outputs for sample in from_outputs(control, output, model, params.n, routes=routes)]


def labels(control: Control, request: str, index: int | None = None) -> Labels:
    """The labels of an ended request, which say what made its tokens. The workers that ran it give them once.

    request: the id that the engine got: `RequestOutput.request_id`, or `request_id` of a server's response. index: of
    the sample, if the request asked for several. Raises EngineError if the workers differ.
    """
    args = [request] if index is None else [request, index]
    first, *others = control.call("collective_rpc", method="moeref_labels", args=args)
    if any(other != first for other in others):
        raise EngineError(f"request {request}: the workers ran its tokens with different weights")
    return dict(first)


def request_id(response: Mapping[str, Any], prompt: int = 0) -> str:
    """The engine's id of a request, from a response of `/v1/completions`; `prompt` counts its prompts from 0."""
    return f"{response['id']}-{prompt}"


def from_outputs(control: Control, output: Any, model: Model, n: int = 1, *, routes: bool = True) -> list[Sample]:
    """The samples of a vLLM `RequestOutput` whose request has ended; `control` is of the engine that made it.

    n: how many samples it asked for. A sample that was aborted before its first token has no routes.
    """
    samples = []
    for one in output.outputs:
        if one.token_ids:
            made = labels(control, output.request_id, one.index if n > 1 else None)
            samples.append(from_output(output.prompt_token_ids, one, model, made, routes=routes))
        else:
            made_T = provenance.given(output.prompt_token_ids)
            samples.append(Sample(made_T, len(made_T), np.empty(0), None, str(one.finish_reason)))
    return samples


def from_output(prompt: Sequence[int], output: Any, model: Model, made: Labels, *, routes: bool = True) -> Sample:
    """The sample of a vLLM `CompletionOutput`. made: its labels, as `labels` gives them.

    Raises EngineError for an output without a logprob or labels for each token, and for routes that are asked for and
    absent; RouteError for routes of another model.
    """
    ids = list(output.token_ids)
    rows = output.logprobs
    logprobs = None if rows is None else [row[token].logprob for row, token in zip(rows, ids, strict=True)]
    return _sample(
        _Answer(prompt, ids, logprobs, output.routed_experts, str(output.finish_reason)), made, model, routes
    )


def from_response(
    prompt: Sequence[int], choice: Mapping[str, Any], model: Model, made: Labels, *, routes: bool = True
) -> Sample:
    """The sample of a choice of `/v1/completions` with `return_token_ids` and `logprobs` set.

    made: its labels, as `labels` gives them. Raises EngineError if the choice has no token ids; more as `from_output`.
    """
    if choice.get("token_ids") is None:
        raise EngineError("the response has no token_ids; ask with return_token_ids=true: text does not map back")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    reason = str(choice.get("finish_reason"))
    answer = _Answer(prompt, choice["token_ids"], logprobs, choice.get("routed_experts"), reason)
    return _sample(answer, made, model, routes)


class _Answer(NamedTuple):
    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float] | None
    routes: Any
    reason: str


def _sample(answer: _Answer, made: Labels, model: Model, wanted: bool) -> Sample:
    ids, logprobs = answer.ids, answer.logprobs
    if logprobs is None or len(logprobs) != len(ids):
        count = "no" if logprobs is None else len(logprobs)
        raise EngineError(f"{len(ids)} sampled tokens came with {count} logprobs; ask for logprobs=0")
    found = _provenance(answer, made)
    routes = _routes(answer.routes, model, found) if wanted else None
    return Sample(found, len(answer.prompt), np.asarray(logprobs, np.float64), routes, answer.reason)


def _provenance(answer: _Answer, made: Labels) -> Provenance:
    """The tokens that came, with their labels. There are more labels if the engine ran ahead and dropped tokens."""
    tokens = [*answer.prompt, *answer.ids]
    given = made["tokens_T"][: len(answer.prompt)]
    if given != list(answer.prompt) or len(made["tokens_T"]) < len(tokens):
        raise EngineError(f"{len(made['tokens_T'])} labels of another request than that of these {len(tokens)} tokens")
    columns = {name: values[: len(tokens)] for name, values in made.items()}
    return Provenance(**columns | {"tokens_T": tokens, "route_T": [*columns["route_T"][:-1], NONE]})  # type: ignore[arg-type]


def _routes(sent: Any, model: Model, made: Provenance) -> replay.Routes:
    if sent is None:
        raise EngineError(
            "routes are asked for and the engine sent none: was it started with enable_return_routed_experts, and is "
            "this the final output of its request?"
        )
    found = replay.from_engine(sent, replay.Spec.of(model))
    return replace(replay.to_tokens(found, len(made))[0], versions_T=made.route_T.astype(np.int32))
