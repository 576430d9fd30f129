"""Checks of `moeref.megatron.replay` that run in a rank, on real models. Each check is a function of a Bench."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from moeref_conformance.contract.api import Cell, Claims, Info, Session, Target, World
from safetensors.torch import load_file

from moeref import bridge, families, megatron
from moeref import replay as room
from moeref.config import MoEConfig
from moeref.dispatcher.padding import Factor, Plan
from moeref.layout import Layout
from moeref.megatron.replay import recording, replaying, routers
from moeref.megatron.training import accumulate, in_ddp
from moeref.record import Record
from moeref.replay import GIVEN, MISSING, RouteError, Routes, Spec, batched, packed, routes, targets


class Nothing:
    """A target that is never opened; `check` below is what the rank runs."""

    info = Info(name="replay", version="0")
    claims = Claims(facets=frozenset(), families=frozenset({"glm4_moe"}), backends=frozenset({"gloo"}), mtp=1)

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        raise NotImplementedError


target = Nothing()


class Bench:
    """Builds and runs models of the cell's checkpoint."""

    def __init__(self, cell: Cell, inputs: dict[str, str]) -> None:
        self.model = families.read(inputs["hf_config"], cell.dtype)
        self.tokens_BS = load_file(inputs["tokens"])["tokens"]
        self._checkpoint = Path(inputs["checkpoint"])
        self.built = self.build()

    def build(self, **overrides: Any) -> Any:
        asked = MoEConfig(moe_enable_routing_replay=True, transformer_config_kwargs=overrides)
        built = megatron.build(Record.of(self.model, Layout(), asked), 0)
        bridge.load(built.shard_map, 0, built.chunks, self._checkpoint)
        return built

    def logits(self, built: Any = None) -> torch.Tensor:
        one = built or self.built
        return megatron.logits(one.chunks, one.shard_map, self.tokens_BS)

    def gradients(self, built: Any) -> dict[tuple[int, str], torch.Tensor]:
        return megatron.gradients(built.chunks, built.shard_map, self.tokens_BS)

    def trained(self, built: Any, *, backward: bool = True) -> dict[str, torch.Tensor]:
        """The loss, including that of multi-token prediction, and its gradients by name."""
        (chunk,), (_, length) = built.chunks, self.tokens_BS.shape
        chunk.train()
        chunk.zero_grad()
        mask_11SS = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        found: dict[str, torch.Tensor] = {"loss": torch.zeros(())}
        for tokens_S in self.tokens_BS:
            labels_1S = tokens_S.roll(-1)[None]
            loss = chunk(tokens_S[None], torch.arange(length)[None], mask_11SS, labels=labels_1S).mean()
            found["loss"] = found["loss"] + loss.detach()
            if backward:
                loss.backward()
        return found | {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None and backward}

    def given(self, seed: int = 0, more: tuple[int, ...] = ()) -> list[Routes]:
        """Random routes for each sample, of the MoE layers and of `more`; the last token has none."""
        layers = [*(i for i, moe in enumerate(self.model.moe_layers) if moe), *more]
        rng, (samples, length) = np.random.default_rng(seed), self.tokens_BS.shape
        found = []
        for _ in range(samples):
            order = rng.random((length, len(layers), self.model.experts)).argsort(axis=2)[:, :, : self.model.top_k]
            order[-1] = -1
            found.append(routes(order, layers=layers, experts=self.model.experts))
        return found

    def assert_native(self, native: torch.Tensor) -> None:
        """The block left nothing behind: no action, no queue, no hook, no method on an instance."""
        for chunk in self.built.chunks:
            assert not chunk._forward_hooks
            assert not chunk._forward_pre_hooks
        for replay in replays(self.built):
            assert replay.router_replay_action is None
            assert replay.target_topk_idx is None
            assert replay.recorded_topk_idx is None
            assert replay.replay_backward_list == []
            assert "get_replay_topk" not in vars(replay)
        assert torch.equal(self.logits(), native)


def replays(built: Any) -> list[RouterReplay]:
    return [router.replay for chunk in built.chunks for router in routers(chunk)]


