"""Token dispatchers as megatron-core runs them: the flex kernels are asked for before a model is built.

megatron-core finds out in the constructor of a layer, or in its first step, that kernels or a GPU are missing.
"""

from __future__ import annotations

import megatron.core.transformer.moe.moe_utils as moe_utils

from moeref import dispatcher
from moeref.config import EffectiveSettings
from moeref.families import Model
from moeref.layout import Layout

_PRECISION = {"bfloat16": "bf16", "float32": "fp32"}


def check(model: Model, layout: Layout, record: EffectiveSettings, *, gpu: bool) -> None:
    """Raise DispatcherError, with every reason, for a flex dispatcher that cannot run in this process."""
    if record["moe_token_dispatcher_type"] != "flex":
        return
    values = {name: setting.value for name, setting in record.by_name.items()}
    setup = dispatcher.setup_of(values, layout, precision=_PRECISION[model.param_dtype])
    dispatcher.select(dispatcher.read(values), setup, dispatcher.installed(gpu=gpu))


def let_router_run() -> None:
    """Say that there is no Transformer Engine where 0.16 leaves that open: its router asks for `te_general_gemm`."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
