"""Bugs of weight updates: what is sent, what the engine keeps, and what it says that it serves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Cell, Sampled, World
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.contract.requests.sync import VERSIONS
from moeref_conformance.selftest.border import Swapped, checkpoint, facet
from moeref_conformance.selftest.faults.base import Fault, cell

Named = tuple[str, torch.Tensor]
#: What a sample has of each token.
CUT = ("tokens", "logprobs", "versions")
QWEN = cell("qwen3_moe", "one", layers=4, backend=ENGINE)
GLM = cell("glm4_moe", "one", layers=4, backend=ENGINE)


class _Wrong(Swapped):
    """An engine that was opened with a folder and does something wrong."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good)
        self.good, self.first = good, checkpoint(folder)


def engine(wrong: Callable[[Any, Path], Any]) -> Callable[[Any, Cell, World], Any]:
    """A fault's `wrap` that passes every engine through `wrong(engine, folder)`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        @contextmanager
        def opened(folder: Path, mode: str) -> Iterator[Any]:
            with session.sync.open(folder, mode) as good:
                yield wrong(good, folder)

        return facet(session, "sync", open=opened)

    return wrap


def sent(change: Callable[[dict[str, torch.Tensor], str, torch.Tensor], torch.Tensor]) -> type[_Wrong]:
    """An engine that is sent other tensors: `change(first weights, name, tensor)`."""

    class _Sent(_Wrong):
        def update(self, tensors: Iterable[Named], version: int) -> None:
            self.good.update(((name, change(self.first, name, tensor)) for name, tensor in tensors), version)

    return _Sent


class _Silent(_Wrong):
    """Takes an update's tensors and does nothing with them, but counts the version; from the update `after` on."""

    after = 1
    said: int | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if version < self.after:
            self.good.update(tensors, version)
            return
        for _ in tensors:
            pass
        self.said = version

    def version(self) -> int:
        return int(self.good.version() if self.said is None else self.said)

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        return [replace(one, versions=(self.version(),) * len(one.tokens)) for one in self.good.sample(*asked)]


class _Once(_Silent):
    """Only the first update arrives: what finalises it is done once."""

    after = VERSIONS["back"]


class _NewerAlone(_Wrong):
    """Leaves out an update whose version is no newer than its own, and says nothing of that."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if version > self.good.version():
            self.good.update(tensors, version)
            return
        for _ in tensors:
            pass


class _CacheByVersion(_Wrong):
    """What is kept of prompts is told apart by the version: one that comes again finds what was kept under it."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.begun, self.again, self.names = 0, False, {0: 0}
        self.kept: dict[tuple[int, ...], Sampled] = {}

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.begun += 1
        again = version in self.names.values()
        self.names[self.begun] = version
        try:
            self.good.update(tensors, self.begun)
        except Exception:
            del self.names[self.begun]
            raise
        self.again = again

    def version(self) -> int:
        return self.names[self.good.version()]

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = []
        for prompt, one in zip(prompts, self.good.sample(prompts, *asked), strict=True):
            named = replace(one, versions=tuple(self.names[version] for version in one.versions))
            key = (named.versions[-1], *prompt)
            found.append(self.kept.get(key, named) if self.again else named)
            self.kept[key] = named
        return found


class _LastByName(_Wrong):
    """Has the weights of each version in a folder, and loads that whose name is the last."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.folders = dict[str, dict[str, torch.Tensor]]()

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.folders[str(version)] = {name: tensor.clone() for name, tensor in tensors}
        self.good.update(self.folders[max(self.folders)].items(), version)


class _SetUpWithVersion1(_Silent):
    """What takes updates is set up with that of version 1."""

    ready = False

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.ready |= version == 1
        take = self.good.update if self.ready else super().update
        take(tensors, version)


class _Late(_Wrong):
    """Sends the other half of a double buffer: the weights of the version before."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        before, self.first = self.first, {name: tensor.clone() for name, tensor in tensors}
        self.good.update(before.items(), version)


class _OneStays(_Wrong):
    """The first update leaves the last expert of the last layer as it was; the next one has it."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        of_last = re.compile(r"model\.layers\.3\.mlp\.experts\.15\.")
        old, self.first = self.first, {}
        self.good.update(((name, old.get(name, t) if of_last.match(name) else t) for name, t in tensors), version)


class _Later(_Wrong):
    """Keeps the trainer's tensors, and copies them when the next prompt comes."""

    waits: tuple[list[Named], int] | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.waits = (list(tensors), version)

    def version(self) -> int:
        return self.waits[1] if self.waits else int(self.good.version())

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        if self.waits:
            self.good.update(*self.waits)
            self.waits = None
        return list(self.good.sample(*asked))


def _from_the_start(first: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As many elements from the start of the tensor's memory, wherever in it the tensor begins."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def _without_strides(first: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As many elements from where the tensor begins, one after the other, whatever its strides."""
    rows = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, rows, tensor.storage_offset())


class _Writes(_Wrong):
    """Adds 1 to the weights of norms, as its own layers hold them, where the trainer has them."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        lent = list(tensors)
        self.good.update(lent, version)
        for name, tensor in lent:
            if name.endswith("norm.weight"):
                tensor.data = tensor.data + 1


class _Fleet(_Wrong):
    """Two engines behind a router that deals each batch out, from the first on. Only the first is updated."""

    latest: dict[str, torch.Tensor] | None = None
    said, switched = 0, 0

    def update(self, tensors: Iterable[Named], version: int) -> None:
        came = {name: tensor.clone() for name, tensor in tensors}
        self._switch(came)
        self.latest, self.said = came, version

    def _switch(self, weights: dict[str, torch.Tensor]) -> None:
        self.switched += 1
        self.good.update(weights.items(), self.switched)

    def version(self) -> int:
        return self.said

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, *asked))
        if self.latest and len(prompts) > 1:
            self._switch(self.first)
            found[1::2] = self.good.sample(prompts[1::2], *asked)
            self._switch(self.latest)
        return [replace(one, versions=(self.said,) * len(one.tokens)) for one in found]


class _InTheFirstOrder(_Wrong):
    """Names are told in the first update; in later ones tensors of a shape, but experts, are taken in its order."""

    names: dict[torch.Size, list[str]] | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        told, named = dict[torch.Size, list[str]](), list[Named]()
        for name, tensor in tensors:
            if ".experts." in name:  # a loader may need those of a layer one after the other
                named.append((name, tensor))
                continue
            of_shape = told.setdefault(tensor.shape, [])
            known = self.names[tensor.shape][len(of_shape)] if self.names else name
            of_shape.append(name)
            named.append((known, tensor))
        self.good.update(named, version)
        self.names = self.names or told


class _Remembers(_Wrong):
    """Answers a prompt that it has seen from before the update."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.seen: dict[tuple[Any, ...], Sampled] = {}

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        version = self.good.version()
        for prompt, one in zip(prompts, self.good.sample(prompts, *asked), strict=True):
            self.seen.setdefault((*prompt, asked), one)
        known = [self.seen[(*prompt, asked)] for prompt in prompts]
        return [replace(one, versions=(version,) * len(one.tokens)) for one in known]


