"""Readers of trees of settings: lines of YAML, interpolations, Hydra's overrides, defaults, and what is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeref.check import CheckError, Report, read_run_file
from moeref.check.readers import check_reading, read
from moeref.check.readers.shell import Word
from moeref.check.readers.tree import Tree, scalar

ACTOR = "actor_rollout_ref.actor.megatron"
MODULES = f"{ACTOR}.override_transformer_config.recompute_modules"
REPLAY = f"{ACTOR}.router_replay.mode"
OLD_REPLAY = "actor_rollout_ref.actor.router_replay.mode"
VANILLA = f"{ACTOR}.vanilla_mbridge=True"
ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
FLASH = ["actor_rollout_ref.model.path=glm-4.7-flash", f"{MODULES}=[layernorm]"]
VERL = f"""#!/bin/bash
TP=${{TP:-2}}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    data.train_batch_size=32 actor_rollout_ref.model.path="$HOME/models/Qwen3-30B-A3B" \\
    {ACTOR}.tensor_model_parallel_size=$TP \\
    {ACTOR}.expert_model_parallel_size=4 \\
    +{ACTOR}.override_transformer_config.recompute_modules='["moe_act", "layernorm"]' \\
    +{ACTOR}.override_transformer_config.recompute_granularity=selective \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.nnodes=1 "$@"
"""
BASE = """
policy:
  model_name: Qwen/Qwen3-30B-A3B
  precision: bfloat16
  max_total_sequence_length: 4096
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 2
    sequence_parallel: true
    pipeline_dtype: ${policy.precision}
    optimizer: {lr: 5e-6}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""


WORKS = ("works", "")


def verl(tmp_path: Path, text: str = VERL, *given: str) -> Report:
    (tmp_path / "run.sh").write_text(text)
    return check_reading(read("verl", [str(tmp_path / "run.sh"), *given], "0.19.2"), verify=False)


def nemo(tmp_path: Path, text: str, *given: str, **options: Any) -> Report:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "run.yaml").write_text(text)
    return check_reading(read("nemo-rl", [str(tmp_path / "run.yaml"), *given], "0.19.2"), verify=False, **options)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-2", -2),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("True", True),
        ("null", None),
        ("None", "None"),  # Hydra's null is written null
        ("'a b'", "a b"),
        ("[a, 'b,c', 3]", ["a", "b,c", 3]),
        ("[]", []),
        ("fp32", "fp32"),
        pytest.param("1" * 5000, "1" * 5000, id="more digits than Python reads"),
    ],
)
def test_a_scalar_is_read_as_hydra_reads_it(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_overrides_come_in_order_and_replace_branches() -> None:
    tree = Tree()
    words = ["a.b=1", "+a.c=x", "++a.b=2", "d=3", "d.e=4", "f.g=5", "f=null", "h.i=6", "~a.c", "~h", "plain"]
    others = tree.overrides(Word(word, f"w:{number}") for number, word in enumerate(words))
    assert {path: (value.value, value.source) for path, value in tree.values.items()} == {
        "a.b": (2, "w:2"),
        "d.e": (4, "w:4"),
        "f": (None, "w:6"),
    }
    assert [word.text for word in others] == ["plain"]


def test_a_default_below_a_value_is_refused() -> None:
    tree = Tree()
    tree.overrides([Word("a={}", "w"), Word("b.c=1", "w"), Word("d=${b.c}", "w")])
    tree.defaults("F", {"a.x": 1, "b.c": 2, "b.e": 3})
    tree.resolve()
    assert {path: value.value for path, value in tree.values.items()} == {"a.x": 1, "b.c": 1, "d": 1, "b.e": 3}
    tree.overrides([Word("e=null", "run.yaml:3")])
    with pytest.raises(CheckError, match=r"^e \(run.yaml:3\) is null, and F reads e.x there; leave it out, or write"):
        tree.defaults("F", {"e.x": 1})
    with pytest.raises(CheckError, match=r"^b.e \(default of F\) is below b, of which F reads a value; leave it out$"):
        tree.defaults("F", {"b": 1})


def test_the_command_line_takes_values_away(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer: {n_gpus_per_node: 8, nnodes: 4}\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-30B-A3B}, actor: {strategy: megatron}}\n"
    )
    for words, world in (((), 32), (("~trainer.nnodes",), 8), (("~trainer.nnodes=4",), 8), (("~trainer",), 8)):
        report = check_reading(read("verl", [str(config), *words], "0.19.2"))
        assert report.layout.endswith(f"world={world}"), (words, report.layout)


