"""vLLM's own HTTP server: samples with routes, and an update whose commands go over HTTP and whose bytes do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from docs.examples import tiny
from docs.examples.grpo_moe import free_port
from moeref import families, sync
from moeref import vllm as engines
from moeref.families import Model

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8]


@contextmanager
def served(arguments: dict[str, Any], log: Path) -> Iterator[str]:
    """The URL of a server that is ready. It is ended on exit."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    for name, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        command += [] if value is False else [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env) as process:
        try:
            wait(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait(url: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer after {seconds} s")


def sample(url: str, folder: Path, model: Model) -> engines.Sample:
    body = {"model": str(folder), "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found = json.load(answer)
    made = engines.labels(engines.Served(url), engines.request_id(found))
    return engines.from_response(PROMPT, found["choices"][0], model, made)


def far(found: engines.Sample, folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    tokens_S = torch.from_numpy(found.tokens_T)
    with torch.no_grad():
        logprobs_SV = AutoModelForCausalLM.from_pretrained(folder)(tokens_S[None]).logits[0].log_softmax(-1)
    expected = logprobs_SV[found.prompt - 1 : -1].gather(1, tokens_S[found.prompt :, None])[:, 0].numpy()
    return float(np.abs(expected - found.logprobs_G).max())


def test_a_server_is_sampled_and_updated(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        tiny.write("qwen3_moe", folder, "float32", seed)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(old)
    model = families.read(old, "float32")
    # The server's completions need a tokeniser, even for tokens.
    size = {"max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20, "skip_tokenizer_init": False}
    arguments = engines.engine_args(old, model, max_model_len=128, **size)
    with served(arguments, tmp_path / "server.log") as url:
        engine = engines.Engine(engines.Served(url), engines.Place("127.0.0.1", free_port(), 2))
        before = sample(url, old, model)
        done = sync.WeightSync(engine, bucket_bytes=1 << 19).update(load_file(new / "model.safetensors").items(), 1)
        after = sample(url, old, model)
    assert done.receipt.buckets > 2
    assert far(before, old) <= 5e-6 < 0.1 < far(after, old)
    assert far(after, new) <= 5e-6
    assert [int(one.versions_G[0]) for one in (before, after)] == [0, 1]
    assert after.routes is not None
    assert after.routes.tokens == len(PROMPT) + 8