def _with_rows(one: Sampled, then: Any, prompt: int) -> Sampled:
    """A sample whose first `prompt` rows of routes are those of `then`, if there are any."""
    return replace(one, routes=(*then[:prompt], *one.routes[prompt:])) if one.routes and then else one


class _CachedRoutes(_Wrong):
    """Gives a prompt that it has seen the routes of then, beside the tokens and logprobs of now."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.seen: dict[tuple[int, ...], Any] = {}

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        now = zip(prompts, self.good.sample(prompts, *asked), strict=True)
        return [_with_rows(one, self.seen.setdefault(tuple(prompt), one.routes), len(prompt)) for prompt, one in now]


class _RoutesOfBefore(_Wrong):
    """After an update amid samples the prompts of these keep the routes that they had before it."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.kept: dict[tuple[int, ...], Any] = {}

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        if during:
            before = zip(prompts, self.good.sample(prompts, tokens), strict=True)
            self.kept = {tuple(prompt): one.routes for prompt, one in before}
            return list(self.good.sample(prompts, tokens, during))
        now = zip(prompts, self.good.sample(prompts, tokens, None, *more), strict=True)
        return [_with_rows(one, self.kept.get(tuple(prompt)), len(prompt)) for prompt, one in now]


class _EvenlyCut(_Wrong):
    """Cuts the routes of a batch into as many equal parts as it has prompts."""

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, *asked))
        rows = [row for one in found for row in one.routes or ()]
        each = len(rows) // len(found)
        cut = [tuple(rows[number * each : (number + 1) * each]) for number in range(len(found))]
        return [replace(one, routes=one.routes and part) for one, part in zip(found, cut, strict=True)]


class _Buffer(_Wrong):
    """Captures routes in a buffer for so many tokens at once, and breaks at a prompt of more."""

    tokens = 4

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        if (longest := max(map(len, prompts))) > self.tokens:
            raise IndexError(f"{longest} tokens are larger than the buffer of routes")
        return list(self.good.sample(prompts, *asked))


def _behind(found: dict[tuple[int, ...], int], prompt: Sequence[int]) -> tuple[int, int]:
    """Where in a prompt the longest earlier sample that it begins with has its own tokens; (0, 0) if it has none."""
    ends = (end for end in range(len(prompt), 0, -1) if tuple(prompt[:end]) in found)
    end = next(ends, 0)
    return found.get(tuple(prompt[:end]), 0), end


class _Turns(_Wrong):
    """Knows of each prompt which of its tokens an earlier sample has made, and are in a cache since."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.made: dict[tuple[int, ...], int] = {}

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = self.answered(prompts, *asked)
        self.made |= {(*prompt, *one.tokens): len(prompt) for prompt, one in zip(prompts, found, strict=True)}
        return found

    def answered(self, prompts: Sequence[list[int]], *asked: Any) -> list[Sampled]:
        """What is sampled."""
        return list(self.good.sample(prompts, *asked))


class _SampledRowsLost(_Turns):
    """Keeps routes with the blocks of a prompt: a token that was sampled has the row before it where it is cached."""

    def answered(self, prompts: Sequence[list[int]], *asked: Any) -> list[Sampled]:
        pairs = zip(prompts, super().answered(prompts, *asked), strict=True)
        return [replace(one, routes=one.routes and self._lost(prompt, one.routes)) for prompt, one in pairs]

    def _lost(self, prompt: list[int], rows: tuple[Any, ...]) -> tuple[Any, ...]:
        begin, end = _behind(self.made, prompt)
        return (*rows[:begin], *(rows[begin - 1],) * (end - begin), *rows[end:])


class _LastTokenNotRun(_Turns):
    """Caches a sample with its last token, which was not run: what is there in its place is another token's."""

    def answered(self, prompts: Sequence[list[int]], *asked: Any) -> list[Sampled]:
        return super().answered([self._stale(prompt) for prompt in prompts], *asked)

    def _stale(self, prompt: list[int]) -> list[int]:
        _, end = _behind(self.made, prompt)
        return [*prompt[: end - 1], prompt[end - 2], *prompt[end:]] if end else prompt


class _OpenedAgain(_Wrong):
    """From the second update on the engine is put back to what it was opened with."""

    later = False

    def update(self, tensors: Iterable[Named], version: int) -> None:
        held = self.first if self.later else {}
        self.good.update(((name, held.get(name, tensor)) for name, tensor in tensors), version)
        self.later = True


class _EndsTheFirst(_Wrong):
    """An update that comes amid another is refused, and ends that one, which returns as if it were done."""

    busy = ended = False

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if self.busy:
            self.ended = True
            raise RuntimeError("an update is under way")
        self.busy, self.ended = True, False
        try:
            read = [(name, tensor.clone()) for name, tensor in tensors]
        finally:
            self.busy = False
        if not self.ended:
            self.good.update(iter(read), version)


class _TwoBuffers(_Wrong):
    """Fills two buffers in turn, and reads one that is filled again before it is."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.buffers = list[dict[str, torch.Tensor]]()

    def update(self, tensors: Iterable[Named], version: int) -> None:
        held, filled = self.buffers, dict[str, torch.Tensor]()
        self.buffers = [*held[-1:], filled]
        read = held[0] if len(held) > 1 else {}

        def passed() -> Iterator[Named]:
            for name, tensor in tensors:
                filled[name] = tensor.clone()
                yield name, read.get(name, tensor)

        self.good.update(passed(), version)


class _PairsInABucket(_Wrong):
    """What the engine holds as one tensor is put together within a bucket: of two parts in two the first is lost."""

    #: A file of a checkpoint has up to 31 between them.
    tensors = 31

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.held = self.first

    def update(self, tensors: Iterable[Named], version: int) -> None:
        sent = [(name, tensor.clone()) for name, tensor in tensors]
        place = {name: number for number, (name, _) in enumerate(sent)}
        lost = {name for name, at in place.items() if place.get(_swapped(name), at) > at + self.tensors}
        kept = [(name, self.held[name] if name in lost else tensor) for name, tensor in sent]
        self.good.update(kept, version)
        self.held = dict(kept)


class _IntoACorner(_Wrong):
    """An expert that is smaller than the engine's, which may be padded, is copied into a corner of it."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.good.update(((name, self._fitted(name, tensor)) for name, tensor in tensors), version)

    def _fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self.first.get(name)
        if held is None or ".experts." not in name or tensor.numel() >= held.numel():
            return tensor
        padded = held.clone()
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor
        return padded


