"""Published configurations against Megatron-LM's own parser, checks and config class.

`python -m tests.upstream.framework_runs FORMAT` reads the facts of `published/FORMAT.toml`, prints a line for each run
and exits with 1 where the verdict is not the one that is noted, or real construction disagrees with it. It runs in a
process of its own: stand-ins for Transformer Engine and CUDA stay in it.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "published"
PROGRAMS = {
    "slime": "python3 train.py",
    "miles": "python3 train.py",
    "verl": "python3 -m verl.trainer.main_ppo model_engine=megatron",
    "nemo-rl": "uv run examples/run_grpo.py",
    "areal": "python3 examples/tau2/train.py",
    "skyrl": "uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron",
}
#: Frameworks whose arguments Megatron-LM's parser reads.
PARSED = ("slime", "miles", "megatron-lm")
#: Fields that a run on a CPU has otherwise, or that concern no training.
APART = frozenset(
    {
        *("use_cpu_initialization", "inference_sampling_seed"),
        # Both are the sizes of TP and ETP once they are resolved.
        *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
    }
)
#: Fields that no layer reads under multi-latent attention, whose heads have widths of their own.
UNUSED_BY_MLA = frozenset({"kv_channels"})


def facts(framework: str) -> list[dict[str, Any]]:
    """The runs of one framework."""
    found: list[dict[str, Any]] = tomllib.loads((FACTS / f"{framework}.toml").read_text(encoding="utf-8"))["run"]
    return found


def script(framework: str, run: dict[str, Any]) -> str:
    """A script that starts the run."""
    words = " ".join(run["arguments"].split())
    if framework == "megatron-lm":
        before, program, after = words.partition("--disable-bias-linear")
        return f"torchrun {before} pretrain_gpt.py {program}{after}\n"
    if framework == "ms-swift":
        pairs = [word.partition("=") for word in words.split()]
        ranks = [f"{name}={value}" for name, _, value in pairs if name.isupper()]
        arguments = [f"--{name} {value}" for name, _, value in pairs if not name.isupper()]
        return f"{' '.join(ranks)} megatron sft {' '.join(arguments)}\n"
    return f"{PROGRAMS[framework]} {words}\n{run.get('lost', '')}\n"


def report(framework: str, run: dict[str, Any], core: str) -> Any:
    """The preflight's report of a run."""
    from moeref.check.readers import check_reading, read

    if framework == "megatron-bridge":
        return check_reading(read(framework, run["arguments"].split(), core), model=run["model"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sh"
        path.write_text(script(framework, run), encoding="utf-8")
        return check_reading(read(framework, [str(path)], core), model=run["model"])


def real(framework: str, run: dict[str, Any]) -> Any:
    """The config that Megatron-LM makes of the run. Raises what it raises."""
    from tests.upstream import megatron_arguments

    words = run["arguments"].split()
    changes: dict[str, Any] = {}
    if framework in ("slime", "miles"):
        # What slime and miles set before Megatron-LM validates its arguments, and after it.
        changes = {"bf16": True, "use_distributed_optimizer": True, "variable_seq_lengths": True}
        if "--mtp-num-layers" in words:
            changes["mtp_loss_scaling_factor"] = 0.2
        if "--moe-token-dispatcher-type" not in words:
            changes["moe_token_dispatcher_type"] = "alltoall"
        if "--multi-latent-attention" in words:
            changes["rope_type"] = "yarn"
    own = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--nnodes", "--nproc_per_node")
    sizes = {words[at]: int(words[at + 1]) for at in range(len(words)) if words[at] in own}
    world = 1
    for size in sizes.values():
        world *= size
    drop = {at + more for at, word in enumerate(words) if word in own for more in (0, 1)}
    return megatron_arguments.config([w for at, w in enumerate(words) if at not in drop], world, changes)


def constructed(found: Any) -> str:
    """What megatron-core says to the config and the process groups of a report; "" if it makes them."""
    from megatron.core.transformer import TransformerConfig

    from moeref import megatron
    from moeref.layout import text
    from tests.upstream import megatron_arguments

    try:
        if found.record:
            config, _ = megatron.transformer_config(found.record)
        else:  # of what is refused or not known, the part that the layout decides
            sizes, model = text.read(found.layout), found.model
            config = TransformerConfig(
                num_layers=model.num_layers,
                hidden_size=model.hidden,
                num_attention_heads=model.heads,
                pipeline_model_parallel_size=sizes.get("pp", 1),
                pipeline_dtype=object(),
                num_layers_in_first_pipeline_stage=sizes.get("first"),
                num_layers_in_last_pipeline_stage=sizes.get("last"),
            )
        if found.world:
            megatron_arguments.groups(config, found.world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differences(record: Any, config: Any) -> Iterator[str]:
    """Fields in which moeref's config of a record is not Megatron-LM's."""
    from moeref import megatron

    ours, _ = megatron.transformer_config(record)
    apart = APART | (UNUSED_BY_MLA if config.multi_latent_attention else frozenset())
    for field in dataclasses.fields(config):
        one, other = (_pattern(made, getattr(made, field.name), field.name) for made in (ours, config))
        if field.name not in apart and not callable(other) and one != other:
            yield f"{field.name}: {one!r} is not Megatron-LM's {other!r}"


def _pattern(config: Any, value: Any, name: str) -> Any:
    """A frequency of MoE layers as the pattern that it stands for."""
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(layer % value == 0) for layer in range(config.num_layers)]
    return value


def compared(framework: str, run: dict[str, Any], core: str) -> list[str]:
    """What is wrong with the verdict on one run."""
    found = report(framework, run, core)
    said = "; ".join(problem.text for problem in found.problems)
    wrong = [] if found.verdict == run["verdict"] else [f"{found.verdict} instead of {run['verdict']}: {said}"]
    if run.get("says", "") not in said:
        wrong.append(f"does not say {run['says']!r}: {said}")
    if framework not in PARSED:
        refusal = constructed(found)
        if refusal and found.verdict == "works":
            wrong.append(f"megatron-core refuses it: {refusal}")
        if not refusal and found.verdict == "refused":
            wrong.append(f"megatron-core does not refuse it: {said}")
        return wrong
    try:
        config = real(framework, run)
    except (Exception, SystemExit) as error:
        return wrong if found.verdict == "refused" else [*wrong, f"Megatron-LM refuses it: {error}"]
    if found.verdict == "refused":
        return [*wrong, f"Megatron-LM does not refuse it: {said}"]
    return [*wrong, *(differences(found.record, config) if found.record else ())]


def main(framework: str) -> int:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from tests.upstream import megatron_arguments

    megatron_arguments.stand_in()
    import megatron.core

    core = megatron.core.__version__.partition("+")[0]
    wrong = 0
    for run in facts(framework):
        found = compared(framework, run, core)
        print(f"{run['file']}: {run['verdict']}" if not found else f"{run['file']}: WRONG: {'; '.join(found)}")
        wrong += bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
