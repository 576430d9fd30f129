"""PLN: the export plan, made without a module, against the checkpoint."""

from __future__ import annotations

from collections import Counter

from moeref_conformance.contract.api import TensorMeta
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.diagnosis.compare import dtype_name
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import expected, finding, observed, outcome


@judges("PLN-001")
def the_plan_is_the_checkpoint(case: Case) -> Outcome:
    """Names once each, shapes, dtypes. The order is the target's, as it is in an export."""
    record = next((r for r in observed(case).ranks if r.has("plan")), None)
    if record is None:
        return outcome([finding(case, 0, "plan", "no record of step plan")])
    rows: tuple[TensorMeta, ...] = record.value("plan")
    want, times = expected(case).tensors, Counter(row.name for row in rows)
    findings = []
    for name in want:
        if not times[name]:
            findings.append(finding(case, 0, "plan", f"{name} is not planned", hf_name=name))
    for name, number in times.items():
        if number > 1:
            findings.append(finding(case, 0, "plan", f"{name} is planned {number} times", hf_name=name))
    for row in rows:
        name = row.name
        if name not in want:
            findings.append(finding(case, 0, "plan", f"{name} is not in the checkpoint", hf_name=name))
            continue
        for what, right, got in (
            ("shape", list(want[name].shape), list(row.shape)),
            ("dtype", dtype_name(want[name].dtype), row.dtype),
        ):
            if right != got:
                message = f"{what} of {name} is {right}, the plan says {got}"
                more = {"hf_name": name, "expected": str(right), "got": str(got)}
                findings.append(finding(case, 0, "plan", message, **more))
    return outcome(findings)
