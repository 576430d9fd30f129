"""Checks, before a model is built, that a flex dispatcher can run in this process.

megatron-core itself fails in the constructor of a layer, or in its first step, if kernels or a GPU are missing.
"""

from __future__ import annotations

import megatron.core.transformer.moe.moe_utils as moe_utils

from moeref import dispatcher
from moeref.dtypes import DTYPES
from moeref.record import Record


def check(record: Record, *, gpu: bool) -> None:
    """Raise DispatcherError, with every reason, for a flex dispatcher that cannot run in this process."""
    values = record.settings.values
    if values["moe_token_dispatcher_type"] != "flex":
        return
    setup = dispatcher.setup_of(values, record.layout, precision=DTYPES[record.model.param_dtype].precision)
    dispatcher.select(record.dispatcher, setup, dispatcher.installed(gpu=gpu))


def let_router_run() -> None:
    """Set `te_general_gemm` to None if undefined: 0.16's router reads it also without Transformer Engine."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
