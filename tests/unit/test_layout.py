"""Layouts on their own: hand-computed places and layers, round trips, and what the errors say."""

import dataclasses
import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeref.layout import Layout, LayoutError

pytestmark = pytest.mark.cpu


# Text


def test_text_form_is_canonical_and_readable():
    text = "tp=2,pp=2,vpp=2,ep=2,etp=1,cp=1,world=8,pipeline_layout=Et|tt|tt|ttL"
    assert Layout.parse(text).text == text
    assert Layout.parse("pp=2,tp=2").text == "tp=2,pp=2,vpp=1,ep=1,etp=2,cp=1,world=4"
    assert Layout.parse("").text == Layout().text == "tp=1,pp=1,vpp=1,ep=1,etp=1,cp=1,world=1"
    assert Layout.parse(" tp = 2 , embedding=1,loss=0, pp=2 ") == Layout(tp=2, pp=2, embedding=True)
    assert Layout.parse("pp=2,pipeline_layout=E,t,t|,L").pipeline_layout == "E,t,t|,L"


@st.composite
def layouts(draw):
    size = st.sampled_from([1, 2, 3, 4, 8])
    tp, pp, ep, cp, etp = draw(size), draw(size), draw(size), draw(size), draw(st.none() | size)
    smallest = math.lcm(tp * pp * cp, (etp or tp) * ep * pp)
    made = {"tp": tp, "pp": pp, "ep": ep, "cp": cp, "etp": etp, "world": draw(st.sampled_from([0, 1, 3])) * smallest}
    made["order"] = draw(st.sampled_from(["tp-cp-ep-dp-pp", "ep-tp-dp-cp-pp", "dp-cp-tp-ep-pp"]))
    how = draw(st.sampled_from(["even", "ends", "counted", "pattern"]))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    if how == "pattern":
        stages = [draw(st.sampled_from(["", "t", "t,t", "t*3", "(tt)*2"])) for _ in range(pp * vpp)]
        made["pipeline_layout"] = "E" + "|".join(stages) + "L"
    else:
        made["vpp"] = vpp
    if how == "ends":
        made |= {"first": draw(st.none() | st.integers(1, 9)), "last": draw(st.none() | st.integers(1, 9))}
    if how == "counted":
        made |= {"embedding": draw(st.booleans()), "loss": draw(st.booleans())}
    return Layout(**made)


@given(layouts())
@settings(deadline=None)
def test_text_round_trip(layout):
    assert Layout.parse(layout.text) == layout
    assert Layout.parse(layout.text).text == layout.text
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(layouts(), st.data())
@settings(deadline=None)
def test_rank_round_trip(layout, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    at = layout.coords(rank)
    assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
    assert layout.expert_rank_of(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpp=2", r"unknown key 'tpp'; did you mean '(tp|vpp|pp)'"),
        ("emb=1,tp=2", "unknown key 'emb'; (did you mean|known keys)"),
        ("frist=1", "did you mean 'first'"),
        ("zz=1", "unknown key 'zz'; known keys: tp, pp, vpp, ep, "),
        ("world_size=8", "did you mean 'world'"),
        ("tp", "'tp' has no value"),
        ("tp=", "'tp' has no value"),
        ("tp=2,,pp=2", "unknown key ''"),
        ("tp=2,tp=2", "'tp' is given twice"),
        ("tp=two", "tp=two must be a whole number"),
        ("tp=-1", "tp=-1 must be a whole number"),
        ("tp=2.0", "must be a whole number"),
        ("tp=0", "tp=0 must be an integer of at least 1"),
        ("pp=2,first=0", "first=0 must be an integer of at least 1"),
        ("embedding=yes", "^layout text 'embedding=yes': embedding=yes must be 0 or 1"),
        ("pipeline_layout=EtL ,tp=2", "' ' is not a layer"),
        ("pipeline_layout=Et\nL", "is not a layer"),
    ],
)
def test_text_errors(text, says):
    with pytest.raises(LayoutError, match=says):
        Layout.parse(text)


