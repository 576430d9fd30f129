"""Messages of plain values and the kit's own data classes: reading one imports no module of a target."""

from __future__ import annotations

import builtins
import io
import numbers
import pickle
from collections.abc import Mapping
from typing import Any

KIT = "moeref_conformance.contract."
#: What a value of a subclass becomes, such as the text of an enum or a named tuple.
KINDS: tuple[tuple[type, type], ...] = (
    (numbers.Integral, int),
    (numbers.Real, float),
    (tuple, tuple),
    (list, list),
    (Mapping, dict),
)


def packed(value: Any) -> bytes:
    """`value` as a message. Raises TypeError, naming what it met, for anything but plain values and the kit's data."""
    buffer = io.BytesIO()
    _Writer(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(message: bytes) -> Any:
    """What was packed. Raises UnpicklingError for a message that names anything else."""
    return _Reader(io.BytesIO(message)).load()


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) or type(value).__module__.startswith(KIT):
            return NotImplemented
        if isinstance(value, str):
            return str, (str.__str__(value),)
        for kind, plain in KINDS:
            if isinstance(value, kind):
                return plain, (plain(value),)
        raise TypeError(
            f"a target answered with {value!r:.80}, a {type(value).__qualname__} of {type(value).__module__}: expected "
            "plain values and data classes of the api"
        )


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(KIT) or (module == "builtins" and isinstance(getattr(builtins, name, None), type)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the message names {module}.{name}, which is neither plain nor the kit's")
