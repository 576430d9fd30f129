"""Reads a run file: one model, one layout, and the settings of policy and reference, each value written once.

```yaml
model: glm-4.7-flash            # a published model's name, or a path
layout: {tp: 2, ep: 8, etp: 1, world: 8}
seq_length: 8192                # optional, as every field of `moeref.record.Options` is
training: {micro_batch_size: 1} # optional: fields of `moeref.costs.Training`; and hbm, GiB of a GPU
policy: {moe_router_score_function: sigmoid}
reference: ${policy}            # interpolation: the reference model has the same settings
```

YAML is read with OmegaConf, which resolves interpolations. JSON needs no package.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeref.check.files import check_yaml, in_a_line, text_of
from moeref.check.report import CheckError, Report
from moeref.check.run import OPTIONS, check
from moeref.config import ConfigError, MoEConfig, declared_differences
from moeref.config.errors import nearest

_ARGUMENTS = ("seq_length", "pad_to", "training", "hbm", "gpus_per_node", "engine", "density", *OPTIONS)
_KEYS = ("model", "layout", *_ARGUMENTS, "policy", "reference", "declared")


@dataclass(frozen=True)
class RunFile:
    """The values of a run file.

    `models` has the settings of policy and reference, `options` the arguments of `check` that the file gives.
    """

    model: str
    layout: str
    models: Mapping[str, dict[str, Any]]
    options: Mapping[str, Any]

    def training(self, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """How `model` is trained; `given` takes precedence. The reference only runs forward."""
        return {"trains": model != "reference", **self.options.get("training", {}), **given}


def check_run(run: RunFile, **options: Any) -> dict[str, Report]:
    """The report of each model of a run; `options` take precedence over the file's."""
    asked = {name: MoEConfig.from_mapping(settings) for name, settings in run.models.items()}
    given, more = options.pop("training", {}), {k: v for k, v in run.options.items() if k != "training"}
    return {
        name: check(run.model, run.layout, asked=moe, training=run.training(name, given), **{**more, **options})
        for name, moe in asked.items()
    }


def is_run_file(model: str) -> bool:
    """Whether the path `model` is a run file (YAML, or JSON with a `policy`) and not a model."""
    path = Path(model)
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.suffix != ".json" or not os.path.isfile(path):  # noqa: PTH113 -- no name of a file, where Path raises
        return False
    found = _parsed(path)
    return isinstance(found, Mapping) and "policy" in found


def read_run_file(file: str | Path) -> RunFile:
    """The values of `file`.

    Raises CheckError for a file that cannot be read, for unknown or missing keys, and for a difference between
    reference and policy that `declared` does not name.
    """
    path = Path(file)
    found = _parsed(path)
    if not isinstance(found, Mapping):
        raise CheckError(f"{path}: a run file is a mapping, this is {type(found).__name__}")
    for key in found:
        if key not in _KEYS:
            raise CheckError(f"{path}: unknown key {key!r}{nearest(str(key), _KEYS)}")
    for key in ("model", "layout", "policy"):
        if found.get(key) is None:
            raise CheckError(f"{path}: {key} is missing" + (" (write `policy: {}`)" if key == "policy" else ""))
    models = {name: _settings(path, name, found[name]) for name in ("policy", "reference") if found.get(name)}
    models = {"policy": {}, **models}
    declared = found.get("declared") or []
    if not isinstance(declared, list):
        raise CheckError(f"{path}: declared is a list of names, not {declared!r}")
    if found.get("reference") is not None:
        models.setdefault("reference", {})
        try:
            sides = [MoEConfig.from_mapping(models[name]) for name in ("policy", "reference")]
            declared_differences(*({**s.fields, **s.transformer_config_kwargs} for s in sides), declared=declared)
        except ConfigError as error:
            raise CheckError(f"{path}: {error}; write the difference under declared:, or interpolate") from error
    layout = found["layout"]
    if not isinstance(layout, str | Mapping):
        raise CheckError(f"{path}: layout is a text such as tp=2,ep=8 or a mapping of sizes, not {layout!r}")
    text = ",".join(f"{k}={v}" for k, v in layout.items()) if isinstance(layout, Mapping) else layout
    options = {key: value for key in _ARGUMENTS if (value := found.get(key)) is not None}
    _settings(path, "training", options.get("training", {}))
    return RunFile(str(found["model"]), text, models, options)


def _settings(path: Path, name: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise CheckError(f"{path}: {name} is a mapping of settings, not {found!r}")
    return dict(found)


def _parsed(path: Path) -> Any:
    text = text_of(path)
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (RecursionError, ValueError) as error:
            raise CheckError(f"{path}: {error}") from error
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        how = "pip install 'moeref[yaml]', or write JSON"
        raise CheckError(f"{path}: YAML run files need the package omegaconf: {how}") from error
    try:
        check_yaml(text)
        if found := re.search(r"\$\{\s*oc\.env\b", text):
            line = text.count("\n", 0, found.start()) + 1
            raise CheckError(f"line {line}: the environment is not read; write the value instead of {found[0]}")
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise CheckError(f"{path}: {in_a_line(error)}") from error
    except Exception as error:  # PyYAML's errors; the package is not imported here
        raise CheckError(f"{path}: not YAML: {in_a_line(error)}") from error
