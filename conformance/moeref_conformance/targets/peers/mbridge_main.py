"""mbridge's main branch as a target, with the adapter of its release."""

from __future__ import annotations

from moeref_conformance.targets.peers import common, mbridge


class MbridgeMain(mbridge.Mbridge):
    """The same calls."""

    info = common.source_info("mbridge-main", "https://github.com/ISEEKYAN/mbridge/issues")


#: What `--target mbridge-main` names.
target = MbridgeMain
