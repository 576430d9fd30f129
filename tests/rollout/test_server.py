"""vLLM's HTTP server: updates under each pause mode, killed senders, and two workers of which one is killed.

Commands go over HTTP and weights do not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import pytest
import torch

pytest.importorskip("psutil", reason="the environment of `nox -s rollout-slow` has psutil, which vLLM needs")
import psutil
from server import DEADLINE, PROMPT, Server, served, until

from docs.examples.grpo_moe import free_port
from moeref import sync
from moeref.provenance import ProvenanceError
from moeref.vllm.control import PauseMode

pytestmark = pytest.mark.slow
CLOSE = 1e-5  # see test_loop
LONG = 450


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("server")) as found:
        yield found


def update(engine: Any, server: Server, name: str) -> sync.Synced:
    return sync.WeightSync(engine, bucket_bytes=1 << 19).update(server.weights(name).items(), engine.version() + 1)


@pytest.mark.parametrize("mode", get_args(PauseMode))
def test_an_update_in_mid_generation(server: Server, mode: PauseMode) -> None:
    engine = server.engine(mode=mode)
    update(engine, server, "old")
    old = engine.version()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(server.sample, LONG)
        until(server.running, "the request")
        done = update(engine, server, "new")
        sample, after = asked.result(), server.sample()
    assert done.receipt.buckets > 2
    assert done.receipt == engine.receipt()
    assert set(after.versions_G) == {old + 1} == {engine.version()}
    assert server.far("new", after, old + 1) <= CLOSE < 0.1 < server.far("old", after)
    assert after.routes is not None
    assert after.routes.tokens == len(after.tokens_T) == len(PROMPT) + 8
    new_G = sample.versions_G == old + 1
    weights = (("old", old), ("new", old + 1))
    by_old, by_new = (np.abs(server.expected(name, sample, v) - sample.logprobs_G) for name, v in weights)
    assert by_old[~new_G].max() <= CLOSE
    assert sample.made.counts().stale_kv == 0
    if mode == "keep":
        assert 0 < new_G.sum() < LONG == len(new_G)
        assert by_new[new_G].max() <= CLOSE < 0.1 < by_old[new_G].max()
        with pytest.raises(ProvenanceError, match="mixed versions"):
            sample.made.trainable()
    else:
        assert not new_G.any()
        assert (sample.reason, len(new_G) < LONG) == (("abort", True) if mode == "abort" else ("length", False))
        assert sample.made.trainable().sum() == len(new_G)


SENDER = """
import os, sys, time
import torch
from moeref import sync, vllm
url, port, when = sys.argv[1:]
engine = vllm.Engine(vllm.Served(url), vllm.Place("127.0.0.1", int(port), 2, seconds=30))
update = sync.Update(engine.version() + 1)
tensors = [("model.norm.weight", torch.full((64,), 7.0))]
engine.pause()
engine.begin(update)
if when == "between buckets":
    engine.send(sync.Bucket.of(0, tensors, False))
else:
    engine._wire.send = lambda tensors: (time.sleep(1), os.kill(os.getpid(), 9))
    engine.send(sync.Bucket.of(0, tensors, False))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("when", ["between buckets", "in a bucket"])
def test_a_killed_sender_leaves_an_engine_that_the_next_one_updates(server: Server, when: str) -> None:
    version = server.engine().version()
    command = [sys.executable, "-c", SENDER, server.url, str(free_port()), when]
    assert subprocess.run(command, timeout=DEADLINE, check=False).returncode == -9
    begun = time.monotonic()
    engine = server.engine()
    assert engine.version() == version
    with pytest.raises(sync.SyncError, match="begun and not committed"):
        engine.resume()
    update(engine, server, "new")
    sample = server.sample()
    assert set(sample.versions_G) == {version + 1}
    assert server.far("new", sample, version + 1) <= CLOSE
    assert time.monotonic() - begun < DEADLINE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("pair"), tensor_parallel_size=2) as found:
        yield found


def test_two_workers_are_updated(pair: Server) -> None:
    """TP2 over gloo: each worker takes every bucket and loads its part."""
    engine = pair.engine(workers=2)
    first = pair.sample()
    assert pair.far("old", first, 0) <= CLOSE < 0.1 < pair.far("new", first)
    done = update(engine, pair, "new")
    states = pair.control.call("collective_rpc", method="moeref_state")
    assert [state["receipt"] for state in states] == [asdict(done.receipt)] * 2
    assert done.receipt.tensors == len(pair.weights("new"))
    sample = pair.sample()
    assert set(sample.versions_G) == {1} == {engine.version()}
    assert sample.routes is not None
    assert sample.routes.tokens == len(sample.tokens_T)
    assert pair.far("new", sample, 1) <= CLOSE < 0.1 < pair.far("old", sample)


def test_a_worker_killed_in_an_update_ends_its_engine(pair: Server) -> None:
    """Dead with the reason in time, nothing of either version is served, and no process is left."""
    engine, processes = pair.engine(workers=2), pair.children()
    weights = sync.WeightSync(engine, bucket_bytes=1 << 18, timeouts=sync.Timeouts(query=20, send=40, commit=20))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(pair.weights("old").items()):
            if number == len(pair.weights("old")) // 2:
                pair.worker().kill()
            yield item

    begun = time.monotonic()
    with pytest.raises(sync.EngineDead, match="send failed"):
        weights.update(tensors(), engine.version() + 1)
    assert time.monotonic() - begun < DEADLINE
    assert weights.state is sync.State.DEAD
    assert weights.reason
    for asked in (engine.version, pair.sample):
        with pytest.raises((OSError, RuntimeError), match=r"."):  # gone, or about to go and saying so
            asked()
    pair.process.terminate()
    assert not psutil.wait_procs([*processes, psutil.Process(pair.process.pid)], timeout=DEADLINE)[1]