def _given(folder: Path) -> dict[str, Any]:
    """What the generation_config.json beside an engine's weights says; nothing if there is none."""
    file = folder / "generation_config.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


class _PassesOver(_Wrong):
    """Never takes certain tokens at temperature 0."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.given = _given(folder)

    def never(self, row: list[int]) -> set[int]:
        """Those that are not taken after a row."""
        raise NotImplementedError

    def sample(self, prompts: Sequence[list[int]], tokens: int, *more: Any) -> Sequence[Sampled]:
        if len(more) < 2 or more[1]:
            return list(self.good.sample(prompts, tokens, *more))
        return [self._passing(list(prompt), tokens) for prompt in prompts]

    def _passing(self, row: list[int], tokens: int) -> Sampled:
        made = list[Sampled]()
        for _ in range(tokens):
            (one,), never = self.good.sample([row], 1, None, 0.0), self.never(row)
            while one.tokens[0] in never:
                (one,) = self.good.sample([row], 1, None, 0.125)
            made.append(one)
            row = [*row, *one.tokens]
        joined = {name: tuple(of for one in made for of in getattr(one, name)) for name in CUT}
        return replace(made[-1], **joined)


class _Penalty(_PassesOver):
    """Takes the penalty of repetitions from the file, since it is passed none."""

    def never(self, row: list[int]) -> set[int]:
        return set(row) if self.given.get("repetition_penalty", 1.0) > 1.0 else set()


class _NoEnd(_PassesOver):
    """Is told a least number of tokens, so that what ends a sequence has no probability."""

    def never(self, row: list[int]) -> set[int]:
        return set(self.given.get("eos_token_id", ()))


class _FewerTokens(_Wrong):
    """Samples no more tokens than the file says, though more are asked for."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.most = _given(folder).get("max_new_tokens", 1000)

    def sample(self, prompts: Sequence[list[int]], tokens: int, *more: Any) -> Sequence[Sampled]:
        return list(self.good.sample(prompts, min(tokens, self.most), *more))


class _FirstLogprob(_Wrong):
    """Reads the logprob of another token than the one that was sampled: the first of a table."""

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        found = self.good.sample(*asked)
        return [replace(one, logprobs=one.logprobs[:1] * len(one.logprobs)) for one in found]


def _answering(change: Callable[[Sampled], Sampled]) -> type[_Wrong]:
    """An engine whose samples pass through `change`."""

    class _Answers(_Wrong):
        def sample(self, *asked: Any) -> Sequence[Sampled]:
            return [change(one) for one in self.good.sample(*asked)]

    return _Answers


def _expert_twice(one: Sampled) -> Sampled:
    """The same with the last expert of each route once more."""
    rows = one.routes and tuple(tuple((*route, route[-1]) for route in row) for row in one.routes)
    return replace(one, routes=rows)


def _place(name: str) -> str:
    """Where an expert stood before two of its layer were exchanged."""
    return re.sub(r"(?<=\.experts\.)([01])(?=\.)", lambda found: str(1 - int(found[0])), name)


class _Moved(_Wrong):
    """Writes experts to their first places after the engine has moved two of each layer."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.good.update(((_place(name), tensor) for name, tensor in tensors), version)


def _bf16_bias(first: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float() if name.endswith("e_score_correction_bias") else tensor


def _without_one(first: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return first[name] if name == "model.layers.2.mlp.experts.3.up_proj.weight" else tensor


def _transposed(first: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous() if ".experts." in name and tensor.shape[0] == tensor.shape[-1] else tensor


def _swapped(name: str) -> str:
    parts = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return ".".join(parts.get(part, part) for part in name.split("."))


class _SwapsOnTheWay(_Wrong):
    """Names gate_proj what is up_proj."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.good.update(((_swapped(name), tensor) for name, tensor in tensors), version)


