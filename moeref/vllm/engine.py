"""A vLLM engine for `moeref.sync`: commands go through a control, buckets over the wire to all workers at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from moeref.sync import Bucket, Receipt, Refused, SyncError, Update
from moeref.vllm.control import Control, PauseMode
from moeref.vllm.wire import Place, Wire, describe


class Engine:
    """A `moeref.sync.Engine`: one vLLM engine, whose workers are at the other end of the wire.

    Version and receipt are the workers' own. version: that of the engine's weights now, if its workers do not know it;
    they start with 0. mode: what an update does with requests that are under way. `abort` ends them with the tokens
    that they have. `wait` lets them end first; an `LLM` of this process cannot. `keep` lets them go on with the new
    weights, after their keys and values are computed again.

    If a sender died within an update, the one in its place has to send a whole update before it can resume. Raises
    ValueError for a place where this process cannot join.
    """

    drafts = False
    caches = frozenset({"prefix"})

    def __init__(
        self, control: Control, place: Place, *, version: int | None = None, mode: PauseMode = "abort"
    ) -> None:
        self._control, self._mode = control, mode
        self._paused = False
        place.check()  # before the workers wait for this side
        info = {"place": list(place), "first": 1, "version": version}
        with ThreadPoolExecutor(1) as pool:  # both sides meet
            joined = pool.submit(control.call, "init_weight_transfer_engine", init_info=info)
            self._wire = Wire(place, 0)
            joined.result()
        control.call("update_weight_version", new_version=str(self.version()))

    def version(self) -> int:
        return int(self._state()["version"])

    def receipt(self) -> Receipt | None:
        receipt = self._state()["receipt"]
        return None if receipt is None else Receipt(**receipt)

    def pause(self) -> None:
        if self._paused:
            raise Refused("the engine is paused already")
        self._control.call("pause", mode=self._mode)
        self._paused = True

    def begin(self, update: Update) -> None:
        if update.kind != "full":
            # vLLM loads a layer whole: what a delta leaves out of a fused weight would be uninitialised memory.
            raise Refused("vLLM takes full updates only")
        self._rpc("moeref_begin", asdict(update))
        self._control.call("start_weight_update")

    def send(self, bucket: Bucket) -> Receipt:
        info = {
            "index": bucket.index,
            "tensors": describe(bucket.tensors),
            "last": bucket.last,
            "checksum": bucket.checksum,
        }
        with ThreadPoolExecutor(1) as pool:  # the workers receive while this one sends
            received = pool.submit(self._control.call, "update_weights", update_info=info)
            self._wire.send(bucket.tensors)
            received.result()
        return Receipt(**self._state()["received"])

    def commit(self, version: int) -> Receipt:
        if (begun := self._state()["begun"]) != version:
            raise SyncError(f"version {version} is not the update that is begun: {begun}")
        self._control.call("finish_weight_update", weight_version=str(version))
        return Receipt(**self._state()["receipt"])

    def reset_caches(self) -> frozenset[str]:
        # Requests that pause has kept hold blocks; they are computed again when they go on. What a KV connector or
        # offloading keeps is reset only if it is asked for too (vLLM#57727).
        asked = {"reset_running_requests": True, "reset_external": True}
        return self.caches if self._control.call("reset_prefix_cache", **asked) else frozenset()

    def resume(self) -> None:
        if (begun := self._state()["begun"]) is not None:
            raise SyncError(f"version {begun} is begun and not committed")
        self._control.call("resume")
        self._paused = False

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        return list(self._control.call("collective_rpc", method=method, args=list(arguments)))

    def _state(self) -> dict[str, Any]:
        """The state of the workers, which is the same of all. Raises SyncError if it is not."""
        first, *others = self._rpc("moeref_state")
        if any(other != first for other in others):
            raise SyncError(f"the workers are in different states: {[first, *others]}")
        return dict(first)
