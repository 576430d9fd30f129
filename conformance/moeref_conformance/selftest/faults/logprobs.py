"""Bugs of log-probabilities: what is summed, on which rank, at which temperature, and of which token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, TokenLogprobs, World
from moeref_conformance.contract.topology import coords
from moeref_conformance.selftest.border import facet, inventory
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.routes import later_turns_hold
from moeref_conformance.selftest.faults.steps import with_first


@dataclass(frozen=True)
class Asked:
    """What a wrong implementation is made from: logits in place, the tokens, and this rank's place."""

    logits_BSV: torch.Tensor
    tokens_BS: torch.Tensor
    temperature: float
    cell: Cell
    rank: int

    def right(self, logits_BSV: torch.Tensor | None = None) -> TokenLogprobs:
        """Of these logits, or the given ones."""
        logits_BSV = self.logits_BSV / self.temperature if logits_BSV is None else logits_BSV
        logprobs_BSV = logits_BSV[:, :-1].log_softmax(-1)
        next_BS1 = self.tokens_BS[:, 1:, None].clamp_min(0)
        return TokenLogprobs(
            logprobs_BSV.gather(-1, next_BS1)[..., 0].float(), -(logprobs_BSV.exp() * logprobs_BSV).sum(-1).float()
        )


def _made(make: Callable[[Asked], TokenLogprobs | None]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: logprobs are what `make` makes of the logits."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        forward: Any = session.forward

        def logprobs(tokens_BS: torch.Tensor, temperature: float) -> TokenLogprobs | None:
            logits_BSV = forward.logits(tokens_BS)
            return None if logits_BSV is None else make(Asked(logits_BSV, tokens_BS, temperature, cell, world.rank))

        return facet(session, "logprobs", logprobs=logprobs)

    return wrap


def _with_padding(asked: Asked) -> TokenLogprobs:
    """Rows of zeros, which pad the vocabulary, are in the sum."""
    scaled_BSV = asked.logits_BSV / asked.temperature
    return asked.right(torch.nn.functional.pad(scaled_BSV, (0, -scaled_BSV.shape[-1] % 128)))


def _of_a_shard(asked: Asked) -> TokenLogprobs:
    """Each TP rank sums over the vocabulary that it holds; the logit of the token comes from the rank that has it."""
    right, scaled_BSV = asked.right(), asked.logits_BSV / asked.temperature
    tp = asked.cell.layout.tp
    own_BSV = scaled_BSV[:, :-1].chunk(tp, -1)[coords(asked.cell.layout, asked.rank)["tp"]]
    whole_BS, own_BS = scaled_BSV[:, :-1].logsumexp(-1), own_BSV.logsumexp(-1)
    return replace(right, logprobs_BS=right.logprobs_BS + whole_BS - own_BS)


def _begins_behind_the_first(asked: Asked) -> TokenLogprobs:
    """The first token of each TP rank's part of the vocabulary but the first is no rank's: its logit counts as 0."""
    right, rows = asked.right(), 128  # Megatron-Core pads the vocabulary to so many for each rank, or twice as many
    next_BS = asked.tokens_BS[:, 1:]
    lost_BS = (next_BS > 0) & (next_BS % rows == 0)
    scaled_BSV = asked.logits_BSV[:, :-1] / asked.temperature
    own_BS = scaled_BSV.gather(-1, next_BS[..., None].clamp_min(0))[..., 0].float()
    return replace(right, logprobs_BS=torch.where(lost_BS, right.logprobs_BS - own_BS, right.logprobs_BS))


def _before(asked: Asked) -> TokenLogprobs:
    """The logits at a token's own place, which predict the next one."""
    right = asked.right()
    logprobs_BSV = (asked.logits_BSV / asked.temperature).log_softmax(-1)
    own_BS = logprobs_BSV.gather(-1, asked.tokens_BS[..., None].clamp_min(0))[:, 1:, 0]
    return replace(right, logprobs_BS=own_BS)


def _in_order_of_length(asked: Asked) -> TokenLogprobs:
    """Rows are sorted by length, and put back by the order in which they were sorted, not by its inverse."""
    order_B = (asked.tokens_BS >= 0).sum(1).argsort(stable=True)
    return TokenLogprobs(*(of_BS[order_B][order_B] for of_BS in vars(asked.right()).values()))


def _clamped(asked: Asked) -> TokenLogprobs:
    """No token is less likely than the 20th power of 1 / e."""
    right = asked.right()
    return replace(right, logprobs_BS=right.logprobs_BS.clamp_min(-20.0))


def _rank_after_rank(asked: Asked) -> TokenLogprobs:
    """What CP ranks hold is joined as they come."""
    right, cp = asked.right(), asked.cell.layout.cp
    chunks = torch.arange(asked.tokens_BS.shape[1]).chunk(2 * cp)
    order_S = torch.cat([chunks[part] for rank in range(cp) for part in (rank, -1 - rank)])
    last = asked.tokens_BS.shape[1] - 1  # has no next token
    at_S = order_S[order_S < last]
    return TokenLogprobs(*(of_BS[:, at_S] for of_BS in vars(right).values()))


def _on_one_rank(asked: Asked) -> TokenLogprobs | None:
    return None if coords(asked.cell.layout, asked.rank)["tp"] else asked.right()


def _of_shares(asked: Asked) -> TokenLogprobs:
    """Logprobs leave the softmax where the logits were, and entropies are computed of it."""
    left = asked.right((asked.logits_BSV / asked.temperature).softmax(-1))
    return replace(asked.right(), entropies_BS=left.entropies_BS)


def _of_whole_chunks(asked: Asked) -> TokenLogprobs:
    """Chunks of four tokens are computed; of what is left over after the last whole one all stays 0."""
    right, whole = asked.right(), (asked.tokens_BS.shape[1] - 1) // 4 * 4
    here_S = torch.arange(asked.tokens_BS.shape[1] - 1) < whole
    return TokenLogprobs(*(of_BS.where(here_S, 0.0) for of_BS in vars(right).values()))


def _rest_of_the_first_call(session: Session, cell: Cell, world: World) -> Any:
    """Chunks of four tokens are written to buffers, in which what is left over stays what the first call had there."""
    good: Any = session.logprobs
    buffers = dict[str, torch.Tensor]()

    def logprobs(tokens_BS: torch.Tensor, temperature: float) -> TokenLogprobs | None:
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature)
        if found is None:
            return None
        here_S = torch.arange(tokens_BS.shape[1] - 1) < (tokens_BS.shape[1] - 1) // 4 * 4
        for name, of_BS in vars(found).items():
            buffers[name] = of_BS.where(here_S, buffers.setdefault(name, of_BS))
        return TokenLogprobs(**{name: of_BS.clone() for name, of_BS in buffers.items()})

    return facet(session, "logprobs", logprobs=logprobs)


