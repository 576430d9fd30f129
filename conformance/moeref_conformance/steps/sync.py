"""Facet `sync`: weight updates of a running inference engine, and what it samples before, during and after them."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Engine, Sampled, Sync, to_plain
from moeref_conformance.contract.hf_files import weight_files
from moeref_conformance.contract.requests.sync import LONG, LOWER, MANY, SECOND, TEMPERATURES, VERSIONS, WEIGHTS
from moeref_conformance.steps.facet import Context, Facet, Step, answer, checked_rows, refusal
from moeref_conformance.steps.tensors import same_bytes

Named = tuple[str, torch.Tensor]
#: Tokens that are sampled after a prompt, where no update comes on the way.
NEW = 6
#: By how many tokens the prompts after an update are shorter, in calls of four: of the last layer each expert has to
#: have a sampled token, but for rare ones. It is only there that its weights show.
SHORTER = (0, 9, 18, 27)
#: How many tensors are sent before something happens.
SENT = 60
#: Seconds within which a sample is there that was asked for amid an update, once that has ended.
WAITING = 60.0
#: Seconds in which the processes of an engine that was killed have to be gone.
LEAVING = 10.0
#: Bytes at a multiple of which each tensor of a bucket begins.
ALIGNED = 64
#: The layer in a tensor's name.
LAYER = re.compile(r"model\.layers\.(\d+)\.")
#: What a loader may put together from parts that come one after the other.
MODULE = re.compile(r"self_attn|mlp\.experts|mlp\.shared_experts|mlp\.|block_sparse_moe\.experts|block_sparse_moe\.")
#: Tensors that failures are made with: of an attention and of an expert, away from the ends of the list.
ATTENTION = "model.layers.1.self_attn.o_proj.weight"
EXPERT = re.compile(r"model\.layers\.2\.(mlp\.experts\.3\.up_proj|block_sparse_moe\.experts\.3\.w3)\.weight")


def tensors(folder: Path) -> Iterator[Named]:
    """The tensors of a Hugging Face folder, file by file, as a trainer sends them."""
    for file in weight_files(folder):
        yield from load_file(file).items()


def scattered(folder: Path) -> Iterator[Named]:
    """As `tensors`, but ordered by kind of module, then of tensor, so that those of a layer or expert are far apart."""

    def place(pair: Named) -> tuple[str, str, str]:
        name = pair[0]
        kind = MODULE.match(LAYER.sub("", name))
        return (kind[0] if kind else "", (LAYER.match(name) or [""])[0], name[::-1])

    yield from sorted(tensors(folder), key=place, reverse=True)


def written_by(engine: Engine, sent: Iterable[Named], version: int) -> list[str]:
    """Send views of one buffer, a bucket, and overwrite it afterwards, as a trainer's next step does.

    Every second matrix lies there column by column, as where a trainer holds it transposed. Returns the names of the
    tensors that have other values once the engine has had them.
    """
    named = list(sent)
    room = [-(-tensor.nbytes // ALIGNED) * ALIGNED for _, tensor in named]
    buffer = torch.empty(sum(room), dtype=torch.uint8)
    parts = enumerate(zip(named, torch.split(buffer, room), strict=True))
    lent = [(name, _placed(part, t, number % 2 == 1)) for number, ((name, t), part) in parts]
    engine.update([*lent], version)
    written = [name for (name, given), (_, kept) in zip(lent, named, strict=True) if not same_bytes(given, kept)]
    buffer.zero_()
    return written


def update(engine: Engine, sent: Iterable[Named], version: int) -> None:
    """As `written_by`, for callers that do not ask what the engine wrote."""
    written_by(engine, sent, version)


def _placed(part: torch.Tensor, tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """A view of these bytes that has a tensor's values; a matrix column by column, if it is to be transposed."""
    memory = part[: tensor.nbytes].view(tensor.dtype)
    turned = transposed and tensor.dim() == 2
    return (memory.view(tensor.shape[::-1]).T if turned else memory.view(tensor.shape)).copy_(tensor)


