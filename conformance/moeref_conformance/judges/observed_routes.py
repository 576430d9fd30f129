"""Which experts received each token of a phase, from what the step `replay` recorded at the experts.

And what transformers computes when the same experts receive them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Layout
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.policy import Loss
from moeref_conformance.contract.requests.replay import SHARED, SHORTER
from moeref_conformance.contract.requests.sequences import shorter
from moeref_conformance.judges import Case
from moeref_conformance.judges.common import expected, finding, once, records, tokens_of
from moeref_conformance.oracles import mtp, routed
from moeref_conformance.oracles.sequence import positions

Place = tuple[int, int]  # sample, position
Seen = Mapping[int, Mapping[Place, frozenset[int]]]  # layer -> place -> experts
Routes = tuple[dict[int, dict[Place, frozenset[int]]], list[Finding]]  # and where rows could not be placed
#: The place of a row that is no token.
PADDING: Place = (-1, -1)
#: Hidden states of one token in Megatron and in transformers in fp32 are not further apart than this part of their
#: length, of a model in bf16 than the other.
NEAR, ROUNDED = 1e-3, 0.1
#: Nor are those of a microbatch that runs twice, in bf16 on a GPU; those of two samples are apart by more than half.
AGAIN = 0.05
#: Hidden states are of another sample than the next in order if they are this much nearer to it.
FAR_NEARER = 0.25
#: Scores of the last chosen and the first unchosen expert that are no further apart may change places by rounding: a
#: sum in another order moves one by 1e-6, one of logits in bf16, which are up to 8, by 0.01.
NEAR_IN_FP32, NEAR_IN_BF16 = 1e-4, 0.02
ByRank = Mapping[int, Mapping[tuple[int, int], Mapping[str, torch.Tensor]]]  # rank -> (layer, call) -> tensors


@once
def replayed(case: Case) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of the step by rank, read once for all judges."""
    return {record.rank: record.tensors("replay") for record in records(case, "replay")}


