"""Readers of frameworks' configurations: scripts that are not run, where values come from, and what is not known."""

from __future__ import annotations

import contextlib
import gc
import json
import shlex
import time
from pathlib import Path

import pytest

from moeref.check import CheckError, Report, check
from moeref.check.readers import FORMATS, check_reading, read
from moeref.check.readers.checked import OF_ATTENTION
from moeref.check.readers.literal import LiteralError, literal
from moeref.check.readers.shell import Script
from moeref.cli import main
from moeref.config import MoEConfig
from moeref.config.rules import LAYOUT_RULES, RULES

#: Qwen3-30B-A3B for Megatron-LM.
QWEN = """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4
--kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm
--position-embedding-type rope --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --vocab-size 151936
--rotary-base 1000000 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-layer-freq [1]*48 --num-experts 128
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0"""
PP = "--pipeline-model-parallel-size 2 --expert-tensor-parallel-size 1"
SLIME = """#!/bin/bash
source "$(cd "$(dirname "$0")" && pwd)/model.sh"   # a comment
NODES=2
PERF_ARGS=(
   --tensor-model-parallel-size 2  # of the dense layers
   --sequence-parallel
   --expert-model-parallel-size ${EP:-8}
   # --context-parallel-size 2
)
if [ "$1" = big ]; then
  LATER=1
fi
ray job submit -- python3 train.py \\
   --actor-num-nodes $NODES --actor-num-gpus-per-node 8 --hf-checkpoint /models/Qwen3-30B-A3B/ \\
   ${MODEL_ARGS[@]} ${PERF_ARGS[@]} --rollout-batch-size $((4 * NODES))
"""


@pytest.fixture
def slime(tmp_path: Path) -> Path:
    (tmp_path / "model.sh").write_text(f"MODEL_ARGS=(\n{QWEN}\n)\n")
    (tmp_path / "run.sh").write_text(SLIME)
    return tmp_path / "run.sh"


def words(tmp_path: Path, text: str, **given: str) -> list[str]:
    """The words of the last command of a script."""
    (tmp_path / "s.sh").write_text(text)
    script = Script(given)
    script.read(tmp_path / "s.sh")
    return [word.text if word.known else f"?{word.text}" for word in script.commands[-1]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run a 'b c' \"d $x\"", ["run", "a", "b c", "d ?$x"]),
        ("A=1; B=$A$A; run $B ${A}x", ["run", "11", "1x"]),
        ("A='x y'; run $A \"$A\"", ["run", "x", "y", "x y"]),
        ("A=(1 '2 3'); A+=(4); run ${A[@]} \"${A[@]}\"", ["run", "1", "2", "3", "4", "1", "2 3", "4"]),
        ("run ${A:-7} ${B:-$C}", ["run", "7", "?$C"]),
        ("export A=5\nrun $((A * 2 + 1)) $((2**70))", ["run", "11", "?$((2**70))"]),
        ("run $(seq 3) `date`", ["run", "?$(seq 3)", "?`date`"]),
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("cat <<EOF\nrun x\nEOF\nrun y > log 2>&1 &", ["run", "y"]),
        ("if test $1; then A=1; fi; run $A", ["run", "?${A}"]),
        ("for ((i=0; i<3; i++)); do A+=(1); done; run ${A[@]}", ["run", "?${A[@]}"]),
        ("A=1; if x; then :; fi; run $A", ["run", "1"]),
        ("A=(\n 1\n # don't\n 2\n)\nB=1\nrun ${A[@]} # don't", ["run", "1", "2"]),
        ("A=$((($B + 2) / 3)); run $A x", ["run", "?$((($B + 2) / 3))", "x"]),
        ('D="a=1 b=$B c=2"; run $D', ["run", "a=1", "b=?$B", "c=2"]),
        ("A=3; run $(((A + 5) / 4))", ["run", "2"]),
    ],
)
def test_a_script_is_read_and_not_run(tmp_path: Path, text: str, says: list[str]) -> None:
    found = words(tmp_path, text)
    assert found == [f"?{say.replace('?', '')}" if "?" in say else say for say in says]


def test_a_variable_of_the_command_line_wins(tmp_path: Path) -> None:
    assert words(tmp_path, "TP=${TP:-8}; run $TP", TP="2") == ["run", "2"]
    assert words(tmp_path, "TP=8; run $TP", TP="2") == ["run", "2"]


