"""vLLM: arguments of an engine, samples with routes and versions, and its side of a weight update.

Only `worker`, which runs in vLLM's own processes, imports vllm: the trainer's ranks use the rest without it.
"""

from moeref.vllm.arguments import EngineError, engine_args
from moeref.vllm.control import InProcess, Piped, Served, serve
from moeref.vllm.engine import Engine
from moeref.vllm.ledger import Labels
from moeref.vllm.process import Process
from moeref.vllm.rollout import Sample, from_output, from_outputs, from_response, generate, labels, request_id, sampling
from moeref.vllm.wire import Place

__all__ = [
    "Engine",
    "EngineError",
    "InProcess",
    "Labels",
    "Piped",
    "Place",
    "Process",
    "Sample",
    "Served",
    "engine_args",
    "from_output",
    "from_outputs",
    "from_response",
    "generate",
    "labels",
    "request_id",
    "sampling",
    "serve",
]