@once
def seen_routes(case: Case, phase: str) -> Routes:
    """The experts that received each token in `phase`, from all ranks' records.

    Rows that enter a layer on a rank are at the positions that CP and sequence parallelism give it; its replica's
    samples come in order. One that comes again (recomputation, filler of an interleaved schedule) has nearly the same
    rows: sums may round otherwise. Packed samples have padding where the target wants it: there a row is the token
    whose hidden state transformers has too.
    """
    by_rank = _of_phase(case, phase)
    packed = case.cell.batch == "packed"
    place_of, findings = _nearest(case, by_rank, phase) if packed else _places(case, by_rank, phase)
    experts: dict[int, dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, layer, expert, row in _received(case, by_rank):
        place = place_of[layer].get(row)
        if place == PADDING:
            continue
        if place is None:
            message = f"{phase}: expert {expert} of layer {layer} received a row that no token is"
            findings.append(finding(case, rank, "replay", message, layer=layer, expert=expert))
        else:
            experts[layer][place].add(expert)
    frozen = {layer: {place: frozenset(e) for place, e in places.items()} for layer, places in experts.items()}
    return frozen, findings


def oracle(case: Case, which: str, router_loss: str = "", counted: int | None = None) -> routed.Routed:
    """What transformers computes under these routes, or the router's own where they have none.

    Gradients are those of the first `counted` rows, of all without.
    """
    balancing = balanced(case, router_loss)
    return routed.under(expected(case), which, case.claims.missing_rows, balancing=balancing, counted=counted)


def balanced(case: Case, router_loss: str) -> routed.Balancing | None:
    """A loss of routers and the rows of the microbatches that it is over; None without one."""
    rows = topology.microbatches(case.cell, len(expected(case).tokens_BS))
    return (router_loss, rows) if router_loss else None


def native_gradients(case: Case, router_loss: str = "", counted: int | None = None) -> Mapping[str, torch.Tensor]:
    """The gradients of a step under the routers' own routes, with what the cell's model has besides its decoder."""
    if case.cell.mtp:
        return with_mtp(case, "native", counted).gradients
    return oracle(case, "native", router_loss, counted).gradients


def with_mtp(case: Case, which: str, counted: int | None = None, policy: Loss | None = None) -> mtp.Step:
    """A step with multi-token prediction layers, under these routes of the decoder's, of a `policy`'s loss if given."""
    claims = case.claims
    design = mtp.Design(
        detached=claims.mtp_detached,
        path=claims.mtp_mask == "path",
        parts=_parts(case, counted) if claims.mtp_mean != "step" else (),
        by_tokens=claims.mtp_mean == "per_token",
        policy=policy,
    )
    return mtp.under(expected(case), which, claims.missing_rows, design, counted)


def _parts(case: Case, counted: int | None) -> tuple[mtp.Part, ...]:
    """What each CP rank of each replica computes of each microbatch in the first `counted` rows."""
    samples, length = expected(case).tokens_BS.shape
    microbatches = topology.microbatches(case.cell, samples)
    across = Layout(cp=case.cell.layout.cp)
    cut = [tuple(positions(length, across, {"tp": 0, "cp": cp}, case.claims.cp_cut)) for cp in range(across.cp)]
    return tuple((rows, at) for rows in microbatches if counted is None or max(rows) < counted for at in cut)


def rounding(case: Case, which: str) -> routed.Rounding:
    """How far transformers' own bf16 is from its fp32 under these routes."""
    return routed.rounding(expected(case), which, case.claims.missing_rows)


def without_route(case: Case, which: str) -> set[Place]:
    """Places that the given routes of this set leave to the router."""
    places = set()
    lengths = expected(case).lengths
    for number, sample in enumerate(routed.given_routes(expected(case), which, case.claims.missing_rows)):
        places |= {(number, s) for s in range(lengths[number]) if s >= len(sample) or sample[s].min() < 0}
    return places


@once
def oracle_of(case: Case, phase: str) -> routed.Routed:
    """What transformers computes under the routes of a phase.

    Tokens without a route take the experts that the target chose for them, which other rules judge.
    """
    return _taking(case, phase[-1], phase, without_route(case, phase[-1]))


@once
def oracle_recorded(case: Case, phase: str, negated: bool) -> routed.Routed:
    """What transformers, with routers `negated` or not, computes when tokens take their experts of a phase of R2."""
    return _taking(case, "native", phase, set(map(tuple, tokens_of(case).nonzero().tolist())), negated)


def _taking(case: Case, which: str, phase: str, free: set[Place], negated: bool = False) -> routed.Routed:
    """What transformers computes under these routes when the tokens `free` take the experts of the phase."""
    native, seen = oracle(case, which), seen_routes(case, phase)[0]
    top_k = {len(experts) for places in native.experts.values() for experts in places.values()}
    # Of all layers, also where both choose alike: after another choice transformers would choose otherwise further on.
    taken = {
        (layer, *place, seen.get(layer, {}).get(place, places[place]))
        for layer, places in native.experts.items()
        for place in free
    }
    chosen = frozenset(one for one in taken if len(one[3]) in top_k)
    if not negated and all(own == native.experts[layer][row, position] for layer, row, position, own in chosen):
        return native
    return routed.under(expected(case), which, case.claims.missing_rows, chosen, negated=negated)


def own_choice(case: Case, phase: str) -> Seen:
    """The experts that transformers' routers take in fp32 for the hidden states that entered them in this phase.

    Rounding before a layer is in these, so that it turns no route. Tokens that are chosen for by little are left out.
    """
    by_rank = _of_phase(case, phase)
    place_of, near = _places(case, by_rank, phase)[0], _near(case)
    want: dict[int, dict[Place, frozenset[int]]] = defaultdict(dict)
    for calls in by_rank.values():
        for (layer, _), tensors in calls.items():
            if "in" in tensors and len(tensors["in"]):
                chosen = routed.choices(expected(case), layer, tensors["in"], near)
                for row, experts in zip(_rows(tensors["in"]), chosen, strict=True):
                    if experts is not None and row in place_of[layer]:
                        want[layer][place_of[layer][row]] = experts
    return want


def weights(case: Case, phase: str) -> Iterator[tuple[int, int, int, torch.Tensor, float]]:
    """Rank, layer, expert, the weight that it is given for a row, and the one that transformers' router has in fp32 for
    this hidden state, of the experts to which the row went."""
    by_rank = _of_phase(case, phase)
    want, went = dict[tuple[int, bytes], Mapping[int, float]](), defaultdict[tuple[int, bytes], set[int]](set)
    for _, layer, expert, row in _received(case, by_rank):
        went[layer, row].add(expert)
    for calls in by_rank.values():
        for (layer, _), tensors in calls.items():
            if "in" in tensors and len(tensors["in"]):
                rows = list(_rows(tensors["in"]))
                taken = [frozenset(went[layer, row]) for row in rows]
                weighed = routed.weighed(expected(case), layer, tensors["in"], taken)
                want |= {(layer, row): right for row, right in zip(rows, weighed, strict=True)}
    for rank, calls in by_rank.items():
        for at, tensors in calls.items():
            received = _received(case, {rank: {at: tensors}})
            for (_, layer, expert, row), weight in zip(received, tensors.get("weighed", ()), strict=False):
                right = want.get((layer, row), {})
                if went[layer, row] == right.keys():
                    yield rank, layer, expert, torch.as_tensor(weight), right[expert]


def _near(case: Case) -> float:
    """The margin that a router's own rounding may turn: of fp32 where the config says so on all ranks, else of bf16."""
    given = [record.value("config")["given"] for record in records(case, "config")]
    exact = bool(given) and all(config.get("moe_router_dtype") in ("fp32", "fp64") for config in given)
    return NEAR_IN_FP32 if exact else NEAR_IN_BF16


def _of_phase(case: Case, phase: str) -> ByRank:
    """The tensors of one phase."""
    by_rank: dict[int, dict[tuple[int, int], dict[str, torch.Tensor]]] = {}
    for rank, tensors in replayed(case).items():
        calls = by_rank.setdefault(rank, {})
        for key, tensor in tensors.items():
            name, *rest = key.split(".")
            if name == phase and len(rest) == 3 and rest[2] in ("in", "sent", "count", "weighed"):
                calls.setdefault((int(rest[0]), int(rest[1])), {})[rest[2]] = tensor
    return by_rank


def _places(case: Case, by_rank: ByRank, phase: str) -> tuple[dict[int, dict[bytes, Place]], list[Finding]]:
    """layer -> row -> the place of the token whose hidden state it is; findings where a layer sees too few tokens."""
    layout, (samples, length) = case.cell.layout, expected(case).tokens_BS.shape
    if phase == SHORTER:
        length = shorter(length, case.cell)
    findings: list[Finding] = []
    place_of: dict[int, dict[bytes, Place]] = defaultdict(dict)
    for rank, calls in by_rank.items():
        local = positions(length, layout, topology.coords(layout, rank), case.claims.cp_cut)
        own = range(samples) if phase in SHARED else topology.replica_rows(case.cell, rank, samples)
        held = [(row, position) for position in local for row in range(case.cell.rows)]  # Megatron's [S, B]
        runs: dict[int, list[torch.Tensor]] = defaultdict(list)
        for (layer, _), tensors in sorted(calls.items()):
            if "in" not in tensors:
                continue
            rows = list(_rows(tensors["in"]))
            first = _number(tensors["in"], runs[layer]) * case.cell.rows % len(own)
            in_order = range(first, first + case.cell.rows)
            if len(rows) != len(held):
                message = f"{phase}: layer {layer} sees {len(rows)} tokens, expected {len(held)}"
                findings.append(finding(case, rank, "replay", message, layer=layer))
                continue
            entering = _computing(case, phase).entering.get(layer) if len(own) > case.cell.rows else None
            sample_of = list(in_order)
            if entering is not None and entering.shape[-1] == tensors["in"].shape[-1]:
                states_SBH = tensors["in"].view(len(local), case.cell.rows, -1)
                own_BSH = entering[list(own)][:, list(local)]
                sample_of = [_sample(states_SBH[:, row], own_BSH, at) for row, at in enumerate(in_order)]
            for row, (number, position) in zip(rows, held, strict=True):
                place_of[layer][row] = (own[sample_of[number]], position)
    return place_of, findings


def _sample(states_SH: torch.Tensor, entering_BSH: torch.Tensor, in_order: int) -> int:
    """Which sample's hidden states these are: the one that is next in order, unless those of another are far nearer.

    A target may take the samples of a step in an order of its own, and their routes with them. Of the positions the
    middle distance counts: a token without a route may be elsewhere.
    """
    apart_B = (entering_BSH.double() - states_SH.double()).norm(dim=-1).median(dim=1).values
    nearest = int(apart_B.argmin())
    return nearest if float(apart_B[nearest]) < FAR_NEARER * float(apart_B[in_order]) else in_order


def _number(rows_TH: torch.Tensor, runs: list[torch.Tensor]) -> int:
    """Which of the layer's microbatches these rows are; `runs` has the first run of each, and gets a new one."""
    for number, earlier_TH in enumerate(runs):
        if rows_TH.shape == earlier_TH.shape and (rows_TH - earlier_TH).norm() <= AGAIN * earlier_TH.norm():
            return number
    runs.append(rows_TH)
    return len(runs) - 1


def _nearest(case: Case, by_rank: ByRank, phase: str) -> tuple[dict[int, dict[bytes, Place]], list[Finding]]:
    """layer -> row -> the place whose hidden state in transformers it is, PADDING for none."""
    tokens, entering = tokens_of(case), _computing(case, phase).entering
    limit = NEAR if case.cell.dtype == "float32" else ROUNDED
    places = [*map(tuple, tokens.nonzero().tolist())]
    place_of: dict[int, dict[bytes, Place]] = defaultdict(dict)
    for calls in by_rank.values():
        for (layer, _), tensors in calls.items():
            if "in" in tensors and len(tensors["in"]):
                want_PH = entering[layer][tokens].double()
                apart_T, nearest_T = torch.cdist(tensors["in"].double(), want_PH).min(1)
                near_T = apart_T <= limit * want_PH.norm(dim=1)[nearest_T]
                for row, near, place in zip(_rows(tensors["in"]), near_T.tolist(), nearest_T.tolist(), strict=True):
                    place_of[layer][row] = places[place] if near else PADDING
    return place_of, []


def route_set(phase: str) -> str:
    """The set of given routes that a phase is under, or `native`."""
    return phase[-1] if phase.endswith(("-a", "-b")) else "native"


def _computing(case: Case, phase: str) -> routed.Routed:
    """What transformers computes in a phase, of R2 when tokens take the experts that they took when recorded."""
    if phase in ("changed-native", "record-changed"):
        return routed.under(expected(case), "native", case.claims.missing_rows, negated=True)
    if phase in ("recompute", "step-changed"):
        source, negated = ("record", True) if phase == "recompute" else ("record-changed", False)
        return oracle_recorded(case, source, negated)
    return oracle(case, route_set(phase))


def _received(case: Case, by_rank: ByRank) -> Iterator[tuple[int, int, int, bytes]]:
    """(rank, layer, global expert, row) of every row that an expert received."""
    for rank, calls in by_rank.items():
        ep = topology.coords(case.cell.layout, rank)["ep"]
        for (layer, _), tensors in calls.items():
            if "sent" not in tensors:
                continue
            counts, rows = tensors["count"].tolist(), _rows(tensors["sent"])
            for local, count in enumerate(counts):
                for _ in range(count):
                    yield rank, layer, ep * len(counts) + local, next(rows)


def _rows(tensor: torch.Tensor) -> Iterator[bytes]:
    """The bytes of each row."""
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    width = len(content) // max(len(tensor), 1)
    return (content[i * width : (i + 1) * width] for i in range(len(tensor)))