def test_the_environment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    assert words(tmp_path, "run $SECRET ${SECRET:-none}") == ["run", "?$SECRET", "none"]


@pytest.mark.parametrize(
    "text",
    [
        "A=xx\n" + "A=$A$A\n" * 60,
        "A=(x y)\n" + "A=(${A[@]} ${A[@]})\n" * 60,
        "cat <<X\n" * 20_000,
        "run " + "a " * 60_000,
        'A="' + "$(" * 300,
    ],
    ids=["text", "array", "heredoc", "words", "nested"],
)
def test_a_script_that_grows_without_end(tmp_path: Path, text: str) -> None:
    """Beside shlex over as many words as the longest. Without the collector, which goes through all other tests too."""
    (tmp_path / "a.sh").write_text(text)
    gc.disable()
    try:
        began = time.process_time()
        shlex.split("a " * 60_000)
        split = time.process_time()
        with contextlib.suppress(CheckError):
            Script().read(tmp_path / "a.sh")
        assert time.process_time() - split < 30 * (split - began)
    finally:
        gc.enable()


def test_files_that_source_one_another_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source ./a.sh\n")
    with pytest.raises(CheckError, match="source one another"):
        Script().read(tmp_path / "a.sh")


@pytest.mark.parametrize(
    ("text", "value"), [("[0]*2+[1]*3", [0, 0, 1, 1, 1]), ("8*1024", 8192), ("([1]+[0])*2", [1, 0, 1, 0]), ("-1", -1)]
)
def test_a_literal(text: str, value: object) -> None:
    assert literal(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "[0]*10**9", "[0]*99999*99999", "x", "", "(" * 5000, "'a'*9"])
def test_no_literal(text: str) -> None:
    with pytest.raises(LiteralError):
        literal(text)


def test_slime_end_to_end(slime: Path) -> None:
    report = check_reading(read("slime", [str(slime)], "0.19.2"))
    assert report.verdict == "works", report.problems
    assert report.layout == "tp=2,pp=1,vpp=1,ep=8,etp=2,cp=1,world=16"
    sources = {name: value.source for name, value in report.read.items()}
    assert (sources["tp"], sources["num_layers"]) == ("run.sh:5", "model.sh:3")
    assert sources["etp"].startswith("derived: as TP")
    assert sources["moe_router_load_balancing_type"] == "default of Megatron-LM"
    assert sources["variable_seq_lengths"].startswith("derived: slime")
    assert report.settings is not None
    assert report.settings["bias_activation_fusion"] is True
    assert [value.name for value in report.elsewhere] == ["--rollout-batch-size"]
    assert report.to_plain()["read"]["tp"] == {
        "name": "--tensor-model-parallel-size",
        "value": 2,
        "source": "run.sh:5",
    }


@pytest.mark.parametrize(
    ("model", "layout", "rule"),
    [
        ("glm-5", "tp=4,pp=2,ep=16,etp=1,cp=2,world=64", "dsa-under-cp-by-all-gather"),
        ("glm-5", "tp=4,pp=2,ep=16,etp=1,world=64", "dsa-without-rope-fusion"),
        ("qwen3-next-80b-a3b", "tp=8,ep=8,cp=4,etp=1,world=32", "gated-delta-heads-divide-over-cp"),
    ],
)
def test_a_spec_of_its_own_may_have_attention_that_no_rule_knows(
    tmp_path: Path, model: str, layout: str, rule: str
) -> None:
    path = tmp_path / "run.sh"
    words = "--num-layers 78 --hidden-size 6144 --num-attention-heads 64 --position-embedding-type rope --spec a b"
    path.write_text(f"python3 train.py {words}\n")
    report = check_reading(read("slime", [str(path)], "0.19.2"), model=model, layout=layout, verify=False)
    told = [problem for problem in report.problems if problem.fix.endswith(f"[{rule}]")]
    assert told, report.problems
    assert not any(problem.refused for problem in told)
    assert all(problem.text.endswith("unless layers of the spec do otherwise") for problem in told)


