"""A real vLLM engine in this process takes updates over the wire; transformers says what its logprobs must be."""

from __future__ import annotations

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
from moeref.provenance import ProvenanceError
from moeref.vllm.arguments import installed
from moeref.vllm.process import Stepped

pytestmark = pytest.mark.engine
CLOSE, TOKENS = 1e-5, 8  # see test_loop
#: Two of them share more than a block of the KV cache (128 tokens on a CPU), so that the prefix cache is used.
PROMPTS = [[5, *range(40, 200)], [5, *range(40, 200)], [9, 8, 7]]


class Bench:
    """An engine, two sets of weights that it may have, and transformers' model to compare with."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from vllm import LLM, SamplingParams

        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        for seed, name in enumerate(("old", "new")):
            tiny.write("qwen3_moe", folder / name, "float32", seed)
            self.weights[name] = load_file(folder / name / "model.safetensors")
        self.hf = {name: AutoModelForCausalLM.from_pretrained(folder / name) for name in self.weights}
        self.model: Model = families.read(folder / "old", "float32")
        size = {
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 32 << 20,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.2,
        }
        self.llm = LLM(**engines.engine_args(folder / "old", self.model, max_model_len=256, **size))
        self.engine = engines.Engine(
            engines.InProcess(self.llm), engines.Place("127.0.0.1", free_port(), 2, seconds=20)
        )
        self.params = SamplingParams(**engines.sampling(TOKENS, ignore_eos=True))

    def sample(self) -> list[engines.Sample]:
        return engines.generate(self.llm, self.model, PROMPTS, self.params)

    def far(self, name: str) -> float:
        """The greatest difference to transformers with these weights."""
        return max(float(np.abs(self.expected(name, s) - s.logprobs_G).max()) for s in self.sample())

    def expected(self, name: str, sample: engines.Sample) -> Any:
        tokens_S = torch.from_numpy(sample.tokens_T)
        with torch.no_grad():
            logprobs_SV = self.hf[name](tokens_S[None]).logits[0].log_softmax(-1)
        return logprobs_SV[sample.prompt - 1 : -1].gather(1, tokens_S[sample.prompt :, None])[:, 0].numpy()

    def update(self, name: str) -> sync.Synced:
        return sync.WeightSync(self.engine, bucket_bytes=1 << 18).update(
            self.weights[name].items(), self.engine.version() + 1
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("engine"))


def test_new_weights_are_used_and_old_ones_come_back(bench: Bench) -> None:
    assert bench.far("old") <= CLOSE < 0.1 < bench.far("new")
    done = bench.update("new")
    assert done.receipt.buckets > 2
    assert bench.far("new") <= CLOSE < 0.1 < bench.far("old")
    assert {int(v) for s in bench.sample() for v in s.versions_G} == {done.receipt.version}
    bench.update("old")
    assert bench.far("old") <= CLOSE


def test_a_cache_that_is_not_reset_is_stale(bench: Bench) -> None:
    """Why the reset is part of the update: without it, prompts that are cached keep keys, values and routes."""

    class Forgetful(engines.Engine):
        def reset_caches(self) -> frozenset[str]:
            return self.caches

    bench.sample()
    bench.engine.__class__ = Forgetful
    try:
        bench.update("new")
        samples = bench.sample()
        assert max(float(np.abs(bench.expected("new", s) - s.logprobs_G).max()) for s in samples) > 0.01
        cached, _, fresh = (s.made for s in samples)
        assert (cached.counts().stale_kv, fresh.counts().stale_kv) == (TOKENS, 0)
        assert set(cached.kv_T[cached.sampled_T]) == {bench.engine.version() - 1}
    finally:
        bench.engine.__class__ = engines.Engine
    bench.update("old")
    assert bench.far("old") <= CLOSE


def test_weights_that_sleep_has_dropped_are_sent_again(bench: Bench) -> None:
    """A CPU's worker drops none, so that only the version tells."""
    bench.update("old")
    version, sent = bench.engine.version(), bench.weights["old"].items()
    again = sync.WeightSync(bench.engine, bucket_bytes=1 << 18)
    assert not again.update(sent, version).sent
    bench.llm.collective_rpc("sleep", args=(2,))
    assert bench.engine.version() == -1
    assert again.update(sent, version).sent
    assert bench.far("old") <= CLOSE


