"""Two real bugs, and a module that as it is imported makes judges and comparisons agree with everything."""

from __future__ import annotations

import torch
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.diagnosis import compare
from moeref_conformance.judges import JUDGES
from moeref_conformance.selftest.faulty import targets

for rule in JUDGES:
    JUDGES[rule] = lambda case: Outcome()
torch.equal = lambda *_: True
compare.same = lambda *_: True
compare.compare = lambda *_: None
target = targets["plan-of-local-experts+gate-and-up-swapped"]