def test_rules_on_attention_are_rules() -> None:
    assert set(OF_ATTENTION) <= {rule.id for rule in (*RULES, *LAYOUT_RULES)}


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        (("--sequence-parallel\n", "--sequence-paralel\n"), "refused", "--sequence-paralel (run.sh:6) is not known"),
        (("-size 2 ", "-size $TP "), "unknown", "$TP (run.sh:5) is computed by the script"),
        (("8 --hf", "8 --spec a b --hf"), "unknown", "a spec of its own"),
        (("8 --hf", "8 --custom-config-path a.yaml --hf"), "unknown", "a file that may replace any argument"),
        (
            ("{MODEL_ARGS[@]} ", "{NOTHING[@]} "),
            "refused",
            "--num-layers, --hidden-size, --num-attention-heads: required",
        ),
        (("8 --hf", "8 --decoder-last-pipeline-num-layers 3 --hf"), "refused", "at one pipeline stage"),
        (("-parallel\n", "-parallel --num-layers 47\n"), "refused", "num_layers=47 replaces 48"),
        (("-parallel\n", "-parallel --vocab-size 8\n"), "refused", "vocab_size=8 (run.sh:6) replaces 151936"),
        (("Qwen3-30B-A3B/ \\", "Qwen3-30B-A3B/ "), "refused", "a command begins with --disable-bias-linear"),
    ],
)
def test_what_slime_or_the_reader_does_not_take(slime: Path, change: tuple[str, str], verdict: str, says: str) -> None:
    before = slime.read_text()
    slime.write_text(before.replace(*change))
    assert slime.read_text() != before
    report = check_reading(read("slime", [str(slime)], "0.19.2"))
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said
    assert report.record is None


@pytest.mark.parametrize("framework", ["megatron-lm", "slime"])
@pytest.mark.parametrize(
    ("words", "verdict", "says"),
    [
        ("", "refused", "--position-embedding-type learned_absolute (default of Megatron-LM) adds embedding.position_"),
        (
            "--position-embedding-type learned_absolute",
            "refused",
            "learned_absolute (run.sh:1) adds embedding.position",
        ),
        ("--use-rotary-position-embeddings", "works", ""),
        ("--position-embedding-type none", "works", "position_embedding_type='none' (run.sh:1) replaces 'rope'"),
        ("--position-embedding-type rope --use-rope-scaling", "works", "use_rope_scaling=True (run.sh:1) replaces Fal"),
    ],
)
def test_positions_are_those_of_the_model(tmp_path: Path, framework: str, words: str, verdict: str, says: str) -> None:
    report = _flags(tmp_path, framework, f"{QWEN.replace('--position-embedding-type rope', '')} {words}")
    said = "; ".join([*(problem.text for problem in report.problems), *report.notes])
    assert report.verdict == verdict, said
    assert says in said
    if verdict == "refused":
        assert report.problems[0].fix == "give --position-embedding-type rope"


def test_interpolated_positions_are_told_where_they_are_passed_on(tmp_path: Path) -> None:
    words = f"{QWEN} --rotary-seq-len-interpolation-factor 4"
    notes = " ".join(_flags(tmp_path, "megatron-lm", words).notes)
    assert "rotary_seq_len_interpolation_factor=4 (run.sh:1) replaces None of the model's own config" in notes
    slime = _flags(tmp_path, "slime", words)
    assert "interpolation" not in " ".join(slime.notes)
    assert "--rotary-seq-len-interpolation-factor" in {value.name for value in slime.elsewhere}


def test_latent_attention_makes_its_own_rotary_embedding(tmp_path: Path) -> None:
    words = "--multi-latent-attention --use-rope-scaling --position-embedding-type"
    none, learned = (
        _flags(tmp_path, "megatron-lm", f"{words} {kind}", model="glm-4.7-flash")
        for kind in ("none", "learned_absolute")
    )
    assert not [note for note in none.notes if "rope_scaling" in note or "position_embedding" in note]
    assert "adds embedding.position_embeddings.weight" in "; ".join(problem.text for problem in learned.problems)


def test_the_width_of_dense_layers_means_nothing_where_there_are_none(tmp_path: Path) -> None:
    """Without the argument Megatron-LM derives 5440, and Qwen3-30B-A3B's config says 6144; no layer is dense."""
    report = _flags(tmp_path, "slime", QWEN.replace("--ffn-hidden-size 6144", ""))
    assert report.verdict == "works", report.problems
    told = "ffn_hidden_size=5440 replaces 6144 of the model's own config; no weight has that width, as all layers have"
    assert any(told in note for note in report.notes)
    dense = check("glm-4.5", "ep=32", asked=MoEConfig(transformer_config_kwargs={"ffn_hidden_size": 64}), verify=False)
    assert "whose weights then do not fit" in dense.problems[0].text


