"""What of `moeref.vllm` needs no vllm: samples from answers, arguments, the wire's bytes, commands over a pipe."""

from __future__ import annotations

import base64
import io
import json
import multiprocessing as mp
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch

from docs.examples.grpo_moe import Devices, free_port, visible
from moeref import vllm
from moeref.replay import GIVEN, MISSING
from moeref.vllm import arguments, wire

MODEL = models.model("glm4_moe")
PROMPT, IDS = [3, 5, 7], [11, 13]
#: Of an engine that ran one token more than it sent, as with asynchronous scheduling.
MADE = {
    "tokens_T": [*PROMPT, -1, -1, -1],
    "weights_T": [-1, -1, -1, 4, 5, 5],
    "kv_T": [-1, -1, -1, 4, 4, 4],
    "route_T": [4, 4, 4, 5, 5, -1],
    "logprob_T": [0, 0, 0, 1, 1, 1],
}


def sent(rows: int) -> str:
    """Routes as vLLM's server sends them: base64 of a .npy, zeros in the dense layer."""
    layers = len(MODEL.moe_layers)
    idx_TLK = np.broadcast_to(np.arange(MODEL.top_k, dtype=np.uint8), (rows, layers, MODEL.top_k)).copy()
    idx_TLK[:, [i for i, moe in enumerate(MODEL.moe_layers) if not moe]] = 0
    file = io.BytesIO()
    np.save(file, idx_TLK)
    return base64.b64encode(file.getvalue()).decode()


def choice(**changes: Any) -> dict[str, Any]:
    found = {"token_ids": IDS, "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
    return {**found, "routed_experts": sent(len(PROMPT) + len(IDS) - 1), **changes}


def test_a_response_becomes_a_sample() -> None:
    sample = vllm.from_response(PROMPT, choice(), MODEL, MADE)
    assert sample.tokens_T.tolist() == [*PROMPT, *IDS]
    assert sample.mask_T.tolist() == [False] * 3 + [True] * 2
    assert sample.logprobs_G.tolist() == [-1.0, -2.0]
    assert sample.versions_G.tolist() == [4, 5]
    assert sample.made.kv_T.tolist() == [-1, -1, -1, 4, 4]
    assert sample.made.route_T.tolist() == [4, 4, 4, 5, -1]
    assert sample.routes is not None
    assert sample.routes.kind_T.tolist() == [GIVEN] * 4 + [MISSING]
    assert sample.routes.versions_T.tolist() == [4, 4, 4, 5, -1]
    assert vllm.from_response(PROMPT, choice(routed_experts=None), MODEL, MADE, routes=False).routes is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routed_experts": None}, "the engine sent none"),
        ({"token_ids": None}, "return_token_ids"),
        ({"logprobs": None}, "2 sampled tokens came with no logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "came with 1 logprobs"),
    ],
)
def test_an_answer_that_lacks_what_was_asked_for_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(vllm.EngineError, match=said):
        vllm.from_response(PROMPT, choice(**changes), MODEL, MADE)


@pytest.mark.parametrize("column", [[3, 5, 8, -1, -1], [*PROMPT, -1]])
def test_labels_of_another_request_are_refused(column: list[int]) -> None:
    with pytest.raises(vllm.EngineError, match="labels of another request"):
        vllm.from_response(PROMPT, choice(), MODEL, {**MADE, "tokens_T": column})


def test_routes_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of routes"):
        vllm.from_response(PROMPT, choice(routed_experts=sent(3)), MODEL, MADE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe"}))
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, version: str, *, on_cpu: bool = False) -> None:
    monkeypatch.setattr(arguments, "installed", lambda: (version, on_cpu))


