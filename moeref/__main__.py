"""`python -m moeref`."""

import sys

from moeref.cli import main

sys.exit(main())
