"""Deliberately wrong targets: moeref, the good target, with real bugs of the field at the border of its sessions.

A rule that none of these can turn red proves little. `faulty:<id>` runs one of them, `faulty:<id>+<id>` two together;
`tests/kit/test_faults.py` runs all and checks each against the rules and the diagnosis that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from moeref_conformance.contract.api import Cell, Claims, Info, Session, World
from moeref_conformance.contract.checks import BadInput, similar
from moeref_conformance.selftest.faults import FAULTS, Fault
from moeref_conformance.selftest.faults.base import Variant
from moeref_conformance.targets.moeref import MoerefTarget

_GOOD = MoerefTarget()


def claimed(faults: Sequence[Variant]) -> Claims:
    """The good target's claims, changed as the faults say."""
    return replace(_GOOD.claims, **{name: value for fault in faults for name, value in fault.claims.items()})


class FaultyTarget:
    """The good target with `faults` in every session."""

    preload = staticmethod(_GOOD.preload)

    def __init__(self, *faults: Variant, kind: str = "faulty") -> None:
        self.faults, self.claims = faults, claimed(faults)
        self.info = Info(name=f"{kind}:" + "+".join(fault.id for fault in faults), version=_GOOD.info.version)

    def chosen(self, cell: Cell) -> Sequence[Variant]:
        """The faults of a session of `cell`."""
        return self.faults

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:
        """A good session that every fault has changed in turn."""
        faults, given = self.chosen(cell), (cell, world)
        with ExitStack() as stack:
            for fault in faults:
                if fault.patch:
                    stack.enter_context(fault.patch(cell, world))
                given = fault.given(*given) if fault.given else given
            session: Session = stack.enter_context(_GOOD.open(*given))
            for fault in faults:
                session = fault.wrap(session, cell, world) if fault.wrap else session
            yield session


class _Targets(Mapping[str, FaultyTarget]):
    """All faulty targets by id; `a+b` makes the one with both faults."""

    def __getitem__(self, key: str) -> FaultyTarget:
        for part in key.split("+"):
            if part not in FAULTS:
                raise BadInput(
                    f"unknown fault {part!r}{similar(part, FAULTS)}; docs/reference/faults.md has all {len(FAULTS)}"
                )
        return FaultyTarget(*(FAULTS[part] for part in key.split("+")))

    def __iter__(self) -> Iterator[str]:
        return iter(FAULTS)

    def __len__(self) -> int:
        return len(FAULTS)

    def __contains__(self, key: object) -> bool:
        return all(part in FAULTS for part in str(key).split("+"))


targets = _Targets()


class ByTag(FaultyTarget):
    """The good target with the faults that the cell's tags name (`fault:<id>`), so that one world can run all."""

    def __init__(self) -> None:
        super().__init__()
        self.info = Info(name="faulty:by-tag", version=_GOOD.info.version)

    def chosen(self, cell: Cell) -> Sequence[Variant]:
        """The faults of the cell's tags, which may be none."""
        return [FAULTS[tag.removeprefix("fault:")] for tag in cell.tags if tag.startswith("fault:")]

    def claims_in(self, cell: Cell) -> Claims:
        """What the target of the cell's faults alone would claim."""
        return claimed(self.chosen(cell))


by_tag = ByTag()

__all__ = ["FAULTS", "Fault", "FaultyTarget", "by_tag", "targets"]