def test_arguments_ask_for_routes_and_for_updates(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    use(monkeypatch, "0.30.0")
    found = vllm.engine_args(folder, MODEL, max_model_len=64, max_num_seqs=3)
    assert found["enable_return_routed_experts"] is True
    assert found["weight_transfer_config"] == {"backend": "moeref"}
    assert found["max_num_seqs"] == 3
    assert "enforce_eager" not in found
    use(monkeypatch, "0.30.0", on_cpu=True)
    on_cpu = vllm.engine_args(folder, MODEL, max_model_len=64)
    assert on_cpu["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert "attention_backend" not in on_cpu
    latent = vllm.engine_args(folder, models.model("glm4_moe_lite"), max_model_len=64)
    assert latent["attention_backend"] == "CPU_MLA"


@pytest.mark.parametrize(
    ("version", "on_cpu", "changes", "said"),
    [
        ("0.21.0", False, {}, "0.21.0 is too old for routes in one array"),
        ("0.25.1", False, {}, "engines that own their weight updates: known from 0.26 on"),
        ("0.31.0", True, {}, "its workarounds are known for 0.30.0"),
        ("0.30.0", False, {"pipeline_parallel_size": 2}, "vLLM returns no routes then"),
        ("0.30.0", False, {"speculative_config": {"method": "mtp"}}, "leave drafts behind"),
        ("0.30.0", False, {"enable_eplb": True}, "writes experts to their first places"),
        ("0.30.0", False, {"kv_transfer_config": {"kv_connector": "x"}}, "no routes with a KV connector"),
        ("0.30.0", False, {"kv_offloading_size": 4.0}, "no routes with a KV connector"),
        ("0.30.0", False, {"data_parallel_size": 2}, "start an engine for each"),
    ],
)
def test_engines_that_cannot_do_it_are_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, on_cpu: bool, changes: dict[str, Any], said: str
) -> None:
    use(monkeypatch, version, on_cpu=on_cpu)
    with pytest.raises(vllm.EngineError, match=said):
        vllm.engine_args(folder, MODEL, max_model_len=64, **changes)


def test_latent_attention_in_fp32_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    use(monkeypatch, "0.30.0")
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    latent = models.model("glm4_moe_lite")
    assert (latent.param_dtype, latent.mla is not None) == ("float32", True)
    with pytest.raises(vllm.EngineError, match=r"float32: .*VLLM_MLA_DISABLE=1"):
        vllm.engine_args(folder, latent, max_model_len=64)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert vllm.engine_args(folder, latent, max_model_len=64)["dtype"] == "float32"


class OldLLM:
    """An `LLM` of vLLM before 0.30."""

    def __init__(self) -> None:
        self.llm_engine, self.done = self, 0

    def __getattr__(self, name: str) -> Any:
        if "version" in name:
            raise AttributeError(name)
        return lambda *_, **__: None

    def finish_weight_update(self) -> None:
        self.done += 1


def test_an_llm_that_keeps_no_version_gets_one() -> None:
    llm = OldLLM()
    control = vllm.InProcess(llm)
    control.call("update_weight_version", new_version="3")
    control.call("finish_weight_update")
    assert (control.call("weight_info"), llm.done) == ("3", 1)
    control.call("finish_weight_update", weight_version="4")
    assert (control.call("weight_info"), llm.done) == ("4", 2)


def test_two_processes_on_one_gpu_are_two_machines_to_nccl() -> None:
    shared, apart = Devices.of(1, 1, 1, nccl=True), Devices.of(1, 1, 2, nccl=True)
    assert (shared.backend, shared.host) == ("nccl", "trainer")
    assert (apart.backend, apart.host) == ("nccl", None)
    assert Devices.of(2, 1, 1, nccl=True).backend == "gloo"


@pytest.mark.parametrize(
    ("world", "workers", "gpus", "expected"),
    [
        (2, 1, 0, ([], [], "gloo")),
        (1, 1, 1, ([0], [0], "gloo")),
        (2, 1, 1, ([], [0], "gloo")),
        (2, 2, 1, ([], [], "gloo")),
        (2, 1, 3, ([0, 1], [2], "nccl")),
        (4, 2, 8, ([0, 1, 2, 3], [4, 5], "nccl")),
    ],
)
def test_every_process_has_a_gpu_or_the_engine_has_them(
    world: int, workers: int, gpus: int, expected: tuple[list[int], list[int], str]
) -> None:
    ranks, engine, backend = Devices.of(world, workers, gpus)
    assert (list(ranks), list(engine), backend) == expected


@pytest.mark.parametrize(("before", "inside"), [(None, "1,2"), ("5,6,7", "6,7")])
def test_processes_see_their_gpus_only(monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with visible([1, 2]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == inside
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_a_config_that_vllm_takes_for_softmax_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "0.30.0")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    model, config = models.model("deepseek_v3"), {"model_type": "deepseek_v3", "topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(vllm.EngineError, match="serves another router"):
        vllm.engine_args(tmp_path, model, max_model_len=64)
    (tmp_path / "config.json").write_text(json.dumps({**config, "scoring_func": "sigmoid"}))
    assert vllm.engine_args(tmp_path, model, max_model_len=64)["model"] == str(tmp_path)


def test_a_seed_of_a_request_is_refused() -> None:
    with pytest.raises(vllm.EngineError, match="engine's seed"):
        vllm.sampling(4, seed=1)


def test_tensors_come_out_of_the_wire_as_they_went_in() -> None:
    tensors = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.tensor([1, 2], dtype=torch.uint8)),
    ]
    described = json.loads(json.dumps(wire.describe(tensors)))
    place = vllm.Place("127.0.0.1", free_port(), 3, seconds=20)
    with ThreadPoolExecutor(3) as pool:
        joined = [pool.submit(wire.Wire, place, rank) for rank in range(3)]
        first, *others = [one.result() for one in joined]
        received = [pool.submit(other.receive, described) for other in others]
        first.send(tensors)
        for one in received:
            for (name, tensor), (found, got) in zip(tensors, one.result(), strict=True):
                assert (found, got.dtype) == (name, tensor.dtype)
                assert torch.equal(got, tensor)


class Silent:
    """A control that must not be called."""

    def call(self, name: str, **_: Any) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (vllm.Place("127.0.0.1", 1, 2, "nccl"), "NCCL needs a GPU"),
        (vllm.Place("127.0.0.1", 1, 2, "mpi"), "backend gloo or nccl"),
        (vllm.Place("127.0.0.1", 1, 1), r"a size of 1 \+ workers"),
    ],
)
def test_a_place_without_the_means_is_refused_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch, place: vllm.Place, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        vllm.Engine(Silent(), place)
    sent = json.loads(json.dumps(list(place)))  # as the workers get it
    with pytest.raises(ValueError, match=said):
        wire.Wire(vllm.Place(*sent), 1)


