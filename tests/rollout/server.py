"""vLLM's own HTTP server on a tiny model: started, asked, watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from docs.examples import tiny
from docs.examples.grpo_moe import free_port
from moeref import families
from moeref import vllm as engines

PROMPT = [5, 6, 7, 8]
#: Seconds until a process has ended or a state is reached; the machine may be busy.
DEADLINE = 120
#: Scores of experts, of about 1/16, that differ less are equal to rounding in fp32.
TIE = 1e-6


class Server:
    """A server, the two sets of weights that it may have, and its processes."""

    def __init__(self, url: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.url, self.folder, self.process = url, folder, process
        self.model = families.read(folder / "old", "float32")
        self.control = engines.Served(url, DEADLINE)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "model.safetensors")

    def engine(self, workers: int = 1, **settings: Any) -> engines.Engine:
        return engines.Engine(
            self.control, engines.Place("127.0.0.1", free_port(), 1 + workers, seconds=30), **settings
        )

    def sample(self, tokens: int = 8) -> engines.Sample:
        body = {"model": str(self.folder / "old"), "prompt": PROMPT, "max_tokens": tokens, "temperature": 1.0}
        body |= {"return_token_ids": True, "ignore_eos": True, "logprobs": 0}
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
            found = json.load(answer)
        made = engines.labels(self.control, engines.request_id(found))
        return engines.from_response(PROMPT, found["choices"][0], self.model, made)

    def expected(self, name: str, sample: engines.Sample, version: int | None = None) -> Any:
        """The logprobs of the sampled tokens by transformers; with routes that the engine gave with `version`, if any.

        Where two experts' scores are equal to rounding, both choices are right, and each gives other logprobs.
        """
        from transformers import AutoModelForCausalLM

        tokens_S = torch.from_numpy(sample.tokens_T)
        model = AutoModelForCausalLM.from_pretrained(self.folder / name)
        if version is not None:
            assert sample.routes is not None
            for number, layer in enumerate(model.model.layers):
                given_TK = torch.from_numpy(sample.routes.idx_TLK[:, number].astype(np.int64))
                layer.mlp.gate.register_forward_hook(_replayed(given_TK, sample.made.route_T == version))
        with torch.no_grad():
            logprobs_SV = model(tokens_S[None]).logits[0].log_softmax(-1)
        return logprobs_SV[sample.prompt - 1 : -1].gather(1, tokens_S[sample.prompt :, None])[:, 0].numpy()

    def far(self, name: str, sample: engines.Sample, version: int | None = None) -> float:
        return float(np.abs(self.expected(name, sample, version) - sample.logprobs_G).max())

    def running(self) -> bool:
        """Whether a request is being sampled."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE) as answer:
            lines = answer.read().decode().splitlines()
        return any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines)

    def worker(self) -> psutil.Process:
        """One of several workers, which have processes of their own."""
        return next(one for one in self.children() if "Worker" in " ".join([one.name(), *one.cmdline()]))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _replayed(given_TK: torch.Tensor, given_T: Any) -> Any:
    """A hook of a router: the given experts where there are some, which must be the best ones but for ties."""
    rows_T = torch.from_numpy(np.flatnonzero(given_T))

    def hook(_: Any, __: Any, out: Any) -> Any:
        if not len(rows_T):
            return out
        scores_TE, weights_TK, idx_TK = out[0].softmax(-1), out[1].clone(), out[2].clone()
        mine_TK, rows_TE = given_TK[rows_T], scores_TE[rows_T]
        found_TK = rows_TE.gather(1, mine_TK)
        best_TE = rows_TE.scatter(1, mine_TK, 0)
        assert (best_TE.max(-1).values - found_TK.min(-1).values).max() <= TIE, "the engine's experts are not the best"
        idx_TK[rows_T], weights_TK[rows_T] = mine_TK, found_TK / found_TK.sum(-1, keepdim=True)
        return out[0], weights_TK, idx_TK

    return hook


def until(reached: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.05)


@contextmanager
def served(folder: Path, **changes: Any) -> Iterator[Server]:
    """A server that is ready, with the weights `old`. It is ended on exit, with all of its processes."""
    write(folder)
    model = families.read(folder / "old", "float32")
    # The server's completions need a tokeniser, even for tokens.
    size = {"max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20, "skip_tokenizer_init": False}
    arguments = engines.engine_args(folder / "old", model, max_model_len=512, **size, **changes)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *words(arguments)]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if changes.get("tensor_parallel_size", 1) > 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(changes["tensor_parallel_size"])))
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=env) as process:
        server = Server(url, folder, process)
        try:
            until(lambda: ready(server), "the server", 5 * DEADLINE)
            yield server
        finally:
            mine = [*server.children(), psutil.Process(process.pid)] if process.poll() is None else []
            process.terminate()
            for one in psutil.wait_procs(mine, timeout=20)[1]:
                one.kill()


def write(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    for seed, name in enumerate(("old", "new")):
        tiny.write("qwen3_moe", folder / name, "float32", seed)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "old")


def words(arguments: dict[str, Any]) -> Sequence[str]:
    """Arguments as the command line has them."""
    found: list[str] = []
    for name, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        found += [] if value is False else [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    return found


def ready(server: Server) -> bool:
    assert server.process.poll() is None, (server.folder / "log").read_text()[-4000:]
    try:
        urllib.request.urlopen(f"{server.url}/health", timeout=2).close()
    except OSError:
        return False
    return True