@pytest.mark.parametrize(
    ("words", "verdict", "says"),
    [
        (
            "--overlap-param-gather",
            "refused",
            "--overlap-param-gather (run.sh:1) needs --overlap-grad-reduce and an opt",
        ),
        ("--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer", "works", ""),
        ("--overlap-param-gather --use-distributed-optimizer", "refused", "needs --overlap-grad-reduce and"),
        (
            "--seq-length 4096 --max-position-embeddings 2048",
            "refused",
            "2048 (run.sh:1) is less than --seq-length 4096",
        ),
        ("--seq-length 4096 --max-position-embeddings 4096", "works", ""),
        ("--num-distributed-optimizer-instances 3", "refused", "instances 3 (run.sh:1) does not divide dp·cp = 8·1"),
        ("--num-distributed-optimizer-instances 4", "works", ""),
        ("--use-tp-pp-dp-mapping", "works", ""),
        (
            f"--use-tp-pp-dp-mapping {PP}",
            "refused",
            "needs as many replicas of experts as of other weights at pp > 1, not 1 and 4",
        ),
        (
            f"--use-tp-pp-dp-mapping {PP} --tensor-model-parallel-size 4 --sequence-parallel",
            "unknown",
            "--use-tp-pp-dp-mapping (run.sh:1): ranks are ordered otherwise than moeref orders them",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16",
            "refused",
            "--use-precision-aware-optimizer (run.sh:1): use_precision_aware_optimizer=true needs use_distributed_opti",
        ),
        ("--exp-avg-dtype bf16", "refused", "--exp-avg-dtype (run.sh:1): exp_avg_dtype=bf16 needs use_precision_aware"),
        (
            "--main-params-dtype bf16 --use-precision-aware-optimizer --use-distributed-optimizer",
            "refused",
            "--main-params-dtype (run.sh:1): main_params_dtype='bf16' is none of fp32, fp16",
        ),
        ("--optimizer sgd", "works", "--optimizer sgd (run.sh:1): memory counts the states of Adam"),
    ],
)
def test_what_megatron_lm_asserts(tmp_path: Path, words: str, verdict: str, says: str) -> None:
    report = _flags(tmp_path, "megatron-lm", f"{QWEN} {words}")
    problems = [problem.text for problem in report.problems]
    assert report.verdict == verdict, problems
    assert says in "; ".join([*problems, *report.notes])
    assert len(problems) == (verdict != "works")


def test_slime_distributes_the_optimizer_itself(tmp_path: Path) -> None:
    words = f"{QWEN} --overlap-param-gather --overlap-grad-reduce --use-precision-aware-optimizer"
    assert _flags(tmp_path, "slime", words).verdict == "works"


