"""LRA: adapters as they are sent, trained, merged and left out, against transformers on merged checkpoints.

What is sent of the base is compared with the checkpoint, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord, digest
from moeref_conformance.contract.requests import adapters as request
from moeref_conformance.diagnosis.compare import compare, dtype_name, same
from moeref_conformance.diagnosis.matching import first_of
from moeref_conformance.diagnosis.values import constant, rounded, scaled
from moeref_conformance.judges import Case, adapter_causes, judges
from moeref_conformance.judges.common import (
    LAYOUT,
    distance,
    expected,
    finding,
    in_any_order,
    missing_records,
    once,
    once_each,
    only_last_stage,
    outcome,
    receivers,
    records,
    shape_and_dtype,
    tokens_of,
    tolerance,
    unmeasured,
    within,
)
from moeref_conformance.oracles import adapters as oracle
from moeref_conformance.oracles import expert_tensors, routed

#: How far a step may be off what transformers' gradients say, relative to the largest move of the same factor.
#: Measured: 1.1e-5, of DeepSeek-V3 under TP and EP.
LIMIT = 1e-4
#: The same in bf16 of all linears of a name, relative to the length of their moves. Measured: 0.01 to 0.22, of three
#: families under TP and EP.
ROUGHLY = 0.7
#: Of logits, relative to the largest of transformers'. Measured: 1.3e-6.
LOGITS = 2e-5
#: Of logits that are those of other weights.
NEAR = 1e-4
#: What fp32 rounds where a factor is moved, relative to the largest in it.
ROUNDED = 2.0**-23
#: How much larger or smaller fresh factors of a module may be than on one rank: by the width of half a matrix they are
#: drawn 1.37 times as large, and of few elements by chance 1.06 times.
SIZE = 1.3
#: The phases before the merged stream; `again` comes after it, for LRA-004.
TRAINED = ("fresh", "step1", "step2")
#: All streams of adapters.
PHASES = (*request.PHASES, *request.RESUMED)
#: Streams of weights, and the phases of adapters until then; the last one is merged.
TRAINED_SO_FAR = {"": TRAINED, request.BEHIND: (*TRAINED, "on", "resumed")}
WEIGHTS = tuple(f"{when}{of}" for when in TRAINED_SO_FAR for of in ("merged", "base"))


@dataclass(frozen=True, eq=False)
class _Stream:
    """A stream of weights: the metadata of what came, and the last tensor of each name."""

    metas: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Sent:
    """What one rank was given, or the ranks together that were given a share."""

    rank: int
    names: Mapping[str, list[str]]
    phases: Mapping[str, dict[str, torch.Tensor]]
    weights: Mapping[str, _Stream]
    overwritten: list[str]


@once
def _streams(case: Case) -> list[_Sent]:
    """What each receiver was given, or all together where each is given a share."""
    return [_together(ranks) for ranks in receivers(case, "adapters", lambda value: any(value["sent"].values()))]


def _together(ranks: list[RankRecord]) -> _Sent:
    """What these ranks were given, as the records of one receiver."""
    values = [record.value("adapters") for record in ranks]
    tensors = {name: tensor for record in ranks for name, tensor in record.tensors("adapters").items()}

    def named(phase: str) -> dict[str, torch.Tensor]:
        prefix = f"{phase}."
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    names = {phase: [name for value in values for name in value["sent"].get(phase, ())] for phase in PHASES}
    phases = {phase: named(phase) for phase in PHASES}
    weights = {key: _Stream([row for of in values for row in of.get(key, ())], named(key)) for key in WEIGHTS}
    overwritten = [name for value in values for name in value["overwritten"]]
    return _Sent(ranks[0].rank, names, phases, weights, overwritten)


def _apart(case: Case, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors with each expert's linears by themselves, also of files that hold all experts as one tensor."""
    return expert_tensors.split(tensors) if case.cell.expert_format != "per_expert" else tensors


@once
def _weights(case: Case) -> Mapping[str, torch.Tensor]:
    """All tensors of the checkpoint, each expert's linears by themselves."""
    return _apart(case, expected(case).tensors)