def test_verl_end_to_end(tmp_path: Path) -> None:
    report = verl(tmp_path)
    assert report.verdict == "works", report.problems
    assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=2,cp=1,world=8"
    assert report.settings is not None
    assert report.settings["recompute_modules"] == ["moe_act", "layernorm"]
    assert report.settings["attention_backend"] == "flash"
    assert report.settings["moe_router_load_balancing_type"] == "none"
    sources = {name: value.source for name, value in report.read.items()}
    assert sources["tp"] == "run.sh:5"
    assert sources["recompute_modules"] == "run.sh:7"
    assert sources["etp"].startswith("derived: as TP")
    assert sources["seed"] == "default of verl"
    assert sources["moe_permute_fusion"] == "default of Megatron-Bridge"
    assert (report.settings["overlap_p2p_comm"], report.settings["batch_p2p_comm"]) == (False, False)
    old = verl(tmp_path, VERL, VANILLA)
    assert old.read["moe_router_bias_update_rate"].source == "default of mbridge"
    assert {value.name for value in report.elsewhere} == {
        "data.train_batch_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    }


@pytest.mark.parametrize(
    ("given", "verdict", "says"),
    [
        (["TP=4"], "refused", "world=8 is not divisible by etp·ep·pp = 4·4·1"),
        ([f"{ACTOR}.expert_tensor_parallel_size=1"], "works", ""),
        ([f"{ACTOR}.tensor_parallel_size=1"], "unknown", f"{ACTOR}.tensor_parallel_size 1 (command line) is not known"),
        ([f"{ACTOR}.override_transformer_config.moe_router_topk=4"], "works", ""),
        ([f"{ACTOR}.use_mbridge=False"], "refused", "is off: verl asserts that a bridge makes the model"),
        ([f"{ACTOR}.sequence_parallel=False", VANILLA], "works", ""),  # mbridge derives it
        ([f"{ACTOR}.sequence_parallel=False"], "refused", "needs sequence parallel"),
        (
            [f"{ACTOR}.sequence_parallel=${{oc.env:SP}}"],
            "unknown",
            f"{ACTOR}.sequence_parallel ${{oc.env:SP}} (command line) is computed",
        ),
        ([f"{ACTOR}.override_transformer_config.sequence_parallel=False"], "refused", "needs sequence parallelism"),
        ([f"{REPLAY}=R3", f"{ROUTES}=true"], "works", ""),
        ([f"{REPLAY}=R2"], "works", ""),
        ([f"{REPLAY}=R3"], "refused", f"{ROUTES}=False (default of verl) asks for none: verl finds none in the batch"),
        ([f"{REPLAY}=R2", f"{ROUTES}=true"], "refused", f"{ROUTES} (command line) is of R3, and {REPLAY} is R2"),
        (
            [f"{OLD_REPLAY}=R2"],
            "unknown",
            f"{OLD_REPLAY} (command line) is not read: verl's workers replay as {REPLAY}",
        ),
        ([f"{OLD_REPLAY}=R2", f"{REPLAY}=R2"], "works", ""),
        ([f"{ACTOR}.use_megatron_fsdp=True"], "unknown", "Megatron-FSDP"),
        ([f"{ACTOR}.dynamic_context_parallel=True"], "unknown", "groups of context parallelism change"),
        (["data.train_batch_size=0", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"], "works", ""),
        ([f"{REPLAY}=r3"], "refused", f"{REPLAY}=r3 (command line) is none of disabled, R2, R3"),
        ([f"{REPLAY}=${{oc.env:MODE}}"], "unknown", f"{REPLAY} ${{oc.env:MODE}} (command line) is computed"),
        (["actor_rollout_ref.model.lora.rank=8"], "unknown", "adapters"),
        (["trainer.nnodes=$N"], "unknown", "trainer.nnodes"),
        (
            [*FLASH, VANILLA],
            "unknown",
            "what it sets for glm4_moe_lite is not known",
        ),
    ],
)
def test_what_verl_s_tree_says(tmp_path: Path, given: list[str], verdict: str, says: str) -> None:
    report = verl(tmp_path, VERL, *given)
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said


def test_a_name_that_transformer_config_lacks_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="has no moe_router_topkk"):
        verl(tmp_path, VERL, f"{ACTOR}.override_transformer_config.moe_router_topkk=4")


def test_mtp_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    text = VERL.replace("Qwen3-30B-A3B", "GLM-4.5-Air").replace("nnodes=1", "nnodes=4")
    assert any("1 MTP layers are left out" in note for note in verl(tmp_path, text).notes)
    asked = verl(tmp_path, text, "actor_rollout_ref.model.mtp.enable=True")
    assert not any("left out" in note for note in asked.notes)


def test_mtp_of_a_model_without_such_layers(tmp_path: Path) -> None:
    asked = "actor_rollout_ref.model.mtp.enable=True"
    report = verl(tmp_path, VERL, asked)
    assert report.verdict == "refused"
    said = f"{asked.removesuffix('=True')} (command line): the config of qwen3_moe says no MTP layers, and verl raises"
    assert said in _said(report)


def test_a_script_has_to_choose_megatron(tmp_path: Path) -> None:
    plain = VERL.replace("--config-path=config --config-name='ppo_megatron_trainer.yaml' ", "")
    report = verl(tmp_path, plain)
    assert report.verdict == "unknown"
    assert "model_engine is not given, and the default of verl is dp, which is no Megatron" in _said(report)
    assert verl(tmp_path, plain.replace(" trainer.nnodes=1", " model_engine=megatron trainer.nnodes=1")).works
    with pytest.raises(CheckError, match=r"model_engine=veomni: moeref knows Megatron only"):
        verl(tmp_path, plain.replace(" trainer.nnodes=1", " model_engine=veomni trainer.nnodes=1"))


EXTRA = """EXTRA=(model_engine=megatron trainer.save_freq=1)
TP=${NOTHING:-}
TP=${TP:-2}
if [ "$ENGINE" = sglang ]; then
    EXTRA+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3)
fi
RAY=(ray_kwargs.ray_init.num_cpus=null)
[ "$UV" = 0 ] || RAY=(ray_kwargs.ray_init.num_cpus=8)
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "${EXTRA[@]}" "${RAY[@]}" \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
"""


def test_overrides_of_other_parts_may_stand_under_a_condition(tmp_path: Path) -> None:
    report = verl(tmp_path, EXTRA)
    assert report.verdict == "works", report.problems
    assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=2,cp=1,world=8"
    text = EXTRA.replace("+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3", f"{ACTOR}.seed=7")
    decides = verl(tmp_path, text)
    assert decides.verdict == "unknown"
    assert f"{ACTOR}.seed 7 (run.sh:5) is computed by the script" in _said(decides)


def test_an_array_that_a_condition_replaces_leaves_its_values_open(tmp_path: Path) -> None:
    text = EXTRA.replace("ray_kwargs.ray_init.num_cpus=null", "trainer.nnodes=1")
    report = verl(tmp_path, text)
    assert report.verdict == "unknown"
    assert "trainer.nnodes 1 (run.sh:9) is computed by the script" in _said(report)


@pytest.mark.parametrize("model", ["glm-5", "kimi-k2.5", "minimax-m2", "qwen3.5-35b-a3b"])
def test_megatron_bridge_s_newer_families(tmp_path: Path, model: str) -> None:
    ends = {"glm-5": "last=18", "kimi-k2.5": "last=13", "minimax-m2": "first=15,last=15"}.get(model, "")
    (tmp_path / "run.sh").write_text(SKYRL)
    layout = ",".join(["tp=4,pp=4,ep=16,etp=1,world=128", *filter(None, [ends])])
    given = [f"{CONFIG}.tensor_model_parallel_size=4"]
    reading = read("skyrl", [str(tmp_path / "run.sh"), *given], "0.19.2")
    report = check_reading(reading, model=model, layout=layout, verify=False)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    assert report.settings["moe_token_dispatcher_type"] == "alltoall"


@pytest.mark.parametrize(
    ("model", "layout", "balancing"),
    [
        ("glm-5", "tp=4,pp=4,ep=16,etp=1,world=128,last=18", "aux_loss"),
        ("kimi-k2.5", "tp=4,pp=4,ep=16,etp=1,world=128,last=13", "seq_aux_loss"),
        ("deepseek-v3.2", "tp=4,pp=4,ep=16,etp=1,world=128,last=13", "seq_aux_loss"),
        ("minimax-m2", "tp=4,pp=2,ep=16,etp=1,world=128", "aux_loss"),
        ("qwen3.5-35b-a3b", "tp=4,ep=16,etp=1,world=16", "aux_loss"),
    ],
)
def test_mcore_bridge_s_newer_families(tmp_path: Path, model: str, layout: str, balancing: str) -> None:
    (tmp_path / "run.sh").write_text(SWIFT)
    reading = read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2")
    report = check_reading(reading, model=model, layout=layout, training={"global_batch_size": 128}, verify=False)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    assert report.settings["moe_router_load_balancing_type"] == balancing


def test_mbridge_makes_qwen3_5(tmp_path: Path) -> None:
    report = verl(tmp_path, VERL.replace("Qwen3-30B-A3B", "Qwen3.5-35B-A3B"), VANILLA)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    names = ("masked_softmax_fusion", "moe_router_dtype", "moe_shared_expert_overlap", "moe_router_bias_update_rate")
    assert [report.settings[name] for name in names] == [False, "fp32", True, 0.001]


def test_the_backend_of_flex_is_ignored_under_another_dispatcher(tmp_path: Path) -> None:
    text = "policy: {megatron_cfg: {moe_token_dispatcher_type: KIND, moe_flex_dispatcher_backend: hybridep}}"
    report = nemo(tmp_path, f"defaults: base.yaml\n{text.replace('KIND', 'alltoall')}\n")
    assert report.verdict == "works", report.problems
    said = "moe_flex_dispatcher_backend hybridep (run.yaml:2) is ignored: the dispatcher alltoall has no backend"
    assert any(note.endswith(said) for note in report.notes), report.notes
    flex = nemo(tmp_path, f"defaults: base.yaml\n{text.replace('KIND', 'flex')}\n")
    assert flex.settings is not None
    assert flex.settings["moe_flex_dispatcher_backend"] == "hybridep"
    assert not any("is ignored" in note for note in flex.notes)


def test_nemo_rl_inherits_and_interpolates(tmp_path: Path) -> None:
    report = nemo(tmp_path, "defaults: base.yaml\npolicy:\n  megatron_cfg:\n    expert_model_parallel_size: 4\n")
    assert report.verdict == "works", report.problems
    assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=1,cp=1,world=4"
    sources = {name: value.source for name, value in report.read.items()}
    assert (sources["ep"], sources["tp"], sources["etp"]) == ("run.yaml:4", "base.yaml:8", "default of NeMo-RL")
    assert report.settings is not None
    assert report.settings["moe_router_dtype"] == "fp64"


@pytest.mark.parametrize(
    ("nodes", "engine", "world"),
    [
        (3, "enabled: false, resources: {num_nodes: 1, gpus_per_node: 4}", 8),
        (3, "enabled: true, resources: {num_nodes: 1, gpus_per_node: 4}", 12),
        (1, "enabled: false, resources: {num_nodes: null, gpus_per_node: 2}", 2),
    ],
)
def test_ranks_of_nemo_rl_s_engine_are_not_the_trainer_s(tmp_path: Path, nodes: int, engine: str, world: int) -> None:
    text = f"defaults: base.yaml\npolicy: {{generation: {{colocated: {{{engine}}}}}}}\n"
    report = nemo(tmp_path, text, f"cluster.num_nodes={nodes}")
    assert (report.verdict, report.world) == ("works", world), report.problems


@pytest.mark.parametrize(
    ("nodes", "resources", "verdict", "says"),
    [
        (3, "num_nodes: 3, gpus_per_node: 4", "refused", "resources.num_nodes=3 (run.yaml:2) has to be 1 to 2"),
        (3, "num_nodes: 1, gpus_per_node: 2", "refused", "has to be 4, the GPUs of a node"),
        (3, "num_nodes: '${a:1}', gpus_per_node: 4", "unknown", "resources.num_nodes ${a:1} (run.yaml:2) is computed"),
        (1, "num_nodes: 2, gpus_per_node: 2", "refused", "has to be 1 or null on one node"),
        (1, "num_nodes: 1", "refused", "resources.gpus_per_node=None (default of NeMo-RL) has to be 1 to 3"),
    ],
)
def test_an_engine_with_which_nemo_rl_does_not_start(
    tmp_path: Path, nodes: int, resources: str, verdict: str, says: str
) -> None:
    engine = f"generation: {{colocated: {{enabled: false, resources: {{{resources}}}}}}}"
    report = nemo(tmp_path, f"defaults: base.yaml\npolicy: {{{engine}}}\n", f"cluster.num_nodes={nodes}")
    assert report.verdict == verdict, report.problems
    assert says in _said(report)


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("nemo-rl", "policy.megatron_cfg.enabled=false"),
        ("verl", "actor_rollout_ref.actor.strategy=fsdp2"),
        ("verl", "actor_rollout_ref.actor.fsdp_config.param_offload=true"),
        ("skyrl", "trainer.strategy=fsdp"),
    ],
)
def test_a_run_that_megatron_does_not_train_is_bad_input(tmp_path: Path, framework: str, given: str) -> None:
    (tmp_path / "run.yaml").write_text("a: 1\n")
    with pytest.raises(CheckError, match=r"^command line: [\w.]+=\w+: moeref knows Megatron only$"):
        read(framework, [str(tmp_path / "run.yaml"), given], "0.19.2")


