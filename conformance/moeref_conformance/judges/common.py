"""What judges share: findings with the rank's coordinates, findings for missing records, contexts for diagnosis."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import NameRow
from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation, RankRecord
from moeref_conformance.contract.requests.gradients import FIRST
from moeref_conformance.contract.requests.policy import REPLAYED, UNROUTED
from moeref_conformance.diagnosis.compare import compare, dtype_name
from moeref_conformance.diagnosis.matching import Candidates
from moeref_conformance.judges import Case, Untested, grouped
from moeref_conformance.oracles import published
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown, hf_numbers

P = ParamSpec("P")
T = TypeVar("T")
#: Where a run on one rank is the reference, and there is none.
NO_BASELINE = Outcome(untested="there is no one-rank run of this variant to compare with")
#: How a one-rank run meets what it is the reference for.
ITSELF = "the one-rank run itself"

#: Why routes that a router chooses itself allow no comparison in a dtype, and the rule that makes one.
NATIVE = "in {} rounding turns routes: judged under given routes, where replay R3 is claimed, by {}"
#: How far the logits of two layouts may be apart in fp32, and on a GPU those of one layout.
#: Largest differences seen: 2.4e-6 on three kinds of CPU (Qwen3-Next, TP and EP), and 2.1e-7 of one layout on an H100.
LAYOUT = 1e-5
#: How far logits and logprobs may move over a step or a call that leaves the weights alone, relative to the largest.
ANSWERS_APART = 1e-5
#: In bf16 a target may be this many times as far from fp32 as transformers' own bf16 is under the same routes.
#: Measured on one rank, TP2, EP2 and PP2, over two kinds of CPU: logits 0.8 to 1.2 times, gradients up to 1.4.
ROUNDINGS = 2.0
#: Steps that take one training step; other phases with gradients are of the step `replay`.
TRAINING_STEPS = ("gradients", *UNROUTED, *REPLAYED)


def observed(case: Case) -> Observation:
    """The run of the cell. If there was none, an empty one: then every step is missing."""
    return case.observation or Observation(case.cell, [])


def expected(case: Case) -> Expected:
    """The expected checkpoint; ValueError if the case has none, which is a failure of the kit."""
    if case.expected is None:
        raise ValueError(f"cell {case.cell.id}: no expected checkpoint to judge by")
    return case.expected


def outcome(findings: Iterable[Finding], met: str = "") -> Outcome:
    """Findings grouped and cut to a readable number."""
    return Outcome(findings=grouped(findings), met=met)


def finding(
    case: Case, rank: int | None, stage: str, message: str, *, expected: object = "", got: object = "", **more: Any
) -> Finding:
    """A finding; coordinates come from the rank, layer and expert from the Hugging Face name."""
    if more.get("hf_name"):
        layer, expert = hf_numbers(more["hf_name"])
        more = {"layer": layer, "expert": expert, **more}
    inside = rank is not None and 0 <= rank < case.cell.layout.world
    coords = topology.coords_text(case.cell.layout, rank) if inside and rank is not None else ""
    return Finding(stage, message, rank=rank, coords=coords, expected=str(expected), got=str(got), **more)


def check_no_crash(case: Case) -> None:
    """Raise `Untested` if a rank failed: that is a finding of RUN-001, or of the step where bad input is refused."""
    for crash in observed(case).crashes[:1]:
        raise Untested(f"rank {crash.rank} {crash.kind} in step {crash.step}")


def missing_records(case: Case, *steps: str) -> list[Finding]:
    """A finding for every rank that has no record of one of the steps. A judge begins with them.

    Raises `Untested` instead where a rank failed: RUN-001 says so, and the records are missing because of that.
    """
    if missing := all_missing_records(case, *steps):
        check_no_crash(case)
    return missing


def all_missing_records(case: Case, *steps: str) -> list[Finding]:
    """As `missing_records`, also where a rank failed."""
    have = {record.rank: record for record in observed(case).ranks}
    return [
        finding(case, rank, step, f"no record of step {step}")
        for rank in range(case.cell.layout.world)
        for step in steps
        if rank not in have or not have[rank].has(step)
    ]


def unanswered(case: Case, step: str) -> list[Finding]:
    """`missing_records` for a step that the static world takes once: there rank 0 answers for all."""
    return [missing for missing in missing_records(case, step) if case.cell.backend != "static" or missing.rank == 0]


def records(case: Case, *steps: str) -> list[RankRecord]:
    """The records of the ranks that have all these steps."""
    return [record for record in observed(case).ranks if all(record.has(step) for step in steps)]


def receivers(case: Case, step: str, was_given: Callable[[Any], bool]) -> list[list[RankRecord]]:
    """The records of each receiver of a stream: one rank's, or where each rank is given a share, those of all together.

    `was_given` says of a step's value whether the rank was given a tensor. Where all are to be, a rank without counts.
    """
    ranks = records(case, step)
    if case.claims.receivers != "all":
        ranks = [record for record in ranks if was_given(record.value(step))]
    if case.claims.receivers == "share":
        return [ranks] if ranks else []
    return [[record] for record in ranks]


def values(case: Case, step: str) -> Iterator[tuple[int, Any]]:
    """Rank and value of this step, of the ranks that have it."""
    return ((record.rank, record.value(step)) for record in records(case, step))


def gradients_of(record: RankRecord, phase: str) -> dict[str, torch.Tensor]:
    """The gradients that a rank recorded in a phase, by `chunk:local`; of two steps those of the last."""
    if phase in TRAINING_STEPS:
        return {key: tensor for key, tensor in record.tensors(phase).items() if not key.startswith(FIRST)}
    prefix = f"{phase}.gradients."
    return {k.removeprefix(prefix): t for k, t in record.tensors("replay").items() if k.startswith(prefix)}


def parameters(record: RankRecord, *placed: Placement) -> Iterator[tuple[str, tuple[ExpectedShard, ...]]]:
    """`chunk:local` and what each placement has there, of every parameter of a rank that they know.

    LOD-001 finds the others.
    """
    for item in record.value("inventory"):
        if item["kind"] == "parameter":
            with contextlib.suppress(Unknown):
                held = tuple(one.shard(record.rank, item["chunk"], item["local"], item["shape"]) for one in placed)
                yield f"{item['chunk']}:{item['local']}", held


def less_one(case: Case, local: str, held: ExpectedShard, got: torch.Tensor) -> bool:
    """Whether the norm inside a gated delta net holds w - 1, as megatron-core's does, which scales by 1 + weight.

    Logits tell whether the norm adds the 1, so a target has to claim them.
    """
    inner = local.endswith("self_attention.out_norm.weight") and "forward" in case.claims.facets
    return inner and compare(held.tensor - 1, got, held.rows) is None


def not_refused(case: Case, step: str, taken: str) -> list[Finding]:
    """A finding for every bad input that a rank recorded no error for.

    `taken` is the message, with `{}` for what is wrong with the input.
    """
    return [
        finding(case, rank, step, taken.format(what))
        for rank, value in values(case, step)
        for what, answer in value["refused"].items()
        if answer is None
    ]


def changed(case: Case, rank: int, step: str, call: str, rows: list[list[str]]) -> Iterator[Finding]:
    """What a `call`, such as an export, has changed beside its answer, by kind, of `steps.bystanders.changed`."""
    names: dict[str, list[str]] = {}
    for kind, name in rows:
        names.setdefault(kind, []).append(name)
    for kind, those in names.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        message = f"the {call} changed the {kind} of {those[0]}{more}"
        yield finding(case, rank, step, message, diagnosis=f"not as before the {call}: {kind}")


def changed_answers(case: Case, step: str, of: str = "step") -> Iterator[Finding]:
    """A finding for logits or logprobs that a recorded step has moved, though it leaves the weights as they are.

    `of` is what messages call the step.
    """
    for rank, value in values(case, step):
        for name, far in ((value or {}).get("off") or {}).items():
            if not far <= ANSWERS_APART:
                message = f"after the {of} {name} are off those before it by {far:.2g} of the largest"
                yield finding(case, rank, step, message)


def left_by_forward(case: Case, rows: list[list[str]]) -> list[list[str]]:
    """What a forward has changed, without generators where Transformer Engine computes on a GPU.

    Its fused attention moves the generator that it runs under, though it drops nothing (`init_philox_state` in its
    attention.cpp). With sequence parallelism that is Megatron's.
    """
    moves = case.cell.kernels == "te" and in_any_order(case)
    return [row for row in rows if not (moves and row[0] == "generator")]


def once(make: Callable[Concatenate[Case, P], T]) -> Callable[Concatenate[Case, P], T]:
    """Cache in a case what `make` derives from it and from its other arguments, which are hashable."""

    @functools.wraps(make)
    def cached(case: Case, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (make, *args, *kwargs.items())  # the function, as two modules may have one of the same name
        if key not in case.made:
            case.made[key] = make(case, *args, **kwargs)
        made: T = case.made[key]
        return made

    return cached


@once
def aliases(case: Case) -> dict[str, str]:
    """Names that an export may have beyond the checkpoint's, and the tensor that each repeats."""
    return published.aliases(case.cell, expected(case).tensors)


