"""Prepares the process for vLLM before anything imports it."""

from __future__ import annotations

from importlib.util import find_spec

from moeref.vllm import prepare

if find_spec("vllm"):  # without it these tests are collected, and none runs
    prepare()