def test_nemo_rl_takes_one_backend(tmp_path: Path) -> None:
    report = nemo(tmp_path, "defaults: base.yaml\npolicy: {dtensor_cfg: {enabled: true}}\n")
    assert report.verdict == "refused", report.problems
    said = "policy.megatron_cfg.enabled (base.yaml:7) and policy.dtensor_cfg.enabled (run.yaml:2): NeMo-RL takes one"
    assert said in _said(report)
    assert nemo(tmp_path, "defaults: base.yaml\npolicy: {dtensor_cfg: {enabled: false}}\n").verdict == "works"


@pytest.mark.parametrize(
    "text",
    [
        "on_policy_distillation: {enabled: true, non_colocated_teachers: {enabled: true}}",
        "env: {reward_model: {resources: {num_nodes: 1}}}\ndata: {default: {env_name: reward_model}}",
        "env: {reward_model: {resources: {num_nodes: 1}}}\ndata: {train: [{env_name: reward_model}]}",
    ],
)
def test_ranks_of_nemo_rl_s_other_models_are_not_counted(tmp_path: Path, text: str) -> None:
    report = nemo(tmp_path, f"defaults: base.yaml\n{text}\n")
    assert report.verdict == "unknown", report.problems
    assert "a model takes ranks of the cluster" in _said(report)


