"""Modules that stand in for what a framework's code imports, and does not call where only its glue is judged."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def without_init(package: str, names: Sequence[str]) -> None:
    """Let modules below `names`, packages of `package`, be imported without what the packages' `__init__` imports."""
    if names[0] in sys.modules:  # done before
        return
    found: Any = importlib.util.find_spec(package)
    root = Path(found.origin).parents[1]
    for name in names:
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]


def holding(modules: Mapping[str, Sequence[str]]) -> None:
    """Put modules with these names into `sys.modules`, each with the names that are taken from it."""
    for name, held in modules.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(dict.fromkeys(held, lambda *_: None), __path__=[])


class _Anything:
    """Takes any arguments. As a decorator it leaves a function as it is, as a context it does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, function: Any) -> Any:
        return function

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Unused(ModuleType):
    """A module each of whose names is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder(MetaPathFinder, Loader):
    """Finds an unused module for what is below `absent`, and for all of a package but what is read."""

    def __init__(self, package: str, read: Sequence[str], absent: Sequence[str]) -> None:
        self.package, self.read, self.absent = package, read, absent

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        unread = _below(name, [self.package]) and not _below(name, self.read)
        return ModuleSpec(name, self, is_package=True) if unread or _below(name, self.absent) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Unused(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def read_alone(package: str, read: Sequence[str], absent: Sequence[str]) -> None:
    """Import modules below `read` of a package as they are; the rest of it, and what is below `absent`, is unused."""
    ways = {".".join(name.split(".")[:depth]) for name in read for depth in range(1, name.count(".") + 1)}
    without_init(package, sorted(ways))
    sys.meta_path.insert(0, _Finder(package, read, absent))


def _below(name: str, roots: Sequence[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)
