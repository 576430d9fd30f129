"""Tries mutmut's mutants of functions that ranks run together, and lists those that no test sees.

mutmut tries a mutant with the tests that it saw reach it; what a forked rank reaches it does not see. Here each mutant
of these functions meets the tests that fork ranks. Runs in the folder `mutants` that `nox -s mutants` leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path

from tests.kit.mutate import run

SECONDS = 300
#: How the names of functions begin, and the tests in which ranks run them.
TESTS = {
    "moeref.bridge.agreement.": ["tests/unit/test_agreement.py"],
    "moeref.bridge.loader.x_load__": [
        *(f"tests/unit/test_{name}.py" for name in ("agreement", "loader", "checkpoint_files")),
        "tests/upstream/test_fp8_against_transformers.py::test_a_rank_loads_what_it_loads_of_the_files_in_bf16",
    ],
    "moeref.bridge.loader.x_read_shard__": ["tests/unit/test_shard_folders.py::test_there_and_back_is_bit_for_bit"],
}


def mutants() -> dict[str, list[str]]:
    """By name, as mutmut wrote them down, the tests for each."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path("moeref/bridge").glob("*.meta"))]
    names = [name for file in files for name in file["exit_code_by_key"]]
    return {name: tests for name in names for begins, tests in TESTS.items() if name.startswith(begins)}


def outcome(name: str, tests: list[str]) -> str:
    """What a forked process, in which a mutant is at work, says of the tests: passed, failed, or late."""
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {0: "passed", -signal.SIGALRM: "late"}.get(status, "failed")
    signal.alarm(SECONDS)
    os.environ["MUTANT_UNDER_TEST"] = name
    os._exit(run(tests))


def main(words: list[str]) -> int:
    """Print each mutant that no test sees, or whose tests do not end."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate_ranks", description=main.__doc__)
    parser.add_argument("--sample", type=int, help="how many mutants (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    asked = parser.parse_args(words)
    found = mutants()
    chosen = random.Random(asked.seed).sample(list(found), min(asked.sample or len(found), len(found)))
    os.environ["MUTANT_UNDER_TEST"] = ""
    if run(sorted({test for tests in TESTS.values() for test in tests})):
        print("the tests fail without a change", file=sys.stderr)
        return 2
    left = 0
    for name in chosen:
        # On a busy machine gloo may fail by itself: what is killed is killed twice.
        ended = {outcome(name, found[name]) for _ in range(2)}
        if ended != {"failed"}:
            left += 1
            print(f"{name}: {', '.join(sorted(ended))}", flush=True)
    print(f"{left} of {len(chosen)} left", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