def apart(prompt: list[int]) -> list[list[int]]:
    """Prompts without a common prefix: with several engines behind one name, no router gives all of them to one."""
    return [prompt[start:] for start in range(0, len(prompt), -(-len(prompt) // 4))]


def prompts(context: Context) -> list[list[int]]:
    """The rows of the kit's tokens."""
    rows: list[list[int]] = load_file(context.input("tokens"))["tokens"].tolist()
    return rows


def ask(engine: Engine, given: Sequence[list[int]]) -> list[dict[str, Any]]:
    """What is sampled after each prompt, with the prompt."""
    return said(given, engine.sample(given, NEW), range(NEW, NEW + 1))


def tempered(engine: Engine, given: Sequence[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """What is sampled after these prompts at other temperatures; samples at temperature 1 come after them."""
    wanted = range(LONG, LONG + 1)
    return {name: said(given, engine.sample(given, LONG, None, of), wanted) for name, of in TEMPERATURES.items()}


def said(given: Sequence[list[int]], sampled: Any, numbers: range) -> list[dict[str, Any]]:
    """Samples of so many tokens as plain values. Raises TypeError or ValueError for an answer of another form."""
    pairs = list(zip(given, checked_rows(sampled, Sampled), strict=True))
    for number, (_, one) in enumerate(pairs):
        tokens, logprobs, versions = len(one.tokens), len(one.logprobs), len(one.versions)
        if tokens not in numbers or not tokens == logprobs == versions:
            asked = f"{numbers.start} to {numbers[-1]}" if len(numbers) > 1 else numbers.start
            counts = f"{tokens} tokens, {logprobs} logprobs and {versions} versions"
            raise ValueError(f"sample {number} has {counts}; asked for {asked} of each")
    return [{"prompt": prompt, **to_plain(one)} for prompt, one in pairs]


def round_trip(sync: Sync, context: Context) -> dict[str, Any]:
    """To the second weights, back, and to third ones: what an engine was opened with, or had two updates before.

    After each update prompts that are new, and one that was there from the start. A turn goes on after a sample.
    """
    known, *fresh = prompts(context)
    with sync.open(context.input("checkpoint"), sync.modes()[0]) as engine:
        versions, written = [engine.version()], dict[str, list[str]]()
        # Of unequal lengths, one shorter than a cache's block, and in one batch: what an engine keeps of all tokens has
        # to be cut where each begins. Three: where graphs are of 1, 2, 4 … rows, the batch is filled up with one.
        sampled = {"first": ask(engine, [known, fresh[0][: len(fresh[0]) * 2 // 3], fresh[0][-7:]])}
        sampled["many"] = ask(engine, [fresh[0][start:] for start in range(MANY)])
        sampled["cached"] = ask(engine, [known] * 4)
        others = tempered(engine, apart(fresh[0]))
        begun = others["low"][0]
        sampled["turn"] = ask(engine, [[*begun["prompt"], *begun["tokens"], *known[:NEW]]])
        updates = (("second", tensors, fresh[1]), ("back", scattered, fresh[2]), ("again", scattered, fresh[1][::-1]))
        for name, sent, new in updates:
            written[name] = written_by(engine, sent(context.input(WEIGHTS[name])), VERSIONS[name])
            versions.append(engine.version())
            sampled[name] = [one for start in SHORTER for one in ask(engine, apart(new[start:]))]
            sampled[f"{name} known"] = ask(engine, [known])
        lower = _lower(engine, context, [*apart(fresh[2]), *apart(fresh[2][::-1]), known])
    return {"versions": versions, "written": written, "sampled": sampled, "tempered": others, "lower": lower}


def _lower(engine: Engine, context: Context, given: list[list[int]]) -> dict[str, Any]:
    """What is served for these prompts after an update to the second weights under a lower number than the last.

    So a trainer begins anew that has lost count. It may be refused. Some prompts were asked for when the first weights
    had that number.
    """
    refused = refusal(engine.update, tensors(context.input("second")), LOWER)
    return {"refused": refused, "sampled": answer(ask, engine, given)}


def under_way(sync: Sync, context: Context) -> dict[str, Any]:
    """An update while samples are under way, in every pause mode, what is sampled after it, and amid another.

    Of a prompt that is new, of one whose sample was finished before the update, and of one whose sample was under way:
    what that left in a cache is half of old weights.
    """
    finished, *given, fresh = prompts(context)[-4:]
    found = {}
    for mode in sync.modes():
        with sync.open(context.input("checkpoint"), mode) as engine:
            before = ask(engine, [finished])  # the last engine served other weights to that prompt
            meanwhile = engine.sample(given, LONG, lambda: update(engine, tensors(context.input("second")), 1))
            cut = said(given, meanwhile, range(1, LONG + 1))
            again = said(given[:1], engine.sample(given[:1], LONG), range(1, LONG + 1))
            then = [*ask(engine, [fresh, finished]), *again]
            amid = _amid(engine, context, apart(fresh)[1])
            found[mode] = {"before": before, "meanwhile": cut, "then": then, "amid": amid}
    return found


def _amid(engine: Engine, context: Context, prompt: list[int]) -> dict[str, Any]:
    """What another thread gets that asks for a sample amid an update back to the first weights, as version 2.

    After it the same prompt again, in `behind`: what a cache kept of it may be of half-updated weights. `sampled` is
    None for a thread that got no answer.
    """
    asked: dict[str, Any] = {"sampled": None}
    wanted = range(1, NEW + 1)

    def sample() -> None:
        asked["sampled"] = answer(lambda: said([prompt], engine.sample([prompt], NEW), wanted))

    thread = threading.Thread(target=sample, daemon=True)

    def meet() -> None:
        thread.start()
        thread.join(2)  # one that waits for the update goes on after it

    refused = refusal(engine.update, at(tensors(context.input("checkpoint")), meet), 2)
    thread.join(WAITING)
    return {"refused": refused, **asked, "behind": answer(ask, engine, [prompt])}


def at(sent: Iterable[Named], act: Callable[[], None]) -> Iterator[Named]:
    """These tensors; `act` is called on the way."""
    for number, pair in enumerate(sent):
        if number == SENT:
            act()
        yield pair


def two_at_once(sync: Sync, context: Context) -> dict[str, Any]:
    """Another thread's update, to the first weights as version 2, comes amid one to the second weights as version 1."""
    other: dict[str, str | None] = {}
    with sync.open(context.input("checkpoint"), sync.modes()[0]) as engine:

        def update() -> None:
            other["refused"] = refusal(engine.update, tensors(context.input("checkpoint")), 2)

        thread = threading.Thread(target=update, daemon=True)

        def meet() -> None:
            thread.start()
            thread.join(5)  # one that is to wait for the other goes on after it

        refused = refusal(engine.update, at(tensors(context.input("second")), meet), 1)
        thread.join()
        return {"refused": [refused, other["refused"]], **_state(engine, prompts(context)[0])}


def _state(engine: Engine, *given: list[int]) -> dict[str, Any]:
    """What an engine serves after a failure; a dead one refuses both."""
    return {"version": answer(engine.version), "sampled": answer(ask, engine, given)}


def killed(sync: Sync, context: Context) -> dict[str, Any]:
    """The engine's processes are killed amid an update."""
    with sync.open(context.input("checkpoint"), sync.modes()[0]) as engine:
        pids = list(engine.pids())

        def kill() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            _outlive(pids)  # a signal takes a moment, in which an update could end

        begun = time.monotonic()
        refused = refusal(engine.update, at(tensors(context.input("second")), kill), 1)
        seconds = time.monotonic() - begun
        state = {"refused": refused, **_state(engine, prompts(context)[0])}
        anew = answer(lambda: list(engine.pids()))  # an engine that is started again has other processes
    left = _outlive([*pids, *([] if isinstance(anew, dict) else anew)])
    return {"pids": pids, "seconds": seconds, "left": left, **state}


def _outlive(pids: Sequence[int]) -> list[int]:
    """The processes that still run after a while: a killed one closes its connections first, and frees memory later."""
    until = time.monotonic() + LEAVING
    while (left := list(filter(_runs, pids))) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _runs(pid: int) -> bool:
    """Whether a process is there and not only to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _breaks_off(sent: Iterable[Named]) -> Iterator[Named]:
    for number, pair in enumerate(sent):
        if number == SENT:
            raise ConnectionError("the trainer broke off")
        yield pair


def _breaks_off_at_the_end(sent: Iterable[Named]) -> Iterator[Named]:
    yield from sent
    raise ConnectionError("the trainer broke off")


def _changed(what: str, sent: Iterable[Named]) -> Iterator[Named]:
    for name, tensor in sent:
        if what == "lost" and EXPERT.fullmatch(name):
            continue
        if what == "cut" and EXPERT.fullmatch(name):
            tensor = tensor[:-1]
        if what == "folded" and name == ATTENTION:
            tensor = tensor.reshape(2 * len(tensor), -1)
        yield name, tensor
        if what == "twice" and name == ATTENTION:
            yield name, tensor
        if what == "unknown" and name == ATTENTION:
            yield name.replace("o_proj", "kit_proj"), tensor


def _with_draft(sent: Iterable[Named]) -> Iterator[Named]:
    """These, and then a draft (a multi-token prediction layer), which is named as the layer after the last one."""
    layers: dict[int, list[Named]] = {}
    for name, tensor in sent:
        yield name, tensor
        if found := LAYER.match(name):
            layers.setdefault(int(found[1]), []).append((name[found.end() :], -tensor))
    draft = max(layers) + 1
    yield from ((f"model.layers.{draft}.{name}", tensor) for name, tensor in layers[draft - 1])


def _wrong(what: str, sent: Iterable[Named]) -> Iterator[Named]:
    """The tensors of an update that has this wrong, one of `failed`'s words."""
    others = {"broken off": _breaks_off, "broken off at the end": _breaks_off_at_the_end, "draft": _with_draft}
    return iter(()) if what == "none" else others.get(what, functools.partial(_changed, what))(sent)


def failed(sync: Sync, context: Context) -> dict[str, Any]:
    """Updates with something wrong; what is served after each, and after a whole update where the engine lives on."""
    found: dict[str, Any] = {}
    names = [name for name, _ in tensors(context.input("second"))]
    if ATTENTION not in names or not any(map(EXPERT.fullmatch, names)):
        raise ValueError(f"no tensor to fail with: {ATTENTION} or {EXPERT.pattern} is not in the checkpoint")
    default, *_ = modes = sync.modes()
    for what in ("broken off", "broken off at the end", "none", "lost", "cut", "folded", "twice", "unknown", "draft"):
        found[what] = _failed(sync, context, default, what)
    for what in ("broken off", "lost"):  # what an engine was opened with is not what it had
        found[f"{what}{SECOND}"] = _failed_second(sync, context, what)
    found["a new engine"] = _new(sync, context, default)
    for mode in modes:  # what pauses and resumes an engine is other code in each
        found[f"broken off amid samples in pause mode {mode}"] = _failed_amid(sync, context, mode)
        if mode != default:
            found[f"a new engine in pause mode {mode}"] = _new(sync, context, mode)
    return found


def _failed(sync: Sync, context: Context, mode: str, what: str) -> dict[str, Any]:
    """An update that has `what` wrong; `again` is a whole one after it, where the engine lives on."""
    first, *_, last = prompts(context)
    with sync.open(context.input("checkpoint"), mode) as engine:
        refused = refusal(engine.update, _wrong(what, tensors(context.input("second"))), 1)
        state = {"refused": refused, **_state(engine, first)}
        if isinstance(state["version"], dict):
            return state
        number = 1 if refused else 2  # one that failed comes again as the same version
        return {**state, "again": _again(engine, context, number, last, first)}  # the first was asked before


def _failed_amid(sync: Sync, context: Context, mode: str) -> dict[str, Any]:
    """An update that breaks off while samples are under way; `again` as in `_failed`."""
    first, *given, last = prompts(context)[-4:]
    state: dict[str, Any] = {"refused": None}

    def break_off() -> None:
        state["refused"] = refusal(engine.update, _breaks_off(tensors(context.input("second"))), 1)

    with sync.open(context.input("checkpoint"), mode) as engine:
        met = answer(lambda: said(given, engine.sample(given, LONG, break_off), range(1, LONG + 1)))
        state |= {"meanwhile": met, **_state(engine, first, given[0])}
        if isinstance(state["version"], dict):
            return state
        return {**state, "again": _again(engine, context, 1 if state["refused"] else 2, last, first, given[0])}


def _failed_second(sync: Sync, context: Context, what: str) -> dict[str, Any]:
    """A whole update, and then one that has `what` wrong."""
    with sync.open(context.input("checkpoint"), sync.modes()[0]) as engine:
        if whole := refusal(engine.update, tensors(context.input("second")), 1):
            return {"again": {"asked": 1, "refused": whole}}
        refused = refusal(engine.update, _wrong(what, tensors(context.input("checkpoint"))), 2)
        return {"refused": refused, **_state(engine, prompts(context)[0])}


def _new(sync: Sync, context: Context, mode: str) -> dict[str, Any]:
    """A whole update of an engine that is opened after others have failed."""
    with sync.open(context.input("checkpoint"), mode) as engine:
        return {"again": _again(engine, context, 1, prompts(context)[-1])}


def _again(engine: Engine, context: Context, version: int, *given: list[int]) -> dict[str, Any]:
    """A whole update to the third weights: those of one that failed were others, as where a trainer has begun anew."""
    refused = refusal(engine.update, tensors(context.input("third")), version)
    return {"asked": version, "refused": refused, **_state(engine, *given)}


FACET = Facet(
    name="sync",
    protocol=Sync,
    serves=True,
    steps=(
        Step(name="sync", ask=round_trip),
        Step(name="sync_under_way", ask=under_way),
        Step(name="sync_two", ask=two_at_once),
        Step(name="sync_killed", ask=killed),
        Step(name="sync_failed", ask=failed),
    ),
)
