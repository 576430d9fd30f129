"""Sessions with another facet in place of one of moeref's: how a fault changes what is said or sent without an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, TensorMeta, World

Pair = tuple[TensorMeta, "torch.Tensor | None"]


class Swapped:
    """`session` with the facets given in place of its own."""

    def __init__(self, session: Session, **facets: Any) -> None:
        self._session = session
        vars(self).update(facets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Rewritten(Swapped):
    """A session, and its export facet, with the stream passed through a function."""

    def __init__(self, session: Session, rewrite: Callable[[Iterator[Pair]], Iterator[Pair]]) -> None:
        assert session.export is not None
        super().__init__(session, export=self)
        self._good, self._rewrite = session.export, rewrite
        self.chunks, self.load, self.plan = self._good.chunks, self._good.load, self._good.plan

    def stream(self) -> Iterator[Pair]:
        return self._rewrite(self._good.stream())


def each(change: Callable[[TensorMeta, torch.Tensor], Pair | None]) -> Callable[[Session, Cell, World], Any]:
    """Wrap the stream so that `change` sees every tensor on the writer; None drops it."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
            for meta, tensor in stream:
                pair = (meta, tensor) if tensor is None else change(meta, tensor)
                del tensor
                if pair is not None:
                    yield pair
                del pair

        return Rewritten(session, rewrite)

    return wrap
