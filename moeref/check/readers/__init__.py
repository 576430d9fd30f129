"""Readers of real configurations: a framework's own files, with its names and defaults, as what `check` takes.

Each framework has a module with one table of names. FORMATS has them by the name that `moeref check --from` takes.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moeref.check.readers import areal, megatron_bridge, megatron_lm, miles, ms_swift, nemo_rl, skyrl, slime, verl
from moeref.check.readers.checked import check_reading
from moeref.check.readers.reading import Reading
from moeref.check.report import CheckError
from moeref.config.errors import nearest

#: Name -> (files, values by NAME or ~NAME that override them, version of megatron-core) -> Reading.
FORMATS: dict[str, Callable[[Sequence[Path], Mapping[str, str], str], Reading]] = {
    "megatron-lm": megatron_lm.read,
    "slime": slime.read,
    "miles": miles.read,
    "verl": verl.read,
    "nemo-rl": nemo_rl.read,
    "skyrl": skyrl.read,
    "ms-swift": ms_swift.read,
    "areal": areal.read,
    "megatron-bridge": megatron_bridge.read,
}


def read(framework: str, arguments: Sequence[str], core: str) -> Reading:
    """The reading of a framework's files; an argument NAME=VALUE that is no file replaces a value, ~NAME takes it away.

    Raises CheckError for an unknown framework, and for files that are missing or cannot be read.
    """
    if framework not in FORMATS:
        raise CheckError(f"--from {framework!r} is none of {', '.join(FORMATS)}{nearest(framework, FORMATS)}")
    given: dict[str, str] = {}
    paths: list[Path] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_file = os.path.isfile(argument)  # noqa: PTH113 -- a value may be no name of a file, where Path raises
        if (equals or name.startswith("~")) and not is_file:
            given[name] = value
        else:
            paths.append(Path(argument))
    if not paths:
        raise CheckError(f"--from {framework}: give a file, or a recipe of Megatron-Bridge")
    return FORMATS[framework](paths, given, core)


__all__ = ["FORMATS", "Reading", "check_reading", "read"]
