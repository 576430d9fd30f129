"""What is audited: a safetensors folder, file or index, a manifest, or a live stream of (name, tensor)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moeref.audit.manifest import AuditError, Fingerprint, Manifest, fingerprint, named
from moeref.bridge import BridgeError, Checkpoint
from moeref.bridge.named import Named

Given = str | Path | Manifest | Mapping[str, torch.Tensor] | Iterable[Named]
#: Of a stream's tensors that differ, so many bytes are kept to find out what happened to them.
KEEP = 1 << 30


class Source:
    """A manifest, and the tensors themselves where they can be read again. A context manager."""

    def __init__(self, given: Given, label: str, against: Manifest | None = None, keep: int = KEEP) -> None:
        self.label, self._stack = label, ExitStack()
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._checkpoint: Checkpoint | None = None
        try:
            self.manifest = self._open(given, against, keep)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, given: Given, against: Manifest | None, keep: int) -> Manifest:
        if isinstance(given, Manifest):
            return given
        if isinstance(given, str | Path):
            return self._open_path(Path(given))
        if isinstance(given, Mapping):
            self._tensors = given
            return Manifest.of(given.items())
        return self._drain(given, against, keep)

    def _open_path(self, path: Path) -> Manifest:
        if path.name.endswith(".index.json"):
            path = path.parent
        if path.is_dir():
            try:
                self._checkpoint = self._stack.enter_context(Checkpoint(path))
            except BridgeError as error:
                raise AuditError(str(error)) from None
            return Manifest.of(self._checkpoint.tensors())
        if not path.exists():
            raise AuditError(f"{path}: there is no such folder or file")
        if path.suffix != ".safetensors":
            return Manifest.load(path)
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise AuditError(f"{path}: not a whole safetensors file: {error}") from None
        self._tensors = _Lazy(file)
        return Manifest.of(self._tensors.items())

    def _drain(self, stream: Iterable[Named], against: Manifest | None, keep: int) -> Manifest:
        """Read a stream; tensors that are not those of `against` are kept, as long as there is room."""
        fingerprints: dict[str, Fingerprint] = {}
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in named(stream):
            fingerprints[name] = fingerprint(tensor)
            expected = against.tensors.get(name) if against else None
            if expected is not None and expected.content == fingerprints[name].content:
                continue
            if tensor.nbytes <= keep and against is not None:
                kept[name], keep = tensor.detach().clone(), keep - tensor.nbytes
        self._tensors = kept
        return Manifest(fingerprints)

    def read(self, name: str) -> torch.Tensor | None:
        """A tensor; None if its source is a saved manifest, or a stream that is over and did not keep it."""
        if name not in self.manifest.tensors:
            return None
        if self._checkpoint is not None:
            return self._checkpoint.read(name, tuple(map(slice, self.manifest.tensors[name].shape)))
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.detach().cpu()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Lazy(Mapping[str, torch.Tensor]):
    """The tensors of one safetensors file, read when asked for."""

    def __init__(self, file: safe_open) -> None:
        self._file, self._names = file, list(file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(given: Given) -> Manifest:
    """The manifest of a folder, file, index, stream or saved manifest. Raises AuditError for what cannot be read."""
    with Source(given, "given") as source:
        return source.manifest
