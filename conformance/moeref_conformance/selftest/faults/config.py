"""Bugs of settings: lost, overruled, forced, or refused on their way to Megatron."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from moeref_conformance.contract.rules import load_rules
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.dispatch import without_rule

ONE = cell("glm4_moe", "tp1", backend="static")


def _fields(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Callable[[Rooms], Iterable[Edit]]:
    """The fields that count as set pass through `change(asked, fields)`."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        asked = rooms["config.user_config"].MoEConfig
        good = asked.fields.fget
        return [Edit(asked, "fields", property(lambda self: change(self, good(self))))]

    return edits


def _asked(change: Callable[[Any, Any, Collection[str]], Any]) -> Callable[[Rooms], Iterable[Edit]]:
    """What is asked for passes through `change(model, asked, names that TransformerConfig has)` on its way in."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["megatron.build"]
        good = room.resolve

        def resolve(model: Any, layout: Any, asked: Any, *, provider: Any, more: Any) -> Any:
            known = provider.__dataclass_fields__
            return good(model, layout, change(model, asked, known), provider=provider, more=more)

        return [Edit(room, "resolve", resolve)]

    return edits


def _without(asked: Any, names: Collection[str]) -> Any:
    fields = {k: v for k, v in asked.fields.items() if k not in names}
    through = {k: v for k, v in asked.transformer_config_kwargs.items() if k not in names}
    return type(asked)(**fields, transformer_config_kwargs=through)


def _if_true(asked: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _with_defaults(asked: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {"moe_router_enable_expert_bias": False, **fields} if asked.transformer_config_kwargs else fields


def _unread(asked: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "moe_enable_routing_replay"}


def _fields_last(model: Any, asked: Any, known: Collection[str]) -> Any:
    through = {k: v for k, v in asked.transformer_config_kwargs.items() if k not in asked.fields}
    return type(asked)(**asked.fields, transformer_config_kwargs=through)


def _without_recompute(model: Any, asked: Any, known: Collection[str]) -> Any:
    return _without(asked, [name for name in known if name.startswith("recompute_")])


def _base_signature(model: Any, asked: Any, known: Collection[str]) -> Any:
    return _without(asked, ["moe_enable_routing_replay"]) if model.mla else asked


def _known_alone(rooms: Rooms) -> Iterable[Edit]:
    asked = rooms["config.user_config"].MoEConfig
    good = asked.from_mapping

    def from_mapping(mapping: Any) -> Any:
        return good({k: v for k, v in mapping.items() if k in asked.__dataclass_fields__})

    def known_alone(model: Any, given: Any, known: Collection[str]) -> Any:
        return _without(given, [name for name in given.transformer_config_kwargs if name not in known])

    return [Edit(asked, "from_mapping", from_mapping), *_asked(known_alone)(rooms)]


def _without_rule(name: str) -> Callable[[Rooms], Iterable[Edit]]:
    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["config.rules"]
        return [Edit(room, "RULES", tuple(rule for rule in room.RULES if rule.__name__ != name))]

    return edits


def _own(names: Collection[str]) -> Callable[[Rooms], Iterable[Edit]]:
    """moeref's own settings without these."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["config.resolve"]
        good = room.transformer_settings

        def transformer_settings(model: Any, layout: Any) -> dict[str, Any]:
            return {k: v for k, v in good(model, layout).items() if k not in names}

        return [Edit(room, "transformer_settings", transformer_settings)]

    return edits


def _no_sequence_parallel(rooms: Rooms) -> Iterable[Edit]:
    return [*_own(["sequence_parallel"])(rooms), *without_rule("tp-needs-sp")(rooms)]


def _every_layer_moe(rooms: Rooms) -> Iterable[Edit]:
    return _own(["moe_layer_freq"])(rooms)


def _own_reference(rooms: Rooms) -> Iterable[Edit]:
    def for_reference(policy: Any, **declared: Any) -> Any:
        return type(policy)(moe_token_dispatcher_type=policy.moe_token_dispatcher_type)

    return [Edit(rooms["config"], "for_reference", for_reference)]


def _built(rooms: Rooms, change: Callable[[Any], None]) -> Iterable[Edit]:
    """The config of a built model passes through `change`."""
    room = rooms["megatron"]
    good = room.build

    def build(*args: Any, **kwargs: Any) -> Any:
        made = good(*args, **kwargs)
        change(made.config)
        return made

    return [Edit(room, "build", build)]


def _replay_forced(rooms: Rooms) -> Iterable[Edit]:
    return _built(rooms, lambda config: setattr(config, "moe_enable_routing_replay", True))


