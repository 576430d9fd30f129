"""PLN: the export plan, made without a module, against the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from moeref_conformance.contract.api import TensorMeta
from moeref_conformance.contract.findings import Finding
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import expected, finding, once_each, records, shape_and_dtype


@judges("PLN-001")
def the_plan_is_the_checkpoint(case: Case) -> Iterator[Finding]:
    """Names once each, shapes, dtypes. The order is the target's, as it is in an export."""
    ranks, want = records(case, "plan"), expected(case).tensors
    if not ranks:
        yield finding(case, 0, "plan", "no record of step plan")
        return
    metas: tuple[TensorMeta, ...] = ranks[0].value("plan")
    yield from once_each(case, 0, "plan", (meta.name for meta in metas), "is not planned", "is planned")
    for meta in metas:
        given = {"shape": list(meta.shape), "dtype": meta.dtype}
        for what, right in shape_and_dtype(want[meta.name]) if meta.name in want else ():
            if right != given[what]:
                message = f"{what} of {meta.name} is {right}, the plan says {given[what]}"
                yield finding(case, 0, "plan", message, hf_name=meta.name, expected=right, got=given[what])
