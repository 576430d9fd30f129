"""vLLM: arguments of an engine, samples with routes and versions, and the engine's side of a weight update.

Only `worker` and `process` import vllm, and only in processes of the engine: the trainer's ranks need no vllm.
"""

from moeref.vllm.arguments import EngineError, engine_args, prepare
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
    "prepare",
    "request_id",
    "sampling",
    "serve",
]