@once
def _adapted(case: Case) -> list[str]:
    """The weights that have an adapter."""
    return oracle.adapted(_weights(case), request.modules(case.claims, case.cell))


@once
def _whole(case: Case, sent: _Sent) -> list[str]:
    """The weights whose adapters are there, in their shape and dtype, in all streams before a merge."""
    want = oracle.shapes(_weights(case), _adapted(case))

    def there(name: str) -> bool:
        return all(
            name in sent.phases[phase] and not _wrong_form(sent.phases[phase][name], want[name]) for phase in TRAINED
        )

    return [name for name in _adapted(case) if all(there(oracle.peft(name, factor)) for factor in oracle.FACTORS)]


def _wrong_form(tensor: torch.Tensor, shape: list[int]) -> str:
    """The dtype and shape of a factor if they are not fp32 and `shape`; else empty."""
    right = tensor.dtype == torch.float32 and list(tensor.shape) == shape
    return "" if right else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _of_sent(judge: Callable[[Case, list[_Sent]], Outcome | Iterable[Finding]]) -> Callable[[Case], Any]:
    """Call a judge with what was sent. If that is nothing, or a rank has no record of it, that is the finding."""

    @functools.wraps(judge)
    def judged(case: Case) -> Any:
        if case.cell.mtp:
            return Outcome(untested="asked of models without multi-token prediction layers")
        if no := unmeasured(case):
            return no
        if missing := missing_records(case, "adapters"):
            return missing
        if not (sent := _streams(case)):
            return [finding(case, None, "adapters", "no rank was given an adapter")]
        return list(_lost(case)) or judge(case, sent)

    return judged


def _lost(case: Case) -> Iterator[Finding]:
    """Ranks that recorded what they were given, and not its values; or nothing, where they have logits."""
    for record in records(case, "adapters"):
        value, tensors = record.value("adapters"), record.tensors("adapters")
        named = {f"{phase}.{name}" for phase, names in value["sent"].items() for name in names}
        named |= {f"{key}.{row['name']}" for key in WEIGHTS for row in value.get(key, ())}
        if named - tensors.keys() or (not tensors and topology.last_stage(case.cell.layout, record.rank)):
            yield finding(case, record.rank, "adapters", "no record of the values of all tensors")


def _found(case: Case, rank: int | None, name: str, message: str, **more: Any) -> Finding:
    """A finding of a factor or a weight. `name` is PEFT's or the checkpoint's."""
    return finding(case, rank, "adapters", message, hf_name=name.removeprefix(oracle.PREFIX), **more)


@judges("LRA-001")
@_of_sent
def every_linear_has_its_adapter(case: Case, sent: list[_Sent]) -> Outcome:
    """Names, shapes and dtypes of every stream, what fresh adapters hold, and logits of these."""
    findings = [found for one in sent for found in (*_named(case, one), *_overwritten(case, one, request.PHASES))]
    findings += [*_fresh(case, sent[0]), *_of_other_sizes(case, sent[0])]
    findings += [found for one in sent[1:] for found in _unlike(case, sent[0], one)]
    more, worst = _of_checkpoint(case, "fresh")
    return outcome([*findings, *more], met=within(case, worst, LOGITS))


def _of_checkpoint(case: Case, phase: str) -> tuple[list[Finding], float]:
    """As `_logits`, of those of the checkpoint; nothing in bf16, where rounding turns routes."""
    if _is_rounded(case):
        return [], 0.0
    return _logits(case, phase, expected(case).logits_BSV, "transformers'")


def _is_rounded(case: Case) -> bool:
    return case.cell.dtype != "float32"