@pytest.mark.parametrize(
    ("text", "verdict", "says"),
    [
        ("policy: {megatron_cfg: {expert_model_parallel_size: '${cluster.gpus_per_node}'}}", "works", ""),
        ("policy: {megatron_cfg: {expert_model_parallel_size: '${oc.env:EP}'}}", "unknown", "${oc.env:EP}"),
        ("policy: {megatron_cfg: {expert_model_parallel_size: '${mul:1,2}'}}", "unknown", "${mul:1,2}"),
        ("policy: {megatron_cfg: {expert_model_parallel_size: '${policy.a}', b: 1}}", "unknown", "${policy.a}"),
        ("policy: {megatron_cfg: {expert_parallel_size: 4}}", "unknown", "expert_parallel_size 4 (run.yaml:2)"),
        ("policy: {megatron_cfg: {peft: {enabled: true}}}", "unknown", "adapters"),
        ("policy: {megatron_cfg: {sequence_parallel: false}}", "refused", "needs sequence parallelism"),
        ("policy: {router_replay: {enabled: true}}", "works", ""),
        ("policy: {quant_cfg: NVFP4, quant_calib_size: 16}", "unknown", "weights are rounded in training"),
        ("policy: {megatron_cfg: {track_moe_metrics: true, calculate_per_token_loss: true}}", "works", ""),
        (
            "policy: {megatron_cfg: {context_parallel_size: 2}, sequence_packing: {enabled: false}}",
            "refused",
            "policy.sequence_packing.enabled (run.yaml:2) is off, and context parallelism needs it",
        ),
        ("policy: {megatron_cfg: {context_parallel_size: 2}}", "works", ""),
        (
            "policy: {megatron_cfg: {model_overrides: {moe_permute_fusion: false}}}",
            "refused",
            "model_overrides.moe_permute_fusion (run.yaml:2): NeMo-RL refuses an override of a setting of its own",
        ),
        ("policy: {megatron_cfg: {model_overrides: {moe_router_fusion: true}}}", "works", ""),
        ("policy: {megatron_cfg: {model_overrides: {layernorm_epsilon: 1.0e-6}}}", "works", ""),
        (
            "policy: {megatron_cfg: {layernorm_epsilon: 1.0e-6, model_overrides: {layernorm_epsilon: 1.0e-6}}}",
            "refused",
            "model_overrides.layernorm_epsilon (run.yaml:2)",
        ),
        ("policy: {megatron_cfg: {cuda_graph_impl: local}}", "unknown", "no rule covers cuda_graph_impl"),
        ("policy: {megatron_cfg: {cuda_graph_impl: none, cuda_graph_modules: [], cuda_graph_warmup_steps: 3}}", *WORKS),
        ("polcy: {megatron_cfg: {expert_model_parallel_size: 4}}", "unknown", "polcy.megatron_cfg"),
    ],
)
def test_what_nemo_rl_s_tree_says(
    tmp_path: Path, text: str, verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP", "4")
    report = nemo(tmp_path, f"defaults: base.yaml\n{text}\n")
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: other.yaml", "other.yaml"),
        ("defaults: run.yaml", "inherit from one another"),
        ("- 1", "a configuration is a mapping"),
        ("a: [", "run.yaml"),
        ("a: &a {b: *a}", "run.yaml"),
        ("policy: {precision: float16, model_name: gpt-oss-20b}", "moeref knows bfloat16"),
        ("policy: {precision: bfloat16}", "does not name a model"),
        ("policy: {precision: bfloat16, model_name: null}", "does not name a model"),
    ],
)
def test_bad_yaml_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CheckError, match=says):
        nemo(tmp_path, text)


def test_without_omegaconf_yaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "omegaconf", None)
    with pytest.raises(CheckError, match=r"pip install 'moeref\[yaml\]'"):
        nemo(tmp_path, "defaults: base.yaml")
    assert verl(tmp_path).verdict == "works"


