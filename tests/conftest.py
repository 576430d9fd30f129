"""What holds for every test: the hypothesis profile, the `cpu` marker, one world of ranks for each of two workers."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moeref_conformance.worlds.forked import ForkedWorld

    from tests import warm

#: What all tests import beyond moeref's own dependencies, by module, and what those outside ELSEWHERE do. These have
#: environments of their own.
NEEDED = {"megatron": "megatron-core", "transformers": "transformers", "jinja2": "jinja2", "hypothesis": "hypothesis"}
NEEDED_HERE = {name: name for name in ("hatchling", "jsonschema", "nox", "omegaconf", "zstandard")}
ELSEWHERE = ("tests/peers", "tests/rollout", "tests/bench/gpu")


def missing(paths: Iterable[str]) -> list[str]:
    """Distributions that the tests below `paths` need and that are not here."""
    needed = NEEDED if all(any(part in path for part in ELSEWHERE) for path in paths) else NEEDED | NEEDED_HERE
    return sorted(name for module, name in needed.items() if importlib.util.find_spec(module) is None)


def _load_hypothesis_profile() -> None:
    from hypothesis import settings

    # Cores are shared: a slow example says nothing. hypothesis' own `ci` profile is derandomised, without a deadline.
    settings.register_profile("local", deadline=None)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Say what is not installed, in one sentence. Load hypothesis' profile.

    Refuse versions that start a world on every worker: pytest-xdist 3.8.0 under pytest 9.2 (pytest-xdist#1386).
    """
    if lacking := missing(config.args):
        raise pytest.UsageError(
            f"the tests need {', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not installed here: "
            "pip install -e '.[kit]' --group test (pip 25.1 or newer)"
        )
    _load_hypothesis_profile()
    if config.getoption("dist", default="no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} ignores --dist loadgroup; install the versions pinned in constraints/"
        )


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs without a GPU, benches apart.

    Tests that start rank processes are two groups, those of faults and all others, each on one xdist worker.
    """
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("gpu", "bench", "engine", "long", "slow", "sync")):
            item.add_marker(pytest.mark.cpu)
        if item.get_closest_marker("ranks") is not None and config.pluginmanager.has_plugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("faults" if item.path.name == "test_faults.py" else "ranks"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the collector what stays for the whole session: modules and tests, some millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def megatron_on_cpu() -> Iterator[warm.Prepared]:
    """A process that has imported megatron-core anew, after the kit's substitutions, for programs in forks of it."""
    from tests import warm

    root = Path(__file__).parents[1]
    program = (
        "from moeref_conformance import authors\n"
        "authors.megatron_on_cpu()\n"
        "import megatron.core.distributed, megatron.core.models.gpt.gpt_layer_specs, megatron.core.optimizer\n"
    )
    forget = ["megatron", "moeref", "moeref_conformance"]
    with warm.prepare(program, cwd=root, path=[str(root)], forget=forget) as prepared:
        yield prepared


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of expected checkpoints, each made once for all tests that run its cells."""
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="session")
def shared_world() -> Iterator[ForkedWorld]:
    """The world that serves all tests of targets; `tests.kit.shared_world.Shared` makes it one of a certain target."""
    from moeref_conformance.worlds.forked import ForkedWorld

    with ForkedWorld("tests.kit.shared_world:target", entry="tests.kit.shared_world:run") as world:
        yield world
