"""A vLLM engine for `moeref.sync`: commands go through a control, buckets over the wire to all workers at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from moeref.sync import Bucket, Receipt, Refused, SyncError, Update
from moeref.vllm.control import Control, PauseMode, version_of
from moeref.vllm.wire import Place, Wire, describe


class Engine:
    """What `moeref.sync.Engine` asks for, of one vLLM engine whose workers are at the other end of the wire.

    version: of the weights that the engine has now. mode: what happens to requests that are under way in an update;
    with "keep" they go on with new weights over old keys and values, unless the caches are reset.
    """

    drafts = False
    caches = frozenset({"prefix"})

    def __init__(self, control: Control, place: Place, *, version: int = 0, mode: PauseMode = "abort") -> None:
        self._control, self._mode, self._version = control, mode, version
        self._receipt: Receipt | None = None
        self._begun: Update | None = None
        self._paused = False
        info = {"place": list(place), "first": 1}
        with ThreadPoolExecutor(1) as pool:  # both sides meet
            joined = pool.submit(control.call, "init_weight_transfer_engine", init_info=info)
            self._wire = Wire(place, 0)
            joined.result()
        control.call("update_weight_version", new_version=str(version))

    def version(self) -> int:
        return version_of(self._control.call("weight_info"))

    def receipt(self) -> Receipt | None:
        return self._receipt

    def pause(self) -> None:
        if self._paused:
            raise Refused("the engine is paused already")
        self._control.call("pause", mode=self._mode)
        self._paused = True

    def begin(self, update: Update) -> None:
        if update.kind != "full":
            # vLLM loads a layer whole: what a delta leaves out of a fused weight would be uninitialised memory.
            raise Refused("vLLM takes full updates only")
        self._rpc("moeref_begin", asdict(update), self.version())
        self._begun = update
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
        return self._same(self._rpc("moeref_receipt"))

    def commit(self, version: int) -> Receipt:
        if self._begun is None or self._begun.version != version:
            raise SyncError(f"version {version} is not the update that is begun: {self._begun}")
        self._control.call("finish_weight_update", weight_version=str(version))
        self._receipt = self._same(self._rpc("moeref_commit", version))
        self._begun = None
        return self._receipt

    def reset_caches(self) -> frozenset[str]:
        return self.caches if self._control.call("reset_prefix_cache") else frozenset()

    def resume(self) -> None:
        if self._begun is not None:
            raise SyncError(f"version {self._begun.version} is begun and not committed")
        self._control.call("resume")
        self._paused = False

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        return list(self._control.call("collective_rpc", method=method, args=list(arguments)))

    def _same(self, receipts: list[dict[str, Any]]) -> Receipt:
        """The receipt of all workers. Raises SyncError if they differ."""
        if any(receipt != receipts[0] for receipt in receipts):
            raise SyncError(f"the workers received different buckets: {receipts}")
        return Receipt(**receipts[0])