SKYRL = """MODEL=Qwen/Qwen3-30B-A3B
uv run --isolated --extra megatron -m skyrl.train.entrypoints.main_base trainer.policy.model.path=$MODEL \\
  trainer.strategy=megatron \\
  trainer.placement.policy_num_gpus_per_node=8 trainer.flash_attn=false generator.batched=true \\
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \\
  trainer.policy.megatron_config.expert_model_parallel_size=4 $@
"""
CONFIG = "trainer.policy.megatron_config"
RETURNED = "generator.inference_engine.enable_return_routed_experts"
SWIFT = """PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
NPROC_PER_NODE=8 \\
megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B --reward_funcs accuracy format \\
    --tensor_model_parallel_size 4 --expert_model_parallel_size 8 --sequence_parallel true --padding_free \\
    --recompute_granularity none
"""


@pytest.mark.parametrize(
    ("given", "verdict", "says"),
    [
        ([], "works", ""),
        ([f"{CONFIG}.tensor_model_parallel_size=4"], "refused", "world=8 is not divisible by etp·ep·pp = 4·4·1"),
        ([f"{CONFIG}.moe_enable_routing_replay=true", f"{RETURNED}=true"], "works", ""),
        ([f"{CONFIG}.moe_enable_routing_replay=true"], "refused", f"{RETURNED}=False (default of SkyRL) asks for none"),
        ([f"{CONFIG}.transformer_config_kwargs.sequence_parallel=false"], "refused", "needs sequence parallelism"),
        (["trainer.gradient_checkpointing=${oc.env:OFF}"], "unknown", "trainer.gradient_checkpointing ${oc.env:OFF}"),
        ([f"{CONFIG}.transformer_config_kwargs.moe_router_fusion=true"], "works", ""),
        ([f"{CONFIG}.moe_enable_routing=true"], "unknown", "moe_enable_routing True (command line) is not known"),
        (["trainer.policy.model.lora.rank=8"], "unknown", "adapters"),
        (["trainer.remove_microbatch_padding=false"], "works", ""),
        ([f"{CONFIG}.context_parallel_size=2"], "works", ""),
        (
            [f"{CONFIG}.context_parallel_size=2", "trainer.remove_microbatch_padding=false"],
            "refused",
            "trainer.remove_microbatch_padding (command line) is off, and context parallelism needs it",
        ),
        (
            [f"{CONFIG}.context_parallel_size=2", "trainer.use_sample_packing=false"],
            "refused",
            "trainer.use_sample_packing (command line) is off",
        ),
        (
            ["trainer.remove_microbatch_padding=${oc.env:P}"],
            "unknown",
            "padding ${oc.env:P} (command line) is computed",
        ),
        (["~trainer.strategy"], "unknown", "trainer.strategy is not given, and the default of SkyRL is fsdp"),
    ],
)
def test_what_skyrl_s_tree_says(tmp_path: Path, given: list[str], verdict: str, says: str) -> None:
    (tmp_path / "run.sh").write_text(SKYRL)
    report = check_reading(read("skyrl", [str(tmp_path / "run.sh"), *given], "0.19.2"), verify=False)
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said
    if not given:
        assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=2,cp=1,world=8"
        assert report.settings is not None
        assert report.settings["attention_backend"] == "fused"
        assert report.read["sequence_parallel"].source == "derived: on where TP > 1"
        assert report.settings["recompute_granularity"] == "full"
        assert report.read["mtp_num_layers"].source == "default of SkyRL"


def test_skyrl_takes_recomputation_away_without_checkpointing(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SKYRL)
    given = ["trainer.gradient_checkpointing=false", f"{CONFIG}.transformer_config_kwargs.recompute_granularity=full"]
    report = check_reading(read("skyrl", [str(tmp_path / "run.sh"), *given], "0.19.2"), verify=False)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    assert [report.settings[f"recompute_{name}"] for name in ("granularity", "method", "num_layers")] == [None] * 3
    read_as = report.read["recompute_granularity"]
    assert (read_as.name, read_as.source) == ("trainer.gradient_checkpointing", "command line")


def test_cuda_graphs_draw_from_transformer_engine_s_generators(tmp_path: Path) -> None:
    report = nemo(tmp_path, "defaults: base.yaml\npolicy: {megatron_cfg: {cuda_graph_impl: local}}\n")
    assert report.settings is not None
    assert report.settings["cuda_graph_impl"] == "local"
    assert report.settings["use_te_rng_tracker"] is True


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        (("", ""), "works", ""),
        (("--padding_free", "--pading_free"), "unknown", "pading_free True (run.sh:4) is not known"),
        (("--padding_free", "--padding_free ${MORE[@]}"), "unknown", "${MORE[@]} (run.sh:4) is not known"),
        (("--padding_free", "--padding_free true $MORE"), "unknown", "$MORE (run.sh:4) is not known"),
        (("--padding_free", "--tuner_type lora"), "unknown", "tuner_type lora (run.sh:4): adapters"),
        (("--padding_free", "--decoder_first_pipeline_num_layers 4"), "refused", "at one pipeline stage"),
        (
            ("--padding_free", "--global_batch_size 3"),
            "refused",
            "global_batch_size=3 is not divisible",
        ),
        (("--padding_free", "--expert_tensor_parallel_size 4"), "refused", "etp·ep·pp = 4·8·1"),
        (
            ("none", "selective --recompute_method uniform"),
            "refused",
            "recompute_method uniform (run.sh:5) is for full",
        ),
        (("--padding_free", "--task_type seq_cls"), "unknown", "task_type seq_cls (run.sh:4): a head of its own"),
        (("--rlhf_type grpo", "--rlhf_type rm"), "unknown", "rlhf_type rm (run.sh:3): a head of its own"),
        (("--padding_free", "--rope_scaling yarn"), "unknown", "rope_scaling (run.sh:4): positions of its own"),
        (
            ("--padding_free", "--linear_decoupled_in_proj true"),
            "unknown",
            "linear_decoupled_in_proj (run.sh:4): projec",
        ),
        (("--padding_free", "--mtp_shared_weights true"), "unknown", "mtp_shared_weights (run.sh:4): MTP layers share"),
        (
            ("--padding_free", "--moe_grouped_gemm $A --bias_dropout_fusion $B"),
            "unknown",
            "moe_grouped_gemm $A (run.sh",
        ),
        (("--padding_free", "--router_replay_mode R4"), "refused", "router_replay_mode R4 (run.sh:4) is none of disab"),
        (("--padding_free", "--router_replay_mode $MODE"), "unknown", "router_replay_mode $MODE (run.sh:4) is comput"),
        (("--padding_free", "--cp_partition_mode contiguous"), "works", ""),
        (
            ("--tensor_model_parallel_size 4", "--context_parallel_size 2 --cp_partition_mode contiguous"),
            "unknown",
            "cp_partition_mode contiguous (run.sh:4): sequences are cut otherwise",
        ),
        (
            ("--padding_free", "--apply_query_key_layer_scaling true --attention_softmax_in_fp32 false"),
            "refused",
            "apply_query_key_layer_scaling",
        ),
        (("NPROC_PER_NODE=8", "NPROC_PER_NODE=$GPUS"), "unknown", "NPROC_PER_NODE"),
        (("none", "full --recompute_method uniform"), "refused", "recompute_num_layers"),
    ],
)
def test_what_ms_swift_s_command_line_says(tmp_path: Path, change: tuple[str, str], verdict: str, says: str) -> None:
    (tmp_path / "run.sh").write_text(SWIFT.replace(*change) if change[0] else SWIFT)
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said
    if not change[0]:
        assert report.layout == "tp=4,pp=1,vpp=1,ep=8,etp=1,cp=1,world=8"
        assert report.settings is not None
        assert report.settings["recompute_granularity"] is None
        assert report.settings["moe_router_load_balancing_type"] == "aux_loss"
        assert report.read["sequence_parallel"].source == "run.sh:4"