def _named(case: Case, sent: _Sent) -> Iterator[Finding]:
    want = oracle.shapes(_weights(case), _adapted(case))
    for phase in request.PHASES:
        times = Counter(sent.names[phase])
        for name in sorted(want.keys() - times.keys()):
            yield _found(case, sent.rank, name, f"{phase}: {name} was never sent")
        for name in sorted(times):
            if name not in want:
                yield _found(case, sent.rank, name, f"{phase}: {name} is no adapter that was asked for")
            elif times[name] > 1:
                yield _found(case, sent.rank, name, f"{phase}: {name} was sent {times[name]} times")
            elif wrong := _wrong_form(sent.phases[phase][name], want[name]):
                message, right = f"{phase}: {name} is {wrong}", f"float32 {want[name]}"
                yield _found(case, sent.rank, name, message, expected=right, got=wrong)


def _overwritten(case: Case, sent: _Sent, streams: Collection[str]) -> Iterator[Finding]:
    """What held other values at the end of one of these streams, if it has to last so long."""
    for key in sent.overwritten if case.claims.lasts == "stream" else ():
        stream, _, name = key.partition(".")
        if stream in streams:
            message = f"{stream}: {name} held other values at the end of the stream than when it was given"
            yield _found(case, sent.rank, name, message)


