"""Layouts against megatron-core's own functions: groups, coordinates, stages, layout strings, experts, and refusals.

Nothing of megatron-core is replaced. Where a real `initialize_model_parallel` is needed it runs under torch's fake
process group, which forms groups of any world size in one process and moves no data.
"""

import contextlib
import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeref.layout import Layout, LayoutError
from tests.upstream.own_groups import own_groups

pytestmark = pytest.mark.cpu

REFUSALS = (AssertionError, ValueError, RuntimeError, ZeroDivisionError, IndexError, NotImplementedError)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@contextlib.contextmanager
def megatron_world(layout, rank, world=None):
    """megatron-core's real parallel state, as `rank` of the layout's world sees it."""
    dist.init_process_group("fake", rank=rank, world_size=world or layout["world"], store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.get("tp", 1),
            pipeline_model_parallel_size=layout.get("pp", 1),
            virtual_pipeline_model_parallel_size=layout.get("vpp"),
            context_parallel_size=layout.get("cp", 1),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp"),
            order=layout.get("order", "tp-cp-ep-dp-pp"),
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        dist.destroy_process_group()


# Ranks and groups

DENSE_KINDS = {
    "tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "dp-cp": "dp-cp", "mp": "tp-pp", "tp-cp": "tp-cp", "tp-dp": "tp-dp",
    "tp-dp-cp": "tp-dp-cp", "cp-pp": "cp-pp", "tp-cp-dp-pp": "tp-cp-dp-pp",
}  # fmt: skip
EXPERT_KINDS = {
    "ep": "ep", "etp": "tp", "edp": "dp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp", "ep-edp": "ep-dp",
    "etp-edp": "tp-dp", "ep-pp": "ep-pp",
}  # fmt: skip
ORDERS = ("tp-cp-ep-dp-pp", "ep-dp-cp-tp-pp", "cp-tp-dp-ep-pp", "tp-cp-ep-pp-dp", "pp-dp-ep-cp-tp")


def rank_generators(layout):
    """megatron-core's generators with sizes worked out here, not by the layout under test."""
    dp = layout.world // (layout.tp * layout.cp * layout.pp)
    edp = layout.world // (layout.etp * layout.ep * layout.pp)
    make = parallel_state.RankGenerator
    dense = make(tp=layout.tp, ep=1, dp=dp, pp=layout.pp, cp=layout.cp, order=layout.order)
    expert = make(tp=layout.etp, ep=layout.ep, dp=edp, pp=layout.pp, cp=1, order=layout.order)
    return dense, expert


def check_groups(layout, kinds=None):
    for generator, names in zip(rank_generators(layout), (DENSE_KINDS, EXPERT_KINDS), strict=True):
        for kind, token in names.items():
            if kinds is None or kind in kinds:
                expected = tuple(map(tuple, generator.get_ranks(token)))
                assert layout.groups(kind) == expected, (layout.text, kind)
                for group in {expected[0], expected[len(expected) // 2], expected[-1]}:
                    assert layout.group_of(kind, group[-1]) == group, (layout.text, kind)


def test_groups_equal_rank_generator():
    checked = 0
    for tp, pp, cp, ep, etp, order in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 3), (1, 2), ORDERS):
        for replicas in (1, 2) if order == ORDERS[0] else (1,):
            smallest = Layout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp).world
            try:
                layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, world=smallest * replicas, order=order)
            except LayoutError:
                assert not order.endswith("pp")
                continue
            check_groups(layout)
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    "text",
    [
        "tp=8,pp=16,ep=64,etp=1,world=8192",
        "tp=4,pp=8,cp=2,ep=32,etp=2,world=4096",
        "tp=2,pp=4,cp=4,ep=8,etp=4,world=1024,order=tp-ep-dp-cp-pp",
        "tp=6,pp=5,cp=3,ep=15,etp=2,world=2700",
    ],
)
def test_wide_groups_equal_rank_generator(text):
    check_groups(Layout.parse(text), kinds=("tp", "dp-cp", "pp", "ep", "edp", "etp-ep-pp"))


