"""Padding plans against their own promises, counted out row by row, and against the numbers of the systems by name."""

from __future__ import annotations

import collections
import itertools
import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.dispatcher import Choice
from moeref.dispatcher.compat import SYSTEMS, Multiples, Run, multiples, pack
from moeref.dispatcher.padding import RECIPES, PaddingError, Plan, pad_experts, plan
from moeref.layout import Layout

pytestmark = pytest.mark.cpu
HYBRID = Choice("flex-hybridep")


@st.composite
def plans(draw: st.DrawFn, **given_: object) -> Plan:
    tp, cp = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.sampled_from((1, 2, 3, 4)))
    fields = {
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "recipe": draw(st.sampled_from((None, *RECIPES))),
        "quantised_at": draw(st.sampled_from(("total", "cp", "rank"))),
        "zigzag": draw(st.booleans()),
        "fused_attention": draw(st.booleans()),
        "dispatcher": draw(st.sampled_from(list(Choice))),
        "fixed": draw(st.none() | st.integers(1, 5000)),
    }
    return plan(Layout(tp=tp, cp=cp), **{**fields, **given_})


def keeps(plan: Plan, total: int) -> bool:
    """Every factor counted at its level: rows of each rank, of each cp rank, of the whole; the split leaves nothing."""
    ranks, per_rank = plan.cp * plan.tp, total // (plan.cp * plan.tp)
    rows = {"sample": total, "total": total, "cp": per_rank * plan.tp, "rank": per_rank, "group": per_rank}
    return per_rank * ranks == total and all(rows[factor.level] % factor.multiple == 0 for factor in plan.factors)


@given(plans(fixed=None), st.integers(0, 9000))
def test_padded_is_the_least_length_that_keeps_every_factor(plan: Plan, length: int) -> None:
    assert plan.padded(length) == next(n for n in itertools.count(length) if keeps(plan, n))


@given(plans(), st.integers(0, 5000), st.integers(0, 5000))
def test_padded_is_monotone_idempotent_and_long_enough(plan: Plan, a: int, b: int) -> None:
    if plan.fixed is not None:
        a, b = min(a, plan.fixed), min(b, plan.fixed)
    low, high = sorted((a, b))
    assert plan.padded(low) <= plan.padded(high)
    assert plan.padded(low) >= low
    assert plan.padded(plan.padded(low)) == plan.padded(low)
    assert keeps(plan, plan.padded(low))


