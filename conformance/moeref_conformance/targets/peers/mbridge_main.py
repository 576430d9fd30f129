"""mbridge's main branch as a target, with the calls of its release."""

from __future__ import annotations

from moeref_conformance.targets.peers import common, mbridge_calls


class MbridgeMain(mbridge_calls.MbridgeCalls):
    """The commit that is on the path."""

    info = common.source_info("mbridge-main", mbridge_calls.ISSUES)


#: What `--target mbridge-main` names.
target = MbridgeMain