def _entropies_by_chunks_of_the_vocabulary(asked: Asked) -> TokenLogprobs:
    """Chunks of 64 are cut along the vocabulary, and entropies of each are added up."""
    parts = torch.split(asked.logits_BSV / asked.temperature, 64, dim=-1)
    shares = [part_BSV[:, :-1].log_softmax(-1) for part_BSV in parts]
    of_each = torch.stack([-(of.exp() * of).sum(-1).float() for of in shares])
    return replace(asked.right(), entropies_BS=of_each.sum(0))


def _of_shares_at_1(asked: Asked) -> TokenLogprobs:
    """Logits are divided into other memory, but for a temperature of 1, where logprobs are computed in their place."""
    return _of_shares(asked) if asked.temperature == 1.0 else asked.right()


def _without_routes(session: Session, cell: Cell, world: World) -> Any:
    """Routes are given to steps, and not to the forward of logprobs."""
    good: Any = session.logprobs
    return facet(session, "logprobs", logprobs=lambda tokens_BS, temperature, *_: good.logprobs(tokens_BS, temperature))


def _under_later_turns(session: Session, cell: Cell, world: World) -> Any:
    """Of a resumed rollout the routes that were computed last are taken."""
    good: Any = session.logprobs

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> TokenLogprobs | None:
        given = [[later_turns_hold(sample) for sample in of_all] for of_all in routes if of_all]
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature, *given)
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _under_routes_of_replica_0(session: Session, cell: Cell, world: World) -> Any:
    """Rows are dealt out to the replicas, and routes are sent to all from the first one."""
    from megatron.core import parallel_state

    good: Any = session.logprobs

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> TokenLogprobs | None:
        shared, group = [routes], parallel_state.get_data_parallel_group()
        dist.broadcast_object_list(shared, dist.get_process_group_ranks(group)[0], group)
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature, *shared[0])
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _of_weights_set_aside(session: Session, cell: Cell, world: World) -> Any:
    """The weights of the first call are set aside, and put in place for each one."""
    good: Any = session.logprobs
    aside = dict[tuple[int, str], torch.Tensor]()

    def logprobs(tokens_BS: torch.Tensor, temperature: float) -> TokenLogprobs | None:
        held = inventory(session)
        now = {key: tensor.clone() for key, tensor in held.items()}
        for key, tensor in held.items():
            tensor.copy_(aside.setdefault(key, now[key]))
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature)
        for key, tensor in held.items():
            tensor.copy_(now[key])
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _late(asked: Asked) -> TokenLogprobs:
    right = asked.right()
    return replace(right, entropies_BS=torch.as_tensor(right.entropies_BS).roll(1, 1))