@given(plans(fixed=None), st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_pack_keeps_samples_and_the_whole(plan: Plan, lengths: list[int]) -> None:
    packed = plan.pack(lengths)
    chunk = next((f.multiple for f in plan.factors if f.level == "sample"), 1)
    assert all(
        n <= padded < n + chunk and padded % chunk == 0 for n, padded in zip(lengths, packed.samples, strict=True)
    )
    assert sum(packed.samples) <= packed.total < sum(packed.samples) + plan.multiple
    assert keeps(plan, packed.total)
    assert packed.rows * plan.cp * plan.tp == packed.total


@given(plans(), st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_a_group_is_equal_where_it_must_be(plan: Plan, lengths: list[int]) -> None:
    if plan.fixed is not None:
        lengths = [min(n, plan.fixed) for n in lengths]
    found = plan.group(lengths)
    assert all(padded >= n and keeps(plan, padded) for n, padded in zip(lengths, found, strict=True))
    if plan.grouped:
        assert set(found) == {plan.padded(max(lengths))}
    else:
        assert found == tuple(map(plan.padded, lengths))


def test_hybridep_rows_are_the_group_maximum_in_chunks_of_64() -> None:
    # What _HybridEPManager.setup_metadata computes with moe_hybridep_pad_uneven_dispatch_inputs: ⌈max/64⌉·64 per rank.
    hybrid = plan(Layout(ep=4), dispatcher="flex-hybridep")
    assert hybrid.group((1, 65, 128, 130)) == (192,) * 4
    assert plan(Layout(ep=4), dispatcher="flex-deepep").group((1, 65)) == (1, 65)
    assert plan(Layout(ep=4), dispatcher="allgather").group((1, 65)) == (65, 65)


@pytest.mark.parametrize(
    ("fields", "length", "expected", "bug"),
    [
        ({"layout": Layout(tp=2, cp=2), "recipe": "delayed"}, 20, 64, "P3: a local slab of 5 rows"),
        ({"layout": Layout(tp=2), "recipe": "delayed"}, 16, 32, "P4: 8 rows a rank"),
        ({"layout": Layout(tp=2), "recipe": "mxfp8"}, 33, 64, "P5: mxfp8 with 16 rows"),
        ({"layout": Layout(tp=2), "recipe": "blockwise"}, 130, 256, "P6: blockwise without 128"),
        ({"layout": Layout(), "recipe": None}, 7, 7, "P8: nothing to pad to is not a number to compare with"),
        ({"layout": Layout(tp=2, cp=2)}, 3, 4, "P9: shorter than TP·2CP"),
        ({"layout": Layout(tp=4, cp=2), "dispatcher": "flex-hybridep", "fixed": 1000}, 10, 1024, "P13: 1000 / (4·2·2)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bugs_of_the_field(fields: dict[str, object], length: int, expected: int, bug: str) -> None:
    assert plan(**fields).padded(length) == expected, bug


def test_samples_of_a_packed_sequence_are_cut_evenly() -> None:
    assert plan(Layout(tp=2, cp=2)).pack((3, 5)).samples == (4, 8)
    assert plan(Layout(tp=2, cp=2), zigzag=False).pack((3, 5)).samples == (4, 6)
    assert plan(Layout(tp=2)).pack((3, 4)).samples == (3, 4)
    assert plan(Layout(tp=2)).pack((3, 4)).total == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recipe": "int4"}, "int4"),
        ({"sequence_parallel": True}, "tp > 1"),
        ({"quantised_at": "sample"}, "sample"),
        ({"fixed": 0}, "fixed=0"),
        ({"dispatcher": "pigeon"}, "pigeon"),
        ({"dispatcher": "flex-hybridep", "equal_rows": False}, "equal pieces"),
        ({"dispatcher": "allgather", "equal_rows": False}, "equal pieces"),
    ],
)
def test_plans_that_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PaddingError, match=words):
        plan(Layout(), **fields)


def test_lengths_that_cannot_be() -> None:
    for call in (
        lambda: plan(Layout()).padded(-1),
        lambda: plan(Layout()).padded(True),
        lambda: plan(Layout()).pack((1, -1)),
        lambda: plan(Layout(), fixed=8).padded(9),
        lambda: plan(Layout()).group(()),
    ):
        with pytest.raises(PaddingError):
            call()


OF = st.integers(1, 64).flatmap(lambda experts: st.tuples(st.integers(1, experts), st.just(experts)))


@given(OF, st.integers(0, 99), st.integers(1, 99))
def test_pad_rows_are_distinct_and_spread(of: tuple[int, int], first: int, rows: int) -> None:
    topk, experts = of
    chosen = [pad_experts(row, topk, experts) for row in range(first, first + rows)]
    assert all(len(set(row)) == topk and set(row) <= set(range(experts)) for row in chosen)
    counts = collections.Counter(dict.fromkeys(range(experts), 0))
    counts.update(itertools.chain.from_iterable(chosen))
    assert sum(counts.values()) == rows * topk
    assert max(counts.values()) - min(counts.values()) <= 1


def test_pad_rows_that_cannot_be() -> None:
    for row, topk, experts in ((0, 3, 2), (0, 0, 2), (-1, 1, 2)):
        with pytest.raises(PaddingError):
            pad_experts(row, topk, experts)


#: fp8 (delayed scaling), sequence parallelism on: (tp, cp) -> what each system's own code returns. Sample and total.
DISAGREEMENT = {
    (8, 1): {"ms-swift": (1, 128), "skyrl": (16, 1), "verl": (16, 1024), "nemo-rl": (8, 128)},
    (2, 2): {"ms-swift": (4, 64), "skyrl": (32, 1), "verl": (16, 1024), "nemo-rl": (8, 128)},
    (4, 2): {"ms-swift": (4, 128), "skyrl": (32, 1), "verl": (16, 2048), "nemo-rl": (16, 256)},
}


@pytest.mark.parametrize("tp_cp", DISAGREEMENT)
@pytest.mark.parametrize("system", ["ms-swift", "skyrl", "verl", "nemo-rl"])
def test_systems_give_their_numbers(system: str, tp_cp: tuple[int, int]) -> None:
    found = multiples(system, Run(tp=tp_cp[0], cp=tp_cp[1], fp8="hybrid"))
    assert (found.sample, found.total) == DISAGREEMENT[tp_cp][system]


@pytest.mark.parametrize(
    ("system", "run", "total"),
    [
        ("ms-swift", Run(tp=2, fp8="hybrid", recipe="mxfp8"), 64),
        ("ms-swift", Run(tp=2, fp8="hybrid", recipe="blockwise"), 256),
        ("ms-swift", Run(tp=2, fp4="e2m1"), 32),
        ("ms-swift", Run(tp=2, cp=2, fused_attention=True), 256),
        ("ms-swift", Run(tp=2, sequence_parallel=False), 1),
        ("ms-swift#8393", Run(tp=2, fp8="hybrid"), 16),
        ("ms-swift#8393", Run(tp=4, cp=2, fp8="hybrid", dispatcher=HYBRID, max_length=1000), 1000),
        ("nemo-rl", Run(dispatcher=HYBRID), 128),
        ("nemo-rl", Run(tp=2, cp=2, dispatcher=HYBRID, fp8="hybrid", recipe="mxfp8"), 1024),
        ("verl", Run(tp=2, cp=2), 1),
    ],
)
def test_systems_give_their_numbers_elsewhere(system: str, run: Run, total: int) -> None:
    assert multiples(system, run).total == total


def test_systems_are_documented_as_computed() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "padding.md"
    names = [*SYSTEMS, "moeref"]
    lines = [f"| TP, CP | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for tp, cp in DISAGREEMENT:
        run, own = Run(tp=tp, cp=cp, fp8="hybrid"), plan(Layout(tp=tp, cp=cp), recipe="delayed")
        cells = [(multiples(name, run), pack(name, run, (1000, 30)).rows) for name in SYSTEMS]
        cells.append((Multiples(own.sample, own.multiple), own.pack((1000, 30)).rows))
        shown = (f"{m.sample} / {m.total}: {rows if rows % 16 == 0 else f'**{rows}**'}" for m, rows in cells)
        lines.append(f"| {tp}, {cp} | {' | '.join(shown)} |")
    assert "\n".join(lines) in page.read_text(encoding="utf-8")


#: Published settings: where their facts are in tests/upstream/published, the file, and what decides the padding.
PUBLISHED = (
    ("verl", "lora/run_qwen3_30b_a3b_megatron.sh", Run(tp=2, cp=2)),
    ("verl", "grpo_30b_a3b_base_math_megatron_96_32.sh", Run(tp=2, cp=2)),
    ("verl", "run_moonlight_16b_a3b_megatron.sh", Run(tp=4)),
    ("verl", "run_deepseek_v3_671b_megatron.sh", Run(tp=8)),
    ("ms-swift", "moe_colocate_full.sh", Run(tp=4)),
    ("ms-swift", "dpo/moe.sh", Run(tp=4)),
    ("nemo-rl", "grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3.yaml", Run(tp=4, cp=2)),
    ("nemo-rl", "dapo-deepseek-v3-64n8g.v2.yaml", Run(tp=8, cp=4)),
    ("nemo-rl", "grpo-moonlight-16ba3b-4n8g-megatron.yaml", Run()),
    ("skyrl", "run_megatron_qwen3-30b-a3b.sh", Run(tp=4)),
)
#: The same with what no published file of these asks for.
ASKED = (
    ("verl", "blockwise", Run(tp=2, cp=2, fp8="hybrid", recipe="blockwise")),
    ("nemo-rl", "blockwise", Run(tp=2, cp=2, fp8="hybrid", recipe="blockwise")),
    ("ms-swift", "blockwise", Run(tp=2, cp=2, fp8="hybrid", recipe="blockwise")),
    ("ms-swift", "fused attention", Run(tp=4, cp=2, fused_attention=True)),
    ("nemo-rl", "HybridEP", Run(tp=2, cp=2, dispatcher=HYBRID)),
)


def _own(run: Run) -> Plan:
    layout, recipe = Layout(tp=run.tp, cp=run.cp), run.recipe if run.fp8 else None
    return plan(layout, recipe=recipe, fused_attention=run.fused_attention, dispatcher=run.dispatcher)


def test_published_settings_are_padded_as_the_page_says() -> None:
    """moeref's packed sequence is that of the framework, or one that divides it: the page says why less is right."""
    lines = []
    for system, name, run in (*PUBLISHED, *ASKED):
        theirs, own = multiples(system, run), _own(run)
        assert math.lcm(theirs.sample, theirs.total) % own.multiple == 0
        shown = f"{theirs.sample} / {theirs.total} | {own.sample} / {own.multiple}"
        lines.append(f"| {system} | `{name}` | {run.tp}, {run.cp} | {shown} |")
    page = Path(__file__).parents[2] / "docs" / "explanation" / "padding.md"
    text = page.read_text(encoding="utf-8")
    assert [line for line in lines if line not in text] == []


def test_published_settings_are_those_of_the_files() -> None:
    folder = Path(__file__).parents[1] / "upstream" / "published"
    sizes = (("tp", "tensor_model_parallel_size="), ("cp", "context_parallel_size="))
    for system, name, run in PUBLISHED:
        runs = tomllib.loads((folder / f"{system}.toml").read_text(encoding="utf-8"))["run"]
        (said,) = {entry["arguments"] for entry in runs if entry["file"].endswith(name)}
        for axis, option in sizes:
            found = {int(size) for size in re.findall(rf"(?<!rollout\.){option}(\d+)", said)}
            assert getattr(run, axis) in (found or {1}), (name, axis, found)
        assert run.fused_attention == ("attention_backend=fused" in said)


def test_systems_by_name_only() -> None:
    assert {type(multiples(name, Run())) for name in SYSTEMS} == {Multiples}
    with pytest.raises(PaddingError, match=r"nemo.*ms-swift"):
        multiples("nemo", Run())


def test_a_system_packs_a_batch() -> None:
    packed = pack("verl", Run(tp=2, cp=2, fp8="hybrid"), (100, 30))
    assert (packed.samples, packed.total, packed.rows) == ((112, 32), 1024, 256)
    # 8 rows a rank: what moeref's own plan would not give.
    assert pack("ms-swift#8393", Run(tp=2, fp8="hybrid"), (10,)).rows == 8
    assert plan(Layout(tp=2), recipe="delayed").pack((10,)).rows == 16
