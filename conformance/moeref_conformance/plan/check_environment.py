"""What a judgement imports, and whether an environment that this project did not install has it.

`python -m moeref_conformance.plan.check_environment` says so in one line and exits with 2 if
anything is missing. It imports nothing
of what it looks for, and nothing of the rest of the kit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

#: By module, the distribution that brings it, and the least version that is known to do.
WANTED = {
    "torch": ("torch", "2.6"),
    "numpy": ("numpy", "1.26"),
    "megatron.core": ("megatron-core", "0.16"),
    "triton": ("triton", ""),
    "packaging": ("packaging", ""),
    "transformers": ("transformers", "5.12"),
    "safetensors": ("safetensors", "0.5"),
    "xxhash": ("xxhash", "3.4"),
    "rich": ("rich", "13"),
    "jinja2": ("jinja2", "3.1"),
}
#: What containers may install under other names; of the others the version is read, not only the module.
RENAMED = ("torch", "triton")


def missing() -> list[str]:
    """Each distribution that is absent or too old, in words."""
    found = []
    for module, (distribution, least) in WANTED.items():
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of a package that should hold it
            there = False
        version = _version(distribution)
        if not there or not (version or distribution in RENAMED):
            found.append(f"{distribution}>={least}" if least else distribution)
        elif least and version and _numbers(version) < _numbers(least):
            found.append(f"{distribution}>={least} (here {version})")
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def main() -> int:
    """Print what is missing, or what is there, and give the exit code."""
    where = f"{sys.executable} (Python {sys.version.split()[0]})"
    if lacking := missing():
        print(f"{where} lacks {', '.join(lacking)}; install that there, without touching what is", file=sys.stderr)
        return 2
    have = ((distribution, _version(distribution)) for distribution, _ in WANTED.values())
    print(f"{where}: " + ", ".join(f"{name} {version}" for name, version in have if version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
