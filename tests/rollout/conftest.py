"""Prepares the process for vLLM before anything imports it."""

from __future__ import annotations

from moeref.vllm import cpu, gpu, installed

(cpu if installed()[1] else gpu).prepare()