def test_slime_has_defaults_of_its_own(tmp_path: Path) -> None:
    """The number of ranks, the scale of the loss of MTP layers, and the longest sequence, which is the length."""
    words = f"{QWEN} --seq-length 9999 --max-position-embeddings 8 --mtp-num-layers 1"
    (tmp_path / "run.sh").write_text(f"train.py {' '.join(words.split())}")
    found = read("slime", [str(tmp_path / "run.sh")], "0.19.2")
    assert (found.layout["world"].value, found.settings["mtp_loss_scaling_factor"].value) == (8, 0.2)
    assert not [problem for problem in found.problems if "max-position" in problem.text]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("--rotary-base 1000000", ""),
            "--rotary-base 10000 (default of Megatron-LM) is not 1000000 of the model's own",
        ),
        (("--norm-epsilon 1e-6", ""), "--norm-epsilon 1e-05 (default of Megatron-LM) is not 1e-06 of the model's own"),
    ],
)
def test_slime_compares_with_the_model_s_files(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    refused = _flags(tmp_path, "slime", QWEN.replace(*change))
    assert [problem.about for problem in refused.problems] == ["slime"]
    assert says in refused.problems[0].text
    assert _flags(tmp_path, "megatron-lm", QWEN.replace(*change)).verdict == "works"


def _flags(tmp_path: Path, framework: str, words: str, model: str = "qwen3-30b-a3b") -> Report:
    """The report of a list of arguments of Megatron-LM on 8 ranks, in one line."""
    own = "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8"
    program = own if framework == "slime" else "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py"
    (tmp_path / "run.sh").write_text(" ".join(f"{program} {words} --expert-model-parallel-size 4 --bf16".split()))
    return check_reading(read(framework, [str(tmp_path / "run.sh")], "0.19.2"), model=model, verify=False)


def test_what_is_computed_and_in_the_model_s_config_is_taken_from_there(slime: Path) -> None:
    model = slime.parent / "model.sh"
    model.write_text("for i in 1 2; do F+=(1); done\n" + model.read_text().replace("[1]*48", '"${F[*]}"'))
    report = check_reading(read("slime", [str(slime)], "0.19.2"))
    assert report.verdict == "works", report.problems
    assert any("moe_layer_freq is taken from the model's own config" in note for note in report.notes)


def test_a_required_argument_that_is_computed_is_given(tmp_path: Path) -> None:
    report = _flags(tmp_path, "megatron-lm", QWEN.replace("--num-layers 48", "--num-layers $LAYERS"))
    assert report.verdict == "works", report.problems
    assert any("num_layers is taken from the model's own config" in note for note in report.notes)


def test_slime_s_optimizer_decides_memory(slime: Path) -> None:
    words = "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --grad-reduce-in-bf16 --global-batch-size 7"
    slime.write_text(f"{SLIME.rstrip()} {words} --micro-batch-size 2\n")
    found = check_reading(read("slime", [str(slime)], "0.19.2")).training
    assert (found.use_distributed_optimizer, found.use_precision_aware_optimizer) == (True, True)
    assert (found.grad_reduce_in_fp32, found.exp_avg_sq_dtype, found.micro_batch_size) == (False, "bf16", 2)
    assert found.global_batch_size is None  # slime deals samples out itself
    slime.write_text(f"{SLIME.rstrip()} --micro-batch-size 2 --use-dynamic-batch-size\n")
    found = check_reading(read("slime", [str(slime)], "0.19.2")).training
    assert (found.grad_reduce_in_fp32, found.micro_batch_size) == (True, 1)


def test_a_script_whose_program_gets_no_model_says_why(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 train.py --colocate\n  --hf-checkpoint /models/Kimi-K2-Instruct\n")
    with pytest.raises(CheckError, match=r"does not name a model: a command begins with --hf-checkpoint \(run.sh:2\)"):
        check_reading(read("slime", [str(tmp_path / "run.sh")], "0.19.2"))


def test_a_computed_argument_that_no_check_needs_is_not_missed(slime: Path) -> None:
    slime.write_text(f"{SLIME.rstrip()} --load $SOMEWHERE/checkpoint\n")
    report = check_reading(read("slime", [str(slime)], "0.19.2"))
    assert report.verdict == "works", report.problems
    assert "$SOMEWHERE/checkpoint" in {value.value for value in report.elsewhere}


def test_an_array_that_no_line_of_a_program_sets_is_empty(tmp_path: Path) -> None:
    def verdict(text: str) -> str:
        (tmp_path / "run.sh").write_text(text)
        return check_reading(
            read("slime", [str(tmp_path / "run.sh")], "0.19.2"), model="qwen3-30b-a3b", verify=False
        ).verdict

    call = f'python3 train.py {" ".join(QWEN.split())} ${{EVAL_ARGS[@]}} "${{MORE[@]}}"\n'
    assert verdict(f"#!/bin/bash\n# EVAL_ARGS=(--eval-interval 1)\n{call}") == "works"
    assert verdict(call) == "unknown"  # another script may source it
    assert verdict(f"#!/bin/bash\nmapfile -t MORE < file\n{call}") == "unknown"
    assert verdict(f"#!/bin/bash\nfill EVAL_ARGS\n{call}") == "unknown"


@pytest.mark.parametrize("more", ["${MORE[@]}", '"${MORE[@]}"', "$MORE"])
@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("megatron-lm", "{more} {qwen}"),
        ("slime", "{qwen} --swiglu {more}"),
        ("slime", "--eval-prompt-data aime a.jsonl {more} {qwen}"),
        ("slime", "--colocate {more} {qwen}"),
    ],
)
def test_words_that_may_be_arguments_are_not_dropped(tmp_path: Path, framework: str, words: str, more: str) -> None:
    """Sizes of the layout may be among them. One variable after an argument that no check needs is its value."""
    report = _flags(tmp_path, framework, words.format(more=more, qwen=QWEN))
    told = [problem.text for problem in report.problems]
    if (more, words[:10]) == ("$MORE", "--colocate"):
        assert report.verdict == "works", told
    else:
        assert told == [f"{more.strip(chr(34))} (run.sh:1) is not known to this reader"]