def test_a_partial_update_is_refused_before_anything_changed(bench: Bench) -> None:
    version = bench.engine.version()
    with pytest.raises(sync.SyncError, match="vLLM takes full updates only"):
        sync.WeightSync(bench.engine).update(bench.weights["new"].items(), version + 1, kind="delta", base=version)
    assert bench.engine.version() == version
    assert bench.far("old") <= CLOSE


@pytest.mark.parametrize("fault", ["lost", "repeated", "torn"])
def test_a_broken_update_does_not_end_until_a_whole_one_came(bench: Bench, fault: str) -> None:
    engine, version = bench.engine, bench.engine.version() + 1
    update = sync.Update(version)
    items = list(bench.weights["new"].items())
    parts = [items[:40], items[40:90], items[90:]]
    buckets = [sync.Bucket.of(i, part, i == 2) for i, part in enumerate(parts)]
    wrong = {
        "lost": buckets[2],
        "repeated": buckets[0],
        "torn": sync.Bucket(1, tuple((n, t + 1) for n, t in parts[1]), False, buckets[1].checksum),
    }
    engine.pause()
    engine.begin(update)
    engine.send(buckets[0])
    with pytest.raises(sync.SyncError, match=r"expected|checksum"):
        engine.send(wrong[fault])
    with pytest.raises(Exception, match=r"did not come|without a matching|no update"):
        engine.commit(version)
    with pytest.raises(sync.SyncError, match="begun and not committed"):
        engine.resume()
    assert engine.version() == version - 1
    engine.begin(update)  # the retry
    for bucket in buckets:
        engine.send(bucket)
    engine.commit(version)
    assert engine.reset_caches() == engine.caches
    engine.resume()
    assert bench.far("new") <= CLOSE
    bench.update("old")


@pytest.mark.parametrize(
    "left_out", ["model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"]
)
def test_an_update_without_a_tensor_is_not_committed(bench: Bench, left_out: str) -> None:
    weights = {name: tensor for name, tensor in bench.weights["new"].items() if name != left_out}
    assert len(weights) == len(bench.weights["new"]) - 1
    layer = ".".join(left_out.split(".")[:4])
    update, engine = sync.Update(bench.engine.version() + 1), bench.engine
    engine.pause()
    engine.begin(update)
    engine.send(sync.Bucket.of(0, weights.items(), True))
    with pytest.raises(sync.SyncError, match=rf"1 layers did not get all of their weights: {layer}"):
        engine.commit(update.version)
    engine.begin(update)
    engine.send(sync.Bucket.of(0, bench.weights["old"].items(), True))
    engine.commit(update.version)
    engine.reset_caches()
    engine.resume()
    assert bench.far("old") <= CLOSE


def test_two_updates_at_once_are_refused(bench: Bench) -> None:
    bench.engine.pause()
    with pytest.raises(sync.Refused, match="paused already"):
        bench.engine.pause()
    bench.engine.resume()


def under_way(bench: Bench, tokens: int) -> Stepped:
    """Requests that have so many tokens each, so that an update comes between their tokens."""
    requests = Stepped(bench.llm)
    requests.submit(PROMPTS, engines.sampling(TOKENS, ignore_eos=True))
    requests.advance(tokens)
    return requests


def agrees(bench: Bench, sample: engines.Sample, weights: dict[int, str]) -> None:
    """Logprobs and routes are transformers' with the weights of their labels."""
    tokens_S = torch.from_numpy(sample.tokens_T)
    assert sample.routes is not None
    for version, name in weights.items():
        mine_G = sample.versions_G == version
        assert np.abs(bench.expected(name, sample) - sample.logprobs_G)[mine_G].max() <= CLOSE
        with torch.no_grad():
            logits = bench.hf[name](tokens_S[None], output_router_logits=True).router_logits
        routed_TLK = torch.stack([one.topk(bench.model.top_k).indices for one in logits], 1).sort(-1).values.numpy()
        mine_T = sample.made.route_T == version
        assert (np.sort(sample.routes.idx_TLK[mine_T]) == routed_TLK[mine_T]).all()