GETTERS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp-cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "mp": parallel_state.get_model_parallel_group,
    "tp-cp": parallel_state.get_tensor_and_context_parallel_group,
    "tp-dp": parallel_state.get_tensor_and_data_parallel_group,
    "tp-dp-cp": lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "edp": parallel_state.get_expert_data_parallel_group,
    "etp-ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "etp-ep-pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
}


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 8, "pp": 16, "ep": 64, "etp": 1, "world": 8192}, (4777, 8191)),
        ({"tp": 4, "pp": 4, "cp": 2, "ep": 16, "etp": 2, "world": 1024}, (1, 600, 1023)),
        ({"tp": 2, "pp": 3, "cp": 2, "ep": 6, "etp": 1, "world": 72}, (0, 17, 40, 71)),
        ({"tp": 2, "pp": 2, "ep": 4, "world": 16}, (3, 12)),
        ({"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1, "world": 16, "order": "ep-tp-dp-cp-pp"}, (5, 10)),
        ({"tp": 2, "pp": 2, "ep": 2, "etp": 1, "world": 8, "order": "tp-cp-ep-pp-dp"}, (2, 5)),
    ],
    ids=str,
)
def test_initialize_model_parallel_agrees(sizes, ranks):
    layout = Layout(**sizes)
    for rank in ranks:
        with own_groups(rank), megatron_world(sizes, rank):
            for kind, group in GETTERS.items():
                assert layout.group_of(kind, rank) == tuple(dist.get_process_group_ranks(group())), (rank, kind)
            at = layout.coords(rank)
            assert at.tp == parallel_state.get_tensor_model_parallel_rank()
            assert at.pp == parallel_state.get_pipeline_model_parallel_rank()
            assert at.cp == parallel_state.get_context_parallel_rank()
            assert at.dp == parallel_state.get_data_parallel_rank()
            assert at.ep == parallel_state.get_expert_model_parallel_rank()
            assert at.etp == parallel_state.get_expert_tensor_parallel_rank()
            assert at.edp == parallel_state.get_expert_data_parallel_rank()
            assert layout.dp == parallel_state.get_data_parallel_world_size()
            assert layout.edp == parallel_state.get_expert_data_parallel_world_size()


def test_grids_are_refused_where_megatron_refuses_them():
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-pp-ep-cp-dp", "tp-dp-pp", "tp-ep-dp")
    verdicts = {True: 0, False: 0}
    for order, pp, tp, cp, ep, etp, world in itertools.product(orders, (1, 2), (1, 2), (1, 2), (1, 3), (1, 2), (4, 12)):
        sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "order": order}
        try:
            with megatron_world(sizes, 0, world):
                theirs = True
        except REFUSALS:
            theirs = False
        try:
            ours = bool(Layout(**sizes, world=world))
        except LayoutError:
            ours = False
        assert ours == theirs, (sizes, world)
        verdicts[theirs] += 1
    assert min(verdicts.values()) > 50


# Stages


def real_config(num_layers, pp, vpp=1, **options):
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        **options,
    )


def real_stages(num_layers, pp, vpp, *, first, last, embedding, loss):
    """(offset, count) of every stage by megatron-core, or None where it refuses or crashes."""
    try:
        config = real_config(
            num_layers,
            pp,
            vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
        )
        return {
            (rank, stage): (
                get_transformer_layer_offset(config, stage if vpp > 1 else None, rank),
                get_num_layers_to_build(config, stage if vpp > 1 else None, rank),
            )
            for rank in range(pp)
            for stage in range(vpp)
        }
    except REFUSALS:
        return None


def our_stages(num_layers, pp, vpp, **options):
    try:
        layout = Layout(pp=pp, vpp=vpp, **options)
        stages = layout.stages(num_layers)
    except LayoutError:
        return None
    for stage, layers in stages.layers.items():
        assert list(layers) == list(range(stages.offset(*stage), stages.offset(*stage) + len(layers)))
    return {stage: (stages.offset(*stage), len(layers)) for stage, layers in stages.layers.items()}


def is_exact_cover(stages, num_layers):
    held = sorted(layer for offset, count in stages.values() for layer in range(offset, offset + count))
    return held == list(range(num_layers))