def _temperature_of_the_first(session: Session, cell: Cell, world: World) -> Any:
    """The temperature of the first call is that of all."""
    good: Any = session.logprobs
    kept: list[float] = []

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> TokenLogprobs | None:
        kept.append(temperature)
        found: TokenLogprobs | None = good.logprobs(tokens_BS, kept[0], *routes)
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _temperature_stays(session: Session, cell: Cell, world: World) -> Any:
    """Logits that are asked for after logprobs are divided by their temperature."""
    good: Any = session.logprobs
    forward: Any = session.forward
    left = [1.0]

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> TokenLogprobs | None:
        left[0] = temperature
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature, *routes)
        return found

    def logits(tokens_BS: torch.Tensor) -> Any:
        logits_BSV = forward.logits(tokens_BS)
        return None if logits_BSV is None else logits_BSV / left[0]

    return facet(facet(session, "logprobs", logprobs=logprobs), "forward", logits=logits)


def _of_one_replica(asked: Asked) -> TokenLogprobs:
    """What a rank has is sent to the whole world, and not to the ranks of its replica alone."""
    right = asked.right()
    for of_BS in vars(right).values():
        dist.broadcast(of_BS, src=0)
    return right


def _of_the_first_tokens(session: Session, cell: Cell, world: World) -> Any:
    """Tokens are kept by their shape."""
    good: Any = session.logprobs
    kept = dict[torch.Size, torch.Tensor]()

    def logprobs(tokens_BS: torch.Tensor, *more: Any) -> TokenLogprobs | None:
        found: TokenLogprobs | None = good.logprobs(kept.setdefault(tokens_BS.shape, tokens_BS), *more)
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _under_the_first_routes(session: Session, cell: Cell, world: World) -> Any:
    """Routes are kept by the shape of the tokens."""
    good: Any = session.logprobs
    kept = dict[torch.Size, Any]()

    def logprobs(tokens_BS: torch.Tensor, temperature: float, routes: Any = None) -> TokenLogprobs | None:
        given = routes and kept.setdefault(tokens_BS.shape, routes)
        found: TokenLogprobs | None = good.logprobs(tokens_BS, temperature, given)
        return found

    return facet(session, "logprobs", logprobs=logprobs)