@pytest.mark.gpu
def test_tensors_cross_nccl() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    place = vllm.Place("127.0.0.1", free_port(), 2, "nccl")
    context = mp.get_context("spawn")
    tensors = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(5, dtype=torch.bfloat16))]
    mine, theirs = context.Pipe()
    process = context.Process(target=receive, args=(place, wire.describe(tensors), theirs))
    process.start()
    torch.cuda.set_device(0)
    wire.Wire(place, 0).send([(name, tensor.cuda()) for name, tensor in tensors])
    for (name, tensor), (found, got) in zip(tensors, mine.recv(), strict=True):
        assert found == name
        assert torch.equal(got, tensor)
    process.join(60)


def receive(place: vllm.Place, described: Any, connection: Any) -> None:
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    if last == 0:
        os.environ["NCCL_HOSTID"] = "another"  # NCCL takes one member a GPU of a machine
    connection.send([(name, tensor.cpu()) for name, tensor in wire.Wire(place, 1).receive(described)])


def test_commands_cross_a_pipe_with_their_errors() -> None:
    class Toy:
        def call(self, name: str, **arguments: Any) -> Any:
            if name == "pause":
                raise ValueError("no")
            return name, arguments

    near, far = mp.Pipe()
    thread = threading.Thread(target=vllm.serve, args=(Toy(), far))
    thread.start()
    piped = vllm.Piped(near)
    assert piped.call("resume", mode="keep") == ("resume", {"mode": "keep"})
    with pytest.raises(ValueError, match="no"):
        piped.call("pause")
    near.send((None, None))
    thread.join(10)
    assert not thread.is_alive()


class _Dev(BaseHTTPRequestHandler):
    """A server with two commands: one has no value, the other fails."""

    def do_POST(self) -> None:
        status, text = (200, b"{}") if self.path == "/collective_rpc" else (500, b"torn")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_what_a_server_says_of_a_failure_is_in_the_error() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dev) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served = vllm.Served(f"http://127.0.0.1:{server.server_port}", 10)
        with pytest.raises(RuntimeError, match=r"/resume: 500 .*: torn$"):
            served.call("resume")
        with pytest.raises(RuntimeError, match="/collective_rpc: the answer has no results"):
            served.call("collective_rpc", method="moeref_state", args=[])
        server.shutdown()