def _dispatcher_dropped(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["megatron.build"]
    good = room.transformer_config

    def transformer_config(record: Any) -> Any:
        config, done = good(record)
        config.moe_token_dispatcher_type = "allgather"
        return config, done

    return [Edit(room, "transformer_config", transformer_config)]


def _ep_in_the_dense_grid(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["megatron"]
    good = room.initialise

    def initialise(layout: Any) -> Any:
        if layout.world % (layout.tp * layout.pp * layout.ep):
            raise ValueError(f"world size {layout.world} is not divisible by TP x PP x EP")
        return good(layout)

    return [Edit(room, "initialise", initialise)]


#: Without an open session there is no record of anything.
_NEEDS_A_SESSION = tuple(
    rule.id
    for rule in load_rules().values()
    if rule.applies("gloo") and not rule.requires and rule.id not in ("RUN-001", "RUN-002", "TOP-001")
)
FAULTS = (
    Fault(
        id="false-taken-for-unset",
        bug="B1 SkyRL#1210: a guard `if value` in front of every setting",
        rules=("CFG-003",),
        cell=ONE,
        edits=_fields(_if_true),
        says="moe_router_enable_expert_bias is True, not False",
    ),
    Fault(
        id="section-brings-its-defaults",
        bug="B2 SkyRL#1247: the default of a section is False and not unset, and replaces a detected True",
        rules=("CFG-004",),
        cell=ONE,
        edits=_fields(_with_defaults),
        says="moe_router_enable_expert_bias became False",
    ),
    Fault(
        id="field-that-nobody-reads",
        bug="B3 SkyRL#1215: a flag in a section that nobody reads",
        rules=("CFG-003",),
        also=("CFG-007",),  # without the flag nothing contradicts the fused router
        cell=ONE,
        edits=_fields(_unread),
        says="moe_enable_routing_replay is False, not True",
    ),
    Fault(
        id="fields-merged-last",
        bug="B4 SkyRL#1215: the order of merging resets values",
        rules=("CFG-005",),
        cell=ONE,
        edits=_asked(_fields_last),
        says="moe_grouped_gemm is True, not False",
    ),
    Fault(
        id="recompute-dropped",
        bug="B5 slime#1737, miles#803: bridge mode drops runtime settings, here recomputation",
        rules=("CFG-003",),
        cell=ONE,
        edits=_asked(_without_recompute),
        says="recompute_granularity is None, not 'full'",
    ),
    Fault(
        id="dispatcher-dropped-when-built",
        bug="B5 slime#1737, miles#1483: the model is built without the dispatcher that was asked for",
        rules=("CFG-009",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_dispatcher_dropped,
        says="moe_token_dispatcher_type='allgather', not 'alltoall'",
    ),
    Fault(
        id="flag-swallowed-by-the-subclass",
        bug="B6 verl#5884: the constructor of the config's subclass does not pass the replay flag on",
        rules=("CFG-003",),
        also=("CFG-007",),
        cell=cell("deepseek_v3", "tp1", layers=4, backend="static"),
        edits=_asked(_base_signature),
        says="moe_enable_routing_replay is False, not True",
    ),
    Fault(
        id="replay-under-a-fused-router",
        bug="B7 SkyRL 04874ec: the fused top-k returns before replay, silently",
        rules=("CFG-007",),
        cell=ONE,
        edits=_without_rule("_replay_reaches_topk"),
        says="moe_enable_routing_replay with moe_router_fusion was taken",
    ),
    Fault(
        id="flex-left-without-a-backend",
        bug="B8 Megatron-Bridge#5207, Megatron-Bridge#5740: the fallback clears one of two settings, flex stays",
        rules=("CFG-007",),
        cell=ONE,
        edits=without_rule("flex-needs-a-backend"),
        says="moe_token_dispatcher_type with moe_flex_dispatcher_backend was taken",
    ),
    Fault(
        id="ep-in-the-dense-grid",
        bug="B10 Megatron-Bridge#5302: the world has to be a multiple of TP·PP·EP",
        rules=("RUN-001",),
        also=_NEEDS_A_SESSION,
        cell=cell("qwen3_moe", "tp2-ep2-etp1"),
        edits=_ep_in_the_dense_grid,
        says="not divisible by TP x PP x EP",
    ),
    Fault(
        id="sequence-parallel-left-out",
        bug="B11 NeMo-RL#1487: sequence parallelism is not given to the provider",
        rules=("CFG-002",),
        cell=cell("glm4_moe", "tp2", backend="static"),
        edits=_no_sequence_parallel,
        says="sequence_parallel=False, not True",
    ),
    Fault(
        id="lost-by-renaming",
        bug="B12 ms-swift#9590, verl#7485, miles#1721: settings are mapped by identical name, what is renamed is lost",
        rules=("CFG-001",),
        cell=ONE,
        edits=_own(["moe_router_topk_scaling_factor"]),
        says="moe_router_topk_scaling_factor=None, not 1.7",
    ),
    Fault(
        id="dense-prefix-not-detected",
        bug="first_k_dense_replace is not read, and every layer has experts",
        rules=("CFG-001",),
        cell=ONE,
        edits=_every_layer_moe,
        says="moe_layer_freq=1, not [0, 1]",
    ),
    Fault(
        id="replay-forced-on",
        bug="B15 miles#2226: replay is switched on after the MTP block is built, whatever was asked for",
        rules=("CFG-009",),
        cell=cell("glm4_moe", "ep2", mtp=1),
        edits=_replay_forced,
        says="moe_enable_routing_replay=True, not False",
    ),
    Fault(
        id="unknown-settings-dropped",
        bug="NeMo-RL#3739: a setting that does not exist is taken without a word",
        rules=("CFG-006",),
        cell=ONE,
        edits=_known_alone,
        says="moe_router_topkk was taken",
    ),
    Fault(
        id="reference-configured-apart",
        bug="SkyRL#1210: the reference model has settings of its own, and flags reach the policy alone",
        rules=("CFG-008",),
        cell=ONE,
        edits=_own_reference,
        says="for the policy and",
    ),
)