def compare_splits(combinations):
    """Counts of (accepted, refused by both, refused by us alone because the stages are no exact cover)."""
    accepted = refused = stricter = 0
    for num_layers, pp, vpp, first, last, embedding, loss in combinations:
        if vpp > 1 and pp == 1:  # refused by initialize_model_parallel: test_interleaving_needs_a_pipeline
            continue
        options = {"first": first, "last": last, "embedding": embedding, "loss": loss}
        theirs = real_stages(num_layers, pp, vpp, **options)
        ours = our_stages(num_layers, pp, vpp, **options)
        case = (num_layers, pp, vpp, options, ours, theirs)
        if theirs is None:
            assert ours is None, case
            refused += 1
        elif is_exact_cover(theirs, num_layers):
            assert ours == theirs, case
            accepted += 1
        else:
            assert ours is None, case
            assert (first or 0) + (last or 0) > num_layers or (pp == 1 and first and last), case
            stricter += 1
    return accepted, refused, stricter


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "most"),
    [
        (range(1, 13), (1, 2, 3, 4, 5), (1, 2, 3), 8),
        ((27, 46, 48, 61, 62, 94), (2, 4, 8, 16), (1, 2, 4), 13),
    ],
    ids=["small", "large"],
)
def test_uneven_splits(num_layers, pp, vpp, most):
    ends = (None, *range(1, most + 1))
    counts = compare_splits((*sizes, False, False) for sizes in itertools.product(num_layers, pp, vpp, ends, ends))
    assert counts[0] > 200, counts
    assert counts[1] > 200, counts
    assert counts[2] > 200 or max(num_layers) > 12, counts


def test_counted_and_conflicting_splits():
    num_layers, pp, vpp = (*range(1, 31), 46, 48, 61, 62, 94), (1, 2, 3, 4, 8), (1, 2, 3, 4)
    options = (None, 2), (None, 3), (False, True), (False, True)
    accepted, refused, stricter = compare_splits(itertools.product(num_layers, pp, vpp, *options))
    assert accepted > 500
    assert refused > 500
    assert stricter > 0


def test_interleaving_needs_a_pipeline():
    with pytest.raises(RuntimeError, match="interleaved"), megatron_world({"pp": 1, "vpp": 2}, 0, 2):
        pass
    with pytest.raises(LayoutError, match="pp > 1"):
        Layout(pp=1, vpp=2)


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (4, None), (2, 2), (4, 3)])
def test_embedding_and_head_stages(pp, vpp):
    layout = Layout(pp=pp, vpp=vpp or 1)
    for rank, stage in itertools.product(range(pp), range(vpp or 1)):
        with megatron_world({"pp": pp, "vpp": vpp}, rank, pp):
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        assert layout.has_embedding(rank, stage) == first
        assert layout.has_head(rank, stage) == last
        if last:
            assert layout.stages(12, mtp=1).mtp == (rank, stage)


# Layout strings


def check_pattern(pattern, pp, num_layers=None, mtp=None, vpp=1):
    """Same verdict and same stages; returns whether megatron-core accepts. Counts default to those of the string."""
    by_string_alone = num_layers is None and mtp is None and vpp == 1
    letters = ""
    with contextlib.suppress(*REFUSALS):
        letters = "".join(
            layer.name[0] for stage in PipelineParallelLayerLayout.parse_str_to_list(pattern) for layer in stage
        )
    num_layers = letters.count("d") if num_layers is None else num_layers
    mtp = letters.count("m") or None if mtp is None else mtp
    try:
        if num_layers:
            config = real_config(num_layers, pp, vpp, mtp_num_layers=mtp, pipeline_model_parallel_layout=pattern)
            theirs = config.pipeline_model_parallel_layout
        else:  # TransformerConfig cannot be made with no layers, for reasons of its own
            theirs = PipelineParallelLayerLayout(pattern, pp)
            theirs.validate_layer_layout(num_layers, mtp)
        # initialize_model_parallel refuses virtual stages at pp=1: test_interleaving_needs_a_pipeline.
        theirs = None if pp == 1 and theirs.virtual_pipeline_model_parallel_size > 1 else theirs
    except REFUSALS:
        theirs = None
    layout = None
    try:
        layout = Layout(pp=pp, vpp=vpp, pipeline_layout=pattern)
        ours = layout.stages(num_layers, mtp=mtp) if num_layers else None
    except LayoutError:
        ours = None
    case = (pattern, pp, num_layers, mtp, vpp)
    if theirs is None:
        assert (layout if by_string_alone else ours) is None, case
        return False
    assert layout is not None, case
    if num_layers:  # a model without decoder layers is refused by stages(), never by the string
        assert ours is not None, case
        compare_pattern(theirs, layout, ours, case)
    return True


def compare_pattern(real, layout, stages, case):
    vpp = real.virtual_pipeline_model_parallel_size
    assert layout.vpp == vpp, case
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    try:
        mtp = {}
        for stage in itertools.product(range(layout.pp), range(layout.vpp)):
            where = {"vp_stage": stage[1], "pp_rank": stage[0]}
            assert list(stages.layers[stage]) == real.get_layer_id_list(LayerType.decoder, **where), case
            assert stages.offset(*stage) == real.get_layer_offset(LayerType.decoder, **where), case
            if real.get_num_layers_to_build(LayerType.mtp, **where):
                mtp[stage] = real.get_num_layers_to_build(LayerType.mtp, **where)
        assert ({stages.mtp: stages.mtp_layers} if stages.mtp else {}) == mtp, case
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