def test_ms_swift_replays_routes(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SWIFT.replace("--padding_free", "--router_replay_mode R3"))
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    assert (report.verdict, report.replay) == ("works", "R3"), report.problems
    assert report.settings is not None
    assert report.settings["moe_enable_routing_replay"] is True


@pytest.mark.parametrize("given", ["", "--bias_dropout_fusion true"])
def test_ms_swift_does_not_fuse_the_dropout_of_gpt_oss(tmp_path: Path, given: str) -> None:
    """It sets False where linears of grouped experts have biases, also if another value is given."""
    text = SWIFT.replace("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b").replace("--padding_free", given)
    (tmp_path / "run.sh").write_text(text.replace("none", "none --attention_backend unfused"))
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    assert report.settings["bias_dropout_fusion"] is False
    told = "bias_dropout_fusion True (run.sh:4) does not reach the model, which has bias_dropout_fusion=False"
    assert (told in report.notes) is bool(given)


def test_ms_swift_s_flash_attention_takes_no_sinks(tmp_path: Path) -> None:
    """Flash is its default."""
    (tmp_path / "run.sh").write_text(SWIFT.replace("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"))
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    told = "attention_backend flash (default of ms-swift): gpt_oss has attention sinks, and ms-swift raises ValueError"
    assert [(problem.text, problem.refused) for problem in report.problems] == [(told, True)]


def test_nemo_rl_reads_no_such_settings(tmp_path: Path) -> None:
    more = "moe_aux_loss_coeff: 0.5, moe_router_enable_expert_bias: true"
    text = f"defaults: base.yaml\npolicy: {{megatron_cfg: {{{more}}}}}\nasync_rl: {{max_buffered_rollouts: 64}}\n"
    report = nemo(tmp_path, text)
    assert report.verdict == "works", report.problems
    told = "policy.megatron_cfg.moe_router_enable_expert_bias True (run.yaml:2) does not reach the model"
    assert told in " ".join(report.notes)


def test_a_batch_divides_over_the_replicas_of_the_layout_that_is_given(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SWIFT)
    reading = read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2")
    report = check_reading(reading, layout="tp=4,ep=8,etp=1,world=96", verify=False)
    assert "global_batch_size=16 is not divisible by micro_batch_size·dp = 1·24" in report.problems[0].text