def _loads_swapped(session: Any, cell: Cell, world: World) -> Any:
    @contextmanager
    def opened(folder: Path, mode: str) -> Iterator[Any]:
        wrong = world.workdir / "swapped"
        shutil.copytree(folder, wrong, copy_function=shutil.copyfile, dirs_exist_ok=True)
        wrong.chmod(0o755)
        for file in wrong.glob("*.safetensors"):
            save_file({_swapped(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
        with session.sync.open(wrong, mode) as good:
            yield good

    return facet(session, "sync", open=opened)


class _Labels(_Wrong):
    """Labels that are not made where tokens are: `label` is asked when the answer arrives."""

    def label(self) -> int:
        return int(self.good.version())

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        found = self.good.sample(*asked)
        return [replace(one, versions=(self.label(),) * len(one.tokens)) for one in found]


class _FloatVersion(_Wrong):
    """The version comes from a message in which every number is a float."""

    def version(self) -> Any:
        return float(self.good.version())


class _FirstLabels(_Labels):
    """Every token has the version that the engine was opened with, or that it had when an update failed."""

    read = 0

    def update(self, tensors: Iterable[Named], version: int) -> None:
        try:
            self.good.update(tensors, version)
        except Exception:
            with suppress(Exception):  # of an engine that is dead there is nothing to read
                self.read = self.good.version()
            raise

    def label(self) -> int:
        return self.read


class _LabelsOfAFailure(_Wrong):
    """The version of an update that failed is noted for labels before it is loaded."""

    noted: int | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.noted = version
        self.good.update(tensors, version)
        self.noted = None

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(*asked))
        if self.noted is None:
            return found
        return [replace(one, versions=(self.noted,) * len(one.tokens)) for one in found]


class _Mixes(_Wrong):
    """Takes an update amid another, whose remaining tensors it sends in place of the other's."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.under_way, self.later = False, dict[str, torch.Tensor]()

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if self.under_way:
            self.later = dict(tensors)
            return
        self.under_way = True
        try:
            self.good.update(((name, self.later.get(name, tensor)) for name, tensor in tensors), version)
        finally:
            self.under_way = False


class _Unawaited(_Wrong):
    """Nobody waits for the outcome of an update."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        with suppress(Exception):
            self.good.update(tensors, version)


class _KeepsHalf(_Wrong):
    """What came of an update that failed stays."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        came, failure = dict(self.first), None
        try:
            for name, tensor in tensors:
                came[name] = tensor if tensor.shape == self.first[name].shape else self.first[name]
        except Exception as error:
            failure = error
        self.good.update(came.items(), version)
        if failure:
            raise failure


class _StartsAnew(_Wrong):
    """An engine that failed in an update is replaced by one as it was opened, under the version that it had."""

    had: int | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        before = self.version()
        try:
            came = list(tensors)
        except Exception:
            if before:
                self.good.update(self.first.items(), version)
                self.had = before
            raise
        self.good.update(came, version)
        self.had = None

    def version(self) -> int:
        version: int = self.good.version()
        return version if self.had is None else self.had


class _Ends(_Wrong):
    """Takes an update as soon as there is a tensor for each of the model's, and then waits for the sender to end."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        sent, came = iter(tensors), dict[str, torch.Tensor]()
        for name, tensor in sent:
            came[name] = tensor
            if len(came) == len(self.first):
                break
        self.good.update(came.items(), version)
        for _ in sent:
            pass


class _Empty(_Silent):
    """Where there is nothing to write, nothing can fail."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        sent = list(tensors)
        self.said = None if sent else version
        if sent:
            self.good.update(sent, version)

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        return list(self.good.sample(*asked)) if self.said is None else super().sample(*asked)


class _ByNumber(_Wrong):
    """Copies as many elements as a tensor has, whatever its shape."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        def fitted(name: str, tensor: torch.Tensor) -> torch.Tensor:
            held = self.first.get(name)
            return tensor if held is None or held.numel() != tensor.numel() else tensor.reshape(held.shape)

        self.good.update(((name, fitted(name, tensor)) for name, tensor in tensors), version)


class _GoesOn(_Wrong):
    """An update of a version that has failed goes on where that broke off: what came then is not taken again.

    What came is kept as files would be, so that an engine that takes the place of a dead one finds it too.
    """

    came: ClassVar[dict[int, dict[str, torch.Tensor]]] = {}

    def update(self, tensors: Iterable[Named], version: int) -> None:
        came = self.came.setdefault(version, {})

        def kept() -> Iterator[Named]:
            for name, tensor in tensors:
                whole = name in self.first and tensor.shape == self.first[name].shape
                yield name, came.setdefault(name, tensor.clone()) if whole else tensor

        self.good.update(kept(), version)
        del self.came[version]


class _Counts(_Wrong):
    """Counts the updates that were begun, whatever version they are said to be."""

    begun, counted = 0, 0

    def update(self, tensors: Iterable[Named], version: int) -> None:
        self.begun += 1
        self.good.update(tensors, version)
        self.counted = self.begun

    def version(self) -> int:
        return self.counted if self.good.version() else 0

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        found = self.good.sample(*asked)
        return [replace(one, versions=tuple(min(v, self.counted) for v in one.versions)) for one in found]


class _KeepsRunning(_Wrong):
    """A cache is not emptied of what runs, and answers of a prompt that an update has met are from before it."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.kept: dict[tuple[int, ...], Sampled] = {}

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        if during:
            self.kept = {tuple(p): one for p, one in zip(prompts, self.good.sample(prompts, tokens), strict=True)}
            return list(self.good.sample(prompts, tokens, during))
        found = zip(prompts, self.good.sample(prompts, tokens, None, *more), strict=True)
        old = ((one, self.kept.get(tuple(prompt), one)) for prompt, one in found)
        return [replace(one, logprobs=kept.logprobs[:tokens]) for one, kept in old]


class _KeepsFinished(_KeepsRunning):
    """A cache is not emptied amid samples, and answers of a prompt that was finished are from before the update."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.seen: dict[tuple[int, ...], Sampled] = {}

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        if during:
            self.kept = self.seen
            return list(self.good.sample(prompts, tokens, during))
        found = super().sample(prompts, tokens, None, *more)
        self.seen = {**self.seen, **{tuple(prompt): one for prompt, one in zip(prompts, found, strict=True)}}
        return found


class _KeepsAfterAFailure(_Wrong):
    """The way back from a failure leaves the cache marked as empty, and the next update does not empty it."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.kept: dict[tuple[int, ...], Sampled] | None = None

    def update(self, tensors: Iterable[Named], version: int) -> None:
        try:
            self.good.update(tensors, version)
        except Exception:
            self.kept = {}
            raise

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, *asked))
        if self.kept is None:
            return found
        old = [self.kept.setdefault(tuple(prompt), one) for prompt, one in zip(prompts, found, strict=True)]
        return [replace(one, logprobs=kept.logprobs) for one, kept in zip(found, old, strict=True)]


def _kept_on_disk(session: Any, cell: Cell, world: World) -> Any:
    """What engines keep of prompts outlives them, and is of the weights that the last one served. Updates empty it."""
    kept: dict[tuple[int, ...], tuple[Any, Sampled]] = {}

    class _Keeps(_Wrong):
        def update(self, tensors: Iterable[Named], version: int) -> None:
            kept.clear()
            self.good.update(tensors, version)

        def sample(self, prompts: Sequence[list[int]], tokens: int, *more: Any) -> Sequence[Sampled]:
            found = list(self.good.sample(prompts, tokens, *more))
            if more:
                return found
            for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
                of, before = kept.setdefault(tuple(prompt), (self, one))
                if of is not self and len(before.tokens) == tokens:
                    found[number] = replace(before, versions=one.versions)
            return found

    return engine(_Keeps)(session, cell, world)


class _OncePerVersion(_Wrong):
    """Refuses a version that it has heard of, though its update failed."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.heard: set[int] = set()

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if version in self.heard:
            raise ValueError(f"version {version} has been sent")
        self.heard.add(version)
        self.good.update(tensors, version)


class _Likelier(_Wrong):
    """Draws the likelier tokens, as with a temperature or a top-k that nobody asked for."""

    times = 16

    def update(self, tensors: Iterable[Named], version: int) -> None:
        try:
            self.good.update(tensors, version)
        except Exception:
            self.times = 1  # the rule reads none of the samples that come then, and drawing takes long
            raise

    def sample(self, prompts: Sequence[list[int]], tokens: int, *more: Any) -> Sequence[Sampled]:
        if more:
            self.times = 1 if more[0] else self.times  # no sample that comes after an update amid others is read either
            return list(self.good.sample(prompts, tokens, *more))
        drawn = [list(self.good.sample(prompts, tokens)) for _ in range(self.times)]
        return [max(of_prompt, key=lambda one: sum(one.logprobs)) for of_prompt in zip(*drawn, strict=True)]


class _Alike(_Wrong):
    """One seed for all: a prompt that comes twice is answered alike."""

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        first: dict[tuple[int, ...], Sampled] = {}
        found = zip(prompts, self.good.sample(prompts, *asked), strict=True)
        return [first.setdefault(tuple(prompt), one) for prompt, one in found]


class _SeedOfPlace(_Wrong):
    """The seed of a prompt is its place in the call; of the same seed, prompt and weights come the same tokens."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.drawn: dict[Any, Sampled] = {}

    def seeds(self, number: int) -> list[Any]:
        """Those of a call with so many prompts."""
        return list(range(number))

    def sample(self, prompts: Sequence[list[int]], tokens: int, *more: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, tokens, *more))
        if more:
            return found
        drawn = zip(self.seeds(len(prompts)), prompts, found, strict=True)
        version = self.good.version()
        return [self.drawn.setdefault((seed, version, tokens, *prompt), one) for seed, prompt, one in drawn]


class _SeedOfPlaceInPart(_SeedOfPlace):
    """Each call has a seed of its own and is dealt out to two workers, where a prompt adds its place in their part."""

    calls = 0

    def seeds(self, number: int) -> list[Any]:
        self.calls += 1
        return [(self.calls, place % -(-number // 2)) for place in range(number)]


class _LoadsDraft(_Wrong):
    """Takes the layer of a draft, which comes after the last one of the model, for that one."""

    def update(self, tensors: Iterable[Named], version: int) -> None:
        last = max(int(name.split(".")[2]) for name in self.first if name.startswith("model.layers."))
        draft, layer = f"model.layers.{last + 1}.", f"model.layers.{last}."
        sent = {name.replace(draft, layer): tensor for name, tensor in tensors}
        self.good.update(sent.items(), version)


class _EndsWhatItKeeps(_Wrong):
    """What ends an update ends the samples that were under way, in any pause mode."""

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, tokens, during, *more))
        if not during:
            return found
        begun = [one.versions.count(one.versions[0]) for one in found]
        cut = [{name: getattr(one, name)[:n] for name in CUT} for one, n in zip(found, begun, strict=True)]
        return [replace(one, **parts, routes=None) for one, parts in zip(found, cut, strict=True)]


class _ServesAmid(_Wrong):
    """An engine that is not paused: a sample that is asked for amid an update has what came of it, and old weights."""

    def __init__(self, good: Any, folder: Path) -> None:
        super().__init__(good, folder)
        self.held, self.came = self.first, dict[str, torch.Tensor]()
        self.said = [0]  # versions of the updates that the good engine had

    def update(self, tensors: Iterable[Named], version: int) -> None:
        if self.came:
            raise RuntimeError("an update is under way")
        try:
            sent = []
            for name, tensor in tensors:
                self.came[name] = tensor.clone()
                sent.append((name, tensor))
            self._load(sent, version)
            self.held = {**self.held, **self.came}
        finally:
            self.came = {}

    def _load(self, sent: Iterable[Named], version: int) -> None:
        self.good.update(sent, len(self.said))
        self.said.append(version)

    def version(self) -> int:
        return int(self.said[self.good.version()])

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        if self.came:
            self._load({**self.held, **self.came}.items(), self.said[-1])
        found = self.good.sample(*asked)
        return [replace(one, versions=tuple(self.said[version] for version in one.versions)) for one in found]


class _GoesOnTorn(_ServesAmid):
    """Where an update breaks off amid samples these go on with what came of it, before the old weights are put back."""

    amid, torn = False, False

    def update(self, tensors: Iterable[Named], version: int) -> None:
        sent = []
        try:
            for name, tensor in tensors:
                sent.append((name, tensor.clone()))
        except Exception:
            if self.amid:
                self.torn = True
                self._load({**self.first, **dict(sent)}.items(), self.said[-1])
            raise
        self._load(sent, version)

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        self.amid = bool(during)
        found = super().sample(prompts, tokens, during, *more)
        if self.torn:
            self._load(self.first.items(), self.said[-1])
        self.amid = self.torn = False
        return found


class _RoutesComputedAgain(_Wrong):
    """A sample that an update has met has the routes of its tokens with the new weights, by which it was run again."""

    def sample(self, prompts: Sequence[list[int]], tokens: int, during: Any = None, *more: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(prompts, tokens, during, *more))
        if not during:
            return found
        whole = [[*prompt, *one.tokens] for prompt, one in zip(prompts, found, strict=True)]
        again = zip(whole, self.good.sample(whole, 1), strict=True)
        rows = [one.routes and one.routes[: len(row) - 1] for row, one in again]
        return [replace(one, routes=routes) for one, routes in zip(found, rows, strict=True)]


def _at(change: Callable[[float], float]) -> type[_Wrong]:
    """An engine that samples at another temperature than the one that is asked for."""

    class _At(_Wrong):
        def sample(self, prompts: Any, tokens: int, during: Any = None, temperature: float = 1.0) -> Sequence[Sampled]:
            return list(self.good.sample(prompts, tokens, during, change(temperature)))

    return _At


class _PadsBatches(_Wrong):
    """Runs a batch in the size of the next graph: the rows that fill it up write over the first row's first token."""

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        if not len(prompts) & len(prompts) - 1:
            return list(self.good.sample(prompts, *asked))
        (first, *row), *others = prompts
        return list(self.good.sample([[(first or 2) - 1, *row], *others], *asked))


class _InTheOrderOfText(_Wrong):
    """Sorts what it gives back by the numbers of prompts, as text."""

    def sample(self, prompts: Sequence[list[int]], *asked: Any) -> Sequence[Sampled]:
        found = self.good.sample(prompts, *asked)
        return [found[number] for number in sorted(range(len(found)), key=str)]


class _BeyondTheVocabulary(_Wrong):
    """The second sample ends with a token of the rows that pad the head: chance is one in many."""

    numbers = 0

    def sample(self, *asked: Any) -> Sequence[Sampled]:
        found = list(self.good.sample(*asked))
        before, self.numbers = self.numbers, self.numbers + len(found)
        if before < 2 <= self.numbers and len(found) > 1:
            rows = len(self.first["model.embed_tokens.weight"])
            found[1] = replace(found[1], tokens=(*found[1].tokens[:-1], rows))
        return found


class _TemperatureOfBefore(_Wrong):
    """A temperature that was asked for is kept for all calls that name none."""

    kept = 1.0

    def sample(self, prompts: Any, tokens: int, during: Any = None, *more: float) -> Sequence[Sampled]:
        self.kept = more[0] if more else self.kept
        return list(self.good.sample(prompts, tokens, during, self.kept))


class _DividesLogprobs(_Wrong):
    """Divides the logprobs of tokens by the temperature."""

    def sample(self, prompts: Any, tokens: int, during: Any = None, temperature: float = 1.0) -> Sequence[Sampled]:
        found = self.good.sample(prompts, tokens, during, temperature)
        return [replace(one, logprobs=tuple(p / (temperature or 1.0) for p in one.logprobs)) for one in found]


def _stays_paused(session: Any, cell: Cell, world: World) -> Any:
    """Once an update has failed for good, no later one of any engine is taken."""
    lost: list[Exception] = []

    class _Paused(_Wrong):
        def update(self, tensors: Iterable[Named], version: int) -> None:
            if lost:
                raise TimeoutError("the engine is still paused")
            try:
                self.good.update(tensors, version)
            except Exception as error:
                if refusal_of(self.good.version):
                    lost.append(error)
                raise

    return engine(_Paused)(session, cell, world)


def _stays_paused_in_one_mode(session: Any, cell: Cell, world: World) -> Any:
    """Once an update has failed in another pause mode than the default, no later one of any engine in it is taken."""
    lost: set[str] = set()

    class _Paused(_Wrong):
        mode = ""

        def update(self, tensors: Iterable[Named], version: int) -> None:
            if self.mode in lost:
                raise TimeoutError(f"the engine is still paused in mode {self.mode}")
            try:
                self.good.update(tensors, version)
            except Exception:
                lost.add(self.mode)
                raise

    @contextmanager
    def opened(folder: Path, mode: str) -> Iterator[Any]:
        with session.sync.open(folder, mode) as good:
            paused = _Paused(good, folder)
            paused.mode = mode
            yield good if mode == session.sync.modes()[0] else paused

    return facet(session, "sync", open=opened)


def refusal_of(call: Callable[[], Any]) -> bool:
    """Whether the call raises."""
    try:
        call()
    except Exception:
        return True
    return False


FAULTS = (
    Fault(
        id="loader-swaps-gate-and-up",
        bug="SkyRL#1680: the engine's loader puts weights in the wrong place, here gate in that of up",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=_loads_swapped,
        says="none of the weights that were sent",
    ),
    Fault(
        id="version-as-a-float",
        bug="reported nowhere: a version that went through JSON or a tensor names other files than the number does",
        rules=("SYN-005",),
        cell=QWEN,
        wrap=engine(_FloatVersion),
        says="versions [0.0, 2.0, 9.0, 10.0] after opening and three updates",
    ),
    Fault(
        id="logprob-of-another-token",
        bug="NeMo-RL#3297: the logprob is that of the first entry, and not of the sampled token",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=engine(_FirstLogprob),
        says="before any update: logprobs are",
    ),
    Fault(
        id="buffer-of-routes-too-small",
        bug="sglang#26860: a prompt that is larger than the buffer for routes kills the engine",
        rules=("RUN-001",),
        cell=QWEN,
        wrap=engine(_Buffer),
        says="larger than the buffer of routes",
    ),
    Fault(
        id="samples-end-at-once",
        bug="reported nowhere: an engine that takes an end of sequence for one although it was told to go on",
        rules=("RUN-001",),
        cell=QWEN,
        wrap=engine(_answering(lambda one: replace(one, tokens=(), logprobs=(), versions=()))),
        says="sample 0 has 0 tokens",
    ),
    Fault(
        id="tokens-without-labels",
        bug="AReaL#1569 in kind: samples carry no version, which an empty set of labels does not contradict",
        rules=("RUN-001",),
        cell=QWEN,
        wrap=engine(_answering(lambda one: replace(one, versions=()))),
        says="6 tokens, 6 logprobs and 0 versions",
    ),
    Fault(
        id="update-dropped",
        bug="torchtitan#3867, W16: tensors are taken, and the policy never changes",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Silent),
        says="the first weights give them",
    ),
    Fault(
        id="last-expert-an-update-late",
        bug="reported nowhere: one update leaves the last expert of the last layer as it was, and the next one has it",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_OneStays),
        says="none of the weights that were sent",
    ),
    Fault(
        id="updates-from-version-1-on",
        bug="open-instruct#1627: updates are set up in step 1, and a run that goes on begins after it",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_SetUpWithVersion1),
        says="the first weights give them",
    ),
    Fault(
        id="weights-of-the-version-before",
        bug="astraflow: the half of the double buffer that is not being written",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Late),
        says="the first weights give them",
    ),
    Fault(
        id="copied-with-the-next-prompt",
        bug="slime#1348 in kind: the sender goes on before the engine has copied, and its memory is used again",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Later),
        says="none of the weights that were sent",
    ),
    Fault(
        id="offset-in-memory-ignored",
        bug="vLLM#40828 in kind: where tensors begin in one buffer is lost, and each is read from its start",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(sent(_from_the_start)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="strides-ignored",
        bug="prime-rl#3113 in kind: a view with strides is read as if its elements lay one after the other",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(sent(_without_strides)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="norms-changed-where-the-trainer-has-them",
        bug="Megatron-Bridge#1929 in kind: what converts weights writes to the trainer's, once more with every update",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Writes),
        says="an update has written to",
    ),
    Fault(
        id="first-engine-updated",
        bug="sglang#2050: of several engines behind one name only the first gets an update",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Fleet),
        says="the first weights give them",
    ),
    Fault(
        id="tensor-not-replaced",
        bug="prime-rl#2714: one tensor of a layer is not loaded",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(sent(_without_one)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="update-added-to-the-old",
        bug="NeMo-RL (documentation): a full update is applied as a difference",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(sent(lambda first, name, tensor: first[name] + tensor)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="gate-and-up-swapped-on-the-way",
        bug="verl#7195: weights are sent in another layout than the engine's, here up before gate",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_SwapsOnTheWay),
        says="none of the weights that were sent",
    ),
    Fault(
        id="experts-in-their-first-places",
        bug="vLLM#55228: after experts were moved, an update writes them to where they were at first",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(_Moved),
        says="none of the weights that were sent",
    ),
    Fault(
        id="experts-transposed-on-the-way",
        bug="ms-swift#9828: one side transposes, and shapes that are square hide it",
        rules=("SYN-002",),
        cell=QWEN,
        wrap=engine(sent(_transposed)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="bias-rounded-on-the-way",
        bug="B41: the experts' bias is sent in bf16",
        rules=("SYN-002",),
        cell=GLM,
        wrap=engine(sent(_bf16_bias)),
        says="none of the weights that were sent",
    ),
    Fault(
        id="second-update-dropped",
        bug="verl#7470: from the second update on, weights look processed and are left as they are",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_Once),
        says="the second weights give them",
    ),
    Fault(
        id="last-version-by-name",
        bug="nvidia-cosmos/cosmos-rl#232 in kind: of folders of steps the last by name is taken, not by number",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_LastByName),
        says="the first weights give them",
    ),
    Fault(
        id="names-of-the-first-update",
        bug="W4 in kind: names are told once, and the tensors of a later update come in another order",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_InTheFirstOrder),
        says="none of the weights that were sent",
    ),
    Fault(
        id="prefix-cache-kept",
        bug="W17, SkyRL#1824: prompts that are cached keep what old weights made of them",
        rules=("SYN-004",),
        cell=QWEN,
        wrap=engine(_Remembers),
        says="for a prompt that was sampled before it",
    ),
    Fault(
        id="routes-of-a-cached-prefix",
        bug="sglang#26975: routes of a cached prompt are those of before the update",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_CachedRoutes),
        says="second known: ",
    ),
    Fault(
        id="routes-of-before-an-update-amid-samples",
        bug="sglang#26975 in kind: routes of a prompt that an update has met are those of before",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_RoutesOfBefore),
        says="after the update ",
    ),
    Fault(
        id="labels-of-the-first-version",
        bug="AReaL#1569: the version is read once, when the request is made",
        rules=("SYN-005",),
        also=("SYN-006", "SYN-007", "SYN-010"),
        cell=QWEN,
        wrap=engine(_FirstLabels),
        says="are labelled [0]",
    ),
    Fault(
        id="labels-at-arrival",
        bug="AReaL#1569: the version is read when the answer arrives",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=engine(_Labels),
        says="is labelled version 1",
    ),
    Fault(
        id="updates-interleave",
        bug="nothing keeps a second update out while one is under way",
        rules=("SYN-007",),
        cell=QWEN,
        wrap=engine(_Mixes),
        says="after two updates at once",
    ),
    Fault(
        id="second-update-ends-the-first",
        bug="an update that comes amid another is refused, and with it ends the other, which says that it was taken",
        rules=("SYN-007",),
        cell=QWEN,
        wrap=engine(_EndsTheFirst),
        says="after two updates at once",
    ),
    Fault(
        id="update-not-awaited",
        bug="TRL#5932: an update that failed counts as one that did not",
        rules=("SYN-008", "SYN-009"),
        also=("SYN-005",),
        cell=QWEN,
        wrap=engine(_Unawaited),
        says="raised nothing",
    ),
    Fault(
        id="half-an-update-kept",
        bug="prime-rl#2714: what came of an update that failed is served",
        rules=("SYN-009",),
        also=("SYN-010",),
        cell=QWEN,
        wrap=engine(_KeepsHalf),
        says="none of the weights that were sent",
    ),
    Fault(
        id="first-weights-after-a-failure",
        bug="miles#1724: an engine that is replaced starts from the checkpoint that it is configured with",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_StartsAnew),
        says="the engine says version 1, and of its logprobs the first weights give them",
    ),
    Fault(
        id="samples-go-on-with-half-an-update",
        bug="prime-rl#2714 in kind: samples go on when an update has failed, and its weights are undone after that",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_GoesOnTorn),
        says="amid samples in pause mode keep a sample that it met is of other weights: token 1 is labelled version 0",
    ),
    Fault(
        id="update-taken-before-it-ends",
        bug="TRL#5932 in kind: an update is taken with its last tensor, and the sender fails after it",
        rules=("SYN-009",),
        also=("SYN-010",),
        cell=QWEN,
        wrap=engine(_Ends),
        says="after an update that was broken off at the end the engine says version 1",
    ),
    Fault(
        id="labels-of-a-failed-update",
        bug="tokenspeed#672: the version of an update that failed is what tokens are labelled with",
        rules=("SYN-009",),
        also=("SYN-005",),
        cell=QWEN,
        wrap=engine(_LabelsOfAFailure),
        says="the engine says version 0, and labels tokens 1",
    ),
    Fault(
        id="update-of-nothing",
        bug="TRL#5932: the version is raised although nothing was sent",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_Empty),
        says="an update without a tensor raised nothing",
    ),
    Fault(
        id="shape-by-number-of-elements",
        bug="vllm-ascend#9612 in kind: what is loaded is viewed in the shape that is there",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_ByNumber),
        says="an update with a tensor folded raised nothing",
    ),
    Fault(
        id="versions-counted-by-the-engine",
        bug="AReaL#1569 in kind: the engine counts updates, and trainers count steps",
        rules=("SYN-005",),
        also=("SYN-007", "SYN-010"),
        cell=QWEN,
        wrap=engine(_Counts),
        says="versions [0, 1, 2, 3] after opening and three updates",
    ),
    Fault(
        id="running-prompts-kept-in-the-cache",
        bug="SkyRL#1824, vLLM#57970: a reset of the cache does nothing where samples are under way",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=engine(_KeepsRunning),
        says="after the update the engine does not serve version 1",
    ),
    Fault(
        id="finished-prompts-kept-in-the-cache",
        bug="SkyRL#1824: while samples are under way a reset does nothing, for prompts that were finished either",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=engine(_KeepsFinished),
        says="after the update the engine does not serve version 1",
    ),
    Fault(
        id="routes-of-a-batch-evenly-cut",
        bug="sglang#26123 in kind: where the routes of a request begin in a buffer is computed from equal lengths",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_EvenlyCut),
        says="first: routes have 90 rows",
    ),
    Fault(
        id="engine-route-with-an-expert-twice",
        bug="R4 in kind: an engine has an expert in two places, and gives both in a route",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_answering(_expert_twice)),
        says="routes are others",
    ),
    Fault(
        id="draft-taken-for-a-layer",
        bug="NeMo-RL#3619: the layer of a draft (MTP) is loaded as a layer of the model",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_LoadsDraft),
        says="with a tensor draft the engine says version 1",
    ),
    Fault(
        id="cache-kept-after-a-failure",
        bug="W17 in kind: the update after one that failed takes another way, on which caches are not reset",
        rules=("SYN-010",),
        cell=QWEN,
        wrap=engine(_KeepsAfterAFailure),
        says="and a whole update the engine says version 1",
    ),
    Fault(
        id="failed-update-goes-on",
        bug="prime-rl#3316, prime-rl#2219: what is left of a version that was sent before is taken for the new one",
        rules=("SYN-010",),
        cell=QWEN,
        wrap=engine(_GoesOn),
        says="and a whole update the engine says version 1",
    ),
    Fault(
        id="likelier-tokens-drawn",
        bug="NeMo-RL#3497 in kind: sampling parameters come from a generation_config.json",
        rules=("SYN-012",),
        cell=QWEN,
        wrap=engine(_Likelier),
        says="samples are more likely than at temperature 1",
    ),
    Fault(
        id="samples-of-a-prompt-alike",
        bug="ms-swift#7858: samples of one prompt have one seed",
        rules=("SYN-012",),
        cell=QWEN,
        wrap=engine(_Alike),
        says="5 samples of one prompt are only 2 different ones",
    ),
    Fault(
        id="seed-of-a-place-in-a-call",
        bug="verl#6857 in kind: the seed of a prompt is its place in its call, and later calls have the same",
        rules=("SYN-012",),
        cell=QWEN,
        wrap=engine(_SeedOfPlace),
        says="5 samples of one prompt are only 4 different ones",
    ),
    Fault(
        id="seed-of-a-place-in-a-worker",
        bug="verl#6857: the seed of a prompt is its place in what its worker is dealt out",
        rules=("SYN-012",),
        cell=QWEN,
        wrap=engine(_SeedOfPlaceInPart),
        says="5 samples of one prompt are only 3 different ones",
    ),
    Fault(
        id="kept-samples-ended",
        bug="miles#2589: the call that tells the new version ends all samples, which the pause mode has kept",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=engine(_EndsWhatItKeeps),
        says="tokens, as if it were aborted",
    ),
    Fault(
        id="half-loaded-weights-served",
        bug="sglang#10071 in kind: a request that arrives amid an update is run with the weights as they are by then",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=engine(_ServesAmid),
        says="of a sample that was asked for amid an update token 0 is labelled version 1",
    ),
    Fault(
        id="routes-of-tokens-computed-again",
        bug="miles#3277, sglang#39633: what is computed again after an update has old logprobs and new routes",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_RoutesComputedAgain),
        says="amid the update ",
    ),
    Fault(
        id="temperature-not-sent",
        bug="NeMo-RL#3497 in kind: sampling parameters are the engine's own, and those of a request are lost",
        rules=("SYN-013",),
        cell=QWEN,
        wrap=engine(_at(lambda asked: 1.0)),
        says="temperature 0.125: samples are less likely",
    ),
    Fault(
        id="temperature-zero-taken-for-none",
        bug="Megatron-LM#6417: a temperature of 0 is false, and the default of 1 is taken",
        rules=("SYN-013",),
        cell=QWEN,
        wrap=engine(_at(lambda asked: asked or 1.0)),
        says="tokens are not the likeliest",
    ),
    Fault(
        id="temperature-of-the-call-before",
        bug="Trinity-RFT#400: the temperature of an evaluation is kept for the rollouts after it",
        rules=("SYN-012",),
        cell=QWEN,
        wrap=engine(_TemperatureOfBefore),
        says="samples are more likely than at temperature 1",
    ),
    Fault(
        id="logprobs-divided-by-temperature",
        bug="prime-rl#697: the logprobs of tokens are divided by the temperature, where logits have to be",
        rules=("SYN-013",),
        cell=QWEN,
        wrap=engine(_DividesLogprobs),
        says="off those of the model's logits",
    ),
    Fault(
        id="sampled-tokens-rows-lost-in-the-cache",
        bug="vLLM#42346 in kind: routes are kept by blocks of prompts, and a later turn has none of what was sampled",
        rules=("SYN-011",),
        cell=QWEN,
        wrap=engine(_SampledRowsLost),
        says="turn: ",
    ),
    Fault(
        id="last-sampled-token-cached-before-it-is-run",
        bug="reported nowhere: a block counts as full with the token that was sampled last, whose keys come later",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=engine(_LastTokenNotRun),
        says="before any update: logprobs are",
    ),
    Fault(
        id="opened-weights-from-the-second-update-on",
        bug="ms-swift#7017 in kind: what sleeps drops its weights, has those of its folder back, and is sent no others",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_OpenedAgain),
        says="after a later update: logprobs are",
    ),
    Fault(
        id="lower-version-left-out",
        bug="miles#2835 in kind: a trainer that goes on counts from 1 again, and engines take newer versions alone",
        rules=("SYN-005",),
        cell=QWEN,
        wrap=engine(_NewerAlone),
        says="after an update to a lower version, which raised nothing, the third weights give them",
    ),
    Fault(
        id="cache-by-version",
        bug="miles#2835, SkyRL#2064 (review) in kind: caches are told apart by the version, and one comes again",
        rules=("SYN-005",),
        cell=QWEN,
        wrap=engine(_CacheByVersion),
        says="after an update to a lower version, which raised nothing, the first weights give them",
    ),
    Fault(
        id="weights-of-two-updates-before",
        bug="ms-swift#10204 in kind: one of two buffers is read before it is filled again",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_TwoBuffers),
        says="the second weights give them",
    ),
    Fault(
        id="halves-in-two-buckets",
        bug="sglang#14178: of a tensor whose parts come in two buckets one part is lost, and large buckets hide it",
        rules=("SYN-003",),
        cell=QWEN,
        wrap=engine(_PairsInABucket),
        says="none of the weights that were sent",
    ),
    Fault(
        id="smaller-expert-into-a-corner",
        bug="vLLM#37010 in kind: where an engine pads its experts, a smaller one is copied into a corner",
        rules=("SYN-009",),
        cell=QWEN,
        wrap=engine(_IntoACorner),
        says="an update with a tensor cut raised nothing",
    ),
    Fault(
        id="repetitions-penalised",
        bug="verl#7270: the trainer's penalty of repetitions is not passed on, and that of the model's folder applies",
        rules=("SYN-013",),
        cell=QWEN,
        wrap=engine(_Penalty),
        says="tokens are not the likeliest",
    ),
    Fault(
        id="ends-without-probability",
        bug="deepspeedai/DeepSpeedExamples#470 in kind: a least length takes all probability from what ends a sequence",
        rules=("SYN-013",),
        cell=QWEN,
        wrap=engine(_NoEnd),
        says="tokens are not the likeliest",
    ),
    Fault(
        id="tokens-limited-by-the-folder",
        bug="NeMo-RL#3497 in kind: a generation_config.json says how many tokens there are at most",
        rules=("RUN-001",),
        cell=QWEN,
        wrap=engine(_FewerTokens),
        says="sample 0 has 3 tokens",
    ),
    Fault(
        id="version-of-a-failure-refused",
        bug="W1 in kind: a trainer that tries again is told that the version has been sent",
        rules=("SYN-010",),
        cell=QWEN,
        wrap=engine(_OncePerVersion),
        says="version 1 has been sent",
    ),
    Fault(
        id="paused-after-a-failure",
        bug="W1: engines stay paused when an update failed",
        rules=("SYN-010",),
        cell=QWEN,
        wrap=_stays_paused,
        says="the engine is still paused",
    ),
    Fault(
        id="paused-in-one-mode-after-a-failure",
        bug="W1 in kind: in one of the pause modes engines stay paused when an update failed",
        rules=("SYN-010",),
        cell=QWEN,
        wrap=_stays_paused_in_one_mode,
        says="the engine is still paused in mode",
    ),
    Fault(
        id="cache-on-disk-kept-for-the-next-engine",
        bug="sglang#24758: what an engine stored of prompts is found by the next one, which has other weights",
        rules=("SYN-006",),
        cell=QWEN,
        wrap=_kept_on_disk,
        says="before the update",
    ),
    Fault(
        id="padded-batches",
        bug="vLLM#43810 in kind: rows that fill a batch up to the size of a graph are written over keys of another row",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=engine(_PadsBatches),
    ),
    Fault(
        id="samples-in-the-order-of-text",
        bug="vLLM#394, NeMo-RL#1627: samples come in another order than prompts, here that of their numbers as text",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=engine(_InTheOrderOfText),
    ),
    Fault(
        id="tokens-beyond-the-vocabulary",
        bug="rllm-org/rllm#751: a token is sampled of a row that pads the head, and the trainer's embedding has none",
        rules=("SYN-001",),
        cell=QWEN,
        wrap=engine(_BeyondTheVocabulary),
        says="logprobs are inf off",
    ),
)