@contextmanager
def setting(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


def a_step_of_no_token_is_refused(bench: Bench) -> None:
    nothing_BS = torch.zeros_like(bench.tokens_BS, dtype=torch.bool)
    with pytest.raises(ValueError, match="no token to train on"):
        megatron.gradients(bench.built.chunks, bench.built.shard_map, bench.tokens_BS, mask_BS=nothing_BS)
    given = bench.built.chunks, bench.built.shard_map, bench.tokens_BS
    with pytest.raises(ValueError, match="no token to train on"):
        megatron.policy_gradients(*given, nothing_BS, torch.ones_like(nothing_BS).float())
    with pytest.raises(ValueError, match=r"^advantages are \[1, 2\], tokens "):
        megatron.policy_gradients(*given, ~nothing_BS, torch.ones(1, 2))
    packs = [[sample_S] for sample_S in bench.tokens_BS]
    masks, short = [[torch.ones_like(of, dtype=torch.bool) for of in pack] for pack in packs], [[torch.ones(2)]]
    with pytest.raises(ValueError, match=r"^advantages are of samples of \[\[2\]\] tokens, packs of "):
        megatron.packed_policy_gradients(*given[:2], packs, masks, short)


def recorded_routes_replay_bit_for_bit(bench: Bench) -> None:
    native = bench.logits()
    with recording(bench.built.chunks) as recorded:
        assert torch.equal(bench.logits(), native)
    assert recorded.microbatches == len(bench.tokens_BS)
    found = [recorded.routes(number) for number in range(recorded.microbatches)]
    assert found[0].layers == tuple(i for i, moe in enumerate(bench.model.moe_layers) if moe)
    with replaying(bench.built.chunks, found):
        assert torch.equal(bench.logits(), native)
    with pytest.raises(KeyError):
        recorded.routes(recorded.microbatches)
    bench.assert_native(native)


def given_rows_are_taken_and_missing_rows_are_not(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    with recording(bench.built.chunks) as before:
        bench.logits()
    seen = seen_experts(bench.built)
    with replaying(bench.built.chunks, given), seen as chosen:
        assert not torch.allclose(bench.logits(), native)
    first = given[0].layers[0]
    for number, one in enumerate(given):
        for i, layer in enumerate(one.layers):
            want = np.sort(one.idx_TLK[:-1, i])
            assert (np.sort(chosen[number][layer][:-1]) == want).all()
        assert one.kind_T[-1] == MISSING
        own = before.routes(number).idx_TLK[-1, 0]
        assert sorted(chosen[number][first][-1].tolist()) == sorted(own.tolist())
    bench.assert_native(native)


@contextmanager
def seen_experts(built: Any, *, mtp: bool = False) -> Iterator[list[dict[int, np.ndarray[Any, Any]]]]:
    """The experts of every token by layer, for each forward, from the routing map given to the dispatcher."""
    found: list[dict[int, np.ndarray[Any, Any]]] = []

    def after(layer: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, out: Any) -> None:
            if not found or layer in found[-1]:
                found.append({})
            map_TE = out[1]
            found[-1][layer] = np.stack([np.flatnonzero(row) for row in map_TE.cpu().numpy()])

        return hook

    watched = [r for c in built.chunks for r in routers(c) if mtp or not r.mtp]
    handles = [r.module.register_forward_hook(after(r.layer)) for r in watched]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def a_scope_in_a_scope_is_refused(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    for outer in (lambda: recording(bench.built.chunks), lambda: replaying(bench.built.chunks, given)):
        for inner in (lambda: recording(bench.built.chunks), lambda: replaying(bench.built.chunks, given)):
            with outer():
                with pytest.raises(RouteError, match="recorded or replayed already"), inner():
                    raise AssertionError("entered")
                bench.logits()
    bench.assert_native(native)


def an_error_leaves_the_routers_native(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    with pytest.raises(ZeroDivisionError), replaying(bench.built.chunks, given):
        _ = bench.logits() / (1 // 0)
    bench.assert_native(native)
    with pytest.raises(ZeroDivisionError), replaying(bench.built.chunks, given):
        raise ZeroDivisionError
    bench.assert_native(native)
    experts = next(m for m in bench.built.chunks[0].modules() if hasattr(m, "router")).experts

    def stop(*_: Any) -> None:
        raise ZeroDivisionError

    handle = experts.register_forward_pre_hook(stop)
    for scope in (recording(bench.built.chunks), replaying(bench.built.chunks, given)):
        with pytest.raises(ZeroDivisionError), scope:  # in the middle of a forward
            bench.logits()
    handle.remove()
    bench.assert_native(native)
    short = [one.take(slice(0, -1)) for one in given]
    with (
        pytest.raises(RouteError, match=r"routes 16 tokens on this rank, its routes have 15 rows"),
        replaying(bench.built.chunks, short),
    ):
        bench.logits()
    bench.assert_native(native)


def a_forward_after_one_that_broke_off_is_refused(bench: Bench) -> None:
    """It would count as the same microbatch, and put its routes into the FIFO twice."""
    native, given, broken = bench.logits(), bench.given(), [True]
    experts = next(m for m in bench.built.chunks[0].modules() if hasattr(m, "router")).experts

    def stop(*_: Any) -> None:
        if broken:
            broken.clear()
            raise ZeroDivisionError

    handle = experts.register_forward_pre_hook(stop)

    def twice() -> None:
        with replaying(bench.built.chunks, given):
            with pytest.raises(ZeroDivisionError):
                bench.logits()
            bench.logits()

    with pytest.raises(RouteError, match="a forward of chunk 0 did not end"):
        twice()
    handle.remove()
    bench.assert_native(native)


def another_number_of_microbatches_is_refused(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    with (
        pytest.raises(RouteError, match="runs microbatch 1, but routes are given for 1"),
        replaying(bench.built.chunks, given[:1]),
    ):
        bench.logits()
    with (
        pytest.raises(RouteError, match=r"given for 3 microbatches, but chunk 0 ran 2"),
        replaying(bench.built.chunks, [*given, given[0]]),
    ):
        bench.logits()
    with (
        pytest.raises(RouteError, match=r"given for 2 microbatches, but chunk 0 ran 0"),
        replaying(bench.built.chunks, given),
    ):
        pass
    bench.assert_native(native)


def another_model_is_left_alone(bench: Bench) -> None:
    """A second model in the process, and one that was discarded before."""
    bench.build()
    other = bench.build()
    native, given = bench.logits(), bench.given()
    with replaying(bench.built.chunks, given):
        replayed = bench.logits()
        assert torch.equal(bench.logits(other), native)
        assert all(r.target_topk_idx is None and r.replay_backward_list == [] for r in replays(other))
    with replaying(other.chunks, given):
        assert torch.equal(bench.logits(other), replayed)
        assert torch.equal(bench.logits(), native)
    with recording(bench.built.chunks) as recorded:
        bench.logits(other)
    assert recorded.microbatches == 0
    bench.assert_native(native)


def mtp_routers_are_kept_apart(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    found = routers(bench.built.chunks[0])
    layers, depth = [r.layer for r in found], len(bench.model.moe_layers)
    assert layers == [*given[0].layers, depth]
    assert [r.mtp for r in found] == [False] * (len(found) - 1) + [True]
    mtp = found[-1].replay
    with replaying(bench.built.chunks, given):
        bench.logits()
        assert (mtp.router_replay_action, mtp.target_topk_idx) == (None, None)
    with (
        pytest.raises(RouteError, match=rf"no routes for layers \[{depth}\]"),
        replaying(bench.built.chunks, given, mtp=True),
    ):
        raise AssertionError("entered")
    config = bench.built.config
    if hasattr(config, "mtp_use_repeated_layer"):  # since megatron-core 0.19
        with (
            setting(config, mtp_use_repeated_layer=True, mtp_num_layers=2),
            pytest.raises(RouteError, match="one router for several layers"),
            recording(bench.built.chunks, mtp=True),
        ):
            raise AssertionError("entered")
    with pytest.raises(RouteError, match=rf"layer {depth} recorded nothing"), recording(bench.built.chunks, mtp=True):
        bench.logits()  # without multi-token prediction
    bench.assert_native(native)


def mtp_layers_take_no_route_of_the_decoder(bench: Bench) -> None:
    """With labels multi-token prediction runs too: with the router's own choice, or with the routes of its layer."""
    depth, given = len(bench.model.moe_layers), bench.given()
    whole = bench.given(seed=1, more=(depth,))
    for way in ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}):
        built = bench.build(**way)
        mtp = routers(built.chunks[0])[-1]
        with seen_experts(built, mtp=True) as seen, own_choice(mtp.module) as own:
            native = bench.trained(built)
            assert all(depth in one for one in seen)
            with replaying(built.chunks, given):
                del seen[:], own[:]
                replayed = bench.trained(built)
            runs = len(seen) // len(given)  # twice as many if each layer is run again
            assert runs == len(way) // 3 + 1
            assert [one[depth].tolist() for one in seen if depth in one] == own
            took(given, seen, runs)
            assert replayed["loss"] != native["loss"]

            with replaying(built.chunks, whole, mtp=True):
                del seen[:]
                bench.trained(built)
            took(whole, seen, runs)

            with recording(built.chunks, mtp=True) as recorded:
                found = bench.trained(built, backward=False)
            kept = [recorded.routes(number) for number in range(recorded.microbatches)]
            assert kept[0].layers == whole[0].layers
            assert found["loss"] == native["loss"]
            with replaying(built.chunks, kept, mtp=True):
                again = bench.trained(built)
            assert again.keys() == native.keys()
            assert all(torch.equal(again[key], native[key]) for key in again)
        assert all(r.replay_backward_list == [] and r.router_replay_action is None for r in replays(built))


def mtp_layers_train_on_what_the_mask_says(bench: Bench) -> None:
    """In a step with a loss of one's own, here that of all tokens: against steps of the package's loss."""
    (chunk,), mask_BS = bench.built.chunks, torch.arange(bench.tokens_BS.shape[1]).expand_as(bench.tokens_BS) >= 9

    def loss(logits_BSV: torch.Tensor, rows: Sequence[int], at_S: torch.Tensor) -> torch.Tensor:
        labels_BS = bench.tokens_BS[list(rows)].roll(-1, 1)[:, at_S]
        return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())

    def trained(*mask: torch.Tensor) -> dict[str, torch.Tensor]:
        wrapped = in_ddp([chunk])
        wrapped[0].train()
        wrapped[0].zero_grad_buffer()
        accumulate(wrapped, bench.built.shard_map, bench.tokens_BS, loss, 1, *mask)
        return {name: parameter.main_grad.clone() for name, parameter in chunk.named_parameters()}

    masked = megatron.gradients([chunk], bench.built.shard_map, bench.tokens_BS, mask_BS=mask_BS)
    name = next(name for _, name in masked if name.endswith("eh_proj.weight"))
    assert torch.allclose(trained(mask_BS)[name], masked[0, name], rtol=1e-4, atol=1e-8)
    assert torch.allclose(trained()[name], bench.gradients(bench.built)[0, name], rtol=1e-4, atol=1e-8)
    assert not torch.allclose(trained()[name], masked[0, name], rtol=0.1, atol=1e-6)


def took(given: Sequence[Routes], seen: Sequence[dict[int, np.ndarray[Any, Any]]], runs: int) -> None:
    """Every given row was routed as given, in all runs of its layer."""
    for i, layer in enumerate(given[0].layers):
        ran = [one[layer] for one in seen if layer in one]
        assert len(ran) == runs * len(given)
        for number, one in enumerate(given):
            want = np.sort(one.idx_TLK[:-1, i]).tolist()
            assert sum(got[:-1].tolist() == want for got in ran) == runs, (layer, number)


@contextmanager
def own_choice(router: torch.nn.Module) -> Iterator[list[list[list[int]]]]:
    """A sigmoid router's own choice of experts, recomputed from its input."""
    found: list[list[list[int]]] = []

    def hook(module: Any, args: tuple[Any, ...]) -> None:
        rows_TH = args[0].detach().reshape(-1, args[0].shape[-1]).double()
        scores_TE = (rows_TH @ module.weight.detach().double().T).sigmoid() + module.expert_bias.double()
        found.append(scores_TE.topk(module.topk).indices.sort().values.tolist())

    handle = router.register_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def what_cannot_be_replayed_is_refused(bench: Bench) -> None:
    native, given, chunks = bench.logits(), bench.given(), bench.built.chunks
    config, first = bench.built.config, routers(chunks[0])[0]

    def refused(says: str, scope: Callable[[], Any] = lambda: replaying(chunks, given)) -> None:
        with pytest.raises(RouteError, match=says), scope():
            raise AssertionError("entered")

    for fields, says in (
        ({"overlap_moe_expert_parallel_comm": True}, "layers of two microbatches"),
        ({"cuda_graph_impl": "local"}, "a CUDA graph that holds the router"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor=1.5 drops tokens of full experts"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True routes by random scores"),
        *(
            [({"moe_router_force_biased": 0.5}, "adds a random bias")]
            if hasattr(config, "moe_router_force_biased")
            else []
        ),
    ):
        with setting(config, **fields):
            refused(says)
            refused(says, lambda: recording(chunks))
    with setting(config, moe_router_fusion=True):
        refused(f"layer {first.layer}: the fused router")
        refused("the fused router", lambda: recording(chunks))
    for kind in ("sinkhorn", "quantile_balancing"):
        with setting(first.module, routing_type=kind):
            refused(f"{kind} routing ignores")
            refused(f"{kind} routing ignores", lambda: recording(chunks))
    with setting(first.module, router_replay=None):
        refused("moe_enable_routing_replay=True")
    for kind, coefficient in (("aux_loss", 0.1), (["seq_aux_loss", "global_aux_loss"], [0.0, 0.1])):
        with setting(first.module, routing_type=kind), setting(config, moe_aux_loss_coeff=coefficient):
            refused("computed over the router's own top-k")
            with recording(chunks), pytest.raises(RouteError, match="already"), replaying(chunks, given):
                pass
            with replaying(chunks, given, aux_loss="native"):
                bench.logits()
    for kind, coefficient in (("aux_loss", 0.0), (["seq_aux_loss", "aux_loss"], [0.0, 0.0])):  # no loss is computed
        with (
            setting(first.module, routing_type=kind),
            setting(config, moe_aux_loss_coeff=coefficient),
            replaying(chunks, given),
        ):
            bench.logits()
    wide = routes(np.zeros((16, 1, 1), np.int64), layers=[given[0].layers[0]], experts=4)
    refused("the routes are top-1 of 4", lambda: replaying(chunks, [wide, wide]))
    twice = [replace(g, idx_TLK=np.zeros_like(g.idx_TLK)) for g in given]
    refused("expert 0 twice", lambda: replaying(chunks, twice))
    beyond = [replace(g, idx_TLK=g.idx_TLK + np.uint8(g.experts)) for g in given]
    refused("routes with expert", lambda: replaying(chunks, beyond))
    lacking = [Routes(g.idx_TLK[:, 1:], g.layers[1:], g.experts, g.kind_T, g.versions_T) for g in given]
    refused("no routes for layers", lambda: replaying(chunks, lacking))
    bench.assert_native(native)


def recomputation_takes_the_same_routes(bench: Bench) -> None:
    """Recomputation of all layers, of some, and of MoE layers only gives the same gradients, bit for bit."""
    ways: Sequence[dict[str, Any]] = (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    )
    given = bench.given()
    found, own, runs = [], [], []
    for way in ways:
        built = bench.build(**way)
        own.append(bench.gradients(built))
        with replaying(built.chunks, given), seen_experts(built) as seen:
            found.append(bench.gradients(built))
        runs.append(sum(map(len, seen)))
        assert all(replay.replay_backward_list == [] for replay in replays(built))
    # Rows times MoE layers, and those again that are recomputed.
    assert [count / runs[0] for count in runs] == [1, 2, 1.5, 2]
    assert any(not torch.equal(found[0][key], own[0][key]) for key in own[0])
    for one in found[1:]:
        assert all(torch.equal(one[key], found[0][key]) for key in found[0])


def run_rows(
    bench: Bench, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], given: Sequence[Routes]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The logits [B, S, V] of each microbatch (tokens_BS, which tokens follow the same sample: [B, S]) under `given`.

    And the gradients of the summed loss of every token that the model predicts within its sample, by name.
    """
    (chunk,) = bench.built.chunks
    chunk.train()
    chunk.zero_grad()
    found = []
    with replaying([chunk], given):
        for tokens_BS, sample_BS in rows:
            same_BSS = sample_BS[:, :, None] == sample_BS[:, None]
            length = tokens_BS.shape[1]
            mask_B1SS = (~(same_BSS & torch.ones(length, length).tril().bool()))[:, None]
            logits_BSV = chunk(tokens_BS, torch.arange(length).expand_as(tokens_BS), mask_B1SS)
            found.append(logits_BSV.detach())
            next_BS = (sample_BS[:, 1:] == sample_BS[:, :-1]) & (sample_BS[:, 1:] >= 0)
            losses = torch.nn.functional.cross_entropy(logits_BSV[:, :-1][next_BS], tokens_BS[:, 1:][next_BS])
            (losses * next_BS.sum()).backward()
    return found, {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}


def samples_in_one_microbatch_get_what_they_get_alone(bench: Bench) -> None:
    """Two samples of unequal length: one by one, side by side in [S, B] and packed, under the same routes."""
    native, lengths = bench.logits(), (16, 11)
    samples = [tokens_S[:n] for tokens_S, n in zip(bench.tokens_BS, lengths, strict=True)]
    given = [one.take(slice(0, n)) for one, n in zip(bench.given(), lengths, strict=True)]
    alone, wanted = run_rows(bench, [(t[None], torch.zeros(1, len(t))) for t in samples], given)
    routes_of = {"batched": batched(given), "packed": packed(given, Plan((Factor(4, "sample", "test"),)))}
    for name, batch in routes_of.items():
        columns = batch.routes.batch
        tokens_SB = torch.zeros(batch.cu_seqlens[-1] * columns, dtype=torch.long)
        sample_SB = torch.full(tokens_SB.shape, -1.0)
        for number, sample in enumerate(samples):
            rows = torch.from_numpy(batch.rows(number))[: len(sample)]
            tokens_SB[rows], sample_SB[rows] = sample, float(number)
        row = (tokens_SB.view(-1, columns).T, sample_SB.view(-1, columns).T)
        (logits_BSV,), gradients = run_rows(bench, [row], [batch.routes])
        by_row = logits_BSV.transpose(0, 1).flatten(0, 1)
        for number, (expected_1SV, length) in enumerate(zip(alone, lengths, strict=True)):
            mine = by_row[torch.from_numpy(batch.rows(number))[:length]]
            torch.testing.assert_close(mine, expected_1SV[0], atol=5e-6, rtol=0)
        for key, gradient in wanted.items():
            torch.testing.assert_close(gradients[key], gradient, atol=5e-6, rtol=1e-4, msg=f"{name} {key}")
        other = replace(batch.routes, batch=3 - columns)
        with pytest.raises(RouteError, match=f"layer 1 routes a batch of {columns} samples, its routes are "):
            run_rows(bench, [row], [other])
    # The check can fail: the rows of one order, said to be in the other.
    full = [one.take(slice(0, 16)) for one in bench.given()]
    as_batch = (bench.tokens_BS, torch.arange(2.0)[:, None].expand(2, 16))
    right, _ = run_rows(bench, [as_batch], [batched(full).routes])
    wrong, _ = run_rows(bench, [as_batch], [replace(packed(full).routes, batch=2)])
    assert (right[0] - wrong[0]).abs().max() > 0.1
    bench.assert_native(native)


def padding_is_not_counted_for_the_expert_bias(bench: Bench) -> None:
    """The counts of which the bias is updated hold every token once, also when layers are run again."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given = [one.take(slice(0, 11)) for one in bench.given()]
    batch = packed(given, Plan((Factor(16, "sample", "test"),)))
    tokens_1S, sample_1S = torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32)
    for way in ({}, full):
        built = bench.build(**way)
        found = [r.module for r in routers(built.chunks[0]) if not r.mtp]
        for routes_of, counted in ((batch.routes, 22), (replace(batch.routes, kind_T=batch.routes.kind_T * 0), 32)):
            for router in found:
                router.local_tokens_per_expert.zero_()
            with setting(bench, built=built):
                run_rows(bench, [(tokens_1S, sample_1S)], [routes_of])
            for i, router in enumerate(found):
                assert router.local_tokens_per_expert.sum() == counted * router.topk
                rows = routes_of.idx_TLK[routes_of.kind_T == GIVEN, i]
                if counted == 32:
                    assert (
                        np.bincount(rows.reshape(-1), minlength=16).tolist() == router.local_tokens_per_expert.tolist()
                    )


def routes_come_one_microbatch_at_a_time(bench: Bench) -> None:
    """From a list, a function or a generator: the same logits, asked for once, and nothing kept after a forward."""
    native, given, chunks = bench.logits(), bench.given(), bench.built.chunks
    with replaying(chunks, given):
        wanted = bench.logits()
    asked: list[int] = []

    def one(number: int) -> Routes:
        assert all(not replay.replay_backward_list for replay in replays(bench.built))
        asked.append(number)
        return given[number]

    seen: list[torch.dtype] = []
    first = routers(chunks[0])[0].module
    handle = first.register_forward_pre_hook(lambda m, _: seen.append(m.router_replay.target_topk_idx.dtype))
    for source in (one, (one(number) for number in range(2))):
        del asked[:]
        with replaying(chunks, source):
            assert torch.equal(bench.logits(), wanted)
        assert asked == [0, 1]
    handle.remove()
    assert set(seen) == {torch.int32}
    for source, says in (
        (iter(given[:1]), "runs microbatch 1, but routes are given for 1"),
        (iter([*given, given[0]]), "given for more than the 2 microbatches that ran"),
        (iter([given[0].take([0, 1])]), "its routes have 2 rows"),
        (lambda _: replace(given[0], idx_TLK=np.zeros_like(given[0].idx_TLK)), "expert 0 twice"),
    ):
        with pytest.raises(RouteError, match=says), replaying(chunks, source):
            bench.logits()
    bench.assert_native(native)


def a_hole_in_one_layer_is_left_to_its_router(bench: Bench) -> None:
    native, given = bench.logits(), bench.given()
    last = len(given[0].layers) - 1
    holes_TL = np.zeros(given[0].idx_TLK.shape[:2], bool)
    holes_TL[5, last] = True
    holed = [replace(one, holes_TL=holes_TL) for one in given]
    own_router = routers(bench.built.chunks[0])[last].module
    with replaying(bench.built.chunks, holed), seen_experts(bench.built) as chosen, own_choice(own_router) as own:
        bench.logits()
    for number, one in enumerate(given):
        for i, layer in enumerate(one.layers):
            want = np.sort(one.idx_TLK[:-1, i])
            if i == last:
                want[5] = own[number][5]
                assert want[5].tolist() != np.sort(one.idx_TLK[5, i]).tolist()
            assert chosen[number][layer][:-1].tolist() == want.tolist()
    bench.assert_native(native)


def the_targets_of_another_controller_are_the_same(bench: Bench) -> None:
    """RouterReplay alone, set from `targets` by a framework that keeps its own controller."""
    (chunk,), native = bench.built.chunks, bench.logits()
    spec = Spec.of(bench.model)
    given = [one.take(slice(0, 15)) for one in bench.given()]
    batch = batched(given, length=16)
    positions_BS, mask = torch.arange(16).expand(2, 16), torch.ones(16, 16).triu(1).bool()[None, None]
    with torch.no_grad():
        with replaying([chunk], [batch.routes]):
            wanted = chunk(bench.tokens_BS, positions_BS, mask)
        (by_layer,) = targets(batch, Layout(), 0, spec)
        assert tuple(by_layer) == spec.layers
        assert {a.dtype for a in by_layer.values()} == {np.dtype(np.int32)}
        for router in routers(chunk):
            router.replay.set_target_indices(torch.from_numpy(by_layer[router.layer]).long())
            router.replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert torch.equal(chunk(bench.tokens_BS, positions_BS, mask), wanted)
        for router in routers(chunk):
            router.replay.clear_indices()
            router.replay.clear_router_replay_action()
    bench.assert_native(native)


def the_how_to_replays_as_written(bench: Bench) -> None:
    """The block of docs/how-to/replay-routes.md that needs a model, run on this one."""
    page = (Path(__file__).parents[2] / "docs/how-to/replay-routes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\{code-block\} python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    native, given = bench.logits(), [one.take(slice(0, 15)) for one in bench.given()]
    with replaying(bench.built.chunks, bench.given()):
        wanted = bench.logits()
    steps: list[torch.Tensor] = []
    names = {
        "replay": room,
        "layout": Layout(),
        "rank": 0,
        "chunks": bench.built.chunks,
        "microbatches": [packed([one], Plan((), fixed=16)) for one in given],
        "step": lambda: steps.append(bench.logits()),
    }
    exec(compile(block, "replay-routes.md", "exec"), names)
    torch.testing.assert_close(steps[0][:, :15], wanted[:, :15], atol=5e-6, rtol=0)  # the last row is padding here
    assert [torch.equal(one, native) for one in steps] == [False, True, True]
    bench.assert_native(native)


def the_order_of_a_batch_is_recorded(bench: Bench) -> None:
    """R2 with micro-batch 2: what was recorded replays, and other orders are refused."""
    (chunk,), native = bench.built.chunks, bench.logits()
    positions_BS, mask = torch.arange(16).expand(2, 16), torch.ones(16, 16).triu(1).bool()[None, None]
    with torch.no_grad():
        with recording([chunk]) as recorded:
            wanted = chunk(bench.tokens_BS, positions_BS, mask)
        kept = recorded.routes(0)
        assert (kept.batch, kept.tokens) == (2, 32)
        with replaying([chunk], [kept]):
            assert torch.equal(chunk(bench.tokens_BS, positions_BS, mask), wanted)
    bench.assert_native(native)


CHECKS = {
    "glm4_moe": (
        samples_in_one_microbatch_get_what_they_get_alone,
        the_order_of_a_batch_is_recorded,
        the_how_to_replays_as_written,
        padding_is_not_counted_for_the_expert_bias,
        routes_come_one_microbatch_at_a_time,
        a_hole_in_one_layer_is_left_to_its_router,
        the_targets_of_another_controller_are_the_same,
        *(recorded_routes_replay_bit_for_bit, given_rows_are_taken_and_missing_rows_are_not),
        *(a_scope_in_a_scope_is_refused, an_error_leaves_the_routers_native, another_model_is_left_alone),
        *(another_number_of_microbatches_is_refused, what_cannot_be_replayed_is_refused),
        a_forward_after_one_that_broke_off_is_refused,
        *(recomputation_takes_the_same_routes, a_step_of_no_token_is_refused),
    ),
    "glm4_moe+mtp1": (
        *(mtp_routers_are_kept_apart, mtp_layers_take_no_route_of_the_decoder),
        mtp_layers_train_on_what_the_mask_says,
    ),
}


def check(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Run the checks of the cell's variant, and write what each raised to done.json."""
    megatron.initialise(Layout())
    bench, done = Bench(cell, inputs), {}
    for one in CHECKS["+".join(part for part in cell.variant.split("+") if part != "L3")]:
        try:
            one(bench)
            done[one.__name__] = ""
        except Exception:
            done[one.__name__] = traceback.format_exc()
    (folder / "done.json").write_text(json.dumps(done))