@pytest.mark.parametrize(
    ("pattern", "pp"),
    [
        ("EtttL", 1), ("Et|tt|tt|ttL", 2), ("Et|tt|tt|ttL", 4), ("Ettt|(tt|)*29,m|L", 16), ("Ett,(tt|)*3ttL", 4),
        ("E|(t|)*61,mL", 7), ("Et*3|(tt|)*5,ttL", 7), ("E|t*10,2|L", 3), ("|Et|t|L", 2), ("Et|tL||", 2),
        ("Et|tt|t|mmL", 2),
        ("E(t)*2*3|L", 2), ("Et*(1)*2|L", 2), ("E(|)*3L", 4), ("Et|*2L", 3), ("Et*0|tL", 2), ("E(t*2|)*2L", 3),
        ("E\tt|L", 2), (" Et|tL", 2), ("Et|tL\n", 2), ("E((t)*2|)*2L", 3), ("E()*3t|L", 2), ("Et*|L", 2), ("et|tl", 2),
        ("Et|t|tL", 2), ("Et|tm|tL", 3), ("Et|m|t|L", 2), ("Et|t|m|mL", 4), ("Em|tL", 2), ("Etm|L", 2), ("", 1),
        ("|", 2),
        ("E|L", 2), ("Et|t|mm|L", 2), ("Et|m|L|", 2), ("Et*٣|L", 2),
    ],
)  # fmt: skip
def test_layout_strings(pattern, pp):
    check_pattern(pattern, pp)
    for num_layers, mtp, vpp in itertools.product((2, 3, 5, 7), (None, 0, 1, 2), (1, 2, 3)):
        check_pattern(pattern, pp, num_layers, mtp, vpp)


def test_every_short_layout_string():
    accepted = 0
    for length in range(1, 6):
        for inner in itertools.product("tm|", repeat=length):
            for pattern in ("E" + "".join(inner) + "L", "".join(inner) + "L", "|E" + "".join(inner) + "L|"):
                accepted += sum(check_pattern(pattern, pp) for pp in (1, 2, 3))
    assert accepted > 100


def test_random_layout_strings():
    accepted = 0

    @given(st.text(alphabet="EtttmL||()*23,", max_size=14), st.integers(1, 4))
    @settings(max_examples=1000, deadline=None, derandomize=True, database=None)
    def arbitrary(inner, pp):
        nonlocal accepted
        check_pattern(inner, pp)
        accepted += check_pattern(f"Et{inner}tL", pp)

    piece = st.sampled_from(
        ["", "t", "t,", "t*2", "(t)*3", "|", "|*2", "t|", "(t|)*2", "(t*2|t)*2", "(|tt,)*3", "(t)*2*3"]
    )

    @given(st.lists(piece, max_size=6), st.sampled_from(["", "", "m", "|m", "m|", "m*2"]), st.integers(1, 4))
    @settings(max_examples=1000, deadline=None, derandomize=True, database=None)
    def well_formed(pieces, mtp, pp):
        nonlocal accepted
        accepted += check_pattern("E" + "".join(pieces) + mtp + "L", pp)

    arbitrary()
    well_formed()
    assert accepted > 250


# Experts


class Experts(BaseMoELayer):
    """megatron-core's base layer, which is abstract only in its forward."""

    def forward(self, hidden_states):
        raise NotImplementedError("built for its expert indices only")


@pytest.mark.parametrize("num_experts", [4, 12, 13, 256])
def test_experts_of_a_rank(num_experts):
    sizes = {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "world": 16}
    layout = Layout(**sizes)
    for rank in range(0, 16, 3):
        with megatron_world(sizes, rank):
            config = real_config(4, 2, num_moe_experts=num_experts, expert_model_parallel_size=4, add_bias_linear=False)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            if num_experts % 4:
                with pytest.raises(AssertionError):
                    Experts(config, pg_collection=groups)
                with pytest.raises(LayoutError, match=f"num_experts={num_experts}"):
                    layout.experts(layout.coords(rank).ep, num_experts)
            else:
                expected = Experts(config, pg_collection=groups).local_expert_indices
                assert list(layout.experts(layout.coords(rank).ep, num_experts)) == expected
