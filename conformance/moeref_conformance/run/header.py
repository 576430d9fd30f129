"""The first line of `results.jsonl`: who is judged, by which kit, rules and matrix, and under which settings."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import to_plain
from moeref_conformance.contract.published_models import TINY_SEED
from moeref_conformance.contract.results import version_of, versions
from moeref_conformance.contract.rules import GROUPS, PROFILES, revision
from moeref_conformance.contract.texts import fit
from moeref_conformance.plan.plan import RunPlan


def header(plan: RunPlan) -> dict[str, Any]:
    """Every setting that decides a verdict, as plain values."""
    settings, claims = plan.settings, plan.claims
    info = {key: fit(value) if isinstance(value, str) else value for key, value in to_plain(plan.info).items()}
    rules = sorted(plan.rules.values(), key=lambda rule: (list(GROUPS).index(rule.group), rule.id))
    return {
        "kit": version_of("moeref") or "from source",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": f"{platform.platform()}, {_processor()}",
        "versions": versions() | dict(plan.machine.versions if plan.machine else {}),
        "target": {"spec": settings.target, **info, "claims": to_plain(claims)},
        "matrix": {"name": plan.matrix.name, "hash": plan.matrix.hash, "cells": len(plan.matrix.cells)},
        "seed": TINY_SEED,
        "settings": {
            "cells": list(settings.cells),
            "rules": list(settings.rules),
            "profiles": list(settings.profiles),
            "backend": settings.backend,
            "known": plan.known_failures_file.name if plan.known_failures_file else "",
            "known entries": len(plan.known_failures),
            "deadline": settings.deadline,
            "jobs": plan.workers,
            "strict": settings.strict,
        },
        "profiles": [asdict(profile) for profile in PROFILES.values()],
        "rules": {"hash": revision(plan.rules), "list": [asdict(rule) for rule in rules]},
        "cells": [
            {
                "id": cell.id,
                "variant": cell.variant,
                "text": cell.layout.text,
                **to_plain(cell),
                "claimed": claims.why_not(cell) is None,
            }
            for cell in plan.cells
        ],
        "excluded": [{"cell": cell_id, "reason": reason} for cell_id, reason in plan.matrix.excluded],
    }


def _processor() -> str:
    """The kind of CPU, on which rounding depends, as in `AMD EPYC, family 26, model 2`."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8").partition("\n\n")[0] if path.exists() else ""
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    family = [f"{key.removeprefix('cpu ')} {said[key]}" for key in ("cpu family", "model") if key in said]
    return ", ".join([said.get("model name") or platform.machine(), *family])