@pytest.mark.parametrize(
    "arguments",
    [{"tp": True}, {"tp": 2.0}, {"ep": "2"}, {"etp": 0}, {"world": -8}, {"last": False}, {"embedding": 1}],
    ids=str,
)
def test_wrong_types_and_sizes_are_refused(arguments):
    with pytest.raises(LayoutError, match=f"{next(iter(arguments))}=.* must be"):
        Layout(**arguments)


# Ranks


def test_defaults_are_filled_in():
    assert Layout(tp=4).etp == 4
    assert Layout.etp is None  # what dataclasses and signatures read as the default
    assert Layout(tp=4, etp=None) == Layout(tp=4, etp=4)
    assert Layout(tp=2, ep=4, etp=1).world == 4
    assert Layout(tp=2, cp=3, ep=4, etp=1).world == 12  # neither 6 nor 4 ranks fit both grids
    layout = Layout(tp=2, pp=2, ep=4, etp=1, world=16)
    assert (layout.dp, layout.edp) == (4, 2)
    assert dataclasses.replace(layout, ep=2).edp == 4


def test_ranks_by_hand():
    """8 ranks, tp2 pp2 ep2 etp1: the expert grid splits what the dense grid calls tp."""
    layout = Layout(tp=2, pp=2, ep=2, etp=1, world=8)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("mp") == layout.groups("tp-pp") == layout.groups("pp-tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("edp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("etp") == tuple((rank,) for rank in range(8))
    assert layout.coords(5).text == "tp1 pp1 ep1 etp0 dp0"
    assert layout.coords(7).text == "tp1 pp1 ep1 etp0 dp1 edp1"
    assert Layout(tp=2, cp=2).coords(2).text == "tp0 pp0 ep0 etp0 dp0 cp1 edp1"
    assert layout.rank_of(tp=1, pp=1) == 5
    assert layout.expert_rank_of(etp=0, ep=1, edp=1, pp=0) == 3
    assert layout.expert_rank_of(etp=0, ep=1, pp=1) == 5


@pytest.mark.parametrize("kind", ["tp", "cp", "dp", "pp", "mp", "dp-cp", "tp-cp", "ep", "etp", "edp", "etp-ep-pp"])
def test_groups_partition_the_world(kind):
    layout = Layout(tp=2, pp=3, cp=2, ep=4, etp=1, world=48)
    groups = layout.groups(kind)
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    for group in groups:
        assert all(layout.group_of(kind, rank) == group for rank in group)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tp": 2, "pp": 4, "world": 12}, r"world=12 is not divisible by tp·cp·pp = 2·1·4 = 8 \(dense grid\)"),
        ({"tp": 2, "ep": 4, "etp": 1, "world": 6}, r"^world=6 .* etp·ep·pp = 1·4·1 = 4 \(expert grid\).*multiple of 4"),
        ({"tp": 4, "ep": 3, "etp": 1, "world": 5}, "= 4 .dense grid.; .* = 3 .expert grid.. Use a multiple of 12"),
        ({"order": "tp-cp-ep-dp-xp"}, r"unknown axis 'xp' \(axes: tp, cp, ep, dp, pp\)$"),
        ({"order": "tp-tp-cp-ep-dp-pp"}, "'tp' 2 times"),
        ({"order": "tp-dp-pp", "cp": 2}, "leaves out 'cp', but cp=2"),
        ({"order": "tp-dp-pp", "ep": 2}, "leaves out 'ep', but ep=2"),
        ({"order": "tp-cp-ep-pp-dp", "tp": 2, "ep": 2, "etp": 2, "pp": 2}, "put pp last"),
    ],
)
def test_impossible_grids(arguments, says):
    with pytest.raises(LayoutError, match=says):
        Layout(**arguments)