VERL_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
STEP = f"{MINI} · actor_rollout_ref.rollout.n"
_STAGED = ("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2", "expert_tensor_parallel_size=1")
CHUNKS = [f"{ACTOR}.{name}" for name in _STAGED]
ROLLOUTS = "data.train_batch_size · actor_rollout_ref.rollout.n"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], ""),  # what a replica takes at a time is given elsewhere
        ([f"{VERL_MICRO}=2"], ""),
        (
            [f"{VERL_MICRO}=16"],
            f"global_batch_size=32 is not divisible by micro_batch_size·dp = 16·4 ({ROLLOUTS}, run.sh:4)",
        ),
        ([f"{VERL_MICRO}=16", "actor_rollout_ref.rollout.n=8"], ""),
        ([f"{VERL_MICRO}=16", "actor_rollout_ref.actor.use_dynamic_bsz=True"], ""),
        ([f"{VERL_MICRO}=1", f"{MINI}=8"], ""),
        (
            [f"{VERL_MICRO}=1", f"{MINI}=2"],
            f"{STEP} = 2 (command line): a replica's 8 samples of a batch are no multiple",
        ),
        ([f"{VERL_MICRO}=1", f"{MINI}=64"], f"{STEP} = 64 (command line): a replica's 8 samples of a batch are no mul"),
        ([f"{VERL_MICRO}=1", *CHUNKS, f"{MINI}=8"], ""),
        (
            [f"{VERL_MICRO}=1", *CHUNKS, f"{MINI}=2"],
            f"{STEP} = 2 (command line): 1 microbatches of a step are no multiple of pp=2, which vpp=2 needs",
        ),
        ([f"{VERL_MICRO}=8", *CHUNKS, f"{MINI}=32", "data.train_batch_size=64"], ""),
    ],
)
def test_verl_s_samples_divide_over_its_replicas(tmp_path: Path, given: list[str], says: str) -> None:
    said = _said(verl(tmp_path, VERL, *given))
    assert said.startswith(says)
    assert bool(said) == bool(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], ""),
        (
            ["trainer.policy_mini_batch_size=7"],
            "global_batch_size=35 is not divisible by micro_batch_size·dp = 1·4 "
            "(trainer.policy_mini_batch_size · generator.n_samples_per_prompt, command line)",
        ),
        (["trainer.policy_mini_batch_size=7", "trainer.max_tokens_per_microbatch=4096"], ""),
        (["trainer.policy_mini_batch_size=7", "generator.n_samples_per_prompt=4"], ""),
    ],
)
def test_skyrl_s_samples_divide_over_its_replicas(tmp_path: Path, given: list[str], says: str) -> None:
    (tmp_path / "run.sh").write_text(SKYRL)
    report = check_reading(read("skyrl", [str(tmp_path / "run.sh"), *given], "0.19.2"), verify=False)
    assert _said(report) == says


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", ""),
        ("train_global_batch_size: 7", ""),  # the size of a microbatch is not known
        (
            "train_global_batch_size: 6, train_micro_batch_size: 2, sequence_packing: {enabled: false}",
            "global_batch_size=6 is not divisible by micro_batch_size·dp = 2·2 "
            "(policy.train_global_batch_size, run.yaml:2)",
        ),
        ("train_global_batch_size: 6, train_micro_batch_size: 2, sequence_packing: {enabled: true}", ""),
        ("train_global_batch_size: 8, train_micro_batch_size: 2", ""),
    ],
)
def test_nemo_rl_s_samples_divide_over_its_replicas(tmp_path: Path, more: str, says: str) -> None:
    assert _said(nemo(tmp_path, f"defaults: base.yaml\npolicy: {{{more}}}\n")) == says


def _said(report: Report) -> str:
    return "; ".join(problem.text for problem in report.problems)


def test_a_file_among_ms_swift_s_arguments_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SWIFT.replace("rlhf", "rlhf more.yaml", 1))
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    assert report.verdict == "unknown"
    assert "more.yaml" in "; ".join(problem.text for problem in report.problems)


def trained(report: Report) -> tuple[bool, bool, str, int]:
    """(precision-aware optimizer, gradients in fp32, dtype of the first moment, sequences of a microbatch)."""
    found = report.training
    aware, moment = found.use_precision_aware_optimizer, found.exp_avg_dtype
    return aware, found.grad_reduce_in_fp32, moment, found.micro_batch_size


def test_how_a_run_is_trained_is_read_where_a_framework_writes_it(tmp_path: Path) -> None:
    optim, ddp = "actor_rollout_ref.actor.optim.override_optimizer_config", f"{ACTOR}.override_ddp_config"
    aware = ["use_precision_aware_optimizer=true", "exp_avg_dtype=bfloat16"]
    assert trained(verl(tmp_path)) == (False, True, "fp32", 1)
    given = [f"{ddp}.grad_reduce_in_fp32=false", *(f"+{optim}.{each}" for each in aware)]
    overridden = VERL.replace(' "$@"', " " + " ".join(given))
    assert trained(verl(tmp_path, overridden)) == (True, False, "bf16", 1)
    assert verl(tmp_path, overridden).read["exp_avg_dtype"].source == "run.sh:9"

    (tmp_path / "sky.sh").write_text(SKYRL)
    more = [f"{CONFIG}.ddp_config.grad_reduce_in_fp32=false"]
    more += [f"{CONFIG}.optimizer_config_kwargs.{each}" for each in aware]
    sky = check_reading(read("skyrl", [str(tmp_path / "sky.sh"), *more], "0.19.2"), verify=False)
    assert trained(sky) == (True, False, "bf16", 1)

    assert trained(nemo(tmp_path, "defaults: base.yaml")) == (True, False, "fp32", 1)
    ddp, optimizer = "{grad_reduce_in_fp32: true}", "{use_precision_aware_optimizer: false}"
    own = f"{{optimizer: {optimizer}, distributed_data_parallel_config: {ddp}}}"
    fp32 = nemo(tmp_path, f"defaults: base.yaml\npolicy:\n  megatron_cfg: {own}")
    assert trained(fp32) == (False, True, "fp32", 1)
    assert fp32.read["grad_reduce_in_fp32"].source == "run.yaml:3"
    stated = nemo(tmp_path, "defaults: base.yaml", training={"grad_reduce_in_fp32": True})
    assert trained(stated) == (True, True, "fp32", 1)  # --train replaces what the files say

    words = "--use_precision_aware_optimizer true --exp_avg_dtype bf16 --main_grads_dtype bf16 --micro_batch_size 2"
    (tmp_path / "swift.sh").write_text(SWIFT.replace("--padding_free", words))
    assert trained(check_reading(read("ms-swift", [str(tmp_path / "swift.sh")], "0.19.2"))) == (True, False, "bf16", 2)


def test_an_optimizer_on_the_cpu_does_not_refuse_a_run_for_memory(tmp_path: Path) -> None:
    optim = "actor_rollout_ref.actor.optim.override_optimizer_config"
    path = tmp_path / "run.sh"
    for words, verdict in (("", "refused"), (f" +{optim}.optimizer_cpu_offload=true", "unknown")):
        path.write_text(VERL.replace(' "$@"', words))
        report = check_reading(read("verl", [str(path)], "0.19.2"), verify=False, hbm=20)
        assert report.verdict == verdict, report.problems
        assert any("keeps optimizer states on the CPU" in note for note in report.notes) == bool(words)