@pytest.mark.parametrize("before", [1, 4])
def test_kept_requests_go_on_with_new_weights_and_say_so(bench: Bench, before: int) -> None:
    """Each logprob is transformers' with the weights and the cache that the labels name."""
    bench.engine._mode, old = "keep", bench.engine.version()
    try:
        requests = under_way(bench, before)
        bench.update("new")
        requests.advance()
        samples = requests.collect(bench.model)
    finally:
        bench.engine._mode = "abort"
    for sample in samples:
        assert sample.versions_G.tolist() == [old] * before + [old + 1] * (TOKENS - before)
        assert sample.made.counts().stale_kv == 0
        # Rows that came out with a token stay, though the token was run again.
        first = sample.prompt + before - 1
        assert sample.made.route_T.tolist() == [old] * first + [old + 1] * (TOKENS - before) + [-1]
        agrees(bench, sample, {old: "old", old + 1: "new"})
        with pytest.raises(ProvenanceError, match="mixed versions"):
            sample.made.trainable()
    bench.update("old")


def test_aborted_requests_keep_the_tokens_and_labels_that_they_had(bench: Bench) -> None:
    old = bench.engine.version()
    requests = under_way(bench, 3)
    bench.update("new")
    samples = requests.collect(bench.model, routes=False)
    assert [(one.reason, one.versions_G.tolist()) for one in samples] == [("abort", [old] * 3)] * len(PROMPTS)
    for sample in samples:
        assert sample.made.counts().stale_kv == 0
        assert np.abs(bench.expected("old", sample) - sample.logprobs_G).max() <= CLOSE
    bench.update("old")


def test_requests_without_a_token_are_not_collected(bench: Bench) -> None:
    requests = under_way(bench, 0)
    with pytest.raises(engines.EngineError, match="3 requests have no token yet: advance first"):
        requests.collect(bench.model)
    requests.submit(PROMPTS[2:], engines.sampling(TOKENS, ignore_eos=True))
    requests.advance()
    (sample,) = requests.collect(bench.model)
    assert sample.reason == "length"
    agrees(bench, sample, {bench.engine.version(): "old"})


def test_an_engine_of_this_process_does_not_wait(bench: Bench) -> None:
    bench.engine._mode = "wait"
    try:
        with pytest.raises(sync.UpdateFailed, match="'wait' pause mode is not supported in inproc"):
            bench.update("new")
    finally:
        bench.engine._mode = "abort"
    assert bench.far("old") <= CLOSE


def test_receipt_and_version_are_the_engines_own(bench: Bench) -> None:
    """A second trainer's engine knows what the workers loaded, and cannot resume what the first one left torn."""
    done = bench.update("old")
    again = engines.Engine(engines.InProcess(bench.llm), engines.Place("127.0.0.1", free_port(), 2, seconds=20))
    assert (again.version(), again.receipt()) == (done.receipt.version, done.receipt)
    again.pause()
    again.begin(sync.Update(done.receipt.version + 1))
    third = engines.Engine(engines.InProcess(bench.llm), engines.Place("127.0.0.1", free_port(), 2, seconds=20))
    with pytest.raises(sync.SyncError, match="begun and not committed"):
        third.resume()
    bench.engine = third
    bench.update("new")
    assert bench.far("new") <= CLOSE
    bench.update("old")


def test_vllm_loads_experts_to_their_first_places() -> None:
    """Why `engine_args` refuses EPLB: the loader is not told where experts are. CPU engines move none."""
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    rows = RoutedExperts.build_expert_params_mapping("gate_proj", "down_proj", "up_proj", 4, num_redundant_experts=2)
    assert {slot: name.split(".")[1] for _, name, slot, _ in rows} == dict(enumerate("012301"))
    if installed()[1]:
        with pytest.raises(ValueError, match="only supported on CUDA devices or ROCm"):
            ParallelConfig(enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2)
