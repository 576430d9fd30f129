"""SkyRL's deltas: after a sync that broke off, the next one leaves out the tensors that had come, and nothing is said.

Its publisher keeps a copy of what the engine has, and takes each tensor's difference to it. The copy moves on as
tensors come; version and manifest only at the end. If an iterator of weights fails in between, the tensors before that
are in the copy and not at the engine, so that the next delta finds them unchanged. Needs SkyRL's source on the path.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file

#: Without what their `__init__` imports.
root = Path(find_spec("skyrl").origin).parents[1]
for package in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.weight_sync"):
    sys.modules[package] = module = ModuleType(package)
    module.__path__ = [str(root.joinpath(*package.split(".")))]

from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk  # noqa: E402
from skyrl.backends.skyrl_train.weight_sync.delta_checkpoint import (  # noqa: E402
    DeltaCheckpointPublisher,
    LocalCheckpointStore,
)

old = {"a": torch.zeros(8), "b": torch.zeros(8)}
new = {"a": torch.ones(8), "b": torch.ones(8)}


def sent(fails: bool):
    for name, tensor in new.items():
        if fails and name == "b":
            raise ConnectionError("the trainer broke off")
        yield WeightChunk([name], [str(tensor.dtype)], [list(tensor.shape)], [tensor])


with TemporaryDirectory() as folder:
    base, sync = Path(folder, "base"), str(Path(folder, "sync"))
    base.mkdir()
    save_file(old, base / "model.safetensors")
    publisher = DeltaCheckpointPublisher(str(base), sync, str(Path(folder, "staging")), publish_num_workers=1)
    try:
        publisher.create_delta_files(sent(fails=True))
    except ConnectionError as error:
        print("first sync:", error)
    asked = publisher.publish(publisher.create_delta_files(sent(fails=False)))
    engine = LocalCheckpointStore(str(base), str(Path(folder, "engine")))
    engine.fetch(asked["target_version"], asked["sync_dir"], asked["uri"])
    (file,) = engine.weights_dir.glob("*.safetensors")
    wrong = [name for name, tensor in load_file(file).items() if not torch.equal(tensor, new[name])]

print(
    f"{'shown' if wrong else 'mended'}: after a whole sync to version {asked['version']}, {wrong} have their old values"
)
sys.exit(not wrong)