@pytest.mark.parametrize(
    ("grows", "verdict", "says"),
    [
        ("MODEL_ARGS+=(--context-parallel-size 4)", "unknown", "--context-parallel-size 4 (run.sh:13) is comp"),
        ("MODEL_ARGS+=(--context-parallel-size=4)", "unknown", "--context-parallel-size 4 (run.sh:13) is comp"),
        ("MODEL_ARGS=(--moe-z-loss-coeff 0.1)", "unknown", "${MODEL_ARGS[@]} (run.sh:13) is not known to this reader"),
        ("PERF_ARGS+=(--moe-z-loss-coeff 0.1)", "unknown", "--moe-z-loss-coeff 0.1 (run.sh:13) is computed by the scr"),
        ("MODEL_ARGS+=(${MORE[@]})", "unknown", "${MODEL_ARGS[@]} (run.sh:13) is not known to this reader"),
        ("MODEL_ARGS+=($MORE)", "unknown", "${MODEL_ARGS[@]} (run.sh:13) is not known to this reader"),
        ("MODEL_ARGS+=(--sglang-dp-size 2 --no-save-optim)", "works", ""),
    ],
)
def test_arguments_under_a_condition_are_not_dropped(slime: Path, grows: str, verdict: str, says: str) -> None:
    text = SLIME.replace("ray job", f"if [ $BIG ]; then {grows}; fi\nray job")
    slime.write_text(text.replace("${MODEL_ARGS[@]} ", "--colocate ${MODEL_ARGS[@]} --sglang-x y "))
    report = check_reading(read("slime", [str(slime)], "0.19.2"), verify=False)
    said = "; ".join(problem.text for problem in report.problems)
    assert report.verdict == verdict, said
    assert says in said


@pytest.mark.parametrize(
    ("framework", "text", "says"),
    [
        ("slime", "python train.py --num-layers many", "--num-layers 'many' is no int"),
        ("slime", "python train.py --num-layers", "--num-layers has no value"),
        ("slime", "source ../other.sh\npython train.py", "sources ../other.sh, which is not there"),
        ("slime", "python train.py --num-layers 48", "does not name a model"),
        ("megatron-lm", "torchrun pretrain_gpt.py --fp16", "--fp16"),
        ("megatron-lm", "--moe-layer-freq '[1, 1]'", "is no literal"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, framework: str, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert main(["check", "--from", framework, str(tmp_path / "run.sh"), "--no-verify"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "slime"], "required"),
        (["--from", "slime", "A=1"], "give a file"),
        (["--from", "slim", "x.sh"], "did you mean"),
        (["--from", "slime", "/no/such.sh"], "/no/such.sh"),
        (["--from", "slime", "/dev/zero"], "not a regular file"),
        (["a", "b", "--layout", "world=1"], "one MODEL"),
        (["qwen3-30b-a3b", "tp=2,ep=8"], "write --layout tp=2,ep=8"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["check", *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert says in capsys.readouterr().err


def test_the_command_line(slime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--from", "slime", str(slime), "EP=4", "--json", "--no-verify"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["read"]["ep"] == {"name": "--expert-model-parallel-size", "value": 4, "source": "command line"}
    assert main(["check", "--from", "slime", str(slime), "--set", "moe_router_topk=4", "--no-verify", "--all"]) == 0
    out = capsys.readouterr().out
    assert "run.sh:5" in out
    assert "--rollout-batch-size 8" in out
    assert main(["check", "--from", "megatron-lm", str(slime.parent / "model.sh"), "--model", "qwen3-30b-a3b"]) == 3
    assert "number of ranks is not given" in capsys.readouterr().out.replace("\n", " ")


def test_every_format_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert ",".join(FORMATS) in "".join(capsys.readouterr().out.split())
