"""What one rollout returns, from vLLM's objects or from the JSON of its server: tokens, logprobs, routes, versions.

Shape suffixes: T tokens of prompt and completion, G sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeref import replay
from moeref.families import Model
from moeref.vllm.arguments import EngineError
from moeref.vllm.control import version_of


@dataclass(frozen=True)
class Sample:
    """A completion with its prompt. Logprobs are those of the sampled tokens before temperature and top-p.

    `routes` has a row for each token; that of the last one, which the engine never ran, is MISSING. None where they
    were not asked for. `versions_G` is the version of the weights that each token was sampled with.
    """

    tokens_T: npt.NDArray[np.int64]
    prompt: int
    logprobs_G: npt.NDArray[np.float64]
    routes: replay.Routes | None
    versions_G: npt.NDArray[np.int64]
    reason: str

    @property
    def mask_T(self) -> npt.NDArray[np.bool_]:
        """True for sampled tokens."""
        return np.arange(len(self.tokens_T)) >= self.prompt


def sampling(max_tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams whose samples can be trained on: raw logprobs, no tokeniser.

    Raises EngineError for a seed of a request, which the CPU's build does not survive; the engine has one.
    """
    if "seed" in changes:
        raise EngineError("a request's seed stops the CPU engine of vllm 0.30; set the engine's seed instead")
    return {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "detokenize": False, **changes}


def generate(
    llm: Any, model: Model, prompts: Sequence[Sequence[int]], params: Any, *, routes: bool = True
) -> list[Sample]:
    """Samples of an `LLM` of this process, in the order of the prompts; `params.n` of each.

    Raises EngineError if routes were asked for and are absent, and if the weights changed on the way.
    """
    before = llm.get_weight_version()
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    if (after := llm.get_weight_version()) != before:
        raise EngineError(f"the weights changed from version {before} to {after} during the rollout")
    return [
        from_output(output.prompt_token_ids, one, model, version=version_of(before), routes=routes)
        for output in outputs
        for one in output.outputs
    ]


def from_output(prompt: Sequence[int], output: Any, model: Model, *, version: int, routes: bool = True) -> Sample:
    """The sample of a vLLM `CompletionOutput`."""
    ids = list(output.token_ids)
    rows = output.logprobs
    logprobs = None if rows is None else [row[token].logprob for row, token in zip(rows, ids, strict=True)]
    return _sample(prompt, ids, logprobs, output.routed_experts, output.finish_reason, model, version, routes)


def from_response(
    prompt: Sequence[int], choice: Mapping[str, Any], model: Model, *, version: int, routes: bool = True
) -> Sample:
    """The sample of a choice of `/v1/completions` with `return_token_ids` and `logprobs` set."""
    if choice.get("token_ids") is None:
        raise EngineError("the response has no token_ids; ask with return_token_ids=true: text does not map back")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    reason = str(choice.get("finish_reason"))
    return _sample(prompt, choice["token_ids"], logprobs, choice.get("routed_experts"), reason, model, version, routes)


def _sample(
    prompt: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float] | None,
    sent: Any,
    reason: str | None,
    model: Model,
    version: int,
    wanted: bool,
) -> Sample:
    if logprobs is None or len(logprobs) != len(ids):
        count = "no" if logprobs is None else len(logprobs)
        raise EngineError(f"{len(ids)} sampled tokens came with {count} logprobs; ask for logprobs=0")
    tokens = np.asarray([*prompt, *ids], np.int64)
    return Sample(
        tokens_T=tokens,
        prompt=len(prompt),
        logprobs_G=np.asarray(logprobs, np.float64),
        routes=_routes(sent, model, len(tokens), version) if wanted else None,
        versions_G=np.full(len(ids), version, np.int64),
        reason=str(reason),
    )


def _routes(sent: Any, model: Model, tokens: int, version: int) -> replay.Routes:
    if sent is None:
        raise EngineError(
            "routes are asked for and the engine sent none: was it started with enable_return_routed_experts, and is "
            "this the final output of its request?"
        )
    found = replay.from_engine(sent, replay.Spec.of(model), version=version)
    return replay.to_tokens(found, tokens)[0]
