"""Token dispatchers as megatron-core runs them: what a flex dispatcher needs is looked for before a model is built.

megatron-core finds out in the constructor of a layer, or in its first step, that kernels or a GPU are missing.
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
    """Say that there is no Transformer Engine where 0.16 leaves that open: its router reads `te_general_gemm`."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
