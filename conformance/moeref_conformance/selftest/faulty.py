"""Deliberately wrong targets: real bugs of the field, each as a small edit of moeref, the good target.

A rule that none of these can turn red proves little. `faulty:<id>` runs one of them, `faulty:<id>+<id>` two together;
`tests/kit/test_faults.py` runs all and holds each against the rules and the diagnosis that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest import mock

from moeref_conformance.contract.api import Cell, Info, Session, World
from moeref_conformance.contract.checks import BadInput, nearest
from moeref_conformance.selftest.faults import FAULTS, Edit, Fault
from moeref_conformance.targets.moeref import ROOMS, MoerefTarget


class FaultyTarget(MoerefTarget):
    """moeref with the edits of `faults` in place while a session is open."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__()
        self.faults = faults
        self.info = Info(name="faulty:" + "+".join(f.id for f in faults), version=MoerefTarget.info.version)
        self.claims = MoerefTarget.claims

    @contextmanager
    def _opened(self, cell: Cell, world: World) -> Iterator[Session]:
        with ExitStack() as stack:
            for fault in self.faults:
                for edit in fault.edits(ROOMS):
                    stack.enter_context(mock.patch.object(edit.owner, edit.attribute, edit.value))
                if fault.patch:
                    stack.enter_context(fault.patch(cell, world))
            asked = cell, world
            for fault in self.faults:
                asked = fault.given(*asked) if fault.given else asked
            session: Session = stack.enter_context(super().open(*asked))
            for fault in self.faults:
                session = fault.wrap(session, cell, world) if fault.wrap else session
            yield session

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:  # type: ignore[override]
        """A session of the edited moeref."""
        return self._opened(cell, world)


class _Targets(Mapping[str, FaultyTarget]):
    """All faulty targets by id; `a+b` makes the one with both faults."""

    def __getitem__(self, key: str) -> FaultyTarget:
        for part in key.split("+"):
            if part not in FAULTS:
                raise BadInput(f"unknown fault {part!r}{nearest(part, FAULTS)}; all: {', '.join(sorted(FAULTS))}")
        return FaultyTarget(*(FAULTS[part] for part in key.split("+")))

    def __iter__(self) -> Iterator[str]:
        return iter(FAULTS)

    def __len__(self) -> int:
        return len(FAULTS)

    def __contains__(self, key: object) -> bool:
        return all(part in FAULTS for part in str(key).split("+"))


targets = _Targets()


class ByTag(MoerefTarget):
    """moeref with the faults that the cell's tags name (`fault:<id>`), so that one world can run all of them."""

    info = Info(name="faulty:by-tag", version=MoerefTarget.info.version)

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:  # type: ignore[override]
        """A session of moeref, edited as the tags say; without such a tag, of moeref as it is."""
        found = [FAULTS[tag.removeprefix("fault:")] for tag in cell.tags if tag.startswith("fault:")]
        return FaultyTarget(*found).open(cell, world)


by_tag = ByTag()

__all__ = ["FAULTS", "Edit", "Fault", "FaultyTarget", "by_tag", "targets"]
