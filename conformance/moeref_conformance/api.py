"""What a target implements; the text is in `contract/api.py`."""

from moeref_conformance.contract.api import *  # noqa: F403
