"""`python -m moeref_conformance` is `moeref-conformance`."""

from __future__ import annotations

import sys

from moeref_conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
