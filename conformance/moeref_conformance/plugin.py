"""The pytest plugin: `pytest --pyargs moeref_conformance --target NAME` from any folder, one test a rule and cell.

Every pytest run in an environment with the kit loads it. So it imports nothing heavy, and adds its options only if the
kit's tests are named: other test suites may have a `--target` of their own.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moeref_conformance.plan.plan import RunPlan
    from moeref_conformance.run.machinery import Machinery

PACKAGE = "moeref_conformance"
OPTIONS = ("target", "matrix", "cell", "rule", "profile", "known", "deadline")
_ACTIVE = pytest.StashKey[bool]()
_SERVED = pytest.StashKey["tuple[RunPlan, Machinery]"]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Add the options if one of the arguments names the kit's tests."""
    early_config.stash[_ACTIVE] = any(_names_kit(arg) for arg in args)
    if not early_config.stash[_ACTIVE]:
        return
    group = parser.getgroup(PACKAGE, "conformance of Megatron ↔ Hugging Face targets")
    group.addoption("--target", help="who is judged: a name or module:attr")
    group.addoption("--matrix", default="cpu", help="a shipped matrix or a file (default: cpu)")
    group.addoption("--cell", action="append", default=[], help="only cells of this id, glob or tag; repeatable")
    group.addoption("--rule", action="append", default=[], help="only rules with this prefix, and what they require")
    group.addoption("--profile", action="append", default=[], help="only the rules of this profile; repeatable")
    group.addoption("--known", type=Path, help="known failures (default: known/<target>.toml next to the matrix)")
    group.addoption("--deadline", type=float, default=120.0, help="seconds a cell may take")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers. Runs of the kit show no warnings, unless `-W` asks, and always draw the same examples."""
    config.addinivalue_line("markers", "rule(id): judges this rule of the conformance kit")
    config.addinivalue_line("markers", "cpu: runs on a machine without a GPU")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "cell(id): judges this cell of the conformance matrix")
    if not config.stash.get(_ACTIVE, False):
        return
    # Importing Megatron-Core warns, also where a project's own settings make errors of warnings.
    for said in ("ignore", "default::pytest.PytestWarning"):
        config.addinivalue_line("filterwarnings", said)
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile(PACKAGE, derandomize=True, deadline=None, database=None)


def served(config: pytest.Config) -> tuple[RunPlan, Machinery]:
    """The plan that the options describe and its machinery, made once and closed with `config`.

    Raises pytest.UsageError for bad input.
    """
    if _SERVED not in config.stash:
        from moeref_conformance.contract.checks import BadInput
        from moeref_conformance.plan.check_environment import import_from_this_folder, of_this_folder
        from moeref_conformance.plan.plan import Settings
        from moeref_conformance.run import machinery

        if not config.stash.get(_ACTIVE, False) or not config.getoption("--target"):
            raise pytest.UsageError(f"run as: pytest --pyargs {PACKAGE} --target NAME|module:attr")
        import_from_this_folder()
        try:
            if line := of_this_folder():
                config.issue_config_time_warning(pytest.PytestWarning(line), stacklevel=2)
            given = {name: config.getoption(name) for name in OPTIONS}
            opened = ExitStack()
            config.stash[_SERVED] = opened.enter_context(machinery.served(Settings.of(**given)))
            config.add_cleanup(opened.close)
        except BadInput as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SERVED]


def _names_kit(argument: str) -> bool:
    """Whether an argument is the package, one of its modules, or a path into it."""
    place = argument.partition("::")[0]
    return not argument.startswith("-") and (PACKAGE in Path(place).parts or place.partition(".")[0] == PACKAGE)
