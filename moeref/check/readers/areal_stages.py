"""How AReaL cuts layers into pipeline stages for mbridge: so that the largest estimate of a stage is least.

The estimate is AReaL's: the output projection of attention counts hidden · hidden, and a rank has the experts that EP
leaves it. Of cuts that are as good, a stage begins as early as it can, the last stage first. Multi-token prediction
layers are with the loss, though AReaL has no place for them.
"""

from __future__ import annotations

from itertools import accumulate

from moeref.families import Model

#: Layers up to a stage's end -> (largest estimate of a stage, layers of each stage).
Cuts = dict[int, tuple[int, list[int]]]


def pattern(model: Model, stages: int, ep: int) -> str:
    """`pipeline_model_parallel_layout` of a model in so many stages, with virtual ones; "" if it cannot be cut."""
    lengths = cut(_layers(model, ep), model.vocab * model.hidden, stages)
    parts = [f"t*{length}" if length else "" for length in lengths]
    return "|".join([f"E{parts[0]}", *parts[1:-1], f"{parts[-1]}{'m' * model.mtp_layers}L"]) if parts else ""


def cut(weights: list[int], end: int, stages: int) -> list[int]:
    """Layers of each stage. The first and the last stage weigh `end` more, and only they may have no layers."""
    sums = [0, *accumulate(weights)]
    cuts: Cuts = {0: (0, [])}
    for stage in range(stages):
        cuts = _longer(cuts, sums, end if stage in (0, stages - 1) else 0)
    return cuts[len(weights)][1] if len(weights) in cuts else []


def _longer(cuts: Cuts, sums: list[int], end: int) -> Cuts:
    """The best cuts with one stage more, which weighs `end` besides its layers."""
    found: Cuts = {}
    for upto, below in enumerate(sums):
        starts = (start for start in cuts if start < upto or (end and start == upto))
        loads = [(max(cuts[start][0], end + below - sums[start]), start) for start in starts]
        if loads:
            load, start = min(loads)
            found[upto] = load, [*cuts[start][1], upto - start]
    return found


def _layers(model: Model, ep: int) -> list[int]:
    """The estimate of each layer."""
    hidden, width, kv = model.hidden, model.heads * model.head_dim, model.kv_groups * model.head_dim
    attention = hidden * width + 2 * hidden * kv + hidden * hidden + 2 * hidden
    if model.qkv_bias:
        attention += width + 2 * kv + hidden
    experts = 3 * hidden * model.moe_ffn * -(-model.experts // ep)
    router = hidden * model.experts + (model.experts if model.expert_bias else 0)
    sparse = attention + router + experts + 3 * hidden * model.shared_ffn
    return [sparse if moe else attention + 3 * hidden * model.ffn for moe in model.moe_layers]
