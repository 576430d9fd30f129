"""Trees of settings: YAML files, overrides as Hydra writes them, and a framework's defaults, by dotted path.

YAML needs OmegaConf, which resolves interpolations. No resolver is called, so the environment is not read.
"""

from __future__ import annotations

import importlib
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeref.check.files import check_yaml, in_a_line, text_of
from moeref.check.readers.arguments import entry, read_script
from moeref.check.readers.reading import Reading
from moeref.check.readers.shell import GIVEN, Word
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value

_OVERRIDE = re.compile(r"(?:\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
#: Numbers, truth values and null as YAML and Hydra read them; lists and quotations are read apart.
_SCALARS = {"true": True, "false": False, "null": None}
_DIGITS = 4300  # of an integer that Python reads
#: Words of a command that say where the tree is, and not what is in it.
_WHERE = re.compile(r"--config[\w-]*(=.*)?|-m|.*\.ya?ml")
#: An interpolation that calls a resolver, such as `${oc.env:HOME}`.
_RESOLVER = re.compile(r"\$\{[^}]*:")


@dataclass
class Tree:
    """Values by dotted path. Later ones replace earlier ones."""

    values: dict[str, Value] = field(default_factory=dict)
    #: Words of scripts that say where the tree is; None without a script.
    where: list[str] | None = None

    def defaults(self, framework: str, values: Mapping[str, Any]) -> None:
        """Put the framework's defaults where nothing is said. Raises CheckError for a value above one or below it."""
        branches = {name: value for path, value in self.values.items() for name in _above(path)}
        for path, value in values.items():
            if leaf := next((self.values[name] for name in _above(path) if name in self.values), None):
                found = "null" if leaf.value is None else reprlib.repr(leaf.value)
                told = f"{leaf.name} ({leaf.source}) is {found}, and {framework} reads {path} there"
                raise CheckError(f"{told}; leave it out, or write a mapping")
            if inner := branches.get(path):
                told = f"{inner.name} ({inner.source}) is below {path}, of which {framework} reads a value"
                raise CheckError(f"{told}; leave it out")
            if path not in self.values:
                self.values[path] = Value(path, value, f"default of {framework}")

    def overrides(self, words: Iterable[Word]) -> list[Word]:
        """Put overrides such as `a.b=1` and `+a.c=[x]`; `~a.b` takes a value away. Returns the other words."""
        others = []
        for word in words:
            if word.text.startswith("~"):
                self._take_away(word.text[1:].partition("=")[0])
            elif found := _OVERRIDE.fullmatch(word.text):
                value = scalar(found[2]) if word.known else found[2]
                self._put(found[1], value, word.where, known=word.known)
            else:
                others.append(word)
        return others

    def given(self, values: Mapping[str, str]) -> None:
        """Put what the command line gives of dotted names, and take away what it has with `~`."""
        self.overrides(Word(f"{name}={value}", GIVEN) for name, value in values.items() if _in_the_tree(name))

    @staticmethod
    def variables(values: Mapping[str, str]) -> dict[str, str]:
        """What the command line gives of other names: variables of scripts."""
        return {name: value for name, value in values.items() if not _in_the_tree(name)}

    def read(self, path: Path, depth: int = 0, inherits: str = "") -> None:
        """Put the values of a YAML file, and before them those of the files that its key `inherits` names."""
        if depth > 8:
            raise CheckError(f"{path}: files inherit from one another more than 8 times")
        text = text_of(path)
        container, lines = _parsed(path, text)
        parents = container.pop(inherits, None) if inherits else None
        for parent in parents if isinstance(parents, list) else [parents] if parents else []:
            self.read(path.parent / str(parent), depth + 1, inherits)
        for name, value in _leaves(container):
            self._put(name, value, f"{path.name}:{lines.get(name, 1)}", known=True)

    def _take_away(self, name: str) -> None:
        for path in [path for path in self.values if path == name or path.startswith(f"{name}.")]:
            del self.values[path]

    def _put(self, name: str, value: Any, source: str, *, known: bool) -> None:
        if value == {}:  # says nothing of what it might hold
            return
        if name not in self.values:
            for above in _above(name):  # a leaf that becomes a branch
                self.values.pop(above, None)
            self._take_away(name)  # a branch that becomes a leaf
        if isinstance(value, Mapping) and value:
            for path, inner in _leaves(value):
                self.values[f"{name}.{path}"] = Value(f"{name}.{path}", inner, source, known)
        else:
            self.values[name] = Value(name, value, source, known)

    def resolve(self) -> None:
        """Replace interpolations such as `${a.b}` by what they stand for; others become unknown."""
        open_ = {path: value for path, value in self.values.items() if value.known and _interpolates(value.value)}
        if not open_:
            return
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        sound = {path: value.value for path, value in self.values.items() if value.known and _parses(value.value)}
        config = OmegaConf.create(_nested(sound))
        for path, value in open_.items():
            try:
                # Resolvers may read the environment or files; only references to other values are followed.
                found = None if _RESOLVER.search(_closure(config, path)) else OmegaConf.select(config, path)
            except (OmegaConfBaseException, ValueError):
                found = None
            self.values[path] = replace(value, value=value.value if found is None else found, known=found is not None)


@dataclass(frozen=True)
class Names:
    """One framework's table: dotted path -> axis of the layout, option of `check`, or setting.

    `settings` are prefixes below which every name is a field of TransformerConfig. `model` is the path of the model's.
    `unmapped` are paths that, if true, build what moeref does not map. `read` are paths that the framework's module
    reads itself, `elsewhere` prefixes of what concerns other parts, `training` paths -> fields of
    `moeref.costs.Training`. Anything else is not known.
    """

    layout: Mapping[str, str]
    options: Mapping[str, str]
    settings: tuple[str, ...]
    fields: Mapping[str, str]
    model: str
    unmapped: Mapping[str, str]
    read: frozenset[str]
    elsewhere: tuple[str, ...]
    training: Mapping[str, str] = field(default_factory=dict)

    def sort(self, tree: Tree, reading: Reading) -> None:
        """Put every value of the tree in its place in the reading."""
        for path, value in tree.values.items():
            if path in self.unmapped:
                if value.value or not value.known:
                    text = f"{path} ({value.source}): {self.unmapped[path]}"
                    reading.problems.append(Problem(reading.framework, text, refused=False))
            elif path not in self.read:
                self._place(path, value, reading)

    def _place(self, path: str, value: Value, reading: Reading) -> None:
        if path in self.training and value.known:
            if value.value is not None:
                reading.training[self.training[path]] = value
            return
        prefix = next((each for each in self.settings if path.startswith(each)), None)
        name = self.layout.get(path) or self.options.get(path) or self.fields.get(path) or (path[len(prefix or "") :])
        if not (prefix or path in {*self.layout, *self.options, *self.fields, self.model}):
            (reading.elsewhere if path.startswith(self.elsewhere) else reading.unread).append(value)
        elif not value.known and path != self.model:
            reading.computed[name] = value
        elif path == self.model:
            reading.model = value
        elif path in self.layout:
            if value.value is not None:
                reading.layout[name] = value
        elif path in self.options:
            reading.options[name] = value
        else:
            reading.settings[name] = value


def read_all(
    name: str,
    paths: Sequence[Path],
    given: Mapping[str, str],
    *,
    program: str,
    defaults: Mapping[str, Any],
    names: Names,
    inherits: str = "",
) -> tuple[Reading, Tree]:
    """YAML files and the overrides of scripts, in order, and what the command line gives, above a framework's defaults.

    The reading has the values whose `names` say what they are; the tree has all.
    """
    reading, tree = Reading(name), Tree()
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            tree.read(path, inherits=inherits)
            continue
        _, words = entry(read_script([path], Tree.variables(given)), program, reading)
        rest = tree.overrides(words)
        tree.where = [*(tree.where or []), *(word.text for word in rest if _WHERE.fullmatch(word.text))]
        others = [word for word in rest if not _WHERE.fullmatch(word.text)]
        reading.unread += [Value(word.text, "", word.where, word.known) for word in others]
    tree.given(given)
    tree.defaults(name, defaults)
    tree.resolve()
    names.sort(tree, reading)
    return reading, tree


def only_megatron(backend: Value | None, *, megatron: object = "megatron") -> None:
    """Raise CheckError where what is given trains by another backend than `megatron` says."""
    if backend and backend.given and backend.known and backend.value != megatron:
        raise CheckError(f"{backend.source}: {backend.name}={backend.value}: moeref knows Megatron only")


def chosen_backend(reading: Reading, tree: Tree, backend: str, default: str) -> None:
    """Put in a problem where a script leaves out `backend`, whose default is another one than Megatron."""
    named = any("megatron" in word for word in tree.where or ())
    if tree.where is not None and backend not in tree.values and not named:
        text = f"{backend} is not given, and the default of {reading.framework} is {default}, which is no Megatron"
        reading.problems.append(Problem(reading.framework, text, f"give {backend}=megatron", refused=False))


def engine_returns_routes(
    reading: Reading, at: Mapping[str, Value], replay: Value, engine: str, *, says: str = "asserts it"
) -> None:
    """Put in a problem where routes of the rollout are replayed and the engine is not asked for them by `engine`."""
    asked = at.get(engine) or Value(engine, False, f"default of {reading.framework}")
    if asked.known and not asked.value:
        text = f"{replay.name} ({replay.source}) replays the engine's routes, and {asked.name}={asked.value}"
        text += f" ({asked.source}) asks for none: {reading.framework} {says}"
        reading.problems.append(Problem(reading.framework, text, f"set {engine}=true"))


def ranks(reading: Reading, at: Mapping[str, Value], nodes: str, each: str) -> None:
    """Put the number of ranks into the reading, from those of nodes and of GPUs on a node."""
    one, other = at[nodes], at[each]
    unknown = next((value for value in (one, other) if type(value.value) is not int), None)
    if unknown:
        reading.computed["world"] = replace(unknown, known=False)
        return
    source = one.source if one.given else other.source
    reading.layout["world"] = Value(f"{nodes}, {each}", one.value * other.value, source)


def batch(reading: Reading, at: Mapping[str, Value], micro: str, *factors: str, by_tokens: object = False) -> None:
    """Put in what a replica takes at a time, and the samples that are dealt out: the product of `factors`.

    Where tokens make the microbatches, or one of the numbers is not known or 0, they decide nothing here.
    """
    found = [at[path] for path in (micro, *factors) if path in at and type(at[path].value) is int]
    if by_tokens or len(found) <= len(factors) or any(value.value < 1 for value in found[1:]):
        reading.elsewhere += [value for value in found if value.given]
        return
    size, *parts = found
    source = next((value.source for value in parts if value.given), parts[0].source)
    total = Value(" · ".join(factors), math.prod(value.value for value in parts), source)
    reading.training |= {"micro_batch_size": size, "global_batch_size": total}


def sequence_parallel(reading: Reading, asked: Value | None = None) -> None:
    """Put in that sequence parallelism is on where TP is above 1, or there what is asked for. An override stands."""
    tp = reading.layout.get("tp")
    if "sequence_parallel" in reading.settings or not tp or type(tp.value) is not int:
        return
    if asked and not asked.known:
        reading.computed["sequence_parallel"] = asked
        return
    derived = Value("sequence_parallel", tp.value > 1, "derived: on where TP > 1")
    reading.settings["sequence_parallel"] = asked if asked and tp.value > 1 else derived


def scalar(text: str) -> Any:
    """The value of an override: a number, truth value, null, list, mapping or text."""
    stripped = text.strip()
    if stripped.lower() in _SCALARS:
        return _SCALARS[stripped.lower()]
    if re.fullmatch(r"[+-]?\d+", stripped):
        return int(stripped) if len(stripped) < _DIGITS else stripped
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", stripped):
        return float(stripped)
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped == "{}":
        return {}
    if stripped.startswith("[") and stripped.endswith("]"):
        return [scalar(part) for part in _parts(stripped[1:-1])]
    return stripped


def _parts(text: str) -> Iterator[str]:
    """What commas separate outside brackets and quotations."""
    found = re.findall(r"(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,'\"\[])+", text)
    yield from (part for part in found if part.strip())


def _above(path: str) -> Iterator[str]:
    """`a` and `a.b` of `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _leaves(container: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in container.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        elif not isinstance(value, Mapping):
            yield path, value


def _in_the_tree(name: str) -> bool:
    return "." in name or name.startswith("~")


def _interpolates(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _parses(value: Any) -> bool:
    """Whether OmegaConf can read a value's interpolations."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"value": value} if _interpolates(value) else {})
    except OmegaConfBaseException:
        return False
    return True


def _closure(config: Any, path: str, depth: int = 0) -> str:
    """The text at a path, and of all that it refers to."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(config, resolve=False)
    for part in path.split("."):
        node = node[part] if isinstance(node, dict) and part in node else ""
    text = str(node)
    if depth > 8:
        raise ValueError(f"{path} refers to itself")
    return text + "".join(_closure(config, found, depth + 1) for found in re.findall(r"\$\{([\w.]+)\}", text))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return found


def _parsed(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The container of a YAML file and the line of each dotted path in it. Raises CheckError."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise CheckError(f"{path}: YAML needs the package omegaconf: pip install 'moeref[yaml]'") from error
    yaml = importlib.import_module("yaml")
    try:
        check_yaml(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        container = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:  # PyYAML's and OmegaConf's errors; neither package is imported here
        raise CheckError(f"{path}: {in_a_line(error)}") from error
    if not isinstance(container, dict) or not isinstance(node, yaml.MappingNode):
        raise CheckError(f"{path}: a configuration is a mapping")
    return {str(key): value for key, value in container.items()}, dict(_lines(node))


def _lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        if isinstance(value.value, list) and value.value and isinstance(value.value[0], tuple):
            yield from _lines(value, f"{path}.")