def once_each(case: Case, rank: int, step: str, names: Iterable[str], never: str, again: str) -> Iterator[Finding]:
    """A finding for every name of the checkpoint that is not among `names`, that is no name of it, or that comes again.

    `never` and `again` are what messages say of a name, such as `was never sent` and `was sent`.
    """
    want, times = expected(case).tensors, Counter(names)
    problems = {name: never for name in want if not times[name]}
    problems |= {name: "is not in the checkpoint" for name in times if name not in want and name not in aliases(case)}
    problems |= {
        name: f"{again} {number} times" for name, number in times.items() if name not in problems and number > 1
    }
    for name, problem in problems.items():
        yield finding(case, rank, step, f"{name} {problem}", hf_name=name)


def shape_and_dtype(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What metadata has to say of a tensor, by name."""
    return ("shape", list(tensor.shape)), ("dtype", dtype_name(tensor.dtype))


def name_rows(record: RankRecord) -> tuple[NameRow, ...]:
    """The names table that this rank gave."""
    value = record.value("names")
    if isinstance(value, tuple):  # kept in memory
        return value
    return tuple(NameRow(**{**row, "hf": tuple(row["hf"]), "shape": tuple(row["shape"])}) for row in value)


@dataclass(frozen=True)
class NamesTable:
    """A names table, and the ranks that gave an equal one at the same place of the TP, PP, EP and ETP groups."""

    rows: tuple[NameRow, ...]
    ranks: list[int]

    @property
    def rank(self) -> int:
        """The first of the ranks; findings name it."""
        return self.ranks[0]


@once
def tables(case: Case) -> list[NamesTable]:
    """The names tables of all ranks. Ranks with equal tables at the same place share one, and one judgement."""
    by_place: dict[tuple[Any, ...], NamesTable] = {}
    same: dict[tuple[NameRow, ...], tuple[NameRow, ...]] = {}
    kept: dict[int, tuple[tuple[NameRow, ...], tuple[NameRow, ...]]] = {}
    for record in records(case, "names"):
        rows = name_rows(record)
        # Of a table that several records share, only the first is compared with the others.
        # Both are held: the number of an object that is gone may come again.
        if id(rows) not in kept:
            kept[id(rows)] = rows, same.setdefault(rows, rows)
        rows = kept[id(rows)][1]
        at = topology.coords(case.cell.layout, record.rank)
        key = id(rows), at["pp"], at["ep"], at["tp"], at["etp"]
        by_place.setdefault(key, NamesTable(rows, [])).ranks.append(record.rank)
    return list(by_place.values())


@once
def placement(case: Case) -> Placement:
    """The brute-force placement of the cell's checkpoint."""
    return Placement(case.cell, expected(case).config, expected(case).tensors)


def candidates(case: Case, factor: float = 1.0, of: Mapping[str, torch.Tensor] | None = None) -> Candidates:
    """The whole expected checkpoint, times `factor`, for diagnosis; or the tensors `of` another export."""
    model = expected(case)
    tensors = model.tensors if of is None else of
    if factor != 1.0:
        tensors = {name: tensor * factor for name, tensor in tensors.items()}
    return Candidates(tensors, int(model.config.get("first_k_dense_replace") or 0), left_over=model.left_over)


def tolerance(case: Case, limit: float) -> str:
    """A tolerance as text; on a GPU with the remark that it was measured on CPUs."""
    return f"{limit:.3g}" + (", a limit measured on CPUs" if case.cell.backend in GPU_BACKENDS else "")


def within(case: Case, worst: float, limit: float) -> str:
    """How a pass within a tolerance was met."""
    return f"{worst:.1e} ≤ {tolerance(case, limit)}" if worst else "exact"


def in_any_order(case: Case) -> bool:
    """Whether the same sums come in another order from run to run: CUDA adds up outputs of experts with atomics."""
    return case.cell.backend in GPU_BACKENDS


def unmeasured(case: Case) -> Outcome | None:
    """Untested, for a precision without a measured tolerance."""
    if not case.cell.precision:
        return None
    return Outcome(untested="no tolerance is measured for FP8 yet")


def without_logits(case: Case, step: str, have: Collection[int], what: str = "logits") -> list[Finding]:
    """Findings for ranks of the last stage that are not among those that have logits."""
    layout = case.cell.layout
    lacking = [rank for rank in range(layout.world) if rank not in have and topology.last_stage(layout, rank)]
    return [finding(case, rank, step, f"no {what} on a rank of the last stage") for rank in lacking]


def only_last_stage(case: Case, step: str, have: Collection[int], what: str = "logits") -> list[Finding]:
    """Findings for ranks of the last stage without logits, and for others with them."""
    others = [rank for rank in have if not topology.last_stage(case.cell.layout, rank)]
    message = f"{what} on a rank that is not of the last stage"
    return [*without_logits(case, step, have, what), *(finding(case, rank, step, message) for rank in others)]


def tokens_of(case: Case) -> torch.Tensor:
    """Which positions of the tokens [B, S] are tokens, and none after the end of a row."""
    return expected(case).tokens_BS >= 0


def distance(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """How far every element is off, in fp64. NaN is never greater than a limit, so it counts as infinitely far.

    ValueError for another shape: one that broadcasts would be compared with what it is not.
    """
    if want.shape != got.shape:
        raise ValueError(f"{list(got.shape)} is compared with {list(want.shape)}")
    apart = (got.double() - want.double()).abs()
    return torch.where(apart.isnan(), torch.inf, apart)


def names_text(names: Iterable[str], most: int = 4) -> str:
    """The first names and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