def test_an_axis_of_size_one_may_be_left_out_of_the_order():
    layout = Layout(tp=2, pp=2, order="tp-dp-pp", world=8)
    assert layout.groups("cp") == layout.groups("ep") == tuple((rank,) for rank in range(8))
    assert layout.groups("tp") == layout.groups("etp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.rank_of(tp=1, dp=1, pp=1) == 7


def test_all_ranks_are_one_group():
    layout = Layout(tp=2, pp=2, ep=2, etp=1)
    assert layout.groups("tp-cp-dp-pp") == layout.groups("etp-ep-edp-pp") == ((0, 1, 2, 3),)


def test_pp_may_come_earlier_where_both_grids_agree():
    """Dense tp2·pp2·dp2, expert ep2·pp2·edp2. In the refused one both strides are 1, but dp is 1 and edp is 2."""
    layout = Layout(tp=2, pp=2, ep=2, etp=1, world=8, order="tp-cp-ep-pp-dp")
    assert layout.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    with pytest.raises(LayoutError, match=r"dp=1, stride 1.*edp=2, stride 1"):
        Layout(tp=2, pp=2, etp=1, order="pp-dp-ep-cp-tp")


def test_questions_about_nothing_are_refused():
    layout = Layout(tp=2, pp=2, ep=2)
    for ask, says in [
        (lambda: layout.coords(8), r"rank 8 is outside the world of 8 ranks \(0 to 7\)"),
        (lambda: layout.group_of("tp", -1), "rank -1 is outside"),
        (lambda: layout.rank_of(tp=2, pp=0), "tp=2 is outside this layout's tp size 2"),
        (lambda: layout.expert_rank_of(etp=0, ep=-1, pp=0), "ep=-1 is outside"),
        (
            lambda: layout.groups("tp-ep"),
            "no set of axes of one grid; the dense has tp, cp, dp, pp, the expert etp, ep, edp, pp; write etp",
        ),
        (lambda: layout.groups("tp-tp"), "names an axis twice"),
        (lambda: layout.groups("etp-dp"), "write etp and edp"),
        (lambda: layout.has_head(2), "no stage .pp 2, vp 0."),
        (lambda: layout.has_head(1, 1), "no stage .pp 1, vp 1."),
        (lambda: layout.experts(2, 8), r"ep rank 2 is outside ep=2 \(0 to 1\)"),
        (lambda: layout.experts(0, 7), "num_experts=7 is not divisible by ep=2"),
        (lambda: layout.experts(0, 0), "num_experts=0 must be"),
        (lambda: layout.stages(0), "num_layers=0 must be"),
        (lambda: layout.stages(4).owner(4), "layers 0 to 3"),
        (lambda: layout.stages(4).offset(0, 1), "vp from 0 to 0"),
        (lambda: layout.stages(4).offset(2), "no stage .pp 2, vp 0.: pp goes from 0 to 1"),
    ]:
        with pytest.raises(LayoutError, match=says):
            ask()


# Stages


@pytest.mark.parametrize(
    ("text", "num_layers", "by_rank"),
    [
        ("pp=1", 3, [[[0, 1, 2]]]),
        ("pp=2,vpp=2", 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("pp=4,vpp=2,first=2,last=2", 12, [[[0], [6]], [[1, 2], [7, 8]], [[3, 4], [9, 10]], [[5], [11]]]),
        ("pp=2,embedding=1", 7, [[[0, 1, 2]], [[3, 4, 5, 6]]]),
        ("pp=4,vpp=2,embedding=1,loss=1", 6, [[[], [3]], [[0], [4]], [[1], [5]], [[2], []]]),
        ("pp=2,pipeline_layout=Et|tt|tt|ttL", 7, [[[0], [3, 4]], [[1, 2], [5, 6]]]),
        ("pp=3,first=5", 9, [[[0, 1, 2, 3, 4]], [[5, 6]], [[7, 8]]]),
        ("pp=3,last=5", 9, [[[0, 1]], [[2, 3]], [[4, 5, 6, 7, 8]]]),
        ("pp=1,first=3", 3, [[[0, 1, 2]]]),
        ("pp=2,first=2,last=1", 3, [[[0, 1]], [[2]]]),
        ("pp=2,pipeline_layout=E|t*3,L", 3, [[[]], [[0, 1, 2]]]),
        ("pp=2,pipeline_layout=|Et|t|L", 2, [[[], [1]], [[0], []]]),
    ],
)
def test_stages_by_hand(text, num_layers, by_rank):
    layout = Layout.parse(text)
    stages = layout.stages(num_layers)
    expected = {(pp, vp): tuple(layers) for pp, chunks in enumerate(by_rank) for vp, layers in enumerate(chunks)}
    assert stages.layers == expected
    for stage, layers in expected.items():
        for local, layer in enumerate(layers):
            assert stages.offset(*stage) + local == layer
            assert stages.owner(layer) == stage
    ends = [(layout.has_embedding(*stage), layout.has_head(*stage)) for stage in expected]
    assert [sum(column) for column in zip(*ends, strict=True)] == [1, 1]
    assert layout.has_embedding(0, 0)
    assert layout.has_head(layout.pp - 1, layout.vpp - 1)


def test_every_accepted_split_is_an_exact_cover():
    accepted = 0
    for pp, vpp, num_layers in itertools.product(range(1, 6), range(1, 4), range(1, 13)):
        if vpp > 1 and pp == 1:
            continue
        ends = [{"first": a, "last": b} for a in (None, *range(1, 8)) for b in (None, *range(1, 8))]
        counted = [{"embedding": a, "loss": b} for a in (False, True) for b in (False, True)]
        for options in ends + counted:
            layout = Layout(pp=pp, vpp=vpp, **options)
            try:
                stages = layout.stages(num_layers)
            except LayoutError:
                continue
            accepted += 1
            held = sorted(layer for layers in stages.layers.values() for layer in layers)
            assert held == list(range(num_layers)), layout.text
            in_order = sorted(stages.layers, key=lambda stage: (stage[1], stage[0]))
            assert [x for stage in in_order for x in stages.layers[stage]] == held, layout.text
    assert accepted > 500


@pytest.mark.parametrize(
    ("text", "num_layers", "says"),
    [
        ("pp=2", 7, "^7 layers are not divisible by pp=2: 1 left over"),
        ("pp=2,embedding=1", 8, r"num_layers=8 \+ 1 for embedding=1 = 9 layers are not divisible by pp=2"),
        ("pp=4,embedding=1,loss=1", 8, r"num_layers=8 \+ 1 for embedding=1 \+ 1 for loss=1 = 10 layers"),
        ("pp=2,vpp=2", 6, "3 layers a pipeline rank, not divisible by vpp=2; use a vpp that divides 3, or"),
        ("pp=4,first=3", 8, "first=3 leave 5 of num_layers=8 layers, not divisible by the 3 other .* by 2"),
        ("pp=2,first=3,last=3", 8, "^first=3 and last=3 leave 2 of num_layers=8 layers for 0 other .*; give the rem"),
        ("pp=3,first=4,last=4", 8, "leave 0 of num_layers=8 layers for 1 other .*; leave at least 1 layers"),
        ("pp=4,vpp=2,first=3", 9, "pipeline rank 0 3 layers, not divisible by vpp=2"),
        ("pp=2,vpp=2,first=4,last=4", 8, "ZeroDivisionError"),
        ("pp=3,first=6,last=4", 8, r"exactly once, .* \(pp 1, vp 0\): -2"),
        ("pp=1,first=2,last=3", 6, "would build 3 of num_layers=6"),
        ("pp=2,last=2", 1, r"^tp=1,pp=2,.*last=2 with num_layers=1: .*lower first= or last="),
        ("pp=2,pipeline_layout=Et|tL", 3, "has 2 t, but num_layers=3"),
    ],
)
def test_impossible_splits(text, num_layers, says):
    layout = Layout.parse(text)
    with pytest.raises(LayoutError, match=says):
        layout.stages(num_layers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vpp=2", "vpp=2 virtual stages need pp > 1"),
        ("pipeline_layout=Et|tL", "vpp=2 virtual stages need pp > 1"),
        ("pp=2,first=1,embedding=1", "first=1 cannot go with embedding=1"),
        ("pp=2,first=1,last=1,embedding=1,loss=1", "^first=1, last=1 cannot go with embedding=1, loss=1; keep one of"),
        ("pp=2,first=1,last=1,pipeline_layout=Et|tL", "cannot go with first=1, last=1; drop them$"),
        ("pp=2,last=1,pipeline_layout=Et|tL", "pipeline_layout=Et.tL cannot go with last=1"),
        ("pp=2,loss=1,pipeline_layout=Et|tL", "cannot go with loss=1"),
        ("pp=2,vpp=3,pipeline_layout=Et|t|t|tL", "vpp=3, but pipeline_layout=.* at pp=2 means vpp=2; drop vpp=$"),
        ("pp=2,pipeline_layout=Et|t|tL", "has 3 stages, not divisible by pp=2"),
        ("pp=2,pipeline_layout=tE|tL", "E .embedding. must come first"),
        ("pp=2,pipeline_layout=Et|Lt", "L .loss. must come last"),
        ("pp=2,pipeline_layout=Et|t", "has 0 L .loss."),
        ("pp=2,pipeline_layout=EE|tL", "^layout 'EE.tL' has 2 E .embedding."),
        ("pipeline_layout=", "has 0 E"),
        ("pp=2,pipeline_layout=Et|m,t,L", "^layout 'Et.m,t,L': decoder layers .t. after"),
        ("pp=2,pipeline_layout=Et|m,t,m,L", "decoder layers .t. after"),
        ("pp=3,pipeline_layout=Et|m|mL", r"spreads m over the stages \(pp 1, vp 0\), \(pp 2, vp 0\)"),
        ("pp=2,pipeline_layout=Et|m||L", r"puts m into \(pp 1, vp 0\); it must be in the last virtual stage, vp 1"),
        ("pp=2,pipeline_layout=Et|((t|)*2)*2L", "is not a layer"),
        ("pp=2,pipeline_layout=Et*99999999|L", r"^layout 'Et\*99999999.L': 't\*99999999' repeats more than"),
        ("pp=2,pipeline_layout=Et*100001|L", "repeats more than 100000 times"),
        ("pp=2,pipeline_layout=Et|x|L", "'x' is not a layer"),
        ("pp=2,pipeline_layout=Et|X|L", "'X' is not a layer"),
    ],
)
def test_impossible_pipelines(text, says):
    with pytest.raises(LayoutError, match=says):
        Layout.parse(text)


def test_multi_token_prediction_stage():
    standalone = Layout.parse("pp=4,pipeline_layout=Et|t|t|t|t|t|m,m|L")
    stages = standalone.stages(6)
    assert (stages.mtp, stages.mtp_layers) == ((2, 1), 2)
    assert standalone.stages(6, mtp=2) == stages
    with pytest.raises(LayoutError, match="has 2 m, but mtp=1"):
        standalone.stages(6, mtp=1)
    with pytest.raises(LayoutError, match="mtp=-1 must be"):
        Layout().stages(6, mtp=-1)
    even = Layout(pp=2, vpp=2)
    assert even.stages(8).mtp is None
    assert even.stages(8, mtp=0) == even.stages(8)
    assert (even.stages(8, mtp=1).mtp, even.stages(8, mtp=1).mtp_layers) == ((1, 1), 1)


# Experts


def test_experts_do_not_depend_on_the_pipeline():
    for pp in (1, 2, 4):
        layout = Layout(pp=pp, ep=4, tp=2, etp=1)
        assert [list(layout.experts(rank, 8)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(Layout().experts(0, 1)) == [0]


def test_the_second_argument_of_a_stage_is_optional():
    layout = Layout(pp=2)
    assert [layout.has_embedding(pp) for pp in range(2)] == [True, False]
    assert [layout.has_head(pp) for pp in range(2)] == [False, True]
    assert [layout.stages(4).offset(pp) for pp in range(2)] == [0, 2]


def test_as_many_layers_as_a_repeat_may_write():
    layout = Layout.parse("pp=2,pipeline_layout=Et*100000|L")
    assert len(layout.stages(100_000).layers[0, 0]) == 100_000