def _under_routes_of_a_step(session: Any, cell: Cell, world: World) -> Any:
    """Routes of a training step are left, and the log-probabilities that are asked for next are under them."""
    good: Any = session.logprobs
    replay: Any = session.replay
    left: list[Any] = []

    def step(tokens_BS: torch.Tensor, routes: Any) -> Any:
        left[:] = routes
        return replay.step(tokens_BS, routes)

    def logprobs(tokens_BS: torch.Tensor, temperature: float, routes: Any = None) -> Any:
        given = list(left) if routes and len(left) == len(routes) else routes
        left.clear()
        return good.logprobs(tokens_BS, temperature, given)

    return facet(facet(session, "replay", step=step), "logprobs", logprobs=logprobs)


FAULTS = (
    Fault(
        id="temperature-left-out",
        bug="NeMo-RL#935: samples were drawn at a temperature that logprobs of the training do not know",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(lambda asked: asked.right(asked.logits_BSV)),
        diagnosis="those of a temperature of 1, not 0.7",
    ),
    Fault(
        id="logprob-of-the-token-before",
        bug="ms-swift#8427 in kind: logprobs and tokens are not aligned",
        rules=("LGP-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(_before),
        says="logprobs differ from transformers by",
        diagnosis="those by the logits at the token's own place",
    ),
    Fault(
        id="logprobs-of-whole-chunks-alone",
        bug="verl#6446 in kind: by chunks of tokens, of which one that is smaller than others is left as it was made",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(_of_whole_chunks),
        says="logprobs differ from transformers by",
        diagnosis="6 of 30 differ: tokens 13–15 of every row, and are 0",
    ),
    Fault(
        id="entropies-by-chunks-of-the-vocabulary",
        bug="verl#6446 (review): chunks are cut along dimension 1, which is the vocabulary where tokens are packed",
        rules=("LGP-002",),
        cell=cell("qwen3_moe", "one", batch="packed"),
        wrap=_made(_entropies_by_chunks_of_the_vocabulary),
        diagnosis="the sum of those of parts of the vocabulary, 64 tokens each",
    ),
    Fault(
        id="log-softmax-with-the-padding",
        bug="SkyRL#1832 (review) in kind: what pads the vocabulary takes part in the softmax",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_made(_with_padding),
        says="logprobs differ from transformers by",
        diagnosis="a softmax over 125 logits of 0 more",
    ),
    Fault(
        id="log-softmax-of-a-shard",
        bug="Megatron-LM#7452 in kind: the sum over the vocabulary is not that of all TP ranks",
        rules=("LGP-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_made(_of_a_shard),
        says="logprobs differ from transformers by",
        diagnosis="the sum of the softmax is over tokens 0 to 65 of the vocabulary alone",
    ),
    Fault(
        id="log-softmax-in-bf16",
        bug="reported nowhere: logits are rounded to bf16 before the softmax",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(lambda asked: asked.right((asked.logits_BSV / asked.temperature).bfloat16())),
        says="logprobs differ from transformers by",
        diagnosis="numbers of bf16: the softmax is computed in it",
    ),
    Fault(
        id="log-softmax-in-the-dtype-of-the-model",
        bug="torchforge#237, TRL#7084 (review): logits of a model in bf16 go into the softmax as they are",
        rules=("LGP-003",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16"),
        wrap=_made(lambda asked: asked.right((asked.logits_BSV / asked.temperature).bfloat16())),
        one_rank=True,
        diagnosis="computed in bfloat16",
    ),
    Fault(
        id="temperature-left-out-in-bf16",
        bug="NeMo-RL#935 in kind: the path that models in 16 bits take does not know the temperature",
        rules=("LGP-003",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16"),
        wrap=_made(lambda asked: asked.right(asked.logits_BSV)),
        says="differ from transformers",
        diagnosis="nearest to those of a temperature of 1",
    ),
    Fault(
        id="logprob-of-the-token-before-in-bf16",
        bug="ms-swift#8427 in kind: the path that models in 16 bits take aligns logprobs and tokens otherwise",
        rules=("LGP-003",),
        cell=cell("glm4_moe", "one", dtype="bfloat16"),
        wrap=_made(_before),
        one_rank=True,
        says="differ from transformers",
        diagnosis="nearest to those by the logits at the token's own place",
    ),
    Fault(
        id="logprobs-of-whole-chunks-alone-in-bf16",
        bug="verl#6446 in kind: logits in 16 bits are cast by chunks (miles#2764), of which a smaller one is left out",
        rules=("LGP-003",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16"),
        wrap=_made(_of_whole_chunks),
        one_rank=True,
        says="10 % of the logprobs differ from transformers by",
        diagnosis="6 of 30 differ: tokens 13–15 of every row, and are 0",
    ),
    Fault(
        id="last-chunk-of-the-first-call-in-bf16",
        bug="verl#6446 in kind: what is left over of a buffer for chunks (miles#2764) stays as the first call left it",
        rules=("LGP-003",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16"),
        wrap=_rest_of_the_first_call,
        says="once weights have changed, 10 % of the entropies differ from transformers by",
        diagnosis="6 of 30 differ: tokens 13–15 of every row",
    ),
    Fault(
        id="head-in-fp32-of-the-first-call",
        bug="tokenspeed#1404 (review): a head in fp32 is kept by address and version, and .data.copy_ changes neither",
        rules=("LGP-003",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16"),
        wrap=with_first("logprobs", "logprobs", "output_layer.weight"),
        says="once weights have changed, half of the logprobs differ from transformers",
        diagnosis="nearest to those of the head before",
    ),
    Fault(
        id="routers-in-fp32-of-the-first-call",
        bug="sglang#30247 (review), vllm-ascend#16956: routers compute with a copy in another dtype that is made once",
        rules=("LGP-003",),
        cell=cell("glm4_moe", "one", dtype="bfloat16"),
        wrap=with_first("logprobs", "logprobs", ".router.weight"),
        one_rank=True,
        says="once weights have changed, half of the logprobs differ from transformers",
    ),
    Fault(
        id="token-at-a-border-of-no-rank",
        bug="apple/ml-cross-entropy#59 in kind: which rank has a token is wrong at ends of its part of the vocabulary",
        rules=("LGP-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_made(_begins_behind_the_first),
        says="once weights have changed, logprobs differ from transformers by",
        diagnosis="1 of 30 differ: tokens 15 of row 1",
    ),
    Fault(
        id="logprobs-put-back-by-the-order",
        bug="SkyRL#1865 in kind: samples are sorted by length, and logprobs put back by the order, not by its inverse",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one", batch="packed"),
        wrap=_made(_in_order_of_length),
        says="logprobs differ from transformers by",
        diagnosis="row 2 has those of row 5",
    ),
    Fault(
        id="logprobs-clamped",
        bug="MakazhanAlpamys/Soup#994 in kind: logprobs are clamped, which changes those of unlikely tokens alone",
        rules=("LGP-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(_clamped),
        says="logprobs differ from transformers by",
        diagnosis="clamped: all that differ are -20",
    ),
    Fault(
        id="logprobs-in-the-order-of-cp",
        bug="SkyRL#1751 in kind: what CP ranks hold is joined rank after rank, and not in the order of positions",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "cp2"),
        wrap=_made(_rank_after_rank),
        says="logprobs differ from transformers by",
        diagnosis="token 5 of row 0 has that of token 13",
    ),
    Fault(
        id="logprobs-on-one-tp-rank",
        bug="reported nowhere: only the first TP rank has logprobs, and the others a loss of nothing",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_made(_on_one_rank),
        says="no logprobs on a rank of the last stage",
    ),
    Fault(
        id="entropy-of-changed-logits",
        bug="verl#1672: logprobs are computed in the place of the logits, and entropies of what is left there",
        rules=("LGP-002",),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(_of_shares),
        says="entropies differ from transformers by",
        diagnosis="those of a softmax that is taken twice",
    ),
    Fault(
        id="entropy-of-changed-logits-at-1",
        bug="verl#1672 in kind: at a temperature of 1 no logits are divided (miles#1190), and so none copied",
        rules=("LGP-002",),
        cell=cell("qwen3_moe", "one", batch="pairs"),
        wrap=_made(_of_shares_at_1),
        says="entropies differ from transformers by",
        diagnosis="those of a softmax that is taken twice",
    ),
    Fault(
        id="logprobs-of-the-routers-own-choice",
        bug="NeMo-RL#2849: routes are not among the fields that the forward of logprobs is given",
        rules=("LGP-004",),
        cell=cell("qwen3_moe", "tp2", replay="R3"),
        wrap=_without_routes,
        diagnosis="those of the routers' own choice",
    ),
    Fault(
        id="logprobs-of-the-routers-own-choice-in-bf16",
        bug="NeMo-RL#2849 in kind: routes are not given to the forward of logprobs that a model in 16 bits takes",
        rules=("LGP-006",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", replay="R3"),
        wrap=_without_routes,
        one_rank=True,
        says="under given routes, half of the logprobs differ from transformers by",
        diagnosis="nearest to those of the routers' own choice",
    ),
    Fault(
        id="logprobs-under-the-routes-of-the-first-call",
        bug="SkyRL#1908 in kind: routes of a batch are kept, and log-probabilities of a later one are under them",
        rules=("LGP-004",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_under_the_first_routes,
        one_rank=True,
        says="under given routes, logprobs differ",
    ),
    Fault(
        id="logprobs-under-the-routes-of-a-step",
        bug="SkyRL#1908 the other way round: routes of a step are left, and logprobs of a later batch have them",
        rules=("LGP-004",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_under_routes_of_a_step,
        one_rank=True,
        says="under given routes, logprobs differ",
    ),
    Fault(
        id="logprobs-of-routes-computed-again",
        bug="miles#3277 in kind: logprobs are of the routes that an engine computed where it went on with a rollout",
        rules=("LGP-004",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_under_later_turns,
        one_rank=True,
        says="under given routes, logprobs differ",
        diagnosis="10 of 30 differ: tokens 6–15 of row 1",
    ),
    Fault(
        id="logprobs-of-weights-set-aside",
        bug="Automodel#3606 in kind: weights that logprobs are computed with are set aside, and never refreshed",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_of_weights_set_aside,
        diagnosis="those of the weights before",
    ),
    Fault(
        id="entropies-a-token-late",
        bug="prime-rl#1525 (review): logprobs are moved to their tokens, and entropies are not",
        rules=("LGP-002",),
        cell=cell("qwen3_moe", "one"),
        wrap=_made(_late),
        diagnosis="those of the token before",
    ),
    Fault(
        id="temperature-of-the-first-call",
        bug="GMISWE/tinker-cloud#26 in kind: logits are divided by one temperature, whatever samples were drawn with",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one"),
        wrap=_temperature_of_the_first,
        diagnosis="those of the temperature of the call before",
    ),
    Fault(
        id="temperature-stays-behind-logprobs",
        bug="GMISWE/tinker-cloud#26 the other way round: the temperature of a call for logprobs stays for forwards",
        rules=("LGP-005",),
        cell=cell("qwen3_moe", "one"),
        wrap=_temperature_stays,
        one_rank=True,
        says="after the call of logprobs logits are off",
    ),
    Fault(
        id="logprobs-of-one-replica",
        bug="Megatron-LM#7452 in kind: a group is not that of a replica, whose values others are given",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "tp2", world_size=4),
        wrap=_made(_of_one_replica),
        diagnosis="those of other rows",
    ),
    Fault(
        id="logprobs-of-the-first-tokens",
        bug="reported nowhere: a buffer of tokens is kept by its shape, and not filled again",
        rules=("LGP-001", "LGP-002"),
        cell=cell("qwen3_moe", "one"),
        wrap=_of_the_first_tokens,
        one_rank=True,
        diagnosis="those of other rows",
    ),
    Fault(
        id="logprobs-under-routes-of-replica-0",
        bug="slime#2385 in kind: routes of logprobs are not dealt out to data-parallel replicas as their rows are",
        rules=("LGP-004",),
        cell=cell("qwen3_moe", "one", world_size=2, replay="R3"),
        wrap=_under_routes_of_replica_0,
        says="under given routes, ",
        diagnosis="those under routes of other rows",
    ),
)