@pytest.mark.parametrize("words", ["--torch_dtype float32", "--torch_dtype float16", "--fp16 true"])
def test_ms_swift_in_fp16_is_bad_input(tmp_path: Path, words: str) -> None:
    (tmp_path / "run.sh").write_text(SWIFT.replace("--padding_free", words))
    with pytest.raises(CheckError, match=r"run.sh:4: \w+=\w+: moeref knows bfloat16 only, and ms-swift computes in fl"):
        read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2")


@pytest.mark.parametrize(
    ("command", "by_tokens"),
    [
        ("megatron sft", True),
        ("megatron sft --calculate_per_token_loss false", False),
        ("megatron rlhf", False),
        ("python -u /opt/swift/cli/_megatron/rlhf.py", False),
        ("torchrun -m swift.cli._megatron.rlhf", False),
        ("python swift/cli/_megatron/sft.py", True),
        ("megatron rlhf --rlhf_type grpo", False),
    ],
)
def test_ms_swift_counts_the_loss_by_tokens_without_rlhf(tmp_path: Path, command: str, by_tokens: bool) -> None:
    text = SWIFT.replace("megatron rlhf --rlhf_type grpo", command).replace("--padding_free", "--torch_dtype bfloat16")
    (tmp_path / "run.sh").write_text(text)
    report = check_reading(read("ms-swift", [str(tmp_path / "run.sh")], "0.19.2"), verify=False)
    assert report.verdict == "works", report.problems
    assert report.settings is not None
    assert report.settings["calculate_per_token_loss"] is by_tokens


def test_ms_swift_s_yaml_does_not_say_its_command(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: Qwen/Qwen3-30B-A3B\nNPROC_PER_NODE: 8\nexpert_model_parallel_size: 8\nbeta: 0.1\n")
    report = check_reading(read("ms-swift", [str(path)], "0.19.2"), verify=False)
    assert report.verdict == "unknown"
    assert "beta (run.yaml:4) is of megatron rlhf, and no file calls it" in _said(report)
    told = check_reading(read("ms-swift", [str(path), "rlhf_type=dpo"], "0.19.2"), verify=False)
    assert told.verdict == "works", _said(told)
    assert told.settings is not None
    assert told.settings["calculate_per_token_loss"] is False


@pytest.mark.parametrize("program", ["megatron export", "python swift/cli/_megatron/export.py"])
def test_a_conversion_of_ms_swift_is_no_run(tmp_path: Path, program: str) -> None:
    path = tmp_path / "export.sh"
    path.write_text(f"{program} --model Qwen/Qwen3-30B-A3B --to_hf true --tensor_model_parallel_size 2\n")
    with pytest.raises(CheckError, match=r"^export.sh: megatron export converts a checkpoint and trains nothing; give"):
        read("ms-swift", [str(path)], "0.19.2")


def test_memory_of_another_optimizer_refuses_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    for kind, verdict in (("adam", "refused"), ("dist_muon", "unknown")):
        path.write_text(SWIFT.replace("--padding_free", f"--optimizer {kind}"))
        report = check_reading(read("ms-swift", [str(path)], "0.19.2"), verify=False, hbm=20)
        assert report.verdict == verdict, report.problems
        told = "optimizer dist_muon (run.sh:4): memory counts the states of Adam" in report.notes
        assert told == (kind != "adam")


def test_memory_of_all_weights_refuses_no_run_of_adapters(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SWIFT.replace("--padding_free", "--tuner_type lora"))
    report = check_reading(read("ms-swift", [str(path)], "0.19.2"), verify=False, hbm=20)
    assert [problem.refused for problem in report.problems if problem.about == "memory"] == [False]
    assert report.verdict == "unknown", report.problems
    assert any(note.startswith("tuner_type lora (run.sh:4): memory counts gradients") for note in report.notes)


def test_ms_swift_reads_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: Qwen/Qwen3-30B-A3B\nexpert_model_parallel_size: 8\nmoe_permute_fusion: true\n"
    )
    report = check_reading(read("ms-swift", [str(tmp_path / "run.yaml"), "NPROC_PER_NODE=8"], "0.19.2"), verify=False)
    assert report.verdict == "works", report.problems
    assert (report.read["ep"].source, report.read["world"].source) == ("run.yaml:2", "command line")


RECIPE = "qwen3_30b_a3b_pretrain_8gpu_h100_bf16"


@pytest.mark.parametrize(
    ("given", "verdict", "says"),
    [
        ([RECIPE], "works", ""),
        ([f"{RECIPE}_config", "model.tensor_model_parallel_size=1"], "works", ""),
        ([RECIPE, "model.expert_tensor_parallel_size=4"], "refused", "world=8 is not divisible by etp·ep·pp = 4·4·2"),
        ([RECIPE, "ranks=32", "model.expert_tensor_parallel_size=4"], "works", ""),
        ([RECIPE, "trainer.x=1"], "unknown", "trainer.x 1 (command line) is not known"),
        ([RECIPE, "model.fine_grained_activation_offloading=true"], "unknown", "activations are offloaded"),
    ],
)
def test_what_a_recipe_of_megatron_bridge_says(given: list[str], verdict: str, says: str) -> None:
    report = check_reading(read("megatron-bridge", given, "0.19.2"), verify=False)
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said
    assert report.read["ep"].source == f"recipe {RECIPE}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["qwen3_30b"], "is no recipe"),
        ([RECIPE, "other"], "is no recipe"),
        ([RECIPE, "ranks=many"], "a whole number"),
        ([RECIPE, "model.topk=1"], "has no topk"),
    ],
)
def test_a_recipe_that_is_none_is_bad_input(given: list[str], says: str) -> None:
    with pytest.raises(CheckError, match=says):
        check_reading(read("megatron-bridge", given, "0.19.2"), verify=False)


def test_a_run_file_does_not_read_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP", "4")
    (tmp_path / "run.yaml").write_text("model: qwen3-30b-a3b\npolicy: {}\nlayout: 'ep=${oc.env:EP}'\n")
    with pytest.raises(CheckError, match="line 3: the environment is not read"):
        read_run_file(tmp_path / "run.yaml")
