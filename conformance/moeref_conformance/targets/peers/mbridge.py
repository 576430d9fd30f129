"""mbridge (ISEEKYAN) as a target, as released."""

from __future__ import annotations

from moeref_conformance.targets.peers import common, mbridge_calls


class Mbridge(mbridge_calls.MbridgeCalls):
    """The distribution that is installed."""

    info = common.info("mbridge", mbridge_calls.ISSUES)


#: What `--target mbridge` names.
target = Mbridge
