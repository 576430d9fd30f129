"""The last part of the preflight: by what the effective settings were verified, the rules or megatron-core itself."""

from __future__ import annotations

from dataclasses import replace

from moeref.check.ask_megatron import Answer, ask
from moeref.check.report import Problem, Report
from moeref.config.coverage import uncovered
from moeref.dispatcher.setup import minor_version


def verified(report: Report, core: str, verify: bool | None) -> Report:
    """The report with what megatron-core says, if it is asked: always, never, or where no rule covers a setting.

    A report that is refused already is verified only on request.
    """
    if report.settings is None:
        return report
    names = uncovered(report.settings.trails, core, mla=report.model.mla is not None)
    if verify is None and report.verdict == "refused":
        note = f"no rule covers {', '.join(names)}; megatron-core is not asked, as the run is refused already"
        return replace(report, notes=(*report.notes, note)) if names else report
    wanted = verify or (verify is None and names)
    answer = ask(report.model, report.settings, core) if wanted else Answer(unavailable="--verify asks megatron-core")
    if answer.refusal:
        return _with(report, Problem("megatron", f"megatron-core {answer.core} refuses it: {answer.refusal}"))
    if not answer.unavailable:
        stand_ins = f", with stand-ins for {', '.join(answer.stand_ins)}" if answer.stand_ins else ""
        kind = "MLATransformerConfig" if report.model.mla else "TransformerConfig"
        return replace(report, verified=f"megatron-core {answer.core}'s own {kind}{stand_ins}")
    if names:
        text = f"no rule covers {', '.join(names)}, and {answer.unavailable}"
        fix = f"check where megatron-core {minor_version(core)} is installed, or drop it"
        return _with(report, Problem("config", text, fix, refused=False))
    return report if report.problems else replace(report, verified=f"the rules of megatron-core {minor_version(core)}")


def _with(report: Report, problem: Problem) -> Report:
    return replace(report, problems=(*report.problems, problem), record=None)