def _fresh(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Each lora_B is 0; no row of a lora_A is, and neither two of its rows nor two of its columns are alike."""
    fresh = sent.phases["fresh"]
    for name in sorted(fresh):
        if not bool(fresh[name].isfinite().all()):
            yield _found(case, sent.rank, name, f"fresh: {name} is not finite")
        elif name.endswith("lora_B.weight"):
            if bool(fresh[name].any()):
                yield _found(case, sent.rank, name, f"fresh: {name} is not 0")
        elif not bool(fresh[name].any(1).all()):
            yield _found(case, sent.rank, name, f"fresh: {name} has a row of 0, which no step would move")
        elif alike := [what for dim, what in enumerate(("rows", "columns")) if _repeats(fresh[name], dim)]:
            message = f"fresh: {name} has {alike[0]} that are alike"
            yield _found(case, sent.rank, name, message, diagnosis="shards drawn alike")


def _repeats(matrix: torch.Tensor, dim: int) -> bool:
    lines = [tuple(line) for line in matrix.movedim(dim, 0).flatten(1).tolist()]
    return len(set(lines)) < len(lines)


def _of_other_sizes(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Fresh factors of each module, in the mean of all layers and experts, are about as large as on one rank."""
    if case.baseline is None or case.baseline is case.observation:
        return
    if not (alone := [record for record in case.baseline.ranks if record.has("adapters")]):
        return
    want, have = (_sizes(one.phases["fresh"]) for one in (_together(alone), sent))
    for module in sorted(want.keys() & have.keys()):
        times = have[module] / want[module] if want[module] else 1.0
        if not 1 / SIZE < times < SIZE:
            message = f"fresh: the factors lora_A of {module} are {times:.2g} times as large as on one rank"
            yield finding(case, sent.rank, "adapters", message, diagnosis="drawn by the width of a shard")


def _sizes(fresh: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The root of the mean square of all lora_A of a module."""
    squares: dict[str, list[torch.Tensor]] = {}
    for name, factor in fresh.items():
        if name.endswith(".lora_A.weight"):
            squares.setdefault(name.split(".")[-3], []).append(factor.double().square().flatten())
    return {module: float(torch.cat(found).mean().sqrt()) for module, found in squares.items()}


def _unlike(case: Case, first: _Sent, other: _Sent) -> Iterator[Finding]:
    """Two receivers are given the same."""
    for phase in request.PHASES:
        for name in sorted(first.phases[phase].keys() & other.phases[phase].keys()):
            if not same(first.phases[phase][name], other.phases[phase][name]):
                message = f"{phase}: {name} is not what rank {first.rank} is given"
                yield _found(case, other.rank, name, message, diagnosis="replicas part")


def _logits(
    case: Case, phase: str, want: torch.Tensor, whose: str, limit: float = LOGITS
) -> tuple[list[Finding], float]:
    """Findings for logits of a phase that are not there or not `want`, and how far others are off; bitwise at 0."""
    have = {
        record.rank: tensors[key]
        for record in records(case, "adapters")
        if (key := f"logits.{phase}") in (tensors := record.tensors("adapters"))
    }
    findings, worst = only_last_stage(case, "adapters", have, f"{phase} logits"), 0.0
    for rank, got in have.items():
        if got.shape != want.shape or got.dtype != want.dtype:
            message = f"{phase}: logits are {got.dtype} {list(got.shape)}, {whose} {want.dtype} {list(want.shape)}"
            findings.append(finding(case, rank, "adapters", message))
            continue
        here = tokens_of(case)[..., None].expand_as(want)
        far = float(distance(want[here], got[here]).max() / want[here].abs().max())
        if far > limit:
            message = f"{phase}: logits differ from {whose} by {far:.2g} of the largest > {tolerance(case, limit)}"
            diagnosis = _as_base(case, phase, got) or _as_other(case, phase, got)
            findings.append(finding(case, rank, "adapters", message, diagnosis=diagnosis))
        else:
            worst = max(worst, far)
    return findings, worst


def _as_base(case: Case, phase: str, got: torch.Tensor) -> str:
    """Whether logits are those without adapters, where they should not be."""
    base, here = expected(case).logits_BSV, tokens_of(case)
    near = torch.allclose(base[here], got[here], rtol=0, atol=NEAR)
    return "as without adapters" if near and phase not in ("fresh", "base") else ""


def _as_other(case: Case, phase: str, got: torch.Tensor) -> str:
    """What other adapters the logits of trained ones are of, by transformers with these merged."""
    here, sent = tokens_of(case), _streams(case)[0]
    if phase == "base":
        trained = _after(case, sent, "step2").logits_BSV
        return "those with adapters" if float(distance(trained[here], got[here]).max()) <= NEAR else ""
    if phase != "trained" or not bool(got[here].isfinite().all()):
        return ""

    def near(want: torch.Tensor) -> bool:
        far = float(distance(want[here], got[here]).max() / want[here].abs().max())
        return far <= LOGITS

    if near(_after(case, sent, "step1").logits_BSV):
        return "those of adapters before the last step"
    others = adapter_causes.of_other_adapters(_whole(case, sent), sent.phases["step2"])
    return next((said for said, adapters in others if near(_with(case, sent, said, adapters).logits_BSV)), "")


def _with(case: Case, sent: _Sent, said: str, adapters: Mapping[str, torch.Tensor]) -> routed.OfWeights:
    """transformers with adapters merged, computed once for the words that name these."""
    key = ("_with", said)
    if key not in case.made:
        merged = oracle.merged(_weights(case), adapters, _whole(case, sent))
        case.made[key] = routed.of_weights(expected(case), expert_tensors.joined(merged, expected(case).tensors))
    made: routed.OfWeights = case.made[key]
    return made


def _after(case: Case, sent: _Sent, phase: str) -> routed.OfWeights:
    """transformers with the adapters of a phase merged."""
    return _with(case, sent, f"{phase} of rank {sent.rank}", sent.phases[phase])


@judges("LRA-002")
@_of_sent
def steps_follow_the_gradients(case: Case, sent: list[_Sent]) -> Outcome:
    """Both factors of every adapter, relative to the largest move of the factor that is expected.

    In bf16 those of all linears of a name, relative to their length.
    """
    if _is_rounded(case):
        return _in_bf16(case, sent[0])
    first, findings, worst = sent[0], list[Finding](), 0.0
    shared, earlier = _shared(case, first), dict[str, torch.Tensor]()
    for before, after, of_weights in _steps(case, first):
        wrong = list[Finding]()
        alone = oracle.gradients(of_weights, first.phases[before], _whole(case, first))
        summed = {names[0]: torch.stack([alone[name] for name in names]).sum(0) for names in shared}
        replica = functools.partial(_of_replica, case, first.rank if after == "step1" else None)
        step = adapter_causes.Step(
            after, _whole(case, first), first.phases[before], of_weights, summed, earlier, replica
        )
        for name, gradient in summed.items():
            want = -request.RATES[after] * gradient
            held, got = (first.phases[phase][name].double() for phase in (before, after))
            far = _off(want, got - held, float(got.abs().max()))
            if far <= LIMIT:
                worst = max(worst, far)
                continue
            by = f"{far:.2g} of its largest > {tolerance(case, LIMIT)}"
            message = f"{after}: {name} moved otherwise than by transformers' gradient: {by}"
            diagnosis = adapter_causes.moved_as(step, name, got - held)
            wrong.append(_found(case, first.rank, name, message, diagnosis=diagnosis))
        right_before = bool(earlier) and not findings
        findings, earlier = [*findings, *adapter_causes.of_linears(wrong, summed, right_before)], summed
    return outcome(findings, met=within(case, worst, LIMIT))


def _steps(case: Case, first: _Sent) -> Iterator[tuple[str, str, Mapping[str, torch.Tensor]]]:
    """The phases before and after each step, and transformers' gradients of the weights in it."""
    yield "fresh", "step1", _apart(case, routed.under(expected(case), "native").gradients)
    yield "step1", "step2", _apart(case, _after(case, first, "step1").gradients)


def _in_bf16(case: Case, first: _Sent) -> Outcome:
    """Where routes turn, all factors of a kind of linear move nearly as they should."""
    findings, worst = list[Finding](), 0.0
    for before, after, of_weights in _steps(case, first):
        alone = oracle.gradients(of_weights, first.phases[before], _whole(case, first))
        kinds: dict[tuple[str, ...], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        for names in _shared(case, first):
            held, got = (first.phases[phase][names[0]].double() for phase in (before, after))
            want = -request.RATES[after] * torch.stack([alone[name] for name in names]).sum(0)
            kinds.setdefault(tuple(names[0].split(".")[-3:-1]), []).append((held, got, want))
        for (linear, factor), moves in kinds.items():
            if (far := _roughly_off(moves)) <= ROUGHLY:
                worst = max(worst, far)
            else:
                by = f"{far:.2g} of their length > {tolerance(case, ROUGHLY)}"
                message = f"{after}: {factor} of {linear} moved otherwise than by transformers' gradients: {by}"
                diagnosis = "" if any(not torch.equal(held, got) for held, got, _ in moves) else "not moved"
                findings.append(finding(case, first.rank, "adapters", message, diagnosis=diagnosis))
    return outcome(findings, met=within(case, worst, ROUGHLY))


def _roughly_off(moves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float:
    """How far factors that were `held` and that came then are off what is wanted of their moves, as one vector.

    Relative to its length, beyond what is rounded of factors that come in bf16; inf for any that is not finite.
    """
    held, got, want = (torch.cat([one.flatten() for one in of]) for of in zip(*moves, strict=True))
    both = torch.cat([held, got])
    rounded = 2.0**-8 * float(both.norm()) if torch.equal(both, both.bfloat16().double()) else 0.0
    far, length = float((got - held - want).norm()), float(want.norm())
    if far <= rounded:
        return 0.0
    return (far - rounded) / length if isfinite(far) and length else torch.inf


@once
def _of_replica(case: Case, rank: int | None) -> Mapping[str, torch.Tensor]:
    """The gradients of the sum of the rows of a rank's replica; none if it has all rows, or of no rank."""
    total = len(expected(case).tokens_BS)
    rows = range(total) if rank is None else topology.replica_rows(case.cell, rank, total)
    summed = dict[str, torch.Tensor]()
    for row in rows if len(rows) < total else ():
        for number, sign in ((row, -1), (row + 1, 1)):
            count = int((routed.labels(expected(case), counted=number) != routed.IGNORED).sum())
            if count:
                gradients = routed.under(expected(case), "native", counted=number).gradients
                summed = {name: summed.get(name, 0.0) + sign * count * one.double() for name, one in gradients.items()}
    return _apart(case, summed)


def _shared(case: Case, sent: _Sent) -> list[list[str]]:
    """The factors of whole adapters, those together that are one."""
    names = [oracle.peft(name, factor) for name in _whole(case, sent) for factor in oracle.FACTORS]
    return oracle.sharing([{name: sent.phases[phase][name] for name in names} for phase in TRAINED])


def _off(want: torch.Tensor, moved: torch.Tensor, largest: float) -> float:
    """The largest distance beyond what fp32 rounds, relative to the largest that is wanted."""
    far = max(float(distance(want, moved).max()) - ROUNDED * largest, 0.0)
    scale = float(want.abs().max())
    return far / scale if scale else 0.0 if far == 0.0 else torch.inf


@judges("LRA-003")
@_of_sent
def logits_are_of_what_is_sent(case: Case, sent: list[_Sent]) -> Outcome:
    """Of the adapters after two steps, as an engine computes with them."""
    want = _after(case, sent[0], "step2").logits_BSV
    findings, worst = _logits(case, "trained", want, "transformers' with what was sent")
    return outcome(findings, met=within(case, worst, LOGITS))


@judges("LRA-004")
@_of_sent
def the_base_stays(case: Case, sent: list[_Sent]) -> Outcome:
    """Weights bit for bit, logits of the base, and adapters and logits after a stream of merged weights."""
    findings = missing_records(case, "shards")
    findings += [found for record in records(case, "adapters", "shards") for found in _held(case, record)]
    more, worst = _of_checkpoint(case, "base")
    findings += [*more, *(found for one in sent for found in _not_again(case, one))]
    for record in records(case, "adapters"):
        tensors = record.tensors("adapters")
        fresh, trained, base, after = (tensors.get(f"logits.{phase}") for phase in request.LOGITS)
        findings += _not_as_before(case, record.rank, trained, after, "after", "before the merged stream")
        if _is_rounded(case):
            findings += _not_as_before(case, record.rank, fresh, base, "base", "of fresh adapters")
    return outcome(findings, met=within(case, worst, LOGITS))


def _held(case: Case, record: RankRecord) -> Iterator[Finding]:
    """The tensors that held a weight as it was loaded when adapters were attached hold it still."""
    value, loaded = record.value("adapters"), {_digest(tensor) for tensor in record.tensors("shards").values()}
    last = {key: (tuple(shape), digest) for key, shape, digest in value["left"]}
    base = {key: (tuple(shape), digest) for key, shape, digest in value["attached"]}
    base = {key: held for key, held in base.items() if held in loaded}
    if not base:
        yield finding(case, record.rank, "adapters", "no chunk holds a weight as it was loaded")
    for key, held in base.items():
        if last.get(key) != held:
            local = key.partition(":")[2]
            yield finding(case, record.rank, "adapters", f"{local} of the base has changed", local_name=local)


def _not_again(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Adapters are sent again as they were before the merge."""
    for name in sorted(sent.phases["step2"].keys() & sent.phases["again"].keys()):
        if not same(sent.phases["step2"][name], sent.phases["again"][name]):
            diagnosis = scaled(sent.phases["step2"][name], sent.phases["again"][name])
            message = f"again: {name} has changed after the merged stream"
            yield _found(case, sent.rank, name, message, diagnosis=diagnosis)


def _not_as_before(
    case: Case, rank: int, before: torch.Tensor | None, after: torch.Tensor | None, phase: str, which: str
) -> Iterator[Finding]:
    """Logits of a phase are those `which` came before it; bit for bit, unless sums come in any order."""
    if before is None and after is None:
        return
    if before is None or after is None or before.shape != after.shape:
        yield finding(case, rank, "adapters", f"{phase}: no logits as {which}")
        return
    far = float(distance(before, after).max())
    any_order = torch.inf if _is_rounded(case) else LAYOUT
    if far > (any_order if in_any_order(case) else 0.0):
        message = f"{phase}: logits differ by {far:.2g} from those {which}"
        yield finding(case, rank, "adapters", message, diagnosis=f"not as {which}")


@judges("LRA-005")
@_of_sent
def merged_weights_are_sums(case: Case, sent: list[_Sent]) -> Outcome:
    """Each weight with an adapter within the rounding of its dtype, each other one bit for bit."""
    findings, worst = list[Finding](), 0.0
    for when, one in _times_asked(case, sent):
        key, behind = f"{when}merged", _in_words(when)
        names = [row["name"] for row in one.weights[key].metas]
        lacks, again = f"is not among the merged weights{behind}", f"is merged{behind}"
        findings += once_each(case, one.rank, "adapters", names, lacks, again)
        findings += _overwritten(case, one, (key,))
        more, far = _sums(case, sent[0], one, when)
        findings, worst = [*findings, *more], max(worst, far)
    return outcome(findings, met=f"off by at most {worst:.2f} of the rounding of sums in {case.cell.dtype}")


def _times_asked(case: Case, sent: list[_Sent]) -> Iterator[tuple[str, _Sent]]:
    """What each receiver was given, with what begins the names of its streams of weights.

    Those behind a restore are left out where not all adapters came then, which LRA-007 judges.
    """
    names = [oracle.peft(name, factor) for name in _whole(case, sent[0]) for factor in oracle.FACTORS]
    for when, phases in TRAINED_SO_FAR.items():
        held = [sent[0].phases[phase] for phase in phases]
        there = all(name in of and of[name].shape == held[0][name].shape for of in held for name in names)
        if not when or (case.claims.adapter_saves and there):
            yield from ((when, one) for one in sent)


def _in_words(when: str) -> str:
    return " of restored adapters" if when else ""


def _sums(case: Case, first: _Sent, sent: _Sent, when: str) -> tuple[list[Finding], float]:
    """Findings of one receiver's merged weights, and how far others are off their limit."""
    trained = {phase: first.phases[phase] for phase in TRAINED_SO_FAR[when]}
    *_, adapters = trained.values()
    tensors, whole = _weights(case), set(_whole(case, first))
    want, worst = oracle.merged(tensors, adapters, sorted(whole)), 0.0
    where = f"among the merged weights{_in_words(when)}"
    findings, fitting = _as_announced(case, sent.rank, sent.weights[f"{when}merged"], where)
    for name, got in fitting.items():
        if name not in whole:
            if (difference := compare(want[name], got)) is not None:
                message = f"{name}, which has no adapter: {difference.text}"
                diagnosis = scaled(want[name], got)
                findings.append(_found(case, sent.rank, name, message, diagnosis=diagnosis, **difference.told))
        else:
            far = float((distance(want[name], got) / oracle.rounding(tensors, adapters, name)).nan_to_num().max())
            worst = worst if far > 1 else max(worst, far)
            if far > 1:
                diagnosis = adapter_causes.merged_as(name, trained, tensors[name], got)
                message = f"{name} is not the sum with its adapter{', restored' if when else ''}"
                findings.append(_found(case, sent.rank, name, message, diagnosis=diagnosis))
    return findings, worst


@judges("LRA-006")
@_of_sent
def the_base_is_sent_alone(case: Case, sent: list[_Sent]) -> Outcome:
    """Each weight of the base while adapters are attached and trained, bit for bit."""
    findings = list[Finding]()
    for when, one in _times_asked(case, sent):
        key, what = f"{when}base", f"sent of the base{_in_words(when)}"
        names = [row["name"] for row in one.weights[key].metas]
        missed = once_each(case, one.rank, "adapters", names, f"is not {what}", f"is {what}")
        findings += [replace(found, diagnosis=adapter_causes.named_as(found.hf_name)) for found in missed]
        findings += [*_overwritten(case, one, (key,)), *_of_base(case, sent[0], one, when)]
    return outcome(findings, met="the base's weights as the checkpoint has them")


def _of_base(case: Case, first: _Sent, sent: _Sent, when: str) -> Iterator[Finding]:
    """Findings of one receiver's weights of the base, with what else they are."""
    tensors, whole = _weights(case), set(_whole(case, first))
    trained = {phase: first.phases[phase] for phase in TRAINED_SO_FAR[when]}
    where = f"of the base{_in_words(when)}"
    findings, fitting = _as_announced(case, sent.rank, sent.weights[f"{when}base"], where)
    yield from findings
    for name, got in fitting.items():
        if (difference := compare(tensors[name], got)) is not None:
            with_it = adapter_causes.added_as(name, trained, tensors[name], got) if name in whole else ""
            diagnosis = with_it or scaled(tensors[name], got)
            yield _found(case, sent.rank, name, f"{name} {where}: {difference.text}", diagnosis=diagnosis)


@judges("LRA-007")
@_of_sent
def what_is_restored_goes_on(case: Case, sent: list[_Sent]) -> Outcome:
    """What is sent after a restore, logits then, and the step that was taken before it."""
    findings = [found for one in sent for found in _restored(case, one)]
    for record in records(case, "adapters"):
        before, after = (record.tensors("adapters").get(f"logits.{phase}") for phase in ("after", "restored"))
        findings += _other_logits(case, record.rank, before, after)
    return outcome(findings, met="adapters go on from a save as without one")


def _restored(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Findings for factors that are not those of the save, or that the next step moves otherwise."""
    saved, on, restored, resumed = (sent.phases[phase] for phase in request.RESUMED)
    for name in sorted(oracle.shapes(_weights(case), _adapted(case))):
        if unsent := [phase for phase in request.RESUMED if sent.names[phase].count(name) != 1]:
            yield _found(case, sent.rank, name, f"{unsent[0]}: {name} was not sent once")
        elif (difference := compare(saved[name], restored[name])) is not None:
            message = f"restored: {name} is not what was saved: {difference.text}"
            diagnosis = first_of(
                *(functools.partial(trial, saved[name], restored[name]) for trial in (constant, rounded, scaled))
            )
            yield _found(case, sent.rank, name, message, diagnosis=diagnosis, **difference.told)
        elif resumed[name].shape != on[name].shape:
            yield _found(case, sent.rank, name, f"resumed: {name} is {list(resumed[name].shape)}")
        else:
            moved, again = on[name].double() - saved[name], resumed[name].double() - saved[name]
            if _off(moved, again, float(on[name].abs().max())) > LIMIT:
                diagnosis = "" if bool(again.any()) else "not moved"
                message = f"resumed: {name} moved otherwise than by the same step before it was restored"
                yield _found(case, sent.rank, name, message, diagnosis=diagnosis)


def _other_logits(case: Case, rank: int, before: torch.Tensor | None, after: torch.Tensor | None) -> Iterator[Finding]:
    """Logits of what is restored are those before the save, within the tolerance of logits."""
    if before is None and after is None:
        return
    rows = tokens_of(case).shape
    if before is None or after is None or before.shape != after.shape or before.shape[:-1] != rows:
        yield finding(case, rank, "adapters", "restored: no logits as before the save")
        return
    here = tokens_of(case)[..., None].expand_as(before)
    far = float(distance(before[here], after[here]).max() / before[here].abs().max())
    if not far <= LOGITS:
        message = f"restored: logits differ from those before the save by {far:.2g} of the largest"
        yield finding(case, rank, "adapters", f"{message} > {tolerance(case, LOGITS)}")


def _as_announced(case: Case, rank: int, weights: _Stream, where: str) -> tuple[list[Finding], dict[str, torch.Tensor]]:
    """Findings for weights of another shape or dtype than the checkpoint's or the announced; and the others.

    Each expert's linears are by themselves.
    """
    findings, fitting = list[Finding](), dict[str, torch.Tensor]()
    for row in weights.metas:
        name = row["name"]
        if (want := expected(case).tensors.get(name)) is None:
            continue
        got = weights.tensors[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            form = f"{dtype_name(got.dtype)} {list(got.shape)}"
            findings.append(_found(case, rank, name, f"{name} is {form} {where}"))
        elif any(row[key] != is_ for key, is_ in shape_and_dtype(got)):
            findings.append(_found(case, rank, name, f"{name} is announced as {row['dtype']} {row['shape']} {where}"))
        else:
            fitting |= _apart(case, {name: got})
    return findings, fitting


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), digest(tensor.contiguous())
