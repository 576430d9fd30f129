"""What `moeref convert` does, with a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from moeref import families
from moeref.bridge import VOCAB_DIVISIBLE_BY, ShardMap
from moeref.families import SpecNames
from moeref.layout import Layout
from moeref.shards.files import ShardError
from moeref.shards.folder import MANIFEST, ShardFolder, files, folder_name
from moeref.shards.join import join
from moeref.shards.split import Progress, checked, size, split


def convert(options: Any) -> str:
    """Convert either way; what was done, for the user. Raises ValueError and OSError for what cannot be."""
    source, target = Path(options.source), Path(options.target)
    if (source / MANIFEST).exists() or source.name.endswith(".part"):
        return _back(source, target, options)
    if within := sorted(file.parent for file in source.glob(f"*/{MANIFEST}")):
        raise ShardError(f"{source} holds folders of shards; name one: {', '.join(map(str, within))}")
    if not options.layout:
        raise ShardError(f"{source} has no {MANIFEST}: to write it as shards give --layout tp=…,pp=…,ep=…,etp=…")
    refuse(options, ("config",), "the source has its own config.json")
    names = SpecNames(norms=options.norms or "separate", experts=options.experts or "sequential")
    layout = Layout.parse(options.layout)
    shard_map = ShardMap(families.read(source), layout, names, divisible_by=divisible_by(options))
    if options.dry_run:
        listed = files(checked(shard_map, source))
        total = sum(map(size, listed))
        return f"would write {len(listed)} files, {total} bytes, to {target / folder_name(layout)}"
    with bar() as progress:
        return f"written: {split(shard_map, source, target, progress=progress)}"


def refuse(options: Any, names: tuple[str, ...], why: str) -> None:
    """Raise ShardError for options of these `names` that are given, though the conversion does not read them."""
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]:
        raise ShardError(f"drop {', '.join(given)}: {why}")


def divisible_by(options: Any) -> int:
    """The option, or Megatron-LM's default."""
    return VOCAB_DIVISIBLE_BY if options.divisible_by is None else int(options.divisible_by)


def _back(source: Path, target: Path, options: Any) -> str:
    if options.layout:
        raise ShardError(f"{source} holds shards, whose layout is known: --layout goes with a Hugging Face folder")
    refuse(options, ("norms", "experts", "divisible_by", "config"), f"{source / MANIFEST} and config.json say it")
    if options.dry_run:
        with ShardFolder(source) as folder:
            number, elements, _ = folder.shard_map.hf_sizes()
        return f"would write {number} tensors, {elements} elements, to {target}"
    with bar() as progress:
        return f"written: {join(source, target, progress=progress)}"


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Progress]:
    """A bar on standard error, if that is a terminal. Until `progress` is called first it has no length."""
    columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    console = Console(stderr=True)
    with bars.Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as drawn:
        task = drawn.add_task("", total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total)
